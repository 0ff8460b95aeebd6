"""The Transactions operator: runs the events of an epoch on tables, exactly once and in the order of their times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from millpond.client.client import Client
from millpond.client.receipts import receipt_of
from millpond.errors import BadOption
from millpond.ops import frames
from millpond.ops.columns import as_table, check_column_name, column_of, times_of
from millpond.ops.committing import check_history, commit, turn_of
from millpond.ops.intake import Part, check_late, timely_rows
from millpond.ops.outputs import EpochOutputs
from millpond.stores.rows import digest_columns
from millpond.txn import TransactionFunction, TransactionSet
from millpond.txn import transaction as as_transaction
from millpond.wire.base import LOCAL_QUERY, KindOfTime, check_name, writer_id
from millpond.wire.epochs import EpochCommitted, EpochPlan, Receipt
from millpond.wire.groups import GroupSpec, TransactionWork
from millpond.wire.house import Register
from millpond.wire.questions import AskProgress, ResidentProgress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class EventIntake:
    """How events are read: all their columns, which the outputs bring back. Plain data that tasks can carry."""

    def __init__(self, group: GroupSpec, name: str, at: str, late: str, schema: pa.Schema) -> None:
        self.resident = group.name
        self.home = group.home_slice
        self.name = name
        self.at = at
        self.schema = schema
        self._late = late

    @property
    def columns(self) -> list[str]:
        return list(self.schema.names)

    def delay(self, kind: KindOfTime) -> int:
        return 0

    def stage(self, client: Client, table: pa.Table, plan: EpochPlan, part: Part) -> Receipt:
        events = table.cast(self.schema)
        times, time_kind = times_of(events, self.at, plan.time_kind)
        timely = timely_rows(times, plan, time_kind, self.resident, self.name, self._late)
        late = 0
        if timely is not None:
            events, late, times = events.take(pa.array(timely)), len(times) - len(timely), times[timely]
        attempt = client.runtime.bits(62)
        if plan.replayed:
            digest = sum(digest_columns(batch.columns) for batch in events.to_batches())
        else:
            digest = client.stage_home(part.message(self.resident, self.name, attempt), self.home, events)
        return receipt_of(part.partition, attempt, len(events), late, digest, times)


class Transactions:
    """A callable `(rows, epoch)` that gives the events back with their outcomes; `.to(function)` for `foreachBatch`.

    Its name is for ever: the same name continues where it stopped.
    """

    def __init__(
        self,
        client: Client,
        group: GroupSpec,
        name: str,
        tables: list[str],
        kinds: Mapping[str, Callable[..., Any]],
        *,
        kind: str,
        at: str,
        seq: str | None,
        late: str,
        history: str = "continue",
    ) -> None:
        if not isinstance(kinds, Mapping):
            raise BadOption(
                "kinds= takes functions by the value of the kind column",
                hint='kinds={"transfer": transfer}',
                option="kinds",
            )
        if not kinds:
            raise BadOption("there are no kinds", hint='kinds={"transfer": transfer}', option="kinds")
        functions = {
            str(key): function if isinstance(function, TransactionFunction) else as_transaction(function)
            for key, function in kinds.items()
        }
        self.name = check_name(name, "the transactions'")
        self._client = client
        self._group = group
        self._functions = TransactionSet(functions, {table: group.tables[table] for table in tables})
        self._kind_column = check_column_name(kind, "kind")
        self._at = check_column_name(at, "at")
        self._seq = None if seq is None else check_column_name(seq, "seq")
        self._late = check_late(late)
        self._history = check_history(history)
        client.call(Register(group.name, name, "updater"))

    def explain(self) -> str:
        """What each kind reads and writes, what depends on what, and how it runs."""
        return self._functions.explain()

    def progress(self) -> ResidentProgress:
        """How far each operator of the group has come (`updaters`), and how many events were late (`late`)."""
        return self._client.call(AskProgress(self._group.name))

    def to(self, function: Callable[[DataFrame, int], Any]) -> Callable[[DataFrame, int], None]:
        """For `foreachBatch`: runs the epoch, then `function(frame, epoch)` gets its events with their outcomes.

        The frame is lazy, and may be used more than once. An epoch that runs again gives the same outcomes.
        """

        def run(frame: DataFrame, epoch: int) -> None:
            function(self(frame, epoch), epoch)

        return run

    def __call__(self, rows: pa.Table | DataFrame, epoch: int) -> Any:
        """Commits one epoch. When it returns, all its transactions are durable; a replay changes nothing.

        Gives the events, but for late ones, with the columns `committed`, `reason` and the results: an Arrow table
        for an Arrow table, in the same order; a DataFrame for a DataFrame.
        """
        if not frames.is_frame(rows):
            table = as_table(rows)
            self._commit(table, epoch, table.schema.remove_metadata())
            return self._outputs(LOCAL_QUERY, epoch).read(self._client)
        committed = self._commit(rows, epoch, frames.arrow_schema(rows.schema))
        outputs = self._outputs(frames.query_of(rows) or LOCAL_QUERY, epoch)
        return outputs.frame(self._client, rows.sparkSession, committed.rows)

    def _commit(
        self, rows: pa.Table | DataFrame, epoch: int, schema: pa.Schema, query: str | None = None
    ) -> EpochCommitted:
        intake, work = self._intake(schema), self._work(schema)
        return commit(self._client, intake, rows, epoch, work, self._history, query)

    def _work(self, schema: pa.Schema) -> TransactionWork:
        described = schema.serialize().to_pybytes()
        return TransactionWork(self._functions.message, self._kind_column, self._at, self._seq, described)

    def _intake(self, schema: pa.Schema) -> EventIntake:
        for name in (self._at, *(() if self._seq is None else (self._seq,)), *schema.names):
            column_of(schema.empty_table(), name)
        self._functions.check_events(schema.names)
        # Says what will be interpreted, and why, where the user reads it.
        self._functions.prepare(dict.fromkeys(self._functions.kinds, schema))
        return EventIntake(self._group, self.name, self._at, self._late, schema)

    def _outputs(self, query: str, epoch: int) -> EpochOutputs:
        slices = tuple(self._group.places(self._client.placement().slices))
        return EpochOutputs(self._group.name, slices, writer_id(self.name, query), turn_of(epoch))
