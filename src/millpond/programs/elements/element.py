"""What all elements have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any, ClassVar, Self

from millpond.programs.values import LONG_MAX, LONG_MIN


class Element(ABC):
    """State that can be taken apart into entries, each under a key of its own.

    Two elements of one class are equal when their entries are.
    """

    TYPE: ClassVar[str] = ""
    """What values of the class are called among the types that travel."""

    @abstractmethod
    def entries(self) -> dict[Hashable, Any]:
        """What it holds, by key, in ascending order of the keys; a copy."""

    @abstractmethod
    def copy(self) -> Self:
        """The same entries, which change no more with this one's."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all entries."""

    @abstractmethod
    def assign(self, other: Self) -> None:
        """Hold a copy of what the other one holds, and nothing else."""

    def __len__(self) -> int:
        return len(self.entries())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Element):
            return NotImplemented
        return self.entries() == other.entries()

    __hash__ = None  # type: ignore[assignment] # it changes

    def __repr__(self) -> str:
        named = next(each for each in type(self).__mro__ if "TYPE" in vars(each))
        return f"{named.__name__}({self.entries()})"


def index_of(key: Any) -> int:
    """A row, column or entry number: a long. TypeError for all else, OverflowError beyond 64 bits."""
    if type(key) is int:
        number: int = key
    elif isinstance(key, bool) or not hasattr(key, "__index__"):
        raise TypeError(f"{key!r} is no index: an int is expected")
    else:
        number = int(key.__index__())
    if not LONG_MIN <= number <= LONG_MAX:
        raise OverflowError(f"the index {number} is beyond the 64 bits of a long")
    return number
