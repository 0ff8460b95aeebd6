"""Containers that are killed with SIGKILL while calls go from one to the other: each call took effect once."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from test_program_plain import Recommender, entries

import millpond as mp
from millpond.durable.crashpoints import ENVIRONMENT
from millpond.errors import Unavailable
from millpond.programs.plain import state_of

KILLS = 2
BETWEEN_ROUNDS = "round.gather.after"
"""Each container dies there once, too, after the first round of the first call: to write has two at least."""
SLICES = 8
WRITERS = 3
CALLS_MIN = 5
SECONDS_MAX = 120


def rows(epoch: int) -> list[dict[str, float]]:
    chance = random.Random(epoch)
    return [
        {"user": chance.randrange(20), "item": chance.randrange(30), "rating": float(chance.randint(1, 5))}
        for _ in range(200)
    ]


def own_call(writer: int, number: int) -> dict[str, float]:
    """Users of a writer's own: whatever comes in between, what is left is the same."""
    return {"user": 100 + writer, "item": 1000 * writer + number, "rating": 1.0 + number % 5}


def surely(call: Callable[[], Any]) -> Any:
    """Again, where it is not known what became of it."""
    while True:
        try:
            return call()
        except Unavailable:
            time.sleep(0.05)


class Everybody:
    """A stream, threads that write with idempotency keys, each call twice, one that reads, and one that kills."""

    def __init__(self, pond: mp.Pond) -> None:
        self.pond = pond
        self.rec = pond.program("rec", Recommender)
        self.killed: list[int] = []
        self.errors: list[BaseException] = []
        self.epochs = 0
        self.written = [0] * WRITERS
        self._over = threading.Event()
        self._deadline = time.monotonic() + SECONDS_MAX

    def run(self) -> None:
        working = [self._thread(self._stream), *(self._thread(self._write, n) for n in range(WRITERS))]
        beside = [self._thread(self._kill), self._thread(self._read)]
        for thread in working:
            thread.join()
        self._over.set()
        for thread in beside:
            thread.join()

    def _thread(self, work: Callable[..., None], *given: int) -> threading.Thread:
        def guarded() -> None:
            try:
                work(*given)
            except BaseException as error:  # noqa: BLE001 - told in the end
                self.errors.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        return thread

    def _goes_on(self, done: int) -> bool:
        is_late = bool(self.errors) or time.monotonic() > self._deadline
        return not is_late and (len(self.killed) < KILLS or done < CALLS_MIN)

    def _stream(self) -> None:
        feed = self.rec.call("add_rating", name="feed")
        while self._goes_on(self.epochs):
            feed(pa.Table.from_pylist(rows(self.epochs)), self.epochs)
            self.epochs += 1

    def _write(self, writer: int) -> None:
        while self._goes_on(self.written[writer]):
            number = self.written[writer]
            call, key = own_call(writer, number), f"{writer}-{number}"
            for _ in range(2):
                surely(partial(self.rec.ask, "add_rating", **call, idempotency_key=key))
            self.written[writer] += 1

    def _read(self) -> None:
        while not self._over.is_set():
            for user in (1, 2, *range(100, 100 + WRITERS)):
                surely(partial(self.rec.get_rec, user=user))

    def _kill(self) -> None:
        chance = random.Random(7)
        while not self._over.is_set() and len(self.killed) < KILLS:
            time.sleep(chance.uniform(0.3, 1.0))
            containers = self.pond.containers()
            if len(containers) == 2 and self.epochs > len(self.killed):
                victim = chance.choice(containers).pid
                os.kill(victim, signal.SIGKILL)
                self.killed.append(victim)


def test_containers_killed_while_all_call_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, BETWEEN_ROUNDS)
    with mp.open(tmp_path / "pond", containers=2, slices=SLICES, threads=1) as pond:
        monkeypatch.delenv(ENVIRONMENT)
        all_calls = Everybody(pond)
        all_calls.run()
        assert not all_calls.errors, all_calls.errors
        assert len(all_calls.killed) == KILLS, "the planned kills should have come"
        assert min(all_calls.epochs, *all_calls.written) >= CALLS_MIN
        for container in range(2):
            words = (tmp_path / "pond" / f"container-{container}.log").read_text()
            assert f"killed at crash point {BETWEEN_ROUNDS}" in words, "between two rounds"
        plain = mp.plain(Recommender, slices=SLICES)
        for epoch in range(all_calls.epochs):
            for call in rows(epoch):
                plain.add_rating(**call)
        for writer, count in enumerate(all_calls.written):
            for number in range(count):
                plain.add_rating(**own_call(writer, number))
        rec = all_calls.rec
        assert entries(rec) == state_of(plain)
        assert [rec.get_rec(user=user) for user in (1, 100)] == [
            plain.get_rec(user=user) for user in (1, 100)
        ]
