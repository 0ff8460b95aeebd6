"""Online bidding (TStream, sections 2 and 6.1): buyers bid for items whose sellers alter prices and top up stocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

import millpond as mp
from millpond.apps.transaction_demo import KEYS, RATE, SECONDS, Application, show
from millpond.apps.transaction_events import Spread, kinds_of, lists, only, skewed, spread
from millpond.code.tables import TableSpec

TABLES = {
    "items": TableSpec(key="long", value="price long, stock long", default={"price": 100, "stock": 1_000})
}


@mp.transaction(results="paid")
def bid(items: Any, item: int, price: int, quantity: int) -> Any:
    if price < items[item].price:
        mp.abort("bid too low")
    if items[item].stock < quantity:
        mp.abort("sold out")
    items[item].stock -= quantity
    return items[item].price * quantity


@mp.transaction
def alter(items: Any, ids: list[int], numbers: list[int]) -> None:
    for item, price in zip(ids, numbers):  # noqa: B905 - both have one length
        items[item].price = price


@mp.transaction
def top(items: Any, ids: list[int], numbers: list[int]) -> None:
    for item, quantity in zip(ids, numbers):  # noqa: B905 - both have one length
        items[item].stock += quantity


KINDS = {"bid": bid, "alter": alter, "top": top}


def events(
    count: int,
    *,
    keys: int = 10_000,
    skew: float = 0.6,
    length: int = 20,
    partitions: Spread = Spread(),  # noqa: B008 - immutable
    seed: int = 1,
) -> pa.Table:
    """Six bids to one alter and one top, which touch `length` items each; `ts` goes up by one."""
    rng = np.random.default_rng(seed)
    kind, names = kinds_of(rng, count, {"bid": 6.0, "alter": 1.0, "top": 1.0})
    bids = kind == 0
    many = count - int(bids.sum())
    asked = spread(rng, skewed(rng, (many, length), keys, skew), keys, partitions)
    numbers = rng.integers(50, 150, (many, length))  # prices
    numbers[kind[~bids] == 2] //= 5  # quantities
    columns = {
        "ts": pa.array(np.arange(count)),
        "kind": names,
        "item": only(skewed(rng, count, keys, skew), bids),
        "price": only(rng.integers(80, 200, count), bids),
        "quantity": only(rng.integers(1, 100, count), bids),
        "ids": lists(asked, ~bids),
        "numbers": lists(numbers, ~bids),
    }
    return pa.table(columns)


def run(seconds: int = SECONDS, rate: int = RATE, keys: int = KEYS) -> bool:
    """`seconds` epochs of `rate` events; True if every outcome is that of plain Python."""
    return show(Application("bidding", TABLES, KINDS, events), seconds, rate, keys)
