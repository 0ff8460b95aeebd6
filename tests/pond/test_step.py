"""Steps on Arrow tables: what an epoch reads, what it writes, when it may begin, and that it happens once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import millpond as mp
from millpond.errors import (
    BadDuration,
    BadOption,
    EpochChanged,
    EpochOutOfOrder,
    MillpondError,
    NullKey,
    RowsWaiting,
    StageLost,
    UpdaterFinished,
    WrongColumn,
    WrongType,
)
from millpond.ops.step import Step
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

MODES: dict[str, dict[str, Any]] = {
    "bsp": {},
    "ssp": {"isolation": "uncommitted", "staleness": 2},
    "asp": {"isolation": "uncommitted", "staleness": None},
}


@pytest.fixture(params=[1, 3], ids=["1-container", "3-containers"])
def pond(request: pytest.FixtureRequest) -> Iterator[LocalPond]:
    with LocalPond(LossyFiles(), containers=request.param, slices=8) as opened:
        yield opened
        opened.validate()


def state_of(pond: mp.Pond) -> mp.State:
    return pond.state("s", key="long", value="long", update=mp.add())


def rows(*keys: int) -> pa.Table:
    return pa.table({"k": pa.array(keys, pa.int64())})


class Doubling:
    """Adds to each key what it holds, plus one: what an epoch read can be told from what it wrote."""

    def __init__(self) -> None:
        self.seen: list[dict[int, int | None]] = []

    def __call__(self, table: pa.Table, ask: Callable[[pa.Table], pa.Table]) -> pa.Table:
        answers = ask(table.select(["k"]))
        assert answers.column_names == ["k", "held"]
        held = answers["held"].to_pylist()
        self.seen.append(dict(zip(answers["k"].to_pylist(), held, strict=True)))
        return answers.append_column("more", pc.add(pc.fill_null(answers["held"], 0), 1)).drop_columns("held")


def step_of(pond: mp.Pond, function: Any, name: str = "a", **options: Any) -> Step:
    options = {"key": "k", "into": "held", "value": "more", "wait": "0 seconds", **options}
    return state_of(pond).step(function, name=name, **options)


def final(pond: mp.Pond) -> dict[int, int]:
    table = state_of(pond).snapshot()
    return dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))


def test_an_epoch_reads_what_those_before_it_wrote(pond: LocalPond) -> None:
    function = Doubling()
    step = step_of(pond, function)
    for epoch, keys in enumerate([(1, 2), (1, 3), (), (1, 2)]):
        done = step(rows(*keys), epoch)
        assert (done.rows, done.late, done.replayed) == (len(keys), 0, False)
    assert function.seen == [{1: None, 2: None}, {1: 1, 3: None}, {}, {1: 3, 2: 1}]
    assert final(pond) == {1: 7, 2: 3, 3: 1}
    progress = state_of(pond).progress()
    assert (progress.update, progress.fetch, progress.time_kind) == (4, 3, "long")


def test_a_function_may_ask_as_often_as_it_likes_and_return_what_it_likes(pond: LocalPond) -> None:
    def follow(table: pa.Table, ask: Callable[[pa.Table], pa.Table]) -> pa.Table:
        """Three hops from each key, and a mark where each ends."""
        at = table["k"]
        for _ in range(3):
            at = pc.coalesce(ask(pa.table({"k": at}))["held"], at)
        return pa.table({"k": at, "unused": at, "more": pa.array([100] * len(at), pa.int64())})

    def load(table: pa.Table, ask: Callable[[pa.Table], pa.Table]) -> pa.Table:
        return table.append_column("more", pc.add(table["k"], 1))

    step_of(pond, load)(rows(1, 2, 3, 7), 0)
    step_of(pond, follow)(rows(1, 3, 7), 1)
    assert final(pond) == {1: 2, 2: 3, 3: 4, 4: 200, 7: 8, 8: 100}


@pytest.mark.parametrize(("mode", "ahead"), [("bsp", 1), ("ssp", 2), ("asp", 5)])
def test_how_far_one_runs_ahead_of_the_other(pond: LocalPond, mode: str, ahead: int) -> None:
    fast, slow = Doubling(), Doubling()
    a, b = (step_of(pond, function, name, **MODES[mode]) for function, name in ((fast, "a"), (slow, "b")))
    for epoch in range(5):
        if epoch < ahead:
            a(rows(1), epoch)
            continue
        before = state_of(pond).progress()
        with pytest.raises(RowsWaiting, match=f"epoch {epoch} of step 'a' .*: b did not") as caught:
            a(rows(1), epoch)
        assert caught.value.hint
        assert caught.value.held_by == ["b"]
        assert state_of(pond).progress() == before
        break
    reads = {"bsp": [None], "ssp": [None, 1], "asp": [None, 1, 3, 7, 15]}[mode]
    assert [seen[1] for seen in fast.seen] == reads
    b(rows(1), 0)
    # What is not final counts only where that is wanted.
    assert slow.seen == [{1: {"bsp": None, "ssp": 3, "asp": 31}[mode]}]
    if mode != "asp":
        a(rows(1), ahead)
        assert fast.seen[-1] == {1: {"bsp": 2, "ssp": 7}[mode]}


@pytest.mark.parametrize("mode", MODES)
def test_an_epoch_that_runs_again_changes_nothing_whatever_it_would_read_now(mode: str) -> None:
    files = LossyFiles()
    function = Doubling()
    with LocalPond(files) as pond:
        a, b = step_of(pond, function, "a", **MODES[mode]), step_of(pond, Doubling(), "b", **MODES[mode])
        a(rows(1, 2, 2), 0)
        b(rows(1), 0)
        before = final(pond)
        runs = len(function.seen)
        again = a(rows(2, 1, 2), 0)  # the order of rows is not theirs
        assert (again.rows, again.replayed) == (3, True)
        with pytest.raises(EpochChanged, match="other rows") as caught:
            a(rows(1, 2), 0)
        assert caught.value.hint
        with pytest.raises(EpochChanged):
            a(rows(1, 2, 3), 0)
        with pytest.raises(EpochOutOfOrder):
            a(rows(1), 2)
        assert final(pond) == before
        assert len(function.seen) == runs, "it is not even run"
    # A driver that starts again has forgotten all; the pond has not.
    with LocalPond(files) as pond:
        a = step_of(pond, function, "a", **MODES[mode])
        assert a(rows(1, 2, 2), 0).replayed
        assert final(pond) == before
        a(rows(1), 1)
        assert function.seen[runs:] == [{1: before[1]}]


def test_an_epoch_whose_report_was_lost_is_reported_by_its_replay(
    pond: LocalPond, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = step_of(pond, Doubling())

    class Ended(Exception):
        pass

    def end(*_: Any) -> None:
        raise Ended

    with monkeypatch.context() as patched:
        patched.setattr("millpond.ops.step.Report", end)
        with pytest.raises(Ended):
            step(rows(1), 0)
    assert state_of(pond).progress().update == 0
    assert step(rows(1), 0).replayed
    assert state_of(pond).progress().update == 1
    assert final(pond) == {1: 1}


def test_what_a_container_lost_is_computed_again(pond: LocalPond) -> None:
    function = Doubling()

    def fragile(table: pa.Table, ask: Callable[[pa.Table], pa.Table]) -> pa.Table:
        made = function(table, ask)
        if len(function.seen) == 2:
            pond.hosting.kill(0)
            pond.coordinator.recover(0)
        return made

    step = step_of(pond, fragile)
    for epoch in range(3):
        try:
            step(rows(1, 2, 3, 4), epoch)
        except StageLost:  # it would be staged again
            step(rows(1, 2, 3, 4), epoch)
    assert final(pond) == dict.fromkeys((1, 2, 3, 4), 7)


def test_one_that_joins_begins_where_the_others_are(pond: LocalPond) -> None:
    first, second = Doubling(), Doubling()
    a = step_of(pond, first, "a")
    for epoch in range(3):
        a(rows(1), epoch)
    b = step_of(pond, second, "b")
    b(rows(1), 0)
    assert second.seen == [{1: 7}]
    a(rows(1), 3)
    assert first.seen[-1] == {1: 7}
    assert final(pond) == {1: 7 + 8 + 8}


def test_one_that_has_finished_holds_nobody_back(pond: LocalPond) -> None:
    a, b = (step_of(pond, Doubling(), name) for name in "ab")
    a(rows(1), 0)
    b(rows(1), 0)
    state_of(pond).finish("b")
    a(rows(1), 1)
    a(rows(1), 2)
    with pytest.raises(UpdaterFinished):
        b(rows(1), 1)
    assert final(pond) == {1: 11}


def made(**columns: Any) -> Callable[..., Any]:
    return lambda table, ask: pa.table(columns)


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda table, ask: None, WrongType),
        (made(k=[1]), WrongColumn),
        (made(more=[1]), WrongColumn),
        (made(k=[1], more=["x"]), WrongType),
        (made(k=pa.array([None], pa.int64()), more=[1]), NullKey),
        (lambda table, ask: ask(pa.table({"x": [1]})), WrongColumn),
        (lambda table, ask: ask(table.append_column("held", table["k"])), BadOption),
        (lambda table, ask: ask(3), WrongType),
        (lambda table, ask: 1 / 0, ZeroDivisionError),
    ],
)
def test_what_a_function_gets_wrong_is_told_and_changes_nothing(
    pond: LocalPond, function: Any, error: type[Exception]
) -> None:
    step_of(pond, Doubling())(rows(1), 0)
    before = final(pond), state_of(pond).progress()
    with pytest.raises(error) as caught:
        step_of(pond, function)(rows(1), 1)
    if isinstance(caught.value, MillpondError):
        assert caught.value.hint
    assert (final(pond), state_of(pond).progress()) == before
    step_of(pond, Doubling())(rows(1), 1)
    assert final(pond) == {1: 3}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"staleness": 0}, BadOption),
        ({"staleness": True}, BadOption),
        ({"staleness": None}, BadOption),
        ({"staleness": 1.5, "isolation": "uncommitted"}, BadOption),
        ({"isolation": "none"}, BadOption),
        ({"wait": "soon"}, BadDuration),
        ({"key": ["k", "l"]}, BadOption),
        ({"value": ["more", "less"]}, BadOption),
        ({"into": ["x", "y"]}, BadOption),
        ({"wait": 5}, BadOption),
        ({"history": "old"}, BadOption),
        ({"history": "shared"}, BadOption),
        ({"function": 3}, BadOption),
    ],
)
def test_bad_options_are_refused_before_anything_is_registered(
    pond: LocalPond, options: dict[str, Any], error: type[Exception]
) -> None:
    options = {"function": Doubling(), **options}
    with pytest.raises(error) as caught:
        step_of(pond, **options)
    assert isinstance(caught.value, MillpondError)
    assert caught.value.hint
    progress = state_of(pond).progress()
    assert (progress.updaters, progress.fetchers) == ({}, {})


def test_a_state_of_timestamps_has_no_steps(pond: LocalPond) -> None:
    state = state_of(pond)
    feed = state.update(key="k", at="t", value="v", name="feed")
    feed(pa.table({"k": [1], "t": pa.array([5], pa.timestamp("us", "UTC")), "v": [1]}), 0)
    with pytest.raises(WrongType, match="timestamp"):
        step_of(pond, Doubling())
    assert list(state.progress().updaters) == ["feed"]


def test_now_answers_from_what_is_there_where_that_is_wanted(pond: LocalPond) -> None:
    step_of(pond, Doubling())(rows(1), 0)
    step_of(pond, Doubling(), "b")
    asked = pa.table({"k": [1], "low": [-5], "t": [1 << 60]})
    options: dict[str, Any] = {"key": "k", "into": "held"}
    with pytest.raises(RowsWaiting):
        state_of(pond).fetch(at="t", **options).now(asked)
    newest = state_of(pond).fetch(at="t", isolation="uncommitted", **options)
    assert newest.now(asked)["held"].to_pylist() == [1]
    ranged = state_of(pond).fetch(between=("low", "t"), rule=mp.as_of(), isolation="uncommitted", **options)
    assert ranged.now(asked)["held"].to_pylist() == [1]
    late = pa.table({"k": [1], "low": [3], "t": [1 << 60]})
    with pytest.raises(RowsWaiting):
        ranged.now(late)
