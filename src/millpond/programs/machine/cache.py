"""Where compiled bodies are kept, and the parts that are compiled into them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from millpond.kernels._jit import CACHE_DIRECTORY, JIT_ENABLED, NO_ENTRY, compiled, own_cache
from millpond.txn.compiler import arithmetic

F = TypeVar("F", bound=Callable[..., Any])
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}


@cache
def directory() -> str | None:
    """None where nothing can be kept safely. It is named by the sources of what is compiled into bodies."""
    if CACHE_DIRECTORY is None:
        return None
    source = hashlib.sha256()
    for file in [Path(__file__), Path(__file__).with_name("checked.py"), Path(arithmetic.__file__)]:
        source.update(file.read_bytes())
    base, name = os.path.split(CACHE_DIRECTORY)
    return own_cache(base, f"programs-{source.hexdigest()[:16]}", name)


def part(function: F) -> F:
    """A part of bodies, compiled once for all of them."""
    if not JIT_ENABLED:
        return function
    return compiled(function, directory(), forceinline=True, **OPTIONS, **NO_ENTRY)
