"""TPC-C against plain Python that does one transaction after the other, and the consistency conditions of its tables."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import millpond as mp
from millpond.apps import tpcc, tpcc_inputs
from millpond.apps.tpcc_conditions import CONDITIONS, violations
from millpond.apps.tpcc_inputs import KEY_SIZES, MIX, Scale, events, population
from millpond.apps.tpcc_serial import UNUSED_ITEM, Interpreter
from millpond.errors import BadOption
from millpond.txn import TransactionSet

SMALL = Scale(warehouses=3, items=150, customers=30)
COUNT = 6_000


@pytest.fixture(scope="module")
def tables() -> dict[str, pa.Table]:
    return population(SMALL)


@pytest.fixture(scope="module")
def happening() -> pa.Table:
    return events(COUNT, SMALL)


@pytest.fixture(scope="module")
def serial(tables: dict[str, pa.Table], happening: pa.Table) -> tuple[Interpreter, list[Any]]:
    interpreter = Interpreter(tables)
    return interpreter, interpreter.run(happening)


# All five take half a minute to compile.
@pytest.mark.parametrize("kinds", [("new_order",), pytest.param(tuple(MIX), marks=pytest.mark.long)], ids=len)
@pytest.mark.long
def test_transactions_do_what_plain_python_does(
    kinds: tuple[str, ...], tables: dict[str, pa.Table], happening: pa.Table
) -> None:
    happening = happening.filter(pc.is_in(happening["kind"], pa.array(kinds)))
    program = TransactionSet({kind: tpcc.KINDS[kind] for kind in kinds}, tpcc.TABLES)
    stores = program.stores()
    for name, rows in tpcc.with_indexes(tables).items():
        stores[name].load(rows.rename_columns(stores[name].snapshot().column_names))
    outputs = []
    for start, stop in pairwise((0, 1, 700, 700, 2_000, len(happening))):
        part = happening.slice(start, stop - start)
        # The rows of an epoch may come in any order.
        part = part.take(pa.array(np.random.default_rng(start).permutation(len(part))))
        outcome = program.run(part, stores, at="ts", threads=2)
        assert not outcome.figures["interpreted"]
        outputs.append(outcome.outputs.set_column(0, "ts", part["ts"]))
    interpreter = Interpreter(tables)
    assert tpcc.differing(happening, interpreter.run(happening), pa.concat_tables(outputs)) == 0
    for store in stores.values():
        store.validate()
    after = {name: stores[name].snapshot().rename_columns(tables[name].column_names) for name in tables}
    for name, rows in after.items():
        assert tpcc.same_rows(rows, interpreter.table(name)), name
    assert violations(after, SMALL.delivered) == dict.fromkeys(CONDITIONS, 0)


def test_the_events_come_to_everything(happening: pa.Table, serial: tuple[Interpreter, list[Any]]) -> None:
    _, answers = serial
    assert {reason for reason, _ in answers} == {None, UNUSED_ITEM}
    by_kind: dict[str, list[dict[str, Any]]] = {kind: [] for kind in MIX}
    for kind, (reason, results) in zip(happening["kind"].to_pylist(), answers, strict=True):
        if reason is None:
            by_kind[kind].append(results)
    assert {answer["delivered"] for answer in by_kind["delivery"]} >= {9, 10}, "no district ran out of orders"
    assert max(answer["low"] for answer in by_kind["stock_level"]) > 0
    assert {answer["credit"] for answer in by_kind["payment"]} == {"GC", "BC"}
    assert any(answer["brands"] for answer in by_kind["new_order"])
    assert {bool(answer["carrier_id"]) for answer in by_kind["order_status"]} == {True, False}


def test_the_population_is_consistent_and_has_the_cardinalities_of_the_specification() -> None:
    tables = population(Scale(warehouses=2, items=200))
    sizes = {name: len(table) / 2 for name, table in tables.items()}
    assert 290_000 < sizes.pop("order_line") < 310_000
    assert sizes == {
        "warehouse": 1, "district": 10, "customer": 30_000, "history": 30_000, "orders": 30_000,
        "new_order": 9_000, "item": 100, "stock": 200,
    }  # fmt: skip
    assert violations(tables, 2_100) == dict.fromkeys(CONDITIONS, 0)
    for name, table in tables.items():
        assert tpcc.TABLES[name].schema.names == table.column_names
        keys = [(key, "ascending") for key in table.column_names[: KEY_SIZES[name]]]
        assert table.sort_by(keys) == table
    named = tpcc.with_indexes(tables)["named"]
    assert len(named) == len(tables["customer"])
    assert pc.max(tpcc.with_indexes(tables)["names"]["n_count"]).as_py() == pc.max(named["n_place"]).as_py()


def test_events_are_of_the_mix() -> None:
    scale = Scale(warehouses=4, items=100_000)
    found = events(100_000, scale)
    share = Counter(found["kind"].to_pylist())
    assert {kind: share[kind] / 1e5 for kind in MIX} == pytest.approx(MIX, abs=0.005)
    orders = found.filter(pc.equal(found["kind"], "new_order"))
    sizes = pc.list_value_length(orders["items"])
    assert (pc.min(sizes).as_py(), pc.max(sizes).as_py()) == (5, 15)
    last = pc.list_element(orders["items"], 4)
    assert pc.max(last).as_py() <= scale.items + 1
    unused = [items[-1] == scale.items + 1 for items in orders["items"].to_pylist()]
    assert np.mean(unused) == pytest.approx(0.01, abs=0.002)
    lines = pa.table(
        {
            "w": orders["w"].take(pc.list_parent_indices(orders["supplies"])),
            "s": pc.list_flatten(orders["supplies"]),
        }
    )
    assert np.mean(np.asarray(lines["w"]) != np.asarray(lines["s"])) == pytest.approx(0.01, abs=0.002)
    payments = found.filter(pc.equal(found["kind"], "payment"))
    assert np.mean(np.asarray(payments["w"]) != np.asarray(payments["c_w"])) == pytest.approx(0.15, abs=0.01)
    assert np.mean(np.asarray(payments["c"]) == 0) == pytest.approx(0.6, abs=0.01)
    assert found == events(100_000, scale)
    # By the bits of NURand, some customers and items come more often than others.
    counts = np.sort(np.bincount(np.asarray(pc.list_flatten(orders["items"]))))[::-1]
    assert counts[: scale.items // 10].sum() > 0.2 * counts.sum()
    difference = abs(tpcc_inputs.NAMES_RUN - tpcc_inputs.NAMES_LOADED)
    assert 65 <= difference <= 119
    assert difference not in (96, 112)


def test_one_warehouse_has_no_others() -> None:
    found = events(2_000, Scale(warehouses=1, items=50, customers=10))
    assert {*found["w"].to_pylist(), *pc.list_flatten(found["supplies"]).to_pylist()} == {1}
    assert pc.unique(found["c_w"].drop_null()).to_pylist() == [1]
    assert len(events(0, Scale())) == 0


# For each condition, a change to one row that breaks it.
DAMAGE: dict[int, tuple[str, str, Any]] = {
    1: ("warehouse", "w_ytd", 1),
    2: ("district", "d_next_o_id", 1),
    3: ("new_order", "no_o_id", 10_000),
    4: ("orders", "o_ol_cnt", 1),
    5: ("orders", "o_carrier_id", 1),
    6: ("orders", "o_ol_cnt", 1),
    7: ("order_line", "ol_delivery_d", 1),
    8: ("history", "h_amount", 1),
    9: ("district", "d_ytd", 1),
    10: ("customer", "c_balance", 1),
    11: ("customer", "c_delivery_cnt", 1),
    12: ("customer", "c_ytd_payment", 1),
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition_that_is_broken_is_seen(condition: int, tables: dict[str, pa.Table]) -> None:
    name, column, by = DAMAGE[condition]
    table = tables[name]
    place = table.column_names.index(column)
    values = np.asarray(table[column].cast(pa.int64())).copy()
    values[-1] += by
    damaged = table.set_column(place, column, pa.array(values).cast(table.schema.field(column).type))
    assert violations({**tables, name: damaged}, SMALL.delivered)[condition] > 0


@pytest.mark.long
def test_a_pond_is_loaded_and_runs_them(tmp_path: Path) -> None:
    scale = Scale(warehouses=2, items=60, customers=20)
    before, happening = population(scale), events(800, scale)
    with mp.open(tmp_path / "pond") as pond:
        transactions = tpcc.open_tables(pond, before)
        for name, table in before.items():
            assert tpcc.same_rows(pond.table(name).snapshot(), table), name
        outputs = pa.concat_tables(
            [transactions(happening.slice(0, 500), 0), transactions(happening.slice(500), 1)]
        )
        after = {name: pond.table(name).snapshot() for name in before}
    serial = Interpreter(before)
    assert tpcc.differing(happening, serial.run(happening), outputs) == 0
    assert all(tpcc.same_rows(after[name], serial.table(name)) for name in before)
    assert violations(after, scale.delivered) == dict.fromkeys(CONDITIONS, 0)
    wrong = outputs.set_column(outputs.column_names.index("total"), "total", pc.add(outputs["total"], 1))
    assert tpcc.differing(happening, Interpreter(before).run(happening), wrong) > 0


def test_too_many_events_are_refused_before_anything_starts() -> None:
    with pytest.raises(BadOption, match="too many"):
        tpcc.run(seconds=1_000, rate=1_000_000)
