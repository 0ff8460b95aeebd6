"""Lookups over the version arena: as-of, ranges, aggregates over ranges, gathering of cells.

A position is an arena row, or -1 for none. An entry id is -1 for a key that the slice does not hold.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import jit
from millpond.kernels._prefetch import AHEAD, FAR_AHEAD, prefetch
from millpond.kernels.control import ENTRIES
from millpond.kernels.versions import CLASS_BITS, PADDING, count_until

TOTAL = 0
SMALLEST = 1
LARGEST = 2
HALF_WINDOW = PADDING // 2


@jit
def latest_at(
    ids: NDArray[np.int64],
    entries: NDArray[np.int64],
    arena: NDArray[np.int64],
    hi: NDArray[np.int64],
    out: NDArray[np.int64],
) -> None:
    """The newest version with time <= hi."""
    last = ids.shape[0] - 1
    for i in range(ids.shape[0]):
        prefetch(entries, ids[min(i + FAR_AHEAD, last)])
        soon = ids[min(i + AHEAD, last)]
        if soon >= 0:
            prefetch(arena, entries[soon, 0])
            prefetch(arena, entries[soon, 0] + HALF_WINDOW)
        entry = ids[i]
        if entry >= 0:
            start = entries[entry, 0]
            found = count_until(arena, start, entries[entry, 1] >> CLASS_BITS, hi[i])
            out[i] = start + found - 1 if found > 0 else -1
        else:
            out[i] = -1


@jit
def drop_until(positions: NDArray[np.int64], arena: NDArray[np.int64], lo: NDArray[np.int64]) -> None:
    """Forget the positions whose version is not newer than `lo`."""
    for i in range(positions.shape[0]):
        at = positions[i]
        if at >= 0 and arena[at, 0] <= lo[i]:
            positions[i] = -1


@jit
def ranges(
    ids: NDArray[np.int64],
    entries: NDArray[np.int64],
    arena: NDArray[np.int64],
    lo: NDArray[np.int64],
    hi: NDArray[np.int64],
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
) -> int:
    """Positions [begin, end) of the versions with lo < time <= hi; `lo` may be empty: unbounded. Returns their number."""
    total = 0
    bounded = lo.shape[0] > 0
    last = ids.shape[0] - 1
    for i in range(ids.shape[0]):
        prefetch(entries, ids[min(i + FAR_AHEAD, last)])
        soon = ids[min(i + AHEAD, last)]
        if soon >= 0:
            prefetch(arena, entries[soon, 0])
            prefetch(arena, entries[soon, 0] + HALF_WINDOW)
        entry = ids[i]
        begin[i] = 0
        end[i] = 0
        if entry >= 0:
            start = entries[entry, 0]
            length = entries[entry, 1] >> CLASS_BITS
            stop = start + count_until(arena, start, length, hi[i])
            if bounded:
                start += count_until(arena, start, length, lo[i])
            if start < stop:
                begin[i] = start
                end[i] = stop
                total += stop - start
    return total


@jit
def expand(
    begin: NDArray[np.int64], end: NDArray[np.int64], offsets: NDArray[np.int64], out: NDArray[np.int64]
) -> None:
    """All positions of all ranges, one after the other, and the offsets of each range among them."""
    at = 0
    offsets[0] = 0
    for i in range(begin.shape[0]):
        for p in range(begin[i], end[i]):
            out[at] = p
            at += 1
        offsets[i + 1] = at


@jit
def entry_ranges(
    entries: NDArray[np.int64], control: NDArray[np.int64], begin: NDArray[np.int64], end: NDArray[np.int64]
) -> None:
    """The range of all versions of each entry."""
    for e in range(control[ENTRIES]):
        begin[e] = entries[e, 0]
        end[e] = entries[e, 0] + (entries[e, 1] >> CLASS_BITS)


@jit
def gather(
    arena: NDArray[np.int64],
    column: int,
    mask: int,
    bit: int,
    positions: NDArray[np.int64],
    out: NDArray[np.int64],
    valid: NDArray[np.uint8],
) -> int:
    """One cell of each position, and Arrow's validity bits. Returns the number of nulls.

    Null, with 0 in its cell, where there is no version, or where its bit in the null mask is set; `mask` is the null
    mask's cell, -1 where the arena has none.
    """
    nulls = 0
    last = positions.shape[0] - 1
    for byte in range(valid.shape[0]):
        packed = 0
        for i in range(8 * byte, min(8 * byte + 8, positions.shape[0])):
            prefetch(arena, positions[min(i + FAR_AHEAD, last)])
            there = positions[i] >= 0
            at = positions[i] if there else 0
            if mask >= 0:
                there = there & ((arena[at, mask] >> bit) & 1 == 0)
            out[i] = arena[at, column] if there else 0
            packed |= there << (i & 7)
            nulls += not there
        valid[byte] = packed
    return nulls


@jit
def gather_refs(
    arena: NDArray[np.int64], column: int, positions: NDArray[np.int64], out: NDArray[np.int64]
) -> None:
    """Heap references, -1 where there is no version."""
    for i in range(positions.shape[0]):
        out[i] = arena[positions[i], column] if positions[i] >= 0 else -1


@jit
def aggregate_longs(
    arena: NDArray[np.int64],
    column: int,
    mask: int,
    bit: int,
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    rule: int,
    out: NDArray[np.int64],
    valid: NDArray[np.uint8],
) -> int:
    """Total, smallest or largest of one cell over each range; nulls do not count; valid[i] = 0 where none is left.

    Returns how many totals do not fit an int64. A total that passes the limit on its way but fits in the end is right.
    """
    overflows = 0
    for i in range(begin.shape[0]):
        some = False
        best = np.int64(0)
        high = np.int64(0)
        low = np.int64(0)
        for p in range(begin[i], end[i]):
            if mask >= 0 and (arena[p, mask] >> bit) & 1 != 0:
                continue
            value = arena[p, column]
            if rule == TOTAL:
                high += value >> 32
                low += value & 0xFFFFFFFF
            elif not some or (value < best if rule == SMALLEST else value > best):
                best = value
            some = True
        if rule == TOTAL:
            high += low >> 32
            if high < -(1 << 31) or high >= 1 << 31:
                overflows += 1
            else:
                best = (high << 32) | (low & 0xFFFFFFFF)
        out[i] = best
        valid[i] = some
    return overflows


@jit
def aggregate_doubles(
    arena: NDArray[np.int64],
    cells: NDArray[np.float64],
    column: int,
    mask: int,
    bit: int,
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    rule: int,
    out: NDArray[np.float64],
    valid: NDArray[np.uint8],
) -> None:
    """As `aggregate_longs`, over the arena seen as doubles. Totals add in time order; NaN is above all numbers."""
    for i in range(begin.shape[0]):
        some = False
        best = 0.0
        for p in range(begin[i], end[i]):
            if mask >= 0 and (arena[p, mask] >> bit) & 1 != 0:
                continue
            value = cells[p, column]
            if not some:
                best = value
            elif rule == TOTAL:
                best += value
            elif rule == SMALLEST:
                if value < best or best != best:
                    best = value
            elif value > best or value != value:
                best = value
            some = True
        out[i] = best
        valid[i] = some


@jit
def mark_nulls(valid: NDArray[np.uint8], offset: int, bit: int, rows: NDArray[np.int64]) -> None:
    """Set the bit in the null mask, the last cell, of the rows that Arrow's validity bits call null."""
    mask = rows.shape[1] - 1
    for i in range(rows.shape[0]):
        at = offset + i
        if (valid[at >> 3] >> (at & 7)) & 1 == 0:
            rows[i, mask] |= np.int64(1) << bit
