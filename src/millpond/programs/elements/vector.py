"""Sparse vectors: numbers by index."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from millpond.programs.elements.element import Element, index_of

Numbers = Sequence[float]
Arrays = tuple[NDArray[np.int64], NDArray[np.float64]]


class Vector(Element):
    """Doubles by index, any long. An entry is there from when it is set, also to 0, until it is deleted; absent ones are 0.0.

    Sums go by ascending index, so that they come out the same everywhere.
    """

    TYPE = "vector"
    __slots__ = ("_arrays", "_own")

    def __init__(self, entries: Mapping[int, float] | Numbers | Vector | None = None) -> None:
        self._own: dict[int, float] | None = {i: float(x) for i, x in pairs_of(entries)}
        self._arrays: Arrays | None = None

    @classmethod
    def of(cls, entries: dict[int, float]) -> Vector:
        """A vector that has these entries, longs and doubles, for its own."""
        made = Vector()
        made._own = entries
        return made

    @classmethod
    def of_arrays(cls, indexes: NDArray[np.int64], values: NDArray[np.float64]) -> Vector:
        """A vector that has these entries, of ascending indexes, none of them twice. The arrays change no more."""
        made = Vector()
        made._own, made._arrays = None, (indexes, values)
        return made

    def arrays(self) -> Arrays:
        """Indexes, ascending, and values. They are not to be changed."""
        if self._arrays is not None:
            return self._arrays
        items = self.items()
        return np.array([i for i, _ in items], np.int64), np.array([x for _, x in items], np.float64)

    @property
    def _entries(self) -> Mapping[int, float]:
        return self._plain()

    def _changing(self) -> dict[int, float]:
        own = self._plain()
        self._arrays = None
        return own

    def _plain(self) -> dict[int, float]:
        if self._own is None:
            assert self._arrays is not None
            indexes, values = self._arrays
            self._own = dict(zip(indexes.tolist(), values.tolist(), strict=True))
        return self._own

    def entries(self) -> dict[Hashable, Any]:
        return dict(self.items())

    def __getitem__(self, index: int) -> float:
        return self._entries.get(index_of(index), 0.0)

    def __setitem__(self, index: int, value: float) -> None:
        self._changing()[index_of(index)] = float(value)

    def __delitem__(self, index: int) -> None:
        """Nothing happens where there is no entry."""
        if index_of(index) in self._entries:
            del self._changing()[index]

    def __contains__(self, index: int) -> bool:
        return index_of(index) in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        return iter(self.keys())

    def get(self, index: int, default: float = 0.0) -> float:
        return self._entries.get(index_of(index), default)

    def keys(self) -> list[int]:
        """Indexes of the entries, ascending."""
        return sorted(self._entries)

    def values(self) -> list[float]:
        """By ascending index."""
        return [x for _, x in self.items()]

    def items(self) -> list[tuple[int, float]]:
        """By ascending index."""
        return sorted(self._entries.items())

    def array(self, length: int) -> list[float]:
        """The entries from 0 to `length`, absent ones as 0.0."""
        return [self._entries.get(i, 0.0) for i in range(length)]

    def total(self) -> float:
        return sum((x for _, x in self.items()), 0.0)

    def dot(self, other: Vector | Numbers) -> float:
        """The sum of products; a list counts as a vector from index 0 on."""
        mine = self._entries
        return sum((mine[i] * x for i, x in pairs_of(other) if i in mine), 0.0)

    def top(self, k: int) -> list[int]:
        """Indexes of the `k` largest entries, the largest first, of equals the smaller index first."""
        ranked = sorted(self.items(), key=lambda entry: (-entry[1], entry[0]))
        return [i for i, _ in ranked[: max(k, 0)]]

    def without(self, other: Vector) -> Vector:
        """A vector of the entries whose index the other one has no entry at."""
        theirs = dict(pairs_of(other))
        return Vector.of({i: x for i, x in self._entries.items() if i not in theirs})

    def add(self, other: Vector | Numbers, times: float = 1.0) -> None:
        """Add the other one, so many times, to this one."""
        pairs = list(pairs_of(other))
        mine = self._changing() if pairs else {}
        for i, x in pairs:
            mine[i] = mine.get(i, 0.0) + x * times

    def assign(self, other: Vector | Numbers) -> None:
        entries = {i: float(x) for i, x in pairs_of(other)}
        mine = self._changing()
        mine.clear()
        mine.update(entries)

    def clear(self) -> None:
        if self._entries:
            self._changing().clear()

    def copy(self) -> Self:
        """A vector of its own, also of a row in a matrix."""
        return Vector.of(dict(self.items()))  # type: ignore[return-value] # a copy of a row is no row

    def __add__(self, other: Vector) -> Vector:
        made = Vector(self)
        made.add(other)
        return made

    def __sub__(self, other: Vector) -> Vector:
        made = Vector(self)
        made.add(other, -1.0)
        return made

    def __mul__(self, number: float) -> Vector:
        return Vector({i: x * number for i, x in self._entries.items()})

    __rmul__ = __mul__

    def __truediv__(self, number: float) -> Vector:
        return Vector({i: x / number for i, x in self._entries.items()})


def pairs_of(entries: Mapping[int, float] | Numbers | Vector | None) -> list[tuple[int, float]]:
    """Indexes, ascending, with what is there."""
    if entries is None:
        return []
    if isinstance(entries, Vector):
        return entries.items()
    if hasattr(entries, "items"):  # a mapping, or in a plain class a partial field
        return sorted((index_of(i), x) for i, x in entries.items())
    return list(enumerate(entries))
