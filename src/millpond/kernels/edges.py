"""Neighbours out of additions and removals."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import jit
from millpond.kernels.slot_hashing import Secret, mix


@jit
def net(
    offsets: NDArray[np.int64],
    ids: NDArray[np.int64],
    added: NDArray[np.int64],
    secret: Secret,
    kept: NDArray[np.uint8],
) -> int:
    """Flags the events that count: of each id the last one of its range, if it is an addition. Returns their number.

    Range i is `offsets[i]:offsets[i+1]`, oldest first.
    """
    longest = 0
    for i in range(offsets.shape[0] - 1):
        longest = max(longest, offsets[i + 1] - offsets[i])
    size = 2
    while size < 2 * longest:
        size *= 2
    mask = np.uint64(size - 1)
    start, a, b, c = secret[0], secret[1], secret[2], secret[3]
    # One table for all ranges: a place is taken if it carries the number of the range.
    held = np.empty(size, np.int64)
    taken = np.zeros(size, np.int64)
    found = 0
    for i in range(offsets.shape[0] - 1):
        for at in range(offsets[i + 1] - 1, offsets[i] - 1, -1):
            place = np.int64(mix(np.uint64(ids[at]), start, a, b, c) & mask)
            while taken[place] == i + 1 and held[place] != ids[at]:
                place = (place + 1) & (size - 1)
            newest = taken[place] != i + 1
            taken[place] = i + 1
            held[place] = ids[at]
            kept[at] = newest and added[at] != 0
            found += kept[at]
    return found
