"""A matrix times a vector. Where many of a matrix's places have cells, a second form of it makes this fast: a *grid*, full, column
by column, in the order in which rows were numbered and columns first seen.

The grid is as decided epochs left the matrix, and follows what an epoch does when that is asked for: `GRID_AT` says how many
records of the log it has followed. Where there are cells, `there` has a bit; elsewhere the grid has 0.0, which adds nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from millpond.kernels._jit import inlined, jit, part
from millpond.kernels.cell_order import order_cells, order_rows
from millpond.kernels.cells import (
    BASE,
    GRID,
    GRID_AT,
    GRID_COLUMNS,
    GRID_ROWS,
    GRID_USED,
    KEY,
    LIVE,
    LOG,
    LOG_KEY,
    LOG_MARK,
    LOG_ROW,
    LOG_WORD,
    MARK,
    NOW,
    PRESENT,
    ROW_CELLS,
    ROW_CLASS,
    ROW_KEY,
    ROW_MADE,
    ROW_START,
    ROWS,
    ROWS_IN_USE,
    SINCE,
    STAMP_SHIFT,
    WORD,
    WORK,
    Doubles,
    Longs,
    as_double,
    find_cell,
    noted_cell,
    row_slot,
)
from millpond.kernels.rows import hash_key

PLACES_PER_CELL = 8
PLACES_FREE = 1 << 17  # a grid so small is no matter
WORK_MIN = 1 << 14
WORD_BITS = 64


@inlined
def column_number(cells: Any, key: int) -> Any:
    """Of a column in the grid, or -1."""
    columns = cells.columns
    return columns[row_slot(key, hash_key((key,), cells.secret), columns), 1] - 1


@part
def drop_grid(cells: Any) -> None:
    control = cells.control
    control[GRID] = control[GRID_AT] = control[GRID_USED] = 0
    control[GRID_ROWS] = control[GRID_COLUMNS] = 0
    cells.grid = np.empty(0, np.float64)
    cells.there = np.empty(0, np.uint64)
    cells.columns = np.empty((0, 2), np.int64)


@part
def enlarge_grid(cells: Any, rows: int, columns: int) -> bool:
    """Room for so many rows and columns, and some more. Where that were too much, the grid is dropped: False."""
    control = cells.control
    if rows * columns > PLACES_PER_CELL * control[LIVE] + PLACES_FREE:
        drop_grid(cells)
        return False
    rows = max((rows + (rows >> 3) + WORD_BITS - 1) // WORD_BITS * WORD_BITS, control[GRID_ROWS])
    columns = max(columns + (columns >> 3) + 8, control[GRID_COLUMNS])
    old, old_there = cells.grid, cells.there
    grid = np.zeros(rows * columns, np.float64)
    there = np.zeros(rows * columns // WORD_BITS, np.uint64)
    before = control[GRID_ROWS]
    for j in range(control[GRID_USED]):
        for i in range(before):
            grid[j * rows + i] = old[j * before + i]
        for i in range(before // WORD_BITS):
            there[j * (rows // WORD_BITS) + i] = old_there[j * (before // WORD_BITS) + i]
    cells.grid = grid
    cells.there = there
    control[GRID_ROWS] = rows
    control[GRID_COLUMNS] = columns
    size = cells.columns.shape[0]
    if size < 2 * columns:
        while size < 2 * columns:
            size = max(2 * size, 64)
        table = np.zeros((size, 2), np.int64)
        old_table = cells.columns
        for i in range(old_table.shape[0]):
            if old_table[i, 1] != 0:
                slot = row_slot(0, old_table[i, 0], table)
                table[slot, 0] = old_table[i, 0]
                table[slot, 1] = old_table[i, 1]
        cells.columns = table
    return True


@part
def set_in_grid(cells: Any, number: int, key: int, word: int, mark: int) -> None:
    """A cell with that mark. The grid may be gone afterwards."""
    control = cells.control
    is_there = mark & PRESENT
    if control[GRID] == 0:
        return
    column = column_number(cells, key)
    if column < 0 or number >= control[GRID_ROWS]:
        if not is_there:
            return
        wanted = control[GRID_USED] + (1 if column < 0 else 0)
        if number >= control[GRID_ROWS] or wanted > control[GRID_COLUMNS]:
            rows = max(control[ROWS], number + 1)
            if not enlarge_grid(cells, rows, wanted):
                return
        if column < 0:
            column = control[GRID_USED]
            hash_ = hash_key((key,), cells.secret)
            slot = row_slot(key, hash_, cells.columns)
            cells.columns[slot, 0] = hash_
            cells.columns[slot, 1] = column + 1
            control[GRID_USED] = column + 1
    at = column * control[GRID_ROWS] + number
    bit = np.uint64(1) << np.uint64(number % WORD_BITS)
    if is_there:
        cells.grid[at] = as_double(word)
        cells.there[at // WORD_BITS] |= bit
    else:
        cells.grid[at] = 0.0
        cells.there[at // WORD_BITS] &= ~bit


@part
def follow(cells: Any, now: bool) -> None:
    """The grid becomes as all is now, or else as decided epochs left it."""
    control = cells.control
    if now:
        count = control[LOG]
        if control[GRID_AT] == count:
            return
        for i in range(control[GRID_AT], count):
            if cells.log[i, LOG_MARK] != ROW_MADE:
                number, key, place = cells.log[i, LOG_ROW], cells.log[i, LOG_KEY], noted_cell(cells, i)
                set_in_grid(cells, number, key, cells.pool[place, WORD], cells.pool[place, MARK])
        control[GRID_AT] = count
        # What changes from here on is noted again: so the log has all that the grid does not.
        control[SINCE] = control[BASE] + count
    else:
        for i in range(control[GRID_AT] - 1, -1, -1):
            log = cells.log
            if log[i, LOG_MARK] != ROW_MADE:
                set_in_grid(cells, log[i, LOG_ROW], log[i, LOG_KEY], log[i, LOG_WORD], log[i, LOG_MARK])
        control[GRID_AT] = 0


@part
def make_grid(cells: Any) -> None:
    """As decided epochs left it; none, where it would be mostly empty."""
    control = cells.control
    control[GRID] = 1
    if not enlarge_grid(cells, max(control[ROWS], 1), 1):
        return
    for number in range(control[ROWS]):
        if cells.rows[number, ROW_CLASS] < 0:
            continue
        start = cells.rows[number, ROW_START]
        for place in range(start, start + cells.rows[number, ROW_CELLS]):
            mark, word = cells.pool[place, MARK], cells.pool[place, WORD]
            while mark >> STAMP_SHIFT >= control[BASE]:
                at = (mark >> STAMP_SHIFT) - control[BASE]
                mark, word = cells.log[at, LOG_MARK], cells.log[at, LOG_WORD]
            set_in_grid(cells, number, cells.pool[place, KEY], word, mark)
        if control[GRID] == 0:
            return


@jit
def multiply(cells: Any, limit: int, keys: Longs, values: Doubles, used: int) -> Any:
    """Keys and sums of the rows that have a cell where the vector has one. Keys are ascending, and so is what is added."""
    control = cells.control
    is_finite = True
    for i in range(used):
        if not np.isfinite(values[i]):
            is_finite = False
    order_rows(cells)
    if control[GRID] == 0:
        # Whether there can be a grid is asked when enough is multiplied, and not each time.
        control[WORK] += used * control[ROWS_IN_USE]
        if control[WORK] > control[LIVE] + WORK_MIN:
            make_grid(cells)
            control[WORK] = -64 * control[LIVE]
    if control[GRID] != 0 and is_finite:
        follow(cells, limit == NOW)
    sums = np.zeros(max(control[ROWS], 1), np.float64)
    if control[GRID] != 0 and is_finite:
        hits = _multiply_grid(cells, keys, values, used, sums)
    else:
        hits = _multiply_rows(cells, limit, keys, values, used, sums)
    out_keys, out_values = (
        np.empty(control[ROWS_IN_USE], np.int64),
        np.empty(control[ROWS_IN_USE], np.float64),
    )
    count = 0
    order, rows = cells.order, cells.rows
    for i in range(order.shape[0]):
        number = order[i]
        if hits[number // WORD_BITS] >> np.uint64(number % WORD_BITS) & np.uint64(1):
            out_keys[count] = rows[number, ROW_KEY]
            out_values[count] = sums[number]
            count += 1
    return out_keys[:count], out_values[:count]


@part
def _multiply_grid(cells: Any, keys: Longs, values: Doubles, used: int, sums: Doubles) -> Any:
    """Bits of the rows that have a sum."""
    room, grid, there = cells.control[GRID_ROWS], cells.grid, cells.there
    words = room // WORD_BITS
    hits = np.zeros(max(words, sums.shape[0] // WORD_BITS + 1), np.uint64)
    columns, factors = np.empty(used, np.int64), np.empty(used, np.float64)
    count = 0
    for i in range(used):
        column = column_number(cells, keys[i])
        if column >= 0:
            columns[count], factors[count] = column, values[i]
            count += 1
            for j in range(words):
                hits[j] |= there[column * words + j]
    height = min(sums.shape[0], room)
    whole = count // 4 * 4
    for i in range(0, whole, 4):
        a, b = grid[columns[i] * room :][:height], grid[columns[i + 1] * room :][:height]
        c, d = grid[columns[i + 2] * room :][:height], grid[columns[i + 3] * room :][:height]
        p, q, r, s = factors[i], factors[i + 1], factors[i + 2], factors[i + 3]
        for j in range(height):
            sums[j] = sums[j] + a[j] * p + b[j] * q + c[j] * r + d[j] * s
    for i in range(whole, count):
        a, p = grid[columns[i] * room :][:height], factors[i]
        for j in range(height):
            sums[j] += a[j] * p
    return hits


@part
def _multiply_rows(cells: Any, limit: int, keys: Longs, values: Doubles, used: int, sums: Doubles) -> Any:
    """The same without a grid."""
    hits = np.zeros(sums.shape[0] // WORD_BITS + 1, np.uint64)
    rows, pool, log = cells.rows, cells.pool, cells.log
    for number in range(cells.control[ROWS]):
        if rows[number, ROW_CLASS] < 0:
            continue
        count, start = rows[number, ROW_CELLS], rows[number, ROW_START]
        is_long = used < count
        if not is_long:
            order_cells(cells, number)
        found, total, near = False, 0.0, 0
        for i in range(used if is_long else count):
            if is_long:
                near, place = i, find_cell(cells, number, keys[i])
                if place < 0:
                    continue
            else:
                place = start + i
                key = pool[place, KEY]
                # In ever longer steps to where the key can be, and back by halves.
                step = 1
                while near + step < used and keys[near + step] <= key:
                    near += step
                    step *= 2
                while step > 0:
                    if near + step < used and keys[near + step] <= key:
                        near += step
                    step //= 2
                if near >= used or keys[near] != key:
                    continue
            mark, word = pool[place, MARK], pool[place, WORD]
            while mark >> STAMP_SHIFT >= limit:
                at = (mark >> STAMP_SHIFT) - limit
                mark, word = log[at, LOG_MARK], log[at, LOG_WORD]
            if mark & PRESENT:
                found = True
                total += as_double(word) * values[near]
        if found:
            sums[number] = total
            hits[number // WORD_BITS] |= np.uint64(1) << np.uint64(number % WORD_BITS)
    return hits
