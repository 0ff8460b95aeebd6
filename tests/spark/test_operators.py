"""Update and Fetch on Spark DataFrames: right in event time, once each, whatever tasks do."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import millpond as mp
from millpond.errors import (
    BadOption,
    EpochChanged,
    LateRows,
    NullKey,
    NullTime,
    RowsWaiting,
    WrongColumn,
    WrongType,
)
from millpond.ops import frames
from millpond.testing import Oracle
from millpond.wire.epochs import CommitEpoch

START = datetime(2026, 1, 1, tzinfo=UTC)
ROWS = "k long, t long, v long"


def rows(seed: int, count: int, low: int, high: int) -> list[tuple[int, int, int]]:
    chance = random.Random(seed)
    drawn = {
        (chance.randrange(20), chance.randrange(low, high)): chance.randrange(1000) for _ in range(count)
    }
    listed = [(key, time, value) for (key, time), value in drawn.items()]
    chance.shuffle(listed)
    return listed


def frame(spark: SparkSession, listed: list[Any], schema: str = ROWS, partitions: int = 3) -> DataFrame:
    return spark.createDataFrame(listed, schema).repartition(partitions)


def collected(sink: dict[int, list[Any]]) -> Any:
    """A sink that keeps each epoch's rows; an epoch that runs again replaces its own."""

    def write(answers: DataFrame, epoch: int) -> None:
        sink[epoch] = [tuple(row) for row in answers.collect()]

    return write


def test_a_stream_of_updates_and_one_of_views_agree_with_the_oracle(
    pond: mp.Pond, spark: SparkSession
) -> None:
    state = pond.state("s", key="long", value="long")
    oracle = Oracle("latest")
    update = state.update(key="k", at="t", value="v", delay=20, name="feed")
    oracle.register_updater("feed")
    sink: dict[int, list[Any]] = {}
    views = state.fetch(key="k", at="t", into="v", name="views").to(collected(sink))
    asked: list[tuple[int, int]] = []
    for epoch in range(5):
        batch = rows(epoch, 60, 100 * epoch - 15, 100 * epoch + 100)
        committed = update(frame(spark, batch), epoch)
        receipt = oracle.update("feed", epoch, batch, delay=20)
        assert (committed.rows, committed.late) == (receipt.rows_applied, receipt.late)
        assert state.progress().update == oracle.update_progress
        # Views run ahead of the updates: some of them have to wait.
        probes = [(key, time) for key, time, _ in rows(100 + epoch, 40, 100 * epoch, 100 * epoch + 150)]
        asked += probes
        views(frame(spark, probes, "k long, t long"), epoch)
        answered = sum(len(part) for part in sink.values())
        assert answered + views.pending().rows == len(asked)
        assert all(time < oracle.update_progress for _, time, _ in sink[epoch])
    state.finish("feed")
    oracle.finish("feed")
    views(frame(spark, [], "k long, t long"), 5)
    assert views.pending().rows == 0
    found = sorted(
        (key, time, -1 if value is None else value) for part in sink.values() for key, time, value in part
    )
    expected = sorted(
        (key, time, -1 if (value := oracle.fetch_latest(key, time)) is None else value) for key, time in asked
    )
    assert found == expected


