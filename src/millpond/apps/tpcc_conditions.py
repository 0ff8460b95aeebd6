"""The consistency conditions of TPC-C (clause 3.3.2), all twelve, over the tables as Arrow has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Tables = Mapping[str, pa.Table]
Groups = dict[tuple[Any, ...], Any]

CONDITIONS = {
    1: "a warehouse's year to date is the sum of its districts'",
    2: "a district's next order follows its newest order, which is the newest that waits",
    3: "the orders of a district that wait have numbers without gaps",
    4: "a district has as many order lines as its orders say",
    5: "an order has no carrier while it waits, and only then",
    6: "an order has as many lines as it says",
    7: "a line has no time of delivery while its order has no carrier, and only then",
    8: "a warehouse's year to date is the sum of its payments",
    9: "a district's year to date is the sum of its payments",
    10: "a customer's balance is what was delivered less what was paid",
    11: "the orders of a district that do not wait were delivered, to begin with or since",
    12: "a customer's balance and year to date are what was delivered",
}


def violations(tables: Tables, delivered: int) -> dict[int, int]:
    """How many warehouses, districts, orders, lines or customers break each condition.

    `delivered` orders of each district were so to begin with: 2,100 in the specification.
    """
    facts = _Facts(tables)
    checks: dict[int, Callable[[], int]] = {
        1: facts.year_of_warehouse,
        2: facts.next_order,
        3: facts.no_gaps,
        4: facts.lines_of_district,
        5: facts.carriers,
        6: facts.lines_of_order,
        7: facts.deliveries,
        8: facts.payments_of_warehouse,
        9: facts.payments_of_district,
        10: facts.balances,
        11: lambda: facts.delivered_orders(delivered),
        12: facts.years_of_customers,
    }
    return {number: check() for number, check in checks.items()}


class _Facts:
    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._years = self._column("district", ("d_w_id", "d_id"), "d_ytd")
        self._districts = self._column("district", ("d_w_id", "d_id"), "d_next_o_id")
        self._waiting = self._column("new_order", ("no_w_id", "no_d_id", "no_o_id"), "no_o_id")
        self._carriers = self._column("orders", ("o_w_id", "o_d_id", "o_id"), "o_carrier_id")
        self._sizes = self._column("orders", ("o_w_id", "o_d_id", "o_id"), "o_ol_cnt")
        self._delivered = self._delivered_amounts()

    def _column(self, table: str, keys: tuple[str, ...], column: str) -> Groups:
        columns = [self._tables[table][key].to_pylist() for key in keys]
        return dict(zip(zip(*columns, strict=True), self._tables[table][column].to_pylist(), strict=True))

    def _grouped(self, table: str | pa.Table, keys: tuple[str, ...], column: str, how: str) -> Groups:
        rows = self._tables[table] if isinstance(table, str) else table
        groups = _aligned(rows.select([*dict.fromkeys((*keys, column))])).group_by(list(keys))
        groups = groups.aggregate([(column, how)])
        columns = [groups[key].to_pylist() for key in keys]
        return dict(zip(zip(*columns, strict=True), groups[f"{column}_{how}"].to_pylist(), strict=True))

    def _delivered_amounts(self) -> Groups:
        """What was delivered to each customer. Lines are told apart by their own times of delivery."""
        lines = self._tables["order_line"]
        lines = lines.filter(pc.not_equal(_longs(lines["ol_delivery_d"]), 0))
        amounts = self._grouped(lines, ("ol_w_id", "ol_d_id", "ol_o_id"), "ol_amount", "sum")
        customers = self._column("orders", ("o_w_id", "o_d_id", "o_id"), "o_c_id")
        totals: Groups = {}
        for (w, d, o), amount in amounts.items():
            customer = (w, d, customers.get((w, d, o)))
            totals[customer] = totals.get(customer, 0) + amount
        return totals

    def year_of_warehouse(self) -> int:
        return _differing(
            self._column("warehouse", ("w_id",), "w_ytd"),
            self._grouped("district", ("d_w_id",), "d_ytd", "sum"),
        )

    def next_order(self) -> int:
        newest = self._grouped("orders", ("o_w_id", "o_d_id"), "o_id", "max")
        waiting = self._grouped("new_order", ("no_w_id", "no_d_id"), "no_o_id", "max")
        return sum(
            newest.get(district) != after - 1 or waiting.get(district, after - 1) != after - 1
            for district, after in self._districts.items()
        )

    def no_gaps(self) -> int:
        keys = ("no_w_id", "no_d_id")
        low, high, count = (
            self._grouped("new_order", keys, "no_o_id", how) for how in ("min", "max", "count")
        )
        return sum(bool(high[district] - low[district] + 1 != count[district]) for district in count)

    def lines_of_district(self) -> int:
        return _differing(
            self._grouped("orders", ("o_w_id", "o_d_id"), "o_ol_cnt", "sum"),
            self._grouped("order_line", ("ol_w_id", "ol_d_id"), "ol_number", "count"),
        )

    def carriers(self) -> int:
        wrong = sum(
            (order in self._waiting) != bool(carrier == 0) for order, carrier in self._carriers.items()
        )
        return wrong + len(self._waiting.keys() - self._carriers.keys())

    def lines_of_order(self) -> int:
        keys = ("ol_w_id", "ol_d_id", "ol_o_id")
        return _differing(self._sizes, self._grouped("order_line", keys, "ol_number", "count"))

    def deliveries(self) -> int:
        lines = _aligned(self._tables["order_line"].select(["ol_w_id", "ol_d_id", "ol_o_id"]))
        waits = pc.equal(_longs(self._tables["order_line"]["ol_delivery_d"]), 0)
        groups = (
            lines.append_column("waits", waits)
            .group_by(lines.column_names)
            .aggregate([("waits", "min"), ("waits", "max")])
        )
        *keys, least, most = (
            groups[name].to_pylist() for name in (*lines.column_names, "waits_min", "waits_max")
        )
        return sum(
            (all_wait, one_waits) != (self._carriers.get(order) == 0,) * 2
            for order, all_wait, one_waits in zip(zip(*keys, strict=True), least, most, strict=True)
        )

    def payments_of_warehouse(self) -> int:
        return _differing(
            self._column("warehouse", ("w_id",), "w_ytd"),
            self._grouped("history", ("h_w_id",), "h_amount", "sum"),
        )

    def payments_of_district(self) -> int:
        return _differing(self._years, self._grouped("history", ("h_w_id", "h_d_id"), "h_amount", "sum"))

    def balances(self) -> int:
        paid = self._grouped("history", ("h_c_w_id", "h_c_d_id", "h_c_id"), "h_amount", "sum")
        balances = self._column("customer", ("c_w_id", "c_d_id", "c_id"), "c_balance")
        return sum(
            balance != self._delivered.get(customer, 0) - paid.get(customer, 0)
            for customer, balance in balances.items()
        )

    def delivered_orders(self, delivered: int) -> int:
        orders = self._grouped("orders", ("o_w_id", "o_d_id"), "o_id", "count")
        waiting = self._grouped("new_order", ("no_w_id", "no_d_id"), "no_o_id", "count")
        since = self._grouped("customer", ("c_w_id", "c_d_id"), "c_delivery_cnt", "sum")
        return sum(
            orders.get(district, 0) - waiting.get(district, 0) != delivered + since[district]
            for district in self._districts
        )

    def years_of_customers(self) -> int:
        keys = ("c_w_id", "c_d_id", "c_id")
        balances, years = (self._column("customer", keys, name) for name in ("c_balance", "c_ytd_payment"))
        return sum(
            balance + years[customer] != self._delivered.get(customer, 0)
            for customer, balance in balances.items()
        )


def _aligned(table: pa.Table) -> pa.Table:
    """A copy: of columns that came over a wire Arrow complains when it groups them."""
    return pa.table({name: pa.array(np.array(np.asarray(table[name]))) for name in table.column_names})


def _longs(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.int64())


def _differing(one: Groups, other: Groups) -> int:
    return sum(one.get(key) != other.get(key) for key in one.keys() | other.keys())
