"""FTRL in mini-batches, by trainers that share a State, learns what FTRL learns sample by sample."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import millpond as mp
from millpond import cli
from millpond.apps import ftrl
from millpond.apps.ftrl import ALPHA, BETA, BIAS, FIELDS, L1, L2, MODES, TRAINERS, Samples, Trainer
from millpond.errors import BadOption, EpochChanged

SMALL = Samples(minibatch=40, steps=6, keys=600)
SMALLER = Samples(minibatch=40, steps=4, keys=600)
"""For the mode whose result is the same every time."""


# The reference, and the columnar code


def test_sequential_ftrl_by_hand() -> None:
    """One feature, seen three times, with alpha 0.05, beta 1, L1 0.1 and L2 0.1.

    1. w = 0, p = 0.5; click: loss ln 2, g = -0.5, z = -0.5, n = 0.25.
    2. w = (0.5 - 0.1) / ((1 + 0.5) / 0.05 + 0.1) = 0.01328904, p = 0.50332221; click: loss -ln p = 0.68652474,
       g = p - 1, sigma = (sqrt(0.25 + g * g) - 0.5) / 0.05 = 4.09523078, z = -0.5 + g - sigma * w = -1.05109946,
       n = 0.25 + g * g = 0.49668883.
    3. w = (1.05109946 - 0.1) / ((1 + 0.70476154) / 0.05 + 0.1) = 0.02781380, p = 0.50695300; no click:
       loss -ln(1 - p) = 0.70715078.
    """
    assert (ALPHA, BETA, L1, L2) == (0.05, 1.0, 0.1, 0.1)
    found = ftrl.sequential(np.array([[7], [7], [7]]), np.array([1, 1, 0]))
    assert found == pytest.approx((math.log(2) + 0.68652474 + 0.70715078) / 3, abs=1e-8)


def naive_weight(z: float, n: float) -> float:
    if abs(z) <= L1:
        return 0.0
    return -(z - math.copysign(L1, z)) / ((BETA + math.sqrt(n)) / ALPHA + L2)


def naive_minibatch(
    features: np.ndarray, clicks: np.ndarray, z: dict[int, float], n: dict[int, float]
) -> tuple[dict[int, float], dict[int, float], list[float]]:
    """What a mini-batch adds to z and n, and its losses; one sample, one feature at a time."""
    sums: dict[int, float] = {}
    dn: dict[int, float] = {}
    losses = []
    for row, click in zip(features.tolist(), clicks.tolist(), strict=True):
        score = sum(naive_weight(z.get(feature, 0.0), n.get(feature, 0.0)) for feature in row)
        p = 1 / (1 + math.exp(-score))
        losses.append(-math.log(p if click else 1 - p))
        for feature in row:
            sums[feature] = sums.get(feature, 0.0) + p - click
            dn[feature] = dn.get(feature, 0.0) + (p - click) ** 2
    dz = {}
    for feature, gradients in sums.items():
        old_z, old_n = z.get(feature, 0.0), n.get(feature, 0.0)
        sigma = (math.sqrt(old_n + dn[feature]) - math.sqrt(old_n)) / ALPHA
        dz[feature] = gradients - sigma * naive_weight(old_z, old_n)
    return dz, dn, losses


@pytest.mark.parametrize("seed", range(3))
def test_a_minibatch_learns_what_a_loop_learns(seed: int) -> None:
    random = np.random.default_rng(seed)
    features = np.column_stack([np.full(50, BIAS), *(10 * k + random.integers(1, 9, 50) for k in range(4))])
    clicks = random.integers(0, 2, 50)
    known = [BIAS, *range(1, 30)]
    z = dict(zip(known, random.normal(0, 3, 30).tolist(), strict=True))
    n = dict(zip(known, random.exponential(5, 30).tolist(), strict=True))
    rows = pa.table(
        {
            "id": np.repeat(random.permutation(50), 5),
            "step": np.full(250, 4),
            "click": np.repeat(clicks, 5),
            "feature": features.ravel(),
            "z": [z.get(feature) for feature in features.ravel().tolist()],
            "n": [n.get(feature) for feature in features.ravel().tolist()],
        }
    ).take(random.permutation(250))
    learnt = ftrl.learn(rows)
    dz, dn, losses = naive_minibatch(features, clicks, z, n)
    assert learnt["step"].to_pylist() == [4] * len(dz)
    for name, expected in (("dz", dz), ("dn", dn)):
        found = dict(zip(learnt["feature"].to_pylist(), learnt[name].to_pylist(), strict=True))
        assert found == pytest.approx(expected, abs=1e-12)
    whole = learnt.filter(pa.compute.equal(learnt["feature"], BIAS)).to_pylist()
    assert [row["samples"] for row in whole] == [50]
    assert whole[0]["loss"] == pytest.approx(sum(losses))
    assert ftrl.predict(rows).loss.sum() == pytest.approx(sum(losses))
    assert len(ftrl.predict(rows).loss) == 50


# The samples


def test_samples_are_what_they_are_said_to_be(spark: SparkSession) -> None:
    samples = Samples(minibatch=100, steps=6, keys=1_200)
    source = spark.range(0, 1_000, 1, 1).withColumnRenamed("id", "value")
    frames = [samples.of_trainer(source, trainer) for trainer in range(TRAINERS)]
    rows = frames[0].unionAll(frames[1]).toPandas()
    assert rows["id"].nunique() == len(rows) == samples.total == 824
    for _, own in rows.groupby(rows["id"] % TRAINERS):
        assert own.groupby("step").size().to_dict() == {0: 16, 1: 32, 2: 64, 3: 100, 4: 100, 5: 100}
        assert own.sort_values("id")["step"].is_monotonic_increasing
    held_out = samples.held_out(source).selectExpr("min(id)").first()
    assert held_out is not None
    assert held_out[0] > rows["id"].max()

    features, clicks = samples.arrays(spark)
    assert features.shape == (824, FIELDS + 1)
    assert (features[:, 0] == BIAS).all()
    ranks, fields = np.divmod(features[:, 1:] - 1, FIELDS)
    assert (fields == np.arange(FIELDS)).all()
    assert (features <= 1_200).all()
    # Of 100 ranks the first one comes with a probability of log 2 / log 100, and the second with log(3/2) / log 100.
    assert (ranks == 1).mean() == pytest.approx(0.15, abs=0.02)
    assert (ranks == 2).mean() == pytest.approx(0.09, abs=0.02)
    assert 0.2 < clicks.mean() < 0.45


# The queries


def minibatch_ftrl(features: np.ndarray, clicks: np.ndarray, samples: Samples) -> tuple[Any, ...]:
    """z, n and the mean loss of all trainers' mini-batches one after another, without Spark or a State."""
    z: dict[int, float] = {}
    n: dict[int, float] = {}
    losses: list[float] = []
    start = 0
    for step in range(samples.steps):
        size = min(16 * 2**step, samples.minibatch) * TRAINERS
        batch = slice(start, start + size)
        start += size
        added = []
        for trainer in range(TRAINERS):
            own = slice(trainer, None, TRAINERS)  # numbers of samples go round
            added.append(naive_minibatch(features[batch][own], clicks[batch][own], z, n))
        for dz, dn, lost in added:
            losses += lost
            for into, more in ((z, dz), (n, dn)):
                for feature, value in more.items():
                    into[feature] = into.get(feature, 0.0) + value
    return z, n, sum(losses) / len(losses)


