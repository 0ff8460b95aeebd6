"""How long a micro-batch takes at a fifth of the update rate, and how long one row takes without Spark.

Two streaming queries, one after the other, each with rows for `BATCH_MS` of a stream at `RATE` rows a second in every
micro-batch. What counts is Spark's own `triggerExecution`: from the offsets of a batch to its commit log.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

import millpond as mp
from millpond.bench.frames import noop

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RATE = 300_000
BATCH_MS = 400
WARM_UPS = 10
BATCHES = 25
ONE_ROW_CALLS = 1_000
TIMEOUT_S = 120.0


class Latency(NamedTuple):
    rows_per_s: float
    p50_ms: float
    p99_ms: float

    def facts(self, note: str) -> dict[str, Any]:
        return {
            "rows": int(RATE * BATCH_MS / 1000),
            "batch_p50_ms": self.p50_ms,
            "batch_p99_ms": self.p99_ms,
            "note": note,
        }


def measure(spark: SparkSession, pond: mp.Pond, keys: int, folder: str) -> dict[str, Latency]:
    """Updates of a State of their own, then views of it, which are behind the updates and so are all answered."""
    state = pond.state("latency", key="long", value="long")
    feed = state.update(key="ad", at="ts", value="campaign", name="feed")
    views = state.fetch(key="ad", at="ts", into="campaign", delay=0, name="views").to(
        lambda frame, epoch: noop(frame)
    )
    ad = f"pmod(xxhash64(value, 1), {keys}) AS ad"
    update = _stream(spark).selectExpr(ad, "value AS ts", "value % 1000 AS campaign")
    asked = _stream(spark).selectExpr(ad, "value AS ts")
    return {
        "millpond-update-stream": _run(update, feed, os.path.join(folder, "latency-feed")),
        "millpond-fetch-stream": _run(asked, views, os.path.join(folder, "latency-views")),
    }


def one_row(state: mp.State, keys: int, newest: int) -> tuple[float, float]:
    """p50 and p99, in milliseconds, of `now` on one row over Flight."""
    chance = np.random.default_rng(1)
    fetch = state.fetch(key="ad", at="ts", into="campaign")
    seconds = []
    for _ in range(ONE_ROW_CALLS):
        row = pa.table({"ad": chance.integers(0, keys, 1), "ts": chance.integers(0, newest, 1)})
        began = time.perf_counter()
        fetch.now(row)
        seconds.append(time.perf_counter() - began)
    return float(np.percentile(seconds, 50)) * 1e3, float(np.percentile(seconds, 99)) * 1e3


def _stream(spark: SparkSession) -> DataFrame:
    options = {"rowsPerBatch": int(RATE * BATCH_MS / 1000), "numPartitions": os.cpu_count() or 1}
    return spark.readStream.format("rate-micro-batch").options(**options).load()


def _run(frame: DataFrame, operator: Callable[[DataFrame, int], Any], checkpoint: str) -> Latency:
    query = (
        frame.writeStream.foreachBatch(operator)
        .option("checkpointLocation", checkpoint)
        .trigger(processingTime=f"{BATCH_MS} milliseconds")
        .start()
    )
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            error = query.exception()
            if error is not None:
                raise error
            last = query.lastProgress
            if last is not None and last["batchId"] >= WARM_UPS + BATCHES:
                break
            time.sleep(0.1)
        done = [epoch for epoch in query.recentProgress if epoch["batchId"] >= WARM_UPS]
    finally:
        query.stop()
    taken = [epoch["durationMs"]["triggerExecution"] for epoch in done]
    # A batch that takes longer than its rows last holds the stream up.
    seconds = sum(max(ms, BATCH_MS) for ms in taken) / 1000
    rows = sum(epoch["numInputRows"] for epoch in done)
    return Latency(rows / seconds, float(np.percentile(taken, 50)), float(np.percentile(taken, 99)))
