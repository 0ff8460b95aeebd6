"""SQLite in memory, a peer of the TPC-C benchmark, and what it shares with PostgreSQL (`tpcc_postgres`).

Both have the tables of `tpcc_inputs` with their keys, and two indexes more: customers by name, orders by customer. They
take events from Arrow tables, one transaction for each, and give their tables back as Arrow.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from millpond.apps.tpcc_inputs import KEY_SIZES

UNUSED_ITEM = "item number is not valid"
FIELDS = {
    "new_order": ("ts", "w", "d", "c", "items", "supplies", "quantities"),
    "payment": ("ts", "w", "d", "c_w", "c_d", "c", "c_last", "amount"),
    "order_status": ("w", "d", "c", "c_last"),
    "delivery": ("ts", "w", "carrier"),
    "stock_level": ("w", "d", "threshold"),
}
INDEXES = (
    "CREATE INDEX customer_name ON customer (c_w_id, c_d_id, c_last, c_first, c_id)",
    "CREATE INDEX orders_customer ON orders (o_w_id, o_d_id, o_c_id, o_id)",
)


def calls(events: pa.Table) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Kind and fields of each event; times are microseconds."""
    events = events.set_column(0, "ts", events["ts"].cast(pa.int64()))
    columns = {name: events[name].to_pylist() for name in events.column_names}
    fields = {kind: [columns[name] for name in names] for kind, names in FIELDS.items()}
    for row, kind in enumerate(columns["kind"]):
        yield kind, tuple(column[row] for column in fields[kind])


def create_table(name: str, schema: pa.Schema, types: Mapping[str, str], end: str = "") -> str:
    """The statement that makes a table; `types` by the names of Arrow's."""
    columns = [f"{field.name} {types[str(field.type)]} NOT NULL" for field in schema]
    key = ", ".join(schema.names[: KEY_SIZES[name]])
    return f"CREATE TABLE {name} ({', '.join(columns)}, PRIMARY KEY ({key})){end}"


_TYPES = {
    "int64": "INTEGER", "bool": "INTEGER", "string": "TEXT", "timestamp[us, tz=UTC]": "INTEGER"
}  # fmt: skip


