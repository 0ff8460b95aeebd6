"""Online learning (Nova, sections 3.4 and 5.2): several trainers and an inference query share one model.

FTRL-proximal learns who clicks from a stream of sparse samples. Its parameters, `z` and `n` of every feature, live in
one State that adds updates up; time is the number of the mini-batch. A trainer fetches the parameters that the samples
of a mini-batch need, and adds what it learnt at the mini-batch's time. How trainers keep in step is a matter of the
fetch alone:

- `bsp`: mini-batch i reads what all trainers have learnt until i - 1, and nothing else;
- `ssp`: it reads whatever is there, once all trainers have learnt from i - STALENESS;
- `asp`: it reads whatever is there.

Every sample is predicted before it is learnt from. In the end the log-loss of these predictions is compared with that of
plain FTRL, which learns from one sample after another, over the same samples.
"""

from __future__ import annotations

import math
import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.console import Console

import millpond as mp
from millpond.apps.spark_session import spark_session
from millpond.errors import BadOption, MillpondError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from millpond.ops.fetch import Fetch

Floats = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]

SECONDS, RATE, KEYS = 20, 1_000, 100_000
MODES = ("bsp", "ssp", "asp")
STALENESS = 2
TRAINERS = 2
TOLERANCE = 0.01

# As in McMahan et al., "Ad Click Prediction: a View from the Trenches" (2013).
ALPHA, BETA, L1, L2 = 0.05, 1.0, 0.1, 0.1

FIELDS = 12  # a sample has one feature of each: the ad, its place, the hour, ...
BIAS = 0  # and this one
INTERCEPT, WEIGHT_MAX = -0.5, 1.0  # of the hidden model that decides who clicks
HELD_OUT = 1 << 40  # samples from this number on are not trained on
FIRST_MINIBATCH = 16
NEWEST = 1 << 62  # later than any mini-batch

INFERENCE_EVERY = 4  # mini-batches
LINE_EVERY_S = 2.0
STALLED_S = 120.0


def run(seconds: int = SECONDS, rate: int = RATE, keys: int = KEYS, mode: str = "bsp") -> bool:
    """Every trainer gets `rate` samples a second for so long; True if their log-loss is near that of sequential FTRL."""
    for option, value, least, most in (
        ("seconds", seconds, 1, 86_400),
        ("rate", rate, 1, 10_000),
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
    """What is trained on: so many mini-batches for every trainer, the same whenever it is asked for.

    The first mini-batches are small, and each is twice the one before: from the many clicks of a large one, a model that
    knows nothing yet would learn far too much at once.
    """

    minibatch: int
    steps: int
    keys: int

    @property
    def total(self) -> int:
        return TRAINERS * sum(min(FIRST_MINIBATCH << step, self.minibatch) for step in range(self.steps))

    def of_trainer(self, source: DataFrame, trainer: int) -> DataFrame:
        """From a source with `value`: the samples of a trainer, in mini-batches `step`."""
        step, place = f"value div {self.minibatch}", f"value % {self.minibatch}"
        rows = source.where(f"{step} < {self.steps}").where(f"{place} < {FIRST_MINIBATCH} * pow(2, {step})")
        return self._samples(rows, f"value * {TRAINERS} + {trainer}")

    def held_out(self, source: DataFrame) -> DataFrame:
        """From the same: samples that no trainer gets."""
        return self._samples(source, f"value + {HELD_OUT}")

    def arrays(self, spark: SparkSession) -> tuple[Longs, Longs]:
        """All that is trained on, in order: the features of each sample, and its clicks."""
        source = spark.range(self.minibatch * self.steps).withColumnRenamed("id", "value")
        parts = [self.of_trainer(source, trainer).toArrow() for trainer in range(TRAINERS)]
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
            source.selectExpr(f"{number} AS id", f"value div {self.minibatch} AS step")
            .selectExpr("*", f"{features} AS features")
            .selectExpr(
                "id",
                "step",
                f"concat(array({BIAS}L), features) AS features",
                f"CAST({_uniform('id')} < 1 / (1 + exp(-{score})) AS LONG) AS click",
            )
        )


def _uniform(of: str) -> str:
    """A number from 0 to 1 that looks random."""
    return f"(shiftrightunsigned(xxhash64({of}), 11) / {1 << 53}D)"


# The model


def weights(z: Floats, n: Floats) -> Floats:
    """What the parameters of features stand for."""
    return -np.sign(z) * np.maximum(np.abs(z) - L1, 0) / ((BETA + np.sqrt(n)) / ALPHA + L2)


class Predicted(NamedTuple):
    """Samples; and for each row, which of them it belongs to."""

    click: Longs
    p: Floats
    loss: Floats
    sample_of: Longs


