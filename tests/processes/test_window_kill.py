"""Windows in real processes that are killed with SIGKILL while windows fire: each epoch gives what the oracle does."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa

import millpond as mp
from millpond.errors import Unavailable
from millpond.testing import DedupOracle, WindowJoinOracle
from millpond.testing import window_aggregates as agg
from millpond.testing import window_kinds as kinds
from millpond.testing.windows import WindowOracle

KEYS, ROWS, STEP, DELAY = 20, 80, 20, 15
KILLS = 3
EPOCHS_MAX = 400
Rows = list[tuple[int, int, dict[str, int]]]


def rows_of(epoch: int, side: str = "") -> Rows:
    chance = Random(f"{side} {epoch}")
    return [
        (chance.randrange(KEYS), epoch * STEP + chance.randint(-40, STEP), {"v": chance.randrange(100)})
        for _ in range(ROWS)
    ]


def table_of(rows: Rows, value: str = "v") -> pa.Table:
    keys, times, values = zip(*rows, strict=True)
    return pa.table({"k": keys, "t": times, value: [each["v"] for each in values]})


def counted(rows: Iterable[Any]) -> Counter[str]:
    return Counter(repr(sorted(row.items())) for row in rows)


@contextmanager
def kills(pond: mp.Pond) -> Iterator[Callable[[], bool]]:
    """Kills containers, each as soon as it serves again; gives a function that tells whether there were enough kills."""
    ended, chance, killed = threading.Event(), Random(7), set()

    def kill() -> None:
        while not ended.wait(chance.uniform(0.05, 0.3)) and len(killed) < KILLS:
            with suppress(Unavailable, ProcessLookupError):
                pids = [container.pid for container in pond.containers() if container.pid not in killed]
                if pids:
                    killed.add(pid := chance.choice(pids))
                    os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield lambda: len(killed) >= KILLS
    finally:
        ended.set()
        killer.join()
    assert len(killed) >= KILLS, "it was killed while windows fired"


def run(operator: Any, table: pa.Table, epoch: int) -> list[dict[str, Any]]:
    while True:
        with suppress(Unavailable):
            rows: list[dict[str, Any]] = operator(table, epoch).to_pylist()
            return rows


def test_containers_are_killed_while_windows_fire(tmp_path: Path) -> None:
    """A window of numbers, one of rows that has two sources, and a dedup, in one pond."""
    with mp.open(tmp_path / "pond", containers=2, slices=8, threads=1) as pond:
        numbers = {"rows": mp.count(), "total": mp.total("v"), "top": mp.top(2, "v")}
        rows = {"rows": mp.count(), "all": mp.collect("v")}
        sessions = pond.window(
            "sessions", key="k long", window=mp.session(12), aggregate=rows, value="v long"
        )
        operators = {
            "sliding": pond.window(
                "sliding", key="k long", window=mp.sliding(60, 20), aggregate=numbers, value="v long"
            ).over(key="k", at="t", delay=DELAY),
            "left": sessions.over(key="k", at="t", delay=DELAY, name="left"),
            "right": sessions.over(key="k", at="t", delay=DELAY, name="right"),
            "dedup": pond.dedup("d", key="k long", within=50).over(key="k", at="t", delay=DELAY),
        }
        of_numbers = {"rows": agg.count(), "total": agg.total("v"), "top": agg.top(2, "v")}
        of_rows = {"rows": agg.count(), "all": agg.collect("v")}
        sliding = WindowOracle(kinds.sliding(60, 20), of_numbers, key="k", sources={"sliding": DELAY})
        both = WindowOracle(kinds.session(12), of_rows, key="k", sources={"left": DELAY, "right": DELAY})
        dedup = DedupOracle(50, key="k", sources={"dedup": DELAY})
        oracles = {"sliding": sliding, "left": both, "right": both, "dedup": dedup}
        with kills(pond) as enough:
            for epoch in range(EPOCHS_MAX):
                for name, operator in operators.items():
                    # Of two rows of one time the order would hang on who was first.
                    part = list({(key, time): (key, time, row) for key, time, row in rows_of(epoch)}.values())
                    part = part[::2] if name == "left" else part[1::2] if name == "right" else part
                    fired = run(operator, table_of(part), epoch)
                    seen = [(key, time, {**row, "t": time}) for key, time, row in part]
                    expected = oracles[name].epoch(epoch, seen, name).rows
                    assert counted(fired) == counted(expected), f"epoch {epoch} of {name}"
                    again = run(operator, table_of(part), epoch)
                    assert counted(again) == counted(fired), f"epoch {epoch} of {name}, again"
                if enough() and epoch > 8:
                    break
        for name in ("sliding", "left", "right"):
            fired = operators[name].finish().to_pylist()
            assert counted(fired) == counted(oracles[name].finish(name).rows), name


def test_containers_are_killed_while_a_join_gives_pairs(tmp_path: Path) -> None:
    with mp.open(tmp_path / "pond", containers=2, slices=8, threads=1) as pond:
        join = pond.join("j", key="k long", left="a long", right="b long", window=mp.tumbling(20))
        sides = {"left": join.left(key="k", at="t"), "right": join.right(key="k", at="t")}
        columns = {"left": "a", "right": "b"}
        oracle = WindowJoinOracle(kinds.tumbling(20), key="k")
        with kills(pond) as enough:
            for epoch in range(EPOCHS_MAX):
                for side, operator in sides.items():
                    part = [(key, time, {columns[side]: row["v"]}) for key, time, row in rows_of(epoch, side)]
                    table = table_of(rows_of(epoch, side), columns[side])
                    fired = run(operator, table, epoch)
                    assert counted(fired) == counted(oracle.epoch(epoch, part, side).rows), (epoch, side)
                if enough() and epoch > 8:
                    break
        for side, operator in sides.items():
            assert counted(operator.finish().to_pylist()) == counted(oracle.finish(side).rows), side
