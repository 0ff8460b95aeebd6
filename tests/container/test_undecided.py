"""A slice that changes hands takes nothing along of an epoch that was prepared and never decided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import millpond as mp
from millpond.errors import WriteFailed
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond


@mp.transaction
def add(totals: Any, key: int, amount: int) -> None:
    totals[key].amount += amount


@mp.program
class Totals:
    amounts: mp.Partitioned[mp.Map[int, int]]

    def add(self, key: int, amount: int) -> None:
        self.amounts[key] += amount


def transactions(pond: LocalPond) -> Callable[[pa.Table, int], Any]:
    totals = pond.table("totals", key="key long", value="amount long", default={"amount": 0})
    return pond.transactions("bank", tables=[totals], kinds={"add": add}, at="ts")


def program(pond: LocalPond) -> Callable[[pa.Table, int], Any]:
    return pond.program("totals", Totals).call("add", name="feed")


@pytest.mark.parametrize("made", [transactions, program], ids=["transactions", "program"])
def test_what_was_prepared_is_taken_back_where_slices_leave(
    made: Callable[[LocalPond], Callable[[pa.Table, int], Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pond = LocalPond(LossyFiles(), "/pond", 2, 4)
    operator = made(pond)
    rows = pa.table({"key": range(8), "amount": [1] * 8, "ts": range(8)})
    columns = rows if made is transactions else rows.drop_columns(["ts"])
    operator(columns, 0)

    def refused(*_: object) -> None:
        raise WriteFailed("the journal cannot be written", hint="make room", path="journal")

    with monkeypatch.context() as patch:
        patch.setattr(pond.coordinator._commits, "_decide", refused)
        with pytest.raises(WriteFailed):
            operator(columns, 1)
    containers = [service.core for service in pond.hosting.services.values()]
    undecided = [core for core in containers if core._logged]
    assert undecided
    for core in undecided:
        for held in core.release(core.owned).values():
            for one in held.values():
                assert one.undecided is None
                assert [value for _, value in _entries(one.store)] == [1] * len(_entries(one.store))
        assert not core._logged


def _entries(store: Any) -> list[tuple[int, int]]:
    if hasattr(store, "tables"):
        rows = store.tables["totals"].snapshot().to_pylist() if store.tables else []
        return [(row["key"], row["amount"]) for row in rows]
    return [item for tracked in store.parts.values() for item in tracked.items()]
