"""Sparse matrices, kept by row."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Self, overload

from millpond.programs.elements.element import Element, index_of
from millpond.programs.elements.vector import Vector

_NOTHING: Mapping[int, float] = {}


class Matrix(Element):
    """Doubles by row and column, any longs; absent ones are 0.0. Of a partitioned field, the row is the key.

    `m[r]` is the row as it is in the matrix: what is done to it is done to the matrix. A row that is needed after
    another field was accessed is a copy there, and cannot be changed any more.
    """

    TYPE = "matrix"
    __slots__ = ("_rows",)

    def __init__(self, entries: Mapping[tuple[int, int], float] | None = None) -> None:
        self._rows: dict[int, dict[int, float]] = {}
        for place, x in (entries or {}).items():
            self[place] = x

    @overload
    def __getitem__(self, place: int) -> Vector: ...
    @overload
    def __getitem__(self, place: tuple[int, int]) -> float: ...
    def __getitem__(self, place: int | tuple[int, int]) -> Vector | float:
        if isinstance(place, tuple):
            row, column = place
            return self._rows.get(index_of(row), _NOTHING).get(index_of(column), 0.0)
        return _Row(self._rows, index_of(place))

    @overload
    def __setitem__(self, place: int, value: Vector) -> None: ...
    @overload
    def __setitem__(self, place: tuple[int, int], value: float) -> None: ...
    def __setitem__(self, place: int | tuple[int, int], value: Vector | float) -> None:
        if isinstance(place, tuple):
            row, column = map(index_of, place)
            self._rows.setdefault(row, {})[column] = float(value)  # type: ignore[arg-type] # as overloaded
        elif isinstance(value, Vector):
            _Row(self._rows, index_of(place)).assign(value)
        else:
            raise TypeError(f"a row of a matrix is a Vector, not {value!r}")

    def __delitem__(self, place: int | tuple[int, int]) -> None:
        """Nothing happens where there is nothing."""
        if isinstance(place, tuple):
            row, column = place
            del _Row(self._rows, index_of(row))[column]
        else:
            self._rows.pop(index_of(place), None)

    def __contains__(self, place: int | tuple[int, int]) -> bool:
        if isinstance(place, tuple):
            row, column = map(index_of, place)
            return column in self._rows.get(row, _NOTHING)
        return bool(self._rows.get(index_of(place)))

    def entries(self) -> dict[Hashable, Any]:
        return {(r, c): self._rows[r][c] for r in sorted(self._rows) for c in sorted(self._rows[r])}

    def keys(self) -> list[int]:
        """Rows with entries, ascending."""
        return sorted(r for r, row in self._rows.items() if row)

    def column(self, index: int) -> Vector:
        """A copy of a column."""
        return Vector({r: row[index] for r, row in self._rows.items() if index in row})

    def multiply(self, vector: Vector) -> Vector:
        """The matrix times the vector: an entry for each row that has an entry where the vector has one."""
        made: dict[int, float] = {}
        theirs = dict(vector.items())
        wanted = theirs.keys()
        for r, row in self._rows.items():
            both = wanted & row.keys()
            if both:
                made[r] = sum([row[c] * theirs[c] for c in sorted(both)], 0.0)
        return Vector.of(made)

    def add(self, other: Matrix) -> None:
        """Add the other one to this one."""
        for r in other.keys():  # noqa: SIM118 - rows with entries
            self[r].add(other[r])

    def __add__(self, other: Matrix) -> Matrix:
        made = self.copy()
        made.add(other)
        return made

    def __truediv__(self, number: float) -> Matrix:
        return Matrix({place: x / number for place, x in self.entries().items()})  # type: ignore[misc] # its own keys

    def copy(self) -> Self:
        made = type(self)()
        made.assign(self)
        return made

    def assign(self, other: Matrix) -> None:
        self._rows = {r: dict(row) for r, row in other._rows.items() if row}

    def clear(self) -> None:
        self._rows = {}


class _Row(Vector):
    """A row where it is; nothing is made in the matrix before something is written."""

    __slots__ = ("_index", "_rows")

    def __init__(self, rows: dict[int, dict[int, float]], index: int) -> None:
        self._rows = rows
        self._index = index
        self._arrays = None

    @property
    def _entries(self) -> Mapping[int, float]:
        return self._rows.get(self._index, _NOTHING)

    def _changing(self) -> dict[int, float]:
        return self._rows.setdefault(self._index, {})
