"""Where aggregates are a few numbers, a worker sends a row for each key and pane, or run of a session, and not each row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import millpond as mp
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

KEYS, ROWS = 5, 2_000


def assign(time: int) -> list[tuple[int, int]]:
    return [(time // 100 * 100, time // 100 * 100 + 150), (0, 1000)]


def gap(v: int) -> int:
    return 20 + v * 0


# Times are those of 4 bursts, at 0, 100, 200 and 300, each 10 long: so many cells are there of a key.
WINDOWS: dict[str, tuple[Any, int]] = {
    "tumbling": (mp.tumbling(100), 4),
    "tumbling that has all": (mp.tumbling(1000), 1),
    "sliding": (mp.sliding(200, 100), 4),
    "sliding unevenly": (mp.sliding(250, 100), 4),
    "session": (mp.session(20), 4),
    "session that has all": (mp.session(200), 1),
    "session function": (mp.session(gap), 4),
    "everything": (mp.everything(), 1),
    "assigned": (mp.windows(assign), 5),
}


@pytest.mark.parametrize("disorder", [False, True])
@pytest.mark.parametrize("name", WINDOWS)
def test_rows_become_cells_before_they_are_sent(name: str, disorder: bool) -> None:
    window, cells = WINDOWS[name]
    rng = np.random.default_rng(11)
    # One burst behind the other, and in each of them in disorder; or all of it in disorder.
    bursts = rng.integers(0, 4, ROWS) if disorder else np.arange(ROWS) * 4 // ROWS
    keys, times = np.arange(ROWS) % KEYS, bursts * 100 + rng.integers(0, 10, ROWS)
    table = pa.table({"k": keys, "t": times, "v": np.ones(ROWS, np.int64)})
    aggregate = {"rows": mp.count(), "total": mp.total("v"), "mean": mp.mean("v"), "top": mp.top(2, "v")}
    with LocalPond(LossyFiles(), containers=2) as pond:
        made = pond.window("w", key="k long", window=window, aggregate=aggregate)
        source = made.over(key="k", at="t", delay=1000)
        source(table, 0)
        taken_in = pond.metrics()["windows"]["w"]["rows"]
        # What counts is what they stand for.
        fired = source.finish()
        copies = {"sliding": 2, "sliding unevenly": 3, "assigned": 2}.get(name, 1)
        assert sum(fired["rows"].to_pylist()) == copies * ROWS
        assert fired["total"].equals(fired["rows"])
        pond.validate()
    assert taken_in == KEYS * cells or (disorder and taken_in < 3 * KEYS * cells)
