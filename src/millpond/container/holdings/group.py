"""What a container holds of a group of tables: their rows, and what the last transactions on them gave.

A group lives whole in one slice, its home. The events of an epoch run when it is prepared, in the order of their
times, with an undo kept until it is decided; run again from the log, they leave the same tables and outputs. Those
of an operator with a delay may wait here, for an epoch in which its watermark has passed them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
from msgspec.structs import replace

from millpond.code.tables import TableSpec, TransactionSetCode
from millpond.container.holdings.base import (
    CheckedRows,
    HeldSlice,
    Holding,
    Means,
    Ready,
    Record,
    Revert,
    Size,
)
from millpond.container.holdings.due import Delayed, apart, check_room, due_events
from millpond.container.holdings.group_files import GroupDelta, merged_group
from millpond.container.holdings.group_store import GroupStore
from millpond.container.room import ROOM_SHARE
from millpond.errors import (
    BadMessage,
    BadType,
    SchemaMismatch,
    Unavailable,
    WrongType,
    unknown_table,
)
from millpond.schema import format_ddl
from millpond.stores.budget import UNLIMITED, Budget
from millpond.stores.compaction import compact
from millpond.stores.outputs import in_batches
from millpond.stores.parts import PARTS
from millpond.stores.rows import digest_columns
from millpond.stores.scratch import Scratch
from millpond.stores.strings import Strings
from millpond.stores.tables import TableStore
from millpond.stores.threads import timed_sections
from millpond.stores.undo import Undo
from millpond.txn import NotPutBack, TransactionSet, Watch, load_transactions
from millpond.wire.base import Done, Exchange, Read, SliceId
from millpond.wire.connection import Answer, SlicedBatch
from millpond.wire.groups import FindRows, GroupSpec, ReadDelayed, ReadTable, TransactionWork
from millpond.wire.questions import ReadOutputs
from millpond.wire.specs import Resident, Spec

REPORT_WAIT_S = 0.2
# Outputs travel as the events came; in smaller batches than this, on the average, each would be felt.
OUTPUT_ROWS_MIN = 1 << 14


class Undone(NamedTuple):
    """Takes back what an epoch has done to the tables."""

    undo: Undo

    def __call__(self, store: GroupStore) -> None:
        self.undo.put_back(store.tables)


class Ran(NamedTuple):
    """What the events of an epoch gave, and how to take it back. `delayed` are those that wait after it, by writer."""

    outputs: pa.Table
    delayed: Delayed
    late: int
    aborted: int
    figures: dict[str, Any]
    undo: Undone


class GroupHolding(Holding[GroupStore]):
    """One group in this container: with its store if the container owns its home, else in name only."""

    snapshot_schema = PARTS
    work_type = TransactionWork

    def __init__(self, resident: Resident, pond_slices: int, means: Means) -> None:
        super().__init__(resident, pond_slices, means)
        self._figures: dict[str, Any] = {"epochs": 0, "events": 0, "committed": 0, "aborted": 0, "late": 0}
        self._sizes: dict[str, dict[str, int]] = {}
        # Guarded by the lock of the home slice.
        self._scratch = Scratch()

    @property
    def _group(self) -> GroupSpec:
        spec = self.resident.spec
        assert isinstance(spec, GroupSpec)
        return spec

    @property
    def _home(self) -> SliceId:
        return self._group.home_slice

    @staticmethod
    def opened(
        spec: GroupSpec, existing: GroupSpec | None, others: Sequence[Spec], owners: Sequence[int]
    ) -> GroupSpec:
        """A spec with one table comes in, and one with all tables of the group goes out."""
        groups = [other for other in others if isinstance(other, GroupSpec)]
        for group in groups:
            for name in spec.tables.keys() & group.tables.keys():
                # A table's name is its own in the whole pond, whatever its group.
                was = describe_table(group.tables[name], group.name)
                raise table_exists(name, was, describe_table(spec.tables[name], spec.name))
        for name, table in spec.tables.items():
            known = existing.tables.get(name) if existing is not None else None
            if known is None:
                _check_table(name, table)
            elif known != table:
                was, wanted = describe_table(known, spec.name), describe_table(table, spec.name)
                raise table_exists(name, was, wanted)
        if existing is None:
            homes = [group.home for group in groups if group.home is not None]
            return replace(spec, home=_new_home(homes, owners))
        tables = {**existing.tables, **spec.tables}
        return existing if tables == existing.tables else replace(existing, tables=tables)

    @staticmethod
    def without(spec: GroupSpec, table: str) -> GroupSpec | None:
        if table not in spec.tables:
            raise unknown_table(table, spec.tables, f"group {spec.name!r}")
        tables = {name: known for name, known in spec.tables.items() if name != table}
        return replace(spec, tables=tables) if tables else None

    def new_store(self) -> GroupStore:
        return GroupStore(self._group.tables)

    def extend(self, resident: Resident) -> None:
        """The group has gained tables, or lost one."""
        if resident.spec == self.resident.spec:
            return
        assert isinstance(resident.spec, GroupSpec)
        self.resident = resident
        for held in list(self.slices.values()):
            with held.lock:
                self.fit(held)
                held.dirty = True

    def fit(self, held: HeldSlice[GroupStore]) -> None:
        if held.store.set_tables(self._group.tables):
            # Another of that name must not find its rows.
            held.anew = held.dirty = True

    def is_stale(self, snapshot: pa.RecordBatch) -> bool:
        kinds, names = snapshot.column(0).to_pylist(), snapshot.column(1).to_pylist()
        return any(
            kind == "table" and name not in self._group.tables
            for kind, name in zip(kinds, names, strict=True)
        )

    def delta(self, held: HeldSlice[GroupStore]) -> GroupDelta:
        assert held.undecided is None or isinstance(held.undecided, Undone)
        return held.store.delta(None if held.undecided is None else held.undecided.undo)

    def merged(self, files: Sequence[pa.RecordBatch], whole: bool) -> pa.RecordBatch:
        return merged_group(files, self._group.tables, whole)

    def concerns(self, counts: Sequence[Sequence[int]], number: SliceId) -> bool:
        """An epoch without events has outputs, too."""
        return True

    def columns_of(self, names: Sequence[str], work: TransactionWork) -> pa.Schema:
        return schema_of(work)

    # Events in

    def check(self, rows: SlicedBatch) -> tuple[CheckedRows, int]:
        batch, counts = rows
        self.check_counts(counts)
        if counts[self._home] != batch.num_rows:
            raise BadMessage(f"events for group {self.name} come for its home, slice {self._home}")
        return CheckedRows(batch, counts), digest_columns(batch.columns)

    def prepare(self, record: Record) -> Ready:
        """Runs the events. Whoever reads in between sees the tables as they were."""
        held = self.held(self._home)
        what = f"the transactions of {record.writer.partition('@')[0]!r}"
        assert isinstance(record.work, TransactionWork)
        watch = Watch(record.work.seconds_max, record.work.memory_max)

        def run() -> Ran:
            with held.lock:
                held.check_whole()
                assert held.undecided is None, "an epoch is undecided"
                ran: Ran | None = None
                try:
                    with _timed(held):
                        ran = self._run(record, held.store, self._scratch, watch)
                    self._check_room(ran.delayed, held.store.delayed)
                    held.undecided = ran.undo
                except NotPutBack as failure:
                    raise self._torn(held, failure) from failure
                except BaseException:
                    # Between the two, an interrupt would leave an epoch that nobody can take back.
                    if ran is not None:
                        self._take_back(held, ran.undo)
                    raise
                return ran

        return Ready(record, self.means.limits.run(what, run, watch))

    def undo(self, ready: Ready) -> None:
        held = self.slices.get(self._home)
        if held is None:
            return
        with held.lock:
            if held.undecided is ready.made.undo:
                self._take_back(held, held.undecided)

    def _take_back(self, held: HeldSlice[GroupStore], undo: Revert) -> None:
        """The caller holds the lock."""
        try:
            undo(held.store)
        except BaseException as failure:
            raise self._torn(held, failure) from failure
        held.undecided = None

    def _torn(self, held: HeldSlice[GroupStore], failure: BaseException) -> Unavailable:
        """Nobody looks at these tables any more: the container ends, and another rebuilds them from its log."""
        held.torn = True
        why = (
            f"the tables of group {self.name!r} could not be put back after an epoch that failed: {failure!r}"
        )
        self.means.limits.doom(why)
        return Unavailable(why, hint="the container begins anew", address="")

    def apply(self, ready: Ready) -> int:
        held = self.held(self._home)
        with held.lock:
            self._keep(ready.record, ready.made, held)
            held.undecided = None
            held.load.rows_updated += ready.record.rows
        self._count(ready.made)
        return len(ready.made.outputs)

    def replay(self, record: Record, slices: Mapping[SliceId, HeldSlice[GroupStore]]) -> int:
        held = slices.get(self._home)
        if held is None or held.has_seen(record.writer, record.turn):
            return 0
        ran = self.means.limits.run(
            f"group {self.name!r} from the log", lambda: self._run(record, held.store, Scratch())
        )
        self._keep(record, ran, held)
        self._count(ran)
        return len(ran.outputs)

    def _keep(self, record: Record, ran: Ran, held: HeldSlice[GroupStore]) -> None:
        with held.changing(record.writer, record.turn):
            held.store.keep(record.writer, record.turn, ran.outputs, ran.delayed, ran.undo.undo)
            held.dirty = True

    def _check_room(self, after: Delayed, before: Delayed) -> None:
        check_room(self.name, after, before, self.means.memory // ROOM_SHARE)

    def _run(self, record: Record, store: GroupStore, scratch: Scratch, watch: Watch | None = None) -> Ran:
        """Runs an epoch's events on the tables. An error leaves them as they were."""
        work = record.work
        assert isinstance(work, TransactionWork)
        functions = functions_of(work)
        for name, spec in functions.tables.items():
            if self._group.tables.get(name) != spec:
                raise BadMessage(f"group {self.name} has no table {name!r} of these types")
        schema = schema_of(work)
        batches = [part.batch for part in record.parts]
        if any(not batch.schema.equals(schema) for batch in batches):
            raise BadMessage(f"events for group {self.name} are not of the schema they were announced with")
        events = pa.Table.from_batches(batches, schema)
        if len(batches) * OUTPUT_ROWS_MIN > len(events):
            events = events.combine_chunks()
        delayed, waited = apart(store.delayed, record.writer, work.takes_over)
        try:
            due = due_events(events, waited, work)
            # Only what the functions read, and only while they run: outputs have the events as they came.
            fields = (name for found in functions.found.values() for name in found.fields)
            wanted = (work.at, *(() if work.seq is None else (work.seq,)), *fields)
            running = scratch.joined(due.events, wanted)
            arranged = functions.arrange(running, kind=work.kind, at=work.at, seq=work.seq)
            if len(due.new_waiting):
                # Bad events are refused in the epoch in which they come.
                functions.arrange(due.new_waiting, kind=work.kind, at=work.at, seq=work.seq)
        except pa.ArrowException as error:
            raise WrongType(
                f"events for group {self.name} cannot be read: {error}",
                hint="cast the columns of kind, time and seq to string, timestamp or long",
            ) from None
        if len(due.waiting):
            delayed[record.writer] = due.waiting
        if watch is not None:
            watch.tells_of(due.events, work.at)
        outcome = functions.execute(arranged, store.tables, self.means.threads, watch=watch)
        outcomes = outcome.outputs.drop_columns(["event"])
        aborted = len(outcomes) - outcomes["reason"].null_count
        return Ran(
            due.outputs(outcomes),
            delayed,
            due.late,
            aborted,
            outcome.figures,
            Undone(outcome.undo),
        )

    def _count(self, ran: Ran) -> None:
        before, events = self._figures, len(ran.outputs) - ran.late
        self._figures = {
            "epochs": before["epochs"] + 1,
            "events": before["events"] + events,
            "committed": before["committed"] + events - ran.aborted,
            "aborted": before["aborted"] + ran.aborted,
            "late": before["late"] + ran.late,
            "last": ran.figures,
        }

    def forget(self, writers: Sequence[str]) -> None:
        super().forget(writers)
        for held in list(self.slices.values()):
            with held.lock:
                held.store.forget(writers)

    # Questions

    def exchange(self, message: Exchange[Any], rows: SlicedBatch, budget: Budget = UNLIMITED) -> Answer[Any]:
        if not isinstance(message, FindRows):
            raise BadMessage(f"{self.name} is a group of tables: it does not answer {type(message).__name__}")
        keys, spec = rows.batch, self._group.tables.get(message.table)
        if spec is None or keys.schema.types != spec.keys.types:
            raise BadMessage(f"keys for table {message.table!r} come as columns of its key's types")
        rows_there = self._read(message.table, lambda table: table.find(keys.columns, budget))
        home = self.held(self._home)
        with home.lock:
            home.load.rows_fetched += keys.num_rows
        return Answer(
            Done(),
            rows_there.combine_chunks().to_batches()[0] if len(rows_there) else _empty(rows_there.schema),
        )

    def read(self, message: Read) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        if isinstance(message, ReadTable):
            rows = self._read(message.table, lambda table: table.snapshot())
        elif isinstance(message, ReadOutputs):
            held = self.held(SliceId(message.slice))
            with held.lock:
                rows = held.store.outputs.read(message.writer, message.turn, message.start, message.stop)
        elif isinstance(message, ReadDelayed):
            # As decided epochs left them: one that is undecided has not changed them yet.
            rows = self.held(self._home).store.list_delayed(message.operator)
        else:
            raise BadMessage(f"{self.name} is a group of tables: it does not answer {type(message).__name__}")
        return rows.schema, in_batches(rows)

    def _read(self, table: str, ask: Any) -> pa.Table:
        """Rows of a table with the key under its name, as decided epochs left it."""
        held = self.held(self._home)
        with held.lock:
            held.check_whole()
            store = held.store if held.undecided is None else held.decided_copy()
            if table not in store.tables:
                raise unknown_table(table, store.tables, f"group {self.name!r}")
            with _timed(held):
                rows = ask(store.tables[table])
        return rows.rename_columns(self._group.tables[table].schema.names)

    def sweep(self, number: SliceId, budget: int) -> bool:
        """Lets go of keys that were only asked for, and of strings that nothing holds any more."""
        held = self.slices.get(number)
        # Not while an epoch runs: it is looked at again soon.
        if held is not None and held.lock.acquire(timeout=0):
            try:
                if not held.torn and held.undecided is None:
                    compact(held.store.tables.values())
                    self._scratch.rest()
            finally:
                held.lock.release()
        return True

    def size(self, held: HeldSlice[GroupStore]) -> Size:
        tables = list(self._sizes.values())
        waiting = sum(rows.nbytes for rows in held.store.delayed.values())
        nbytes = sum(table["bytes"] for table in tables) + waiting + held.store.outputs.nbytes
        return Size(nbytes, sum(table["keys"] for table in tables))

    def figures(self) -> dict[str, Any]:
        """Of the tables, and of how transactions ran.

        Those of tables are older while a long epoch runs: a container that is busy must not look as if it had ended.
        """
        held = self.slices.get(self._home)
        if held is None:
            return {}
        if held.lock.acquire(timeout=REPORT_WAIT_S):
            try:
                tables = held.store.tables.items()
                self._sizes = {name: {"keys": len(t), "bytes": t.nbytes} for name, t in tables}
            finally:
                held.lock.release()
        self.sizes = {self._home: self.size(held)}
        delayed = held.store.delayed.values()
        waiting = {"rows": sum(map(len, delayed)), "bytes": sum(rows.nbytes for rows in delayed)}
        return {**self._figures, "waiting": waiting, "tables": self._sizes}


