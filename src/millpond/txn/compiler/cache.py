"""Compiled transactions, kept on disk: to compile one takes seconds.

The text of a kernel is a file in a directory of its own, and numba keeps what it made of it beside it. The directory
above is named by a hash of this package's sources, since kernels are compiled together with parts of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import config

from millpond.kernels._jit import CACHE_DIRECTORY, NO_C_ENTRY

_setting = threading.Lock()  # numba's setting is one for all threads
KEPT = 512  # kernels, of some 100 kB each; those that were made longest ago go first


@cache
def _directory() -> Path | None:
    """Where kernels are kept; None where nothing can be written."""
    source = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        source.update(file.read_bytes())
    found = (
        Path(CACHE_DIRECTORY).parent / f"transactions-{source.hexdigest()[:16]}" / Path(CACHE_DIRECTORY).name
    )
    try:
        found.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return found if os.access(found, os.W_OK) else None


def kept_source(source: str) -> str | None:
    """The file that holds this text, made if need be."""
    above = _directory()
    if above is None:
        return None
    file = above / hashlib.sha256(source.encode()).hexdigest()[:32] / "kernel"
    try:
        if not file.exists():
            _prune(above)
            file.parent.mkdir(exist_ok=True)
            # Numba looks at the file's time: whoever comes second changes it, and compiles once more.
            own = file.with_suffix(f".{os.getpid()}")
            own.write_text(source)
            own.replace(file)
    except OSError:
        return None
    return str(file)


def _prune(above: Path) -> None:
    made: list[tuple[float, Path]] = []
    for path in above.iterdir():
        with contextlib.suppress(OSError):
            made.append((path.stat().st_mtime, path))
    for _, path in sorted(made)[: max(0, len(made) - KEPT + 1)]:
        shutil.rmtree(path, ignore_errors=True)


def lazily_compiled(function: Callable[..., Any], file: str | None) -> Callable[..., Any]:
    """The function, compiled on its first call; kept on disk where its text is."""
    settings: Any = config
    with _setting:
        before = settings.CACHE_DIR
        try:
            if file is not None:
                settings.CACHE_DIR = str(Path(file).parent)
            decorate = numba.njit(
                nogil=True, error_model="numpy", boundscheck=False, cache=file is not None, **NO_C_ENTRY
            )
            found: Callable[..., Any] = decorate(function)
        finally:
            settings.CACHE_DIR = before
    return found
