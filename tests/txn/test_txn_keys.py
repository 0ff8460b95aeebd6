"""Keys of several columns, keys that come from rows, rows that are asked for and deleted: what each means, and its faults."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from millpond.code.tables import TableSpec
from millpond.errors import BadTransaction, BadType, WrongType
from millpond.kernels import rows
from millpond.stores.compaction import compact
from millpond.txn import TransactionSet, abort, transaction

TABLES = {
    "district": TableSpec("w long, d int", "next long", {"next": 1}),
    "orders": TableSpec("w long, d int, o long", "customer string, lines int"),
    "lines": TableSpec("w long, d int, o long, line byte", "item long, amount decimal(9,2)"),
    "last": TableSpec("customer string, day date", "o long, seen timestamp", {"o": 0, "seen": 0}),
}
DAY = datetime.date(2024, 2, 29)


@transaction(results="o long")
def order(district, orders, lines, last, w, d, customer, day, items, prices):  # type: ignore[no-untyped-def]
    o = district[w, d].next
    district[w, d].next += 1
    orders[w, d, o].customer = customer
    orders[w, d, o].lines = len(items)
    last[customer, day].o = o
    for i in range(len(items)):
        lines[w, d, o, i].item = items[i]
        lines[w, d, o, i].amount = prices[i]
        if items[i] < 0:
            abort("no such item")
    return o


@transaction(results="items long, amount decimal(12,2)")
def level(district, orders, lines, w, d):  # type: ignore[no-untyped-def]
    """The distinct items of the last orders, and what they came to."""
    seen = set()
    amount = 0
    for o in range(max(1, district[w, d].next - 20), district[w, d].next):
        if (w, d, o) in orders:
            for i in range(orders[w, d, o].lines):
                seen.add(lines[w, d, o, i].item)
                amount += lines[w, d, o, i].amount
    return len(seen), amount if len(seen) > 0 else None


@transaction
def deliver(district, orders, lines, w, d):  # type: ignore[no-untyped-def]
    """The oldest order goes, with its lines."""
    o = 1
    while (w, d, o) not in orders:
        o += 1
        if o >= district[w, d].next:
            return None
    row = orders.get((w, d, o))
    for i in range(row.lines):
        del lines[w, d, o, i]
    del orders[w, d, o]
    return o


def events(kind: str, first: int, many: list[dict[str, Any]]) -> pa.Table:
    usual = {"w": 1, "d": 2, "customer": "ann", "day": DAY, "items": [], "prices": []}
    schema = pa.schema(
        {
            "kind": pa.string(), "time": pa.int64(), "w": pa.int64(), "d": pa.int64(), "customer": pa.string(),
            "day": pa.date32(), "items": pa.list_(pa.int64()), "prices": pa.list_(pa.decimal128(7, 2)),
        }
    )  # fmt: skip
    found = [{**usual, **one, "kind": kind, "time": first + at} for at, one in enumerate(many)]
    return pa.Table.from_pylist(found, schema=schema)


@pytest.fixture(scope="module")
def shop() -> TransactionSet:
    return TransactionSet({"order": order, "level": level, "deliver": deliver}, TABLES)


def prices(*texts: str) -> list[Decimal]:
    return [Decimal(text) for text in texts]


@pytest.mark.long
def test_orders_are_numbered_read_and_deleted(shop: TransactionSet) -> None:
    stores = shop.stores()
    made = [
        {"items": [5, 6], "prices": prices("1.10", "2.25")},
        {"items": [5, -1], "prices": prices("1.10", "2.25")},
        {"customer": "bob", "items": [6], "prices": prices("0.05")},
        {"d": 3, "items": [9], "prices": prices("7.00")},
        {"d": 2**31, "items": [9], "prices": prices("7.00")},
    ]
    outcome = shop.run(events("order", 0, made), stores, threads=2)
    assert outcome.figures["plan"] == "serial"
    assert outcome.outputs["o"].to_pylist() == [1, None, 2, 1, None]
    assert outcome.outputs["reason"].to_pylist()[1] == "no such item"
    assert "does not hold" in outcome.outputs["reason"].to_pylist()[4]
    assert stores["orders"].snapshot().to_pylist() == [
        {"w": 1, "d": 2, "o": 1, "customer": "ann", "lines": 2},
        {"w": 1, "d": 2, "o": 2, "customer": "bob", "lines": 1},
        {"w": 1, "d": 3, "o": 1, "customer": "ann", "lines": 1},
    ]
    assert stores["last"].snapshot().select(["customer", "day", "o"]).to_pylist() == [
        {"customer": "ann", "day": DAY, "o": 1},
        {"customer": "bob", "day": DAY, "o": 2},
    ]
    outcome = shop.run(events("level", 10, [{}, {"d": 9}]), stores)
    assert outcome.outputs["items"].to_pylist() == [2, 0]
    assert outcome.outputs["amount"].to_pylist() == [Decimal("3.40"), None]
    was = {name: store.export() for name, store in stores.items()}
    gone = shop.run(events("deliver", 20, [{}, {}, {}]), stores)
    assert gone.outputs["r0"].to_pylist() == [1, 2, None]
    assert len(stores["lines"]) == 1
    gone.undo.put_back(stores)
    assert {name: store.export() for name, store in stores.items()} == was
    again = shop.run(events("deliver", 20, [{}, {}, {}]), stores)
    assert again.outputs == gone.outputs
    # A row that was deleted is made again, of zeros.
    more = shop.run(events("order", 30, [{"items": [1], "prices": prices("1.00")}]), stores)
    assert more.outputs["o"].to_pylist() == [3]
    for store in stores.values():
        store.validate()


def test_tables_grow_while_functions_run(shop: TransactionSet) -> None:
    """Far more rows than there was room for, some of them by one event; what they were is found again after a compaction."""
    stores = shop.stores()
    many = [{"d": at % 3, "items": list(range(100)), "prices": prices(*["0.01"] * 100)} for at in range(60)]
    outcome = shop.run(events("order", 0, many), stores)
    assert all(outcome.outputs["committed"].to_pylist())
    assert len(stores["lines"]) == 6000
    shop.run(events("deliver", 100, [{"d": at % 3} for at in range(57)]), stores)
    left = {name: store.export() for name, store in stores.items()}
    assert compact(stores.values(), above_bytes=1)
    assert {name: store.export() for name, store in stores.items()} == left
    copied = {name: store.copy(store.strings) for name, store in stores.items()}
    assert shop.run(events("level", 300, [{"d": 0}]), copied).outputs["items"].to_pylist() == [100]
    for store in stores.values():
        store.validate()


def test_functions_that_know_their_keys_keep_their_plans() -> None:
    @transaction
    def pay(district, w, d, n):  # type: ignore[no-untyped-def]
        district[w, d].next += n

    @transaction
    def clear(district, w, d):  # type: ignore[no-untyped-def]
        if (w, d) in district:
            del district[w, d]

    both = TransactionSet({"pay": pay, "clear": clear, "level": level}, TABLES)
    schema = pa.schema(
        {"kind": pa.string(), "time": pa.int64(), "w": pa.int64(), "d": pa.int64(), "n": pa.int64()}
    )
    rows_in = [
        {"kind": "clear" if at % 7 == 0 else "pay", "time": at, "w": at % 5, "d": at % 3, "n": at}
        for at in range(200)
    ]
    found = []
    for plan in ("serial", "chains", "groups", "rounds"):
        # A late function in the set rules out chains, and nothing else where it has no events.
        for program in (both, TransactionSet({"pay": pay, "clear": clear}, TABLES)):
            stores = program.stores()
            outcome = program.run(pa.Table.from_pylist(rows_in, schema), stores, threads=2, plan=plan)
            assert outcome.figures["plan"] == plan or (program is both and plan == "chains")
            found.append((outcome.outputs["reason"], stores["district"].snapshot()))
            stores["district"].validate()
    assert all(one == found[0] for one in found)
    late = both.run(pa.Table.from_pylist([*rows_in, {"kind": "level", "time": 300, "w": 1, "d": 1}], schema), both.stores(), threads=2, plan="groups")  # fmt: skip
    assert late.figures["plan"] == "serial"
    text = both.explain()
    assert "serial only: it finds its rows one by one as it runs" in text
    assert "the key of orders[w, d, o] comes from district[w, d]" in text
    assert "plan of the epoch: serial: level finds rows late; of an epoch without them, the cheapest" in text


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("orders[w, d].lines = 1", "the key of table 'orders' has 3 columns"),
        ("orders[w].lines = 1", "the key of table 'orders' has 3 columns"),
        ("district[w, d, 1].next = 1", "the key of table 'district' has 2 columns"),
        ("district[w, 'x'].next = 1", "the key 'x' is a string, the table's is a long"),
        ("x = w in district", "the key of table 'district' has 2 columns"),
        ("district[w, d].next = lines[w, d, 1, 1].amount", "is a long column, the value is a decimal2"),
        ("lines[w, d, 1, 1].amount = 0.5", "is a decimal2 column, the value is a double"),
    ],
)
def test_refused_with_the_tables(body: str, why: str) -> None:
    from millpond.code.capture import Code
    from millpond.code.tables import TransactionCode
    from millpond.txn import load

    function = load(TransactionCode(Code("f", f"def f(district, orders, lines, w, d):\n    {body}\n")))
    transactions = TransactionSet({"f": function}, TABLES)
    with pytest.raises(BadTransaction, match=why):
        transactions.run(pa.table({"time": [1], "w": [1], "d": [1]}), transactions.stores())


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (("a long, b decimal(4,2)", "x long", None), "cannot be"),
        (("long", "x decimal(19,2)", None), "cannot be decimal"),
        (("long", "x binary", None), "cannot be binary"),
        (("long", "x byte", {"x": 128}), "is no byte"),
        (("long", "x decimal(4,2)", {"x": "1.234"}), "is no decimal"),
        (("long", "x decimal(4,2)", {"x": "100"}), "is no decimal"),
        (("long", "x date", {"x": 2**31}), "is no date"),
    ],
)
def test_types_are_checked(spec: tuple[str, str, Any], why: str) -> None:
    with pytest.raises(BadType, match=why) as caught:
        TransactionSet({}, {"t": TableSpec(*spec)})
    assert caught.value.hint


def test_long_decimals_in_events_are_refused_with_a_hint(shop: TransactionSet) -> None:
    table = events("order", 0, [{}])
    wide = table.set_column(
        table.column_names.index("prices"), "prices", pa.array([[]], pa.list_(pa.decimal128(38, 18)))
    )
    stores = shop.stores()
    with pytest.raises(WrongType, match="at most 18 digits") as caught:
        shop.run(wide, stores)
    assert "cast" in str(caught.value.hint)
    assert not any(len(store) for store in stores.values())


def test_no_row_is_found_by_a_part_of_its_key() -> None:
    """Keys whose parts are the same in another order, or whose differences cancel out, are other keys."""
    stores = TransactionSet({}, TABLES).stores()
    store = stores["orders"]
    keys = [(a, b, c) for a in range(-6, 6) for b in range(-6, 6) for c in range(-6, 6)]
    assert [store.resolve_one(key) for key in keys] == list(range(len(keys)))
    assert [store.find_one(key) for key in reversed(keys)] == list(reversed(range(len(keys))))
    assert store.find_one((7, 7, 7)) == rows.NO_ROW
    store.validate()
