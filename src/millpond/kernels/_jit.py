"""The one place of numba flags."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.core import config

F = TypeVar("F", bound=Callable[..., Any])

JIT_ENABLED = not getattr(config, "DISABLE_JIT", 0)
NO_C_ENTRY: dict[str, Any] = {"no_cfunc_wrapper": True}
"""An option of numba's: nothing in C calls a kernel, and to compile an entry for that takes time."""
NO_ENTRY: dict[str, Any] = {"no_cpython_wrapper": True, **NO_C_ENTRY}
"""The same for what only compiled code calls."""


def _cache_directory() -> str:
    """Where compiled kernels are kept: a directory for this very source.

    Numba itself looks only at the file of the outermost kernel, so that a changed part of it, in another
    file, would go unnoticed.
    """
    here = Path(__file__).parent
    source = hashlib.sha256(numba.__version__.encode())
    for file in sorted(here.glob("*.py")):
        source.update(file.read_bytes())
    own = here / "__pycache__"
    if os.access(own if own.exists() else here, os.W_OK):
        base = own
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millpond"
    return str(base / f"kernels-{source.hexdigest()[:16]}")


CACHE_DIRECTORY = _cache_directory()


def _compiled(function: F, forceinline: bool = False) -> F:
    """Numba reads the cache directory when it decorates; the setting of the rest of the process stays as it is."""
    settings: Any = config
    before = settings.CACHE_DIR
    settings.CACHE_DIR = CACHE_DIRECTORY
    try:
        decorate = numba.njit(
            nogil=True, cache=True, boundscheck=False, forceinline=forceinline, **NO_C_ENTRY
        )
        return cast(F, decorate(function))
    finally:
        settings.CACHE_DIR = before


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
    return _compiled(function)


def inlined(function: F) -> F:
    """A part of other kernels, compiled into each, and called by nothing else. Passing arrays along costs more than most
    of these do."""
    if not JIT_ENABLED:
        return function
    return _compiled(function, forceinline=True)
