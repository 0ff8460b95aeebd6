"""What an epoch does to cells: each first change is noted in a log, with what was before, so that it can be taken back.
A record also tells where the cell lay, which is where it still lies as a rule.

Records are numbered, over all epochs. A cell's mark has the number of its newest one, and each record the mark from before: they
are a chain that ends where the epoch began. From a *mark* in the log on each first change is noted again, so that what was done
since can be undone by itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from millpond.kernels._jit import brief, inlined, jit, part
from millpond.kernels.cell_grid import follow, set_in_grid
from millpond.kernels.cells import (
    BASE,
    DIRTY_PLACES,
    FLAGS,
    GHOSTS,
    GRID,
    GRID_AT,
    KEY,
    LIVE,
    LOG,
    LOG_FIELDS,
    LOG_KEY,
    LOG_MARK,
    LOG_PLACE,
    LOG_ROW,
    LOG_WORD,
    MARK,
    PRESENT,
    REMOVED,
    ROW_CELLS,
    ROW_CLASS,
    ROW_KEY,
    ROW_LIVE,
    ROW_MADE,
    ROW_START,
    ROWS,
    SAVED,
    SINCE,
    STAMP_SHIFT,
    TWICE,
    WORD,
    add_cell,
    as_double,
    as_word,
    drop_row,
    find_cell,
    grown,
    make_row,
    noted_cell,
    row_number,
    take_cell,
)


@inlined
def note(cells: Any, number: int, key: int, word: int, mark: int, place: int) -> Any:
    """A record of what was, and where; its number."""
    control = cells.control
    count = control[LOG]
    if count == cells.log.shape[0]:
        cells.log = grown(cells.log, count + 1)
    log = cells.log
    log[count, LOG_ROW] = number
    log[count, LOG_KEY] = key
    log[count, LOG_WORD] = word
    log[count, LOG_MARK] = mark
    log[count, LOG_PLACE] = place
    control[LOG] = count + 1
    return control[BASE] + count


@part
def new_row(cells: Any, row: int) -> Any:
    """The number of a row that the epoch makes."""
    number = make_row(cells, row)
    note(cells, number, 0, 0, ROW_MADE, -1)
    return number


@part
def new_cell(cells: Any, number: int, key: int, word: int, flags: int) -> None:
    """A cell that the epoch makes, where none lies."""
    stamp = note(cells, number, key, 0, 0, -1)
    place = add_cell(cells, number, key, word, stamp << STAMP_SHIFT | flags)
    cells.log[cells.control[LOG] - 1, LOG_PLACE] = place
    cells.rows[number, ROW_LIVE] += 1
    cells.control[LIVE] += 1


@inlined
def change_cell(cells: Any, number: int, place: int, word: int, flags: int) -> None:
    """Sets a cell that lies there. Without PRESENT among the flags it is gone."""
    control, pool = cells.control, cells.pool
    mark = pool[place, MARK]
    if (mark & PRESENT) != (flags & PRESENT):
        step = 1 if flags & PRESENT else -1
        cells.rows[number, ROW_LIVE] += step
        control[LIVE] += step
        control[GHOSTS] -= step
    if mark >> STAMP_SHIFT < control[SINCE]:
        stamp = note(cells, number, pool[place, KEY], pool[place, WORD], mark, place)
        pool[place, MARK] = stamp << STAMP_SHIFT | flags
    else:
        pool[place, MARK] = (mark & ~FLAGS) | flags
    pool[place, WORD] = word


@part
def write(cells: Any, row: int, key: int, word: int, flags: int) -> None:
    """Sets a cell, which is there from now on."""
    number = row_number(cells, row)
    if number < 0:
        number = new_row(cells, row)
    place = find_cell(cells, number, key)
    if place < 0:
        new_cell(cells, number, key, word, flags)
    else:
        change_cell(cells, number, place, word, flags)


@part
def add_to_cell(cells: Any, row: int, key: int, x: float) -> None:
    """Adds to a double. What is absent is 0.0, and there from now on."""
    number = row_number(cells, row)
    if number < 0:
        number = new_row(cells, row)
    place = find_cell(cells, number, key)
    if place < 0:
        new_cell(cells, number, key, as_word(0.0 + x), PRESENT)
        return
    pool = cells.pool
    mark = pool[place, MARK]
    if mark & PRESENT and mark >> STAMP_SHIFT >= cells.control[SINCE]:
        pool[place, WORD] = as_word(as_double(pool[place, WORD]) + x)
    else:
        before = as_double(pool[place, WORD]) if mark & PRESENT else 0.0
        change_cell(cells, number, place, as_word(before + x), PRESENT)


@part
def remove(cells: Any, row: int, key: int) -> bool:
    """Whether there was one."""
    number = row_number(cells, row)
    if number < 0:
        return False
    place = find_cell(cells, number, key)
    if place < 0 or not cells.pool[place, MARK] & PRESENT:
        return False
    change_cell(cells, number, place, 0, 0)
    return True


@part
def clear_number(cells: Any, number: int) -> None:
    start = cells.rows[number, ROW_START]
    for place in range(start, start + cells.rows[number, ROW_CELLS]):
        if cells.pool[place, MARK] & PRESENT:
            change_cell(cells, number, place, 0, 0)


@brief
def clear(cells: Any, row: int, whole: bool) -> None:
    """Removes the cells of a row, or of all."""
    if whole:
        for number in range(cells.control[ROWS]):
            if cells.rows[number, ROW_CLASS] >= 0:
                clear_number(cells, number)
    else:
        number = row_number(cells, row)
        if number >= 0:
            clear_number(cells, number)


@inlined
def as_of(cells: Any, limit: int, place: int) -> Any:
    """The mark and the word of a cell: as it is, or, where `limit` is BASE, as decided epochs left it."""
    pool = cells.pool
    mark, word = pool[place, MARK], pool[place, WORD]
    while mark >> STAMP_SHIFT >= limit:
        at = (mark >> STAMP_SHIFT) - limit
        mark, word = cells.log[at, LOG_MARK], cells.log[at, LOG_WORD]
    return mark, word


@inlined
def read(cells: Any, limit: int, row: int, key: int) -> Any:
    """The mark and the word of a cell, a mark without PRESENT where there is none."""
    number = row_number(cells, row)
    if number >= 0:
        place = find_cell(cells, number, key)
        if place >= 0:
            return as_of(cells, limit, place)
    return np.int64(0), np.int64(0)


@part
def note_dirty(cells: Any, row: int, key: int, is_new: bool) -> None:
    control = cells.control
    if is_new and control[REMOVED] > 0:
        control[TWICE] += 1
    count = control[DIRTY_PLACES]
    if count == cells.dirty.shape[0]:
        cells.dirty = grown(cells.dirty, count + 1)
    cells.dirty[count, 0] = row
    cells.dirty[count, 1] = key
    control[DIRTY_PLACES] = count + 1


@jit
def settle(cells: Any) -> None:
    """The epoch is decided."""
    control = cells.control
    count = control[LOG]
    if control[GRID]:
        follow(cells, True)
    for i in range(count):
        log, rows = cells.log, cells.rows
        number, mark = log[i, LOG_ROW], log[i, LOG_MARK]
        if mark != ROW_MADE and mark >> STAMP_SHIFT < control[BASE]:
            if mark >> STAMP_SHIFT < control[SAVED]:
                note_dirty(cells, rows[number, ROW_KEY], log[i, LOG_KEY], mark == 0)
            if control[GHOSTS] > 0:
                place = noted_cell(cells, i)
                if not cells.pool[place, MARK] & PRESENT:
                    take_cell(cells, number, place)
                    control[GHOSTS] -= 1
                    control[REMOVED] += 1
    _drop_empty(cells, count)
    _begin(cells, control[BASE] + count)


@part
def _drop_empty(cells: Any, count: int) -> None:
    """Lets go of rows in the log that have no cells."""
    for i in range(count):
        number = cells.log[i, LOG_ROW]
        if cells.rows[number, ROW_CELLS] == 0 and cells.rows[number, ROW_CLASS] >= 0:
            drop_row(cells, number)


@part
def _begin(cells: Any, base: int) -> None:
    control = cells.control
    control[BASE] = control[SINCE] = base
    control[LOG] = control[GRID_AT] = 0
    if cells.log.shape[0] > 1 << 16:
        cells.log = np.empty((0, LOG_FIELDS), np.int64)


@brief
def mark(cells: Any) -> Any:
    """A place in the log to come back to."""
    control = cells.control
    control[SINCE] = control[BASE] + control[LOG]
    return control[LOG]


@jit
def undo_to(cells: Any, to: int) -> None:
    """Takes back what was done since `mark` gave that place."""
    control = cells.control
    count = control[LOG]
    for i in range(count - 1, to - 1, -1):
        log = cells.log
        number, key, word, mark_ = log[i, LOG_ROW], log[i, LOG_KEY], log[i, LOG_WORD], log[i, LOG_MARK]
        if mark_ == ROW_MADE:
            drop_row(cells, number)
            continue
        if i < control[GRID_AT]:
            set_in_grid(cells, number, key, word, mark_)
        place = noted_cell(cells, i)
        now, was = cells.pool[place, MARK] & PRESENT, mark_ & PRESENT
        control[LIVE] += was - now
        cells.rows[number, ROW_LIVE] += was - now
        if now == 0:
            control[GHOSTS] -= 1
        if mark_ == 0:
            take_cell(cells, number, place)
            continue
        if was == 0:
            control[GHOSTS] += 1
        cells.pool[place, WORD] = word
        cells.pool[place, MARK] = mark_
    control[GRID_AT] = min(control[GRID_AT], to)
    control[LOG] = to
    control[SINCE] = control[BASE] + to
    if to == 0:
        _begin(cells, control[BASE])


@jit
def clean(cells: Any) -> None:
    """All that is decided is saved. What an undecided epoch has changed will be dirty when it is decided."""
    control = cells.control
    control[SAVED] = control[BASE]
    control[DIRTY_PLACES] = control[REMOVED] = control[TWICE] = 0
    cells.dirty = np.empty((0, 2), np.int64)
