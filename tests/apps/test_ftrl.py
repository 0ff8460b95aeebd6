"""FTRL in mini-batches, by trainers that share a State, learns what FTRL learns sample by sample."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import millpond as mp
from millpond import cli
from millpond.apps import ftrl
from millpond.apps.ftrl import BIAS, FIELDS, MODES, TRAINERS, Samples
from millpond.apps.ftrl_model import ALPHA, BETA, L1, L2, LOSS, learn, predict, sequential
from millpond.errors import BadOption
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

SMALL = Samples(minibatch=40, steps=6, keys=600)
SMALLER = Samples(minibatch=40, steps=3, keys=600)
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
    found = sequential(np.array([[7], [7], [7]]), np.array([1, 1, 0]))
    assert found == pytest.approx((math.log(2) + 0.68652474 + 0.70715078) / 3, abs=1e-8)


def naive_weight(z: float, n: float) -> float:
    if abs(z) <= L1:
        return 0.0
    return -(z - math.copysign(L1, z)) / ((BETA + math.sqrt(n)) / ALPHA + L2)


Parameters = dict[int, float]


def naive_learn(features: np.ndarray, clicks: np.ndarray, z: Parameters, n: Parameters) -> list[float]:
    """Learns in place, one sample, one feature at a time. Gives the losses."""
    losses = []
    for row, click in zip(features.tolist(), clicks.tolist(), strict=True):
        weights = {feature: naive_weight(z.get(feature, 0.0), n.get(feature, 0.0)) for feature in row}
        p = 1 / (1 + math.exp(-sum(weights.values())))
        losses.append(-math.log(p if click else 1 - p))
        for feature in row:
            old = n.get(feature, 0.0)
            n[feature] = old + (p - click) ** 2
            sigma = (math.sqrt(n[feature]) - math.sqrt(old)) / ALPHA
            z[feature] = z.get(feature, 0.0) + (p - click) - sigma * weights[feature]
    return losses


def drawn(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    features = np.column_stack(
        [np.full(rows, BIAS), *(10 * k + random.integers(1, 9, rows) for k in range(4))]
    )
    return features, random.integers(0, 2, rows)


def table_of(features: np.ndarray, clicks: np.ndarray) -> pa.Table:
    return pa.table({"features": pa.array(features.tolist(), pa.list_(pa.int64())), "click": clicks})


@pytest.mark.parametrize("seed", range(3))
def test_a_minibatch_learns_what_a_loop_learns(seed: int) -> None:
    random = np.random.default_rng(seed)
    features, clicks = drawn(seed, 50)
    known = [BIAS, *range(1, 30)]
    z = dict(zip(known, random.normal(0, 3, 30).tolist(), strict=True))
    n = dict(zip(known, random.exponential(5, 30).tolist(), strict=True))
    asked = []

    def ask(table: pa.Table) -> pa.Table:
        keys = table["feature"].to_pylist()
        asked.append(keys)
        for name, values in (("z", z), ("n", n)):
            table = table.append_column(name, pa.array([values.get(key) for key in keys], pa.float64()))
        return table

    samples = table_of(features, clicks)
    samples = pa.concat_tables([samples.slice(0, 7), samples.slice(7)])  # as Spark hands them over
    learnt = learn(samples, ask)
    assert [sorted(keys) for keys in asked] == [sorted(set(features.ravel().tolist()))], "each feature once"
    after_z, after_n = dict(z), dict(n)
    losses = naive_learn(features, clicks, after_z, after_n)
    rows = {row["feature"]: row for row in learnt.to_pylist()}
    assert rows.pop(LOSS) == {"feature": LOSS, "z": pytest.approx(sum(losses)), "n": 50}
    for name, before, after in (("z", z, after_z), ("n", n, after_n)):
        expected = {feature: after[feature] - before.get(feature, 0.0) for feature in asked[0]}
        assert {feature: row[name] for feature, row in rows.items()} == pytest.approx(expected, abs=1e-12)


def test_predictions_are_those_that_a_loop_makes() -> None:
    features, clicks = drawn(7, 50)
    z = dict(zip(range(40), np.random.default_rng(8).normal(0, 3, 40).tolist(), strict=True))
    n = dict.fromkeys(range(40), 2.0)
    losses = [
        naive_learn(features[i : i + 1], clicks[i : i + 1], dict(z), dict(n))[0] for i in range(len(clicks))
    ]
    flat = features.ravel().tolist()
    rows = pa.table(
        {
            "id": np.repeat(np.arange(50), 5),
            "click": np.repeat(clicks, 5),
            "z": pa.array([z.get(feature) for feature in flat], pa.float64()),
            "n": pa.array([n[feature] if feature in z else None for feature in flat], pa.float64()),
        }
    ).take(np.random.default_rng(9).permutation(250))
    assert predict(rows).loss == pytest.approx(losses)
    p = predict(rows).p
    assert np.where(clicks == 1, -np.log(p), -np.log(1 - p)) == pytest.approx(losses)


# Trainers, on Arrow tables


@pytest.fixture
def local() -> Iterator[LocalPond]:
    with LocalPond(LossyFiles()) as opened:
        yield opened
        opened.validate()


def parameters(pond: mp.Pond) -> tuple[Parameters, Parameters]:
    found = ftrl.parameters(pond).snapshot().filter(pa.compute.field("key") != LOSS)
    keys = found["key"].to_pylist()
    return dict(zip(keys, found["z"].to_pylist(), strict=True)), dict(
        zip(keys, found["n"].to_pylist(), strict=True)
    )


@pytest.mark.parametrize("mode", MODES)
def test_one_trainer_learns_exactly_what_plain_ftrl_learns(local: LocalPond, mode: str) -> None:
    features, clicks = drawn(1, 200)
    step = ftrl.trainer(ftrl.parameters(local), mode, "trainer")
    for epoch in range(5):
        own = slice(40 * epoch, 40 * epoch + 40)
        step(table_of(features[own], clicks[own]), epoch)
    z: Parameters = {}
    n: Parameters = {}
    losses = naive_learn(features, clicks, z, n)
    found = ftrl.loss_of(ftrl.parameters(local))
    assert found == (200, pytest.approx(sum(losses)))
    assert found.mean == pytest.approx(sequential(features, clicks))
    found_z, found_n = parameters(local)
    assert found_z == pytest.approx(z, abs=1e-9)
    assert found_n == pytest.approx(n, abs=1e-9)


def test_nothing_is_lost_before_anything_was_learnt(local: LocalPond) -> None:
    params = ftrl.parameters(local)
    ftrl.trainer(params, "bsp", "trainer")
    assert str(ftrl.loss_of(params)) == "0 samples"


# The samples


def test_samples_are_what_they_are_said_to_be(spark: SparkSession) -> None:
    samples = Samples(minibatch=100, steps=6, keys=1_200)
    source = spark.range(0, 1_000, 1, 1).withColumnRenamed("id", "value")
    frames = [samples.of_trainer(source, trainer) for trainer in range(TRAINERS)]
    rows = frames[0].unionAll(frames[1]).toPandas()
    assert rows["id"].nunique() == len(rows) == samples.total == 1_200
    held_out = samples.held_out(source).selectExpr("min(id)").first()
    assert held_out is not None
    assert held_out[0] > rows["id"].max()

    features, clicks = samples.arrays(spark)
    assert features.shape == (1_200, FIELDS + 1)
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
    """z, n and the mean loss of trainers that learn in step, each on a copy of its own, without Spark or a State."""
    z: Parameters = {}
    n: Parameters = {}
    losses: list[float] = []
    size = samples.minibatch * TRAINERS
    for start in range(0, len(clicks), size):
        before = dict(z), dict(n)
        for trainer in range(TRAINERS):
            own = slice(start + trainer, start + size, TRAINERS)  # numbers of samples go round
            copies = dict(before[0]), dict(before[1])
            losses += naive_learn(features[own], clicks[own], *copies)
            for into, old, new in zip((z, n), before, copies, strict=True):
                for feature, value in new.items():
                    into[feature] = into.get(feature, 0.0) + value - old.get(feature, 0.0)
    return z, n, sum(losses) / len(losses)


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
    assert found.mean == pytest.approx(sequential(features, clicks), rel=0.01)
    assert "inference: " in lines[-1]
    z, n = parameters(pond)
    assert set(z) == set(features.ravel().tolist())
    if mode == "bsp":
        expected_z, expected_n, expected_loss = minibatch_ftrl(features, clicks, samples)
        assert z == pytest.approx(expected_z, abs=1e-9)
        assert n == pytest.approx(expected_n, abs=1e-9)
        assert found.mean == pytest.approx(expected_loss, abs=1e-9)


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
    assert printed.splitlines()[-1].startswith("320 samples, 0 missing, log-loss 0.")
    assert "; inference: " in printed
    assert not [name for name in os.listdir(tmp_path) if name.startswith("millpond-ftrl-")]
