"""Containers and a driver that are killed with SIGKILL while lanes and fields change, under calls from everywhere."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

import millpond as mp
from millpond.errors import SchemaMismatch, Unavailable

SLICES = 8
CHANGES_MIN, EPOCHS_MIN, KILLS = 4, 4, 1
SECONDS_MAX = 100


@mp.program(lanes=2)
class Tally:
    counts: mp.Partitioned[mp.Map[int, int]]
    sums: mp.Partial[mp.Vector]

    def add(self, key: int, by: int):
        self.counts[key] += by
        self.sums[key % 5] += by

    def total(self, key: int) -> float:
        parts = mp.everywhere(self.sums).get(key)
        return mp.total(parts)


@mp.program(lanes=2)
class TallyByText:
    counts: mp.Partitioned[mp.Map[str, float]]
    sums: mp.Partial[mp.Vector]

    def add(self, key: str, by: float):
        self.counts[key] += by


def by_text(key: int, value: int) -> tuple[str, float]:
    return str(key), float(value)


class Everybody:
    """A stream and a thread that call, one that kills, and this one, which changes lanes."""

    def __init__(self, pond: mp.Pond) -> None:
        self.pond = pond
        self.tally = pond.program("tally", Tally)
        self.errors: list[BaseException] = []
        self.over = threading.Event()
        self.epochs = self.calls = 0
        self.killed: list[int] = []

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._guarded, args=[work])
            for work in (self._stream, self._call, self._kill)
        ]
        for thread in threads:
            thread.start()
        deadline, changes = time.monotonic() + SECONDS_MAX, 0
        while (
            changes < CHANGES_MIN or self.epochs < EPOCHS_MIN or len(self.killed) < KILLS
        ) and time.monotonic() < deadline:
            graph = Tally.__millpond_graph__._replace(lanes=(3, 1, 4, 2)[changes % 4])
            surely(lambda graph=graph: self.pond.program("tally", graph, migrate=True))
            changes += 1
        self.over.set()
        for thread in threads:
            thread.join()
        assert changes >= CHANGES_MIN
        assert len(self.killed) == KILLS, "the planned kills should have come"

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - told in the end
            self.errors.append(error)
            self.over.set()

    def _stream(self) -> None:
        feed = self.tally.call("add", name="feed")
        while not self.over.is_set():
            feed(pa.table({"key": list(range(20)), "by": [1] * 20}), self.epochs)
            self.epochs += 1

    def _call(self) -> None:
        while not self.over.is_set():
            key = f"call-{self.calls}"
            surely(lambda key=key: self.tally.ask("add", key=100, by=1, idempotency_key=key))
            self.calls += 1
            surely(lambda: self.tally.total(key=3))

    def _kill(self) -> None:
        chance = random.Random(7)
        while not self.over.is_set() and len(self.killed) < KILLS:
            time.sleep(chance.uniform(0.3, 0.8))
            containers = self.pond.containers()
            if len(containers) == 2 and self.epochs:
                victim = chance.choice(containers).pid
                os.kill(victim, signal.SIGKILL)
                self.killed.append(victim)


def surely(call: Callable[[], Any]) -> Any:
    while True:
        try:
            return call()
        except Unavailable:
            time.sleep(0.05)


def test_containers_killed_while_lanes_change(tmp_path: Path) -> None:
    with mp.open(tmp_path / "pond", containers=2, slices=SLICES, threads=1) as pond:
        everybody = Everybody(pond)
        everybody.run()
        assert not everybody.errors, everybody.errors
        counts = {**dict.fromkeys(range(20), everybody.epochs), 100: everybody.calls}
        assert everybody.epochs >= EPOCHS_MIN
        assert everybody.tally.entries("counts") == {key: count for key, count in counts.items() if count}
        sums = {key: 4.0 * everybody.epochs + everybody.calls * (key == 0) for key in range(5)}
        assert {key: everybody.tally.total(key=key) for key in range(5)} == sums
        # The same pond: fields change, too, and what has the old class is told so.
        again = surely(lambda: pond.program("tally", TallyByText, migrate={"counts": by_text, "sums": True}))
        assert again.entries("counts") == {str(key): float(count) for key, count in counts.items() if count}
        try:
            everybody.tally.add(key=1, by=1)
        except SchemaMismatch as error:
            assert "counts" in str(error)
        else:
            raise AssertionError("old code ran")
