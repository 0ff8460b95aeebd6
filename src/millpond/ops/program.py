"""The Call operator: each row is a call of a program's method, exactly once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from millpond.client.client import Client
from millpond.client.receipts import receipt_of
from millpond.errors import BadOption, EpochChanged, WrongColumn
from millpond.ops import frames
from millpond.ops.columns import as_table, column_of, keys_of
from millpond.ops.committing import check_history, check_sink, commit, turn_of
from millpond.ops.intake import Part
from millpond.ops.interruptions import ends_with_query
from millpond.ops.limits import bytes_of, seconds_of
from millpond.programs.graph import Method
from millpond.programs.rows import ERROR, KEY, PARTITION_BITS, ROW, arrow_type
from millpond.schema import cast_column
from millpond.stores.keys import Keys
from millpond.stores.rows import digest_columns
from millpond.wire.base import LOCAL_QUERY, KindOfTime, SliceId, Turn, check_name, writer_id
from millpond.wire.epochs import EpochCommitted, EpochPlan, Receipt
from millpond.wire.house import Register
from millpond.wire.programs import ProgramSpec, ProgramWork, ReadReturned
from millpond.wire.questions import AskProgress, ResidentProgress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class CallIntake:
    """How rows become calls: all their columns travel, and outputs bring them back. Plain data that tasks can carry.

    A row goes to the slice of the method's first key; to any, by its number, where it has none; where it has an idempotency
    key, to the slice of that, which remembers it.
    """

    at = None

    def __init__(
        self,
        resident: str,
        name: str,
        schema: pa.Schema,
        key: tuple[str, pa.Schema] | None,
        method: str,
    ) -> None:
        self.resident = resident
        self.name = name
        self.schema = schema
        self._key = key
        self._method = method

    @property
    def columns(self) -> list[str]:
        return list(self.schema.names)

    @property
    def staged(self) -> pa.Schema:
        """The columns of rows as they are sent."""
        key = pa.int64() if self._key is None or self._key[1].field(0).type != pa.string() else pa.binary()
        return pa.schema([pa.field(KEY, key), pa.field(ROW, pa.int64()), *self.schema])

    def delay(self, kind: KindOfTime) -> int:
        return 0

    def stage(self, client: Client, table: pa.Table, plan: EpochPlan, part: Part) -> Receipt:
        rows = table.cast(self.schema)
        numbers = (part.partition << PARTITION_BITS) + np.arange(len(rows), dtype=np.int64)
        if self._key is None:
            keys = Keys.from_longs(numbers)
        else:
            column, schema = self._key
            keys = keys_of(rows, [column], schema)
        columns = [
            pa.concat_arrays(each.chunks) if each.num_chunks else pa.array([], each.type)
            for each in rows.columns
        ]
        # Of the rows and the method: their numbers are others when the source replays them in other partitions.
        of_method = int.from_bytes(hashlib.blake2b(self._method.encode(), digest_size=8).digest())
        source = (digest_columns(columns) + of_method * len(rows)) % (1 << 64)
        attempt = client.runtime.bits(62)
        digest = 0
        if not plan.replayed:
            message = part.message(self.resident, self.name, attempt)
            digest = client.stage(message, self.staged, keys, [numbers], columns, plan.placement)
        return replace(receipt_of(part.partition, attempt, len(rows), 0, digest), source=source)


class ProgramCall:
    """A callable `(rows, epoch)` that gives the rows back with what their calls returned; `.to(function)` for `foreachBatch`.

    Its name is for ever: the same name continues where it stopped.
    """

    def __init__(
        self,
        client: Client,
        spec: ProgramSpec,
        graph: bytes,
        method: Method,
        name: str,
        arguments: Mapping[str, str],
        *,
        into: str | None = None,
        limit: str | float | timedelta | None = None,
        memory: str | int | None = None,
        history: str = "continue",
        once: str | None = None,
        version: str = "",
    ) -> None:
        """`once` is a column of idempotency keys: a call whose key is remembered does nothing, and gives what it gave.

        `version` is that of the graph.
        """
        self.name = check_name(name, "the call's")
        self._client = client
        self._spec = spec
        self.resident = spec.name
        self._graph = graph
        self._method = method
        self._arguments = dict(arguments)
        self._into = _check_into(into, method)
        self._once = once
        self._version = version
        self._seconds_max, self._memory_max = seconds_of(limit), bytes_of(memory)
        self._history = check_history(history)
        client.call(Register(spec.name, name, "updater"))

    @ends_with_query
    def __call__(self, rows: pa.Table | DataFrame, epoch: int) -> Any:
        """Commits one epoch. When it returns, what its calls changed is durable; a replay changes nothing.

        Gives the rows as they came with the column `into`, and `error` where the method rejects calls: an Arrow table for an
        Arrow table, a lazy DataFrame for a DataFrame.
        """
        if not frames.is_frame(rows):
            table = as_table(rows)
            schema = table.schema.remove_metadata()
            committed = self._commit(table, epoch, schema)
            if not self.gives:
                return table.cast(schema).combine_chunks()
            return self._given(committed, LOCAL_QUERY, schema).read(self._client)
        schema = frames.arrow_schema(rows.schema)
        committed = self._commit(rows, epoch, schema)
        if not self.gives:
            return rows
        query = frames.query_of(rows) or LOCAL_QUERY
        return self._given(committed, query, schema).frame(self._client, rows.sparkSession)

    @property
    def gives(self) -> bool:
        """Whether anything comes back with the rows. Where nothing does, nothing is kept of them."""
        return self._into is not None or self._method.rejects

    def commit_in(self, query: str, epoch: int, table: pa.Table) -> None:
        """As `(table, epoch)`, as an epoch of the query of that name."""
        intake = self.intake(table.schema)
        commit(self._client, intake, table, epoch, self.work(intake), self._history, query)

    def returned_in(self, query: str, epoch: int, schema: pa.Schema) -> pa.Table:
        """What that gave, of rows with these columns."""
        return self.returned(query, turn_of(epoch), schema).read(self._client)

    def to(self, function: Callable[[Any, int], Any]) -> Callable[[Any, int], None]:
        """For `foreachBatch`: commits the epoch, then `function(frame, epoch)` gets the rows with what was returned.

        The frame is lazy, and may be used more than once. An epoch that runs again gives the same.
        """
        check_sink(function)

        @ends_with_query
        def run(rows: Any, epoch: int) -> None:
            function(self(rows, epoch), epoch)

        return run

    def progress(self) -> ResidentProgress:
        """Which operators the program has (`updaters`), and how many of its epochs are visible (`seen`)."""
        return self._client.call(AskProgress(self._spec.name))

    def _commit(self, rows: pa.Table | DataFrame, epoch: int, schema: pa.Schema) -> EpochCommitted:
        intake = self.intake(schema)
        return commit(self._client, intake, rows, epoch, self.work(intake), self._history)

    def _given(self, committed: EpochCommitted, query: str, schema: pa.Schema) -> ReturnedRows:
        """Where what a turn gave is. EpochChanged if it was committed before, and gave other columns then."""
        found = self.returned(query, committed.turn, schema)
        if committed.replayed and committed.rows:
            kept = found.kept_columns(self._client)
            if not _same_results(kept, found.schema, len(schema)):
                raise EpochChanged(
                    f"epoch {committed.turn} of {self.name!r} was committed, and gave"
                    f" {_results(kept, len(schema))} then, and not {_results(found.schema, len(schema))}",
                    hint="run it again as it was, with the same into= and result; from the next epoch on these can be others",
                    epoch=committed.turn.epoch,
                )
        return found

    def work(self, intake: CallIntake) -> ProgramWork:
        """What an epoch brings beside its rows."""
        return ProgramWork(
            self._graph,
            self._method.name,
            self._arguments,
            intake.staged.serialize().to_pybytes(),
            self._into,
            self._seconds_max,
            self._memory_max,
            self._once,
            self._version,
        )

    def intake(self, schema: pa.Schema) -> CallIntake:
        """Refuses rows of which a column is missing, there twice, or not of the type that the method takes."""
        nothing = schema.empty_table()
        for column in schema.names:
            column_of(nothing, column)
        taken = {KEY, ROW, *([self._into] if self._into else []), *([ERROR] if self._method.rejects else [])}
        for column in taken.intersection(schema.names):
            raise WrongColumn(
                f"the rows have a column {column!r}, which what is returned has, too",
                hint="rename it" + (", or choose another into=" if column == self._into else ""),
                column=column,
                available=schema.names[:50],
            )
        for parameter in self._method.parameters:
            column = self._arguments.get(parameter.name)
            if column is not None:
                cast_column(column_of(nothing, column), pa.field(column, arrow_type(parameter.type)), column)
        first = self._method.tasks[0]
        key = None
        if self._once is not None:
            key = (self._once, pa.schema([(KEY, pa.string())]))
        elif first.access == "partitioned":
            kind = next(variable.type for variable in first.inputs if variable.name == first.key)
            assert first.key is not None
            key = (self._arguments[first.key], pa.schema([(KEY, arrow_type(kind))]))
        return CallIntake(self._spec.name, self.name, schema, key, self._method.name)

    def returned(self, query: str, turn: Turn, schema: pa.Schema) -> ReturnedRows:
        """Where what a turn gave is, whose rows had these columns."""
        fields = list(schema)
        if self._into is not None:
            assert self._method.returns is not None
            fields.append(pa.field(self._into, arrow_type(self._method.returns)))
        if self._method.rejects:
            fields.append(pa.field(ERROR, pa.string()))
        return ReturnedRows(self._spec.name, writer_id(self.name, query), turn, pa.schema(fields))


class ReturnedRows(NamedTuple):
    """Where what the calls of a turn returned is. Plain data that tasks can carry."""

    resident: str
    writer: str
    turn: Turn
    schema: pa.Schema

    def read(self, client: Client, slices: list[int] | None = None) -> pa.Table:
        """All of it, or what came by these slices; in the order of rows."""
        streams = client.read(self._message, slices).column(0)
        tables = [pa.ipc.open_stream(stream.as_buffer()).read_all() for stream in streams]
        if not tables:
            return self.schema.empty_table()
        rows = pa.concat_tables(tables).sort_by(ROW).drop_columns([ROW])
        return rows.cast(self.schema).combine_chunks()

    def kept_columns(self, client: Client) -> pa.Schema:
        """The columns of what is kept of it; none where nothing is."""
        streams = client.read(
            lambda slices: ReadReturned(self.resident, self.writer, self.turn, slices, columns_only=True)
        ).column(0)
        for stream in streams:
            schema = pa.ipc.open_stream(stream.as_buffer()).schema
            return schema.remove(schema.get_field_index(ROW))
        return pa.schema([])

    def _message(self, slices: list[SliceId]) -> ReadReturned:
        return ReadReturned(self.resident, self.writer, self.turn, slices)

    def frame(self, client: Client, spark: SparkSession) -> DataFrame:
        """All of it as a lazy DataFrame."""
        return frames.read_by_slices(client, spark, self, self.schema)


def _check_into(into: str | None, method: Method) -> str | None:
    if into is not None and method.returns is None:
        raise BadOption(
            f"into={into!r}, but {method.name} returns nothing", hint="leave into= out", option="into"
        )
    return into


def _same_results(kept: pa.Schema, wanted: pa.Schema, columns: int) -> bool:
    """Whether what comes after so many columns of the rows is the same."""
    return [(field.name, field.type) for field in list(kept)[columns:]] == [
        (field.name, field.type) for field in list(wanted)[columns:]
    ]


def _results(schema: pa.Schema, columns: int) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in list(schema)[columns:]) or "nothing"
