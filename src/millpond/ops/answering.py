"""A fetch on a stream: each epoch's rows are answered as soon as U has passed them; the others wait.

U is pinned for every epoch before anything runs, so that the answers are a pure function of the rows: running
an epoch again gives the same. Rows that wait are kept under the pond's root, and join the next epoch's.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from millpond.client.client import Client
from millpond.errors import BadOption
from millpond.ops import frames
from millpond.ops.asking import Asking
from millpond.ops.tasks import FetchTask, KeepTask
from millpond.times import Progress, delay_for, parse_duration
from millpond.wire.messages import (
    DRAINS_MAX,
    LOCAL_QUERY,
    Answered,
    AskPending,
    Pending,
    Pin,
    Pinned,
    Register,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

WAITING = "waiting"
KEPT = "_kept"
# Arrow's writer knows no intervals and nothing of variants; Spark's own, which takes longer, does.
NOT_IN_PARQUET = ("interval", "void", "variant")


class _Left(NamedTuple):
    """What an epoch leaves behind: how many rows wait, and the lowest time they ask for."""

    waiting: int
    lowest: int | None


class _Seen(NamedTuple):
    """The new rows of an epoch: the newest time they ask for, and how many came too late."""

    newest: int | None
    late: int


class Answering:
    """A callable `(frame, epoch)` for `foreachBatch`. Its fetcher exists from the moment it is built."""

    def __init__(
        self,
        client: Client,
        asking: Asking,
        name: str,
        delay: str | int | timedelta | None,
        committed: bool,
        to: Callable[[DataFrame, int], Any],
    ) -> None:
        if delay is not None:
            parse_duration(delay)
        self._client = client
        self._asking = asking
        self._delay = delay
        self._committed = committed
        self._to = to
        self.name = name
        self.state = asking.state
        client.call(Register(asking.state, name, "fetcher"))

    def __call__(self, frame: DataFrame, epoch: int) -> None:
        """Hands the rows that are ready, with their answers, to the function; keeps the others for the next epoch."""
        asking = self._asking
        frames.check_columns(frame, asking.columns)
        asking.check_into(frame.columns)
        query = frames.query_of(frame) or LOCAL_QUERY
        number, drain = turn_of(epoch)
        pinned: Pinned = self._client.call(Pin(asking.state, self.name, query, number, drain))
        left, seen = self._keep_waiting(frame, pinned, query, self._waiting(query, number, drain))
        rows = self._with_waiting(frame, pinned, query)
        ready = rows.filter(self._ready(rows, pinned))
        self._to(answers_of(self._client, asking, ready), epoch)
        self._client.call(
            Answered(
                state=asking.state,
                fetcher=self.name,
                query=query,
                epoch=number,
                drain=drain,
                waiting=left.waiting,
                late=seen.late,
                lowest=left.lowest,
                watermark=self._watermark(frame, seen),
            )
        )
        self._remove_waiting(query, pinned.oldest)

    def pending(self) -> Pending:
        """How many rows wait, since which time, and how many came too late, as of the last epoch."""
        answer: Pending = self._client.call(AskPending(self._asking.state, self.name))
        return answer

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
        for name, (turn, left) in drains.items():
            if query in (None, name):
                spark = frames.active_session()
                with frames.as_query(spark, name):
                    schema = self._kept(spark, name, left).schema
                    self(spark.createDataFrame([], schema), number_of(*turn))
        return self.pending()

    def _ready(self, rows: DataFrame, pinned: Pinned) -> Column:
        """A committed read waits for the end of its range, an uncommitted one only for the beginning."""
        if self._committed:
            return frames.below(frames.micros(rows.schema, self._asking.high), pinned.update)
        if self._asking.low is not None:
            return frames.below(frames.micros(rows.schema, self._asking.low), pinned.update)
        return frames.always(pinned.update > -math.inf)

    def _late(self, rows: DataFrame, pinned: Pinned) -> Column:
        """Rows that ask for a time below what this fetcher said it would still ask for."""
        return frames.late(self._lowest(rows), pinned.late_below)

    def _lowest(self, rows: DataFrame) -> Column:
        """The lowest time that a row asks for."""
        if self._asking.low is None:
            return frames.micros(rows.schema, self._asking.high)
        return frames.micros(rows.schema, self._asking.low) + 1

    def _with_waiting(self, frame: DataFrame, pinned: Pinned, query: str) -> DataFrame:
        """The new rows that are not late, and those that waited. Only new ones can be late: the others hold F back."""
        rows = frame.filter(~self._late(frame, pinned))
        if pinned.previous is None:
            return rows
        return rows.unionByName(self._kept(frame.sparkSession, query, pinned.previous, frame.schema))

    def _keep_waiting(self, frame: DataFrame, pinned: Pinned, query: str, path: str) -> tuple[_Left, _Seen]:
        """Writes the rows that are not ready, in a job of the driver's own: the sink may run its part any number of times.

        The same job sees what a fetcher with a delay must know of its new rows.
        """
        from pyspark.sql import Observation
        from pyspark.sql import functions as f

        late = f.coalesce(f.sum(self._late(frame, pinned).cast("long")), f.lit(0))
        facts = [f.max(self._lowest(frame)).alias("newest"), late.alias("late")]
        # A fetcher without a delay has late rows, too, where its progress was reported.
        told = self._delay is not None or pinned.late_below > -math.inf
        whenever = not self._committed and self._asking.low is None and pinned.update > -math.inf
        if whenever or pinned.update == math.inf:
            # Nothing waits.
            found = frame.agg(*facts).first() if told else None
            return _Left(0, None), _Seen(None, 0) if found is None else _Seen(*found)
        seen, kept = Observation(), Observation()
        if told:
            frame = frame.observe(seen, *facts)
        rows = self._with_waiting(frame, pinned, query)
        lowest = f.min(self._lowest(rows)).alias("lowest")
        waiting = rows.filter(~self._ready(rows, pinned)).observe(
            kept, f.count(f.lit(1)).alias("rows"), lowest
        )
        write_kept(waiting, path)
        new = _Seen(seen.get["newest"], seen.get["late"]) if told else _Seen(None, 0)
        return _Left(kept.get["rows"], kept.get["lowest"]), new

    def _watermark(self, frame: DataFrame, seen: _Seen) -> Progress | None:
        if self._delay is None or seen.newest is None:
            return None
        return seen.newest - delay_for(frames.kind_of(frame.schema, self._asking.high), self._delay)

    def _folder(self, query: str) -> str:
        return os.path.join(self._client.placement().root, WAITING, self._asking.state, self.name, query)

    def _waiting(self, query: str, epoch: int, drain: int) -> str:
        return os.path.join(self._folder(query), f"{epoch:012d}.{drain:04d}")

    def _kept(
        self, spark: SparkSession, query: str, turn: tuple[int, int], schema: StructType | None = None
    ) -> DataFrame:
        """The rows that a turn left waiting."""
        folder = self._waiting(query, *turn)
        with open(os.path.join(folder, KEPT)) as file:
            paths = [os.path.join(folder, name) for name in file.read().split()]
        reader = spark.read if schema is None else spark.read.schema(schema)
        return reader.parquet(*paths)

    def _remove_waiting(self, query: str, oldest: tuple[int, int]) -> None:
        """Removes what no turn can ask for any more, not even one that runs again."""
        with suppress(FileNotFoundError):
            for name in os.listdir(self._folder(query)):
                path = os.path.join(self._folder(query), name)
                if path < self._waiting(query, *oldest):
                    shutil.rmtree(path, ignore_errors=True)


def write_kept(waiting: DataFrame, folder: str) -> None:
    """Writes rows to files in a folder, and their names to one more: it counts those of tasks that count."""
    shutil.rmtree(folder, ignore_errors=True)
    if any(kind in waiting.schema.simpleString() for kind in NOT_IN_PARQUET):
        waiting.write.parquet(folder)
        names = [name for name in os.listdir(folder) if name.startswith("part-")]
    else:
        names = [row[0] for row in waiting.mapInArrow(KeepTask(folder), KeepTask.schema).collect()]
        os.makedirs(folder, exist_ok=True)
    partial = os.path.join(folder, KEPT + ".tmp")
    with open(partial, "w") as file:
        file.write("\n".join(names))
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, os.path.join(folder, KEPT))


def number_of(epoch: int, drain: int) -> int:
    """What an epoch, or a drain after one, is called: Spark's own number, or one below zero."""
    return epoch if drain == 0 else -(epoch * DRAINS_MAX + drain)


def turn_of(number: int) -> tuple[int, int]:
    """The epoch and the drain of a number."""
    return (number, 0) if number >= 0 else divmod(-number, DRAINS_MAX)


def answers_of(client: Client, asking: Asking, ready: DataFrame) -> DataFrame:
    """The rows with their answers, as a lazy DataFrame; every row must be ready."""
    from pyspark.sql.types import StructType

    fields = [pa.field(name, field.type) for name, field in zip(asking.into, asking.answers, strict=True)]
    schema = StructType([*ready.schema.fields, *frames.spark_schema(pa.schema(fields)).fields])
    return ready.mapInArrow(FetchTask(frames.link_of(client), asking), schema)
