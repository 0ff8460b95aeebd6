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
from test_program_plain import entries

import millpond as mp
from millpond.durable.crashpoints import ENVIRONMENT
from millpond.errors import Unavailable
from millpond.programs.plain import state_of

KILLS = 2
READS_MIN = 200
BETWEEN_ROUNDS = "round.gather.after"
"""Each container dies there once, too, after the first round of the first call: to write has two at least."""
SLICES = 8
WRITERS = 3
EPOCHS_MIN, CALLS_MIN = 5, 60
SECONDS_MAX = 120


STREAMED = 50
"""A user whom each epoch has twice, with items that are nobody else's, as those of writers are."""


@mp.program(lanes=3)
class Recommender:
    user_item: mp.Partitioned[mp.Matrix]
    co_occ: mp.Partial[mp.Matrix]

    def add_rating(self, user: int, item: int, rating: float):
        row = self.user_item[user]
        fresh = item not in row
        others = row.keys()
        row[item] = rating
        if fresh:
            for other in others:
                self.co_occ[item, other] += 1
                self.co_occ[other, item] += 1

    def get_rec(self, user: int, k: int = 10) -> "array<long>":  # noqa: F722 - DDL
        row = self.user_item[user]
        parts = mp.everywhere(self.co_occ).multiply(row)
        return mp.total(parts).without(row).top(k)

    def row_of(self, user: int) -> list[int]:
        return self.user_item[user].keys()

    def told(self, user: int) -> mp.Vector:
        """The row of a user whose items are nobody else's, with -1 in it where lanes are not of the same state: there each
        item came once with every other one, and with none that the row has not.
        """
        row = self.user_item[user].copy()
        sums = mp.total(mp.everywhere(self.co_occ).multiply(row))
        for item in sums:
            if item not in row or sums[item] != row.total() - row[item]:
                row[-1] = -1.0
        return row


def rows(epoch: int) -> list[dict[str, float]]:
    chance = random.Random(epoch)
    drawn = [
        {"user": chance.randrange(20), "item": chance.randrange(30), "rating": float(chance.randint(1, 5))}
        for _ in range(200)
    ]
    own = [{"user": STREAMED, "item": 100_000 + 2 * epoch + n, "rating": 1.0 + n} for n in range(2)]
    return [own[0], *drawn, own[1]]


def own_call(writer: int, number: int) -> dict[str, float]:
    """Users and items of a writer's own: whatever comes in between, what is left is the same."""
    return {"user": 100 + writer, "item": 1000 * (writer + 1) + number, "rating": 1.0 + number % 5}


def surely(call: Callable[[], Any]) -> Any:
    """Again, where it is not known what became of it."""
    while True:
        try:
            return call()
        except Unavailable:
            time.sleep(0.05)


class Reader:
    """What it has seen, it sees from then on, whole."""

    def __init__(self, rec: Any) -> None:
        self._rec = rec
        self._seen: dict[int, set[int]] = {}
        self.reads = self.grew = 0

    def read(self) -> None:
        self._grows(1, surely(partial(self._rec.row_of, user=1)))
        surely(partial(self._rec.get_rec, user=2))
        for user in (STREAMED, *range(100, 100 + WRITERS)):
            told = surely(partial(self._rec.told, user=user))
            assert told[-1] == 0.0, (user, "what lanes hold is not of the row", told.items())
            self._grows(user, told.keys())
            assert user != STREAMED or len(told) % 2 == 0, "half of an epoch was seen"

    def _grows(self, user: int, items: list[int]) -> None:
        before, now = self._seen.get(user, set()), set(items)
        assert before <= now, (user, "a row has gone back", before - now)
        self._seen[user] = now
        self.reads += 1
        self.grew += before != now


