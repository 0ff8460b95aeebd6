"""How cost grows: with keys, with versions of a key, with containers, with the size of the state.

A pond of child processes on this machine, updated and asked by Arrow tables over Flight, without Spark. Each line loads
a State, then measures: durable updates and as-of fetches per second in batches of `BATCH` rows, the bytes that a version
takes in memory, how long a small epoch takes to commit, one row by `now`, and the longest pause of a checkpoint.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import millpond as mp

BATCH = 500_000
SMALL = 1_000
ROUNDS = 5
ONE_ROW_CALLS = 1_000


class Shape(NamedTuple):
    """What a line of the table measures."""

    system: str
    keys: int
    versions: int
    containers: int = 1


def shapes(quick: bool) -> list[Shape]:
    """Keys at one version each, then versions at 2 M in all, then containers."""
    scale = 100 if quick else 1
    keys = [
        Shape(f"keys-{_short(n // scale)}", n // scale, 1) for n in (10_000, 100_000, 1_000_000, 10_000_000)
    ]
    depth = [Shape(f"versions-{n}", 2_000_000 // n // scale or 1, n) for n in (1, 10, 100, 1000)]
    spread = [Shape(f"containers-{n}", 1_000_000 // scale, 5, n) for n in (1, 2)]
    return [*keys, *depth, *spread]


def run(quick: bool, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    results = []
    for shape in shapes(quick):
        progress(
            f"{shape.system}: {shape.keys:,} keys with {shape.versions:,} versions each,"
            f" {shape.containers} container{'s' * (shape.containers > 1)}"
        )
        with (
            tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder,
            mp.open(os.path.join(folder, "pond"), containers=shape.containers) as pond,
        ):
            _rehearse(pond)
            results.append(_measured(pond, shape))
    return results


def _rehearse(pond: mp.Pond) -> None:
    """Every kind of call once or more, on another State: code is loaded, connections are made."""
    state = pond.state("rehearsal", key="long", value="long")
    feed = state.update(key="k", at="t", value="v", name="feed")
    rows = np.arange(SMALL)
    for epoch in range(ROUNDS):
        feed(pa.table({"k": rows, "t": rows + epoch * SMALL, "v": rows}), epoch)
    state.finish("feed")
    for _ in range(ONE_ROW_CALLS // 10):
        state.fetch(key="k", at="t", into="v").now(pa.table({"k": rows[:1], "t": rows[:1]}))


def _measured(pond: mp.Pond, shape: Shape) -> dict[str, Any]:
    chance = np.random.default_rng(1)
    state = pond.state("s", key="long", value="long", compact=mp.keep_all())
    feed = state.update(key="k", at="t", value="v", name="feed")
    total = shape.keys * shape.versions
    rates = []
    epochs = 0
    for first in range(0, total, BATCH):
        # Round after round over all keys, each round in an order of its own: versions of a key lie apart.
        row = np.arange(first, min(first + BATCH, total))
        keys = (row % shape.keys * 7919 + row // shape.keys) % shape.keys
        table = pa.table({"k": keys, "t": row, "v": row})
        rates.append(len(row) / _timed(partial(feed, table, epochs)))
        epochs += 1
    loaded = pond.metrics()["states"]["s"]
    commits = []
    for _ in range(ROUNDS * 2):
        row = np.arange(total, total + SMALL)
        total += SMALL
        table = pa.table({"k": chance.integers(0, shape.keys, SMALL), "t": row, "v": row})
        commits.append(_timed(partial(feed, table, epochs)))
        epochs += 1
    checkpoint = _timed(pond.checkpoint)
    pause = max(container["snapshot_pause_ms_max"] for container in pond.metrics()["containers"].values())
    state.finish("feed")
    fetch = state.fetch(key="k", at="t", into="v")
    asked = [_questions(chance, shape.keys, total, BATCH) for _ in range(ROUNDS)]
    fetched = [BATCH / _timed(partial(fetch.now, table)) for table in asked]
    single = [_questions(chance, shape.keys, total, 1) for _ in range(ONE_ROW_CALLS)]
    one_row = [_timed(partial(fetch.now, table)) for table in single]
    return {
        "system": shape.system,
        "rows_per_s": max(fetched),
        "threads": os.cpu_count() or 1,
        "keys": shape.keys,
        "versions_per_key": shape.versions,
        "containers": shape.containers,
        "updates_per_s": float(np.median(rates)),
        "bytes_per_version": loaded["bytes"] / max(loaded["versions"], 1),
        "state_mb": loaded["bytes"] / 1e6,
        "commit_ms": float(np.median(commits)) * 1e3,
        "one_row_p50_ms": float(np.percentile(one_row, 50)) * 1e3,
        "one_row_p99_ms": float(np.percentile(one_row, 99)) * 1e3,
        "checkpoint_s": checkpoint,
        "checkpoint_pause_ms": pause,
    }


def _questions(chance: np.random.Generator, keys: int, newest: int, rows: int) -> pa.Table:
    times: npt.NDArray[np.int64] = chance.integers(0, newest, rows)
    return pa.table({"k": chance.integers(0, keys, rows), "t": times})


def _short(number: int) -> str:
    for unit, size in (("M", 1_000_000), ("K", 1_000)):
        if number >= size:
            return f"{number // size}{unit}"
    return str(number)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
