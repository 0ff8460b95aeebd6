"""TPC-C on a stream: New-Order, Payment, Order-Status, Delivery and Stock-Level as transactions over one group of tables.

The tables are those of the specification, as `tpcc_inputs` makes them. What a database has as indexes are tables of
their own: `names` and `named` find a customer by last name, `newest` its last order, `oldest` the order of a district
that waits longest.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console

import millpond as mp
from millpond.apps.spark_session import spark_session
from millpond.apps.tpcc_conditions import CONDITIONS, violations
from millpond.apps.tpcc_inputs import START_US, TIME, Scale, events, population
from millpond.apps.tpcc_serial import Answer, Interpreter
from millpond.apps.transaction_demo import check_events, run_stream, write_epochs
from millpond.code.capture import Code
from millpond.code.tables import TableSpec, TransactionCode
from millpond.txn.functions import TransactionFunction, load

if TYPE_CHECKING:
    from millpond.ops.transactions import Transactions

SECONDS, RATE, WAREHOUSES = 10, 10_000, 4
ITEMS, CUSTOMERS = 1_000, 90  # of the demonstration; the specification has 100,000 and 3,000
LOAD_ROWS = 250_000  # in an epoch

TABLES = {
    "warehouse": TableSpec(key="w_id long", value="w_name string, w_tax long, w_ytd long"),
    "district": TableSpec(
        key="d_w_id long, d_id long", value="d_name string, d_tax long, d_ytd long, d_next_o_id long"
    ),
    "customer": TableSpec(
        key="c_w_id long, c_d_id long, c_id long",
        value="c_first string, c_last string, c_credit string, c_discount long, c_balance long, c_ytd_payment long,"
        " c_payment_cnt long, c_delivery_cnt long, c_paid_w_id long, c_paid_d_id long, c_paid_amount long",
    ),
    "history": TableSpec(
        key="h_c_w_id long, h_c_d_id long, h_c_id long, h_number long",
        value="h_w_id long, h_d_id long, h_date timestamp, h_amount long",
    ),
    "orders": TableSpec(
        key="o_w_id long, o_d_id long, o_id long",
        value="o_c_id long, o_entry_d timestamp, o_carrier_id long, o_ol_cnt long, o_all_local boolean",
    ),
    "new_order": TableSpec(key="no_w_id long, no_d_id long, no_o_id long", value="no_entry_d timestamp"),
    "order_line": TableSpec(
        key="ol_w_id long, ol_d_id long, ol_o_id long, ol_number long",
        value="ol_i_id long, ol_supply_w_id long, ol_delivery_d timestamp, ol_quantity long, ol_amount long",
    ),
    "item": TableSpec(key="i_id long", value="i_name string, i_price long, i_original boolean"),
    "stock": TableSpec(
        key="s_w_id long, s_i_id long",
        value="s_quantity long, s_ytd long, s_order_cnt long, s_remote_cnt long, s_original boolean",
    ),
    "names": TableSpec(key="n_w_id long, n_d_id long, n_last string", value="n_count long"),
    "named": TableSpec(key="n_w_id long, n_d_id long, n_last string, n_place long", value="n_c_id long"),
    "newest": TableSpec(key="n_w_id long, n_d_id long, n_c_id long", value="n_o_id long"),
    "oldest": TableSpec(key="n_w_id long, n_d_id long", value="n_o_id long"),
}


@mp.transaction(results="o_id long, total long, brands long, credit string")
def order_goods(
    warehouse: Any, district: Any, customer: Any, item: Any, stock: Any, orders: Any, new_order: Any, order_line: Any,
    newest: Any, ts: int, w: int, d: int, c: int, items: list[int], supplies: list[int], quantities: list[int],
) -> Any:  # fmt: skip
    o = district[w, d].d_next_o_id
    district[w, d].d_next_o_id = o + 1
    number = 0
    total = 0
    brands = 0
    is_local = True
    for i, supply, quantity in zip(items, supplies, quantities):  # noqa: B905 - all have one length
        sold = item.get(i)
        if sold is None:
            mp.abort("item number is not valid")
        number += 1
        left = stock[supply, i].s_quantity - quantity
        stock[supply, i].s_quantity = left if left >= 10 else left + 91
        stock[supply, i].s_ytd += quantity
        stock[supply, i].s_order_cnt += 1
        if supply != w:
            stock[supply, i].s_remote_cnt += 1
            is_local = False
        amount = quantity * sold.i_price
        total += amount
        if sold.i_original and stock[supply, i].s_original:
            brands += 1
        order_line[w, d, o, number].ol_i_id = i
        order_line[w, d, o, number].ol_supply_w_id = supply
        order_line[w, d, o, number].ol_quantity = quantity
        order_line[w, d, o, number].ol_amount = amount
    orders[w, d, o].o_c_id = c
    orders[w, d, o].o_entry_d = ts
    orders[w, d, o].o_ol_cnt = number
    orders[w, d, o].o_all_local = is_local
    new_order[w, d, o].no_entry_d = ts
    newest[w, d, c].n_o_id = o
    tax = 10_000 + warehouse[w].w_tax + district[w, d].d_tax
    return (
        o,
        total * (10_000 - customer[w, d, c].c_discount) * tax // 100_000_000,
        brands,
        customer[w, d, c].c_credit,
    )


@mp.transaction(results="c_id long, balance long, credit string")
def pay(
    warehouse: Any, district: Any, customer: Any, history: Any, names: Any, named: Any,
    ts: int, w: int, d: int, c_w: int, c_d: int, c: int, c_last: str, amount: int,
) -> Any:  # fmt: skip
    who = c
    if c == 0:
        who = named[c_w, c_d, c_last, (names[c_w, c_d, c_last].n_count + 1) // 2].n_c_id
    warehouse[w].w_ytd += amount
    district[w, d].d_ytd += amount
    customer[c_w, c_d, who].c_balance -= amount
    customer[c_w, c_d, who].c_ytd_payment += amount
    customer[c_w, c_d, who].c_payment_cnt += 1
    if customer[c_w, c_d, who].c_credit == "BC":
        customer[c_w, c_d, who].c_paid_w_id = w
        customer[c_w, c_d, who].c_paid_d_id = d
        customer[c_w, c_d, who].c_paid_amount = amount
    number = customer[c_w, c_d, who].c_payment_cnt
    history[c_w, c_d, who, number].h_w_id = w
    history[c_w, c_d, who, number].h_d_id = d
    history[c_w, c_d, who, number].h_date = ts
    history[c_w, c_d, who, number].h_amount = amount
    return who, customer[c_w, c_d, who].c_balance, customer[c_w, c_d, who].c_credit


@mp.transaction(results="c_id long, balance long, o_id long, carrier_id long, lines long, total long")
def tell_status(
    customer: Any, orders: Any, order_line: Any, names: Any, named: Any, newest: Any,
    w: int, d: int, c: int, c_last: str,
) -> Any:  # fmt: skip
    who = c
    if c == 0:
        who = named[w, d, c_last, (names[w, d, c_last].n_count + 1) // 2].n_c_id
    o = newest[w, d, who].n_o_id
    total = 0
    for number in range(1, orders[w, d, o].o_ol_cnt + 1):
        total += order_line[w, d, o, number].ol_amount
    return (
        who,
        customer[w, d, who].c_balance,
        o,
        orders[w, d, o].o_carrier_id,
        orders[w, d, o].o_ol_cnt,
        total,
    )


@mp.transaction(results="delivered long")
def deliver(
    customer: Any, orders: Any, new_order: Any, order_line: Any, oldest: Any, ts: int, w: int, carrier: int
) -> Any:
    delivered = 0
    for d in range(1, 11):
        o = oldest[w, d].n_o_id
        if (w, d, o) in new_order:
            del new_order[w, d, o]
            oldest[w, d].n_o_id = o + 1
            orders[w, d, o].o_carrier_id = carrier
            amount = 0
            for number in range(1, orders[w, d, o].o_ol_cnt + 1):
                order_line[w, d, o, number].ol_delivery_d = ts
                amount += order_line[w, d, o, number].ol_amount
            c = orders[w, d, o].o_c_id
            customer[w, d, c].c_balance += amount
            customer[w, d, c].c_delivery_cnt += 1
            delivered += 1
    return delivered


@mp.transaction(results="low long")
def count_low_stock(
    district: Any, orders: Any, order_line: Any, stock: Any, w: int, d: int, threshold: int
) -> Any:
    after = district[w, d].d_next_o_id
    low = set()
    for o in range(max(1, after - 20), after):
        items = []
        for number in range(1, orders[w, d, o].o_ol_cnt + 1):
            items.append(order_line[w, d, o, number].ol_i_id)  # noqa: PERF401 - a loop is compiled
        for i in items:
            if stock[w, i].s_quantity < threshold:
                low.add(i)
    return len(low)


KINDS = {
    "new_order": order_goods,
    "payment": pay,
    "order_status": tell_status,
    "delivery": deliver,
    "stock_level": count_low_stock,
}


# The tables to begin with


def with_indexes(tables: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
    """The tables of the specification, and those that stand for indexes."""
    customers = tables["customer"].select(["c_w_id", "c_d_id", "c_last", "c_first", "c_id"])
    customers = customers.sort_by([(column, "ascending") for column in customers.column_names])
    name = ["c_w_id", "c_d_id", "c_last"]
    counts = customers.group_by(name).aggregate([([], "count_all")])
    counts = counts.sort_by([(column, "ascending") for column in name])
    sizes = np.asarray(counts["count_all"])
    places = np.arange(len(customers)) - np.repeat(np.cumsum(sizes) - sizes, sizes) + 1
    orders = tables["orders"]
    newest = orders.group_by(["o_w_id", "o_d_id", "o_c_id"]).aggregate([("o_id", "max")])
    oldest = tables["new_order"].group_by(["no_w_id", "no_d_id"]).aggregate([("no_o_id", "min")])
    indexes = {
        "names": counts.columns,
        "named": [*customers.select(name).columns, pa.chunked_array([pa.array(places)]), customers["c_id"]],
        "newest": newest.columns,
        "oldest": oldest.columns,
    }
    return {
        **tables,
        **{table: pa.table(columns, TABLES[table].schema.names) for table, columns in indexes.items()},
    }


def loader(name: str) -> TransactionFunction:
    """A transaction that writes one row of a table, every column from the event."""
    spec = TABLES[name]
    names = spec.schema.names
    columns = spec.columns.names
    key = ", ".join(names[: -len(columns)])
    lines = [f"def load_{name}({name}, {', '.join(names)}):", f"    row = {name}[{key}]"]
    lines += [f"    row.{column} = {column}" for column in columns]
    return load(TransactionCode(Code(f"load_{name}", "\n".join(lines) + "\n")))


def open_tables(pond: mp.Pond, tables: Mapping[str, pa.Table]) -> Transactions:
    """Makes the tables in a pond, with these rows, and gives the operator of the five transactions."""
    for name, spec in TABLES.items():
        pond.table(name, key=spec.key, value=spec.value, default=spec.default, group="tpcc")
    rows = with_indexes(tables)
    for name, table in rows.items():
        loading = pond.transactions(f"load_{name}", [name], {name: loader(name)}, at="ts")
        for epoch, start in enumerate(range(0, len(table), LOAD_ROWS)):
            part = table.slice(start, LOAD_ROWS)
            done = loading(part.append_column("ts", pa.array(np.full(len(part), START_US)).cast(TIME)), epoch)
            if not pc.all(done["committed"]).as_py():
                raise RuntimeError(f"rows of {name!r} were refused: {pc.unique(done['reason']).to_pylist()}")
    return pond.transactions("tpcc", list(TABLES), KINDS, kind="kind", at="ts")


# The demonstration


def run(seconds: int = SECONDS, rate: int = RATE, warehouses: int = WAREHOUSES) -> bool:
    """`seconds` epochs of `rate` transactions; True if every outcome is that of plain Python and all conditions hold."""
    check_events(seconds, rate)
    out = Console(highlight=False, soft_wrap=True)
    began = time.perf_counter()
    scale = Scale(warehouses, ITEMS, CUSTOMERS)
    before, happening = population(scale), events(seconds * rate, scale)
    with tempfile.TemporaryDirectory(prefix="millpond-tpcc-") as folder:
        write_epochs(happening, folder, rate)
        out.print("starting Spark and a pond (the first time, transactions are compiled) ...")
        with spark_session("tpcc") as spark, mp.open(os.path.join(folder, "pond"), spark=spark) as pond:
            answers = run_stream(spark, pond, open_tables(pond, before), "tpcc", folder, rate, out)
            after = {name: pond.table(name).snapshot() for name in before}
        out.print("running every transaction again, as plain Python ...")
        serial = Interpreter(before)
        wrong = differing(happening, serial.run(happening), answers)
    wrong_tables = [name for name in before if not same_rows(after[name], serial.table(name))]
    broken = violations(after, scale.delivered)
    for number, count in broken.items():
        out.print(
            f"condition {number:2}, {CONDITIONS[number]}: {'holds' if not count else f'{count} break it'}"
        )
    out.print(
        f"{len(happening):,} transactions, [bold]{wrong} wrong[/bold]; {len(before)} tables, {len(wrong_tables)} wrong;"
        f" 12 conditions, {sum(map(bool, broken.values()))} broken ({time.perf_counter() - began:.0f} s)"
    )
    return not (wrong or wrong_tables or any(broken.values()))


def differing(happening: pa.Table, wanted: list[Answer], answers: pa.Table) -> int:
    """How many events have another answer than is wanted, or none, or several."""
    names = answers.column_names[answers.column_names.index("reason") :]
    by_time = dict(zip(happening["ts"].to_pylist(), wanted, strict=True))
    wrong = abs(len(answers) - len(by_time))
    for answer in answers.select(["ts", *names]).to_pylist():
        reason, results = by_time.pop(answer.pop("ts"), ("none", {}))
        wrong += answer != dict.fromkeys(names) | results | {"reason": reason}
    return wrong


def same_rows(one: pa.Table, other: pa.Table) -> bool:
    """Whether both have the same rows in the order of the first's key."""
    return bool(one.combine_chunks().equals(other.select(one.column_names).cast(one.schema).combine_chunks()))
