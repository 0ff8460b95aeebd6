"""What an epoch gave back, wherever its resident lives: read from the owner of each of the resident's slices."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from millpond.client.client import Client
from millpond.client.link import Link
from millpond.ops import frames
from millpond.ops.tasks import client_of
from millpond.wire.base import SliceId, Turn
from millpond.wire.questions import ReadOutputs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Rows of outputs that are read at once, and are worth a Spark task of their own.
PIECE_ROWS = 1 << 15
EVERY_ROW = 1 << 62


class EpochOutputs(NamedTuple):
    """Where the outputs of an epoch are. Plain data that tasks can carry."""

    resident: str
    slices: tuple[SliceId, ...]
    writer: str
    turn: Turn

    def read(self, client: Client) -> pa.Table:
        """All of them, in the order of slices; of one slice in the order of the rows that they answer."""
        parts = client.runtime.map(lambda number: self._read(client, number, 0, EVERY_ROW), self.slices)
        return pa.concat_tables(parts)

    def share(self, client: Client, task: int, tasks: int) -> Iterator[pa.Table]:
        """What one of so many tasks is to read, piece by piece. Together they read every row once."""
        for number in self.slices:
            for place in count(task, tasks):
                start = place * PIECE_ROWS
                piece = self._read(client, number, start, start + PIECE_ROWS)
                yield piece
                if len(piece) < PIECE_ROWS:
                    break

    def frame(self, client: Client, spark: SparkSession, rows: int) -> DataFrame:
        """All of them as a lazy DataFrame. `rows` is about how many there are: for so many it has tasks."""
        tasks = min(max(1, rows // PIECE_ROWS), spark.sparkContext.defaultParallelism)
        schema = frames.spark_schema(self._read(client, self.slices[0], 0, 0).schema)
        task = OutputsTask(frames.link_of(client), self, tasks)
        return spark.range(0, tasks, 1, tasks).mapInArrow(task, schema)

    def _read(self, client: Client, number: SliceId, start: int, stop: int) -> pa.Table:
        message = ReadOutputs(self.resident, self.writer, self.turn, number, start, stop)
        return client.read_home(message, number)


class OutputsTask:
    """For `mapInArrow` over the numbers of tasks: gives each its share of the outputs."""

    def __init__(self, link: Link, outputs: EpochOutputs, tasks: int) -> None:
        self._link = link
        self._outputs = outputs
        self._tasks = tasks

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                # In pieces: Spark takes the one while the next comes.
                for piece in self._outputs.share(client_of(self._link), number, self._tasks):
                    yield from piece.to_batches()
