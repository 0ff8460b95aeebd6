"""Updates: what epochs change is sent with them, or every so often, as the oracle does it; also from what the disk kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from firing import CELLS, WHOLE, WINDOWS, StayingPond, table
from window_driving import Shape, check, compare_runs, draw, oracle_rows, result_rows

import millpond as mp
from millpond.errors import BadDuration, BadOption, BadType, SchemaMismatch
from millpond.testing import LossyFiles
from millpond.testing import window_aggregates as agg
from millpond.testing import window_kinds as kinds
from millpond.testing.local import LocalPond
from millpond.testing.windows import WindowOracle

MORE = {
    "everything": (mp.everything(), kinds.everything()),
    "counted": (mp.counted(5), kinds.counted(5)),
    "counted or after": (mp.counted(5, or_after=40), kinds.counted(5, or_after=40)),
}
ALL = WINDOWS | MORE

ROWS_LONG = pytest.param(WHOLE, marks=pytest.mark.long)


def add(kept: int, v: int) -> int:
    return kept + v * v


def merge(kept: int, other: int) -> int:
    return kept + other


def span_of(times: Any, v: Any) -> int:
    return times[len(times) - 1] - times[0] + len(v)


SHAPE = Shape(straggling=0.15, epochs=10, rows=25)
APART = Shape(straggling=0.15, epochs=16, rows=14, disorder=200, silence=0.0)
"""So few rows, in such disorder, that sessions are sent before others come between them."""


def run(
    name: str, aggregates: Any, seed: int, lateness: int = 0, shape: Shape = SHAPE, every: int = 0
) -> WindowOracle:
    window, kind = ALL[name]
    ours, theirs = aggregates
    driven = StayingPond(LossyFiles(), window, ours, every=every, lateness=lateness, emit="update")
    driven.key_type = shape.key_type
    oracle = WindowOracle(kind, theirs, sources={"feed": 10}, lateness=lateness, emit="update")
    check(driven.source(), oracle, draw(seed, shape))
    driven.close()
    return oracle


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("aggregates", [CELLS, ROWS_LONG], ids=["cells", "rows"])
def test_updates_answer_as_the_oracle(name: str, aggregates: Any) -> None:
    run(name, aggregates, 1)
    if name in WINDOWS:
        run(name, aggregates, 2, lateness=150)
        for seed in range(3, 4):
            run(name, aggregates, seed, lateness=400, shape=APART)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("aggregates", [CELLS, ROWS_LONG], ids=["cells", "rows"])
def test_what_the_disk_kept_of_updates_goes_on(name: str, aggregates: Any) -> None:
    oracle = run(name, aggregates, 11, lateness=400 if name in WINDOWS else 0, shape=APART, every=2)
    if oracle.window.has_sessions:
        fired = [row for _, answer in oracle.epochs["feed"].values() for row in answer.rows]
        assert any(row["retracted"] for row in fired), "nothing merged"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("aggregates", [CELLS, ROWS_LONG], ids=["cells", "rows"])
def test_updates_every_so_often(name: str, aggregates: Any) -> None:
    """By the clock of the driver, of which an operator that was opened anew knows nothing: its first epoch emits."""
    window, kind = ALL[name]
    ours, theirs = aggregates
    lateness = 400 if name in WINDOWS else 0
    driven = StayingPond(LossyFiles(), window, ours, every=3, lateness=lateness, every_s=10)
    operator = driven.source()
    oracle = WindowOracle(kind, theirs, sources={"feed": 10}, lateness=lateness, emit="update")
    answers, truth, emitting = [], [], []
    last: tuple[Any, float] | None = None
    for epoch in draw(11, APART):
        pond = driven.pond
        assert pond is not None
        driven.wait(4)
        now = pond._client.runtime.now()
        emitting.append(last is None or last[0] is not pond or now - last[1] >= 10)
        last = (pond, now) if emitting[-1] else last
        answers.append(result_rows(operator(epoch.table, epoch.number)))
        truth.append(oracle.epoch(epoch.number, oracle_rows(epoch.table), emitting=emitting[-1]).rows)
    assert 0 < sum(emitting) < len(emitting) - 4
    if kind.has_sessions:
        assert any(row["retracted"] for rows in truth for row in rows), "nothing merged"
    answers.append(result_rows(operator.finish()))
    truth.append(oracle.finish().rows)
    compare_runs(answers, truth)
    driven.close()


@pytest.mark.parametrize("name", ["tumbling", "sliding", "session", "session cut", "counted"])
def test_functions_of_your_own_run_before_the_epoch_is_decided(name: str) -> None:
    for ours, theirs in (
        ({"folded": mp.fold(0, add, merge, "v")}, {"folded": agg.user(0, add, merge, "v")}),
        ({"span": span_of}, {"span": agg.function(span_of, "ts", "v")}),
    ):
        shape = dataclasses.replace(APART, nulls=0.0)
        run(name, (ours, theirs), 31, lateness=400 if name in WINDOWS else 0, shape=shape, every=3)


@pytest.mark.parametrize("name", ["tumbling", "session", "session cut"])
@pytest.mark.parametrize("start", [-(2**63) + 1, 2**63 - 2000])
def test_the_ends_of_time(name: str, start: int) -> None:
    shape = Shape(start=start, silence=0.0, straggling=0.0, disorder=0, epochs=5)
    for aggregates in (CELLS, WHOLE):
        run(name, aggregates, 41, lateness=100, shape=shape)


SESSIONS = {"session": mp.session(10), "session cut": mp.session(10, longest=1000)}


@pytest.mark.parametrize("window", SESSIONS.values(), ids=SESSIONS)
@pytest.mark.parametrize("aggregates", [CELLS, WHOLE], ids=["cells", "rows"])
@pytest.mark.parametrize("reopened", ["never", "before they merge", "before that is told"])
def test_sessions_that_merge_are_taken_back(window: Any, aggregates: Any, reopened: str) -> None:
    """The id of the session that was made first goes on, also from a checkpoint; the other comes once more."""
    driven = StayingPond(LossyFiles(), window, aggregates[0], lateness=50, every_s=10)
    operator = driven.source(delay=0)
    (later,) = result_rows(operator(table((7, 40)), 0))
    driven.wait(20)
    (earlier,) = result_rows(operator(table((7, 25)), 1))
    assert later["session_id"] != earlier["session_id"]
    if reopened == "before they merge":
        driven.disturb()
        driven.wait(20)
        assert operator(table((8, 39)), 2).num_rows == 1
    else:
        assert operator(table((8, 39)), 2).num_rows == 0
    assert operator(table((7, 33)), 3).num_rows == 0
    if reopened == "before that is told":
        driven.disturb()
    driven.wait(20)
    rows = [row for row in result_rows(operator(table((8, 38)), 4)) if row["key"] == 7]
    merged, gone = sorted(rows, key=lambda row: row["retracted"])
    assert (merged["window_start"], merged["window_end"], merged["rows"]) == (25, 50, 3)
    assert merged["session_id"] == later["session_id"]
    assert not merged["retracted"]
    edges = {"window_start": 25, "window_end": 35}
    assert gone == dict.fromkeys(gone) | edges | {
        "key": 7, "session_id": earlier["session_id"], "retracted": True,
    }  # fmt: skip
    assert operator.finish().num_rows == 0
    driven.close()


@pytest.mark.parametrize("name", ["tumbling", "sliding", "assigned", "session", "session cut", "counted"])
@pytest.mark.parametrize("aggregates", [CELLS, WHOLE], ids=["cells", "rows"])
def test_what_waits_for_the_next_update_is_in_checkpoints(name: str, aggregates: Any) -> None:
    window, kind = ALL[name]
    driven = StayingPond(LossyFiles(), window, aggregates[0], every_s=10)
    oracle = WindowOracle(kind, aggregates[1], sources={"feed": 0}, emit="update")
    operator = driven.source(delay=0)
    answers, truth = [], []
    for number, (rows, emitting) in enumerate(
        [(table((1, 32), (2, 33)), True), (table((2, 34), (3, 33)), False), (table((4, 34)), True)]
    ):
        if number == 2:
            driven.disturb()
        answers.append(result_rows(operator(rows, number)))
        truth.append(oracle.epoch(number, oracle_rows(rows), emitting=emitting).rows)
    assert not answers[1]
    assert {row["key"] for row in answers[2]} == {2, 3, 4}
    compare_runs(answers, truth)
    driven.close()


def test_ids_are_unique_over_slices() -> None:
    driven = StayingPond(LossyFiles(), mp.session(10), CELLS[0], emit="update")
    rows = result_rows(driven.source()(table(*((key, key % 5) for key in range(200))), 0))
    assert len({row["session_id"] for row in rows}) == 200
    driven.close()


def test_open_windows_tell_their_ids() -> None:
    driven = StayingPond(LossyFiles(), mp.session(10), CELLS[0], lateness=100, emit="update")
    operator = driven.source(delay=0)
    sent = result_rows(operator(table((1, 0), (2, 5), (1, 30)), 0))
    assert driven.pond is not None
    window = driven.pond.window("w")
    (row,) = result_rows(window.now())
    assert row == next(row for row in sent if row["window_start"] == 30)
    assert result_rows(window.now([1])) == [row]
    assert window.now([2]).num_rows == 0
    driven.close()


def test_bad_input() -> None:
    pond = LocalPond(LossyFiles())

    def window(**options: Any) -> Any:
        options = {"window": mp.session("1 minute"), "aggregate": {"rows": mp.count()}, **options}
        return pond.window("w", key="key long", **options)

    for options, option in (
        ({"emit": "often"}, "emit"),
        ({"every": 10}, "every"),
        ({"every": "0 seconds"}, "every"),
    ):
        with pytest.raises(BadOption) as caught:
            window(**options)
        assert caught.value.option == option
        assert caught.value.hint
    with pytest.raises(BadDuration):
        window(every="often")
    for name in ("session_id", "retracted"):
        with pytest.raises(BadType, match=name):
            window(aggregate={name: mp.count()}, emit="update")
    assert pond.windows() == {}
    window(emit="update")
    with pytest.raises(SchemaMismatch, match='emit="update"'):
        window()
    with pytest.raises(SchemaMismatch, match="every=10000000 us"):
        window(every="10 seconds")
    window(emit="update")
    pond.close()
