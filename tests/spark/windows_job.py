"""Windows in a process of their own: `windows_job.py ROOT`. Sessions of views, from files, until the files end.

While the sink writes what an epoch fired, and once right before Spark notes that it is done, the driver kills itself with SIGKILL.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow.parquet as pq
from jobs import die_once, is_due, start
from pyspark.sql import DataFrame

import millpond as mp
from millpond.apps.spark_session import spark_session

GAP, DELAY = 15, 40
DEATHS = {"during the sink's write": 1, "before the commit log": 2, "during the last write": -1}


def main(root: Path) -> None:
    (root / "out").mkdir(exist_ok=True)
    with (
        spark_session("windows-job", master="local[1]", compiled=False) as spark,
        mp.open(root / "pond", spark=spark, containers=2) as pond,
    ):

        def sink(fired: DataFrame, epoch: int) -> None:
            target, rows = root / "out" / f"{epoch}.parquet", fired.toArrow()
            place = "during the sink's write" if epoch >= 0 else "during the last write"
            at = epoch if epoch >= 0 else -1
            if is_due(root, place, at, DEATHS):
                pq.write_table(rows[: len(rows) // 2], target)
                die_once(root, place, at, DEATHS)
            pq.write_table(rows, target)
            die_once(root, "before the commit log", at, DEATHS)

        window = pond.window(
            "sessions",
            key="ad long",
            window=mp.session(GAP),
            aggregate={"views": mp.count(), "all": mp.collect("ts")},
        )
        views = window.over(key="ad", at="ts", value="ts", delay=DELAY, name="views")
        start(spark, root, "views", "ad long, ts long", views.to(sink)).awaitTermination()
        views.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
