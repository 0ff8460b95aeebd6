"""Version arena: per entry one block of versions, sorted by time.

The arena is int64[rows, width]. A row is a version: its time, its cells. An entry is
`(first row of its block, length * 64 + size class)`; a block of class c has 2**c rows, a new entry has none (-1).
Blocks that were outgrown are kept in free lists, one per class, linked through their first cell.
The arena always has `PADDING` rows behind the last block, so that lookups may read a little past one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import inlined, jit
from millpond.kernels._prefetch import AHEAD, FAR_AHEAD, prefetch
from millpond.kernels.control import FREE, ROWS_MOVED, USED, VERSIONS

CLASS_BITS = 6
CLASS_MASK = 63
CLASSES = 64
PADDING = 8


@inlined
def count_until(arena: NDArray[np.int64], start: int, length: int, time: int) -> int:
    """How many of the block's versions have a time <= `time`."""
    base = start
    while length > PADDING:
        half = length >> 1
        if arena[base + half - 1, 0] <= time:
            base += half
        length -= half
    # The last few without a branch: how many is a coin toss, and a wrong guess costs more than the reads.
    stop = base + length
    base += 4 * ((base + 3 < stop) & (arena[base + 3, 0] <= time))
    base += 2 * ((base + 1 < stop) & (arena[base + 1, 0] <= time))
    base += (base < stop) & (arena[base, 0] <= time)
    base += (base < stop) & (arena[base, 0] <= time)
    return int(base - start)


@inlined
def copy_rows(source: NDArray[np.int64], first: int, to: NDArray[np.int64], at: int, rows: int) -> None:
    """Copy rows forwards: right within one arena when `at < first` or the ranges are apart."""
    for r in range(rows):
        for c in range(source.shape[1]):
            to[at + r, c] = source[first + r, c]


@inlined
def take_block(
    arena: NDArray[np.int64], heads: NDArray[np.int64], control: NDArray[np.int64], size_class: int
) -> int:
    """A block of that class, from its free list or the unused end; -1 when the arena must grow first."""
    start = heads[size_class]
    rows = 1 << size_class
    if start >= 0:
        heads[size_class] = arena[start, 0]
        control[FREE] -= rows
        return int(start)
    start = control[USED]
    if start + rows + PADDING > arena.shape[0]:
        return -1
    control[USED] = start + rows
    return int(start)


@inlined
def free_block(
    arena: NDArray[np.int64],
    heads: NDArray[np.int64],
    control: NDArray[np.int64],
    start: int,
    size_class: int,
) -> None:
    arena[start, 0] = heads[size_class]
    heads[size_class] = start
    control[FREE] += 1 << size_class


@jit
def drop_oldest(
    entries: NDArray[np.int64],
    entry: int,
    arena: NDArray[np.int64],
    heads: NDArray[np.int64],
    control: NDArray[np.int64],
    dropped: int,
) -> None:
    """Drop the entry's oldest versions. Of a block left three quarters empty the rest is split off as free."""
    start = entries[entry, 0]
    size_class = entries[entry, 1] & CLASS_MASK
    left = (entries[entry, 1] >> CLASS_BITS) - dropped
    copy_rows(arena, start + dropped, arena, start, left)
    while size_class > 0 and left * 4 <= 1 << size_class:
        size_class -= 1
        free_block(arena, heads, control, start + (1 << size_class), size_class)
    entries[entry, 1] = (left << CLASS_BITS) | size_class
    control[VERSIONS] -= dropped
    control[ROWS_MOVED] += left


@inlined
def outdated(arena: NDArray[np.int64], start: int, length: int, keep_from: int, alive_from: int) -> int:
    """How many of the block's versions no read from `keep_from` on can see: all before the newest one below it, and
    that one too if its time is before `alive_from`."""
    below = count_until(arena, start, length, keep_from - 1)
    return int(below - (below > 0 and arena[start + below - 1, 0] >= alive_from))


