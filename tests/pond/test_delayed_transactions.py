"""Transactions with a delay: events wait in the pond, and run in the order of their times whatever epoch they came in."""

from __future__ import annotations

import inspect
import random
import textwrap
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest
from txn_oracle import OracleTable, run_serially

import millpond as mp
from millpond.container.holdings import group
from millpond.errors import (
    BadDuration,
    BadOption,
    EpochChanged,
    EpochOutOfOrder,
    LateRows,
    NullTime,
    OutOfMemory,
    SchemaMismatch,
    UnknownKind,
)
from millpond.ops.transactions import Transactions
from millpond.stores.delayed import PIECES_MAX, delayed
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.wire.base import Epoch, Turn
from millpond.wire.questions import Pending

KEYS = 4
DELAY = 20


@mp.transaction(results="x")
def add(t, k, v):
    t[k].x += v
    return t[k].x


@mp.transaction(results="x")
def take(t, k, v):
    if t[k].x < v:
        mp.abort("too little")
    t[k].x -= v
    return t[k].x


@mp.transaction(results="x")
def pass_on(t, k, v):
    t[k].x -= v
    t[k + 1].x += v * 2
    if t[k].x < -50:
        mp.abort("too low")
    return t[k + 1].x


KINDS = {"add": add, "take": take, "pass_on": pass_on}


def source_of(function: Any) -> str:
    text = textwrap.dedent(inspect.getsource(function.plain))
    return text[text.index("def ") :]


class Case:
    """A pond with one table, and an operator with a delay on it."""

    def __init__(self, name: str = "op", containers: int = 2, **options: Any) -> None:
        self.files = LossyFiles()
        self.pond = LocalPond(self.files, containers=containers)
        self.options = {"seq": "seq", "delay": DELAY, **options}
        self.op = self.operator(name)

    def operator(self, name: str = "op", **options: Any) -> Transactions:
        self.pond.table("t", key="long", value="x long", default={"x": 0})
        return self.pond.transactions(name, ["t"], KINDS, **{**self.options, **options})

    def reopen(self, containers: int = 1) -> None:
        self.files = self.files.crash("all")
        self.pond = LocalPond(self.files, containers=containers)
        self.op = self.operator()

    def rows(self) -> dict[int, int]:
        return {row["key"]: row["x"] for row in self.pond.table("t").snapshot().to_pylist()}


def events(times: list[int], **columns: Any) -> pa.Table:
    count = len(times)
    usual = {"type": ["add"] * count, "seq": [0] * count, "k": [1] * count, "v": times}
    schema = {"ts": pa.int64(), "type": pa.string(), "seq": pa.int64(), "k": pa.int64(), "v": pa.int64()}
    return pa.table({"ts": times, **usual, **columns}).cast(pa.schema(schema))


def ran(table: pa.Table | None) -> list[int]:
    assert table is not None
    return table["ts"].to_pylist()


# The promise


def shuffled(seed: int, count: int = 120) -> list[pa.Table]:
    """Five epochs of events, each at most `DELAY` behind the newest that came before it."""
    chance = random.Random(seed)
    drawn = [
        {
            "ts": chance.randrange(3 * count),
            "type": chance.choice(list(KINDS)),
            "seq": number,
            "k": chance.randrange(KEYS),
            "v": chance.randrange(1, 40),
        }
        for number in range(count)
    ]
    arrival = sorted(drawn, key=lambda event: event["ts"] + chance.randrange(DELAY + 1))
    cuts = sorted(chance.sample(range(count + 1), 4))
    spans = zip([0, *cuts], [*cuts, count], strict=True)
    schema = events([]).schema
    return [pa.Table.from_pylist(arrival[start:stop], schema=schema) for start, stop in spans]


