"""Compiled transactions, kept on disk: to compile one takes seconds.

The text of a kernel is a file in a directory of its own, and numba keeps what it made of it beside it. The directory
above is named by a hash of this package's sources, since kernels are compiled together with parts of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from millpond import private
from millpond.kernels._jit import CACHE_DIRECTORY, NO_C_ENTRY, compiled, own_cache

KEPT = 512  # kernels, of some 100 kB each; those that were made longest ago go first


@cache
def _directory() -> str | None:
    """Where kernels are kept; None where nothing can be kept safely."""
    if CACHE_DIRECTORY is None:
        return None
    source = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        source.update(file.read_bytes())
    base, name = os.path.split(CACHE_DIRECTORY)
    return own_cache(base, f"transactions-{source.hexdigest()[:16]}", name)


def digest(source: str) -> str:
    """What tells this text from all others."""
    return hashlib.sha256(source.encode()).hexdigest()[:32]


def kept_source(source: str) -> str | None:
    """The file that holds this text, made if need be."""
    above = _directory()
    return None if above is None else kept_in(above, source)


def kept_in(above: str, source: str) -> str | None:
    """The same, in a directory of the user's own."""
    name = digest(source)
    file = os.path.join(above, name, "kernel")
    try:
        if not os.path.exists(file):
            _prune(Path(above))
        folder = own_cache(above, name)
        if folder is None:
            return None
        if not os.path.exists(file):
            # Numba looks at the file's time: whoever comes second changes it, and compiles once more.
            own = f"{file}.{os.getpid()}"
            with open(private.create(own), "w") as text:
                text.write(source)
            os.replace(own, file)
    except OSError:
        return None
    return file


def _prune(above: Path) -> None:
    made: list[tuple[float, Path]] = []
    for path in above.iterdir():
        with contextlib.suppress(OSError):
            made.append((path.stat().st_mtime, path))
    for _, path in sorted(made)[: max(0, len(made) - KEPT + 1)]:
        shutil.rmtree(path, ignore_errors=True)


def lazily_compiled(function: Callable[..., Any], file: str | None) -> Callable[..., Any]:
    """The function, compiled on its first call; kept on disk where its text is."""
    directory = None if file is None else os.path.dirname(file)
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False, **NO_C_ENTRY}
    return compiled(function, directory, **options)
