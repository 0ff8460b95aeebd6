"""`spark.read.format("millpond")`: a State as a DataFrame, and what is open of a window."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import millpond as mp


@pytest.fixture
def state(pond: mp.Pond) -> mp.State:
    state = pond.state("s", key="long", value="string")
    update = state.update(key="k", at="t", value="v", name="feed")
    update(pa.table({"k": [1, 1, 2], "t": [10, 20, 30], "v": ["a", "b", "c"]}), 0)
    return state


def read(spark: SparkSession, **options: str) -> list[tuple[object, ...]]:
    frame = spark.read.format("millpond").options(**options).load()
    assert frame.columns == ["key", "time", "value"]
    return sorted(map(tuple, frame.collect()))


@pytest.mark.usefixtures("state")
def test_only_final_values_unless_asked_otherwise(
    pond: mp.Pond, spark: SparkSession, state: mp.State
) -> None:
    pond.state("empty", key="long", value="string")
    assert read(spark, state="empty") == []
    assert read(spark, state="s") == [(1, 20, "b")]
    assert read(spark, state="s", asOf="15") == [(1, 10, "a")]
    assert read(spark, state="s", isolation="uncommitted") == [(1, 20, "b"), (2, 30, "c")]
    state.finish("feed")
    assert read(spark, state="s") == [(1, 20, "b"), (2, 30, "c")]


@pytest.mark.usefixtures("state")
def test_what_cannot_be_read_says_why(spark: SparkSession) -> None:
    for options, message in [
        ({"state": "s", "asOf": "30"}, "is not final"),
        ({"state": "s", "asOf": "soon"}, "neither a timestamp nor an integer"),
        ({"state": "other"}, "no state"),
        ({"state": "s", "colour": "red"}, "no option"),
        ({"window": "other"}, "no window 'other'"),
        ({"window": "s"}, "no window 's'"),
        ({"window": "w", "asOf": "30"}, "no option 'asof'"),
    ]:
        with pytest.raises(PySparkException, match=message):
            read(spark, **options)


def test_open_windows(pond: mp.Pond, spark: SparkSession) -> None:
    def load(name: str) -> list[tuple[object, ...]]:
        return sorted(map(tuple, spark.read.format("millpond").option("window", name).load().collect()))

    window = pond.window("w", key="k string", window=mp.session(10), aggregate={"sum": mp.total("v")})
    with pytest.raises(PySparkException, match="not known before its first rows"):
        load("w")
    source = window.over(key="k", at="t")
    source(pa.table({"k": ["a", "b", "b"], "t": [1, 30, 35], "v": [1, 2, 3]}), 0)
    assert load("w") == [(30, 45, "b", 5)]
    assert source.finish().num_rows == 1
    assert load("w") == []
    with pytest.raises(PySparkException, match="there is no window 'other'"):
        load("other")