@jit
def insert(
    ids: NDArray[np.int64],
    rows: NDArray[np.int64],
    first: int,
    replaces: bool,
    keep_from: int,
    alive_from: int,
    moved_max: int,
    entries: NDArray[np.int64],
    arena: NDArray[np.int64],
    heads: NDArray[np.int64],
    control: NDArray[np.int64],
) -> int:
    """Put the rows from `first` on under their entries, in order; a version of equal time is replaced or followed.

    An entry with at least half of its versions `outdated` is compacted when touched: seldom enough that a row costs
    O(1) amortised. The smallest int64 as `keep_from` means never.
    Returns the number of rows done; fewer than all means that the arena is full, or, where `control` counts more than
    `moved_max`, that the rest had better be merged: each row that comes before many moves them all.
    """
    width = arena.shape[1]
    last = ids.shape[0] - 1
    for i in range(first, ids.shape[0]):
        if control[ROWS_MOVED] > moved_max:
            return i
        prefetch(entries, ids[min(i + FAR_AHEAD, last)])
        soon = ids[min(i + AHEAD, last)]
        prefetch(arena, entries[soon, 0] + (entries[soon, 1] >> CLASS_BITS))
        entry = ids[i]
        time = rows[i, 0]
        start = entries[entry, 0]
        length = entries[entry, 1] >> CLASS_BITS
        if length > 1 and arena[start + (length >> 1), 0] < keep_from:
            gone = outdated(arena, start, length, keep_from, alive_from)
            drop_oldest(entries, entry, arena, heads, control, gone)
            start = entries[entry, 0]
            length = entries[entry, 1] >> CLASS_BITS
        at = length
        if length > 0 and time <= arena[start + length - 1, 0]:
            at = count_until(arena, start, length, time)
            if replaces and at > 0 and arena[start + at - 1, 0] == time:
                for c in range(1, width):
                    arena[start + at - 1, c] = rows[i, c]
                continue
        size_class = entries[entry, 1] & CLASS_MASK
        if start < 0 or length == 1 << size_class:
            bigger = 0 if start < 0 else size_class + 1
            block = take_block(arena, heads, control, bigger)
            if block < 0:
                return i
            if start >= 0:
                copy_rows(arena, start, arena, block, at)
                copy_rows(arena, start + at, arena, block + at + 1, length - at)
                free_block(arena, heads, control, start, size_class)
                control[ROWS_MOVED] += length
            start = block
            size_class = bigger
        else:
            for r in range(start + length, start + at, -1):
                for c in range(width):
                    arena[r, c] = arena[r - 1, c]
            control[ROWS_MOVED] += length - at
        for c in range(width):
            arena[start + at, c] = rows[i, c]
        entries[entry, 0] = start
        entries[entry, 1] = ((length + 1) << CLASS_BITS) | size_class
        control[VERSIONS] += 1
    return int(ids.shape[0])


@jit
def merge(
    ids: NDArray[np.int64],
    rows: NDArray[np.int64],
    order: NDArray[np.int64],
    first: int,
    replaces: bool,
    keep_from: int,
    alive_from: int,
    entries: NDArray[np.int64],
    arena: NDArray[np.int64],
    heads: NDArray[np.int64],
    control: NDArray[np.int64],
) -> int:
    """As `insert`, for the rows `order[first:]`, which go by entry, then time: each version moves once at most.

    Returns how many of them are done; fewer than all means that the arena is full.
    """
    done = first
    while done < order.shape[0]:
        entry = ids[order[done]]
        stop = done + 1
        while stop < order.shape[0] and ids[order[stop]] == entry:
            stop += 1
        length = entries[entry, 1] >> CLASS_BITS
        if length > 1 and arena[entries[entry, 0] + (length >> 1), 0] < keep_from:
            gone = outdated(arena, entries[entry, 0], length, keep_from, alive_from)
            drop_oldest(entries, entry, arena, heads, control, gone)
            length = entries[entry, 1] >> CLASS_BITS
        start = entries[entry, 0]
        added = stop - done
        if replaces:
            for j in range(done, stop):
                time = rows[order[j], 0]
                at = count_until(arena, start, length, time) if length > 0 else 0
                known = at > 0 and arena[start + at - 1, 0] == time
                added -= known or (j + 1 < stop and rows[order[j + 1], 0] == time)
        old_class = entries[entry, 1] & CLASS_MASK
        size_class = old_class
        while 1 << size_class < length + added:
            size_class += 1
        block = start
        if start < 0 or size_class > old_class:
            block = take_block(arena, heads, control, size_class)
            if block < 0:
                return done
        # From the newest down: what is read lies at or below what is written.
        to = block + length + added - 1
        left = length
        j = stop - 1
        while j >= done:
            time = rows[order[j], 0]
            while left > 0 and arena[start + left - 1, 0] > time:
                left -= 1
                copy_rows(arena, start + left, arena, to, 1)
                to -= 1
            if replaces and left > 0 and arena[start + left - 1, 0] == time:
                left -= 1
            copy_rows(rows, order[j], arena, to, 1)
            to -= 1
            j -= 1
            while replaces and j >= done and rows[order[j], 0] == time:
                j -= 1
        if block != start:
            copy_rows(arena, start, arena, block, left)
            if start >= 0:
                free_block(arena, heads, control, start, old_class)
            left = 0
        control[ROWS_MOVED] += length - left
        control[VERSIONS] += added
        entries[entry, 0] = block
        entries[entry, 1] = ((length + added) << CLASS_BITS) | size_class
        done = stop
    return done
