"""What a State answers, through the public API on Arrow tables, against plain Python, DuckDB and pandas."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import millpond as mp
from millpond.errors import (
    BadDuration,
    BelowFetchProgress,
    EpochChanged,
    EpochOutOfOrder,
    LateRows,
    RowsWaiting,
    SchemaMismatch,
    TotalOverflow,
    UnknownUpdater,
    UpdaterFinished,
    WrongType,
)
from millpond.testing import LossyFiles, Oracle
from millpond.testing.local import LocalPond

INF = math.inf
LOWEST, HIGHEST = -(2**63), 2**63 - 1
RULES = {
    "latest": mp.latest(),
    "values": mp.values(),
    "count": mp.count(),
    "total": mp.total(),
    "smallest": mp.smallest(),
    "largest": mp.largest(),
}
T0 = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(params=[1, 3], ids=["1-container", "3-containers"])
def pond(request: pytest.FixtureRequest) -> Iterator[LocalPond]:
    with LocalPond(LossyFiles(), containers=request.param, slices=8) as opened:
        yield opened
        opened.validate()


def rows(keys: list[Any], times: list[Any], values: list[Any], **types: pa.DataType) -> pa.Table:
    return pa.table(
        {
            "k": pa.array(keys, types.get("key", pa.int64())),
            "t": pa.array(times, types.get("time", pa.int64())),
            "v": pa.array(values, types.get("value", pa.int64())),
        }
    )


def asked(
    keys: list[Any], times: list[Any], key: pa.DataType | None = None, time: pa.DataType | None = None
) -> pa.Table:
    return pa.table({"k": pa.array(keys, key or pa.int64()), "t": pa.array(times, time or pa.int64())})


def longs(pond: mp.Pond, name: str = "s", **options: Any) -> mp.State:
    return pond.state(name, key="long", value="long", **options)


def updater(state: mp.State, name: str = "feed", **options: Any) -> Any:
    return state.update(key="k", at="t", value="v", name=name, **options)


def as_of(
    state: mp.State, keys: list[Any], times: list[Any], key: pa.DataType | None = None, **options: Any
) -> list[Any]:
    return (
        state.fetch(key="k", at="t", into="a").now(asked(keys, times, key), **options).column("a").to_pylist()
    )


def held(state: mp.State, at: int | datetime | None = None) -> dict[Any, tuple[Any, Any]]:
    """The snapshot as `{key: (time, value)}`."""
    table = state.snapshot(at).to_pylist()
    found = {row["key"]: (row["time"], row["value"]) for row in table}
    assert len(found) == len(table), "a key twice in a snapshot"
    return found


# As-of and ranges


def test_as_of_is_the_newest_value_at_or_before_the_time(pond: LocalPond) -> None:
    state = longs(pond)
    updater(state)(rows([1, 1, 1, 2], [10, 20, 30, 15], [100, 200, 300, 150]), 0)
    state.finish("feed")

    assert as_of(state, [1] * 7, [9, 10, 11, 20, 29, 30, 99]) == [None, 100, 100, 200, 200, 300, 300]
    assert as_of(state, [2, 3, 2], [15, 15, 14]) == [150, None, None]


def test_rows_out_of_order_and_at_equal_times(pond: LocalPond) -> None:
    state = longs(pond)
    op = updater(state, delay=100)
    op(rows([1, 1, 1], [30, 10, 20], [3, 1, 2]), 0)
    op(rows([1, 1, 1], [15, 20, 20], [15, 21, 22]), 1)
    state.finish("feed")

    # At an equal key and time the later row replaces the earlier one, within an epoch and between epochs.
    assert as_of(state, [1] * 5, [10, 15, 19, 20, 30]) == [1, 15, 15, 22, 3]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("key_ddl", ["long", "string"])
def test_ranges_of_every_rule_agree_with_the_oracle(pond: LocalPond, rule: str, key_ddl: str) -> None:
    rng = np.random.default_rng([list(RULES).index(rule), len(key_ddl)])
    name = int if key_ddl == "long" else (lambda key: f"key-{key}" * (key % 3))
    key_type = pa.int64() if key_ddl == "long" else pa.string()
    state = pond.state("s", key=key_ddl, value="long")
    oracle = Oracle()
    oracle.register_updater("feed")
    op = updater(state, delay=50)
    for epoch in range(4):
        keys = [name(key) for key in rng.integers(0, 12, 60)]
        times = [int(time) for time in rng.integers(40 * epoch, 40 * epoch + 90, 60)]
        values = [None if value % 5 == 0 else int(value) for value in rng.integers(-50, 50, 60)]
        op(rows(keys, times, values, key=key_type), epoch)
        oracle.update("feed", epoch, list(zip(keys, times, values, strict=True)), delay=50)
    state.finish("feed")
    oracle.finish("feed")

    keys = [name(key) for key in rng.integers(0, 14, 200)]
    lows = [int(low) for low in rng.integers(-20, 250, 200)]
    highs = [low + int(more) for low, more in zip(lows, rng.integers(-5, 120, 200), strict=True)]
    table = pa.table({"k": pa.array(keys, key_type), "lo": lows, "hi": highs})
    answers = state.fetch(key="k", between=("lo", "hi"), into="a", rule=RULES[rule]).now(table)

    expected = [oracle.fetch_range(k, lo, hi, rule) for k, lo, hi in zip(keys, lows, highs, strict=True)]
    assert answers.column("a").to_pylist() == expected
    assert answers.drop_columns("a").equals(table)


def test_a_range_leaves_its_low_end_out_and_takes_its_high_end_in(pond: LocalPond) -> None:
    state = longs(pond)
    updater(state)(rows([1, 1, 1], [10, 20, 30], [1, 2, 3]), 0)
    state.finish("feed")
    table = pa.table({"k": [1] * 5, "lo": [10, 9, 30, 20, LOWEST], "hi": [30, 10, 30, 10, HIGHEST]})

    answers = state.fetch(key="k", between=("lo", "hi"), into="a", rule=mp.values()).now(table)

    assert answers.column("a").to_pylist() == [[2, 3], [1], [], [], [1, 2, 3]]


def test_every_rule_over_as_of_covers_all_values_up_to_the_time(pond: LocalPond) -> None:
    state = longs(pond)
    updater(state)(rows([1, 1, 1, 1], [10, 20, 30, 40], [5, None, -7, 1]), 0)
    state.finish("feed")
    expected = {
        "latest": [None, 5, None, -7],
        "values": [[], [5], [5, None], [5, None, -7]],
        "count": [0, 1, 2, 3],
        "total": [None, 5, 5, -2],
        "smallest": [None, 5, 5, -7],
        "largest": [None, 5, 5, 5],
    }
    for rule, answers in expected.items():
        fetch = state.fetch(key="k", at="t", into="a", rule=RULES[rule])
        assert fetch.now(asked([1] * 4, [9, 10, 20, 30])).column("a").to_pylist() == answers, rule


def test_a_total_beyond_a_long_is_an_error_and_the_largest_one_is_not(pond: LocalPond) -> None:
    state = longs(pond)
    updater(state)(rows([1, 1, 1, 2, 2], [1, 2, 3, 1, 2], [HIGHEST, 5, -5, HIGHEST, 1]), 0)
    state.finish("feed")
    fetch = state.fetch(key="k", at="t", into="a", rule=mp.total())

    assert fetch.now(asked([1], [9])).column("a").to_pylist() == [HIGHEST]
    with pytest.raises(TotalOverflow) as caught:
        fetch.now(asked([2, 2], [9, 1]))
    assert isinstance(caught.value, ArithmeticError)
    assert caught.value.rows == 1
    assert caught.value.hint


def test_doubles_put_nan_above_all_numbers(pond: LocalPond) -> None:
    state = pond.state("d", key="long", value="double")
    values = [1.5, math.nan, -math.inf, 0.25]
    updater(state)(rows([1] * 4, [1, 2, 3, 4], values, value=pa.float64()), 0)
    state.finish("feed")
    one = asked([1], [9])

    assert math.isnan(state.fetch(key="k", at="t", into="a", rule=mp.largest()).now(one)["a"][0].as_py())
    assert state.fetch(key="k", at="t", into="a", rule=mp.smallest()).now(one)["a"].to_pylist() == [-math.inf]


# Peers


def _feed(seed: int, strings: bool) -> tuple[pa.Table, pa.Table]:
    """Versions with distinct `(k, t)`, so that every system has one right answer; and probes."""
    rng = np.random.default_rng(seed)
    pairs = np.unique(rng.integers(0, [400, 5000], (6000, 2)), axis=0)
    rng.shuffle(pairs)
    probes = rng.integers(0, [450, 5200], (5000, 2))
    key = (lambda keys: [f"ключ-{key:x}" for key in keys]) if strings else (lambda keys: keys)
    versions = pa.table({"k": key(pairs[:, 0]), "t": pairs[:, 1], "v": rng.integers(0, 10**9, len(pairs))})
    return versions, pa.table({"k": key(probes[:, 0]), "t": probes[:, 1], "n": np.arange(len(probes))})


@pytest.mark.parametrize("strings", [False, True], ids=["long", "string"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_as_of_agrees_with_duckdb_and_pandas(pond: LocalPond, seed: int, strings: bool) -> None:
    versions, probes = _feed(seed, strings)
    state = pond.state("s", key="string" if strings else "long", value="long")
    op = updater(state, delay=10_000)
    for epoch, start in enumerate(range(0, len(versions), 1500)):
        op(versions.slice(start, 1500), epoch)
    state.finish("feed")

    ours = state.fetch(key="k", at="t", into="a").now(probes).column("a").to_pylist()

    connection = duckdb.connect()
    connection.register("versions", versions)
    connection.register("probes", probes)
    joined = connection.sql(
        "SELECT v FROM probes ASOF LEFT JOIN versions ON probes.k = versions.k AND probes.t >= versions.t ORDER BY n"
    )
    assert ours == [row[0] for row in joined.fetchall()]
    merged = pd.merge_asof(
        probes.to_pandas().sort_values("t", kind="stable"),
        versions.to_pandas().astype({"v": "Int64"}).sort_values("t"),
        on="t",
        by="k",
    ).sort_values("n")
    assert ours == [None if value is pd.NA else value for value in merged["v"]]
    assert 0 < ours.count(None) < len(ours), "the data should have both answers"


@pytest.mark.parametrize("strings", [False, True], ids=["long", "string"])
def test_ranges_agree_with_duckdb(pond: LocalPond, strings: bool) -> None:
    versions, probes = _feed(9, strings)
    probes = probes.slice(0, 1500).append_column("lo", pa.array(probes["t"].to_numpy()[:1500] - 700))
    state = pond.state("s", key="string" if strings else "long", value="long")
    updater(state)(versions, 0)
    state.finish("feed")
    connection = duckdb.connect()
    connection.register("versions", versions)
    connection.register("probes", probes)
    joined = connection.sql(
        "SELECT count(v), sum(v), min(v), max(v), list(v ORDER BY versions.t), any_value(n) FROM probes LEFT JOIN"
        " versions ON probes.k = versions.k AND lo < versions.t AND versions.t <= probes.t GROUP BY n ORDER BY n"
    ).fetchall()

    for index, rule in enumerate(["count", "total", "smallest", "largest", "values"]):
        ours = state.fetch(key="k", between=("lo", "t"), into="a", rule=RULES[rule]).now(probes).column("a")
        theirs = [row[index] for row in joined]
        if rule == "values":
            theirs = [[] if found == [None] else found for found in theirs]
        assert ours.to_pylist() == theirs, rule


# Time


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin", "+05:30"])
def test_timestamps_of_any_unit_and_zone_are_instants(pond: LocalPond, unit: str, zone: str | None) -> None:
    state = longs(pond)
    times = [T0 + timedelta(seconds=s) for s in (0, 10, 20)]
    column = pa.array([int(t.timestamp()) for t in times], pa.timestamp("s", "UTC")).cast(
        pa.timestamp(unit, zone or "UTC")
    )
    if zone is None:
        column = column.cast(pa.int64()).cast(pa.timestamp(unit))
    op = updater(state, delay="5 seconds")
    committed = op(pa.table({"k": [1, 1, 1], "t": column, "v": [1, 2, 3]}), 0)

    micros = int(times[-1].timestamp()) * 1_000_000
    assert committed.watermark == micros - 5_000_000
    assert state.progress().update == micros - 5_000_000
    assert state.progress().time_kind == "timestamp"
    probe = [T0 - timedelta(microseconds=1), T0, T0 + timedelta(seconds=14, microseconds=999_999)]
    assert state.fetch(key="k", at="t", into="a").now(asked([1] * 3, probe, time=pa.timestamp("us", "UTC")))[
        "a"
    ].to_pylist() == [None, 1, 2]
    with pytest.raises(RowsWaiting) as caught:
        state.fetch(key="k", at="t", into="a").now(
            asked([1], [T0 + timedelta(seconds=15)], time=pa.timestamp("us", "UTC"))
        )
    assert "2026-01-01T00:00:15" in str(caught.value)
    assert held(state) == {1: (times[1], 2)}
    assert state.snapshot().schema.field("time").type == pa.timestamp("us", "UTC")


def test_dates_are_their_midnights(pond: LocalPond) -> None:
    state = longs(pond)
    days = pa.array([date(2026, 1, 1), date(2026, 1, 3)], pa.date32())
    updater(state)(pa.table({"k": [1, 1], "t": days, "v": [1, 2]}), 0)

    assert held(state) == {1: (T0, 1)}


def test_a_state_has_one_kind_of_time(pond: LocalPond) -> None:
    state = longs(pond)
    op = updater(state)
    op(rows([1], [5], [1]), 0)

    with pytest.raises(WrongType) as caught:
        op(rows([1], [T0], [1], time=pa.timestamp("us", "UTC")), 1)
    assert (caught.value.column, caught.value.expected, caught.value.actual) == ("t", "long", "timestamp")
    with pytest.raises(WrongType):
        state.fetch(key="k", at="t").now(asked([1], [T0], time=pa.timestamp("us")))


def test_delay_is_a_duration_for_timestamps_and_an_integer_for_longs(pond: LocalPond) -> None:
    stamped = rows([1], [T0], [1], time=pa.timestamp("us", "UTC"))
    micros = int(T0.timestamp()) * 1_000_000
    for number, delay in enumerate(["1 minute 30 seconds", timedelta(seconds=90)]):
        state = longs(pond, f"stamped{number}")
        assert updater(state, delay=delay)(stamped, 0).watermark == micros - 90_000_000
    logical = longs(pond, "logical")
    assert updater(logical, delay=7)(rows([1], [50], [1]), 0).watermark == 43
    assert updater(longs(pond, "none"))(rows([1], [50], [1]), 0).watermark == 50

    with pytest.raises(BadDuration):
        updater(logical, "other", delay="5 seconds")(rows([1], [50], [1]), 0)
    with pytest.raises(BadDuration):
        updater(longs(pond, "stamped0"), "other", delay=5)(stamped, 0)


def test_times_and_values_and_keys_at_the_ends_of_int64(pond: LocalPond) -> None:
    state = longs(pond)
    ends = [LOWEST, LOWEST + 1, -1, 0, 1, HIGHEST - 1, HIGHEST]
    op = updater(state, delay=2**63 - 1)
    op(rows([key for key in ends for _ in ends], ends * len(ends), ends * len(ends)), 0)
    # A watermark below all of int64 is none at all.
    assert op(rows([], [], []), 1).watermark == HIGHEST - (2**63 - 1) == 0
    state.finish("feed")

    for key in ends:
        assert as_of(state, [key] * len(ends), ends) == ends
    table = pa.table({"k": ends, "lo": [LOWEST] * 7, "hi": [HIGHEST] * 7})
    counts = state.fetch(key="k", between=("lo", "hi"), into="n", rule=mp.count()).now(table)
    assert counts["n"].to_pylist() == [6] * 7, "the low end is left out"
    assert held(state) == dict.fromkeys(ends, (HIGHEST, HIGHEST))


def test_a_delay_beyond_the_first_time_leaves_progress_where_it_was(pond: LocalPond) -> None:
    state = longs(pond)
    assert updater(state, delay=10)(rows([1], [LOWEST + 5], [1]), 0).watermark == -INF
    assert state.progress().update == -INF


# Late rows


def test_late_rows_are_dropped_and_counted(pond: LocalPond) -> None:
    state = longs(pond)
    op = updater(state, delay=10)
    first = op(rows([1], [100], [1]), 0)
    assert (first.rows, first.late, first.watermark, first.replayed) == (1, 0, 90, False)
    late = op(rows([1, 1, 2, 1], [89, 90, 5, 120], [9, 2, 9, 3]), 1)

    assert (late.rows, late.late, late.watermark) == (2, 2, 110)
    assert state.progress().late == {"feed": 2}
    state.finish("feed")
    assert as_of(state, [1, 1, 2], [89, 95, 95]) == [None, 2, None]
    again = op(rows([1, 1, 2, 1], [89, 90, 5, 120], [9, 2, 9, 3]), 1)
    assert (again.replayed, again.rows, again.late, again.watermark) == (True, 2, 2, 110)
    assert state.progress().late == {"feed": 2}


def test_late_rows_as_an_error_change_nothing(pond: LocalPond) -> None:
    state = longs(pond)
    op = updater(state, late="error")
    op(rows([1], [100], [1]), 0)
    before = (state.progress(), held(state))

    with pytest.raises(LateRows) as caught:
        op(rows([1, 1, 1], [99, 150, 20], [1, 2, 3]), 1)

    assert (caught.value.rows, caught.value.watermark) == (2, 100)
    assert isinstance(caught.value, ValueError)
    assert caught.value.hint
    assert (state.progress(), held(state)) == before
    assert op(rows([1], [100], [2]), 1).rows == 1, "a row at the watermark is not late"


def test_lateness_is_each_updaters_own(pond: LocalPond) -> None:
    state = longs(pond)
    fast, slow = updater(state, "fast"), updater(state, "slow")
    fast(rows([1], [1000], [1]), 0)
    slow(rows([1], [10], [2]), 0)

    assert state.progress().late == {"fast": 0, "slow": 0}
    assert fast(rows([1], [10], [3]), 1).late == 1
    assert slow(rows([1], [11], [4]), 1).late == 0
    assert state.progress().updaters == {"fast": 1000, "slow": 11}


# Progress


def test_u_is_the_least_progress_of_all_updaters(pond: LocalPond) -> None:
    state = longs(pond)
    assert state.progress().update == -INF
    a, b = updater(state, "a"), updater(state, "b")
    a(rows([1], [50], [1]), 0)
    assert state.progress().update == -INF, "an updater that never started holds U back"
    assert state.progress().updaters == {"a": 50, "b": -INF}
    with pytest.raises(RowsWaiting) as caught:
        as_of(state, [1], [LOWEST])
    assert (caught.value.rows, caught.value.update_progress) == (1, -INF)

    b(rows([2], [30], [2]), 0)
    assert state.progress().update == 30
    assert as_of(state, [2, 1], [29, 29]) == [None, None]
    b(rows([2], [70], [3]), 1)
    assert state.progress().update == 50
    state.finish("b")
    assert state.progress().update == 50
    state.finish("a")
    assert state.progress().update == INF
    assert as_of(state, [1, 2, 2], [50, 69, HIGHEST]) == [1, 2, 3]


def test_an_updater_that_joins_later_begins_at_u_and_u_never_falls(pond: LocalPond) -> None:
    state = longs(pond)
    updater(state, "a")(rows([1], [50], [1]), 0)
    late_comer = updater(state, "b")

    assert state.progress().update == 50
    assert state.progress().updaters == {"a": 50, "b": 50}
    assert late_comer(rows([1, 1], [49, 60], [8, 9]), 0).late == 1


def test_a_finished_updater_may_not_go_on_but_may_replay(pond: LocalPond) -> None:
    state = longs(pond)
    op = updater(state)
    other = updater(state, "other")
    op(rows([1], [50], [1]), 0)
    state.finish("feed")

    assert op(rows([1], [50], [1]), 0).replayed
    with pytest.raises(UpdaterFinished) as caught:
        op(rows([1], [60], [1]), 1)
    assert (caught.value.resident, caught.value.name) == ("s", "feed")
    assert other(rows([1], [60], [2]), 0).rows == 1
    state.finish("other")
    with pytest.raises(UpdaterFinished):
        updater(state, "newcomer")
    assert set(state.progress().updaters) == {"feed", "other"}


def test_reported_progress_moves_u_and_never_back(pond: LocalPond) -> None:
    state = longs(pond)
    op = updater(state)
    state.report("feed", update=100)
    assert state.progress().update == 100
    state.report("feed", update=40)
    assert state.progress().update == 100
    assert op(rows([1, 1], [99, 100], [1, 2]), 0).late == 1
    state.report("feed", update=INF)
    assert state.progress().update == INF
    for name in ("nobody", "s"):
        with pytest.raises(UnknownUpdater):
            state.finish(name)
        with pytest.raises(UnknownUpdater):
            state.report(name, update=3)


def test_reported_progress_is_of_the_kind_of_time_that_the_state_has(pond: LocalPond) -> None:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    for name, times, fits, other in (("a", [7, 8], 100, moment),):
        state = longs(pond, name)
        op = updater(state)
        state.report("feed", update=-INF)
        op(pa.table({"k": [1, 2], "t": times, "v": [1, 2]}), 0)
        before = state.progress()
        for report in ({"update": other}, {"fetch": other}, {"update": fits, "fetch": other}):
            with pytest.raises(WrongType, match="of kind"):
                state.report("feed", **report)
        assert state.progress() == before
        state.report("feed", update=fits, fetch=fits)
        state.report("feed", update=INF, fetch=INF)
        assert state.progress().update == state.progress().fetch == INF


def test_an_empty_epoch_counts_and_moves_nothing(pond: LocalPond) -> None:
    state = longs(pond)
    op = updater(state)
    empty = op(rows([], [], []), 0)
    assert (empty.rows, empty.watermark, state.progress().update) == (0, -INF, -INF)
    op(rows([1], [10], [1]), 1)
    assert op(rows([], [], []), 2).watermark == 10
    assert op(rows([], [], []), 2).replayed
    assert state.progress().update == 10


# Waiting


def test_rows_that_u_has_not_passed(pond: LocalPond) -> None:
    state = longs(pond)
    updater(state)(rows([1, 1], [10, 20], [1, 2]), 0)
    table = asked([1, 1, 2, 1], [20, 19, 21, 10]).append_column("n", pa.array([0, 1, 2, 3]))
    fetch = state.fetch(key="k", at="t", into="a")

    with pytest.raises(RowsWaiting) as caught:
        fetch.now(table)
    assert (caught.value.rows, caught.value.update_progress) == (2, 20)
    assert "2 of 4" in caught.value.message
    assert caught.value.hint
    assert fetch.now(table, waiting="null").to_pydict() == {**table.to_pydict(), "a": [None, 1, None, 1]}
    assert fetch.now(table, waiting="drop").to_pydict() == {
        "k": [1, 1],
        "t": [19, 10],
        "n": [1, 3],
        "a": [1, 1],
    }
    none = fetch.now(table.slice(0, 1), waiting="drop")
    assert none.num_rows == 0
    assert none.schema.field("a").type == pa.int64()
    counted = state.fetch(key="k", at="t", into="a", rule=mp.count()).now(table, waiting="null")
    assert counted["a"].to_pylist() == [None, 1, None, 1], "not zero: nobody knows yet"
    whole = state.fetch(key="k", between=("t", "t2"), into="a", rule=mp.values())
    table = pa.table({"k": [1, 1], "t": [0, 0], "t2": [15, 25]})
    assert whole.now(table, waiting="null")["a"].to_pylist() == [[1], None]


# Fetch progress and compaction


def test_f_is_minus_infinity_without_a_fetcher_and_now_registers_none(pond: LocalPond) -> None:
    state = longs(pond)
    updater(state)(rows([1], [10], [1]), 0)
    state.finish("feed")
    fetch = state.fetch(key="k", at="t", into="a", name="views")
    assert (state.progress().fetch, state.progress().fetchers) == (-INF, {})
    fetch.now(asked([1], [10]))
    assert (state.progress().fetch, state.progress().fetchers) == (-INF, {})
    assert as_of(state, [1], [LOWEST]) == [None]


def test_f_is_the_least_progress_of_all_fetchers(pond: LocalPond) -> None:
    state = longs(pond)
    updater(state)(rows([1], [100], [1]), 0)
    state.report("one", fetch=40)
    assert state.progress().fetch == 40
    state.report("two", fetch=20)
    assert state.progress().fetchers == {"one": 40, "two": 40}, "what may be compacted stays so"
    state.report("one", fetch=60)
    assert state.progress().fetch == 40
    state.report("two", fetch=50)
    state.report("two", fetch=10)
    assert (state.progress().fetch, state.progress().fetchers) == (50, {"one": 60, "two": 50})


@pytest.mark.parametrize("swept", [False, True], ids=["before-sweep", "after-sweep"])
@pytest.mark.parametrize("compact", [mp.keep_latest(), mp.keep_all()], ids=["keep_latest", "keep_all"])
def test_a_read_below_f_is_refused_naming_f(pond: LocalPond, swept: bool, compact: Any) -> None:
    state = longs(pond, compact=compact)
    updater(state)(rows([1] * 5, [10, 20, 30, 40, 50], [1, 2, 3, 4, 5]), 0)
    state.finish("feed")
    state.report("views", fetch=35)
    if swept:
        pond.maintain()

    def ranged(low: int, high: int) -> pa.Table:
        return pa.table({"k": [1], "lo": [low], "hi": [high]})

    between = state.fetch(key="k", between=("lo", "hi"), into="a", rule=mp.values())
    refused = {
        "as-of": lambda: as_of(state, [1, 1], [50, 34]),
        "a key that is not there": lambda: as_of(state, [9], [34]),
        "range": lambda: between.now(ranged(33, 50)),
        "range over all": lambda: between.now(ranged(LOWEST, 50)),
        "snapshot": lambda: state.snapshot(34),
    }
    for what, read in refused.items():
        with pytest.raises(BelowFetchProgress) as caught:
            read()
        assert caught.value.fetch_progress == 35, what
        assert "F = 35" in caught.value.message, what
        assert isinstance(caught.value, ValueError)
        assert caught.value.hint
    assert as_of(state, [1, 1], [35, 40]) == [3, 4]
    assert between.now(ranged(34, 50))["a"].to_pylist() == [[4, 5]]
    assert held(state, 35) == {1: (30, 3)}


def test_compaction_keeps_the_newest_below_f_and_all_from_f_on(pond: LocalPond) -> None:
    state = longs(pond)
    op = updater(state)
    keys, times = list(range(50)) * 6, [time for time in (10, 20, 30, 40, 50, 60) for _ in range(50)]
    op(rows(keys, times, times), 0)
    state.report("views", fetch=35)
    pond.maintain()
    pond.validate()

    assert pond.metrics()["states"]["s"] == pond.metrics()["states"]["s"] | {"keys": 50, "versions": 200}
    state.finish("feed")
    for at, expected in [(35, 30), (39, 30), (40, 40), (55, 50), (60, 60)]:
        assert as_of(state, list(range(50)), [at] * 50) == [expected] * 50
    state.report("views", fetch=INF)
    pond.maintain()
    assert pond.metrics()["states"]["s"]["versions"] == 50
    assert held(state) == dict.fromkeys(range(50), (60, 60))


def test_keep_all_keeps_all(pond: LocalPond) -> None:
    state = longs(pond, compact=mp.keep_all())
    updater(state)(rows([1] * 3, [10, 20, 30], [1, 2, 3]), 0)
    state.report("views", fetch=25)
    pond.maintain()
    assert pond.metrics()["states"]["s"]["versions"] == 3


def test_updates_below_f_are_taken_and_change_what_f_sees(pond: LocalPond) -> None:
    state = longs(pond)
    op = updater(state, delay=100)
    op(rows([1, 1, 2], [10, 60, 60], [1, 6, 6]), 0)
    state.report("views", fetch=50)
    pond.maintain()
    op(rows([1, 2, 2], [20, 20, 10], [2, 2, 1]), 1)
    pond.maintain()
    assert pond.metrics()["states"]["s"]["versions"] == 6, "what is not final is not compacted"
    state.finish("feed")
    pond.maintain()
    pond.validate()

    assert as_of(state, [1, 2, 1, 2], [50, 50, 60, 60]) == [2, 2, 6, 6]
    assert pond.metrics()["states"]["s"]["versions"] == 4


# Snapshots


def test_snapshot_holds_what_is_final(pond: LocalPond) -> None:
    state = longs(pond)
    assert state.snapshot().num_rows == 0
    assert state.snapshot().column_names == ["key", "time", "value"]
    updater(state)(rows([1, 1, 2, 3], [10, 20, 15, 20], [1, 2, 3, 4]), 0)

    assert held(state) == {1: (10, 1), 2: (15, 3)}, "a value at U is not final"
    assert held(state, 19) == {1: (10, 1), 2: (15, 3)}
    assert held(state, 14) == {1: (10, 1)}
    assert held(state, LOWEST) == {}
    for at in (20, HIGHEST):
        with pytest.raises(RowsWaiting) as caught:
            state.snapshot(at)
        assert caught.value.update_progress == 20
    state.finish("feed")
    assert held(state) == held(state, HIGHEST) == {1: (20, 2), 2: (15, 3), 3: (20, 4)}
    assert held(state, 15) == {1: (10, 1), 2: (15, 3)}


def test_snapshot_where_f_has_reached_u(pond: LocalPond) -> None:
    state = longs(pond)
    updater(state)(rows([1, 1, 2], [10, 20, 30], [1, 2, 3]), 0)
    state.report("views", fetch=30)
    pond.maintain()

    # Compaction keeps the newest value below F, and that is what a snapshot just below F asks for.
    assert held(state) == {1: (20, 2)}
    state.report("views", fetch=31)
    with pytest.raises(BelowFetchProgress):
        state.snapshot()


def test_snapshot_at_a_datetime(pond: LocalPond) -> None:
    state = longs(pond)
    times = [T0, T0 + timedelta(seconds=1), T0 + timedelta(seconds=2)]
    updater(state)(rows([1, 1, 1], times, [1, 2, 3], time=pa.timestamp("us", "UTC")), 0)

    assert held(state, T0 + timedelta(milliseconds=1500)) == {1: (times[1], 2)}
    assert held(state, times[0].replace(tzinfo=None)) == {1: (times[0], 1)}, "without a zone it is UTC"
    assert held(state, times[0].astimezone(timezone(timedelta(hours=9)))) == {1: (times[0], 1)}


# Keys


KEYS: dict[str, tuple[str, pa.DataType, list[Any]]] = {
    "boolean": ("boolean", pa.bool_(), [True, False]),
    "byte": ("byte", pa.int8(), [-128, 0, 127]),
    "short": ("short", pa.int16(), [-(2**15), 2**15 - 1]),
    "int": ("int", pa.int32(), [-(2**31), -1, 2**31 - 1]),
    "long": ("long", pa.int64(), [LOWEST, -1, 0, HIGHEST]),
    "date": ("date", pa.date32(), [date(1, 1, 1), date(1970, 1, 1), date(9999, 12, 31)]),
    "timestamp": ("timestamp", pa.timestamp("us", "UTC"), [T0, T0 + timedelta(microseconds=1)]),
    "timestamp_ntz": ("timestamp_ntz", pa.timestamp("us"), [T0.replace(tzinfo=None)]),
    "string": ("string", pa.string(), ["", "a", "a\0", "ä", "\N{PILE OF POO}", "long" * 500]),
    "binary": ("binary", pa.binary(), [b"", b"\0", b"\0\0", b"\xff\xfe", bytes(range(256))]),
}


@pytest.mark.parametrize("kind", KEYS)
def test_every_type_of_key(pond: LocalPond, kind: str) -> None:
    ddl, type_, keys = KEYS[kind]
    state = pond.state("s", key=ddl, value="long")
    count = len(keys)
    updater(state)(rows(keys + keys, [10] * count + [20] * count, list(range(2 * count)), key=type_), 0)
    state.finish("feed")

    assert as_of(state, keys, [15] * count, type_) == list(range(count))
    assert as_of(state, keys, [20] * count, type_) == list(range(count, 2 * count))
    assert held(state, 15) == {key: (10, value) for value, key in enumerate(keys)}
    assert state.snapshot().schema.field("key").type == type_


def test_composite_keys_are_told_apart_by_every_column(pond: LocalPond) -> None:
    state = pond.state("s", key="ad string, region string, day date, n int", value="long")
    keys = [
        ("ab", "c", date(2026, 1, 1), 1),
        ("a", "bc", date(2026, 1, 1), 1),
        ("", "abc", date(2026, 1, 1), 1),
        ("abc", "", date(2026, 1, 1), 1),
        ("ab", "c", date(2026, 1, 2), 1),
        ("ab", "c", date(2026, 1, 1), -1),
        ("ab\0", "c", date(2026, 1, 1), 1),
    ]
    names = ["ad", "region", "day", "n"]
    types = [pa.string(), pa.string(), pa.date32(), pa.int32()]
    columns = {name: pa.array([key[i] for key in keys], types[i]) for i, name in enumerate(names)}
    table = pa.table(columns | {"t": [1] * len(keys), "v": list(range(len(keys)))})
    state.update(key=names, at="t", value="v", name="feed")(table, 0)
    state.finish("feed")

    answers = state.fetch(key=names, at="t", into="a").now(table.drop_columns("v"))
    assert answers["a"].to_pylist() == list(range(len(keys)))
    snapshot = state.snapshot()
    assert snapshot.column_names == [*names, "time", "value"]
    assert [snapshot.schema.field(name).type for name in names] == types
    found = {tuple(row[name] for name in names): row["value"] for row in snapshot.to_pylist()}
    assert found == {key: number for number, key in enumerate(keys)}
    # The order in which the columns are named is the schema's.
    swapped = state.fetch(key=["region", "ad", "day", "n"], at="t", into="a").now(table.drop_columns("v"))
    assert swapped["a"].to_pylist()[:2] == [None, None]


@pytest.mark.parametrize(
    "type_", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())], ids=str
)
def test_encodings_of_one_key_are_one_key(pond: LocalPond, type_: pa.DataType) -> None:
    state = pond.state("s", key="string", value="long")
    updater(state)(rows(["a", "b"], [1, 1], [1, 2], key=pa.string()), 0)
    state.finish("feed")
    column = pa.chunked_array([pa.array(["b"]).cast(type_), pa.array(["a", "b", "c"]).slice(1).cast(type_)])
    table = pa.table({"k": column, "t": [1, 1, 1]})
    assert state.fetch(key="k", at="t", into="a").now(table)["a"].to_pylist() == [2, 2, None]


# Values


VALUES: dict[str, list[Any]] = {
    "boolean": [True, False, None],
    "byte": [-128, 127, None],
    "int": [2**31 - 1, None, -(2**31)],
    "float": [0.5, None, math.inf],
    "double": [1e308, -0.0, None],
    "decimal(20,3)": [Decimal("12345678901234567.891"), None, Decimal("-0.001")],
    "string": ["", None, "straße" * 100],
    "binary": [b"", b"\0\xff", None],
    "date": [date(1, 1, 1), None, date(9999, 12, 31)],
    "timestamp": [T0, None, T0 + timedelta(microseconds=1)],
    "timestamp_ntz": [T0.replace(tzinfo=None), None],
    "array<float>": [[0.5, None, 1.5], [], None],
    "array<array<string>>": [[["a", None], None, []], None, []],
    "struct<a:int,b:struct<c:string>>": [{"a": 1, "b": {"c": "x"}}, {"a": None, "b": None}, None],
    "map<string,long>": [[("a", 1), ("b", None)], [], None],
}


@pytest.mark.parametrize("ddl", VALUES)
def test_every_type_of_value_comes_back_as_it_went_in(pond: LocalPond, ddl: str) -> None:
    from millpond.schema import parse_ddl

    type_ = parse_ddl(ddl, "value").field(0).type
    values = VALUES[ddl]
    count = len(values)
    state = pond.state("s", key="long", value=ddl)
    # Two keys hold every value, one of them in the other order; a third holds none.
    table = rows([1] * count + [2] * count, list(range(count)) * 2, values + values[::-1], value=type_)
    updater(state)(table, 0)
    state.finish("feed")

    fetch = state.fetch(key="k", at="t", into="a")
    probes = asked([1] * count + [2] * count + [3], [*range(count), *range(count), 0])
    answers = fetch.now(probes)["a"]
    assert answers.type == type_
    assert answers.to_pylist() == values + values[::-1] + [None]
    listed = state.fetch(key="k", at="t", into="a", rule=mp.values()).now(asked([2, 3], [count, count]))["a"]
    assert listed.type == pa.list_(type_)
    assert listed.to_pylist() == [values[::-1], []]
    assert held(state) == {1: (count - 1, values[-1]), 2: (count - 1, values[0])}
    assert state.snapshot().schema.field("value").type == type_
    assert state.snapshot(0)["value"].to_pylist().count(None) == [values[0], values[-1]].count(None)


def test_several_value_columns(pond: LocalPond) -> None:
    state = pond.state("s", key="long", value="price double, label string, tags array<string>")
    table = pa.table(
        {
            "k": [1, 1, 2],
            "t": [1, 2, 1],
            "p": [1.5, None, 2.5],
            "l": ["x", "y", None],
            "g": pa.array([["a"], None, []], pa.list_(pa.string())),
        }
    )
    state.update(key="k", at="t", value=["p", "l", "g"], name="feed")(table, 0)
    state.finish("feed")

    answers = state.fetch(key="k", at="t").now(asked([1, 1, 2, 3], [1, 2, 9, 9]))
    assert answers.drop_columns(["k", "t"]).to_pylist() == [
        {"price": 1.5, "label": "x", "tags": ["a"]},
        {"price": None, "label": "y", "tags": None},
        {"price": 2.5, "label": None, "tags": []},
        {"price": None, "label": None, "tags": None},
    ]
    assert state.snapshot().column_names == ["key", "time", "price", "label", "tags"]
    counted = state.fetch(key="k", at="t", rule=mp.count()).now(asked([1, 3], [9, 9]))
    assert counted.column_names == ["k", "t", "count"]
    assert counted["count"].to_pylist() == [2, 0]


def test_a_rule_that_does_not_fit_the_type_is_refused_when_the_fetch_is_built(pond: LocalPond) -> None:
    state = pond.state("s", key="long", value="price double, tags array<string>")
    for rule in (mp.total(), mp.smallest(), mp.largest()):
        with pytest.raises(WrongType) as caught:
            state.fetch(key="k", at="t", rule=rule)
        assert caught.value.column == "tags"
        assert caught.value.hint


def test_nothing_asked_and_nothing_held(pond: LocalPond) -> None:
    state = longs(pond)
    for rule in RULES.values():
        found = state.fetch(key="k", at="t", into="a", rule=rule).now(asked([], []))
        assert found.column_names == ["k", "t", "a"]
        assert found.num_rows == 0
    updater(state)
    state.finish("feed")
    assert as_of(state, [1], [1]) == [None]
    assert state.snapshot().num_rows == 0


# Epochs


def test_a_replay_changes_nothing_whatever_the_order_of_its_rows(pond: LocalPond) -> None:
    state = longs(pond)
    op = updater(state, delay=100)
    op(rows([1, 2, 3], [10, 20, 30], [1, 2, 3]), 0)
    op(rows([1, 2], [40, 50], [4, 5]), 1)
    before = (state.progress(), held(state), pond.metrics()["states"])

    first = op(rows([3, 1, 2], [30, 10, 20], [3, 1, 2]), 0)
    assert (first.replayed, first.rows, first.watermark) == (True, 3, -70)
    assert op(rows([1, 2], [40, 50], [4, 5]), 1).replayed
    # A new operator of the same name continues where the old one stopped.
    assert updater(state, delay=100)(rows([1, 2], [40, 50], [4, 5]), 1).replayed
    assert (state.progress(), held(state), pond.metrics()["states"]) == before
    assert pond.metrics()["coordinator"]["epochs_replayed"] == 3


@pytest.mark.parametrize(
    "changed",
    [
        rows([1, 2], [10, 20], [1, 3]),
        rows([1, 2], [10, 21], [1, 2]),
        rows([1, 3], [10, 20], [1, 2]),
        rows([1], [10], [1]),
        rows([1, 2, 2], [10, 20, 20], [1, 2, 2]),
        rows([1, 2], [10, 20], [1, None]),
        rows([], [], []),
    ],
    ids=["value", "time", "key", "missing", "twice", "null", "empty"],
)
def test_an_epoch_replayed_with_other_rows_is_an_error(pond: LocalPond, changed: pa.Table) -> None:
    state = longs(pond)
    op = updater(state, delay=100)
    op(rows([1, 2], [10, 20], [1, 2]), 0)
    before = (state.progress(), held(state))

    with pytest.raises(EpochChanged) as caught:
        op(changed, 0)

    assert caught.value.epoch == 0
    assert caught.value.hint
    assert (state.progress(), held(state)) == before
    assert op(rows([1], [30], [3]), 1).rows == 1


def test_epochs_are_consecutive_from_wherever_they_begin(pond: LocalPond) -> None:
    state = longs(pond)
    op = state.update(key="k", at="t", value="v", name="feed", history="new")
    op(rows([1], [10], [1]), 7)
    for epoch, expected in [(9, 8), (6, 8), (0, 8)]:
        with pytest.raises(EpochOutOfOrder) as caught:
            op(rows([1], [20], [2]), epoch)
        assert (caught.value.epoch, caught.value.expected) == (epoch, expected)
        assert caught.value.hint
    assert op(rows([1], [20], [2]), 8).rows == 1
    # Another query of the same updater numbers its own.
    assert op.commit(rows([1], [30], [3]), 0, "q-2").rows == 1


def test_replays_of_long_ago_are_still_no_ops(pond: LocalPond) -> None:
    state = longs(pond)
    op = updater(state)
    for epoch in range(80):
        op(rows([1], [epoch], [epoch]), epoch)
    assert op(rows([1], [0], [0]), 0).replayed
    assert held(state) == {1: (78, 78)}


# The pond's own face


def test_states_containers_placement_and_metrics() -> None:
    with LocalPond(LossyFiles(), containers=3, slices=8) as pond:
        longs(pond, "b")
        pond.state("a", key="x string, y long", value="array<float>")
        updater(pond.states()["b"])(rows([1, 2], [1, 2], [1, 2]), 0)

        assert list(pond.states()) == ["a", "b"]
        assert (pond.states()["a"].key, pond.states()["a"].value) == (
            pond.state("a").key,
            pond.state("a").value,
        )
        containers = pond.containers()
        assert [container.id for container in containers] == [0, 1, 2]
        assert sorted(number for container in containers for number in container.slices) == list(range(8))
        assert {len(container.slices) for container in containers} <= {2, 3}
        placement = pond.placement()
        assert placement == {n: container.id for container in containers for n in container.slices}
        metrics = pond.metrics()
        assert set(metrics) >= {"coordinator", "containers", "states", "groups"}
        assert metrics["coordinator"]["epochs_committed"] == 1
        assert sum(figures["rows_applied"] for figures in metrics["containers"].values()) == 2
        assert metrics["states"]["b"]["keys"] == 2


def test_a_state_opened_with_another_schema_shows_both(pond: LocalPond) -> None:
    pond.state("s", key="ad long", value="price double")
    same = pond.state("s", key="`ad` BIGINT", value="price: double")
    assert (same.key, same.value) == (pond.state("s").key, pond.state("s").value)
    others = [
        {"key": "ad string", "value": "price double"},
        {"key": "id long", "value": "price double"},
        {"key": "ad long", "value": "price float"},
        {"key": "ad long", "value": "price double, n long"},
        {"key": "ad long", "value": "price double", "compact": mp.keep_all()},
    ]
    for other in others:
        with pytest.raises(SchemaMismatch) as caught:
            pond.state("s", **other)
        for shown in (caught.value.existing, caught.value.requested):
            assert shown in caught.value.message
        assert caught.value.existing != caught.value.requested
        assert caught.value.resident == "s"
        assert caught.value.hint
    assert list(pond.states()) == ["s"]


def test_states_do_not_share_what_they_hold(pond: LocalPond) -> None:
    one, two = longs(pond, "one"), longs(pond, "two")
    updater(one)(rows([1], [10], [1]), 0)
    updater(two)(rows([1], [20], [2]), 0)
    for state in (one, two):
        state.finish("feed")
    assert (held(one), held(two)) == ({1: (10, 1)}, {1: (20, 2)})


@pytest.mark.parametrize("containers", [1, 2, 5])
def test_all_of_it_survives_reopening_with_any_number_of_containers(containers: int) -> None:
    files = LossyFiles()
    with LocalPond(files, containers=3, slices=8) as pond:
        state = pond.state("s", key="string", value="array<float>")
        table = rows(
            [f"k{n}" for n in range(100)],
            list(range(100)),
            [[n / 2] for n in range(100)],
            key=pa.string(),
            value=pa.list_(pa.float32()),
        )
        op = updater(state, delay=10)
        op(table.slice(0, 60), 0)
        pond.checkpoint()
        op(table.slice(60), 1)
        state.report("views", fetch=5)
        before = (state.progress(), held(state))
    with LocalPond(files, containers=containers) as pond:
        state = pond.state("s")
        assert (state.progress(), held(state)) == before
        assert updater(state, delay=10)(table.slice(60), 1).replayed
        pond.validate()


def test_two_fetches_of_one_name_on_arrow_tables_lose_no_rows(pond: LocalPond) -> None:
    state = pond.state("s", key="long", value="long")
    feed = state.update(key="k", at="t", value="v", name="feed")
    feed(pa.table({"k": [1], "t": [10], "v": [5]}), 0)
    got: list[Any] = []
    one, two = (
        state.fetch(key="k", at="t", into="x", name="views").to(lambda rows, _: got.extend(rows.to_pylist()))
        for _ in range(2)
    )
    one(pa.table({"k": [1], "t": [50]}), 0)
    one(pa.table({"k": [1], "t": [50]}), 0)
    for operator in (one, two):
        with pytest.raises(EpochChanged):
            operator(pa.table({"k": [2], "t": [50]}), 0)
    two(pa.table({"k": [2], "t": [50]}), 1)
    state.finish("feed")
    assert one.drain().rows == 0
    assert sorted((row["k"], row["x"]) for row in got) == [(1, 5), (2, None)]


def test_an_uncommitted_fetch_has_a_turn_due_as_soon_as_there_is_any_u(pond: LocalPond) -> None:
    state = pond.state("s", key="long", value="v long")
    update = state.update(key="k", at="t", value="v", name="feed")
    fetch = state.fetch(key="k", at="t", into="v", isolation="uncommitted", name="views")
    answers: list[Any] = []
    views = fetch.to(lambda table, epoch: answers.extend(table["v"].to_pylist()))
    views(pa.table({"k": [1], "t": [100]}), 0)
    assert (answers, views.pending().rows, views.due()) == ([], 1, {})
    update(pa.table({"k": [1], "t": [5], "v": [7]}), 0)
    assert list(views.due()) == ["local"]
    views.drain()
    assert answers == [7]
