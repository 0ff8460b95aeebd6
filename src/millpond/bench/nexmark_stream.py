"""A NEXMark query as a stream: files by `readStream`, one a micro-batch, with a checkpoint, its answers collected.

The query runs without a break from the first file to the last. The clock and the CPU seconds of all processes are read when
the warm-up has been answered and the timed files are put where the stream finds them, and again when all of those and the
closing files have been answered: what Spark does between micro-batches counts, too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from millpond.bench.cpu import cpu_seconds_by_kind
from millpond.bench.nexmark_load import ASKED, CLOSING_FILES, Run, Staged, Workload
from millpond.times import MICROS, parse_duration

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

SETTINGS = {
    # A file is split by what its opening is said to cost, too: so small, every core gets its part of it.
    "spark.sql.files.openCostInBytes": "1024",
    # As is advised for queries with state: a watermark acts with the next file, which there always is.
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.sql.streaming.numRecentProgressUpdates": "10000",
}


class Collector:
    """A function for `foreachBatch`, as the sink of answers: all rows come to the driver. Each epoch counts once."""

    def __init__(self) -> None:
        self._tables: dict[int, list[pa.Table]] = {}

    def __call__(self, frame: DataFrame, epoch: int) -> None:
        self._tables[epoch] = [frame.toArrow()]

    def add(self, epoch: int, table: pa.Table) -> None:
        """Rows that come otherwise; the epochs of tables that are added are not those of frames."""
        self._tables.setdefault(epoch, []).append(table)

    def table(self) -> pa.Table:
        tables = [table for _, of_epoch in sorted(self._tables.items()) for table in of_epoch]
        if not tables:
            raise RuntimeError("the stream has handed no answers to its sink, not even none")
        return pa.concat_tables(tables)


Build = Callable[[Mapping[str, "DataFrame"], Collector], "Sequence[DataStreamWriter]"]
"""From streams by source to queries that are ready to start but for their checkpoints and triggers."""


def run_stream(
    session: SparkSession,
    workload: Workload,
    query: str,
    build: Build,
    finish: Callable[[Collector], None] | None = None,
) -> Run:
    """Run what `build` makes. `finish`, if given, is called after the last file, within the time that counts.

    `session` has its settings already, `SETTINGS` among them; see `prepare`.
    """
    staged = workload.stage(query)
    collector = Collector()
    frames = {
        source: session.readStream.schema(columns)
        .option("maxFilesPerTrigger", 1)
        .parquet(f"{staged.folder(source)}/*")
        for source, columns in ASKED[query].columns.items()
    }
    staged.put("warm")
    queries = [
        writer.option("checkpointLocation", str(_checkpoint(staged, number)))
        .trigger(processingTime="0 seconds")
        .start()
        for number, writer in enumerate(build(frames, collector))
    ]
    try:
        _answer(queries)
        meter = _Meter()
        staged.put("timed")
        if query == "q12":
            # Its windows are of the clock: the last one is over before the closing files arrive. To wait costs nothing.
            _answer(queries)
            with meter.paused():
                time.sleep(2 * parse_duration(workload.work.arrival_size) / MICROS)
        staged.put("closing")
        _answer(queries)
        if finish is not None:
            finish(collector)
        seconds, cpu_by_kind = meter.read()
        progress = [_epochs(each) for each in queries]
    finally:
        for each in queries:
            each.stop()
    return Run(
        seconds=seconds,
        cpu_seconds=sum(cpu_by_kind.values()),
        events=workload.events(query),
        result=collector.table(),
        arrivals=_arrivals(_checkpoint(staged, 0), workload) if query == "q12" else None,
        extras={
            "cpu_by_kind": cpu_by_kind,
            "batch_ms": [epoch["durationMs"]["triggerExecution"] for epoch in progress[0]],
            "state_rows_max": _state_max(progress[0], "numRowsTotal"),
            "state_mb_max": _state_max(progress[0], "memoryUsedBytes") / 1e6,
        },
    )


def prepare(session: SparkSession, settings: Mapping[str, str] | None = None) -> SparkSession:
    """A session beside this one, on the same Spark, with `SETTINGS` and these: queries of others keep theirs."""
    beside = session.newSession()
    for name, value in {"spark.sql.session.timeZone": "UTC", **SETTINGS, **(settings or {})}.items():
        beside.conf.set(name, value)
    return beside


class _Meter:
    """Seconds and CPU seconds since it was made, without pauses."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._cpu: dict[str, float] = {}
        self._resume()

    def _resume(self) -> None:
        self._cpu_began = cpu_seconds_by_kind()
        self._began = time.perf_counter()

    def _pause(self) -> None:
        self._seconds += time.perf_counter() - self._began
        for kind, seconds in cpu_seconds_by_kind().items():
            self._cpu[kind] = self._cpu.get(kind, 0.0) + seconds - self._cpu_began[kind]

    def paused(self) -> _Meter:
        return self

    def __enter__(self) -> None:
        self._pause()

    def __exit__(self, *_: object) -> None:
        self._resume()

    def read(self) -> tuple[float, dict[str, float]]:
        self._pause()
        return self._seconds, self._cpu


def _answer(queries: Sequence[StreamingQuery]) -> None:
    """Until all files that are there have been answered; raises what made a query fail."""
    for query in queries:
        query.processAllAvailable()


def _epochs(query: StreamingQuery) -> list[dict[str, Any]]:
    return [epoch for epoch in query.recentProgress if "addBatch" in epoch["durationMs"]]


def _state_max(epochs: Sequence[dict[str, Any]], figure: str) -> float:
    """Of all operators with state together, at its most."""
    return max((sum(each[figure] for each in epoch["stateOperators"]) for epoch in epochs), default=0)


def _checkpoint(staged: Staged, number: int) -> Path:
    return staged.run_folder / f"checkpoint-{number}"


def _arrivals(checkpoint: Path, workload: Workload) -> list[int]:
    """What `current_timestamp()` was in each micro-batch, as Spark has recorded it before it ran."""
    files = sorted((file for file in (checkpoint / "offsets").iterdir() if file.name.isdigit()), key=_number)
    if len(files) != workload.work.files + CLOSING_FILES:
        raise RuntimeError(f"Spark tells of {len(files)} micro-batches, not one for each file")
    stamps = [json.loads(file.read_text().splitlines()[1])["batchTimestampMs"] * 1_000 for file in files]
    return stamps[: workload.work.files]


def _number(file: Path) -> int:
    return int(file.name)
