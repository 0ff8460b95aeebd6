"""How a turn on Spark is answered in one pass over its rows: the tasks that answer also keep the rows that are not ready."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.client.link import Link
from millpond.client.waiting import WaitingPlace
from millpond.ops import frames
from millpond.ops.asking import DIGESTS, Asking, Questions
from millpond.ops.reports import Report, Reporting, collecting, covering, of_every_task, tasks_of_stage
from millpond.ops.tasks import ASK_ROWS, client_of, gathered
from millpond.ops.waiting import Widening, widening
from millpond.ops.waits import total, waits_of, with_arrival, without_arrival
from millpond.stores import readiness
from millpond.stores.waiting import WaitingFile, WaitingList, WaitingRows, new_token
from millpond.times import Progress
from millpond.wire.base import Turn
from millpond.wire.questions import Passed, Waits

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_Rows = TypeVar("_Rows", pa.RecordBatch, pa.Table)

# Rows that waited, and are worth a task of their own.
SHARE_ROWS = 1 << 15


class Sight(NamedTuple):
    """What a turn sees: which rows are ready, and which are late."""

    update: Progress
    late_below: Progress
    committed: bool
    passed: Sequence[Passed] = ()

    def ready(self, asked: Questions) -> npt.NDArray[np.int64] | None:
        """Positions; None for all."""
        return _positions(
            readiness.ready(asked.lows, asked.highs, self.update, self.committed), len(asked.highs)
        )

    def timely(self, asked: Questions) -> npt.NDArray[np.int64] | None:
        """Positions of new rows that are not late; None for all."""
        late = readiness.late(asked.lows, asked.highs, self.late_below)
        return _positions(np.logical_not(late), len(asked.highs))


class Waited(NamedTuple):
    """What waited before the turn: the files, in so many shares, and how their columns become those of the turn."""

    listed: WaitingList
    shares: int
    widening: Widening

    @classmethod
    def of(cls, listed: WaitingList, like: DataFrame) -> Self:
        """For a turn whose rows have the columns of `like`."""
        tasks = like.sparkSession.sparkContext.defaultParallelism
        shares = min(1 + listed.rows // SHARE_ROWS, len(listed.files), tasks)
        return cls(listed, shares, widening(listed, like.schema))

    def read(self, rows: WaitingRows, share: int) -> Iterator[tuple[pa.Table, npt.NDArray[np.int64] | None]]:
        """The rows of a share, and when they arrived."""
        tables = [rows.read(self.listed, file) for file in self.listed.files[share :: self.shares]]
        one: pa.Schema | None = None
        for group in _by_schema(tables):
            table, arrived = without_arrival(pa.concat_tables(group))
            table = self.widening(table)
            if one is None:
                one = pa.schema([field.with_nullable(True) for field in table.schema])
            yield _as_schema(table, one), arrived


class AnswerTask:
    """For `mapInArrow`: gives a partition's ready rows with their answers, and writes down those that wait.

    A task that runs twice writes two files: those that the driver lists count. One that does not ask gives no rows.
    """

    def __init__(
        self,
        link: Link,
        asking: Asking,
        sight: Sight,
        place: WaitingPlace,
        turn: Turn,
        began: int,
        reporting: Reporting,
        *,
        asks: bool,
    ) -> None:
        self._link = link
        self._asking = asking
        self._sight = sight
        self._place = place
        self._turn = turn
        self._began = began
        self._reporting = reporting
        self._asks = asks

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        left = _Left(self._asking)
        for table in gathered(batches, ASK_ROWS):
            asked = self._asking.questions(table, "")
            left.see(asked)
            timely = self._sight.timely(asked)
            if timely is not None:
                left.late += len(asked.highs) - len(timely)
                yield from self._answered(_taken(table, timely), asked.take(timely), left, self._began)
            else:
                yield from self._answered(table, asked, left, self._began)
        self._report(left, left.content)

    def _answered(
        self, table: pa.Table, asked: Questions, left: _Left, arrived: int | npt.NDArray[np.int64]
    ) -> Iterator[pa.RecordBatch]:
        ready = self._sight.ready(asked)
        left.waits.append(self._waits(asked, arrived, ready))
        if ready is not None:
            waiting = np.delete(np.arange(len(asked.highs)), ready)
            since = arrived if isinstance(arrived, int) else arrived[waiting]
            left.add(with_arrival(_taken(table, waiting), since), asked.take(waiting))
            if self._asks:
                table, asked = _taken(table, ready), asked.take(ready)
        if self._asks and table.num_rows:
            client = client_of(self._link)
            yield from self._asking.with_answers(table, self._asking.ask(client, asked)).to_batches()

    def _waits(
        self, asked: Questions, arrived: int | npt.NDArray[np.int64], ready: npt.NDArray[np.int64] | None
    ) -> Waits:
        """How long the rows that are answered now have waited."""
        rows = len(asked.highs) if ready is None else len(ready)
        if isinstance(arrived, int) or not rows:
            return Waits(rows=rows)
        ends = asked.highs if self._sight.committed or asked.lows is None else asked.lows
        if ready is not None:
            ends, arrived = ends[ready], arrived[ready]
        return waits_of(ends, arrived, self._began, self._sight.passed)

    def _report(self, left: _Left, content: str | None, share: int | None = None) -> None:
        """Says what was done, once all of it is."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        token = self._reporting.token
        report = Report(
            token=token,
            stage=context.stageId(),
            task=context.partitionId(),
            content=content,
            files=self._kept(left, token),
            lowest=left.lowest,
            digest=left.digest,
            newest=left.newest,
            late=left.late,
            waits=total(left.waits),
            share=share,
        )
        self._reporting.send(report)

    def _kept(self, left: _Left, token: str) -> list[WaitingFile]:
        """Where this task runs, the root may be seen or not."""
        groups = left.by_schema()
        if not groups:
            return []
        rows = self._place.rows(client_of(self._link))
        return [file for batches in groups for file in rows.keep(self._turn, token, batches)]


