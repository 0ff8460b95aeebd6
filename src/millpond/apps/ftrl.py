"""Online learning (Nova, sections 3.4 and 5.2): several trainers and an inference query share one model.

FTRL-proximal learns who clicks from a stream of sparse samples. Its parameters, `z` and `n` of every feature, live in
one State that adds updates up. A trainer is a query whose micro-batches are mini-batches: each is a step that fetches the
parameters that its samples need, learns in Spark's workers, and adds what it learnt. How trainers keep in step is a
matter of the fetch alone:

- `bsp`: mini-batch i reads what all trainers have learnt until i - 1, and nothing else;
- `ssp`: it reads whatever is there, once all trainers have learnt from i - STALENESS;
- `asp`: it reads whatever is there.

Every sample is predicted before it is learnt from. In the end the log-loss of these predictions is compared with that of
plain FTRL, which learns from one sample after another, over the same samples.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console

import millpond as mp
from millpond.apps.ftrl_model import LOSS, Longs, learn, predict, sequential
from millpond.apps.spark_session import spark_session
from millpond.errors import BadOption, MillpondError
from millpond.ops.step import Step

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

SECONDS, RATE, KEYS = 20, 2_000, 100_000
STALENESS = 2
MODES: dict[str, dict[str, Any]] = {
    "bsp": {},
    "ssp": {"isolation": "uncommitted", "staleness": STALENESS},
    "asp": {"isolation": "uncommitted", "staleness": None},
}
TRAINERS = 2
TOLERANCE = 0.01

FIELDS = 12  # a sample has one feature of each: the ad, its place, the hour, ...
BIAS = 0  # and this one
INTERCEPT, WEIGHT_MAX = -0.5, 1.0  # of the hidden model that decides who clicks
HELD_OUT = 1 << 40  # samples from this number on are not trained on
NEWEST = 1 << 62  # later than any mini-batch

INFERENCE_EVERY = 4  # mini-batches
INFERENCE_ROWS = 100
LINE_EVERY_S = 2.0
STALLED_S = 120.0
EPOCH_ENDS_S = 2.0


def run(seconds: int = SECONDS, rate: int = RATE, keys: int = KEYS, mode: str = "bsp") -> bool:
    """Every trainer gets `rate` samples a second for so long; True if their log-loss is near that of sequential FTRL."""
    for option, value, least, most in (
        ("seconds", seconds, 1, 86_400),
        ("rate", rate, 1, 100_000),
        ("keys", keys, 2 * FIELDS, 1 << 40),
    ):
        if not least <= value <= most:
            raise BadOption(f"--{option} {value} is not within {least} and {most:,}", option=f"--{option}")
    if mode not in MODES:
        raise BadOption(f"no mode is called {mode!r}", hint=f"known: {', '.join(MODES)}", option="--mode")
    out = Console(highlight=False, soft_wrap=True)
    began = time.perf_counter()
    out.print("starting Spark and a pond (the first time, kernels are compiled) ...")
    with (
        tempfile.TemporaryDirectory(prefix="millpond-ftrl-") as folder,
        spark_session("ftrl", compiled=False) as spark,
        mp.open(os.path.join(folder, "pond"), spark=spark) as pond,
    ):
        samples = Samples(minibatch=rate, steps=seconds, keys=keys)
        found = train(spark, pond, samples, mode, folder, lambda line: out.print(f"  {line}"))
        out.print("comparing with FTRL that learns from one sample after another ...")
        expected = sequential(*samples.arrays(spark))
    excess = found.mean / expected - 1
    out.print(
        f"{found.samples:,} samples, {samples.total - found.samples} missing,"
        f" [bold]log-loss {found.mean:.4f}[/bold]: {excess:+.1%} beside the {expected:.4f} of sequential FTRL,"
        f" of {TOLERANCE:.0%} allowed; {mode} ({time.perf_counter() - began:.0f} s)"
    )
    # Much better would be as wrong: predictions that have seen their own clicks.
    return found.samples == samples.total and abs(excess) <= TOLERANCE


# The samples


class Samples(NamedTuple):
    """What is trained on: so many mini-batches for every trainer, the same whenever it is asked for."""

    minibatch: int
    steps: int
    keys: int
    trainers: int = TRAINERS

    @property
    def total(self) -> int:
        return self.trainers * self.steps * self.minibatch

    def of_trainer(self, source: DataFrame, trainer: int) -> DataFrame:
        """From a source with `value`: the samples of a trainer."""
        rows = source.where(f"value < {self.minibatch * self.steps}")
        return self._samples(rows, f"value * {self.trainers} + {trainer}")

    def held_out(self, source: DataFrame) -> DataFrame:
        """From the same: samples that no trainer gets."""
        return self._samples(source, f"value + {HELD_OUT}")

    def arrays(self, spark: SparkSession) -> tuple[Longs, Longs]:
        """All that is trained on, in order: the features of each sample, and its clicks."""
        source = spark.range(self.minibatch * self.steps).withColumnRenamed("id", "value")
        parts = [self.of_trainer(source, trainer).toArrow() for trainer in range(self.trainers)]
        samples = pa.concat_tables(parts).sort_by("id")
        features = pc.list_flatten(samples["features"]).to_numpy()
        return features.reshape(samples.num_rows, FIELDS + 1), samples["click"].to_numpy()

    def _samples(self, source: DataFrame, number: str) -> DataFrame:
        # floor(m ** u) is r with a probability of about 1 / r: Zipf's law.
        rank = f"floor(pow({self.keys // FIELDS}, {_uniform('id, field')}))"
        features = f"transform(sequence(1L, {FIELDS}L), field -> {FIELDS} * {rank} + field)"
        weight = f"{WEIGHT_MAX}D * (2 * {_uniform('feature')} - 1)"
        score = f"aggregate(features, {INTERCEPT}D, (sum, feature) -> sum + {weight})"
        return (
            source.selectExpr(f"{number} AS id")
            .selectExpr("*", f"{features} AS features")
            .selectExpr(
                "id",
                f"concat(array({BIAS}L), features) AS features",
                f"CAST({_uniform('id')} < 1 / (1 + exp(-{score})) AS LONG) AS click",
            )
        )


def _uniform(of: str) -> str:
    """A number from 0 to 1 that looks random."""
    return f"(shiftrightunsigned(xxhash64({of}), 11) / {1 << 53}D)"


# The queries


def parameters(pond: mp.Pond, name: str = "params") -> mp.State:
    return pond.state(name, key="long", value="z double, n double", update=mp.add())


def trainer(params: mp.State, mode: str, name: str) -> Step:
    """Learns from its mini-batches, in their order, for `foreachBatch`."""
    return params.step(learn, key="feature", into=["z", "n"], value=["z", "n"], name=name, **MODES[mode])


class Loss(NamedTuple):
    """The log-loss of so many samples, in sum."""

    samples: int = 0
    total: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / self.samples

    def __str__(self) -> str:
        return f"{self.samples:,} samples" + (f", log-loss {self.mean:.4f}" if self.samples else "")


def loss_of(params: mp.State) -> Loss:
    """What trainers have lost so far: they add it to the model, and so it is counted exactly once, too."""
    fetch = params.fetch(key="key", at="at", into=["z", "n"], isolation="uncommitted")
    row = fetch.now(pa.table({"key": [LOSS], "at": [NEWEST]})).to_pylist()[0]
    return Loss() if row["n"] is None else Loss(int(row["n"]), row["z"])


class Inference:
    """Predicts samples that nobody trains on, from whatever parameters are there."""

    def __init__(self, params: mp.State) -> None:
        self._losses: dict[int, Loss] = {}  # of each epoch
        fetch = params.fetch(
            key="feature", at="newest", into=["z", "n"], isolation="uncommitted", name="inference"
        )
        self.operator = fetch.to(self._predict)
        params.report("inference", fetch=NEWEST)

    @property
    def loss(self) -> Loss:
        losses = list(self._losses.values())
        return Loss(sum(loss.samples for loss in losses), sum(loss.total for loss in losses))

    @staticmethod
    def questions(samples: DataFrame) -> DataFrame:
        """A row for each feature of each sample."""
        return samples.selectExpr("id", "click", "explode(features) AS feature", f"{NEWEST} AS newest")

    def _predict(self, answers: DataFrame, epoch: int) -> None:
        loss = predict(answers.select("id", "click", "z", "n").toArrow()).loss
        self._losses[epoch] = Loss(len(loss), float(loss.sum()))


def train(
    spark: SparkSession,
    pond: mp.Pond,
    samples: Samples,
    mode: str,
    folder: str,
    show: Callable[[str], None],
    every_s: float = 1.0,
) -> Loss:
    """Runs until all samples are learnt from. A trainer gets a mini-batch each `every_s`, if it can follow."""
    params = parameters(pond)
    # All trainers are there before one of them learns: U waits for each.
    trainers = [trainer(params, mode, f"trainer_{number}") for number in range(samples.trainers)]
    inference = Inference(params)

    def source(rows: int) -> DataFrame:
        options = {"rowsPerBatch": rows, "numPartitions": 1}
        return spark.readStream.format("rate-micro-batch").options(**options).load()

    queries = Queries(os.path.join(folder, "checkpoints"))
    try:
        for number, step in enumerate(trainers):
            rows = samples.of_trainer(source(samples.minibatch), number)
            queries.start(step.name, rows, step, every_s)
        rows = Inference.questions(samples.held_out(source(INFERENCE_ROWS)))
        queries.start("inference", rows, inference.operator, INFERENCE_EVERY * every_s)
        watch(queries, params, inference, samples.total, show)
    finally:
        queries.stop()
    for step in trainers:
        params.finish(step.name)
    return loss_of(params)


def watch(
    queries: Queries,
    params: mp.State,
    inference: Inference,
    count: int,
    show: Callable[[str], None],
) -> None:
    """Shows a line now and then until so many samples are learnt from."""
    seen = last_shown = 0
    shown = moved = time.monotonic()
    while seen < count:
        queries.check()
        time.sleep(0.1)
        now, learnt = time.monotonic(), loss_of(params)
        if learnt.samples > seen:
            seen, moved = learnt.samples, now
        if now - moved > STALLED_S:
            raise MillpondError(
                f"nothing moved for {STALLED_S:.0f} s: {seen:,} of {count:,} samples",
                hint="give a lower --rate: the machine may be too busy for this one",
            )
        if now - shown >= LINE_EVERY_S or seen == count:
            rate = (seen - last_shown) / (now - shown)
            show(
                f"training: {learnt}, {rate:,.0f}/s, U {params.progress().update};"
                f" inference: {inference.loss}"
            )
            last_shown, shown = seen, now


class Queries:
    """Streaming queries that end between two epochs, where one ends soon: one that is interrupted complains."""

    def __init__(self, checkpoints: str) -> None:
        self._checkpoints = checkpoints
        self._running: list[tuple[StreamingQuery, threading.Lock]] = []
        self._ended = False

    def start(
        self, name: str, rows: DataFrame, operator: Callable[[DataFrame, int], Any], every_s: float
    ) -> None:
        epoch_runs = threading.Lock()

        def run_epoch(frame: DataFrame, epoch: int) -> None:
            with epoch_runs:
                if not self._ended:
                    operator(frame, epoch)

        query = (
            rows.writeStream.queryName(name)
            .foreachBatch(run_epoch)
            .option("checkpointLocation", os.path.join(self._checkpoints, name))
            .trigger(processingTime=f"{every_s} seconds")
            .start()
        )
        self._running.append((query, epoch_runs))

    def check(self) -> None:
        """Raises what ended a query."""
        for query, _ in self._running:
            error = query.exception()
            if error is not None:
                raise error

    def stop(self) -> None:
        self._ended = True
        for query, epoch_runs in self._running:
            if epoch_runs.acquire(timeout=EPOCH_ENDS_S):
                epoch_runs.release()
            query.stop()
