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


@pytest.mark.parametrize("window_bytes", [1 << 30, 0], ids=["memory", "disk"])
@pytest.mark.parametrize("aggregate", [mp.total("v"), mp.median("v")], ids=["cells", "rows"])
def test_a_sliding_window_has_one_copy_of_a_row_whatever_its_slides(
    aggregate: Any, window_bytes: int
) -> None:
    """What is sent, what the log has and what the store keeps are the same for 2 slides and for 60."""
    rng = np.random.default_rng(12)
    table = pa.table({"k": np.arange(ROWS) % 50, "t": rng.integers(0, 600, ROWS), "v": np.arange(ROWS)})
    costs: dict[int, tuple[int, int, int]] = {}
    for slides in (2, 9, 60):
        files = LossyFiles()
        with LocalPond(files, window_bytes=window_bytes) as pond:
            window = mp.sliding(10 * slides, 10)
            made = pond.window("w", key="k long", window=window, aggregate={"a": aggregate, "n": mp.count()})
            source = made.over(key="k", at="t", delay=10_000)
            before = logged(files)
            source(table, 0)
            figures = pond.metrics()["windows"]["w"]
            kept = figures["bytes"] + figures["spilled_bytes"]
            costs[slides] = figures["rows"], logged(files) - before, kept
            # Of rows at t, windows begin at each slide in (t - size, t].
            assert sum(source.finish()["n"].to_pylist()) == slides * ROWS
    few, *others = costs.values()
    assert min(few) > 0
    for cost in others:
        assert cost == pytest.approx(few, rel=0.05), costs


def logged(files: LossyFiles) -> int:
    """Bytes in the containers' logs."""
    return sum(len(inode.content) for path, inode in files._names.items() if "/containers/" in path)
