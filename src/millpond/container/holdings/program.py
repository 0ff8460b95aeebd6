"""What a container holds of a program: entries of its fields, and what the last calls returned.

The calls of an epoch run when it is prepared, in rounds with the other containers. What is logged is what they have
changed, and returned: whoever applies the record again runs no code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from millpond.container.holdings.base import (
    CheckedRows,
    HeldSlice,
    Means,
    Ready,
    Record,
    RoundsOf,
    Size,
)
from millpond.container.holdings.keyed import KeyedHolding
from millpond.container.holdings.program_code import LoadedMethod, check_code, method_of
from millpond.container.holdings.program_made import Returned
from millpond.container.holdings.program_migrate import Moving, parts_of
from millpond.container.holdings.program_read import run_tasks
from millpond.container.holdings.program_run import EpochCalls
from millpond.container.holdings.program_store import ProgramDelta, ProgramStore, merged_files
from millpond.errors import BadMessage, ProgramFailed, StageLost, Unavailable
from millpond.programs.call_columns import values_of
from millpond.programs.cells import warm_up_for
from millpond.programs.entries import ENTRIES, NO_LANE, RETURNED, Entry, batch_of
from millpond.programs.migrating import changed_fields, exists_otherwise
from millpond.programs.rows import KEY, ROW, in_table
from millpond.stores.budget import UNLIMITED, Budget
from millpond.stores.outputs import in_batches
from millpond.stores.parts import PARTS
from millpond.stores.rows import digest_columns
from millpond.wire.base import Exchange, Read, SliceId
from millpond.wire.connection import Answer, SlicedBatch
from millpond.wire.programs import (
    MigrationWork,
    ProgramSpec,
    ProgramWork,
    ReadEntries,
    ReadReturned,
    RunTasks,
)
from millpond.wire.specs import Resident, Spec, Work

_T = TypeVar("_T")
# How long one waits for a slice in which code was given up, to put it back.
PUT_BACK_S = 5.0


RETURNS = pa.schema({"rows": pa.large_binary()})
"""What `ReadReturned` is answered by: tables as Arrow streams, of the slices by which calls came."""
NOTHING = pa.table({})


def put_back(store: ProgramStore) -> None:
    """Takes back what an epoch has done to a slice."""
    store.put_back()


class Ran(NamedTuple):
    """What the calls of an epoch returned, and how many there were, by the slice by which they came; all slices here."""

    outputs: dict[SliceId, pa.Table]
    calls: list[int]


class ProgramHolding(KeyedHolding[ProgramStore]):
    """One program's slices in this container."""

    snapshot_schema = PARTS
    work_type = ProgramWork

    def __init__(self, resident: Resident, pond_slices: int, means: Means) -> None:
        super().__init__(resident, pond_slices, means)
        self._calls = 0
        # By name, as the last epoch had them.
        self._methods: dict[str, LoadedMethod] = {}
        # Now, and not in the time that a call has.
        warm_up_for(field.types for field in self._program.fields.values())

    @property
    def _program(self) -> ProgramSpec:
        spec = self.resident.spec
        assert isinstance(spec, ProgramSpec)
        return spec

    @staticmethod
    def opened(
        spec: ProgramSpec, existing: ProgramSpec | None, others: Sequence[Spec], owners: Sequence[int]
    ) -> ProgramSpec:
        """Fields may be added; those that there are stay as they are, also when the code has no use for them any more."""
        if existing is None:
            return spec
        changed = changed_fields(spec, existing)
        if changed or spec.lanes != existing.lanes:
            raise exists_otherwise(spec, existing, changed)
        return replace(existing, fields={**spec.fields, **existing.fields})

    @staticmethod
    def after(spec: ProgramSpec, work: Work) -> ProgramSpec:
        if not isinstance(work, MigrationWork):
            return spec
        if work.before != spec:
            raise StageLost(f"program {spec.name!r} has changed since its migration was planned")
        return work.after

    @staticmethod
    def version_of(work: Work) -> str:
        return work.version if isinstance(work, ProgramWork) else ""

    def check_work(self, work: Work) -> None:
        if not isinstance(work, MigrationWork):
            super().check_work(work)

    def extend(self, resident: Resident) -> None:
        """The program has gained fields: they are empty. Or it was migrated: that its slices learn by the epoch of it."""
        spec = resident.spec
        assert isinstance(spec, ProgramSpec)
        if spec.revision < self._program.revision:
            return
        warm_up_for(field.types for field in spec.fields.values())
        self.resident = resident
        for held in list(self.slices.values()):
            with held.lock:
                self.fit(held)

    def fit(self, held: HeldSlice[ProgramStore]) -> None:
        held.store.extend(self._program.fields)

    def _migrated(self, work: Work) -> None:
        """An epoch is decided: if it is a migration, the program is what that makes of it."""
        if isinstance(work, MigrationWork) and work.after.revision > self._program.revision:
            self.resident = replace(self.resident, spec=work.after)

    def new_store(self) -> ProgramStore:
        return ProgramStore(self._program.fields, self._program.revision)

    def concerns(self, counts: Sequence[Sequence[int]], number: SliceId) -> bool:
        """An epoch without rows for a slice has outputs there, too: none."""
        return True

    def delta(self, held: HeldSlice[ProgramStore]) -> ProgramDelta:
        return held.store.delta()

    def merged(self, files: Sequence[pa.RecordBatch], whole: bool) -> pa.RecordBatch:
        return merged_files(files, whole)

    def columns_of(self, names: Sequence[str], work: ProgramWork | MigrationWork) -> pa.Schema:
        return ENTRIES

    # Calls in

    def check(self, rows: SlicedBatch) -> tuple[CheckedRows, int]:
        batch, counts = rows
        if batch.schema.names[:2] != [KEY, ROW] or batch.schema.field(1).type != pa.int64():
            raise BadMessage(f"calls of {self.name} come with their key and their order")
        keys = self.keys_of(rows, batch.schema)
        if batch.column(1).null_count:
            raise BadMessage(f"a call of {self.name} has no order")
        return CheckedRows(batch, counts, keys), digest_columns(batch.columns)

    def prepare(self, record: Record) -> Ready:
        raise BadMessage(f"epochs of {self.name} run in rounds")

    def run(self, record: Record, rounds: RoundsOf) -> Ready:
        """Runs the calls, with all others that run some of them. An error leaves the entries as they were."""
        work = record.work
        assert isinstance(work, ProgramWork | MigrationWork)
        slices = dict(self.slices)
        for held in slices.values():
            with held.lock:
                held.check_whole()
                assert held.undecided is None, "an epoch is undecided"
                held.undecided = put_back
        try:
            if isinstance(work, MigrationWork):
                Moving(work, slices, self.pond_slices, self.means).run(rounds)
                lines = {number: held.store.changed() for number, held in slices.items()}
                made = record._replace(parts=parts_of(lines, self.pond_slices), came=record.rows)
                return Ready(made, Ran(dict.fromkeys(slices, NOTHING), [0] * self.pond_slices))
            what = f"method {work.method!r} of program {self.name!r}"
            method = self.means.limits.run(what, lambda: method_of(work))
            check_code(method.graph, self._program)
            self._methods[work.method] = method
            calls = EpochCalls(self._program, method, work, slices, self.pond_slices, self.means)
            calls.run(record, rounds)
            calls.remember()
            outputs = _outputs(record, method, work, calls.returned, slices)
            came = sum((part.counts for part in record.parts), np.zeros(self.pond_slices, np.int64)).tolist()
            return Ready(self._changes(record, slices, outputs, method), Ran(outputs, came))
        except BaseException:
            self._take_back(slices.values())
            raise

    def _changes(
        self,
        record: Record,
        slices: Mapping[SliceId, HeldSlice[ProgramStore]],
        outputs: Mapping[SliceId, pa.Table],
        method: LoadedMethod,
    ) -> Record:
        try:
            return self._record(record, slices, outputs)
        except (TypeError, ValueError, OverflowError) as error:
            name = method.method.name
            raise ProgramFailed(
                f"method {name!r} of program {self.name!r} left something in a field that it cannot hold: {error}",
                hint="nothing was changed; convert what is set there, for example by int(...) or float(...)",
                program=self.name,
                method=name,
                line=method.method.line,
            ) from error

    def _record(
        self,
        record: Record,
        slices: Mapping[SliceId, HeldSlice[ProgramStore]],
        outputs: Mapping[SliceId, pa.Table],
    ) -> Record:
        """What is to be logged: by slice, what was changed, and what the calls returned that came by it."""
        lines: list[pa.RecordBatch] = []
        counts = np.zeros(self.pond_slices, np.int32)
        for number, held in sorted(slices.items()):
            with held.lock:
                own = held.store.changed()
            if len(outputs[number]):
                own.append(batch_of([Entry(RETURNED, NO_LANE, b=_stream(outputs[number]))]))
            counts[number] = sum(batch.num_rows for batch in own)
            lines += own
        batch = pa.concat_batches(lines) if lines else batch_of([])
        return record._replace(parts=[CheckedRows(batch, counts)], came=record.rows)

    def undo(self, ready: Ready) -> None:
        self._take_back(self.slices.values())

    def _take_back(self, slices: Iterable[HeldSlice[ProgramStore]]) -> None:
        for held in list(slices):
            # Code that could not be interrupted may be in it for ever: then the container ends soon.
            if not held.lock.acquire(timeout=PUT_BACK_S):
                held.torn = True
                continue
            try:
                if held.undecided is not None:
                    held.store.put_back()
                    held.undecided = None
            except BaseException as failure:
                held.torn = True
                why = f"program {self.name!r} could not be put back after an epoch that failed: {failure!r}"
                self.means.limits.doom(why)
                raise Unavailable(why, hint="the container begins anew", address="") from failure
            finally:
                held.lock.release()

    def apply(self, ready: Ready) -> int:
        record, outputs, calls = ready.record, ready.made.outputs, ready.made.calls
        self._migrated(record.work)
        for number, held in list(self.slices.items()):
            with held.lock:
                if held.has_seen(record.writer, record.turn):
                    continue
                with held.changing(record.writer, record.turn):
                    held.store.settle()
                    held.store.outputs.keep(record.writer, record.turn, _kept(outputs[number]))
                    self._changed(held, record.work)
                held.undecided = None
                held.load.rows_updated += calls[number]
        self._calls += record.rows
        return record.rows

    def replay(self, record: Record, slices: Mapping[SliceId, HeldSlice[ProgramStore]]) -> int:
        rows, work = 0, record.work
        self._migrated(work)
        for number, held in slices.items():
            with held.lock:
                if held.has_seen(record.writer, record.turn):
                    continue
                held.check_whole()
                with held.changing(record.writer, record.turn):
                    if isinstance(work, MigrationWork):
                        held.store.switch(work.after.fields, work.after.revision)
                    outputs = NOTHING
                    for part in record.parts:
                        start = int(part.counts[:number].sum(dtype=np.int64))
                        entries = part.batch.slice(start, int(part.counts[number]))
                        is_returned = pc.equal(entries.column("field"), RETURNED)
                        for stream in entries.filter(is_returned).column("b"):
                            outputs = pa.ipc.open_stream(stream.as_py()).read_all()
                        held.store.put(entries.filter(pc.invert(is_returned)))
                    held.store.outputs.keep(record.writer, record.turn, outputs)
                    self._changed(held, work)
                rows += len(outputs)
        self._calls += rows
        return rows

    def _changed(self, held: HeldSlice[ProgramStore], work: Work) -> None:
        held.dirty = True
        if isinstance(work, MigrationWork):
            # Entries of before need not lie in its files for ever.
            held.write_anew()

    def forget(self, writers: Sequence[str]) -> None:
        super().forget(writers)
        for held in list(self.slices.values()):
            with held.lock:
                held.store.forget(writers)

    # Questions

    def exchange(self, message: Exchange[Any], rows: SlicedBatch, budget: Budget = UNLIMITED) -> Answer[Any]:
        if isinstance(message, RunTasks):
            self.check_counts(rows.counts)
            slices = dict(self.slices)
            return run_tasks(self._program, message, rows, slices, self.pond_slices, self.means)
        raise BadMessage(f"{self.name} is a program: it does not answer {type(message).__name__}")

    def read(self, message: Read) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        match message:
            case ReadReturned(_, writer, turn, slices, columns_only):
                tables = [
                    self._ask(number, lambda store: store.outputs.find(writer, turn)) for number in slices
                ]
                streams = [
                    _stream(table.slice(0, 0) if columns_only else table) for table in tables if len(table)
                ]
                rows = pa.table([pa.array(streams, pa.large_binary())], schema=RETURNS)
            case ReadEntries(_, field, slices):
                if field not in self._program.fields:
                    raise BadMessage(f"program {self.name} has no field {field!r}")
                entries = [
                    batch
                    for number in slices
                    for batch in self._ask(number, lambda store: store.entries([field]), decided=True)
                ]
                rows = pa.Table.from_batches(entries, ENTRIES)
            case _:
                raise BadMessage(f"{self.name} is a program: it does not answer {type(message).__name__}")
        return rows.schema, in_batches(rows)

    def _ask(self, number: SliceId, ask: Callable[[ProgramStore], _T], *, decided: bool = False) -> _T:
        held = self.held(number)
        with held.lock:
            held.check_whole()
            return ask(held.decided_copy() if decided and held.undecided is not None else held.store)

    def size(self, held: HeldSlice[ProgramStore]) -> Size:
        return Size(held.store.nbytes + held.store.outputs.nbytes, held.store.count)

    def figures(self) -> dict[str, Any]:
        self.sizes = {number: self.size(held) for number, held in dict(self.slices).items()}
        refused = {
            f"{name}, line {each.task.line}": each.kernel.refused
            for name, method in dict(self._methods).items()
            for each in method.tasks
            if each.kernel.refused
        }
        return {
            "calls": self._calls,
            "entries": sum(size.keys for size in self.sizes.values()),
            "bytes": sum(size.nbytes for size in self.sizes.values()),
            # What one container has found out, none that has not takes back.
            **({"interpreted": refused} if refused else {}),
        }


