"""Toll processing (TStream, section 6.1; Linear Road): the toll of a road segment depends on how busy it is.

As in the paper, a segment's statistics are those of all reports so far, not of the last minutes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

import millpond as mp
from millpond.apps.transaction_demo import RATE, SECONDS, Application, show
from millpond.apps.transaction_events import skewed
from millpond.code.tables import TableSpec

TABLES = {
    "speeds": TableSpec(
        key="long", value="average double, reports long", default={"average": 0.0, "reports": 0}
    ),
    "vehicles": TableSpec(key="long", value="count long", default={"count": 0}),
}


@mp.transaction(results="toll")
def report(speeds: Any, vehicles: Any, segment: int, speed: float, entered: bool) -> Any:
    speeds[segment].reports += 1
    speeds[segment].average += (speed - speeds[segment].average) / speeds[segment].reports
    if entered:
        vehicles[segment].count += 1
    if speeds[segment].average >= 40.0 or vehicles[segment].count <= 50:
        return 0
    return 2 * (vehicles[segment].count - 50) ** 2


KINDS = {"report": report}


def events(count: int, *, keys: int = 100, skew: float = 0.2, seed: int = 1) -> pa.Table:
    """Position reports of vehicles on `keys` segments; a third have just entered theirs; `ts` goes up by one."""
    rng = np.random.default_rng(seed)
    segment = skewed(rng, count, keys, skew)
    usual = rng.uniform(20.0, 80.0, keys)
    columns = {
        "ts": pa.array(np.arange(count)),
        "kind": pa.array(["report"]).take(pa.array(np.zeros(count, np.int64))),
        "segment": pa.array(segment),
        "speed": pa.array(usual[segment] + rng.normal(0.0, 10.0, count)),
        "entered": pa.array(rng.random(count) < 1 / 3),
    }
    return pa.table(columns)


def run(seconds: int = SECONDS, rate: int = RATE, keys: int = 100) -> bool:
    """`seconds` epochs of `rate` events; True if every outcome is that of plain Python."""
    return show(Application("tolls", TABLES, KINDS, events), seconds, rate, keys)
