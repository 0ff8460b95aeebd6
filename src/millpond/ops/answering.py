"""A fetch on a stream: each epoch's rows are answered as soon as U has passed them; the others wait.

U is pinned for every epoch before anything runs, so that the answers are a pure function of the rows: running
an epoch again gives the same. Rows that wait are kept under the pond's root, and join the next epoch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from millpond import private
from millpond.client.client import Client
from millpond.client.runs import Run
from millpond.errors import BadOption, BadRoot, NotPrivate
from millpond.ops import frames
from millpond.ops.asking import Asking
from millpond.ops.columns import as_table
from millpond.ops.committing import check_history, turn_of
from millpond.ops.tasks import FetchTask
from millpond.ops.waiting import Left, keep, kept
from millpond.stores import readiness
from millpond.stores.waiting import WaitingRows
from millpond.times import TIME_MIN, TimeKind, delay_for, parse_duration
from millpond.wire.base import LOCAL_QUERY, Turn
from millpond.wire.house import Register
from millpond.wire.questions import Answered, AskPending, Pending, Pin, Pinned

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


class _Seen(NamedTuple):
    """The new rows of a turn: the newest time they begin to ask for, and how many came too late."""

    newest: int | None = None
    late: int = 0


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
        self._place = (_root_of(client), asking.state, name)

    def __call__(self, rows: DataFrame | pa.Table, epoch: int) -> None:
        """Hands the rows that are ready, with their answers, to the function; keeps the others for the next epoch."""
        if frames.is_frame(rows):
            self._answer_frame(rows, epoch)
        else:
            self._answer_table(as_table(rows), epoch)

    def _answer_frame(self, frame: DataFrame, epoch: int) -> None:
        asking, turn = self._asking, turn_of(epoch)
        frames.check_questions(frame, asking)
        delay = self._delay_for(frames.time_kind_of(frame.schema, asking.high))
        run = Run(frames.run_of(frame), epoch, self._operator)
        self._check_alone(run)
        query = frames.query_of(frame) or LOCAL_QUERY
        pinned = self._client.call(Pin(asking.state, self.name, query, turn, self._history))
        frames.check_kinds(frame.schema, asking, pinned.time_kind)
        rows = self._rows(query)
        with frames.errors_of_tasks():
            left, seen = self._keep_waiting(frame, pinned, rows, turn)
            asked = self._with_waiting(frame, pinned, rows)
            self._to(answers_of(self._client, asking, asked.filter(self._ready(asked, pinned))), epoch)
        self._end(query, turn, left, seen, delay)
        self._client.runs.note(self.state, self.name, run)
        rows.remove_before(pinned.oldest)

    def _answer_table(self, table: pa.Table, epoch: int, query: str = LOCAL_QUERY) -> None:
        asking, turn = self._asking, turn_of(epoch)
        asking.check_into(table.column_names)
        new = asking.questions(table, "")
        delay = self._delay_for(new.kind)
        pinned = self._client.call(Pin(asking.state, self.name, query, turn, self._history))
        asking.questions(table.slice(0, 0), pinned.time_kind)
        rows = WaitingRows(*self._place, query, self._client.files, self._client.runtime.bits)
        late = readiness.positions(readiness.late(new.lows, new.highs, pinned.late_below), len(table))
        newest = new.highs if new.lows is None else new.lows
        seen = _Seen(int(newest.max()) if len(table) else None, len(late))
        timely = table.take(np.delete(np.arange(len(table)), late)) if len(late) else table
        if pinned.previous is not None:
            listed = rows.listed(pinned.previous, pinned.token)
            timely = pa.concat_tables([timely, *(rows.read(listed, file) for file in listed.files)])
        asked = asking.questions(timely, "")
        is_ready = readiness.ready(asked.lows, asked.highs, pinned.update, self._committed)
        ready = readiness.positions(is_ready, len(timely))
        waiting = timely.take(np.delete(np.arange(len(timely)), ready))
        left = Left()
        if len(waiting):
            token = rows.begin(turn)
            rows.list_files(turn, token, "", [rows.write(turn, token, waiting.to_batches())])
            first = asking.questions(waiting, "")
            left = Left(len(waiting), asking.first_time(first.lowest), token, first.digest)
        self._to(asking.answer(self._client, timely.take(ready)), epoch)
        self._end(query, turn, left, seen, delay)
        rows.remove_before(pinned.oldest)

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
        for name, drain in drains.items():
            turn, left, token = drain.turn, drain.left, drain.token
            if query in (None, name):
                self._drain(name, turn, left, token)
        return self.pending()

    def _drain(self, query: str, turn: Turn, left: Turn, token: str) -> None:
        rows = self._rows(query)
        listed = rows.listed(left, token)
        if not listed.schema:  # they came in Arrow tables
            self._answer_table(rows.read(listed, listed.files[0]).slice(0, 0), turn.number, query)
            return
        spark = frames.active_session()
        with frames.as_query(spark, query):
            self._answer_frame(spark.createDataFrame([], kept(spark, rows, left, token).schema), turn.number)

    def _check_alone(self, run: Run) -> None:
        if self._client.runs.is_taken(self.state, self.name, run):
            raise BadOption(
                f"another fetch of the name {self.name!r} has answered rows in epoch {run.epoch} of this query",
                hint="give each fetch of a query a name of its own",
                option="name",
            )

    def _times(self, rows: DataFrame) -> tuple[Column | None, Column]:
        """Low, if there is one, and high of every question."""
        low = None if self._asking.low is None else frames.micros(rows.schema, self._asking.low)
        return low, frames.micros(rows.schema, self._asking.high)

    def _ready(self, rows: DataFrame, pinned: Pinned) -> Column:
        """A row without a time is: whoever answers it reports it."""
        return frames.truth(self._is_ready(rows, pinned), null=True)

    def _is_ready(self, rows: DataFrame, pinned: Pinned) -> Column | bool:
        said: Column | bool = readiness.ready(*self._times(rows), pinned.update, self._committed)
        return said

    def _late(self, rows: DataFrame, pinned: Pinned) -> Column:
        """Rows that ask for a time below what this fetcher said it would still ask for."""
        return frames.truth(readiness.late(*self._times(rows), pinned.late_below), null=False)

    def _with_waiting(self, frame: DataFrame, pinned: Pinned, rows: WaitingRows) -> DataFrame:
        """The new rows that are not late, and those that waited. Only new ones can be late: the others hold F back."""
        timely = frame.filter(~self._late(frame, pinned))
        if pinned.previous is None:
            return timely
        return timely.union(kept(frame.sparkSession, rows, pinned.previous, pinned.token, frame.schema))

    def _keep_waiting(
        self, frame: DataFrame, pinned: Pinned, rows: WaitingRows, turn: Turn
    ) -> tuple[Left, _Seen]:
        """Writes the rows that are not ready, in a job of the driver's own: the sink may run its part any number of times.

        The same job sees what a fetcher with a delay must know of its new rows.
        """
        from pyspark.sql import Observation
        from pyspark.sql import functions as f

        newest = f.max(frames.micros(frame.schema, self._asking.first)).alias("newest")
        late = f.coalesce(f.sum(self._late(frame, pinned).cast("long")), f.lit(0)).alias("late")
        # A fetcher without a delay has late rows, too, where its progress was reported.
        looks = self._delay is not None or pinned.late_below > -math.inf
        if self._is_ready(frame, pinned) is True:
            row = frame.agg(newest, late).first() if looks else None
            return Left(), _Seen() if row is None else _Seen(*row)
        seen = Observation()
        if looks:
            frame = frame.observe(seen, newest, late)
        asked = self._with_waiting(frame, pinned, rows)
        left = keep(asked.filter(~self._ready(asked, pinned)), rows, turn, self._asking)
        return left, _Seen(seen.get["newest"], seen.get["late"]) if looks else _Seen()

    def _delay_for(self, kind: TimeKind) -> int | None:
        return None if self._delay is None else delay_for(kind, self._delay)

    def _rows(self, query: str) -> WaitingRows:
        return WaitingRows(*self._place, query, self._client.files)


def _root_of(client: Client) -> str:
    """Where rows that wait are kept. The pond tells; it must be a root that only this user can write."""
    root = client.placement().root
    if client.files is not None:
        return root  # not on this machine's disk
    try:
        if private.real_path(root) == root:
            private.check_directory(root)
            return root
        why = "it is not a path without links"
    except OSError as error:
        why = error.message if isinstance(error, NotPrivate) else error.strerror or str(error)
    raise BadRoot(
        f"rows that wait cannot be kept under the pond's root {root}: {why}",
        hint="run the fetch as the user who opened the pond, on the same machine",
        root=root,
    )


def answers_of(client: Client, asking: Asking, ready: DataFrame) -> DataFrame:
    """The rows with their answers, as a lazy DataFrame; every row must be ready."""
    from pyspark.sql.types import StructType

    fields = [pa.field(name, field.type) for name, field in zip(asking.into, asking.answers, strict=True)]
    schema = StructType([*ready.schema.fields, *frames.spark_schema(pa.schema(fields)).fields])
    return ready.mapInArrow(FetchTask(frames.link_of(client), asking), schema)
