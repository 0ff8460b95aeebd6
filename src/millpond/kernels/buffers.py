"""Variable-length bytes: compare, copy, gather over (offsets, data) pairs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import inlined, jit
from millpond.kernels._prefetch import FAR_AHEAD, prefetch
from millpond.kernels.hashing import load32, load64


@inlined
def same_bytes(a: NDArray[np.uint8], at: int, b: NDArray[np.uint8], bt: int, size: int) -> bool:
    if size < 8:
        if size >= 4:
            same_start = load32(a, at) == load32(b, bt)
            return bool(same_start and load32(a, at + size - 4) == load32(b, bt + size - 4))
        for j in range(size):
            if a[at + j] != b[bt + j]:
                return False
        return True
    j = 0
    while size - j > 8:
        if load64(a, at + j) != load64(b, bt + j):
            return False
        j += 8
    # The last word may overlap the one before.
    return bool(load64(a, at + size - 8) == load64(b, bt + size - 8))


@inlined
def store64(out: NDArray[np.uint8], at: int, word: np.uint64) -> None:
    """8 bytes, little-endian, at any alignment, as one store."""
    for j in range(8):
        out[np.uint64(at) + np.uint64(j)] = np.uint8((word >> np.uint64(8 * j)) & np.uint64(255))


@inlined
def copy_bytes(source: NDArray[np.uint8], first: int, out: NDArray[np.uint8], at: int, size: int) -> None:
    if size < 8:
        for j in range(size):
            out[at + j] = source[first + j]
    else:
        j = 0
        while size - j > 8:
            store64(out, at + j, load64(source, first + j))
            j += 8
        store64(out, at + size - 8, load64(source, first + size - 8))


@jit
def gather_codes(codes: NDArray[np.int32], refs: NDArray[np.int64], out: NDArray[np.int64]) -> None:
    """The code of each reference; -1 where it is negative."""
    last = refs.shape[0] - 1
    for i in range(refs.shape[0]):
        prefetch(codes, refs[min(i + FAR_AHEAD, last)])
        r = refs[i]
        out[i] = codes[r] if r >= 0 else -1


@jit
def gather_sizes(offsets: NDArray[np.int64], refs: NDArray[np.int64], out: NDArray[np.int64]) -> int:
    """Offsets of the gathered values, from 0; a negative reference takes none. Returns the total size."""
    total = 0
    out[0] = 0
    last = refs.shape[0] - 1
    for i in range(refs.shape[0]):
        prefetch(offsets, refs[min(i + FAR_AHEAD, last)])
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
    last = refs.shape[0] - 1
    for i in range(refs.shape[0]):
        soon = refs[min(i + FAR_AHEAD, last)]
        if soon >= 0:
            prefetch(data, offsets[soon])
        r = refs[i]
        if r >= 0:
            copy_bytes(data, offsets[r], out, out_offsets[i], out_offsets[i + 1] - out_offsets[i])


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


@jit
def scatter_sizes(offsets: NDArray[np.int64], places: NDArray[np.int64], out: NDArray[np.int64]) -> int:
    """Offsets, from 0, of the values once value i has gone to `places[i]`. Returns the total size."""
    for i in range(places.shape[0]):
        out[places[i] + 1] = offsets[i + 1] - offsets[i]
    out[0] = 0
    for i in range(places.shape[0]):
        out[i + 1] += out[i]
    return int(out[places.shape[0]])


@jit
def scatter_bytes(
    offsets: NDArray[np.int64],
    data: NDArray[np.uint8],
    places: NDArray[np.int64],
    out_offsets: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> None:
    for i in range(places.shape[0]):
        copy_bytes(data, offsets[i], out, out_offsets[places[i]], offsets[i + 1] - offsets[i])