@pytest.mark.parametrize("seed", range(6))
def test_events_shuffled_across_five_epochs_give_what_the_sorted_serial_run_gives(seed: int) -> None:
    epochs = shuffled(seed)
    tables = {"t": OracleTable("t", {"x": 0}, {"x": 0})}
    everything = pa.concat_tables(epochs).to_pylist()
    given = [{**event, "time": event["ts"], "kind": event["type"]} for event in everything]
    outcomes = run_serially({kind: source_of(function) for kind, function in KINDS.items()}, tables, given)
    expected = {
        event["seq"]: (reason, None if results is None else results[0])
        for event, (reason, results) in zip(everything, outcomes, strict=True)
    }
    assert {reason for reason, _ in expected.values()} > {None}
    case = Case()
    found: dict[int, Any] = {}
    newest = -1

    def note(outputs: pa.Table | None) -> None:
        """Each event once; and none before one that ran in an earlier epoch."""
        nonlocal newest
        assert outputs is not None
        rows = outputs.to_pylist()
        assert not found.keys() & {row["seq"] for row in rows}
        assert all(row["ts"] >= newest for row in rows)
        newest = max([newest, *(row["ts"] for row in rows)])
        found.update({row["seq"]: (row["reason"], row["x"]) for row in rows})

    moved = 0
    for epoch, table in enumerate(epochs):
        note(case.op(table, epoch))
        match (seed + epoch) % 4:
            case 0:
                case.reopen(containers=epoch % 3 + 1)
            case 1:
                case.pond.checkpoint()
                case.reopen(containers=2)
            case 2:
                owners = [(owner + 1) % 2 for owner in case.pond.placement().values()]
                if len(case.pond.containers()) == 2:
                    case.pond.coordinator.place(owners)
                    moved += 1
    assert case.op.pending().rows > 0
    note(case.op.finish())
    assert found == expected
    assert case.rows() == {key: row["x"] for key, row in tables["t"].rows.items()}
    assert case.op.pending() == Pending(rows=0, since=None, late=0)
    case.reopen()
    assert case.rows() == {key: row["x"] for key, row in tables["t"].rows.items()}
    case.pond.validate()


def test_the_moves_above_happen() -> None:
    """A group's slice changes hands with what waits in it."""
    case = Case()
    case.op(events([100, 90]), 0)
    before = case.pond.placement()
    case.pond.coordinator.place([(owner + 1) % 2 for owner in before.values()])
    assert case.pond.placement() != before
    assert case.op.pending() == Pending(rows=2, since=90, late=0)
    assert ran(case.op(events([120]), 1)) == [90]


# One thing at a time


def test_what_is_due_late_and_waiting() -> None:
    case = Case()
    assert ran(case.op(events([100, 75, 90, 79, 80]), 0)) == [75, 79]  # below 80
    assert case.op.pending() == Pending(rows=3, since=80, late=0)
    out = case.op(events([79, 80, 85, 106]), 1)  # below 86; 79 is late
    assert ran(out) == [80, 79, 80, 85], "those that waited, then its own as they came"
    assert out["reason"].to_pylist() == [None, "late", None, None]
    assert out["x"].to_pylist() == [75 + 79 + 80, None, 75 + 79 + 160, 75 + 79 + 160 + 85]
    assert case.op.pending() == Pending(rows=3, since=90, late=1)
    assert case.op(events([106, 80, 85, 79]), 1).equals(out), "an epoch that runs again"
    assert ran(case.op(events([]), 2)) == []
    assert case.op.progress().updaters == {"op": 86}
    figures = case.pond.metrics()["groups"]["tables"]
    assert (figures["waiting"]["rows"], figures["late"], figures["events"]) == (3, 1, 5)
    # Without a delay what waits runs up to the newest time.
    assert ran(case.operator(delay=None)(events([91]), 3)) == [90, 91]
    assert ran(case.operator(delay=None)(events([106]), 4)) == [100, 106, 106]
    assert case.rows() == {1: 75 + 79 + 80 + 80 + 85 + 100 + 90 + 106 + 91 + 106}


LATE_CHOICES: list[Any] = ["output", "drop", lambda rows, epoch: None]


@pytest.mark.parametrize("now", [*LATE_CHOICES, "error"])
@pytest.mark.parametrize("first", LATE_CHOICES)
def test_an_epoch_with_late_events_is_recognised_whatever_becomes_of_them_now(first: Any, now: Any) -> None:
    case = Case(late=first)
    case.op(events([100, 75, 79]), 0)
    out = case.op(events([79, 80, 78, 85, 106]), 1)
    ran_once = case.rows()
    for _ in range(2):
        replaying = case.operator(late=now)
        assert replaying(events([85, 79, 106, 78, 80]), 1).equals(out), "in any order"
        for changed in ([79, 80, 78, 85, 107], [77, 80, 78, 85, 106], [79, 80, 85, 106], [80, 85, 106]):
            with pytest.raises(EpochChanged):
                replaying(events(changed), 1)
        case.reopen()
    assert case.rows() == ran_once
    assert case.op.pending() == Pending(rows=2, since=100, late=2)


def test_an_epoch_of_late_events_alone_is_not_one_of_none() -> None:
    case = Case(late="drop")
    case.op(events([100]), 0)
    case.op(events([79]), 1)
    case.op(events([]), 2)
    for epoch, others in ((1, []), (1, [78]), (2, [79])):
        with pytest.raises(EpochChanged):
            case.op(events(others), epoch)
    case.op(events([79]), 1)
    case.op(events([]), 2)
    assert case.op.pending() == Pending(rows=1, since=100, late=1)