def test_a_stream_goes_on_once_its_epoch_is_decided_and_others_when_it_is_visible(
    pond: mp.Pond, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = pond.state("s", key="long", value="long")
    streaming, static = (state.update(key="k", at="t", value="v", name=name) for name in ("a", "b"))
    call, commits = pond._client.call, []

    def noted(message: Any) -> Any:
        commits.extend([message.early] if isinstance(message, CommitEpoch) else [])
        return call(message)

    monkeypatch.setattr(pond._client, "call", noted)
    with frames.as_query(spark, "a0a0a0a0-b1b1-c2c2-d3d3-e4e4e4e4e4e4"):
        streaming(frame(spark, [(1, 10, 7)]), 0)
    static(frame(spark, [(1, 10, 7)]), 0)
    static(pa.table({"k": [1], "t": [11], "v": [8]}), 1)
    assert commits == [True, False, False]
    assert state.progress().updaters == {"a": 10, "b": 11}


def test_an_updater_that_has_not_started_holds_every_view_back(pond: mp.Pond, spark: SparkSession) -> None:
    state = pond.state("s", key="long", value="long")
    first = state.update(key="k", at="t", value="v", name="first")
    second = state.update(key="k", at="t", value="v", name="second")
    sink: dict[int, list[Any]] = {}
    views = state.fetch(key="k", at="t", into="v", name="views").to(collected(sink))
    first(frame(spark, [(1, 10, 7), (1, 99, 8)]), 0)
    views(frame(spark, [(1, 20)], "k long, t long"), 0)
    assert sink[0] == []
    assert (views.pending().rows, views.pending().since) == (1, 20)
    # The row that a join against what is there would have missed.
    second(frame(spark, [(1, 15, 9), (1, 50, 1)]), 0)
    views(frame(spark, [], "k long, t long"), 1)
    assert sink[1] == [(1, 20, 9)]
    assert views.pending().rows == 0


def test_an_epoch_of_a_fetch_that_runs_again_gives_the_same(pond: mp.Pond, spark: SparkSession) -> None:
    state = pond.state("s", key="long", value="long")
    update = state.update(key="k", at="t", value="v", name="feed")
    update(frame(spark, [(1, 10, 7), (1, 20, 8)]), 0)
    sink: dict[int, list[Any]] = {}
    views = state.fetch(key="k", at="t", into="v", name="views").to(collected(sink))
    asked = frame(spark, [(1, 15), (1, 25)], "k long, t long")
    views(asked, 0)
    before = dict(sink)
    update(frame(spark, [(1, 30, 9)]), 1)
    views(asked, 0)
    assert sink == before
    views(frame(spark, [], "k long, t long"), 1)
    assert sink[1] == [(1, 25, 8)]
    views(frame(spark, [], "k long, t long"), 1)
    assert sink[1] == [(1, 25, 8)]
    assert views.pending().rows == 0


def test_a_task_that_fails_and_is_retried_counts_once(pond: mp.Pond, spark: SparkSession) -> None:
    state = pond.state("s", key="long", value="long")
    update = state.update(key="k", at="t", value="v", name="feed")

    def fails_first(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        yield from batches
        if context.attemptNumber() == 0:
            raise RuntimeError("planned")

    listed = rows(1, 200, 0, 1000)
    flaky = frame(spark, listed, partitions=2).mapInArrow(fails_first, ROWS)
    committed = update(flaky, 0)
    assert committed.rows == len(listed)
    state.finish("feed")
    latest = {key: (time, value) for key, time, value in sorted(listed, key=lambda row: row[1])}
    found = {row["key"]: (row["time"], row["value"]) for row in state.snapshot().to_pylist()}
    assert found == latest


def test_a_batch_replayed_with_another_partitioning_is_the_same_batch(
    pond: mp.Pond, spark: SparkSession
) -> None:
    state = pond.state("s", key="long", value="long")
    update = state.update(key="k", at="t", value="v", name="feed")
    listed = rows(2, 100, 0, 500)
    assert not update(frame(spark, listed, partitions=4), 0).replayed
    before = state.progress()
    assert update(frame(spark, listed[::-1], partitions=1), 0).replayed
    assert state.progress() == before
    with pytest.raises(EpochChanged):
        update(frame(spark, [*listed[1:], (1, 1, 1)], partitions=2), 0)


def test_a_container_killed_in_the_middle_of_an_epoch_loses_nothing(
    pond: mp.Pond, spark: SparkSession
) -> None:
    state = pond.state("s", key="long", value="long")
    update = state.update(key="k", at="t", value="v", name="feed")
    listed = rows(3, 300, 0, 1000)
    victim = pond.containers()[0].pid

    def kills(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        if os.path.exists(f"/proc/{victim}"):
            os.kill(victim, signal.SIGKILL)

    committed = update(frame(spark, listed, partitions=2).mapInArrow(kills, ROWS), 0)
    assert committed.rows == len(listed)
    deadline = time.monotonic() + 20  # the others have its slices long before it is back
    while pond.metrics()["coordinator"]["container_restarts"] < 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    state.finish("feed")
    asked = frame(spark, [(key, 999) for key in range(20)], "k long, t long")
    answers = {row["k"]: row["v"] for row in state.fetch(key="k", at="t", into="v").now(asked).collect()}
    assert answers == {key: value for key, _, value in sorted(listed, key=lambda row: row[1])}


def test_ranges_rules_and_timestamps(pond: mp.Pond, spark: SparkSession) -> None:
    state = pond.state("s", key="k string, region long", value="double")
    update = state.update(key=["name", "region"], at="ts", value="price", delay="5 seconds", name="feed")
    moments = [START + timedelta(seconds=second) for second in range(10)]
    update(
        spark.createDataFrame(
            [("a", 1, moment, float(number)) for number, moment in enumerate(moments)],
            "name string, region long, ts timestamp, price double",
        ),
        0,
    )
    state.finish("feed")
    asked = spark.createDataFrame(
        [("a", 1, START + timedelta(seconds=2), START + timedelta(seconds=6))],
        "name string, region long, low timestamp, high timestamp",
    )
    for rule, expected in [
        (mp.total(), 3.0 + 4 + 5 + 6),
        (mp.count(), 4),
        (mp.smallest(), 3.0),
        (mp.largest(), 6.0),
        (mp.values(), [3.0, 4.0, 5.0, 6.0]),
        (mp.latest(), 6.0),
    ]:
        fetch = state.fetch(key=["name", "region"], between=("low", "high"), into="answer", rule=rule)
        assert [row["answer"] for row in fetch.now(asked).collect()] == [expected], rule


def test_now_counts_or_drops_or_nulls_what_waits(pond: mp.Pond, spark: SparkSession) -> None:
    state = pond.state("s", key="long", value="long")
    state.update(key="k", at="t", value="v", name="feed")(frame(spark, [(1, 10, 7), (1, 20, 8)]), 0)
    asked = frame(spark, [(1, 15), (1, 20)], "k long, t long")
    fetch = state.fetch(key="k", at="t", into="v")
    with pytest.raises(RowsWaiting) as error:
        fetch.now(asked)
    assert error.value.rows == 1
    assert [tuple(row) for row in fetch.now(asked, waiting="drop").collect()] == [(1, 15, 7)]
    assert sorted(map(tuple, fetch.now(asked, waiting="null").collect()), key=str) == [
        (1, 15, 7),
        (1, 20, None),
    ]


def test_now_refuses_a_stream_whose_rows_would_have_to_wait(pond: mp.Pond, spark: SparkSession) -> None:
    state = pond.state("s", key="long", value="long")
    state.update(key="k", at="t", value="v", name="feed")(frame(spark, [(1, 10, 7)]), 0)
    stream = spark.readStream.format("rate").load().selectExpr("value AS k", "value AS t")
    fetch = state.fetch(key="k", at="t", into="v")
    for waiting in ("error", "drop", "null"):
        with pytest.raises(BadOption, match=r"fetch\.to\(sink\)"):
            fetch.now(stream, waiting=waiting)
    state.finish("feed")
    assert fetch.now(stream).isStreaming


def test_fetch_progress_follows_the_views_when_a_delay_is_given(pond: mp.Pond, spark: SparkSession) -> None:
    state = pond.state("s", key="long", value="long")
    update = state.update(key="k", at="t", value="v", name="feed")
    update(frame(spark, [(1, time, time) for time in range(0, 101, 10)]), 0)
    sink: dict[int, list[Any]] = {}
    views = state.fetch(key="k", at="t", into="v", delay=10, name="views").to(collected(sink))
    views(frame(spark, [(1, 50), (1, 45)], "k long, t long"), 0)
    assert state.progress().fetch == -math.inf, "the epoch may run again, and ask for what it asked"
    views(frame(spark, [(1, 50), (1, 45)], "k long, t long"), 0)
    assert sorted(sink[0]) == [(1, 45, 40), (1, 50, 50)]
    # One row waits, and holds F back; one comes too late, and is dropped and counted.
    views(frame(spark, [(1, 120), (1, 39), (1, 60)], "k long, t long"), 1)
    assert sink[1] == [(1, 60, 60)]
    assert (views.pending().rows, views.pending().late) == (1, 1)
    assert state.progress().fetch == 40
    views(frame(spark, [], "k long, t long"), 2)
    assert state.progress().fetch == 110


def test_an_uncommitted_fetch_with_a_delay_answers_at_once(pond: mp.Pond, spark: SparkSession) -> None:
    state = pond.state("s", key="long", value="long")
    update = state.update(key="k", at="t", value="v", name="feed")
    sink: dict[int, list[Any]] = {}
    fetch = state.fetch(key="k", at="t", into="v", isolation="uncommitted", delay=10, name="views")
    views = fetch.to(collected(sink))
    views(frame(spark, [(1, 50)], "k long, t long"), 0)
    assert (sink[0], views.pending().rows) == ([], 1), "before the first update nothing is there to read"
    update(frame(spark, [(1, 10, 7)]), 0)
    views(frame(spark, [(1, 60)], "k long, t long"), 1)
    assert sorted(sink[1]) == [(1, 50, 7), (1, 60, 7)]


def test_a_delay_is_refused_where_the_rule_needs_the_whole_history(pond: mp.Pond) -> None:
    state = pond.state("s", key="long", value="long")
    with pytest.raises(BadOption, match="whole history"):
        state.fetch(key="k", at="t", rule=mp.count(), delay=5, name="views").to(collected({}))


def test_bad_rows_are_typed_errors_and_change_nothing(pond: mp.Pond, spark: SparkSession) -> None:
    state = pond.state("s", key="long", value="long")
    update = state.update(key="k", at="t", value="v", late="error", name="feed")
    update(frame(spark, [(1, 100, 1)]), 0)
    before = state.progress()
    for listed, schema, error in [
        ([(None, 200, 1)], ROWS, NullKey),
        ([(1, None, 1)], ROWS, NullTime),
        ([(1, 99, 1)], ROWS, LateRows),
        ([(1, 200)], "k long, t long", WrongColumn),
        ([(1, 200.5, 1)], "k long, t double, v long", WrongType),
        ([(1, 200, "x")], "k long, t long, v string", WrongType),
    ]:
        with pytest.raises(error):
            update(frame(spark, listed, schema), 1)
    assert state.progress() == before


def test_a_frame_of_answers_can_be_used_more_than_once(
    pond: mp.Pond, spark: SparkSession, tmp_path: Path
) -> None:
    state = pond.state("s", key="long", value="string")
    state.update(key="k", at="t", value="v", name="feed")(
        frame(spark, [(1, 10, "x"), (2, 20, "y")], "k long, t long, v string"), 0
    )
    state.finish("feed")
    counts: list[int] = []

    def twice(answers: DataFrame, epoch: int) -> None:
        answers.write.mode("overwrite").parquet(str(tmp_path / "out"))
        counts.append(answers.filter(f.col("v").isNotNull()).count())

    views = state.fetch(key="k", at="t", into="v", name="views").to(twice)
    views(frame(spark, [(1, 15), (2, 15), (3, 15)], "k long, t long"), 0)
    assert counts == [1]
    assert spark.read.parquet(str(tmp_path / "out")).count() == 3


def test_a_row_that_waits_is_never_late(pond: mp.Pond, spark: SparkSession) -> None:
    state = pond.state("s", key="long", value="long")
    update = state.update(key="k", at="t", value="v", name="feed")
    update(frame(spark, [(1, 5, 5)]), 0)
    sink: dict[int, list[Any]] = {}
    views = state.fetch(key="k", at="t", into="v", delay=1, name="views").to(collected(sink))
    views(frame(spark, [(1, 10), (1, 30)], "k long, t long"), 0)
    assert views.pending().rows == 2
    update(frame(spark, [(1, 9, 9), (1, 40, 40)]), 1)
    views(frame(spark, [], "k long, t long"), 1)
    assert sorted(sink[1]) == [(1, 10, 9), (1, 30, 9)]
    # Once everything is final there is nothing left to wait for.
    state.finish("feed")
    views(frame(spark, [(1, 45)], "k long, t long"), 2)
    assert sink[2] == [(1, 45, 40)]
    assert (views.pending().rows, views.pending().late) == (0, 0)


@pytest.mark.parametrize("kind", ["timestamp_ntz", "date", "timestamp"])
def test_times_mean_the_same_in_every_session_zone(pond: mp.Pond, spark: SparkSession, kind: str) -> None:
    state = pond.state("s", key="long", value="long")
    noon = datetime(2026, 1, 2, 12, tzinfo=UTC)
    state.update(key="k", at="t", value="v", name="feed")(
        pa.table({"k": [1, 1], "t": [noon - timedelta(days=1), noon], "v": [1, 2]}), 0
    )
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        texts = {"timestamp": ["2026-01-02 20:59:59", "2026-01-02 21:00:00"]}.get(
            kind,
            ["2026-01-02 11:59:59", "2026-01-02 18:00:00"]
            if kind != "date"
            else ["2026-01-02", "2026-01-03"],
        )
        asked = spark.createDataFrame([(1, text) for text in texts], "k long, text string").select(
            "k", f.col("text").cast(kind).alias("t")
        )
        fetch = state.fetch(key="k", at="t", into="v")
        assert [row["v"] for row in fetch.now(asked, waiting="drop").collect()] == [1]
        with pytest.raises(RowsWaiting) as error:
            fetch.now(asked)
        assert error.value.rows == 1
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
