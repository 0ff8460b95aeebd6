"""Transactions in real processes that are killed with SIGKILL: money is conserved, and each event took effect once.

Run as a script, this file is the worker: a process that opens a pond, tells what it found, and commits epochs, until
a crash point ends it.
"""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import millpond as mp
from millpond.durable.crashpoints import ENVIRONMENT

SOAK_S = float(os.environ.get("MILLPOND_SOAK_SECONDS", "0"))
KILLS_MIN = 5
EPOCHS_MIN = 6
EPOCHS_AHEAD_MAX = 4
PROGRESS_S_MAX = 60
EVENTS = 150
ACCOUNTS = 12
START = 100


@mp.transaction(results="left, note")
def transfer(accounts, log, src, dst, amount, name, steps):
    accounts[src].balance -= amount
    accounts[dst].balance += amount
    log[name].count += 1
    for step in steps:
        log[name].total += step
    if accounts[src].balance < 0:
        mp.abort("poor")
    log[name].last = name
    return accounts[src].balance, log[name].total // amount


@mp.transaction
def count(visits, name, amount):
    visits[name].n += amount
    if visits[name].n % 7 == 0:
        mp.abort("seven")


# The stream: events of an epoch follow from its number, so that anyone can replay it.


def events_of(epoch: int, seed: int = 0) -> pa.Table:
    """Out of order, some late, amounts of zero among them."""
    chance = np.random.default_rng([seed, epoch])
    name = [f"name {number}" for number in chance.integers(0, 9, EVENTS)]
    return pa.table(
        {
            "ts": epoch * 50 + chance.integers(-20, 50, EVENTS),
            "seq": chance.permutation(EVENTS),
            "src": chance.integers(0, ACCOUNTS, EVENTS),
            "dst": chance.integers(0, ACCOUNTS, EVENTS),
            "amount": chance.integers(0, 60, EVENTS),
            "name": name,
            "steps": [chance.integers(0, 5, length).tolist() for length in chance.integers(0, 4, EVENTS)],
        }
    )


