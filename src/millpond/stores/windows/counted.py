"""Windows of so many rows: of each key, as they come, and of one epoch in the order of their times."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.stores import views
from millpond.stores.growing import grown
from millpond.stores.keys import Keys
from millpond.stores.windows.celltable import Fired, new_index
from millpond.stores.windows.overlay import OverlayRows
from millpond.stores.windows.rowlog import RowLog, in_portions, with_keys
from millpond.stores.windows.shape import WindowShape
from millpond.stores.windows.whole import Rows, WholeWindows
from millpond.times import TIME_MAX, TIME_MIN, Progress

Longs = NDArray[np.int64]
ENTRIES_MIN = 1024


class CountedWindows:
    """One slice. The rows of a key are one group in the log of rows, under the number of its entry."""

    def __init__(self, shape: WindowShape, rows: RowLog) -> None:
        self._shape = shape
        self._whole = WholeWindows(shape.values, shape.aggregates)
        self.rows = rows
        self._index = new_index(shape.key_kind)
        self._counts: Longs = np.empty(0, np.int64)
        self._firsts: Longs = np.empty(0, np.int64)
        self._schema = shape.staged.remove(0)
        # Of each key, whether its rows are others than when they were last sent; known where windows are updated.
        self._changed = np.empty(0, np.bool_)

    def insert(self, portions: list[tuple[Keys, pa.RecordBatch]]) -> None:
        keys = Keys.concat([own for own, _ in portions])
        batch = pa.concat_batches([batch for _, batch in portions])
        order = np.argsort(views.longs(batch.column(1)), kind="stable")
        entries = self._insert(keys.take(order), batch.take(pa.array(order)))
        self._changed[entries] = True

    def _insert(self, keys: Keys, batch: pa.RecordBatch) -> Longs:
        entries = self._index.assign(keys)
        known, count = len(self._counts), len(self._index)
        if count > known:
            self._counts, self._firsts = grown(self._counts, known, count), grown(self._firsts, known, count)
            self._counts[known:], self._firsts[known:] = 0, TIME_MAX
            self._changed = grown(self._changed, known, count)
            self._changed[known:] = False
        touched, rows = np.unique(entries, return_index=True)
        fresh = self._counts[touched] == 0
        self._firsts[touched[fresh]] = views.longs(batch.column(1))[rows[fresh]]
        np.add.at(self._counts, entries, 1)
        self.rows.append(entries, pa.RecordBatch.from_arrays(batch.columns[1:], schema=self._schema))
        return entries

    def fire(self, watermark: Progress, closes: bool, emits: bool = False) -> Iterator[Fired]:
        entries = self._due(watermark, closes, emits)
        for some in in_portions(self.rows, entries):
            yield from self._fire(some, watermark, closes, emits)
        if len(entries):
            self._let_go_of_keys()

    def _due(self, watermark: Progress, closes: bool, emits: bool) -> Longs:
        """The keys of which something fires, or is to be told."""
        size, after = self._shape.window.size, self._shape.window.or_after
        used = len(self._index)
        counts, firsts = self._counts[:used], self._firsts[:used]
        is_over = np.full(used, closes)
        if after and watermark > -np.inf and not closes:
            is_over = (counts > 0) & (firsts <= watermark - after)
        is_over &= counts > 0
        has_news = self._changed[:used] & emits
        return np.flatnonzero(is_over | (counts >= size) | has_news)

    def _fire(self, entries: Longs, watermark: Progress, closes: bool, emits: bool) -> Iterator[Fired]:
        size, after = self._shape.window.size, self._shape.window.or_after
        batch, offsets = self.rows.take(entries)
        keys = self._index.stored_keys().take(entries)
        sizes = np.diff(offsets)
        groups = np.repeat(np.arange(len(entries)), sizes)
        place = np.arange(len(groups)) - offsets[groups]
        full = sizes // size * size
        # What is left behind full windows is over by the first of its own rows.
        times = views.longs(batch.column(0))
        rest = np.minimum(offsets[:-1] + full, len(times) - 1)
        is_over = np.full(len(entries), closes) | bool(after) & (times[rest] <= watermark - after)
        fires = np.where(is_over, sizes, full)[groups] > place
        shown = fires
        if self._shape.updates:
            shown = (full[groups] > place) | ((fires | emits) & self._changed[entries][groups])
        chosen = np.flatnonzero(shown)
        window_of = np.concatenate(([0], np.cumsum(-(-sizes // size))))[groups] + place // size
        if len(chosen):
            numbers, windows = np.unique(window_of[chosen], return_inverse=True)
            rows_order, rows_offsets = self._whole.order(windows, times[chosen], len(numbers))
            ordered = chosen[rows_order]
            rows = batch.take(pa.array(ordered))
            in_order = times[ordered]
            starts = np.minimum.reduceat(in_order, rows_offsets[:-1])
            ends = np.maximum.reduceat(in_order, rows_offsets[:-1])
            ends = np.where(ends == TIME_MAX, ends, ends + 1)
            results = self._whole.results(Rows(in_order, rows.columns[1:], rows_offsets))
            yield Fired(keys.take(groups[ordered[rows_offsets[:-1]]]), starts, ends, results)
        self._counts[entries], self._firsts[entries] = 0, TIME_MAX
        left = np.flatnonzero(~fires)
        self._changed[entries] = False
        self._changed[entries[groups[left]]] = not emits
        if len(left):
            own = keys.take(groups[left])
            rows = batch.take(pa.array(left))
            self._insert(
                own, pa.RecordBatch.from_arrays([own.to_arrow(), *rows.columns], schema=self._shape.staged)
            )

    def _let_go_of_keys(self) -> None:
        used = np.flatnonzero(self._counts[: len(self._index)] > 0)
        if len(self._index) <= ENTRIES_MIN or len(self._index) <= 2 * len(used):
            return
        keys = self._index.stored_keys().take(used)
        self._index = new_index(self._shape.key_kind)
        entries = self._index.assign(keys)
        for name in ("_counts", "_firsts", "_changed"):
            setattr(self, name, getattr(self, name)[used])
        # An entry is never further back than it was: one group after another takes the place of one that is gone.
        self.rows.merge(entries, used)

    def open(self, keys: Keys | None = None) -> Iterator[Fired]:
        entries = np.flatnonzero(self._counts[: len(self._index)] > 0)
        if keys is not None:
            entries = np.intersect1d(entries, self._index.find(keys))
        for some in in_portions(self.rows, entries):
            yield self._open(some)

    def _open(self, entries: Longs) -> Fired:
        batch, offsets = self.rows.peek(entries)
        groups = np.repeat(np.arange(len(entries)), np.diff(offsets))
        times = views.longs(batch.column(0))
        order, offsets = self._whole.order(groups, times, len(entries))
        rows = batch.take(pa.array(order))
        in_order = times[order]
        starts = np.minimum.reduceat(in_order, offsets[:-1])
        ends = np.maximum.reduceat(in_order, offsets[:-1])
        results = self._whole.results(Rows(in_order, rows.columns[1:], offsets))
        return Fired(
            self._index.stored_keys().take(entries),
            starts,
            np.where(ends == TIME_MAX, ends, ends + 1),
            results,
        )

    def contents(self) -> Iterator[pa.RecordBatch]:
        entries = np.flatnonzero(self._counts[: len(self._index)] > 0)
        keys = self._index.stored_keys().take(entries)
        return with_keys(keys, self.rows.frozen(entries), self._shape.staged)

    def load(self, batch: pa.RecordBatch) -> None:
        """Rows of `contents`, which are in the order in which they came."""
        self._insert(Keys.from_arrow(batch.column(0)), batch)

    def marked(self) -> Iterator[tuple[str, pa.Table]]:
        if self._shape.updates:
            used = self._counts[: len(self._index)] > 0
            yield "changed", pa.table({"changed": self._changed[: len(self._index)][used]})

    def load_marks(self, name: str, rows: pa.Table) -> None:
        """Keys are in the order of `contents`."""
        self._changed[: len(rows)] = rows.column(0).to_numpy()

    def recode(self, shape: WindowShape) -> None:
        self._shape, self._whole = shape, WholeWindows(shape.values, shape.aggregates)

    def fork(self, keys: Keys, watermark: Progress, closes: bool, emits: bool) -> CountedWindows:
        touched = self._index.find(keys)
        entries = np.union1d(touched[touched >= 0], self._due(watermark, closes, emits))
        other = CountedWindows(self._shape, OverlayRows(self.rows, self._schema, entries.tolist()))
        other._index.assign(self._index.stored_keys().take(entries))
        for name in ("_counts", "_firsts", "_changed"):
            setattr(other, name, getattr(self, name)[entries])
        return other

    @property
    def withheld(self) -> bool:
        used = len(self._index)
        return bool((self._changed[:used] & (self._counts[:used] > 0)).any())

    @property
    def oldest(self) -> int:
        # Rows stay in any order of their times.
        return TIME_MIN if self._counts[: len(self._index)].any() else TIME_MAX

    @property
    def newest(self) -> int | None:
        used = self._counts[: len(self._index)] > 0
        after = self._shape.window.or_after
        if not used.any() or not after:
            return None
        return min(int(self._firsts[: len(self._index)][used].max()) + after, TIME_MAX)

    @property
    def count(self) -> int:
        return int((self._counts[: len(self._index)] > 0).sum())

    @property
    def nbytes(self) -> int:
        return self._index_bytes + self.rows.memory_bytes

    @property
    def staying_bytes(self) -> int:
        return self._index_bytes + self.rows.staying_bytes

    @property
    def _index_bytes(self) -> int:
        """What it takes to know of each key."""
        arrays = (self._counts, self._firsts, self._changed)
        return self._index.nbytes + sum(int(array[: len(self._index)].nbytes) for array in arrays)

    def validate(self) -> None:
        self._index.validate()
        self.rows.validate()
