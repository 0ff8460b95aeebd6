"""The oracle of windows beside DuckDB over all rows at once, its aggregates, and what its updates come to."""

from __future__ import annotations

import math
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.testing import WindowOracle
from millpond.testing import window_aggregates as agg
from millpond.testing.window_kinds import Kind, session, sliding, tumbling
from millpond.testing.windows import Row

INF = math.inf
LOWEST, HIGHEST = -(2**63), 2**63 - 1


# Aggregates


def of(aggregate: Any, *values: Any) -> Any:
    return aggregate([{"v": value} for value in values])


def test_aggregates() -> None:
    values = (3, None, -1, 7, 3)
    assert of(agg.count(), *values) == 5
    assert of(agg.count("v"), *values) == 4
    assert of(agg.total("v"), *values) == 12
    assert of(agg.mean("v"), *values) == 3.0
    assert of(agg.smallest("v"), *values) == -1
    assert of(agg.largest("v"), *values) == 7
    assert of(agg.top(3, "v"), *values) == [7, 3, 3]
    assert of(agg.top(9, "v"), *values) == [7, 3, 3, -1]
    assert of(agg.median("v"), *values) == 3.0
    assert of(agg.median("v"), 1, 2) == 1.5
    assert of(agg.percentile(0.25, "v"), 1, 2, 3, 4) == 1.75
    assert of(agg.percentile(1, "v"), 4, 1) == 4.0
    assert of(agg.collect("v"), *values) == list(values)
    assert of(agg.user("", lambda text, value: f"{text}{value}", None, "v"), *values) == "3-173"
    assert of(agg.function(lambda column: column[-1] - column[0], "v"), *values) == 0
    assert of(agg.function(list, "v"), *values) == list(values)
    assert of(agg.latest("v"), *values, None) is None
    assert of(agg.where_largest("v"), *values) == [{"v": 7}]


def test_aggregates_of_nothing() -> None:
    for make in (agg.total, agg.mean, agg.smallest, agg.largest, agg.median):
        assert of(make("v"), None, None) is None
    assert of(agg.top(1, "v"), None) == []
    assert of(agg.percentile(0.5, "v"), None) is None
    assert of(agg.user(0, max, max, "v"), None) is None
    assert of(agg.function(len, "v"), None) == 1
    assert of(agg.where_largest("v"), None) == []
    assert of(agg.count("v"), None) == 0
    assert of(agg.collect("v"), None, None) == [None, None]


def test_aggregates_at_the_ends_of_numbers() -> None:
    assert of(agg.total("v"), HIGHEST, 1, -1) == HIGHEST
    assert of(agg.total("v"), HIGHEST, 1) is None
    assert of(agg.mean("v"), HIGHEST, HIGHEST) == float(HIGHEST)
    assert of(agg.median("v"), LOWEST, HIGHEST) == -0.5
    assert of(agg.total("v"), 1e308, 1e308, -1e308) == 1e308
    assert of(agg.total("v"), 1e16, 1.0, -1e16) == 1.0
    assert of(agg.largest("v"), 1.0, math.nan, INF) != of(agg.largest("v"), 1.0, INF)
    assert of(agg.smallest("v"), math.nan, 1.0) == 1.0
    assert of(agg.total("v"), INF, 1.0) == INF
    assert of(agg.largest("v"), "b", "é", "a") == "é"


def test_columns_of_a_function_are_of_the_same_rows_in_time_order() -> None:
    made = WindowOracle(
        tumbling(10), {"pairs": agg.function(lambda v, w: list(zip(v, w, strict=True)), "v", "w")}
    )
    made.epoch(0, [("k", 2, {"v": 2, "w": 20}), ("k", 1, {"v": 1, "w": None})])
    made.epoch(1, [("k", 0, {"v": 0, "w": 5}), ("k", 2, {"v": 3, "w": 30})])
    assert [row["pairs"] for row in made.finish().rows] == [[(0, 5), (1, None), (2, 20), (3, 30)]]


# Beside DuckDB, over all rows at once

DISORDER = 25
SUMMARY = {
    "n": agg.count(),
    "vs": agg.count("v"),
    "total": agg.total("v"),
    "mean": agg.mean("v"),
    "smallest": agg.smallest("v"),
    "largest": agg.largest("v"),
    "top": agg.top(2, "v"),
    "median": agg.median("v"),
    "percentile": agg.percentile(0.9, "v"),
    "all": agg.collect("v"),
}
SUMMARY_SQL = """
    count(*) AS n, count(v) AS vs, sum(v)::BIGINT AS total, avg(v) AS mean, min(v) AS smallest, max(v) AS largest,
    list(v ORDER BY v DESC) FILTER (v IS NOT NULL)[:2] AS top, median(v)::DOUBLE AS median,
    quantile_cont(v::DOUBLE, 0.9) AS percentile, list(v ORDER BY t, place) AS "all"
"""
TUMBLING = """
    SELECT t - ((t - $offset) % $size + $size) % $size AS window_start, window_start + $size AS window_end, key,
"""
SLIDING = """
    SELECT window_start, window_start + $size AS window_end, key,
"""
SLID = """
    (SELECT *, unnest(generate_series(t - (t % $slide + $slide) % $slide, t - $size + 1, -$slide)) AS window_start FROM r)
"""
SESSIONS = """
    SELECT min(t) AS window_start, max(t) + $gap AS window_end, key,
"""
SPACED = """
    (SELECT *, count(*) FILTER (silence IS NULL OR silence > $gap OR (silence = $gap AND NOT $touching)) OVER (
            PARTITION BY key ORDER BY t RANGE UNBOUNDED PRECEDING) AS session
        FROM (SELECT *, t - lag(t) OVER (PARTITION BY key ORDER BY t) AS silence FROM r))
"""

