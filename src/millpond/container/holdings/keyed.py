"""What kinds have in common whose rows and questions begin with a key, by which they are hashed to slices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.container.holdings.base import HeldSlice, Holding, Record, Store
from millpond.container.holdings.load import Laps
from millpond.errors import BadMessage, NullKey
from millpond.kernels.hashing import slices_of
from millpond.stores.keys import Keys, decode_keys
from millpond.wire.base import SliceId
from millpond.wire.connection import SlicedBatch

_S = TypeVar("_S", bound=Store)
_T = TypeVar("_T")
# Slices are worked on together while they have no more rows than this: whoever wants one of them waits for all.
ROWS_TOGETHER = 8192


class Portion(NamedTuple):
    """Rows of one batch that are for one slice."""

    keys: Keys
    batch: pa.RecordBatch


class KeyedHolding(Holding[_S]):
    """A kind gives what is done with a slice's rows; that it is done once, and in whole slices, is seen to here."""

    def keys_of(self, rows: SlicedBatch, wanted: pa.Schema) -> Keys:
        """The keys, if the rows have the columns that are wanted, and hash to the slices that they were sent for."""
        batch, counts = rows
        self.check_counts(counts)
        if not batch.schema.equals(wanted):
            raise BadMessage(
                f"what comes for {self.name} has columns {_columns(batch.schema)}, not {_columns(wanted)}"
            )
        if batch.column(0).null_count:
            raise NullKey("a key is null", column=batch.schema.names[0], rows=batch.column(0).null_count)
        keys = Keys.from_arrow(batch.column(0))
        claimed = np.repeat(np.arange(self.pond_slices, dtype=np.int32), counts)
        if not np.array_equal(slices_of(keys.hashes, self.pond_slices), claimed):
            raise BadMessage(
                "rows were sent for slices that their keys do not hash to",
                hint="client and pond must run the same version of millpond",
            )
        return keys

    def check_keys(self, encoded: pa.Array, keys: pa.Schema) -> None:
        """What is no key of this resident must not come to rest in it."""
        if keys.types not in ([pa.int64()], [pa.binary()]):
            decode_keys(encoded, keys)

    def change(
        self,
        record: Record,
        slices: Mapping[SliceId, HeldSlice[_S]],
        work: Callable[[_S, list[Portion]], None],
    ) -> int:
        """Has every slice see the record, once: `work` is done on its store with the rows it has. Returns all rows."""
        rows: list[int] = []

        def change(held: HeldSlice[_S], portions: list[Portion]) -> None:
            # A slice without rows has seen the epoch, too.
            with held.changing(record.writer, record.turn):
                if portions:
                    work(held.store, portions)
                    held.dirty = True
            own = sum(portion.batch.num_rows for portion in portions)
            held.load.rows_updated += own
            rows.append(own)

        self.each(record, slices, change)
        return sum(rows)

    def each(
        self,
        record: Record,
        slices: Mapping[SliceId, HeldSlice[_S]],
        work: Callable[[HeldSlice[_S], list[Portion]], None],
    ) -> None:
        """Works on every slice that has not seen the record, with its rows, under its lock."""
        keys = [
            part.keys if part.keys is not None else Keys.from_arrow(part.batch.column(0))
            for part in record.parts
        ]
        starts = [_starts(part.counts) for part in record.parts]
        laps = Laps()

        def visit(number: SliceId) -> None:
            held = slices[number]
            with held.lock:
                if held.has_seen(record.writer, record.turn):
                    return
                held.check_whole()
                portions = []
                for part, own, bounds in zip(record.parts, keys, starts, strict=True):
                    start, stop = bounds[number], bounds[number + 1]
                    if stop > start:
                        portions.append(Portion(own.part(start, stop), part.batch.slice(start, stop - start)))
                if portions:
                    laps.begin()
                    work(held, portions)
                    held.load.cpu_ns += laps.end_ns()
                else:
                    laps.skip()
                    work(held, portions)

        self.means.run(visit, list(slices), record.rows)

    def ask(self, counts: npt.NDArray[np.int32], ask: Callable[[_S, int, int], _T]) -> list[_T]:
        """What each slice that has questions says of those from start to stop, in the order of the questions."""
        starts = _starts(counts)
        said: dict[SliceId, Any] = dict.fromkeys(map(SliceId, np.flatnonzero(counts).tolist()))
        laps = Laps()

        def answer(number: SliceId) -> None:
            held = self.held(number)
            with held.lock:
                held.check_whole()
                laps.begin()
                said[number] = ask(held.store, starts[number], starts[number + 1])
                held.load.cpu_ns += laps.end_ns()
                held.load.rows_fetched += starts[number + 1] - starts[number]

        self.means.run(answer, list(said), starts[-1])
        return list(said.values())

    def change_together(
        self,
        record: Record,
        slices: Mapping[SliceId, HeldSlice[_S]],
        work: Callable[[int, list[tuple[_S, int, int]]], None],
    ) -> int:
        """As `change`, of several slices at a time: `work` gets the number of a part, and stores with their rows in it."""
        starts = [_starts(part.counts) for part in record.parts]
        sizes = sum((part.counts for part in record.parts), np.zeros(self.pond_slices, np.int64)).tolist()
        writer, turn = record.writer, record.turn
        rows: list[int] = []

        def change(group: list[SliceId]) -> None:
            fresh = [(number, slices[number]) for number in group]
            fresh = [(number, held) for number, held in fresh if not held.has_seen(writer, turn)]
            for _, held in fresh:
                held.check_whole()
            for _, held in fresh:
                held.torn = True
            began = time.thread_time_ns()
            for part, bounds in enumerate(starts):
                shares = [
                    (held.store, bounds[number], bounds[number + 1])
                    for number, held in fresh
                    if bounds[number + 1] > bounds[number]
                ]
                if shares:
                    work(part, shares)
            own = [sizes[number] for number, _ in fresh]
            cpu_ns = (time.thread_time_ns() - began) / max(sum(own), 1)
            for (_, held), size in zip(fresh, own, strict=True):
                # A slice without rows has seen the epoch, too.
                held.vector[writer] = turn
                held.torn = False
                if size:
                    held.dirty = True
                    held.load.rows_updated += size
                    held.load.cpu_ns += round(cpu_ns * size)
            rows.append(sum(own))

        self._together(slices, list(slices), sizes, change)
        return sum(rows)

    def ask_together(
        self,
        counts: npt.NDArray[np.int32],
        ask: Callable[[list[_S], npt.NDArray[np.int64], npt.NDArray[np.int64]], None],
    ) -> None:
        """Has slices that have questions answer theirs, several at a time: `ask` gets stores, with their starts and stops."""
        asked = np.flatnonzero(counts)
        numbers, sizes = list(map(SliceId, asked.tolist())), counts.tolist()
        ends = np.cumsum(counts, dtype=np.int64)[asked]
        starts = ends - counts[asked]
        places = dict(zip(numbers, range(len(numbers)), strict=True))

        def answer(group: list[SliceId]) -> None:
            first = places[group[0]]
            last = first + len(group)
            helds = self.each_held(group)
            for held in helds:
                if held.torn:
                    held.check_whole()
            began = time.thread_time_ns()
            ask([held.store for held in helds], starts[first:last], ends[first:last])
            cpu_ns = (time.thread_time_ns() - began) // int(ends[last - 1] - starts[first])
            for number, held in zip(group, helds, strict=True):
                load, size = held.load, sizes[number]
                load.rows_fetched += size
                load.cpu_ns += cpu_ns * size

        slices = dict(zip(numbers, self.each_held(numbers), strict=True))
        self._together(slices, numbers, sizes, answer)

    def _together(
        self,
        slices: Mapping[SliceId, HeldSlice[_S]],
        numbers: Sequence[SliceId],
        sizes: Sequence[int],
        work: Callable[[list[SliceId]], None],
    ) -> None:
        """Works on all of these slices, under the locks of those that are worked on together."""

        def visit(group: list[SliceId]) -> None:
            while group:
                with _locked([slices[number] for number in group]) as count:
                    work(group[:count])
                group = group[count:]

        self.means.run(visit, _groups(numbers, sizes), sum(sizes))


@contextmanager
def _locked(helds: Sequence[HeldSlice[Any]]) -> Iterator[int]:
    """Waits for the lock of the first, and takes those of as many behind it as are free: how many it has.

    Nobody has to wait for a slice because another one is busy; and who waits for a lock has no other.
    """
    helds[0].lock.acquire()
    count = 1
    try:
        while count < len(helds) and helds[count].lock.acquire(timeout=0):
            count += 1
        yield count
    finally:
        for held in helds[:count]:
            held.lock.release()


def _groups(numbers: Sequence[SliceId], sizes: Sequence[int]) -> list[list[SliceId]]:
    groups: list[list[SliceId]] = []
    rows = ROWS_TOGETHER
    for number in numbers:
        rows += sizes[number]
        if rows > ROWS_TOGETHER or not groups:
            groups.append([])
            rows = sizes[number]
        groups[-1].append(number)
    return groups


def _starts(counts: npt.NDArray[np.int32]) -> list[int]:
    starts: list[int] = np.concatenate(([0], np.cumsum(counts, dtype=np.int64))).tolist()
    return starts


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
