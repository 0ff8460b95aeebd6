"""Values of all lanes, and how they become one."""

from __future__ import annotations

from functools import reduce
from typing import Any, TypeVar, overload

from millpond.code import rules

T = TypeVar("T")
READING_EVERYWHERE = frozenset(
    [
        "get",
        "keys",
        "values",
        "items",
        "array",
        "total",
        "dot",
        "top",
        "without",
        "copy",
        "multiply",
        "column",
    ]
)
GIVEN_EVERYWHERE = {
    "map": ["[key]", "get", "keys", "values"],
    "vector": ["[i]", "get", "keys", "values", "array", "total", "dot", "top", "without", "copy"],
    "matrix": ["[row]", "[row, column]", "keys", "column", "multiply", "copy"],
    "dense": ["[row]", "[row, column]", "keys", "copy"],
}
"""By what a field holds, of what can be read everywhere that which can travel."""
WRITING_EVERYWHERE = frozenset({"assign", "clear"})
"""What of an element can be done everywhere."""


class Collection(list[T]):
    """The values that an access `everywhere` gave, one from each lane, in their order."""


@overload
def total(of: Collection[T]) -> T: ...
@overload
def total(of: str = "") -> rules.FetchRule: ...
def total(of: Any = "") -> Any:
    """Of a Collection: the sum of its values, from the first lane on.

    Else a rule: the sum of the values of a range or a window, of the column that is named; nulls are ignored, null if
    nothing is left.
    """
    return rules.total(of) if isinstance(of, str) else reduce(plus, of)


def average(of: Collection[T]) -> T:
    """The sum of a Collection's values, divided by how many they are."""
    whole: Any = reduce(plus, of)
    return [x / len(of) for x in whole] if isinstance(whole, list) else whole / len(of)  # type: ignore[return-value] # as T


def plus(left: Any, right: Any) -> Any:
    """Lists are added item by item: a shorter one counts as if it went on with zeros."""
    if not isinstance(left, list):
        return left + right
    longer, shorter = (left, right) if len(left) >= len(right) else (right, left)
    return [x + shorter[i] if i < len(shorter) else x for i, x in enumerate(longer)]
