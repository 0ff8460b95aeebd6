"""Collaborative filtering as a stream: requests from Parquet files by `readStream`, ratings and questions mixed, one file a micro-batch.

`foreachBatch` gives the ratings of a micro-batch to one operator, then its questions to another, whose answers go to a sink that
takes them as they are. There is a checkpoint, and everything is durable before the next micro-batch. Some files warm up: Spark
compiles its plans, and the pond the tasks. The clock runs from when the others are put where the stream finds them, until the last
is answered. Answers are compared with those of the loop over arrays.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

import millpond as mp
from millpond.apps.ratings import MOVIELENS, drawn_ratings
from millpond.apps.recommender import Recommender
from millpond.apps.spark_session import spark_session
from millpond.bench.cpu import cpu_seconds_by_kind
from millpond.bench.programs_cf import MIXES, TARGET, Requests, ratings_of_movielens
from millpond.bench.programs_kernel import Filtering
from millpond.bench.programs_pond import CONTAINERS, Scale, opened

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = "number long, adds boolean, user long, item long, rating double"
STALLED_S = 300.0
WARM = 3
"""Of so many parts of the requests, one warms up."""


class File(NamedTuple):
    """The requests of one micro-batch: which ratings, and who asks what number of question."""

    added: tuple[int, int]
    asked: tuple[int, int]


def run(scale: Scale, progress: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    sources = {
        "movielens": ratings_of_movielens(progress),
        "generated": drawn_ratings(scale.cf_ratings, MOVIELENS),
    }
    with spark_session("millpond bench programs") as spark:
        for source, ratings in sources.items():
            if ratings is None:
                continue
            for mix in MIXES:
                progress(f"cf as a stream, {source}, {mix[0]}:{mix[1]}")
                part = ratings.slice(0, scale.cf_ratings)
                yield {
                    "system": "millpond, Spark stream",
                    "section": "cf",
                    "work": f"{source} {mix[0]}:{mix[1]}",
                    **_streamed(spark, Requests.of(part, min(scale.cf_loaded, len(part) // 2)), mix, scale),
                }


def _streamed(spark: SparkSession, requests: Requests, mix: tuple[int, int], scale: Scale) -> dict[str, Any]:
    files = list(_files(requests, mix, scale))
    timed = files[len(files) // WARM :]
    with opened() as pond, tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder:
        stream = Stream(spark, pond, requests, Path(folder))
        try:
            stream.load()
            stream.put(range(len(files) - len(timed)), files)
            stream.await_epochs()
            cpu, began = cpu_seconds_by_kind(), time.perf_counter()
            stream.put(range(len(files) - len(timed), len(files)), files)
            stream.await_epochs()
            seconds = time.perf_counter() - began
            used = {name: s - cpu[name] for name, s in cpu_seconds_by_kind().items()}
        finally:
            stream.stop()
        count = sum(last - first for file in timed for first, last in file)
        wrong = stream.wrong(files)
    rate = count / seconds
    return {
        "setup": f"{CONTAINERS} containers of 1 thread; {requests.loaded:,} ratings loaded, a micro-batch has {scale.cf_file:,} requests",
        "requests": count,
        "batch": scale.cf_file,
        "requests_per_s": rate,
        "cpu_s": used,
        "wrong": wrong,
        "aims": {f">= {TARGET:,} requests/s, none wrong": rate >= TARGET and not wrong},
    }


def _files(requests: Requests, mix: tuple[int, int], scale: Scale) -> Iterator[File]:
    """So many as there are ratings for, or as a few seconds take."""
    adds = scale.cf_file * mix[0] // sum(mix)
    asks = scale.cf_file - adds
    most = max(2 * WARM, int(2 * scale.seconds * TARGET / scale.cf_file))
    for number in range(
        min(most, (len(requests.ratings) - requests.loaded) // adds, len(requests.asking) // asks)
    ):
        first = requests.loaded + number * adds
        yield File((first, first + adds), (number * asks, (number + 1) * asks))


class Stream:
    def __init__(self, spark: SparkSession, pond: mp.Pond, requests: Requests, folder: Path) -> None:
        self._requests = requests
        self._folder = folder
        self._program = pond.program("rec", Recommender)
        self._feed = self._program.call("add_rating", name="feed")
        self._asked = self._program.call("get_rec", into="recommended", name="ask").to(self._keep)
        self._answers: list[pa.Table] = []
        self._put = 0
        self._began_ms = int(time.time() * 1e3)
        for name in ("made", "requests"):
            (folder / name).mkdir()
        self._query = (
            spark.readStream.schema(SCHEMA)
            .option("maxFilesPerTrigger", 1)
            .parquet(str(folder / "requests"))
            .writeStream.foreachBatch(self._both)
            .option("checkpointLocation", str(folder / "checkpoint"))
            .trigger(processingTime="0 seconds")
            .start()
        )

    def _both(self, frame: DataFrame, epoch: int) -> None:
        self._feed(frame.where("adds"), epoch)
        self._asked(frame.where("not adds"), epoch)

    def _keep(self, frame: DataFrame, epoch: int) -> None:
        self._answers.append(frame.select("number", "recommended").toArrow())

    def load(self) -> None:
        """The first ratings, as a file of their own."""
        self._write(self._table((0, self._requests.loaded), (0, 0)))
        self._show()
        self.await_epochs()

    def put(self, numbers: range, files: list[File]) -> None:
        """Makes files, and then shows them to the stream all at once."""
        for number in numbers:
            self._write(self._table(*files[number]))
        self._show()

    def _table(self, added: tuple[int, int], asked: tuple[int, int]) -> pa.Table:
        """Ratings and questions evenly mixed."""
        users, items, ratings = self._requests.adds(*added)
        adds, asks = len(users), asked[1] - asked[0]
        order = np.argsort(
            np.concatenate([(np.arange(n) + 0.5) / max(n, 1) for n in (adds, asks)]), kind="stable"
        )

        def column(of_adds: npt.NDArray[Any], of_asks: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return np.concatenate([of_adds, of_asks])[order]

        none = np.zeros(asks, np.int64)
        return pa.table(
            {
                "number": column(np.arange(*added), np.arange(*asked)),
                "adds": column(np.ones(adds, bool), np.zeros(asks, bool)),
                "user": column(users, self._requests.asking[asked[0] : asked[1]]),
                "item": column(items, none),
                "rating": column(ratings, none.astype(np.float64)),
            }
        )

    def _write(self, table: pa.Table) -> None:
        file = self._folder / "made" / f"{self._put:06}.parquet"
        # Parts of a file are read by several tasks.
        pq.write_table(table, file, row_group_size=max(1, len(table) // CONTAINERS))
        # Spark takes files by their times, in milliseconds.
        os.utime(file, ns=(0, (self._began_ms + self._put) * 1_000_000))
        self._put += 1

    def _show(self) -> None:
        for file in sorted((self._folder / "made").iterdir()):
            file.rename(self._folder / "requests" / file.name)

    def await_epochs(self) -> None:
        """Until all files are answered."""
        deadline = time.monotonic() + STALLED_S
        while True:
            last = self._query.lastProgress
            if self._query.exception() is not None:
                raise RuntimeError(str(self._query.exception()))
            if last is not None and last["batchId"] >= self._put - 1 and len(self._answers) == self._put:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"the stream did not answer {self._put} files in {STALLED_S:g} s")
            time.sleep(0.005)

    def stop(self) -> None:
        self._query.stop()

    def wrong(self, files: list[File]) -> int:
        """How many of all answers are not those of the loop."""
        filtering = Filtering(*self._requests.size)
        filtering.add(*self._requests.adds(0, self._requests.loaded))
        wrong = 0
        for file, told in zip(files, self._answers[1:], strict=True):
            filtering.add(*self._requests.adds(*file.added))
            expected = filtering.ask(self._requests.asking[slice(*file.asked)]).tolist()
            answers = dict(zip(told["number"].to_pylist(), told["recommended"].to_pylist(), strict=True))
            wrong += sum(
                answers.get(number) != [item for item in row if item >= 0]
                for number, row in zip(range(*file.asked), expected, strict=True)
            )
        return wrong
