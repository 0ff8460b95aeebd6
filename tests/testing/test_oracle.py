"""The oracle judges the pond, so it is judged itself: by examples worked out by hand, and by invariants."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.errors import (
    BadOption,
    BelowFetchProgress,
    EpochChanged,
    EpochOutOfOrder,
    LateRows,
    MillpondError,
    RowsWaiting,
    TotalOverflow,
    UnknownUpdater,
    UpdaterFinished,
)
from millpond.testing import Oracle, Receipt

INF = math.inf
LOWEST, HIGHEST = -(2**63), 2**63 - 1


def oracle(*updaters: str, keep: Any = "latest") -> Oracle:
    made = Oracle(keep)
    for name in updaters:
        made.register_updater(name)
    return made


def filled(*rows: tuple[Any, int, Any], keep: Any = "latest") -> Oracle:
    """These rows, all final."""
    made = oracle("feed", keep=keep)
    made.update("feed", 0, rows)
    made.finish("feed")
    return made


def unchanged_by(made: Oracle, error: type[MillpondError], call: Callable[[Oracle], object]) -> MillpondError:
    before = made.copy()
    with pytest.raises(error) as caught:
        call(made)
    assert vars(made) == vars(before)
    return caught.value


# Progress


def test_without_updaters_and_fetchers_both_progresses_are_minus_infinity() -> None:
    made = Oracle()
    assert (made.update_progress, made.fetch_progress) == (-INF, -INF)


def test_update_progress_is_the_least_of_all_updaters() -> None:
    made = oracle("a", "b")
    made.update("a", 0, [("k", 100, 1)])
    assert made.update_progress == -INF
    made.update("b", 0, [("k", 50, 1)])
    assert made.update_progress == 50
    made.finish("b")
    assert made.update_progress == 100
    made.finish("a")
    assert made.update_progress == INF


def test_a_new_updater_starts_at_u_once_u_is_known_and_a_known_name_stays_where_it_is() -> None:
    made = oracle("a")
    made.update("a", 0, [("k", 100, 1)])
    made.register_updater("b")
    assert made.updaters["b"].progress == 100
    made.update("a", 1, [("k", 200, 1)])
    made.register_updater("a")
    made.register_updater("b")
    assert (made.updaters["a"].progress, made.updaters["b"].progress) == (200, 100)


def test_a_new_updater_beside_one_that_has_not_started_starts_at_minus_infinity() -> None:
    made = oracle("idle", "a")
    made.update("a", 0, [("k", 100, 1)])
    made.register_updater("b")
    assert made.updaters["b"].progress == -INF


def test_the_watermark_is_the_highest_time_less_the_delay_and_never_falls() -> None:
    made = oracle("a")
    watermarks = []
    for epoch, (times, delay) in enumerate([([7, 30, 10], 5), ([], 0), ([26], 5), ([27], 20), ([40], 0)]):
        made.update("a", epoch, [("k", time, 0) for time in times], delay=delay)
        watermarks.append(made.update_progress)
    assert watermarks == [25, 25, 25, 25, 40]


def test_an_epoch_of_late_rows_alone_leaves_the_watermark() -> None:
    made = oracle("a")
    made.update("a", 0, [("k", 100, 1)])
    assert made.update("a", 1, [("k", 99, 2), ("k", 5, 3)]) == Receipt(0, 2, False)
    assert made.update_progress == 100


def test_reports_only_rise_and_go_to_updater_and_fetcher_apart() -> None:
    made = oracle("q")
    made.register_fetcher("q")
    made.report("q", update=10, fetch=5)
    made.report("q", update=9, fetch=4)
    assert (made.update_progress, made.fetch_progress) == (10, 5)
    made.report("q", fetch=INF)
    assert (made.update_progress, made.fetch_progress) == (10, INF)


def test_fetch_progress_is_the_least_of_all_fetchers_and_a_newcomer_starts_there() -> None:
    made = Oracle()
    made.register_fetcher("a")
    made.report("a", fetch=10)
    made.register_fetcher("b")
    assert made.fetchers["b"] == made.fetch_progress == 10
    made.report("a", fetch=30)
    made.register_fetcher("a")
    assert (made.fetch_progress, made.fetchers["a"]) == (10, 30)
    made.report("b", fetch=20)
    assert made.fetch_progress == 20


@pytest.mark.parametrize(
    "call",
    [
        lambda made: made.update("absent", 0, []),
        lambda made: made.finish("absent"),
        lambda made: made.report("absent", update=1),
        lambda made: made.report("absent", fetch=1),
        lambda made: made.report("feed", update=HIGHEST, fetch=1),
    ],
)
def test_a_name_that_nobody_has_is_refused(call: Callable[[Oracle], object]) -> None:
    unchanged_by(oracle("feed"), UnknownUpdater, call)


# Updates


def test_the_same_key_and_time_is_replaced_and_the_later_row_wins() -> None:
    made = oracle("a")
    made.update("a", 0, [("k", 10, "first"), ("k", 5, "x"), ("k", 10, "second")])
    assert made.raw("k") == [(5, "x"), (10, "second")]
    made.update("a", 1, [("k", 10, "third")])
    assert made.raw("k") == [(5, "x"), (10, "third")]


def test_rows_are_kept_in_time_order_whatever_order_they_came_in() -> None:
    made = oracle("a")
    made.update("a", 0, [("k", time, str(time)) for time in (3, 1, HIGHEST, 2, LOWEST)], delay=HIGHEST)
    assert made.raw("k") == [(time, str(time)) for time in (LOWEST, 1, 2, 3, HIGHEST)]
    assert made.raw("other") == []


def test_rows_below_the_watermark_of_the_previous_epoch_are_late_and_one_at_it_is_not() -> None:
    made = oracle("a")
    assert made.update("a", 0, [("k", 100, 0), ("k", 1, 0)], delay=50) == Receipt(2, 0, False)
    assert made.update("a", 1, [("k", 49, 1), ("k", 50, 1), ("k", 200, 1)], delay=50) == Receipt(2, 1, False)
    assert [time for time, _ in made.raw("k")] == [1, 50, 100, 200]


def test_lateness_is_by_the_updaters_own_watermark_not_by_u() -> None:
    made = oracle("fast", "slow")
    made.update("fast", 0, [("k", 1000, 0)])
    assert made.update("slow", 0, [("k", 1, 0)]) == Receipt(1, 0, False)


def test_late_rows_as_an_error_refuse_the_whole_epoch() -> None:
    made = oracle("a")
    made.update("a", 0, [("k", 100, 0)])
    rows = [("k", 300, 1), ("k", 99, 1), ("k", 98, 1)]
    error = unchanged_by(made, LateRows, lambda o: o.update("a", 1, rows, late="error"))
    assert (error.rows, error.watermark) == (2, 100)  # type: ignore[attr-defined]
    assert made.update("a", 1, rows[:1], late="error") == Receipt(1, 0, False)


# Epochs


def test_the_first_epoch_is_0_and_then_they_follow_one_by_one() -> None:
    made = oracle("a")
    for epoch in (7, 1, -1):
        error = unchanged_by(made, EpochOutOfOrder, lambda o, epoch=epoch: o.update("a", epoch, []))  # type: ignore[misc]
        assert (error.epoch, error.expected) == (epoch, 0)  # type: ignore[attr-defined]
    made.update("a", 0, [("k", 1, 0)])
    for epoch in (2, 9, -1):
        error = unchanged_by(made, EpochOutOfOrder, lambda o, epoch=epoch: o.update("a", epoch, []))  # type: ignore[misc]
        assert (error.epoch, error.expected) == (epoch, 1)  # type: ignore[attr-defined]
    made.update("a", 1, [])


def test_a_replay_in_another_order_changes_nothing() -> None:
    made = oracle("a")
    first = [("k", 10, 1), ("k", 10, 1), ("j", 4, None)]
    made.update("a", 0, first)
    made.update("a", 1, [("k", 10, 2), ("k", 12, 3)])
    before = made.copy()
    assert made.update("a", 0, [first[2], first[0], first[1]]) == Receipt(0, 0, True)
    assert made.update("a", 1, [("k", 10, 2), ("k", 12, 3)]) == Receipt(0, 0, True)
    assert vars(made) == vars(before)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [("k", 10, 1)],
        [("k", 10, 1)] * 3,
        [("k", 10, 1), ("k", 10, 1.0)],
        [("k", 10, 1), ("k", 11, 1)],
        [("k", 10, 1), ("j", 10, 1)],
    ],
)
def test_a_replay_with_other_rows_is_refused(rows: list[Any]) -> None:
    made = oracle("a")
    made.update("a", 0, [("k", 10, 1)] * 2)
    unchanged_by(made, EpochChanged, lambda o: o.update("a", 0, rows))


def test_a_replay_is_judged_by_the_watermark_that_its_epoch_met() -> None:
    made = oracle("a")
    made.update("a", 0, [("k", 10, 0)])
    made.update("a", 1, [("k", 9, "late"), ("k", 20, 1)])
    made.update("a", 2, [("k", 1000, 2)])
    assert made.update("a", 1, [("k", 20, 1), ("k", 9, "late")]).replayed
    assert made.update("a", 1, [("k", 20, 1), ("k", 3, "another late one")]).replayed
    unchanged_by(made, EpochChanged, lambda o: o.update("a", 1, [("k", 20, 1), ("k", 10, "timely")]))


def test_a_refused_epoch_is_not_remembered() -> None:
    made = oracle("a")
    made.update("a", 0, [("k", 10, 0)])
    unchanged_by(made, LateRows, lambda o: o.update("a", 1, [("k", 9, 0)], late="error"))
    assert made.update("a", 1, [("k", 11, 0)]) == Receipt(1, 0, False)


def test_a_finished_updater_may_replay_and_nothing_else() -> None:
    made = oracle("a")
    made.update("a", 0, [("k", 10, 0)])
    made.finish("a")
    assert made.update("a", 0, [("k", 10, 0)]).replayed
    unchanged_by(made, EpochChanged, lambda o: o.update("a", 0, []))
    unchanged_by(made, UpdaterFinished, lambda o: o.update("a", 1, [("k", 1, 1)]))
    for epoch in (-1, 2):
        unchanged_by(made, EpochOutOfOrder, lambda o, epoch=epoch: o.update("a", epoch, []))  # type: ignore[misc]


def test_once_every_updater_has_finished_there_are_no_new_ones() -> None:
    made = oracle("a")
    made.finish("a")
    unchanged_by(made, UpdaterFinished, lambda o: o.register_updater("b"))
    made.register_updater("a")
    assert made.update_progress == INF


def test_a_watermark_before_all_times_does_not_move() -> None:
    made = oracle("a")
    made.update("a", 0, [("k", -(2**63) + 4, 0)], delay=5)
    assert made.update_progress == -INF
    made.update("a", 1, [("k", -(2**63) + 5, 0)], delay=5)
    assert made.update_progress == -(2**63)
    made.update("a", 2, [("k", -(2**63), 0)], delay=5)
    assert made.update_progress == -(2**63)


def test_epochs_of_two_updaters_do_not_meet() -> None:
    made = oracle("a", "b")
    made.update("a", 0, [("k", 1, "a")])
    assert not made.update("b", 0, [("k", 1, "b")]).replayed
    assert made.raw("k") == [(1, "b")]


# Reads


def test_as_of_takes_the_newest_version_at_or_before() -> None:
    made = filled(("k", 10, "a"), ("k", 20, None), ("k", 30, "c"))
    assert [made.fetch_latest("k", at) for at in (9, 10, 19, 20, 29, 30, HIGHEST)] == [
        None,
        "a",
        "a",
        None,
        None,
        "c",
        "c",
    ]
    assert made.fetch_latest("unknown", 10) is None


def test_a_range_leaves_out_its_lower_end_and_takes_in_its_upper() -> None:
    made = filled(*(("k", time, time) for time in (10, 20, 30)))
    ranges = [(9, 30), (10, 30), (10, 29), (10, 10), (30, 10), (-INF, 20)]
    assert [made.fetch_range("k", lo, hi, "values") for lo, hi in ranges] == [
        [10, 20, 30],
        [20, 30],
        [20],
        [],
        [],
        [10, 20],
    ]


NAN = math.nan
RULE_CASES: list[tuple[list[Any], dict[str, Any]]] = [
    ([], {"latest": None, "values": [], "count": 0, "total": None, "smallest": None, "largest": None}),
    (
        [None],
        {"latest": None, "values": [None], "count": 1, "total": None, "smallest": None, "largest": None},
    ),
    (
        [3, None, -5],
        {"latest": -5, "values": [3, None, -5], "count": 3, "total": -2, "smallest": -5, "largest": 3},
    ),
    ([3, None], {"latest": None, "count": 2, "total": 3, "smallest": 3, "largest": 3}),
    ([HIGHEST, 1, -1], {"total": HIGHEST}),
    ([NAN, 1.0, INF], {"smallest": 1.0, "largest": NAN, "total": NAN}),
    ([NAN], {"smallest": NAN, "largest": NAN}),
    (["b", None, "a"], {"smallest": "a", "largest": "b"}),
]


@pytest.mark.parametrize(("values", "expected"), RULE_CASES)
def test_rules_over_a_range(values: list[Any], expected: dict[str, Any]) -> None:
    made = filled(*(("k", time, value) for time, value in enumerate(values)))
    answers = {rule: made.fetch_range("k", -1, HIGHEST, rule) for rule in expected}
    assert repr(answers) == repr(expected)


@pytest.mark.parametrize("values", [[HIGHEST, 1], [LOWEST, -1], [HIGHEST] * 3])
def test_a_total_beyond_a_long_is_an_error(values: list[int]) -> None:
    made = filled(*(("k", time, value) for time, value in enumerate(values)))
    with pytest.raises(TotalOverflow):
        made.fetch_range("k", -1, 10, "total")


def test_unknown_options_are_refused() -> None:
    with pytest.raises(BadOption):
        Oracle("newest")  # type: ignore[arg-type]
    with pytest.raises(BadOption):
        filled().fetch_range("k", 0, 1, "median")


def test_what_u_has_not_passed_waits() -> None:
    made = oracle("a")
    made.update("a", 0, [("k", 10, "v"), ("k", 20, "w")], delay=5)
    assert made.fetch_latest("k", 14) == "v"
    assert made.fetch_range("k", 0, 14, "values") == ["v"]
    assert made.snapshot(14) == {"k": (10, "v")}
    for call in (
        lambda: made.fetch_latest("k", 15),
        lambda: made.fetch_range("k", 0, 15, "count"),
        lambda: made.snapshot(15),
    ):
        with pytest.raises(RowsWaiting) as caught:
            call()
        assert caught.value.update_progress == 15  # type: ignore[attr-defined]


def test_with_no_updater_or_one_that_has_not_started_every_read_waits() -> None:
    for made in (Oracle(), oracle("a")):
        with pytest.raises(RowsWaiting):
            made.fetch_latest("k", LOWEST)
        assert made.snapshot() == {}


def test_reads_below_fetch_progress_are_refused_naming_it() -> None:
    made = filled(("k", 10, "a"), ("k", 20, "b"))
    made.register_fetcher("f")
    made.report("f", fetch=15)
    assert made.fetch_latest("k", 15) == "a"
    assert made.fetch_range("k", 14, 30, "values") == ["b"]
    assert made.snapshot(15) == {"k": (10, "a")}
    for call in (
        lambda: made.fetch_latest("k", 14),
        lambda: made.fetch_range("k", 13, 30, "values"),
        lambda: made.fetch_range("k", -INF, 30, "values"),
        lambda: made.snapshot(14),
    ):
        with pytest.raises(BelowFetchProgress) as caught:
            call()
        assert caught.value.fetch_progress == 15  # type: ignore[attr-defined]


def test_below_fetch_progress_is_told_before_waiting() -> None:
    made = oracle("a")
    made.register_fetcher("f")
    made.report("f", fetch=15)
    with pytest.raises(BelowFetchProgress):
        made.fetch_latest("k", 14)
    with pytest.raises(RowsWaiting):
        made.fetch_latest("k", 15)


def test_a_snapshot_without_a_time_is_what_is_final() -> None:
    made = oracle("a")
    made.update("a", 0, [("k", 10, "v"), ("k", 20, "w"), ("j", 19, "x"), ("i", 20, "y")])
    assert made.snapshot() == {"k": (10, "v"), "j": (19, "x")}
    made.finish("a")
    assert made.snapshot() == {"k": (20, "w"), "j": (19, "x"), "i": (20, "y")}


def test_a_snapshot_without_a_time_is_refused_only_where_compaction_may_have_taken_it() -> None:
    made = oracle("a")
    made.update("a", 0, [("k", 10, "v"), ("k", 15, "w"), ("k", 20, "x")])
    made.register_fetcher("f")
    made.report("f", fetch=20)
    made.compact()
    assert made.snapshot() == {"k": (15, "w")}
    made.report("f", fetch=21)
    with pytest.raises(BelowFetchProgress):
        made.snapshot()


# Compaction


def test_compaction_keeps_the_newest_below_f_and_all_from_f_on() -> None:
    made = filled(*(("k", time, time) for time in (10, 20, 30, 40)), ("j", 5, 5), ("i", 50, 50))
    made.register_fetcher("f")
    made.compact()
    assert len(made.raw("k")) == 4
    made.report("f", fetch=30)
    made.compact()
    assert made.raw("k") == [(20, 20), (30, 30), (40, 40)]
    made.report("f", fetch=INF)
    made.compact()
    assert (made.raw("k"), made.raw("j"), made.raw("i")) == ([(40, 40)], [(5, 5)], [(50, 50)])


def test_keep_all_keeps_all() -> None:
    made = filled(("k", 10, 1), ("k", 20, 2), keep="all")
    made.register_fetcher("f")
    made.report("f", fetch=INF)
    made.compact()
    assert len(made.raw("k")) == 2


times = st.integers(-6, 6)
rows = st.lists(st.tuples(st.sampled_from("kj"), times, st.one_of(st.none(), st.integers(0, 9))), max_size=6)


def answers(made: Oracle) -> dict[object, object]:
    """Every answer there is to get, errors included."""
    questions: dict[object, Callable[[], object]] = {"snapshot": made.snapshot}
    for hi in range(-8, 9):
        questions["snapshot", hi] = lambda hi=hi: made.snapshot(hi)  # type: ignore[misc]
        for key in "kj":
            questions[key, hi] = lambda key=key, hi=hi: made.fetch_latest(key, hi)  # type: ignore[misc]
            for lo in range(-8, 9):
                questions[key, lo, hi] = lambda key=key, lo=lo, hi=hi: made.fetch_range(key, lo, hi, "values")  # type: ignore[misc]
    found: dict[object, object] = {}
    for question, ask in questions.items():
        try:
            found[question] = ask()
        except MillpondError as error:
            found[question] = (type(error), error.attributes())
    return found


@given(epochs=st.lists(rows, max_size=4), delay=st.integers(0, 3), fetch=times, more=rows)
@pytest.mark.long
def test_no_permitted_read_can_tell_compaction(
    epochs: list[list[Any]], delay: int, fetch: int, more: list[Any]
) -> None:
    made = oracle("a")
    made.register_fetcher("f")
    for epoch, batch in enumerate(epochs):
        made.update("a", epoch, batch, delay=delay)
    made.report("f", fetch=fetch)
    compacted = made.copy()
    compacted.compact()
    assert answers(compacted) == answers(made)
    for other in (made, compacted):
        other.update("a", len(epochs), more, delay=delay)
    right = answers(made)
    assert answers(compacted) == right
    compacted.compact()
    assert answers(compacted) == right
    compacted.validate()


@given(epochs=st.lists(rows, max_size=5), delay=st.integers(0, 3))
def test_what_is_final_never_changes_and_progress_never_falls(epochs: list[list[Any]], delay: int) -> None:
    made = oracle("a")
    final: dict[Any, Any] = {}
    progress: float = -INF
    for epoch, batch in enumerate(epochs):
        made.update("a", epoch, batch, delay=delay)
        assert made.update_progress >= progress
        progress = made.update_progress
        for at in range(-8, 9):
            if at < progress:
                snapshot = made.snapshot(at)
                assert final.setdefault(at, snapshot) == snapshot
        made.validate()


@given(epochs=st.lists(rows, min_size=1, max_size=5), data=st.data())
def test_replaying_any_epoch_changes_nothing(epochs: list[list[Any]], data: st.DataObject) -> None:
    made = oracle("a")
    for epoch, batch in enumerate(epochs):
        made.update("a", epoch, batch, delay=2)
    before = made.copy()
    again = data.draw(st.integers(0, len(epochs) - 1))
    shuffled = data.draw(st.permutations(epochs[again]))
    assert made.update("a", again, shuffled, delay=2) == Receipt(0, 0, True)
    assert vars(made) == vars(before)


def test_a_copy_goes_its_own_way() -> None:
    made = oracle("a")
    made.update("a", 0, [("k", 1, 1)])
    made.register_fetcher("f")
    other = made.copy()
    other.update("a", 1, [("k", 2, 2)])
    other.report("f", fetch=1)
    assert (made.raw("k"), made.update_progress, made.fetch_progress) == ([(1, 1)], 1, -INF)
    assert list(made.updaters["a"].epochs) == [0]
