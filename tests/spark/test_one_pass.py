"""A fetch on a stream reads its source once, whatever the sink does with its frame; nothing is lost, nothing kept twice."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext, cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import millpond as mp
from millpond.errors import MillpondError

ROWS = 60
READY, LATER = range(40), range(40, ROWS)
COMPILED = {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}

# Workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

names = (f"s{number}" for number in itertools.count())


class Counting:
    """For `mapInArrow`: leaves a file for each time that a partition was read to its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        context = TaskContext.get()
        assert context is not None
        Path(self.folder, f"{context.taskAttemptId()}-{context.stageId()}-{id(self)}").touch()


class Counted:
    """Rows 0 to 59 in three partitions and an empty one, of which one is counted for each time it is read."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        rows = spark.range(0, ROWS, 1, 4).filter("id < 15 or id >= 30").union(spark.range(15, 30, 1, 1))
        self.frame = rows.selectExpr("id AS k", "id AS t").mapInArrow(Counting(folder), "k long, t long")

    @property
    def reads(self) -> float:
        """How often all partitions were read."""
        return len(list(self.folder.iterdir())) / 5


@pytest.fixture
def state(pond: mp.Pond, spark: SparkSession) -> mp.State:
    """U is 40."""
    made = pond.state(next(names), key="long", value="v long")
    feed = made.update(key="k", at="t", value="v", name="feed")
    feed(pa.table({"k": [*range(ROWS), 1], "t": [0] * ROWS + [40], "v": [*range(ROWS), 1]}), 0)
    return made


@pytest.fixture
def source(spark: SparkSession, tmp_path: Path) -> Counted:
    return Counted(spark, tmp_path / "reads")


def into(sink: list[Any]) -> Callable[[DataFrame, int], None]:
    return lambda answers, epoch: sink.extend(row["k"] for row in answers.collect())


def drained(state: mp.State, views: Any, sink: list[int]) -> None:
    """What waited is answered once, and is what had to wait."""
    assert (views.pending().rows, views.pending().since) == (len(LATER), LATER[0])
    state.finish("feed")
    sink.clear()
    assert views.drain().rows == 0
    assert sorted(sink) == list(LATER)


def stops_early(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from itertools.islice(batches, 1)


def swallowed(answers: DataFrame) -> None:
    with pytest.raises(Exception, match="UNRESOLVED_COLUMN"):
        answers.select("no such column").count()


def fails_at_its_end(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches
    raise RuntimeError("a task of the sink fails")


def swallowed_of_a_task(answers: DataFrame) -> None:
    with pytest.raises(Exception, match="a task of the sink fails"):
        answers.mapInArrow(fails_at_its_end, answers.schema).collect()


USES: dict[str, tuple[Callable[[DataFrame], Any], float]] = {
    "collect": (lambda a: a.collect(), 1),
    "write": (lambda a: a.write.format("noop").mode("append").save(), 1),
    "count alone": (lambda a: a.count(), 1),
    "aggregate": (lambda a: a.groupBy("k").agg(f.max("v")).collect(), 1),
    "repartition": (lambda a: a.repartition(7).write.format("noop").mode("append").save(), 1),
    "sort": (lambda a: a.orderBy("t").collect(), 2),
    "filter and column": (lambda a: a.where("v > 10").select("v").collect(), 1),
    "after other rows": (
        lambda a: a.sparkSession.range(3).selectExpr("id k", "id t", "id v").union(a).collect(),
        2,
    ),
    "write, then count": (lambda a: (a.write.format("noop").mode("append").save(), a.count()), 2),
    "persist, write, count": (lambda a: (a.persist().count(), a.count(), a.unpersist()), 1),
    "with itself": (lambda a: a.union(a).collect(), 3),
    "join with itself": (lambda a: a.join(a.withColumnRenamed("v", "w"), ["k", "t"]).collect(), 2),
    "coalesce": (lambda a: a.coalesce(1).collect(), 2),
    "nothing": (lambda a: None, 1),
    "limit": (lambda a: a.limit(1).collect(), 2),
    "show": (lambda a: a.show(2), 2),
    "is empty": (lambda a: a.isEmpty(), 2),
    "stops early": (lambda a: a.mapInArrow(stops_early, a.schema).collect(), 2),
    "an error swallowed": (swallowed, 1),
    "an error of a task swallowed": (
        swallowed_of_a_task,
        5,
    ),  # four attempts, and the job that makes up for them
    "to pandas": (lambda a: a.toPandas(), 1),
    "rdd": (lambda a: a.rdd.map(lambda row: row["k"]).sum(), 1),
}


OFTEN = (
    "collect",
    "stops early",
    "an error of a task swallowed",
    "with itself",
    "persist, write, count",
    "nothing",
)


@pytest.mark.parametrize(
    "use", [pytest.param(use, marks=() if use in OFTEN else pytest.mark.long) for use in USES]
)
def test_whatever_a_sink_does_the_rest_waits_once(
    state: mp.State, spark: SparkSession, source: Counted, use: str
) -> None:
    work, reads_max = USES[use]
    sink: list[int] = []
    epochs: list[int] = []

    def write(answers: DataFrame, epoch: int) -> None:
        epochs.append(epoch)
        if epoch == 0:
            work(answers)
        else:
            sink.extend(row["k"] for row in answers.collect())

    views = state.fetch(key="k", at="t", into="v", name="views").to(write)
    views(source.frame, 0)
    assert source.reads <= reads_max
    drained(state, views, sink)
    assert source.reads <= reads_max, "a drain reads no source"


def test_with_compiled_plans_and_aqe_a_shuffled_source_is_read_once(
    state: mp.State, spark: SparkSession, source: Counted
) -> None:
    settings = {"spark.sql.adaptive.enabled": "true", **COMPILED}
    before = {name: spark.conf.get(name) for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        sink: list[int] = []
        views = state.fetch(key="k", at="t", into="v", name="views").to(into(sink))
        shuffled = source.frame.repartition(6, "k").groupBy("k", "t").agg(f.count("*").alias("n"))
        views(shuffled, 0)
        assert (sorted(sink), source.reads) == (list(READY), 1)
        drained(state, views, sink)
    finally:
        for name, was in before.items():
            spark.conf.set(name, str(was))


class FailsOnce:
    """For `mapInArrow`: the first attempt of each task fails, after it gave all its rows."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() == 0:
            raise RuntimeError("the first attempt fails")


