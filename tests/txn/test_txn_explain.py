"""explain() says what a transaction reads, writes and depends on, and how it runs."""

from __future__ import annotations

from millpond import txn
from millpond.code.tables import TableSpec
from millpond.txn import TransactionSet, transaction


@transaction
def transfer(accounts, fees, src: int, dst: int, amount: int):  # type: ignore[no-untyped-def]
    if accounts[src].balance < amount:
        txn.abort("insufficient funds")
    accounts[src].balance -= amount
    accounts[dst].balance += amount
    fees[0].total += 1
    return accounts[src].balance


@transaction
def alter(items, ids: list, prices: list):  # type: ignore[no-untyped-def]
    for i in range(len(ids)):
        items[ids[i]].price = prices[i]


@transaction(results="price")
def bid(items, item: int, quantity: int):  # type: ignore[no-untyped-def]
    row = items[item]
    if row.quantity < quantity:
        txn.abort("sold out")
    row.quantity -= quantity
    return row.price


def test_explain_of_a_function() -> None:
    line = transfer.tree.lineno
    assert (
        transfer.explain()
        == f"""\
transaction transfer(accounts, fees, src, dst, amount)   {__file__}:{line}
  tables   accounts, fees
  fields   src, dst, amount
  reads    accounts[src].balance (line {line + 1}, {line + 3}, {line + 6})
           accounts[dst].balance (line {line + 4})
           fees[0].total (line {line + 5})
  writes   accounts[src].balance (line {line + 3})
           accounts[dst].balance (line {line + 4})
           fees[0].total (line {line + 5})
  depends  accounts[dst] on accounts[src] (line {line + 4})
           fees[0] on accounts[src] (line {line + 5})
           abort "insufficient funds" on accounts[src] (line {line + 2})
  aborts   "insufficient funds" (line {line + 2})
  results  r0
  runs     compiled, unless the types of the events forbid it
  plan     serial, groups or rounds: line {line + 4}: accounts[dst].balance depends on accounts[src]"""
    )


def test_explain_of_a_set() -> None:
    items = TableSpec("long", "price long, quantity long", {"price": 1, "quantity": 10})
    text = TransactionSet({"alter": alter, "bid": bid}, {"items": items}).explain()
    assert "kind 'alter': transaction alter(items, ids, prices)" in text
    assert "items[ids[i]].price in each round of a loop" in text
    assert "plan     chains: its operations on different keys are independent" in text
    assert "plan     chains: it touches one key" in text
    assert "results  price" in text
    assert "plan of the epoch: serial, chains, groups or rounds, whichever is cheapest" in text
