"""Elements that know what has changed in them: since an epoch began that is not decided, and since they were last saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from millpond.programs.columns import Columns
from millpond.programs.decided import ABSENT, DecidedEntries, Place, as_it_was
from millpond.programs.elements import DenseMatrix, Element, Map
from millpond.programs.values import NUMBERS

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
    """The entries of a map: before the first change of one in an epoch it notes what was there. `old` is that, by place."""

    __slots__ = ("old",)

    def __init__(self, old: dict[Place, Any]) -> None:
        super().__init__()
        self.old = old

    def _note(self, key: Any) -> None:
        if key not in self.old:
            self.old[key] = self.get(key, ABSENT)

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

    def update(self, other: Mapping[Any, Any]) -> None:  # type: ignore[override] # as elements use it
        for key, value in other.items():
            self[key] = value

    def clear(self) -> None:
        for key in self:
            self._note(key)
        super().clear()

    def popitem(self) -> tuple[Any, Any]:
        raise NotImplementedError("elements have no use for it")


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


Items = list[tuple[Place, Any]] | Columns
"""Entries: places and values, ABSENT where there is none, or columns of them."""


class Tracked(ABC):
    """An element with what has changed in it."""

    __slots__ = ("element", "kind", "types")

    element: Element

    def __init__(self, kind: str, key: str = "", value: str = "") -> None:
        self.kind = kind
        self.types = (key, value)

    @property
    @abstractmethod
    def is_changed(self) -> bool:
        """Whether an epoch that is not decided has changed something."""

    @abstractmethod
    def decided_element(self) -> Element:
        """The element as decided epochs left it, to be read at once: it does not last."""

    @property
    def is_columnar(self) -> bool:
        """Whether compiled code takes the element."""
        return False

    @abstractmethod
    def get(self, place: Place) -> Any:
        """The value there, or ABSENT."""

    @abstractmethod
    def put(self, items: Items, *, dirty: bool = False) -> None:
        """Sets entries, or deletes them where the value is ABSENT. No epoch's doing: what was there is not noted."""

    @abstractmethod
    def change(self, place: Place, value: Any) -> None:
        """Sets one, or deletes it, as an epoch's doing."""

    @abstractmethod
    def changed(self) -> Items:
        """What the epoch that is not decided has left, of entries that it has changed."""

    @abstractmethod
    def settle(self) -> None:
        """The epoch is decided."""

    @abstractmethod
    def put_back(self) -> None:
        """The epoch will not be decided."""

    @abstractmethod
    def unsaved(self) -> Items:
        """What is dirty, without an epoch that is not decided."""

    @property
    @abstractmethod
    def dirty_count(self) -> int: ...

    @abstractmethod
    def clean(self) -> None:
        """All that is decided is saved."""

    @abstractmethod
    def entries(self) -> Items:
        """All entries as they are now."""

    @abstractmethod
    def items(self) -> Iterator[tuple[Place, Any]]:
        """The same, one by one."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """What entries take in memory, about."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def copy(self) -> Tracked:
        """With what an epoch that is not decided has changed, to be put back there, too."""

    @abstractmethod
    def validate(self) -> None:
        """Raises AssertionError if an invariant does not hold. For tests."""


class TrackedEntries(Tracked):
    """A map or a dense matrix. `old` is what entries were before an epoch that is not decided."""

    __slots__ = ("_bytes", "_entries", "_is_even", "dirty", "old")

    def __init__(self, kind: str, key: str = "", value: str = "") -> None:
        super().__init__(kind, key, value)
        self.old: dict[Place, Any] = {}
        self.dirty: set[Place] = set()
        # Where entries do not all take the same, what decided ones take is counted.
        self._is_even = kind == "map" and key != "string" and value in NUMBERS
        self._bytes = 0
        self._entries: Entries
        if kind == "dense":
            self._entries = Arrays(self.old)
            self.element = _TrackedDense(self._entries)
        else:
            self._entries = Entries(self.old)
            self.element = _TrackedMap(key, value, self._entries)

    @property
    def is_changed(self) -> bool:
        return bool(self.old)

    def decided_element(self) -> Element:
        if not self.old:
            return self.element
        return as_it_was(self.kind, DecidedEntries(self._entries, self.old), *self.types)

    def get(self, place: Place) -> Any:
        return self._entries.get(place, ABSENT)

    def put(self, items: Items, *, dirty: bool = False) -> None:
        assert isinstance(items, list)
        for place, value in items:
            self._count(place, self.get(place), value)
            self._set(place, value)
        if dirty:
            self.dirty.update(place for place, _ in items)

    def _set(self, place: Place, value: Any) -> None:
        if value is ABSENT:
            dict.pop(self._entries, place, None)
        else:
            dict.__setitem__(self._entries, place, value)

    def change(self, place: Place, value: Any) -> None:
        if value is ABSENT:
            self._entries.pop(place, None)
        else:
            self._entries[place] = value

    @property
    def nbytes(self) -> int:
        return ENTRY_BYTES * len(self) if self._is_even else self._bytes

    def _count(self, place: Place, was: Any, value: Any) -> None:
        if self._is_even:
            return
        if was is not ABSENT:
            self._bytes -= bytes_of(place, was)
        if value is not ABSENT:
            self._bytes += bytes_of(place, value)

    def changed(self) -> Items:
        return [(place, self.get(place)) for place in self.old]

    def settle(self) -> None:
        self.dirty.update(self.old)
        if not self._is_even:
            for place, was in self.old.items():
                self._count(place, was, self.get(place))
        self.old.clear()

    def put_back(self) -> None:
        for place, value in self.old.items():
            self._set(place, value)
        self.old.clear()

    def unsaved(self) -> Items:
        return list(self._decided(self.dirty))

    @property
    def dirty_count(self) -> int:
        return len(self.dirty)

    def clean(self) -> None:
        self.dirty.clear()

    def _decided(self, places: Iterable[Place]) -> Iterator[tuple[Place, Any]]:
        """What entries hold without an epoch that is not decided."""
        for place in places:
            value = self.old.get(place, self)
            yield place, self.get(place) if value is self else value

    def entries(self) -> Items:
        return list(self._entries.items())

    def items(self) -> Iterator[tuple[Place, Any]]:
        yield from self._entries.items()

    def __len__(self) -> int:
        return len(self._entries)

    def copy(self) -> TrackedEntries:
        other = TrackedEntries(self.kind, *self.types)
        for place, value in self.items():
            other._set(place, value.copy() if self.kind == "dense" else value)
        other._bytes = self._bytes
        other.old.update(self.old)
        other.dirty = set(self.dirty)
        return other

    def validate(self) -> None:
        assert self._is_even or self._bytes == sum(
            bytes_of(place, value)
            for place, value in self._decided({*self.old, *(place for place, _ in self.items())})
            if value is not ABSENT
        )
