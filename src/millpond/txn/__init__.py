"""State transactions: plain Python functions over tables, run epoch by epoch as if one after the other.

    @transaction
    def transfer(accounts, src: int, dst: int, amount: int):
        if accounts[src].balance < amount:
            abort("insufficient funds")
        accounts[src].balance -= amount
        accounts[dst].balance += amount
        return accounts[src].balance

    accounts = TableSpec("long", "balance long", default={"balance": 0})
    transactions = TransactionSet({"transfer": transfer}, {"accounts": accounts})
    outcome = transactions.run(events, stores, at="ts", kind="type")

A function is analysed when it is decorated, bound to tables, and compiled when the types of its events are known.
Integers are 64 bits wide: a step that leaves that range aborts the transaction, as does any error in user code. What
the machine cannot do, such as to find memory, is an error of the epoch, which leaves the tables as they were. A
column of results that gets longs and doubles is one of doubles. Timestamps are microseconds and dates days, as longs.

`compiler` makes kernels of functions, `run` takes epochs of events through them. Nothing here knows of ponds, Spark
or files.
"""

from __future__ import annotations

from millpond.txn.functions import TransactionFunction, abort, load, transaction
from millpond.txn.run.plans import PLANS
from millpond.txn.run.transaction_set import (
    ArrangedEpoch,
    NotPutBack,
    Outcome,
    TransactionSet,
    load_transactions,
)
from millpond.txn.run.watch import Watch

__all__ = [
    "PLANS",
    "ArrangedEpoch",
    "NotPutBack",
    "Outcome",
    "TransactionFunction",
    "TransactionSet",
    "Watch",
    "abort",
    "load",
    "load_transactions",
    "transaction",
]
