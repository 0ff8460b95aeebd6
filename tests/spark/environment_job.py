"""The README's example on Spark, without an active environment: `environment_job.py ROOT PYTHON`.

PYTHON is the `python3` of PATH. It has no millpond.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

import millpond as mp
from millpond.errors import WorkersUnfit


def main(root: Path, python: str) -> None:
    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    assert spark.sparkContext.pythonExec == "python3"
    spark.sparkContext.pythonExec = python  # as PYSPARK_PYTHON would have it
    try:
        mp.open(root / "pond", spark=spark)
    except WorkersUnfit as error:
        sys.stdout.write(f"{error}\n")
    assert not os.path.exists(root / "pond")
    spark.sparkContext.pythonExec = "python3"
    with mp.open(root / "pond", spark=spark) as pond:
        campaigns = pond.state("campaigns", key="string", value="string")
        feed = campaigns.update(key="ad", at="ts", value="campaign", name="feed")
        feed(pa.table({"ad": ["shoe", "shoe"], "ts": [10, 50], "campaign": ["spring", "summer"]}), 0)
        spark.createDataFrame([("shoe", 30), ("shoe", 50)], "ad string, ts long").write.parquet(
            f"{root}/views"
        )
        views = spark.readStream.schema("ad string, ts long").parquet(f"{root}/views")

        def sink(answers: DataFrame, epoch: int) -> None:
            sys.stdout.write(f"{[tuple(row) for row in answers.collect()]}\n")

        asking = campaigns.fetch(key="ad", at="ts", into="campaign", name="views").to(sink)
        query = views.writeStream.foreachBatch(asking).option("checkpointLocation", f"{root}/checkpoint")
        query.trigger(availableNow=True).start().awaitTermination()
        read = spark.read.format("millpond").option("state", "campaigns").load()
        sys.stdout.write(f"{asking.pending().rows} waits, {read.count()} read\n")
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
