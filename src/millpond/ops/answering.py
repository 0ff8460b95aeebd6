"""A fetch on a stream: each epoch's rows are answered as soon as U has passed them; the others wait.

U is pinned for every epoch before anything runs, so that the answers are a pure function of the rows: running
an epoch again gives the same. Rows that wait are kept under the pond's root, and join the next epoch's; whoever does
not see the root has the pond keep them there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from millpond.client.client import Client
from millpond.client.runs import Run
from millpond.client.waiting import WaitingPlace
from millpond.errors import BadOption
from millpond.ops import frames
from millpond.ops.asking import DIGESTS, Asking
from millpond.ops.columns import as_table
from millpond.ops.committing import check_history, turn_of
from millpond.ops.interruptions import ends_with_query
from millpond.ops.one_pass import OnePass, Sight, Waited
from millpond.ops.own_turns import OwnTurns
from millpond.ops.reports import Report
from millpond.ops.tasks import FetchTask
from millpond.ops.waiting import Left, schema_of
from millpond.ops.waits import total, without_arrival
from millpond.stores import readiness
from millpond.stores.waiting import WaitingRows
from millpond.times import TIME_MIN, TimeKind, delay_for, parse_duration
from millpond.wire.base import DRAINS_MAX, LOCAL_QUERY, Turn
from millpond.wire.house import Register
from millpond.wire.questions import Answered, AskPending, Drain, Pending, Pin, Pinned, Waits

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


class _Seen(NamedTuple):
    """The new rows of a turn: the newest time they begin to ask for, and how many came too late."""

    newest: int | None = None
    late: int = 0
    waits: Waits | None = None


class Answering:
    """A callable `(rows, epoch)` for `foreachBatch`, or for Arrow tables. Its fetcher exists from the moment it is built."""

    def __init__(
        self,
        client: Client,
        asking: Asking,
        name: str,
        delay: str | int | timedelta | None,
        committed: bool,
        to: Callable[[Any, int], Any],
        history: str,
        own_turns: bool = True,
    ) -> None:
        if delay is not None:
            parse_duration(delay)
        self._client = client
        self._asking = asking
        self._delay = delay
        self._committed = committed
        self._to = to
        self._history = check_history(history)
        self.name = name
        self.state = asking.state
        client.call(Register(asking.state, name, "fetcher"))
        self._operator = client.runs.new_operator()
        self._place = (client.placement().root, asking.state, name)
        self._own_turns = OwnTurns(self) if own_turns else None
        if self._own_turns is not None and self.pending().rows:
            spark = frames.default_session()
            if spark is not None:
                # Its query may be started, and find no new rows.
                self._own_turns.watch(spark)

    @property
    def place(self) -> tuple[str, str, str]:
        """The pond's root, the State and the name: where rows that wait are kept."""
        return self._place

    @property
    def is_shared(self) -> bool:
        return self._history == "shared"

    @ends_with_query
    def __call__(self, rows: DataFrame | pa.Table, epoch: int) -> None:
        """Hands the rows that are ready, with their answers, to the function; keeps the others for the next epoch.

        On a stream, rows that wait are also handed on as soon as U has passed them, under a number below zero.
        """
        if frames.is_frame(rows) and self._own_turns is not None:
            run = frames.run_of(rows)
            query = None if run is None else frames.query_of(rows)
            with self._own_turns.batch(rows.sparkSession, query, run):
                if query is not None:
                    self._finish_turn(query, rows.sparkSession)
                self._answer_frame(rows, epoch)
        elif frames.is_frame(rows):
            self._answer_frame(rows, epoch)
        else:
            self._answer_table(as_table(rows), epoch)

    def _answer_frame(self, frame: DataFrame, epoch: int) -> None:
        asking, turn = self._asking, turn_of(epoch)
        frames.check_questions(frame, asking)
        run = Run(frames.run_of(frame), epoch, self._operator)
        self._check_alone(run)
        self._take_turn(frame, frame, frames.query_of(frame) or LOCAL_QUERY, turn)
        self._client.runs.note(self.state, self.name, run)

    def _take_turn(self, frame: DataFrame | None, like: DataFrame, query: str, turn: Turn) -> None:
        """Answers the new rows of a frame, if there is one, and those that waited; `like` has the columns of both."""
        asking = self._asking
        delay = self._delay_for(frames.time_kind_of(like.schema, asking.high))
        pinned = self._client.call(Pin(asking.state, self.name, query, turn, self._history))
        frames.check_kinds(like.schema, asking, pinned.time_kind)
        place = self._waiting_place(query, pinned.landmark)
        rows = place.rows(self._client)
        began_s = self._client.runtime.now()
        with frames.errors_of_tasks():
            left, seen = self._answer(frame, like, pinned, place, rows, turn)
        took_ms = 1_000 * (self._client.runtime.now() - began_s)
        waits = None if seen.waits is None else total([seen.waits], took_ms)
        self._end(query, turn, left, seen._replace(waits=waits), delay)
        rows.remove_before(pinned.oldest, turn)

    def _answer(
        self,
        frame: DataFrame | None,
        like: DataFrame,
        pinned: Pinned,
        place: WaitingPlace,
        rows: WaitingRows,
        turn: Turn,
    ) -> tuple[Left, _Seen]:
        """Has the function take the answers. The tasks that give them also write down what waits, and report it."""
        sight = Sight(pinned.update, pinned.late_below, self._committed, pinned.passed)
        link, schema = frames.link_of(self._client), answers_schema(self._asking, like)
        waited = None
        if pinned.previous is not None:
            waited = Waited.of(rows.listed(pinned.previous, pinned.token), like)
        asking = self._asking.seeing(pinned)
        one_pass = OnePass(link, asking, sight, place, turn, frame, waited, like.sparkSession, schema)
        token, reports = one_pass.through(lambda answers: self._to(answers, turn.number))
        if pinned.update == math.inf and self._delay is None and pinned.late_below == -math.inf:
            return Left(), _Seen(
                waits=total(report.waits for report in reports or ())
            )  # nothing need be seen
        if reports is None:
            token, reports = one_pass.by_itself()
        left = self._listed(reports, rows, turn, token, like.schema.json())
        newest = max((report.newest for report in reports if report.newest is not None), default=None)
        waits = total(report.waits for report in reports)
        return left, _Seen(newest, sum(report.late for report in reports), waits)

    def _listed(self, reports: list[Report], rows: WaitingRows, turn: Turn, token: str, schema: str) -> Left:
        """Writes down which files count."""
        files = [file for report in reports for file in report.files]
        if not files:
            return Left()
        rows.list_files(turn, token, schema, files)
        lowest = min(report.lowest for report in reports if report.lowest is not None)
        digest = sum(report.digest for report in reports) % DIGESTS
        return Left(sum(file.rows for file in files), lowest, token, digest)

    def _answer_table(self, table: pa.Table, epoch: int, query: str = LOCAL_QUERY) -> None:
        asking, turn = self._asking, turn_of(epoch)
        asking.check_into(table.column_names)
        new = asking.questions(table, "")
        delay = self._delay_for(new.kind)
        pinned = self._client.call(Pin(asking.state, self.name, query, turn, self._history))
        asking.questions(table.slice(0, 0), pinned.time_kind)
        rows = self._waiting_place(query, pinned.landmark).rows(self._client)
        late = readiness.positions(readiness.late(new.lows, new.highs, pinned.late_below), len(table))
        newest = new.highs if new.lows is None else new.lows
        seen = _Seen(int(newest.max()) if len(table) else None, len(late))
        timely = table.take(np.delete(np.arange(len(table)), late)) if len(late) else table
        if pinned.previous is not None:
            listed = rows.listed(pinned.previous, pinned.token)
            waited = (without_arrival(rows.read(listed, file))[0] for file in listed.files)
            timely = pa.concat_tables([timely, *(_like(table, timely.schema) for table in waited)])
        asked = asking.questions(timely, "")
        is_ready = readiness.ready(asked.lows, asked.highs, pinned.update, self._committed)
        ready = readiness.positions(is_ready, len(timely))
        waiting = timely.take(np.delete(np.arange(len(timely)), ready))
        left = Left()
        if len(waiting):
            token = rows.token()
            rows.list_files(turn, token, "", rows.keep(turn, token, waiting.to_batches()))
            first = asking.questions(waiting, "")
            left = Left(len(waiting), asking.first_time(first.lowest), token, first.digest)
        self._to(asking.seeing(pinned).answer(self._client, timely.take(ready)), epoch)
        self._end(query, turn, left, seen, delay)
        rows.remove_before(pinned.oldest, turn)

    def _end(self, query: str, turn: Turn, left: Left, seen: _Seen, delay: int | None) -> None:
        """The sink has returned: the turn is answered, but for what waits."""
        watermark = None
        if delay is not None and seen.newest is not None:
            watermark = max(self._asking.first_time(seen.newest) - delay, TIME_MIN)
        self._client.call(
            Answered(
                resident=self._asking.state,
                fetcher=self.name,
                query=query,
                turn=turn,
                waiting=left.waiting,
                late=seen.late,
                lowest=left.lowest,
                watermark=watermark,
                token=left.token,
                digest=left.digest,
                waits=seen.waits,
            )
        )

    def pending(self) -> Pending:
        """How many rows wait, since which time, and how many came too late, as of the last epoch."""
        return self._client.call(AskPending(self._asking.state, self.name))

    def drain(self, query: str | None = None) -> Pending:
        """Answers rows that wait, as far as U allows, without a new batch: for a query that has ended.

        The function gets them under a number of their own, below zero. Exactly once, as any epoch. Returns what
        waits still. `query` is the id of the one to drain, where several queries have used the fetcher's name.
        """
        drains = self.pending().drains
        if query is None and len(drains) > 1:
            raise BadOption(
                f"rows of {len(drains)} queries wait at fetcher {self.name!r}",
                hint=f"drain one after the other: query= one of {', '.join(sorted(drains))}",
                option="query",
            )
        for name in drains:
            if query in (None, name):
                with nullcontext() if self._own_turns is None else self._own_turns.one_at_a_time(name):
                    # While the query is active, a turn of its own may have been first.
                    drain = self.pending().drains.get(name)
                    if drain is not None:
                        self._drain(name, drain)
        return self.pending()

    def waits(self) -> bool:
        return self.pending().rows > 0

    def due(self) -> dict[str, Drain]:
        """Queries of which waiting rows may be ready, and the turn in which they can be answered."""
        return {query: drain for query, drain in self.pending().drains.items() if self.pays(drain)}

    def pays(self, drain: Drain) -> bool:
        """Whether a drain may answer rows. An uncommitted answer does not wait for U to pass the row's own time."""
        return drain.pays or (not self._committed and drain.turn.drain < DRAINS_MAX - 1)

    def take(self, query: str, spark: SparkSession) -> None:
        """Answers rows of a query that wait, as far as U allows, if there are any."""
        drain = self.due().get(query)
        if drain is not None:
            self._drain(query, drain, spark)

    def _finish_turn(self, query: str, spark: SparkSession) -> None:
        """A turn of its own that was interrupted comes to its end before the next epoch: its sink may have seen the rows."""
        drain = self.pending().drains.get(query)
        if drain is not None and drain.begun:
            self._drain(query, drain, spark)

    def _drain(self, query: str, drain: Drain, spark: SparkSession | None = None) -> None:
        rows = self._waiting_place(query, self._client.placement().landmark).rows(self._client)
        listed = rows.listed(drain.left, drain.token)
        if not listed.schema:  # they came in Arrow tables
            self._answer_table(rows.read(listed, listed.files[0]).slice(0, 0), drain.turn.number, query)
            return
        spark = frames.active_session() if spark is None else spark
        with frames.as_query(spark, query):
            self._take_turn(None, spark.createDataFrame([], schema_of(listed)), query, drain.turn)

    def _check_alone(self, run: Run) -> None:
        if self._client.runs.is_taken(self.state, self.name, run):
            raise BadOption(
                f"another fetch of the name {self.name!r} has answered rows in epoch {run.epoch} of this query",
                hint="give each fetch of a query a name of its own",
                option="name",
            )

    def _delay_for(self, kind: TimeKind) -> int | None:
        return None if self._delay is None else delay_for(kind, self._delay)

    def _waiting_place(self, query: str, landmark: str) -> WaitingPlace:
        root, state, name = self._place
        return WaitingPlace(root, landmark, state, name, query)


def _like(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Rows that came in a DataFrame, as those that come in tables now."""
    if table.schema.equals(schema) or set(table.column_names) != set(schema.names):
        return table
    return table.select(schema.names).cast(schema)


def answers_of(client: Client, asking: Asking, ready: DataFrame) -> DataFrame:
    """The rows with their answers, as a lazy DataFrame; every row must be ready."""
    return ready.mapInArrow(FetchTask(frames.link_of(client), asking), answers_schema(asking, ready))


def answers_schema(asking: Asking, rows: DataFrame) -> StructType:
    """The columns of rows with their answers."""
    from pyspark.sql.types import StructType

    fields = [pa.field(name, field.type) for name, field in zip(asking.into, asking.answers, strict=True)]
    return StructType([*rows.schema.fields, *frames.spark_schema(pa.schema(fields)).fields])
