"""What a container holds of one State: its slices, each with a store, a lock and a progress vector."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.code.rules import FetchRule, UpdateRule
from millpond.errors import BadMessage, Moved, NullKey, NullTime, NullValue
from millpond.kernels.hashing import slices_of
from millpond.schema import key_kind, parse_ddl
from millpond.stores.keys import Keys, decode_keys
from millpond.stores.rows import digest_rows
from millpond.stores.versioned import Ruleset, VersionedSlice, result_schema
from millpond.times import TIME_MAX, TIME_MIN, Progress, below_fetch_progress
from millpond.wire.connection import SlicedBatch
from millpond.wire.messages import StateSpec, Transactions

KEY, TIME, LOW, SEQ = "_key", "_time", "_low", "_seq"


class Runner(Protocol):
    """Does `work` on every item, perhaps on several threads; returns when all is done, raises what work raised."""

    def __call__(self, work: Callable[[Any], None], items: Sequence[Any], rows: int) -> None: ...


def run_serially(work: Callable[[Any], None], items: Sequence[Any], rows: int) -> None:
    for item in items:
        work(item)


class Record(NamedTuple):
    """One epoch's rows in this container, as the log keeps them."""

    state: str
    writer: str
    epoch: int
    digest: int
    batches: list[SlicedBatch]
    transactions: Transactions | None = None

    @property
    def rows(self) -> int:
        return sum(batch.num_rows for batch, _ in self.batches)


class Store(Protocol):
    """What a slice holds, as far as checkpoints go."""

    def copy(self) -> Store: ...

    def export(self) -> pa.RecordBatch: ...

    def load(self, batch: pa.RecordBatch) -> None: ...

    def validate(self) -> None: ...


_S = TypeVar("_S", bound=Store)


class HeldSlice(Generic[_S]):
    """One slice of one State. `vector` is `{writer: newest epoch applied here}`."""

    __slots__ = ("dirty", "lock", "snapshot", "store", "vector")

    def __init__(self, store: _S) -> None:
        self.store: _S = store
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
        self.rules = Ruleset(self.values, spec.update, spec.compact)
        self.slices = {number: HeldSlice(self.new_store()) for number in slices}
        self.fetch_progress: Progress = -math.inf
        self.final_below: Progress = -math.inf

    def places(self, owned: Sequence[int]) -> list[int]:
        """The slices, of those that the container owns, in which this State is."""
        return list(owned)

    def new_store(self) -> VersionedSlice:
        return VersionedSlice(self.key_kind, self.values, self.rules)

    def advance(self, fetch_progress: Progress, final_below: Progress) -> None:
        """F and the time below which no update comes any more. Neither falls."""
        self.fetch_progress = max(self.fetch_progress, fetch_progress)
        self.final_below = max(self.final_below, final_below)

    @property
    def keep_from(self) -> int | None:
        """The time from which every version is kept; None while nothing may be compacted.

        What is not final stays as well: an update before it would be folded into it.
        """
        keep_from = min(self.fetch_progress, self.final_below)
        if self.spec.compact.name == "keep_all" or keep_from == -math.inf:
            return None
        return int(min(max(keep_from, TIME_MIN), TIME_MAX))

    def schema_of(self, names: Sequence[str], transactions: Transactions | None = None) -> pa.Schema:
        """The columns of staged rows that have these names: with `_seq` at the end where the updater has one."""
        return self.rows_schema.append(pa.field(SEQ, pa.int64())) if SEQ in names else self.rows_schema

    # Rows in

    def digest(self, sliced: SlicedBatch) -> int:
        """The digest of a batch, if it is what this State takes and this container serves."""
        batch, counts = sliced
        self._check_counts(counts)
        if not batch.schema.equals(self.schema_of(batch.schema.names)):
            raise BadMessage(
                f"rows for state {self.spec.name} have columns {_columns(batch.schema)},"
                f" not {_columns(self.schema_of(batch.schema.names))}"
            )
        _check_no_nulls(batch)
        check_values(self.spec.update, self.values, batch.columns[2:])
        if self.keys.types not in ([pa.int64()], [pa.binary()]):
            # What is no key of this State must not come to rest in it.
            decode_keys(batch.column(0), self.keys)
        keys = Keys.from_arrow(batch.column(0))
        self._check_routed(keys, counts)
        return digest_rows(keys, batch.column(1).to_numpy(), batch.columns[2:])

    def check_epoch(self, record: Record) -> None:
        """Its rows were checked one by one."""
        if record.transactions is not None:
            raise BadMessage(f"{self.spec.name} is a State: transactions run on tables")

    def apply(self, record: Record, among: Iterable[int], run: Runner) -> int:
        """Applies an epoch's rows to every slice `among` those that has not seen it. Returns the rows applied."""
        writer, epoch, batches = record.writer, record.epoch, record.batches
        parts: dict[int, list[tuple[int, int, int]]] = {number: [] for number in among}
        for index, (_, counts) in enumerate(batches):
            starts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
            for number in np.flatnonzero(counts).tolist():
                if number in parts:
                    parts[number].append((index, int(starts[number]), int(starts[number + 1])))
        sequenced = any(SEQ in batch.schema.names for batch, _ in batches)
        keys = [Keys.from_arrow(batch.column(0)) for batch, _ in batches]
        times = [batch.column(1).to_numpy() for batch, _ in batches]
        applied: list[int] = []

        def apply_to(number: int) -> None:
            held = self.slices[number]
            with held.lock:
                if held.vector.get(writer, -1) >= epoch:
                    return
                mine = [
                    Portion(
                        keys[index].part(start, stop),
                        times[index][start:stop],
                        [column.slice(start, stop - start) for column in batches[index].batch.columns[2:]],
                    )
                    for index, start, stop in parts[number]
                ]
                for portion in ordered(mine) if sequenced else mine:
                    values = portion.values[: len(self.values)]
                    held.store.insert(portion.keys, portion.times, values, self.keep_from)
                    held.dirty = True
                    applied.append(len(portion.times))
                held.vector[writer] = epoch

        run(apply_to, list(parts), sum(batch.num_rows for batch, _ in batches))
        return sum(applied)

    # Questions

    def fetch(self, sliced: SlicedBatch, rule: FetchRule, run: Runner) -> pa.RecordBatch:
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
        lowest = lowest_asked(lows, highs, rule, self.spec)
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
            newest = held.store.latest(None if at == math.inf else int(at), self.keep_from)
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