def _outputs(
    record: Record,
    method: LoadedMethod,
    work: ProgramWork,
    returned: Returned,
    slices: Mapping[SliceId, Any],
) -> dict[SliceId, pa.Table]:
    """By slice, the rows that came by it in their order, with what their calls returned; nothing where they return nothing."""
    schema = method.outputs(work)
    if work.into is None and not method.method.rejects:
        return dict.fromkeys(slices, NOTHING)
    rows: dict[SliceId, list[pa.RecordBatch]] = {number: [] for number in slices}
    for part in record.parts:
        starts = np.concatenate(([0], np.cumsum(part.counts, dtype=np.int64)))
        for number in np.flatnonzero(part.counts).tolist():
            rows[SliceId(number)].append(part.batch.slice(starts[number], part.counts[number]))
    outputs = {}
    for number, batches in rows.items():
        if not batches:
            outputs[number] = schema.empty_table()
            continue
        table = pa.Table.from_batches(batches).sort_by(ROW).combine_chunks()
        results, errors = returned.of(table.column(ROW).combine_chunks().to_numpy())
        columns = table.columns[1:]
        if work.into is not None:
            wanted = schema.field(work.into).type
            if results.type != wanted:
                kind = returned.kind
                results = pa.array([in_table(each, kind) for each in values_of(results, kind)], wanted)
            columns.append(results)
        if method.method.rejects:
            columns.append(errors)
        outputs[number] = pa.table(columns, schema=schema)
    return outputs


def _kept(outputs: pa.Table) -> pa.Table:
    """As it is after a replay, which does not know the columns where nothing came."""
    return outputs if len(outputs) else NOTHING


def _stream(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    data: bytes = sink.getvalue().to_pybytes()
    return data