class Everybody:
    """A stream, threads that write with idempotency keys, each call twice, some that read, and one that kills."""

    def __init__(self, pond: mp.Pond, root: Path) -> None:
        self.pond = pond
        self.logs = [root / f"container-{number}.log" for number in range(2)]
        self.rec = pond.program("rec", Recommender)
        self._joined = mp.connect(pond.address, (root / "token").read_text())
        # Who writes reads, too; and who has joined the pond does.
        self.readers = [Reader(self.rec), Reader(self._joined.program("rec", Recommender))]
        self.killed: list[int] = []
        self.errors: list[BaseException] = []
        self.epochs = 0
        self.written = [0] * WRITERS
        self._over = threading.Event()
        self._deadline = time.monotonic() + SECONDS_MAX

    def run(self) -> None:
        working = [self._thread(self._stream), *(self._thread(self._write, n) for n in range(WRITERS))]
        beside = [self._thread(self._kill), *(self._thread(self._read, n) for n in range(2))]
        for thread in working:
            thread.join()
        self._over.set()
        for thread in beside:
            thread.join()
        self._joined.close()

    def _thread(self, work: Callable[..., None], *given: int) -> threading.Thread:
        def guarded() -> None:
            try:
                work(*given)
            except BaseException as error:  # noqa: BLE001 - told in the end
                self.errors.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        return thread

    def _goes_on(self) -> bool:
        """All go on until there was enough of everything."""
        is_late = bool(self.errors) or time.monotonic() > self._deadline
        is_enough = (
            len(self.killed) == KILLS
            and self.epochs >= EPOCHS_MIN
            and min(self.written) >= CALLS_MIN
            and min(reader.reads for reader in self.readers) >= READS_MIN
        )
        return not is_late and not is_enough

    def _stream(self) -> None:
        feed = self.rec.call("add_rating", name="feed")
        while self._goes_on():
            feed(pa.Table.from_pylist(rows(self.epochs)), self.epochs)
            self.epochs += 1

    def _write(self, writer: int) -> None:
        while self._goes_on():
            number = self.written[writer]
            call, key = own_call(writer, number), f"{writer}-{number}"
            for _ in range(2):
                surely(partial(self.rec.ask, "add_rating", **call, idempotency_key=key))
            row = surely(partial(self.rec.row_of, user=call["user"]))
            assert len(row) == number + 1, "a call that has returned is seen"
            self.written[writer] += 1

    def _read(self, number: int) -> None:
        while not self._over.is_set():
            self.readers[number].read()

    def _kill(self) -> None:
        chance = random.Random(7)
        while not self._over.is_set() and not self.died_between_rounds():
            time.sleep(0.05)
        while not self._over.is_set() and len(self.killed) < KILLS:
            time.sleep(chance.uniform(0.3, 1.0))
            containers = self.pond.containers()
            if len(containers) == 2 and self.epochs > len(self.killed):
                victim = chance.choice(containers).pid
                os.kill(victim, signal.SIGKILL)
                self.killed.append(victim)

    def died_between_rounds(self) -> bool:
        """Whether both containers have."""
        return all(f"killed at crash point {BETWEEN_ROUNDS}" in log.read_text() for log in self.logs)

    def check(self) -> None:
        """Each call took effect once, and all was seen."""
        assert self.died_between_rounds()
        assert not self.errors, self.errors
        assert len(self.killed) == KILLS, "the planned kills should have come"
        assert self.epochs >= EPOCHS_MIN
        assert min(self.written) >= CALLS_MIN
        for reader in self.readers:
            assert reader.reads >= READS_MIN
            assert reader.grew >= READS_MIN // 10, "there should have been something to see"
        plain = mp.plain(Recommender, slices=SLICES)
        for epoch in range(self.epochs):
            for call in rows(epoch):
                plain.add_rating(**call)
        for writer, count in enumerate(self.written):
            for number in range(count):
                plain.add_rating(**own_call(writer, number))
        assert entries(self.rec) == state_of(plain)
        for user in (1, STREAMED, 100):
            assert self.rec.get_rec(user=user) == plain.get_rec(user=user)
            assert self.rec.told(user=user) == plain.told(user=user)


def test_containers_killed_while_all_call_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, BETWEEN_ROUNDS)
    with mp.open(tmp_path / "pond", containers=2, slices=SLICES, threads=1) as pond:
        monkeypatch.delenv(ENVIRONMENT)
        all_calls = Everybody(pond, tmp_path / "pond")
        all_calls.run()
        all_calls.check()