class Ledger:
    """The serial model: one event after the other, over dicts."""

    def __init__(self) -> None:
        self.accounts: dict[int, int] = {}
        self.log: dict[str, dict[str, Any]] = {}
        self.visits: dict[str, int] = {}
        self.marks = {"ledger": -np.inf, "visits": -np.inf}

    def arrive(
        self, operator: str, epoch: int, seed: int, outcome: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """All rows of the epoch as they came, late ones with their outcome; and those that run, in their order."""
        mark = self.marks[operator]
        rows = [row | outcome for row in events_of(epoch, seed).to_pylist()]
        for row in rows:
            if row["ts"] < mark:
                row["reason"] = "late"
        self.marks[operator] = max([mark, *(row["ts"] for row in rows)])
        timely = [row for row in rows if row["reason"] is None]
        return rows, sorted(timely, key=lambda row: (row["ts"], row["seq"]))

    def transfers(self, epoch: int) -> list[dict[str, Any]]:
        outcome = {"committed": False, "reason": None, "left": None, "note": None}
        rows, timely = self.arrive("ledger", epoch, 0, outcome)
        for row in timely:
            accounts = dict(self.accounts)
            accounts[row["src"]] = accounts.get(row["src"], START) - row["amount"]
            accounts[row["dst"]] = accounts.get(row["dst"], START) + row["amount"]
            entry = dict(self.log.get(row["name"], {"count": 0, "total": 0, "last": ""}))
            entry["count"] += 1
            entry["total"] += sum(row["steps"])
            entry["last"] = row["name"]
            if accounts[row["src"]] < 0:
                row["reason"] = "poor"
            elif row["amount"] == 0:
                row["reason"] = "ZeroDivisionError: division by zero"
            else:
                self.accounts = accounts
                self.log[row["name"]] = entry
                row["committed"] = True
                row["left"], row["note"] = accounts[row["src"]], entry["total"] // row["amount"]
        return rows

    def counts(self, epoch: int) -> list[dict[str, Any]]:
        rows, timely = self.arrive("visits", epoch, 1, {"committed": False, "reason": None})
        for row in timely:
            found = self.visits.get(row["name"], 0) + row["amount"]
            row |= {"committed": bool(found % 7), "reason": None if found % 7 else "seven"}
            if found % 7:
                self.visits[row["name"]] = found
        return rows

    def tables(self) -> dict[str, Any]:
        return {
            "accounts": {key: {"balance": value} for key, value in self.accounts.items()},
            "log": {name: dict(entry) for name, entry in self.log.items()},
            "visits": {name: {"n": value} for name, value in self.visits.items()},
        }


def operators(pond: mp.Pond) -> tuple[Any, Any]:
    accounts = pond.table("accounts", key="long", value="balance long", default={"balance": START})
    pond.table("log", "string", "count long, total long, last string", {"count": 0, "total": 0, "last": ""})
    visits = pond.table("visits", key="string", value="n long", default={"n": 0}, group="visits")
    ledger = pond.transactions("ledger", [accounts, "log"], {"transfer": transfer}, seq="seq")
    return ledger, pond.transactions("visits", [visits], {"count": count}, seq="seq")


def tables_of(pond: mp.Pond) -> dict[str, Any]:
    found = {}
    for name, table in pond.tables().items():
        rows = table.snapshot().to_pylist()
        found[name] = {row.pop("key"): row for row in rows}
    return found


def open_pond(root: Path, containers: int = 2) -> mp.Pond:
    return mp.open(root, containers=containers, threads=1, slices=8)


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A root for a pond. After the test no process of it is left."""
    yield tmp_path / "pond"
    deadline = time.monotonic() + 20
    while left := [
        pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _is_at(pid, tmp_path)
    ]:
        assert time.monotonic() < deadline, f"processes {left} were still there"
        time.sleep(0.05)


def _is_at(pid: int, root: Path) -> bool:
    with suppress(OSError):
        return pid != os.getpid() and str(root).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


class Drive:
    """Two operators and a reader, each in a thread of its own, and how far they have come."""

    def __init__(self, pond: mp.Pond) -> None:
        self.pond = pond
        self.model = Ledger()
        self.epochs = {"ledger": 0, "visits": 0}
        self.before = dict(self.epochs)
        self.reads = 0
        self.failures: list[BaseException] = []
        ledger, visits = operators(pond)
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(work,))
            for work in (
                lambda: self._commit("ledger", ledger, self.model.transfers),
                lambda: self._commit("visits", visits, self.model.counts),
                self._read,
            )
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(120)
        assert not self.failures, self.failures

    def moved(self) -> bool:
        """Both operators did, since the last time that somebody waited for it."""
        return all(self.epochs[name] > count for name, count in self.before.items())

    def wait_until_moved(self) -> None:
        self.before = dict(self.epochs)
        patience = time.monotonic() + PROGRESS_S_MAX
        while not self.moved() and not self.failures:
            assert time.monotonic() < patience, f"stuck at {self.epochs}"
            time.sleep(0.01)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            while not self._ended.is_set():
                work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test shows it
            self.failures.append(error)

    def _commit(self, name: str, op: Any, expected: Any) -> None:
        # Who is far ahead waits until the other, whose container is down, got somewhere, too.
        if self.epochs[name] - self.before[name] > EPOCHS_AHEAD_MAX and not self.moved():
            time.sleep(0.01)
            return
        epoch, seed = self.epochs[name], int(name == "visits")
        wanted = expected(epoch)
        assert op(events_of(epoch, seed), epoch).to_pylist() == wanted, f"{name}, epoch {epoch}"
        # As a source may, that was not told.
        if epoch % 4 == 3:
            again = events_of(epoch, seed).take(np.arange(EVENTS)[::-1])
            assert op(again, epoch).to_pylist() == wanted, f"{name}, epoch {epoch} again"
        self.epochs[name] += 1

    def _read(self) -> None:
        rows = self.pond.table("accounts").snapshot()["balance"].to_pylist()
        assert sum(rows) == START * len(rows), "money came or went"
        assert all(balance >= 0 for balance in rows), "an abort left a trace"
        self.reads += 1
        time.sleep(0.02)


@pytest.mark.timeout(SOAK_S + 150)
@pytest.mark.long
def test_containers_killed_at_random_lose_and_double_nothing(root: Path) -> None:
    """Two operators at once, on groups in different containers, while one container after the other is killed.

    One container, or one and soon another; then again, once both operators got somewhere: who is killed again and
    again before it did is taken for one whose code does it.
    """
    chance, kills, deadline = random.Random(7), 0, time.monotonic() + SOAK_S
    with open_pond(root) as pond:
        drive = Drive(pond)
        drive.start()
        try:
            while (time.monotonic() < deadline or kills < KILLS_MIN) and not drive.failures:
                drive.wait_until_moved()
                for _ in range(chance.choice([1, 2, 2])):
                    time.sleep(chance.uniform(0.05, 0.3))
                    serving = pond.containers()
                    if serving:
                        kill(chance.choice(serving).pid)
                        kills += 1
                if chance.random() < 0.5:
                    with suppress(mp.MillpondError):
                        pond.checkpoint()
            while min(drive.epochs.values()) < EPOCHS_MIN and not drive.failures:
                drive.wait_until_moved()
        finally:
            drive.end()
        assert tables_of(pond) == drive.model.tables()
    assert kills >= KILLS_MIN
    assert drive.reads > 5
    with open_pond(root, containers=1) as pond:
        assert tables_of(pond) == drive.model.tables()


CONTAINER_POINTS = [
    "log.append.before:3", "log.rename.after:5", "acknowledge.after:4", "apply.before:6", "apply.after:4",
    "snapshot.rename.before:1", "manifest.dirsync.after:2", "truncate.before:1", "truncate.after:1",
]  # fmt: skip


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=() if "apply.before" in point else pytest.mark.long)
        for point in CONTAINER_POINTS
    ],
)
def test_a_container_that_dies_at_a_point_goes_on_as_if_nothing_had_happened(
    root: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, point)
    model = Ledger()
    with open_pond(root, containers=1) as pond:
        ledger, visits = operators(pond)
        for epoch in range(6):
            assert ledger(events_of(epoch), epoch).to_pylist() == model.transfers(epoch)
            assert visits(events_of(epoch, 1), epoch).to_pylist() == model.counts(epoch)
            if epoch == 2:
                with suppress(mp.MillpondError):
                    pond.checkpoint()
        assert pond.metrics()["coordinator"]["container_restarts"] == 1, "it died, once"
        assert tables_of(pond) == model.tables()


def work(root: Path, containers: int, first: int) -> None:
    """Tells what the pond holds, then commits epochs from `first` on, and tells what each gave."""

    def say(line: Any) -> None:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    with open_pond(root, containers) as pond:
        ledger, _ = operators(pond)
        say(list_of(tables_of(pond)))
        for epoch in range(first, first + 20):
            say(ledger(events_of(epoch), epoch).to_pylist())
            if epoch % 4 == 1:
                pond.checkpoint()


def list_of(tables: dict[str, Any]) -> list[Any]:
    """What JSON keeps as it is."""
    return [[name, [list(row) for row in sorted(rows.items())]] for name, rows in sorted(tables.items())]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "points",
    [
        ("journal.sync.after:12", "publish.before:3"),
        pytest.param(("journal.dirsync.after:12", "publish.after:2"), marks=pytest.mark.long),
    ],
    ids=["before", "after"],
)
def test_a_driver_that_dies_at_a_point_finds_whole_epochs(root: Path, points: tuple[str, ...]) -> None:
    """At points of the coordinator's, which is in the driver; one after the other, on one pond.

    Each driver begins with the last epoch that the one before it had acknowledged, as Spark does.
    """
    models, outputs = [Ledger()], []

    def expect(epoch: int) -> list[dict[str, Any]]:
        while len(outputs) <= epoch:
            model = copy.deepcopy(models[-1])
            outputs.append(model.transfers(len(outputs)))
            models.append(model)
        return outputs[epoch]

    def check_found(tables: list[Any], where: str) -> None:
        expect(done)
        assert tables in [list_of(models[done].tables()), list_of(models[done + 1].tables())], where

    done = 0
    for containers, point in enumerate(points, start=1):
        first = max(done - 1, 0)
        worker = subprocess.run(
            [sys.executable, __file__, str(root), str(containers), str(first)],
            env={**os.environ, ENVIRONMENT: point},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert worker.returncode == -signal.SIGKILL, worker.stderr[-2000:]
        found, *given = map(json.loads, worker.stdout.splitlines())
        check_found(found, f"before {point}")
        assert given == [expect(epoch) for epoch in range(first, first + len(given))], point
        done = max(done, first + len(given))
    assert done > len(points), "epochs were acknowledged before the deaths"
    with open_pond(root, containers=1) as pond:
        ledger, _ = operators(pond)
        check_found(list_of(tables_of(pond)), f"after {point}")
        for epoch in (done - 1, done):
            assert ledger(events_of(epoch), epoch).to_pylist() == expect(epoch)
        assert tables_of(pond) == models[done + 1].tables()


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
