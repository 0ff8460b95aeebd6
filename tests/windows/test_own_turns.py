"""Turns that a window takes without rows: on silence, in a finish, after an interruption. Each window fires once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import millpond as mp
from millpond.errors import BadOption
from millpond.ops.chains import Chain
from millpond.ops.window import FiringSource
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.wire.base import LOCAL_QUERY, Turn
from millpond.wire.epochs import BeginEpoch, HandedOver

IDLE_S = 10
Result = tuple[int, ...]


def table(*rows: tuple[int, int]) -> pa.Table:
    """Keys and times."""
    return pa.table({"key": [key for key, _ in rows], "ts": [time for _, time in rows]})


class Sink:
    """Keeps the rows of each turn by its number; a turn that runs again replaces its own."""

    def __init__(self) -> None:
        self.turns: dict[int, list[Result]] = {}
        self.calls: list[int] = []
        self.failures = 0

    def __call__(self, fired: pa.Table, number: int) -> None:
        self.calls.append(number)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the sink is away")
        self.turns[number] = [tuple(row.values()) for row in fired.to_pylist()]

    @property
    def rows(self) -> list[Result]:
        return sorted(row for rows in self.turns.values() for row in rows)


class Ponds:
    """A pond that can be closed and opened again, with a clock of its own."""

    def __init__(self) -> None:
        self.files = LossyFiles()
        self.pond = LocalPond(self.files)

    def reopen(self) -> LocalPond:
        self.pond.close()
        self.pond = LocalPond(self.files)
        return self.pond

    def fall_silent(self) -> None:
        self.pond.coordinator._commits.leave_out_silent()
        self.pond._client.runtime.sleep(IDLE_S + 1)
        self.pond.coordinator._commits.leave_out_silent()

    def window(self, name: str = "w", **options: Any) -> Any:
        options = {"window": mp.tumbling(10), "aggregate": {"rows": mp.count()}, **options}
        return self.pond.window(name, key="key long", **options)


@pytest.fixture
def ponds() -> Iterator[Ponds]:
    ponds = Ponds()
    yield ponds
    ponds.pond.close()


def take_due(source: FiringSource, turns_max: int = 10) -> int:
    """All turns of its own that are due, as a streaming query without rows takes them; how many."""
    for turns in range(turns_max):
        if LOCAL_QUERY not in source.due():
            return turns
        source.take(LOCAL_QUERY, None)  # type: ignore[arg-type]
    raise AssertionError("it does not come to rest")


# Interrupted


@pytest.mark.parametrize("dies", [False, True], ids=["the sink fails", "the driver dies"])
def test_an_interrupted_turn_is_handed_over_before_the_next_epoch(ponds: Ponds, dies: bool) -> None:
    sink = Sink()
    source = ponds.window().over(key="key", idle=f"{IDLE_S} seconds")
    run = source.to(sink)
    run(table((1, 1), (1, 12)), 0)
    ponds.fall_silent()
    sink.failures = 1
    with pytest.raises(ConnectionError):
        source.take(LOCAL_QUERY, None)  # type: ignore[arg-type]
    if dies:
        ponds.reopen()
        source = ponds.window().over(key="key", idle=f"{IDLE_S} seconds")
        run = source.to(sink)
    run(table((1, 33)), 1)
    run(table((1, 45)), 2)
    turn = Turn(0, 1).number
    assert sink.calls == [0, turn, turn, 1, 2], "first what is owed, under its own number"
    assert sink.rows == [(0, 10, 1, 1), (10, 20, 1, 1), (30, 40, 1, 1)]


def test_a_sink_that_fails_again_lets_no_rows_in(ponds: Ponds) -> None:
    sink = Sink()
    source = ponds.window().over(key="key")
    run = source.to(sink)
    run(table((1, 1)), 0)
    sink.failures = 2
    for epoch in (None, 1):
        with pytest.raises(ConnectionError):
            source.finish() if epoch is None else run(table((1, 33)), epoch)
    assert source.progress().seen == 2
    run(table((1, 33)), 1)
    assert sink.rows == [(0, 10, 1, 1)]


def test_what_was_interrupted_waits_after_a_restart(ponds: Ponds) -> None:
    sink = Sink()
    source = ponds.window().over(key="key")
    source.to(sink)(table((1, 1)), 0)
    assert source.waits()
    sink.failures = 1
    with pytest.raises(ConnectionError):
        source.finish()
    ponds.reopen()
    source = ponds.window().over(key="key")
    source.to(sink)
    assert source.waits()
    assert take_due(source) == 1
    assert (sink.rows, source.waits()) == ([(0, 10, 1, 1)], False)


# Several sources


def test_a_finish_waits_for_other_sources(ponds: Ponds) -> None:
    """What they bring later is part of the same windows."""
    window = ponds.window()
    left, right = (window.over(key="key", name=name) for name in ("left", "right"))
    right(table((1, 2)), 0)
    left(table((1, 1), (1, 15), (1, 31)), 0)
    assert left.finish().num_rows == 0
    fired = right(table((1, 3), (1, 21)), 1)
    assert [tuple(row.values()) for row in fired.to_pylist()] == [(0, 10, 1, 3), (10, 20, 1, 1)]
    last = right.finish()
    assert sorted(tuple(row.values()) for row in last.to_pylist()) == [(20, 30, 1, 1), (30, 40, 1, 1)]
    assert right.finish().num_rows == 2, "asked again, it gives the same"
    assert left.finish().num_rows == 0
    assert left(table((1, 32), (1, 47)), 1).num_rows == 0
    assert window.progress().late == {"left": 1, "right": 0}
    assert window.now().to_pylist()[0]["rows"] == 1


def test_a_source_that_ended_without_rows_is_not_waited_for(ponds: Ponds) -> None:
    window = ponds.window()
    left, right = (window.over(key="key", name=name) for name in ("left", "right"))
    assert left.finish().num_rows == 0
    assert right(table((1, 1), (1, 10)), 0).num_rows == 1
    assert right.finish().num_rows == 1


def test_a_dedup_that_one_source_has_finished_remembers(ponds: Ponds) -> None:
    dedup = ponds.pond.dedup("d", key="key long", within=100)
    left, right = (dedup.over(key="key", name=name) for name in ("left", "right"))
    assert left(table((1, 1)), 0).num_rows == 1
    assert right(table((1, 1)), 0).num_rows == 0
    left.finish()
    assert right(table((1, 2)), 1).num_rows == 0


def test_silence_that_another_source_ends_meanwhile_closes_nothing(ponds: Ponds) -> None:
    """It comes back between the look at who is silent and the turn, and again while the turn is staged."""
    window = ponds.window()
    idle = f"{IDLE_S} seconds"
    left, right = (window.over(key="key", name=name, idle=idle) for name in ("left", "right"))
    fired: list[Result] = []

    def sink(rows: pa.Table, number: int) -> None:
        fired.extend(tuple(row.values()) for row in rows.to_pylist())

    run_left, run_right = left.to(sink), right.to(sink)
    run_left(table((1, 1), (1, 15)), 0)
    run_right(table((1, 2)), 0)
    ponds.fall_silent()
    client, stage = ponds.pond._client, ponds.pond._client.stage
    begins: list[int] = []

    def stage_slowly(*args: Any) -> Any:
        if not begins:
            begins.append(client.call(BeginEpoch("w", "right", LOCAL_QUERY, Turn(1), "continue")).placement)
        return stage(*args)

    client.stage = stage_slowly  # type: ignore[method-assign]
    left.take(LOCAL_QUERY, None)  # type: ignore[arg-type]
    assert begins
    run_right(table((1, 17), (1, 30)), 1)
    ponds.fall_silent()
    assert take_due(left) == 1
    assert sorted(fired) == [(0, 10, 1, 2), (10, 20, 1, 2), (30, 40, 1, 1)]


def test_an_epoch_waits_for_a_source_that_counts_again_while_it_is_staged(ponds: Ponds) -> None:
    window = ponds.window()
    left = window.over(key="key", name="left")
    right = window.over(key="key", name="right", idle=f"{IDLE_S} seconds")
    left(table((1, 1)), 0)
    right(table((1, 2)), 0)
    ponds.fall_silent()
    client, stage = ponds.pond._client, ponds.pond._client.stage
    again: list[bool] = []

    def stage_slowly(*args: Any) -> Any:
        if not again:
            again.append(True)
            client.call(BeginEpoch("w", "right", LOCAL_QUERY, Turn(1), "continue"))
        return stage(*args)

    client.stage = stage_slowly  # type: ignore[method-assign]
    assert left(table((1, 25)), 1).num_rows == 0
    fired = right(table((1, 3), (1, 25)), 1)
    assert [tuple(row.values()) for row in fired.to_pylist()] == [(0, 10, 1, 3)]


def test_queries_that_share_a_source_wait_for_each_other(ponds: Ponds) -> None:
    window = ponds.window()
    source = window.over(key="key", history="shared")
    fired: dict[str, Any] = {}

    def run(query: str, rows: pa.Table, epoch: int) -> list[Result]:
        from millpond.ops.committing import commit

        intake = source._intake(rows.schema)
        commit(ponds.pond._client, intake, rows, epoch, source._planned(intake, "long"), "shared", query)
        fired[query] = source.fired_in(query, Turn(epoch)).to_pylist()
        return [tuple(row.values()) for row in fired[query]]

    assert run("one", table((1, 1)), 0) == []
    assert run("two", table((1, 2)), 0) == []
    assert run("one", table((1, 15)), 1) == []
    assert run("two", table((1, 3), (1, 12)), 1) == [(0, 10, 1, 3)]


# One window behind another


def chain_of(ponds: Ponds, second: Any, *, idle: str | None = None, name: str = "source") -> Chain:
    first = ponds.window("first").over(key="key", idle=idle, name=name)
    aggregate = {"windows": mp.count(), "rows": mp.total("rows")}
    return first.then(
        ponds.window("second", window=second, aggregate=aggregate).over(at="window_time", name=name)
    )


SECONDS = {
    "longer": (mp.tumbling(100), [(0, 100, 1, 2, 3), (0, 100, 2, 1, 1)]),
    "shorter": (mp.tumbling(5), [(5, 10, 1, 1, 2), (5, 10, 2, 1, 1), (15, 20, 1, 1, 1)]),
    "session": (mp.session(40), [(9, 49, 2, 1, 1), (9, 59, 1, 2, 3)]),
}
ROWS = table((1, 1), (1, 2), (2, 3), (1, 12))


@pytest.mark.parametrize("second", SECONDS)
def test_a_chain_fires_all_that_is_left_on_silence(ponds: Ponds, second: str) -> None:
    window, expected = SECONDS[second]
    sink = Sink()
    chain = chain_of(ponds, window, idle=f"{IDLE_S} seconds")
    run = chain.to(sink)
    run(ROWS, 0)
    ponds.fall_silent()
    first = chain._sources[0]
    assert 1 <= take_due(first) <= 3
    assert sink.rows == expected
    assert not first.waits()
    run(table((1, 4), (1, 150)), 1)
    assert sink.turns[1] == []
    ponds.fall_silent()
    take_due(first)
    assert len(sink.rows) == len(expected) + 1


@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("second", SECONDS)
def test_a_chain_finishes(ponds: Ponds, second: str, has_sink: bool) -> None:
    window, expected = SECONDS[second]
    sink = Sink()
    chain = chain_of(ponds, window)
    if has_sink:
        chain.to(sink)(ROWS, 0)
        assert chain.finish() is None
        assert chain.finish() is None
        assert sink.rows == expected
        return
    before = [tuple(row.values()) for row in chain(ROWS, 0).to_pylist()]
    for _ in range(2):
        left = chain.finish()
        assert left is not None
        assert sorted([*before, *(tuple(row.values()) for row in left.to_pylist())]) == expected


def test_three_windows_in_a_row_finish(ponds: Ponds) -> None:
    sink = Sink()
    chain = chain_of(ponds, mp.tumbling(100))
    third = ponds.window("third", window=mp.session(1000), aggregate={"rows": mp.total("rows")})
    chain = chain.then(third.over(at="window_time"))
    chain.to(sink)(ROWS, 0)
    chain.finish()
    assert sink.rows == [(99, 1099, 1, 3), (99, 1099, 2, 1)]


def test_two_chains_into_one_window_wait_for_each_other(ponds: Ponds) -> None:
    sink = Sink()
    chains = [chain_of(ponds, mp.tumbling(100), name=name) for name in ("left", "right")]
    runs = [chain.to(sink) for chain in chains]
    runs[0](table((1, 1), (1, 15)), 0)
    runs[1](table((1, 2)), 0)
    chains[0].finish()
    runs[1](table((1, 3), (1, 25)), 1)
    assert sink.rows == []
    chains[1].finish()
    assert sink.rows == [(0, 100, 1, 3, 5)]


@pytest.mark.parametrize("place", ["between the windows", "at the sink", "when all is handed over"])
@pytest.mark.parametrize("how", ["an epoch", "a finish"])
def test_a_chain_that_is_interrupted_goes_on(ponds: Ponds, place: str, how: str) -> None:
    sink = Sink()
    rows = [ROWS, table((1, 5), (1, 33)), table((3, 120))]

    def open_chain() -> tuple[Chain, Any]:
        chain = chain_of(ponds, mp.tumbling(50))
        return chain, chain.to(sink)

    chain, run = open_chain()
    run(rows[0], 0)
    client, call, stage = ponds.pond._client, ponds.pond._client.call, ponds.pond._client.stage

    def breaks(*args: Any) -> Any:
        if args[0].resident == "second":
            raise KeyboardInterrupt
        return stage(*args)

    def breaks_off(message: Any) -> Any:
        if isinstance(message, HandedOver):
            raise KeyboardInterrupt
        return call(message)

    if place == "between the windows":
        client.stage = breaks  # type: ignore[method-assign]
    elif place == "at the sink":
        sink.failures = 1
    else:
        client.call = breaks_off  # type: ignore[method-assign]
    try:
        if how == "an epoch":
            run(rows[1], 1)
        else:
            chain.finish()
    except (KeyboardInterrupt, ConnectionError):
        pass
    ponds.reopen()
    chain, run = open_chain()
    if how == "an epoch":
        # A turn of its own may come before the epoch runs again.
        chain.finish()
    run(rows[1], 1)
    run(rows[2], 2)
    chain.finish()
    assert sink.rows == [(0, 50, 1, 3, 4), (0, 50, 2, 1, 1), (100, 150, 3, 1, 1)]


@pytest.mark.parametrize(
    "options", [{"emit": "update"}, {"lateness": 5}, {"emit": "update", "every": "1 second"}]
)
def test_what_fires_more_than_once_has_nothing_behind_it(ponds: Ponds, options: dict[str, Any]) -> None:
    twice = ponds.window("twice", **options).over(key="key")
    once = ponds.window("once").over(key="key", at="window_time")
    with pytest.raises(BadOption, match="count twice") as error:
        twice.then(once)
    assert error.value.hint
    assert isinstance(once.then(twice), Chain), "the last one may"


# Updates that are withheld


EVERY_S = 8
CUT = mp.session(10, longest=30)
UPDATED = [mp.tumbling(10), mp.sliding(10, 5), mp.session(10), CUT, mp.counted(9), mp.everything()]


@pytest.mark.parametrize("whole", [False, True], ids=["cells", "rows"])
@pytest.mark.parametrize("kind", UPDATED, ids=str)
def test_what_was_withheld_is_sent_when_its_time_has_come(ponds: Ponds, kind: Any, whole: bool) -> None:
    aggregate = {"rows": mp.count(), **({"last": mp.latest("v")} if whole else {})}
    window = ponds.window(window=kind, aggregate=aggregate, value="v long", every=f"{EVERY_S} seconds")
    sink = Sink()
    source = window.over(key="key", at="ts")
    run = source.to(sink)
    sleep = ponds.pond._client.runtime.sleep
    for epoch in range(2):
        run(pa.table({"key": [1, 2], "ts": [1 + epoch, 2], "v": [epoch, 7]}), epoch)
        sleep(3)
        assert (take_due(source), len(sink.calls)) == (0, epoch + 1), "nothing is due so soon"
    assert (len(sink.turns[0]), sink.turns[1]) == (len(window.now()), [])
    sleep(EVERY_S)
    assert take_due(source) == 1
    columns = [name for name in window.now().column_names if name != "retracted"]
    shown = sorted(tuple(row[name] for name in columns) for row in window.now().to_pylist())
    sent = sorted(row[: len(columns)] for row in sink.turns[sink.calls[-1]])
    assert sent == shown
    sleep(EVERY_S)
    assert take_due(source) == 0, "it has been sent"


def test_the_last_of_a_chain_sends_what_it_withheld(ponds: Ponds) -> None:
    sink = Sink()
    first = ponds.window("first").over(key="key")
    second = ponds.window("second", window=mp.tumbling(100), every=f"{EVERY_S} seconds").over(
        key="key", at="window_time"
    )
    chain = first.then(second)
    run = chain.to(sink)
    for epoch in range(3):
        run(table((1, 10 * epoch + 5), (1, 10 * epoch + 10)), epoch)
    assert [len(sink.turns[epoch]) for epoch in range(3)] == [1, 0, 0]
    assert take_due(first) == 0
    ponds.pond._client.runtime.sleep(EVERY_S)
    assert take_due(first) == 1
    assert sink.turns[sink.calls[-1]] == [(0, 100, 1, 3)]