class WaitedTask(AnswerTask):
    """For `mapInArrow` over the numbers of shares: the same of rows that waited. They are never late."""

    def __init__(self, *common: Any, asks: bool, waited: Waited) -> None:
        super().__init__(*common, asks=asks)
        self._waited = waited

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = self._place.rows(client_of(self._link))
        for batch in batches:
            for share in batch.column(0).to_pylist():
                left = _Left(self._asking)
                for table, arrived in self._waited.read(rows, share):
                    since = self._began if arrived is None else arrived
                    yield from self._answered(table, self._asking.questions(table, ""), left, since)
                self._report(left, f"share {share}", share)


class OnePass:
    """The rows of a turn: new ones, if there is a frame of them, and those that waited."""

    def __init__(
        self,
        link: Link,
        asking: Asking,
        sight: Sight,
        place: WaitingPlace,
        turn: Turn,
        frame: DataFrame | None,
        waited: Waited | None,
        spark: SparkSession,
        schema: StructType,
    ) -> None:
        self._common = link, asking, sight, place, turn, time.time_ns() // 1_000
        self._frame: DataFrame | None = None
        self._partitions = 0
        if frame is not None:
            self._frame, self._partitions = frames.fixed(frame)
        self._waited = waited
        self._parts = self._partitions + (0 if waited is None else waited.shares)
        self._spark = spark
        self._schema = schema

    def through(self, function: Callable[[DataFrame], Any]) -> tuple[str, list[Report] | None]:
        """The function gets the ready rows with their answers. The token of what was kept, and the reports of all
        partitions; None for these if the function did not read its frame to the end.
        """
        context, token = self._spark.sparkContext, new_token()
        with collecting(context, token) as (reporting, reports):
            function(self._answers(reporting))
            return token, covering(reports, self._parts, partial(tasks_of_stage, context))

    def by_itself(self) -> tuple[str, list[Report]]:
        """Keeps what waits, and asks nobody, in a job of its own."""
        token = new_token()
        with collecting(self._spark.sparkContext, token) as (reporting, reports):
            self._answers(reporting, asks=False).write.format("noop").mode("append").save()
            return token, of_every_task(reports, self._parts)

    def _answers(self, reporting: Reporting, asks: bool = True) -> DataFrame:
        parts: list[DataFrame] = []
        if self._frame is not None:
            parts.append(
                self._frame.mapInArrow(AnswerTask(*self._common, reporting, asks=asks), self._schema)
            )
        if self._waited is not None:
            numbers = self._spark.range(0, self._waited.shares, 1, self._waited.shares)
            task = WaitedTask(*self._common, reporting, asks=asks, waited=self._waited)
            parts.append(numbers.mapInArrow(task, self._schema))
        return parts[0] if len(parts) == 1 else parts[0].union(parts[1])


class _Left:
    """What a partition leaves waiting, and what was seen of its new rows."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._batches: list[pa.RecordBatch] = []
        self.waits: list[Waits] = []
        self.lowest: int | None = None
        self.digest = 0
        self.newest: int | None = None
        self.late = 0
        self._seen = 0
        self._seen_digest = 0

    @property
    def content(self) -> str | None:
        """Which rows were seen, in any order."""
        return f"{self._seen} rows {self._seen_digest:x}" if self._seen else None

    def see(self, asked: Questions) -> None:
        """New rows, which may be late."""
        firsts = asked.highs if asked.lows is None else asked.lows
        newest = int(firsts.max())
        self.newest = newest if self.newest is None else max(self.newest, newest)
        self._seen += len(firsts)
        self._seen_digest = (self._seen_digest + asked.digest) % DIGESTS

    def add(self, table: pa.Table, asked: Questions) -> None:
        if table.num_rows:
            self._batches += table.combine_chunks().to_batches()
            lowest = self._asking.first_time(asked.lowest)
            self.lowest = lowest if self.lowest is None else min(self.lowest, lowest)
            self.digest = (self.digest + asked.digest) % DIGESTS

    def by_schema(self) -> list[list[pa.RecordBatch]]:
        """A file has one schema: new rows and those that waited may name a zone of times differently."""
        return _by_schema(self._batches)


def _by_schema(rows: Sequence[_Rows]) -> list[list[_Rows]]:
    groups: list[list[_Rows]] = []
    for some in rows:
        for group in groups:
            if group[0].schema.equals(some.schema, check_metadata=True):
                group.append(some)
                break
        else:
            groups.append([some])
    return groups


def _as_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """What a task gives Spark has one schema, whatever the zones were in which the rows came.

    A column that has the type is not cast: Arrow refuses some nested ones, nulls over fields that hold none.
    """
    columns = [
        column if column.type.equals(field.type) else column.cast(field.type)
        for column, field in zip(table.columns, schema, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _positions(said: npt.NDArray[np.bool_] | bool, rows: int) -> npt.NDArray[np.int64] | None:
    if np.all(said):
        return None
    return readiness.positions(said, rows)


def _taken(table: pa.Table, rows: npt.NDArray[np.int64]) -> pa.Table:
    """Rows that lie side by side are not copied: streams often are in the order of their times."""
    count = len(rows)
    if count == 0:
        return table.slice(0, 0)
    if rows[-1] - rows[0] == count - 1:
        return table.slice(int(rows[0]), count)
    return table.take(pa.array(rows))
