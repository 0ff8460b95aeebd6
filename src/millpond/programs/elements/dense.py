"""Matrices whose rows are full."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Self, overload

import numpy as np
from numpy.typing import NDArray

from millpond.programs.elements.element import Element, index_of

Row = NDArray[np.float64]


class DenseMatrix(Element):
    """Rows of doubles, each a list from column 0 on. Rows are any longs; what is absent is 0.0, or an empty row.

    `m[r]` is a copy of the row, to change one write `m[r, c] = x` or `m[r] = row`. Of a partitioned field, the row is the key.
    """

    TYPE = "dense"
    __slots__ = ("_rows",)

    def __init__(self, rows: Mapping[int, Sequence[float]] | Sequence[Sequence[float]] | None = None) -> None:
        self._rows: dict[int, Row] = {}
        pairs = rows.items() if isinstance(rows, Mapping) else enumerate(rows or ())
        for index, row in pairs:
            self[index] = row

    @overload
    def __getitem__(self, place: int) -> list[float]: ...
    @overload
    def __getitem__(self, place: tuple[int, int]) -> float: ...
    def __getitem__(self, place: int | tuple[int, int]) -> list[float] | float:
        if isinstance(place, tuple):
            row = self._rows.get(index_of(place[0]))
            column = _column(place[1])
            return float(row[column]) if row is not None and column < len(row) else 0.0
        row = self._rows.get(index_of(place))
        return [] if row is None else [float(x) for x in row]

    @overload
    def __setitem__(self, place: int, value: Sequence[float]) -> None: ...
    @overload
    def __setitem__(self, place: tuple[int, int], value: float) -> None: ...
    def __setitem__(self, place: int | tuple[int, int], value: Sequence[float] | float) -> None:
        if not isinstance(place, tuple):
            self._rows[index_of(place)] = np.array(value, np.float64).reshape(-1)
            return
        index, column = index_of(place[0]), _column(place[1])
        row = self._rows.get(index, np.empty(0))
        if column >= len(row):
            row = np.concatenate([row, np.zeros(column + 1 - len(row))])
        self._rows[index] = row
        row[column] = value

    def __delitem__(self, row: int) -> None:
        """Nothing happens where there is no row."""
        self._rows.pop(index_of(row), None)

    def __contains__(self, row: int) -> bool:
        return index_of(row) in self._rows

    def entries(self) -> dict[Hashable, Any]:
        """Rows, as lists."""
        return {r: self[r] for r in sorted(self._rows)}

    def keys(self) -> list[int]:
        """Rows that are there, ascending."""
        return sorted(self._rows)

    def add(self, other: DenseMatrix) -> None:
        """Add the other one to this one; a shorter row counts as if it went on with zeros."""
        for r, row in other._rows.items():
            mine = self._rows.get(r, np.empty(0))
            longer = np.zeros(max(len(mine), len(row)))
            longer[: len(mine)] = mine
            longer[: len(row)] += row
            self._rows[r] = longer

    def __add__(self, other: DenseMatrix) -> DenseMatrix:
        made = self.copy()
        made.add(other)
        return made

    def __truediv__(self, number: float) -> DenseMatrix:
        return DenseMatrix({r: list(row / number) for r, row in self._rows.items()})

    def copy(self) -> Self:
        made = type(self)()
        made.assign(self)
        return made

    def assign(self, other: DenseMatrix) -> None:
        self._rows = {r: row.copy() for r, row in other._rows.items()}

    def clear(self) -> None:
        self._rows = {}


def _column(key: Any) -> int:
    column = index_of(key)
    if column < 0:
        raise IndexError(f"columns of a DenseMatrix go from 0 on, and {column} is below")
    return column