def parameters(pond: mp.Pond) -> tuple[dict[int, float], dict[int, float]]:
    found = pond.state("params", key="long", value="z double, n double", update=mp.add()).snapshot()
    keys = found["key"].to_pylist()
    return dict(zip(keys, found["z"].to_pylist(), strict=True)), dict(
        zip(keys, found["n"].to_pylist(), strict=True)
    )


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=() if mode == "bsp" else pytest.mark.long) for mode in MODES]
)
def test_it_learns_as_well_as_sequential_ftrl(
    spark: SparkSession, pond: mp.Pond, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(ftrl, "INTERCEPT", 0.0)  # so few samples depend much on how soon it is learnt
    lines: list[str] = []
    samples = SMALLER if mode == "bsp" else SMALL
    found = ftrl.train(spark, pond, samples, mode, str(tmp_path), lines.append, every_s=0.4)
    features, clicks = samples.arrays(spark)
    assert found.samples == samples.total == len(clicks)
    assert found.mean == pytest.approx(ftrl.sequential(features, clicks), rel=0.01)
    assert f"U {samples.steps};" in lines[-1]
    z, n = parameters(pond)
    assert set(z) == set(features.ravel().tolist())
    if mode == "bsp":
        expected_z, expected_n, expected_loss = minibatch_ftrl(features, clicks, samples)
        assert z == pytest.approx(expected_z, abs=1e-9)
        assert n == pytest.approx(expected_n, abs=1e-9)
        assert found.mean == pytest.approx(expected_loss, abs=1e-9)


class Driven:
    """Trainers whose epochs the test runs itself."""

    def __init__(self, spark: SparkSession, pond: mp.Pond, mode: str, folder: Path) -> None:
        self.params = pond.state("params", key="long", value="z double, n double", update=mp.add())
        self.trainers = [Trainer(self.params, mode, f"trainer_{k}", str(folder)) for k in range(TRAINERS)]
        source = spark.range(SMALL.minibatch * SMALL.steps).withColumnRenamed("id", "value")
        self._rows = [ftrl.asked(SMALL.of_trainer(source, k)).cache() for k in range(TRAINERS)]

    def epoch(self, trainer: int, epoch: int, steps: range) -> list[int]:
        """Which mini-batches the trainer has learnt from after an epoch that brings it these."""
        rows: DataFrame = self._rows[trainer].where(f"step BETWEEN {steps.start} AND {steps.stop - 1}")
        self.trainers[trainer].operator(rows, epoch)
        return sorted(self.trainers[trainer].losses)


@pytest.mark.parametrize(
    ("mode", "first", "second"),
    [("bsp", [0], [0, 1]), ("ssp", [0, 1], [0, 1, 2]), ("asp", [0, 1, 2, 3], [0, 1, 2, 3])],
)
def test_how_far_a_trainer_runs_ahead_and_that_an_epoch_run_again_adds_nothing(
    spark: SparkSession, pond: mp.Pond, tmp_path: Path, mode: str, first: list[int], second: list[int]
) -> None:
    driven = Driven(spark, pond, mode, tmp_path)
    assert driven.epoch(0, 0, range(4)) == first
    assert driven.epoch(0, 1, range(0)) == first  # the other has not begun
    assert driven.epoch(1, 0, range(1)) == [0]
    assert driven.epoch(0, 2, range(0)) == second

    # Again the last epoch of one that learns from what waited, or, where nothing waits, from the rows it is given.
    again = (1, 0, range(1)) if mode == "asp" else (0, 2, range(0))
    before = parameters(pond)
    driven.epoch(*again)
    assert parameters(pond) == before
    if mode == "asp":
        # Were it not kept what the epoch has learnt, it would now learn something else.
        (tmp_path / "trainer_1" / "epoch=0.parquet").unlink()
        with pytest.raises(EpochChanged):
            driven.epoch(*again)
        assert parameters(pond) == before


# The command


@pytest.mark.parametrize(
    "options", [{"seconds": 0}, {"rate": 0}, {"keys": 2 * FIELDS - 1}, {"mode": "async"}]
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadOption, match=str(next(iter(options.values())))):
        ftrl.run(**options)


def test_the_command_hands_the_mode_over(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(ftrl, "run", lambda mode="bsp": given.append({"mode": mode}) or True)
    cli.demo("ftrl", mode="ssp")
    cli.demo("ftrl")
    assert given == [{"mode": "ssp"}, {"mode": "bsp"}]


@pytest.mark.long
def test_it_runs_to_its_end(
    spark: SparkSession,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    spark.stop()  # it brings a session of its own
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ftrl, "INTERCEPT", 0.0)
    assert ftrl.run(seconds=4, rate=40, keys=600)
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith("256 samples, 0 missing, log-loss 0.")
    assert "U 4; inference: " in printed
    assert not [name for name in os.listdir(tmp_path) if name.startswith("millpond-ftrl-")]
