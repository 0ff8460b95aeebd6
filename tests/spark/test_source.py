"""`spark.read.format("millpond")`: a State as a DataFrame."""

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
    ]:
        with pytest.raises(PySparkException, match=message):
            read(spark, **options)
