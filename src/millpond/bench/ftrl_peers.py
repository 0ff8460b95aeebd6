"""The peers of the ftrl benchmark: parameters in Redis, and river's FTRL in a loop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import redis
from river import linear_model, optim

from millpond.apps.ftrl_model import ALPHA, BETA, L1, L2, LOSS, Longs, learn

PIPELINE = 10_000


class RedisStep:
    """For `mapInArrow`: as a trainer's step, with parameters in a hash of Redis. Gives its sample count.

    Fields are read by the thousand and added to by pipelined commands. Nothing is durable, and a batch that runs again
    counts again.
    """

    schema = "samples long"

    def __init__(self, port: int) -> None:
        self._port = port

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        samples = list(batches)
        if not samples:
            return
        with redis.Redis(port=self._port) as client:
            table = pa.Table.from_batches(samples)
            learnt = learn(table, lambda keys: _read(client, keys))
            _add(client, learnt)
        yield pa.record_batch({"samples": pa.array([len(table)])})


def redis_loss(port: int) -> tuple[int, float]:
    """How many samples were learnt from, and the sum of their losses."""
    with redis.Redis(port=port) as client:
        row = _read(client, pa.table({"feature": [LOSS]})).to_pylist()[0]
    return int(row["n"] or 0), float(row["z"] or 0.0)


def _read(client: redis.Redis, keys: pa.Table) -> pa.Table:
    """`z` and `n` of a feature in one command, so that both are of one time."""
    fields = [field for key in keys["feature"].to_pylist() for field in (f"z{key}", f"n{key}")]
    values: list[float | None] = []
    for start in range(0, len(fields), PIPELINE):
        texts = client.hmget("params", fields[start : start + PIPELINE])
        values += [None if text is None else float(text) for text in texts]
    for place, name in enumerate(("z", "n")):
        keys = keys.append_column(name, pa.array(values[place::2], pa.float64()))
    return keys


def _add(client: Any, learnt: pa.Table) -> None:
    rows = list(zip(*(learnt[name].to_pylist() for name in ("feature", "z", "n")), strict=True))
    for start in range(0, len(rows), PIPELINE // 2):
        pipe = client.pipeline(transaction=False)
        for feature, z, n in rows[start : start + PIPELINE // 2]:
            pipe.execute_command("HINCRBYFLOAT", "params", f"z{feature}", repr(z))
            pipe.execute_command("HINCRBYFLOAT", "params", f"n{feature}", repr(n))
        pipe.execute()


class LoopRun(NamedTuple):
    samples_per_s: float
    log_loss: float


def run_river(features: Longs, clicks: Longs) -> LoopRun:
    """Logistic regression by `optim.FTRLProximal`, one sample after another on one core; the bias is a feature as others."""
    model: Any = linear_model.LogisticRegression(
        optimizer=optim.FTRLProximal(alpha=ALPHA, beta=BETA, l1=L1, l2=L2), intercept_lr=0.0
    )
    samples = [dict.fromkeys(sample, 1.0) for sample in features.tolist()]
    p: npt.NDArray[np.float64] = np.empty(len(samples))
    began = time.perf_counter()
    for number, (sample, click) in enumerate(zip(samples, clicks.tolist(), strict=True)):
        p[number] = model.predict_proba_one(sample)[True]
        model.learn_one(sample, bool(click))
    seconds = time.perf_counter() - began
    loss = -np.log(np.where(clicks == 1, p, 1 - p)).mean()
    return LoopRun(len(samples) / seconds, float(loss))
