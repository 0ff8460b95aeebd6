"""Joins of two streams answer as the oracles do, epoch by epoch, also from what the disk kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from reopening import Disturbed
from window_driving import Operator, Shape, check, draw, sided

import millpond as mp
from millpond.errors import (
    BadOption,
    BadType,
    LateRows,
    MillpondError,
    SchemaMismatch,
    UnknownResident,
    UpdaterFinished,
    WrongColumn,
    WrongType,
)
from millpond.pond.pond import Pond
from millpond.stores.keys import Keys
from millpond.stores.windows.intervals import TimedRows
from millpond.stores.windows.overlay import memory_rows
from millpond.testing import IntervalJoinOracle, LossyFiles, WindowJoinOracle
from millpond.testing import window_kinds as kinds
from millpond.testing.local import LocalPond
from millpond.wire.base import LOCAL_QUERY

SOURCES = ("left", "right")
DELAYS = {"left": 10, "right": 25}
WINDOWS: dict[str, tuple[Any, kinds.Kind]] = {
    "tumbling": (mp.tumbling(20), kinds.tumbling(20)),
    "tumbling with an offset": (mp.tumbling(20, offset=7), kinds.tumbling(20, 7)),
    "sliding": (mp.sliding(60, 20), kinds.sliding(60, 20)),
    "sliding unevenly": (mp.sliding(50, 15), kinds.sliding(50, 15)),
}
INTERVALS = [(-20, 30), (0, 0), (5, 40), (-40, -5), (-1, 200)]


class WithoutTimes:
    """A side of an interval join whose results have lost `left_time` and `right_time`, which were looked at."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator

    def __call__(self, table: pa.Table, epoch: int) -> pa.Table:
        return self._checked(self._operator(table, epoch))

    def finish(self) -> pa.Table:
        return self._checked(self._operator.finish())

    def _checked(self, pairs: pa.Table) -> pa.Table:
        for side in SOURCES:
            assert pairs[f"{side}_time"].equals(pairs[f"{side}_ts"])
        return pairs.drop_columns(["left_time", "right_time"])


def joined(pond: Pond, key_type: str = "long", times: str = "long", **how: Any) -> Mapping[str, Operator]:
    types = {side: f"{side}_ts {times}, {side}_v long, {side}_w double" for side in SOURCES}
    join = pond.join("j", key=f"key {key_type}", **types, **how)
    delays: dict[str, Any] = dict(DELAYS)
    if times == "timestamp":
        delays = {side: f"{delay} microseconds" for side, delay in DELAYS.items()}
    sides = {
        "left": join.left(at="left_ts", delay=delays["left"]),
        "right": join.right(at="right_ts", delay=delays["right"]),
    }
    if "between" in how:
        return {side: WithoutTimes(operator) for side, operator in sides.items()}  # type: ignore[arg-type]
    return sides  # type: ignore[return-value]


def oracle_of(
    how: Mapping[str, Any], kind: kinds.Kind | None = None
) -> WindowJoinOracle | IntervalJoinOracle:
    delays = {"left_delay": DELAYS["left"], "right_delay": DELAYS["right"]}
    if kind is not None:
        return WindowJoinOracle(kind, **delays)
    return IntervalJoinOracle(*how["between"], **delays)


def run(
    how: dict[str, Any],
    seed: int,
    kind: kinds.Kind | None = None,
    *,
    every: int = 0,
    window_bytes: int | None = None,
    key_type: str = "long",
    times: str = "long",
    **shape: Any,
) -> Disturbed:
    driven = Disturbed(
        lambda pond: joined(pond, key_type, times, **how), every=every, window_bytes=window_bytes
    )
    drawn = draw(seed, Shape(sources=SOURCES, key_type=key_type, times=times, **shape))  # type: ignore[arg-type]
    oracle = oracle_of(how, kind)
    check(driven.sources, oracle, sided(drawn))
    late = driven.pond.join("j").progress().late
    assert sum(late.values()) == oracle.late
    driven.pond.close()
    return driven


