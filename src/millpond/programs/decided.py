"""Elements as they were before an epoch that is not decided, which has changed them in place: for those who read meanwhile.

A *place* is where an entry is: the key in a map or vector, row and column in a matrix, the row in a dense one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from millpond.programs.elements import DenseMatrix, Element, Map, Matrix, Vector


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Any = _Absent()
"""In place of a value: there is no entry."""
Place = Any


class DecidedEntries(Mapping[Any, Any]):
    """Entries as they were before the epoch that is not decided: `old` over what there is now."""

    def __init__(self, entries: Mapping[Any, Any], old: Mapping[Place, Any]) -> None:
        self._entries = entries
        self._old = old

    def __getitem__(self, key: Any) -> Any:
        if key not in self._old:
            return self._entries[key]
        value = self._old[key]
        if value is ABSENT:
            raise KeyError(key)
        return value

    def __iter__(self) -> Iterator[Any]:
        yield from (key for key in self._entries if key not in self._old)
        yield from (key for key, value in self._old.items() if value is not ABSENT)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class DecidedRows(Mapping[int, Mapping[int, float]]):
    """The same of the rows of a matrix: those that the epoch has changed are copied when they are asked for, once."""

    def __init__(self, rows: Mapping[int, Mapping[int, float]], old: Mapping[Place, Any]) -> None:
        self._now = rows
        self._old = old
        self._changed: dict[int, list[int]] = {}
        self._noted = 0
        self._copies: dict[int, dict[int, float]] = {}

    def note(self) -> None:
        """Goes on to what has changed since. A copy that was made before holds what is decided of all its row."""
        if self._noted < len(self._old):
            for row, column in islice(self._old, self._noted, None):
                self._changed.setdefault(row, []).append(column)
            self._noted = len(self._old)

    def __getitem__(self, row: int) -> Mapping[int, float]:
        columns = self._changed.get(row)
        if columns is None:
            return self._now[row]
        if row not in self._copies:
            copy: dict[int, float] = dict(self._now.get(row, {}))
            for column in columns:
                value = self._old[row, column]
                if value is ABSENT:
                    copy.pop(column, None)
                else:
                    copy[column] = value
            self._copies[row] = copy
        return self._copies[row]

    def __iter__(self) -> Iterator[int]:
        yield from self._now
        yield from (row for row in self._changed if row not in self._now)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _OldMap(Map[Any, Any]):
    __slots__ = ()

    def __init__(self, entries: Any, key: str, value: str) -> None:
        super().__init__(key, value)
        self._own = entries


class _OldVector(Vector):
    __slots__ = ()

    def __init__(self, entries: Any) -> None:
        self._own = entries


class _OldMatrix(Matrix):
    __slots__ = ()

    def __init__(self, rows: Any) -> None:
        self._rows = rows


class _OldDense(DenseMatrix):
    __slots__ = ()

    def __init__(self, rows: Any) -> None:
        self._rows = rows


def as_it_was(kind: str, entries: Mapping[Any, Any], key: str = "", value: str = "") -> Element:
    """An element of that kind that is only read."""
    match kind:
        case "matrix":
            return _OldMatrix(entries)
        case "dense":
            return _OldDense(entries)
        case "vector":
            return _OldVector(entries)
    return _OldMap(entries, key, value)
