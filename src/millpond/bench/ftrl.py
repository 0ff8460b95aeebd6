"""Online learning (Nova, section 5.2): training throughput by mini-batch and mode, and inference while training runs.

Samples lie in Parquet files, a mini-batch each. A trainer is a streaming query that reads one file a micro-batch, with a
checkpoint. A third of its micro-batches warm up; the others count, from the end of one to the end of another, with all that Spark
does in between. Two trainers share one model unless said otherwise. The log-loss is that of all samples, each predicted before it
is learnt from, beside that of FTRL over the same samples in one sequence.

- millpond: `State.step`, the modes of `millpond.apps.ftrl`; durable and exactly once.
- redis: the same queries with the same learning in `mapInArrow`, parameters in Redis.
- river: river's FTRL in a loop on one core. No stream, no sharing.
- compiled-loop: our own kernel on one core over arrays in memory, which is what learning alone takes.

Inference asks for the parameters of one sample at a time, FIELDS + 1 rows, by `now`, and predicts, from the process that
opened the pond.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.table import Table

import millpond as mp
from millpond.apps import ftrl
from millpond.apps.ftrl import BIAS, FIELDS, INTERCEPT, NEWEST, TOLERANCE, WEIGHT_MAX, Loss
from millpond.apps.ftrl_model import Longs, encoded, learn_samples, predict
from millpond.apps.spark_session import spark_session
from millpond.bench import ftrl_peers as peers
from millpond.bench.adcamp_peers import find_redis, redis_server
from millpond.bench.report import print_notes, save_figure, wide_console

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KEYS = 100_000
TRAINERS = 2
SCHEMA = "features array<long>, click long"
INFERENCE_PAUSE_S = 0.02
IDLE_INFERENCES = 200  # once training has ended
STALLED_S = 300.0


class Work(NamedTuple):
    """How many mini-batches of which size a trainer gets, and how many samples the loop over river."""

    minibatches: dict[int, int]
    inference: int
    redis: int
    river: int


FULL = Work({1_000: 18, 10_000: 24, 100_000: 6}, inference=10_000, redis=6, river=20_000)
QUICK = Work({500: 4, 2_000: 4}, inference=2_000, redis=3, river=1_000)


class Set(NamedTuple):
    """Samples in their order, and the log-loss of plain FTRL over them; number i is of trainer i % TRAINERS."""

    minibatch: int
    steps: int
    samples: pa.Table
    sequential: float
    loop_rate: float


def run(quick: bool, progress: Callable[[str], None], work: Work | None = None) -> list[dict[str, Any]]:
    """Raises where samples are missing; a log-loss that is too far off is in the results, and said."""
    work = work or (QUICK if quick else FULL)
    with (
        spark_session("millpond bench ftrl") as spark,
        tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder,
        mp.open(os.path.join(folder, "pond"), spark=spark) as pond,
        ExitStack() as servers,
    ):
        bench = _Bench(spark, pond, Path(folder), progress)
        progress("warming up")  # Spark compiles its own code over its first batches
        bench.millpond(drawn(*next(iter(work.minibatches.items()))), "asp")
        bench.results.clear()
        for minibatch, steps in work.minibatches.items():
            progress(f"mini-batches of {minibatch:,}: drawing samples")
            samples = drawn(minibatch, steps)
            for mode in ftrl.MODES:
                bench.millpond(samples, mode)
            if minibatch == work.inference:
                bench.millpond(samples, "bsp", inference=True)
                bench.millpond(samples, "bsp", trainers=1)
                bench.millpond(samples, "bsp", trainers=1, inference=True)
                bench.loop(samples)
                bench.river(samples, work.river)
                path = find_redis(progress)
                if path is not None:
                    bench.redis(samples, work.redis, servers.enter_context(redis_server(path)))
    return bench.results


def drawn(minibatch: int, steps: int) -> Set:
    """Samples as those of the demo: a feature of each field by Zipf's law, clicks by a hidden model."""
    random = np.random.default_rng(0)
    count = minibatch * steps * TRAINERS
    ranks = np.floor((KEYS // FIELDS) ** random.random((count, FIELDS))).astype(np.int64)
    features = np.column_stack([np.full(count, BIAS), FIELDS * ranks + np.arange(1, FIELDS + 1)])
    hidden = random.uniform(-WEIGHT_MAX, WEIGHT_MAX, KEYS + FIELDS + 1)
    hidden[BIAS] = INTERCEPT
    clicks = (random.random(count) < 1 / (1 + np.exp(-hidden[features].sum(axis=1)))).astype(np.int64)
    offsets = np.arange(0, features.size + 1, FIELDS + 1, dtype=np.int32)
    samples = pa.table({"features": pa.ListArray.from_arrays(offsets, features.ravel()), "click": clicks})
    _sequential(samples.slice(0, 10))  # compiles
    loss, seconds = _sequential(samples)
    return Set(minibatch, steps, samples, loss, count / seconds)


def _sequential(samples: pa.Table) -> tuple[float, float]:
    """The log-loss of FTRL over all samples, one after another, and the seconds of learning."""
    offsets, features, places = encoded(samples)
    z, n = np.zeros(len(features)), np.zeros(len(features))
    clicks = np.array(samples["click"])
    began = time.perf_counter()
    total = learn_samples(offsets, places, clicks, z, n)
    return total / len(samples), time.perf_counter() - began


class _Bench:
    def __init__(
        self, spark: SparkSession, pond: mp.Pond, folder: Path, progress: Callable[[str], None]
    ) -> None:
        self.results: list[dict[str, Any]] = []
        self._spark = spark
        self._pond = pond
        self._folder = folder
        self._progress = progress
        self._numbers = itertools.count()

    def millpond(self, of: Set, mode: str, trainers: int = TRAINERS, inference: bool = False) -> None:
        self._progress(f"  {mode}, {trainers} trainer{'s' * (trainers > 1)}{', inference' * inference}")
        params = ftrl.parameters(self._pond, f"params_{next(self._numbers)}")
        steps = [ftrl.trainer(params, mode, f"trainer_{number}") for number in range(trainers)]
        latencies: list[float] = []
        ask = (lambda: latencies.append(_infer(params, of))) if inference else None
        rate, batch_ms = self._stream(of, trainers, of.steps, [*steps], ask)
        loss = ftrl.loss_of(params)
        figures: dict[str, Any] = {"mode": mode}
        if latencies:
            figures |= {
                f"inference_p{part}_ms": float(np.percentile(latencies, part)) * 1e3 for part in (50, 99)
            }
            figures["inferences"] = len(latencies)
            idle = [_infer(params, of) for _ in range(IDLE_INFERENCES)]
            figures["inference_idle_p50_ms"] = float(np.percentile(idle, 50)) * 1e3
        self._pond.forget(params)
        self._add("millpond", of, trainers, of.steps, rate, loss, batch_p50_ms=batch_ms, **figures)

    def redis(self, of: Set, steps: int, port: int) -> None:
        self._progress("  redis")
        task = peers.RedisStep(port)

        def step(frame: DataFrame, epoch: int) -> None:
            frame.mapInArrow(task, task.schema).collect()

        rate, batch_ms = self._stream(of, TRAINERS, steps, [step] * TRAINERS, None)
        loss = Loss(*peers.redis_loss(port))
        note = "nothing is durable, and a batch that runs again counts again"
        self._add("redis", of, TRAINERS, steps, rate, loss, batch_p50_ms=batch_ms, mode="asp", note=note)

    def river(self, of: Set, count: int) -> None:
        self._progress("  river")
        samples = of.samples.slice(0, count)
        features = samples["features"].combine_chunks().flatten().to_numpy().reshape(-1, FIELDS + 1)
        rate, loss = peers.run_river(features, np.array(samples["click"]))
        expected = _sequential(samples)[0]
        figures = {"log_loss": loss, "excess": loss / expected - 1, "samples": len(samples)}
        note = "river's FTRL in a loop on one core, no stream"
        self.results.append({"system": "river", "samples_per_s": rate, **figures, "note": note})

    def loop(self, of: Set) -> None:
        figures = {"log_loss": of.sequential, "excess": 0.0, "samples": len(of.samples)}
        note = "the kernel alone on one core, arrays in memory, no stream"
        self.results.append(
            {"system": "compiled-loop", "samples_per_s": of.loop_rate, **figures, "note": note}
        )

    def _add(
        self, system: str, of: Set, trainers: int, steps: int, rate: float, loss: Loss, **figures: Any
    ) -> None:
        """Compares with what plain FTRL loses on the same samples."""
        samples = _taken(of, trainers, steps)
        if loss.samples != len(samples):
            raise RuntimeError(f"{system} has learnt from {loss.samples:,} of {len(samples):,} samples")
        whole = len(samples) == len(of.samples)
        expected = of.sequential if whole else _sequential(samples)[0]
        result = {
            "system": system,
            "minibatch": of.minibatch,
            "trainers": trainers,
            "samples_per_s": rate,
            "log_loss": loss.mean,
            "excess": loss.mean / expected - 1,
            "samples": loss.samples,
            **figures,
        }
        if abs(result["excess"]) > TOLERANCE:
            excess = f"log-loss {result['excess']:+.1%} off, more than {TOLERANCE:.0%}"
            result["note"] = "; ".join(filter(None, (result.get("note"), excess)))
        self.results.append(result)
        self._progress(f"    {rate:,.0f} samples/s, log-loss {result['excess']:+.2%}")

    def _stream(
        self,
        of: Set,
        trainers: int,
        steps: int,
        operators: list[Callable[[DataFrame, int], Any]],
        meanwhile: Callable[[], object] | None,
    ) -> tuple[float, float]:
        """Runs each trainer's query to its end: samples a second of all, and the median of a micro-batch in ms."""
        with tempfile.TemporaryDirectory(dir=self._folder) as place:
            ends: list[list[float]] = [[] for _ in operators]
            queries = []
            for number, operator in enumerate(operators):
                folder = Path(place) / f"{number}"
                _write(_taken(of, trainers, steps), number, trainers, of.minibatch, folder / "samples")

                def run_epoch(
                    frame: DataFrame, epoch: int, operator: Any = operator, done: Any = ends[number]
                ) -> None:
                    operator(frame, epoch)
                    done.append(time.perf_counter())

                samples = self._spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
                queries.append((samples.parquet(str(folder / "samples")), run_epoch, folder / "checkpoint"))
            running = [
                rows.writeStream.foreachBatch(run_epoch)
                .option("checkpointLocation", str(checkpoint))
                .trigger(availableNow=True)
                .start()
                for rows, run_epoch, checkpoint in queries
            ]
            try:
                deadline = time.monotonic() + STALLED_S
                while any(query.isActive for query in running) and time.monotonic() < deadline:
                    warm = all(len(done) > steps // 3 for done in ends)
                    if meanwhile is not None and warm:
                        meanwhile()
                    time.sleep(INFERENCE_PAUSE_S)
            finally:
                for query in running:
                    query.stop()
            for query in running:
                error = query.exception()
                if error is not None:
                    raise error
        counted = [done[steps // 3 :] for done in ends]
        rates = [(len(done) - 1) * of.minibatch / (done[-1] - done[0]) for done in counted]
        return sum(rates), float(np.median(np.concatenate([np.diff(done) for done in counted]))) * 1e3


def _taken(of: Set, trainers: int, steps: int) -> pa.Table:
    """The samples that so many trainers get, in order."""
    return of.samples.slice(0, of.minibatch * steps * trainers)


def _write(samples: pa.Table, trainer: int, trainers: int, minibatch: int, folder: Path) -> None:
    folder.mkdir(parents=True)
    own = samples.take(pa.array(range(trainer, len(samples), trainers)))
    for number in range(len(own) // minibatch):
        file = folder / f"{number:06d}.parquet"
        pq.write_table(own.slice(number * minibatch, minibatch), file)
        os.utime(file, (number + 1, number + 1))  # the source takes the oldest first


def _infer(params: mp.State, of: Set) -> float:
    """Predicts one sample, and gives the seconds."""
    number = int(time.perf_counter_ns() // 1_000 % len(of.samples))
    features: Longs = of.samples["features"][number].values.to_numpy()
    rows = len(features)
    fetch = params.fetch(key="feature", at="at", into=["z", "n"], isolation="uncommitted")
    began = time.perf_counter()
    row = pa.table({"feature": features, "at": np.full(rows, NEWEST)})
    answered = fetch.now(row)
    predict(
        answered.append_column("id", pa.array(np.zeros(rows))).append_column(
            "click", pa.array(np.zeros(rows))
        )
    )
    return time.perf_counter() - began


def print_table(name: str, results: list[dict[str, Any]]) -> None:
    """A line for each run."""
    table = Table(title=f"millpond bench {name}", title_justify="left")
    table.add_column("system", no_wrap=True)
    headings = {
        "minibatch": "mini-batch",
        "mode": "mode",
        "trainers": "trainers",
        "samples_per_s": "samples/s",
        "batch_p50_ms": "micro-batch\np50 ms",
        "log_loss": "log-loss",
        "excess": "beside\nsequential",
        "inference_p50_ms": "inference\np50 ms",
        "inference_p99_ms": "inference\np99 ms",
        "inference_idle_p50_ms": "no training\np50 ms",
    }
    shapes = {
        "minibatch": ",",
        "samples_per_s": ",.0f",
        "batch_p50_ms": ",.0f",
        "log_loss": ".4f",
        "excess": "+.2%",
        "inference_p50_ms": ".2f",
        "inference_p99_ms": ".2f",
        "inference_idle_p50_ms": ".2f",
    }
    for heading in headings.values():
        table.add_column(heading, justify="right")
    for result in results:
        cells = (format(result[key], shapes.get(key, "")) if key in result else "" for key in headings)
        table.add_row(result["system"], *cells)
    console = wide_console()
    console.print(table)
    print_notes(console, results)


def plot(path_base: Path, name: str, results: list[dict[str, Any]]) -> list[Path]:
    """Samples per second over mini-batch sizes, a line for each mode of two trainers; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for mode in ftrl.MODES:
        own = [
            result
            for result in results
            if result["system"] == "millpond"
            and result["mode"] == mode
            and result["trainers"] == TRAINERS
            and "inferences" not in result
        ]
        axes.plot([r["minibatch"] for r in own], [r["samples_per_s"] for r in own], marker="o", label=mode)
    for result in results:
        if result["system"] in ("river", "redis"):
            axes.axhline(result["samples_per_s"], color="#9aa5ac", linestyle="--")
            axes.annotate(result["system"], (1, result["samples_per_s"]), xycoords=("axes fraction", "data"))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("samples in a mini-batch")
    axes.set_ylabel("samples per second")
    axes.set_title(f"millpond bench {name}", loc="left")
    axes.legend()
    axes.spines[["top", "right"]].set_visible(False)
    return save_figure(figure, path_base)
