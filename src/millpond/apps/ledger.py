"""A streaming ledger (TStream, section 6.1): money and assets change hands, all of a transfer or nothing of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

import millpond as mp
from millpond.apps.transaction_demo import KEYS, RATE, SECONDS, Application, show
from millpond.apps.transaction_events import Spread, kinds_of, only, skewed, spread
from millpond.code.tables import TableSpec

TABLES = {
    "accounts": TableSpec(key="long", value="balance long", default={"balance": 1_000}),
    "assets": TableSpec(key="long", value="amount long", default={"amount": 1_000}),
}


@mp.transaction(results="balance, left")
def transfer(
    accounts: Any, assets: Any, src: int, dst: int, src_asset: int, dst_asset: int, money: int, units: int
) -> Any:
    if accounts[src].balance < money:
        mp.abort("insufficient funds")
    if assets[src_asset].amount < units:
        mp.abort("not enough assets")
    accounts[src].balance -= money
    accounts[dst].balance += money
    assets[src_asset].amount -= units
    assets[dst_asset].amount += units
    return accounts[src].balance, assets[src_asset].amount


@mp.transaction
def deposit(accounts: Any, assets: Any, dst: int, dst_asset: int, money: int, units: int) -> None:
    accounts[dst].balance += money
    assets[dst_asset].amount += units


KINDS = {"transfer": transfer, "deposit": deposit}


def events(
    count: int,
    *,
    keys: int = 10_000,
    skew: float = 0.6,
    transfer_ratio: float = 0.5,
    partitions: Spread = Spread(),  # noqa: B008 - immutable
    seed: int = 1,
) -> pa.Table:
    """Transfers, which touch four records, and deposits, which touch two; `ts` goes up by one."""
    rng = np.random.default_rng(seed)
    kind, names = kinds_of(rng, count, {"transfer": transfer_ratio, "deposit": 1.0 - transfer_ratio})
    asked = spread(rng, skewed(rng, (count, 4), keys, skew), keys, partitions)
    dst, dst_asset, src, src_asset = np.ascontiguousarray(asked.T)
    columns = {
        "ts": pa.array(np.arange(count)),
        "kind": names,
        "src": only(src, kind == 0),
        "dst": pa.array(dst),
        "src_asset": only(src_asset, kind == 0),
        "dst_asset": pa.array(dst_asset),
        "money": pa.array(rng.integers(1, 100, count)),
        "units": pa.array(rng.integers(1, 100, count)),
    }
    return pa.table(columns)


def run(seconds: int = SECONDS, rate: int = RATE, keys: int = KEYS) -> bool:
    """`seconds` epochs of `rate` events; True if every outcome is that of plain Python."""
    return show(Application("ledger", TABLES, KINDS, events), seconds, rate, keys)
