"""A streaming job as a user would write it, in a process of its own: `streaming_job.py ROOT`.

Updates first, then views, from files. At each place of `DEATHS`, in an epoch of its own, the driver kills itself
with SIGKILL, if it has not died there before: a file under ROOT remembers.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

import millpond as mp
from millpond.apps.spark_session import spark_session
from millpond.wire.epochs import CommitEpoch

DEATHS = {"after stage": 1, "after commit": 2, "before the commit log": 3, "during the sink's write": 1}


def is_due(root: Path, place: str, epoch: int, deaths: dict[str, int] = DEATHS) -> bool:
    return deaths[place] == epoch and not (root / f"died {place}").exists()


def die_once(root: Path, place: str, epoch: int, deaths: dict[str, int] = DEATHS) -> None:
    if is_due(root, place, epoch, deaths):
        (root / f"died {place}").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main(root: Path) -> None:
    with (
        spark_session("streaming-job", master="local[2]", compiled=False) as spark,
        mp.open(root / "pond", spark=spark, containers=2) as pond,
    ):
        campaigns = pond.state("campaigns", key="long", value="long")
        feed = campaigns.update(key="ad", at="ts", value="campaign", delay=50, name="feed")
        call = feed._client.call

        def watched_call(message: Any) -> Any:
            if not isinstance(message, CommitEpoch):
                return call(message)
            die_once(root, "after stage", message.turn.epoch)
            answer = call(message)
            die_once(root, "after commit", message.turn.epoch)
            return answer

        feed._client.call = watched_call  # type: ignore[method-assign]

        def update(frame: DataFrame, epoch: int) -> None:
            feed(frame, epoch)
            die_once(root, "before the commit log", epoch)

        def sink(answers: DataFrame, epoch: int) -> None:
            target = str(root / "out" / f"epoch={epoch}")
            if is_due(root, "during the sink's write", epoch):
                answers.limit(3).write.mode("overwrite").parquet(target)
                die_once(root, "during the sink's write", epoch)
            answers.write.mode("overwrite").parquet(target)

        run(spark, root, "updates", "ad long, ts long, campaign long", update)
        views = campaigns.fetch(key="ad", at="ts", into="campaign", name="views").to(sink)
        run(spark, root, "views", "ad long, ts long", views)
        campaigns.finish("feed")
        run(spark, root, "views", "ad long, ts long", views)
        sys.stdout.write(f"waiting {views.pending().rows}\n")


def run(
    spark: SparkSession, root: Path, name: str, schema: str, batch: Callable[[DataFrame, int], Any]
) -> None:
    (
        spark.readStream.schema(schema)
        .option("maxFilesPerTrigger", 1)
        .parquet(str(root / name))
        .writeStream.foreachBatch(batch)
        .option("checkpointLocation", str(root / f"checkpoint-{name}"))
        .trigger(availableNow=True)
        .start()
        .awaitTermination()
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
