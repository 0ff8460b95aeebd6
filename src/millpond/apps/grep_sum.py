"""Grep and sum (TStream, section 6.1): transactions that read, or write, a number of records at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

import millpond as mp
from millpond.apps.transaction_demo import KEYS, RATE, SECONDS, Application, show
from millpond.apps.transaction_events import Spread, kinds_of, lists, only, skewed, spread
from millpond.code.tables import TableSpec

TABLES = {"records": TableSpec(key="long", value="number long", default={"number": 0})}


@mp.transaction(results="total")
def read(records: Any, keys: list[int]) -> Any:
    total = 0
    for key in keys:
        total += records[key].number
    return total


@mp.transaction
def write(records: Any, keys: list[int], number: int) -> None:
    for place, key in enumerate(keys):
        records[key].number = number + place


KINDS = {"read": read, "write": write}


def events(
    count: int,
    *,
    keys: int = 10_000,
    skew: float = 0.6,
    length: int = 10,
    read_ratio: float = 0.5,
    partitions: Spread = Spread(),  # noqa: B008 - immutable
    seed: int = 1,
) -> pa.Table:
    """Events with `length` keys each, so many of them reads; `ts` goes up by one."""
    rng = np.random.default_rng(seed)
    kind, names = kinds_of(rng, count, {"read": read_ratio, "write": 1.0 - read_ratio})
    asked = spread(rng, skewed(rng, (count, length), keys, skew), keys, partitions)
    columns = {
        "ts": pa.array(np.arange(count)),
        "kind": names,
        "keys": lists(asked, np.ones(count, np.bool_)),
        "number": only(rng.integers(0, 1_000_000, count), kind == 1),
    }
    return pa.table(columns)


def run(seconds: int = SECONDS, rate: int = RATE, keys: int = KEYS) -> bool:
    """`seconds` epochs of `rate` events; True if every outcome is that of plain Python."""
    return show(Application("grep_sum", TABLES, KINDS, events), seconds, rate, keys)
