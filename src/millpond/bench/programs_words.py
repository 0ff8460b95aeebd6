"""Word count by wall-clock time: the smallest window that is sustained, beside Spark's `groupBy`.

Words come at one rate, and those of a window together, as it ends: as rows, and as a file that appears. A window is sustained when
its counts are there before the next one ends, in 95 of 100 windows, and at the end nothing is left over. Windows are tried from
the largest on, until one is not sustained; the first ones of each try warm up. All counts are compared.

- millpond, Arrow tables: `add` for each word, an epoch for each window.
- millpond, Spark stream: the same by `foreachBatch`; a micro-batch takes what files there are.
- spark groupBy: `groupBy("window", "word").count()` in update mode, its rows taken by `foreachBatch`; state in memory, with Spark's
  checkpoints.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import millpond as mp
from millpond.apps.spark_session import spark_session
from millpond.apps.word_count import WordCount, spoken
from millpond.bench.programs_pond import Scale, opened

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WARM = 0.25
LEAST = 4
"""Windows of a try, at least."""
STALLED_S = 60.0
WARM_BATCHES = 3
SCHEMA = "window long, word string, at long"

Try = Callable[[list[pa.Table], int], list[float]]
"""Feeds windows of so many milliseconds: how many after its end each one was counted."""


def run(scale: Scale, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    setup = f"{scale.words_per_s:,} words/s, {scale.seconds:g} s of each window"
    results = []
    with spark_session("millpond bench programs") as spark, opened() as pond:
        systems: dict[str, Try] = {
            "millpond, Arrow tables": Tables(pond),
            "millpond, Spark stream": Stream(spark, pond),
            "spark groupBy": Stream(spark, None),
        }
        for system, attempt in systems.items():
            result: dict[str, Any] = {"system": system, "section": "words", "setup": setup}
            for window_ms in scale.windows_ms:
                progress(f"words: {system}, {window_ms} ms")
                took = attempt(list(windows(scale, window_ms)), window_ms)
                p95 = float(np.percentile(took[int(WARM * len(took)) :], 95))
                if p95 > window_ms:
                    result.setdefault("note", f"{system}: of {window_ms} ms, p95 is {p95:,.0f} ms")
                    break
                result |= {"window_ms": window_ms, "counted_p95_ms": p95, "words_per_s": scale.words_per_s}
            results.append(result)
    return results


def windows(scale: Scale, window_ms: int) -> Iterator[pa.Table]:
    """The words of each."""
    count = max(LEAST, round(1_000 * scale.seconds / window_ms))
    each = max(1, scale.words_per_s * window_ms // 1_000)
    words = pa.array([row["word"] for row in spoken(count * each)])
    for number in range(count):
        yield pa.table(
            {
                "window": np.full(each, number),
                "word": words.slice(number * each, each),
                "at": np.full(each, number * window_ms),
            }
        )


def feed(tables: list[pa.Table], window_ms: int, give: Callable[[int, pa.Table], None]) -> list[float]:
    """Gives each window as it ends, or as soon after that as the one before lets it. When each one ended."""
    ends = []
    began = time.perf_counter()
    for number, table in enumerate(tables):
        ends.append(began + (number + 1) * window_ms / 1e3)
        time.sleep(max(0.0, ends[-1] - time.perf_counter()))
        give(number, table)
    return ends


def check(table: pa.Table, counted: dict[str, int]) -> None:
    """What was counted of a window."""
    if counted != Counter(table["word"].to_pylist()):
        raise RuntimeError(f"window {table['window'][0]} was not counted right")


def earlier(table: pa.Table, number: int, window_ms: int) -> pa.Table:
    """The same words in another window."""
    count = len(table)
    moved = {
        "window": np.full(count, number),
        "word": table["word"],
        "at": np.full(count, number * window_ms),
    }
    return pa.table(moved)


def await_all(query: Any, done: dict[int, float], numbers: set[int]) -> None:
    """Until these windows are counted."""
    deadline = time.monotonic() + STALLED_S
    while not numbers <= done.keys():
        if query.exception() is not None:
            raise RuntimeError(str(query.exception()))
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(numbers - done.keys())} windows were not counted in {STALLED_S:g} s")
        time.sleep(0.002)


class Tables:
    def __init__(self, pond: mp.Pond) -> None:
        self._program = pond.program("words", WordCount)
        self._tries = 0

    def __call__(self, tables: list[pa.Table], window_ms: int) -> list[float]:
        self._tries += 1
        add = self._program.call("add", into="count", width="width", name=f"words{self._tries}")
        shift = self._tries * 1_000_000_000
        done: list[float] = []
        counts: list[pa.Table] = []

        def give(number: int, table: pa.Table) -> None:
            counts.append(add(program_rows(table, window_ms, shift), number))
            done.append(time.perf_counter())

        ends = feed(tables, window_ms, give)
        for table, counted in zip(tables, counts, strict=True):
            check(table, largest(counted))
        return [1e3 * (there - end) for there, end in zip(done, ends, strict=True)]


def program_rows(table: pa.Table, window_ms: int, shift: int) -> pa.Table:
    """As the program takes them. Words of a later try are said later."""
    at = table["at"].to_numpy() + shift * window_ms
    return pa.table({"word": table["word"], "at": at, "width": np.full(len(at), window_ms)})


def largest(counted: pa.Table) -> dict[str, int]:
    """By word, the last of its counts."""
    grouped = counted.group_by("word").aggregate([("count", "max")])
    return dict(zip(grouped["word"].to_pylist(), grouped["count_max"].to_pylist(), strict=True))


class Stream:
    """Files through Spark: to a program, or, without a pond, to `groupBy`."""

    def __init__(self, spark: SparkSession, pond: mp.Pond | None) -> None:
        self._spark = spark
        self._program = None if pond is None else pond.program("streamed_words", WordCount)
        self._tries = 0

    def __call__(self, tables: list[pa.Table], window_ms: int) -> list[float]:
        self._tries += 1
        done: dict[int, float] = {}
        counts: dict[int, dict[str, int]] = {}
        with tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder:
            os.makedirs(os.path.join(folder, "words"))
            arriving = self._spark.readStream.schema(SCHEMA).parquet(os.path.join(folder, "words"))
            query = (
                self._counting(arriving, window_ms, done, counts)
                .option("checkpointLocation", os.path.join(folder, "checkpoint"))
                .start()
            )

            def give(number: int, table: pa.Table) -> None:
                hidden, file = (os.path.join(folder, "words", f"{dot}{number}.parquet") for dot in (".", ""))
                pq.write_table(table, hidden)
                os.rename(hidden, file)

            try:
                # Windows before the first: Spark compiles its own code over its first batches.
                for number in range(-WARM_BATCHES, 0):
                    give(number, earlier(tables[0], number, window_ms))
                    await_all(query, done, {number})
                ends = feed(tables, window_ms, give)
                await_all(query, done, set(range(len(tables))))
            finally:
                query.stop()
        for number, table in enumerate(tables):
            check(table, counts[number])
        return [1e3 * (done[number] - end) for number, end in enumerate(ends)]

    def _counting(
        self, words: DataFrame, window_ms: int, done: dict[int, float], counts: dict[int, dict[str, int]]
    ) -> Any:
        def keep(rows: pa.Table) -> None:
            """By window, the last count of each word."""
            for row in rows.to_pylist():
                counted = counts.setdefault(row["window"], {})
                counted[row["word"]] = max(row["count"], counted.get(row["word"], 0))
            now = time.perf_counter()
            for number in set(rows["window"].to_pylist()):
                done.setdefault(number, now)

        if self._program is None:

            def grouped(frame: DataFrame, epoch: int) -> None:
                keep(frame.toArrow())

            return (
                words.groupBy("window", "word").count().writeStream.outputMode("update").foreachBatch(grouped)
            )
        add = self._program.call("add", into="count", width="width", name=f"words{self._tries}")
        shift = self._tries * 1_000_000_000 * window_ms

        def added(frame: DataFrame, epoch: int) -> None:
            # Rows of two windows in one batch: the older ones first, or they would be late.
            rows = frame.selectExpr("window", "word", f"at + {shift}L AS at", f"{window_ms}L AS width")
            keep(add(rows.repartition(1).sortWithinPartitions("window"), epoch).toArrow())

        return words.writeStream.foreachBatch(added)