@pytest.mark.long
def test_tasks_that_fail_and_run_again_keep_their_rows_once(
    state: mp.State, spark: SparkSession, source: Counted
) -> None:
    sink: list[int] = []

    def write(answers: DataFrame, epoch: int) -> None:
        # The tasks of the fetch end well, what comes after them in the same task does not.
        frame = answers.mapInArrow(FailsOnce(), answers.schema) if epoch == 0 else answers
        sink.extend(row["k"] for row in frame.collect())

    views = state.fetch(key="k", at="t", into="v", name="views").to(write)
    views(source.frame, 0)
    assert sorted(sink) == list(READY)
    drained(state, views, sink)


@pytest.mark.long
def test_an_epoch_that_runs_again_reads_once_more_and_keeps_the_same(
    state: mp.State, spark: SparkSession, source: Counted
) -> None:
    sink: list[int] = []
    views = state.fetch(key="k", at="t", into="v", name="views").to(into(sink))
    for run in (1, 2):
        views(source.frame, 0)
        assert source.reads == run
    with pytest.raises(MillpondError, match="came again with other rows"):
        views(source.frame.where("k <> 50"), 0)
    drained(state, views, sink)


def test_late_rows_and_the_newest_time_are_seen_in_the_same_pass(
    state: mp.State, spark: SparkSession, source: Counted
) -> None:
    sink: list[int] = []
    views = state.fetch(key="k", at="t", into="v", delay=5, name="views").to(into(sink))
    views(source.frame, 0)
    assert (sorted(sink), views.pending().late) == (list(READY), 0)
    views(spark.range(0, 60, 30, 1).selectExpr("id AS k", "id AS t"), 1)
    assert views.pending().late == 2, "below 59 - 5"
    state.finish("feed")
    views(spark.createDataFrame([], "k long, t long"), 2)
    assert source.reads == 1
    assert sorted(sink) == list(range(ROWS))


def test_a_stream_of_files_is_read_once_and_waits_across_batches(
    state: mp.State, spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "reads").mkdir()
    spark.range(0, 30, 1, 1).selectExpr("id AS k", "id AS t").write.parquet(str(tmp_path / "in"))
    spark.range(30, ROWS, 1, 1).selectExpr("id AS k", "id AS t").write.mode("append").parquet(
        str(tmp_path / "in")
    )
    stream = spark.readStream.schema("k long, t long").option("maxFilesPerTrigger", 1)
    counted = stream.parquet(str(tmp_path / "in")).mapInArrow(Counting(tmp_path / "reads"), "k long, t long")
    sink: list[int] = []
    views = state.fetch(key="k", at="t", into="v", name="views").to(into(sink))
    writer = counted.writeStream.foreachBatch(views).trigger(availableNow=True)
    writer.option("checkpointLocation", str(tmp_path / "c")).start().awaitTermination()
    assert sorted(sink) == list(READY)
    partitions = len(list((tmp_path / "reads").iterdir()))
    assert partitions in (2, 4), "each batch has a file, of one or two parts"
    drained(state, views, sink)


def test_partitions_with_the_same_rows_are_not_taken_for_one(
    state: mp.State, spark: SparkSession, tmp_path: Path
) -> None:
    rows = spark.range(0, ROWS, 1, 1).selectExpr("id AS k", "id AS t")
    sink: list[int] = []
    views = state.fetch(key="k", at="t", into="v", name="views").to(into(sink))
    views(rows.union(rows).union(rows.where("k < 0")), 0)
    assert sorted(sink) == sorted([*READY, *READY])
    assert views.pending().rows == 2 * len(LATER)
    state.finish("feed")
    sink.clear()
    views.drain()
    assert sorted(sink) == sorted([*LATER, *LATER])


def test_new_rows_and_waiting_ones_that_spark_runs_in_one_task_are_all_kept(
    state: mp.State, spark: SparkSession
) -> None:
    views = state.fetch(key="k", at="t", into="v", name="views").to(lambda answers, epoch: None)
    for epoch in range(3):
        rows = spark.createDataFrame([(1, 50 + epoch)], "k long, t long").coalesce(1).localCheckpoint()
        views(rows, epoch)
        assert views.pending().rows == epoch + 1
