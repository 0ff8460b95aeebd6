"""Sessions of keys: their contents are cells (RMW), or rows in a log of rows (AUR)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.schema import TIME
from millpond.stores import views
from millpond.stores.growing import grown
from millpond.stores.keys import Keys
from millpond.stores.windows.cellruns import CellRuns
from millpond.stores.windows.cells import CellLayout
from millpond.stores.windows.celltable import Fired, GrowingCells
from millpond.stores.windows.cutting import cut_sessions
from millpond.stores.windows.overlay import OverlayRows
from millpond.stores.windows.rowlog import RowLog, in_portions, with_keys
from millpond.stores.windows.session_index import Merged, SessionIndex
from millpond.stores.windows.session_marks import SessionMarks
from millpond.stores.windows.shape import CUT, WindowShape
from millpond.stores.windows.spilled_sessions import SpilledSessions
from millpond.stores.windows.whole import Rows, WholeWindows, naming
from millpond.times import TIME_MAX, Progress

Longs = NDArray[np.int64]


class SessionCells:
    """RMW: a session's cells, changed in place. With `runs`, sessions can go to disk."""

    def __init__(self, shape: WindowShape, slices: int, runs: CellRuns | None = None) -> None:
        assert shape.layout is not None
        self._shape = shape
        self._layout: CellLayout = shape.layout
        self._index = SessionIndex(shape.key_kind, shape.window.touching)
        self._cells = GrowingCells(self._layout)
        self._slices = slices
        self.marks = None if shape.fires_once else SessionMarks(shape, slices)
        self._spilled = None if runs is None or not shape.fires_once else SpilledSessions(shape, runs)
        # Of a fork: what it is one of, and which sessions of that it has.
        self._below: SessionCells | None = None
        self._is_here: NDArray[np.bool_] = np.empty(0, np.bool_)

    def insert(self, portions: list[tuple[Keys, pa.RecordBatch]]) -> None:
        for keys, batch in portions:
            if self._below is not None:
                self._fetch(self._below, self._below.sessions_of(keys))
            self._insert(keys, batch)

    def _insert(self, keys: Keys, batch: pa.RecordBatch) -> Longs:
        spans = views.longs(batch.column(1)), views.longs(batch.column(2))
        merged = self._index.join(keys, *spans)
        if self.marks is not None:
            self.marks.joined(merged, self._index.size)
        cells = self._cells.reserve(self._index.size)
        if len(merged.gone):
            self._layout.merge(merged.roots, cells.take(merged.gone), cells)
            self._cells.clear(merged.gone)
        self._layout.merge(merged.nodes, self._layout.from_arrow(batch.columns[3:]), cells)
        return merged.nodes

    def fork(self, keys: Keys, watermark: Progress, closes: bool, emits: bool) -> SessionCells:
        other = SessionCells(self._shape, self._slices)
        other.marks = None if self.marks is None else self.marks.fork()
        other._spilled = None if self._spilled is None else self._spilled.copy()
        other._below, other._is_here = self, np.zeros(self._index.size, np.bool_)
        return other

    def _fetch(self, below: SessionCells, nodes: Longs) -> None:
        """Takes over sessions that an epoch touches."""
        nodes = nodes[~self._is_here[nodes]]
        if not len(nodes):
            return
        self._is_here[nodes] = True
        staged = below.staged(nodes)
        own = self._insert(Keys.from_arrow(staged.column(0)), staged)
        if self.marks is not None and below.marks is not None:
            self.marks.copy_from(below.marks, nodes, own)

    def sessions_of(self, keys: Keys) -> Longs:
        return self._index.of(keys)

    def due(self, watermark: Progress, closes: bool, emits: bool) -> Longs:
        """The sessions in memory that fire."""
        if self.marks is not None:
            return self.marks.due(self._index, watermark, closes, emits)
        return self._index.ended(np.inf if closes else watermark)

    def fire(self, watermark: Progress, closes: bool, emits: bool = False) -> Iterator[Fired]:
        if self._below is not None:
            self._fetch(self._below, self._below.due(watermark, closes, emits))
        if self.marks is not None:
            yield from self.marks.fire(self._index, watermark, closes, emits, self._now, self._cells.clear)
            return
        upto = np.inf if closes else watermark
        while self._spilled:
            # One run after another, and what is over before the next one begins to end: that is all that is in memory.
            next_end = self._spilled.next_end
            assert next_end is not None
            if next_end > upto or (next_end == TIME_MAX and upto < np.inf):
                break
            self._insert_staged([self._spilled.take_next()])
            if self._spilled.next_end is not None:
                yield from self._fire(min(upto, self._spilled.next_end - 1))
        yield from self._fire(upto)

    def _now(self, nodes: Longs) -> Iterator[tuple[Longs, Fired]]:
        yield nodes, self._results(nodes)

    def _insert_staged(self, batches: Iterable[pa.RecordBatch]) -> None:
        self.insert([(Keys.from_arrow(batch.column(0)), batch) for batch in batches])

    def _fire(self, watermark: Progress) -> Iterator[Fired]:
        nodes = self._index.ended(watermark)
        if self._spilled and len(nodes):
            reached = self._spilled.take_reached(self._index.keys(nodes), self._index.ends[nodes], watermark)
            self._insert_staged(list(reached))
            nodes = self._index.ended(watermark)
        if len(nodes):
            yield self._results(nodes)
            self._cells.clear(nodes)
            self._index.remove(nodes)

    def open(self, keys: Keys | None = None) -> Iterator[Fired]:
        nodes = self._index.all() if keys is None else self._index.of(keys)
        if self.marks is not None:
            nodes = nodes[self.marks.is_open(self._index, nodes)]
        if self._spilled:
            merged = SessionCells(self._shape, self._slices)
            merged._insert_staged([*self._spilled.batches(keys), self.staged(nodes)])
            yield from merged.open(keys)
        elif len(nodes):
            yield self._results(nodes)

    def _results(self, nodes: Longs) -> Fired:
        results = self._layout.results(self._cells.reserve(self._index.size).take(nodes))
        if self.marks is not None:
            results |= self.marks.columns(nodes)
        index = self._index
        return Fired(index.keys(nodes), index.starts[nodes], index.ends[nodes], results)

    def contents(self) -> Iterator[pa.RecordBatch]:
        nodes = self._index.all()
        in_memory = [self.staged(nodes)] if len(nodes) else []
        return chain(self._spilled.batches(), in_memory) if self._spilled else iter(in_memory)

    def staged(self, nodes: Longs) -> pa.RecordBatch:
        index = self._index
        cells = self._layout.to_arrow(self._cells.reserve(index.size).take(nodes))
        columns = [index.keys(nodes).to_arrow(), pa.array(index.starts[nodes]), pa.array(index.ends[nodes])]
        return pa.RecordBatch.from_arrays([*columns, *cells], schema=self._shape.staged)

    @property
    def withheld(self) -> bool:
        return self.marks is not None and self.marks.withheld(self._index)

    @property
    def oldest(self) -> int:
        return min(self._index.oldest, self._spilled.oldest) if self._spilled else self._index.oldest

    @property
    def newest(self) -> int | None:
        nodes = self._index.all()
        ends = [int(self._index.ends[nodes].max())] if len(nodes) else []
        if self._spilled and self._spilled.newest is not None:
            ends.append(self._spilled.newest)
        return max(ends, default=None)

    @property
    def count(self) -> int:
        """What is on disk of a session counts as one of its own."""
        return len(self._index) + (self._spilled.rows if self._spilled else 0)

    @property
    def nbytes(self) -> int:
        marks = 0 if self.marks is None else self.marks.nbytes
        known = self._spilled.memory_bytes if self._spilled else 0
        return self._index.nbytes + self._cells.nbytes + marks + known

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
        if self.marks is not None:
            return self.nbytes
        return self._spilled.memory_bytes if self._spilled else 0

    def spill(self, nbytes: int) -> int:
        """Those that end last go to disk, at least half of all: what stays is put together anew."""
        nodes = self._index.all()
        if self._spilled is None or not len(nodes):
            return 0
        before = self.memory_bytes
        nodes = nodes[np.argsort(self._index.ends[nodes], kind="stable")]
        needed = -(-nbytes * len(nodes) // max(before, 1))
        stay = max(0, len(nodes) - max(needed, (len(nodes) + 1) // 2))
        self._spilled.put(self.staged(nodes[stay:]))
        staying = self.staged(nodes[:stay])
        self._index = SessionIndex(self._shape.key_kind, self._shape.window.touching)
        self._cells = GrowingCells(self._layout)
        self._insert_staged([staying])
        return before - self.memory_bytes

    def close(self) -> None:
        if self._spilled is not None:
            self._spilled.close()

    def marked(self) -> Iterator[tuple[str, pa.Table]]:
        if self.marks is not None:
            yield from self.marks.contents(self._index)

    def load_marks(self, name: str, rows: pa.Table) -> None:
        assert self.marks is not None
        self.marks.load(name, rows, self._index)

    def validate(self) -> None:
        self._index.validate()
        if self.marks is not None:
            self.marks.validate(self._index)
        if self._spilled is not None:
            self._spilled.validate()


class SessionRows:
    """AUR: a session's rows, in a log of rows under the number of its node."""

    def __init__(self, shape: WindowShape, rows: RowLog, slices: int) -> None:
        self._shape = shape
        self._slices = slices
        self.marks = None if shape.fires_once else SessionMarks(shape, slices)
        self._whole = WholeWindows(shape.values, shape.aggregates)
        self._index = SessionIndex(shape.key_kind, shape.window.touching)
        self.rows = rows
        self._schema = shape.staged.remove(0)
        self._value_names = shape.values.names
        # Of sessions that may be cut: the first moment at which one of their parts may be over.
        self._triggers: Longs = np.empty(0, np.int64)

    def insert(self, portions: list[tuple[Keys, pa.RecordBatch]]) -> None:
        for keys, batch in portions:
            self._insert(keys, batch)

    def _insert(self, keys: Keys, batch: pa.RecordBatch) -> None:
        starts, ends = views.longs(batch.column(1)), views.longs(batch.column(2))
        merged = self._index.join(keys, starts, ends)
        nodes = merged.nodes
        if self.marks is not None:
            self.marks.joined(merged, self._index.size)
        if len(merged.gone):
            self.rows.merge(merged.into, merged.gone)
        self.rows.append(nodes, pa.RecordBatch.from_arrays(batch.columns[1:], schema=self._schema))
        touched = np.unique(nodes)
        if self._shape.window.is_cut:
            self._note_cuts(merged, starts, batch)
        self.rows.expect(touched, self._triggered(touched))

    def _note_cuts(self, merged: Merged, starts: Longs, batch: pa.RecordBatch) -> None:
        known = len(self._triggers)
        if self._index.size > known:
            self._triggers = grown(self._triggers, known, self._index.size)
            self._triggers[known:] = TIME_MAX
        np.minimum.at(self._triggers, merged.roots, self._triggers[merged.gone])
        self._triggers[merged.gone] = TIME_MAX
        if CUT in batch.schema.names:
            cuts = views.longs(batch.column(CUT)) != 0
            np.minimum.at(self._triggers, merged.nodes[cuts], np.minimum(starts[cuts], TIME_MAX - 1) + 1)

    def _triggered(self, nodes: Longs) -> Longs:
        """When sessions are over, as far as is known now."""
        ends = self._index.ends[nodes]
        if not self._shape.window.is_cut:
            return ends
        longest = self._shape.window.longest
        if longest:
            starts = self._index.starts[nodes]
            ends = np.minimum(ends, np.where(starts > TIME_MAX - longest, TIME_MAX, starts + longest))
        return np.minimum(ends, self._triggers[nodes])

    def fire(self, watermark: Progress, closes: bool, emits: bool = False) -> Iterator[Fired]:
        if self.marks is not None:
            yield from self.marks.fire(self._index, watermark, closes, emits, self._now, self.rows.drop)
            return
        if self._shape.window.is_cut:
            yield from self._fire_parts(watermark, closes)
            return
        nodes = self._due(watermark, closes, emits)
        for some in in_portions(self.rows, nodes):
            batch, offsets = self.rows.take(some)
            yield self._results(some, batch, offsets)
        if len(nodes):
            self._index.remove(nodes)

    def _now(self, nodes: Longs) -> Iterator[tuple[Longs, Fired]]:
        """What sessions are that stay, some after the others."""
        for some in in_portions(self.rows, nodes):
            batch, offsets = self.rows.peek(some)
            yield some, self._results(some, batch, offsets)
        # Read next when they go.
        ends, lateness = self._index.ends[nodes], self._shape.lateness
        self.rows.expect(nodes, np.where(ends > TIME_MAX - lateness, TIME_MAX, ends + lateness))

    def _fire_parts(self, watermark: Progress, closes: bool) -> Iterator[Fired]:
        """Sessions that are cut: of those of which a part may be over, all rows are looked at; what is open stays."""
        for some in in_portions(self.rows, self._due(watermark, closes, emits=False)):
            yield from self._cut_off(some, watermark, closes)

    def _cut_off(self, nodes: Longs, watermark: Progress, closes: bool) -> Iterator[Fired]:
        batch, offsets = self.rows.take(nodes)
        keys = self._index.keys(nodes)
        self._triggers[nodes] = TIME_MAX
        self._index.remove(nodes)
        window = self._shape.window
        parts = cut_sessions(batch, offsets, window.longest, window.touching, np.inf if closes else watermark)
        if len(parts.fired):
            rows = batch.take(pa.array(parts.rows))
            yield Fired(
                keys.take(parts.groups),
                parts.starts,
                parts.ends,
                self._whole.results(self._as_rows(rows, parts.fired)),
            )
        if len(parts.left):
            rows = batch.take(pa.array(parts.left))
            own = keys.take(parts.left_groups)
            self._insert(
                own, pa.RecordBatch.from_arrays([own.to_arrow(), *rows.columns], schema=self._shape.staged)
            )

    def _as_rows(self, batch: pa.RecordBatch, offsets: Longs) -> Rows:
        values = [batch.column(name) for name in self._value_names]
        return Rows(views.longs(batch.column(TIME)), values, offsets)

    def open(self, keys: Keys | None = None) -> Iterator[Fired]:
        nodes = self._index.all() if keys is None else self._index.of(keys)
        if self.marks is not None:
            nodes = nodes[self.marks.is_open(self._index, nodes)]
        for some in in_portions(self.rows, nodes):
            batch, offsets = self.rows.peek(some)
            if not self._shape.window.is_cut:
                yield self._results(some, batch, offsets)
                continue
            window = self._shape.window
            parts = cut_sessions(batch, offsets, window.longest, window.touching, np.inf)
            rows = self._as_rows(batch.take(pa.array(parts.rows)), parts.fired)
            owners = self._index.keys(some).take(parts.groups)
            yield Fired(owners, parts.starts, parts.ends, self._whole.results(rows))

    def _results(self, nodes: Longs, batch: pa.RecordBatch, offsets: Longs) -> Fired:
        if self._whole.is_ordered:
            groups = np.repeat(np.arange(len(nodes)), np.diff(offsets))
            order, _ = self._whole.order(groups, views.longs(batch.column(TIME)), len(nodes))
            batch = batch.take(pa.array(order))
        index = self._index
        keys, starts, ends = index.keys(nodes), index.starts[nodes].copy(), index.ends[nodes].copy()
        named = naming(self._shape.keys, keys, starts, ends)
        results = self._whole.results(self._as_rows(batch, offsets)._replace(named=named))
        if self.marks is not None:
            results |= self.marks.columns(nodes)
        return Fired(keys, starts, ends, results)

    def contents(self) -> Iterator[pa.RecordBatch]:
        nodes = self._index.all()
        return with_keys(self._index.keys(nodes), self.rows.frozen(nodes), self._shape.staged)

    def recode(self, shape: WindowShape) -> None:
        self._shape, self._whole = shape, WholeWindows(shape.values, shape.aggregates)

    def fork(self, keys: Keys, watermark: Progress, closes: bool, emits: bool) -> SessionRows:
        nodes = np.union1d(self._index.of(keys), self._due(watermark, closes, emits))
        rows = OverlayRows(self.rows, self._schema, nodes.tolist())
        other = SessionRows(self._shape, rows, self._slices)
        other._index = self._index.part(nodes)
        if self.marks is not None:
            other.marks = self.marks.fork()
            own = np.arange(len(nodes))
            other.marks.joined(Merged(own, own[:0], own[:0], own[:0]), len(nodes))
            other.marks.copy_from(self.marks, nodes, own)
        if self._shape.window.is_cut:
            other._triggers = self._triggers[nodes]
        return other

    def _due(self, watermark: Progress, closes: bool, emits: bool) -> Longs:
        """The sessions of which something may fire."""
        if self.marks is not None:
            return self.marks.due(self._index, watermark, closes, emits)
        if not self._shape.window.is_cut:
            return self._index.ended(np.inf if closes else watermark)
        nodes = self._index.all()
        return nodes if closes else nodes[self._triggered(nodes) <= watermark]

    @property
    def withheld(self) -> bool:
        return self.marks is not None and self.marks.withheld(self._index)

    @property
    def oldest(self) -> int:
        return self._index.oldest

    @property
    def newest(self) -> int | None:
        nodes = self._index.all()
        return int(self._index.ends[nodes].max()) if len(nodes) else None

    @property
    def count(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        return self._index_bytes + self.rows.memory_bytes

    @property
    def staying_bytes(self) -> int:
        return self._index_bytes + self.rows.staying_bytes

    @property
    def _index_bytes(self) -> int:
        """What it takes to know of each session."""
        marks = 0 if self.marks is None else self.marks.nbytes
        return self._index.used_bytes + int(self._triggers.nbytes) + marks

    def marked(self) -> Iterator[tuple[str, pa.Table]]:
        if self.marks is not None:
            yield from self.marks.contents(self._index)

    def load_marks(self, name: str, rows: pa.Table) -> None:
        assert self.marks is not None
        self.marks.load(name, rows, self._index)

    def validate(self) -> None:
        self._index.validate()
        if self.marks is not None:
            self.marks.validate(self._index)
        self.rows.validate()
        assert set(self.rows.groups().tolist()) <= set(self._index.all().tolist())
