"""Which campaign did an ad belong to when it was viewed? Asked while one of two containers is killed.

A feed moves ads between campaigns, out of order; views ask for the campaign as of their own time. Half-way a
container dies by `kill -9`. At the end every answer is compared with pandas' `merge_asof` over the same rows.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console

import millpond as mp

EPOCHS = 12
KEYS = 50_000
UPDATES = 100_000
VIEWS = 100_000
STEP_US = 10_000_000
DISORDER_US = 2_000_000
START = pd.Timestamp("2026-01-01T00:00:00Z").value // 1_000


def run() -> bool:
    """Prints what it does; True if every answer was right."""
    out = Console(highlight=False, soft_wrap=True)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="millpond-demo-") as root:
        out.print("opening a pond with two containers (the first time, kernels are compiled) ...")
        with mp.open(root, containers=2) as pond:
            for info in pond.containers():
                out.print(f"  container {info.id}: pid {info.pid}, {len(info.slices)} slices")
            updates, answers = _stream(pond, out)
            restarts = int(pond.metrics()["coordinator"]["container_restarts"])
            late = sum(pond.state("campaigns").progress().late.values())
    wrong = _wrong(updates, answers)
    out.print(
        f"{updates.num_rows:,} updates ({late} late), {answers.num_rows:,} views,"
        f" {restarts} container killed and recovered, [bold]{wrong} wrong[/bold]"
        f" ({time.perf_counter() - began:.0f} s)"
    )
    return wrong == 0 and restarts == 1 and answers.num_rows == EPOCHS * VIEWS


def _stream(pond: mp.Pond, out: Console) -> tuple[pa.Table, pa.Table]:
    """All updates that were sent, and all views with their answers."""
    campaigns = pond.state("campaigns", key="long", value="string")
    feed = campaigns.update(key="ad", at="ts", value="campaign", delay="2 seconds", name="feed")
    fetch = campaigns.fetch(key="ad", at="ts", into="campaign")
    random = np.random.default_rng(7)
    sent: list[pa.Table] = []
    answered: list[pa.Table] = []
    waiting = _views(random, 0).slice(0, 0)
    for epoch in range(EPOCHS):
        sent.append(_updates(random, epoch))
        killer = _kill_soon(pond) if epoch == EPOCHS // 2 else None
        started = time.perf_counter()
        feed(sent[-1], epoch)
        seconds = time.perf_counter() - started
        if killer is not None:
            out.print(
                f"  [bold red]kill -9[/bold red] of container 0 (pid {killer.pid}) during epoch {epoch}"
            )
            killer.join()
        waiting = pa.concat_tables([waiting, _views(random, epoch)])
        # Views at or after U have no final answer yet: they wait for the next epoch.
        ready = pc.less(waiting["ts"].cast(pa.int64()), campaigns.progress().update)
        answered.append(fetch.now(waiting.filter(ready)))
        waiting = waiting.filter(pc.invert(ready))
        out.print(
            f"  epoch {epoch:2}: {UPDATES:,} updates durable in {seconds:.2f} s,"
            f" {answered[-1].num_rows:,} views answered, {waiting.num_rows:,} wait for U"
        )
    campaigns.finish("feed")
    answered.append(fetch.now(waiting))
    out.print(f"  feed finished: {answered[-1].num_rows:,} waiting views answered")
    return pa.concat_tables(sent), pa.concat_tables(answered)


def _updates(random: np.random.Generator, epoch: int) -> pa.Table:
    times = START + epoch * STEP_US + random.integers(0, STEP_US + DISORDER_US, UPDATES)
    campaigns = np.char.add("campaign-", random.integers(0, 1_000, UPDATES).astype(str))
    return pa.table(
        {"ad": random.integers(0, KEYS, UPDATES), "ts": _timestamps(times), "campaign": pa.array(campaigns)}
    )


def _views(random: np.random.Generator, epoch: int) -> pa.Table:
    # Views run ahead of what is final.
    times = START + epoch * STEP_US + random.integers(0, STEP_US + 2 * DISORDER_US, VIEWS)
    return pa.table({"ad": random.integers(0, KEYS, VIEWS), "ts": _timestamps(times)})


def _timestamps(micros: np.ndarray) -> pa.Array:
    return pa.array(micros).cast(pa.timestamp("us", "UTC"))


class _Killer(threading.Thread):
    """Kills a process a moment after it is started."""

    def __init__(self, pid: int) -> None:
        super().__init__(name="demo-killer")
        self.pid = pid

    def run(self) -> None:
        time.sleep(0.02)
        os.kill(self.pid, signal.SIGKILL)


def _kill_soon(pond: mp.Pond) -> _Killer:
    killer = _Killer(pond.containers()[0].pid)
    killer.start()
    return killer


def _wrong(updates: pa.Table, answers: pa.Table) -> int:
    """How many answers differ from those of pandas."""
    # Of two updates of an ad at the same instant the later row counts.
    values = updates.to_pandas().drop_duplicates(["ad", "ts"], keep="last").sort_values("ts", kind="stable")
    asked = answers.to_pandas().sort_values("ts", kind="stable")
    expected = pd.merge_asof(asked[["ad", "ts"]], values, on="ts", by="ad")["campaign"]
    given = asked["campaign"].reset_index(drop=True)
    same = (given == expected) | (given.isna() & expected.isna())
    return int((~same).sum())
