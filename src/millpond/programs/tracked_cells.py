"""Fields of cells, with what has changed in them; and which fields are of cells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from millpond.kernels import cells as at
from millpond.kernels.cells import FLAGS, NOW, PRESENT, new_cells
from millpond.programs.cells import CellMap, CellMatrix, CellVector, is_of_cells, kernels
from millpond.programs.columns import Columns, Longs, columns_of, pairs_in, values_of
from millpond.programs.decided import ABSENT, Place
from millpond.programs.elements import Element
from millpond.programs.tracking import ENTRY_BYTES, Items, Tracked, TrackedEntries

TWICE_MAX = 1 << 12
"""Places that may be among the dirty ones twice, before those are looked through; as many more as there are entries."""


def tracked(kind: str, key: str = "", value: str = "") -> Tracked:
    """An empty field."""
    return (TrackedCells if is_of_cells(kind, key, value) else TrackedEntries)(kind, key, value)


class TrackedCells(Tracked):
    """A matrix, a vector, or a map from longs to numbers."""

    __slots__ = ("_control", "cells")

    def __init__(self, kind: str, key: str = "", value: str = "", cells: Any = None) -> None:
        super().__init__(kind, key, value)
        self.cells = new_cells() if cells is None else cells
        self._control: Longs = kernels.arrays_of(self.cells)[0]
        self.element = self._element(NOW)

    def _element(self, limit: int) -> Element:
        if self.kind == "matrix":
            return CellMatrix(self.cells, limit)
        return (
            CellVector(self.cells, 0, limit)
            if self.kind == "vector"
            else CellMap(self.cells, *self.types, limit)
        )

    @property
    def is_columnar(self) -> bool:
        return True

    @property
    def is_changed(self) -> bool:
        return bool(self._control[at.LOG])

    def decided_element(self) -> Element:
        return self._element(int(self._control[at.BASE])) if self.is_changed else self.element

    def mark(self) -> int:
        """A moment in the epoch, to which `undo_to` leads back."""
        return int(kernels.mark(self.cells))

    def undo_to(self, mark: int) -> None:
        kernels.undo_to(self.cells, mark)

    def get(self, place: Place) -> Any:
        row, key = place if self.kind == "matrix" else (0, place)
        flags, word = kernels.get_word(self.cells, NOW, row, key)
        if not flags:
            return ABSENT
        return values_of(self.types[1], np.array([word], np.int64), np.array([flags], np.uint8))[0]

    def put(self, items: Items, *, dirty: bool = False) -> None:
        columns = items if isinstance(items, Columns) else columns_of(self.kind, self.types[1], items)
        arrays = (columns.rows, columns.keys, columns.words, columns.flags)
        kernels.put_columns(self.cells, *map(np.ascontiguousarray, arrays), dirty)

    def change(self, place: Place, value: Any) -> None:
        element: Any = self.element
        if value is ABSENT:
            del element[place]
        else:
            element[place] = value

    def changed(self) -> Items:
        return Columns(*kernels.changed_columns(self.cells))

    def settle(self) -> None:
        if self.is_changed:
            kernels.settle(self.cells)
            if self._control[at.TWICE] > self._control[at.LIVE] + TWICE_MAX:
                self._dirty_places()

    def put_back(self) -> None:
        if self.is_changed:
            kernels.undo_to(self.cells, 0)

    def _dirty_places(self) -> Longs:
        """Rows and keys, none of them twice."""
        count = int(self._control[at.DIRTY_PLACES])
        places: Longs = kernels.arrays_of(self.cells)[4][:count]
        if self._control[at.TWICE]:
            places[:] = places[np.lexsort((places[:, 1], places[:, 0]))]
            is_first = np.ones(count, np.bool_)
            is_first[1:] = (places[1:] != places[:-1]).any(axis=1)
            left = int(is_first.sum())
            places[:left] = places[is_first]
            self._control[at.DIRTY_PLACES], self._control[at.TWICE] = left, 0
            places = places[:left]
        return places

    def unsaved(self) -> Items:
        rows, keys = np.ascontiguousarray(self._dirty_places().T)
        return Columns(rows, keys, *kernels.decided_columns(self.cells, rows, keys))

    @property
    def dirty_count(self) -> int:
        return len(self._dirty_places())

    def clean(self) -> None:
        kernels.clean(self.cells)

    def entries(self) -> Items:
        return Columns(*kernels.all_columns(self.cells, NOW))

    def items(self) -> Iterator[tuple[Place, Any]]:
        return iter(pairs_in(self.kind, self.types[1], Columns(*kernels.all_columns(self.cells, NOW))))

    @property
    def nbytes(self) -> int:
        return ENTRY_BYTES * len(self)

    def __len__(self) -> int:
        return int(self._control[at.LIVE])

    def copy(self) -> TrackedCells:
        made = new_cells()
        kernels.copied(self.cells, made)
        return TrackedCells(self.kind, *self.types, made)

    def validate(self) -> None:
        control, rows, pool, _, _ = kernels.arrays_of(self.cells)
        in_use = [number for number in range(control[at.ROWS]) if rows[number, at.ROW_CLASS] >= 0]
        assert len(in_use) == control[at.ROWS_IN_USE]
        live = ghosts = 0
        for number in in_use:
            start, count = rows[number, at.ROW_START], rows[number, at.ROW_CELLS]
            assert count or control[at.LOG], "a row without entries"
            keys, marks = pool[start : start + count, at.KEY], pool[start : start + count, at.MARK]
            assert len(set(keys.tolist())) == count, "a key that is there twice"
            in_order = keys[: rows[number, at.ROW_SORTED]]
            assert (in_order[1:] > in_order[:-1]).all(), "out of order"
            here = int((marks & PRESENT).sum())
            assert here == rows[number, at.ROW_LIVE]
            live, ghosts = live + here, ghosts + int(count) - here
            for key, mark in zip(keys.tolist(), marks.tolist(), strict=True):
                flags, _ = kernels.get_word(self.cells, NOW, int(rows[number, at.ROW_KEY]), key)
                assert flags == mark & FLAGS, "a key that is not found"
            assert (marks >> at.STAMP_SHIFT < control[at.BASE] + control[at.LOG]).all(), "a mark from nowhere"
        assert (live, ghosts) == (control[at.LIVE], control[at.GHOSTS])
        assert not ghosts or control[at.LOG], "an entry that is gone and still there"
        places = [tuple(place) for place in self._dirty_places().tolist()]
        assert len(set(places)) == len(places)
