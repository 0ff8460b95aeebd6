"""Cells: numbers by row and key, in memory that compiled code can make grow. All that sparse fields of programs hold.

A cell has 64 bits, of a double or a long, and a mark. Those of a row lie together, in a stretch of `pool` that is twice as
long as the one before whenever it is full; from the ninth on an open-addressing table in `index` tells where a key is. Keys go to
places by secret hashes (`slot_hashing`): chosen ones make nothing slow. Rows are found by `slots`, and numbered; a number is
free again when its row is let go of.

A mark is the number of the record in the log that notes what the cell was before (see `cell_log`), and below it two bits:
NULL, PRESENT. A cell that is not PRESENT lies where it was until its epoch ends. One whose record is not older than SAVED is dirty: it
has changed since all was saved.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numba import types
from numba.experimental import structref
from numba.extending import intrinsic
from numpy.typing import NDArray

from millpond.kernels._jit import JIT_ENABLED, inlined, jit, part
from millpond.kernels.rows import hash_key
from millpond.kernels.slot_hashing import make_secret

Longs = NDArray[np.int64]
Doubles = NDArray[np.float64]

# Marks.
PRESENT, NULL = 1, 2
FLAGS = PRESENT | NULL
STAMP_SHIFT = 2

# Columns of `rows`, of `pool` and of `log`.
ROW_KEY, ROW_START, ROW_CLASS, ROW_CELLS, ROW_LIVE, ROW_SORTED = range(6)
ROW_FIELDS = 6
KEY, WORD, MARK = range(3)
LOG_ROW, LOG_KEY, LOG_WORD, LOG_MARK, LOG_PLACE = range(5)
LOG_FIELDS = 5
ROW_MADE = -1  # in place of a mark in the log: the row was made

# Places in `control`.
ROWS = 0  # row numbers that were ever used
ROWS_FREE = 1  # the first one that is free, +1
ROWS_IN_USE = 2
LIVE = 3  # cells that are present
GHOSTS = 4  # cells that an epoch has removed
POOL = 5  # how much of the pool was ever used
LOG = 6  # records in the log
BASE = 7  # the number of its first one
SINCE = 8  # cells that were noted by this record, or a later one, need no other
DIRTY_PLACES = 9
REMOVED = 10  # cells that were removed since all was saved
ORDERED = 11  # whether `order` is that of the rows
GRID = 12  # whether there is one
GRID_ROWS = 13  # room in it
GRID_COLUMNS = 14
GRID_USED = 15  # columns that it has
GRID_AT = 16  # it is as after so many records
WORK = 17  # what multiplications without one have cost
TWICE = 18  # dirty places that may be there twice
SAVED = 19  # the number of the first record since all was saved
FREE = 24  # stretches that are free, +1, by class
CONTROL_SIZE = 64

CLASS_CELLS = 4  # of a stretch of class 0; each class has twice as many
UNINDEXED = 8  # a stretch of so many cells is searched through
NOW = (1 << 62) - 1
"""In place of the number of a record: as all is now. With `BASE` cells are read as decided epochs left them."""

_FIELDS: list[tuple[str, Any]] = [
    ("control", types.int64[::1]),
    ("secret", types.uint64[::1]),
    ("slots", types.int64[:, ::1]),
    ("rows", types.int64[:, ::1]),
    ("pool", types.int64[:, ::1]),
    ("index", types.int32[::1]),
    ("log", types.int64[:, ::1]),
    ("dirty", types.int64[:, ::1]),
    ("order", types.int64[::1]),
    ("grid", types.float64[::1]),
    ("there", types.uint64[::1]),
    ("columns", types.int64[:, ::1]),
]


_structs: Any = structref  # it has no types


class Cells(structref.StructRefProxy):
    """What Python holds of cells."""


@_structs.register
class CellsType(types.StructRef):
    """What compiled code holds of them."""


_structs.define_boxing(CellsType, Cells)
_cells_type: Any = CellsType
CELLS = _cells_type(_FIELDS)

as_double: Any
"""The double that the 64 bits of a long are."""
as_word: Any
"""And back."""
blank_cells: Any


def _bits_as(source: Any, target: Any) -> Any:
    def typed(typing_context: Any, value: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], context.get_value_type(target))

        return target(source), code

    return intrinsic(typed)


if JIT_ENABLED:
    as_double, as_word = _bits_as(types.int64, types.float64), _bits_as(types.float64, types.int64)

    def _blank() -> Any:
        return _structs.new(CELLS)

    blank_cells = part(_blank)
else:

    class _Plain:
        pass

    def as_double(word: Any) -> Any:
        return np.array([word], np.int64).view(np.float64)[0]

    def as_word(x: Any) -> Any:
        return np.array([x], np.float64).view(np.int64)[0]

    blank_cells = _Plain


@jit
def _new_cells(
    control: Longs, secret: Any, slots: Longs, rows: Longs, pool: Longs, index: Any, pairs: Longs
) -> Any:
    cells = blank_cells()
    cells.control = control
    cells.secret = secret
    cells.slots = slots
    cells.rows = rows
    cells.pool = pool
    cells.index = index
    cells.log = np.empty((0, LOG_FIELDS), np.int64)
    cells.dirty = pairs
    cells.order = np.empty(0, np.int64)
    cells.grid = np.empty(0, np.float64)
    cells.there = np.empty(0, np.uint64)
    cells.columns = pairs.copy()
    return cells


def new_cells(secret: Any = None) -> Any:
    """Cells without any."""
    control = np.zeros(CONTROL_SIZE, np.int64)
    control[BASE] = control[SINCE] = control[SAVED] = 1
    rows = np.zeros((1, ROW_FIELDS), np.int64)
    rows[0, ROW_CLASS] = -1
    secret = make_secret(os.urandom(48)) if secret is None else secret
    slots, pool = np.zeros((4, 2), np.int64), np.empty((CLASS_CELLS, 3), np.int64)
    index = np.zeros(2 * CLASS_CELLS, np.int32)
    return _new_cells(control, secret, slots, rows, pool, index, np.empty((0, 2), np.int64))


@part
def grown(old: Longs, wanted: int) -> Longs:
    """The same, with room for so many and more."""
    size = old.shape[0]
    size = max(wanted, 2 * size if size < 1 << 20 else size + (size >> 1), 4)
    new = np.empty((size, old.shape[1]), np.int64)
    copy_cells(old, 0, new, 0, old.shape[0])
    return new


@part
def copy_cells(source: Longs, start: int, target: Longs, to: int, count: int) -> None:
    # A loop: numba takes seconds to compile what is assigned to a slice.
    for i in range(count):
        for j in range(source.shape[1]):
            target[to + i, j] = source[start + i, j]


# Rows


@inlined
def row_slot(row: int, hash_: int, slots: Longs) -> Any:
    """The slot that has the row, or the empty one where it would go. Equal hashes are those of equal longs."""
    mask = slots.shape[0] - 1
    slot = hash_ & mask
    while slots[slot, 1] != 0 and slots[slot, 0] != hash_:
        slot = (slot + 1) & mask
    return slot


@inlined
def row_number(cells: Any, row: int) -> Any:
    """Of a row that there is; else -1."""
    rows = cells.rows
    if rows[0, ROW_KEY] == row and rows[0, ROW_CLASS] >= 0:
        return np.int64(0)
    slots = cells.slots
    return slots[row_slot(row, hash_key((row,), cells.secret), slots), 1] - 1


@part
def make_row(cells: Any, row: int) -> Any:
    """The number of a new row."""
    control, slots = cells.control, cells.slots
    if 2 * control[ROWS_IN_USE] >= slots.shape[0]:
        larger = np.zeros((2 * slots.shape[0], 2), np.int64)
        for at in range(slots.shape[0]):
            if slots[at, 1] != 0:
                place = row_slot(0, slots[at, 0], larger)
                larger[place, 0] = slots[at, 0]
                larger[place, 1] = slots[at, 1]
        cells.slots = larger
        slots = larger
    number = control[ROWS_FREE] - 1
    if number >= 0:
        control[ROWS_FREE] = cells.rows[number, ROW_START]
    else:
        number = control[ROWS]
        if number == cells.rows.shape[0]:
            cells.rows = grown(cells.rows, number + 1)
        control[ROWS] = number + 1
    rows = cells.rows
    start = take_stretch(cells, 0)
    rows[number, ROW_KEY] = row
    rows[number, ROW_START] = start
    rows[number, ROW_CLASS] = 0
    rows[number, ROW_CELLS] = 0
    rows[number, ROW_LIVE] = 0
    rows[number, ROW_SORTED] = 0
    hash_ = hash_key((row,), cells.secret)
    slot = row_slot(row, hash_, slots)
    slots[slot, 0] = hash_
    slots[slot, 1] = number + 1
    control[ROWS_IN_USE] += 1
    control[ORDERED] = 0
    return number


@part
def drop_row(cells: Any, number: int) -> None:
    """Lets go of a row without cells."""
    control, slots, rows = cells.control, cells.slots, cells.rows
    mask = slots.shape[0] - 1
    row = rows[number, ROW_KEY]
    hole = row_slot(row, hash_key((row,), cells.secret), slots)
    slot = hole
    while True:
        slot = (slot + 1) & mask
        if slots[slot, 1] == 0:
            break
        if ((slot - slots[slot, 0]) & mask) >= ((slot - hole) & mask):
            slots[hole, 0] = slots[slot, 0]
            slots[hole, 1] = slots[slot, 1]
            hole = slot
    slots[hole, 1] = 0
    free_stretch(cells, rows[number, ROW_START], rows[number, ROW_CLASS])
    rows[number, ROW_CLASS] = -1
    rows[number, ROW_START] = control[ROWS_FREE]
    control[ROWS_FREE] = number + 1
    control[ROWS_IN_USE] -= 1
    control[ORDERED] = 0


# Stretches of the pool


@part
def take_stretch(cells: Any, class_: int) -> Any:
    control = cells.control
    size = CLASS_CELLS << class_
    start = control[FREE + class_] - 1
    if start >= 0:
        control[FREE + class_] = cells.pool[start, KEY]
    else:
        start = control[POOL]
        if start + size > cells.pool.shape[0]:
            cells.pool = grown(cells.pool, start + size)
            index = np.empty(2 * cells.pool.shape[0], np.int32)
            for i in range(2 * start):
                index[i] = cells.index[i]
            cells.index = index
        control[POOL] = start + size
    return start


@part
def free_stretch(cells: Any, start: int, class_: int) -> None:
    control = cells.control
    cells.pool[start, KEY] = control[FREE + class_]
    control[FREE + class_] = start + 1


@part
def index_row(cells: Any, number: int) -> None:
    """Makes the table anew that tells where keys are in the stretch of a row."""
    rows, pool, index, secret = cells.rows, cells.pool, cells.index, cells.secret
    size = CLASS_CELLS << rows[number, ROW_CLASS]
    if size <= UNINDEXED:
        return
    start, mask = rows[number, ROW_START], 2 * size - 1
    for i in range(2 * start, 2 * (start + size)):
        index[i] = 0
    for i in range(rows[number, ROW_CELLS]):
        slot = hash_key((pool[start + i, KEY],), secret) & mask
        while index[2 * start + slot] != 0:
            slot = (slot + 1) & mask
        index[2 * start + slot] = i + 1


# Cells


@inlined
def find_cell(cells: Any, number: int, key: int) -> Any:
    """Where the cell of that key lies in the pool, or -1."""
    rows, pool = cells.rows, cells.pool
    start, size = rows[number, ROW_START], CLASS_CELLS << rows[number, ROW_CLASS]
    if size <= UNINDEXED:
        for i in range(start, start + rows[number, ROW_CELLS]):
            if pool[i, KEY] == key:
                return i
        return np.int64(-1)
    index = cells.index
    mask = 2 * size - 1
    slot = hash_key((key,), cells.secret) & mask
    while True:
        i = index[2 * start + slot]
        if i == 0:
            return np.int64(-1)
        if pool[start + i - 1, KEY] == key:
            return start + i - 1
        slot = (slot + 1) & mask


@inlined
def noted_cell(cells: Any, record: int) -> Any:
    """Where the cell lies of which that record in the log tells: mostly where it did."""
    log, rows = cells.log, cells.rows
    number, key, place = log[record, LOG_ROW], log[record, LOG_KEY], log[record, LOG_PLACE]
    start = rows[number, ROW_START]
    if start <= place < start + rows[number, ROW_CELLS] and cells.pool[place, KEY] == key:
        return place
    return find_cell(cells, number, key)


@part
def add_cell(cells: Any, number: int, key: int, word: int, mark: int) -> Any:
    """A cell of a key that the row has not; where it lies."""
    rows = cells.rows
    used, class_ = rows[number, ROW_CELLS], rows[number, ROW_CLASS]
    if used == CLASS_CELLS << class_:
        old = rows[number, ROW_START]
        new = take_stretch(cells, class_ + 1)
        pool = cells.pool
        copy_cells(pool, old, pool, new, used)
        free_stretch(cells, old, class_)
        class_ += 1
        rows[number, ROW_START] = new
        rows[number, ROW_CLASS] = class_
        index_row(cells, number)
    pool, start = cells.pool, rows[number, ROW_START]
    pool[start + used, KEY] = key
    pool[start + used, WORD] = word
    pool[start + used, MARK] = mark
    if rows[number, ROW_SORTED] == used and (used == 0 or pool[start + used - 1, KEY] < key):
        rows[number, ROW_SORTED] = used + 1
    rows[number, ROW_CELLS] = used + 1
    size = CLASS_CELLS << class_
    if size > UNINDEXED:
        index, mask = cells.index, 2 * size - 1
        slot = hash_key((key,), cells.secret) & mask
        while index[2 * start + slot] != 0:
            slot = (slot + 1) & mask
        index[2 * start + slot] = used + 1
    return start + used


@part
def take_cell(cells: Any, number: int, place: int) -> None:
    """Takes a cell out of its row; the last one goes where it was."""
    rows, pool, index, secret = cells.rows, cells.pool, cells.index, cells.secret
    start, size = rows[number, ROW_START], CLASS_CELLS << rows[number, ROW_CLASS]
    last = start + rows[number, ROW_CELLS] - 1
    rows[number, ROW_CELLS] -= 1
    rows[number, ROW_SORTED] = min(rows[number, ROW_SORTED], place - start)
    if size > UNINDEXED:
        mask, at = 2 * size - 1, 2 * start
        hole = hash_key((pool[place, KEY],), secret) & mask
        while index[at + hole] != place - start + 1:
            hole = (hole + 1) & mask
        slot = hole
        while True:
            slot = (slot + 1) & mask
            i = index[at + slot]
            if i == 0:
                break
            home = hash_key((pool[start + i - 1, KEY],), secret) & mask
            if ((slot - home) & mask) >= ((slot - hole) & mask):
                index[at + hole] = i
                hole = slot
        index[at + hole] = 0
        if place != last:
            slot = hash_key((pool[last, KEY],), secret) & mask
            while index[at + slot] != last - start + 1:
                slot = (slot + 1) & mask
            index[at + slot] = place - start + 1
    for j in range(3):
        pool[place, j] = pool[last, j]
