"""What a container holds of a group of tables: their rows, and what the last transactions on them gave.

A group lives whole in one slice, its home. An epoch of transactions takes the way of any epoch: its events are
staged and logged; when it is decided they run, in the order of their times, and leave the same tables and outputs
whenever they run again from the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import pyarrow as pa

from millpond.code.tables import ProgramCode, TableSpec
from millpond.container.held import HeldSlice, Record, Runner
from millpond.errors import BadMessage, GroupBroken, Moved, OutputsGone, UnknownTable, WrongColumn, WrongType
from millpond.stores.rows import digest_columns
from millpond.times import Progress
from millpond.txn import Program, Strings, TableStore, load_program
from millpond.txn.program import Arranged
from millpond.wire.connection import SlicedBatch
from millpond.wire.messages import GroupSpec, Transactions

PARTS = pa.schema([("kind", pa.string()), ("name", pa.string()), ("rows", pa.large_binary())])
"""A snapshot: one row for each table and for each epoch's outputs, which are Arrow streams."""

# Outputs are kept for an epoch that runs again: the newest two, and more of them while they are small.
OUTPUTS_KEPT = (2, 64)
OUTPUTS_BYTES_MAX = 64 << 20
# Of one operator, so many queries may run their epochs again: those that were heard of last.
QUERIES_KEPT = 4
# What goes into one batch of an answer: Arrow Flight sends none of 2 GiB.
BATCH_BYTES = 64 << 20
REPORT_WAIT_S = 1.0


class GroupStore:
    """The tables of a group, and the outputs of the newest epochs of each writer."""

    def __init__(self, tables: Mapping[str, TableSpec]) -> None:
        self.strings = Strings()
        self.tables: dict[str, TableStore] = {}
        self.outputs: dict[str, dict[int, pa.Table]] = {}
        self.add_tables(tables)

    def add_tables(self, tables: Mapping[str, TableSpec]) -> None:
        for name, spec in tables.items():
            if name not in self.tables:
                self.tables[name] = TableStore(spec, self.strings)

    def keep_outputs(self, writer: str, epoch: int, outputs: pa.Table) -> None:
        """For an epoch that runs again. The query that was heard of last comes last."""
        operator = _operator(writer)
        others = [other for other in self.outputs if other != writer and _operator(other) == operator]
        for other in others[: max(0, len(others) + 1 - QUERIES_KEPT)]:
            del self.outputs[other]
        kept = self.outputs[writer] = self.outputs.pop(writer, {})
        kept[epoch] = outputs
        least, most = OUTPUTS_KEPT
        while len(kept) > least and (
            len(kept) > most or sum(table.nbytes for table in kept.values()) > OUTPUTS_BYTES_MAX
        ):
            del kept[min(kept)]

    @property
    def outputs_bytes(self) -> int:
        return sum(table.nbytes for kept in list(self.outputs.values()) for table in list(kept.values()))

    def copy(self) -> GroupStore:
        """All of it as it is now, to be read while this one goes on."""
        other = GroupStore({})
        other.strings = self.strings.copy()
        other.tables = {name: table.copy(other.strings) for name, table in self.tables.items()}
        other.outputs = {writer: dict(kept) for writer, kept in self.outputs.items()}
        return other

    def export(self) -> pa.RecordBatch:
        parts = [("table", name, table.export()) for name, table in self.tables.items()] + [
            ("outputs", f"{writer} {epoch}", outputs)
            for writer, kept in self.outputs.items()
            for epoch, outputs in kept.items()
        ]
        columns = [
            pa.array([kind for kind, _, _ in parts], pa.string()),
            pa.array([name for _, name, _ in parts], pa.string()),
            _streams_of([rows for _, _, rows in parts]),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=PARTS)

    def load(self, batch: pa.RecordBatch) -> None:
        for kind, name, stream in zip(*batch.columns, strict=True):
            rows = pa.ipc.open_stream(stream.as_buffer()).read_all()
            if kind.as_py() == "table":
                self.tables[name.as_py()].load(rows)
            else:
                writer, epoch = name.as_py().split(" ")
                self.outputs.setdefault(writer, {})[int(epoch)] = rows

    def validate(self) -> None:
        """Raises AssertionError if an invariant does not hold. For tests."""
        for table in self.tables.values():
            table.validate()


