"""What the parts of `millpond bench programs` have in common: how large they are, and their pond."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import millpond as mp

CONTAINERS = os.cpu_count() or 1
SLICES = 16


class Scale(NamedTuple):
    """How much is done. `seconds` bound each measurement."""

    seconds: float
    cf_ratings: int
    cf_loaded: int
    cf_batch: int
    cf_file: int
    """Requests of a micro-batch."""
    warm_s: float
    cf_by_item: int
    """Ratings, where counts by item are compared."""
    kv_keys: int
    kv_batch: int
    lr_points: int
    lr_iterations: int
    words_per_s: int
    windows_ms: Sequence[int]
    """From the largest on."""
    entries: Sequence[int]
    """Of a state that lasts; the last one is the largest."""
    checkpoint_rounds: int
    checkpoint_every_s: float


FULL = Scale(
    seconds=10.0,
    cf_ratings=100_000,
    cf_loaded=20_000,
    cf_batch=6_000,
    cf_file=6_000,
    warm_s=15.0,
    cf_by_item=2_000,
    kv_keys=10_000,
    kv_batch=10_000,
    lr_points=20_000,
    lr_iterations=10,
    words_per_s=2_000,
    windows_ms=(4_000, 2_000, 1_000, 500, 250, 100, 50),
    entries=(10_000, 50_000, 200_000),
    checkpoint_rounds=3,
    checkpoint_every_s=5.0,
)
QUICK = Scale(
    seconds=1.5,
    cf_ratings=8_000,
    cf_loaded=3_000,
    cf_batch=300,
    cf_file=500,
    warm_s=1.0,
    cf_by_item=400,
    kv_keys=1_000,
    kv_batch=1_000,
    lr_points=1_000,
    lr_iterations=3,
    words_per_s=1_000,
    windows_ms=(1_000, 250),
    entries=(2_000, 10_000),
    checkpoint_rounds=1,
    checkpoint_every_s=0.7,
)


@contextmanager
def opened(**options: Any) -> Iterator[mp.Pond]:
    """A pond on all cores: a container of one thread for each."""
    with (
        tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder,
        mp.open(
            os.path.join(folder, "pond"),
            **{"containers": CONTAINERS, "threads": 1, "slices": SLICES, **options},
        ) as pond,
    ):
        yield pond


def percentiles(name: str, ms: npt.NDArray[np.float64]) -> dict[str, float]:
    """p50 and p95; none where there is nothing."""
    if not len(ms):
        return {}
    return {f"{name}_p{q}_ms": float(np.percentile(ms, q)) for q in (50, 95)}
