"""Streams beside the same streams that ask nobody: Parquet files by `readStream` through `foreachBatch` into Spark's noop sink.

The path that a user takes, with a checkpoint, one file a micro-batch, all systems in one Spark application on the same
files, in turns: a round of one, a round of the next. What counts is Spark's own `triggerExecution` of each micro-batch,
all of it; `rows_per_s` are a batch's rows by the median. Machines are slower in one minute than in the next: ratios are
between medians of the same round, and of those the median. `spark-identity` adds a column in `mapInArrow` and asks nobody,
`spark-identity-in` only counts its rows in Python. Files are split into as many tasks as there are cores.

U is finite throughout. For `millpond-fetch` it lies beyond all rows; for `millpond-waiting` it moves before each batch to
the newest tenth of its rows, which wait for the next one. For `millpond-both` updates and views run as two queries at
the same time; `rows_per_s` are the rows of both by the time from the first batch to the end of the last. A last round
hands its answers over instead of dropping them: they must be DuckDB's, each view's once.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import millpond as mp
from millpond.apps.spark_session import spark_session
from millpond.bench.streams_rows import Rows, Source
from millpond.bench.streams_systems import NAMES, Setting, Stream, System, systems
from millpond.errors import BadOption

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

CHECK_FILES = 2


class Work(NamedTuple):
    """How much of everything. Of each round the first batches are left out."""

    keys: int = 1_000_000
    versions: int = 5_000_000
    rows: int = 1_000_000
    warm_ups: int = 3
    rounds: int = 5
    batches: int = 3
    left_out: int = 1
    small_rows: int = 10_000
    small_batches: int = 15
    small_left_out: int = 3
    checked_rows: int = 200_000


FULL = Work()
QUICK = Work(
    keys=100_000,
    versions=500_000,
    rows=100_000,
    warm_ups=2,
    rounds=1,
    batches=4,
    small_batches=12,
    small_left_out=4,
    checked_rows=50_000,
)


class Round(NamedTuple):
    """So many files of so many rows for every system that takes part; `counts` says for which figures, if any."""

    counts: str
    rows: int
    files: int
    left_out: int
    first: int  # the number of its first file


class Batches(NamedTuple):
    """What a stream did in a round."""

    ms: list[int]
    began_ms: float
    ended_ms: float
    reads: float  # of the source


def run(
    quick: bool,
    progress: Callable[[str], None],
    only: Sequence[str] | None = None,
    work: Work | None = None,
) -> list[dict[str, Any]]:
    """Measure them all, or `only` some. Raises where an answer differs from DuckDB's."""
    check_names(only or ())
    work = work or (QUICK if quick else FULL)
    rounds = rounds_of(work)
    rows = Rows(work.keys, work.versions, files=sum(round_.files for round_ in rounds))
    with (
        spark_session("millpond bench streams") as spark,
        tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder,
        mp.open(os.path.join(folder, "pond"), spark=spark) as pond,
    ):
        # A file is split by what its opening is said to cost, too: so small, every task gets as much.
        spark.conf.set("spark.sql.files.openCostInBytes", "1024")
        setting = Setting(pond, rows, spark.sparkContext.defaultParallelism)
        chosen = [system for system in systems(setting) if not only or system.name in only]
        progress(f"loading {work.versions:,} versions of {work.keys:,} keys")
        for stream in (stream for system in chosen for stream in system.streams):
            stream.load()
        bench = _Bench(spark, Path(folder), rows, chosen, rounds)
        progress("writing files")
        bench.write_files()
        for number, round_ in enumerate(rounds):
            progress(
                f"{round_.counts or ('checking' if number else 'warming up')}, {round_.rows:,} rows a batch"
            )
            bench.run(number, round_)
        bench.check()
        return bench.results()


def rounds_of(work: Work) -> list[Round]:
    """Warm-up, large batches, small batches, and rows whose answers are compared."""
    shapes = [
        ("", work.rows, work.warm_ups, work.warm_ups),
        *[("large", work.rows, work.batches, work.left_out)] * work.rounds,
        *[("small", work.small_rows, work.small_batches, work.small_left_out)] * work.rounds,
        ("", work.checked_rows, CHECK_FILES, CHECK_FILES),
    ]
    rounds: list[Round] = []
    for shape in shapes:
        first = sum(round_.files for round_ in rounds)
        rounds.append(Round(*shape, first=first))
    return rounds


def check_names(only: Sequence[str]) -> None:
    """Before anything is started."""
    for name in only:
        if name not in NAMES:
            raise BadOption(
                f"no system is called {name!r}", hint=f"known: {', '.join(NAMES)}", option="--only"
            )


