"""Advertising campaigns (Nova, section 3.5): which campaign did an ad belong to when it was viewed?

One stream moves ads between campaigns, another views them: two streaming queries of one Spark application that share
one State. Rows of both come out of order. A view is answered as soon as the campaigns of its time are final, and waits
until then. At the end every answer is compared with DuckDB's `ASOF JOIN` over the same rows.
"""

from __future__ import annotations

import math
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

import millpond as mp
from millpond.apps.spark_session import spark_session
from millpond.errors import BadOption, MillpondError
from millpond.times import MICROS
from millpond.wire.questions import Pending

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

SECONDS, RATE, KEYS = 30, 20_000, 100_000
RATE_MAX = MICROS  # above it two updates would share a microsecond, and neither would come after the other
CAMPAIGNS = 1_000
DISORDER_S = 1
DELAY = f"{DISORDER_S} seconds"
START_US = 1_767_225_600 * MICROS  # event time begins at 2026-01-01T00:00:00Z
RECENT_S = 5.0
STALLED_S = 60.0
LINE_EVERY_S = 2.0
SCREEN_EVERY_S = 0.25


def run(
    seconds: int = SECONDS,
    rate: int = RATE,
    keys: int = KEYS,
    master: str = "local[*]",
    hosting: str = "embedded",
    containers: int = 1,
    backups: int = 0,
) -> bool:
    """Both streams at `rate` rows a second for so long; True if every view was answered once, and rightly.

    Spark runs at `master`, and the pond's containers where `hosting` says: while they run, somebody may kill, move and
    scale them from another terminal.
    """
    for option, value, least, most in (
        ("seconds", seconds, 1, 86_400),
        ("rate", rate, 1, RATE_MAX),
        ("keys", keys, 1, 1 << 40),
        ("containers", containers, 1, 9_999),
        ("backups", backups, 0, 16),
    ):
        if not least <= value <= most:
            raise BadOption(f"--{option} {value} is not within {least} and {most:,}", option=f"--{option}")
    if hosting not in ("embedded", "spark"):
        raise BadOption(f"--hosting {hosting} is not embedded or spark", option="--hosting")
    out = Console(highlight=False, soft_wrap=True)
    began = time.perf_counter()
    rows = seconds * rate
    with tempfile.TemporaryDirectory(prefix="millpond-adcamp-") as folder:
        out.print("starting Spark and a pond (the first time, kernels are compiled) ...")
        root, sizes = os.path.join(folder, "pond"), {"containers": containers, "backups": backups}
        with (
            spark_session("adcamp", master=master) as spark,
            mp.open(root, spark=spark, hosting=hosting, **sizes) as pond,  # type: ignore[arg-type]
        ):
            out.print(by_hand(pond, root), markup=False)
            warm_up(spark, pond, folder)
            campaigns = pond.state("campaigns", key="long", value="string")
            streams = Streams(spark, campaigns, folder, rate, keys, rows)
            try:
                Watch(out, streams, rows).until_answered()
            finally:
                streams.stop()
            out.print(where_the_time_went(streams.answered, pond.metrics()["states"]["campaigns"]))
            late = sum(campaigns.progress().late.values()) + streams.waiting.late
        out.print("comparing every answer with DuckDB's ASOF JOIN over the same rows ...")
        found = compare(folder)
    out.print(
        f"{found.updates:,} updates ({late} late), {found.views:,} views, [bold]{found.wrong} wrong[/bold]"
        f" ({found.lost(rows)} lost, {found.twice} twice; {time.perf_counter() - began:.0f} s)"
    )
    return found == Comparison(rows, rows, wrong=0, twice=0) and late == 0


def by_hand(pond: mp.Pond, root: str) -> str:
    """What somebody may do to the pond in another terminal: to watch it, and to act on it."""
    containers = pond.containers()
    killed = containers[-1]
    lines = [
        f"watch it in another terminal: millpond top {root}",
        f"kill a container, which is started again: kill -9 {killed.pid}   # container {killed.id} of {len(containers)}",
        "move and scale at a Python prompt:",
        "  import millpond as mp",
        f"  pond = mp.connect({pond.address!r}, open({os.path.join(root, 'token')!r}).read())",
        f"  pond.scale(containers={len(containers) + 1}); pond.move([0, 1, 2], to={containers[0].id})",
        f"  pond.rebalance(); pond.scale(containers={len(containers)})",
    ]
    return "\n".join(lines)


