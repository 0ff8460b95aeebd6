"""What a Spark user has today: a stateful query on RocksDB that is stopped, given other state partitions, and started again.

A sum by key over Parquet files, one file a micro-batch, `foreachBatch` as its sink. Then small files come. Without answers is
from `stop()` until the first micro-batch after it has handed over its rows. The state partitions change by
`_streamingCheckpointManager.repartition` where Spark has it; or by a discarded checkpoint, after which all files are read again.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from millpond.apps.spark_session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

FILE_ROWS = 1_000_000
SMALL_ROWS = 1_000
PARTITIONS = "spark.sql.shuffle.partitions"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
WAIT_S = 300.0


def run(keys: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    with (
        tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder,
        spark_session("millpond bench elastic") as spark,
    ):
        spark.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
        bench = _Bench(spark, Path(folder), keys)
        progress(f"Spark: a state of {keys:,} keys")
        bench.load()
        results = []
        cores = os.cpu_count() or 1
        if hasattr(spark, "_streamingCheckpointManager"):
            progress("Spark: stopped, repartitioned, started again")
            results.append(bench.changed("repartitioned offline", bench.repartition, 2 * cores))
        progress("Spark: stopped, checkpoint discarded, started again")
        results.append(bench.changed("checkpoint discarded", bench.discard, cores))
        return results


class _Bench:
    def __init__(self, spark: SparkSession, folder: Path, keys: int) -> None:
        self._spark = spark
        self._files = folder / "files"
        self._files.mkdir()
        self._checkpoint = str(folder / "checkpoint")
        self._keys = keys
        self._partitions = os.cpu_count() or 1
        self._number = 0
        self._answered = threading.Event()
        self._marker = -1
        self._query: StreamingQuery | None = None
        self._state_mb = 0.0

    def load(self) -> None:
        for first in range(0, self._keys, FILE_ROWS):
            self._write(np.arange(first, min(first + FILE_ROWS, self._keys)))
        query = self._start()
        self._write_marker()
        self._await_marker()
        query.processAllAvailable()
        self._note_size()

    def changed(self, name: str, change: Callable[[], None], to: int) -> dict[str, Any]:
        assert self._query is not None
        began = time.monotonic()
        self._write_marker()
        self._await_marker()
        small_s = time.monotonic() - began
        self._query.processAllAvailable()
        stopped = time.monotonic()
        self._query.stop()
        before, self._partitions = self._partitions, to
        change()
        changed = time.monotonic()
        self._write_marker()
        query = self._start()
        self._await_marker()
        answered = time.monotonic()
        query.processAllAvailable()
        partitions = _state_operator(query)["numShufflePartitions"]
        if partitions != self._partitions:
            raise RuntimeError(f"the state has {partitions} partitions, not {self._partitions}")
        self._note_size()
        return {
            "system": f"Spark, {name}",
            "section": "spark",
            "setup": f"sum by key on RocksDB, {self._keys:,} keys, local[{os.cpu_count()}], {before} to {partitions} partitions",
            "sst_mb": self._state_mb,
            "without_answers_ms": (answered - stopped) * 1e3,
            "change_s": changed - stopped,
            "batch_ms": small_s * 1e3,
        }

    def repartition(self) -> None:
        self._spark._streamingCheckpointManager.repartition(self._checkpoint, self._partitions)  # noqa: SLF001

    def discard(self) -> None:
        shutil.rmtree(self._checkpoint)

    def _start(self) -> StreamingQuery:
        self._spark.conf.set(PARTITIONS, str(self._partitions))

        def answer(rows: DataFrame, _epoch: int) -> None:
            # Everything is computed, and one key is looked for.
            if rows.filter(f"k = {self._marker}").count():
                self._answered.set()

        stream = self._spark.readStream.schema("k long, v long").option("maxFilesPerTrigger", 1)
        sums = stream.parquet(str(self._files)).groupBy("k").sum("v")
        writer = sums.writeStream.outputMode("update").option("checkpointLocation", self._checkpoint)
        self._query = writer.foreachBatch(answer).start()
        return self._query

    def _await_marker(self) -> None:
        """Until a batch has answered the newest marker, which is a key that no other file has."""
        assert self._query is not None
        deadline = time.monotonic() + WAIT_S
        while not self._answered.wait(0.02):
            if not self._query.isActive or time.monotonic() > deadline:
                raise RuntimeError(f"Spark did not answer: {self._query.exception()}")

    def _write_marker(self) -> None:
        self._answered.clear()
        self._marker = -1 - self._number
        keys = np.random.default_rng(self._number).integers(0, self._keys, SMALL_ROWS)
        self._write(np.append(keys, self._marker))

    def _write(self, keys: np.ndarray[Any, Any]) -> None:
        # Files are read in the order of their times.
        beside = self._files.parent / "next.parquet"
        pq.write_table(pa.table({"k": keys.astype(np.int64), "v": np.ones(len(keys), np.int64)}), beside)
        beside.rename(self._files / f"{self._number:06}.parquet")
        self._number += 1
        time.sleep(0.01)

    def _note_size(self) -> None:
        assert self._query is not None
        operator = _state_operator(self._query)
        # Compressed, on disk.
        self._state_mb = operator["customMetrics"].get("rocksdbSstFileSize", 0) / 1e6


def _state_operator(query: StreamingQuery) -> dict[str, Any]:
    progress: Any = query.lastProgress
    operator: dict[str, Any] = progress["stateOperators"][0]
    return operator
