"""The transaction applications against plain Python that does one event after the other, and what must hold of them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from millpond.apps import bidding, grep_sum, ledger, tolls
from millpond.apps.transaction_events import Spread, skewed, spread
from millpond.txn import PLANS, TransactionSet

Rows = dict[str, dict[int, tuple[Any, ...]]]
Answers = list[tuple[Any, ...]]  # reason, or None, and results by name


def serial_grep_sum(events: list[dict[str, Any]]) -> tuple[Answers, Rows]:
    records: dict[int, int] = {}
    answers: Answers = []
    for event in events:
        if event["kind"] == "read":
            answers.append((None, {"total": sum(records.get(key, 0) for key in event["keys"])}))
        else:
            records |= {key: event["number"] + place for place, key in enumerate(event["keys"])}
            answers.append((None, {}))
    return answers, {"records": {key: (number,) for key, number in records.items()}}


def serial_ledger(events: list[dict[str, Any]]) -> tuple[Answers, Rows]:
    money: dict[int, int] = defaultdict(lambda: 1_000)
    units: dict[int, int] = defaultdict(lambda: 1_000)
    touched: tuple[set[int], set[int]] = (set(), set())
    answers: Answers = []
    for event in events:
        is_transfer = event["kind"] == "transfer"
        if is_transfer and money[event["src"]] < event["money"]:
            answers.append(("insufficient funds", {}))
            continue
        if is_transfer and units[event["src_asset"]] < event["units"]:
            answers.append(("not enough assets", {}))
            continue
        for held, touch, what, end in (
            (money, touched[0], "money", ""),
            (units, touched[1], "units", "_asset"),
        ):
            if is_transfer:
                held[event["src" + end]] -= event[what]
                touch.add(event["src" + end])
            held[event["dst" + end]] += event[what]
            touch.add(event["dst" + end])
        given = {"balance": money[event["src"]], "left": units[event["src_asset"]]} if is_transfer else {}
        answers.append((None, given))
    tables = {"accounts": (money, touched[0]), "assets": (units, touched[1])}
    return answers, {name: {key: (held[key],) for key in keys} for name, (held, keys) in tables.items()}


def serial_bidding(events: list[dict[str, Any]]) -> tuple[Answers, Rows]:
    prices: dict[int, int] = {}
    stocks: dict[int, int] = {}
    answers: Answers = []
    for event in events:
        given: tuple[str | None, dict[str, Any]] = (None, {})
        if event["kind"] == "bid":
            item, quantity = event["item"], event["quantity"]
            price, stock = prices.get(item, 100), stocks.get(item, 1_000)
            if event["price"] < price:
                given = "bid too low", {}
            elif stock < quantity:
                given = "sold out", {}
            else:
                stocks[item] = stock - quantity
                given = None, {"paid": price * quantity}
        elif event["kind"] == "alter":
            prices |= dict(zip(event["ids"], event["numbers"], strict=True))
        else:
            for item, quantity in zip(event["ids"], event["numbers"], strict=True):
                stocks[item] = stocks.get(item, 1_000) + quantity
        answers.append(given)
    seen = prices.keys() | stocks.keys()
    return answers, {"items": {item: (prices.get(item, 100), stocks.get(item, 1_000)) for item in seen}}


def serial_tolls(events: list[dict[str, Any]]) -> tuple[Answers, Rows]:
    averages: dict[int, float] = defaultdict(float)
    reports, vehicles = Counter[int](), Counter[int]()
    answers: Answers = []
    for event in events:
        segment = event["segment"]
        reports[segment] += 1
        averages[segment] += (event["speed"] - averages[segment]) / reports[segment]
        if event["entered"]:
            vehicles[segment] += 1
        busy = averages[segment] < 40.0 and vehicles[segment] > 50
        answers.append((None, {"toll": 2 * (vehicles[segment] - 50) ** 2 if busy else 0}))
    speeds = {segment: (averages[segment], count) for segment, count in reports.items()}
    return answers, {"speeds": speeds, "vehicles": {s: (count,) for s, count in vehicles.items()}}


APPS: dict[str, tuple[ModuleType, Callable[..., tuple[Answers, Rows]]]] = {
    "grep_sum": (grep_sum, serial_grep_sum),
    "ledger": (ledger, serial_ledger),
    "bidding": (bidding, serial_bidding),
    "tolls": (tolls, serial_tolls),
}


def rows_of(table: pa.Table) -> dict[int, tuple[Any, ...]]:
    columns = table.to_pydict()
    keys = columns.pop("key")
    return dict(zip(keys, zip(*columns.values(), strict=True), strict=True))


@pytest.mark.parametrize("plan", [None, *PLANS])
@pytest.mark.parametrize("name", APPS)
def test_an_application_does_what_plain_python_does(name: str, plan: str | None) -> None:
    app, serial = APPS[name]
    more = {"transfer_ratio": 0.9} if name == "ledger" else {}
    events = app.events(6_000, keys=60, seed=7, **more)
    wanted, rows = serial(events.to_pylist())
    program = TransactionSet(app.KINDS, app.TABLES)
    stores = program.stores()
    outputs = []
    for start, stop in pairwise((0, 1, 500, 500, 3_000, 6_000)):
        part = events.slice(start, stop - start)
        outcome = program.run(part, stores, at="ts", threads=2, plan=plan)
        assert not outcome.figures["interpreted"]
        outputs += outcome.outputs.to_pylist()
    results = set(outputs[0]) - {"event", "committed", "reason"}
    for found, (reason, given) in zip(outputs, wanted, strict=True):
        assert (found["committed"], found["reason"]) == (reason is None, reason)
        assert {result: found[result] for result in results} == dict.fromkeys(results) | given
    for table, store in stores.items():
        store.validate()
        assert rows_of(store.snapshot()) == rows[table]
    if name in ("ledger", "bidding"):
        reasons = {reason for reason, _ in wanted}
        assert len(reasons) == 3, "the events do not come to every abort"


def run(app: ModuleType, events: pa.Table) -> tuple[dict[str, pa.Table], pa.Table]:
    program = TransactionSet(app.KINDS, app.TABLES)
    stores = program.stores()
    outputs = program.run(events, stores, at="ts", threads=2).outputs
    return {name: store.snapshot() for name, store in stores.items()}, outputs


def test_money_and_assets_are_conserved() -> None:
    events = ledger.events(200_000, keys=1_000)
    tables, outputs = run(ledger, events)
    deposits = events.filter(pc.equal(events["kind"], "deposit"))
    for table, column, what in (("accounts", "balance", "money"), ("assets", "amount", "units")):
        held = tables[table][column].to_numpy()
        assert held.sum() == 1_000 * len(held) + pc.sum(deposits[what]).as_py()
        assert held.min() >= 0
    committed = outputs["committed"].to_numpy()
    assert committed[pc.equal(events["kind"], "deposit").to_numpy()].all()
    assert not committed.all()


def test_what_is_sold_is_gone() -> None:
    events = bidding.events(200_000, keys=1_000)
    tables, outputs = run(bidding, events)
    is_sold = pc.and_(pc.equal(events["kind"], "bid"), outputs["committed"])
    sold = pc.sum(events.filter(is_sold)["quantity"]).as_py()
    tops = events.filter(pc.equal(events["kind"], "top"))
    topped = pc.sum(pc.list_flatten(tops["numbers"])).as_py()
    stock = tables["items"]["stock"].to_numpy()
    assert stock.sum() == 1_000 * len(stock) + topped - sold
    assert stock.min() >= 0
    assert outputs["paid"].null_count == len(events) - pc.sum(is_sold).as_py()


def test_tolls_count_every_vehicle_once() -> None:
    events = tolls.events(200_000)
    tables, outputs = run(tolls, events)
    segment, entered = events["segment"].to_numpy(), events["entered"].to_numpy()
    counts = np.bincount(segment[entered], minlength=100)
    assert (tables["vehicles"]["count"].to_numpy() == counts).all()
    means = np.bincount(segment, events["speed"].to_numpy(), 100) / np.bincount(segment, minlength=100)
    assert tables["speeds"]["average"].to_numpy() == pytest.approx(means, rel=1e-9)
    last = 200_000 - 1 - np.unique(segment[::-1], return_index=True)[1]
    expected = np.where((means < 40.0) & (counts > 50), 2 * (counts - 50) ** 2, 0)
    assert (outputs["toll"].to_numpy()[last] == expected).all()
    assert (expected > 0).any()
    assert (expected == 0).any()


def test_a_record_holds_what_was_written_last() -> None:
    events = grep_sum.events(50_000, keys=2_000, length=4)
    tables, outputs = run(grep_sum, events)
    is_write = pc.equal(events["kind"], "write").to_numpy()
    keys = np.stack(events["keys"].to_numpy())
    numbers = events["number"].fill_null(0).to_numpy()[:, None] + np.arange(4)
    written, last = np.unique(keys[is_write].ravel()[::-1], return_index=True)
    assert (tables["records"]["key"].to_numpy() == written).all()
    assert (tables["records"]["number"].to_numpy() == numbers[is_write].ravel()[::-1][last]).all()
    assert (outputs["total"].is_null().to_numpy() == is_write).all()


# The generators


@pytest.mark.parametrize("name", APPS)
def test_events_are_the_same_for_a_seed(name: str) -> None:
    app, _ = APPS[name]
    events = app.events(1_000, keys=50, seed=3)
    assert events.equals(app.events(1_000, keys=50, seed=3))
    assert not events.equals(app.events(1_000, keys=50, seed=4))
    events.validate(full=True)
    assert events["ts"].to_pylist() == list(range(1_000))
    assert len(app.events(0)) == 0


def test_kinds_come_in_their_ratios() -> None:
    def share(events: pa.Table) -> dict[str, float]:
        counts = Counter(events["kind"].to_pylist())
        return {kind: count / len(events) for kind, count in counts.items()}

    assert share(ledger.events(40_000)) == pytest.approx({"transfer": 0.5, "deposit": 0.5}, abs=0.02)
    assert share(bidding.events(40_000)) == pytest.approx(
        {"bid": 6 / 8, "alter": 1 / 8, "top": 1 / 8}, abs=0.02
    )
    assert share(grep_sum.events(40_000, read_ratio=0.1)) == pytest.approx(
        {"read": 0.1, "write": 0.9}, abs=0.02
    )
    assert share(grep_sum.events(100, read_ratio=1.0)) == {"read": 1.0}
    assert share(grep_sum.events(100, read_ratio=0.0)) == {"write": 1.0}


@pytest.mark.parametrize("skew", [0.0, 0.6, 1.0, 1.3])
@pytest.mark.parametrize("keys", [1, 100, 70_000])
def test_keys_follow_zipf(skew: float, keys: int) -> None:
    draws = 400_000
    drawn = skewed(np.random.default_rng(5), draws, keys, skew)
    assert drawn.min() >= 0
    assert drawn.max() < keys
    counts = np.sort(np.bincount(drawn, minlength=keys))[::-1]
    weights = np.arange(1, keys + 1) ** -skew
    expected = draws * weights / weights.sum()
    if keys > 1_000 and not skew:
        assert counts[0] < 40, "six a key, give or take"
    else:
        assert counts[:20].sum() == pytest.approx(expected[:20].sum(), rel=0.03)


@pytest.mark.parametrize(("ratio", "length"), [(0.0, 4), (0.25, 4), (1.0, 6)])
def test_keys_of_an_event_lie_in_its_partitions(ratio: float, length: int) -> None:
    rng = np.random.default_rng(5)
    keys = skewed(rng, (20_000, 10), 997, 0.6)
    moved = spread(rng, keys, 997, Spread(count=16, ratio=ratio, length=length))
    assert moved.min() >= 0
    assert moved.max() < 997
    assert (moved[:, 0] == keys[:, 0]).all()
    assert np.abs(moved - keys).max() < 16
    found = Counter(len(set(row)) for row in (moved % 16).tolist())
    assert set(found) <= {1, length}
    assert math.isclose(found[length] / 20_000, ratio, abs_tol=0.02)
    assert (spread(rng, keys, 997, Spread(count=1)) == keys).all()
