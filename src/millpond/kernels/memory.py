"""The memory of this process: how much it has, and how it keeps what arrays gave back."""

from __future__ import annotations

import ctypes
import resource
from contextlib import suppress

# glibc's names.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
# Of a process without a limit, and of one with much memory: what an arena keeps.
_KEPT_BYTES, _KEPT_BYTES_MAX = 128 << 20, 512 << 20
# The largest arrays that can be taken from it.
_ARRAY_BYTES_MAX = 32 << 20
# Of the limit of a process that has one. What an arena keeps, threads of another cannot have: so these are few.
_KEPT_SHARE, _ARRAY_SHARE, _ARENAS_MIN = 16, 256, 4


def data_bytes() -> int:
    """What this process may write to: what `RLIMIT_DATA` counts. 0 where the system does not tell."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()
    return 0


def keep_freed_memory(limit: int = 0, threads: int = 1) -> None:
    """Keep it for the next arrays. For processes of our own: asked for anew, every page of it costs a fault.

    `limit` is how many bytes the process may have, if that is limited: it keeps a share of them. `threads` is how many
    ask for large arrays at the same time. Does nothing where the C library is not glibc.
    """
    kept = min(limit // _KEPT_SHARE, _KEPT_BYTES_MAX) if limit else _KEPT_BYTES
    array = min(limit // _ARRAY_SHARE, _ARRAY_BYTES_MAX) if limit else _ARRAY_BYTES_MAX
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("libc.so.6")
        library.mallopt(_M_MMAP_THRESHOLD, array)
        library.mallopt(_M_TRIM_THRESHOLD, kept)
        if limit:
            library.mallopt(_M_ARENA_MAX, max(_ARENAS_MIN, threads))
