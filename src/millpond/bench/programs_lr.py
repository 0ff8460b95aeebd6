"""Logistic regression: seconds an iteration beside Spark's MLlib, over the same points.

An iteration takes all points once. Millpond: an epoch in which each lane learns from its points, one after the other, and a
direct call after which all lanes go on from their average. MLlib: a step of L-BFGS, without regularization, on points that
Spark has cached; what a fit takes beside its iterations is left out, by the difference of two fits. The log-loss of both models is
that over the same points, after as many iterations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from millpond.apps.regression import LogisticRegression, points
from millpond.apps.spark_session import spark_session
from millpond.bench.programs_pond import CONTAINERS, Scale, opened

FEATURES = 8
RATE = 0.05


def run(scale: Scale, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = pa.Table.from_pylist(list(points(scale.lr_points, features=FEATURES)))
    x = np.array(rows["features"].to_pylist())
    y = rows["label"].to_numpy()
    setup = f"{scale.lr_points:,} points of {FEATURES} features, {scale.lr_iterations} iterations"
    return [
        {"section": "lr", "setup": setup, **measured, "points_per_s": len(rows) / measured["iteration_s"]}
        for measured in (_millpond(rows, x, y, scale, progress), _mllib(rows, x, y, scale, progress))
    ]


def log_loss(weights: Any, x: Any, y: Any) -> float:
    """Of a model over these points, the mean."""
    margins = np.where(y > 0, 1.0, -1.0) * (x @ weights)
    return float(np.logaddexp(0.0, -margins).mean())


def _millpond(
    rows: pa.Table, x: Any, y: Any, scale: Scale, progress: Callable[[str], None]
) -> dict[str, Any]:
    progress("lr: millpond")
    rows = rows.append_column("rate", pa.array(np.full(len(rows), RATE)))
    with opened() as pond:
        model = pond.program("lr", LogisticRegression)
        learn = model.call("learn", rate="rate", name="points")
        learn(rows.slice(0, 1), 0)
        model.average()
        took = []
        for iteration in range(scale.lr_iterations):
            began = time.perf_counter()
            learn(rows, iteration + 1)
            model.average()
            took.append(time.perf_counter() - began)
        weights = np.array(model.model(FEATURES))
    return {
        "system": f"millpond, {CONTAINERS} containers of 1 thread",
        "iteration_s": float(np.median(took)),
        "loss": log_loss(weights, x, y),
    }


def _mllib(rows: pa.Table, x: Any, y: Any, scale: Scale, progress: Callable[[str], None]) -> dict[str, Any]:
    progress("lr: Spark MLlib")
    from pyspark.ml.classification import LogisticRegression as Peer
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql.functions import col

    with spark_session("millpond bench programs") as spark:
        frame = spark.createDataFrame(rows.select(["features", "label"]).to_pandas())
        frame = frame.select(array_to_vector(col("features")).alias("features"), "label").cache()
        frame.count()

        def fitted(iterations: int) -> tuple[float, Any]:
            peer = Peer(maxIter=iterations, regParam=0.0, fitIntercept=False, standardization=False, tol=0.0)
            began = time.perf_counter()
            model = peer.fit(frame)
            return time.perf_counter() - began, model

        for _ in range(2):  # Spark compiles its own code
            fitted(1)
        short = min(fitted(1)[0] for _ in range(3))
        long, model = min((fitted(1 + scale.lr_iterations) for _ in range(3)), key=lambda each: each[0])
        done = model.summary.totalIterations
        _, model = fitted(scale.lr_iterations)
        weights = model.coefficients.toArray()
    return {
        "system": "spark mllib",
        "iteration_s": max(long - short, 1e-6) / max(1, done - 1),
        "loss": log_loss(weights, x, y),
    }
