"""Sessions larger than memory: those that end last lie on disk, in runs of neighbouring ends.

Nobody looks for a session on disk when rows come: they begin another in memory, and both become one when the run is read,
which is when its first session ends, or when one in memory would fire that reaches into one of the run. To tell that, two
bytes or so of each session on disk stay in memory: a Bloom filter of its run's keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.stores import views
from millpond.stores.keys import Keys
from millpond.stores.windows.cellruns import CellRuns, Run
from millpond.stores.windows.shape import WindowShape
from millpond.times import TIME_MAX, Progress

Longs = NDArray[np.int64]
RUN_ROWS = 1 << 15
"""Sessions of one run, at most: they are read at once."""


_ROWS, _STARTS = 0, 1
"""The parts of a run."""
_START_SCHEMA = pa.schema({"hash": pa.uint64(), "start": pa.int64()})
_BITS = 16
"""Of a filter for each key, at least."""


class _Sessions(NamedTuple):
    """A run, and what is known of it. Its second part has the hashes of keys, ascending, with the starts of sessions."""

    run: Run
    filter: NDArray[np.uint8]
    first_start: int
    first_end: int
    last_end: int


class SpilledSessions:
    """What one slice has on disk: rows as they are staged."""

    def __init__(self, shape: WindowShape, runs: CellRuns, *, run_rows: int = RUN_ROWS) -> None:
        self._shape = shape
        self._files = runs
        self._run_rows = run_rows
        self._runs: list[_Sessions] = []
        """By their first ends."""
        self._is_shared = False

    def __bool__(self) -> bool:
        return bool(self._runs)

    @property
    def rows(self) -> int:
        return sum(each.run.rows // 2 for each in self._runs)  # each is in both parts

    @property
    def memory_bytes(self) -> int:
        return sum(each.filter.nbytes for each in self._runs)

    @property
    def disk_bytes(self) -> int:
        return self._files.disk_bytes

    @property
    def oldest(self) -> int:
        return min((each.first_start for each in self._runs), default=TIME_MAX)

    @property
    def newest(self) -> int | None:
        return max((each.last_end for each in self._runs), default=None)

    @property
    def next_end(self) -> int | None:
        """When the first session on disk ends, at the earliest."""
        return self._runs[0].first_end if self._runs else None

    def put(self, batch: pa.RecordBatch) -> None:
        """Sessions by ascending ends. Nothing has changed if the disk refuses them."""
        written: list[_Sessions] = []
        try:
            for begin in range(0, batch.num_rows, self._run_rows):
                part = batch.slice(begin, self._run_rows)
                starts, ends = views.longs(part.column(1)), views.longs(part.column(2))
                hashes = Keys.from_arrow(part.column(0)).hashes
                order = np.lexsort((starts, hashes))
                sorted_starts = [pa.array(hashes[order]), pa.array(starts[order])]
                run = self._files.write([part, pa.record_batch(sorted_starts, schema=_START_SCHEMA)])
                times = int(starts.min()), int(ends.min()), int(ends.max())
                written.append(_Sessions(run, _new_filter(hashes), *times))
        except BaseException:
            self._files.drop(each.run for each in written)
            raise
        self._runs = sorted([*self._runs, *written], key=lambda each: each.first_end)

    def take_next(self) -> pa.RecordBatch:
        """The run whose first session ends first; it is no longer here."""
        return self._take(self._runs[0])

    def _take(self, sessions: _Sessions) -> pa.RecordBatch:
        batch = self._read(sessions)
        self._runs = [each for each in self._runs if each is not sessions]
        if not self._is_shared:
            self._files.drop([sessions.run])
        return batch

    def _read(self, sessions: _Sessions) -> pa.RecordBatch:
        return self._files.read(sessions.run, _ROWS, self._shape.staged)

    def take_reached(self, keys: Keys, ends: Longs, watermark: Progress) -> Iterator[pa.RecordBatch]:
        """Runs with sessions of these keys that begin before those end, where all on disk end after the watermark."""
        assert self.next_end is None or self.next_end > watermark or self.next_end == TIME_MAX
        for sessions in list(self._runs):
            if sessions.first_start > ends.max():
                continue
            likely = np.flatnonzero(_may_have(sessions.filter, keys.hashes))
            if len(likely) and self._are_reached(sessions, keys.hashes[likely], ends[likely]):
                yield self._take(sessions)

    def _are_reached(self, sessions: _Sessions, hashes: NDArray[np.uint64], ends: Longs) -> bool:
        """Whether a session of one of these keys begins before its end."""
        batch = self._files.read(sessions.run, _STARTS, _START_SCHEMA)
        own, starts = batch.column(0).to_numpy(), batch.column(1).to_numpy()
        places = np.minimum(np.searchsorted(own, hashes), len(own) - 1)
        return bool(((own[places] == hashes) & (starts[places] <= ends)).any())

    def batches(self, keys: Keys | None = None) -> Iterator[pa.RecordBatch]:
        """All sessions that are on disk now, or those of these keys, and of any with the same hash. They may be read later,
        and from any thread.
        """
        wanted = None if keys is None else np.unique(keys.hashes)
        runs = list(self._runs)
        pin = self._files.pin(each.run for each in runs)

        def read() -> Iterator[pa.RecordBatch]:
            for sessions in runs:
                if wanted is None:
                    yield self._read(sessions)
                elif _may_have(sessions.filter, wanted).any():
                    batch = self._read(sessions)
                    hashes = Keys.from_arrow(batch.column(0)).hashes
                    yield batch.take(pa.array(np.flatnonzero(np.isin(hashes, wanted))))
            pin.release()

        return read()

    def copy(self) -> SpilledSessions:
        """The same runs, to be read; what is taken from it stays on disk."""
        other = SpilledSessions(self._shape, self._files)
        other._runs = list(self._runs)
        other._is_shared = True
        return other

    def close(self) -> None:
        self._files.close()

    def validate(self) -> None:
        ends = [each.first_end for each in self._runs]
        assert ends == sorted(ends)
        for sessions in self._runs:
            batch = self._read(sessions)
            hashes = self._files.read(sessions.run, _STARTS, _START_SCHEMA).column(0).to_numpy()
            assert 2 * batch.num_rows == 2 * len(hashes) == sessions.run.rows > 0
            assert (hashes[1:] >= hashes[:-1]).all()
            assert _may_have(sessions.filter, hashes).all()
            assert int(views.longs(batch.column(2)).min()) == sessions.first_end
        if not self._is_shared:
            assert self.disk_bytes == sum(each.run.nbytes for each in self._runs)


def _new_filter(hashes: NDArray[np.uint64]) -> NDArray[np.uint8]:
    size = 1 << (max(_BITS * len(hashes), 8) - 1).bit_length()
    is_set = np.zeros(size, np.bool_)
    for places in _places(hashes, size):
        is_set[places] = True
    return np.packbits(is_set, bitorder="little")


def _may_have(bits: NDArray[np.uint8], hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether keys of these hashes may be in there; False is certain."""
    answer = np.ones(len(hashes), np.bool_)
    for places in _places(hashes, 8 * len(bits)):
        answer &= (bits[places >> 3] >> (places & 7).astype(np.uint8)) & 1 != 0
    return answer


def _places(hashes: NDArray[np.uint64], size: int) -> Iterator[Longs]:
    # Keys of a slice have bits of their hashes in common: these are others.
    mixed = hashes * np.uint64(0x9E3779B97F4A7C15)
    for shift in (44, 24, 4):
        yield ((mixed >> np.uint64(shift)) & np.uint64(size - 1)).astype(np.int64)
