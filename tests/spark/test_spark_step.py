"""Steps in Spark's workers: one job an epoch, exactly once, whatever tasks do."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark import TaskContext, cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import millpond as mp
from millpond.errors import BadOption, EpochChanged, WrongColumn

# Spark's workers cannot import a test.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

Ask = Callable[[pa.Table], pa.Table]


def count(table: pa.Table, ask: Ask) -> pa.Table:
    """Adds how often each key comes; a key that is there already counts double."""
    groups = table.group_by("k").aggregate([("k", "count")])
    known = ask(groups.select(["k"]))["held"].is_valid()
    return pa.table(
        {"k": groups["k"], "more": pc.multiply(groups["k_count"], pc.add(known.cast("int64"), 1))}
    )


def fails_once(table: pa.Table, ask: Ask) -> pa.Table:
    made = count(table, ask)
    context = TaskContext.get()
    assert context is not None
    if context.attemptNumber() == 0 and context.partitionId() == 1:
        raise RuntimeError("the first attempt of a task")
    return made


def state_of(pond: mp.Pond) -> mp.State:
    return pond.state("s", key="long", value="long", update=mp.add())


def step_of(pond: mp.Pond, function: Any = count, name: str = "a", **options: Any) -> Any:
    return state_of(pond).step(function, key="k", into="held", value="more", name=name, **options)


def final(pond: mp.Pond) -> dict[int, int]:
    table = state_of(pond).snapshot()
    return dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))


def keys(spark: SparkSession, *values: int, partitions: int = 2) -> DataFrame:
    return spark.createDataFrame([(value,) for value in values], "k long").repartition(partitions)


def test_tasks_fail_and_epochs_come_again_and_all_count_once(pond: mp.Pond, spark: SparkSession) -> None:
    step = step_of(pond, fails_once)
    assert step(keys(spark, 1, 1, 2, 3, 4, 5), 0).rows >= 5
    assert final(pond) == {1: 2, 2: 1, 3: 1, 4: 1, 5: 1}
    assert step(keys(spark, 5, 4, 3, 2, 1, 1, partitions=4), 0).replayed, "the same rows, cut otherwise"
    with pytest.raises(EpochChanged):
        step(keys(spark, 1, 2), 0)
    step(keys(spark, 1), 1)
    step(keys(spark, 9).where("k < 0"), 2)
    assert final(pond) == {1: 4, 2: 1, 3: 1, 4: 1, 5: 1}
    assert state_of(pond).progress().update == 3


def test_errors_of_functions_come_out_and_change_nothing(pond: mp.Pond, spark: SparkSession) -> None:
    def wrong(table: pa.Table, ask: Ask) -> pa.Table:
        return table

    def broken(table: pa.Table, ask: Ask) -> pa.Table:
        raise ZeroDivisionError("of the user's")

    with pytest.raises(WrongColumn, match="more"):
        step_of(pond, wrong)(keys(spark, 1), 0)
    with pytest.raises(PySparkException, match="of the user's"):
        step_of(pond, broken)(keys(spark, 1), 0)
    assert final(pond) == {}
    step_of(pond)(keys(spark, 1), 0)
    assert final(pond) == {1: 1}


def start(spark: SparkSession, folder: Path, name: str, batch: Callable[[DataFrame, int], Any]) -> Any:
    return (
        spark.readStream.schema("k long")
        .option("maxFilesPerTrigger", 1)
        .parquet(str(folder / name))
        .writeStream.foreachBatch(batch)
        .option("checkpointLocation", str(folder / f"checkpoint-{name}"))
        .trigger(availableNow=True)
        .start()
    )


def write(folder: Path, name: str, files: range) -> None:
    (folder / name).mkdir(exist_ok=True)
    for number in files:
        file = folder / name / f"{number}.parquet"
        pq.write_table(pa.table({"k": [1, 1, number]}), file)
        os.utime(file, (number + 1, number + 1))


def test_two_streams_keep_in_step_in_one_job_an_epoch_and_survive_a_stop(
    pond: mp.Pond, spark: SparkSession, tmp_path: Path
) -> None:
    """`a` runs alone until it waits for `b`, is stopped there, and goes on beside `b` from its checkpoint."""
    write(tmp_path, "a", range(10, 13))
    write(tmp_path, "b", range(10, 13))
    a, b = step_of(pond), step_of(pond, name="b")
    query = start(spark, tmp_path, "a", a)
    deadline = time.monotonic() + 60
    # Stopped before Spark has begun the second one, its source would make one epoch of the files that are left.
    begun = tmp_path / "checkpoint-a" / "offsets" / "1"
    while not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # it waits in its second epoch
    assert query.isActive
    stopping = threading.Thread(target=query.stop)
    stopping.start()
    stopping.join(30)
    assert not stopping.is_alive(), "a query that waits can be stopped"
    assert query.exception() is None
    assert state_of(pond).progress().updaters == {"a": 1, "b": 0}

    jobs: list[int] = []

    def counted(frame: DataFrame, epoch: int) -> None:
        tracker = spark.sparkContext.statusTracker()
        group = spark.sparkContext.getLocalProperty("spark.jobGroup.id")
        before = len(tracker.getJobIdsForGroup(group))
        b(frame, epoch)
        jobs.append(len(tracker.getJobIdsForGroup(group)) - before)

    queries = [start(spark, tmp_path, "a", a), start(spark, tmp_path, "b", counted)]
    for query in queries:
        query.awaitTermination(90)
        assert query.exception() is None
    # In step: both see key 1 from their second epoch on, and no key else of the same epoch.
    assert final(pond) == {1: 2 * (2 + 4 + 4), 10: 2, 11: 2, 12: 2}
    assert jobs == [1, 1, 1]


def test_two_steps_of_one_name_in_a_query_are_refused(
    pond: mp.Pond, spark: SparkSession, tmp_path: Path
) -> None:
    write(tmp_path, "a", range(1))
    first, second = step_of(pond), step_of(pond)
    caught: list[Exception] = []

    def both(frame: DataFrame, epoch: int) -> None:
        first(frame, epoch)
        try:
            second(frame, epoch)
        except BadOption as error:
            caught.append(error)

    start(spark, tmp_path, "a", both).awaitTermination(60)
    assert [error.option for error in caught] == ["name"]
    assert final(pond) == {0: 1, 1: 2}
