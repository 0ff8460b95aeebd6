"""Epochs whose code never ends, eats all memory or crashes are refused; the pond goes on, and opens again."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

import millpond as mp
from millpond.errors import CodeFailed, CodeTookTooLong, OutOfMemory

# Limits of memory are met by what a container of users takes.
pytestmark = pytest.mark.usefixtures("started_as_ever")

SECONDS = 4
MEMORY = 1 << 30


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.RuleInterpreted)
        yield


# Endless: with text interpreted, without it compiled.


def turn(n):
    while n >= 5:
        n = n + 1 if n < 1000 else 5
    return n


def turn_aloud(n):
    text = ""
    while n >= 5:
        text = f"{n}"
    return len(text)


def hoard(n):
    kept = []
    while n >= 5:
        kept.append(list(range(1000)))
    return len(kept)


def reach_out(n):
    far = np.lib.stride_tricks.as_strided(np.zeros(1), (1 << 45,))
    far[1 << 44] = n
    return n


@mp.transaction
def turning(accounts, key, n):
    accounts[key].balance += turn(n)


@mp.transaction
def turning_aloud(accounts, key, n):
    accounts[key].balance += 1
    accounts[key].balance += turn_aloud(n)


@mp.transaction
def hoarding(accounts, key, n):
    accounts[key].balance += 1
    accounts[key].balance += hoard(n)


@mp.transaction
def reaching_out(accounts, key, n):
    accounts[key].balance += 1
    accounts[key].balance += reach_out(n)


@mp.transaction
def adding(accounts, key, n):
    accounts[key].balance += n


def turning_rule(old, new):
    return old + turn(new)


def turning_aloud_rule(old, new):
    return old + str(turn_aloud(len(new)))


def hoarding_rule(old, new):
    return old + str(hoard(len(new)))


def turning_answer(times, value) -> int:
    return turn(value[0])


def turning_aloud_answer(times, value) -> int:
    return turn_aloud(value[0])


def turning_on_anything(times, value) -> int:
    while True:
        pass


EVENTS = pa.table({"ts": [2, 2], "key": [1, 2], "n": [5, 6]})


class Bystander:
    """A State of the same container that has nothing to do with it."""

    def __init__(self, pond: mp.Pond, epoch: int = 0) -> None:
        self.state = pond.state("bystander", key="long", value="long")
        self.update = self.state.update(key="k", at="t", value="v", name="feed")
        self.epoch = epoch

    def goes_on(self) -> None:
        epoch, self.epoch = self.epoch, self.epoch + 1
        self.update(pa.table({"k": [1], "t": [epoch], "v": [epoch]}), epoch)
        fetch = self.state.fetch(key="k", at="t", into="v")
        answers = fetch.now(pa.table({"k": [1], "t": [epoch - 1]}))["v"].to_pylist()
        assert answers == [epoch - 1 if epoch else None]


def open_pond(root: Path, code_seconds: float = SECONDS) -> mp.Pond:
    return mp.open(root, code_seconds=code_seconds, memory=MEMORY)


def balances(pond: mp.Pond) -> dict[int, int]:
    return {row["key"]: row["balance"] for row in pond.table("accounts").snapshot().to_pylist()}


class Transactions(NamedTuple):
    """Transactions that misbehave cost their epoch only."""

    function: Any
    error: type[Exception]

    def check(self, pond: mp.Pond, bystander: Bystander) -> None:
        accounts = pond.table("accounts", key="long", value="balance long", default={"balance": 0})
        name = self.function.__name__
        pond.transactions(f"before_{name}", [accounts], {"adding": adding})(EVENTS, 0)
        before = balances(pond)
        started = time.monotonic()
        with pytest.raises(self.error) as raised:
            pond.transactions(name, [accounts], {"bad": self.function})(EVENTS, 0)
        assert time.monotonic() - started < 30
        if self.error is CodeTookTooLong:
            assert name in raised.value.what  # type: ignore[attr-defined]
        if self.error is CodeFailed:
            assert "SIG" in str(raised.value)
        bystander.goes_on()
        assert balances(pond) == before
        # The epoch, mended.
        pond.transactions(name, [accounts], {"bad": adding})(EVENTS, 0)
        assert balances(pond) == {1: before[1] + 5, 2: before[2] + 6}


class UpdateRule(NamedTuple):
    """An update rule that misbehaves costs its epoch only."""

    rule: Any
    value: Any
    error: type[Exception]

    def check(self, pond: mp.Pond, bystander: Bystander) -> None:
        kind = "long" if isinstance(self.value, int) else "string"
        state = pond.state(self.rule.__name__, key="long", value=kind, update=self.rule)
        update = state.update(key="k", at="t", value="v", name="feed")
        # The first update of a key is kept as it is; the second calls the rule.
        update(pa.table({"k": [1], "t": [1], "v": [self.value]}), 0)
        with pytest.raises(self.error):
            update(pa.table({"k": [1], "t": [2], "v": [self.value]}), 1)
        bystander.goes_on()
        update(pa.table({"k": [2], "t": [3], "v": [self.value]}), 1)
        state.finish("feed")
        self.check_held(pond)

    def check_held(self, pond: mp.Pond) -> None:
        rows = pond.state(self.rule.__name__).snapshot().to_pylist()
        assert sorted((row["key"], row["value"]) for row in rows) == [(1, self.value), (2, self.value)]


class Question(NamedTuple):
    """A question that never ends costs itself only."""

    rule: Any
    error: type[Exception]

    def check(self, pond: mp.Pond, bystander: Bystander) -> None:
        state = pond.state(self.rule.__name__, key="long", value="long")
        state.update(key="k", at="t", value="v", name="feed")(pa.table({"k": [1], "t": [1], "v": [5]}), 0)
        state.finish("feed")
        questions = pa.table({"k": [1], "low": [0], "t": [1]})
        with pytest.raises(self.error):
            state.fetch(key="k", between=("low", "t"), into="v", rule=self.rule).now(questions)
        bystander.goes_on()
        latest = state.fetch(key="k", between=("low", "t"), into="v", rule=mp.latest())
        assert latest.now(questions)["v"].to_pylist() == [5]


def check_a_rule_does_not_run_where_it_is_declared(pond: mp.Pond) -> None:
    state = pond.state("s", key="long", value="long")
    state.fetch(key="k", between=("low", "t"), into="v", rule=turning_on_anything)
    pond.state("folded", key="long", value="long", update=lambda old, new: turn(old + new + 5))


@pytest.mark.parametrize(
    ("cases", "code_seconds"),
    [
        pytest.param(
            [
                Transactions(turning, CodeTookTooLong),
                UpdateRule(turning_aloud_rule, "five!", CodeTookTooLong),
                Question(turning_answer, CodeTookTooLong),
            ],
            SECONDS,
            id="endless",
        ),
        pytest.param(
            [
                Transactions(turning_aloud, CodeTookTooLong),
                UpdateRule(turning_rule, 5, CodeTookTooLong),
                Question(turning_aloud_answer, CodeTookTooLong),
            ],
            SECONDS,
            id="endless the other way",
            marks=pytest.mark.long,
        ),
        # To fill the memory takes a while, too.
        pytest.param(
            [Transactions(hoarding, OutOfMemory), Transactions(reaching_out, CodeFailed)],
            60,
            id="greedy or crashing",
        ),
        pytest.param(
            [UpdateRule(hoarding_rule, "five!", OutOfMemory)], 60, id="greedy rule", marks=pytest.mark.long
        ),
    ],
)
def test_code_that_misbehaves_costs_its_epoch_only(
    tmp_path: Path, cases: list[Transactions | UpdateRule | Question], code_seconds: float
) -> None:
    root = tmp_path / "pond"
    with open_pond(root, code_seconds) as pond:
        bystander = Bystander(pond)
        bystander.goes_on()
        check_a_rule_does_not_run_where_it_is_declared(pond)
        for case in cases:
            case.check(pond, bystander)
        held = balances(pond) if "accounts" in pond.tables() else None
    with open_pond(root) as pond:
        Bystander(pond, bystander.epoch).goes_on()
        for case in cases:
            if isinstance(case, UpdateRule):
                case.check_held(pond)
        assert held is None or balances(pond) == held


@mp.transaction
def spinning(accounts, key, n):
    for i in range(n * n * 200_000):
        for j in range(n * n * 200_000):
            accounts[key].balance = (accounts[key].balance + i * j) % 7


@pytest.mark.parametrize(
    ("function", "options", "error"),
    [
        pytest.param(spinning, {"limit": 3}, CodeTookTooLong, id="compiled"),
        pytest.param(turning_aloud, {"limit": "500 milliseconds"}, CodeTookTooLong, id="interpreted"),
        pytest.param(hoarding, {"memory": "100m"}, OutOfMemory, id="memory"),
    ],
)
def test_an_operator_has_limits_of_its_own_and_the_event_is_named(
    tmp_path: Path, function: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    with mp.open(tmp_path / "pond", threads=1) as pond:
        bystander = Bystander(pond)
        bystander.goes_on()
        accounts = pond.table("accounts", key="long", value="balance long", default={"balance": 0})
        run = pond.transactions("run", [accounts], {"bad": function}, delay=5, **options)
        run(pa.table({"ts": [1], "key": [3], "n": [0]}), 0)
        events = pa.table({"ts": [7, 8, 9, 20], "key": [1, 2, 3, 3], "n": [0, 6, 0, 0]})
        started = time.monotonic()
        with pytest.raises(error) as raised:
            run(events, 1)
        assert time.monotonic() - started < 30
        # Of those that run: the one that waited, and the first three that came.
        assert "at event 2 of 4, a 'bad' with ts=8, key=2, n=6" in str(raised.value)
        assert "limit" in str(raised.value) or "memory" in str(raised.value)
        bystander.goes_on()
        assert balances(pond) == {}
        assert run.pending().rows == 1, "what waited waits on"
        mended = pond.transactions("run", [accounts], {"bad": adding}, delay=5, **options)
        assert mended(events, 1)["ts"].to_pylist() == [1, 7, 8, 9]
        assert balances(pond) == {1: 0, 2: 6, 3: 0}
