"""The Window operator: takes the rows of an epoch into windows, and gives what they fired, exactly once."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pyarrow as pa
from msgspec.structs import replace

from millpond.client.client import Client
from millpond.errors import BadOption, RuleInterpreted
from millpond.ops import frames
from millpond.ops.chains import Chain
from millpond.ops.columns import Names, as_names, as_table, check_column_name, time_kind_in
from millpond.ops.committing import Planned, check_history, check_sink, commit, commit_staged, turn_of
from millpond.ops.intake import Part, Stager
from millpond.ops.interruptions import ends_with_query
from millpond.ops.own_turns import OwnTurns
from millpond.ops.pace import Pace
from millpond.ops.update import idle_seconds
from millpond.ops.window_intake import WindowIntake, check_teachable, columns_of, inferred
from millpond.schema import format_ddl, parse_ddl
from millpond.stores.keys import Keys
from millpond.stores.windows.rowwise import interpreted_reasons
from millpond.stores.windows.shape import NO_KEY, Chosen, WindowShape, choose_early, columns_needed
from millpond.stores.windows.sifting import can_sift
from millpond.stores.windows.store import WindowStore
from millpond.stores.windows.whole import WholeWindows
from millpond.times import MICROS, TIME_MAX, TIME_MIN, Progress, parse_duration, watermark_after
from millpond.wire.base import LOCAL_QUERY, KindOfTime, SliceId, Turn, check_name, writer_id
from millpond.wire.dedups import DedupSpec
from millpond.wire.epochs import (
    AskTurns,
    BeginEpoch,
    EpochCommitted,
    EpochPlan,
    HandedOver,
    Receipt,
    WriterTurns,
)
from millpond.wire.house import OpenResident, Register
from millpond.wire.joins import JoinSpec
from millpond.wire.questions import AskProgress, Drain, Report, ResidentProgress
from millpond.wire.windows import AskOpen, ReadFired, WindowSpec, WindowWork

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Delay = str | int | timedelta
LateRows = Callable[[Any, int], Any]


class Open(NamedTuple):
    """What is open in all slices: how many windows, when the last of them ends, up to when all have fired, and whether some
    have changed since they were last sent.
    """

    windows: int
    newest: int | None
    fired: Progress
    withheld: bool


class FiringIntake(Stager, Protocol):
    """A stager that says which rows are late in an epoch."""

    def late_flags(self, table: pa.Table, plan: EpochPlan) -> Any: ...


class FiringSource(ABC):
    """A callable `(rows, epoch)` that gives what the epoch fired; `.to(function)` for `foreachBatch`.

    It is one of the sources of its resident: the watermark of a resident is the lowest of those of its sources.
    """

    def __init__(
        self,
        client: Client,
        spec: WindowSpec | JoinSpec | DedupSpec,
        *,
        at: str,
        delay: Delay,
        late: str | LateRows,
        idle: str | timedelta | None,
        name: str,
        history: str,
    ) -> None:
        self.name = check_name(name, f"the {spec.kind}'s source")
        self._client = client
        self._resident = spec.name
        self._kind = spec.kind
        self._at = check_column_name(at, "at")
        parse_duration(delay)
        self._delay = delay
        self._late = _check_late(late)
        self._history = check_history(history)
        self._idle = idle is not None
        self._to: Callable[[Any, int], Any] | None = None
        self._turns = OwnTurns(self)
        self._waits_behind: Callable[[], bool] = lambda: False
        self._owes_update_behind: Callable[[], bool] = lambda: False
        self._rests = False
        window = spec if isinstance(spec, WindowSpec) else None
        self._pace = Pace(client.runtime, 0 if window is None else window.every / MICROS)
        self._lateness = 0 if window is None else window.lateness
        client.call(Register(spec.name, name, "updater", None if idle is None else idle_seconds(idle)))

    # What a kind says of itself

    @property
    @abstractmethod
    def _is_known(self) -> bool:
        """Whether its types are: until then nothing has come."""

    @abstractmethod
    def _intake(self, schema: pa.Schema | None) -> FiringIntake:
        """How rows of that schema are read; None for those of a turn that brings none."""

    @abstractmethod
    def _results(self, time_kind: str) -> pa.Schema:
        """The columns of what it gives."""

    @abstractmethod
    def _staged(self) -> tuple[pa.Schema, int]:
        """The columns of rows as they are sent, the first of which is the key; how many times follow it."""

    # Epochs

    @ends_with_query
    def __call__(self, rows: pa.Table | DataFrame, epoch: int) -> Any:
        """Commits one epoch. When it returns, its rows are durable, and what it fired has fired; a replay gives the same.

        Gives the results: `window_start`, `window_end`, the key and the aggregates. An Arrow table for an Arrow table, a
        lazy DataFrame for a DataFrame.
        """
        if not frames.is_frame(rows):
            table = as_table(rows)
            self._hand_over_owed(LOCAL_QUERY, None)
            intake = self._intake(table.schema)
            planned = self._planned(intake, time_kind_in(table, self._at))
            committed = commit(self._client, intake, table, epoch, planned, self._history)
            self._pace.committed()
            self._hand_late(intake, table, epoch, LOCAL_QUERY, committed)
            return self._outputs(LOCAL_QUERY, turn_of(epoch)).read(self._client)
        query = frames.query_of(rows) or LOCAL_QUERY
        with self._turns.batch(rows.sparkSession, frames.query_of(rows), frames.run_of(rows)):
            self._hand_over_owed(query, rows.sparkSession)
            intake = self._intake(frames.arrow_schema(rows.schema))
            planned = self._planned(intake, frames.time_kind_of(rows.schema, self._at))
            committed = commit(self._client, intake, rows, epoch, planned, self._history)
            self._pace.committed()
            self._hand_late(intake, rows, epoch, query, committed)
        return self.frame(query, turn_of(epoch), rows.sparkSession)

    def to(self, function: Callable[[Any, int], Any]) -> Callable[[Any, int], None]:
        """For `foreachBatch`: commits the epoch, then `function(frame, epoch)` gets what it fired.

        The frame is lazy, and may be used more than once. What fires without a batch, by `idle=` or `finish()`, the same
        function gets, under a number below zero.
        """
        check_sink(function)
        self._to = function
        spark = frames.default_session()
        if spark is not None and self.waits() and set(self._writers().last) - {LOCAL_QUERY}:
            # Its query may be started, and find no new rows.
            self._turns.watch(spark)

        @ends_with_query
        def run(rows: Any, epoch: int) -> None:
            if not frames.is_frame(rows):
                function(self(rows, epoch), epoch)
                return
            # No turn of its own comes between an epoch and its results.
            with self._turns.one_at_a_time(frames.query_of(rows) or LOCAL_QUERY):
                function(self(rows, epoch), epoch)

        return run

    def finish(self, query: str | None = None) -> pa.Table | None:
        """This source has ended: fires all windows that no other source is waited for, without new rows. Exactly once.

        It is left out until rows of it come again; those for windows that have fired are late. Of several sources the last
        one that finishes fires what is left. The results go to the function of `to`, under a number of their own, below
        zero; where there is none, they come back as an Arrow table, each time until something comes again.
        """
        name = self.query_named(query)
        turns = self._writers()
        self.rest()
        if name not in turns.last:
            return None if self._to is not None else self.nothing()
        spark = None if name == LOCAL_QUERY else frames.active_session()
        last = turns.last[name]
        if self._to is None and not turns.owed and last.drain and not self._has_left():
            # Whoever was interrupted before it had them asks again.
            return self._outputs(name, last).read(self._client)
        with self._turns.one_at_a_time(name):
            handed: pa.Table | None = None
            is_owed = name in self._writers().owed
            if is_owed:
                handed = self._fire_without_rows(name, spark, ends=True)
            if (is_owed and self._to is None) or not self._has_left():
                return handed if is_owed or self._to is not None else self.nothing()
            return self._fire_without_rows(name, spark, ends=True)

    def query_named(self, query: str | None) -> str:
        """The query of that id, or the only one."""
        turns = self._writers()
        queries = list(turns.owed) or list(turns.last)
        if query is None and len(queries) > 1:
            raise BadOption(
                f"{self.name!r} has {len(queries)} queries",
                hint=f"finish one of them: query= one of {', '.join(sorted(queries))}",
                option="query",
            )
        return query or (queries[0] if queries else LOCAL_QUERY)

    def rest(self) -> None:
        """No other source waits for this one, until rows of it come."""
        self._client.call(Report(self._resident, self.name, update=None, fetch=None, rests=True))
        self._rests = True

    def progress(self) -> ResidentProgress:
        """How far each source has come (`updaters`), and how many rows were late (`late`). `update` is the watermark."""
        return self._client.call(AskProgress(self._resident))

    def nothing(self) -> pa.Table:
        """No results."""
        return self._results(self.progress().time_kind).empty_table() if self._is_known else pa.table({})

    # What is behind it

    @property
    def has_sink(self) -> bool:
        return self._to is not None

    @contextmanager
    def handing_to(self, function: Callable[[Any, int], Any]) -> Iterator[None]:
        """What fires without a batch goes to that function meanwhile."""
        self._to = function
        try:
            yield
        finally:
            self._to = None

    def followed_by(self, waits: Callable[[], bool], owes_update: Callable[[], bool]) -> None:
        """Something takes in what this fires. `waits` says whether anything there could go on by a turn of this, and
        `owes_update` whether a turn would give an update there.
        """
        self._waits_behind, self._owes_update_behind = waits, owes_update

    def fired_in(self, query: str, turn: Turn) -> pa.Table:
        """What a turn of this source fired."""
        return self._outputs(query, turn).read(self._client)

    def fired_upto(self) -> Progress:
        """The time up to which all windows have fired, in every slice."""
        return self._ask_open().fired

    def last_turn(self, query: str) -> Turn | None:
        return self._writers().last.get(query)

    def is_over(self) -> bool:
        """Whether nothing is open, and no source is waited for."""
        return self._none_counts() and not self.has_open()

    def has_open(self) -> bool:
        return self._is_known and self._ask_open().windows > 0

    def may_close(self) -> bool:
        """Whether what is open may fire once this source rests."""
        return not self._rests or self._none_counts()

    def _none_counts(self) -> bool:
        return all(each.idle for each in self.progress().held_by)

    # What an epoch is

    def _planned(self, intake: FiringIntake, kind: KindOfTime) -> Planned:
        """How far the window's watermark comes: this source's follows from the rows that were staged."""

        def planned(plan: EpochPlan, receipts: list[Receipt]) -> WindowWork:
            times = [one.time_max for one in receipts if one.time_max is not None]
            own = watermark_after(plan.late_below, max(times, default=None), intake.delay(kind))
            return WindowWork(min(own, plan.others), kind, emits=self._pace.emits(plan.replayed))

        return planned

    def _hand_late(
        self, intake: FiringIntake, rows: Any, epoch: int, query: str, committed: EpochCommitted
    ) -> None:
        """Late rows to the function that takes them; again whenever their epoch runs again."""
        if not callable(self._late) or not committed.late:
            return
        message = BeginEpoch(
            self._resident, self.name, query, turn_of(epoch), self._history, brings_rows=False
        )
        plan = self._client.call(message)
        if frames.is_frame(rows):
            task = LateTask(intake, plan)
            self._late(rows.mapInArrow(task, rows.schema), epoch)
        else:
            self._late(rows.filter(pa.array(intake.late_flags(rows, plan))), epoch)

    # Results

    def _outputs(self, query: str, turn: Turn) -> Fired:
        return Fired(self._resident, writer_id(self.name, query), turn)

    def frame(self, query: str, turn: Turn, spark: SparkSession) -> DataFrame:
        """What a turn fired, as a lazy DataFrame."""
        return self._outputs(query, turn).frame(self._client, spark, self._results(self.progress().time_kind))

    # Turns without rows

    def _writers(self) -> WriterTurns:
        return self._client.call(AskTurns(self._resident, self.name))

    def _ask_open(self) -> Open:
        rows = self._client.read(lambda slices: AskOpen(self._resident, slices))
        newest = [each for each in rows.column("newest").to_pylist() if each is not None]
        return Open(
            sum(rows.column("open").to_pylist()),
            max(newest, default=None),
            min(rows.column("fired").to_pylist(), default=-math.inf),
            "withheld" in rows.column_names and any(rows.column("withheld").to_pylist()),
        )

    def _hand_over_owed(self, query: str, spark: SparkSession | None) -> None:
        """A turn of its own that was interrupted comes to its end before the next epoch: its sink may have seen the rows."""
        if self._to is not None and query in self._writers().owed:
            self._fire_without_rows(query, None if query == LOCAL_QUERY else spark, ends=False)

    def _fire_without_rows(self, query: str, spark: SparkSession | None, ends: bool) -> pa.Table | None:
        """A turn that brings no rows; what it fires goes where results go. A turn whose results are owed is not repeated."""
        turns = self._writers()
        if query in turns.owed:
            turn = turns.owed[query]
        else:
            turn = turns.last[query].next_drain
            self._commit_without_rows(query, turn, ends)
        outputs = self._outputs(query, turn)
        handed: pa.Table | None = None
        if self._to is None:
            handed = outputs.read(self._client)
        elif spark is None:
            self._to(outputs.read(self._client), turn.number)
        else:
            with frames.as_query(spark, query):
                self._to(self.frame(query, turn, spark), turn.number)
        self._client.call(HandedOver(self._resident, self.name, query, turn))
        return handed

    def _commit_without_rows(self, query: str, turn: Turn, ends: bool, owes: bool = True) -> None:
        """With `ends` all that is open fires, if no other source is waited for."""
        intake = self._intake(None)

        def closes(plan: EpochPlan) -> bool:
            return ends and plan.others == math.inf

        def stage(plan: EpochPlan) -> list[Receipt]:
            """No rows, but a time: what comes for windows that fired is late."""
            newest = self._ask_open().newest if closes(plan) else None
            attempt = self._client.runtime.bits(62)
            staged, times = self._staged()
            keys = Keys.from_arrow(pa.array([], staged.field(0).type))
            longs = [pa.array([], pa.int64()).to_numpy()] * times
            columns = [pa.array([], type_) for type_ in staged.types[1 + times :]]
            message = Part(query, turn, 0).message(self._resident, self.name, attempt)
            digest = self._client.stage(message, staged, keys, longs, columns, plan.placement)
            time_max = None if newest is None else min(newest + self._lateness, TIME_MAX)
            return [Receipt(0, attempt, 0, 0, digest, time_max)]

        def planned(plan: EpochPlan, receipts: list[Receipt]) -> WindowWork:
            own = watermark_after(plan.late_below, receipts[0].time_max, 0)
            return self._work_without_rows(plan, own, closes(plan))

        commit_staged(
            self._client, intake, query, turn, stage, "", planned, self._history, owes=owes, brings_rows=False
        )
        self._pace.committed()

    def _work_without_rows(self, plan: EpochPlan, own: Progress, closes: bool) -> WindowWork:
        """What a turn brings that has no rows. `own` is how far this source comes by it."""
        if closes:
            return WindowWork(own, plan.time_kind, closes=True, emits=self._pace.emits(plan.replayed))
        # This source may have gone on since the turn was found due: what others have yet to bring is waited for all the same.
        # One that was left out as idle may be behind U.
        watermark = min(plan.others, max(plan.late_below, self.progress().update))
        return WindowWork(watermark, plan.time_kind, emits=self._pace.emits(plan.replayed))

    # Turning: turns of its own while its query gets no rows

    @property
    def place(self) -> tuple[str, ...]:
        return (self._kind, self._resident, self.name)

    @property
    def is_shared(self) -> bool:
        return self._history == "shared"

    def waits(self) -> bool:
        return self._is_known and (self._is_open() or bool(self._writers().owed))

    def due(self) -> Mapping[str, Drain]:
        """Queries that had rows, where something fires though none come: all sources are silent, or U has gone on, or what
        has changed was withheld until now.
        """
        if not self._is_known or self._to is None:
            return {}
        turns = self._writers()
        fires = self._fires(*self._silent()) or self.owes_update() or self._owes_update_behind()
        return {
            query: Drain(last.next_drain, last, "")
            for query, last in turns.last.items()
            if fires or query in turns.owed
        }

    def owes_update(self) -> bool:
        """Whether something has changed that was not sent, because it was too soon, and is no longer."""
        return self._pace.is_over and self._is_known and self._ask_open().withheld

    def _is_open(self) -> bool:
        return self._ask_open().windows > 0 or self._waits_behind()

    def _fires(self, closes: bool, watermark: Progress) -> bool:
        """Whether anything would by a turn without rows."""
        if not closes and watermark == -math.inf:
            return False
        return self._is_open() and (closes or float(watermark) > self._ask_open().fired)

    def _has_left(self) -> bool:
        """Whether a finish would fire anything."""
        return self._fires(self._none_counts(), self.progress().update)

    def _silent(self) -> tuple[bool, Progress]:
        """Whether all sources are, and where the watermark stands."""
        progress = self.progress()
        holders = progress.held_by
        return bool(holders) and self._idle and all(each.idle for each in holders), progress.update

    def take(self, query: str, spark: SparkSession) -> None:
        is_silent, _ = self._silent()
        self._fire_without_rows(query, spark, ends=is_silent)


class WindowSource(FiringSource):
    """A source of a window."""

    def __init__(
        self,
        client: Client,
        spec: WindowSpec,
        *,
        key: Names,
        at: str,
        value: Names | None,
        delay: Delay,
        late: str | LateRows,
        idle: str | timedelta | None,
        name: str,
        history: str,
    ) -> None:
        self._spec = spec
        self._key = as_names(key, parse_ddl(spec.key, "key"), "key") if spec.key != NO_KEY else ()
        needed = (
            columns_needed(spec.window, spec.aggregates)
            if spec.value is None
            else [field.name for field in parse_ddl(spec.value, "value")]
            if spec.value
            else []
        )
        self._value = columns_of(value, needed)
        self._needed = needed
        super().__init__(client, spec, at=at, delay=delay, late=late, idle=idle, name=name, history=history)

    def explain(self) -> str:
        """Which store its windows are in, and why."""
        return explain(self._spec)

    def then(self, following: WindowSource) -> Chain:
        """What this fires goes into another window, in the same epoch: consecutive windows, as one operator.

        A fired row has one more column there, `window_time`, the last instant of its window, which is the time to go by:
        `at="window_time"`. The watermark of the other window follows this one's, without a delay.
        """
        return Chain([self, following])

    def check_followed(self) -> None:
        """What fires goes on as rows: one that fires again, or takes rows back, would count twice."""
        spec = self._spec
        if spec.emit == "close" and not spec.lateness:
            return
        how = f"lateness={spec.lateness}" if spec.emit == "close" else 'emit="update"'
        raise BadOption(
            f"window {spec.name!r} gives a result more than once ({how}): rows of another window behind it would count twice",
            hint="let the first window fire once, when it closes; the last of a chain may give updates",
            option="then",
        )

    def feed(self, table: pa.Table, query: str, turn: Turn, watermark: Progress) -> pa.Table:
        """Takes in rows of a turn of another operator, whose watermark is that; what they fire."""
        self._rests = False
        intake = self._intake(table.schema)
        part = Part(query, turn, 0)

        def stage(plan: EpochPlan) -> list[Receipt]:
            receipt = intake.stage(self._client, table, plan, part)
            # All windows up to the watermark have come, whatever the times of these.
            newest = int(min(max(watermark, TIME_MIN), TIME_MAX)) if watermark > -math.inf else None
            return [replace(receipt, time_max=newest)]

        kind = time_kind_in(table, self._at)
        commit_staged(
            self._client, intake, query, turn, stage, kind, self._planned(intake, kind), self._history
        )
        self._pace.committed()
        return self.fired_in(query, turn)

    def close(self, query: str, turn: Turn) -> pa.Table:
        """The same turn of an operator that is over: all that is open here fires, as far as other sources let it."""
        last = self.last_turn(query)
        if last is None or last < turn:
            self.rest()
            self._commit_without_rows(query, turn, ends=True, owes=False)
        return self.fired_in(query, turn)

    @property
    def _is_known(self) -> bool:
        return self._spec.value is not None

    def _intake(self, schema: pa.Schema | None) -> WindowIntake:
        if schema is None:
            return WindowIntake(self._spec, self.name, self._key, self._at, self._value, 0, "drop")
        if self._spec.value is None:
            self._learn(schema)
        late = "drop" if callable(self._late) else self._late
        return WindowIntake(self._spec, self.name, self._key, self._at, self._value, self._delay, late)

    def _learn(self, schema: pa.Schema) -> None:
        """The first rows tell the types."""
        known = self._client.specs(WindowSpec)[self._spec.name]
        if known.value is None:
            check_teachable(schema, self._key, parse_ddl(self._spec.key, "key"), self._at)
            types = inferred(schema, dict(zip(self._needed, self._value, strict=True)))
            spec = replace(self._spec, value=format_ddl(types) if len(types) else "")
            warn_if_interpreted(spec)
            self._client.call(OpenResident(spec))
            known = self._client.specs(WindowSpec)[self._spec.name]
        self._spec = known

    def _results(self, time_kind: str) -> pa.Schema:
        return WindowStore(shape_of(self._spec), _no_rows).schema(time_kind)

    def _staged(self) -> tuple[pa.Schema, int]:
        shape = shape_of(self._spec)
        return shape.staged, len(shape.longs)


class Fired(NamedTuple):
    """Where what an epoch fired is. Plain data that tasks can carry."""

    resident: str
    writer: str
    turn: Turn

    def read(self, client: Client, slices: list[int] | None = None) -> pa.Table:
        """All of it, or that of these slices."""
        return client.read(self._message, slices).combine_chunks()

    def _message(self, slices: list[SliceId]) -> ReadFired:
        return ReadFired(self.resident, self.writer, self.turn, slices)

    def frame(self, client: Client, spark: SparkSession, schema: pa.Schema) -> DataFrame:
        """All of it as a lazy DataFrame."""
        return frames.read_by_slices(client, spark, self, schema)


class LateTask:
    """For `mapInArrow`: of a partition's rows, those that are late."""

    def __init__(self, intake: FiringIntake, plan: EpochPlan) -> None:
        self._intake = intake
        self._plan = plan

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            flags = self._intake.late_flags(pa.Table.from_batches([batch]), self._plan)
            yield batch.filter(pa.array(flags))


