"""Flows: one query and one checkpoint for several sources, updates and fetches; and drains after a query has ended."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import millpond as mp
from millpond.errors import BadDuration, BadOption, EpochOutOfOrder, WrongType

EDGES = "src long, dst long, ts long, added boolean"


def collected(sink: dict[int, list[Any]]) -> Any:
    """A sink that keeps each epoch's rows; an epoch that runs again replaces its own."""

    def write(answers: DataFrame, epoch: int) -> None:
        sink[epoch] = sorted(tuple(row) for row in answers.collect())

    return write


def everything(sink: dict[int, list[Any]]) -> list[Any]:
    return sorted(row for part in sink.values() for row in part)


class Feed:
    """A directory of JSON files as a streaming source: one file is one batch."""

    def __init__(self, spark: SparkSession, folder: Path, schema: str) -> None:
        self._folder = folder
        self._names = [part.split()[0] for part in schema.split(",")]
        self._count = 0
        folder.mkdir()
        reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
        self.frame = reader.json(str(folder))

    def add(self, rows: list[tuple[Any, ...]]) -> None:
        text = "".join(json.dumps(dict(zip(self._names, row, strict=True))) + "\n" for row in rows)
        self._count += 1
        # The source takes the oldest file first; a file must be whole when it sees it.
        whole = self._folder / f".{self._count:03d}.json"
        whole.write_text(text)
        os.utime(whole, (self._count, self._count))
        whole.rename(self._folder / f"{self._count:03d}.json")


@pytest.fixture
def two_feeds(spark: SparkSession, tmp_path: Path) -> tuple[Feed, Feed]:
    return (
        Feed(spark, tmp_path / "updates", "k long, t long, v long"),
        Feed(spark, tmp_path / "views", "k long, t long"),
    )


def test_two_sources_in_one_query_and_what_waits_is_drained(
    pond: mp.Pond, two_feeds: tuple[Feed, Feed], tmp_path: Path
) -> None:
    updates, views = two_feeds
    state = pond.state("s", key="long", value="v long")
    sink: dict[int, list[Any]] = {}

    def flow() -> mp.Flow:
        made = pond.flow("both")
        made.source(updates.frame).into(state.update(key="k", at="t", value="v", delay=5, name="feed"))
        made.source(views.frame).ask(state.fetch(key="k", at="t", into="v", name="views")).to(collected(sink))
        return made

    updates.add([(1, 10, 100), (2, 12, 200)])
    views.add([(1, 11), (1, 6), (2, 30), (3, 2)])
    flow().start(str(tmp_path / "checkpoint"), availableNow=True).awaitTermination()
    # The views of an epoch see its updates: U is 7 by then.
    assert sink == {0: [(1, 6, None), (3, 2, None)]}
    updates.add([(2, 25, 250)])
    views.add([(2, 19)])
    flow().start(str(tmp_path / "checkpoint"), availableNow=True).awaitTermination()
    assert sink[1] == [(1, 11, 100), (2, 19, 200)]
    state.finish("feed")
    ended = flow()
    (left,) = ended.drain()
    assert left.rows == 0
    assert everything(sink) == [
        (1, 6, None), (1, 11, 100), (2, 19, 200), (2, 30, 250), (3, 2, None),
    ]  # fmt: skip
    before = dict(sink)
    ended.drain()
    assert sink == before, "nothing waits, nothing is answered again"
    # The query goes on after a drain, with Spark's own numbers.
    views.add([(1, 99)])
    flow().start(str(tmp_path / "checkpoint"), availableNow=True).awaitTermination()
    assert sink[2] == [(1, 99, 100)]
    assert sum(len(part) for part in sink.values()) == 6


def test_hops_within_one_epoch_and_progress_from_after_the_loop(
    pond: mp.Pond, spark: SparkSession, tmp_path: Path
) -> None:
    graph = pond.state("g", key="long", value="neighbour long, added boolean", update=mp.edges())
    feed = Feed(spark, tmp_path / "edges", EDGES)
    sink: dict[int, list[Any]] = {}
    flow = pond.flow("hops")
    edges = flow.source(feed.frame)
    edges.into(graph.update(key="src", at="ts", value=["dst", "added"], delay=0, name="edges"))
    first = edges.map(
        lambda df: df.where("added").selectExpr("src", "dst", "ts", "ts - 100 AS since", "ts - 1 AS until")
    ).ask(graph.fetch(key="dst", between=("since", "until"), into="n1", name="hop1"))
    second = first.map(lambda df: df.selectExpr("*", "explode(n1) AS v1")).ask(
        graph.fetch(key="v1", between=("since", "until"), into="n2", name="hop2")
    )
    second.map(
        lambda df: df.where("array_contains(n2, src)").selectExpr("ts", "src AS a", "dst AS b", "v1 AS c")
    ).to(collected(sink))
    first.report(graph, ["hop1", "hop2"], at="since", delay=0)
    # 1 -> 2 -> 3 -> 1 closes at 30; the edge 2 -> 4 is gone before 4 -> 1 could close another.
    feed.add([(1, 2, 10, True), (2, 3, 20, True), (3, 1, 30, True), (2, 4, 21, True)])
    feed.add([(2, 4, 35, False), (4, 1, 40, True), (5, 5, 41, True), (3, 1, 150, True)])
    feed.add([(9, 9, 200, True)])
    flow.start(str(tmp_path / "checkpoint"), availableNow=True).awaitTermination()
    graph.finish("edges")
    flow.drain()
    assert everything(sink) == [(30, 3, 1, 2)]
    assert graph.progress().fetch == 50, "one epoch behind: the last may run again"


