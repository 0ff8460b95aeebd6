"""Several updaters of one State at once, a fetcher that reports, and containers that are killed meanwhile."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

import millpond as mp

UPDATERS = 4
EPOCHS = 12
ROWS = 300
KILLS = 5


def batch(updater: int, epoch: int) -> list[tuple[int, int, int]]:
    """Keys are shared, times are each updater's own, values tell who wrote them."""
    chance = random.Random(1000 * updater + epoch)
    times = [UPDATERS * (100 * epoch + chance.randrange(100)) + updater for _ in range(ROWS)]
    return [(chance.randrange(50), at, 1_000_000 * updater + 1000 * epoch + n) for n, at in enumerate(times)]


def update(state: mp.State, updater: int) -> None:
    name = f"updater_{updater}"
    operator = state.update(key="k", at="t", value="v", name=name)
    for epoch in range(EPOCHS):
        keys, times, values = zip(*batch(updater, epoch), strict=True)
        operator(pa.table({"k": keys, "t": times, "v": values}), epoch)
    state.finish(name)


def report(state: mp.State, ended: threading.Event) -> None:
    while not ended.is_set():
        progress = state.progress().update
        if not math.isinf(progress):
            state.report("dashboard", fetch=int(progress) // 2)
        time.sleep(0.05)


def kill(pond: mp.Pond, ended: threading.Event) -> int:
    chance = random.Random(7)
    for number in range(KILLS):
        if ended.wait(0.4):
            return number
        # It may be down from the kill before, or not there at all.
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(chance.choice(pond.containers()).pid, signal.SIGKILL)
    return KILLS


@pytest.mark.timeout(120)
@pytest.mark.long
def test_nothing_is_lost_or_stuck_while_all_happens_at_once(tmp_path: Path) -> None:
    written = [row for updater in range(UPDATERS) for epoch in range(EPOCHS) for row in batch(updater, epoch)]
    held = {(key, at): value for key, at, value in written}
    ended = threading.Event()
    with mp.open(tmp_path / "pond", containers=2) as pond, ThreadPoolExecutor() as pool:
        state = pond.state("s", key="long", value="long")
        for updater in range(UPDATERS):
            state.update(key="k", at="t", value="v", name=f"updater_{updater}")
        reporting, killing = pool.submit(report, state, ended), pool.submit(kill, pond, ended)
        for updating in [pool.submit(update, state, updater) for updater in range(UPDATERS)]:
            updating.result()
        ended.set()
        reporting.result()
        assert killing.result() > 0
        asked = sorted(place for place in held if place[1] >= state.progress().fetch)
        table = pa.table({"k": [key for key, _ in asked], "t": [at for _, at in asked]})
        fetch = state.fetch(key="k", at="t", into="v")
        answers = fetch.now(table)["v"].to_pylist()
        assert answers == [held[place] for place in asked]
        for info in pond.containers():
            os.kill(info.pid, signal.SIGKILL)
        assert fetch.now(table)["v"].to_pylist() == answers
