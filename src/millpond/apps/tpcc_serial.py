"""TPC-C as plain Python: one transaction after the other, over dicts. What the compiled ones are checked against."""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from millpond.apps.tpcc_inputs import KEY_SIZES

Row = dict[str, Any]
Answer = tuple[str | None, dict[str, Any]]
"""Why it was rolled back, or None; and its results."""

UNUSED_ITEM = "item number is not valid"


class Interpreter:
    """The tables as dicts of rows by key, and what a database would have as indexes."""

    def __init__(self, tables: Mapping[str, pa.Table]) -> None:
        self.rows: dict[str, dict[tuple[Any, ...], Row]] = {}
        self._schemas = {name: table.schema for name, table in tables.items()}
        for name, table in tables.items():
            plain = _plain(table).to_pylist()
            self.rows[name] = {tuple(row.values())[: KEY_SIZES[name]]: row for row in plain}
        self._named: dict[tuple[Any, ...], list[tuple[str, int]]] = defaultdict(list)
        for (w, d, c), row in self.rows["customer"].items():
            insort(self._named[w, d, row["c_last"]], (row["c_first"], c))
        self._orders_of: dict[tuple[int, ...], int] = {}
        for (w, d, o), row in self.rows["orders"].items():
            customer = (w, d, row["o_c_id"])
            self._orders_of[customer] = max(o, self._orders_of.get(customer, 0))
        self._waiting: dict[tuple[int, int], list[int]] = defaultdict(list)
        for w, d, o in sorted(self.rows["new_order"]):
            self._waiting[w, d].append(o)

    def run(self, events: pa.Table) -> list[Answer]:
        """All events in the order of their times; the answers in the order of rows."""
        rows = _plain(events).to_pylist()
        answers: list[Answer] = [(None, {})] * len(rows)
        for place in sorted(range(len(rows)), key=lambda place: rows[place]["ts"]):
            answers[place] = getattr(self, rows[place]["kind"])(rows[place])
        return answers

    def table(self, name: str) -> pa.Table:
        """As it is now, in the order of keys."""
        rows = self.rows[name]
        schema = self._schemas[name]
        plain = pa.schema([pa.field(f.name, _plain_type(f.type)) for f in schema])
        return pa.Table.from_pylist([rows[key] for key in sorted(rows)], plain).cast(schema)

    def new_order(self, event: Row) -> Answer:
        w, d, c = event["w"], event["d"], event["c"]
        wanted = list(zip(event["items"], event["supplies"], event["quantities"], strict=True))
        if any((item,) not in self.rows["item"] for item, _, _ in wanted):
            return UNUSED_ITEM, {}
        district = self.rows["district"][w, d]
        o = district["d_next_o_id"]
        district["d_next_o_id"] = o + 1
        self.rows["orders"][w, d, o] = {
            "o_w_id": w,
            "o_d_id": d,
            "o_id": o,
            "o_c_id": c,
            "o_entry_d": event["ts"],
            "o_carrier_id": 0,
            "o_ol_cnt": len(wanted),
            "o_all_local": all(supply == w for _, supply, _ in wanted),
        }
        self.rows["new_order"][w, d, o] = {
            "no_w_id": w,
            "no_d_id": d,
            "no_o_id": o,
            "no_entry_d": event["ts"],
        }
        self._waiting[w, d].append(o)
        self._orders_of[w, d, c] = o
        total = brands = 0
        for number, (item_id, supply, quantity) in enumerate(wanted, start=1):
            item, stock = self.rows["item"][item_id,], self.rows["stock"][supply, item_id]
            left = stock["s_quantity"] - quantity
            stock["s_quantity"] = left if left >= 10 else left + 91
            stock["s_ytd"] += quantity
            stock["s_order_cnt"] += 1
            stock["s_remote_cnt"] += supply != w
            amount = quantity * item["i_price"]
            self.rows["order_line"][w, d, o, number] = {
                "ol_w_id": w,
                "ol_d_id": d,
                "ol_o_id": o,
                "ol_number": number,
                "ol_i_id": item_id,
                "ol_supply_w_id": supply,
                "ol_delivery_d": 0,
                "ol_quantity": quantity,
                "ol_amount": amount,
            }
            total += amount
            brands += item["i_original"] and stock["s_original"]
        customer = self.rows["customer"][w, d, c]
        tax = 10_000 + self.rows["warehouse"][w,]["w_tax"] + district["d_tax"]
        return None, {
            "o_id": o,
            "total": total * (10_000 - customer["c_discount"]) * tax // 10**8,
            "brands": brands,
            "credit": customer["c_credit"],
        }

    def payment(self, event: Row) -> Answer:
        w, d, amount = event["w"], event["d"], event["amount"]
        c = self._customer(event["c_w"], event["c_d"], event)
        self.rows["warehouse"][w,]["w_ytd"] += amount
        self.rows["district"][w, d]["d_ytd"] += amount
        customer = self.rows["customer"][event["c_w"], event["c_d"], c]
        customer["c_balance"] -= amount
        customer["c_ytd_payment"] += amount
        customer["c_payment_cnt"] += 1
        if customer["c_credit"] == "BC":
            customer |= {"c_paid_w_id": w, "c_paid_d_id": d, "c_paid_amount": amount}
        key = (event["c_w"], event["c_d"], c, customer["c_payment_cnt"])
        values = (*key, w, d, event["ts"], amount)
        self.rows["history"][key] = dict(zip(self._schemas["history"].names, values, strict=True))
        return None, {"c_id": c, "balance": customer["c_balance"], "credit": customer["c_credit"]}

    def order_status(self, event: Row) -> Answer:
        w, d = event["w"], event["d"]
        c = self._customer(w, d, event)
        o = self._orders_of[w, d, c]
        order = self.rows["orders"][w, d, o]
        lines = [self.rows["order_line"][w, d, o, n] for n in range(1, order["o_ol_cnt"] + 1)]
        return None, {
            "c_id": c,
            "balance": self.rows["customer"][w, d, c]["c_balance"],
            "o_id": o,
            "carrier_id": order["o_carrier_id"],
            "lines": len(lines),
            "total": sum(line["ol_amount"] for line in lines),
        }

    def delivery(self, event: Row) -> Answer:
        w, delivered = event["w"], 0
        for d in range(1, 11):
            if not self._waiting[w, d]:
                continue
            o = self._waiting[w, d].pop(0)
            del self.rows["new_order"][w, d, o]
            order = self.rows["orders"][w, d, o]
            order["o_carrier_id"] = event["carrier"]
            lines = [self.rows["order_line"][w, d, o, n] for n in range(1, order["o_ol_cnt"] + 1)]
            for line in lines:
                line["ol_delivery_d"] = event["ts"]
            customer = self.rows["customer"][w, d, order["o_c_id"]]
            customer["c_balance"] += sum(line["ol_amount"] for line in lines)
            customer["c_delivery_cnt"] += 1
            delivered += 1
        return None, {"delivered": delivered}

    def stock_level(self, event: Row) -> Answer:
        w, d = event["w"], event["d"]
        after = self.rows["district"][w, d]["d_next_o_id"]
        items = set()
        for o in range(max(1, after - 20), after):
            for number in range(1, self.rows["orders"][w, d, o]["o_ol_cnt"] + 1):
                items.add(self.rows["order_line"][w, d, o, number]["ol_i_id"])
        low = sum(self.rows["stock"][w, item]["s_quantity"] < event["threshold"] for item in items)
        return None, {"low": low}

    def _customer(self, w: int, d: int, event: Row) -> int:
        """By number, or of those of a name the one in the middle by first name."""
        if event["c"]:
            return int(event["c"])
        named = self._named[w, d, event["c_last"]]
        return named[(len(named) + 1) // 2 - 1][1]


def _plain_type(type_: pa.DataType) -> pa.DataType:
    return pa.int64() if pa.types.is_timestamp(type_) else type_


def _plain(table: pa.Table) -> pa.Table:
    """Times as microseconds."""
    return table.cast(pa.schema([pa.field(f.name, _plain_type(f.type)) for f in table.schema]))