def test_equal_times_of_two_epochs_go_by_seq() -> None:
    case = Case(delay=0)
    assert ran(case.op(events([10], seq=[2], type=["take"], v=[7]), 0)) == []
    out = case.op(events([10, 11], seq=[1, 0], v=[7, 1]), 1)
    assert list(zip(out["seq"].to_pylist(), out["committed"].to_pylist(), strict=True)) == [
        (2, True),
        (1, True),
    ]


def test_finish_runs_what_waits_and_is_given_again_until_the_next_epoch() -> None:
    case = Case()
    assert case.op.finish() == pa.table({}), "nothing came yet"
    case.op(events([100, 95]), 0)
    out = case.op.finish()
    assert ran(out) == [100, 95]
    assert case.rows() == {1: 195}
    for _ in range(2):
        assert case.op.finish() == out
        case.reopen()
    again = case.op(events([100, 101, 130]), 1)
    assert (ran(again), again["reason"].to_pylist()) == ([100, 101], ["late", None])
    assert ran(case.op.finish()) == [130]
    case.op(events([500, 400]), 2)
    case.op(events([600]), 3)
    assert ran(case.op.finish()) == [600]
    assert case.rows() == {1: 195 + 101 + 130 + 500 + 400 + 600}


def test_finish_hands_to_the_function_and_no_epoch_follows_before_it_has_returned() -> None:
    case = Case()
    seen: list[tuple[int, list[int]]] = []
    broken = True

    def sink(outputs: Any, epoch: int) -> None:
        seen.append((epoch, ran(outputs)))
        if epoch < 0 and broken:
            raise RuntimeError("the sink fails")

    into = case.op.to(sink)
    into(events([100, 95]), 0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="the sink fails"):
        case.op.finish()
    case.reopen()
    into = case.op.to(sink)
    with pytest.raises(EpochOutOfOrder, match="finish"):
        into(events([110]), 1)  # type: ignore[arg-type]
    broken = False
    assert case.op.finish() is None
    assert case.op.finish() is None
    into(events([130, 105]), 1)  # type: ignore[arg-type]
    assert seen == [(0, []), (-1, [100, 95]), (-1, [100, 95]), (1, [105])]
    assert case.rows() == {1: 300}


def test_operators_of_one_group_wait_each_for_their_own() -> None:
    case = Case()
    other = case.operator("other", delay=5)
    case.op(events([100]), 0)
    assert ran(other(events([100, 90]), 0)) == [90]
    assert ran(case.op(events([121]), 1)) == [100]
    assert case.op.pending() == Pending(rows=1, since=121, late=0)
    assert other.pending() == Pending(rows=1, since=100, late=0)
    case.pond.forget("t", name="other")
    assert case.operator("other").pending().rows == 0
    case.reopen()
    assert case.op.pending().rows == 1
    assert case.rows() == {1: 190}


def test_a_new_history_takes_over_what_waits() -> None:
    case = Case()
    table = events([100, 95])
    case.op._commit(table, 0, table.schema, "first")
    assert case.op.pending().rows == 2
    again = case.operator(history="new")
    again._commit(events([118]), 0, table.schema, "second")
    assert ran(again._outputs("second", Turn(Epoch(0))).read(again._client)) == [95]
    assert ran(again.finish()) == [100, 118]


def test_bad_events_are_refused_in_the_epoch_in_which_they_come() -> None:
    case = Case(late="error")
    case.op(events([100]), 0)
    for bad, error in (
        (events([101], type=["none such"]), UnknownKind),
        (events([101, 79]), LateRows),
        (events([101], ts=[None]), NullTime),
        (events([101]).append_column("more", pa.array([1])), SchemaMismatch),
    ):
        with pytest.raises(error):
            case.op(bad, 1)
        assert case.op.pending() == Pending(rows=1, since=100, late=0)
    assert ran(case.op(events([121]), 1)) == [100]


def test_events_with_other_columns_come_after_a_finish() -> None:
    case = Case()
    case.op(events([100]), 0)
    wider = events([130]).append_column("more", pa.array([1]))
    with pytest.raises(SchemaMismatch) as refused:
        case.op(wider, 1)
    assert "finish()" in str(refused.value)
    assert ran(case.op.finish()) == [100]
    case.op(wider, 1)
    assert case.op.finish()["more"].to_pylist() == [1]  # type: ignore[index]


def not_null(table: pa.Table) -> pa.Table:
    return table.cast(pa.schema([field.with_nullable(False) for field in table.schema]))


