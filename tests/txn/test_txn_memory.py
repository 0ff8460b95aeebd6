"""What tables remember has an end: strings that passed by, and keys that were only asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from millpond.code.tables import TableSpec
from millpond.stores import compaction
from millpond.stores.compaction import compact
from millpond.stores.tables import TableStore
from millpond.txn import TransactionSet, abort, transaction

TABLES = {
    "owners": TableSpec("string", "name string, visits long", {"name": "nobody", "visits": 0}),
    "limits": TableSpec("long", "most long"),
}


@transaction
def visit(owners, limits, who: str, note: str, place: int):  # type: ignore[no-untyped-def]
    if note == "a constant":
        abort("no")
    owners[who].visits += 1
    owners[who].name = who
    return note, owners[who].visits, limits[place].most  # a place without a limit ends it


@transaction
def allow(limits, place: int):  # type: ignore[no-untyped-def]
    limits[place].most = place


def events(epoch: int, count: int) -> dict[str, pa.Table]:
    """All notes and most places are new; a few visitors and places come again and again."""
    numbers = range((epoch + 1) * count, (epoch + 2) * count)
    places = [n if n % 2 else n % 20 for n in numbers]
    columns = {
        "time": numbers,
        "who": [f"w{n}" if p == n else f"w{p % 7}" for n, p in zip(numbers, places, strict=True)],
        "note": [f"note {n}" for n in numbers],
        "place": places,
    }
    return {"visit": pa.table(columns), "allow": pa.table({"time": [-1] * 20, "place": range(20)})}


def bytes_of(stores: dict[str, TableStore]) -> int:
    return sum(store.nbytes for store in stores.values()) + stores["owners"].strings.nbytes


@pytest.mark.long
def test_a_million_strings_and_probed_keys_stay_bounded() -> None:
    transactions = TransactionSet({"visit": visit, "allow": allow}, TABLES)
    stores, plain = transactions.stores(), transactions.stores()
    sizes, rebuilt = [], 0
    for epoch in range(25):
        given = events(epoch, 40_000)
        one = transactions.run(given, stores)
        rebuilt += compact(stores.values())
        sizes.append(bytes_of(stores))
        if epoch < 5:
            assert one.outputs == transactions.run(given, plain).outputs
            for name, store in stores.items():
                store.validate()
                assert store.export() == plain[name].export()
    assert rebuilt > 5
    assert max(sizes[10:]) <= max(sizes[:10]), "it does not grow any more"
    assert bytes_of(plain) > 2 * min(sizes), "it would"
    assert len(stores["owners"]) == 7
    found = stores["owners"].find([pa.array(["w3", "never"])]).to_pydict()
    assert (found["key"], found["name"]) == (["w3"], ["w3"])
    assert stores["limits"].snapshot()["most"].to_pylist() == list(range(20))


def test_what_is_of_use_stays_and_is_looked_at_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    transactions = TransactionSet({"allow": allow}, {"limits": TABLES["limits"]})
    stores = transactions.stores()
    looks: list[int] = []
    sound = compaction._used_strings

    def counted(*args: Any) -> Any:
        looks.append(1)
        return sound(*args)

    monkeypatch.setattr(compaction, "_used_strings", counted)
    for epoch in range(100):
        transactions.run(
            pa.table({"time": range(1000), "place": range(epoch * 1000, (epoch + 1) * 1000)}), stores
        )
        assert not compact(stores.values(), above_bytes=1 << 16)
    assert 5 <= len(looks) <= 9
    assert len(stores["limits"]) == 100_000


@pytest.mark.parametrize("where", [TableStore.only, TableStore.resolve, compaction._used_strings])
def test_memory_that_runs_out_while_it_is_saved(
    where: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    transactions = TransactionSet({"visit": visit, "allow": allow}, TABLES)
    stores = transactions.stores()
    transactions.run(events(0, 2_000), stores)
    was = {name: store.export() for name, store in stores.items()}

    def fails(*args: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(
            compaction if where.__module__ == compaction.__name__ else TableStore, where.__name__, fails
        )
        with pytest.raises(MemoryError):
            compact(stores.values(), above_bytes=0)
    assert {name: store.export() for name, store in stores.items()} == was
    copy = stores["owners"].copy(stores["owners"].strings.copy())
    assert compact(stores.values(), above_bytes=0)
    assert not compact([], above_bytes=0)
    assert {name: store.export() for name, store in stores.items()} == was
    assert copy.export() == was["owners"], "a copy is not touched"
    for store in stores.values():
        store.validate()
        assert store.count == len(store)