@contextmanager
def _timed(held: HeldSlice[GroupStore]) -> Iterator[None]:
    """Counts what this thread and those that help it do within. The caller holds the slice's lock."""
    started = time.thread_time_ns()
    with timed_sections() as sections:
        try:
            yield
        finally:
            helpers = int((sections.all - sections.own) * 1e9)
            held.load.cpu_ns += time.thread_time_ns() - started + helpers


def table_exists(name: str, was: str, wanted: str) -> SchemaMismatch:
    return SchemaMismatch(
        f"table {name!r} exists otherwise\n  existing:  {was}\n  requested: {wanted}",
        hint="open it as it is, or choose another name",
        resident=name,
        existing=was,
        requested=wanted,
    )


def describe_table(spec: TableSpec, group: str) -> str:
    return f"key={spec.key!r}, value={spec.value!r}, default={spec.default!r}, group={group!r}"


def _new_home(homes: Sequence[int], owners: Sequence[int]) -> int:
    """A slice of the container that is home to the fewest groups; one that is no home yet, if there is."""
    per_container = Counter(owners[home] for home in homes)
    container = min(dict.fromkeys(owners), key=lambda owner: per_container[owner])
    slices = [number for number, owner in enumerate(owners) if owner == container]
    return min(slices, key=homes.count)


def _check_table(name: str, spec: TableSpec) -> None:
    if (format_ddl(spec.keys), format_ddl(spec.columns)) != (spec.key, spec.value):
        raise BadMessage(f"the types of table {name!r} are not in their canonical form")
    for key in spec.keys.names:
        if key in spec.columns.names:
            raise BadType(
                f"key and value of table {name!r} both have a column {key!r}",
                hint="give one of them another name",
                ddl=key,
            )
    TableStore(spec, Strings())  # a default that does not fit raises


def schema_of(work: TransactionWork) -> pa.Schema:
    try:
        return pa.ipc.read_schema(pa.py_buffer(work.schema))
    except (pa.ArrowInvalid, OSError) as error:
        raise BadMessage(f"the schema of events cannot be read: {error}") from None


def functions_of(work: TransactionWork) -> TransactionSet:
    """The functions, loaded and compiled once for the same text."""
    return _loaded(msgspec.msgpack.encode(work.functions))


@lru_cache(maxsize=64)
def _loaded(text: bytes) -> TransactionSet:
    return load_transactions(msgspec.msgpack.decode(text, type=TransactionSetCode))


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
