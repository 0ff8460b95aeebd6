"""What a container holds of a State: its slices of versioned values, and the questions that they answer."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.code.rules import CompactRule, FetchRule, UpdateRule, keep_all, put
from millpond.container.holdings.base import CheckedRows, HeldSlice, Means, Ready, Record, Size
from millpond.container.holdings.keyed import KeyedHolding, Portion
from millpond.errors import BadMessage, BadType, NullTime, SchemaMismatch, not_trusted
from millpond.schema import LOW, SEQ, TIME, check_key_types, format_ddl
from millpond.stores import views
from millpond.stores.budget import UNLIMITED, Budget
from millpond.stores.deltas import FrozenVersions, merged_versions
from millpond.stores.keys import Keys
from millpond.stores.outputs import in_batches
from millpond.stores.readiness import check_not_below, lowest_asked
from millpond.stores.rows import digest_rows
from millpond.stores.ruleset import check_rules, check_values
from millpond.stores.together import Newest, Updates
from millpond.stores.versioned import Ruleset, VersionedSlice, result_schema
from millpond.times import TIME_MAX, TIME_MIN, Progress
from millpond.wire.base import Done, Exchange, Read, SliceId
from millpond.wire.connection import Answer, SlicedBatch
from millpond.wire.specs import Resident, Spec
from millpond.wire.states import Question, ReadSlices, RowsWork, StateSpec


class StateHolding(KeyedHolding[VersionedSlice]):
    """One State's slices in this container."""

    work_type = RowsWork

    def __init__(self, resident: Resident, pond_slices: int, means: Means) -> None:
        super().__init__(resident, pond_slices, means)
        spec = resident.spec
        assert isinstance(spec, StateSpec)
        self._state = spec
        self._shape = spec.shape
        self.snapshot_schema = spec.shape.rows
        update, compact = spec.update, spec.compact
        if update.code is not None and not means.runs_code:
            # On disk is what updates brought, not what the rule made of it.
            update = put()
            self.broken = not_trusted(
                f"the values of state {self.name!r} are made by an update rule of its own"
            )
        if compact.code is not None and not means.runs_code:
            # What it would let go stays until it runs again.
            compact = keep_all()
        self.rules = Ruleset(spec.shape.values, update, compact)
        self.sweeps_code = compact.code is not None
        self.fetch_progress: Progress = resident.fetch_progress
        self.final_below: Progress = resident.final_below

    @staticmethod
    def opened(
        spec: StateSpec, existing: StateSpec | None, others: Sequence[Spec], owners: Sequence[int]
    ) -> StateSpec:
        if existing is None:
            _check_spec(spec)
        elif existing != spec:
            was, wanted = _described(existing), _described(spec)
            raise SchemaMismatch(
                f"state {spec.name!r} exists with another schema\n  existing:  {was}\n  requested: {wanted}",
                hint="open it with the existing schema, or choose another name",
                resident=spec.name,
                existing=was,
                requested=wanted,
            )
        return spec

    def new_store(self) -> VersionedSlice:
        return VersionedSlice(self._shape.key_kind, self._shape.values, self.rules)

    def advance(self, fetch_progress: Progress, final_below: Progress) -> None:
        self.fetch_progress = max(self.fetch_progress, fetch_progress)
        self.final_below = max(self.final_below, final_below)

    @property
    def progress(self) -> tuple[Progress, Progress]:
        return self.fetch_progress, self.final_below

    @property
    def keep_from(self) -> int | None:
        """The time from which every version is kept; None while nothing may be compacted.

        What is not final stays as well: an update before it would be folded into it.
        """
        keep_from = min(self.fetch_progress, self.final_below)
        if self.rules.compact.name == "keep_all" or keep_from == -math.inf:
            return None
        return int(min(max(keep_from, TIME_MIN), TIME_MAX))

    def delta(self, held: HeldSlice[VersionedSlice]) -> FrozenVersions:
        return held.store.delta()

    def merged(self, files: Sequence[pa.RecordBatch], whole: bool) -> pa.RecordBatch:
        return merged_versions(files, whole)

    def columns_of(self, names: Sequence[str], work: RowsWork) -> pa.Schema:
        return self._shape.sequenced_rows if SEQ in names else self._shape.rows

    # Rows in

    def check(self, rows: SlicedBatch) -> tuple[CheckedRows, int]:
        batch, counts = rows
        keys = self.keys_of(rows, self.columns_of(batch.schema.names, RowsWork()))
        _check_times(batch)
        check_values(self._state.update, self._shape.values, batch.columns[2:])
        self.check_keys(batch.column(0), self._shape.keys)
        return CheckedRows(batch, counts, keys), digest_rows(
            keys, batch.column(1).to_numpy(), batch.columns[2:]
        )

    def prepare(self, record: Record) -> Ready:
        """Rows were checked one by one. A rule that may fail runs once before it counts, on the keys it touches."""
        if self.rules.may_fail:
            what = f"the update rule of state {self.name!r}"
            self.means.limits.run(what, lambda: self.each(record, self.slices, self._try))
        return Ready(record)

    def apply(self, ready: Ready) -> int:
        # The user's own compaction is left to sweeps: after the decision nothing may fail.
        keep_from = self.keep_from if self.rules.compact.code is None else None
        return self._insert(ready.record, self.slices, keep_from)

    def replay(self, record: Record, slices: Mapping[SliceId, HeldSlice[VersionedSlice]]) -> int:
        # Nothing is compacted yet: updates come that are below today's progress.
        if not self._state.runs_code:
            return self._insert(record, slices, None)
        what = f"the update rule of state {self.name!r}, from the log,"
        return self.means.limits.run(what, lambda: self._insert(record, slices, None))

    def _insert(
        self, record: Record, slices: Mapping[SliceId, HeldSlice[VersionedSlice]], keep_from: int | None
    ) -> int:
        if Updates.takes(self.rules) and not any(SEQ in part.batch.schema.names for part in record.parts):
            return self._insert_together(record, slices, keep_from)

        def insert(store: VersionedSlice, portions: list[Portion]) -> None:
            for rows in self._rows(portions):
                store.insert(*rows, keep_from)

        return self.change(record, slices, insert)

    def _insert_together(
        self, record: Record, slices: Mapping[SliceId, HeldSlice[VersionedSlice]], keep_from: int | None
    ) -> int:
        parts = []
        for batch, _, keys in record.parts:
            own = Keys.from_arrow(batch.column(0)) if keys is None else keys
            times = views.longs(batch.column(1))
            parts.append(Updates(self.rules, own, times, batch.columns[2:], keep_from))
        return self.change_together(record, slices, lambda part, shares: parts[part].insert(shares))

    def _try(self, held: HeldSlice[VersionedSlice], portions: list[Portion]) -> None:
        for rows in self._rows(portions):
            held.store.trial(*rows, self.keep_from)

    def _rows(self, portions: list[Portion]) -> list[SliceRows]:
        """As a store takes them: in the order that counts where times are equal."""
        rows = [SliceRows(keys, batch.column(1).to_numpy(), batch.columns[2:]) for keys, batch in portions]
        sequenced = any(SEQ in batch.schema.names for _, batch in portions)
        return ordered(rows) if sequenced else rows

    # Questions

    def exchange(self, message: Exchange[Any], rows: SlicedBatch, budget: Budget = UNLIMITED) -> Answer[Any]:
        if not isinstance(message, Question):
            raise BadMessage(f"{self.name} is a State: it does not answer {type(message).__name__}")
        rule = FetchRule(message.rule, message.code, message.returns)
        if rule.code is None:
            return Answer(Done(), self.fetch(rows, rule, budget))
        what = f"the fetch rule {rule.code.name!r}"
        return Answer(Done(), self.means.limits.run(what, lambda: self.fetch(rows, rule, budget)))

    def fetch(self, rows: SlicedBatch, rule: FetchRule, budget: Budget = UNLIMITED) -> pa.RecordBatch:
        """Answers in the order of the questions. Columns: `_key`, `_time` (upper bound), perhaps `_low`."""
        batch, counts = rows
        ranged = LOW in batch.schema.names
        keys = self.keys_of(rows, self._shape.ranged_questions if ranged else self._shape.questions)
        _check_times(batch)
        schema = result_schema(self._shape.values, rule)
        # A long for each answer, and for where it was found.
        budget.claim(8 * batch.num_rows * (1 + len(schema)))
        if batch.num_rows == 0:
            return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
        highs = batch.column(1).to_numpy()
        lows = batch.column(2).to_numpy() if ranged else None
        lowest = lowest_asked(lows, highs, rule, self._state)
        self._check_not_below(lowest)

        if rule.name in ("latest", "as_of") and Newest.takes(self.rules, highs):
            newest = Newest(self.rules, keys, None if rule.name == "as_of" else lows, highs)
            self.ask_together(counts, newest.ask)
            self._check_not_below(lowest)
            return pa.RecordBatch.from_arrays(newest.answers(), schema=schema)

        def fetch(store: VersionedSlice, start: int, stop: int) -> list[pa.Array]:
            low = None if lows is None else lows[start:stop]
            return store.fetch(keys.part(start, stop), low, highs[start:stop], rule, budget)

        answers = self.ask(counts, fetch)
        # Compaction may have begun to use a newer F while the slices were asked.
        self._check_not_below(lowest)
        if len(answers) == 1:
            return pa.RecordBatch.from_arrays(answers[0], schema=schema)
        columns = [pa.concat_arrays(parts) for parts in zip(*answers, strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def read(self, message: Read) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        if not isinstance(message, ReadSlices):
            raise BadMessage(f"{self.name} is a State: it does not answer {type(message).__name__}")
        if len(set(message.slices)) < len(message.slices):
            raise BadMessage("a slice is read once")
        for number in message.slices:
            self.held(number)
        return self._shape.rows, self._all_newest(message)

    def _all_newest(self, message: ReadSlices) -> Iterator[pa.RecordBatch]:
        """One slice after the other, in batches that travel."""
        for number in message.slices:
            yield from in_batches(pa.Table.from_batches([self._newest(number, message.at)]))

    def _newest(self, number: SliceId, at: Progress) -> pa.RecordBatch:
        """One row per key of a slice: the newest version with time <= `at`."""
        held = self.held(number)
        with held.lock:
            held.check_whole()
            newest = held.store.latest(None if at == math.inf else int(at), self.keep_from)
        # Compaction keeps the newest value below F, so that a read at F - 1 is right as well.
        self._check_not_below(at + 1)
        return newest

    def _check_not_below(self, time: Progress) -> None:
        check_not_below(time, self.fetch_progress, "long")

    def sweep(self, number: SliceId, budget: int) -> bool:
        """Compacts a bounded part of a slice."""
        keep_from = self.keep_from
        held = self.slices.get(number)
        if held is None:
            return True
        since = TIME_MIN if keep_from is None else keep_from
        if held.store.is_settled(since):
            return True
        with held.lock:
            if held.torn:
                return True
            if self.rules.compact.code is None:
                return held.store.sweep(since, budget)
            what = f"the compaction rule of state {self.name!r}"
            return self.means.limits.run(what, lambda: held.store.sweep(since, budget))

    def size(self, held: HeldSlice[VersionedSlice]) -> Size:
        return Size(held.store.nbytes, held.store.keys)

    def figures(self) -> dict[str, Any]:
        slices = dict(self.slices)
        self.sizes = {number: self.size(held) for number, held in slices.items()}
        return {
            "keys": sum(size.keys for size in self.sizes.values()),
            "versions": sum(held.store.versions for held in slices.values()),
            "bytes": sum(size.nbytes for size in self.sizes.values()),
            "rule_failures": self.rules.failures,
        }


class SliceRows(NamedTuple):
    """Rows for one slice."""

    keys: Keys
    times: npt.NDArray[np.int64]
    values: list[pa.Array]


def ordered(portions: Sequence[SliceRows]) -> list[SliceRows]:
    """All rows of a slice as one, by `_seq`, their last column; of two with the same the earlier stays before."""
    keys = Keys.concat([portion.keys for portion in portions])
    times = np.concatenate([portion.times for portion in portions])
    values = [pa.concat_arrays(columns) for columns in zip(*(p.values for p in portions), strict=True)]
    order = np.argsort(values[-1].to_numpy(), kind="stable")
    return [
        SliceRows(keys.take(order), times[order], [column.take(pa.array(order)) for column in values[:-1]])
    ]


def _check_times(batch: pa.RecordBatch) -> None:
    for name in (TIME, LOW, SEQ):
        if name in batch.schema.names and batch.column(name).null_count:
            raise NullTime("a time is null", column=name, rows=batch.column(name).null_count)


def _check_spec(spec: StateSpec) -> None:
    """A spec that containers could not read must never get into the journal."""
    key, value = spec.shape.keys, spec.shape.values
    check_key_types(key)
    check_rules(value, spec.update, spec.compact)
    if (format_ddl(key), format_ddl(value)) != (spec.key, spec.value):
        raise BadMessage(f"the types of state {spec.name!r} are not in their canonical form")
    shared = sorted(set(key.names) & set(value.names))
    if shared:
        raise BadType(
            f"key and value of state {spec.name!r} both have a column {shared[0]!r}",
            hint="give one of them another name",
            ddl=shared[0],
        )


def _described(spec: StateSpec) -> str:
    rules = ", ".join(f"{kind}={_rule(getattr(spec, kind))}" for kind in ("update", "compact"))
    return f"key={spec.key!r}, value={spec.value!r}, {rules}"


def _rule(rule: UpdateRule | CompactRule) -> str:
    if rule.code is not None:
        return f"{rule.code.name} ({zlib.crc32(msgspec.msgpack.encode(rule.code)):08x})"
    span = rule.span if isinstance(rule, CompactRule) and rule.span else ""
    return f"{rule.name}({span})"
