"""Panes larger than memory: runs of keys and cells on disk, and a table in memory that takes in what comes after them.

A key may be in several runs of a pane and in its table: cells are merged when they are read, part by part of the keys'
hashes, so that no more than one part of a window is in memory at once. Sums of doubles may then differ in their last digits
from those of a pane that never left memory. Runs of a pane are merged into one once they hold a key too often (`msa`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.durable.crashpoints import around
from millpond.errors import CorruptFile, RuleFailed
from millpond.stores.keys import Keys
from millpond.stores.windows.cellruns import CellRuns, Run
from millpond.stores.windows.cells import Cells
from millpond.stores.windows.celltable import CellTable
from millpond.stores.windows.shape import WindowShape
from millpond.stores.windows.slides import between

Longs = NDArray[np.int64]
Span = tuple[int, int]
Chunk = tuple[Keys, Cells]
PARTS_MAX = 64
"""Of a run, by bits of the hash that slices do not go by: a power of two."""
_WRITTEN_ROWS = 2048
"""Of a part as it is written, about."""
_READ_ROWS = 16384
"""Of what is merged at once, about, while there are parts enough."""
MSA = 1.5
"""Rows in the runs of a pane for each of its keys, at most."""
RUNS_MAX = 32
_SAMPLED = np.uint64(63)
"""How often a key is in the runs is known from one of so many and one more."""


class SpilledPanes:
    """What one slice has on disk, by pane."""

    def __init__(
        self, shape: WindowShape, runs: CellRuns, *, msa: float = MSA, runs_max: int = RUNS_MAX
    ) -> None:
        assert shape.layout is not None
        self._shape = shape
        self._layout = shape.layout
        self._schema = pa.schema([shape.staged.field(0), *shape.layout.schema])
        self._files = runs
        self._msa, self._runs_max = msa, runs_max
        self._runs: dict[Span, list[Run]] = {}
        self._samples: dict[Span, NDArray[np.uint64]] = {}
        self._grown: set[Span] = set()  # with new runs, since functions of the user's could merge them
        self._is_shared = False

    def __bool__(self) -> bool:
        return bool(self._runs)

    @property
    def rows(self) -> int:
        return sum(run.rows for runs in self._runs.values() for run in runs)

    @property
    def memory_bytes(self) -> int:
        runs = sum(run.offsets.nbytes + run.checksums.nbytes for runs in self._runs.values() for run in runs)
        return runs + sum(sample.nbytes for sample in self._samples.values())

    @property
    def disk_bytes(self) -> int:
        return self._files.disk_bytes

    def put(self, span: Span, table: CellTable) -> None:
        """A table becomes a run of its pane. Nothing has changed if the disk refuses it."""
        keys, cells = table.all()
        parts = _power(len(keys) // _WRITTEN_ROWS, PARTS_MAX)
        numbers = parts_of(keys, parts)
        run = self._files.write(
            self._batch(keys.take(rows), cells.take(rows))
            for rows in (np.flatnonzero(numbers == part) for part in range(parts))
        )
        self._runs.setdefault(span, []).append(run)
        sample = keys.hashes[(keys.hashes >> np.uint64(40)) & _SAMPLED == 0]
        known = self._samples.get(span)
        self._samples[span] = sample if known is None else np.concatenate([known, sample])
        if self._layout.has_folds:
            self._grown.add(span)

    def tidy(self, span: Span) -> None:
        """Merges the runs of a pane where they hold a key too often. Nothing has changed if the disk refuses it."""
        # Functions of the user's run where they may fail: not here.
        if not self._layout.has_folds and self._is_amplified(span):
            self._compact(span)

    def tidy_folds(self) -> None:
        """`tidy` for all panes, by functions of the user's. Runs of which these fail stay as they are, and so they do
        where the disk refuses it.
        """
        while self._grown:
            # Each is tried once, however that ends: an epoch that is repeated gets further.
            span = self._grown.pop()
            if self._is_amplified(span):
                try:
                    self._compact(span)
                except CorruptFile:
                    raise
                except (RuleFailed, OSError):
                    continue

    def _is_amplified(self, span: Span) -> bool:
        sample = self._samples[span]
        return len(self._runs[span]) > self._runs_max or len(sample) > self._msa * len(np.unique(sample))

    def _compact(self, span: Span) -> None:
        """One run of all."""
        runs = self._runs[span]
        parts = _power(sum(run.rows for run in runs) // _WRITTEN_ROWS, PARTS_MAX)
        tables = (self.table(self._on_disk(span, part, parts)) for part in range(parts))
        with around("scratch.compact"):
            self._runs[span] = [self._files.write(self._batch(*table.all()) for table in tables)]
        self._samples[span] = np.unique(self._samples[span])
        self._files.figures["compactions"] += 1
        self._files.drop(runs)

    def _batch(self, keys: Keys, cells: Cells) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(
            [keys.to_arrow(), *self._layout.to_arrow(cells)], schema=self._schema
        )

    def _on_disk(self, span: Span, part: int, parts: int) -> Iterator[Chunk]:
        """The keys of one of so many parts, however many the runs have."""
        for run in self._runs.get(span, ()):
            written = len(run.checksums)
            for number in range(
                part * written // parts, max((part + 1) * written // parts, part * written // parts + 1)
            ):
                keys, cells = self._chunk(self._files.read(run, number, self._schema))
                yield _of_part(keys, cells, part, parts) if written < parts else (keys, cells)

    def _chunk(self, batch: pa.RecordBatch) -> Chunk:
        return Keys.from_arrow(batch.column(0)), self._layout.from_arrow(batch.columns[1:])

    def chunks(self, span: Span, table: CellTable, part: int, parts: int) -> Iterator[Chunk]:
        """Keys and cells of one part of a pane, in the order in which they came: on disk, then in memory."""
        yield from self._on_disk(span, part, parts)
        if len(table):
            yield _of_part(*table.all(), part, parts)

    def table(self, chunks: Iterator[Chunk]) -> CellTable:
        merged = CellTable(self._shape.key_kind, self._layout)
        for keys, cells in chunks:
            merged.take_in(keys, cells)
        return merged

    def windows(
        self, panes: Mapping[Span, CellTable], spans: Sequence[Span]
    ) -> Iterator[tuple[Span, CellTable]]:
        """The cells of windows made of panes, by the windows' spans in ascending order: for each part, all windows.

        A pane is read once for all of them.
        """
        runs = [run for span in panes for run in self._runs.get(span, ())]
        rows = sum(run.rows for run in runs) + sum(map(len, panes.values()))
        parts = _power(-(-rows // _READ_ROWS), max((len(run.checksums) for run in runs), default=1))
        every = sorted(panes)
        for part in range(parts):
            loaded: dict[Span, list[Chunk]] = {}
            for begin, end in spans:
                own = between(every, begin, end)
                loaded = {span: chunks for span, chunks in loaded.items() if span[0] >= begin}
                for span in own:
                    if span not in loaded:
                        loaded[span] = list(self.chunks(span, panes[span], part, parts))
                merged = self.table(chunk for span in own for chunk in loaded[span])
                if len(merged):
                    yield (begin, end), merged

    def batches(self, span: Span) -> Iterator[pa.RecordBatch]:
        """All rows on disk of a pane, as they are now: keys and cells. They may be read later, and from any thread."""
        runs = list(self._runs.get(span, ()))
        pin = self._files.pin(runs)

        def read() -> Iterator[pa.RecordBatch]:
            for run in runs:
                for part in range(len(run.checksums)):
                    yield self._files.read(run, part, self._schema)
            pin.release()

        return read()

    @property
    def spans(self) -> list[Span]:
        return list(self._runs)

    def has(self, span: Span) -> bool:
        return span in self._runs

    def drop_all_but(self, spans: Mapping[Span, CellTable]) -> None:
        for span in [span for span in self._runs if span not in spans]:
            del self._samples[span]
            self._grown.discard(span)
            runs = self._runs.pop(span)
            if not self._is_shared:
                self._files.drop(runs)

    def copy(self) -> SpilledPanes:
        """The same runs, to be read; what is dropped from it stays on disk."""
        other = SpilledPanes(self._shape, self._files)
        other._runs = {span: list(runs) for span, runs in self._runs.items()}
        other._samples = dict(self._samples)
        other._is_shared = True
        return other

    def close(self) -> None:
        self._files.close()

    def validate(self) -> None:
        for span, runs in self._runs.items():
            assert runs, "a pane without runs is forgotten"
            assert span in self._samples
            for run in runs:
                for part in range(len(run.checksums)):
                    keys, _ = self._chunk(self._files.read(run, part, self._schema))
                    assert (parts_of(keys, len(run.checksums)) == part).all(), (
                        "a key lies in the part of its hash"
                    )
        if not self._is_shared:
            assert self.disk_bytes == sum(run.nbytes for runs in self._runs.values() for run in runs)


def parts_of(keys: Keys, parts: int) -> NDArray[np.uint8]:
    """In which of so many parts each key is."""
    numbers = (keys.hashes >> np.uint64(24)) & np.uint64(PARTS_MAX - 1)
    return (numbers // np.uint64(PARTS_MAX // parts)).astype(np.uint8)


def _of_part(keys: Keys, cells: Cells, part: int, parts: int) -> Chunk:
    if parts == 1:
        return keys, cells
    rows = np.flatnonzero(parts_of(keys, parts) == part)
    return keys.take(rows), cells.take(rows)


def _power(number: int, at_most: int) -> int:
    """The power of two from 1 on that is next below, and not above the bound."""
    return 1 << min(max(number, 1).bit_length() - 1, at_most.bit_length() - 1)