# The rows


def updates(source: DataFrame, rate: int, keys: int, rows: int) -> DataFrame:
    """From a source with `value` and `timestamp`: the ad `ad` belongs to `campaign` from `ts` on."""
    return source.where(f"value < {rows}").selectExpr(
        f"pmod(xxhash64(value, 1), {keys}) AS ad",
        f"{_event_time(rate)} AS ts",
        f"concat('campaign-', pmod(xxhash64(value, 2), {CAMPAIGNS})) AS campaign",
    )


def views(source: DataFrame, rate: int, keys: int, rows: int) -> DataFrame:
    """From the same: the view `view` of the ad `ad` at `ts`, and when it `arrived`, which is the source's stamp."""
    return source.where(f"value < {rows}").selectExpr(
        "value AS view",
        f"pmod(xxhash64(value, 3), {keys}) AS ad",
        f"{_event_time(rate)} AS ts",
        "timestamp AS arrived",
    )


def _event_time(rate: int) -> str:
    """Rows come in shuffled order within each `DISORDER_S` seconds; no two have the same time."""
    block = rate * DISORDER_S
    step = max(1, int(block * 0.618))
    while math.gcd(step, block) != 1:
        step += 1
    position = f"(value - value % {block} + (value % {block}) * {step} % {block})"
    return f"timestamp_micros({START_US} + {position} * {MICROS} div {rate})"


# The two queries


def warm_up(spark: SparkSession, pond: mp.Pond, folder: str) -> None:
    """One small epoch of each kind, so that the streams do not begin by loading code."""
    rehearsal = pond.state("rehearsal", key="long", value="string")
    source = spark.range(1_000).selectExpr("id AS value", "current_timestamp() AS timestamp")
    feed = rehearsal.update(key="ad", at="ts", value="campaign", name="feed")
    feed(updates(source, rate=1_000, keys=100, rows=1_000), 0)
    rehearsal.finish("feed")
    asked = views(source, rate=1_000, keys=100, rows=1_000)
    answers = rehearsal.fetch(key="ad", at="ts", into="campaign").now(asked)
    answers.write.parquet(os.path.join(folder, "rehearsal"))


class Streams:
    """Updates and views, each a query of its own; what they did so far can be read while they run."""

    def __init__(
        self, spark: SparkSession, campaigns: mp.State, folder: str, rate: int, keys: int, rows: int
    ) -> None:
        self.campaigns = campaigns
        self.updated = Meter()
        self.answered = Meter()
        self._folder = folder
        self._epoch_runs = {"updates": threading.Lock(), "views": threading.Lock()}
        self._ended: set[str] = set()
        feed = campaigns.update(key="ad", at="ts", value="campaign", delay=DELAY, name="feed")
        ask = campaigns.fetch(key="ad", at="ts", into="campaign", delay=DELAY, name="views").to(
            self._keep_answers
        )

        def update(frame: DataFrame, epoch: int) -> None:
            frame.write.mode("overwrite").parquet(self._part("updates", epoch))
            self.updated.add(feed(frame, epoch).rows)

        self._ask = ask

        def source() -> DataFrame:
            return spark.readStream.format("rate").option("rowsPerSecond", rate).load()

        # `feed` is registered by now: no view can be answered before the first updates are there.
        self._queries = {
            "updates": self._start("updates", updates(source(), rate, keys, rows), update),
            "views": self._start("views", views(source(), rate, keys, rows), ask),
        }

    @property
    def waiting(self) -> Pending:
        return self._ask.pending()

    def check(self) -> None:
        """Raises what ended a query."""
        for query in self._queries.values():
            error = query.exception()
            if error is not None:
                raise error

    def finish_updates(self) -> None:
        """All updates are in: U passes everything, and every view can be answered."""
        self._stop("updates")
        self.campaigns.finish("feed")

    def stop(self) -> None:
        for name in list(self._queries):
            self._stop(name)

    def _stop(self, name: str) -> None:
        """Ends a query between two epochs: one that is interrupted complains."""
        if self._epoch_runs[name].acquire(timeout=STALLED_S):
            self._ended.add(name)
            self._epoch_runs[name].release()
        self._queries.pop(name).stop()

    def _start(
        self, name: str, frame: DataFrame, operator: Callable[[DataFrame, int], None]
    ) -> StreamingQuery:
        def run_epoch(rows: DataFrame, epoch: int) -> None:
            with self._epoch_runs[name]:
                if name not in self._ended:
                    operator(rows, epoch)

        checkpoint = os.path.join(self._folder, "checkpoints", name)
        return (
            frame.writeStream.queryName(name)
            .foreachBatch(run_epoch)
            .option("checkpointLocation", checkpoint)
            .start()
        )

    def _keep_answers(self, frame: DataFrame, epoch: int) -> None:
        part = self._part("answers", epoch)
        frame.write.mode("overwrite").parquet(part)
        now = time.time()
        arrived = pq.read_table(part, columns=["arrived"])["arrived"].to_numpy()
        self.answered.add(len(arrived), now - arrived.astype("datetime64[us]").astype(np.int64) / MICROS)

    def _part(self, name: str, epoch: int) -> str:
        return os.path.join(self._folder, name, f"epoch={epoch}")


