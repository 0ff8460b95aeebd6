"""Elements that know what has changed in them: since an epoch began that is not decided, and since they were last saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from millpond.programs.decided import ABSENT, DecidedEntries, DecidedRows, Place, as_it_was
from millpond.programs.elements import DenseMatrix, Element, Map, Matrix, Vector

NUMBERS = ("long", "double", "boolean")
# What an entry takes in memory, about: what holds it, and each item of a list.
ENTRY_BYTES, ITEM_BYTES = 100, 32


def bytes_of(place: Place, value: Any) -> int:
    """What an entry takes in memory, about."""
    nbytes = ENTRY_BYTES + (len(place) if isinstance(place, str) else 0)
    match value:
        case str() | bytes():
            return nbytes + len(value)
        case np.ndarray():
            return nbytes + int(value.nbytes)
        case list():
            return nbytes + sum(ITEM_BYTES + (len(x) if isinstance(x, str) else 0) for x in value)
        case Element():
            return nbytes + ENTRY_BYTES * len(value)
    return nbytes


class Entries(dict[Any, Any]):
    """The entries of a map, a vector or a row: before the first change of one in an epoch it notes what was there.

    `old` is what was there, by place, and `row` what comes before the key in a place.
    """

    __slots__ = ("old", "row")

    def __init__(self, old: dict[Place, Any], row: int | None = None) -> None:
        super().__init__()
        self.old = old
        self.row = row

    def _note(self, key: Any) -> None:
        place = key if self.row is None else (self.row, key)
        if place not in self.old:
            self.old[place] = self.get(key, ABSENT)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._note(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        if key in self:
            self._note(key)
        super().__delitem__(key)

    def pop(self, key: Any, *default: Any) -> Any:
        if key in self:
            self._note(key)
        return super().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, other: Mapping[Any, Any]) -> None:  # type: ignore[override] # as elements use it
        for key, value in other.items():
            self[key] = value

    def clear(self) -> None:
        for key in self:
            self._note(key)
        super().clear()

    def popitem(self) -> tuple[Any, Any]:
        raise NotImplementedError("elements have no use for it")


class Rows(dict[int, Entries]):
    """The rows of a matrix. `made` are those that an epoch has made, which may have stayed empty."""

    __slots__ = ("made", "old")

    def __init__(self, old: dict[Place, Any]) -> None:
        super().__init__()
        self.old = old
        self.made: set[int] = set()

    def setdefault(self, row: int, default: Any = None) -> Entries:
        entries = self.get(row)
        if entries is None:
            entries = Entries(self.old, row)
            super().__setitem__(row, entries)
            self.made.add(row)
        return entries

    def __setitem__(self, row: int, entries: Mapping[int, float]) -> None:
        own = self.setdefault(row)
        own.clear()
        own.update(entries)

    def __delitem__(self, row: int) -> None:
        self[row].clear()
        super().__delitem__(row)

    def pop(self, row: int, *default: Any) -> Any:
        if row not in self:
            return super().pop(row, *default)
        entries = dict(self[row])
        del self[row]
        return entries

    def clear(self) -> None:
        for row in list(self):
            del self[row]

    def update(self, other: Mapping[int, Mapping[int, float]]) -> None:  # type: ignore[override] # as elements use it
        for row, entries in other.items():
            self[row] = entries


class Arrays(Entries):
    """The rows of a dense matrix, which change in place after they were set: what is noted is a copy."""

    __slots__ = ()

    def _note(self, key: Any) -> None:
        if key not in self.old:
            row = self.get(key, ABSENT)
            self.old[key] = row if row is ABSENT else row.copy()


class _TrackedMap(Map[Any, Any]):
    __slots__ = ("_tracked",)

    def __init__(self, key: str, value: str, tracked: Entries) -> None:
        self._tracked = tracked
        super().__init__(key, value)

    @property
    def _own(self) -> Entries:
        return self._tracked

    @_own.setter
    def _own(self, entries: Mapping[Any, Any]) -> None:
        self._tracked.clear()
        self._tracked.update(entries)

    def copy(self) -> Map[Any, Any]:  # type: ignore[override] # a copy is not part of the state
        made: Map[Any, Any] = Map(self._key, self._value)
        made.assign(self)
        return made


class _TrackedVector(Vector):
    __slots__ = ("_tracked",)

    def __init__(self, tracked: Entries) -> None:
        self._tracked = tracked
        super().__init__()

    @property
    def _own(self) -> Entries:
        return self._tracked

    @_own.setter
    def _own(self, entries: Mapping[int, float]) -> None:
        self._tracked.clear()
        self._tracked.update(entries)


class _TrackedMatrix(Matrix):
    __slots__ = ("_tracked",)

    def __init__(self, tracked: Rows) -> None:
        self._tracked = tracked
        super().__init__()

    @property  # type: ignore[override] # it is in place of the dict
    def _rows(self) -> Rows:
        return self._tracked

    @_rows.setter
    def _rows(self, rows: Mapping[int, Mapping[int, float]]) -> None:
        self._tracked.clear()
        self._tracked.update(rows)

    def copy(self) -> Matrix:  # type: ignore[override] # a copy is not part of the state
        made = Matrix()
        made.assign(self)
        return made


class _TrackedDense(DenseMatrix):
    __slots__ = ("_tracked",)

    def __init__(self, tracked: Arrays) -> None:
        self._tracked = tracked
        super().__init__()

    @property
    def _rows(self) -> Arrays:
        return self._tracked

    @_rows.setter
    def _rows(self, rows: Mapping[int, Any]) -> None:
        self._tracked.clear()
        self._tracked.update(rows)

    def copy(self) -> DenseMatrix:  # type: ignore[override] # a copy is not part of the state
        made = DenseMatrix()
        made.assign(self)
        return made


class Tracked:
    """An element with what has changed in it. `old` is what entries were before an epoch that is not decided."""

    __slots__ = ("_bytes", "_entries", "_is_even", "_rows", "dirty", "element", "kind", "old", "types")

    def __init__(self, kind: str, key: str = "", value: str = "") -> None:
        self.kind = kind
        self.types = (key, value)
        self.old: dict[Place, Any] = {}
        self.dirty: set[Place] = set()
        # Where entries do not all take the same, what decided ones take is counted.
        self._is_even = kind in ("matrix", "vector") or (key != "string" and value in NUMBERS)
        self._bytes = 0
        self._rows: DecidedRows | None = None
        self._entries: Any
        self.element: Element
        if kind == "matrix":
            self._entries = Rows(self.old)
            self.element = _TrackedMatrix(self._entries)
        elif kind == "dense":
            self._entries = Arrays(self.old)
            self.element = _TrackedDense(self._entries)
        else:
            self._entries = Entries(self.old)
            self.element = (
                _TrackedVector(self._entries) if kind == "vector" else _TrackedMap(key, value, self._entries)
            )

    def decided_element(self) -> Element:
        """The element as decided epochs left it, to be read at once: it does not last."""
        if not self.old:
            return self.element
        if self.kind == "matrix":
            if self._rows is None:
                self._rows = DecidedRows(self._entries, self.old)
            self._rows.note()
            return as_it_was(self.kind, self._rows)
        return as_it_was(self.kind, DecidedEntries(self._entries, self.old), *self.types)

    def get(self, place: Place) -> Any:
        """The value there, or ABSENT."""
        if self.kind == "matrix":
            row = self._entries.get(place[0])
            return ABSENT if row is None else row.get(place[1], ABSENT)
        return self._entries.get(place, ABSENT)

    def put(self, place: Place, value: Any) -> None:
        """Sets the entry, or deletes it where the value is ABSENT. No epoch's doing: it is neither noted nor dirty."""
        self._count(place, self.get(place), value)
        self._set(place, value)

    def _set(self, place: Place, value: Any) -> None:
        entries, key = self._entries, place
        if self.kind == "matrix":
            entries, key = self._entries.setdefault(place[0]), place[1]
        if value is ABSENT:
            dict.pop(entries, key, None)
            if self.kind == "matrix":
                self._drop_empty([place[0]])
        else:
            dict.__setitem__(entries, key, value)

    def change(self, place: Place, value: Any) -> None:
        """The same as an epoch's doing, of what is no matrix."""
        if value is ABSENT:
            self._entries.pop(place, None)
        else:
            self._entries[place] = value

    def _drop_empty(self, rows: Iterable[int]) -> None:
        """Lets go of these rows of a matrix, if nothing is left in them."""
        for row in rows:
            if not self._entries.get(row, True):
                dict.pop(self._entries, row)

    @property
    def nbytes(self) -> int:
        """What entries take in memory, about."""
        return ENTRY_BYTES * len(self) if self._is_even else self._bytes

    def _count(self, place: Place, was: Any, value: Any) -> None:
        if self._is_even:
            return
        if was is not ABSENT:
            self._bytes -= bytes_of(place, was)
        if value is not ABSENT:
            self._bytes += bytes_of(place, value)

    def changed(self) -> list[tuple[Place, Any]]:
        """What the epoch that is not decided has left, of entries that it has changed."""
        return [(place, self.get(place)) for place in self.old]

    def settle(self) -> None:
        """The epoch is decided."""
        self.dirty.update(self.old)
        if not self._is_even:
            for place, was in self.old.items():
                self._count(place, was, self.get(place))
        self._end_epoch()

    def put_back(self) -> None:
        """The epoch will not be decided."""
        for place, value in self.old.items():
            self._set(place, value)
        self._end_epoch()

    def _end_epoch(self) -> None:
        if self.kind == "matrix":
            self._drop_empty({place[0] for place in self.old} | self._entries.made)
            self._entries.made.clear()
        self._rows = None
        self.old.clear()

    def decided(self, places: Iterable[Place]) -> Iterator[tuple[Place, Any]]:
        """What entries hold without an epoch that is not decided."""
        for place in places:
            value = self.old.get(place, self)
            yield place, self.get(place) if value is self else value

    def items(self) -> Iterator[tuple[Place, Any]]:
        """All entries."""
        if self.kind != "matrix":
            yield from self._entries.items()
            return
        for row, entries in self._entries.items():
            for column, value in entries.items():
                yield (row, column), value

    def __len__(self) -> int:
        return sum(map(len, self._entries.values())) if self.kind == "matrix" else len(self._entries)

    def copy(self) -> Tracked:
        """With what an epoch that is not decided has changed, to be put back there, too."""
        other = Tracked(self.kind, *self.types)
        for place, value in self.items():
            other._set(place, value.copy() if self.kind == "dense" else value)
        other._bytes = self._bytes
        other.old.update(self.old)
        other.dirty = set(self.dirty)
        return other

    def validate(self) -> None:
        """Raises AssertionError if an invariant does not hold. For tests."""
        if self.kind == "matrix":
            assert all(entries.row == row for row, entries in self._entries.items())
            assert self.old or self._entries.made or all(self._entries.values()), "a row without entries"
        assert self._is_even or self._bytes == sum(
            bytes_of(place, value)
            for place, value in self.decided({*self.old, *(place for place, _ in self.items())})
            if value is not ABSENT
        )
