"""How this process keeps memory that arrays gave back."""

from __future__ import annotations

import ctypes
from contextlib import suppress

# glibc's names, and the largest arrays that it can take from memory it has kept.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 128 << 20
_ARRAY_BYTES_MAX = 32 << 20


def keep_freed_memory() -> None:
    """Keep it for the next arrays. For processes of our own: asked for anew, every page of it costs a fault.

    Does nothing where the C library is not glibc.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("libc.so.6")
        library.mallopt(_M_MMAP_THRESHOLD, _ARRAY_BYTES_MAX)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
