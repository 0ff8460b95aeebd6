"""Epochs whose code never ends, eats all memory or crashes are refused; the pond goes on, and opens again."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import millpond as mp
from millpond.errors import CodeFailed, CodeTookTooLong, OutOfMemory

SECONDS = 4.0
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


class Bystander:
    """A State of the same container that has nothing to do with it."""

    def __init__(self, pond: mp.Pond) -> None:
        self.state = pond.state("bystander", key="long", value="long")
        self.update = self.state.update(key="k", at="t", value="v", name="feed")

    def goes_on(self, epoch: int) -> None:
        self.update(pa.table({"k": [1], "t": [epoch], "v": [epoch]}), epoch)
        fetch = self.state.fetch(key="k", at="t", into="v")
        answers = fetch.now(pa.table({"k": [1], "t": [epoch - 1]}))["v"].to_pylist()
        assert answers == [epoch - 1 if epoch else None]


def open_pond(root: Path, error: type[Exception] = CodeTookTooLong) -> mp.Pond:
    # To fill the memory takes a while, too.
    return mp.open(root, code_seconds=SECONDS if error is CodeTookTooLong else 60, memory=MEMORY)


def balances(pond: mp.Pond) -> dict[int, int]:
    return {row["key"]: row["balance"] for row in pond.table("accounts").snapshot().to_pylist()}


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (turning, CodeTookTooLong),
        pytest.param(turning_aloud, CodeTookTooLong, marks=pytest.mark.long),
        (hoarding, OutOfMemory),
        (reaching_out, CodeFailed),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "name", None)),
)
def test_transactions_that_misbehave_cost_their_epoch_only(
    tmp_path: Path, function: Any, error: type[Exception]
) -> None:
    events = pa.table({"ts": [2, 2], "key": [1, 2], "n": [5, 6]})
    root = tmp_path / "pond"
    with open_pond(root, error) as pond:
        bystander = Bystander(pond)
        bystander.goes_on(0)
        accounts = pond.table("accounts", key="long", value="balance long", default={"balance": 0})
        pond.transactions("sound", [accounts], {"adding": adding})(events, 0)
        started = time.monotonic()
        with pytest.raises(error) as raised:
            pond.transactions("ledger", [accounts], {"bad": function})(events, 0)
        assert time.monotonic() - started < 30
        if error is CodeTookTooLong:
            assert "ledger" in raised.value.what
        if error is CodeFailed:
            assert "SIG" in str(raised.value)
        bystander.goes_on(1)
        assert balances(pond) == {1: 5, 2: 6}
        # The epoch, mended.
        pond.transactions("ledger", [accounts], {"bad": adding})(events, 0)
        assert balances(pond) == {1: 10, 2: 12}
    with open_pond(root) as pond:
        Bystander(pond).goes_on(2)
        assert balances(pond) == {1: 10, 2: 12}


@pytest.mark.parametrize(
    ("rule", "value", "error"),
    [
        pytest.param(turning_rule, 5, CodeTookTooLong, marks=pytest.mark.long),
        (turning_aloud_rule, "five!", CodeTookTooLong),
        pytest.param(hoarding_rule, "five!", OutOfMemory, marks=pytest.mark.long),
    ],
)
def test_update_rules_that_misbehave_cost_their_epoch_only(
    tmp_path: Path, rule: Any, value: Any, error: type[Exception]
) -> None:
    root = tmp_path / "pond"
    with open_pond(root, error) as pond:
        bystander = Bystander(pond)
        bystander.goes_on(0)
        kind = "long" if isinstance(value, int) else "string"
        state = pond.state("bad", key="long", value=kind, update=rule)
        update = state.update(key="k", at="t", value="v", name="feed")
        # The first update of a key is kept as it is; the second calls the rule.
        update(pa.table({"k": [1], "t": [1], "v": [value]}), 0)
        with pytest.raises(error):
            update(pa.table({"k": [1], "t": [2], "v": [value]}), 1)
        bystander.goes_on(1)
        update(pa.table({"k": [2], "t": [3], "v": [value]}), 1)
        state.finish("feed")
        assert sorted(state.snapshot()["key"].to_pylist()) == [1, 2]
    with open_pond(root) as pond:
        Bystander(pond).goes_on(2)
        rows = pond.state("bad").snapshot().to_pylist()
        assert sorted((row["key"], row["value"]) for row in rows) == [(1, value), (2, value)]


def turning_answer(times, value) -> int:
    return turn(value[0])


def turning_aloud_answer(times, value) -> int:
    return turn_aloud(value[0])


@pytest.mark.parametrize("rule", [turning_answer, pytest.param(turning_aloud_answer, marks=pytest.mark.long)])
def test_a_question_that_never_ends_costs_itself_only(tmp_path: Path, rule: Any) -> None:
    with open_pond(tmp_path / "pond") as pond:
        bystander = Bystander(pond)
        bystander.goes_on(0)
        state = pond.state("asked", key="long", value="long")
        state.update(key="k", at="t", value="v", name="feed")(pa.table({"k": [1], "t": [1], "v": [5]}), 0)
        state.finish("feed")
        questions = pa.table({"k": [1], "low": [0], "t": [1]})
        with pytest.raises(CodeTookTooLong):
            state.fetch(key="k", between=("low", "t"), into="v", rule=rule).now(questions)
        bystander.goes_on(1)
        latest = state.fetch(key="k", between=("low", "t"), into="v", rule=mp.latest())
        assert latest.now(questions)["v"].to_pylist() == [5]


def turning_on_anything(times, value) -> int:
    while True:
        pass


def test_a_rule_does_not_run_where_it_is_declared(tmp_path: Path) -> None:
    with open_pond(tmp_path / "pond") as pond:
        state = pond.state("s", key="long", value="long")
        state.fetch(key="k", between=("low", "t"), into="v", rule=turning_on_anything)
        pond.state("folded", key="long", value="long", update=lambda old, new: turn(old + new + 5))