steps = st.tuples(
    st.integers(0, 2), st.integers(0, 12), st.integers(0, DISORDER), st.none() | st.integers(-9, 9)
)
streams = st.tuples(
    st.integers(-100, 100), st.lists(st.lists(steps, max_size=8), min_size=1, max_size=5).filter(any)
)


def epochs_of(stream: Any) -> list[list[Row]]:
    """Time goes on by steps, and rows are older by some: with a delay of as much, none is late."""
    now, drawn = stream
    epochs = []
    for steps_taken in drawn:
        epoch: list[Row] = []
        for key, step, back, value in steps_taken:
            now += step
            epoch.append((key, now - back, {"t": now - back, "v": value}))
        epochs.append(epoch)
    return epochs


def by_duckdb(connection: duckdb.DuckDBPyConnection, sql: str, epochs: list[list[Row]], **params: Any) -> Any:
    flat = [(key, time, values["v"]) for epoch in epochs for key, time, values in epoch]
    names = {"place": range(len(flat)), "key": [r[0] for r in flat], "t": [r[1] for r in flat]}
    table = pa.table({**names, "v": pa.array([r[2] for r in flat], pa.int64())})
    connection.register("r", table)
    return connection.sql(sql, params=params).to_arrow_table().to_pylist()


@pytest.fixture(scope="module")
def connection() -> Any:
    with duckdb.connect() as made:
        made.execute("SET threads = 1")
        yield made


def check_beside(connection: Any, window: Kind, sql: str, stream: Any, **params: Any) -> None:
    epochs = epochs_of(stream)
    made = WindowOracle(window, SUMMARY, sources={"feed": DISORDER})
    answers = []
    for number, epoch in enumerate(epochs):
        fired = made.epoch(number, epoch)
        made.validate()
        assert all(row["window_end"] <= fired.watermark for row in fired.rows)
        answers += fired.rows
    answers += made.finish().rows
    assert made.late == 0

    def sort(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return sorted(rows, key=lambda row: (row["window_start"], row["window_end"], row["key"]))

    expected = by_duckdb(connection, sql, epochs, **params)
    for row in (*expected, *answers):
        row["top"] = row["top"] or []  # to DuckDB, what has no values is null
        for name in ("mean", "percentile"):
            row[name] = row[name] if row[name] is None else round(row[name], 9)
    assert sort(answers) == sort(expected)


@settings(max_examples=20)
@given(streams, st.integers(1, 30), st.integers(-40, 40))
def test_tumbling_is_as_duckdb_has_it(connection: Any, stream: Any, size: int, offset: int) -> None:
    sql = f"{TUMBLING} {SUMMARY_SQL} FROM r GROUP BY ALL"
    check_beside(connection, tumbling(size, offset), sql, stream, size=size, offset=offset)


@settings(max_examples=20)
@given(streams, st.integers(1, 30), st.integers(1, 30))
def test_sliding_is_as_duckdb_has_it(connection: Any, stream: Any, size: int, slide: int) -> None:
    sql = f"{SLIDING} {SUMMARY_SQL} FROM {SLID} GROUP BY ALL"
    check_beside(connection, sliding(size, slide), sql, stream, size=size, slide=slide)


@settings(max_examples=20)
@given(streams, st.integers(1, 20), st.booleans())
def test_sessions_are_as_duckdb_has_them(connection: Any, stream: Any, gap: int, touching: bool) -> None:
    sql = f"{SESSIONS} {SUMMARY_SQL} FROM {SPACED} GROUP BY key, session"
    check_beside(connection, session(gap, touching=touching), sql, stream, gap=gap, touching=touching)


# Updates come to the same


@settings(max_examples=40)
@given(
    streams, st.sampled_from([tumbling(13), sliding(12, 5), session(7)]), st.lists(st.booleans(), min_size=5)
)
def test_the_last_updates_are_what_closes(stream: Any, window: Kind, emitting: list[bool]) -> None:
    closing = WindowOracle(window, SUMMARY, sources={"feed": DISORDER})
    updating = WindowOracle(window, SUMMARY, sources={"feed": DISORDER}, emit="update")
    closed: list[Any] = []
    latest: dict[Any, Any] = {}
    for number, epoch in enumerate(epochs_of(stream)):
        closed += closing.epoch(number, epoch).rows
        take(latest, updating.epoch(number, epoch, emitting=emitting[number]).rows)
        updating.validate()
    closed += closing.finish().rows
    take(latest, updating.finish().rows)
    assert sorted(map(repr, closed)) == sorted(map(repr, latest.values()))


def take(latest: dict[Any, Any], updates: list[dict[str, Any]]) -> None:
    """As one does who keeps the newest: what is retracted goes first."""
    for update in sorted(updates, key=lambda row: not row.get("retracted", False)):
        number, is_retracted = update.pop("session_id", None), update.pop("retracted", False)
        edges = (update["window_start"], update["window_end"])
        identity = edges if number is None else number, update["key"]
        if is_retracted:
            gone = latest.pop(identity)
            assert edges == (gone["window_start"], gone["window_end"])
        else:
            latest[identity] = update