def test_which_columns_may_be_null_changes_while_events_wait() -> None:
    case = Case()
    for epoch in range(PIECES_MAX + 2):
        table = events([100 + epoch // 10], v=[1 if epoch else None])
        case.op(not_null(table) if epoch % 2 else table, epoch)
    case.pond.checkpoint()
    case.reopen()
    assert case.op.pending().rows == PIECES_MAX + 2
    out = case.op(not_null(events([130])), PIECES_MAX + 2)
    assert out["reason"].to_pylist()[:2] == ["field 'v' is null", None]
    assert case.op.finish()["ts"].to_pylist() == [130]  # type: ignore[index]
    assert case.rows() == {1: PIECES_MAX + 1 + 130}


def test_queries_whose_events_have_other_columns_are_finished_one_by_one() -> None:
    case = Case(history="shared")
    table = events([100])
    wider = table.append_column("more", pa.array([1]))
    case.op._commit(table, 0, table.schema, "first")
    case.op._commit(wider, 0, wider.schema, "second")
    new = case.operator(history="new")
    with pytest.raises(SchemaMismatch, match="other columns"):
        new._commit(table, 0, table.schema, "third")
    case.pond.checkpoint()
    assert ran(new.finish("first")) == [100]
    assert ran(new.finish("second")) == [100]
    new._commit(table, 0, table.schema, "third")
    assert new.pending().rows == 0


def test_without_its_delay_an_operator_keeps_the_order() -> None:
    case = Case()
    case.op(events([100, 95]), 0)
    plain = case.operator(delay=None)
    assert ran(plain(events([]), 1)) == []
    assert ran(plain(events([90]), 2)) == [90]
    assert ran(plain(events([97, 96]), 3)) == [95, 97, 96]
    assert plain(events([94]), 4)["reason"].to_pylist() == ["late"]
    case.reopen()
    plain = case.operator(delay=None)
    assert plain.pending() == Pending(rows=1, since=100, late=1)
    assert ran(plain.finish()) == [100]
    assert plain(events([100]), 5)["reason"].to_pylist() == ["late"]
    assert case.rows() == {1: 90 + 95 + 97 + 96 + 100}


def test_a_finish_that_a_sink_owes_may_be_taken_as_a_table() -> None:
    case = Case()

    def sink(outputs: Any, epoch: int) -> None:
        if epoch < 0:
            raise RuntimeError("the sink fails")

    case.op.to(sink)(events([100]), 0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        case.op.finish()
    case.reopen()
    assert ran(case.op.finish()) == ran(case.op.finish()) == [100]
    assert ran(case.op(events([130]), 1)) == []


def test_events_that_wait_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case()
    case.op(events([100, 90]), 0)
    monkeypatch.setattr(group, "ROOM_SHARE", 1 << 60)
    with pytest.raises(OutOfMemory, match="would wait") as refused:
        case.op(events([101, 102, 103]), 1)
    assert "delay=" in str(refused.value)
    assert case.op.pending() == Pending(rows=2, since=90, late=0)
    # Those that let others run are taken.
    assert ran(case.op(events([130]), 1)) == [100, 90]
    case.reopen()
    assert case.op.pending().rows == 1


def test_delays_and_what_becomes_of_late_events_are_checked() -> None:
    case = Case()
    for options, error in (
        ({"delay": "ten"}, BadDuration),
        ({"delay": -1}, BadDuration),
        ({"late": "keep"}, BadOption),
        ({"limit": 0}, BadOption),
        ({"limit": "soon"}, BadDuration),
        ({"limit": True}, BadOption),
        ({"memory": "much"}, BadOption),
        ({"memory": 5}, BadOption),
    ):
        with pytest.raises(error) as refused:
            case.operator("bad", **options)
        assert refused.value.hint
    for delay in ("10 seconds", timedelta(seconds=10)):
        with pytest.raises(BadDuration):
            case.operator("bad", delay=delay)(events([1]), 0)
    assert (
        case.operator("good", limit="30 seconds", memory="512m", delay=timedelta(0))(events([1]), 0)
        is not None
    )


def test_pieces_are_joined_before_they_are_many() -> None:
    waiting = delayed(events([0])["ts"].to_numpy(), events([0]))
    for time in range(1, 4 * PIECES_MAX):
        waiting = waiting.followed_by(delayed(events([time])["ts"].to_numpy(), events([time])))
        assert len(waiting._pieces) <= PIECES_MAX
    due, left = waiting.split(100)
    assert [time for rows in due for time in ran(rows)] == list(range(100))
    assert (left.lowest, left.newest, len(left)) == (100, 4 * PIECES_MAX - 1, 4 * PIECES_MAX - 100)
