"""What is wrong is refused with a word on how to mend it, and changes nothing: the next good epoch goes on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import millpond as mp
from millpond.errors import (
    BadOption,
    BadRule,
    BadType,
    CodeTookTooLong,
    MillpondError,
    RuleFailed,
    SchemaMismatch,
    WrongColumn,
    WrongType,
)
from millpond.ops import code_limit
from millpond.pond.pond import Pond
from millpond.stores.windows import aligned
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

BAD = pa.table({"k": [1, 2], "ts": [1, 50], "v": [1, 2]})
GOOD = pa.table({"k": [1, 2], "ts": [1, 50], "v": [7, 7]})


@pytest.fixture
def pond() -> Iterator[Pond]:
    with LocalPond(LossyFiles()) as pond:
        yield pond


def window(pond: Pond, **options: Any) -> Any:
    return pond.window(
        "w", **{"key": "k long", "window": mp.tumbling(10), "aggregate": {"n": mp.count()}, **options}
    )


def first_v(v: Any) -> Any:
    return v


def none_or_five(v: int) -> Any:
    return None if v == 1 else 5


def nan_or_five(v: int) -> Any:
    return float("nan") if v == 1 else 5


def text_or_five(v: int) -> Any:
    return "a gap" if v == 1 else 5


def huge_or_five(v: int) -> Any:
    return 2**70 if v == 1 else 5


def leaves_or_five(v: int) -> Any:
    if v == 1:
        raise SystemExit(3)
    return 5


def several_or_true(v: int) -> Any:
    return np.array([1, 2]) if v == 1 else True


def leaves_or_window(time: int) -> Any:
    if time == 1:
        raise SystemExit(3)
    return [(time, time + 5)]


def twice(time: int) -> Any:
    return [(0, 10), (0, 10.0)]


def half_window(time: int) -> Any:
    return [(0.5, 10)]


def is_seven(v: int) -> bool:
    return v == 7


def never_ends(times: Any, v: Any) -> float:
    count = 0
    while v[0] == 1:
        count = count + 1
    return 1.0


# Names


@pytest.mark.parametrize(
    "options",
    [
        {"key": "window_end long"},
        {"key": "Window_Start long"},
        {"key": "session_id long", "window": mp.session(5), "emit": "update"},
        {"aggregate": {"Window_End": mp.count()}},
        {"aggregate": {"K": mp.count()}},
        {"aggregate": {"n": mp.count(), "N": mp.count()}},
        {"aggregate": {"": mp.count()}},
        {"key": "_all boolean"},
        {"value": "_end long", "window": mp.session(5), "aggregate": {"m": mp.median("_end")}},
        {"value": "_start long", "aggregate": {"m": mp.median("_start")}},
    ],
)
def test_no_two_columns_have_one_name(pond: Pond, options: dict[str, Any]) -> None:
    with pytest.raises(BadType) as refused:
        window(pond, **options)
    assert refused.value.hint
    assert window(pond).over()(GOOD, 0).num_rows == 1


def test_a_name_that_is_reserved_is_refused_when_the_first_rows_tell_it(pond: Pond) -> None:
    operator = window(pond, window=mp.session(5), aggregate={"m": mp.median("_end")}).over()
    with pytest.raises(BadType, match="_end is reserved"):
        operator(pa.table({"k": [1], "ts": [1], "_end": [7]}), 0)


# Definitions


@pytest.mark.parametrize(
    "make",
    [
        lambda: mp.counted(2**70),
        lambda: mp.session(column=5),  # type: ignore[arg-type]
        lambda: mp.session(5, touching="yes"),  # type: ignore[arg-type]
        lambda: mp.fold(2**70, first_v, first_v, "v"),
        lambda: mp.fold((), first_v, first_v, "v"),
    ],
)
def test_what_no_message_could_carry_is_refused_at_once(make: Any) -> None:
    with pytest.raises((BadOption, BadRule)) as refused:
        make()
    assert refused.value.hint


@pytest.mark.parametrize(
    "options",
    [
        {"pattern": "quick"},
        {"aggregate": {"m": mp.median(5)}},  # type: ignore[arg-type]
        {"value": "other long", "aggregate": {"m": mp.median("v")}},
        {"value": "v long", "window": mp.session(column="gap"), "aggregate": {"m": mp.median("v")}},
    ],
)
def test_a_window_that_could_not_be_says_why(pond: Pond, options: dict[str, Any]) -> None:
    with pytest.raises((BadOption, WrongColumn)) as refused:
        window(pond, **options)
    assert refused.value.hint


def test_times_of_the_other_kind_are_refused_in_words_of_windows(pond: Pond) -> None:
    operator = window(pond).over()
    times = pa.array([1, 50], pa.timestamp("us", tz="UTC"))
    with pytest.raises(WrongType) as refused:
        operator(GOOD.set_column(1, "ts", times), 0)
    assert "ttl" not in str(refused.value)
    assert operator(GOOD, 0).num_rows == 1


def test_gaps_and_ends_may_be_lambdas(pond: Pond) -> None:
    by_gap = mp.session(lambda v: v)
    operator = window(pond, window=by_gap).over()
    assert operator(GOOD, 0).to_pylist() == [{"window_start": 1, "window_end": 8, "k": 1, "n": 1}]


# Types that the first rows tell


@pytest.mark.parametrize(
    "refused", [{"ts": [1]}, {"k": [1]}, {"k": ["a"], "ts": [1]}, {"k": [1], "ts": ["now"]}]
)
def test_rows_that_are_refused_tell_no_types(pond: Pond, refused: dict[str, Any]) -> None:
    dedup = pond.dedup("d", key="k long", within=10).over()
    median = window(pond, aggregate={"m": mp.median("v")}).over()
    small = pa.table({**refused, "v": pa.array([1], pa.int8())})
    for operator in (dedup, median):
        with pytest.raises(MillpondError):
            operator(small, 0)
    large = pa.table({"k": [1, 2], "ts": [1, 50], "v": [1_000, 2_000], "w": [1, 2]})
    assert dedup(large, 0).column_names == large.column_names
    assert median(large, 0).column("m").to_pylist() == [1000.0]


# Times at their ends


LEAST, MOST = -(2**63), 2**63 - 1


@pytest.mark.parametrize("aggregate", [mp.total("v"), mp.median("v")])
def test_the_first_and_last_sliding_windows_of_all_are_cut(pond: Pond, aggregate: Any) -> None:
    opened = window(pond, window=mp.sliding(20, 10), aggregate={"m": aggregate})
    operator = opened.over()
    fired = operator(pa.table({"k": [1, 1], "ts": [LEAST, 0], "v": [1, 2]}), 0)
    assert fired.column("window_start").to_pylist()[0] == LEAST
    fired = operator(pa.table({"k": [1], "ts": [MOST], "v": [4]}), 1)
    assert fired.column("window_start").to_pylist() == [-10, 0]
    for rows in (opened.now(), operator.finish()):
        assert set(rows.column("window_end").to_pylist()) == {MOST}
        assert set(rows.column("m").to_pylist()) == {4}


@pytest.mark.parametrize("aggregate", [mp.count("v"), mp.median("v")])
@pytest.mark.parametrize("made", [mp.tumbling(10), mp.tumbling(10, offset=3), mp.sliding(30, 10)])
def test_the_first_windows_of_all_have_the_edges_that_others_have(
    pond: Pond, made: Any, aggregate: Any
) -> None:
    times = [LEAST, LEAST + 1, LEAST + 7, LEAST + 8, LEAST + 9, LEAST + 25]
    operator = window(pond, window=made, aggregate={"m": aggregate}).over()
    fired = operator(pa.table({"k": [1] * 6, "ts": times, "v": times}), 0).to_pylist()
    fired += operator.finish().to_pylist()
    found = {(row["window_start"], row["window_end"], row["m"]) for row in fired}
    size, slide = made.size, made.slide or made.size
    starts = {
        start
        for t in times
        for start in range((t - made.offset) // slide * slide + made.offset, t - size, -slide)
    }
    expected = set()
    for start in starts:
        own = [t for t in times if start <= t < start + size]
        value = (
            len(own)
            if aggregate.name == "count"
            else float((own[(len(own) - 1) // 2] + own[len(own) // 2]) / 2)
        )
        expected.add((max(start, LEAST), start + size, value))
    assert found == expected


def test_the_first_window_of_a_join(pond: Pond) -> None:
    join = pond.join("j", key="k long", left="a long", right="b long", window=mp.tumbling(10))
    join.left(at="ts")(pa.table({"k": [1, 1], "ts": [LEAST, LEAST + 8], "a": [1, 2]}), 0)
    fired = join.right(at="ts")(pa.table({"k": [1, 1], "ts": [LEAST + 7, LEAST + 60], "b": [3, 4]}), 0)
    (pair,) = fired.to_pylist()
    assert (pair["window_start"], pair["window_end"], pair["a"], pair["b"]) == (LEAST, LEAST + 8, 1, 3)


@pytest.mark.parametrize("aggregate", [mp.count(), mp.median("v")])
def test_a_session_that_ends_with_time(pond: Pond, aggregate: Any) -> None:
    operator = window(pond, window=mp.session(5, ends_when=is_seven), aggregate={"m": aggregate}).over()
    fired = operator(pa.table({"k": [1], "ts": [MOST], "v": [7]}), 0)
    assert [row["window_end"] for row in [*fired.to_pylist(), *operator.finish().to_pylist()]] == [MOST]


def test_a_session_may_be_cut_wherever_it_began(pond: Pond) -> None:
    operator = window(
        pond, window=mp.session(column="g", longest=MOST), aggregate={"m": mp.count("g")}
    ).over()
    rows = pa.table({"k": [1] * 3, "ts": [LEAST, -2, 100], "g": [MOST] * 3})
    assert operator(rows, 0).num_rows == 1
    fired = operator.finish().to_pylist()
    assert [(row["window_start"], row["window_end"], row["m"]) for row in fired] == [(100, MOST, 1)]


# Values at their ends


INF = float("inf")


@pytest.mark.parametrize(
    ("values", "middle"),
    [
        ([INF, INF], INF),
        ([-INF, -INF], -INF),
        ([1.0, INF], INF),
        ([-1.7e308, 1.7e308], 0.0),
        ([-INF, INF], None),
    ],
)
def test_the_middle_of_two_that_are_far_apart(pond: Pond, values: list[float], middle: float | None) -> None:
    operator = window(pond, aggregate={"m": mp.median("v")}).over()
    (found,) = (
        operator(pa.table({"k": [1, 1, 1], "ts": [1, 2, 90], "v": [*values, 0.0]}), 0).column("m").to_pylist()
    )
    assert math.isnan(found) if middle is None else found == middle


# Keys to look at


@pytest.mark.parametrize("keys", [["a"], [1.5], [2**70], [True], [(1,)], [1, "a"]])
def test_a_key_of_another_type_is_refused_not_rounded(pond: Pond, keys: list[Any]) -> None:
    opened = window(pond)
    opened.over()(GOOD.slice(0, 1), 0)
    with pytest.raises(MillpondError) as refused:
        opened.now(keys)
    assert refused.value.hint
    assert opened.now([1]).num_rows == 1
    assert opened.now([]).num_rows == 0


@pytest.mark.parametrize("keys", [[1], [(1,)], [(1, "a"), (2,)], [None], [("a", 1)]])
def test_a_key_of_several_columns_has_them_all(pond: Pond, keys: list[Any]) -> None:
    opened = window(pond, key="k long, s string")
    opened.over()(pa.table({"k": [1], "s": ["a"], "ts": [1]}), 0)
    with pytest.raises(MillpondError) as refused:
        opened.now(keys)
    assert refused.value.hint
    assert opened.now([(1, "a")]).num_rows == 1


# User code on the way in


@pytest.mark.parametrize(
    "made",
    [
        mp.session(none_or_five),
        mp.session(nan_or_five),
        mp.session(text_or_five),
        mp.session(huge_or_five),
        mp.session(leaves_or_five),
        mp.session(5, ends_when=several_or_true),
    ],
)
def test_a_gap_that_is_none_costs_its_epoch(pond: Pond, made: Any) -> None:
    operator = window(pond, window=made).over()
    with pytest.raises(RuleFailed) as refused:
        operator(BAD, 0)
    assert refused.value.hint
    assert operator(GOOD, 0).num_rows >= 1


def test_a_row_is_in_a_window_of_ones_own_once(pond: Pond) -> None:
    operator = window(pond, window=mp.windows(twice)).over()
    operator(pa.table({"k": [1, 1], "ts": [1, 2]}), 0)
    assert operator.finish().column("n").to_pylist() == [2]


def test_windows_of_ones_own_have_whole_edges(pond: Pond) -> None:
    with pytest.raises(RuleFailed, match=r"0\.5 is no whole number"):
        window(pond, window=mp.windows(half_window)).over()(GOOD, 0)


def test_windows_of_ones_own_that_want_to_leave_cost_their_epoch(pond: Pond) -> None:
    operator = window(pond, window=mp.windows(leaves_or_window)).over()
    with pytest.raises(RuleFailed, match="SystemExit"):
        operator(BAD, 0)
    later = pa.table({"k": [1, 2], "ts": [2, 50]})
    assert operator(later, 0).num_rows == 1


def endless_or_five(v: int) -> Any:
    while v == 1:
        pass
    return 5


def endless_or_window(time: int) -> Any:
    while time == 1:
        pass
    return [(time, time + 5)]


@pytest.mark.parametrize(
    "made",
    [mp.session(endless_or_five), mp.session(5, ends_when=endless_or_five), mp.windows(endless_or_window)],
)
def test_one_that_never_ends_costs_its_epoch(pond: Pond, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_limit, "SECONDS", 0.2)
    operator = window(pond, window=made).over()
    with pytest.raises(CodeTookTooLong, match="endless_or") as refused:
        operator(BAD, 0)
    assert refused.value.hint
    assert operator(GOOD.set_column(1, "ts", pa.array([2, 50])), 0).num_rows >= 1


def first_share(times: Any, v: Any) -> float:
    return 10.0 / v[0]


def first_share_or_none(times: Any, v: Any) -> float:
    return 10.0 / v[0] if v[0] != 0 else -1.0


@pytest.mark.parametrize("made", [mp.tumbling(10), mp.session(10)])
def test_a_function_that_fails_on_rows_committed_before_can_be_replaced(made: Any) -> None:
    files = LossyFiles()
    bad = pa.table({"k": [1, 2], "ts": [1, 1], "v": [0, 4]})
    with LocalPond(files) as pond:
        operator = window(pond, window=made, aggregate={"m": first_share}, value="v long").over()
        assert operator(bad, 0).num_rows == 0
        for _ in range(2):
            with pytest.raises(
                RuleFailed, match=r"'first_share' of aggregate 'm' failed on window \[1?0?"
            ) as refused:
                operator(GOOD, 1)
            assert "of key 1" in str(refused.value)
            assert "open the window again" in str(refused.value)
        with pytest.raises(SchemaMismatch):
            window(pond, window=made, aggregate={"other": first_share_or_none}, value="v long")
        window(pond, window=made, aggregate={"m": first_share_or_none}, value="v long")
        fired = operator(GOOD, 1)
    with LocalPond(files) as pond:
        again = window(pond, window=made, aggregate={"m": first_share_or_none}, value="v long").over()(
            GOOD, 1
        )
    for rows in (fired, again):
        first = [row["m"] for row in rows.to_pylist() if row["k"] == 1]
        assert first == [-1.0]


# Processes


@pytest.mark.long
def test_looking_at_open_windows_takes_no_longer_than_code_may(tmp_path: Path) -> None:
    with mp.open(tmp_path / "pond", memory="700m", code_seconds=4) as pond:
        opened = window(pond, aggregate={"m": never_ends}, value="v long")
        operator = opened.over()
        assert operator(BAD.slice(0, 1), 0).num_rows == 0
        for keys in (None, [1]):
            with pytest.raises(CodeTookTooLong):
                opened.now(keys)
        assert operator(pa.table({"k": [3], "ts": [2], "v": [2]}), 1).num_rows == 0


@pytest.mark.parametrize("memory", ["", "much", "5m", "-1g", 1.5])
def test_memory_is_a_number_of_bytes_or_a_text_for_one(tmp_path: Path, memory: Any) -> None:
    with pytest.raises(BadOption) as refused:
        mp.open(tmp_path / "pond", memory=memory)
    assert refused.value.hint


# Memory


def test_batches_that_are_joined_make_no_more_than_a_piece(tmp_path: Path) -> None:
    """Joining needs as much memory again: were it all rows of all slices, in one epoch, twice the budget would be needed."""
    schema = pa.schema({"v": pa.int64()})
    log = aligned.AlignedRows(schema, LossyFiles(), "/scratch")
    batch = pa.RecordBatch.from_arrays([pa.array(np.arange(10_000))], schema=schema)
    for _ in range(70):
        log.append(np.zeros(len(batch), np.int64), batch)
    log.validate()
    pieces = log._groups[0].pieces
    assert max(piece.nbytes for piece in pieces if isinstance(piece, pa.RecordBatch)) <= aligned.PIECE_BYTES