class HeldGroup:
    """One group in this container: with its store if the container owns its home, else in name only."""

    rows_schema = PARTS

    def __init__(self, spec: GroupSpec, slices: Iterable[int], pond_slices: int, threads: int = 1) -> None:
        self.spec = spec
        self.pond_slices = pond_slices
        self.slices = {spec.home: HeldSlice(GroupStore(spec.tables))} if spec.home in slices else {}
        self.threads = threads
        self.figures: dict[str, Any] = {"epochs": 0, "events": 0, "committed": 0, "aborted": 0}
        self.broken: GroupBroken | None = None
        self._arranged: tuple[Record, pa.Table, Arranged] | None = None
        self._sizes: dict[str, dict[str, int]] = {}

    def extend(self, spec: GroupSpec) -> None:
        """The group has gained tables; it never loses any."""
        if (spec.home, spec.tables | self.spec.tables) != (self.spec.home, spec.tables):
            return
        for held in self.slices.values():
            with held.lock:
                held.store.add_tables(spec.tables)
        self.spec = spec

    def places(self, owned: Sequence[int]) -> list[int]:
        return [self.spec.home] if self.spec.home in owned else []

    def schema_of(self, names: Sequence[str], transactions: Transactions | None = None) -> pa.Schema:
        if transactions is None:
            raise BadMessage(f"{self.spec.name} is a group of tables: its epochs are transactions")
        return schema_of(transactions)

    def digest(self, sliced: SlicedBatch) -> int:
        """The digest of events, if this container has the group."""
        batch, counts = sliced
        self.home()
        if len(counts) != self.pond_slices or counts[self.spec.home] != batch.num_rows:
            raise BadMessage(f"events for group {self.spec.name} come for its home, slice {self.spec.home}")
        return digest_columns(batch.columns)

    def check_epoch(self, record: Record) -> None:
        """Raises an error if these events could not run. What was found out is kept until they do."""
        self._arranged = (record, *self._arrange(record))

    def apply(self, record: Record, among: Iterable[int], run: Runner) -> int:
        """Runs an epoch, unless the group has seen it. Returns the events that ran."""
        if self.spec.home not in among:
            return 0
        held = self.home()
        with held.lock:
            if held.vector.get(record.writer, -1) >= record.epoch:
                return 0
            try:
                return self._run(record, held)
            except Exception as error:
                # What is in the tables now is not known. The log is sound: a new start runs it again.
                self.broken = GroupBroken(
                    f"epoch {record.epoch} of {_operator(record.writer)!r} could not run on group"
                    f" {self.spec.name!r}: {type(error).__name__}: {error}",
                    hint="nothing is lost: open the pond again when the cause is mended, such as too little memory",
                    group=self.spec.name,
                )
                raise self.broken from error

    def _run(self, record: Record, held: HeldSlice[GroupStore]) -> int:
        """Runs an epoch and keeps what it gave. The caller holds the lock."""
        arranged, self._arranged = self._arranged, None
        if arranged is not None and arranged[0] is record:
            events, epoch = arranged[1:]
        else:
            events, epoch = self._arrange(record)
        assert record.transactions is not None
        outcome = program_of(record.transactions).execute(epoch, held.store.tables, self.threads)
        outputs = outcome.outputs.drop_columns(["event"])
        for field, column in zip(outputs.schema, outputs.columns, strict=True):
            events = events.append_column(field, column)
        held.store.keep_outputs(record.writer, record.epoch, events)
        held.vector[record.writer] = record.epoch
        held.dirty = True
        self._count(len(events), len(events) - outputs["reason"].null_count, outcome.figures)
        return len(events)

    def _arrange(self, record: Record) -> tuple[pa.Table, Arranged]:
        transactions = record.transactions
        if transactions is None:
            raise BadMessage(f"{self.spec.name} is a group of tables: its epochs are transactions")
        program = program_of(transactions)
        for name, spec in program.tables.items():
            if self.spec.tables.get(name) != spec:
                raise BadMessage(f"group {self.spec.name} has no table {name!r} of these types")
        schema = schema_of(transactions)
        batches = [batch for batch, _ in record.batches]
        if any(not batch.schema.equals(schema) for batch in batches):
            raise BadMessage(
                f"events for group {self.spec.name} are not of the schema they were announced with"
            )
        # Once here, or again wherever a column is wanted as one array.
        events = pa.Table.from_batches(batches, schema).combine_chunks()
        try:
            arranged = program.arrange(
                events, kind=transactions.kind, at=transactions.at, seq=transactions.seq
            )
        except pa.ArrowException as error:
            raise WrongType(
                f"events for group {self.spec.name} cannot be read: {error}",
                hint="cast the columns of kind, time and seq to string, timestamp or long",
            ) from None
        return events, arranged

    def _count(self, events: int, aborted: int, figures: dict[str, Any]) -> None:
        self.figures = {
            "epochs": self.figures["epochs"] + 1,
            "events": self.figures["events"] + events,
            "committed": self.figures["committed"] + events - aborted,
            "aborted": self.figures["aborted"] + aborted,
            "last": figures,
        }

    # Questions

    def read(self, table: str) -> pa.Table:
        """All rows, with the key under its name. No epoch is half done."""
        held = self.home()
        with held.lock:
            return self._named(table, self._table(table).snapshot())

    def find(self, table: str, keys: pa.RecordBatch) -> pa.RecordBatch:
        held = self.home()
        spec = self.spec.tables.get(table)
        if spec is None or keys.num_columns != 1 or not keys.schema.field(0).type.equals(spec.key_type):
            raise BadMessage(f"keys for table {table!r} come as one column of its key's type")
        with held.lock:
            found = self._named(table, self._table(table).find(keys.column(0)))
        return found.combine_chunks().to_batches()[0] if len(found) else _empty(found.schema)

    def read_outputs(
        self, writer: str, epoch: int, start: int, stop: int
    ) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        held = self.home()
        with held.lock:
            outputs = held.store.outputs.get(writer, {}).get(epoch)
        if outputs is None:
            raise OutputsGone(
                f"what epoch {epoch} of {_operator(writer)!r} gave is no longer kept",
                hint="only the newest epochs can run again; the tables are as that epoch left them, and later ones",
                epoch=epoch,
            )
        return outputs.schema, in_batches(outputs.slice(start, max(stop - start, 0)))

    def report(self) -> dict[str, Any]:
        """Figures: of the tables, and of how transactions ran.

        Those of tables are older while a long epoch runs: a container that is busy must not look as if it had ended.
        """
        if not self.slices or self.broken is not None:
            return {} if self.broken is None else {"broken": str(self.broken)}
        held = self.home()
        if held.lock.acquire(timeout=REPORT_WAIT_S):
            try:
                tables = held.store.tables.items()
                self._sizes = {name: {"keys": len(t), "bytes": t.nbytes} for name, t in tables}
            finally:
                held.lock.release()
        return {**self.figures, "tables": self._sizes}

    def home(self) -> HeldSlice[GroupStore]:
        if self.broken is not None:
            raise self.broken
        try:
            return self.slices[self.spec.home]
        except KeyError:
            raise Moved(f"slice {self.spec.home} is not served here", slice_id=self.spec.home) from None

    def _table(self, name: str) -> TableStore:
        try:
            return self.home().store.tables[name]
        except KeyError:
            raise UnknownTable(
                f"there is no table {name!r} in group {self.spec.name!r}", table=name
            ) from None

    def _named(self, table: str, rows: pa.Table) -> pa.Table:
        return rows.rename_columns(table_schema(self.spec.tables[table]).names)

    # What only States do

    def advance(self, fetch_progress: Progress, final_below: Progress) -> None:
        """Tables have no versions."""

    def sweep(self, number: int, budget: int) -> bool:
        return True