@pytest.mark.parametrize("name", WINDOWS)
def test_windowed_joins_answer_as_the_oracle(name: str) -> None:
    window, kind = WINDOWS[name]
    for seed in range(2):
        run({"window": window}, seed, kind)
    run({"window": window}, 11, kind, every=2, epochs=10)


@pytest.mark.parametrize("between", INTERVALS, ids=str)
def test_interval_joins_answer_as_the_oracle(between: tuple[int, int]) -> None:
    for seed in range(2):
        run({"between": between}, seed)
    run({"between": between}, 11, every=2, epochs=10)


@pytest.mark.long
@pytest.mark.parametrize("keys", ["hot", "many"])
def test_hot_and_many_keys(keys: Any) -> None:
    run({"window": mp.tumbling(20)}, 31, kinds.tumbling(20), keys=keys, rows=150, disorder=60)
    run({"between": (-10, 20)}, 32, keys=keys, rows=150, disorder=60)


@pytest.mark.parametrize("window_bytes", [0, pytest.param(20_000, marks=pytest.mark.long)])
def test_rows_on_disk(window_bytes: int) -> None:
    shape: dict[str, Any] = {"window_bytes": window_bytes, "every": 3, "rows": 80, "keys": "many"}
    run({"window": mp.sliding(60, 20)}, 61, kinds.sliding(60, 20), **shape)
    run({"between": (-20, 30)}, 62, **shape)


def test_keys_of_strings() -> None:
    shape: dict[str, Any] = {"key_type": "string", "keys": "many", "every": 3}
    run({"window": mp.sliding(60, 20)}, 21, kinds.sliding(60, 20), **shape)
    run({"between": (-20, 30)}, 22, **shape)


def test_timestamps() -> None:
    shape: dict[str, Any] = {"times": "timestamp", "every": 4}
    run({"window": mp.tumbling("20 microseconds")}, 41, kinds.tumbling(20), **shape)
    driven = Disturbed(
        lambda pond: joined(pond, times="timestamp", between=("-20 microseconds", "30 microseconds")), every=3
    )
    epochs = sided(draw(42, Shape(sources=SOURCES, times="timestamp")))
    check(driven.sources, oracle_of({"between": (-20, 30)}), epochs)


@pytest.mark.parametrize("start", [-(2**63) + 1, 2**63 - 2000])
def test_the_ends_of_time(start: int) -> None:
    shape: dict[str, Any] = {"start": start, "silence": 0.0, "straggling": 0.0, "disorder": 0, "epochs": 5}
    run({"window": mp.tumbling(20)}, 51, kinds.tumbling(20), **shape)
    for between in INTERVALS:
        run({"between": between}, 52, **shape)


def test_keys_of_several_columns() -> None:
    with LocalPond(LossyFiles()) as pond:
        join = pond.join("j", key="a long, b string", left="x long", right="y long", window=mp.tumbling(10))
        left, right = join.left(at="t", key=["a", "c"]), join.right(at="t")
        left(pa.table({"a": [1, 1, 2], "c": ["u", "v", "u"], "t": [1, 2, 3], "x": [10, 20, 30]}), 0)
        assert (
            len(right(pa.table({"a": [1, 2, 2], "b": ["u", "u", "w"], "t": [4, 5, 6], "y": [7, 8, 9]}), 0))
            == 0
        )
        left.finish()
        pairs = right.finish()
        assert pairs is not None
        assert sorted(pairs.to_pylist(), key=lambda row: row["a"]) == [
            {"window_start": 0, "window_end": 10, "a": 1, "b": "u", "x": 10, "y": 7},
            {"window_start": 0, "window_end": 10, "a": 2, "b": "u", "x": 30, "y": 8},
        ]


def rows(side: str, *pairs: tuple[int, int]) -> pa.Table:
    keys, times = zip(*pairs, strict=True) if pairs else ((), ())
    columns = {"key": keys, "ts": times, f"{side}_v": times}
    return pa.table({name: pa.array(values, pa.int64()) for name, values in columns.items()})


def small(pond: Pond, **how: Any) -> tuple[Any, Any, Any]:
    join = pond.join("j", key="key long", left="left_v long", right="right_v long", **how)
    return join, join.left(), join.right()


