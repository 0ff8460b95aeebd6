"""The one place of numba flags."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.core import config

F = TypeVar("F", bound=Callable[..., Any])

JIT_ENABLED = not getattr(config, "DISABLE_JIT", 0)


def jit(function: F) -> F:
    """Compile on first call, keep on disk, release the GIL. No fast-math: NaN and -0.0 are data here.

    Numba types an array by its flags too. Kernels are called with C-contiguous, aligned, writeable arrays only
    (`stores.views.plain`), so that each has one specialisation per element type.
    """
    if not JIT_ENABLED:

        @functools.wraps(function)
        def interpreted(*args: Any) -> Any:
            # Hashes wrap around and infinities add up to NaN by design; NumPy's scalars warn of it.
            with np.errstate(over="ignore", invalid="ignore"):
                return function(*args)

        return cast(F, interpreted)
    return cast(F, numba.njit(nogil=True, cache=True, boundscheck=False)(function))


def inlined(function: F) -> F:
    """A part of other kernels, compiled into each. Passing arrays along costs more than most of these do."""
    if not JIT_ENABLED:
        return jit(function)
    return cast(F, numba.njit(nogil=True, cache=True, boundscheck=False, forceinline=True)(function))
