"""Plans: what may run side by side, what is chosen, and that the outcome is the same to the byte."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millpond import txn
from millpond.code.tables import TableSpec
from millpond.txn import PLANS, TransactionSet, transaction

LONGS = TableSpec("long", "balance long, count long", {"balance": 0, "count": 0})


@transaction
def transfer(accounts, src: int, dst: int, amount: int):  # type: ignore[no-untyped-def]
    if accounts[src].balance < amount:
        txn.abort("insufficient funds")
    accounts[src].balance -= amount
    accounts[dst].balance += amount
    return accounts[src].balance


@transaction
def deposit(accounts, dst: int, amount: int):  # type: ignore[no-untyped-def]
    if amount % 7 == 0:
        txn.abort("unlucky")
    accounts[dst].balance += amount
    if accounts[dst].balance > 3000:
        txn.abort("too rich")
    return accounts[dst].balance


@transaction
def heavy(accounts, dst: int, amount: int):  # type: ignore[no-untyped-def]
    x = math.exp(amount / 7) + math.log(amount) + math.sin(amount) + math.cos(amount) + math.sqrt(amount)
    y = math.exp(amount / 9) + math.log(amount + x) + math.sin(x) + math.cos(x) + math.sqrt(x)
    accounts[dst].balance += int(x + y)


@transaction
def alter(accounts, keys: list, amount: int):  # type: ignore[no-untyped-def]
    for key in keys:
        accounts[key].balance += amount
        if accounts[key].balance > 100:
            accounts[key].count += 1


@transaction
def ring(a, b, c, key: int, to: int, amount: int):  # type: ignore[no-untyped-def]
    if a[key].balance >= amount:
        a[key].balance -= amount
        b[to].balance += amount
    elif b[key].balance >= amount:
        b[key].balance -= amount
        c[to].balance += amount
    elif c[key].balance >= amount:
        c[key].balance -= amount
        a[to].balance += amount
    else:
        txn.abort("nothing left")
    a[key].count += 1
    c[key].count -= 1


def outcomes(
    transactions: TransactionSet, epochs: list[Any], start: pa.Table, threads: int = 3
) -> dict[str, Any]:
    """The bytes of all outputs and tables, and the figures, by plan."""
    out = {}
    for plan in PLANS:
        stores = transactions.stores()
        for store in stores.values():
            store.load(start)
        runs = [transactions.run(events, stores, threads=threads, plan=plan) for events in epochs]
        tables = [store.snapshot() for store in stores.values()]
        for store in stores.values():
            store.validate()
        out[plan] = (data([run.outputs for run in runs]), data(tables), [run.figures for run in runs], tables)
    return out


def data(tables: list[pa.Table]) -> bytes:
    sink = pa.BufferOutputStream()
    for table in tables:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.combine_chunks())
    return bytes(sink.getvalue())


def check_equal(found: dict[str, Any]) -> None:
    for plan in PLANS:
        assert found[plan][0] == found["serial"][0], plan
        assert found[plan][1] == found["serial"][1], plan


def start_of(keys: int, balance: int = 1000) -> pa.Table:
    return pa.table({"key": np.arange(keys), "balance": np.full(keys, balance), "count": np.zeros(keys, int)})


def test_money_is_conserved_under_every_plan() -> None:
    rng = np.random.default_rng(1)
    transactions = TransactionSet({"transfer": transfer}, {"accounts": LONGS})
    epochs = [
        pa.table(
            {
                "time": rng.integers(0, 50, 3000),
                "src": rng.zipf(1.3, 3000) % 300,
                "dst": rng.integers(0, 310, 3000),
                "amount": rng.integers(0, 900, 3000),
            }
        )
        for _ in range(3)
    ]
    found = outcomes(transactions, epochs, start_of(300))
    check_equal(found)
    for plan in PLANS:
        assert sum(found[plan][3][0]["balance"].to_pylist()) == 300 * 1000
    assert found["groups"][2][0]["plan"] == "groups"
    assert found["rounds"][2][0]["rounds"] > 1
    assert found["chains"][2][0]["plan"] == "serial", "transfers are coupled: chains would be wrong"


def test_a_ring_over_three_tables_holds_at_every_epoch() -> None:
    rng = np.random.default_rng(2)
    transactions = TransactionSet({"ring": ring}, dict.fromkeys("abc", LONGS))
    stores = {plan: transactions.stores() for plan in PLANS}
    for tables in stores.values():
        for store in tables.values():
            store.load(start_of(40, 50))
    for _ in range(4):
        events = pa.table(
            {
                name: rng.integers(0, high, 500)
                for name, high in {"time": 99, "key": 40, "to": 40, "amount": 90}.items()
            }
        )
        bytes_of = set()
        for plan in PLANS:
            run = transactions.run(events, stores[plan], threads=2, plan=plan)
            tables = {name: store.snapshot() for name, store in stores[plan].items()}
            bytes_of.add(data([run.outputs, *tables.values()]))
            total = sum(sum(table["balance"].to_pylist()) for table in tables.values())
            assert total == 3 * 40 * 50
            counts = [
                dict(zip(t["key"].to_pylist(), t["count"].to_pylist(), strict=True)) for t in tables.values()
            ]
            assert all(counts[0][key] + counts[2][key] == 0 for key in range(40))
            assert all(min(table["balance"].to_pylist()) >= 0 for table in tables.values())
        assert len(bytes_of) == 1


def test_chains_of_single_keys_keep_their_aborts() -> None:
    rng = np.random.default_rng(3)
    transactions = TransactionSet({"deposit": deposit}, {"accounts": LONGS})
    events = pa.table(
        {
            "time": rng.integers(0, 9, 4000),
            "dst": rng.integers(0, 300, 4000),
            "amount": rng.integers(1, 400, 4000),
        }
    )
    found = outcomes(transactions, [events, events], start_of(100))
    check_equal(found)
    assert found["chains"][2][0]["plan"] == "chains"
    assert b"too rich" in found["chains"][0]


def lists(rng: np.random.Generator, count: int, keys: int, amount: int) -> pa.Table:
    return pa.table(
        {
            "time": rng.integers(0, 9, count),
            "keys": [rng.integers(0, keys, rng.integers(0, 6)).tolist() for _ in range(count)],
            "amount": rng.integers(0, amount, count),
        }
    )


def test_independent_operations_run_apart() -> None:
    rng = np.random.default_rng(4)
    transactions = TransactionSet({"alter": alter, "deposit": deposit}, {"accounts": LONGS})
    events = {
        "alter": lists(rng, 1500, 200, 9),
        "deposit": pa.table(
            {"time": rng.integers(0, 9, 300), "dst": rng.integers(0, 200, 300), "amount": np.full(300, 30)}
        ),
    }
    found = outcomes(transactions, [events, events], start_of(150, 10))
    check_equal(found)
    assert [figures["plan"] for figures in found["chains"][2]] == ["chains", "chains"]
    assert not found["chains"][2][0]["redone"]


def test_a_fault_that_couples_chains_puts_the_epoch_back() -> None:
    rng = np.random.default_rng(5)
    transactions = TransactionSet({"alter": alter}, {"accounts": LONGS})
    found = outcomes(transactions, [lists(rng, 500, 100, 2**61)], start_of(100, 2**62))
    check_equal(found)
    assert found["chains"][2][0]["redone"]
    assert b"overflow" in found["serial"][0]


def test_the_planner_counts_and_chooses() -> None:
    rng = np.random.default_rng(6)
    transactions = TransactionSet({"heavy": heavy}, {"accounts": LONGS})
    few = pa.table({"time": np.arange(10), "dst": np.arange(10), "amount": np.full(10, 5)})
    many = pa.table(
        {"time": np.arange(300_000), "dst": rng.integers(0, 9000, 300_000), "amount": np.full(300_000, 1)}
    )
    stores = transactions.stores()
    assert transactions.run(few, stores, threads=2).figures["plan"] == "serial"
    figures = transactions.run(many, stores, threads=2).figures
    assert figures["plan"] == "chains"
    assert figures["events"] == figures["touches"] == 300_000
    assert transactions.run(many, stores, threads=1).figures["plan"] == "serial"


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_nothing(threads: int) -> None:
    rng = np.random.default_rng(7)
    transactions = TransactionSet({"transfer": transfer}, {"accounts": LONGS})
    # Pairs of neighbours only: many components, and wide rounds.
    src = rng.integers(0, 20_000, 30_000) * 2
    events = pa.table(
        {"time": np.arange(30_000), "src": src, "dst": src + 1, "amount": rng.integers(0, 900, 30_000)}
    )
    found = outcomes(transactions, [events], start_of(40_000), threads)
    check_equal(found)
    assert found["groups"][2][0]["components"] > 10_000
    assert 1 < found["rounds"][2][0]["rounds"] < 30


@transaction
def repeated(accounts, src: int, dst: int, amounts: list):  # type: ignore[no-untyped-def]
    """A loop that names no rows of its own."""
    for amount in amounts:
        accounts[dst].count = accounts[src].count * 3 + amount
    accounts[src].balance += 1


@pytest.mark.parametrize("plan", PLANS)
def test_loops_over_rows_from_outside(plan: str) -> None:
    transactions = TransactionSet({"repeated": repeated}, {"accounts": LONGS})
    rng = np.random.default_rng(5)
    amounts = pa.array([list(range(n % 3)) for n in range(3_000)], pa.list_(pa.int64()))
    keys = rng.integers(0, 2_000, (2, 3_000))
    events = pa.table({"time": range(3_000), "src": keys[0], "dst": keys[1], "amounts": amounts})
    stores, serial = transactions.stores(), transactions.stores()
    transactions.run(events, stores, threads=3, plan=plan)
    transactions.run(events, serial, plan="serial")
    assert stores["accounts"].snapshot() == serial["accounts"].snapshot()
