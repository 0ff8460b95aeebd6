"""Sessions whose rows say how far they reach, by a column or by a function, answer as the oracle does."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from reopening import Disturbed
from test_window_operator import CELLS, WHOLE, over
from window_driving import Epoch, Shape, check, draw

import millpond as mp
from millpond.testing import window_kinds as kinds
from millpond.testing.windows import WindowOracle


def reach(gap: int) -> int:
    return 2 * gap - 1


def by_two(gap: int, v: int | None) -> int:
    return gap if v is None or v < 0 else gap + 10


def ends(gap: int) -> bool:
    return gap > 18


WINDOWS: dict[str, tuple[Any, kinds.Kind]] = {
    "column": (mp.session(column="gap"), kinds.session("gap")),
    "column touching": (
        mp.session(column="gap", touching=True),
        kinds.session("gap", touching=True),
    ),
    "function": (mp.session(reach), kinds.session(lambda row: reach(row["gap"]))),
    "function of nulls": (mp.session(by_two), kinds.session(lambda row: by_two(row["gap"], row["v"]))),
    "column, cut": (mp.session(column="gap", longest=40), kinds.session("gap", longest=40)),
    "function, that ends": (
        mp.session(reach, ends_when=ends),
        kinds.session(lambda row: reach(row["gap"]), ends_when=lambda row: ends(row["gap"])),
    ),
}


def with_gaps(epochs: list[Epoch]) -> list[Epoch]:
    """Of 1 to 20, whatever else the row is: some reach over many rows behind them."""
    return [
        epoch._replace(
            table=epoch.table.append_column(
                "gap", pa.array([1 + time * 7 % 20 for time in epoch.table["ts"].to_pylist()], pa.int64())
            )
        )
        for epoch in epochs
    ]


@pytest.mark.parametrize("window_bytes", [None, 0], ids=["memory", "disk"])
@pytest.mark.parametrize("aggregates", [CELLS, WHOLE], ids=["cells", "rows"])
@pytest.mark.parametrize("name", WINDOWS)
def test_sessions_of_rows_with_gaps_of_their_own(
    name: str, aggregates: Any, window_bytes: int | None
) -> None:
    window, kind = WINDOWS[name]
    ours, theirs = aggregates
    driven = Disturbed(over(window, ours, {"feed": 10}), every=3, window_bytes=window_bytes)
    oracle = WindowOracle(kind, theirs, sources={"feed": 10})
    shape = Shape(epochs=10, rows=60, keys="few" if window_bytes is None else "hot")
    check(driven.sources, oracle, with_gaps(draw(81, shape)))
    assert driven.pond.window("w").progress().late == {"feed": oracle.late}
    driven.pond.close()