def shape_of(spec: WindowSpec) -> WindowShape:
    assert spec.value is not None
    return WindowShape(
        spec.key,
        spec.value,
        spec.window,
        spec.aggregates,
        spec.pattern,
        lateness=spec.lateness,
        updates=spec.emit == "update",
    )


def _no_rows(schema: pa.Schema, pattern: str) -> Any:
    return None


def _check_late(late: str | LateRows) -> str | LateRows:
    if late in ("drop", "error") or callable(late):
        return late
    raise BadOption(
        f"late={late!r} is not a choice",
        hint='late="drop", late="error", or a function (rows, epoch)',
        option="late",
    )


def warn_if_interpreted(spec: WindowSpec) -> None:
    """Compiles a window's own functions to see whether that works; a warning names the reason where it does not."""
    if spec.value is None:
        return
    shape = shape_of(spec)
    for reason in interpreted_reasons(spec.window, shape.values):
        warnings.warn(
            f"a function of window {spec.name!r} runs interpreted, row by row, where rows are read: {reason}",
            RuleInterpreted,
            stacklevel=3,
        )
    if not spec.runs_code:
        return
    layout = shape.layout
    reasons = (
        WholeWindows(shape.values, shape.aggregates).interpreted if layout is None else layout.interpreted
    )
    for reason in reasons:
        warnings.warn(
            f"an aggregate of window {spec.name!r} runs interpreted, row by row: {reason}",
            RuleInterpreted,
            stacklevel=3,
        )


