"""Cells and rows in ascending order: they are brought into it where they lie, when somebody asks."""

from __future__ import annotations

from typing import Any

import numpy as np

from millpond.kernels._jit import part
from millpond.kernels.cells import (
    CLASS_CELLS,
    KEY,
    ORDERED,
    ROW_CELLS,
    ROW_CLASS,
    ROW_KEY,
    ROW_SORTED,
    ROW_START,
    ROWS,
    ROWS_IN_USE,
    UNINDEXED,
    WORD,
    Longs,
    copy_cells,
    index_row,
)

RUN = 12


@part
def sort_by_key(table: Longs, start: int, count: int) -> None:
    """Sorts so many rows of a table of three columns; what is in order already takes little time."""
    for first in range(start, start + count, RUN):
        for i in range(first + 1, min(first + RUN, start + count)):
            key, word, mark = table[i, 0], table[i, 1], table[i, 2]
            j = i
            while j > first and table[j - 1, 0] > key:
                table[j, 0], table[j, 1], table[j, 2] = table[j - 1, 0], table[j - 1, 1], table[j - 1, 2]
                j -= 1
            table[j, 0], table[j, 1], table[j, 2] = key, word, mark
    if count <= RUN:
        return
    left = np.empty((count, 3), np.int64)
    width = RUN
    while width < count:
        for first in range(start, start + count - width, 2 * width):
            middle, end = first + width, min(first + 2 * width, start + count)
            if table[middle - 1, 0] <= table[middle, 0]:
                continue
            copy_cells(table, first, left, 0, width)
            i, j, at = 0, middle, first
            while i < width:
                if j < end and table[j, 0] < left[i, 0]:
                    table[at, 0], table[at, 1], table[at, 2] = table[j, 0], table[j, 1], table[j, 2]
                    j += 1
                else:
                    table[at, 0], table[at, 1], table[at, 2] = left[i, 0], left[i, 1], left[i, 2]
                    i += 1
                at += 1
        width *= 2


@part
def order_cells(cells: Any, number: int) -> None:
    """The cells of a row lie in ascending order of their keys."""
    rows, pool = cells.rows, cells.pool
    count, sorted_ = rows[number, ROW_CELLS], rows[number, ROW_SORTED]
    if sorted_ == count:
        return
    start = rows[number, ROW_START]
    if count - sorted_ <= 2:
        for i in range(start + sorted_, start + count):
            key, word, mark = pool[i, 0], pool[i, 1], pool[i, 2]
            j = i
            while j > start and pool[j - 1, KEY] > key:
                j -= 1
            for at in range(i, j, -1):
                pool[at, 0], pool[at, 1], pool[at, 2] = pool[at - 1, 0], pool[at - 1, 1], pool[at - 1, 2]
            pool[j, 0], pool[j, 1], pool[j, 2] = key, word, mark
    else:
        sort_by_key(pool, start, count)
    rows[number, ROW_SORTED] = count
    if CLASS_CELLS << rows[number, ROW_CLASS] > UNINDEXED:
        index_row(cells, number)


@part
def order_rows(cells: Any) -> None:
    """`order` has the numbers of all rows, by ascending key."""
    control, rows = cells.control, cells.rows
    if control[ORDERED]:
        return
    table = np.empty((control[ROWS_IN_USE], 3), np.int64)
    count = 0
    for number in range(control[ROWS]):
        if rows[number, ROW_CLASS] >= 0:
            table[count, KEY] = rows[number, ROW_KEY]
            table[count, WORD] = number
            count += 1
    sort_by_key(table, 0, count)
    cells.order = table[:, WORD].copy()
    control[ORDERED] = 1
