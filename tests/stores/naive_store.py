"""The store as a dict of sorted lists, in plain Python. Shares no code with what it checks."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any

Row = tuple[Any, ...]


class NaiveStore:
    """key -> [(time, row)] sorted by time; a row is a tuple of the value columns."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.entries: dict[Any, list[tuple[int, Row]]] = {}

    def insert(self, keys: Sequence[Any], times: Sequence[int], rows: Sequence[Row]) -> None:
        for key, time, row in zip(keys, times, rows, strict=True):
            versions = self.entries.setdefault(key, [])
            at = bisect.bisect_left([t for t, _ in versions], time)
            if at < len(versions) and versions[at][0] == time:
                versions[at] = (time, row)
            else:
                versions.insert(at, (time, row))

    def compact(self, keep_from: int) -> None:
        for key, versions in self.entries.items():
            below = [v for v in versions if v[0] < keep_from]
            self.entries[key] = below[-1:] + [v for v in versions if v[0] >= keep_from]

    def in_range(self, key: Any, lo: int | None, hi: int) -> list[Row]:
        versions = self.entries.get(key, [])
        return [row for time, row in versions if (lo is None or lo < time) and time <= hi]

    def fetch(self, key: Any, lo: int | None, hi: int, rule: str) -> list[Any]:
        """One answer per value column; `count` has one."""
        rows = self.in_range(key, lo, hi)
        if rule == "count":
            return [len(rows)]
        if rule == "latest":
            return list(rows[-1]) if rows else [None] * self.columns
        columns = [[row[c] for row in rows] for c in range(self.columns)]
        if rule == "values":
            return columns
        return [aggregate([v for v in column if v is not None], rule) for column in columns]

    def export(self) -> dict[Any, list[tuple[int, Row]]]:
        return {key: versions for key, versions in self.entries.items() if versions}


def is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def aggregate(values: list[Any], rule: str) -> Any:
    if not values:
        return None
    if rule == "total":
        total = values[0]
        for value in values[1:]:
            total += value
        return total
    numbers = [v for v in values if not is_nan(v)]
    if rule == "smallest":
        return min(numbers) if numbers else math.nan
    return math.nan if len(numbers) < len(values) else max(numbers)


def comparable(value: Any) -> Any:
    """The value with NaN equal to NaN."""
    if is_nan(value):
        return "NaN"
    if isinstance(value, list | tuple):
        return [comparable(v) for v in value]
    if isinstance(value, dict):
        return {k: comparable(v) for k, v in value.items()}
    return value
