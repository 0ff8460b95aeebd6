"""Tables and events of TPC-C (revision 5.11), scaled by warehouses: seeded, columnar, as clauses 2 and 4.3.3 have them.

Money is in cents, taxes and discounts in ten-thousandths, times in timestamps. What the specification leaves null (the
carrier and the delivery of an order that waits) is 0. Text that no transaction looks at is left out: addresses, phone
numbers, C_DATA, H_DATA and S_DIST; I_DATA and S_DATA are whether they have the word ORIGINAL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Longs = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

DISTRICTS = 10
# Of each table, how many of its first columns are its key.
KEY_SIZES = {
    "warehouse": 1, "district": 2, "customer": 3, "history": 4, "orders": 3, "new_order": 3, "order_line": 4,
    "item": 1, "stock": 2,
}  # fmt: skip
MIX = {"new_order": 0.45, "payment": 0.43, "order_status": 0.04, "delivery": 0.04, "stock_level": 0.04}
SYLLABLES = ("BAR", "OUGHT", "ABLE", "PRI", "PRES", "ESE", "ANTI", "CALLY", "ATION", "EING")
TIME = pa.timestamp("us", tz="UTC")
START_US = 1_767_225_600_000_000  # 2026-01-01
STEP_US = 1_000
# The constants of NURand, of the load and of a run: for last names they lie 65 to 119 apart, but neither 96 nor 112.
NAMES_LOADED, NAMES_RUN, CUSTOMERS_RUN, ITEMS_RUN = 123, 223, 259, 7_911


@dataclass(frozen=True)
class Scale:
    """How many rows. The specification's own numbers, but for the warehouses, are the defaults."""

    warehouses: int = 1
    items: int = 100_000
    customers: int = 3_000  # of a district, and as many orders to begin with

    @property
    def delivered(self) -> int:
        """Orders of each district that have been delivered to begin with: 2,100 of 3,000."""
        return self.customers * 7 // 10

    @property
    def names(self) -> int:
        """Different last names in a district. Every one of them is somebody's."""
        return min(1_000, max(1, self.customers // 3))


def last_names(numbers: Longs) -> pa.Array:
    """The names of numbers below 1,000: three syllables, one for each digit."""
    names = [SYLLABLES[n // 100] + SYLLABLES[n // 10 % 10] + SYLLABLES[n % 10] for n in range(1_000)]
    return pa.array(names).take(pa.array(numbers))


def nurand(rng: np.random.Generator, a: int, low: int, high: int, c: int, size: int) -> Longs:
    """Numbers from `low` to `high`, some of them more frequent than others."""
    either = rng.integers(0, a, size, endpoint=True) | rng.integers(low, high, size, endpoint=True)
    return np.asarray((either + c) % (high - low + 1) + low)


def population(scale: Scale, seed: int = 1) -> dict[str, pa.Table]:
    """The tables to begin with: the columns of the key first, rows in the order of keys."""
    rng = np.random.default_rng(seed)
    warehouses, districts = scale.warehouses, scale.warehouses * DISTRICTS
    w_ids = np.arange(1, warehouses + 1)
    d_w_ids, d_ids = np.repeat(w_ids, DISTRICTS), np.tile(np.arange(1, DISTRICTS + 1), warehouses)
    paid = 10_00 * scale.customers  # in each district: ten by each customer
    customers = _customers(rng, scale, d_w_ids, d_ids)
    orders, lines = _orders(rng, scale, d_w_ids, d_ids)
    waiting = orders.filter(pa.array(np.asarray(orders["o_id"]) > scale.delivered))
    stocks = warehouses * scale.items
    return {
        "warehouse": _table(
            w_id=w_ids,
            w_name=_words(rng, warehouses, 6),
            w_tax=rng.integers(0, 2_000, warehouses, endpoint=True),
            w_ytd=np.full(warehouses, DISTRICTS * paid),
        ),
        "district": _table(
            d_w_id=d_w_ids,
            d_id=d_ids,
            d_name=_words(rng, districts, 6),
            d_tax=rng.integers(0, 2_000, districts, endpoint=True),
            d_ytd=np.full(districts, paid),
            d_next_o_id=np.full(districts, scale.customers + 1),
        ),
        "customer": customers,
        "history": _table(
            h_c_w_id=customers["c_w_id"],
            h_c_d_id=customers["c_d_id"],
            h_c_id=customers["c_id"],
            h_number=np.ones(len(customers), np.int64),
            h_w_id=customers["c_w_id"],
            h_d_id=customers["c_d_id"],
            h_date=_times(np.full(len(customers), START_US)),
            h_amount=np.full(len(customers), 10_00),
        ),
        "orders": orders,
        "new_order": _table(
            no_w_id=waiting["o_w_id"],
            no_d_id=waiting["o_d_id"],
            no_o_id=waiting["o_id"],
            no_entry_d=waiting["o_entry_d"],
        ),
        "order_line": lines,
        "item": _table(
            i_id=np.arange(1, scale.items + 1),
            i_name=_words(rng, scale.items, 14),
            i_price=rng.integers(1_00, 100_00, scale.items, endpoint=True),
            i_original=rng.random(scale.items) < 0.1,
        ),
        "stock": _table(
            s_w_id=np.repeat(w_ids, scale.items),
            s_i_id=np.tile(np.arange(1, scale.items + 1), warehouses),
            s_quantity=rng.integers(10, 100, stocks, endpoint=True),
            s_ytd=np.zeros(stocks, np.int64),
            s_order_cnt=np.zeros(stocks, np.int64),
            s_remote_cnt=np.zeros(stocks, np.int64),
            s_original=rng.random(stocks) < 0.1,
        ),
    }


def _customers(rng: np.random.Generator, scale: Scale, d_w_ids: Longs, d_ids: Longs) -> pa.Table:
    per, count = scale.customers, scale.customers * len(d_ids)
    numbers = nurand(rng, 255, 0, scale.names - 1, NAMES_LOADED, count).reshape(len(d_ids), per)
    numbers[:, : scale.names] = np.arange(scale.names)
    zeros = np.zeros(count, np.int64)
    return _table(
        c_w_id=np.repeat(d_w_ids, per),
        c_d_id=np.repeat(d_ids, per),
        c_id=np.tile(np.arange(1, per + 1), len(d_ids)),
        c_first=_words(rng, count, 12),
        c_last=last_names(numbers.ravel()),
        c_credit=pa.array(["GC", "BC"]).take(pa.array((rng.random(count) < 0.1).astype(np.int64))),
        c_discount=rng.integers(0, 5_000, count, endpoint=True),
        c_balance=np.full(count, -10_00),
        c_ytd_payment=np.full(count, 10_00),
        c_payment_cnt=zeros + 1,
        c_delivery_cnt=zeros,
        # Of a customer with bad credit: the latest payment, which the specification writes into C_DATA.
        c_paid_w_id=zeros,
        c_paid_d_id=zeros,
        c_paid_amount=zeros,
    )


def _orders(
    rng: np.random.Generator, scale: Scale, d_w_ids: Longs, d_ids: Longs
) -> tuple[pa.Table, pa.Table]:
    per, count = scale.customers, scale.customers * len(d_ids)
    w_ids, own_d_ids = np.repeat(d_w_ids, per), np.repeat(d_ids, per)
    o_ids = np.tile(np.arange(1, per + 1), len(d_ids))
    is_delivered = o_ids <= scale.delivered
    sizes = rng.integers(5, 15, count, endpoint=True)
    orders = _table(
        o_w_id=w_ids,
        o_d_id=own_d_ids,
        o_id=o_ids,
        o_c_id=1 + np.concatenate([rng.permutation(per) for _ in d_ids]),
        o_entry_d=_times(np.full(count, START_US)),
        o_carrier_id=np.where(is_delivered, rng.integers(1, 10, count, endpoint=True), 0),
        o_ol_cnt=sizes,
        o_all_local=np.ones(count, np.bool_),
    )
    place = np.repeat(np.arange(count), sizes)
    total = len(place)
    lines = _table(
        ol_w_id=w_ids[place],
        ol_d_id=own_d_ids[place],
        ol_o_id=o_ids[place],
        ol_number=_numbered(sizes),
        ol_i_id=rng.integers(1, scale.items, total, endpoint=True),
        ol_supply_w_id=w_ids[place],
        ol_delivery_d=_times(np.where(is_delivered[place], START_US, 0)),
        ol_quantity=np.full(total, 5),
        ol_amount=np.where(is_delivered[place], 0, rng.integers(1, 9_999_99, total, endpoint=True)),
    )
    return orders, lines


def events(count: int, scale: Scale, seed: int = 2) -> pa.Table:
    """`count` transactions of the mix, one each millisecond, as columns that any kind may have; others have nulls.

    A customer that is chosen by name has the number 0, one that is chosen by number the name "".
    """
    rng = np.random.default_rng(seed)
    share = np.cumsum(list(MIX.values()))
    kind = np.searchsorted(share, rng.random(count) * share[-1], side="right")
    is_order, is_payment, is_status, is_delivery, is_level = (kind == number for number in range(len(MIX)))
    w = rng.integers(1, scale.warehouses, count, endpoint=True)
    d = rng.integers(1, DISTRICTS, count, endpoint=True)
    is_named = (is_payment | is_status) & (rng.random(count) < 0.6)
    names = last_names(nurand(rng, 255, 0, scale.names - 1, NAMES_RUN, count))
    c = nurand(rng, 1_023, 1, scale.customers, CUSTOMERS_RUN, count)
    of_customer = is_order | is_payment | is_status
    away = is_payment & (rng.random(count) < 0.15) & (scale.warehouses > 1)
    columns = {
        "ts": _times(START_US + STEP_US * np.arange(1, count + 1)),
        "kind": pa.array(list(MIX)).take(pa.array(kind)),
        "w": pa.array(w.astype(np.int32)),
        "d": _only(d, ~is_delivery),
        "c_w": _only(np.where(away, _others(rng, w, scale.warehouses), w), is_payment),
        "c_d": _only(np.where(away, rng.integers(1, DISTRICTS, count, endpoint=True), d), is_payment),
        "c": _only(np.where(is_named, 0, c), of_customer),
        "c_last": _where(names, is_named, is_payment | is_status),
        "amount": _only(rng.integers(1_00, 5_000_00, count, endpoint=True), is_payment),
        "carrier": _only(rng.integers(1, 10, count, endpoint=True), is_delivery),
        "threshold": _only(rng.integers(10, 20, count, endpoint=True), is_level),
    }
    return pa.table(columns | _order_lines(rng, scale, w, is_order))


def _order_lines(rng: np.random.Generator, scale: Scale, w: Longs, is_order: Flags) -> dict[str, pa.Array]:
    """The lines of each order as lists. One order in a hundred ends with an item that does not exist."""
    sizes = np.where(is_order, rng.integers(5, 15, len(w), endpoint=True), 0)
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    items = nurand(rng, 8_191, 1, scale.items, ITEMS_RUN, total)
    fails = is_order & (rng.random(len(w)) < 0.01)
    items[ends[fails] - 1] = scale.items + 1
    home = np.repeat(w, sizes)
    away = (rng.random(total) < 0.01) & (scale.warehouses > 1)
    offsets = pa.array(
        np.concatenate([[0], ends]).astype(np.int32), mask=np.concatenate([~is_order, [False]])
    )
    lists = {
        "items": items,
        "supplies": np.where(away, _others(rng, home, scale.warehouses), home),
        "quantities": rng.integers(1, 10, total, endpoint=True),
    }
    return {
        name: pa.ListArray.from_arrays(offsets, pa.array(values.astype(np.int32)))
        for name, values in lists.items()
    }


def _others(rng: np.random.Generator, w: Longs, warehouses: int) -> Longs:
    """Another warehouse than each of these; where there is but one, that one."""
    return np.asarray((w - 1 + rng.integers(1, max(warehouses, 2), len(w))) % warehouses + 1)


def _numbered(sizes: Longs) -> Longs:
    """1, 2, ... for each group of so many rows."""
    starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.asarray(np.arange(1, int(sizes.sum()) + 1) - starts)


def _words(rng: np.random.Generator, count: int, digits: int) -> pa.Array:
    return pa.array(rng.integers(10 ** (digits - 1), 10**digits, count)).cast(pa.string())


def _times(microseconds: Longs) -> pa.Array:
    return pa.array(microseconds).cast(TIME)


def _only(values: Longs, there: Flags) -> pa.Array:
    return pa.array(values.astype(np.int32), mask=~there)


def _where(names: pa.Array, is_named: Flags, there: Flags) -> pa.Array:
    return pc.if_else(
        pa.array(there), pc.if_else(pa.array(is_named), names, ""), pa.scalar(None, pa.string())
    )


def _table(**columns: Any) -> pa.Table:
    return pa.table(columns).combine_chunks()