class _Bench:
    def __init__(
        self, spark: SparkSession, folder: Path, rows: Rows, chosen: list[System], rounds: list[Round]
    ) -> None:
        self._spark = spark
        self._folder = folder
        self._rows = rows
        self._systems = chosen
        self._rounds = rounds
        # By system and size: the batches of each round, where a system is one stream, and the rate of each round.
        self._ms: dict[tuple[str, str], list[int]] = {}
        self._rates: dict[tuple[str, str], list[float]] = {}
        self._reads: dict[tuple[str, str], list[float]] = {}

    def write_files(self) -> None:
        for round_ in self._rounds:
            for source in {stream.source for system in self._taking(round_) for stream in system.streams}:
                (self._folder / source.folder).mkdir(exist_ok=True)
                for number in _numbers(round_):
                    self._rows.write(self._file(source, number), source, number, round_.rows)

    def run(self, number: int, round_: Round) -> None:
        """One system after the other; every other round in the opposite order."""
        taking = self._taking(round_)
        for system in taking if number % 2 == 0 else taking[::-1]:
            for stream in system.streams:
                self._put(stream, round_)
                stream.collects = round_ is self._rounds[-1]
            queries = [self._start(stream) for stream in system.streams]
            done = [_batches(query, round_) for query in queries]
            if round_.counts:
                place = (system.name, round_.counts)
                self._reads.setdefault(place, []).extend(stream.reads for stream in done)
                if len(done) == 1:
                    self._ms.setdefault(place, []).extend(done[0].ms)
                    rate = round_.rows / float(np.median(done[0].ms)) * 1e3
                else:
                    ms = max(stream.ended_ms for stream in done) - min(stream.began_ms for stream in done)
                    rate = len(done) * round_.rows * round_.files / ms * 1e3
                self._rates.setdefault(place, []).append(rate)

    def check(self) -> None:
        """Of all systems, what the last round handed over, and what they counted."""
        for system in self._systems:
            rounds = [round_ for round_ in self._rounds if system in self._taking(round_)]
            for stream in system.streams:
                files = [
                    self._file(stream.source, number) for round_ in rounds for number in _numbers(round_)
                ]
                stream.check(files, rounds[-1].files)

    def results(self) -> list[dict[str, Any]]:
        results = []
        for counts in ("large", "small"):
            rows = next(round_.rows for round_ in self._rounds if round_.counts == counts)
            for system in self._systems:
                place = (system.name, counts)
                if place not in self._reads:
                    continue
                result: dict[str, Any] = {
                    "system": system.name + "-small" * (counts == "small"),
                    "rows_per_s": self._rate(place, rows),
                    "threads": self._spark.sparkContext.defaultParallelism,
                    "batch_rows": rows,
                    "source_reads": float(np.mean(self._reads[place])),
                }
                if place in self._ms:
                    for part in (50, 99):
                        result[f"batch_p{part}_ms"] = float(np.percentile(self._ms[place], part))
                results.append(result | self._beside(system, counts))
        return results

    def _rate(self, place: tuple[str, str], rows: int) -> float:
        if place in self._ms:
            return rows / float(np.median(self._ms[place])) * 1e3
        return float(np.median(self._rates[place]))

    def _beside(self, system: System, counts: str) -> dict[str, Any]:
        """Ratios to the stream that asks nobody."""
        identity = (system.reach.identity, counts)
        if identity not in self._reads:
            return {}
        own, beside = self._rates[system.name, counts], self._rates[identity]
        ratio = float(np.median([rate / other for rate, other in zip(own, beside, strict=True)]))
        if counts == "large":
            reach = system.reach.rate
            reached = reach is None or ratio >= reach
            ratios: dict[str, Any] = {"vs_identity": ratio}
        else:
            reach = system.reach.small_p50
            reached = reach is None or 1 / ratio <= reach
            ratios = {"vs_identity": ratio, "p50_vs_identity": 1 / ratio}
        if reach is None:
            return ratios
        limit = f"at least {reach}" if counts == "large" else f"p50 at most {reach} times"
        note = f"{'reached' if reached else 'not reached'}: {limit} of {system.reach.identity}"
        return ratios | {"reach": reach, "reached": reached, "note": note}

    def _taking(self, round_: Round) -> list[System]:
        return [system for system in self._systems if round_.counts != "small" or system.takes_small]

    def _file(self, source: Source, number: int) -> Path:
        return self._folder / source.folder / f"{number}.parquet"

    def _put(self, stream: Stream, round_: Round) -> None:
        """The round's files, where the stream finds them."""
        folder = self._folder / "sources" / stream.name
        folder.mkdir(parents=True, exist_ok=True)
        for number in _numbers(round_):
            file = self._file(stream.source, number)
            os.utime(file, (number + 1, number + 1))  # the source takes the oldest first
            os.link(file, folder / file.name)

    def _start(self, stream: Stream) -> StreamingQuery:
        """All files that are there; then it ends. The next round goes on from its checkpoint."""
        return (
            self._spark.readStream.schema(stream.source.schema)
            .option("maxFilesPerTrigger", 1)
            .parquet(str(self._folder / "sources" / stream.name))
            .writeStream.foreachBatch(stream)
            .option("checkpointLocation", str(self._folder / "checkpoints" / stream.name))
            .trigger(availableNow=True)
            .start()
        )


def _numbers(round_: Round) -> range:
    return range(round_.first, round_.first + round_.files)


def _batches(query: StreamingQuery, round_: Round) -> Batches:
    """Waits for the query's end."""
    query.awaitTermination()
    epochs = [epoch for epoch in query.recentProgress if "addBatch" in epoch["durationMs"]]
    if len(epochs) != round_.files:
        raise RuntimeError(f"{len(epochs)} micro-batches where there were {round_.files} files")
    ms = [epoch["durationMs"]["triggerExecution"] for epoch in epochs]
    began = [float(np.datetime64(epoch["timestamp"].rstrip("Z"), "ms").astype(np.int64)) for epoch in epochs]
    reads = sum(epoch["numInputRows"] for epoch in epochs) / (round_.rows * round_.files)
    return Batches(ms[round_.left_out :], began[0], began[-1] + ms[-1], reads)
