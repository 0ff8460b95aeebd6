"""Joins and deduplication on Spark DataFrames: rows of all tasks count, an epoch that runs again gives the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import millpond as mp


def frame(spark: SparkSession, rows: list[tuple[int, int]], names: str) -> DataFrame:
    return spark.createDataFrame(rows, names).repartition(3)


def taken(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in frame.collect())


def test_a_windowed_join(pond: mp.Pond, spark: SparkSession) -> None:
    join = pond.join("j", key="k long", left="l long", right="r long", window=mp.tumbling(10))
    left, right = join.left(at="l"), join.right(at="r")
    rows = frame(spark, [(1, 1), (1, 2), (2, 3)], "k long, l long")
    assert taken(left(rows, 0)) == []
    assert taken(right(frame(spark, [(1, 5), (2, 6), (1, 30)], "k long, r long"), 0)) == []
    last = frame(spark, [(1, 30)], "k long, l long")
    fired = [(0, 10, 1, 1, 5), (0, 10, 1, 2, 5), (0, 10, 2, 3, 6)]
    assert taken(left(last, 1)) == fired
    assert taken(left(last, 1)) == fired
    late: list[Any] = []
    join.left(at="l", late=lambda rows, epoch: late.extend(taken(rows)))(
        frame(spark, [(7, 4), (1, 40)], "k long, l long"), 2
    )
    assert late == [(7, 4)]


def test_an_interval_join_of_two_streams(pond: mp.Pond, spark: SparkSession, tmp_path: Path) -> None:
    """Both are queries of their own; which of them brings the second row of a pair, nobody can tell."""
    join = pond.join("i", key="k long", left="l long", right="r long", between=("-1 second", "1 second"))
    pairs: dict[str, dict[int, list[Any]]] = {"l": {}, "r": {}}
    for name, side in (("l", join.left(at="t")), ("r", join.right(at="t"))):
        data = tmp_path / name
        number = f.col("id").alias(name)
        moment = f.timestamp_seconds(f.col("id")).alias("t")
        spark.range(40).select((f.col("id") % 5).alias("k"), moment, number).repartition(4).write.parquet(
            str(data)
        )

        def sink(found: DataFrame, epoch: int, name: str = name) -> None:
            pairs[name][epoch] = [(row["k"], row["l"], row["r"]) for row in found.collect()]

        stream = spark.readStream.schema(f"k long, t timestamp, {name} long").option("maxFilesPerTrigger", 4)
        query = (
            stream.parquet(str(data))
            .writeStream.option("checkpointLocation", str(tmp_path / f"{name}-checkpoint"))
            .foreachBatch(side.to(sink))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    every = [pair for side in pairs.values() for rows in side.values() for pair in rows]
    assert sorted(every) == sorted((n % 5, n, n) for n in range(40))


@pytest.mark.parametrize("partitions", [1, 5])
def test_dedup(pond: mp.Pond, spark: SparkSession, partitions: int) -> None:
    name = f"d{partitions}"
    dedup = pond.dedup(name, key="k long", within="1 minute")
    operator = dedup.over(at="t", delay="1 hour")
    rows = spark.range(1000).select(
        (f.col("id") % 100).alias("k"),
        f.timestamp_seconds(f.col("id") / 100).alias("t"),
        f.lit("x").alias("word"),
    )
    passed = operator(rows.repartition(partitions), 0)
    assert passed.columns == ["k", "t", "word"]
    assert passed.count() == 100
    assert passed.agg(f.max(f.unix_timestamp("t"))).first()[0] == 0
    assert operator(rows, 1).count() == 0
    assert dedup.dropped() == 900 + 1000