def predict(rows: pa.Table) -> Predicted:
    """From answered rows of whole samples, in any order: a row has the parameters of one feature of a sample."""
    _, first, sample_of = np.unique(_longs(rows, "id"), return_index=True, return_inverse=True)
    score = np.bincount(sample_of, weights(_doubles(rows, "z"), _doubles(rows, "n")))
    click = _longs(rows, "click")[first]
    p, loss = 1 / (1 + np.exp(-score)), np.logaddexp(0, score) - click * score
    return Predicted(click, p, loss, sample_of)


LEARNT = pa.schema(
    [
        ("step", pa.int64()),
        ("feature", pa.int64()),
        ("dz", pa.float64()),
        ("dn", pa.float64()),
        ("samples", pa.int64()),
        ("loss", pa.float64()),
    ]
)


def learn(rows: pa.Table) -> pa.Table:
    """From the answered rows of a mini-batch: what to add to the parameters of each of its features.

    Also how many samples have the feature, and their loss: for BIAS, which all have, that of the mini-batch.
    """
    samples = predict(rows)
    features, first, feature_of = np.unique(_longs(rows, "feature"), return_index=True, return_inverse=True)
    # Uncommitted, a feature may have been read before and after an update; either will do.
    z, n = _doubles(rows, "z")[first], _doubles(rows, "n")[first]
    gradient = (samples.p - samples.click)[samples.sample_of]
    dn = np.bincount(feature_of, gradient**2)
    sigma = (np.sqrt(n + dn) - np.sqrt(n)) / ALPHA
    return pa.table(
        {
            "step": np.full(len(features), _longs(rows, "step")[0]),
            "feature": features,
            "dz": np.bincount(feature_of, gradient) - sigma * weights(z, n),
            "dn": dn,
            "samples": np.bincount(feature_of),
            "loss": np.bincount(feature_of, samples.loss[samples.sample_of]),
        },
        schema=LEARNT,
    )


def _longs(rows: pa.Table, name: str) -> Longs:
    return np.asarray(rows[name], dtype=np.int64)


def _doubles(rows: pa.Table, name: str) -> Floats:
    """A feature that nobody has learnt anything of has no parameters yet: they are zero."""
    return np.asarray(pc.fill_null(rows[name], 0.0), dtype=np.float64)


# The queries


def asked(samples: DataFrame) -> DataFrame:
    """A row for each feature of each sample, with all the times that a fetch might ask for."""
    return samples.selectExpr(
        "id",
        "step",
        "click",
        "explode(features) AS feature",
        "step - 1 AS before",
        f"step - {STALENESS} AS stale",
        f"{NEWEST} AS newest",
    )


ANSWERED = ("id", "step", "click", "feature", "z", "n")


def fetch(params: mp.State, mode: str, name: str) -> Fetch:
    """What a mini-batch reads, and when: the only difference between the modes."""
    if mode == "bsp":
        return params.fetch(key="feature", at="before", into=["z", "n"], name=name)
    if mode == "ssp":
        return params.fetch(
            key="feature",
            between=("stale", "newest"),
            rule=mp.as_of(),
            into=["z", "n"],
            isolation="uncommitted",
            name=name,
        )
    return params.fetch(key="feature", at="newest", into=["z", "n"], isolation="uncommitted", name=name)


class Loss(NamedTuple):
    """The log-loss of so many samples, in sum."""

    samples: int
    total: float

    @property
    def mean(self) -> float:
        return self.total / self.samples

    def __str__(self) -> str:
        return f"{self.samples:,} samples" + (f", log-loss {self.mean:.4f}" if self.samples else "")


def loss_of(*queries: Trainer | Inference) -> Loss:
    """What these have predicted so far."""
    losses = [loss for query in queries for loss in list(query.losses.values())]
    return Loss(sum(loss.samples for loss in losses), sum(loss.total for loss in losses))


