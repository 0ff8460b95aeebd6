"""Compaction: under keep-latest of the versions below F the newest stays, and all from F on; else as a mask says."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import jit
from millpond.kernels.control import ENTRIES, FREE, USED
from millpond.kernels.versions import (
    CLASS_BITS,
    CLASS_MASK,
    copy_rows,
    count_until,
    drop_oldest,
    outdated,
)

SMALLEST_TIME = -(2**63)


@jit
def sweep(
    entries: NDArray[np.int64],
    arena: NDArray[np.int64],
    heads: NDArray[np.int64],
    control: NDArray[np.int64],
    cursor: int,
    keep_from: int,
    alive_from: int,
    budget: int,
    dirty: NDArray[np.uint8],
) -> int:
    """Compact `budget` entries from `cursor` on, round and round; those that change are marked. Returns the new cursor."""
    count = control[ENTRIES]
    if cursor >= count:
        cursor = 0
    if keep_from == SMALLEST_TIME:
        return int((cursor + min(budget, count)) % max(count, 1))
    for _ in range(min(budget, count)):
        length = entries[cursor, 1] >> CLASS_BITS
        start = entries[cursor, 0]
        if length > 0 and (arena[start, 0] < alive_from or (length > 1 and arena[start + 1, 0] < keep_from)):
            gone = outdated(arena, start, length, keep_from, alive_from)
            drop_oldest(entries, cursor, arena, heads, control, gone)
            dirty[cursor] = 1
        cursor += 1
        if cursor == count:
            cursor = 0
    return cursor


@jit
def mark(ids: NDArray[np.int64], dirty: NDArray[np.uint8]) -> None:
    for i in range(ids.shape[0]):
        dirty[ids[i]] = 1


@jit
def ranges_below(
    ids: NDArray[np.int64],
    entries: NDArray[np.int64],
    arena: NDArray[np.int64],
    keep_from: int,
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
) -> int:
    """Positions [begin, end) of the versions of these entries with a time below `keep_from`. Returns their number."""
    total = 0
    for i in range(ids.shape[0]):
        start = entries[ids[i], 0]
        begin[i] = start
        end[i] = start + count_until(arena, start, entries[ids[i], 1] >> CLASS_BITS, keep_from - 1)
        total += end[i] - begin[i]
    return total


@jit
def full_entries(
    ids: NDArray[np.int64], entries: NDArray[np.int64], arena: NDArray[np.int64], keep_from: int
) -> NDArray[np.int64]:
    """Of these entries those whose block is full and at least half of it below `keep_from`, as often as they come."""
    out = np.empty(ids.shape[0], np.int64)
    found = 0
    for i in range(ids.shape[0]):
        e = ids[i]
        length = entries[e, 1] >> CLASS_BITS
        if length >= 4 and length == 1 << (entries[e, 1] & CLASS_MASK):
            if arena[entries[e, 0] + (length >> 1), 0] < keep_from:
                out[found] = e
                found += 1
    return out[:found]


@jit
def retain(
    ids: NDArray[np.int64],
    offsets: NDArray[np.int64],
    kept: NDArray[np.uint8],
    entries: NDArray[np.int64],
    arena: NDArray[np.int64],
    heads: NDArray[np.int64],
    control: NDArray[np.int64],
    dirty: NDArray[np.uint8],
) -> None:
    """Of the oldest versions of each entry just those whose flag is set stay; its flags are `offsets[i]:offsets[i+1]`.

    Entries that change are marked."""
    width = arena.shape[1]
    for i in range(ids.shape[0]):
        start = entries[ids[i], 0]
        looked_at = offsets[i + 1] - offsets[i]
        # The survivors move up behind each other; then the oldest rows, which are free now, are dropped.
        at = start + looked_at - 1
        for r in range(looked_at - 1, -1, -1):
            if kept[offsets[i] + r]:
                if at != start + r:
                    for c in range(width):
                        arena[at, c] = arena[start + r, c]
                at -= 1
        if at >= start:
            drop_oldest(entries, ids[i], arena, heads, control, at - start + 1)
            dirty[ids[i]] = 1


@jit
def rewrite(
    entries: NDArray[np.int64], arena: NDArray[np.int64], to: NDArray[np.int64], control: NDArray[np.int64]
) -> None:
    """Move every block to the arena `to`, one after the other, in entry order: no free blocks are left."""
    used = 0
    for e in range(control[ENTRIES]):
        start = entries[e, 0]
        if start >= 0:
            copy_rows(arena, start, to, used, entries[e, 1] >> CLASS_BITS)
            entries[e, 0] = used
            used += 1 << (entries[e, 1] & CLASS_MASK)
    control[USED] = used
    control[FREE] = 0


@jit
def renumber(
    entries: NDArray[np.int64], arena: NDArray[np.int64], control: NDArray[np.int64], column: int
) -> None:
    """Heap references 0, 1, 2, ... in entry and time order, as `entry_ranges` and `expand` list the versions."""
    at = 0
    for e in range(control[ENTRIES]):
        start = entries[e, 0]
        for p in range(start, start + (entries[e, 1] >> CLASS_BITS)):
            arena[p, column] = at
            at += 1