def test_rows_are_let_go_of_once_no_partner_can_come() -> None:
    with LocalPond(LossyFiles()) as pond:
        _, left, right = small(pond, between=(-10, 20))
        for epoch in range(60):
            times = [(key, 400 * epoch + key) for key in range(200)]
            assert len(left(rows("left", *times), epoch)) == 0
            assert len(right(rows("right", *times), epoch)) == 200
        figures = pond.metrics()["joins"]["j"]
        assert (figures["rows"], figures["fired"]) == (60 * 400, 60 * 200)
        # A row is needed for 20 at most, and is let go of with others of its key, an interval's length or less later.
        assert 0 < figures["open"] <= 2 * (20 + 31)
        pond.validate()


def test_an_index_of_rows_does_not_grow_for_ever() -> None:
    schema = pa.schema({"t": pa.int64(), "v": pa.int64()})
    kept = TimedRows("i64", 10, memory_rows(schema, "aur"))
    sizes = []
    for start in range(0, 60_000, 1000):
        times = np.arange(start, start + 1000)
        kept.insert(Keys.from_longs(times % 700), pa.RecordBatch.from_arrays([times, times], schema=schema))
        kept.drop_before(start + 500)
        kept.validate()
        assert len(kept) == 500
        (near,) = kept.near(Keys.from_longs(times % 700), times, times)
        assert sorted(near.batch["v"].take(pa.array(near.theirs)).to_pylist()) == times[500:].tolist()
        sizes.append(kept.index_bytes)
    assert sizes[-1] <= max(sizes[:10])
    kept.drop_before(math.inf)
    kept.validate()
    assert len(kept) == 0


def test_one_side_may_finish_before_the_other() -> None:
    with LocalPond(LossyFiles()) as pond:
        _, left, right = small(pond, window=mp.tumbling(10))
        left(rows("left", (1, 1), (1, 11)), 0)
        right(rows("right", (1, 2)), 0)
        assert len(left.finish()) == 0
        fired = right(rows("right", (1, 12)), 1)
        assert fired.to_pylist() == [
            {"window_start": 0, "window_end": 10, "key": 1, "left_v": 1, "right_v": 2}
        ]
        with pytest.raises(UpdaterFinished):
            left(rows("left", (1, 30)), 1)
        assert right.finish()["right_v"].to_pylist() == [12]


def test_a_turn_of_its_own_waits_for_the_other_side() -> None:
    """Also if its side went on after it was found due."""
    with LocalPond(LossyFiles()) as pond:
        _, left, right = small(pond, window=mp.tumbling(10))
        fired: list[pa.Table] = []
        run_left = left.to(lambda pairs, epoch: fired.append(pairs))
        run_left(rows("left", (1, 1), (1, 15)), 0)
        right(rows("right", (1, 2), (1, 12)), 0)
        run_left(rows("left", (1, 35)), 1)
        left.take(LOCAL_QUERY, None)  # type: ignore[arg-type]
        assert [pairs["right_v"].to_pylist() for pairs in fired if len(pairs)] == []
        fired += [right(rows("right", (1, 16), (1, 40)), 1)]
        assert sorted(pa.concat_tables(fired)["right_v"].to_pylist()) == [12, 16]


def test_the_other_side_is_waited_for_before_it_is_made() -> None:
    with LocalPond(LossyFiles()) as pond:
        join = pond.join("j", key="key long", left="left_v long", right="right_v long", between=(0, 5))
        left = join.left()
        left(rows("left", (1, 10), (1, 100)), 0)
        assert join.progress().update == float("-inf")
        right = pond.join("j").right()
        assert right(rows("right", (1, 12)), 0)["left_v"].to_pylist() == [10]


