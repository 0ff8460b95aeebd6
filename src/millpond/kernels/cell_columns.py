"""Cells as columns, in and out: rows, keys, words and flags (PRESENT, NULL; 0 for what is not there)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import brief, jit
from millpond.kernels.cell_grid import set_in_grid
from millpond.kernels.cell_log import as_of, change_cell, new_cell, new_row, note_dirty, read, remove, write
from millpond.kernels.cell_order import order_cells, order_rows
from millpond.kernels.cells import (
    BASE,
    FLAGS,
    GHOSTS,
    GRID,
    KEY,
    LIVE,
    LOG,
    LOG_KEY,
    LOG_MARK,
    LOG_ROW,
    MARK,
    PRESENT,
    REMOVED,
    ROW_CELLS,
    ROW_KEY,
    ROW_LIVE,
    ROW_MADE,
    ROW_START,
    ROWS_IN_USE,
    SAVED,
    SINCE,
    STAMP_SHIFT,
    WORD,
    Longs,
    add_cell,
    as_double,
    as_word,
    drop_row,
    find_cell,
    make_row,
    noted_cell,
    row_number,
    take_cell,
)

Flags = NDArray[np.uint8]


@brief
def row_columns(cells: Any, limit: int, row: int) -> Any:
    """Keys, ascending, words and flags of a row."""
    number = row_number(cells, row)
    count = np.int64(0)
    if number >= 0:
        order_cells(cells, number)
        count = cells.rows[number, ROW_CELLS]
    keys, words, flags = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.uint8)
    used = 0
    for i in range(count):
        place = cells.rows[number, ROW_START] + i
        mark, word = as_of(cells, limit, place)
        if mark & PRESENT:
            keys[used] = cells.pool[place, KEY]
            words[used] = word
            flags[used] = mark & FLAGS
            used += 1
    return keys[:used], words[:used], flags[:used]


@brief
def row_length(cells: Any, limit: int, row: int) -> int:
    number = row_number(cells, row)
    if number < 0:
        return 0
    if limit != cells.control[BASE]:
        return int(cells.rows[number, ROW_LIVE])
    count = 0
    start = cells.rows[number, ROW_START]
    for place in range(start, start + cells.rows[number, ROW_CELLS]):
        count += as_of(cells, limit, place)[0] & PRESENT
    return count


@brief
def keys_of_rows(cells: Any, limit: int) -> Any:
    """Rows that have cells, ascending."""
    order_rows(cells)
    keys = np.empty(cells.control[ROWS_IN_USE], np.int64)
    used = 0
    for i in range(cells.order.shape[0]):
        number = cells.order[i]
        start = cells.rows[number, ROW_START]
        for place in range(start, start + cells.rows[number, ROW_CELLS]):
            if as_of(cells, limit, place)[0] & PRESENT:
                keys[used] = cells.rows[number, ROW_KEY]
                used += 1
                break
    return keys[:used]


@jit
def all_columns(cells: Any, limit: int) -> Any:
    """Rows, keys, words and flags of all cells, in the order of places."""
    order_rows(cells)
    control = cells.control
    room = control[LIVE] + control[GHOSTS]
    rows, keys = np.empty(room, np.int64), np.empty(room, np.int64)
    words, flags = np.empty(room, np.int64), np.empty(room, np.uint8)
    used = 0
    for i in range(cells.order.shape[0]):
        number = cells.order[i]
        order_cells(cells, number)
        start = cells.rows[number, ROW_START]
        for place in range(start, start + cells.rows[number, ROW_CELLS]):
            mark, word = as_of(cells, limit, place)
            if mark & PRESENT:
                rows[used] = cells.rows[number, ROW_KEY]
                keys[used] = cells.pool[place, KEY]
                words[used] = word
                flags[used] = mark & FLAGS
                used += 1
    return rows[:used], keys[:used], words[:used], flags[:used]


@brief
def column(cells: Any, limit: int, key: int) -> Any:
    """Rows, ascending, and words of the cells of that key."""
    order_rows(cells)
    rows, words = (
        np.empty(cells.control[ROWS_IN_USE], np.int64),
        np.empty(cells.control[ROWS_IN_USE], np.int64),
    )
    used = 0
    for i in range(cells.order.shape[0]):
        number = cells.order[i]
        place = find_cell(cells, number, key)
        if place >= 0:
            mark, word = as_of(cells, limit, place)
            if mark & PRESENT:
                rows[used] = cells.rows[number, ROW_KEY]
                words[used] = word
                used += 1
    return rows[:used], words[:used]


@jit
def changed_columns(cells: Any) -> Any:
    """What the epoch that is not decided has left, of the cells that it has changed; in the order of their first changes."""
    control, log = cells.control, cells.log
    room = control[LOG]
    rows, keys = np.empty(room, np.int64), np.empty(room, np.int64)
    words, flags = np.empty(room, np.int64), np.empty(room, np.uint8)
    used = 0
    for i in range(room):
        if log[i, LOG_MARK] == ROW_MADE or log[i, LOG_MARK] >> STAMP_SHIFT >= control[BASE]:
            continue
        number = log[i, LOG_ROW]
        place = noted_cell(cells, i)
        rows[used] = cells.rows[number, ROW_KEY]
        keys[used] = log[i, LOG_KEY]
        words[used] = cells.pool[place, WORD]
        flags[used] = cells.pool[place, MARK] & FLAGS
        used += 1
    return rows[:used], keys[:used], words[:used], flags[:used]


@jit
def decided_columns(cells: Any, rows: Longs, keys: Longs) -> Any:
    """Words and flags at these places, without an epoch that is not decided."""
    words, flags = np.zeros(rows.shape[0], np.int64), np.zeros(rows.shape[0], np.uint8)
    for i in range(rows.shape[0]):
        mark, word = read(cells, cells.control[BASE], rows[i], keys[i])
        if mark & PRESENT:
            words[i], flags[i] = word, mark & FLAGS
    return words, flags


@jit
def put_columns(cells: Any, rows: Longs, keys: Longs, words: Longs, flags: Flags, is_dirty: bool) -> None:
    """Sets cells as no epoch's doing, while none is undecided; removes those that are not PRESENT."""
    control = cells.control
    stamp = np.int64(0)
    if is_dirty:
        # As if a record of an epoch that is decided had told of them.
        stamp = control[BASE] << STAMP_SHIFT
        control[BASE] += 1
        control[SINCE] = control[BASE]
    for i in range(rows.shape[0]):
        number = row_number(cells, rows[i])
        if is_dirty:
            mark, _ = read(cells, control[BASE], rows[i], keys[i])
            if mark >> STAMP_SHIFT < control[SAVED]:
                note_dirty(cells, rows[i], keys[i], mark == 0)
        if flags[i] & PRESENT:
            if number < 0:
                number = make_row(cells, rows[i])
            place = find_cell(cells, number, keys[i])
            if place < 0:
                add_cell(cells, number, keys[i], words[i], stamp | flags[i])
                cells.rows[number, ROW_LIVE] += 1
                cells.control[LIVE] += 1
            else:
                cells.pool[place, WORD] = words[i]
                was = cells.pool[place, MARK] & ~FLAGS
                cells.pool[place, MARK] = (stamp if is_dirty else was) | flags[i]
        else:
            cells.control[REMOVED] += 1
            place = np.int64(-1)
            if number >= 0:
                place = find_cell(cells, number, keys[i])
            if place >= 0:
                take_cell(cells, number, place)
                cells.rows[number, ROW_LIVE] -= 1
                cells.control[LIVE] -= 1
        if cells.control[GRID] != 0 and number >= 0:
            set_in_grid(cells, number, keys[i], words[i], flags[i])
        if number >= 0 and cells.rows[number, ROW_CELLS] == 0:
            drop_row(cells, number)


