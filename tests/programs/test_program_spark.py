"""Calls on Spark DataFrames: rows of all tasks are calls, a stream goes on from its checkpoint, a replay gives the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from test_program_kill import KILLS, SLICES, Everybody
from test_program_kill import rows as ratings_of
from test_program_plain import Recommender, entries

import millpond as mp
from millpond.programs.plain import state_of

RATINGS = pa.schema({"user": pa.int64(), "item": pa.int64(), "rating": pa.float64()})


def test_calls_by_a_stream(pond: mp.Pond, spark: SparkSession, tmp_path: Path) -> None:
    rec = pond.program("rec", Recommender)
    plain = mp.plain(Recommender, slices=len(pond.placement()))
    # One user in each partition: whatever the order of partitions, what is left is the same.
    data = [(user, (7 * n + user) % 11, float(n % 5)) for user in range(6) for n in range(10)]
    source = str(tmp_path / "data")
    spark.createDataFrame(data, "user long, item long, rating double").repartition(6, "user").write.parquet(
        source
    )
    query = (
        spark.readStream.schema("user long, item long, rating double")
        .option("maxFilesPerTrigger", 2)
        .parquet(source)
        .writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
        .foreachBatch(rec.call("add_rating", name="feed"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    for call in data:
        plain.add_rating(*call)
    assert entries(rec) == state_of(plain)
    given: dict[int, list[Any]] = {}

    def sink(frame: DataFrame, epoch: int) -> None:
        given[epoch] = sorted((row["user"], list(row["items"])) for row in frame.collect())

    ask = rec.call("get_rec", into="items", name="asked").to(sink)
    questions = spark.range(8).selectExpr("id as user", "'why' as note").repartition(3)
    ask(questions, 0)
    ask(questions, 0)
    assert given[0] == [(user, plain.get_rec(user)) for user in range(8)]
    answered = rec.call("get_rec", into="items", name="asked")(questions, 0)
    assert answered.columns == ["user", "note", "items"]
    assert answered.filter("note = 'why'").count() == 8


def test_a_query_that_failed_goes_on_from_its_checkpoint(
    pond: mp.Pond, spark: SparkSession, tmp_path: Path
) -> None:
    """What failed comes again with the same number, in other partitions: a batch that was committed counts once."""
    rec = pond.program("again", Recommender)
    plain = mp.plain(Recommender, slices=len(pond.placement()))
    source, checkpoint = tmp_path / "data", str(tmp_path / "checkpoint")
    given: dict[int, list[list[Any]]] = {}
    feed = rec.call("add_rating", name="feed")
    asked = rec.call("get_rec", into="items", name="asked")
    failing_at = 1

    def both(frame: DataFrame, epoch: int) -> None:
        # Another number of partitions each time: that is Spark's business.
        rows = frame.repartition(1 + len(given.get(epoch, [])) * 2, "item")
        feed(rows, epoch)
        answers = asked(rows, epoch)
        given.setdefault(epoch, []).append(
            sorted((row["user"], row["item"], list(row["items"])) for row in answers.collect())
        )
        if epoch == failing_at and len(given[epoch]) == 1:
            raise ValueError("the sink is away")

    def run() -> None:
        query = (
            spark.readStream.schema("user long, item long, rating double")
            .option("maxFilesPerTrigger", 1)
            .parquet(str(source))
            .writeStream.option("checkpointLocation", checkpoint)
            .foreachBatch(both)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    for number in range(3):
        data = [(user, (7 * n + user + number) % 11, float(n % 5)) for user in range(6) for n in range(5)]
        frame = spark.createDataFrame(data, "user long, item long, rating double")
        frame.coalesce(1).write.mode("append").parquet(str(source))
        for call in data:
            plain.add_rating(*call)
    with pytest.raises(StreamingQueryException, match="the sink is away"):
        run()
    assert sorted(given) == [0, 1]
    run()
    assert sorted(given) == [0, 1, 2]
    assert [len(of) for _, of in sorted(given.items())] == [1, 2, 1]
    assert given[1][0] == given[1][1]
    assert entries(rec) == state_of(plain)
    assert rec.progress().seen == 6


class Streaming(Everybody):
    """The same by `foreachBatch`: a file for each micro-batch."""

    def __init__(self, pond: mp.Pond, token: str, spark: SparkSession, folder: Path) -> None:
        self._spark = spark
        self._folder = folder
        super().__init__(pond, token)

    def _stream(self) -> None:
        source = self._folder / "data"
        source.mkdir()
        query = (
            self._spark.readStream.schema("user long, item long, rating double")
            .parquet(str(source))
            .writeStream.option("checkpointLocation", str(self._folder / "checkpoint"))
            .foreachBatch(self.rec.call("add_rating", name="feed"))
            .start()
        )
        try:
            while self._goes_on():
                file = self._folder / "next"
                pq.write_table(pa.Table.from_pylist(ratings_of(self.epochs), RATINGS), file)
                file.rename(source / f"{self.epochs}.parquet")
                query.processAllAvailable()
                self.epochs += 1
        finally:
            query.stop()


@pytest.mark.long
def test_containers_killed_while_a_stream_and_direct_calls_go_on(spark: SparkSession, tmp_path: Path) -> None:
    with mp.open(tmp_path / "pond", containers=2, slices=SLICES, threads=1, spark=spark) as pond:
        all_calls = Streaming(pond, (tmp_path / "pond" / "token").read_text(), spark, tmp_path)
        all_calls.run()
        all_calls.check()
        assert pond.metrics()["coordinator"]["container_restarts"] == KILLS
