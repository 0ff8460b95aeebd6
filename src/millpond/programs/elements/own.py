"""State classes of a user's own: methods over entries by key, which the pond undoes, logs, saves, moves and migrates as those of a map."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Hashable
from typing import Any, Generic, Self, TypeVar

from millpond.programs.elements.element import Element
from millpond.programs.elements.map import Map

K = TypeVar("K")
V = TypeVar("V")


class StateElement(Element, Generic[K, V]):
    """The base of such a class, as in `class Distinct(mp.StateElement[int, int])`: it holds all that it knows in `self.state`.

    That is a `Map[K, V]`. In a `Partial` field there is one of the class in each lane. Of a `Partitioned` field a call reaches
    one key: the first argument of each method is that key, and `self.state` has no other one then.
    """

    TYPE = "own"
    state: Map[K, V]

    def __init__(self) -> None:
        self.state = Map(*types_of(type(self)))

    @classmethod
    def over(cls, state: Any) -> Self:
        """One that has this map for its own."""
        made = object.__new__(cls)
        made.state = state
        return made

    def entries(self) -> dict[Hashable, Any]:
        return self.state.entries()

    def clear(self) -> None:
        self.state.clear()

    def copy(self) -> Self:
        return type(self).over(self.state.copy())

    def assign(self, other: Self) -> None:
        self.state.assign(other.state)


MADE_HERE = frozenset(vars(StateElement)) | frozenset(vars(Element)) | {"state"}
"""Names that such a class has already."""


def types_of(cls: type) -> tuple[str, str]:
    """The types of keys and values, as DDL."""
    for base in getattr(cls, "__orig_bases__", ()):
        if typing.get_origin(base) is StateElement:
            key, value = typing.get_args(base)
            return _ddl(key), _ddl(value)
    return "", ""


def _ddl(hint: Any) -> str:
    if typing.get_origin(hint) is list:
        return f"array<{_ddl(typing.get_args(hint)[0])}>"
    if isinstance(hint, type) and issubclass(hint, Element):
        return hint.TYPE
    return {int: "long", float: "double", bool: "boolean", str: "string"}.get(hint, "")


class OneKey:
    """What a map has under one key, and of that what a method may do with `self.state`."""

    def __init__(self, entries: Any, key: Any) -> None:
        self._entries = entries
        self._key = key

    def _at(self, key: Any) -> Any:
        if key != self._key:
            raise TypeError(
                f"{key!r} is another key than the call's, {self._key!r}: of a Partitioned field a call reaches one key"
            )
        return self._entries

    def __getitem__(self, key: Any) -> Any:
        return self._at(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._at(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._at(key)[key]

    def __contains__(self, key: Any) -> bool:
        return key in self._at(key)

    def get(self, key: Any, *default: Any) -> Any:
        return self._at(key).get(key, *default)

    def pop(self, key: Any, *default: Any) -> Any:
        return self._at(key).pop(key, *default)

    def __getattr__(self, name: str) -> Any:
        raise TypeError(
            f"self.state.{name} goes across keys, and of a Partitioned field a call reaches one key"
        )

    def __iter__(self) -> Any:
        raise TypeError(
            "a loop over self.state goes across keys, and of a Partitioned field a call reaches one key"
        )

    __len__ = __iter__


class Bound:
    """A class of a user's over a map: its methods, for tasks. `by_key` where the map is a slice's part of a field."""

    def __init__(self, cls: type[StateElement[Any, Any]], entries: Any, by_key: bool) -> None:
        self._cls = cls
        self._entries = entries
        self._by_key = by_key

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self._call, name)

    def _call(self, name: str, *given: Any) -> Any:
        """Lists are copied on their way in: a method changes none of the caller's."""
        given = tuple(list(value) if isinstance(value, list) else value for value in given)
        state = OneKey(self._entries, given[0]) if self._by_key else self._entries
        return getattr(self._cls.over(state), name)(*given)
