"""Tasks that Spark runs twice at once, and those that lose and go on: `twins_job.py ROOT`.

Spark starts a twin on another host only. So the cluster is a master and two workers in the driver's Java machine, whose
executors have addresses of their own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import SparkConf, SparkContext, TaskContext
from pyspark.sql import DataFrame, SparkSession

import millpond as mp
from millpond.apps.spark_session import INTERPRETED, SETTINGS
from millpond.ops import frames, one_pass
from millpond.ops.one_pass import AnswerTask, WaitedTask
from millpond.ops.tasks import StageTask
from millpond.wire.epochs import Receipt

FILES = 3
ROWS = 20
PER_EPOCH = FILES * ROWS
EPOCHS = 4
SECONDS = 30

SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "20ms",
    "spark.speculation.minTaskRuntime": "500ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.1",
    # A worker whose task was killed is left alone: a zombie.
    "spark.python.task.killTimeout": f"{2 * SECONDS}s",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    # A file is a partition.
    "spark.sql.files.maxPartitionBytes": "1m",
    "spark.sql.files.openCostInBytes": "1m",
}


def attempt() -> int:
    context = TaskContext.get()
    assert context is not None
    return context.attemptNumber()


def first_of(batches: list[pa.RecordBatch]) -> int:
    return int(min(batch.column("k")[0].as_py() for batch in batches))


def wait_for(marker: Path) -> None:
    until = time.monotonic() + SECONDS
    while not marker.exists():
        assert time.monotonic() < until, f"{marker.name} did not come"
        time.sleep(0.01)


class Hold:
    """Where the first attempt of a task waits: until its epoch is over, or its twin is there. Markers tell of both."""

    def __init__(self, root: Path, name: str, until: str = "over") -> None:
        self._root, self._name, self._until = root, name, until

    def marker(self, what: str) -> Path:
        return self._root / f"{self._name} {what}"

    def __call__(self, work: Callable[[], Any]) -> Any:
        """Does the work, after having waited."""
        if attempt():
            self.marker("twin").touch()
            return work()
        self.marker("first").touch()
        wait_for(self.marker(self._until))
        done = work()
        self.marker("went on").touch()
        return done

    def release(self) -> None:
        self.marker("over").touch()
        wait_for(self.marker("twin"))
        wait_for(self.marker("went on"))


Holds = dict[int, Hold]
"""By epoch, that of the task which has the epoch's first row."""


class Source:
    """For `mapInArrow`: counts by which stage and attempt each partition was read, and may be slow."""

    def __init__(self, folder: Path, holds: Holds) -> None:
        self._folder, self._holds = folder, holds

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        read, context = list(batches), TaskContext.get()
        assert context is not None
        first = first_of(read)
        (self._folder / f"{first} {context.stageId()} {attempt()}").touch()
        if first % PER_EPOCH == 0 and first // PER_EPOCH in self._holds:
            self._holds[first // PER_EPOCH](lambda: None)
        yield from read


class HeldAnswers(AnswerTask):
    """Held when its rows are read and answered, before it writes down those that wait, and reports."""

    holds: ClassVar[Holds] = {}

    def __init__(self, *common: Any, asks: bool) -> None:
        super().__init__(*common, asks=asks)
        self._hold = self.holds.get(self._turn.epoch)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        read = list(batches)
        if first_of(read) != self._turn.epoch * PER_EPOCH:
            self._hold = None
        yield from super().__call__(iter(read))

    def _report(self, *what: Any) -> None:
        report = partial(super()._report, *what)
        report() if self._hold is None else self._hold(report)


class HeldWaited(WaitedTask):
    """As that, of rows that waited."""

    holds: ClassVar[Holds] = {}

    def __init__(self, *common: Any, asks: bool, waited: Any) -> None:
        super().__init__(*common, asks=asks, waited=waited)
        self._hold = self.holds.get(self._turn.number)

    def _report(self, *what: Any) -> None:
        report = partial(super()._report, *what)
        report() if self._hold is None else self._hold(report)


class HeldStage(StageTask):
    """Held before it stages its rows."""

    holds: ClassVar[Holds] = {}

    def __init__(self, *common: Any) -> None:
        super().__init__(*common)
        self._hold = self.holds.get(self._turn.epoch)

    def _stage(self, table: pa.Table) -> Receipt:
        stage = partial(super()._stage, table)
        if self._hold is None or first_of(table.to_batches()) != self._turn.epoch * PER_EPOCH:
            return stage()
        return self._hold(stage)


def start_cluster(root: Path) -> SparkSession:
    os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")
    SparkContext._ensure_initialized()
    java: Any = SparkContext._jvm
    deploy, conf = java.org.apache.spark.deploy, SparkConf()._jconf
    master = deploy.master.Master.startRpcEnvAndEndpoint("127.0.0.1", 0, 0, conf)._1()
    address = f"spark://127.0.0.1:{master.address().port()}"
    masters = SparkContext._gateway.new_array(java.java.lang.String, 1)
    masters[0] = address
    for number in (2, 3):
        place = f"127.0.0.{number}", 0, 0, 1, 512, masters, str(root / f"worker {number}")
        rest = java.scala.Some(number), conf, java.scala.Option.empty()
        deploy.worker.Worker.startRpcEnvAndEndpoint(*place, *rest)
    builder = SparkSession.builder.master(address).appName("twins-job").config("spark.ui.enabled", "false")
    for key, value in {**SETTINGS, **INTERPRETED, **SPECULATION}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def write_rows(folder: Path) -> None:
    folder.mkdir()
    for number in range(EPOCHS * FILES):
        rows = range(number * ROWS, (number + 1) * ROWS)
        table = pa.table({"k": list(rows), "t": [row % ROWS for row in rows], "one": [1] * ROWS})
        path = folder / f"{number}.parquet"
        pq.write_table(table, path)
        # Spark takes files by their age; of one age, in any order.
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))


