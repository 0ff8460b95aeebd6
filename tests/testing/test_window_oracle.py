"""The oracle of windows, judged itself, by examples worked out by hand. `test_window_truth.py` has it beside DuckDB."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from millpond.errors import (
    BadOption,
    EpochChanged,
    EpochOutOfOrder,
    UnknownUpdater,
    UpdaterFinished,
)
from millpond.testing import window_aggregates as agg
from millpond.testing.window_kinds import Kind, counted, custom, everything, session, sliding, tumbling
from millpond.testing.windows import Fired, Row, WindowOracle

INF = math.inf
LOWEST, HIGHEST = -(2**63), 2**63 - 1
COUNT = {"n": agg.count()}
TIMES = {"times": agg.collect("t")}


def rows(*times: int, key: Any = "k", **values: Any) -> list[Row]:
    return [(key, time, {"t": time, **values}) for time in times]


def oracle(window: Kind, aggregate: Mapping[str, Any] = TIMES, **options: Any) -> WindowOracle:
    return WindowOracle(window, aggregate, **options)


def brief(fired: Fired) -> list[tuple[Any, ...]]:
    """Start, end and the values, of one key."""
    return [(row["window_start"], row["window_end"], *list(row.values())[3:]) for row in fired.rows]


def all_at_once(window: Kind, *times: int, **values: Any) -> list[tuple[Any, ...]]:
    made = oracle(window)
    assert made.epoch(0, []).rows == []
    # The delay is more than there is time: nothing fires before the end.
    made.watermarks.sources["feed"].delay = 2**64
    assert made.epoch(1, rows(*times, **values)).rows == []
    fired = brief(made.finish())
    assert made.finish().rows == []
    made.validate()
    return fired


# Which windows


def test_tumbling() -> None:
    assert all_at_once(tumbling(10), 0, 9, 10, -1, -10, -11) == [
        (-20, -10, [-11]),
        (-10, 0, [-10, -1]),
        (0, 10, [0, 9]),
        (10, 20, [10]),
    ]
    assert all_at_once(tumbling(10, 3), 2, 3, 12, 13) == [(-7, 3, [2]), (3, 13, [3, 12]), (13, 23, [13])]
    assert all_at_once(tumbling(10, -7), 2, 3) == all_at_once(tumbling(10, 3), 2, 3)


def test_sliding() -> None:
    assert all_at_once(sliding(10, 5), 0, 7, -1) == [
        (-10, 0, [-1]),
        (-5, 5, [-1, 0]),
        (0, 10, [0, 7]),
        (5, 15, [7]),
    ]
    assert all_at_once(sliding(7, 3), 6) == [(0, 7, [6]), (3, 10, [6]), (6, 13, [6])]


def test_sliding_by_more_than_the_size_leaves_rows_out_that_are_not_late() -> None:
    made = oracle(sliding(3, 10))
    assert made.epoch(0, rows(2, 3, 9, 10)).late_rows == []
    assert (made.outside, made.late) == (2, 0)
    assert brief(made.finish()) == [(10, 13, [10])]


def test_windows_at_the_ends_of_time_end_there() -> None:
    assert all_at_once(tumbling(10), LOWEST, HIGHEST) == [
        (LOWEST, LOWEST + 8, [LOWEST]),  # -2**63 is 8 below a multiple of ten
        (HIGHEST - 7, HIGHEST, [HIGHEST]),
    ]
    assert all_at_once(session(10), LOWEST, HIGHEST - 3) == [
        (LOWEST, LOWEST + 10, [LOWEST]),
        (HIGHEST - 3, HIGHEST, [HIGHEST - 3]),
    ]
    assert all_at_once(sliding(10, 5), HIGHEST) == [
        (HIGHEST - 7, HIGHEST, [HIGHEST]),
        (HIGHEST - 2, HIGHEST, [HIGHEST]),
    ]
    made = oracle(tumbling(10))
    assert brief(made.epoch(0, rows(HIGHEST))) == [(HIGHEST - 7, HIGHEST, [HIGHEST])]
    assert made.epoch(1, rows(HIGHEST)).late_rows == rows(HIGHEST)


def test_sessions() -> None:
    assert all_at_once(session(10), 0, 9, 18, 28) == [(0, 28, [0, 9, 18]), (28, 38, [28])]
    assert all_at_once(session(10, touching=True), 0, 9, 18, 28, 39) == [
        (0, 38, [0, 9, 18, 28]),
        (39, 49, [39]),
    ]
    assert all_at_once(session(10), -5, -15, -6, -26) == [(-26, -16, [-26]), (-15, 5, [-15, -6, -5])]
    assert all_at_once(session(10), -5, -15) == [(-15, -5, [-15]), (-5, 5, [-5])]


def test_a_row_out_of_order_bridges_two_sessions() -> None:
    made = oracle(session(10), sources={"feed": 30})
    assert made.epoch(0, rows(0)).rows == []
    assert made.epoch(1, rows(15)).rows == []
    assert [row["times"] for row in made.now()] == [[0], [15]]
    assert made.epoch(2, rows(8)).rows == []
    assert [row["times"] for row in made.now()] == [[0, 8, 15]]
    assert brief(made.epoch(3, rows(55))) == [(0, 25, [0, 8, 15])]
    made.validate()


def test_a_rows_own_gap() -> None:
    made = oracle(session("gap"), sources={"feed": 200})
    wide = [("k", 0, {"t": 0, "gap": 100}), ("k", 5, {"t": 5, "gap": 1}), ("k", 99, {"t": 99, "gap": 2})]
    made.epoch(0, [*wide, ("k", 101, {"t": 101, "gap": 7})])
    assert brief(made.finish()) == [(0, 101, [0, 5, 99]), (101, 108, [101])]
    by_function = oracle(session(lambda row: row["t"] + 1), sources={"feed": 200})
    by_function.epoch(0, rows(1, 2, 4, 9))
    assert brief(by_function.finish()) == [(1, 9, [1, 2, 4]), (9, 19, [9])]
    with pytest.raises(BadOption):
        made.epoch(1, [("k", 200, {"t": 200, "gap": 0})])


def test_a_session_is_no_longer_than_the_longest() -> None:
    assert all_at_once(session(10, longest=20), 0, 5, 10, 15, 20, 25, 44) == [
        (0, 20, [0, 5, 10, 15]),
        (20, 35, [20, 25]),
        (44, 54, [44]),
    ]
    assert all_at_once(session(10, longest=4), 0, 3) == [(0, 4, [0, 3])]


def test_a_row_may_end_its_session() -> None:
    made = oracle(session(10, ends_when=lambda row: row["t"] % 5 == 0), sources={"feed": 100})
    made.epoch(0, rows(5, 1, 2, 6, 10, 10, 12))
    assert brief(made.finish()) == [(1, 6, [1, 2, 5]), (6, 11, [6, 10]), (10, 11, [10]), (12, 22, [12])]


def test_counted() -> None:
    made = oracle(counted(3))
    assert brief(made.epoch(0, rows(9, 1, 5, 7))) == [(1, 8, [1, 5, 7])]
    assert made.epoch(1, rows(100, key="other")).rows == []
    # The row at 9 came first, whatever its time: an epoch ends before the next begins. None is late.
    fired = made.epoch(2, rows(2, 3, 4))
    assert brief(fired) == [(2, 10, [2, 3, 9])]
    assert fired.late_rows == []
    assert sorted(brief(made.finish())) == [(4, 5, [4]), (100, 101, [100])]
    made.validate()


def test_counted_or_after() -> None:
    made = oracle(counted(3, or_after=10))
    assert made.epoch(0, rows(5, 6)).rows == []
    assert made.epoch(1, rows(14, key="other")).rows == []
    assert brief(made.epoch(2, rows(15, key="other"))) == [(5, 7, [5, 6])]
    assert brief(made.epoch(3, rows(4))) == [(4, 5, [4])], "the watermark is there already"


def test_counted_or_after_goes_by_the_row_that_came_first() -> None:
    made = oracle(counted(3, or_after=10), sources={"feed": 5})
    made.epoch(0, rows(8))
    made.epoch(1, rows(5))
    assert made.epoch(2, rows(22, key="other")).rows == [], "17: after 5 + 10, not after 8 + 10"
    assert brief(made.epoch(3, rows(23, key="other"))) == [(5, 9, [5, 8])]


def test_everything_fires_at_the_end_alone() -> None:
    made = oracle(everything())
    assert made.epoch(0, rows(HIGHEST, LOWEST)).rows == []
    assert made.epoch(1, rows(0)).late_rows == []
    assert brief(made.finish()) == [(None, None, [LOWEST, 0, HIGHEST])]


def test_windows_of_ones_own() -> None:
    made = oracle(
        custom(lambda time: [(0, 100), (50, 60)] if 50 <= time < 60 else [(0, 100)] if time else [])
    )
    made.epoch(0, rows(50, 0))
    assert made.outside == 1
    assert brief(made.epoch(1, rows(60, 59))) == [(50, 60, [50, 59])]
    assert made.epoch(2, rows(58)).late_rows == [], "late for one of two"
    assert brief(made.finish()) == [(0, 100, [50, 58, 59, 60])]


# When they fire


def test_a_window_fires_once_when_the_watermark_is_at_its_end() -> None:
    made = oracle(tumbling(10), sources={"feed": 5})
    assert made.epoch(0, rows(3, 14)).rows == []
    assert brief(made.epoch(1, rows(15))) == [(0, 10, [3])]
    fired = made.epoch(2, rows(9, 10))
    assert (fired.rows, fired.late_rows, fired.watermark) == ([], rows(9), 10)
    assert made.epoch(3, []) == Fired([], [], 10)
    assert brief(made.finish()) == [(10, 20, [10, 14, 15])]
    assert made.late == 1


def test_windows_without_rows_do_not_fire() -> None:
    made = oracle(tumbling(10))
    made.epoch(0, rows(0))
    assert brief(made.epoch(1, rows(1000))) == [(0, 10, [0])]


def test_rows_of_an_epoch_are_late_against_the_watermark_before_it() -> None:
    made = oracle(tumbling(10))
    assert brief(made.epoch(0, rows(100, 1))) == [(0, 10, [1])]
    assert made.epoch(1, rows(200, 99)).late_rows == rows(99)


def test_a_row_may_be_late_for_some_of_its_windows() -> None:
    made = oracle(sliding(10, 5))
    assert brief(made.epoch(0, rows(12))) == []
    fired = made.epoch(1, rows(8, 15))
    assert fired.late_rows == []
    assert brief(fired) == [(5, 15, [8, 12])], "[0, 10) had closed"


def test_lateness() -> None:
    made = oracle(tumbling(10), lateness=7)
    assert brief(made.epoch(0, rows(1, 12))) == [(0, 10, [1])]
    assert brief(made.epoch(1, rows(16))) == []
    assert brief(made.epoch(2, rows(9, 2))) == [(0, 10, [1, 2, 9])], "again, as it is now"
    assert brief(made.epoch(3, rows(3, 17))) == [(0, 10, [1, 2, 3, 9])]
    assert made.epoch(4, rows(4)) == Fired([], rows(4), 17)
    assert brief(made.finish()) == [(10, 20, [12, 16, 17])]
    made.validate()


def test_a_row_that_comes_when_its_session_has_fired_begins_another() -> None:
    made = oracle(session(10))
    assert brief(made.epoch(0, rows(0))) == []
    assert brief(made.epoch(1, rows(12))) == [(0, 10, [0])]
    assert made.epoch(2, rows(2)).late_rows == rows(2), "2 + 10 is not after 12"
    assert made.epoch(3, rows(3)).late_rows == []
    assert brief(made.finish()) == [(3, 22, [3, 12])]


def test_a_session_that_fired_may_grow_within_the_lateness() -> None:
    made = oracle(session(10), lateness=20)
    made.epoch(0, rows(0))
    assert brief(made.epoch(1, rows(18))) == [(0, 10, [0])]
    assert brief(made.epoch(2, rows(5))) == [(0, 15, [0, 5])], "longer, and still behind the watermark"
    assert brief(made.epoch(3, rows(9))) == [], "now all one, up to 28"
    assert brief(made.epoch(4, rows(28))) == [(0, 28, [0, 5, 9, 18])]
    made.validate()


def test_the_lowest_source_counts() -> None:
    made = oracle(tumbling(10), sources={"a": 0, "b": 5})
    assert made.epoch(0, rows(3, 30), "a").watermark == -INF
    assert brief(made.epoch(0, rows(17), "b")) == [(0, 10, [3])]
    assert made.watermark == 12
    # Late is what is behind its own source, even where the window is open.
    assert made.epoch(1, rows(15), "a").late_rows == rows(15)
    assert made.epoch(1, rows(15), "b").late_rows == []
    assert brief(made.finish("b")) == [(10, 20, [15, 17])]
    assert made.watermark == 30
    assert brief(made.finish("a")) == [(30, 40, [30])]
    with pytest.raises(UpdaterFinished):
        made.epoch(2, rows(50), "a")
    with pytest.raises(UnknownUpdater):
        made.epoch(0, rows(50), "c")


def test_an_idle_source_is_left_out_and_comes_back_where_the_others_are() -> None:
    made = oracle(tumbling(10), sources={"a": 0, "b": 0})
    made.epoch(0, rows(3, 30), "a")
    assert brief(made.idle("b")) == [(0, 10, [3])]
    assert made.watermark == 30
    made.epoch(0, [], "b")
    assert made.epoch(1, rows(31), "a").watermark == 31, "without rows it is not back"
    fired = made.epoch(1, rows(5, 35), "b")
    assert (fired.late_rows, fired.watermark) == (rows(5), 31)
    assert made.epoch(2, rows(60), "a").watermark == 35, "it counts again"
    assert made.idle("a").watermark == 35
    fired = made.idle("b")
    assert fired.watermark == 60, "none is active: where the furthest was"
    assert brief(fired) == [(30, 40, [30, 31, 35])]


def test_the_watermark_may_move_without_rows() -> None:
    made = oracle(tumbling(10), sources={"feed": 100})
    made.epoch(0, rows(3))
    assert brief(made.advance(10)) == [(0, 10, [3])]
    assert made.advance(4).watermark == 10
    assert made.epoch(1, rows(4)).late_rows == rows(4)


def test_a_delay_before_all_time_does_not_move_the_watermark() -> None:
    made = oracle(tumbling(10), sources={"feed": 5})
    assert made.epoch(0, rows(LOWEST + 4)).watermark == -INF
    assert made.epoch(1, rows(LOWEST + 5)).watermark == LOWEST


def test_an_epoch_that_comes_again_gives_the_same_and_changes_nothing() -> None:
    made = oracle(tumbling(10))
    first = made.epoch(0, rows(3, 10))
    assert made.epoch(0, rows(10, 3)) == first._replace(replayed=True)
    with pytest.raises(EpochChanged):
        made.epoch(0, rows(3))
    with pytest.raises(EpochOutOfOrder):
        made.epoch(2, rows(3))
    assert brief(made.finish()) == [(10, 20, [10])]


def test_a_key_of_several_columns() -> None:
    made = oracle(tumbling(10), COUNT, key=["a", "b"])
    made.epoch(0, [((1, "x"), 0, {}), ((1, "y"), 1, {}), ((1, "x"), 2, {})])
    assert made.finish().rows == [
        {"window_start": 0, "window_end": 10, "a": 1, "b": "x", "n": 2},
        {"window_start": 0, "window_end": 10, "a": 1, "b": "y", "n": 1},
    ]


def test_a_look_changes_nothing() -> None:
    made = oracle(tumbling(10), COUNT, sources={"feed": 5})
    made.epoch(0, [*rows(1, 2), *rows(12, key="other")])
    assert [(row["key"], row["n"]) for row in made.now()] == [("k", 2), ("other", 1)]
    assert [row["key"] for row in made.now(["other", "nobody"])] == ["other"]
    assert brief(made.copy().finish()) == brief(made.finish())


@pytest.mark.parametrize(
    "call",
    [
        lambda: tumbling(0),
        lambda: sliding(0, 1),
        lambda: sliding(1, 0),
        lambda: session(0),
        lambda: session(1, longest=0),
        lambda: counted(0),
        lambda: agg.top(0, "v"),
        lambda: agg.percentile(101, "v"),
        lambda: oracle(tumbling(1), emit="never"),
        lambda: oracle(tumbling(1), lateness=-1),
        lambda: oracle(counted(1), lateness=1),
    ],
)
def test_what_makes_no_sense_is_refused(call: Any) -> None:
    with pytest.raises(BadOption) as refused:
        call()
    assert refused.value.hint


# Updates


def updates(fired: Fired) -> list[tuple[Any, ...]]:
    return [
        (row["window_start"], row["window_end"], row["times"], row["session_id"], row["retracted"])
        for row in fired.rows
    ]


def test_updates_give_what_changed_and_nothing_more_at_the_close() -> None:
    made = oracle(tumbling(10), emit="update")
    assert brief(made.epoch(0, rows(1))) == [(0, 10, [1])]
    assert brief(made.epoch(1, rows(2))) == [(0, 10, [1, 2])]
    assert brief(made.epoch(2, rows(10))) == [(10, 20, [10])], "the first closes in silence"
    assert brief(made.epoch(3, rows(19, 25))) == [(10, 20, [10, 19]), (20, 30, [25])]
    assert made.finish().rows == []


def test_a_close_between_two_updates_gives_what_was_not_yet_seen() -> None:
    made = oracle(tumbling(10), emit="update")
    assert brief(made.epoch(0, rows(1), emitting=False)) == []
    assert brief(made.epoch(1, rows(2, 12), emitting=False)) == [(0, 10, [1, 2])]
    assert brief(made.epoch(2, [])) == [(10, 20, [12])]
    assert made.finish().rows == []


def test_sessions_that_merge_keep_the_first_id_and_retract_the_others() -> None:
    made = oracle(session(10), emit="update", sources={"feed": 50})
    assert updates(made.epoch(0, rows(20))) == [(20, 30, [20], 0, False)]
    assert updates(made.epoch(1, rows(0, 35))) == [(0, 10, [0], 1, False), (35, 45, [35], 2, False)]
    assert updates(made.epoch(2, rows(9, 11))) == [
        (0, 10, None, 1, True),
        (0, 30, [0, 9, 11, 20], 0, False),
    ]
    assert updates(made.epoch(3, rows(28))) == [
        (0, 45, [0, 9, 11, 20, 28, 35], 0, False),
        (35, 45, None, 2, True),
    ]
    assert made.finish().rows == []
    made.validate()


def test_sessions_merged_before_they_were_seen_are_not_retracted() -> None:
    made = oracle(session(10), emit="update", sources={"feed": 50})
    made.epoch(0, rows(0, 15), emitting=False)
    assert updates(made.epoch(1, rows(8))) == [(0, 25, [0, 8, 15], 0, False)]


def test_a_session_cut_anew_keeps_its_id_where_its_first_row_is() -> None:
    made = oracle(session(10, longest=10), emit="update", sources={"feed": 50})
    assert updates(made.epoch(0, rows(0, 8))) == [(0, 10, [0, 8], 0, False)]
    assert updates(made.epoch(1, rows(-5))) == [(-5, 5, [-5, 0], 0, False), (8, 18, [8], 1, False)]


def test_the_first_row_of_a_session_may_come_later() -> None:
    made = oracle(session(10, longest=10), emit="update", sources={"feed": 50})
    made.epoch(0, rows(5))
    assert updates(made.epoch(1, rows(0))) == [(0, 10, [0, 5], 0, False)]
    assert updates(made.epoch(2, rows(-6))) == [(-6, 4, [-6, 0], 0, False), (5, 15, [5], 1, False)]
