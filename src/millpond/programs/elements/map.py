"""Maps: values by key."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, Generic, Self, TypeVar, overload

from millpond.programs.elements.element import Element
from millpond.programs.values import fit, zero_of

K = TypeVar("K")
V = TypeVar("V")


class Map(Element, Generic[K, V]):
    """Values by key, as in `Map[str, int]`. What is absent reads as 0 where values are numbers, else as None.

    Lists and vectors go in and come out as copies: to change one, take it out, change it, and put it back.
    """

    TYPE = "map"
    __slots__ = ("_key", "_own", "_value")

    def __init__(self, key: str = "", value: str = "") -> None:
        """The types as DDL; a program gives them to its fields. Without them anything is taken."""
        self._own: dict[Any, Any] = {}
        self._key = key
        self._value = value

    def __getitem__(self, key: K) -> V:
        value: V = self._out(self._own[key]) if self._asked(key) in self._own else zero_of(self._value)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        key = fit(key, self._key) if self._key else key
        if key is None:
            raise TypeError("None is no key")
        self._own[key] = self._out(value)

    def __delitem__(self, key: K) -> None:
        """Nothing happens where there is no entry."""
        self._own.pop(self._asked(key), None)

    def __contains__(self, key: K) -> bool:
        return self._asked(key) in self._own

    def __iter__(self) -> Iterator[K]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._own)

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: V) -> V: ...
    def get(self, key: K, default: V | None = None) -> V | None:
        """The value, or `default` where there is none, also for numbers."""
        value: V | None = self._out(self._own[key]) if self._asked(key) in self._own else default
        return value

    def pop(self, key: K, default: V | None = None) -> V | None:
        """As `get`, and the entry is gone."""
        value = self.get(key, default)  # type: ignore[arg-type] # None is one, too
        del self[key]
        return value

    def keys(self) -> list[K]:
        """Ascending."""
        return sorted(self._own)

    def values(self) -> list[V]:
        """By ascending key."""
        return [self._out(self._own[key]) for key in self.keys()]

    def items(self) -> list[tuple[K, V]]:
        """By ascending key."""
        return [(key, self._out(self._own[key])) for key in self.keys()]

    def entries(self) -> dict[Hashable, Any]:
        return {key: self._out(self._own[key]) for key in sorted(self._own)}

    def copy(self) -> Self:
        made = type(self)(self._key, self._value)
        made.assign(self)
        return made

    def assign(self, other: Map[K, V]) -> None:
        self._own = {key: self._out(value) for key, value in other.items()}

    def clear(self) -> None:
        self._own = {}

    def _asked(self, key: Any) -> Any:
        return fit(key, self._key) if self._key else key

    def _out(self, value: Any) -> Any:
        if self._value:
            return fit(value, self._value)
        return list(value) if isinstance(value, list) else value
