"""Memory comes to an end: tables and their strings, rebuilt without what nothing refers to any more.

A key that was only asked for has a row number all the same, and the strings of all events have numbers. Between two
epochs, neither is needed, unless the row is there, or has changed since it was saved, or the string is part of one.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from millpond.stores.strings import Strings
from millpond.stores.tables import TableStore

COMPACT_ABOVE_BYTES = 4 << 20  # less is not worth a look


def compact(stores: Iterable[TableStore], above_bytes: int = COMPACT_ABOVE_BYTES) -> bool:
    """Rebuilds the stores that share one set of strings, all of them, if more than half of their memory is of no use.

    Cheap to call after every epoch: it looks only when they have doubled since it last looked. Rows and strings get
    other numbers, so that no undo may be outstanding; copies are not touched. What the tables hold does not change,
    and where memory runs out, nothing does.
    """
    tables = list(stores)
    if not tables:
        return False
    strings = tables[0].strings
    size = _size(strings, tables)
    if size < max(above_bytes, 2 * strings.size_when_looked_at):
        return False
    # A file may still hold rows that were deleted since it was written.
    rows = [np.union1d(np.flatnonzero(table.cells[: table.count, 0]), table.dirty.ids()) for table in tables]
    used = _used_strings(strings, tables, rows)
    smaller = strings.only(used)
    rebuilt = (
        sum(len(of) * table.row_bytes for of, table in zip(rows, tables, strict=True)) + smaller.used_bytes
    )
    worth = 2 * rebuilt < size
    if worth:
        number_of = np.cumsum(used) - 1
        made = [table.only(of, smaller, number_of) for of, table in zip(rows, tables, strict=True)]
        for table, new in zip(tables, made, strict=True):
            table.take_over(new)
        strings.take_over(smaller)
    strings.size_when_looked_at = rebuilt if worth else size
    return worth


def _size(strings: Strings, tables: list[TableStore]) -> int:
    return strings.used_bytes + sum(table.count * table.row_bytes for table in tables)


def _used_strings(
    strings: Strings, tables: list[TableStore], rows: list[NDArray[np.int64]]
) -> NDArray[np.bool_]:
    """Which strings are keys, stand in cells or are defaults. The empty one is always kept, as number 0."""
    used = np.zeros(len(strings), np.bool_)
    used[0] = True
    for table, of in zip(tables, rows, strict=True):
        for place in table.layout.string_keys:
            used[table.index.keys[of, place]] = True
        for cell in table.layout.string_cells:
            used[table.cells[of, cell]] = True
            used[table.first[cell]] = True
    return used