def run(
    spark: SparkSession,
    root: Path,
    name: str,
    operator: Any,
    holds: Holds,
    slow: Holds,
    after: Callable[[int], None],
) -> dict[int, int]:
    """A query over all rows. By partition, how many stages have read it; a twin reads in the stage of the other."""
    reads = root / f"{name} reads"
    reads.mkdir()

    def batch(frame: DataFrame, epoch: int) -> None:
        operator(frame, epoch)
        if epoch in holds:
            holds[epoch].release()
        after(epoch)

    schema = "k long, t long, one long"
    stream = spark.readStream.schema(schema).option("maxFilesPerTrigger", FILES).parquet(str(root / "rows"))
    query = stream.mapInArrow(Source(reads, slow), schema).writeStream.foreachBatch(batch)
    query = query.option("checkpointLocation", str(root / f"{name} checkpoint")).trigger(availableNow=True)
    query.start().awaitTermination()
    stages: dict[int, set[str]] = {}
    for marker in reads.iterdir():
        first, stage, _ = marker.name.split()
        stages.setdefault(int(first), set()).add(stage)
    return {first: len(stages[first]) for first in sorted(stages)}


def fetch(pond: mp.Pond, spark: SparkSession, root: Path) -> dict[str, Any]:
    """U is 10: of each file half the rows wait."""
    state = pond.state("asked", key="long", value="v long")
    feed = state.update(key="k", at="t", value="v", name="feed")
    keys = range(EPOCHS * PER_EPOCH)
    feed(pa.table({"k": [*keys, 0], "t": [0] * len(keys) + [ROWS // 2], "v": [*keys, 0]}), 0)
    slow = {0: Hold(root, "source")}
    HeldAnswers.holds = {1: Hold(root, "answers"), 2: Hold(root, "answers together", until="twin")}
    HeldWaited.holds = {3: Hold(root, "waited")}
    one_pass.AnswerTask, one_pass.WaitedTask = HeldAnswers, HeldWaited  # type: ignore[misc]
    answers = root / "answers"

    def sink(frame: DataFrame, epoch: int) -> None:
        # Behind a shuffle both twins may have reported: whoever is second to end well is heard, too.
        frame = frame.repartition(2) if epoch == 2 else frame
        frame.write.mode("overwrite").parquet(str(answers / f"epoch={epoch}"))

    views = state.fetch(key="k", at="t", into="v", name="views").to(sink)
    waiting: list[int] = []
    files: list[int] = []

    def note(epoch: int) -> None:
        waiting.append(views.pending().rows)
        kept = (root / "pond" / "waiting" / "asked" / "views").glob(f"*/{epoch:012}.*/*")
        files.append(sum(not file.name.startswith("list") for file in kept))

    holds = {**slow, **HeldAnswers.holds, **HeldWaited.holds}
    reads = run(spark, root, "fetch", views, holds, slow, note)
    state.finish("feed")
    ready = {epoch: rows_in(answers / f"epoch={epoch}") for epoch in range(EPOCHS)}
    left = views.drain().rows
    drained = [path for path in answers.iterdir() if path.name.startswith("epoch=-")]
    rest = [row for path in drained for row in rows_in(path)]
    return {"reads": reads, "waiting": waiting, "files": files, "ready": ready, "left": left, "rest": rest}


def rows_in(folder: Path) -> list[int]:
    table = pq.read_table(folder, partitioning=None)
    assert table["k"].equals(table["v"])
    return sorted(table["k"].to_pylist())


def update(pond: mp.Pond, spark: SparkSession, root: Path) -> dict[str, Any]:
    state = pond.state("counts", key="long", value="n long", update=mp.add())
    feed = state.update(key="k", at="k", value="one", name="feed")
    HeldStage.holds = {0: Hold(root, "stage"), 1: Hold(root, "stage together", until="twin")}
    frames.StageTask = HeldStage  # type: ignore[misc]
    reads = run(spark, root, "update", feed, HeldStage.holds, {}, lambda epoch: None)
    state.finish("feed")
    counts = {row["key"]: row["n"] for row in state.snapshot().to_pylist()}
    return {"reads": reads, "counts": counts}


def main(root: Path) -> None:
    root.mkdir()
    write_rows(root / "rows")
    spark = start_cluster(root)
    with mp.open(root / "pond", spark=spark) as pond:
        told = {"fetch": fetch(pond, spark, root), "update": update(pond, spark, root)}
    spark.stop()
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
