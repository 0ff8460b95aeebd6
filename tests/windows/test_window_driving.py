"""What compares operators with the oracle sees every difference, and none where there is none."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from window_driving import (
    OracleOperator,
    Shape,
    check,
    compare,
    compare_runs,
    difference,
    draw,
    oracle_rows,
    run_oracle,
    sided,
)

from millpond.testing import IntervalJoinOracle, WindowJoinOracle
from millpond.testing import window_aggregates as agg
from millpond.testing.window_kinds import Kind, session, tumbling
from millpond.testing.windows import WindowOracle

SCHEMA = pa.schema(
    {
        "window_start": pa.int64(),
        "window_end": pa.int64(),
        "key": pa.int64(),
        "rows": pa.int64(),
        "mean": pa.float64(),
        "all": pa.list_(pa.int64()),
    }
)
VALUES = {"v": pa.int64(), "w": pa.float64()}
UPDATES = SCHEMA.append(pa.field("session_id", pa.int64())).append(pa.field("retracted", pa.bool_()))


def oracle(window: Kind, emit: Any = "close", sources: Any = None) -> WindowOracle:
    aggregate = {"rows": agg.count(), "mean": agg.mean("w"), "all": agg.collect("v")}
    return WindowOracle(window, aggregate, emit=emit, lateness=30, sources=sources or {"feed": 10})


@pytest.mark.parametrize("keys", ["few", "many", "hot"])
def test_an_oracle_answers_as_an_oracle(keys: Any) -> None:
    epochs = draw(1, Shape(keys=keys))
    for window in (tumbling(20), session(15)):
        check(OracleOperator(oracle(window), SCHEMA), oracle(window), epochs)


def test_updates_of_sessions_may_have_other_ids() -> None:
    epochs = draw(2, Shape(epochs=20, rows=15))
    driven = oracle(session(15), "update")
    driven.ids = 1000
    check(OracleOperator(driven, UPDATES), oracle(session(15), "update"), epochs)


def test_several_sources() -> None:
    sources = {"left": 10, "right": 20}
    epochs = draw(3, Shape(sources=("left", "right")))
    shared = oracle(tumbling(20), sources=sources)
    operators = {name: OracleOperator(shared, SCHEMA, name) for name in sources}
    check(operators, oracle(tumbling(20), sources=sources), epochs)


def test_draws_repeat_and_are_what_was_asked_for() -> None:
    shape = Shape(keys="hot", key_type="string", times="timestamp", rows=200, epochs=12)
    epochs = draw(4, shape)
    assert all(a.table.equals(b.table) for a, b in zip(epochs, draw(4, shape), strict=True))
    assert [epoch.number for epoch in epochs] == list(range(12))
    rows = [row for epoch in epochs for row in oracle_rows(epoch.table)]
    times = [time for _, time, _ in rows]
    assert times != sorted(times)
    assert isinstance(times[0], int)
    assert 0.6 < sum(key == "key 0" for key, _, _ in rows) / len(rows) < 0.9
    assert any(row["v"] is None for _, _, row in rows)


ROW = {"window_start": 0, "window_end": 10, "key": 1, "rows": 3, "mean": 0.5, "all": [1, None]}


@pytest.mark.parametrize(
    ("other", "word"),
    [
        ([], "missing"),
        ([ROW, ROW], "unwanted"),
        ([ROW | {"rows": 4}], "rows is 4, expected 3"),
        ([ROW | {"mean": 0.50001}], "mean is 0.50001"),
        ([ROW | {"mean": None}], "mean is None"),
        ([ROW | {"all": [None, 1]}], "all is"),
        ([ROW | {"key": 2}], "unwanted"),
        ([ROW | {"more": 2}], "more too many"),
        ([{name: value for name, value in ROW.items() if name != "rows"}], "no rows"),
        ([ROW | {"rows": 3.0}], "rows is 3.0"),
    ],
)
def test_a_difference_is_seen_and_told(other: list[Any], word: str) -> None:
    with pytest.raises(AssertionError, match=word):
        compare(other, [ROW])
    with pytest.raises(AssertionError, match=word):
        compare_runs([other], [[ROW]])


def test_order_and_last_digits_do_not_count() -> None:
    other = ROW | {"key": 2}
    assert difference([other, ROW | {"mean": 0.5 + 1e-15}], [ROW, other]) == []


def test_ids_that_change_or_are_shared_are_seen() -> None:
    first, second = ROW | {"session_id": 1}, ROW | {"key": 2, "session_id": 2}
    compare_runs([[first], [second]], [[first | {"session_id": 8}], [second | {"session_id": 9}]])
    with pytest.raises(AssertionError, match="session_id is 2"):
        compare_runs([[first], [first | {"session_id": 2}]], [[first], [first]])
    with pytest.raises(AssertionError, match="two sessions"):
        compare_runs([[first], [second | {"session_id": 1}]], [[first], [second]])


def test_joins_are_driven_by_sides() -> None:
    epochs = sided(draw(5, Shape(sources=("left", "right"), epochs=5)))
    assert {*epochs[0].table.column_names} >= {"key", f"{epochs[0].source}_ts"}
    times = {"left_ts": pa.int64(), "right_ts": pa.int64()}
    values = {f"{side}_{name}": kind for side in ("left", "right") for name, kind in VALUES.items()}
    schema = pa.schema({"key": pa.int64()} | times | values)
    window = pa.schema(
        {
            "window_start": pa.int64(),
            "window_end": pa.int64(),
            **dict(zip(schema.names, schema.types, strict=True)),
        }
    )

    def windowed() -> WindowJoinOracle:
        return WindowJoinOracle(tumbling(20), left_delay=30, right_delay=30)

    def near() -> IntervalJoinOracle:
        return IntervalJoinOracle(-5, 5, left_delay=30, right_delay=30)

    for make, columns in ((windowed, window), (near, schema)):
        shared = make()
        results = run_oracle(make(), epochs)
        assert sum(map(len, results)) > 20
        check({side: OracleOperator(shared, columns, side) for side in ("left", "right")}, make(), epochs)
