"""A source of which no rows come is left out, and counts again when some do: the other goes on, as the oracle says."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from window_driving import Shape, compare_runs, draw, oracle_rows, result_rows, sided

import millpond as mp
from millpond.pond.pond import Pond
from millpond.testing import IntervalJoinOracle, LossyFiles, WindowJoinOracle
from millpond.testing import window_aggregates as agg
from millpond.testing import window_kinds as kinds
from millpond.testing.local import LocalPond
from millpond.testing.windows import WindowOracle

SIDES = ("left", "right")
DELAY, IDLE_S = 20, 10
TYPES = {side: f"{side}_ts long, {side}_v long, {side}_w double" for side in SIDES}


def joined(pond: Pond, **how: Any) -> dict[str, Any]:
    """The right side may fall silent; the left one is always waited for."""
    join = pond.join("j", key="key long", **TYPES, **how)
    return {
        "left": join.left(at="left_ts", delay=DELAY),
        "right": join.right(at="right_ts", delay=DELAY, idle=f"{IDLE_S} seconds"),
    }


def windowed(pond: Pond, window: Any) -> dict[str, Any]:
    made = pond.window("j", key="key long", window=window, aggregate={"rows": mp.count()})
    return {
        "left": made.over(key="key", at="left_ts", delay=DELAY, name="left"),
        "right": made.over(key="key", at="right_ts", delay=DELAY, name="right", idle=f"{IDLE_S} seconds"),
    }


def rows_of(kind: kinds.Kind) -> WindowOracle:
    return WindowOracle(kind, {"rows": agg.count()}, sources=dict.fromkeys(SIDES, DELAY))


DELAYS: dict[str, Any] = {"left_delay": DELAY, "right_delay": DELAY}
CASES: dict[str, tuple[Callable[[Pond], dict[str, Any]], Callable[[], Any]]] = {
    "tumbling join": (
        lambda pond: joined(pond, window=mp.tumbling(20)),
        lambda: WindowJoinOracle(kinds.tumbling(20), **DELAYS),
    ),
    "interval join": (
        lambda pond: joined(pond, between=(-20, 30)),
        lambda: IntervalJoinOracle(-20, 30, **DELAYS),
    ),
    "tumbling": (lambda pond: windowed(pond, mp.tumbling(20)), lambda: rows_of(kinds.tumbling(20))),
    "session": (lambda pond: windowed(pond, mp.session(15)), lambda: rows_of(kinds.session(15))),
}


def fall_silent(pond: LocalPond) -> None:
    pond.coordinator._commits.leave_out_silent()
    pond._client.runtime.sleep(IDLE_S + 1)
    pond.coordinator._commits.leave_out_silent()


def results(table: pa.Table) -> list[Any]:
    return result_rows(table.drop_columns([name for name in table.column_names if name.endswith("_time")]))


@pytest.mark.parametrize("name", CASES)
def test_one_side_falls_silent_and_comes_again(name: str) -> None:
    build, oracle_of = CASES[name]
    silences = returns = late = 0
    for seed in range(3):
        pond, oracle, chance = LocalPond(LossyFiles(), containers=2), oracle_of(), random.Random(seed)
        sources = build(pond)
        given: list[list[Any]] = []
        expected: list[list[Any]] = []
        is_silent = False
        # Times of the two go their own ways: who comes back may be far behind.
        shape = Shape(sources=SIDES, epochs=14, silence=0.3, straggling=0.0, empty=0.0)
        for epoch in sided(draw(90 + seed, shape)):
            if not is_silent and chance.random() < 0.3:
                fall_silent(pond)
                expected.append(oracle.idle("right").rows)
                is_silent = True
                silences += 1
            if epoch.source == "right":
                returns += is_silent
                is_silent = False
            given.append(results(sources[epoch.source](epoch.table, epoch.number)))
            rows = oracle_rows(epoch.table, "key", f"{epoch.source}_ts")
            expected.append(oracle.epoch(epoch.number, rows, epoch.source).rows)
        given += [results(sources[side].finish()) for side in SIDES]
        expected.append(oracle.finish().rows)
        compare_runs(given, expected, each_epoch=False)
        assert sum(sources["left"].progress().late.values()) == oracle.late
        late += oracle.late
        pond.validate()
        pond.close()
    assert silences > 5
    assert returns > 5
    assert late > 5