class Portion(NamedTuple):
    """Rows for one slice; the last of the values may be `_seq`."""

    keys: Keys
    times: npt.NDArray[np.int64]
    values: list[pa.Array]


def ordered(portions: Sequence[Portion]) -> list[Portion]:
    """All rows of a slice's portions as one, by `_seq`; of two with the same the earlier stays before."""
    if not portions:
        return []
    keys = Keys.concat([portion.keys for portion in portions])
    times = np.concatenate([portion.times for portion in portions])
    values = [pa.concat_arrays(columns) for columns in zip(*(p.values for p in portions), strict=True)]
    order = np.argsort(values[-1].to_numpy(), kind="stable")
    return [Portion(keys.take(order), times[order], [column.take(pa.array(order)) for column in values])]


def lowest_asked(
    lows: npt.NDArray[np.int64] | None,
    highs: npt.NDArray[np.int64],
    rule: FetchRule,
    spec: StateSpec,
) -> Progress:
    """The lowest time that an answer depends on, as far as compaction goes.

    Without a low bound an answer depends on the upper bound alone if compaction keeps what it needs: the newest value
    below F, under `edges` the neighbours, under a user's own rule whatever the user's reads need. Else it depends on
    all values of its range.
    """
    if served_below(rule, spec) and (lows is None or rule.name == "as_of"):
        return int(highs.min())
    return int(lows.min()) + 1 if lows is not None and rule.name != "as_of" else -math.inf


def served_below(rule: FetchRule, spec: StateSpec) -> bool:
    """Whether compaction keeps what the rule needs of the values below F."""
    kept = ("neighbours",) if spec.update.name == "edges" else ("latest", "as_of")
    return rule.name in kept or spec.compact.name == "custom"


def check_values(update: UpdateRule, schema: pa.Schema, values: Sequence[pa.Array]) -> None:
    """Rules that fold take no nulls, and `edges` none in the neighbour and in what became of it."""
    refused: Sequence[int] = range(len(schema)) if update.folds else ()
    if update.name == "edges":
        refused = (0, len(schema) - 1)
    for number in refused:
        column, name = values[number], schema.field(number).name
        nulls = column.null_count or (
            column.flatten().null_count if pa.types.is_list(column.type) and update.name == "add" else 0
        )
        if nulls:
            raise NullValue(
                f"the value column {name!r} is null in {nulls:,} places, and the update rule takes no null",
                hint="filter these rows out, or give them a value",
                column=name,
                rows=nulls,
            )


def _check_no_nulls(batch: pa.RecordBatch) -> None:
    if batch.column(0).null_count:
        raise NullKey("a key is null", column=KEY, rows=batch.column(0).null_count)
    for name in (TIME, LOW, SEQ):
        if name in batch.schema.names and batch.column(name).null_count:
            raise NullTime("a time is null", column=name, rows=batch.column(name).null_count)


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
