"""The memory of this process: how much it has, and how it keeps what arrays gave back."""

from __future__ import annotations

import ctypes
import resource
from contextlib import suppress

# glibc's names, and the largest arrays that it can take from memory it has kept.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 128 << 20, 512 << 20
_KEPT_SHARE = 16
_ARRAY_BYTES_MAX = 32 << 20


def data_bytes() -> int:
    """What this process may write to: what `RLIMIT_DATA` counts. 0 where the system does not tell."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()
    return 0


def keep_freed_memory(limit: int = 0) -> None:
    """Keep it for the next arrays. For processes of our own: asked for anew, every page of it costs a fault.

    More of it where the process may have much memory: `limit` is how many bytes. Does nothing where the C library is
    not glibc.
    """
    least, most = _KEPT_BYTES
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("libc.so.6")
        library.mallopt(_M_MMAP_THRESHOLD, _ARRAY_BYTES_MAX)
        library.mallopt(_M_TRIM_THRESHOLD, min(max(least, limit // _KEPT_SHARE), most))