@brief
def change_columns(
    cells: Any, row: int, keys: Longs, words: Longs, flags: Flags, adds: bool, times: float
) -> None:
    """Sets cells of a row as an epoch's doing; or adds so many times these doubles to what they are."""
    number = row_number(cells, row)
    if number < 0:
        if keys.shape[0] == 0:
            return
        number = new_row(cells, row)
    for i in range(keys.shape[0]):
        place = find_cell(cells, number, keys[i])
        word = words[i]
        if adds:
            before = 0.0
            if place >= 0 and cells.pool[place, MARK] & PRESENT:
                before = as_double(cells.pool[place, WORD])
            word = as_word(before + as_double(word) * times)
        if place < 0:
            new_cell(cells, number, keys[i], word, flags[i])
        else:
            change_cell(cells, number, place, word, flags[i])


# One cell, for Python


@brief
def get_double(cells: Any, limit: int, row: int, key: int, default: float) -> float:
    mark, word = read(cells, limit, row, key)
    return as_double(word) if mark & PRESENT else default


@brief
def get_word(cells: Any, limit: int, row: int, key: int) -> Any:
    """The flags and the word."""
    mark, word = read(cells, limit, row, key)
    return mark & FLAGS, word


@brief
def get_number(cells: Any, limit: int, row: int, key: int) -> Any:
    """The flags and the word as a double."""
    mark, word = read(cells, limit, row, key)
    return mark & FLAGS, as_double(word)


@brief
def set_double(cells: Any, row: int, key: int, x: float) -> None:
    write(cells, row, key, as_word(x), PRESENT)


@brief
def set_word(cells: Any, row: int, key: int, word: int, flags: int) -> None:
    write(cells, row, key, word, flags)


@brief
def delete(cells: Any, row: int, key: int) -> bool:
    return remove(cells, row, key)


@jit
def copied(cells: Any, other: Any) -> None:
    """Makes the other cells, which are new, the same as these."""
    other.control = cells.control.copy()
    other.secret = cells.secret
    other.slots = cells.slots.copy()
    other.rows = cells.rows.copy()
    other.pool = cells.pool.copy()
    other.index = cells.index.copy()
    other.log = cells.log.copy()
    other.dirty = cells.dirty.copy()
    other.order = cells.order.copy()
    other.grid = cells.grid.copy()
    other.there = cells.there.copy()
    other.columns = cells.columns.copy()


@brief
def arrays_of(cells: Any) -> Any:
    """What cells are made of, as it is now."""
    return cells.control, cells.rows, cells.pool, cells.log, cells.dirty
