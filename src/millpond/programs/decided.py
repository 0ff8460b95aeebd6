"""Elements as they were before an epoch that is not decided, which has changed them in place: for those who read meanwhile.

A *place* is where an entry is: the key in a map or vector, row and column in a matrix, the row in a dense one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from millpond.programs.elements import DenseMatrix, Element, Map


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


class _OldMap(Map[Any, Any]):
    __slots__ = ()

    def __init__(self, entries: Any, key: str, value: str) -> None:
        super().__init__(key, value)
        self._own = entries


class _OldDense(DenseMatrix):
    __slots__ = ()

    def __init__(self, rows: Any) -> None:
        self._rows = rows


def as_it_was(kind: str, entries: Mapping[Any, Any], key: str = "", value: str = "") -> Element:
    """An element of that kind that is only read."""
    return _OldDense(entries) if kind == "dense" else _OldMap(entries, key, value)
