"""Rows that wait on their way through Spark: every type comes back as it was, and damage is never another answer."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import millpond as mp
from elsewhere import put_elsewhere
from millpond.errors import BadDuration, BadOption, CorruptFile, EpochChanged, NullTime, WrongType
from millpond.ops import frames
from millpond.stores import readiness
from millpond.stores.waiting import WaitingRows
from millpond.times import Progress
from millpond.wire.base import Turn

ASKED = "k long, t long"
TYPES = {
    "span": "INTERVAL '1 02:03:04' DAY TO SECOND",
    "spans": "array(INTERVAL '1' DAY)",
    "nothing": "NULL",
    "nothings": "struct(NULL AS a, array(NULL) AS b)",
    "variant": """parse_json('{"a": [1, "x"]}')""",
    "variants": "array(parse_json('1'), NULL)",
    "clock": "TIME'12:13:14.5'",
    "moment": "TIMESTAMP'2026-01-01 00:00:00'",
    "moments": "map('a', TIMESTAMP'2026-01-01 00:00:00')",
    "plain": "TIMESTAMP_NTZ'2026-01-01 00:00:00'",
    "day": "DATE'2026-01-01'",
    "decimal": "CAST(1.5 AS DECIMAL(20, 3))",
    "bytes": "CAST('a' AS BINARY)",
    "map": "map('a', 1)",
    "folded": "'a' COLLATE UTF8_LCASE",
    "place": "ST_GeomFromWKB(X'0101000000000000000000F03F0000000000000040')",
}


names = (f"s{number}" for number in itertools.count())


@pytest.fixture
def state(pond: mp.Pond, spark: SparkSession) -> mp.State:
    """U is 10. Each has a name of its own: files of one that was forgotten are removed some time later."""
    made = pond.state(next(names), key="long", value="v long")
    feed = made.update(key="k", at="t", value="v", name="feed")
    feed(spark.createDataFrame([(1, 5, 5), (1, 10, 10)], "k long, t long, v long"), 0)
    return made


def two_rows(spark: SparkSession) -> DataFrame:
    """(1, 20) and (2, 30), each in a partition of its own."""
    return spark.range(1, 3, 1, 2).selectExpr("id AS k", "10 + 10 * id AS t")


def answers_into(sink: list[Any]) -> Any:
    return lambda answers, epoch: sink.extend(answers.collect())


def files_of(root: Path, state: mp.State, turn: str = "000000000000.0000") -> list[Path]:
    return sorted(root.glob(f"waiting/{state.name}/views/local/{turn}/*.arrow"))


@pytest.mark.parametrize("away", [False, True], ids=["root seen", "root unseen"])
def test_every_type_waits_and_comes_back_as_it_was(
    state: mp.State, pond: mp.Pond, spark: SparkSession, away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where neither driver nor tasks see the pond's root. Here the driver could not do without the pond."""
    if away:
        put_elsewhere(pond)
        monkeypatch.setattr(WaitingRows, "put", None)
        monkeypatch.setattr(WaitingRows, "get", None)
    columns = [f.expr(text).alias(name) for name, text in TYPES.items()]
    rows = spark.sql("SELECT 1L AS k, 20L AS t").select("*", *columns)
    seen: list[tuple[str, list[str]]] = []

    def write(answers: DataFrame, epoch: int) -> None:
        seen.append((answers.schema.simpleString(), [str(row) for row in answers.collect()]))

    views = state.fetch(key="k", at="t", into="v", name="views").to(write)
    views(rows, 0)
    assert (views.pending().rows, views.pending().since) == (1, 20)
    state.finish("feed")
    assert views.drain().rows == 0
    expected = rows.withColumn("v", f.lit(10).cast("long"))
    schema = expected.schema.simpleString()
    assert seen == [(schema, []), (schema, [str(row) for row in expected.collect()])]


@pytest.mark.parametrize("text", ["INTERVAL '1-2' YEAR TO MONTH", "array(make_interval(1, 2))"])
def test_a_type_that_workers_do_not_take_is_refused_by_name(
    state: mp.State, spark: SparkSession, text: str
) -> None:
    rows = spark.sql(f"SELECT 1L AS k, 20L AS t, {text} AS span")
    fetch = state.fetch(key="k", at="t", into="v", name="views")
    views = fetch.to(answers_into([]))
    for call in (lambda: views(rows, 0), lambda: fetch.now(rows)):
        with pytest.raises(WrongType, match="'span'") as error:
            call()
        assert error.value.column == "span"
    views(rows.drop("span"), 0)
    assert views.pending().rows == 1


