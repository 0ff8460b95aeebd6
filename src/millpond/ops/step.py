"""The Step operator: rows ask a State, a function makes updates of rows and answers, the same State takes them.

All of it happens in the task that has the rows, in one pass of one job. The time of what a step writes is logical: epochs
of a name, counted. So operators of several names walk through the same times together, as the trainers of a model do.

An epoch may read what is not final, and would read something else if it ran again. It does not: once it is decided, an epoch
is known by the rows that it was given, and what it made of them stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from millpond.client.client import Client
from millpond.client.runs import Run
from millpond.code.rules import latest
from millpond.errors import BadOption, RowsWaiting, updater_finished, wrong_time_kind
from millpond.ops import frames
from millpond.ops.asking import Asking, Questions
from millpond.ops.columns import Names, as_table, column_of, keys_of
from millpond.ops.committing import check_history, commit_staged, turn_of
from millpond.ops.fetch import check_isolation
from millpond.ops.intake import Intake, Part
from millpond.ops.interruptions import ends_with_query
from millpond.stores.readiness import before
from millpond.stores.rows import digest_columns
from millpond.times import TIME_MAX, parse_duration
from millpond.wire.base import LOCAL_QUERY, KindOfTime
from millpond.wire.epochs import EpochCommitted, EpochPlan, Receipt
from millpond.wire.house import Register
from millpond.wire.questions import AskProgress, Report, ResidentProgress
from millpond.wire.states import RowsWork, StateSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Ask: TypeAlias = Callable[[pa.Table], pa.Table]
"""Gives a table of keys back with their answers."""
StepFunction: TypeAlias = Callable[[pa.Table, Ask], pa.Table]

TIME = "time of the step"
PAUSE_S = (0.002, 0.05)


class StepStager:
    """What a task does with its rows (a `Stager`); plain data that tasks can carry."""

    at: str | None = None

    def __init__(
        self, function: StepFunction, asking: Asking, intake: Intake, staleness: int | None, committed: bool
    ) -> None:
        self.resident = intake.resident
        self.name = intake.name
        self.columns: list[str] = []
        self._function = function
        self._asking = asking
        self._intake = intake
        self._staleness = staleness
        self._committed = committed

    def with_columns(self, columns: list[str]) -> StepStager:
        """The same, for rows with these columns, which are all handed to the function."""
        other = StepStager(self._function, self._asking, self._intake, self._staleness, self._committed)
        other.columns = columns
        return other

    def delay(self, kind: KindOfTime) -> int:
        return 0

    @staticmethod
    def time(plan: EpochPlan) -> int:
        """When the epoch takes place: each comes one after the last, whose end is where the watermark stands."""
        return 0 if plan.late_below == -math.inf else int(plan.late_below)

    def final_until(self, time: int) -> int | None:
        """The time that U must have passed before the epoch of that time can read; None if it waits for nobody."""
        return None if self._staleness is None else time - self._staleness

    def stage(self, client: Client, table: pa.Table, plan: EpochPlan, part: Part) -> Receipt:
        source = sum(digest_columns(batch.columns) for batch in table.to_batches()) % (1 << 64)
        if plan.replayed:
            return Receipt(part.partition, client.runtime.bits(62), 0, 0, 0, None, source)
        time = self.time(plan)
        updates = as_table(self._function(table, partial(self._ask, client, time)))
        names = dict.fromkeys((*self._intake.key, *self._intake.value))
        columns = {name: column_of(updates, name) for name in names}
        columns[TIME] = pa.array(np.full(len(updates), time))
        return replace(self._intake.stage(client, pa.table(columns), plan, part), source=source)

    def _ask(self, client: Client, time: int, table: pa.Table) -> pa.Table:
        asking, table = self._asking, as_table(table)
        asking.check_into(table.column_names)
        keys = keys_of(table, asking.key, asking.shape.keys)
        until = self.final_until(time) if self._committed else TIME_MAX
        questions = Questions(keys, None, np.full(len(table), until), "long")
        return asking.with_answers(table, asking.ask(client, questions))


class Step:
    """A callable `(rows, epoch)` for `foreachBatch`, or for Arrow tables.

    It counts as an updater and as a fetcher of its name, and holds U and F back, from the moment it is built.
    """

    def __init__(
        self,
        client: Client,
        spec: StateSpec,
        function: StepFunction,
        *,
        key: Names,
        into: Names | None,
        value: Names,
        isolation: str,
        staleness: int | None,
        wait: str | timedelta,
        history: str,
        name: str,
    ) -> None:
        if not callable(function):
            raise BadOption(
                f"{function!r} is not a function", hint="def learn(rows, ask): ...", option="function"
            )
        committed = check_isolation(isolation) == "committed"
        _check_staleness(staleness, committed)
        if not isinstance(wait, str | timedelta):
            raise BadOption(
                f"wait={wait!r} is not a duration", hint='for example wait="1 minute"', option="wait"
            )
        if history == "shared":
            raise BadOption(
                "the epochs of a step count the time of its name: two queries cannot share it",
                hint="give each query a step with a name of its own; they share the State",
                option="history",
            )
        self._wait_s = parse_duration(wait) / 1e6
        asking = Asking(spec, key, TIME, None, into, latest())
        intake = Intake(spec, key, TIME, value, 0, "error", name)
        self._stager = StepStager(function, asking, intake, staleness, committed)
        self._history = check_history(history)
        self._client = client
        self.name = intake.name
        self.state = spec.name
        progress: ResidentProgress = client.call(AskProgress(spec.name, waits=False))
        if progress.time_kind == "timestamp":
            raise wrong_time_kind(f"state {spec.name!r}", "timestamp", "long")
        for role in ("updater", "fetcher"):
            client.call(Register(spec.name, name, role))
        # Nothing comes before the first epoch. One that joins others begins where they are.
        client.call(Report(spec.name, name, 0, None, "long"))
        self._operator = client.runs.new_operator()

    @ends_with_query
    def __call__(self, rows: pa.Table | DataFrame, epoch: int) -> EpochCommitted:
        """Waits until the epoch can read, has its tasks run, and commits what they made; a replay changes nothing."""
        turn, client, stager = turn_of(epoch), self._client, self._stager
        pause: Callable[[float], None] = client.runtime.sleep
        run = Run(None, epoch, self._operator)
        if frames.is_frame(rows):
            query = frames.query_of(rows) or LOCAL_QUERY
            run = Run(frames.run_of(rows), epoch, self._operator)
            stage: Callable[[EpochPlan], list[Receipt]] = frames.Staging(
                client, stager.with_columns(rows.columns), rows, query, turn
            )
            pause = partial(frames.pause, rows.sparkSession)
        else:
            table, query = as_table(rows), LOCAL_QUERY
            part = Part(query, turn, 0)

            def stage(plan: EpochPlan) -> list[Receipt]:
                return [stager.stage(client, table, plan, part)]

        if client.runs.is_taken(self.state, self.name, run):
            raise BadOption(
                f"another step of the name {self.name!r} has taken epoch {epoch} of this query",
                hint="give each step of a query a name of its own",
                option="name",
            )
        time = 0

        def stage_when_ready(plan: EpochPlan) -> list[Receipt]:
            nonlocal time
            if plan.late_below == math.inf:
                raise updater_finished(self.state, self.name)
            time = stager.time(plan)
            if not plan.replayed:
                self._await(time, epoch, pause)
            return stage(plan)

        with frames.errors_of_tasks() if frames.is_frame(rows) else nullcontext():
            committed = commit_staged(
                client, stager, query, turn, stage_when_ready, "long", RowsWork(), self._history
            )
        # The epoch was one point in time, and the next asks for nothing that lies further back than this.
        oldest = stager.final_until(time + 1)
        client.call(Report(self.state, self.name, time + 1, time if oldest is None else oldest, "long"))
        client.runs.note(self.state, self.name, run)
        return committed

    def _await(self, time: int, epoch: int, pause: Callable[[float], None]) -> None:
        until = self._stager.final_until(time)
        if until is None:
            # It reads whatever is there: with it what an update of the same batch brought.
            self._client.call(AskProgress(self.state))
            return
        deadline = self._client.runtime.now() + self._wait_s
        seconds, longest = PAUSE_S
        while True:
            progress: ResidentProgress = self._client.call(AskProgress(self.state))
            if before(until, progress.update):
                return
            if self._client.runtime.now() >= deadline:
                behind = sorted(n for n, at in progress.updaters.items() if not before(until, at))
                raise RowsWaiting(
                    f"epoch {epoch} of step {self.name!r} has waited {self._wait_s:g} s for U to pass {until}:"
                    f" {', '.join(behind)} did not come so far",
                    hint="start the others, finish() those that are done, or let it wait longer by wait=",
                    update_progress=progress.update,
                    held_by=behind,
                )
            pause(seconds)
            seconds = min(2 * seconds, longest)


def _check_staleness(staleness: int | None, committed: bool) -> None:
    if staleness is None and not committed:
        return
    if isinstance(staleness, bool) or not isinstance(staleness, int) or not 1 <= staleness <= TIME_MAX:
        raise BadOption(
            f"staleness={staleness!r} is not a number of epochs, from 1 on",
            hint='1 to read what all have written until the epoch before; None, with isolation="uncommitted", to wait for nobody',
            option="staleness",
        )
