"""A contender of the NEXMark benchmark: Spark's own operators with state, on RocksDB with changelog checkpoints.

Append mode throughout: a row of answers is final. Each query is what Spark SQL says without a function of one's own, and
answers exactly. Other forms may be faster: that sessions are not merged before the shuffle, for one, is Spark's default.

- Q5: two aggregations in a row, the second by `window_time` of the first.
- Q7 and Q7-Session: `max_by(bid, price, k)`, which keeps bids of equal price; the query fails if k are not
  enough. Spark 4.2 is the first that can say it.
- Q8: a join of two streams by window and id; auctions of one seller in one window count once, by `dropDuplicates`. People
  register once, so that theirs need not be looked for.
- Q11 and Q11-Median: `session_window`, with `count` and `median`. Spark merges sessions that touch.
- Q12: windows of `current_timestamp()`, which Spark takes once for each micro-batch.
"""

from __future__ import annotations

import glob
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from millpond.bench.nexmark_load import Run, Workload
from millpond.bench.nexmark_stream import Collector, prepare, run_stream
from millpond.bench.window_container import UNCACHED_EVERY_S, drop_cached

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

SETTINGS = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    # One to two for each core is advised for queries with state. Each is a RocksDB to be committed in every micro-batch.
    "spark.sql.shuffle.partitions": str(os.cpu_count() or 1),
}
TIES_MAX = 8
"""Bids of one price that are the highest of a window, for which there is room."""
TIED, TIED_SINCE = ("q7", "q7-bidder", "q7-session", "q7-bidder-whole", "q7-session-whole"), (4, 2)
"""What needs them, and from which Spark on it has them."""


class SparkNative:
    """Spark SQL in streaming mode. With a budget, its RocksDB has no more memory, and no page cache for its files."""

    name = "spark-native"

    def __init__(self, spark: SparkSession, budget: int = 0) -> None:
        self._session = prepare(spark, SETTINGS | (bounded(budget) if budget else {}))
        self._bounded = bool(budget)
        self._version = tuple(int(part) for part in spark.version.split(".")[:2])

    def supports(self, query: str) -> bool:
        return query in BUILDERS and not (query in TIED and self._version < TIED_SINCE)

    def run(self, workload: Workload, query: str) -> Run:
        self._session.conf.set(
            "spark.sql.streaming.minBatchesToRetain", str(max(100, workload.work.files + 10))
        )
        parameters = workload.parameters(query) | {
            "delay": f"{-(-workload.delay_us(query) // 1_000)} milliseconds"
        }

        def build(streams: Mapping[str, DataFrame], collector: Collector) -> Sequence[DataStreamWriter]:
            answers = BUILDERS[query](streams, parameters)
            return [answers.writeStream.outputMode("append").foreachBatch(collector)]

        with self._uncached():
            done = run_stream(self._session, workload, query, build)
        # Each micro-batch ends with one: those of the timed and of the closing files.
        done.extras["checkpoints"] = len(done.extras["batch_ms"]) - workload.work.warm_files
        return done

    @contextmanager
    def _uncached(self) -> Iterator[None]:
        if not self._bounded:
            yield
            return
        jvm: Any = self._session.sparkContext._jvm  # noqa: SLF001 - Spark says nowhere else where its files are
        conf = self._session.sparkContext._jsc.sc().conf()  # noqa: SLF001
        local = jvm.org.apache.spark.util.Utils.getLocalDir(conf)
        over = threading.Event()

        def keep() -> None:
            while not over.wait(UNCACHED_EVERY_S):
                for stores in glob.glob(f"{glob.escape(local)}/**/StateStoreId*", recursive=True):
                    drop_cached(stores)

        keeping = threading.Thread(target=keep, daemon=True)
        keeping.start()
        try:
            yield
        finally:
            over.set()
            keeping.join()


def bounded(budget: int) -> dict[str, str]:
    rocksdb = "spark.sql.streaming.stateStore.rocksdb"
    return {f"{rocksdb}.boundedMemoryUsage": "true", f"{rocksdb}.maxMemoryUsageMB": str(budget >> 20)}


Parameters = Mapping[str, Any]
Builder = Callable[[Mapping[str, "DataFrame"], Parameters], "DataFrame"]


