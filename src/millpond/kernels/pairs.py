"""Pairs of rows of two sides, by the groups of their keys; and which rows are the first of their keys."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import inlined, jit

Longs = NDArray[np.int64]


@jit
def count_pairs(groups: Longs, offsets: Longs) -> int:
    """How many pairs `expand_pairs` gives."""
    total = 0
    for i in range(groups.shape[0]):
        if groups[i] >= 0:
            total += offsets[groups[i] + 1] - offsets[groups[i]]
    return total


@jit
def expand_pairs(groups: Longs, offsets: Longs, order: Longs, ours: Longs, theirs: Longs) -> None:
    """Each row with all of the other side's group that it is of, if it is of one: those are `order` from offset to offset."""
    at = 0
    for i in range(groups.shape[0]):
        if groups[i] >= 0:
            for j in range(offsets[groups[i]], offsets[groups[i] + 1]):
                ours[at] = i
                theirs[at] = order[j]
                at += 1


@jit
def near_pairs(
    groups: Longs, low: Longs, high: Longs, offsets: Longs, times: Longs, ours: Longs, theirs: Longs
) -> int:
    """Row i with those of the group in each column of `groups[i]`, -1 for none, whose times are from low[i] to high[i].

    Returns how many pairs there are; with no room for any, they are only counted.
    """
    writes = ours.shape[0] > 0
    at = 0
    for i in range(groups.shape[0]):
        for c in range(groups.shape[1]):
            group = groups[i, c]
            if group < 0:
                continue
            for j in range(offsets[group], offsets[group + 1]):
                if low[i] <= times[j] <= high[i]:
                    if writes:
                        ours[at] = i
                        theirs[at] = j
                    at += 1
    return at


@inlined
def _is_near(one: int, other: int, within: int) -> bool:
    """Whether two times are less than that apart: the difference of two longs needs all bits of an unsigned one."""
    earlier, later = min(one, other), max(one, other)
    if earlier < 0 <= later:
        # Neither of these overflows where their sum would.
        return later < within and -(earlier + 1) < within - later - 1
    return later - earlier < within


@jit
def admit_first(
    entries: Longs, times: Longs, ends: Longs, within: int, first: int,
    heads: Longs, node_start: Longs, node_end: Longs, node_next: Longs, node_entry: Longs,
    free: Longs, control: Longs, passes: NDArray[np.uint8],
) -> int:  # fmt: skip
    """Which rows of keys pass, from row `first` on: those that are `within` or more from all that did before.

    With 0 for `within` one row of a key passes, ever. The times of a key are a list, the last first. `control` has: nodes in use, free nodes. Returns the number of rows
    done: fewer than all means that there are no nodes left.
    """
    for i in range(first, entries.shape[0]):
        e = entries[i]
        node = heads[e]
        before = -1
        while node >= 0 and within > 0 and not _is_near(times[i], node_start[node], within):
            if node_start[node] < times[i]:
                node = -1  # and so are all behind it
            else:
                before = node
                node = node_next[node]
        passes[i] = node < 0
        if node >= 0:
            continue
        if control[1] > 0:
            control[1] -= 1
            node = free[control[1]]
        elif control[0] < node_start.shape[0]:
            node = control[0]
            control[0] += 1
        else:
            return i
        node_start[node] = times[i]
        node_end[node] = ends[i]
        node_entry[node] = e
        if before < 0:
            node_next[node] = heads[e]
            heads[e] = node
        else:
            node_next[node] = node_next[before]
            node_next[before] = node
    return int(entries.shape[0])
