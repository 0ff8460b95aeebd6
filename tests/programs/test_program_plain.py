"""Classes in a pond of several containers return and leave what they do as plain Python, one call after the other."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

import millpond as mp
from millpond.programs.local import LocalRun
from millpond.programs.plain import state_of
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

SLICES = 8


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
        return self.best(parts, row, k)

    def best(self, parts: mp.Collection[mp.Vector], row: mp.Vector, k: int):
        return mp.total(parts).without(row).top(k)


@mp.program(lanes=2)
class Shop:
    """Text keys, rejections, lists, two partitioned fields one after the other, and counts in lanes."""

    stock: mp.Partitioned[mp.Map[str, int]]
    bought: mp.Partitioned[mp.Map[int, list[str]]]
    sales: mp.Partial[mp.Vector]

    def fill(self, what: str, count: int) -> int:
        self.stock[what] += count
        return self.stock[what]

    def buy(self, who: int, what: str, count: int = 1) -> "array<string>":  # noqa: F722 - DDL
        left = self.stock[what]
        if left < count:
            mp.reject("sold out")
        self.stock[what] = left - count
        mine = self.bought[who] or []
        mine = mine + [what] * count
        self.bought[who] = mine
        self.sales[who] += count
        return mine

    def sold(self, who: int) -> float:
        parts = mp.everywhere(self.sales).get(who)
        return mp.total(parts)


@mp.program(lanes=2, max_rounds=200)
class Chain:
    """A loop that goes from key to key: a cycle."""

    next_of: mp.Partitioned[mp.Map[int, int]]
    visits: mp.Partitioned[mp.Map[int, int]]

    def link(self, at: int, to: int):
        self.next_of[at] = to

    def walk(self, at: int, steps: int) -> int:
        for _ in range(steps):
            self.visits[at] += 1
            at = self.next_of[at]
        return at


@mp.program(lanes=4)
class Regression:
    """Partial weights, averaged: a step of gradient descent for each row, in its lane."""

    weights: mp.Partial[mp.Vector]
    rows: mp.Partitioned[mp.DenseMatrix]

    def learn(self, row: int, x: "array<double>", y: float) -> float:  # noqa: F722 - DDL
        self.rows[row] = x
        error = self.weights.dot(x) - y
        for i in range(len(x)):
            self.weights[i] -= 0.05 * error * x[i]
        return error

    def agree(self, row: int):
        parts = mp.everywhere(self.weights).copy()
        mp.everywhere(self.weights).assign(mp.average(parts))


Epoch = tuple[str, list[dict[str, Any]]]


def draw_recommender(chance: random.Random) -> list[Epoch]:
    epochs: list[Epoch] = []
    for _ in range(5):
        rated = [
            {"user": chance.randrange(9), "item": chance.randrange(12), "rating": float(chance.randint(1, 5))}
            for _ in range(30)
        ]
        epochs += [("add_rating", rated), ("get_rec", [{"user": user, "k": 5} for user in range(10)])]
    return epochs


def draw_shop(chance: random.Random) -> list[Epoch]:
    names = ["apple", "pear", "nut"]
    epochs: list[Epoch] = []
    for _ in range(5):
        epochs.append(
            ("fill", [{"what": chance.choice(names), "count": chance.randint(0, 6)} for _ in range(4)])
        )
        epochs.append(
            (
                "buy",
                [
                    {"who": chance.randrange(5), "what": chance.choice(names), "count": chance.randint(1, 3)}
                    for _ in range(8)
                ],
            )
        )
        epochs.append(("sold", [{"who": who} for who in range(5)]))
    return epochs


def draw_regression(chance: random.Random) -> list[Epoch]:
    epochs: list[Epoch] = []
    for start in range(0, 60, 15):
        rows = []
        for row in range(start, start + 15):
            x = [chance.random(), chance.random(), 1.0]
            rows.append({"row": row, "x": x, "y": 2 * x[0] - x[1] + 0.5})
        epochs += [("learn", rows), ("agree", [{"row": 0}])]
    return epochs


CASES: dict[str, tuple[Any, Any]] = {
    "recommender": (Recommender, draw_recommender),
    "shop": (Shop, draw_shop),
    "regression": (Regression, draw_regression),
}


def outcome(instance: Any, method: str, arguments: dict[str, Any]) -> tuple[Any, str | None]:
    try:
        return getattr(instance, method)(**arguments), None
    except mp.errors.Rejected as rejected:
        return None, rejected.reason


def in_pond(
    program: Any, method: str, calls: list[dict[str, Any]], epoch: int
) -> list[tuple[Any, str | None]]:
    found = next(each for each in program.graph.methods if each.name == method)
    columns = {name: name for name in calls[0]}
    into = None if found.returns is None else "out"
    rows = program.call(method, name=method, into=into, **columns)(pa.Table.from_pylist(calls), epoch)
    results = rows["out"].to_pylist() if into else [None] * len(calls)
    errors = rows["error"].to_pylist() if found.rejects else [None] * len(calls)
    return list(zip(results, errors, strict=True))


def entries(program: Any) -> dict[str, Any]:
    """As `state_of` has it."""
    held = {}
    for field in program.graph.fields:
        found = program.entries(field.name)
        held[field.name] = (
            [found.get(lane, {}) for lane in range(program.graph.lanes)] if field.kind == "partial" else found
        )
    return held


@pytest.mark.parametrize("containers", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_class_in_a_pond_is_the_plain_class(name: str, containers: int) -> None:
    cls, draw = CASES[name]
    assert cls.__millpond_graph__.serial == (name != "regression")
    plain = mp.plain(cls, slices=SLICES)
    with LocalPond(LossyFiles(3), containers=containers, slices=SLICES) as pond:
        program = pond.program(name, cls)
        counts: dict[str, int] = {}
        for method, calls in draw(random.Random(name)):
            epoch = counts.get(method, 0)
            counts[method] = epoch + 1
            given = in_pond(program, method, calls, epoch)
            assert given == [outcome(plain, method, call) for call in calls], (method, epoch)
        assert entries(program) == state_of(plain)
        pond.validate()


def test_a_loop_from_key_to_key_runs_as_in_one_process() -> None:
    """It is round-synchronous: the oracle is the graph in one process, which is compared with plain Python elsewhere."""
    chance = random.Random(5)
    local = LocalRun(Chain.__millpond_graph__, slices=SLICES)
    links = [{"at": at, "to": chance.randrange(20)} for at in range(20)]
    walks = [{"at": chance.randrange(20), "steps": chance.randrange(12)} for _ in range(15)]
    with LocalPond(LossyFiles(3), containers=3, slices=SLICES) as pond:
        program = pond.program("chain", Chain)
        in_pond(program, "link", links, 0)
        local.epoch([("link", link) for link in links])
        given = in_pond(program, "walk", walks, 0)
        assert [value for value, _ in given] == [
            each.value for each in local.epoch([("walk", w) for w in walks])
        ]
        held = local.state()
        assert entries(program) == {name: held[name] for name in ("next_of", "visits")}
        with pytest.raises(mp.errors.ProgramFailed, match="200 tasks"):
            in_pond(program, "walk", [{"at": 1, "steps": 2}, {"at": 1, "steps": 1000}], 1)
        assert entries(program) == held


@pytest.mark.parametrize("name", ["recommender", "shop"])
def test_direct_calls_of_a_class(name: str) -> None:
    cls, draw = CASES[name]
    plain = mp.plain(cls, slices=SLICES)
    with LocalPond(LossyFiles(3), containers=2, slices=SLICES) as pond:
        program = pond.program(name, cls)
        for method, calls in draw(random.Random(7))[:4]:
            for call in calls[:6]:
                assert outcome(program, method, call) == outcome(plain, method, call)
        assert entries(program) == state_of(plain)
