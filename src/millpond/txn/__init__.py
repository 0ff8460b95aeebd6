"""State transactions: plain Python functions over tables, run epoch by epoch as if one after the other.

    @transaction
    def transfer(accounts, src: int, dst: int, amount: int):
        if accounts[src].balance < amount:
            abort("insufficient funds")
        accounts[src].balance -= amount
        accounts[dst].balance += amount
        return accounts[src].balance

    accounts = TableSpec("long", "balance long", default={"balance": 0})
    program = bind({"transfer": transfer}, {"accounts": accounts})
    outcome = program.run(events, stores, at="ts", kind="type")

A function is analysed when it is decorated, bound to tables, and compiled when the types of its events are known.
Integers are 64 bits wide: a step that leaves that range aborts the transaction, as does any error in user code. A
variable that is a long on one path and a double on another is a double. Timestamps are microseconds, as longs.
Nothing here knows of ponds, Spark or files.
"""

from __future__ import annotations

from millpond.code.tables import ProgramCode, TableSpec, TransactionCode
from millpond.txn.functions import TransactionFunction, abort, load, transaction
from millpond.txn.plans import PLANS
from millpond.txn.program import Outcome, Program, bind, load_program
from millpond.txn.tables import Strings, TableStore, new_stores

__all__ = [
    "PLANS",
    "Outcome",
    "Program",
    "ProgramCode",
    "Strings",
    "TableSpec",
    "TableStore",
    "TransactionCode",
    "TransactionFunction",
    "abort",
    "bind",
    "load",
    "load_program",
    "new_stores",
    "transaction",
]
