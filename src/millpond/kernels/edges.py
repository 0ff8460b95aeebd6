"""Neighbours out of additions and removals."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import jit

_SPREAD = -7046029254386353131  # 2**64 / golden ratio: near ids come to lie apart


@jit
def net(
    offsets: NDArray[np.int64], ids: NDArray[np.int64], added: NDArray[np.int64], kept: NDArray[np.uint8]
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
    # One table for all ranges: a place is taken if it carries the number of the range.
    held = np.empty(size, np.int64)
    taken = np.zeros(size, np.int64)
    found = 0
    for i in range(offsets.shape[0] - 1):
        for at in range(offsets[i + 1] - 1, offsets[i] - 1, -1):
            place = ((ids[at] * _SPREAD) >> 17) & (size - 1)
            while taken[place] == i + 1 and held[place] != ids[at]:
                place = (place + 1) & (size - 1)
            newest = taken[place] != i + 1
            taken[place] = i + 1
            held[place] = ids[at]
            kept[at] = newest and added[at] != 0
            found += kept[at]
    return found