def test_all_that_is_reported_of_a_frame_is_looked_for_in_one_job(pond: mp.Pond, spark: SparkSession) -> None:
    rows = spark.createDataFrame([(1, 7, 3), (2, 9, 1)], "k long, t long, since long")
    jobs: list[int] = []
    for columns in ([], ["t"], ["t", "since", "t"]):
        group = f"reports_of_{len(columns)}"
        state = pond.state(group, key="long", value="v long")
        flow = pond.flow(group)
        stream = flow.source(rows)
        for number, column in enumerate(columns):
            stream.report(state, f"{group}_{number}", at=column)
        spark.sparkContext.setJobGroup(group, group)
        try:
            flow.run(0)
        finally:
            for name in ("spark.jobGroup.id", "spark.job.description"):
                spark.sparkContext.setLocalProperty(name, None)  # type: ignore[arg-type]
        jobs.append(len(spark.sparkContext.statusTracker().getJobIdsForGroup(group)))
        flow.run(1)
    assert jobs[0] == 0
    assert jobs[1] == jobs[2] > 0
    asked = state.progress().fetchers
    assert [asked[f"reports_of_3_{number}"] for number in range(3)] == [9, 3, 9]


def test_updates_that_follow_a_fetch_are_made_once_also_by_a_drain(
    pond: mp.Pond, two_feeds: tuple[Feed, Feed], tmp_path: Path
) -> None:
    updates, views = two_feeds
    values = pond.state("values", key="long", value="v long")
    counts = pond.state("counts", key="long", value="n long", update=mp.add())
    flow = pond.flow("chain")
    flow.source(updates.frame).into(values.update(key="k", at="t", value="v", name="feed"))
    asked = flow.source(views.frame).ask(values.fetch(key="k", at="t", into="v", name="views"))
    asked.map(lambda df: df.where("v IS NOT NULL").selectExpr("v", "t", "1L AS n")).into(
        counts.update(key="v", at="t", value="n", delay=1000, name="counter")
    )
    updates.add([(1, 10, 7), (2, 10, 7)])
    views.add([(1, 5), (1, 12), (2, 30), (1, 30)])
    flow.start(str(tmp_path / "checkpoint"), availableNow=True).awaitTermination()
    assert flow.fetchers[0].pending().rows == 3
    values.finish("feed")
    flow.drain()
    counts.finish("counter")
    assert counts.snapshot().to_pydict() == {"key": [7], "time": [30], "n": [3]}


def test_a_fetch_of_its_own_drains_too_and_an_interrupted_drain_goes_on(
    pond: mp.Pond, spark: SparkSession
) -> None:
    state = pond.state("s", key="long", value="v long")
    feed = state.update(key="k", at="t", value="v", name="feed")
    feed(spark.createDataFrame([(1, 10, 5)], "k long, t long, v long"), 0)
    sink: dict[int, list[Any]] = {}
    broken = True

    def write(answers: DataFrame, epoch: int) -> None:
        collected(sink)(answers, epoch)
        if broken and epoch < 0:
            raise RuntimeError("the sink broke after it had written")

    views = state.fetch(key="k", at="t", into="v", name="views").to(write)
    asked = spark.createDataFrame([(1, 9), (1, 10), (1, 11)], "k long, t long")
    views(asked, 0)
    assert views.pending().rows == 2
    state.finish("feed")
    with pytest.raises(RuntimeError, match="the sink broke"):
        views.drain()
    with pytest.raises(EpochOutOfOrder, match="interrupted"):
        views(asked, 1)
    broken = False
    assert views.drain().rows == 0
    assert everything(sink) == [(1, 9, None), (1, 10, 5), (1, 11, 5)]
    views(asked.where("t = 11"), 1)
    assert sink[1] == [(1, 11, 5)]


def test_a_drain_that_broke_while_u_is_finite_goes_on(pond: mp.Pond, spark: SparkSession) -> None:
    state = pond.state("s", key="long", value="v long")
    feed = state.update(key="k", at="t", value="v", name="feed")
    feed(spark.createDataFrame([(1, 10, 5)], "k long, t long, v long"), 0)
    sink: dict[int, list[Any]] = {}
    broken = [True]

    def write(answers: DataFrame, epoch: int) -> None:
        collected(sink)(answers, epoch)
        if epoch < 0 and broken.pop():
            raise RuntimeError("the sink broke after it had written")

    views = state.fetch(key="k", at="t", into="v", name="views").to(write)
    views(spark.createDataFrame([(1, 11)], "k long, t long"), 0)
    feed(spark.createDataFrame([(1, 20, 6)], "k long, t long, v long"), 1)
    with pytest.raises(RuntimeError, match="the sink broke"):
        views.drain()
    broken.append(False)
    assert views.drain().rows == 0
    assert sink == {0: [], -1: [(1, 11, 5)]}


