"""A streaming job as a user would write it, in a process of its own: `streaming_job.py ROOT`.

One query updates, another one asks, both from files. In each of its first lives the driver kills itself with SIGKILL
while both are at a place of `DEATHS`; files under ROOT remember which it has died at.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

from jobs import die, start
from pyspark.sql import DataFrame
from pyspark.sql.streaming import StreamingQuery

import millpond as mp
from millpond.apps.spark_session import spark_session
from millpond.wire.epochs import CommitEpoch

# Where the updates stand, and where the answers do, each with its epoch.
DEATHS = [
    (("after stage", 1), ("during the sink's write", 0)),
    (("after commit", 2), ("before the commit log", 1)),
]


class Life:
    """One life of the driver: the updates stop where they are to, and the answers where the process dies."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._number = len(list(root.glob("died *")))
        self._stand, self._fall = DEATHS[self._number] if self._number < len(DEATHS) else (None, None)
        self._standing = threading.Event()

    def stands_at(self, place: str, epoch: int) -> None:
        if self._stand == (place, epoch):
            self._standing.set()
            threading.Event().wait()

    def falls_at(self, place: str, epoch: int) -> bool:
        return self._fall == (place, epoch)

    def end(self) -> None:
        die(self._root, str(self._number))

    def wait_until_it_stands(self, updates: StreamingQuery) -> None:
        """In the last life, until all is updated."""
        while updates.isActive and not self._standing.wait(0.1):
            pass
        if not self._standing.is_set():
            updates.awaitTermination()


def main(root: Path) -> None:
    life = Life(root)
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
            life.stands_at("after stage", message.turn.epoch)
            answer = call(message)
            life.stands_at("after commit", message.turn.epoch)
            return answer

        feed._client.call = watched_call  # type: ignore[method-assign]

        def sink(answers: DataFrame, epoch: int) -> None:
            target = str(root / "out" / f"epoch={epoch}")
            if life.falls_at("during the sink's write", epoch):
                answers.limit(3).write.mode("overwrite").parquet(target)
                life.end()
            answers.write.mode("overwrite").parquet(target)
            if life.falls_at("before the commit log", epoch):
                life.end()

        life.wait_until_it_stands(start(spark, root, "updates", "ad long, ts long, campaign long", feed))
        views = campaigns.fetch(key="ad", at="ts", into="campaign", name="views").to(sink)
        start(spark, root, "views", "ad long, ts long", views).awaitTermination()
        campaigns.finish("feed")
        start(spark, root, "views", "ad long, ts long", views).awaitTermination()
        sys.stdout.write(f"waiting {views.pending().rows}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
