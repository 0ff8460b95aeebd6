"""A fetch on a stream: each epoch's rows are answered as soon as U has passed them; the others wait.

U is pinned for every epoch before anything runs, so that the answers are a pure function of the rows: running
an epoch again gives the same. Rows that wait are kept under the pond's root, and join the next epoch's.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from millpond.client.client import Client
from millpond.ops import frames
from millpond.ops.asking import Asking
from millpond.ops.tasks import FetchTask
from millpond.times import Progress, delay_for, parse_duration
from millpond.wire.messages import LOCAL_QUERY, Answered, AskPending, Pending, Pin, Pinned, Register

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

WAITING = "waiting"


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
        client.call(Register(asking.state, name, "fetcher"))

    def __call__(self, frame: DataFrame, epoch: int) -> None:
        """Hands the rows that are ready, with their answers, to the function; keeps the others for the next epoch."""
        asking = self._asking
        frames.check_columns(frame, asking.columns)
        asking.check_into(frame.columns)
        query = frames.query_of(frame) or LOCAL_QUERY
        pinned: Pinned = self._client.call(Pin(asking.state, self.name, query, epoch))
        # Only new rows can be late: those that wait hold the fetcher's progress back.
        rows = frame.filter(~self._late(frame, pinned))
        if pinned.previous is not None:
            kept = frame.sparkSession.read.schema(frame.schema)
            rows = rows.unionByName(kept.parquet(self._waiting(query, pinned.previous)))
        left = self._keep_waiting(rows, pinned, query, epoch)
        seen = self._seen(frame, pinned)
        ready = rows.filter(self._ready(rows, pinned))
        self._to(answers_of(self._client, asking, ready), epoch)
        self._client.call(
            Answered(
                state=asking.state,
                fetcher=self.name,
                query=query,
                epoch=epoch,
                waiting=left.waiting,
                late=seen.late,
                lowest=left.lowest,
                watermark=self._watermark(frame, seen),
            )
        )
        shutil.rmtree(self._waiting(query, epoch - 2), ignore_errors=True)

    def pending(self) -> Pending:
        """How many rows wait, since which time, and how many came too late, as of the last epoch."""
        answer: Pending = self._client.call(AskPending(self._asking.state, self.name))
        return answer

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

    def _keep_waiting(self, rows: DataFrame, pinned: Pinned, query: str, epoch: int) -> _Left:
        """Writes the rows that are not ready, in a job of the driver's own: the sink may run its part any number of times."""
        from pyspark.sql import Observation
        from pyspark.sql import functions as f

        if pinned.update == math.inf:
            return _Left(0, None)
        kept = Observation()
        waiting = rows.filter(~self._ready(rows, pinned)).observe(
            kept, f.count(f.lit(1)).alias("rows"), f.min(self._lowest(rows)).alias("lowest")
        )
        waiting.write.mode("overwrite").parquet(self._waiting(query, epoch))
        return _Left(kept.get["rows"], kept.get["lowest"])

    def _seen(self, frame: DataFrame, pinned: Pinned) -> _Seen:
        """What only a fetcher with a delay must know of its new rows."""
        from pyspark.sql import functions as f

        if self._delay is None:
            return _Seen(None, 0)
        late = f.sum(self._late(frame, pinned).cast("long"))
        newest, count = frame.agg(f.max(self._lowest(frame)), f.coalesce(late, f.lit(0))).first() or (None, 0)
        return _Seen(newest, count)

    def _watermark(self, frame: DataFrame, seen: _Seen) -> Progress | None:
        if self._delay is None or seen.newest is None:
            return None
        return seen.newest - delay_for(frames.kind_of(frame.schema, self._asking.high), self._delay)

    def _waiting(self, query: str, epoch: int) -> str:
        root = self._client.placement().root
        return os.path.join(root, WAITING, self._asking.state, self.name, query, f"{epoch:012d}")


def answers_of(client: Client, asking: Asking, ready: DataFrame) -> DataFrame:
    """The rows with their answers, as a lazy DataFrame; every row must be ready."""
    from pyspark.sql.types import StructType

    fields = [pa.field(name, field.type) for name, field in zip(asking.into, asking.answers, strict=True)]
    schema = StructType([*ready.schema.fields, *frames.spark_schema(pa.schema(fields)).fields])
    return ready.mapInArrow(FetchTask(frames.link_of(client), asking), schema)