class Sqlite:
    """A database in memory; the statements of each kind are prepared, those of an order's lines run as one."""

    def __init__(self, tables: Mapping[str, pa.Table]) -> None:
        self._schemas = {name: table.schema for name, table in tables.items()}
        self._database = sqlite3.connect(":memory:", isolation_level=None, cached_statements=256)
        do = self._do = self._database.execute
        self._many = self._database.executemany
        for name, table in tables.items():
            do(create_table(name, table.schema, _TYPES, " WITHOUT ROWID"))
            columns = [
                (column.cast(pa.int64()) if not pa.types.is_string(column.type) else column).to_pylist()
                for column in table.columns
            ]
            places = ", ".join("?" * len(columns))
            do("BEGIN")
            self._many(f"INSERT INTO {name} VALUES ({places})", zip(*columns, strict=True))  # noqa: S608 - our own names
            do("COMMIT")
        for index in INDEXES:
            do(index)
        do("ANALYZE")

    def run(self, events: pa.Table) -> list[tuple[Any, ...]]:
        do = self._do
        functions = {kind: getattr(self, kind) for kind in FIELDS}
        answers = []
        for kind, fields in calls(events):
            do("BEGIN")
            answer = functions[kind](*fields)
            do("COMMIT" if answer[0] is None else "ROLLBACK")
            answers.append(answer)
        return answers

    def table(self, name: str) -> pa.Table:
        schema = self._schemas[name]
        key = ", ".join(schema.names[: KEY_SIZES[name]])
        rows = self._do(f"SELECT * FROM {name} ORDER BY {key}").fetchall()  # noqa: S608 - our own names
        columns = zip(*rows, strict=True) if rows else [()] * len(schema)
        plain = [
            pa.array(column, pa.string() if pa.types.is_string(field.type) else pa.int64())
            for column, field in zip(columns, schema, strict=True)
        ]
        return pa.table(plain, schema.names).cast(schema)

    def close(self) -> None:
        self._database.close()

    def new_order(
        self, ts: int, w: int, d: int, c: int, items: list[int], supplies: list[int], quantities: list[int]
    ) -> tuple[Any, ...]:
        do = self._do
        o, d_tax = do(
            "UPDATE district SET d_next_o_id = d_next_o_id + 1 WHERE d_w_id = ? AND d_id = ?"
            " RETURNING d_next_o_id - 1, d_tax",
            (w, d),
        ).fetchone()
        (tax,) = do("SELECT w_tax FROM warehouse WHERE w_id = ?", (w,)).fetchone()
        discount, credit = do(
            "SELECT c_discount, c_credit FROM customer WHERE c_w_id = ? AND c_d_id = ? AND c_id = ?",
            (w, d, c),
        ).fetchone()
        total = brands = 0
        lines = []
        for number, (item, supply, quantity) in enumerate(zip(items, supplies, quantities, strict=True), 1):
            sold = do(
                "SELECT i_price, i_original AND s_original FROM item JOIN stock ON s_i_id = i_id"
                " WHERE i_id = ? AND s_w_id = ?",
                (item, supply),
            ).fetchone()
            if sold is None:
                return (UNUSED_ITEM,)
            amount = quantity * sold[0]
            total += amount
            brands += sold[1]
            lines.append((w, d, o, number, item, supply, quantity, amount))
        do(
            "INSERT INTO orders VALUES (?, ?, ?, ?, ?, 0, ?, ?)",
            (w, d, o, c, ts, len(items), all(supply == w for supply in supplies)),
        )
        do("INSERT INTO new_order VALUES (?, ?, ?, ?)", (w, d, o, ts))
        self._many("INSERT INTO order_line VALUES (?, ?, ?, ?, ?, ?, 0, ?, ?)", lines)
        self._many(
            "UPDATE stock SET s_quantity = s_quantity - ?1 + 91 * (s_quantity - ?1 < 10), s_ytd = s_ytd + ?1,"
            " s_order_cnt = s_order_cnt + 1, s_remote_cnt = s_remote_cnt + (?2 <> ?4) WHERE s_w_id = ?2 AND s_i_id = ?3",
            [(line[6], line[5], line[4], w) for line in lines],
        )
        return None, o, total * (10_000 - discount) * (10_000 + tax + d_tax) // 10**8, brands, credit

    def payment(
        self, ts: int, w: int, d: int, c_w: int, c_d: int, c: int, c_last: str, amount: int
    ) -> tuple[Any, ...]:
        do = self._do
        c = c or self._named(c_w, c_d, c_last)
        do("UPDATE warehouse SET w_ytd = w_ytd + ? WHERE w_id = ?", (amount, w))
        do("UPDATE district SET d_ytd = d_ytd + ? WHERE d_w_id = ? AND d_id = ?", (amount, w, d))
        balance, credit, payments = do(
            "UPDATE customer SET c_balance = c_balance - ?1, c_ytd_payment = c_ytd_payment + ?1,"
            " c_payment_cnt = c_payment_cnt + 1 WHERE c_w_id = ?2 AND c_d_id = ?3 AND c_id = ?4"
            " RETURNING c_balance, c_credit, c_payment_cnt",
            (amount, c_w, c_d, c),
        ).fetchone()
        if credit == "BC":
            do(
                "UPDATE customer SET c_paid_w_id = ?, c_paid_d_id = ?, c_paid_amount = ?"
                " WHERE c_w_id = ? AND c_d_id = ? AND c_id = ?",
                (w, d, amount, c_w, c_d, c),
            )
        do("INSERT INTO history VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (c_w, c_d, c, payments, w, d, ts, amount))
        return None, c, balance, credit

    def order_status(self, w: int, d: int, c: int, c_last: str) -> tuple[Any, ...]:
        do = self._do
        c = c or self._named(w, d, c_last)
        (balance,) = do(
            "SELECT c_balance FROM customer WHERE c_w_id = ? AND c_d_id = ? AND c_id = ?", (w, d, c)
        ).fetchone()
        o, carrier = do(
            "SELECT o_id, o_carrier_id FROM orders WHERE o_w_id = ? AND o_d_id = ? AND o_c_id = ?"
            " ORDER BY o_id DESC LIMIT 1",
            (w, d, c),
        ).fetchone()
        lines, total = do(
            "SELECT count(*), sum(ol_amount) FROM order_line WHERE ol_w_id = ? AND ol_d_id = ? AND ol_o_id = ?",
            (w, d, o),
        ).fetchone()
        return None, c, balance, o, carrier, lines, total

    def delivery(self, ts: int, w: int, carrier: int) -> tuple[Any, ...]:
        do = self._do
        delivered = 0
        for d in range(1, 11):
            (o,) = do(
                "SELECT min(no_o_id) FROM new_order WHERE no_w_id = ? AND no_d_id = ?", (w, d)
            ).fetchone()
            if o is None:
                continue
            do("DELETE FROM new_order WHERE no_w_id = ? AND no_d_id = ? AND no_o_id = ?", (w, d, o))
            (c,) = do(
                "UPDATE orders SET o_carrier_id = ? WHERE o_w_id = ? AND o_d_id = ? AND o_id = ? RETURNING o_c_id",
                (carrier, w, d, o),
            ).fetchone()
            (amount,) = do(
                "SELECT sum(ol_amount) FROM order_line WHERE ol_w_id = ? AND ol_d_id = ? AND ol_o_id = ?",
                (w, d, o),
            ).fetchone()
            do(
                "UPDATE order_line SET ol_delivery_d = ? WHERE ol_w_id = ? AND ol_d_id = ? AND ol_o_id = ?",
                (ts, w, d, o),
            )
            do(
                "UPDATE customer SET c_balance = c_balance + ?, c_delivery_cnt = c_delivery_cnt + 1"
                " WHERE c_w_id = ? AND c_d_id = ? AND c_id = ?",
                (amount, w, d, c),
            )
            delivered += 1
        return None, delivered

    def stock_level(self, w: int, d: int, threshold: int) -> tuple[Any, ...]:
        (after,) = self._do(
            "SELECT d_next_o_id FROM district WHERE d_w_id = ? AND d_id = ?", (w, d)
        ).fetchone()
        (low,) = self._do(
            "SELECT count(DISTINCT ol_i_id) FROM order_line CROSS JOIN stock ON s_w_id = ol_w_id AND s_i_id = ol_i_id"
            " WHERE ol_w_id = ? AND ol_d_id = ? AND ol_o_id >= ? AND ol_o_id < ? AND s_quantity < ?",
            (w, d, after - 20, after, threshold),
        ).fetchone()
        return None, low

    def _named(self, w: int, d: int, c_last: str) -> int:
        rows = self._do(
            "SELECT c_id FROM customer WHERE c_w_id = ? AND c_d_id = ? AND c_last = ? ORDER BY c_first, c_id",
            (w, d, c_last),
        ).fetchall()
        return int(rows[(len(rows) + 1) // 2 - 1][0])
