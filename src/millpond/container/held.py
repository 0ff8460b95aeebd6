"""What a container holds of one State: its slices, each with a store, a lock and a progress vector."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.errors import BadMessage, Moved, NullKey, NullTime
from millpond.kernels.hashing import slices_of
from millpond.schema import key_kind, parse_ddl
from millpond.stores.keys import Keys, decode_keys
from millpond.stores.versioned import VersionedSlice, result_schema
from millpond.times import TIME_MAX, TIME_MIN, Progress, below_fetch_progress
from millpond.wire.connection import SlicedBatch
from millpond.wire.messages import StateSpec

KEY, TIME, LOW = "_key", "_time", "_low"


class Runner(Protocol):
    """Does `work` on every item, perhaps on several threads; returns when all is done, raises what work raised."""

    def __call__(self, work: Callable[[Any], None], items: Sequence[Any], rows: int) -> None: ...


def run_serially(work: Callable[[Any], None], items: Sequence[Any], rows: int) -> None:
    for item in items:
        work(item)


class HeldSlice:
    """One slice of one State. `vector` is `{writer: newest epoch applied here}`."""

    __slots__ = ("dirty", "lock", "snapshot", "store", "vector")

    def __init__(self, store: VersionedSlice) -> None:
        self.store = store
        self.lock = threading.Lock()
        self.vector: dict[str, int] = {}
        self.dirty = False
        self.snapshot: str | None = None


class HeldState:
    """One State's slices in this container."""

    def __init__(self, spec: StateSpec, slices: Iterable[int], pond_slices: int) -> None:
        self.spec = spec
        self.pond_slices = pond_slices
        self.keys = parse_ddl(spec.key, "key")
        self.key_kind = key_kind(self.keys)
        self.values = parse_ddl(spec.value, "value")
        self.key_type = pa.int64() if self.key_kind == "i64" else pa.binary()
        self.rows_schema = pa.schema([(KEY, self.key_type), (TIME, pa.int64()), *self.values])
        self.slices = {number: HeldSlice(self.new_store()) for number in slices}
        self.fetch_progress: Progress = -math.inf

    def new_store(self) -> VersionedSlice:
        return VersionedSlice(self.key_kind, self.values)

    @property
    def keep_from(self) -> int | None:
        """The time from which every version is kept; None while nothing may be compacted."""
        if self.spec.compact.name == "keep_all" or self.fetch_progress == -math.inf:
            return None
        return int(min(max(self.fetch_progress, TIME_MIN), TIME_MAX))

    # Rows in

    def check_rows(self, sliced: SlicedBatch) -> Keys:
        """The batch's keys, if the batch is what this State takes and this container serves."""
        batch, counts = sliced
        self._check_counts(counts)
        if not batch.schema.equals(self.rows_schema):
            raise BadMessage(
                f"rows for state {self.spec.name} have columns {_columns(batch.schema)},"
                f" not {_columns(self.rows_schema)}"
            )
        _check_no_nulls(batch)
        if self.keys.types not in ([pa.int64()], [pa.binary()]):
            # What is no key of this State must not come to rest in it.
            decode_keys(batch.column(0), self.keys)
        keys = Keys.from_arrow(batch.column(0))
        self._check_routed(keys, counts)
        return keys

    def insert(
        self, writer: str, epoch: int, batches: Sequence[SlicedBatch], among: Iterable[int], run: Runner
    ) -> int:
        """Applies an epoch's rows to every slice `among` those that has not seen it. Returns the rows applied."""
        parts: dict[int, list[tuple[int, int, int]]] = {number: [] for number in among}
        for index, (_, counts) in enumerate(batches):
            starts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
            for number in np.flatnonzero(counts).tolist():
                if number in parts:
                    parts[number].append((index, int(starts[number]), int(starts[number + 1])))
        keys = [Keys.from_arrow(batch.column(0)) for batch, _ in batches]
        times = [batch.column(1).to_numpy() for batch, _ in batches]
        applied: list[int] = []

        def apply_to(number: int) -> None:
            held = self.slices[number]
            with held.lock:
                if held.vector.get(writer, -1) >= epoch:
                    return
                for index, start, stop in parts[number]:
                    values = [
                        column.slice(start, stop - start) for column in batches[index].batch.columns[2:]
                    ]
                    held.store.insert(
                        keys[index].part(start, stop), times[index][start:stop], values, self.keep_from
                    )
                    held.dirty = True
                    applied.append(stop - start)
                held.vector[writer] = epoch

        run(apply_to, list(parts), sum(batch.num_rows for batch, _ in batches))
        return sum(applied)

    # Questions

    def fetch(self, sliced: SlicedBatch, rule: str, run: Runner) -> pa.RecordBatch:
        """Answers in the order of the questions. Columns: `_key`, `_time` (upper bound), perhaps `_low`."""
        batch, counts = sliced
        self._check_counts(counts)
        ranged = LOW in batch.schema.names
        expected = [(KEY, self.key_type), (TIME, pa.int64())] + ([(LOW, pa.int64())] if ranged else [])
        if not batch.schema.equals(pa.schema(expected)):
            raise BadMessage(
                f"questions to state {self.spec.name} have columns {_columns(batch.schema)},"
                f" not {_columns(pa.schema(expected))}"
            )
        _check_no_nulls(batch)
        schema = result_schema(self.values, rule)
        if batch.num_rows == 0:
            return _empty(schema)
        keys = Keys.from_arrow(batch.column(0))
        self._check_routed(keys, counts)
        highs = batch.column(1).to_numpy()
        lows = batch.column(2).to_numpy() if ranged else None
        lowest = lowest_asked(lows, highs, rule)
        self.check_not_below(lowest)
        starts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        asked = np.flatnonzero(counts).tolist()
        found: dict[int, list[pa.Array]] = {}

        def answer(number: int) -> None:
            start, stop = int(starts[number]), int(starts[number + 1])
            held = self.slices[number]
            with held.lock:
                found[number] = held.store.fetch(
                    keys.part(start, stop),
                    None if lows is None else lows[start:stop],
                    highs[start:stop],
                    rule,
                )

        run(answer, asked, batch.num_rows)
        # Compaction may have begun to use a newer F while the slices were asked.
        self.check_not_below(lowest)
        if len(asked) == 1:
            return pa.RecordBatch.from_arrays(found[asked[0]], schema=schema)
        columns = [
            pa.concat_arrays(parts) for parts in zip(*(found[number] for number in asked), strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def newest(self, number: int, at: Progress) -> pa.RecordBatch:
        """One row per key of a slice: the newest version with time <= `at`."""
        held = self.slices[number]
        with held.lock:
            newest = held.store.latest(None if at == math.inf else int(at))
        # Compaction keeps the newest value below F, so that a read at F - 1 is right as well.
        self.check_not_below(at + 1)
        return newest

    def check_not_below(self, time: Progress) -> None:
        if time < self.fetch_progress:
            raise below_fetch_progress(time, self.fetch_progress, "long")

    def sweep(self, number: int, budget: int) -> bool:
        """Compacts a bounded part of a slice. True when there is nothing left to do."""
        keep_from = self.keep_from
        held = self.slices[number]
        with held.lock:
            return held.store.sweep(TIME_MIN if keep_from is None else keep_from, budget)

    def _check_routed(self, keys: Keys, counts: npt.NDArray[np.int32]) -> None:
        claimed = np.repeat(np.arange(self.pond_slices, dtype=np.int32), counts)
        if not np.array_equal(slices_of(keys.hashes, self.pond_slices), claimed):
            raise BadMessage(
                "rows were sent for slices that their keys do not hash to",
                hint="client and pond must run the same version of millpond",
            )

    def _check_counts(self, counts: npt.NDArray[np.int32]) -> None:
        if len(counts) != self.pond_slices:
            raise BadMessage(f"a batch counts its rows for {len(counts)} slices, not {self.pond_slices}")
        for number in np.flatnonzero(counts).tolist():
            if number not in self.slices:
                raise Moved(f"slice {number} is not served here", slice_id=number)


def lowest_asked(lows: npt.NDArray[np.int64] | None, highs: npt.NDArray[np.int64], rule: str) -> Progress:
    """The lowest time that an answer depends on, as far as compaction goes.

    Compaction keeps the newest value below F, so that `latest` without a low bound depends on the upper bound
    alone. Any other rule depends on all values of its range.
    """
    if lows is not None:
        return int(lows.min()) + 1
    return int(highs.min()) if rule == "latest" else -math.inf


def _check_no_nulls(batch: pa.RecordBatch) -> None:
    if batch.column(0).null_count:
        raise NullKey("a key is null", column=KEY, rows=batch.column(0).null_count)
    for name in (TIME, LOW):
        if name in batch.schema.names and batch.column(name).null_count:
            raise NullTime("a time is null", column=name, rows=batch.column(name).null_count)


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