class Meter:
    """Counts rows as epochs bring them; a rate and latencies over the last few seconds. Safe between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epochs: deque[tuple[float, int, npt.NDArray[np.float64]]] = deque()
        self._began = time.monotonic()
        self.total = 0
        self.latency_s_total = 0.0

    def add(self, rows: int, latencies_s: npt.NDArray[np.float64] | None = None) -> None:
        with self._lock:
            self.total += rows
            latencies_s = np.empty(0) if latencies_s is None else latencies_s
            self._epochs.append((time.monotonic(), rows, latencies_s))
            self.latency_s_total += float(latencies_s.sum())

    def rows_per_s(self) -> float:
        recent = self._recent()
        span = min(RECENT_S, time.monotonic() - self._began)
        return sum(rows for _, rows, _ in recent) / max(span, 0.001)

    def latency_s(self, percentile: float) -> float | None:
        latencies = np.concatenate([np.empty(0), *(latencies for _, _, latencies in self._recent())])
        return float(np.percentile(latencies, percentile)) if len(latencies) else None

    def _recent(self) -> list[tuple[float, int, npt.NDArray[np.float64]]]:
        with self._lock:
            while self._epochs and self._epochs[0][0] < time.monotonic() - RECENT_S:
                self._epochs.popleft()
            return list(self._epochs)


# What is seen of them


class Watch:
    """Shows the streams until every view is answered: a live table in a terminal, lines elsewhere."""

    def __init__(self, out: Console, streams: Streams, rows: int) -> None:
        self._out = out
        self._streams = streams
        self._rows = rows
        self._finished = False

    def until_answered(self) -> None:
        if self._out.is_terminal:
            with Live(console=self._out, auto_refresh=False) as live:
                self._watch(SCREEN_EVERY_S, lambda: live.update(self._screen(), refresh=True))
        else:
            self._out.print(f"  {LATENCY_MEANS}")
            self._watch(LINE_EVERY_S, lambda: self._out.print(f"  {self._line()}"))

    def _watch(self, every_s: float, show: Callable[[], None]) -> None:
        """Finishes the feed once all updates are in; ends when no view waits any more."""
        streams = self._streams
        seen, moved, shown = (-1, -1), time.monotonic(), 0.0
        done = False
        while not done:
            streams.check()
            if not self._finished and streams.updated.total >= self._rows:
                streams.finish_updates()
                self._finished = True
            done = streams.answered.total >= self._rows and streams.waiting.rows == 0
            now = time.monotonic()
            if done or now - shown >= every_s:
                show()
                shown = now
            counts = (streams.updated.total, streams.answered.total)
            if counts != seen:
                seen, moved = counts, now
            if now - moved > STALLED_S:
                raise MillpondError(
                    f"nothing moved for {STALLED_S:.0f} s: {counts[0]:,} updates and {counts[1]:,} answers of {self._rows:,}",
                    hint="give a lower --rate: the machine may be too busy for this one",
                )
            time.sleep(0.05)

    def _line(self) -> str:
        streams, progress = self._streams, self._streams.campaigns.progress()
        return (
            f"updates {streams.updated.total:,} ({streams.updated.rows_per_s():,.0f}/s),"
            f" views answered {streams.answered.total:,} ({streams.answered.rows_per_s():,.0f}/s),"
            f" U {_since_start(progress.update)}, F {_since_start(progress.fetch)},"
            f" waiting {streams.waiting.rows:,},"
            f" p50 {_seconds(streams.answered.latency_s(50))}, p99 {_seconds(streams.answered.latency_s(99))}"
        )

    def _screen(self) -> Group:
        streams, progress = self._streams, self._streams.campaigns.progress()
        answered = streams.answered
        rates = Table(title="one State, two streaming queries", title_justify="left")
        for heading in ("stream", "rows", "rows/s", "waiting", "p50", "p99"):
            rates.add_column(heading, justify="left" if heading == "stream" else "right", min_width=9)
        updated = streams.updated
        rates.add_row("updates", f"{updated.total:,}", f"{updated.rows_per_s():,.0f}", "", "", "")
        rates.add_row(
            "views",
            f"{answered.total:,}",
            f"{answered.rows_per_s():,.0f}",
            f"{streams.waiting.rows:,}",
            _seconds(answered.latency_s(50)),
            _seconds(answered.latency_s(99)),
        )
        state = (
            f"U {_since_start(progress.update)}: what is before is final."
            f"  F {_since_start(progress.fetch)}: nobody asks for what is before.  (seconds of event time)"
        )
        phase = "all updates are in: the views that wait are answered" if self._finished else "streaming"
        return Group(rates, Text(state), Text(LATENCY_MEANS, style="dim"), Text(phase))


LATENCY_MEANS = (
    "p50, p99: from a view's stamp at the source, which hands rows over once a second, until its answer is written;"
    f" {DISORDER_S} s of it is the updates' delay"
)


def where_the_time_went(answered: Meter, figures: dict[str, Any]) -> str:
    """The mean time from a view's stamp to its answer, and what it was spent on."""
    views = figures["fetchers"]["views"]
    share = views["rows_waited"] / max(views["rows"], 1)
    mean_s = answered.latency_s_total / max(answered.total, 1)
    update_s, turn_s = (share * views[f"wait_for_{what}_ms_mean"] / 1_000 for what in ("update", "turn"))
    batch_s = views["batch_ms_p50"] / 1_000
    return (
        f"of the {mean_s:.2f} s from a view's stamp to its answer, in the mean {update_s:.2f} s went into waiting for U"
        f" ({DISORDER_S} s is the updates' delay), {max(mean_s - update_s - batch_s, 0.0):.2f} s into waiting for a batch to"
        f" begin ({turn_s:.2f} s of it after U had passed), {batch_s:.2f} s into the batch itself"
    )


