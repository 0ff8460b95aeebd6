"""What the rows of a window come to, in plain Python: each aggregate is a function of all of them, in time order.

Rows of one time are in the order of their arrival. Nulls of the column count for `collect`, `latest` and functions alone; of
no value that is not null, an aggregate is None, and a count 0. NaN is above every number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

from millpond.errors import BadOption

Aggregate: TypeAlias = Callable[[Sequence[Mapping[str, Any]]], Any]
"""Of the rows of a window, each by column."""


def count(column: str | None = None) -> Aggregate:
    """How many rows; with a column, how many that are not null in it."""
    if column is None:
        return len
    return lambda rows: len(_values(rows, column))


def total(column: str) -> Aggregate:
    """Exact for integers, whatever the order: only a total that fits no long is None. Of doubles, rounded once."""
    return _of_values(column, _total)


def mean(column: str) -> Aggregate:
    """A double; of integers, that of their exact total."""
    return _of_values(column, lambda values: float(_sum(values) / len(values)))


def smallest(column: str) -> Aggregate:
    return _of_values(column, lambda values: min(values, key=_nan_last))


def largest(column: str) -> Aggregate:
    return _of_values(column, lambda values: max(values, key=_nan_last))


def top(k: int, column: str) -> Aggregate:
    """The k largest, largest first, equal ones each for itself; fewer where there are not so many, or none."""
    if k < 1:
        raise BadOption(f"k={k}", hint="make it 1 or more", option="k")
    return lambda rows: sorted(_values(rows, column), key=_nan_last, reverse=True)[:k]


def median(column: str) -> Aggregate:
    """A double: the middle one, or of an even number the mean of the middle two."""
    return _of_values(column, _median)


def percentile(p: float, column: str) -> Aggregate:
    """A double, p from 0 to 1: at that share of the way from the smallest to the largest, in between by a straight line."""
    if not 0 <= p <= 1:
        raise BadOption(f"p={p}", hint="from 0 to 1", option="p")
    return _of_values(column, lambda values: _percentile(values, p))


def collect(column: str) -> Aggregate:
    """All values with the nulls, in time order."""
    return lambda rows: [row[column] for row in rows]


def latest(column: str) -> Aggregate:
    """The value of the last row, also where that is null."""
    return lambda rows: rows[-1][column] if rows else None


def where_largest(column: str, *columns: str) -> Aggregate:
    """Of all rows with the largest value, in time order, these columns; none where all are null."""
    names = list(dict.fromkeys((column, *columns)))

    def of_rows(rows: Sequence[Mapping[str, Any]]) -> Any:
        best = max((_nan_last(value) for value in _values(rows, column)), default=None)
        return [
            {name: row[name] for name in names}
            for row in rows
            if row[column] is not None and _nan_last(row[column]) == best
        ]

    return of_rows


def user(
    zero: Any, add: Callable[[Any, Any], Any], merge: Callable[[Any, Any], Any] | None, column: str
) -> Aggregate:
    """`add(add(zero, first), second)` and so on, in time order. `merge` is for those who hold parts: it is not called."""
    del merge

    def fold(values: list[Any]) -> Any:
        result = zero
        for value in values:
            result = add(result, value)
        return result

    return _of_values(column, fold)


def function(compute: Callable[..., Any], *columns: str) -> Aggregate:
    """`compute(first column, second, ...)`, lists in time order, of all rows: a null is None there."""
    return lambda rows: compute(*([row[column] for row in rows] for column in columns))


def _of_values(column: str, compute: Callable[[list[Any]], Any]) -> Aggregate:
    def of_rows(rows: Sequence[Mapping[str, Any]]) -> Any:
        values = _values(rows, column)
        return compute(values) if values else None

    return of_rows


def _values(rows: Sequence[Mapping[str, Any]], column: str) -> list[Any]:
    return [row[column] for row in rows if row[column] is not None]


def _sum(values: list[Any]) -> Any:
    if all(isinstance(value, float) and math.isfinite(value) for value in values):
        exact = sum(map(Fraction, values))
        try:
            return float(exact)
        except OverflowError:
            return math.copysign(math.inf, exact)
    return sum(values[1:], start=values[0])


def _total(values: list[Any]) -> Any:
    result = _sum(values)
    if isinstance(result, int) and not -(2**63) <= result < 2**63:
        return None
    return result


def _median(values: list[Any]) -> float:
    ordered = sorted(values, key=_nan_last)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return float(ordered[middle])
    return float((ordered[middle - 1] + ordered[middle]) / 2)


def _percentile(values: list[Any], p: float) -> float:
    ordered = sorted(values, key=_nan_last)
    place = p * (len(ordered) - 1)
    below = min(math.floor(place), len(ordered) - 1)
    above = min(below + 1, len(ordered) - 1)
    share = place - below
    if share == 0 or ordered[below] == ordered[above]:
        return float(ordered[below])
    between = ordered[above] - ordered[below]
    if isinstance(between, float) and not math.isfinite(between):
        return float(ordered[below] * (1 - share) + ordered[above] * share)
    return float(ordered[below] + between * share)


def _nan_last(value: Any) -> tuple[bool, Any]:
    is_nan = isinstance(value, float) and math.isnan(value)
    return is_nan, 0 if is_nan else value