@pytest.mark.long
def test_damage_to_any_file_is_refused_and_never_another_answer(
    state: mp.State, spark: SparkSession, pond_root: Path
) -> None:
    sink: list[Any] = []
    views = state.fetch(key="k", at="t", into="v", name="views").to(answers_into(sink))
    views(two_rows(spark), 0)
    files = files_of(pond_root, state)
    assert len(files) == 3
    (files[0].parent / "leftover.arrow.tmp").write_bytes(b"half")
    # Once with U finite, so that what still waits is written again, and once with all of it ready.
    state.update(key="k", at="t", value="v", name="feed")(
        spark.createDataFrame([(1, 25, 25)], "k long, t long, v long"), 1
    )
    empty = spark.createDataFrame([], ASKED)
    for path, missing in zip(files, (False, True, False), strict=True):
        whole = path.read_bytes()
        middle = len(whole) // 2
        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 4]) + whole[middle + 1 :])
        if missing:
            path.unlink()
        with pytest.raises(
            CorruptFile, match=f"{path.name} cannot be read: it is missing" if missing else path.name
        ):
            views(empty, 1)
        path.write_bytes(whole)
    assert sink == []
    views(empty, 1)
    assert [tuple(row) for row in sink] == [(1, 20, 10)]
    state.finish("feed")
    # Epoch 1 ran several times; what counts is what the journal names.
    (drain,) = views.pending().drains.values()
    (listed,) = WaitingRows(str(pond_root), state.name, "views", "local").listed(Turn(1), drain.token).files
    (file,) = (path for path in files_of(pond_root, state, "000000000001.0000") if path.name == listed.name)
    whole = file.read_bytes()
    file.write_bytes(whole[:-30] + b"x" + whole[-29:])
    with pytest.raises(CorruptFile, match=file.name):
        views(empty, 2)
    file.write_bytes(whole)
    views(empty, 2)
    assert [tuple(row) for row in sink[1:]] == [(2, 30, None)]