def _since_start(progress: float) -> str:
    if math.isinf(progress):
        return f"{progress:+}"
    return f"{round((progress - START_US) / MICROS, 1) + 0.0:.1f} s"  # + 0.0: no negative zero


def _seconds(latency_s: float | None) -> str:
    return "-" if latency_s is None else f"{latency_s:.2f} s"


# The check


class Comparison(NamedTuple):
    """What DuckDB found in the files of both streams. `twice` counts answers beyond the first of a view."""

    updates: int
    views: int
    wrong: int
    twice: int

    def lost(self, rows: int) -> int:
        return rows - (self.views - self.twice)


def compare(folder: str) -> Comparison:
    """Every answer beside that of an ASOF JOIN of the same files, which shares no code with the pond."""
    with duckdb.connect() as connection:
        connection.execute("SET enable_progress_bar = false")
        for name in ("updates", "answers"):
            # As tables their sizes are known: from files, DuckDB may choose to compare each row with each.
            connection.execute(
                f"CREATE TABLE {name} AS FROM read_parquet($files, hive_partitioning = false)",
                {"files": os.path.join(folder, name, "*", "*.parquet")},
            )
        row = connection.execute(
            """
            WITH compared AS (
                SELECT a.view, a.campaign IS DISTINCT FROM u.campaign AS wrong
                FROM answers a ASOF LEFT JOIN updates u ON a.ad = u.ad AND a.ts >= u.ts
            )
            SELECT (SELECT count(*) FROM updates), count(*), count_if(wrong), count(*) - count(DISTINCT view)
            FROM compared
            """
        ).fetchone()
    assert row is not None
    return Comparison(*(int(number) for number in row))
