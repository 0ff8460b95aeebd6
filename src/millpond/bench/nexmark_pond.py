"""A contender of the NEXMark benchmark: windows of a pond."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

import millpond as mp
from millpond.apps.nexmark_queries import QUERIES, WHOLE, Batches, stream_of
from millpond.bench.cpu import thread_seconds
from millpond.bench.nexmark_load import Run, Workload
from millpond.bench.nexmark_stream import Collector, prepare, run_stream
from millpond.bench.window_container import Means, containers, told_by
from millpond.stores.windows.rowlog import FIGURES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

BUILDERS = QUERIES | WHOLE
SLICES = 8
"""Each has a store of its own, or a database with its write batch in an epoch: many for two cores, few enough for RocksDB."""
MEMORY = "3g"
"""Of a pond's container: the budget of its windows is another, and a part of it."""


class PondWindows:
    """Windows in a pond, fed by `foreachBatch`, with a checkpoint after each micro-batch.

    `told`, if given, is where the container over RocksDB tells of itself.
    """

    def __init__(
        self,
        spark: SparkSession,
        pond: mp.Pond,
        name: str = "millpond",
        told: str = "",
        watches_s: float = 0.0,
    ) -> None:
        self.name = name
        self._watches_s = watches_s
        self._told = told
        self._session = prepare(spark)
        self._pond = pond
        self._numbers = count()

    def supports(self, query: str) -> bool:
        return query in BUILDERS

    def run(self, workload: Workload, query: str) -> Run:
        name = f"{query.replace('-', '_')}_{next(self._numbers)}"
        delay = f"{workload.delay_us(query)} microseconds"

        batches: Batches | None = None
        did = StoreFigures(self._pond, name, self._told)
        checkpoints = Checkpoints(self._pond)

        def build(streams: Mapping[str, DataFrame], collector: Collector) -> Sequence[DataStreamWriter]:
            nonlocal batches

            def sink(frame: Any, epoch: int) -> None:
                collector(frame, epoch)
                checkpoints.ask()

            batches = BUILDERS[query](self._pond, name, workload.parameters(query), delay, sink)
            return [
                stream_of(query, streams[source]).writeStream.foreachBatch(batch)
                for source, batch in batches.items()
            ]

        def finish(collector: Collector) -> None:
            """What one of two streams has let out without a batch may still be on its way."""
            if batches is not None and len(batches) > 1:
                batches.finish()

        try:
            with did.watched(self._watches_s), checkpoints.taken():
                done = run_stream(self._session, workload, query, build, finish)
            done.extras |= did.read() | checkpoints.figures()
            return done
        finally:
            forget(self._pond, name)


class Checkpoints:
    """Of a pond, beside what it does: one each time that somebody asks. Who asks while one is taken gets another one after it."""

    def __init__(self, pond: mp.Pond) -> None:
        self._pond = pond
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._seconds: list[float] = []
        self._failed: list[Exception] = []
        self._bytes = self._bytes_written()

    def _bytes_written(self) -> float:
        containers = self._pond.metrics()["containers"].values()
        return float(sum(each["checkpoint_bytes"] for each in containers))

    def ask(self) -> None:
        self._asked.put(True)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """All that are asked for within are over at its end; raises what failed."""
        taking = threading.Thread(target=self._take, daemon=True)
        taking.start()
        try:
            yield
        finally:
            self._asked.put(False)
            taking.join()
        if self._failed:
            raise self._failed[0]

    def _take(self) -> None:
        while self._asked.get():
            began = time.perf_counter()
            try:
                self._pond.checkpoint()
            except Exception as error:  # noqa: BLE001 - whoever measures gets it
                self._failed.append(error)
                return
            self._seconds.append(time.perf_counter() - began)

    def figures(self) -> dict[str, Any]:
        count = len(self._seconds)
        return {
            "checkpoints": count,
            "checkpoint_s": float(np.median(self._seconds)) if count else None,
            "checkpoint_mb": (self._bytes_written() - self._bytes) / 1e6 / max(count, 1),
        }


