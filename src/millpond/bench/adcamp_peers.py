"""The peers of the adcamp benchmark that need a set-up of their own: Redis, and Spark's own keyed state."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import redis
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PIPELINE = 10_000
START_S_MAX = 20.0


# Redis: a sorted set for each key, versions by time


def find_redis(progress: Callable[[str], None]) -> str | None:
    """The server's path; on Debian, root gets it installed. None, and a line that says so, where there is none."""
    found = shutil.which("redis-server")
    apt = shutil.which("apt-get")
    if found is None and apt is not None and os.geteuid() == 0:
        progress("installing redis-server (apt-get)")
        # RUNLEVEL=1: the package shall not start a server of its own.
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
        for arguments in (["update"], ["install", "-y", "--no-install-recommends", "redis-server"]):
            subprocess.run(  # noqa: S603 - constant arguments
                [apt, "-qq", *arguments], env=environment, capture_output=True, check=False
            )
        found = shutil.which("redis-server")
    if found is None:
        progress("redis: skipped, redis-server is not installed (Debian: apt-get install redis-server)")
    return found


@contextlib.contextmanager
def redis_server(path: str) -> Iterator[int]:
    """Runs a server on a free port of the loopback interface, in memory only. Gives the port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    options = {"--port": str(port), "--bind": "127.0.0.1", "--save": "", "--appendonly": "no"}
    with tempfile.TemporaryDirectory(prefix="millpond-redis-") as folder:
        command = [path, "--dir", folder, *(word for option in options.items() for word in option)]
        server = subprocess.Popen(  # noqa: S603 - a path found by which(), constant arguments
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            _await_ping(port)
            yield port
        finally:
            server.terminate()
            server.wait()


def _await_ping(port: int) -> None:
    deadline = time.monotonic() + START_S_MAX
    with redis.Redis(port=port) as client:
        while True:
            try:
                client.ping()
                return
            except redis.ConnectionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def load_redis(port: int, versions: pa.Table) -> None:
    """Puts versions (ad, ts, campaign) into sorted sets, all versions of a key by one command."""
    frame = versions.to_pandas().sort_values(["ad", "ts"], kind="stable")
    ads, times, campaigns = (frame[name].tolist() for name in ("ad", "ts", "campaign"))
    bounds = [*np.flatnonzero(np.diff(frame["ad"].to_numpy(), prepend=-1)).tolist(), len(ads)]
    with redis.Redis(port=port) as client:
        for first in range(0, len(bounds) - 1, PIPELINE):
            pipe = client.pipeline(transaction=False)
            for start, stop in zip(bounds[first:], bounds[first + 1 : first + PIPELINE + 1], strict=False):
                words: list[Any] = ["ZADD", ads[start]]
                for row in range(start, stop):
                    # A member is there once: the time makes it one of this version.
                    words += (times[row], f"{times[row]}:{campaigns[row]}")
                pipe.execute_command(*words)
            pipe.execute()


class RedisTask:
    """For `mapInArrow`: answers a partition's views from Redis, many in one pipeline."""

    def __init__(self, port: int) -> None:
        self._port = port

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with redis.Redis(port=self._port) as client:
            for batch in batches:
                ads, times = batch["ad"].to_pylist(), batch["ts"].to_pylist()
                answers: list[int | None] = []
                for start in range(0, len(ads), PIPELINE):
                    pipe = client.pipeline(transaction=False)
                    for row in range(start, min(start + PIPELINE, len(ads))):
                        pipe.execute_command("ZREVRANGEBYSCORE", ads[row], times[row], "-inf", "LIMIT", 0, 1)
                    answers += [
                        int(found[0].partition(b":")[2]) if found else None for found in pipe.execute()
                    ]
                yield batch.append_column("campaign", pa.array(answers, pa.int64()))


# Spark's own state for each key


class VersionsPerKey(StatefulProcessor):
    """Keeps the versions of its key in a list, and answers views from it. Rows without a view are versions."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._versions = handle.getListState("versions", "ts long, campaign long")

    def handleInputRows(  # noqa: N802 - Spark's name
        self,
        key: Any,
        rows: Iterator[pd.DataFrame] | Iterator[Row],
        timerValues: Any,  # noqa: N803 - Spark's name
    ) -> Iterator[pd.DataFrame]:
        for frame in rows:
            assert isinstance(frame, pd.DataFrame)
            are_views = frame["view"].notna()
            added = frame[~are_views]
            if len(added):
                self._versions.appendList(
                    list(zip(added["ts"].tolist(), added["campaign"].tolist(), strict=True))
                )
            asked = frame[are_views]
            if len(asked) == 0:
                continue
            known = sorted((int(ts), int(campaign)) for ts, campaign in self._versions.get())
            at = np.searchsorted([ts for ts, _ in known], asked["ts"].to_numpy(), side="right") - 1
            answers = [known[found][1] if found >= 0 else None for found in at.tolist()]
            yield pd.DataFrame(
                {"view": asked["view"].astype("int64"), "campaign": pd.array(answers, dtype="Int64")}
            )

    def close(self) -> None:
        pass


class TwsRun(NamedTuple):
    rows_per_s: float
    answers: pa.Table  # view, campaign


def run_tws(spark: SparkSession, versions: pa.Table, rounds: list[pa.Table]) -> TwsRun:
    """Loads versions (ad, ts, campaign) in the first epoch, answers views (view, ad, ts) in one epoch for each round.

    The first round warms up, the best of the others counts: its views by the duration of its whole epoch.
    """
    settings = {
        "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    }
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        with tempfile.TemporaryDirectory(prefix="millpond-tws-") as folder:
            return _run_tws(spark, versions, rounds, Path(folder))
    finally:
        for name, earlier in before.items():
            if earlier is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, earlier)


def _run_tws(spark: SparkSession, versions: pa.Table, rounds: list[pa.Table], folder: Path) -> TwsRun:
    schema = pa.schema([(name, pa.int64()) for name in ("view", "ad", "ts", "campaign")])
    rows, answers = folder / "rows", folder / "answers"
    rows.mkdir()
    for number, table in enumerate([versions, *rounds]):
        columns = [
            table[name] if name in table.column_names else pa.nulls(len(table), pa.int64())
            for name in schema.names
        ]
        file = rows / f"{number}.parquet"
        pq.write_table(pa.table(columns, schema=schema), file)
        os.utime(file, (number + 1, number + 1))  # the source takes the oldest first
    query = (
        spark.readStream.schema("view long, ad long, ts long, campaign long")
        .option("maxFilesPerTrigger", 1)
        .parquet(str(rows))
        .groupBy("ad")
        .transformWithStateInPandas(VersionsPerKey(), "view long, campaign long", "Append", "None")
        .writeStream.format("parquet")
        .option("path", str(answers))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    epochs = [epoch for epoch in query.recentProgress if epoch["numInputRows"]]
    best = max(
        epoch["numInputRows"] / (epoch["durationMs"]["triggerExecution"] / 1e3) for epoch in epochs[2:]
    )
    found = pq.read_table([str(file) for file in answers.glob("*.parquet")])
    return TwsRun(best, found)
