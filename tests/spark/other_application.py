"""A Spark application of its own that joins a pond: `other_application.py ADDRESS TOKEN_FILE UPDATER KEY`."""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import SparkSession

import millpond as mp
from millpond.apps.spark_session import spark_session


def main(address: str, token_file: str, updater: str, key: str) -> None:
    with (
        spark_session(updater, master="local[1]", memory="512m", compiled=False) as spark,
        mp.connect(address, token=Path(token_file).read_text(), spark=spark) as pond,
    ):
        update_shared(pond, spark, updater, int(key))


def update_shared(pond: mp.Pond, spark: SparkSession, updater: str, key: int) -> None:
    state = pond.state("shared")
    feed = state.update(key="k", at="t", value="v", name=updater)
    for epoch in range(3):
        rows = [(key, 10 * epoch + step, 100 * key + epoch) for step in range(10)]
        feed(spark.createDataFrame(rows, "k long, t long, v long"), epoch)
    state.finish(updater)


if __name__ == "__main__":
    main(*sys.argv[1:])