def test_late_rows() -> None:
    with LocalPond(LossyFiles()) as pond:
        join, left, _ = small(pond, between=(0, 5))
        left(rows("left", (1, 100)), 0)
        left(rows("left", (1, 99), (1, 100)), 1)
        assert join.progress().late == {"left": 1, "right": 0}
        taken = []
        strict, giving = (
            join.left(late="error"),
            join.left(late=lambda late, epoch: taken.append((late, epoch))),
        )
        with pytest.raises(LateRows) as error:
            strict(rows("left", (1, 99)), 2)
        assert error.value.hint
        giving(rows("left", (1, 98), (2, 200)), 2)
        assert [(late["ts"].to_pylist(), epoch) for late, epoch in taken] == [([98], 2)]


def test_results_go_to_a_function() -> None:
    with LocalPond(LossyFiles()) as pond:
        _, left, right = small(pond, window=mp.tumbling(10))
        given: list[tuple[int, int]] = []
        run_left, run_right = (
            side.to(lambda pairs, epoch: given.append((len(pairs), epoch))) for side in (left, right)
        )
        run_left(rows("left", (1, 1)), 0)
        run_right(rows("right", (1, 2), (1, 20)), 0)
        run_left(rows("left", (1, 15)), 1)
        assert given == [(0, 0), (0, 0), (1, 1)]
        assert left.finish() is None
        assert right.finish() is None
        assert [pairs for pairs, _ in given[3:]] == [0, 0]
        assert all(epoch < 0 for _, epoch in given[3:])


def test_a_join_is_forgotten() -> None:
    with LocalPond(LossyFiles()) as pond:
        small(pond, between=(0, 5))
        assert list(pond.joins()) == ["j"]
        pond.forget("j")
        assert pond.joins() == {}
        join, left, right = small(pond, window=mp.tumbling(5))
        left(rows("left", (1, 1)), 0)
        pond.forget(join)
        with pytest.raises(UnknownResident) as error:
            pond.join("j")
        assert error.value.hint
        with pytest.raises(MillpondError):
            right(rows("right", (1, 1)), 0)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"window": None}, BadOption, "neither"),
        ({"between": (0, 1)}, BadOption, "both"),
        ({"window": mp.session(5)}, BadOption, "session"),
        ({"window": mp.counted(5)}, BadOption, "counted"),
        ({"window": "10 seconds"}, BadOption, "no window"),
        ({"window": None, "between": (1, 0)}, BadOption, "nothing is from"),
        ({"window": None, "between": ("1 second", 2)}, BadOption, "both a duration and an integer"),
        ({"window": None, "between": 5}, BadOption, "no interval"),
        ({"window": None, "between": (-(2**62), 2**62)}, BadOption, "too long"),
        ({"left": None}, BadOption, "needs left="),
        ({"right": "left_v long"}, BadType, "two columns 'left_v'"),
        ({"right": "key long"}, BadType, "two columns 'key'"),
        ({"right": "window_end long"}, BadType, "two columns 'window_end'"),
        ({"left": "_right long"}, BadType, "two columns '_right'"),
    ],
)
def test_what_is_no_join(changes: dict[str, Any], error: type[MillpondError], words: str) -> None:
    options: dict[str, Any] = {"left": "left_v long", "right": "right_v long", "window": mp.tumbling(10)}
    with LocalPond(LossyFiles()) as pond:
        with pytest.raises(error, match=words) as raised:
            pond.join("j", key="key long", **{**options, **changes})
        assert raised.value.hint
        assert pond.joins() == {}


def test_bad_rows_change_nothing() -> None:
    with LocalPond(LossyFiles()) as pond:
        join, left, right = small(pond, between=("0 seconds", "5 seconds"))
        with pytest.raises(SchemaMismatch):
            small(pond, between=("0 seconds", "6 seconds"))
        with pytest.raises(WrongType):
            left(rows("left", (1, 1)), 0)
        with pytest.raises(WrongColumn):
            left(rows("right", (1, 1)), 0)
        with pytest.raises(BadOption):
            join.left(late="never")
        with pytest.raises(BadOption):
            join.right(value=["a", "b"])
        assert join.progress().seen == 0
        table = rows("right", (1, 1))
        times = table["ts"].cast(pa.timestamp("us", tz="UTC"))
        assert len(right(table.set_column(1, "ts", times), 0)) == 0
        pond.validate()
