"""What runs inside Spark's Python workers: staging a partition's rows, answering a partition's rows.

A task is plain data; it finds its client in the worker process, which keeps it from one task to the next.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Protocol

import msgspec
import pyarrow as pa

from millpond.client.client import Client
from millpond.client.link import Link
from millpond.errors import MillpondError, error_named
from millpond.kernels.memory import keep_freed_memory
from millpond.ops.asking import Asking
from millpond.ops.intake import Part, Stager
from millpond.wire.base import Turn
from millpond.wire.epochs import EpochPlan, Receipt

# Rows that are asked at once. A slice is then visited with thousands of rows, which find its lines in the cache.
ASK_ROWS = 1 << 19

_clients: dict[Link, Client] = {}


def client_of(link: Link) -> Client:
    """This process's client of the pond."""
    if link not in _clients:
        keep_freed_memory()
        _clients[link] = link.connect()
        # Spark's workers collect garbage after every task. What was just imported stays, and need not be looked at.
        gc.collect()
        gc.freeze()
    return _clients[link]


class Readable(Protocol):
    """Plain data that says where rows are."""

    def read(self, client: Client, slices: list[int] | None = None) -> pa.Table: ...


class ReadTask:
    """For `mapInArrow` over the numbers of tasks: gives each its share of the slices."""

    def __init__(self, link: Link, rows: Readable, slices: int, tasks: int) -> None:
        self._link = link
        self._rows = rows
        self._slices = slices
        self._tasks = tasks

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                own = list(range(number, self._slices, self._tasks))
                yield from self._rows.read(client_of(self._link), own).to_batches()


class StageReply(msgspec.Struct, frozen=True):
    """What a staging task tells the driver: its receipt, or the error to raise there."""

    receipt: Receipt | None = None
    error: str = ""
    message: str = ""
    hint: str = ""
    attributes: dict[str, object] = {}

    def unwrap(self) -> Receipt:
        if self.receipt is None:
            raise error_named(self.error)(self.message, hint=self.hint, **self.attributes)
        return self.receipt


class StageTask:
    """For `mapInArrow`: stages a partition and gives one row, the encoded reply."""

    schema = "reply binary"

    def __init__(self, link: Link, intake: Stager, plan: EpochPlan, turn: Turn, query: str) -> None:
        self._link = link
        self._intake = intake
        self._plan = plan
        self._turn = turn
        self._query = query

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        table = list(batches)
        if not table:
            return
        try:
            reply = StageReply(self._stage(pa.Table.from_batches(table)))
        except MillpondError as error:
            reply = StageReply(
                None, type(error).__name__, error.message, error.hint, dict(error.attributes())
            )
        yield pa.record_batch({"reply": pa.array([msgspec.msgpack.encode(reply)], pa.binary())})

    def _stage(self, table: pa.Table) -> Receipt:
        from pyspark import TaskContext

        context = TaskContext.get()
        partition = 0 if context is None else context.partitionId()
        part = Part(self._query, self._turn, partition)
        return self._intake.stage(client_of(self._link), table, self._plan, part)


class FetchTask:
    """For `mapInArrow`: answers a partition's rows, in their order."""

    def __init__(self, link: Link, asking: Asking) -> None:
        self._link = link
        self._asking = asking

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        client = client_of(self._link)
        for table in gathered(batches, ASK_ROWS):
            yield from self._asking.answer(client, table).to_batches()


def gathered(batches: Iterator[pa.RecordBatch], rows_min: int) -> Iterator[pa.Table]:
    """The batches, several in one table, so that each has at least `rows_min` rows; the last may have fewer."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        if rows >= rows_min:
            yield pa.Table.from_batches(held)
            held, rows = [], 0
    if rows:
        yield pa.Table.from_batches(held)
