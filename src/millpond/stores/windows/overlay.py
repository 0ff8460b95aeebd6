"""Rows on top of a log of rows that stays as it is: for an epoch that is tried before it is decided."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.stores.windows.aligned import only_share
from millpond.stores.windows.rowlog import RowLog, no_figures, peeked

Longs = NDArray[np.int64]
_K = TypeVar("_K")
_V = TypeVar("_V")
_NO_ROWS = np.zeros(1, np.int64)


def memory_rows(schema: pa.Schema, pattern: str) -> RowLog:
    """A log of rows in memory alone."""
    return OverlayRows(None, schema, ())


class Overlay(MutableMapping[_K, _V]):
    """A mapping on top of one that stays as it is."""

    def __init__(self, below: Mapping[_K, _V]) -> None:
        self._below = below
        self._own: dict[_K, _V] = {}
        self._gone: set[_K] = set()

    def __getitem__(self, key: _K) -> _V:
        if key in self._own:
            return self._own[key]
        if key in self._gone:
            raise KeyError(key)
        return self._below[key]

    def __setitem__(self, key: _K, value: _V) -> None:
        self._own[key] = value

    def __delitem__(self, key: _K) -> None:
        self[key]
        self._own.pop(key, None)
        self._gone.add(key)

    def __iter__(self) -> Iterator[_K]:
        yield from self._own
        yield from (key for key in self._below if key not in self._own and key not in self._gone)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OverlayRows:
    """A `RowLog`. What it is given it keeps in memory; of what is below it only reads.

    `groups` are those below that it has: its own group i has the rows of `groups[i]`.
    """

    def __init__(self, below: RowLog | None, schema: pa.Schema, groups: Iterable[int]) -> None:
        self._below = below
        self._schema = schema
        # Of a group that is known here: the groups below that it has rows of, and rows of its own.
        self._lower: dict[int, list[int]] = {own: [group] for own, group in enumerate(groups)}
        self._own: dict[int, list[pa.RecordBatch]] = {}

    memory_bytes = staying_bytes = disk_bytes = live_bytes = 0

    def append(self, groups: Longs, rows: pa.RecordBatch) -> None:
        order = np.argsort(groups, kind="stable")
        numbers, starts = np.unique(groups[order], return_index=True)
        ends = [*starts[1:].tolist(), len(order)]
        for group, start, end in zip(numbers.tolist(), starts.tolist(), ends, strict=True):
            self._own.setdefault(group, []).append(rows.take(pa.array(order[start:end])))

    def expect(self, groups: Longs, triggers: Longs) -> None:
        pass

    def merge(self, into: Longs, gone: Longs) -> None:
        for one, other in zip(into.tolist(), gone.tolist(), strict=True):
            if one == other:
                continue
            if other in self._lower:
                self._lower.setdefault(one, []).extend(self._lower.pop(other))
            if other in self._own:
                self._own.setdefault(one, []).extend(self._own.pop(other))

    def take(self, groups: Longs) -> tuple[pa.RecordBatch, Longs]:
        taken = self.peek(groups)
        self.drop(groups)
        return taken

    def peek(self, groups: Longs) -> tuple[pa.RecordBatch, Longs]:
        # One look below for all: each may have to search an index.
        lower = [below for group in groups.tolist() for below in self._lower.get(group, ())]
        below, bounds = self._nothing(), _NO_ROWS
        if lower and self._below is not None:
            below, bounds = self._below.peek(np.array(lower, np.int64))
        parts: list[pa.RecordBatch] = []
        sizes, at = [0], 0
        for group in groups.tolist():
            known = len(self._lower.get(group, ()))
            first, last = int(bounds[at]), int(bounds[at + known])
            at += known
            own = [below.slice(first, last - first), *self._own.get(group, ())]
            parts += [part for part in own if part.num_rows]
            sizes.append(sum(part.num_rows for part in own))
        offsets = np.cumsum(sizes, dtype=np.int64)
        if not parts:
            return self._nothing(), offsets
        return pa.concat_batches(parts), offsets

    def _nothing(self) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in self._schema], schema=self._schema)

    def drop(self, groups: Longs) -> None:
        for group in groups.tolist():
            self._lower.pop(group, None)
            self._own.pop(group, None)

    def sizes_of(self, groups: Longs) -> Longs:
        lower = [self._lower.get(group, ()) for group in groups.tolist()]
        own = (self._own.get(group, ()) for group in groups.tolist())
        sizes = np.array([sum(int(rows.nbytes) for rows in batches) for batches in own], np.int64)
        if self._below is not None:
            of_group = np.repeat(np.arange(len(groups)), list(map(len, lower)))
            below = np.array([group for groups in lower for group in groups], np.int64)
            np.add.at(sizes, of_group, self._below.sizes_of(below))
        return sizes

    def peek_share(self, groups: Longs, share: int, shares: int) -> pa.RecordBatch:
        parts: list[pa.RecordBatch] = []
        for group in groups.tolist():
            lower = np.array(self._lower.get(group, ()), np.int64)
            if len(lower) and self._below is not None:
                parts.append(self._below.peek_share(lower, share, shares))
            parts += [only_share(rows, share, shares) for rows in self._own.get(group, ())]
        return pa.concat_batches(parts) if parts else self._nothing()

    def frozen(self, groups: Longs) -> Iterator[tuple[Longs, pa.RecordBatch]]:
        return peeked(self, groups)

    def spill(self, nbytes: int) -> int:
        return 0

    def groups(self) -> Longs:
        return np.array(sorted({*self._lower, *self._own}), np.int64)

    def figures(self) -> dict[str, float]:
        return no_figures()

    def close(self) -> None:
        pass

    def validate(self) -> None:
        pass
