"""Which slice a key belongs to, and which lane a row: as the pond has it for all its keys."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from millpond.kernels import hashing

SLICES = 64


@lru_cache(maxsize=1 << 16)
def _hash(key: int | str) -> np.uint64:
    if isinstance(key, str):
        data = np.frombuffer(key.encode(), np.uint8)
        return np.uint64(hashing.hash_bytes(np.array([0, len(data)], np.int64), data)[0])
    return np.uint64(hashing.hash_longs(np.array([key], np.int64))[0])


def slice_of(key: int | str, slices: int) -> int:
    """The slice of a key, a long or a string."""
    if not isinstance(key, int | str) or isinstance(key, bool):
        raise TypeError(f"{key!r} is no key: an int or a str is expected")
    return int(hashing.slices_of(np.array([_hash(key)], np.uint64), slices)[0])


def lane_of(key: int | str, slices: int, lanes: int) -> int:
    """The lane of a row whose last key it is."""
    return slice_of(key, slices) % lanes
