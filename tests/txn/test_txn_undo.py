"""An epoch that was run can be undone: in the tables, in copies of them, and by itself where it fails half-way.

`test_txn_random` undoes random epochs.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millpond.code.tables import TableSpec
from millpond.errors import RuleInterpreted
from millpond.stores import tables
from millpond.stores.row_index import RowIndex
from millpond.stores.tables import TableStore
from millpond.txn import Outcome, TransactionSet, transaction
from millpond.txn.run import execution, plans

Stores = dict[str, TableStore]


@transaction
def transfer(accounts, src: int, dst: int, amount: int):  # type: ignore[no-untyped-def]
    accounts[src].balance -= amount
    accounts[dst].balance += amount
    return accounts[src].balance


@transaction
def rename(owners, name: str, to: str):  # type: ignore[no-untyped-def]
    text = f"{to}!"  # what numba is not given
    owners[name].alias = text
    return text


@transaction
def reach(accounts, keys: list):  # type: ignore[no-untyped-def]
    for key in keys:
        accounts[key].balance += 1


BANK = {
    "accounts": TableSpec("long", "balance long", {"balance": 100}),
    "owners": TableSpec("string", "alias string"),
}


def bank() -> TransactionSet:
    return TransactionSet({"transfer": transfer, "rename": rename, "reach": reach}, BANK)


def some_events(count: int, keys: int, seed: int) -> dict[str, pa.Table]:
    rng = np.random.default_rng(seed)
    times = pa.array(rng.permutation(count))
    src, dst = rng.integers(0, keys, count), rng.integers(0, keys, count)
    names = pa.array([f"n{n}" for n in rng.integers(0, keys, count // 10)])
    lists = [rng.integers(0, keys, n % 4).tolist() for n in range(count // 10)]
    return {
        "transfer": pa.table({"time": times, "src": src, "dst": dst, "amount": src % 7}),
        "rename": pa.table(
            {
                "time": times[: count // 10],
                "name": names,
                "to": pa.array([f"{name} of {seed}" for name in names]),
            }
        ),
        "reach": pa.table({"time": times[: count // 10], "keys": pa.array(lists, pa.list_(pa.int64()))}),
    }


def contents(stores: Stores) -> dict[str, tuple[pa.Table, pa.Table, int]]:
    wanted = {"accounts": pa.array(range(50)), "owners": pa.array([f"n{n}" for n in range(50)])}
    for store in stores.values():
        store.validate()
    return {name: (s.export(), s.find([wanted[name]]), len(s)) for name, s in stores.items()}


def copies(stores: Stores) -> Stores:
    strings = next(iter(stores.values())).strings.copy()
    return {name: store.copy(strings) for name, store in stores.items()}


def run(transactions: TransactionSet, events: Any, stores: Stores, **options: Any) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuleInterpreted)
        return transactions.run(events, stores, **options)


@pytest.mark.parametrize("kinds", [["transfer"], ["reach"], ["rename"], ["transfer", "rename", "reach"]])
@pytest.mark.parametrize(("before", "after"), [(40, 40), (4_000, 4_000), (10, 50)])
def test_tables_and_their_copies_are_as_before(kinds: list[str], before: int, after: int) -> None:
    """Few rows of many, all rows of few, and rows that the epoch makes; compiled, interpreted and both."""
    transactions = bank()
    stores = transactions.stores()
    run(transactions, some_events(before * 5, before, 1), stores)
    was = contents(stores)
    second = some_events(200, after, 2)
    outcome = run(transactions, {kind: second[kind] for kind in kinds}, stores)
    assert contents(stores) != was
    reader = copies(stores)
    outcome.undo.put_back(reader)
    assert contents(reader) == was
    again = contents(stores)
    outcome.undo.put_back(stores)
    assert contents(stores) == was
    # And forth: what is undone can be done again.
    assert run(transactions, {kind: second[kind] for kind in kinds}, stores).outputs == outcome.outputs
    assert contents(stores) == again


FAULTS = [(plans, "run"), (tables, "grown"), (RowIndex, "reserve"), (execution.EpochRun, "outputs")]


@pytest.mark.parametrize("where", FAULTS, ids=lambda where: where[1])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, ValueError])
def test_an_epoch_that_fails_leaves_the_tables(
    where: tuple[Any, str], error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    transactions = bank()
    stores = transactions.stores()
    run(transactions, some_events(50, 10, 1), stores)
    was = contents(stores)
    events = some_events(500, 200, 2)
    if where == (plans, "run"):
        del events["rename"]  # all compiled
    sound = getattr(*where)

    def fails(*args: Any) -> Any:
        sound(*args)  # the harm is done
        raise error("no more")

    with monkeypatch.context() as patch:
        patch.setattr(*where, fails)
        with pytest.raises(error):
            run(transactions, events, stores)
    assert contents(stores) == was
    fresh = transactions.stores()
    run(transactions, some_events(50, 10, 1), fresh)
    assert run(transactions, events, stores).outputs == run(transactions, events, fresh).outputs
    assert contents(stores) == contents(fresh)


class Hoard:
    """What fills the memory."""


def test_what_filled_the_memory_is_let_go_before_the_tables_are_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else there might be none to put them back with, and half of an epoch would stay."""
    transactions = bank()
    stores = transactions.stores()
    hoards: list[weakref.ref[Hoard]] = []
    put_back = execution.EpochRun.put_back

    def fails(run: execution.EpochRun) -> None:
        hoard = Hoard()
        hoards.append(weakref.ref(hoard))
        raise MemoryError

    def looks(run: execution.EpochRun) -> None:
        assert hoards[-1]() is None
        put_back(run)

    with monkeypatch.context() as patch:
        patch.setattr(execution.EpochRun, "outputs", fails)
        patch.setattr(execution.EpochRun, "put_back", looks)
        with pytest.raises(MemoryError):
            run(transactions, some_events(50, 10, 1), stores)
    assert len(hoards) == 1
