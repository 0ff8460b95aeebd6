"""RMW of aligned windows: for each window or pane a table of keys and their cells. What has fired is dropped as a whole.

Sliding windows are made of panes, so that a row is taken in once. A window's cells are those of its panes: of the older ones
they were merged before, from each pane on to the last (`_suffixes`), of the newer ones as they came (`_recent`). So that a
window costs the same, however many slides there are in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.stores import views
from millpond.stores.keys import Keys
from millpond.stores.windows.cellruns import CellRuns
from millpond.stores.windows.cells import Cells
from millpond.stores.windows.celltable import CellOverlay, CellTable, Fired
from millpond.stores.windows.shape import WindowShape
from millpond.stores.windows.slides import Slides, Span, between, has_ended
from millpond.stores.windows.spilled_panes import SpilledPanes
from millpond.stores.windows.touched import TouchedKeys
from millpond.times import TIME_MAX, TIME_MIN, Progress

Longs = NDArray[np.int64]
PANES_AT_ONCE = 8
"""Windows of no more slides than this are made of their panes each time: that is less work than to keep parts of them."""


class PaneStore:
    """One slice of a window whose aggregates are cells, and that fires for all keys at once.

    With `runs` panes can go to disk: `_panes` then has what came to them since.
    """

    def __init__(self, shape: WindowShape, runs: CellRuns | None = None) -> None:
        assert shape.layout is not None
        self._shape = shape
        self._layout = shape.layout
        self._panes: dict[Span, CellTable] = {}
        self._fired: Progress = -np.inf
        self._sliding = SlidingCells(shape) if shape.window.kind == "sliding" else None
        self.touched = None if shape.fires_once else TouchedKeys(shape)
        self._spilled = None if runs is None else SpilledPanes(shape, runs)
        self._changed: set[Span] = set()

    def insert(self, portions: list[tuple[Keys, pa.RecordBatch]]) -> None:
        self._changed.clear()
        for keys, batch in portions:
            starts = views.longs(batch.column(1))
            cells_from = 2
            ends = None
            if self._shape.window.kind == "assigned":
                ends, cells_from = views.longs(batch.column(2)), 3
            cells = self._layout.from_arrow(batch.columns[cells_from:])
            for span, rows in self._apart(starts, ends):
                table = self._panes.get(span)
                self._changed.add(span)
                if table is None:
                    table = self._panes[span] = CellTable(self._shape.key_kind, self._layout)
                if self._sliding is not None:
                    self._sliding.changed(span[0])
                own = keys if rows is None else keys.take(rows)
                table.take_in(own, cells if rows is None else cells.take(rows))
                if self.touched is not None:
                    self.touched.note(span, own)

    def put(self, span: Span, keys: Keys, cells: Cells) -> None:
        """Cells of keys of one pane."""
        table = self._panes.setdefault(span, CellTable(self._shape.key_kind, self._layout))
        table.take_in(keys, cells)

    def tables(self) -> list[tuple[Span, CellTable]]:
        """What is in memory, by pane."""
        return sorted(self._panes.items())

    def continue_after(self, next_start: int | None) -> None:
        """Of sliding windows, those before have fired."""
        if self._sliding is not None:
            self._sliding.next_start = next_start

    def _apart(self, starts: Longs, ends: Longs | None) -> Iterator[tuple[Span, Longs | None]]:
        """Rows by their pane; None for all."""
        if ends is None:
            pairs = [(start, self._end(start)) for start in np.unique(starts).tolist()]
        else:
            pairs = [(s, e) for s, e in np.unique(np.stack([starts, ends], axis=1), axis=0).tolist()]
        if len(pairs) == 1:
            yield pairs[0], None
            return
        for start, end in pairs:
            mine = starts == start if ends is None else (starts == start) & (ends == end)
            yield (start, end), np.flatnonzero(mine)

    def _end(self, start: int) -> int:
        if self._shape.window.kind == "everything":
            return TIME_MAX
        return self._shape.pane_end(start)

    def fire(self, watermark: Progress, closes: bool, emits: bool = False) -> Iterator[Fired]:
        """What ends at the watermark or before; all with `closes`."""
        if self.touched is not None:
            yield from self._fire_touched(self.touched, watermark, closes, emits)
        elif self._sliding is not None:
            yield from self._sliding.fire(self._panes, watermark, closes, self._spilled)
        else:
            due = sorted((e, s) for s, e in self._panes if closes or has_ended(e, watermark))
            for end, start in due:
                if self._spilled is not None and self._spilled.has((start, end)):
                    own = {(start, end): self._panes[start, end]}
                    for _, table in self._spilled.windows(own, [(start, end)]):
                        yield results_of(self._shape, table, start, end, None)
                else:
                    keys, cells = self._panes[start, end].all()
                    yield self._results(keys, cells, start, end)
                del self._panes[start, end]
        if self._spilled:
            self._spilled.drop_all_but(self._panes)
        self._fired = max(self._fired, watermark)

    def _fire_touched(
        self, touched: TouchedKeys, watermark: Progress, closes: bool, emits: bool
    ) -> Iterator[Fired]:
        again: SlidingCells | None = None
        spans = sorted(self._panes)
        for due in touched.due(self._panes, watermark, closes, emits):
            if self._spilled:
                yield from self._in_parts(spans, (due.start, due.end), due.edges, due.keys)
                continue
            if self._sliding is None:
                table = self._panes[due.start, due.end]
            elif due.keys is None:
                table = self._sliding.window(self._panes, spans, due.start)
            else:
                again = again or SlidingCells(self._shape)
                table = again.window(self._panes, spans, due.start)
            yield results_of(self._shape, table, *due.edges, due.keys)
        for span in touched.settle(self._panes, watermark, closes, emits):
            del self._panes[span]
        if self._sliding is not None:
            self._sliding.go_on(touched.fired)

    def _in_parts(self, spans: list[Span], window: Span, edges: Span, keys: Keys | None) -> Iterator[Fired]:
        """A window of which something may be on disk, some keys after the others. `spans` are all panes, in their order."""
        assert self._spilled is not None
        own = between(spans, *window) if self._sliding is not None else [window]
        panes = {span: self._panes[span] for span in own}
        for _, table in self._spilled.windows(panes, [window]):
            yield results_of(self._shape, table, *edges, keys)

    def open(self, keys: Keys | None = None) -> Iterator[Fired]:
        """What is there now, of all keys or of these."""
        if self._sliding is not None:
            yield from self._sliding.open(self._panes, keys, self._spilled)
            return
        if self._spilled:
            for span in sorted(self._panes):
                if self.touched is None or not self.touched.is_over(span):
                    yield from self._in_parts([], span, span, keys)
            return
        for (start, end), table in sorted(self._panes.items()):
            if self.touched is None or not self.touched.is_over((start, end)):
                yield results_of(self._shape, table, start, end, keys)

    def _results(self, keys: Keys, cells: Cells, start: int, end: int) -> Fired:
        count = len(cells.longs)
        return Fired(keys, np.full(count, start), np.full(count, end), self._layout.results(cells))

    def contents(self) -> Iterator[pa.RecordBatch]:
        """All of it, as rows that `insert` takes."""
        parts: list[Iterator[pa.RecordBatch]] = []
        for span, table in sorted(self._panes.items()):
            if self._spilled is not None and self._spilled.has(span):
                columns = (batch.columns for batch in self._spilled.batches(span))
                parts.append(map(partial(self._staged, span), columns))
            keys, cells = table.all()
            parts.append(iter([self._staged(span, [keys.to_arrow(), *self._layout.to_arrow(cells)])]))
        return chain.from_iterable(parts)

    def _staged(self, span: Span, columns: list[pa.Array]) -> pa.RecordBatch:
        key, *cells = columns
        times = span if self._shape.window.kind == "assigned" else span[:1]
        filled = [pa.array(np.full(len(key), time)) for time in times]
        return pa.RecordBatch.from_arrays([key, *filled, *cells], schema=self._shape.staged)

    def marked(self) -> Iterator[tuple[str, pa.Table]]:
        if self.touched is not None:
            yield "touched", self.touched.contents()

    def load_marks(self, name: str, rows: pa.Table) -> None:
        assert self.touched is not None
        self.touched.load(rows)

    def fork(self, keys: Keys, watermark: Progress, closes: bool, emits: bool) -> PaneStore:
        other = PaneStore(self._shape)
        kind, layout = self._shape.key_kind, self._layout
        other._panes = {span: CellOverlay(kind, layout, table) for span, table in self._panes.items()}
        other._fired = self._fired
        other.touched = None if self.touched is None else self.touched.fork()
        other._spilled = None if self._spilled is None else self._spilled.copy()
        other._sliding = None if self._sliding is None else self._sliding.fork()
        return other

    @property
    def withheld(self) -> bool:
        return self.touched is not None and self.touched.withheld

    @property
    def oldest(self) -> int:
        """The beginning of the first that is open."""
        return min((start for start, _ in self._panes), default=TIME_MAX)

    @property
    def newest(self) -> int | None:
        """When the last one that is open ends."""
        ends = [end for _, end in self._panes]
        extra = self._shape.window.size - self._shape.pane if self._sliding is not None else 0
        return min(max(ends) + extra, TIME_MAX) if ends else None

    @property
    def count(self) -> int:
        """Keys of panes; one that is on disk counts each time that it is there."""
        return sum(map(len, self._panes.values())) + (self._spilled.rows if self._spilled else 0)

    @property
    def nbytes(self) -> int:
        touched = 0 if self.touched is None else self.touched.nbytes
        cached = self._sliding.nbytes if self._sliding is not None else 0
        known = self._spilled.memory_bytes if self._spilled else 0
        return sum(table.nbytes for table in self._panes.values()) + touched + cached + known

    @property
    def memory_bytes(self) -> int:
        return self.nbytes

    @property
    def disk_bytes(self) -> int:
        return self._spilled.disk_bytes if self._spilled else 0

    @property
    def live_bytes(self) -> int:
        return self.memory_bytes + self.disk_bytes

    @property
    def staying_bytes(self) -> int:
        touched = 0 if self.touched is None else self.touched.nbytes
        return touched + (self._spilled.memory_bytes if self._spilled else 0)

    def spill(self, nbytes: int) -> int:
        """Whole tables go to disk: those first that the last epoch had no rows for, and of these the largest."""
        if self._spilled is None:
            return 0
        before = self.memory_bytes
        if self._sliding is not None:
            self._sliding.do_without_cache()
        spans = [span for span, table in self._panes.items() if len(table)]
        for span in sorted(spans, key=lambda span: (span in self._changed, -self._panes[span].nbytes)):
            if before - self.memory_bytes >= nbytes:
                break
            self._spilled.put(span, self._panes[span])
            # What is on disk is in memory no more, whatever becomes of the runs after.
            self._panes[span] = CellTable(self._shape.key_kind, self._layout)
            self._spilled.tidy(span)
        return before - self.memory_bytes

    def tidy_folds(self) -> None:
        """What is on disk is merged by functions of the user's, where it has grown."""
        if self._spilled is not None:
            self._spilled.tidy_folds()

    def close(self) -> None:
        if self._spilled is not None:
            self._spilled.close()

    def validate(self) -> None:
        for (start, end), table in self._panes.items():
            assert start < end
            table.validate()
        if self._spilled is not None:
            self._spilled.validate()
            assert all(span in self._panes for span in self._spilled.spans)


