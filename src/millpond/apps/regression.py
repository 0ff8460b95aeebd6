"""Logistic regression: each lane learns from its points, and now and then all go on from their average."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

import millpond as mp
from millpond.apps.program_demo import RATE, SECONDS, Application, Asking, check_calls, show


def logistic(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0.0 else 1.0 - 1.0 / (1.0 + math.exp(x))


@mp.program(lanes=2)
class LogisticRegression:
    """Weights, one set for each lane."""

    weights: mp.Partial[mp.Vector]

    def learn(self, point: int, features: list[float], label: float, rate: float = 0.1) -> None:
        """A step towards the label, 0 or 1, in the lane of the point."""
        wrong = label - logistic(self.weights.dot(features))
        self.weights.add(features, rate * wrong)

    def average(self) -> None:
        """All lanes go on from the average of their weights: the end of an iteration, in an epoch of its own."""
        mp.everywhere(self.weights).assign(mp.average(mp.everywhere(self.weights).copy()))

    def predict(self, features: list[float]) -> float:
        """How likely the label is 1."""
        scores = mp.everywhere(self.weights).dot(features)
        return logistic(mp.average(scores))

    def model(self, length: int) -> list[float]:
        """The average weights, so many of them."""
        whole: mp.Vector = mp.average(mp.everywhere(self.weights).copy())
        return whole.array(length)


def points(count: int, *, features: int = 8, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Points on both sides of a plane that is drawn from the seed, some of them on the wrong one; the last feature is 1."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=features)
    for number in range(count):
        x = np.append(rng.normal(size=features - 1), 1.0)
        likely = 1.0 / (1.0 + np.exp(-3.0 * x @ truth))
        yield {"point": number, "features": [float(v) for v in x], "label": float(rng.random() < likely)}


APPLICATION = Application(
    "regression",
    LogisticRegression,
    {"learn": {"point": pa.int64(), "features": pa.list_(pa.float64()), "label": pa.float64()}},
    between=lambda ask, epoch: averaged(ask),
    words=lambda model: f"all lanes go on from {[round(weight, 2) for weight in model]}",
)


def averaged(ask: Asking) -> list[float]:
    """The end of an iteration, and the model that it leaves."""
    ask("average")
    model: list[float] = ask("model", length=8)
    return model


def run(seconds: int = SECONDS, rate: int = RATE) -> bool:
    """`seconds` iterations over `rate` points, the same ones each time."""
    check_calls(seconds, rate)
    rows = list(points(rate))
    return show(APPLICATION, [("learn", row) for _ in range(seconds) for row in rows], rate)
