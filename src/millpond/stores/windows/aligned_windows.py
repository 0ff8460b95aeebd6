"""AAR: rows by the window or pane that they fall into, for all keys; what has fired is dropped as a whole."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels import windows as kernel
from millpond.stores import views
from millpond.stores.keys import Keys
from millpond.stores.windows.celltable import Fired, new_index
from millpond.stores.windows.overlay import OverlayRows
from millpond.stores.windows.rowlog import RowLog, shares_for
from millpond.stores.windows.shape import WindowShape
from millpond.stores.windows.slides import Slides, Span, between, has_ended
from millpond.stores.windows.touched import TouchedKeys
from millpond.stores.windows.whole import Rows, WholeWindows, naming
from millpond.times import TIME_MAX, TIME_MIN, Progress

Longs = NDArray[np.int64]


class AlignedWindows:
    """One slice of a window that needs all its rows, and fires for all keys at once."""

    def __init__(self, shape: WindowShape, rows: RowLog) -> None:
        self._shape = shape
        self._whole = WholeWindows(shape.values, shape.aggregates)
        self.rows = rows
        self._is_assigned = shape.window.kind == "assigned"
        self._first = 4 if self._is_assigned else 2
        # The group of each window or pane in the log of rows; numbers are used again.
        self._groups: dict[Span, int] = {}
        self._free: list[int] = []
        self._sliding = Slides(shape) if shape.window.kind == "sliding" else None
        self.touched = None if shape.fires_once else TouchedKeys(shape)

    def insert(self, portions: list[tuple[Keys, pa.RecordBatch]]) -> None:
        for keys, batch in portions:
            times = views.longs(batch.column(1))
            if self._is_assigned:
                starts, ends = views.longs(batch.column(2)), views.longs(batch.column(3))
                spans = np.unique(np.stack([starts, ends], axis=1), axis=0)
            else:
                starts = self.starts_of(times)
                spans = np.stack([known := np.unique(starts), self._ends(known)], axis=1)
                ends = starts
            groups = np.empty(len(times), np.int64)
            for start, end in spans.tolist():
                mine = starts == start if not self._is_assigned else (starts == start) & (ends == end)
                groups[mine] = self._group((start, end))
                if self.touched is not None:
                    self.touched.note((start, end), keys.take(np.flatnonzero(mine)))
            self.rows.append(groups, batch)

    def starts_of(self, times: Longs) -> Longs:
        if self._shape.window.kind == "everything":
            return np.full(len(times), TIME_MIN)
        starts = np.empty(len(times), np.int64)
        kernel.pane_starts(times, self._shape.pane, self._shape.window.offset, starts)
        return starts

    def _ends(self, starts: Longs) -> Longs:
        if self._shape.window.kind == "everything":
            return np.full(len(starts), TIME_MAX)
        return np.array([self._shape.pane_end(start) for start in starts.tolist()], np.int64)

    def _group(self, span: Span) -> int:
        if span not in self._groups:
            group = self._free.pop() if self._free else len(self._groups)
            self._groups[span] = group
            self.rows.expect(np.array([group]), np.array([span[1]]))
        return self._groups[span]

    def fire(self, watermark: Progress, closes: bool, emits: bool = False) -> Iterator[Fired]:
        if self.touched is not None:
            yield from self._fire_touched(self.touched, watermark, closes, emits)
            return
        if self._sliding is not None:
            yield from self._fire_sliding(self._sliding, watermark, closes)
            return
        due = sorted((e, s) for s, e in self._groups if closes or has_ended(e, watermark))
        for end, start in due:
            yield from self._shares([(start, end)], start, end)
            self._drop((start, end))

    def _fire_sliding(self, sliding: Slides, watermark: Progress, closes: bool) -> Iterator[Fired]:
        panes, size = sorted(self._groups), self._shape.window.size
        for start in sliding.due([start for start, _ in panes], watermark, closes):
            yield from self._shares(between(panes, start, start + size), start, start + size)
        for span in [span for span in self._groups if sliding.is_done(span[0])]:
            self._drop(span)

    def _fire_touched(
        self, touched: TouchedKeys, watermark: Progress, closes: bool, emits: bool
    ) -> Iterator[Fired]:
        panes = sorted(self._groups)
        for due in touched.due(panes, watermark, closes, emits):
            spans = [(due.start, due.end)]
            if self._sliding is not None:
                spans = between(panes, due.start, due.start + self._shape.window.size)
            yield from self._shares(spans, *due.edges, due.keys)
        for span in touched.settle(panes, watermark, closes, emits):
            self._drop(span)
        if self._sliding is not None:
            self._sliding.next_start = self._sliding.first_behind(touched.fired)

    def _shares(self, spans: list[Span], start: int, end: int, wanted: Keys | None = None) -> Iterator[Fired]:
        """A window of these panes; if it is large, of some keys after the others, so that not all of it is in memory."""
        groups = np.array([self._groups[span] for span in spans], np.int64)
        shares = shares_for(int(self.rows.sizes_of(groups).sum()))
        for share in range(shares):
            yield self._results(self.rows.peek_share(groups, share, shares), start, end, wanted)

    def _drop(self, span: Span) -> None:
        group = self._groups.pop(span)
        self.rows.drop(np.array([group]))
        self._free.append(group)

    def _results(self, batch: pa.RecordBatch, start: int, end: int, wanted: Keys | None = None) -> Fired:
        """Rows of one window, by key."""
        keys = Keys.from_arrow(batch.column(0))
        index = new_index(self._shape.key_kind)
        ids = index.assign(keys)
        if wanted is not None:
            entries = index.find(wanted)
            chosen = np.zeros(len(index) + 1, np.bool_)
            chosen[entries[entries >= 0]] = True
            mine = np.flatnonzero(chosen[ids])
            return self._results(batch.take(pa.array(mine)), start, end)
        order, offsets = self._whole.order(ids, views.longs(batch.column(1)), len(index))
        rows = batch.take(pa.array(order))
        # The first and the last windows of all reach beyond what times can tell.
        starts, ends = (
            np.full(len(index), max(start, TIME_MIN)),
            np.full(len(index), min(end, TIME_MAX)),
        )
        own = index.stored_keys()
        named = naming(self._shape.keys, own, starts, ends)
        times = views.longs(rows.column(1))
        results = self._whole.results(Rows(times, rows.columns[self._first :], offsets, named))
        return Fired(own, starts, ends, results)

    def open(self, keys: Keys | None = None) -> Iterator[Fired]:
        if self._sliding is not None:
            panes, size = sorted(self._groups), self._shape.window.size
            for start in self._sliding.starts([start for start, _ in panes], np.inf):
                yield from self._shares(between(panes, start, start + size), start, start + size, keys)
            return
        for start, end in sorted(self._groups):
            if self.touched is None or not self.touched.is_over((start, end)):
                yield from self._shares([(start, end)], start, end, keys)

    def contents(self) -> Iterator[pa.RecordBatch]:
        groups = [group for _, group in sorted(self._groups.items())]
        return (rows for _, rows in self.rows.frozen(np.array(groups, np.int64)))

    def marked(self) -> Iterator[tuple[str, pa.Table]]:
        if self.touched is not None:
            yield "touched", self.touched.contents()

    def load_marks(self, name: str, rows: pa.Table) -> None:
        assert self.touched is not None
        self.touched.load(rows)

    def recode(self, shape: WindowShape) -> None:
        self._shape, self._whole = shape, WholeWindows(shape.values, shape.aggregates)

    def fork(self, keys: Keys, watermark: Progress, closes: bool, emits: bool) -> AlignedWindows:
        rows = OverlayRows(self.rows, self._shape.staged, self._groups.values())
        other = AlignedWindows(self._shape, rows)
        other._groups = {span: own for own, span in enumerate(self._groups)}
        other.touched = None if self.touched is None else self.touched.fork()
        if self._sliding is not None and other._sliding is not None:
            other._sliding.next_start = self._sliding.next_start
        return other

    @property
    def withheld(self) -> bool:
        return self.touched is not None and self.touched.withheld

    @property
    def oldest(self) -> int:
        return min((start for start, _ in self._groups), default=TIME_MAX)

    @property
    def newest(self) -> int | None:
        ends = [end for _, end in self._groups]
        extra = self._shape.window.size - self._shape.pane if self._sliding is not None else 0
        return min(max(ends) + extra, TIME_MAX) if ends else None

    @property
    def count(self) -> int:
        return len(self._groups)

    @property
    def nbytes(self) -> int:
        return self.rows.memory_bytes + self._touched_bytes

    @property
    def staying_bytes(self) -> int:
        return self._touched_bytes + self.rows.staying_bytes

    @property
    def _touched_bytes(self) -> int:
        return 0 if self.touched is None else self.touched.nbytes

    def validate(self) -> None:
        self.rows.validate()
        assert set(self.rows.groups().tolist()) <= set(self._groups.values())
