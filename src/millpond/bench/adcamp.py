"""Views answered as of their own time through Spark: a pond beside Redis, Spark's own state, and asking nobody.

The same views, keys and versions for all, in one Spark application; what a system gets fewer of, its result says.
`rows_per_s` are views per second from `spark.range` through the system into Spark's noop sink, the state loaded before:
all systems warm up together, then run in turns, and each one's best run counts. `spark-identity` is the same query with
a function that adds a column and asks nobody: as fast as Spark moves rows through Python. `millpond-update` are
versions per second into the pond, durable, by epochs of the Update operator. Answers are compared with DuckDB's.
`flink`, where asked for, is Flink SQL's event-time temporal join, a program of its own without Spark.
`rows_per_cpu_s` counts the CPU seconds of all processes that take part, which others on the machine disturb less.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

import millpond as mp
from millpond.apps.spark_session import SETTINGS, spark_session
from millpond.bench import adcamp_flink, adcamp_latency, flink_environment
from millpond.bench.adcamp_peers import RedisTask, TwsRun, find_redis, load_redis, redis_server, run_tws
from millpond.bench.answers import compare, expected
from millpond.bench.cpu import cpu_seconds
from millpond.bench.frames import AddColumn, noop

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CAMPAIGNS = 1_000
BATCH_ROWS = int(SETTINGS["spark.sql.execution.arrow.maxRecordsPerBatch"])
WARM_UPS = 3  # Spark compiles its own code over the first runs
ROUNDS = 3


class Work(NamedTuple):
    """How much of everything. Redis, Flink and Spark's own state get fewer views, so that the run ends; the last fewer keys too."""

    keys: int = 1_000_000
    versions: int = 5_000_000
    views: int = 4_000_000
    epochs: int = 5
    checked: int = 100_000
    redis_views: int = 200_000
    tws_keys: int = 10_000
    tws_views: int = 40_000
    flink_views: int = 250_000

    @property
    def tws_versions(self) -> int:
        return self.tws_keys * (self.versions // self.keys)


FULL = Work()
QUICK = Work(
    keys=100_000,
    versions=500_000,
    views=400_000,
    redis_views=100_000,
    tws_keys=2_000,
    tws_views=8_000,
    flink_views=100_000,
)


def versions_of(spark: SparkSession, keys: int, first: int, stop: int) -> DataFrame:
    """Versions in time order, no two at one time."""
    return spark.range(first, stop).selectExpr(
        f"pmod(xxhash64(id, 1), {keys}) AS ad", "id AS ts", f"pmod(xxhash64(id, 2), {CAMPAIGNS}) AS campaign"
    )


def views_of(spark: SparkSession, keys: int, versions: int, first: int, stop: int) -> DataFrame:
    """Views of random keys at random times."""
    return spark.range(first, stop).selectExpr(
        "id AS view", f"pmod(xxhash64(id, 3), {keys}) AS ad", f"pmod(xxhash64(id, 4), {versions}) AS ts"
    )


def named(frame: DataFrame) -> DataFrame:
    """The same rows with strings for ads and campaigns."""
    columns = {"ad": "concat('ad-', ad) AS ad", "campaign": "concat('campaign-', campaign) AS campaign"}
    return frame.selectExpr(*(columns.get(name, name) for name in frame.columns))


def run(
    quick: bool, progress: Callable[[str], None], work: Work | None = None, flink: bool = False
) -> list[dict[str, Any]]:
    """Measure them all, Flink only where asked for. Raises where an answer differs from DuckDB's."""
    work = work or (QUICK if quick else FULL)
    flink_python = flink_environment.prepare(progress) if flink else None
    progress(f"{work.views:,} views of {work.keys:,} keys with {work.versions:,} versions")
    with (
        spark_session("millpond bench adcamp") as spark,
        tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder,
        mp.open(os.path.join(folder, "pond"), spark=spark) as pond,
    ):
        bench = _Bench(spark, pond, work, progress)
        bench.update()
        bench.fetch()
        bench.latency(folder)
        bench.redis()
        bench.tws()
        if flink_python is not None:
            bench.flink(flink_python)
        return bench.results()


class _Bench:
    def __init__(
        self, spark: SparkSession, pond: mp.Pond, work: Work, progress: Callable[[str], None]
    ) -> None:
        self._spark = spark
        self._pond = pond
        self._work = work
        self._progress = progress
        self._longs = pond.state("campaigns", key="long", value="long")
        self._strings = pond.state("named_campaigns", key="string", value="string")
        self._rates: dict[str, float] = {}
        self._cpu_rates: dict[str, float] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._all_views = views_of(spark, work.keys, work.versions, 0, work.views)

    def update(self) -> None:
        """Loads both states through the Update operator, and times the epochs of the one with long keys."""
        self._progress("loading the pond")
        step = self._work.versions // self._work.epochs
        seconds = [
            self._load(self._longs, epoch, step, as_strings=False) for epoch in range(self._work.epochs)
        ]
        for epoch in range(self._work.epochs):
            self._load(self._strings, epoch, step, as_strings=True)
        for state in (self._longs, self._strings):
            state.finish("feed")
        self._rates["millpond-update"] = step / min(seconds[1:])
        self._facts["millpond-update"] = {
            "rows": step,
            "note": f"versions per second, durable when the epoch returns; the best of {self._work.epochs} epochs of"
            f" {step:,} rows, the first left out",
        }

    def _load(self, state: mp.State, epoch: int, step: int, as_strings: bool) -> float:
        """Commits an epoch; gives the seconds it took."""
        frame = versions_of(self._spark, self._work.keys, epoch * step, (epoch + 1) * step)
        rows = named(frame) if as_strings else frame
        feed = state.update(key="ad", at="ts", value="campaign", name="feed")
        return timed(lambda: feed(rows, epoch))

    def fetch(self) -> None:
        """The four systems that take all views."""
        views, names = self._all_views, named(self._all_views)
        frames = {
            "spark-identity": views.mapInArrow(
                AddColumn("campaign", "ts"), "view long, ad long, ts long, campaign long"
            ),
            "millpond": self._longs.fetch(key="ad", at="ts", into="campaign").now(views),
            "spark-identity-strings": names.mapInArrow(
                AddColumn("campaign", "ad"), "view long, ad string, ts long, campaign string"
            ),
            "millpond-strings": self._strings.fetch(key="ad", at="ts", into="campaign").now(names),
        }
        self._check("millpond", frames["millpond"])
        self._check("millpond-strings", frames["millpond-strings"], named_campaigns=True)
        for turn in range(WARM_UPS + ROUNDS):
            warming = turn < WARM_UPS
            self._progress("warming up" if warming else f"round {turn - WARM_UPS + 1} of {ROUNDS}")
            for system, frame in frames.items():
                self._run(system, frame, self._work.views, counts=not warming)
        checked = f"{self._work.checked:,} answers equal to DuckDB's"
        self._facts["spark-identity"] = {"note": "the same query, asking nobody"}
        self._facts["spark-identity-strings"] = {"note": "the same query with strings, asking nobody"}
        self._facts["millpond"] = {"note": checked}
        self._facts["millpond-strings"] = {
            "note": checked,
            "vs_identity_strings": self._rates["millpond-strings"] / self._rates["spark-identity-strings"],
        }

    def latency(self, folder: str) -> None:
        self._progress(f"timing micro-batches at {adcamp_latency.RATE:,} rows a second, and single rows")
        found = adcamp_latency.measure(self._spark, self._pond, self._work.keys, folder)
        told = f"micro-batches of {adcamp_latency.BATCH_MS} ms of a stream of {adcamp_latency.RATE:,} rows a second"
        for system, latency in found.items():
            self._rates[system] = latency.rows_per_s
            self._facts[system] = latency.facts(told)
        p50, p99 = adcamp_latency.one_row(self._longs, self._work.keys, self._work.versions)
        self._facts["millpond"] |= {"one_row_p50_ms": p50, "one_row_p99_ms": p99}

    def redis(self) -> None:
        path = find_redis(self._progress)
        if path is None:
            return
        work = self._work
        with redis_server(path) as port:
            self._progress("loading Redis")
            load_redis(port, versions_of(self._spark, work.keys, 0, work.versions).toArrow())
            views = views_of(self._spark, work.keys, work.versions, 0, work.redis_views)
            frame = views.mapInArrow(RedisTask(port), "view long, ad long, ts long, campaign long")
            self._check("redis", frame)
            self._progress("asking Redis")
            for turn in range(1 + ROUNDS):
                self._run("redis", frame, work.redis_views, counts=turn > 0)
        self._facts["redis"] = {
            "rows": work.redis_views,
            "note": f"ZREVRANGEBYSCORE on a sorted set per key, pipelined from the same workers, {work.redis_views:,} of"
            f" the views; {work.checked:,} answers equal to DuckDB's",
        }

    def tws(self) -> None:
        self._progress("asking Spark's own state (transformWithStateInPandas on RocksDB)")
        work = self._work
        versions = versions_of(self._spark, work.tws_keys, 0, work.tws_versions).toArrow()
        asked = views_of(
            self._spark, work.tws_keys, work.tws_versions, 0, work.tws_views * (1 + ROUNDS)
        ).toArrow()
        rounds = [asked.slice(turn * work.tws_views, work.tws_views) for turn in range(1 + ROUNDS)]
        done: TwsRun = run_tws(self._spark, versions, rounds)
        compare("spark-tws", done.answers, expected(versions, asked))
        self._rates["spark-tws"] = done.rows_per_s
        self._facts["spark-tws"] = {
            "rows": work.tws_views,
            "keys": work.tws_keys,
            "versions": work.tws_versions,
            "note": f"transformWithStateInPandas, a list of versions per key, RocksDB with changelog checkpoints;"
            f" epochs of {work.tws_views:,} views of {work.tws_keys:,} keys, all answers equal to DuckDB's",
        }

    def flink(self, python: Path) -> None:
        self._progress("asking Flink (a temporal join on RocksDB)")
        work = self._work
        versions = versions_of(self._spark, work.keys, 0, work.versions).toArrow()
        asked = views_of(self._spark, work.keys, work.versions, 0, work.flink_views * (1 + ROUNDS)).toArrow()
        done = adcamp_flink.run_flink(python, versions, asked, 1 + ROUNDS, BATCH_ROWS)
        compare("flink", done.answers, expected(versions, asked))
        self._rates["flink"] = done.rows_per_s
        self._cpu_rates["flink"] = done.rows_per_cpu_s
        self._facts["flink"] = {
            "rows": work.flink_views,
            "note": f"Flink 2.3 SQL, a temporal join FOR SYSTEM_TIME AS OF on RocksDB, from CSV files into CSV files, its"
            f" versions loaded before; rounds of {work.flink_views:,} of the views in time order, a watermark after each"
            f" {BATCH_ROWS:,}, no checkpoints; all answers equal to DuckDB's",
        }

    def results(self) -> list[dict[str, Any]]:
        work = self._work
        order = (
            *("spark-identity", "millpond", "millpond-strings", "spark-tws", "flink", "redis"),
            *("spark-identity-strings", "millpond-update", "millpond-update-stream", "millpond-fetch-stream"),
        )
        found = []
        for system in (system for system in order if system in self._rates):
            result: dict[str, Any] = {
                "system": system,
                "rows_per_s": self._rates[system],
                "threads": os.cpu_count() or 1,
                "rows": work.views,
                "keys": work.keys,
                "versions": work.versions,
                "batch_rows": BATCH_ROWS,
            }
            if not system.startswith(("millpond-update", "millpond-fetch")):
                result["vs_identity"] = self._rates[system] / self._rates["spark-identity"]
            if system in self._cpu_rates:
                result["rows_per_cpu_s"] = self._cpu_rates[system]
                result["per_cpu_s_vs_identity"] = self._cpu_rates[system] / self._cpu_rates["spark-identity"]
            found.append({**result, **self._facts[system]})
        return found

    def _run(self, system: str, frame: DataFrame, rows: int, counts: bool) -> None:
        cpu = cpu_seconds()
        seconds = timed(lambda: noop(frame))
        used = cpu_seconds() - cpu
        if counts:
            self._rates[system] = max(self._rates.get(system, 0.0), rows / seconds)
            if used > 0:
                self._cpu_rates[system] = max(self._cpu_rates.get(system, 0.0), rows / used)

    def _check(self, system: str, answered: DataFrame, named_campaigns: bool = False) -> None:
        """The first views' answers beside DuckDB's."""
        work = self._work
        self._progress(f"comparing answers of {system}")
        versions = versions_of(self._spark, work.keys, 0, work.versions).toArrow()
        asked = self._all_views.where(f"view < {work.checked}").toArrow()
        wanted = expected(versions, asked)
        if named_campaigns:
            names = pc.binary_join_element_wise("campaign-", wanted["campaign"].cast(pa.string()), "")
            wanted = wanted.set_column(1, "campaign", names)
        compare(system, answered.where(f"view < {work.checked}").select("view", "campaign").toArrow(), wanted)


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
