"""The Transactions operator: runs the events of an epoch on tables, exactly once and in the order of their times."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from msgspec.structs import replace

from millpond.client.client import Client
from millpond.client.receipts import receipt_of
from millpond.errors import BadOption
from millpond.ops import frames
from millpond.ops.columns import as_table, check_column_name, column_of, time_kind_in, times_of
from millpond.ops.committing import Planned, check_history, check_sink, commit, commit_staged, turn_of
from millpond.ops.intake import Part, timely_rows
from millpond.ops.interruptions import ends_with_query
from millpond.ops.limits import bytes_of, seconds_of
from millpond.ops.outputs import EpochOutputs
from millpond.stores.readiness import before, late_rows
from millpond.stores.rows import digest_columns
from millpond.times import TIME_MAX, Progress, delay_for, parse_duration, watermark_after
from millpond.txn import TransactionFunction, TransactionSet
from millpond.txn import transaction as as_transaction
from millpond.wire.base import LOCAL_QUERY, KindOfTime, Turn, check_name, writer_id
from millpond.wire.epochs import AskTurns, BeginEpoch, EpochCommitted, EpochPlan, HandedOver, Receipt
from millpond.wire.groups import GroupSpec, ReadDelayed, TransactionWork
from millpond.wire.house import Register
from millpond.wire.questions import AskProgress, Pending, ResidentProgress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


Delay = str | int | timedelta
LateRows = Callable[[Any, int], Any]
"""Gets late events `(rows, epoch)`."""


class EventIntake:
    """How events are read: all their columns, which the outputs bring back. Plain data that tasks can carry."""

    def __init__(
        self, group: GroupSpec, name: str, at: str, late: str, delay: Delay | None, schema: pa.Schema
    ) -> None:
        self.resident = group.name
        self.home = group.home_slice
        self.name = name
        self.at = at
        self.schema = schema
        self._late = late
        self._delay = delay

    @property
    def columns(self) -> list[str]:
        return list(self.schema.names)

    def delay(self, kind: KindOfTime) -> int:
        return 0 if self._delay is None or not kind else delay_for(kind, self._delay)

    def stage(self, client: Client, table: pa.Table, plan: EpochPlan, part: Part) -> Receipt:
        """An epoch is known by all rows that came, late or not: what becomes of late ones may be another choice next time."""
        events = table.cast(self.schema)
        times, time_kind = times_of(events, self.at, plan.time_kind)
        timely = timely_rows(times, plan, time_kind, self.resident, self.name, self._late)
        late = 0 if timely is None else len(times) - len(timely)
        left_out = 0
        if timely is not None and self._late != "output":
            left_out = _digest(events.take(pa.array(late_rows(times, plan.late_below))))
            events, times = events.take(pa.array(timely)), times[timely]
        attempt = client.runtime.bits(62)
        if plan.replayed:
            digest = _digest(events)
        else:
            message = part.message(self.resident, self.name, attempt)
            digest = client.stage_home(message, self.home, events, plan.placement)
        receipt = receipt_of(part.partition, attempt, len(events), late, digest, times)
        return replace(receipt, source=(digest + left_out) % (1 << 64))


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
        delay: Delay | None = None,
        late: str | LateRows = "output",
        limit: str | float | timedelta | None = None,
        memory: str | int | None = None,
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
        if delay is not None:
            parse_duration(delay)
        self._delay = delay
        self._late = _check_late(late)
        self._seconds_max, self._memory_max = seconds_of(limit), bytes_of(memory)
        self._history = check_history(history)
        self._to: Callable[[Any, int], Any] | None = None
        client.call(Register(group.name, name, "updater"))

    def explain(self) -> str:
        """What each kind reads and writes, what depends on what, and how it runs."""
        return self._functions.explain()

    def progress(self) -> ResidentProgress:
        """How far each operator of the group has come (`updaters`), and how many events were late (`late`)."""
        return self._client.call(AskProgress(self._group.name))

    def pending(self) -> Pending:
        """How many events wait, since which time, and how many came too late."""
        waiting = self._waiting()
        return Pending(
            rows=sum(row["rows"] for row in waiting.values()),
            since=min((row["since"] for row in waiting.values()), default=None),
            late=self.progress().late[self.name],
        )

    def to(self, function: Callable[[DataFrame, int], Any]) -> Callable[[DataFrame, int], None]:
        """For `foreachBatch`: runs the epoch, then `function(frame, epoch)` gets the events that ran, with their outcomes.

        The frame is lazy, and may be used more than once. An epoch that runs again gives the same outcomes. What
        `finish()` runs, the same function gets.
        """
        check_sink(function)
        self._to = function

        @ends_with_query
        def run(frame: DataFrame, epoch: int) -> None:
            function(self(frame, epoch), epoch)

        return run

    @ends_with_query
    def __call__(self, rows: pa.Table | DataFrame, epoch: int) -> Any:
        """Commits one epoch. When it returns, all its transactions are durable; a replay changes nothing.

        Gives the events that ran in it with the columns `committed`, `reason` and the results: those that waited and
        are due, then its own, as they came. An Arrow table for an Arrow table, a DataFrame for a DataFrame.
        """
        if not frames.is_frame(rows):
            table = as_table(rows)
            committed = self._commit(table, epoch, table.schema.remove_metadata())
            self._hand_late(table, epoch, LOCAL_QUERY, committed)
            return self._outputs(LOCAL_QUERY, turn_of(epoch)).read(self._client)
        committed = self._commit(rows, epoch, frames.arrow_schema(rows.schema))
        query = frames.query_of(rows) or LOCAL_QUERY
        self._hand_late(rows, epoch, query, committed)
        return self._outputs(query, turn_of(epoch)).frame(self._client, rows.sparkSession, committed.rows)

    def finish(self, query: str | None = None) -> pa.Table | None:
        """Runs all events that wait, without new ones: for a stream that has ended. Exactly once, as any epoch.

        Their outputs go to the function of `to`, under a number of their own, below zero; where there is none, they
        come back as an Arrow table. Until the next epoch, events that came in Arrow tables are given back each time;
        a function that did not return gets its own again, and until then no epoch follows. `query` is the
        one to finish, where events of several wait.
        """
        turns = self._client.call(AskTurns(self._group.name, self.name))
        waiting = self._waiting()
        open_queries = {*waiting, *turns.owed} or ({LOCAL_QUERY} & set(turns.last))
        if query is None and len(open_queries) > 1:
            raise BadOption(
                f"events of {len(open_queries)} queries wait for {self.name!r}",
                hint=f"finish one after the other: query= one of {', '.join(sorted(open_queries))}",
                option="query",
            )
        name = next(iter(open_queries), LOCAL_QUERY) if query is None else query
        if name not in turns.last:
            return None if self._to is not None else pa.table({})
        turn, rows = turns.last[name], 0
        if name in waiting and name not in turns.owed:
            turn, rows = turn.next_drain, waiting[name]["rows"]
            if not self._run_waiting(name, turn, waiting[name]):
                return self.finish(query)  # an epoch came in between
        elif self._to is not None and name not in turns.owed:
            return None
        outputs = self._outputs(name, turn)
        if self._to is None:
            found = outputs.read(self._client)
            if name in turns.owed:
                self._client.call(HandedOver(self._group.name, self.name, name, turn))
            return found if turn.drain else found.slice(0, 0)
        if name == LOCAL_QUERY:
            self._to(outputs.read(self._client), turn.number)
        else:
            spark = frames.active_session()
            with frames.as_query(spark, name):
                self._to(outputs.frame(self._client, spark, rows), turn.number)
        self._client.call(HandedOver(self._group.name, self.name, name, turn))
        return None

    def _run_waiting(self, query: str, turn: Turn, waiting: Mapping[str, Any]) -> bool:
        """Commits a turn in which all run that wait. False if that turn had been taken."""
        schema = pa.ipc.read_schema(pa.py_buffer(waiting["schema"]))
        intake = EventIntake(self._group, self.name, self._at, "drop", None, schema)
        part = Part(query, turn, 0)

        def stage(plan: EpochPlan) -> list[Receipt]:
            """No rows, but a time: what comes below it later is late."""
            receipt = intake.stage(self._client, schema.empty_table(), plan, part)
            return [replace(receipt, time_max=min(waiting["newest"] + 1, TIME_MAX))]

        committed = commit_staged(
            self._client,
            intake,
            query,
            turn,
            stage,
            "",
            replace(self._work(schema), takes_over=False, watermark=math.inf),
            self._history,
            owes=self._to is not None,
        )
        return not committed.replayed

    def _commit(
        self, rows: pa.Table | DataFrame, epoch: int, schema: pa.Schema, query: str | None = None
    ) -> EpochCommitted:
        intake = self._intake(schema)
        return commit(self._client, intake, rows, epoch, self._planned(intake), self._history, query)

    def _planned(self, intake: EventIntake) -> Planned:
        """What an epoch brings: how far the watermark comes follows from the rows that were staged."""
        work = self._work(intake.schema)
        delay = intake.delay(time_kind_in(intake.schema.empty_table(), self._at))

        def planned(plan: EpochPlan, receipts: list[Receipt]) -> TransactionWork:
            watermark: Progress | None = None
            if self._delay is not None:
                newest = max((one.time_max for one in receipts if one.time_max is not None), default=None)
                watermark = watermark_after(plan.late_below, newest, delay)
            has_late = self._late == "output" and any(one.late for one in receipts)
            late_below = plan.late_below if has_late else -math.inf
            return replace(work, late_below=late_below, watermark=watermark)

        return planned

    def _hand_late(self, rows: Any, epoch: int, query: str, committed: EpochCommitted) -> None:
        """Late events to the function that takes them; again whenever their epoch runs again."""
        if not callable(self._late) or not committed.late:
            return
        plan = self._client.call(
            BeginEpoch(self._group.name, self.name, query, turn_of(epoch), self._history)
        )
        if frames.is_frame(rows):
            is_late = before(frames.micros(rows.schema, self._at), plan.late_below)
            self._late(rows.filter(frames.truth(is_late, null=False)), epoch)
        else:
            times, _ = times_of(rows, self._at, plan.time_kind)
            self._late(rows.filter(pa.array(before(times, plan.late_below))), epoch)

    def _work(self, schema: pa.Schema) -> TransactionWork:
        described = schema.serialize().to_pybytes()
        return TransactionWork(
            self._functions.message,
            self._kind_column,
            self._at,
            self._seq,
            described,
            takes_over=self._history == "new",
            seconds_max=self._seconds_max,
            memory_max=self._memory_max,
        )

    def _intake(self, schema: pa.Schema) -> EventIntake:
        for name in (self._at, *(() if self._seq is None else (self._seq,)), *schema.names):
            column_of(schema.empty_table(), name)
        self._functions.check_events(schema.names)
        # Says what will be interpreted, and why, where the user reads it.
        self._functions.prepare(dict.fromkeys(self._functions.kinds, schema))
        late = "drop" if callable(self._late) else self._late
        return EventIntake(self._group, self.name, self._at, late, self._delay, schema)

    def _outputs(self, query: str, turn: Turn) -> EpochOutputs:
        slices = tuple(self._group.places(self._client.placement().slices))
        return EpochOutputs(self._group.name, slices, writer_id(self.name, query), turn)

    def _waiting(self) -> dict[str, dict[str, Any]]:
        """By query, what waits for this operator: how many `rows`, `since` when, the `newest` time and the `schema`."""
        rows = self._client.read_home(ReadDelayed(self._group.name, self.name), self._group.home_slice)
        return {row.pop("writer").partition("@")[2]: row for row in rows.to_pylist()}


def _digest(events: pa.Table) -> int:
    return sum(digest_columns(batch.columns) for batch in events.to_batches())


def _check_late(late: str | LateRows) -> str | LateRows:
    if late in ("output", "drop", "error") or callable(late):
        return late
    raise BadOption(
        f"late={late!r} is not a choice",
        hint='late="output", late="drop", late="error", or a function (rows, epoch)',
        option="late",
    )
