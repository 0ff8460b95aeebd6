"""The oracles of joins and of deduplication: by examples worked out by hand, and joins beside DuckDB."""

from __future__ import annotations

from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.errors import BadOption
from millpond.testing import DedupOracle, Fired, IntervalJoinOracle, WindowJoinOracle
from millpond.testing.window_kinds import session, sliding, tumbling
from millpond.testing.windows import Row


def left(*times: int, key: Any = "k") -> list[Row]:
    return [(key, time, {"l": time}) for time in times]


def right(*times: int, key: Any = "k") -> list[Row]:
    return [(key, time, {"r": time}) for time in times]


def pairs(fired: Fired) -> list[tuple[int, int]]:
    return sorted((row["l"], row["r"]) for row in fired.rows)


def test_pairs_of_a_window_fire_at_its_end_by_the_slower_side() -> None:
    made = WindowJoinOracle(tumbling(10))
    assert made.epoch(0, left(1, 2, 15), "left").rows == []
    assert made.epoch(0, [*right(3, 9), *right(4, key="other")], "right").rows == []
    assert len(made.now()) == 4
    fired = made.epoch(1, right(12), "right")
    assert fired.rows[0] == {"window_start": 0, "window_end": 10, "key": "k", "l": 1, "r": 3}
    assert pairs(fired) == [(1, 3), (1, 9), (2, 3), (2, 9)]
    assert pairs(made.finish()) == [(15, 12)]
    made.validate()


def test_a_side_that_is_idle_does_not_hold_up_the_other() -> None:
    made = WindowJoinOracle(tumbling(10))
    made.epoch(0, right(3), "right")
    made.epoch(0, left(1, 25), "left")
    assert pairs(made.idle("right")) == [(1, 3)]
    assert made.epoch(1, right(4), "right").late_rows == right(4)


def test_rows_within_the_lateness_give_the_pairs_that_are_new() -> None:
    made = WindowJoinOracle(tumbling(10), lateness=100)
    made.epoch(0, left(1, 20), "left")
    assert pairs(made.epoch(0, right(3, 20), "right")) == [(1, 3)]
    assert pairs(made.epoch(1, left(2), "left")) == [(2, 3)]
    assert pairs(made.epoch(1, right(4), "right")) == [(1, 4), (2, 4)]


def test_sides_make_sessions_together() -> None:
    made = WindowJoinOracle(session(10))
    made.epoch(0, left(0, 30), "left")
    made.epoch(0, right(8, 16), "right")
    fired = made.finish()
    assert pairs(fired) == [(0, 8), (0, 16)]
    assert {(row["window_start"], row["window_end"]) for row in fired.rows} == {(0, 26)}


def test_sides_have_columns_of_their_own_but_for_the_key() -> None:
    made = WindowJoinOracle(tumbling(10))
    made.epoch(0, [("k", 1, {"key": "k", "v": 1})], "left")
    made.epoch(0, [("k", 1, {"key": "k", "v": 1})], "right")
    with pytest.raises(BadOption):
        made.finish()


def test_interval_pairs_come_with_the_second_row() -> None:
    made = IntervalJoinOracle(-2, 5)
    assert made.epoch(0, left(10, 20), "left").rows == []
    fired = made.epoch(0, [*right(7, 8, 15, 16, 18), *right(10, key="other")], "right")
    assert pairs(fired) == [(10, 8), (10, 15), (20, 18)]
    assert fired.rows[0] == {"key": "k", "l": 10, "r": 8}
    assert pairs(made.epoch(1, left(21, 19), "left")) == [], "19 is late, it would have had 18"
    assert made.late == 1
    assert pairs(made.epoch(1, right(25), "right")) == [(20, 25), (21, 25)]
    assert made.epoch(1, right(25), "right").replayed
    assert made.finish().rows == []
    with pytest.raises(BadOption):
        IntervalJoinOracle(1, 0)


def test_a_row_at_the_watermark_is_not_late_nor_one_within_the_lateness() -> None:
    for lateness, late in ((0, left(9, 6)), (3, left(6))):
        made = IntervalJoinOracle(0, 0, lateness=lateness)
        made.epoch(0, left(10), "left")
        assert made.epoch(1, left(10, 9, 6), "left").late_rows == late


def test_the_first_row_of_a_key_is_let_through() -> None:
    made = DedupOracle(10, sources={"feed": 100})
    assert made.epoch(0, [("a", 5, {"v": 1}), ("a", 3, {"v": 2}), ("b", 9, {"v": 3})]).rows == [
        {"key": "a", "v": 2},
        {"key": "b", "v": 3},
    ]
    assert [row["v"] for row in made.epoch(1, [("a", 12, {"v": 4}), ("a", 13, {"v": 5})]).rows] == [5]
    # Nearer than ten to the row at 3, though that came before it.
    assert made.epoch(2, [("a", -6, {"v": 6})]).rows == []
    assert [row["v"] for row in made.epoch(3, [("a", -7, {"v": 7})]).rows] == [7]
    assert made.dropped == 3
    for_ever = DedupOracle()
    assert len(for_ever.epoch(0, left(0, 0)).rows) == 1
    assert for_ever.epoch(1, left(10**9)).rows == []
    fired = for_ever.epoch(2, left(5, key="new"))
    assert (fired.rows, fired.late_rows, for_ever.dropped) == ([], left(5, key="new"), 2)
    with pytest.raises(BadOption):
        DedupOracle(0)


sides = st.lists(st.tuples(st.integers(0, 2), st.integers(-30, 30)), min_size=1, max_size=15)


@pytest.fixture(scope="module")
def connection() -> Any:
    with duckdb.connect() as made:
        made.execute("SET threads = 1")
        yield made


@settings(max_examples=20)
@given(sides, sides, st.integers(1, 12), st.integers(1, 12), st.integers(1, 15))
def test_joins_are_as_duckdb_has_them(
    connection: Any, lefts: Any, rights: Any, size: int, slide: int, cut: int
) -> None:
    for name, rows in (("lefts", lefts), ("rights", rights)):
        connection.register(name, pa.table({"key": [k for k, _ in rows], "t": [t for _, t in rows]}))
    slid = "unnest(generate_series(t - (t % $slide + $slide) % $slide, t - $size + 1, -$slide)) AS s"
    windowed = f"""
        SELECT l.s, l.key, l.t, r.t FROM (SELECT *, {slid} FROM lefts) l
        JOIN (SELECT *, {slid} FROM rights) r USING (key, s)
    """
    near = "SELECT key, l.t, r.t FROM lefts l JOIN rights r USING (key) WHERE r.t - l.t BETWEEN -$slide AND $size"

    def run(made: Any) -> list[dict[str, Any]]:
        given_rows = {"left": [("l", *row) for row in lefts], "right": [("r", *row) for row in rights]}
        results = []
        for number, part in enumerate((slice(None, cut), slice(cut, None))):
            for source, rows in given_rows.items():
                rows_now = [(key, time, {column: time}) for column, key, time in rows[part]]
                results += made.epoch(number, rows_now, source).rows
        return results + made.finish().rows

    answers = run(WindowJoinOracle(sliding(size, slide), left_delay=60, right_delay=60))
    expected = connection.sql(windowed, params={"size": size, "slide": slide}).fetchall()
    assert sorted((row["window_start"], row["key"], row["l"], row["r"]) for row in answers) == sorted(
        expected
    )

    answers = run(IntervalJoinOracle(-slide, size, left_delay=60, right_delay=60))
    expected = connection.sql(near, params={"size": size, "slide": slide}).fetchall()
    assert sorted((row["key"], row["l"], row["r"]) for row in answers) == sorted(expected)
