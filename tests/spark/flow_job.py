"""A flow in a process of its own: `flow_job.py ROOT`. Views ask what campaign an ad had, and are counted by it.

While the sink writes epoch 1, when both States have it already, the driver kills itself with SIGKILL, once.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow.parquet as pq
from jobs import die_once, is_due
from pyspark.sql import DataFrame

import millpond as mp
from millpond.apps.spark_session import spark_session

DEATHS = {"during the sink's write": 1}


def main(root: Path) -> None:
    (root / "out").mkdir(exist_ok=True)
    with (
        spark_session("flow-job", master="local[1]", compiled=False) as spark,
        mp.open(root / "pond", spark=spark, containers=1) as pond,
    ):

        def source(name: str, schema: str) -> DataFrame:
            return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(root / name))

        def sink(answers: DataFrame, epoch: int) -> None:
            target = root / "out" / f"{epoch}.parquet"
            found = answers.toArrow()
            if is_due(root, "during the sink's write", epoch, DEATHS):
                pq.write_table(found[:3], target)
                die_once(root, "during the sink's write", epoch, DEATHS)
            pq.write_table(found, target)

        campaigns = pond.state("campaigns", key="long", value="long")
        shown = pond.state("shown", key="long", value="views long", update=mp.add())
        flow = pond.flow("flow")
        feed = campaigns.update(key="ad", at="ts", value="campaign", delay=50, name="feed")
        flow.source(source("updates", "ad long, ts long, campaign long")).into(feed)
        # Some ask for a time that U passes with the next epoch's updates, or only with the feed's end.
        views = flow.source(source("views", "ad long, ts long")).map(
            lambda frame: frame.selectExpr("ad", "ts + 40 AS ts")
        )
        answered = views.ask(campaigns.fetch(key="ad", at="ts", into="campaign", name="views")).to(sink)
        answered.map(lambda frame: frame.where("campaign IS NOT NULL").selectExpr("*", "1L AS views")).into(
            shown.update(key="campaign", at="ts", value="views", delay=1_000, late="error", name="views")
        )
        flow.start(checkpoint=str(root / "checkpoint"), availableNow=True).awaitTermination()
        waiting = flow.fetchers[0].pending().rows
        campaigns.finish("feed")
        [left] = flow.drain()
        shown.finish("views")
        sys.stdout.write(f"drained {waiting}, waiting {left.rows}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