def test_a_drain_without_progress_leaves_rows_waiting(pond: mp.Pond, spark: SparkSession) -> None:
    state = pond.state("s", key="long", value="v long")
    feed = state.update(key="k", at="t", value="v", name="feed")
    sink: dict[int, list[Any]] = {}
    views = state.fetch(key="k", at="t", into="v", name="views").to(collected(sink))
    views(spark.createDataFrame([(1, 9), (1, 30)], "k long, t long"), 0)
    for _ in range(2):
        assert views.drain().rows == 2
    feed(spark.createDataFrame([(1, 10, 5)], "k long, t long, v long"), 0)
    assert views.drain().rows == 1
    state.finish("feed")
    assert views.drain().rows == 0
    assert everything(sink) == [(1, 9, None), (1, 30, 5)]


def test_transactions_that_follow_a_fetch_run_once_also_in_a_drain(
    pond: mp.Pond, spark: SparkSession
) -> None:
    accounts = pond.table("accounts", key="long", value="n long", default={"n": 0})

    def count(accounts, k: int):  # type: ignore[no-untyped-def]
        accounts[k].n += 1

    ledger = pond.transactions("ledger", tables=[accounts], kinds={"count": count}, kind="kind", at="t")
    state = pond.state("s", key="long", value="v long")
    feed = state.update(key="k", at="t", value="v", name="feed")
    feed(spark.createDataFrame([(1, 10, 5)], "k long, t long, v long"), 0)
    sink: dict[int, list[Any]] = {}
    broken = [True]

    def write(outcomes: DataFrame, epoch: int) -> None:
        collected(sink)(outcomes.select("k", "t", "committed"), epoch)
        if epoch < 0 and broken.pop():
            raise RuntimeError("the sink broke after it had written")

    flow = pond.flow("chain")
    asked = flow.source(
        spark.createDataFrame([(1, 5, "count"), (1, 11, "count")], "k long, t long, kind string")
    )
    asked.ask(state.fetch(key="k", at="t", into="v", name="views")).to(ledger.to(write))
    flow.run(0)
    assert sink == {0: [(1, 5, True)]}
    state.finish("feed")
    with pytest.raises(RuntimeError, match="the sink broke"):
        flow.drain()
    broken.append(False)
    assert flow.drain()[0].rows == 0
    assert sink == {0: [(1, 5, True)], -1: [(1, 11, True)]}
    assert accounts.snapshot()["n"].to_pylist() == [2]


def test_reports_of_another_kind_of_time_are_refused(pond: mp.Pond, spark: SparkSession) -> None:
    state = pond.state("s", key="long", value="v long")
    rows = spark.sql("SELECT 1L AS k, 5L AS t, 7L AS v, TIMESTAMP'2026-01-01 00:00:00' AS ts")
    for name, at, delay, error in (
        ("late", "ts", "1 second", WrongType),
        ("unit", "t", "1 second", BadDuration),
    ):
        flow = pond.flow(name)
        stream = flow.source(rows).into(state.update(key="k", at="t", value="v", name=name))
        stream.report(state, "reader", at=at, delay=delay)
        with pytest.raises(error):
            flow.run(0)
        flow.drain()
        assert state.progress().fetchers == {"reader": float("-inf")}


def test_what_a_flow_refuses(pond: mp.Pond, spark: SparkSession, tmp_path: Path) -> None:
    flow = pond.flow("empty")
    with pytest.raises(BadOption, match="no source"):
        flow.start(str(tmp_path / "checkpoint"))
    stream = flow.source(spark.range(1))
    state = pond.state("s", key="long", value="v long")
    unsure = state.fetch(key="id", at="id", into="v", isolation="uncommitted", name="unsure")
    with pytest.raises(BadOption, match="uncommitted"):
        stream.ask(unsure).map(lambda df: df).into(state.update(key="id", at="id", value="v", name="u"))
    update = state.update(key="id", at="id", value="v", name="twice")
    fetch = state.fetch(key="id", at="id", into="v", name="twice")
    stream.into(update).ask(fetch)
    for call in (lambda: stream.into(update), lambda: stream.ask(fetch)):
        with pytest.raises(BadOption, match="'twice' of state 's' already") as error:
            call()
        assert error.value.option == "name"
    # A name is of its State: another may have the same.
    other = pond.state("other", key="long", value="v long")
    stream.into(other.update(key="id", at="id", value="v", name="twice"))
    for call in (flow.source, stream.into, stream.ask):
        with pytest.raises(BadOption):
            call("rows")  # type: ignore[operator]
