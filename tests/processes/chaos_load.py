"""What goes on in a pond of processes, with every answer checked: updaters of a State and readers of it, rows that wait, and
transactions.
"""

from __future__ import annotations

import math
import random
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import pyarrow as pa
from test_transactions_kill import EVENTS, Ledger, events_of, operators, tables_of

import millpond as mp
from millpond.errors import MillpondError, Unavailable, WriteFailed
from millpond.testing import Oracle

KEYS = 40
ROWS = 60
DELAY = 100
FEEDS = ("even", "odd")
PAUSE_S = 0.03
PROGRESS_S_MAX = 60.0
FIRST_S_MAX = 180.0
"""Transactions are compiled before the first one runs, by every process that it takes."""


# The stream: rows of an epoch follow from its number


def rows_of(seed: int, feed: str, epoch: int) -> list[tuple[str, int, int]]:
    """Out of order, some of them late. The feeds share keys, and no times: what is final depends on no race."""
    chance = np.random.default_rng([seed, FEEDS.index(feed), epoch])
    keys = chance.integers(0, KEYS, ROWS).tolist()
    times = (2 * (epoch * 50 + chance.integers(-160, 100, ROWS)) + FEEDS.index(feed)).tolist()
    values = chance.integers(0, 1_000_000, ROWS).tolist()
    return [(f"key-{key}", at, value) for key, at, value in zip(keys, times, values, strict=True)]


def table_of(rows: Sequence[tuple[str, int, int]]) -> pa.Table:
    keys, times, values = zip(*rows, strict=True)
    return pa.table({"k": keys, "t": pa.array(times, pa.int64()), "v": pa.array(values, pa.int64())})