def table_schema(spec: TableSpec) -> pa.Schema:
    """The columns of a table as users see it: the key, then the rest."""
    return pa.schema([spec.key_field, *spec.columns])


def outputs_names(program: Program) -> list[str]:
    """The columns that outputs have beyond the events'."""
    results = [name for function in program.kinds.values() for name in function.result_names]
    return ["committed", "reason", *dict.fromkeys(results)]


def check_outputs(program: Program, names: Sequence[str]) -> None:
    """The events' columns must leave room for the outputs'."""
    for name in outputs_names(program):
        if name in names:
            raise WrongColumn(
                f"the events have a column {name!r}, which the outputs need",
                hint='rename it, or name results otherwise: @mp.transaction(results="balance")',
                column=name,
                available=list(names)[:50],
            )


def schema_of(transactions: Transactions) -> pa.Schema:
    try:
        return pa.ipc.read_schema(pa.py_buffer(transactions.schema))
    except (pa.ArrowInvalid, OSError) as error:
        raise BadMessage(f"the schema of events cannot be read: {error}") from None


def program_of(transactions: Transactions) -> Program:
    """The program, loaded and compiled once for the same text."""
    return _loaded(msgspec.msgpack.encode(transactions.program))


@lru_cache(maxsize=64)
def _loaded(text: bytes) -> Program:
    return load_program(msgspec.msgpack.decode(text, type=ProgramCode))


def in_batches(rows: pa.Table) -> Iterator[pa.RecordBatch]:
    """The rows in batches that travel."""
    most = max(1, len(rows) * BATCH_BYTES // max(rows.nbytes, 1))
    return iter(rows.to_batches(max_chunksize=most))


def _operator(writer: str) -> str:
    return writer.partition("@")[0]


def _streams_of(tables: Sequence[pa.Table]) -> pa.Array:
    """Each table as an Arrow stream. They are measured first: a buffer that grows would be copied again and again."""
    measured = pa.MockOutputStream()
    _write_streams(measured, tables)
    buffer = pa.allocate_buffer(measured.size())
    with pa.FixedSizeBufferWriter(buffer) as sink:
        ends = _write_streams(sink, tables)
    offsets = pa.array([0, *ends], pa.int64()).buffers()[1]
    return pa.Array.from_buffers(pa.large_binary(), len(tables), [None, offsets, buffer])


def _write_streams(sink: pa.NativeFile, tables: Sequence[pa.Table]) -> list[int]:
    """Writes the tables one after the other; tells where each ends."""
    ends = []
    for rows in tables:
        with pa.ipc.new_stream(sink, rows.schema) as stream:
            stream.write_table(rows)
        ends.append(sink.tell())
    return ends


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
