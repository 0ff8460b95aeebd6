"""A flow: several sources, updates and fetches as one Spark query with one checkpoint.

In each epoch all updates that no fetch comes before are committed first, so that the fetches of the epoch can see
them. Rows that a fetch cannot answer yet wait at that fetch; the others go on, through as many fetches as there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from msgspec.structs import replace

from millpond.client.client import Client
from millpond.errors import BadOption, EpochOutOfOrder, check_not_connect
from millpond.ops import frames
from millpond.ops.answering import Answering
from millpond.ops.columns import check_kind
from millpond.ops.fetch import Fetch
from millpond.ops.interruptions import ends_with_query
from millpond.ops.own_turns import OwnTurns
from millpond.ops.update import Update
from millpond.times import TIME_MIN, delay_for, parse_duration
from millpond.wire.base import LOCAL_QUERY
from millpond.wire.house import Register
from millpond.wire.questions import AskProgress, Drain, Pending, Report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

SOURCE = "_source"


class Named(Protocol):
    """A State, as far as a report needs to know it."""

    @property
    def name(self) -> str: ...


class _Reporting(NamedTuple):
    """Fetch progress that follows the rows of a stream, for fetchers of that State."""

    state: str
    names: tuple[str, ...]
    at: str
    delay: str | int | timedelta


class Stream:
    """Rows on their way through a flow. Made by `flow.source`, `map` and `ask`."""

    def __init__(self, flow: Flow, repeatable: bool = True) -> None:
        self._flow = flow
        self._repeatable = repeatable
        self.maps: list[tuple[Callable[[DataFrame], DataFrame], Stream]] = []
        self.updates: list[Update] = []
        self.asks: list[Answering] = []
        self.sinks: list[Callable[[DataFrame, int], Any]] = []
        self.reports: list[_Reporting] = []

    @property
    def only_sinks_once(self) -> bool:
        """Whether one function gets the rows, and nobody else does."""
        return len(self.sinks) == 1 and not (self.maps or self.updates or self.asks or self.reports)

    def map(self, function: Callable[[DataFrame], DataFrame]) -> Stream:
        """The stream that the function makes of this one, epoch by epoch."""
        child = Stream(self._flow, self._repeatable)
        self.maps.append((function, child))
        return child

    def into(self, update: Update) -> Self:
        """These rows update a State: `stream.into(state.update(...))`."""
        if not isinstance(update, Update):
            raise BadOption(
                f"{update!r} is no update", hint="for example stream.into(state.update(...))", option="update"
            )
        if not self._repeatable:
            raise BadOption(
                "an update cannot follow an uncommitted fetch: when the epoch runs again its rows may be others",
                hint="write the answers down in a sink, and update from what it wrote",
                option="update",
            )
        self._flow.take_name("updater", update.state, update.name)
        self.updates.append(update)
        return self

    def ask(self, fetch: Fetch) -> Stream:
        """The stream of these rows with their answers: `stream.ask(state.fetch(..., name=...))`."""
        if not isinstance(fetch, Fetch):
            raise BadOption(
                f"{fetch!r} is no fetch", hint="for example stream.ask(state.fetch(...))", option="fetch"
            )
        child = Stream(self._flow, self._repeatable and fetch.isolation == "committed")
        fetcher = fetch.answering(
            lambda frame, epoch: self._flow.answered(child, frame, epoch), own_turns=False
        )
        self._flow.take_name("fetcher", fetcher.state, fetcher.name)
        self.asks.append(fetcher)
        self._flow.fetchers.append(fetcher)
        return child

    def to(self, function: Callable[[DataFrame, int], Any]) -> Self:
        """`function(frame, epoch)` gets the rows of each epoch."""
        self.sinks.append(function)
        return self

    def report(
        self, state: Named, name: str | Sequence[str], *, at: str, delay: str | int | timedelta = 0
    ) -> Self:
        """From the next epoch on the fetchers so named ask for no time below the newest `at` of these rows, less `delay`.

        Fetch progress may have to come from further down the dataflow than the fetch. Rows that wait in this flow
        hold it back.
        """
        names = (name,) if isinstance(name, str) else tuple(name)
        parse_duration(delay)
        for fetcher in names:
            self._flow.client.call(Register(state.name, fetcher, "fetcher"))
        self.reports.append(_Reporting(state.name, names, at, delay))
        return self


class Flow:
    """Made by `pond.flow(name)`: give it sources, say what becomes of them, and start it."""

    def __init__(self, client: Client, name: str) -> None:
        self.client = client
        self.name = name
        self.fetchers: list[Answering] = []
        self._names: set[tuple[str, str, str]] = set()
        self._sources: list[tuple[DataFrame, Stream]] = []
        self._reported: list[tuple[_Reporting, DataFrame]] = []
        self._due: tuple[int, list[Report]] = (0, [])
        self._held: list[DataFrame] = []
        self._own_turns = OwnTurns(self)

    @property
    def place(self) -> tuple[str, ...]:
        """Those of its fetches."""
        return tuple(part for fetcher in self.fetchers for part in fetcher.place)

    @property
    def is_shared(self) -> bool:
        return any(fetcher.is_shared for fetcher in self.fetchers)

    def source(self, frame: DataFrame) -> Stream:
        """A stream of the rows of a DataFrame, a streaming one if the flow is to be started."""
        if not frames.is_frame(frame):
            check_not_connect(frame, "frame")
            raise BadOption(f"{frame!r} is no DataFrame", hint="give one of Spark's", option="frame")
        stream = Stream(self)
        self._sources.append((frame, stream))
        return stream

    def start(
        self,
        checkpoint: str,
        *,
        availableNow: bool = False,  # noqa: N803 - Spark's name
        processingTime: str | None = None,  # noqa: N803 - Spark's name
    ) -> StreamingQuery:
        """Starts the flow as one streaming query. The triggers are Spark's own."""
        trigger: dict[str, Any] = {"availableNow": True} if availableNow else {}
        if processingTime is not None:
            trigger["processingTime"] = processingTime
        if any(fetcher.pending().rows for fetcher in self.fetchers):
            self._own_turns.watch(self._spark())  # there may be no new rows
        writer = self._tagged().writeStream.queryName(self.name).foreachBatch(self._epoch)
        writer = writer.option("checkpointLocation", checkpoint)
        return (writer.trigger(**trigger) if trigger else writer).start()

    def run(self, epoch: int) -> None:
        """One epoch over sources that are static DataFrames."""
        self._run([(stream, frame) for frame, stream in self._sources], epoch)

    def drain(self) -> list[Pending]:
        """Answers rows that wait at the fetches, as far as U allows: for a flow that has ended. What waits still."""
        for query in self._drains(lambda *_: True):
            with self._own_turns.one_at_a_time(query):
                # While the query is active, a turn of its own may have been first.
                drain = self._drains(lambda *_: True).get(query)
                if drain is not None:
                    self._drain(query, drain, self._spark())
        return [fetcher.pending() for fetcher in self.fetchers]

    def waits(self) -> bool:
        return any(fetcher.waits() for fetcher in self.fetchers)

    def due(self) -> dict[str, Drain]:
        """Queries of which rows that wait at a fetch may be ready, and the turn in which they can be answered."""
        due = self._drains(Answering.pays)
        # An epoch that was interrupted comes again by itself.
        return {query: drain for query, drain in due.items() if drain.turn.drain}

    def take(self, query: str, spark: SparkSession) -> None:
        """Answers rows of a query that wait, as far as U allows, if there are any."""
        drain = self.due().get(query)
        if drain is not None:
            self._drain(query, drain, spark)

    def _drains(self, wanted: Callable[[Answering, Drain], bool]) -> dict[str, Drain]:
        """Of each query the first of the turns in which its fetches can answer."""
        first: dict[str, Drain] = {}
        every = [fetcher.pending() for fetcher in self.fetchers]
        for fetcher, pending in zip(self.fetchers, every, strict=True):
            for query, drain in pending.drains.items():
                if wanted(fetcher, drain) and (query not in first or drain.turn < first[query].turn):
                    first[query] = drain
        for query, drain in first.items():
            last = max(pending.turns[query] for pending in every if query in pending.turns)
            if last < drain.turn and any(pending.turns.get(query) != last for pending in every):
                # A turn was interrupted between two fetches: those that had it repeat it, the others catch up.
                first[query] = replace(drain, turn=last)
        return first

    def _drain(self, query: str, drain: Drain, spark: SparkSession) -> None:
        turn = drain.turn
        if turn.drain == 0 or any(query in fetcher.pending().unfinished for fetcher in self.fetchers):
            raise EpochOutOfOrder(
                f"flow {self.name!r} was stopped in the middle of epoch {turn.epoch}",
                hint="start it again first, so that the epoch comes to its end",
                epoch=turn.epoch,
                expected=turn.epoch,
            )
        with frames.as_query(spark, query):
            empty = [(stream, spark.createDataFrame([], frame.schema)) for frame, stream in self._sources]
            self._run(empty, turn.number)

    def take_name(self, role: str, state: str, name: str) -> None:
        """A name serves once: what bears it a second time in an epoch would be taken for a replay of the first."""
        if (role, state, name) in self._names:
            raise BadOption(
                f"flow {self.name!r} has a {role} {name!r} of state {state!r} already",
                hint=f"give each {role} a name of its own",
                option="name",
            )
        self._names.add((role, state, name))

    def answered(self, stream: Stream, frame: DataFrame, epoch: int) -> None:
        """Rows that came through a fetch go on. They are kept where more than a sink looks at them."""
        if not stream.only_sinks_once:
            frame = frame.persist()
            self._held.append(frame)
        self._pass(self._expanded([(stream, frame)]), epoch)

    def _spark(self) -> SparkSession:
        if not self._sources:
            raise BadOption("the flow has no source", hint="give it one: flow.source(frame)", option="flow")
        return self._sources[0][0].sparkSession

    def _tagged(self) -> DataFrame:
        """All sources as one: each row in the struct of its source."""
        from pyspark.sql import functions as f

        self._spark()
        if len(self._sources) == 1:
            return self._sources[0][0]
        whole: DataFrame | None = None
        for number, (frame, _) in enumerate(self._sources):
            row = f.struct(*(f.col(frames.quoted(name)) for name in frame.columns)).alias(f"_{number}")
            tagged = frame.select(f.lit(number).alias(SOURCE), row)
            whole = tagged if whole is None else whole.unionByName(tagged, allowMissingColumns=True)
        assert whole is not None
        return whole

    @ends_with_query
    def _epoch(self, batch: DataFrame, epoch: int) -> None:
        query = frames.query_of(batch) or LOCAL_QUERY
        with self._own_turns.batch(batch.sparkSession, query, frames.run_of(batch)):
            begun = self._drains(lambda _, drain: drain.begun).get(query)
            if begun is not None:
                # It was interrupted, and comes to its end first: sinks may have seen its rows.
                self._drain(query, begun, batch.sparkSession)
            self._run_batch(batch, epoch)

    def _run_batch(self, batch: DataFrame, epoch: int) -> None:
        if len(self._sources) == 1:
            self._run([(self._sources[0][1], batch)], epoch)
            return
        # Every source's part is a look at the whole batch.
        batch = batch.persist()
        try:
            parts = [
                (stream, batch.where(f"{SOURCE} = {number}").select(f"_{number}.*"))
                for number, (_, stream) in enumerate(self._sources)
            ]
            self._run(parts, epoch)
        finally:
            batch.unpersist()

    def _run(self, sources: list[tuple[Stream, DataFrame]], epoch: int) -> None:
        self._reported, self._held = [], []
        reported, due = self._due
        if epoch != reported:
            # Only now, for Spark might have run that epoch again.
            for report in due:
                self.client.call(report)
        try:
            self._pass(self._expanded(sources), epoch)
            self._due = (epoch, self._reports())
        finally:
            for kept in self._held:
                kept.unpersist()

    def _expanded(self, streams: Iterable[tuple[Stream, DataFrame]]) -> list[tuple[Stream, DataFrame]]:
        """The streams and all that `map` makes of them."""
        found = []
        for stream, frame in streams:
            found.append((stream, frame))
            found += self._expanded((child, function(frame)) for function, child in stream.maps)
        return found

    def _pass(self, streams: list[tuple[Stream, DataFrame]], epoch: int) -> None:
        """Updates first, then sinks, then fetches and what comes after them."""
        for stream, frame in streams:
            for reporting in stream.reports:
                frames.check_columns(frame, [reporting.at])
                delay_for(frames.time_kind_of(frame.schema, reporting.at), reporting.delay)
        for stream, frame in streams:
            for update in stream.updates:
                update(frame, epoch)
        for stream, frame in streams:
            for sink in stream.sinks:
                sink(frame, epoch)
        for stream, frame in streams:
            for ask in stream.asks:
                ask(frame, epoch)
            self._reported += [(reporting, frame) for reporting in stream.reports]

    def _reports(self) -> list[Report]:
        """What is to be said of an epoch, once it cannot run again."""
        if not self._reported:
            return []
        waiting = [fetcher.pending().since for fetcher in self.fetchers]
        waits_since = min((since for since in waiting if since is not None), default=math.inf)
        newest: dict[int, dict[str, int | None]] = {}  # of a frame's columns: looked for once, in one job
        reports = []
        for reporting, frame in self._reported:
            if id(frame) not in newest:
                newest[id(frame)] = _newest(frame, {other.at for other, of in self._reported if of is frame})
            time = newest[id(frame)][reporting.at]
            if time is not None:
                kind = frames.time_kind_of(frame.schema, reporting.at)
                known = self.client.call(AskProgress(reporting.state, waits=False)).time_kind
                check_kind(reporting.at, kind, known)
                progress = min(max(time - delay_for(kind, reporting.delay), TIME_MIN), waits_since)
                reports += [Report(reporting.state, name, None, progress) for name in reporting.names]
        return reports


def _newest(frame: DataFrame, columns: set[str]) -> dict[str, int | None]:
    from pyspark.sql import functions as f

    names, schema = sorted(columns), frame.schema
    found = frame.agg(*(f.max(frames.micros(schema, name)) for name in names)).first()
    assert found is not None  # a row, whatever there is
    return dict(zip(names, found, strict=True))
