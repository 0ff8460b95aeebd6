"""The one place of numba flags."""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.core import config

from millpond import private
from millpond.errors import NotPrivate

F = TypeVar("F", bound=Callable[..., Any])

JIT_ENABLED = not getattr(config, "DISABLE_JIT", 0)
NO_C_ENTRY: dict[str, Any] = {"no_cfunc_wrapper": True}
"""An option of numba's: nothing in C calls a kernel, and to compile an entry for that takes time."""
NO_ENTRY: dict[str, Any] = {"no_cpython_wrapper": True, **NO_C_ENTRY}
"""The same for what only compiled code calls."""


def _cache_directory() -> str | None:
    """Where compiled kernels are kept: a directory for this very source; None if there is no safe place.

    Numba itself looks only at the file of the outermost kernel, so that a changed part of it, in another
    file, would go unnoticed.
    """
    here = Path(__file__).parent
    source = hashlib.sha256(numba.__version__.encode())
    for file in sorted(here.glob("*.py")):
        source.update(file.read_bytes())
    name = f"kernels-{source.hexdigest()[:16]}"
    with suppress(OSError):
        return _own(here / "__pycache__" / name)
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):
        home = os.path.expanduser("~/.cache")
    return own_cache(os.path.join(home, "millpond"), name)


def own_cache(base: str, *names: str) -> str | None:
    """A directory for compiled code, which is this user's alone; None, with a warning, if it cannot be.

    Numba pickles what it keeps, and to read a pickle is to run it.
    """
    try:
        return _own(os.path.join(base, *names))
    except OSError as error:
        why, mend = error.strerror, "set XDG_CACHE_HOME to a directory of your own"
        if isinstance(error, NotPrivate):
            why = error.message
            inside = f"{error.path}/".startswith(f"{os.path.abspath(base)}/")
            # What is another user's, only root can remove for sure.
            if not error.owner or (inside and os.geteuid() == 0):
                # What lay open may be anyone's by now, whatever mode it gets: only a new one will do.
                mend = f"rm -rf {private.quoted(base)}"
                mend = mend if inside else f"{error.hint} && {mend}"
        warnings.warn(
            f"compiled kernels are not kept, and compiled at each start: {why}\n  hint: {mend}", stacklevel=3
        )
        return None


def _own(path: private.AnyPath) -> str:
    if not os.path.isabs(path):
        raise FileNotFoundError(errno.ENOENT, "this user has no home", path)
    directory = private.own_directory(path)
    with TemporaryFile(dir=directory) as file:
        # Numba's files get the modes that the umask leaves.
        if os.fstat(file.fileno()).st_mode & 0o600 != 0o600:
            raise PermissionError(errno.EACCES, "the umask keeps files from their own user", directory)
    return directory


CACHE_DIRECTORY = _cache_directory()
_setting = threading.Lock()  # numba's setting is one for all threads


def compiled(function: F, directory: str | None, **options: Any) -> F:
    """Compiled on its first call, and kept in that directory or nowhere.

    Numba takes the directory from a setting when it decorates; that of the rest of the process stays as it is. Where it
    cannot write, it would look for other places on its own.
    """
    settings: Any = config
    if directory is not None:
        with _setting, suppress(RuntimeError):  # which says that there is no place
            before, settings.CACHE_DIR = settings.CACHE_DIR, directory
            try:
                kept: Any = numba.njit(cache=True, **options)(function)
            finally:
                settings.CACHE_DIR = before
            if os.path.dirname(kept.stats.cache_path) == directory:
                return cast(F, kept)
    return cast(F, numba.njit(**options)(function))


def _compiled(function: F, **others: Any) -> F:
    options = {"nogil": True, "boundscheck": False, **NO_C_ENTRY, **others}
    return compiled(function, CACHE_DIRECTORY, **options)


def jit(function: F) -> F:
    """Compile on first call, keep on disk, release the GIL. No fast-math: NaN and -0.0 are data here.

    Numba types an array by its flags too. Kernels are called with C-contiguous, aligned, writeable arrays only
    (`stores.views.plain`), so that each has one specialisation per element type.
    """
    return _compiled(function) if JIT_ENABLED else _interpreted(function)


def brief(function: F) -> F:
    """The same, for what Python calls and what takes less time than to release the GIL and to get it back."""
    return _compiled(function, nogil=False) if JIT_ENABLED else _interpreted(function)


def _interpreted(function: F) -> F:
    @functools.wraps(function)
    def interpreted(*args: Any) -> Any:
        # Hashes wrap around and infinities add up to NaN by design; NumPy's scalars warn of it.
        with np.errstate(over="ignore", invalid="ignore"):
            return function(*args)

    return cast(F, interpreted)


def part(function: F) -> F:
    """What only other kernels call: to compile it takes less time."""
    return _compiled(function, **NO_ENTRY) if JIT_ENABLED else _interpreted(function)


def inlined(function: F) -> F:
    """A part of other kernels, compiled into each, and called by nothing else. Passing arrays along costs more than most
    of these do."""
    if not JIT_ENABLED:
        return function
    return _compiled(function, forceinline=True)
