"""What the machine cannot do is no outcome of a transaction: the epoch raises it, and leaves the tables alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millpond.code.capture import Code
from millpond.code.tables import TableSpec, TransactionCode
from millpond.durable.crashpoints import SimulatedCrash
from millpond.errors import RuleInterpreted
from millpond.stores.tables import TableStore
from millpond.txn import TransactionSet, load

NUMBERS = {"numbers": TableSpec("long", "x long", {"x": 0}), "words": TableSpec("string", "s string")}


def transactions_of(body: str, helper: str = "") -> TransactionSet:
    """A function that changes a row and then does what `body` says, if n is 3."""
    source = f"""{helper}
def f(numbers, words, n):
    numbers[n].x += 1
    words["w"].s = "".join(["x", "y"])
    if n == 3:
        {body}
    return n
"""
    return TransactionSet({"f": load(TransactionCode(Code("f", source, {}, {})))}, NUMBERS)


def run(transactions: TransactionSet, stores: dict[str, TableStore]) -> list[str | None]:
    events = pa.table({"time": range(6), "n": range(6)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuleInterpreted)
        reasons: list[str | None] = transactions.run(events, stores).outputs["reason"].to_pylist()
    return reasons


RECURSION = "def deep(n):\n    return deep(n + 1)\n"
STRANGE = """
class Strange(Exception):
    def __str__(self):
        raise {error}
"""


@pytest.mark.parametrize(
    ("body", "helper", "error"),
    [
        ("raise MemoryError", "", MemoryError),
        ("n = [0] * (1 << 60)", "", MemoryError),
        ("n = 'x' * (1 << 62)", "", MemoryError),
        ("deep(0)", RECURSION, RecursionError),
        ("raise KeyboardInterrupt", "", KeyboardInterrupt),
        ("raise Strange", STRANGE.format(error="MemoryError"), MemoryError),
        ("raise Strange", STRANGE.format(error="KeyboardInterrupt"), KeyboardInterrupt),
    ],
)
def test_user_code_that_the_machine_cannot_run(body: str, helper: str, error: type[BaseException]) -> None:
    transactions = transactions_of(body, helper)
    stores = transactions.stores()
    run(transactions_of("pass"), stores)
    was = {name: store.export() for name, store in stores.items()}
    with pytest.raises(error):
        run(transactions, stores)
    assert {name: store.export() for name, store in stores.items()} == was
    for store in stores.values():
        store.validate()


@pytest.mark.parametrize(
    ("body", "helper", "reason"),
    [
        ("raise SystemExit", "", "SystemExit: "),
        ("raise GeneratorExit", "", "GeneratorExit: "),
        ("raise StopIteration", "", "StopIteration: "),
        ("raise ValueError(n)", "", "ValueError: 3"),
        ("raise Strange", STRANGE.format(error="ValueError"), "Strange"),
        ("raise Strange", STRANGE.format(error="SystemExit"), "Strange"),
        ("n = 1 << 10 ** 12", "", "overflow"),
        ("n = 7 ** 10 ** 12", "", "overflow"),
        ("numbers[n].x <<= 10 ** 12", "", "overflow"),
    ],
)
def test_user_code_that_ends_its_transaction_only(body: str, helper: str, reason: str) -> None:
    transactions = transactions_of(body, helper)
    stores = transactions.stores()
    assert run(transactions, stores) == [None, None, None, reason, None, None]
    assert stores["numbers"].snapshot()["key"].to_pylist() == [0, 1, 2, 4, 5]


@pytest.mark.parametrize(
    "error", [MemoryError, KeyboardInterrupt, SimulatedCrash("log.sync.after"), RecursionError]
)
@pytest.mark.parametrize("where", [TableStore.resolve_one, TableStore.encoded, TableStore.resolve])
def test_errors_in_our_own_code(
    error: Any, where: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    transactions = transactions_of("pass")
    stores = transactions.stores()
    run(transactions, stores)
    was = {name: store.export() for name, store in stores.items()}
    calls = []

    def fails(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 5:
            raise error
        return where(*args)

    with monkeypatch.context() as patch:
        patch.setattr(TableStore, where.__name__, fails)
        with pytest.raises(error if isinstance(error, type) else type(error)):
            run(transactions, stores)
    assert {name: store.export() for name, store in stores.items()} == was
    assert run(transactions, stores) == [None] * 6
    assert np.all(stores["numbers"].snapshot()["x"].to_numpy() == 2)
