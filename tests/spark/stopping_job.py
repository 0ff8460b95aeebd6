"""Queries that are stopped in the middle of a batch: `stopping_job.py ROOT`, in a process whose stderr a test reads.

Each is stopped while a task of its second batch runs, once or STOPS times, and then goes on to its end.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

import millpond as mp
from millpond.apps.spark_session import spark_session

FILES = 3
ROWS = 20
STOPS = 3


class Hold:
    """For `mapInArrow`: a task that says it runs, and goes on when it may. Until then it can only be killed."""

    def __init__(self, root: Path) -> None:
        self._runs, self._may_go_on = root / "runs", root / "may go on"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows and batch.column("ts")[0].as_py() >= ROWS:
                self._runs.touch()
                while not self._may_go_on.exists():
                    time.sleep(0.01)
            yield batch

    def held(self, frame: DataFrame) -> DataFrame:
        return frame.mapInArrow(self, frame.schema)


def stop_and_go_on(root: Path, start: Callable[[], Any], stops: int = 1) -> None:
    for _ in range(stops):
        query = start()
        while not (root / "runs").exists():
            assert query.isActive, query.exception()
            time.sleep(0.01)
        (root / "runs").unlink()
        query.stop()
        assert query.exception() is None, query.exception()
        sys.stdout.write("stopped\n")
    (root / "may go on").touch()
    query = start()
    query.processAllAvailable()
    query.stop()


def rows_of(spark: SparkSession, root: Path) -> DataFrame:
    reader = spark.readStream.schema("key long, ts long, amount long").option("maxFilesPerTrigger", 1)
    return reader.parquet(str(root.parent / "rows"))


def starting(root: Path, rows: DataFrame, operator: Any) -> Callable[[], Any]:
    writer = rows.writeStream.foreachBatch(operator).option("checkpointLocation", str(root / "checkpoint"))
    return writer.start


def write_down(root: Path, hold: Hold) -> Callable[[DataFrame, int], None]:
    def sink(frame: DataFrame, epoch: int) -> None:
        # Written here: Spark's own writers say a lot of a task that is killed.
        pq.write_table(hold.held(frame).toArrow(), root / f"{epoch}.parquet")

    return sink


def say(name: str, column: pa.ChunkedArray, root: Path | None = None) -> None:
    """What was added up in the pond, and how many rows the sink has."""
    sink = () if root is None else root.glob("*.parquet")
    rows = sum(pq.read_table(file).num_rows for file in sink)
    sys.stdout.write(f"{name}: {sum(column.to_pylist())}, {rows}\n")


def update(pond: mp.Pond, rows: DataFrame, root: Path) -> None:
    """Stopped while the rows of an update are staged."""
    state = pond.state("update", key="long", value="long", update=mp.add())
    feed = state.update(key="key", at="ts", value="amount", name="feed")
    stop_and_go_on(root, starting(root, Hold(root).held(rows), feed), STOPS)
    state.finish("feed")
    say("update", state.snapshot()["value"])


def flow(pond: mp.Pond, rows: DataFrame, root: Path) -> None:
    """Stopped in the sink of a flow that updates and asks."""
    state = pond.state("flow", key="long", value="long", update=mp.add())
    flow = pond.flow("flow")
    source = flow.source(rows)
    source.into(state.update(key="key", at="ts", value="amount", name="feed"))
    asked = source.ask(state.fetch(key="key", at="ts", into="total", name="totals"))
    asked.to(write_down(root, Hold(root)))
    stop_and_go_on(root, lambda: flow.start(str(root / "checkpoint")))
    state.finish("feed")
    flow.drain()
    say("flow", state.snapshot()["value"], root)


def transactions(pond: mp.Pond, rows: DataFrame, root: Path) -> None:
    """Stopped in the sink that gets the outcomes."""
    accounts = pond.table("accounts", key="key long", value="balance long", default={"balance": 0})

    @mp.transaction
    def deposit(accounts: Any, key: int, amount: int) -> None:
        accounts[key].balance += amount

    bank = pond.transactions("bank", tables=[accounts], kinds={"deposit": deposit})
    stop_and_go_on(root, starting(root, rows, bank.to(write_down(root, Hold(root)))))
    say("transactions", accounts.snapshot()["balance"], root)


def main(root: Path) -> None:
    (root / "rows").mkdir(parents=True)
    for number in range(FILES):
        times = range(ROWS * number, ROWS * (number + 1))
        rows = pa.table({"key": [time % 5 for time in times], "ts": list(times), "amount": [1] * ROWS})
        path = root / "rows" / f"{number}.parquet"
        pq.write_table(rows, path)
        # Spark takes files by their age; of one age, in any order.
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    with (
        spark_session("stopping-job", master="local[1]", compiled=False) as spark,
        mp.open(root / "pond", spark=spark) as pond,
    ):
        for job in (update, flow, transactions):
            place = root / job.__name__
            place.mkdir()
            job(pond, rows_of(spark, place), place)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
