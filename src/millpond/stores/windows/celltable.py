"""Keys and their cells: what is changed in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels import control
from millpond.schema import KeyKind
from millpond.stores.growing import grown
from millpond.stores.key_index import KeyIndex
from millpond.stores.keys import Keys
from millpond.stores.windows.cells import CellLayout, Cells

Longs = NDArray[np.int64]


class Fired(NamedTuple):
    """Windows of keys, and what became of them. Of all time there are no `starts` and `ends`."""

    keys: Keys
    starts: Longs
    ends: Longs
    columns: dict[str, pa.Array]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def nbytes(self) -> int:
        columns = sum(int(column.nbytes) for column in self.columns.values())
        return int(self.keys.nbytes) + 16 * len(self) + columns


def new_index(kind: KeyKind) -> KeyIndex:
    return KeyIndex(kind, np.zeros(control.SIZE, np.int64))


class GrowingCells:
    """Cells with room for more; those that are not used yet have taken in nothing."""

    def __init__(self, layout: CellLayout) -> None:
        self._layout = layout
        self._cells = layout.zeros(0)
        self._used = 0

    def reserve(self, rows: int) -> Cells:
        """Cells of so many rows at least."""
        if rows > self._used:
            longs = grown(self._cells.longs, self._used, rows)
            doubles = grown(self._cells.doubles, self._used, rows)
            if len(longs) > self._used:
                new = self._layout.zeros(rows - self._used)
                longs[self._used : rows], doubles[self._used : rows] = new
            self._cells, self._used = Cells(longs, doubles), rows
        return self._cells

    def clear(self, rows: Longs) -> None:
        """These have taken in nothing again."""
        zeros = self._layout.zeros(1)
        self._cells.longs[rows], self._cells.doubles[rows] = zeros.longs[0], zeros.doubles[0]

    @property
    def nbytes(self) -> int:
        return self._cells.nbytes


class CellTable:
    """The keys of one window or pane, each with its cells."""

    def __init__(self, kind: KeyKind, layout: CellLayout) -> None:
        self._kind = kind
        self._layout = layout
        self._index = new_index(kind)
        self._cells = GrowingCells(layout)

    def __len__(self) -> int:
        return len(self._index)

    def take_in(self, keys: Keys, cells: Cells) -> None:
        """Cells of keys, of which one may come several times."""
        if not len(self._index):
            self._index.reserve(len(keys), keys.nbytes)
        entries = self._index.assign(keys)
        self._layout.merge(entries, cells, self._cells.reserve(len(self._index)))

    def take_in_tables(self, others: Sequence[CellTable]) -> None:
        every = [other.all() for other in others if len(other)]
        if every:
            cells = Cells(
                np.concatenate([own.longs for _, own in every]),
                np.concatenate([own.doubles for _, own in every]),
            )
            self.take_in(Keys.concat([keys for keys, _ in every]), cells)

    def take_in_all(self, other: CellTable) -> None:
        self.take_in(*other.all())

    def all(self) -> tuple[Keys, Cells]:
        """Every key, with its cells. Shares memory: to be read at once."""
        count = len(self._index)
        longs, doubles = self._cells.reserve(count)
        return self._index.stored_keys(), Cells(longs[:count], doubles[:count])

    def find(self, keys: Keys) -> tuple[Longs, Cells]:
        """Which of the keys are there, and their cells."""
        entries = self._index.find(keys)
        there = np.flatnonzero(entries >= 0)
        return there, self._cells.reserve(len(self)).take(entries[there])

    def place_of(self, keys: Keys) -> Longs:
        """Where in `all` the keys are, -1 for one that is not there."""
        return self._index.find(keys)

    def copy(self) -> CellTable:
        other = CellTable(self._kind, self._layout)
        other.take_in_all(self)
        return other

    @property
    def nbytes(self) -> int:
        return self._index.nbytes + self._cells.nbytes

    def validate(self) -> None:
        self._index.validate()


class CellOverlay(CellTable):
    """A table on top of one that stays as it is: what it takes in it keeps itself, with the cells that were there of those keys."""

    def __init__(self, kind: KeyKind, layout: CellLayout, below: CellTable) -> None:
        super().__init__(kind, layout)
        self._below = below
        self._fresh = 0  # of its keys, those that are not below

    def __len__(self) -> int:
        return len(self._below) + self._fresh

    def take_in(self, keys: Keys, cells: Cells) -> None:
        known = len(self._index)
        entries = self._index.assign(keys)
        count = len(self._index)
        own = self._cells.reserve(count)
        if count > known:
            new = self._index.stored_keys().take(np.arange(known, count))
            there, lower = self._below.find(new)
            own.longs[known + there], own.doubles[known + there] = lower
            self._fresh += len(new) - len(there)
        self._layout.merge(entries, cells, own)

    def all(self) -> tuple[Keys, Cells]:
        keys, cells = self._below.all()
        own_keys, own = super().all() if len(self._index) else (None, cells)
        if own_keys is None:
            return keys, cells
        places = self._below.place_of(own_keys)
        there, fresh = np.flatnonzero(places >= 0), np.flatnonzero(places < 0)
        merged = []
        for lower, upper in zip(cells, own, strict=True):
            column = np.concatenate([lower, upper[fresh]])
            column[places[there]] = upper[there]
            merged.append(column)
        return Keys.concat([keys, own_keys.take(fresh)]), Cells(*merged)

    def find(self, keys: Keys) -> tuple[Longs, Cells]:
        entries = self._index.find(keys)
        mine, others = np.flatnonzero(entries >= 0), np.flatnonzero(entries < 0)
        there, lower = self._below.find(keys.take(others))
        own = self._cells.reserve(len(self._index)).take(entries[mine])
        found = np.concatenate([mine, others[there]])
        order = np.argsort(found)
        cells = Cells(*(np.concatenate(pair)[order] for pair in zip(own, lower, strict=True)))
        return found[order], cells
