"""Variable-length bytes: compare, copy, gather over (offsets, data) pairs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import jit
from millpond.kernels.hashing import load64


@jit
def same_bytes(a: NDArray[np.uint8], at: int, b: NDArray[np.uint8], bt: int, size: int) -> bool:
    j = 0
    while size - j >= 8:
        if load64(a, at + j) != load64(b, bt + j):
            return False
        j += 8
    while j < size:
        if a[at + j] != b[bt + j]:
            return False
        j += 1
    return True


@jit
def gather_sizes(offsets: NDArray[np.int64], refs: NDArray[np.int64], out: NDArray[np.int64]) -> int:
    """Offsets of the gathered values, from 0; a negative reference takes none. Returns the total size."""
    total = 0
    out[0] = 0
    for i in range(refs.shape[0]):
        r = refs[i]
        if r >= 0:
            total += offsets[r + 1] - offsets[r]
        out[i + 1] = total
    return total


@jit
def gather_bytes(
    offsets: NDArray[np.int64],
    data: NDArray[np.uint8],
    refs: NDArray[np.int64],
    out_offsets: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> None:
    for i in range(refs.shape[0]):
        r = refs[i]
        if r >= 0:
            to = out_offsets[i]
            source = offsets[r]
            size = out_offsets[i + 1] - to
            for j in range(size):
                out[to + j] = data[source + j]


@jit
def pack_valid(flags: NDArray[np.uint8], refs: NDArray[np.int64], out: NDArray[np.uint8]) -> int:
    """Arrow validity bits of gathered values: set where the reference is >= 0 and its flag is not 0.

    `flags` may be empty: all set. Returns the number of nulls.
    """
    nulls = 0
    some = flags.shape[0] > 0
    for i in range(refs.shape[0]):
        r = refs[i]
        if r >= 0 and (not some or flags[r] != 0):
            out[i >> 3] |= np.uint8(1 << (i & 7))
        else:
            nulls += 1
    return nulls


@jit
def offsets_in_bounds(offsets: NDArray[np.int64], size: int) -> bool:
    """Whether the offsets ascend from 0 or more and end within `size` bytes."""
    last = np.int64(0)
    for i in range(offsets.shape[0]):
        if offsets[i] < last:
            return False
        last = offsets[i]
    return bool(last <= size)