def test_an_epoch_that_another_driver_runs_too_keeps_its_rows_once(
    state: mp.State, spark: SparkSession, pond_root: Path
) -> None:
    sink: list[Any] = []
    fetch = state.fetch(key="k", at="t", into="v", name="views")
    views = fetch.to(answers_into(sink))
    rows = two_rows(spark)
    views(rows, 0)
    # The other one comes in between, is split otherwise, and fails in its sink.
    with pytest.raises(ZeroDivisionError):
        fetch.to(lambda answers, epoch: len(answers.collect()) // 0)(rows.coalesce(1), 0)
    assert len(files_of(pond_root, state)) == 3 + 1, "rows and list of the one, rows of the other"
    state.finish("feed")
    views(spark.createDataFrame([], ASKED), 1)
    assert sorted(map(tuple, sink)) == [(1, 20, 10), (2, 30, None)]
    views(spark.createDataFrame([], ASKED), 2)
    assert files_of(pond_root, state) == []


def test_a_column_may_come_or_widen_while_rows_wait_and_not_become_another(
    state: mp.State, spark: SparkSession
) -> None:
    sink: list[Any] = []
    views = state.fetch(key="k", at="t", into="v", name="views").to(answers_into(sink))
    views(spark.createDataFrame([(1, 20, 3)], "k int, t long, x int"), 0)
    state.finish("feed")
    with pytest.raises(WrongType, match="'x' is int; now it is string"):
        views(spark.createDataFrame([], "k int, t long, x string"), 1)
    views(spark.createDataFrame([], "y string, x long, t long, k long"), 1)
    assert [tuple(row) for row in sink] == [(None, 3, 20, 1, 10)]


@pytest.mark.parametrize("frame_first", [True, False])
def test_rows_that_came_in_a_frame_and_in_a_table_wait_together(
    state: mp.State, spark: SparkSession, frame_first: bool
) -> None:
    sink: list[tuple[int, ...]] = []

    def write(answers: Any, epoch: int) -> None:
        rows = answers if isinstance(answers, pa.Table) else answers.toArrow()
        sink.extend(tuple(row.values()) for row in rows.to_pylist())

    views = state.fetch(key="k", at="t", into="v", name="views").to(write)
    frame = spark.createDataFrame([(1, 20)], "k long, t long")
    table = pa.table({"t": pa.array([30], pa.int64()), "k": pa.array([1], pa.int32())}).select(["k", "t"])
    for epoch, rows in enumerate([frame, table] if frame_first else [table, frame]):
        views(rows, epoch)
    assert views.pending().rows == 2
    state.finish("feed")
    assert views.drain().rows == 0
    assert sorted(sink) == [(1, 20, 10), (1, 30, 10)]


def test_times_of_another_kind_are_refused_before_anything_is_kept_or_answered(
    state: mp.State, spark: SparkSession, pond_root: Path
) -> None:
    rows = spark.sql("SELECT 1L AS k, 3L AS t, TIMESTAMP'2026-01-01 00:00:00' AS ts")
    sink: list[Any] = []
    for bounds in ({"at": "ts"}, {"between": ("ts", "t")}, {"between": ("t", "ts")}):
        fetch = state.fetch(key="k", into="v", name="views", **bounds)
        with pytest.raises(WrongType, match="of kind") as error:
            fetch.to(answers_into(sink))(rows, 0)
        assert error.value.column in ("t", "ts")
        with pytest.raises(WrongType, match="of kind"):
            fetch.now(rows, waiting="null")
    with pytest.raises(WrongType, match="of kind"):
        state.fetch(key="k", at="ts", into="v").now(rows.toArrow())
    assert (sink, files_of(pond_root, state)) == ([], [])


def test_a_delay_that_does_not_fit_is_refused_before_the_sink(state: mp.State, spark: SparkSession) -> None:
    sink: list[Any] = []
    views = state.fetch(key="k", at="t", into="v", delay="5 seconds", name="views").to(answers_into(sink))
    with pytest.raises(BadDuration):
        views(spark.createDataFrame([(1, 3)], ASKED), 0)
    assert sink == []


def test_what_tasks_refuse_is_the_same_error_as_without_spark(state: mp.State, spark: SparkSession) -> None:
    views = state.fetch(key="k", at="t", into="v", name="views").to(answers_into([]))
    with pytest.raises(NullTime, match="'t' is null in 1 of 1 rows"):
        views(spark.createDataFrame([(1, None)], ASKED), 0)


@pytest.mark.parametrize("progress", [-math.inf, -(2**63), 0, 8, 2**63 - 1, math.inf])
def test_columns_are_judged_as_arrays_are(spark: SparkSession, progress: Progress) -> None:
    times = [-(2**63), -1, 0, 6, 7, 8, 2**63 - 1]
    rows = [(low, high) for low in times for high in times]
    frame = spark.createDataFrame(rows, "low long, high long").coalesce(1)
    lows, highs = (np.array(column) for column in zip(*rows, strict=True))
    low, high = f.col("low"), f.col("high")
    pairs = [
        (readiness.ready(low, high, progress, committed), readiness.ready(lows, highs, progress, committed))
        for committed in (True, False)
    ]
    pairs += [(readiness.late(low, high, progress), readiness.late(lows, highs, progress))]
    pairs += [(readiness.late(None, high, progress), readiness.late(None, highs, progress))]
    said = frame.select(*(frames.truth(column, null=False) for column, _ in pairs)).collect()
    for place, (_, array) in enumerate(pairs):
        assert [row[place] for row in said] == np.broadcast_to(array, len(rows)).tolist()


def test_two_fetches_of_one_name_in_one_query_are_told_apart(
    state: mp.State, spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.json").write_text('{"k": 1, "t": 20}\n')
    stream = spark.readStream.schema(ASKED).json(str(tmp_path / "in"))
    fetch = state.fetch(key="k", at="t", into="v", name="views")
    one, two = fetch.to(answers_into([])), fetch.to(answers_into([]))
    errors = []

    def both(frame: DataFrame, epoch: int) -> None:
        one(frame, epoch)
        one(frame, epoch)
        for other, rows in ((two, frame), (one, frame.withColumn("k", f.lit(9)))):
            # Whose job it is, is the user's to say.
            frame.sparkSession.sparkContext.setJobGroup("ours", "")
            try:
                other(rows, epoch)
            except mp.MillpondError as error:
                errors.append(error)

    def start(function: Any) -> None:
        writer = stream.writeStream.foreachBatch(function).trigger(availableNow=True)
        writer.option("checkpointLocation", str(tmp_path / "c")).start().awaitTermination()

    start(both)
    assert [type(error) for error in errors] == [BadOption, EpochChanged]
    assert "another fetch of the name 'views'" in str(errors[0])
    assert one.pending().rows == 1
    (tmp_path / "in" / "2.json").write_text('{"k": 2, "t": 30}\n')
    # Another run may have other operators.
    start(two)
    assert one.pending().rows == 2