class Trainer:
    """Learns from its mini-batches, in their order. `operator` is for `foreachBatch`."""

    def __init__(self, params: mp.State, mode: str, name: str, folder: str) -> None:
        self.name = name
        self.losses: dict[int, Loss] = {}  # of each mini-batch
        self._params = params
        self._folder = os.path.join(folder, name)
        os.makedirs(self._folder, exist_ok=True)
        self._update = params.update(key="feature", at="step", value=["dz", "dn"], late="error", name=name)
        params.report(name, update=0)  # nothing comes before mini-batch 0
        self.operator = fetch(params, mode, name).to(self._learn)

    def _learn(self, answers: DataFrame, epoch: int) -> None:
        file = os.path.join(self._folder, f"epoch={epoch}.parquet")
        # What an epoch has learnt is kept before it is added to the State: an epoch that runs again after a crash has to
        # add the same. By then uncommitted parameters may be others, and even a sum of the same doubles depends on the
        # order of the rows.
        if not os.path.exists(file):
            rows = answers.select(*ANSWERED).toArrow()  # a mini-batch is small enough to learn from it here
            parts = [rows.filter(pc.field("step") == step) for step in rows["step"].unique()]
            pq.write_table(pa.concat_tables([LEARNT.empty_table(), *map(learn, parts)]), file + ".part")
            os.replace(file + ".part", file)
        learnt = pq.read_table(file)
        self._update(learnt, epoch)
        done = learnt.filter(pc.field("feature") == BIAS).to_pylist()
        if done:
            # Nobody else can know that a mini-batch is complete. The next one asks for no time before it.
            last = max(minibatch["step"] for minibatch in done)
            self._params.report(self.name, update=last + 1, fetch=last)
        self.losses.update({row["step"]: Loss(row["samples"], row["loss"]) for row in done})


class Inference:
    """Predicts samples that nobody trains on, from whatever parameters are there."""

    def __init__(self, params: mp.State) -> None:
        self.losses: dict[int, Loss] = {}  # of each epoch
        self.operator = fetch(params, "asp", "inference").to(self._predict)
        params.report("inference", fetch=NEWEST)

    def _predict(self, answers: DataFrame, epoch: int) -> None:
        loss = predict(answers.select(*ANSWERED).toArrow()).loss
        self.losses[epoch] = Loss(len(loss), float(loss.sum()))


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
    params = pond.state("params", key="long", value="z double, n double", update=mp.add())
    # All trainers are there before one of them learns: U waits for each.
    trainers = [Trainer(params, mode, f"trainer_{number}", folder) for number in range(TRAINERS)]
    inference = Inference(params)

    def source() -> DataFrame:
        options = {"rowsPerBatch": samples.minibatch, "numPartitions": 1}
        return spark.readStream.format("rate-micro-batch").options(**options).load()

    queries = Queries(os.path.join(folder, "checkpoints"))
    try:
        for number, trainer in enumerate(trainers):
            rows = asked(samples.of_trainer(source(), number))
            queries.start(trainer.name, rows, trainer.operator, every_s)
        rows = asked(samples.held_out(source()))
        queries.start("inference", rows, inference.operator, INFERENCE_EVERY * every_s)
        watch(queries, params, trainers, inference, samples.total, show)
    finally:
        queries.stop()
    for trainer in trainers:
        params.finish(trainer.name)
    return loss_of(*trainers)


def watch(
    queries: Queries,
    params: mp.State,
    trainers: list[Trainer],
    inference: Inference,
    count: int,
    show: Callable[[str], None],
) -> None:
    """Shows a line now and then until so many samples are learnt from."""
    seen = last_shown = 0
    shown = moved = time.monotonic()
    while seen < count:
        queries.check()
        time.sleep(0.05)
        now, learnt = time.monotonic(), loss_of(*trainers)
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
                f" inference: {loss_of(inference)}"
            )
            last_shown, shown = seen, now


class Queries:
    """Streaming queries that end between two epochs: one that is interrupted complains."""

    def __init__(self, checkpoints: str) -> None:
        self._checkpoints = checkpoints
        self._running: list[tuple[StreamingQuery, threading.Lock]] = []
        self._ended = False

    def start(
        self, name: str, rows: DataFrame, operator: Callable[[DataFrame, int], None], every_s: float
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
            if epoch_runs.acquire(timeout=STALLED_S):
                epoch_runs.release()
            query.stop()


# The check


def sequential(features: Longs, clicks: Longs) -> float:
    """The log-loss of plain FTRL, which predicts a sample, learns from it, and goes on to the next."""
    z: defaultdict[int, float] = defaultdict(float)
    n: defaultdict[int, float] = defaultdict(float)

    def weight(i: int) -> float:
        if abs(z[i]) <= L1:
            return 0.0
        return (math.copysign(L1, z[i]) - z[i]) / ((BETA + math.sqrt(n[i])) / ALPHA + L2)

    total = 0.0
    for sample, click in zip(features.tolist(), clicks.tolist(), strict=True):
        w = [weight(i) for i in sample]
        p = 1 / (1 + math.exp(-sum(w)))
        total -= math.log(p if click else 1 - p)
        g = p - click
        for i, w_i in zip(sample, w, strict=True):
            z[i] += g - (math.sqrt(n[i] + g * g) - math.sqrt(n[i])) / ALPHA * w_i
            n[i] += g * g
    return total / len(clicks)