def results_of(shape: WindowShape, table: CellTable, start: int, end: int, keys: Keys | None) -> Fired:
    """What a table holds, of all keys or of these."""
    assert shape.layout is not None
    if keys is None:
        own, cells = table.all()
    else:
        there, cells = table.find(keys)
        own = keys.take(there)
    count = len(cells.longs)
    return Fired(own, np.full(count, start), np.full(count, end), shape.layout.results(cells))


class SlidingCells(Slides):
    """The cells of windows made of panes."""

    def __init__(self, shape: WindowShape) -> None:
        super().__init__(shape)
        assert shape.layout is not None
        self._shape = shape
        self._layout = shape.layout
        self._suffixes: dict[int, CellTable] = {}
        self._recent: CellTable | None = None
        self._turn = TIME_MIN  # where the older panes end and the newer ones begin
        self._reach = TIME_MIN  # up to which panes are in `_recent`
        self._uncached = 0  # so many windows more are made of their panes alone

    def fork(self) -> SlidingCells:
        """The same, to be gone on with; these stay as they are."""
        other = SlidingCells(self._shape)
        other.next_start = self.next_start
        other._suffixes = dict(self._suffixes)
        if self._recent is not None:
            other._recent = CellOverlay(self._shape.key_kind, self._layout, self._recent)
        other._turn, other._reach, other._uncached = self._turn, self._reach, self._uncached
        return other

    @property
    def nbytes(self) -> int:
        """Of what was merged before."""
        tables = {id(table): table for table in [*self._suffixes.values(), self._recent] if table is not None}
        return sum(table.nbytes for table in tables.values())

    def do_without_cache(self) -> None:
        """Memory is short: for two windows' time nothing is merged before it is needed."""
        self._forget()
        self._uncached = 2 * (self._size // self._slide + 1)

    def _new_table(self) -> CellTable:
        return CellTable(self._shape.key_kind, self._layout)

    def changed(self, start: int) -> None:
        """Rows came to a pane that may have been merged already."""
        if start < self._reach:
            self._forget()

    def _forget(self) -> None:
        self._suffixes = {}
        self._recent = None
        self._turn = self._reach = TIME_MIN

    def fire(
        self,
        panes: dict[Span, CellTable],
        watermark: Progress,
        closes: bool,
        spilled: SpilledPanes | None = None,
    ) -> Iterator[Fired]:
        spans = sorted(panes)
        due = self.due([start for start, _ in spans], watermark, closes)
        if spilled is not None and (spilled or self._uncached):
            self._forget()
            starts = list(due)
            self._uncached = max(0, self._uncached - len(starts))
            yield from self._from_panes(panes, starts, None, spilled)
        else:
            for start in due:
                table = self.window(panes, spans, start)
                begin, end = max(start, TIME_MIN), min(start + self._size, TIME_MAX)
                yield results_of(self._shape, table, begin, end, None)
        for span in [span for span in panes if self.is_done(span[0])]:
            del panes[span]
        self._let_go()

    def go_on(self, fired: Progress) -> None:
        """Windows that end by then have fired."""
        self.next_start = self.first_behind(fired)
        self._let_go()

    def _let_go(self) -> None:
        for start in [start for start in self._suffixes if self.is_done(start)]:
            del self._suffixes[start]

    def window(self, panes: dict[Span, CellTable], spans: list[Span], start: int) -> CellTable:
        """The cells of a window: of its older panes, then of its newer ones. `spans` are all panes, in their order."""
        end = start + self._size
        if self._size <= PANES_AT_ONCE * self._slide:
            table = self._new_table()
            table.take_in_tables([panes[span] for span in between(spans, start, end)])
            return table
        if self._recent is None or start >= self._turn:
            self._turn_over(panes, spans, start)
        assert self._recent is not None
        for span in between(spans, self._reach, end):
            self._recent.take_in_all(panes[span])
        self._reach = max(self._reach, end)
        older = self._suffixes.get(start)
        if older is None:
            return self._recent
        window = older.copy()
        window.take_in_all(self._recent)
        return window

    def _turn_over(self, panes: dict[Span, CellTable], spans: list[Span], start: int) -> None:
        """All panes of this window are the older ones from now on."""
        end = start + self._size
        self._suffixes = {}
        table = self._new_table()
        older = between(spans, start, end)
        for begin in range(start + (self._size - 1) // self._slide * self._slide, start - 1, -self._slide):
            if older and older[-1][0] >= begin:
                table = table.copy() if len(table) else table
            while older and older[-1][0] >= begin:
                table.take_in_all(panes[older.pop()])
            if len(table):
                self._suffixes[begin] = table
        self._recent = self._new_table()
        self._turn = self._reach = end

    def _from_panes(
        self, panes: dict[Span, CellTable], starts: list[int], keys: Keys | None, spilled: SpilledPanes
    ) -> Iterator[Fired]:
        for (start, end), table in spilled.windows(panes, [(start, start + self._size) for start in starts]):
            yield results_of(self._shape, table, max(start, TIME_MIN), min(end, TIME_MAX), keys)

    def open(
        self, panes: dict[Span, CellTable], keys: Keys | None, spilled: SpilledPanes | None = None
    ) -> Iterator[Fired]:
        """Windows that have begun and not fired; made anew of their panes."""
        spans = sorted(panes)
        starts = self.starts([start for start, _ in spans], np.inf)
        if spilled:
            yield from self._from_panes(panes, list(starts), keys, spilled)
            return
        for start in starts:
            table = self._new_table()
            for span in between(spans, start, start + self._size):
                table.take_in_all(panes[span])
            if len(table):
                yield results_of(
                    self._shape, table, max(start, TIME_MIN), min(start + self._size, TIME_MAX), keys
                )
