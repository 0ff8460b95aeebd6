"""Compaction under keep-latest: of the versions below F the newest stays, and all from F on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import jit
from millpond.kernels.control import ENTRIES, FREE, USED
from millpond.kernels.versions import CLASS_BITS, CLASS_MASK, copy_rows, count_until, drop_oldest

SMALLEST_TIME = -(2**63)


@jit
def sweep(
    entries: NDArray[np.int64],
    arena: NDArray[np.int64],
    heads: NDArray[np.int64],
    control: NDArray[np.int64],
    cursor: int,
    keep_from: int,
    budget: int,
) -> int:
    """Compact `budget` entries from `cursor` on, round and round. Returns the new cursor."""
    count = control[ENTRIES]
    if cursor >= count:
        cursor = 0
    if keep_from == SMALLEST_TIME:
        return int((cursor + min(budget, count)) % max(count, 1))
    for _ in range(min(budget, count)):
        length = entries[cursor, 1] >> CLASS_BITS
        start = entries[cursor, 0]
        if length > 1 and arena[start + 1, 0] < keep_from:
            below = count_until(arena, start, length, keep_from - 1)
            drop_oldest(entries, cursor, arena, heads, control, below - 1)
        cursor += 1
        if cursor == count:
            cursor = 0
    return cursor


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
