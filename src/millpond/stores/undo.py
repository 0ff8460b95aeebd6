"""What an epoch changes in tables, kept until the epoch is decided: the rows that it may write to, as they were."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import jit
from millpond.stores.growing import grown
from millpond.stores.tables import TableStore

Longs = NDArray[np.int64]


RowNumbers = tuple[Longs, int, int]
"""An array, a start and a step: every step-th number from the start on. Those that are no row's number are passed over."""

_SCAN = 64  # marks that are looked at in the time in which one row is sorted


class TableUndo:
    """One table as it was: how many rows it had, and the cells of those that are kept."""

    def __init__(self, store: TableStore) -> None:
        self._rows_before = store.count
        self._is_kept = np.zeros(store.count, np.uint8)
        self._whole: Longs | None = None
        self._rows: Longs = np.empty(0, np.int64)
        self._cells: Longs = np.empty((0, store.layout.width), np.int64)
        self._single: dict[int, Longs] = {}
        # What kernels keep of rows that they come to.
        self._late_count: Longs = np.zeros(1, np.int64)
        self._late_rows: Longs = np.empty(0, np.int64)
        self._late_cells: Longs = np.empty((0, store.layout.width), np.int64)

    def keep(self, store: TableStore, written: Sequence[RowNumbers]) -> None:
        """Keeps rows before anything is written to them. To be called once."""
        touches = sum(len(range(start, len(numbers), step)) for numbers, start, step in written)
        if 2 * touches > self._rows_before:
            self._whole = store.cells[: self._rows_before].copy()  # faster than to pick half of them
            self._is_kept[:] = 1
            return
        for numbers, start, step in written:
            _mark(numbers, start, step, self._is_kept)
        if _SCAN * touches > self._rows_before:
            self._rows = np.flatnonzero(self._is_kept.view(np.bool_))
        else:
            rows = np.concatenate([numbers[start::step] for numbers, start, step in written])
            self._rows = np.unique(rows[(rows >= 0) & (rows < self._rows_before)])
        self._cells = store.cells.take(self._rows, axis=0)

    def keep_row(self, store: TableStore, row: int) -> None:
        """Keeps one row, before it is written to."""
        if self._whole is None and row < self._rows_before and not self._is_kept[row]:
            self._single[row] = store.cells[row].copy()
            self._is_kept[row] = 1

    def make_room(self) -> None:
        """For rows that kernels keep, if there is none left."""
        count = int(self._late_count[0])
        if count == len(self._late_rows):
            rows = grown(self._late_rows, count, max(1024, 2 * count))
            self._late_cells = grown(self._late_cells, count, len(rows))
            self._late_rows = rows

    @property
    def late(self) -> tuple[NDArray[np.uint8], Longs, Longs, Longs]:
        """For kernels: marks of rows, and the rows that they keep, with their cells and how many they are."""
        return self._is_kept, self._late_rows, self._late_cells, self._late_count

    def put_back(self, store: TableStore) -> None:
        # Rows that kernels made may not count yet, if the epoch broke off.
        rows = max(store.count, min(len(store.index), len(store.cells)))
        store.cells[self._rows_before : rows] = store.first
        if self._whole is not None:
            store.cells[: self._rows_before] = self._whole
        store.cells[self._rows] = self._cells
        for row, cells in self._single.items():
            store.cells[row] = cells
        late = int(self._late_count[0])
        store.cells[self._late_rows[:late]] = self._late_cells[:late]

    def mark(self, store: TableStore) -> None:
        """The epoch is decided: the rows that it may have written to are dirty, and new ones that are there."""
        store.dirty.fit(store.count)
        flags, before = store.dirty.flags, min(self._rows_before, store.count)
        if self._whole is not None:
            # Nobody noted which of them were written to.
            flags[:before] |= (store.cells[:before] != self._whole[:before]).any(axis=1)
        for rows in (self._rows, self._late_rows[: int(self._late_count[0])], np.array([*self._single], int)):
            flags[rows[rows < before]] = 1
        flags[before : store.count] |= store.cells[before : store.count, 0] != 0

    def cells_before(self, store: TableStore, rows: Longs) -> Longs:
        """What these rows, in ascending order, held before the epoch."""
        if self._whole is not None:
            cells = np.empty((len(rows), store.layout.width), np.int64)
            old = rows < self._rows_before
            cells[old] = self._whole[rows[old]]
        else:
            cells = store.cells[rows]
            late = int(self._late_count[0])
            _overlay(cells, rows, self._rows, self._cells)
            _overlay(cells, rows, self._late_rows[:late], self._late_cells[:late])
            if self._single:
                _overlay(cells, rows, np.array([*self._single]), np.stack([*self._single.values()]))
        cells[rows >= self._rows_before] = store.first
        return cells

    @property
    def nbytes(self) -> int:
        whole = 0 if self._whole is None else int(self._whole.nbytes)
        return (
            whole
            + int(self._cells.nbytes + self._rows.nbytes + self._late_cells.nbytes + self._late_rows.nbytes)
            + sum(c.nbytes for c in self._single.values())
        )


class Undo:
    """The way back from one epoch.

    It fits the stores that the epoch ran over and copies of them, as long as no other epoch has run since and no
    compaction has given rows other numbers.
    """

    def __init__(self, stores: Mapping[str, TableStore]) -> None:
        self.tables = {name: TableUndo(store) for name, store in stores.items()}

    def put_back(self, stores: Mapping[str, TableStore]) -> None:
        """Makes the tables hold what they held before the epoch."""
        for name, table in self.tables.items():
            if name in stores:  # else it was forgotten since
                table.put_back(stores[name])

    def mark(self, stores: Mapping[str, TableStore]) -> None:
        """The epoch is decided: what it has changed is dirty."""
        for name, table in self.tables.items():
            if name in stores:
                table.mark(stores[name])

    def cells_before(self, name: str, store: TableStore) -> Callable[[Longs], Longs] | None:
        """Tells what rows of a table held before the epoch; None where the epoch has nothing to do with it."""
        return partial(self.tables[name].cells_before, store) if name in self.tables else None

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self.tables.values())


def _overlay(cells: Longs, rows: Longs, kept_rows: Longs, kept: Longs) -> None:
    """Puts what was kept of some rows, in any order, in its place among these."""
    at = np.searchsorted(rows, kept_rows)
    at[at == len(rows)] = 0
    found = rows[at] == kept_rows if len(rows) else np.zeros(len(at), np.bool_)
    cells[at[found]] = kept[found]


@jit
def _mark(numbers: Longs, start: int, step: int, marks: NDArray[np.uint8]) -> None:
    for j in range(start, numbers.shape[0], step):
        if 0 <= numbers[j] < marks.shape[0]:
            marks[numbers[j]] = 1