class StoreFigures:
    """What the stores of all windows whose names begin so do, from now on: CPU seconds, hits, bytes, and memory at its most.

    Of RocksDB, which tells it in the file `told`, also what calls for each key take, of all windows.
    """

    def __init__(self, pond: mp.Pond, name: str, told: str = "") -> None:
        self._pond = pond
        self._name = name
        self._told = told
        self._loops = told_by(told)["loops"] if told else {}
        self._processes = [int(each["pid"]) for each in pond.metrics()["containers"].values()]
        self._threads = self._rocksdb_threads()
        self._before = self._sums()
        self._spilled = self._rss = 0.0

    def _rocksdb_threads(self) -> float:
        return sum(thread_seconds(process, "rocksdb") for process in self._processes)

    def _residents(self, metrics: Mapping[str, Any]) -> list[dict[str, float]]:
        kinds = (metrics["windows"], metrics["joins"])
        return [figures for kind in kinds for name, figures in kind.items() if name.startswith(self._name)]

    def _sums(self) -> dict[str, float]:
        residents = self._residents(self._pond.metrics())
        return {figure: sum(each.get(f"store_{figure}", 0.0) for each in residents) for figure in FIGURES}

    def look(self) -> None:
        """What is on disk, and memory, come and go."""
        metrics = self._pond.metrics()
        self._spilled = max(self._spilled, sum(each["spilled_bytes"] for each in self._residents(metrics)))
        self._rss = max(self._rss, sum(each["rss_bytes"] for each in metrics["containers"].values()))

    @contextmanager
    def watched(self, every_s: float) -> Iterator[None]:
        """With a look every so often; without one for 0."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(every_s):
                self.look()

        watching = threading.Thread(target=watch, daemon=True)
        if every_s:
            watching.start()
        try:
            yield
        finally:
            over.set()
            if every_s:
                watching.join()
        self.look()

    def read(self) -> dict[str, Any]:
        did = {figure: number - self._before[figure] for figure, number in self._sums().items()}
        # RocksDB compacts and flushes in threads of its own.
        did["compact_s"] += self._rocksdb_threads() - self._threads
        looked_up = did["hits"] + did["misses"]
        return {
            "store": did,
            "store_s": did["write_s"] + did["read_s"] + did["compact_s"],
            "hit_ratio": did["hits"] / looked_up if looked_up else None,
            "spilled_mb_max": self._spilled / 1e6,
            "rss_mb_max": self._rss / 1e6,
            **self._rocksdb(),
        }

    def _rocksdb(self) -> dict[str, Any]:
        if not self._told:
            return {}
        told = told_by(self._told)
        loops = {name: number - self._loops[name] for name, number in told["loops"].items()}
        return {"rocksdb": told["options"], "loops": loops}


def options_text(options: Mapping[str, Any]) -> str:
    """How RocksDB is set up, on one line."""
    return f"rocksdb: {', '.join(f'{name}={value}' for name, value in options.items())}"


def loops_share(figures: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of runs over RocksDB, what part of the store's CPU time goes into calls for each key: puts, and steps of iterators."""
    told = [each for each in figures if "loops" in each]
    return {
        name: float(np.median([each["loops"][seconds] / max(each["store_s"], 1e-9) for each in told]))
        for name, seconds in (("fill_share", "fill_s"), ("step_share", "step_s"))
        if told
    }


def forget(pond: mp.Pond, name: str) -> None:
    """All windows and joins whose names begin so."""
    for resident in (*pond.windows(), *pond.joins()):
        if resident.startswith(name):
            pond.forget(resident)


@contextmanager
def open_pond(
    folder: Path, means: Means, spark: SparkSession | None = None, slices: int = SLICES
) -> Iterator[mp.Pond]:
    """A pond in a folder of its own, whose windows have these means."""
    with containers(means):
        pond = mp.open(str(folder), spark=spark, memory=MEMORY, slices=slices)
    with pond:
        yield pond