class History:
    """The oracle, which is told of an epoch before the pond is: of what lies below U it knows all, at any time."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.oracle = Oracle()
        self.epochs = dict.fromkeys(FEEDS, 0)
        self._lock = threading.Lock()
        for feed in FEEDS:
            self.oracle.register_updater(feed)

    def next_of(self, feed: str) -> tuple[int, list[tuple[str, int, int]], tuple[int, int]]:
        """The next epoch of a feed: its number, its rows, and how many must be applied and how many are late."""
        with self._lock:
            epoch = self.epochs[feed]
            self.epochs[feed] += 1
            rows = rows_of(self.seed, feed, epoch)
            receipt = self.oracle.update(feed, epoch, rows, delay=DELAY)
        return epoch, rows, (receipt.rows_applied, receipt.late)

    def answer(self, key: str, at: int) -> int | None:
        """The newest value of the key with time <= at."""
        with self._lock:
            versions = self.oracle.versions.get(key, [])
            place = bisect_right(versions, at, key=lambda version: version[0])
            return versions[place - 1][1] if place else None

    def told(self, key: str, at: int) -> list[tuple[str, int, int, int]]:
        """For those who look for what went wrong: versions near there by feed, epoch, time and value."""
        return [
            (feed, epoch, when, value)
            for feed in FEEDS
            for epoch in range(self.epochs[feed])
            for name, when, value in rows_of(self.seed, feed, epoch)
            if name == key and at - 600 <= when <= at
        ]

    def epochs_of(self, values: dict[str, set[int]]) -> list[tuple[str, str, int]]:
        """By key, feed and epoch, for those who look for what went wrong."""
        return [
            (key, feed, epoch)
            for feed in FEEDS
            for epoch in range(self.epochs[feed])
            for key, _, value in rows_of(self.seed, feed, epoch)
            if value in values.get(key, ())
        ]

    def below(self, until: float) -> dict[str, list[int]]:
        """All values of each key with time < until, in the order of their times."""
        with self._lock:
            return {
                f"key-{key}": [v for at, v in self.oracle.raw(f"key-{key}") if at < until]
                for key in range(KEYS)
            }


def held_by(pond: mp.Pond) -> dict[str, list[int]]:
    """All that is final, by key."""
    state = pond.state("s")
    until = state.progress().update
    high = 2**62 if until == math.inf else int(until) - 1
    asked = pa.table(
        {"k": [f"key-{key}" for key in range(KEYS)], "lo": [-(2**62)] * KEYS, "hi": [high] * KEYS}
    )
    answers = state.fetch(key="k", between=("lo", "hi"), rule=mp.values(), into="v").now(asked)
    return dict(zip(answers["k"].to_pylist(), answers["v"].to_pylist(), strict=True))


# What goes on


class Worker:
    """Does one thing after the other in a thread of its own, until it is ended or something is wrong.

    What it may be refused for is in `refusals`, and counted: it does the same again, as a stream does.
    """

    refusals: tuple[type[MillpondError], ...] = (WriteFailed,)

    def __init__(self, name: str) -> None:
        self.name = name
        self.done = 0
        self.refused: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self.gap_s_max = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"chaos-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ended.set()

    def join(self) -> None:
        self._thread.join(PROGRESS_S_MAX)
        assert not self._thread.is_alive(), f"{self.name} does not end"

    def work(self) -> bool:
        """One thing; whether there was one to do. To be done again if it raises."""
        raise NotImplementedError

    def _run(self) -> None:
        last_s = time.monotonic()
        try:
            while not self._ended.wait(PAUSE_S):
                try:
                    if not self.work():
                        continue
                except self.refusals as error:
                    self.refused[type(error).__name__] += 1
                    continue
                now_s = time.monotonic()
                self.gap_s_max, last_s = max(self.gap_s_max, now_s - last_s), now_s
                self.done += 1
        except BaseException as error:  # noqa: BLE001 - whatever it is, the run shows it
            self.failure = error


class Feed(Worker):
    """Commits one epoch after the other; some of them twice, as a source may that was not told."""

    def __init__(
        self, name: str, pond: mp.Pond, history: History, refusals: tuple[type[MillpondError], ...] = ()
    ) -> None:
        super().__init__(name)
        self.refusals = (*Worker.refusals, *refusals)
        self._history = history
        self._op = pond.state("s").update(key="k", at="t", value="v", delay=DELAY, name=name)
        self._next: tuple[int, list[tuple[str, int, int]], tuple[int, int]] | None = None

    def work(self) -> bool:
        was_refused = self._next is not None
        if self._next is None:
            self._next = self._history.next_of(self.name)
        epoch, rows, expected = self._next
        committed = self._op(table_of(rows), epoch)
        # One that was decided before its driver was refused is a replay.
        if not (was_refused and committed.replayed):
            assert not committed.replayed, f"{self.name}, epoch {epoch}, was there already"
            assert (committed.rows, committed.late) == expected, f"{self.name}, epoch {epoch}"
        if epoch % 5 == 4:
            assert self._op(table_of(rows[::-1] if len(set(rows)) == ROWS else rows), epoch).replayed
        self._next = None
        return True


class Reader(Worker):
    """Asks for what is final, old and new."""

    def __init__(
        self,
        name: str,
        pond: mp.Pond,
        history: History,
        seed: int,
        refusals: tuple[type[MillpondError], ...] = (),
    ) -> None:
        super().__init__(name)
        self.refusals = refusals
        self._state = pond.state("s")
        self._fetch = self._state.fetch(key="k", at="t", into="v")
        self._history = history
        self._chance = random.Random(seed)

    def work(self) -> bool:
        until = self._state.progress().update
        if until == -math.inf:
            return False
        check_answers(self._fetch, self._history, self._chance, int(min(until, 2**40)))
        return True


def check_answers(fetch: Any, history: History, chance: random.Random, until: int) -> None:
    keys = [f"key-{chance.randrange(KEYS)}" for _ in range(30)]
    times = [until - 1 - int(chance.expovariate(1 / 400)) for _ in keys]
    answers = fetch.now(pa.table({"k": keys, "t": times}))["v"].to_pylist()
    for key, at, value in zip(keys, times, answers, strict=True):
        expected = history.answer(key, at)
        assert value == expected, f"{key} at {at}: {value}, not {expected}; U was {until}"


class Views(Worker):
    """Rows that ask for times which are not final yet: each is answered once, and rightly."""

    refusals = (WriteFailed,)

    def __init__(self, pond: mp.Pond, history: History, seed: int) -> None:
        super().__init__("views")
        self._state = pond.state("s")
        self._history = history
        self._chance = random.Random(seed)
        self._views = self._state.fetch(key="k", at="t", into="v", name="views").to(self._take)
        self._asked: set[int] = set()
        self._rows: pa.Table | None = None
        self._epoch = 0
        self.answers: dict[int, dict[int, tuple[str, int, int | None]]] = {}

    def _take(self, answers: pa.Table, epoch: int) -> None:
        rows = {row["id"]: (row["k"], row["t"], row["v"]) for row in answers.to_pylist()}
        assert len(rows) == answers.num_rows, f"views, epoch {epoch}, answers a row twice"
        # A turn that is repeated gives the same.
        assert self.answers.setdefault(epoch, rows) == rows, f"views, epoch {epoch}, changed"
        for key, at, value in rows.values():
            expected = self._history.answer(key, at)
            assert value == expected, (
                f"views: {key} at {at}: {value}, not {expected}; {self._history.told(key, at)}"
            )

    def work(self) -> bool:
        until = self._state.progress().update
        if until == -math.inf:
            return False
        if self._rows is None:
            ids = [self._epoch * 20 + number for number in range(20)]
            times = [int(min(until, 2**40)) + self._chance.randrange(-200, 400) for _ in ids]
            keys = [f"key-{self._chance.randrange(KEYS)}" for _ in ids]
            self._rows = pa.table({"id": ids, "k": keys, "t": times})
            self._asked |= set(ids)
        self._views(self._rows, self._epoch)
        self._rows = None
        self._epoch += 1
        return True

    def finish(self) -> None:
        """U is at its end: what waited is answered, all of it, once."""
        self.work()
        answered = [number for rows in self.answers.values() for number in rows]
        assert len(answered) == len(set(answered)), "a row was answered in two turns"
        assert set(answered) == self._asked, "rows that waited are lost"


class Transactions(Worker):
    """One operator; its outcomes are those of the serial model."""

    refusals = (WriteFailed,)

    def __init__(self, name: str, op: Any, run: Callable[[int], list[dict[str, Any]]], seed: int) -> None:
        super().__init__(name)
        self._op = op
        self._model = run
        self._seed = seed
        self._expected: list[dict[str, Any]] | None = None

    def work(self) -> bool:
        epoch = self.done
        if self._expected is None:
            self._expected = self._model(epoch)
        events = events_of(epoch, self._seed)
        assert self._op(events, epoch).to_pylist() == self._expected, f"{self.name}, epoch {epoch}"
        if epoch % 4 == 3:
            again = self._op(events.take(np.arange(EVENTS)[::-1]), epoch).to_pylist()
            assert again == self._expected, f"{self.name}, epoch {epoch} again"
        self._expected = None
        return True


class Ledgers:
    """The serial model, and what the accounts were after each epoch."""

    def __init__(self) -> None:
        self.model = Ledger()
        self.accounts: list[dict[int, int]] = [{}]

    def transfers(self, epoch: int) -> list[dict[str, Any]]:
        outcomes = self.model.transfers(epoch)
        self.accounts.append(dict(self.model.accounts))
        return outcomes


class Auditor(Worker):
    """Reads a table: as it is after an epoch that is not older than the last that was acknowledged."""

    refusals = ()

    def __init__(self, pond: mp.Pond, ledgers: Ledgers, ledger: Transactions) -> None:
        super().__init__("auditor")
        self._table = pond.table("accounts")
        self._ledgers = ledgers
        self._ledger = ledger

    def work(self) -> bool:
        check_accounts(self._table, self._ledgers, self._ledger)
        return True


def check_accounts(table: Any, ledgers: Ledgers, ledger: Transactions) -> None:
    acknowledged = ledger.done
    accounts = {row["key"]: row["balance"] for row in table.snapshot().to_pylist()}
    possible = ledgers.accounts[acknowledged : len(ledgers.accounts)]
    assert accounts in possible, (
        f"the accounts are none of those after epoch {acknowledged} to {len(ledgers.accounts) - 1};"
        f" they were so after {[n for n, each in enumerate(ledgers.accounts) if each == accounts]}"
    )


class Load:
    """All that goes on in a pond, by the process that has it open and, through a proxy, by one that joined."""

    def __init__(self, pond: mp.Pond, joined: mp.Pond, seed: int) -> None:
        self.pond = pond
        self.history = History(seed)
        self.ledgers = Ledgers()
        pond.state("s", key="string", value="long")
        ledger, visits = operators(pond)
        self.transfers = Transactions("ledger", ledger, self.ledgers.transfers, 0)
        away = (Unavailable,)
        self.views = Views(pond, self.history, seed + 2)
        self.workers: list[Worker] = [
            Feed("even", pond, self.history),
            Feed("odd", joined, self.history, away),
            Reader("reader", pond, self.history, seed),
            Reader("joined-reader", joined, self.history, seed + 1, away),
            self.views,
            self.transfers,
            Transactions("visits", visits, self.ledgers.model.counts, 1),
            Auditor(pond, self.ledgers, self.transfers),
        ]

    def __enter__(self) -> Self:
        for worker in self.workers:
            worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.end()
        for worker in self.workers:
            worker.join()

    def check(self) -> None:
        for worker in self.workers:
            if worker.failure is not None:
                raise AssertionError(f"{worker.name}: {worker.failure!r}") from worker.failure

    def wait_until_moved(self, seconds: float = PROGRESS_S_MAX) -> None:
        """All of them do, or the run fails."""
        before = {worker.name: worker.done for worker in self.workers}
        await_true(
            lambda: all(worker.done > before[worker.name] for worker in self.workers),
            seconds,
            lambda: f"stuck: {[w.name for w in self.workers if w.done == before[w.name]]}",
            self.check,
        )

    def finish(self) -> None:
        """Nothing comes any more: compares all that there is."""
        for feed in FEEDS:
            self.pond.state("s").finish(feed)
        self.views.finish()
        self.compare(self.pond)

    def compare(self, pond: mp.Pond) -> None:
        """A pond that was opened since, too."""
        held, expected = held_by(pond), self.history.below(math.inf)
        wrong = [key for key in expected if held[key] != expected[key]]
        lost = {key: set(expected[key]) - set(held[key]) for key in wrong}
        assert not wrong, f"{wrong} lack {self.history.epochs_of(lost)}, of {self.history.epochs}"
        versions = sum(len(own) for own in self.history.oracle.versions.values())
        assert pond.metrics()["states"]["s"]["versions"] == versions
        assert tables_of(pond) == self.ledgers.model.tables()


def await_true(
    condition: Callable[[], bool],
    seconds: float,
    what: Callable[[], str],
    check: Callable[[], None] = lambda: None,
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        check()
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what()}"
        time.sleep(0.02)