PATTERNS = {
    "rmw": "RMW (read, modify, write): a few numbers for each key and window, changed in place",
    "aar": "AAR (append, aligned read): rows by window, for all keys; a window is read and dropped as a whole",
    "aur": "AUR (append, unaligned read): rows by key and window, read ahead of when they are likely to end",
}


def _firing(spec: WindowSpec) -> str:
    unit = " us" if spec.span_kind == "timestamp" else ""
    when = "when it closes" if spec.emit == "close" else "with each epoch that changes it"
    often = f", at most every {spec.every / MICROS:g} s" if spec.every else ""
    stays = f", and again while it stays, for {spec.lateness}{unit}" if spec.lateness else ""
    return when + often + stays


def explain(spec: WindowSpec) -> str:
    aggregates = ", ".join(f"{name} = {aggregate}" for name, aggregate in spec.aggregates.items())
    lines = [
        f"window {spec.name}: {spec.window} by {'nothing' if spec.key == NO_KEY else spec.key}",
        f"  aggregates: {aggregates}",
    ]
    if spec.lateness or spec.emit == "update":
        lines.append(f"  fires: {_firing(spec)}")
    if spec.value is not None:
        shape = shape_of(spec)
        return "\n".join([*lines, *_explain_store(shape.chosen, shape.is_sifted)])
    numbers, others = choose_early(spec.window, spec.aggregates, spec.pattern)
    if numbers is not None and numbers == others:
        sifts = spec.window.is_aligned and can_sift(spec.aggregates)
        return "\n".join([*lines, *_explain_store(numbers, sifts)])
    either = [
        f"{'refused' if chosen is None else chosen.pattern.upper()} if {values}"
        for chosen, values in ((numbers, "all values are numbers"), (others, "none is"))
    ]
    return "\n".join([*lines, f"  store: {', '.join(either)}; the first rows tell their types"])


def _explain_store(chosen: Chosen, is_sifted: bool) -> list[str]:
    way_in = (
        "rows become cells in Spark's workers, before they are sent"
        if chosen.pattern == "rmw"
        else "rows with the largest or smallest values of their key are sent, as they are: no others can be in results"
        if is_sifted
        else "rows are sent as they are: all of them are needed"
    )
    return [
        f"  store: {PATTERNS[chosen.pattern]}",
        f"  because {chosen.why}",
        f"  on the way in: {way_in}",
    ]
