"""Rows of DataFrames that wait: tasks write them to the pond's root, and tasks read them back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from millpond.errors import WrongType
from millpond.ops import frames
from millpond.ops.asking import DIGESTS, Asking
from millpond.stores.waiting import WaitingFile, WaitingList, WaitingRows
from millpond.wire.base import Turn

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

# A column that was kept as one of these can be read as a later one.
WIDER = (("tinyint", "smallint", "int", "bigint"), ("float", "double"))


class Left(NamedTuple):
    """What a turn leaves behind: how many rows wait, the lowest time they ask for, and a digest of what they ask."""

    waiting: int = 0
    lowest: int | None = None
    token: str = ""
    digest: int = 0


class KeepTask:
    """For `mapInArrow`: writes a partition's rows, if there are any, and says to which file.

    A task that runs twice writes two files: those whose names the driver collected count.
    """

    schema = "file string, rows long, lowest long, digest long"

    def __init__(self, rows: WaitingRows, turn: Turn, token: str, asking: Asking) -> None:
        self._rows = rows
        self._turn = turn
        self._token = token
        self._asking = asking

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        some = [batch for batch in batches if batch.num_rows]
        if some:
            asked = self._asking.questions(pa.Table.from_batches(some), "")
            file = self._rows.write(self._turn, self._token, some)
            told = {"file": file.name, "rows": file.rows, "lowest": asked.lowest, "digest": asked.digest}
            yield pa.RecordBatch.from_pylist([told])


class ReadTask:
    """For `mapInArrow` over the numbers of tasks: reads each one's share of the files of a list."""

    def __init__(self, rows: WaitingRows, listed: WaitingList, tasks: int) -> None:
        self._rows = rows
        self._listed = listed
        self._tasks = tasks

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for file in self._listed.files[number :: self._tasks]:
                    yield from self._rows.read(self._listed, file).to_batches()


def keep(waiting: DataFrame, rows: WaitingRows, turn: Turn, asking: Asking) -> Left:
    """Writes the rows down as what waits after a turn."""
    token = rows.begin(turn)
    task = KeepTask(rows, turn, token, asking)
    found = waiting.mapInArrow(task, KeepTask.schema).collect()
    if not found:
        return Left()
    rows.list_files(turn, token, waiting.schema.json(), (WaitingFile(row[0], row[1]) for row in found))
    lowest, digest = min(row[2] for row in found), sum(row[3] for row in found) % DIGESTS
    return Left(sum(row[1] for row in found), asking.first_time(lowest), token, digest)


def kept(
    spark: SparkSession, rows: WaitingRows, turn: Turn, token: str, schema: StructType | None = None
) -> DataFrame:
    """The rows that wait after a turn; with the columns of a schema, where the stream's have changed since."""
    from pyspark.sql.types import StructType

    listed = rows.listed(turn, token)
    tasks = min(len(listed.files), spark.sparkContext.defaultParallelism)
    frame = spark.range(0, tasks, 1, tasks).mapInArrow(
        ReadTask(rows, listed, tasks), StructType.fromJson(json.loads(listed.schema))
    )
    return frame if schema is None else _with_columns(frame, schema)


def _with_columns(frame: DataFrame, schema: StructType) -> DataFrame:
    """A column that is new is null; one that became wider is cast."""
    from pyspark.sql import functions as f

    if frame.schema.simpleString() == schema.simpleString():
        return frame
    columns = []
    for field in schema.fields:
        wanted = field.dataType.simpleString()
        if field.name not in frame.columns:
            columns.append(f.lit(None).cast(field.dataType).alias(field.name))
            continue
        actual = frame.schema[field.name].dataType.simpleString()
        column = f.col(frames.quoted(field.name))
        if actual == wanted:
            columns.append(column)
        elif any(actual in widths and wanted in widths[widths.index(actual) :] for widths in WIDER):
            columns.append(column.cast(field.dataType))
        else:
            raise WrongType(
                f"rows wait whose column {field.name!r} is {actual}; now it is {wanted}",
                hint="answer them first: give the column the type it had, or drain the fetch",
                column=field.name,
                expected=actual,
                actual=wanted,
            )
    return frame.select(*columns)
