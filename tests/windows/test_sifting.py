"""Rows that others outdo are not sent where only the largest and smallest can be in results; and results are the same."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from window_driving import Shape, check, draw

import millpond as mp
from millpond.code.windows import Aggregate
from millpond.stores.windows.sifting import sifted
from millpond.stores.windows.whole import Rows, WholeWindows
from millpond.testing import LossyFiles
from millpond.testing import window_aggregates as agg
from millpond.testing import window_kinds as kinds
from millpond.testing.local import LocalPond
from millpond.testing.windows import WindowOracle

TYPES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "long": (pa.int64(), [-(2**63), -1, 0, 1, 2**63 - 1, None]),
    "double": (pa.float64(), [-math.inf, -0.0, 0.0, 1.5, math.inf, math.nan, None]),
    "string": (pa.string(), ["", "a", "b", "é", None]),
    "decimal": (pa.decimal128(9, 2), [Decimal("-1.50"), Decimal("0.00"), Decimal("99.99"), None]),
}


def results_of(whole: WholeWindows, values: list[pa.Array], groups: Any, rows: Any) -> list[str]:
    order, offsets = whole.order(groups[rows], rows, groups.max() + 1)
    taken = [column.take(pa.array(rows[order])) for column in values]
    return [repr(array.to_pylist()) for array in whole.results(Rows(rows[order], taken, offsets)).values()]


@pytest.mark.parametrize("name", TYPES)
def test_results_are_made_of_few_rows(name: str) -> None:
    type_, choice = TYPES[name]
    schema = pa.schema([("v", type_), ("w", pa.int64())])
    aggregates = {
        "where": Aggregate("where_largest", "v", columns=("v", "w")),
        "high": Aggregate("largest", "v"),
        "low": Aggregate("smallest", "v"),
    }
    rng = np.random.default_rng(5)
    for names in (["where"], ["high"], ["low"], ["high", "low"], ["where", "low"]):
        own = {each: aggregates[each] for each in names}
        whole = WholeWindows(schema, own)
        for share_of_nulls in (0.0, 0.9):
            picked = rng.integers(0, len(choice) - 1, 400)
            picked[rng.random(400) < share_of_nulls] = len(choice) - 1
            values = [pa.array([choice[n] for n in picked], type_), pa.array(np.arange(400))]
            groups, firsts = np.unique(rng.integers(0, 40, 400), return_index=True, return_inverse=True)[
                2:0:-1
            ]
            groups = np.ascontiguousarray(groups)
            firsts = np.array([np.flatnonzero(groups == n)[0] for n in range(groups.max() + 1)])

            needed = sifted(schema, own, values, groups, firsts)
            of_all = results_of(whole, values, groups, np.arange(400))
            assert results_of(whole, values, groups, needed) == of_all
            assert len(needed) < 300


WINDOWS: dict[str, tuple[Any, kinds.Kind]] = {
    "tumbling": (mp.tumbling(20), kinds.tumbling(20)),
    "sliding": (mp.sliding(50, 15), kinds.sliding(50, 15)),
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("firing", [{}, {"lateness": 60, "emit": "update"}], ids=["once", "updated"])
def test_windows_of_the_largest_answer_as_the_oracle(name: str, firing: dict[str, Any]) -> None:
    window, kind = WINDOWS[name]
    pond = LocalPond(LossyFiles(), containers=2, slices=4)
    made = pond.window(
        "w", key="key long", window=window, aggregate={"best": mp.where_largest("v", "w")}, **firing
    )
    oracle = WindowOracle(kind, {"best": agg.where_largest("v", "w")}, sources={"feed": 10}, **firing)
    check({"feed": made.over(key="key", at="ts", delay=10, name="feed")}, oracle, draw(7, Shape(rows=60)))
    taken_in = pond.metrics()["windows"]["w"]["rows"]
    assert 0 < taken_in < 0.7 * oracle.rows_seen
    assert "no others can be in results" in made.explain()
    pond.close()