def _q5(streams: Mapping[str, DataFrame], of: Parameters) -> DataFrame:
    from pyspark.sql import functions as f

    counts = (
        _watermarked(streams["bids"], of)
        .groupBy(f.window("date_time", of["size"], of["slide"]), "auction")
        .agg(f.count("*").alias("bids"))
    )
    # A window is the only one that ends within a slide: the last instant of it tells it from all others.
    per_window = counts.groupBy(f.window(f.window_time("window"), of["slide"]).alias("last_slide"))
    tops = per_window.agg(
        f.first("window").alias("window"),
        f.max("bids").alias("most"),
        f.collect_list(f.struct("auction", "bids")).alias("counts"),
    )
    top = f.explode(f.filter("counts", lambda each: each["bids"] == f.col("most"))).alias("top")
    return _with_window(tops.select("window", top), "top.*")


def _highest(window: Callable[[Parameters], Column], keys: Sequence[str], *more: str) -> Builder:
    def build(streams: Mapping[str, DataFrame], of: Parameters) -> DataFrame:
        from pyspark.sql import functions as f

        bid = f"struct({', '.join(['auction', 'bidder', 'price', 'date_time', *more])})"
        highest = (
            _watermarked(streams["bids"], of)
            .groupBy(window(of).alias("window"), *keys)
            .agg(f.expr(f"max_by({bid}, price, {TIES_MAX})").alias("bids"))
        )
        enough = f"size(bids) < {TIES_MAX} OR bids[{TIES_MAX - 1}].price < bids[0].price"
        message = f"more than {TIES_MAX - 1} bids are the highest of one window"
        tied = f.expr(
            f"if({enough}, filter(bids, each -> each.price = bids[0].price), raise_error('{message}'))"
        )
        return _with_window(highest.select("window", f.explode(tied).alias("bid")), "bid.*")

    return build


def _q8(streams: Mapping[str, DataFrame], of: Parameters) -> DataFrame:
    from pyspark.sql import functions as f

    window = f.window("date_time", of["size"]).alias("window")
    registered = _watermarked(streams["persons"], of).select(window, "id", "name")
    opened = _watermarked(streams["auctions"], of).select(window, f.col("seller").alias("id"))
    joined = registered.join(opened.dropDuplicates(["window", "id"]), ["window", "id"])
    return _with_window(joined, "id", "name")


def _q11(aggregate: str, name: str) -> Builder:
    def build(streams: Mapping[str, DataFrame], of: Parameters) -> DataFrame:
        from pyspark.sql import functions as f

        sessions = (
            _watermarked(streams["bids"], of)
            .groupBy(f.session_window("date_time", of["gap"]).alias("window"), "bidder")
            .agg(f.expr(aggregate).alias(name))
        )
        return _with_window(sessions, "bidder", name)

    return build


def _q12(streams: Mapping[str, DataFrame], of: Parameters) -> DataFrame:
    from pyspark.sql import functions as f

    arrived = (
        streams["bids"].withColumn("arrival", f.current_timestamp()).withWatermark("arrival", "0 seconds")
    )
    counts = arrived.groupBy(f.window("arrival", of["size"]), "bidder").agg(f.count("*").alias("bids"))
    return _with_window(counts, "bidder", "bids")


def _watermarked(stream: DataFrame, of: Parameters) -> DataFrame:
    return stream.withWatermark("date_time", of["delay"])


def _with_window(rows: DataFrame, *columns: str) -> DataFrame:
    from pyspark.sql import functions as f

    return rows.select(
        f.col("window.start").alias("window_start"), f.col("window.end").alias("window_end"), *columns
    )


def _tumbling(of: Parameters) -> Column:
    from pyspark.sql import functions as f

    return f.window("date_time", of["size"])


def _session(of: Parameters) -> Column:
    from pyspark.sql import functions as f

    return f.session_window("date_time", of["gap"])


BUILDERS: dict[str, Builder] = {
    "q5": _q5,
    "q7": _highest(_tumbling, []),
    "q7-bidder": _highest(_tumbling, ["bidder"]),
    "q7-session": _highest(_session, ["bidder"]),
    "q7-bidder-whole": _highest(_tumbling, ["bidder"], "extra"),
    "q7-session-whole": _highest(_session, ["bidder"], "extra"),
    "q8": _q8,
    "q11": _q11("count(*)", "bids"),
    "q11-median": _q11("median(price)", "median"),
    "q12": _q12,
}
