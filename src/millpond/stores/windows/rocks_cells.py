"""Cells in RocksDB, as a peer to compare with: what an epoch touches is read at once, merged by the same kernels, and written
in one batch.

Panes lie under `end|key`, sessions under `key|start`, big-endian. Which panes and sessions there are is known in memory.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.private import AnyPath
from millpond.stores import views
from millpond.stores.growing import grown
from millpond.stores.keys import Keys
from millpond.stores.windows.cells import CellLayout, Cells
from millpond.stores.windows.celltable import CellTable, Fired
from millpond.stores.windows.panes import PaneStore, results_of
from millpond.stores.windows.rocks_database import RocksMemory, as_bytes, imported, open_database
from millpond.stores.windows.session_index import SessionIndex
from millpond.stores.windows.sessions import SessionCells
from millpond.stores.windows.shape import WindowShape
from millpond.stores.windows.slides import Slides, has_ended
from millpond.times import TIME_MAX, TIME_MIN, Progress

Longs = NDArray[np.int64]
Span = tuple[int, int]
Portions = list[tuple[Keys, pa.RecordBatch]]
_SIGN = 1 << 63


class RocksCells:
    """A database of cells under keys of bytes."""

    def __init__(
        self, layout: CellLayout, directory: AnyPath, memory: RocksMemory, compaction: str = "level"
    ) -> None:
        self._layout = layout
        self._path = str(directory)
        self._options = memory.options(compaction=compaction)
        self._rocks = imported()
        self._memory = memory
        self._opened: tuple[Any, Any] | None = None

    @property
    def _database(self) -> Any:
        """Opened when it is first needed: many slices stay empty."""
        if self._opened is None:
            self._opened = open_database(self._path, self._memory, self._options)
        return self._opened[0]

    def _write(self, batch: Any) -> None:
        database = self._database
        assert self._opened is not None
        database.write(batch, self._opened[1])

    def options(self) -> dict[str, Any]:
        """How the database is set up, to be printed beside figures."""
        return dict(self._options)

    @property
    def disk_bytes(self) -> int:
        if self._opened is None:
            return 0
        return int(self._database.property_int_value("rocksdb.total-sst-files-size") or 0)

    def read(self, keys: list[bytes]) -> tuple[Cells, NDArray[np.bool_]]:
        """The cells of these keys, and which are there; those that are not have taken in nothing."""
        values = self._database.get(keys) if keys else []
        there = np.fromiter((value is not None for value in values), np.bool_, len(keys))
        cells = self._layout.zeros(len(keys))
        stored = self._unpacked([value for value in values if value is not None])
        cells.longs[there], cells.doubles[there] = stored
        return cells, there

    def write(self, keys: list[bytes], cells: Cells, gone: Iterable[bytes] = ()) -> None:
        """One batch."""
        batch = self._rocks.WriteBatch(raw_mode=True)
        words = np.concatenate([cells.longs, cells.doubles.view(np.int64)], axis=1)
        filling = time.thread_time()
        deque(map(batch.delete, gone), maxlen=0)
        deque(map(batch.put, keys, as_bytes(words)), maxlen=0)
        self._memory.note(len(batch), time.thread_time() - filling)
        self._write(batch)

    def between(self, begin: bytes, end: bytes) -> tuple[list[bytes], Cells]:
        """All that lies there, by a bounded iterator."""
        reads = self._rocks.ReadOptions()
        reads.set_iterate_upper_bound(end)
        stepping = time.thread_time()
        items = list(self._database.items(from_key=begin, read_opt=reads))
        self._memory.note_steps(len(items), time.thread_time() - stepping)
        return [key for key, _ in items], self._unpacked([value for _, value in items])

    def drop(self, ranges: Iterable[tuple[bytes, bytes]]) -> None:
        batch = self._rocks.WriteBatch(raw_mode=True)
        for begin, end in ranges:
            batch.delete_range(begin, end)
        if len(batch):
            self._write(batch)

    def flush(self) -> None:
        if self._opened is not None:
            self._database.flush(True)

    def _unpacked(self, values: list[bytes]) -> Cells:
        zeros = self._layout.zeros(0)
        width = zeros.longs.shape[1]
        words = np.frombuffer(bytearray(b"".join(values)), np.int64).reshape(
            len(values), width + zeros.doubles.shape[1]
        )
        return Cells(
            np.ascontiguousarray(words[:, :width]), np.ascontiguousarray(words[:, width:]).view(np.float64)
        )

    def close(self) -> None:
        if self._opened is not None:
            self._database.close()
            self._opened = None
            shutil.rmtree(self._path, ignore_errors=True)


class _RocksWindows:
    """What both kinds have in common."""

    def marked(self) -> Iterator[tuple[str, pa.Table]]:
        """It has no windows that stay or are updated."""
        return iter(())

    def load_marks(self, name: str, rows: pa.Table) -> None:
        raise ValueError("windows in RocksDB fire once")

    def __init__(self, shape: WindowShape, cells: RocksCells) -> None:
        assert shape.layout is not None
        self._shape = shape
        self._layout = shape.layout
        self.cells = cells

    memory_bytes = nbytes = staying_bytes = 0
    """That of the database is its own, within its budget."""

    @property
    def disk_bytes(self) -> int:
        return self.cells.disk_bytes

    @property
    def live_bytes(self) -> int:
        return self.cells.disk_bytes

    def spill(self, nbytes: int) -> int:
        """Of its write buffers all that there is; the database knows by itself when."""
        self.cells.flush()
        return 0

    def close(self) -> None:
        self.cells.close()


class RocksPanes(_RocksWindows):
    """RMW of aligned windows."""

    def __init__(self, shape: WindowShape, cells: RocksCells) -> None:
        super().__init__(shape, cells)
        self._sizes: dict[Span, int] = {}
        """How many keys each pane has."""
        self._slides = Slides(shape) if shape.window.kind == "sliding" else None

    def insert(self, portions: Portions) -> None:
        # Grouped first, by the store that would do all of it in memory.
        epoch = PaneStore(self._shape)
        epoch.insert(portions)
        names: list[bytes] = []
        owners: list[tuple[Span, int]] = []
        parts: list[Cells] = []
        for span, table in epoch.tables():
            keys, cells = table.all()
            prefix = _prefix(span)
            names += [prefix + key for key in _as_bytes(keys)]
            owners.append((span, len(keys)))
            parts.append(cells)
        stored, there = self.cells.read(names)
        fresh = Cells(np.concatenate([c.longs for c in parts]), np.concatenate([c.doubles for c in parts]))
        self._layout.merge(np.arange(len(names)), fresh, stored)
        self.cells.write(names, stored)
        begin = 0
        for span, count in owners:
            self._sizes[span] = self._sizes.get(span, 0) + int((~there[begin : begin + count]).sum())
            begin += count

    def fire(self, watermark: Progress, closes: bool, emits: bool = False) -> Iterator[Fired]:
        if self._slides is not None:
            for start in self._slides.due(sorted(start for start, _ in self._sizes), watermark, closes):
                yield self._window(start, None)
            done = [span for span in self._sizes if self._slides.is_done(span[0])]
        else:
            done = [span for span in self._sizes if closes or has_ended(span[1], watermark)]
            for span in sorted(done, key=lambda span: span[::-1]):
                yield self._results(span, [span], None)
        self.cells.drop((_prefix(span), _after(_prefix(span))) for span in done)
        for span in done:
            del self._sizes[span]

    def _window(self, start: int, keys: Keys | None) -> Fired:
        end = start + self._shape.window.size
        own = sorted(span for span in self._sizes if start <= span[0] < end)
        return self._results((max(start, TIME_MIN), min(end, TIME_MAX)), own, keys)

    def _results(self, window: Span, spans: Sequence[Span], keys: Keys | None) -> Fired:
        """Of panes that lie side by side, or of one."""
        table = CellTable(self._shape.key_kind, self._layout)
        for span in spans:
            table.take_in(*self._pane(span))
        return results_of(self._shape, table, *window, keys)

    def _pane(self, span: Span) -> tuple[Keys, Cells]:
        prefix = _prefix(span)
        names, cells = self.cells.between(prefix, _after(prefix))
        return _from_bytes([name[len(prefix) :] for name in names], self._shape.key_kind), cells

    def open(self, keys: Keys | None = None) -> Iterator[Fired]:
        if self._slides is not None:
            for start in self._slides.starts(sorted(start for start, _ in self._sizes), np.inf):
                yield self._window(start, keys)
            return
        for span in sorted(self._sizes):
            yield self._results(span, [span], keys)

    def contents(self) -> Iterator[pa.RecordBatch]:
        every: list[pa.RecordBatch] = []
        for span in sorted(self._sizes):
            epoch = PaneStore(self._shape)
            epoch.put(span, *self._pane(span))
            every += epoch.contents()
        return iter(every)

    def fork(self, keys: Keys, watermark: Progress, closes: bool, emits: bool) -> PaneStore:
        other = PaneStore(self._shape)
        for span in self._sizes:
            other.put(span, *self._pane(span))
        other.continue_after(self._slides.next_start if self._slides is not None else None)
        return other

    @property
    def oldest(self) -> int:
        return min((start for start, _ in self._sizes), default=TIME_MAX)

    @property
    def newest(self) -> int | None:
        extra = self._shape.window.size - self._shape.pane if self._slides is not None else 0
        return min(max(end for _, end in self._sizes) + extra, TIME_MAX) if self._sizes else None

    @property
    def count(self) -> int:
        return sum(self._sizes.values())

    def validate(self) -> None:
        for span, size in self._sizes.items():
            assert len(self._pane(span)[0]) == size > 0


class RocksSessions(_RocksWindows):
    """RMW of sessions. Which sessions a key has is in memory."""

    def __init__(self, shape: WindowShape, cells: RocksCells) -> None:
        super().__init__(shape, cells)
        self._index = SessionIndex(shape.key_kind, shape.window.touching)
        self._starts: Longs = np.empty(0, np.int64)
        """Of each node, the start under which its cells lie."""
        self._is_stored: NDArray[np.bool_] = np.empty(0, np.bool_)

    def insert(self, portions: Portions) -> None:
        # Grouped first: sessions of this epoch alone.
        epoch = SessionCells(self._shape, 1)
        epoch.insert(portions)
        for batch in epoch.contents():
            self._merge(Keys.from_arrow(batch.column(0)), batch)

    def _merge(self, keys: Keys, batch: pa.RecordBatch) -> None:
        index = self._index
        nodes, into, gone, _ = index.join(keys, views.longs(batch.column(1)), views.longs(batch.column(2)))
        known = len(self._starts)
        self._starts = grown(self._starts, known, index.size)
        self._is_stored = grown(self._is_stored, known, index.size)
        self._is_stored[known:] = False
        involved = np.unique(np.concatenate([nodes, into, gone]))
        # What is gone had the key of what it became a part of.
        owners = involved.copy()
        became = dict(zip(gone.tolist(), into.tolist(), strict=True))
        for place in np.flatnonzero(np.isin(involved, gone)).tolist():
            while int(owners[place]) in became:
                owners[place] = became[int(owners[place])]
        stored = np.flatnonzero(self._is_stored[involved])
        old_names = _session_names(index.keys(owners[stored]), self._starts[involved[stored]])
        cells = self._layout.zeros(len(involved))
        read, there = self.cells.read(old_names)
        assert there.all(), "what is known to be stored is there"
        cells.longs[stored], cells.doubles[stored] = read
        for one, other in zip(np.searchsorted(involved, into), np.searchsorted(involved, gone), strict=True):
            self._layout.merge(np.array([one]), cells.take(np.array([other])), cells)
        self._layout.merge(
            np.searchsorted(involved, nodes), self._layout.from_arrow(batch.columns[3:]), cells
        )
        stay = np.flatnonzero(~np.isin(involved, gone))
        left = involved[stay]
        names = _session_names(index.keys(left), index.starts[left])
        self.cells.write(names, cells.take(stay), gone=set(old_names) - set(names))
        self._is_stored[gone] = False
        self._is_stored[left] = True
        self._starts[left] = index.starts[left]

    def _read(self, nodes: Longs) -> Cells:
        cells, there = self.cells.read(_session_names(self._index.keys(nodes), self._starts[nodes]))
        assert there.all(), "each session has cells"
        return cells

    def fire(self, watermark: Progress, closes: bool, emits: bool = False) -> Iterator[Fired]:
        nodes = self._index.ended(np.inf if closes else watermark)
        if len(nodes):
            yield self._results(nodes)
            names = _session_names(self._index.keys(nodes), self._starts[nodes])
            self.cells.write([], self._layout.zeros(0), gone=names)
            self._is_stored[nodes] = False
            self._index.remove(nodes)

    def open(self, keys: Keys | None = None) -> Iterator[Fired]:
        nodes = self._index.all() if keys is None else self._index.of(keys)
        if len(nodes):
            yield self._results(nodes)

    def _results(self, nodes: Longs) -> Fired:
        index = self._index
        results = self._layout.results(self._read(nodes))
        return Fired(index.keys(nodes), index.starts[nodes], index.ends[nodes], results)

    def contents(self) -> Iterator[pa.RecordBatch]:
        nodes, index = self._index.all(), self._index
        if not len(nodes):
            return iter([])
        columns = [
            index.keys(nodes).to_arrow(),
            pa.array(index.starts[nodes]),
            pa.array(index.ends[nodes]),
        ]
        cells = self._layout.to_arrow(self._read(nodes))
        return iter([pa.RecordBatch.from_arrays([*columns, *cells], schema=self._shape.staged)])

    def fork(self, keys: Keys, watermark: Progress, closes: bool, emits: bool) -> SessionCells:
        other = SessionCells(self._shape, 1)
        other.insert([(Keys.from_arrow(batch.column(0)), batch) for batch in self.contents()])
        return other

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

    def validate(self) -> None:
        self._index.validate()
        self._read(self._index.all())
        assert int(self._is_stored.sum()) == len(self._index)


def _prefix(span: Span) -> bytes:
    """Of the keys of a pane. Two panes may end together: then their starts differ."""
    return b"".join((time + _SIGN).to_bytes(8, "big") for time in span[::-1])


def _after(prefix: bytes) -> bytes:
    """The first bytes beyond all that begin so."""
    return (int.from_bytes(prefix, "big") + 1).to_bytes(len(prefix), "big")


def _as_bytes(keys: Keys) -> list[bytes]:
    if keys.kind == "i64":
        return as_bytes(keys.longs.astype(">i8"))
    content, offsets = keys.data.tobytes(), keys.offsets.tolist()
    return [content[begin:end] for begin, end in itertools.pairwise(offsets)]


def _from_bytes(names: list[bytes], kind: str) -> Keys:
    if kind == "i64":
        return Keys.from_longs(np.frombuffer(b"".join(names), ">i8").astype(np.int64))
    return Keys.from_arrow(pa.array(names, pa.binary()))


def _session_names(keys: Keys, starts: Longs) -> list[bytes]:
    """`key|start`: a start has a fixed width, so no two of them are the same."""
    times = (starts.view(np.uint64) ^ np.uint64(_SIGN)).astype(">u8").tobytes()
    return [key + times[8 * place : 8 * place + 8] for place, key in enumerate(_as_bytes(keys))]
