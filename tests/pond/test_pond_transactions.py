"""Transactions through a pond: every output row and every table is what a serial interpreter gives."""

from __future__ import annotations

import datetime as dt
import decimal
import os
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from txn_grammar import SCHEMA, TABLES, epochs, function_sets, oracle_tables, rows_by_key
from txn_oracle import run_serially

import millpond as mp
from millpond.code.capture import Code
from millpond.code.tables import TransactionCode
from millpond.errors import (
    BadOption,
    BadTransaction,
    BadType,
    EpochChanged,
    EpochOutOfOrder,
    LateRows,
    MillpondError,
    NullKey,
    NullTime,
    RuleInterpreted,
    SchemaMismatch,
    UnknownKind,
    UnknownTable,
    WrongColumn,
    WrongType,
)
from millpond.kernels._jit import JIT_ENABLED
from millpond.ops.columns import time_kind_in
from millpond.ops.committing import commit_staged
from millpond.ops.intake import Part
from millpond.ops.transactions import Transactions
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.txn import load
from millpond.wire.base import LOCAL_QUERY, Turn
from millpond.wire.epochs import Receipt
from millpond.wire.questions import Pending

EXAMPLES = int(os.environ.get("MILLPOND_TXN_EXAMPLES", "2" if JIT_ENABLED else "40"))

pytestmark = pytest.mark.filterwarnings("ignore::millpond.errors.RuleInterpreted")


# Random transactions, on a pond that is checkpointed, killed and reopened between their epochs


def run_in_parts(
    op: Transactions, parts: Sequence[tuple[int, pa.Table]], epoch: int, zombies: Sequence[pa.Table] = ()
) -> pa.Table:
    """An epoch whose events come in partitions, as Spark's tasks send them; `zombies` are attempts that do not count."""
    schema, turn = parts[0][1].schema, Turn(epoch)
    intake = op._intake(schema)

    def stage(plan: Any) -> list[Receipt]:
        for zombie in zombies:
            intake.stage(op._client, zombie, plan, Part(LOCAL_QUERY, turn, parts[0][0]))
        return [
            intake.stage(op._client, table, plan, Part(LOCAL_QUERY, turn, number)) for number, table in parts
        ]

    kind = time_kind_in(parts[0][1], intake.at)
    commit_staged(op._client, intake, LOCAL_QUERY, turn, stage, kind, op._planned(intake), op._history)
    return op._outputs(LOCAL_QUERY, turn).read(op._client)


def bits(value: Any) -> Any:
    """Equal where the bytes are; all NaNs are one."""
    if isinstance(value, list):
        return [bits(one) for one in value]
    if isinstance(value, dict):
        return {key: bits(one) for key, one in value.items()}
    if isinstance(value, float):
        return "nan" if value != value else struct.pack("d", value)  # noqa: PLR0124
    return value


class RandomRun:
    """One pond, one operator, and the model of both."""

    def __init__(self, sources: dict[str, str], containers: int, delay: int | None) -> None:
        self.sources = sources
        self.functions = {
            kind: load(TransactionCode(Code(kind, "import math\n" + source, {}, {"math": "math"})))
            for kind, source in sources.items()
        }
        self.files = LossyFiles()
        self.tables = oracle_tables()
        self.delay = delay
        self.mark = -np.inf
        self.waiting: list[dict[str, Any]] = []
        self.late = 0
        self.outputs: list[Any] = []
        self.reopen(containers)

    def reopen(self, containers: int) -> None:
        self.files = self.files.crash("all")
        self.pond = LocalPond(self.files, containers=containers)
        for name, spec in TABLES.items():
            self.pond.table(name, spec.key, spec.value, spec.default)
        self.op = self.pond.transactions(
            "op", list(TABLES), self.functions, kind="kind", at="time", seq="seq", delay=self.delay
        )

    def expect(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        before = self.mark
        self.late += sum(event["time"] < before for event in events)
        self.mark = max([before, *(event["time"] - (self.delay or 0) for event in events)])
        known = [*self.waiting, *events]
        is_due = [
            (place < len(self.waiting) or event["time"] >= before)
            and (self.delay is None or event["time"] < self.mark)
            for place, event in enumerate(known)
        ]
        shown = [
            (event, due)
            for place, (event, due) in enumerate(zip(known, is_due, strict=True))
            if due or (place >= len(self.waiting) and event["time"] < before)
        ]
        self.waiting = [
            event
            for place, (event, due) in enumerate(zip(known, is_due, strict=True))
            if not due and (place < len(self.waiting) or event["time"] >= before)
        ]
        return self._rows(shown)

    def expect_finish(self) -> list[dict[str, Any]]:
        shown = [(event, True) for event in self.waiting]
        self.mark = max([self.mark, *(event["time"] + 1 for event in self.waiting)])
        self.waiting = []
        return self._rows(shown)

    def _rows(self, shown: list[tuple[dict[str, Any], bool]]) -> list[dict[str, Any]]:
        widths = {kind: len(function.result_names) for kind, function in self.functions.items()}
        outcomes = iter(run_serially(self.sources, self.tables, [event for event, ran in shown if ran]))
        out = []
        for event, ran in shown:
            reason, results = next(outcomes) if ran else ("late", None)
            row = {**event, "committed": reason is None, "reason": reason}
            row |= {f"r{place}": None for place in range(max(widths.values()))}
            out.append(row | {f"r{place}": value for place, value in enumerate(results or ())})
        return [bits(row) for row in out]

    def check(self) -> None:
        for name, table in self.tables.items():
            found = rows_by_key(name, self.pond.table(name).snapshot())
            assert bits(found) == bits(table.rows), name
        assert self.op.progress().late == {"op": self.late}
        since = min((event["time"] for event in self.waiting), default=None)
        assert self.op.pending() == Pending(len(self.waiting), since, self.late)
        self.pond.validate()


@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),  # an example takes seconds: to shrink one takes too long
)
@given(st.data())
def test_any_program_and_any_partitions_give_what_serial_execution_gives(data: st.DataObject) -> None:
    sources = data.draw(function_sets())
    note("\n".join(sources.values()))
    run = RandomRun(sources, data.draw(st.integers(1, 3)), data.draw(st.sampled_from([None, 0, 2, 4, 9])))
    for epoch in range(5):
        events = [] if data.draw(st.integers(0, 5)) == 0 else data.draw(epochs(list(sources)))
        events = [{**event, "time": event["time"] + 3 * epoch} for event in events]
        places = [data.draw(st.integers(0, 2)) for _ in events]
        parts = [
            (number, [event for event, place in zip(events, places, strict=True) if place == number])
            for number in range(3)
        ]
        tables = {number: pa.Table.from_pylist(part, schema=SCHEMA) for number, part in parts}
        sent = data.draw(st.permutations(list(tables.items())))
        # Equal times and seqs go by partition, and in it by row.
        expected = run.expect([event for _, part in parts for event in part])
        zombies = [sent[0][1].slice(1)] if data.draw(st.booleans()) else []
        outputs = run_in_parts(run.op, sent, epoch, zombies)
        assert [bits(row) for row in outputs.to_pylist()] == expected
        run.outputs.append((sent, expected))
        run.check()
        match data.draw(st.sampled_from(["go on", "checkpoint", "kill", "reopen", "both"])):
            case "checkpoint":
                run.pond.checkpoint()
            case "kill":
                run.pond.coordinator._containers.recover(0, broken=True)
                run.check()
            case "reopen":
                run.reopen(data.draw(st.integers(1, 4)))
            case "both":
                run.pond.checkpoint()
                run.reopen(data.draw(st.integers(1, 4)))
        for before, (again, gave) in enumerate(run.outputs):
            # As one table, in another order: a replay is known by its content.
            whole = pa.concat_tables([table for _, table in reversed(again)])
            assert [bits(row) for row in run.op(whole, before).to_pylist()] == gave
        run.check()
    expected = run.expect_finish()
    for _ in range(2):
        finished = run.op.finish()
        assert finished is not None
        assert [bits(row) for row in finished.to_pylist()] == expected
        run.check()
        run.reopen(2)


@pytest.mark.skipif(not JIT_ENABLED, reason="this is the run without the compiler")
@pytest.mark.long
def test_many_more_without_the_compiler() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "any_program"]
    done = subprocess.run(
        command, env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]


# One thing at a time


@mp.transaction
def add(t, k, v):
    t[k].x += v
    return t[k].x


@mp.transaction
def take(t, k, v):
    if t[k].x < v:
        mp.abort("too little")
    t[k].x -= v


class Case:
    """A pond with one table of longs, and an operator on it."""

    def __init__(self, kinds: dict[str, Any] | None = None, value: str = "x long", **options: Any) -> None:
        self.files = LossyFiles()
        self.kinds = kinds or {"add": add, "take": take}
        self.options = options
        self.pond = LocalPond(self.files, containers=2)
        self.pond.table("t", key="long", value=value, default={"x": 0} if value == "x long" else None)
        self.op = self.operator(self.pond)

    def operator(self, pond: LocalPond, kinds: dict[str, Any] | None = None) -> Transactions:
        return pond.transactions("op", ["t"], kinds or self.kinds, **self.options)

    def rows(self) -> dict[Any, Any]:
        return rows_of(self.pond)

    def reopened(self, containers: int = 1) -> LocalPond:
        """Another pond, on the files as a crash would leave them now. This one goes on."""
        found = self.files.crash("all")
        self.files._halted = None
        return LocalPond(found, containers=containers)

    def check(self, expected: dict[Any, Any]) -> None:
        """Now, and after a restart."""
        assert self.rows() == expected
        assert rows_of(self.reopened()) == expected
        self.pond.validate()


def rows_of(pond: LocalPond) -> dict[Any, Any]:
    rows = pond.table("t").snapshot().to_pylist()
    return {row["key"]: row["x"] for row in rows}


def events(times: Any, keys: Any = None, values: Any = None, kinds: Any = "add", **more: Any) -> pa.Table:
    count = len(times)
    return pa.table(
        {
            "ts": times,
            "k": [1] * count if keys is None else keys,
            "v": [1] * count if values is None else values,
            "type": [kinds] * count if isinstance(kinds, str) else kinds,
            **more,
        }
    )


@pytest.fixture
def case() -> Case:
    return Case()


def test_late_events_have_outputs_that_say_so(case: Case) -> None:
    case.op(events([10, 30, 20]), 0)
    sent = events([29, 30, 31, 5], values=[1000, 10, 100, 1000], kinds=["take", "add", "add", "none such"])
    out = case.op(sent, 1)
    assert out["ts"].to_pylist() == [29, 30, 31, 5], "as they came"
    assert out["committed"].to_pylist() == [False, True, True, False]
    assert out["reason"].to_pylist() == ["late", None, None, "late"]
    assert out["r0"].to_pylist() == [None, 13, 113, None]
    assert case.op.progress().late == {"op": 2}
    assert case.op(sent.take([3, 2, 0, 1]), 1).equals(out)
    alone = case.op(events([1]), 2)
    assert (alone["committed"].to_pylist(), alone["reason"].to_pylist()) == ([False], ["late"])
    assert case.op.progress().late == {"op": 3}
    figures = case.pond.metrics()["groups"]["tables"]
    assert (figures["events"], figures["aborted"], figures["late"]) == (5, 0, 3)
    case.check({1: 113})


def test_late_events_go_to_a_function() -> None:
    late: list[tuple[int, list[int]]] = []
    case = Case(late=lambda rows, epoch: late.append((epoch, rows["ts"].to_pylist())))
    case.op(events([10, 30]), 0)
    out = case.op(events([29, 30, 5]), 1)
    assert out["ts"].to_pylist() == [30]
    case.op(events([31]), 2)
    case.op(events([29, 30, 5]), 1)  # a replay hands the same rows over
    assert late == [(1, [29, 5]), (1, [29, 5])]
    assert case.op.progress().late == {"op": 2}
    case.check({1: 4})


def test_late_events_are_dropped_and_counted() -> None:
    case = Case(late="drop")
    case.op(events([10, 30, 20]), 0)
    out = case.op(events([29, 30, 31, 5], values=[1000, 10, 100, 1000]), 1)
    assert out["ts"].to_pylist() == [30, 31]
    assert out["r0"].to_pylist() == [13, 113]
    assert case.op.progress().late == {"op": 2}
    assert case.op.progress().updaters == {"op": 31}
    # All of them late, and an epoch of none: the punctuation stays.
    assert len(case.op(events([1]), 2)) == len(case.op(events([]).cast(events([1]).schema), 3)) == 0
    assert case.op.progress().late == {"op": 3}
    # A replay counts nothing twice, and drops the same rows.
    assert case.op(events([5, 31, 30, 29], values=[1000, 100, 10, 1000]), 1).equals(out)
    assert case.op.progress().late == {"op": 3}
    case.check({1: 113})


def test_late_events_are_an_error_where_wanted() -> None:
    case = Case(late="error")
    case.op(events([10]), 0)
    with pytest.raises(LateRows) as refused:
        case.op(events([10, 9]), 1)
    assert refused.value.rows == 1
    assert case.op.progress().late == {"op": 0}
    case.op(events([10]), 1)
    assert len(case.op(events([10]), 0)) == 1
    case.check({1: 2})


def test_an_operator_that_comes_later_begins_where_all_others_are(case: Case) -> None:
    case.op(events([10]), 0)
    other = case.pond.transactions("other", ["t"], {"add": add})
    assert other(events([9, 10]), 0)["reason"].to_pylist() == ["late", None]
    assert other.progress().late == {"op": 0, "other": 1}
    # From then on each has a punctuation of its own.
    other(events([50]), 1)
    case.op(events([20]), 1)
    case.check({1: 4})


def test_a_replay_with_other_content_changes_nothing(case: Case) -> None:
    out = case.op(events([1, 2]), 0)
    for other in (
        events([1, 2, 2]),
        events([1]),
        events([1, 2], values=[1, 2]),
        events([1, 2], note=["a", None]),
        events([1, 2], kinds=["add", "take"]),
        events([1, 2]).slice(0, 0),
    ):
        with pytest.raises(EpochChanged):
            case.op(other, 0)
    assert case.op(events([2, 1]), 0).equals(out)
    with pytest.raises(EpochOutOfOrder):
        case.op(events([3]), 2)
    case.op(events([3]), 1)
    case.check({1: 3})


UNREADABLE: list[tuple[str, pa.Table, type[Exception]]] = [
    ("unknown kind", events([5, 6], kinds=["add", "steal"]), UnknownKind),
    ("null kind", events([5], kinds=[None]), MillpondError),
    ("kind of lists", events([5], kinds=pa.array([["add"]])), WrongType),
    ("kind of broken bytes", events([5], kinds=pa.array([b"\xff"])), WrongType),
    ("null time", events([5, None]), NullTime),
    ("time of doubles", events([5.0]), WrongType),
    ("time too fine", events(pa.array([5], pa.timestamp("ns"))), WrongType),
    ("time of another kind", events(pa.array([5], pa.timestamp("us"))), WrongType),
    ("no time", events([5]).drop_columns(["ts"]), WrongColumn),
    ("no field", events([5]).drop_columns(["v"]), WrongColumn),
    ("no kind", events([5]).drop_columns(["type"]), WrongColumn),
    ("two of a name", pa.table([[5], [1], [1], ["add"], [1]], names=["ts", "k", "v", "type", "v"]), WrongColumn),
    ("two of a name that is not used", pa.table([[5], [1], [1], ["add"], [1], [1]], names=["ts", "k", "v", "type", "z", "z"]), WrongColumn),
    ("keys of another type", events([5], keys=["a"]), BadTransaction),
    ("taken: committed", events([5], committed=[True]), WrongColumn),
    ("taken: reason", events([5], reason=["x"]), WrongColumn),
    ("taken: a result", events([5], r0=[1]), WrongColumn),
    ("no digest", events([5], z=pa.array(["a"], pa.string_view())), WrongType),
]  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "error"), [bad[1:] for bad in UNREADABLE], ids=[bad[0] for bad in UNREADABLE]
)
def test_events_that_cannot_run_change_nothing_and_the_operator_goes_on(
    case: Case, bad: pa.Table, error: type[Exception]
) -> None:
    case.op(events([4]), 0)
    for _ in range(2):
        with pytest.raises(error):
            case.op(bad, 1)
    assert rows_of(case.reopened()) == {1: 1}
    case.op(events([5], values=[10]), 1)
    with pytest.raises(error):
        case.op(bad, 2)
    case.check({1: 11})
    again = case.reopened()
    case.operator(again)(events([8], values=[100]), 2)
    assert rows_of(again) == {1: 111}


@pytest.mark.parametrize(
    "seq",
    [
        pa.array([1.0]), pa.array([1], pa.uint64()), pa.array([None], pa.int64()), pa.array(["a"]),
        pa.array([1], pa.timestamp("ns")), pa.array([1], pa.time64("us")),
    ],
    ids=lambda seq: str(seq.type),
)  # fmt: skip
def test_a_seq_that_orders_nothing_changes_nothing(seq: pa.Array) -> None:
    case = Case(seq="s")
    with pytest.raises(MillpondError):
        case.op(events([5], s=seq), 0)
    case.op(events([5, 5], values=[1, 2], s=[2, 1]), 0)
    case.check({1: 3})


def test_events_run_in_the_order_of_time_and_seq_whatever_order_they_come_in() -> None:
    case = Case(seq="s")
    table = events([2, 1, 1, 3], values=[5, 3, 4, 2], kinds=["take", "add", "add", "take"], s=[0, 2, 1, 0])
    out = case.op(table, 0)
    assert out["r0"].to_pylist() == [None, 7, 4, None]
    assert out["committed"].to_pylist() == [True, True, True, True]
    shuffled = case.op(table.take([3, 0, 2, 1]), 0)
    assert shuffled.equals(out)
    case.check({1: 0})


def test_a_null_field_aborts_its_event_alone(case: Case) -> None:
    out = case.op(
        events([1, 2, 3], keys=pa.array([1, None, 1], pa.int64()), values=pa.array([1, 1, None], pa.int64())),
        0,
    )
    assert out["reason"].to_pylist() == [None, "field 'k' is null", "field 'v' is null"]
    assert out["committed"].to_pylist() == [True, False, False]
    case.check({1: 1})


OTHER_TYPES = {
    "struct": pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": ""}]),
    "list of strings": pa.array([["a", None], [], None]),
    "nested lists": pa.array([[[1], []], None, [[2, 3]]]),
    "decimal": pa.array([decimal.Decimal("1.50"), None, decimal.Decimal("-2.25")]),
    "date": pa.array([dt.date(2020, 1, 1), None, dt.date(1960, 1, 1)]),
    "binary": pa.array([b"\x00\xff", None, b""]),
    "dictionary": pa.array(["x", None, "y"]).dictionary_encode(),
    "large string": pa.array(["x", None, "y"], pa.large_string()),
    "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
    "nothing but nulls": pa.nulls(3),
    "list of nulls": pa.array([[None], [], None]),
    "time of day": pa.array([1, None, 3], pa.time64("us")),
    "timestamp": pa.array([1, None, 3], pa.timestamp("us", "Europe/Berlin")),
    "nanoseconds": pa.array([1, None, 3], pa.timestamp("ns")),
    "unsigned": pa.array([2**63, 0, None], pa.uint64()),
}


@pytest.mark.parametrize("column", OTHER_TYPES.values(), ids=list(OTHER_TYPES))
def test_columns_that_no_function_takes_come_back_as_they_were(case: Case, column: pa.Array) -> None:
    table = events([3, 1, 2], values=[1, 10, 100], extra=column)
    out = case.op(table, 0)
    assert out["extra"].combine_chunks().equals(column)
    assert out["r0"].to_pylist() == [111, 10, 110]
    # In other pieces it is the same content.
    assert case.op(pa.concat_tables([table.slice(2), table.slice(0, 2)]), 0).equals(out)
    case.pond.checkpoint()
    again = case.operator(case.reopened())
    assert again(table, 0).equals(out)
    assert again(table.slice(0, 0), 1).schema.equals(out.schema)


# Errors of user code


@mp.transaction
def raises_base(t, k, v):
    t[k].x += v
    if v == 13:
        raise SystemExit("bye")
    return v


@mp.transaction
def says_no_text(t, k, v):
    t[k].x += v
    if v == 13:
        raise ValueError(chr(0xD800))
    return v


@mp.transaction(results="said string")
def returns_no_text(t, k, v):
    t[k].x += v
    said = "fine"
    if v == 13:
        said = chr(0xD800)
    return said


@mp.transaction
def aborts_with_a_number(t, k, v):
    t[k].x += v
    if v == 13:
        mp.abort(v)
    return v


@mp.transaction
def aborts_with_none(t, k, v):
    t[k].x += v
    if v == 13:
        mp.abort(None)
    return v


@mp.transaction
def divides(t, k, v):
    t[k].x += v
    t[k].x += 0 // (v - 13)
    return v


@mp.transaction
def overflows(t, k, v):
    t[k].x += v
    if v == 13:
        t[k].x += 9223372036854775807
    return v


@mp.transaction
def overflows_interpreted(t, k, v):
    t[k].x += v
    if str(v) == "13":
        t[k].x += 9223372036854775807
    return v


@mp.transaction
def returns_nothing_that_fits(t, k, v):
    t[k].x += v
    if v == 13:
        return "a", [v]
    return v, v


@mp.transaction
def writes_what_does_not_fit(t, k, v):
    t[k].x += v
    if v == 13:
        t[k].x = str(v)
    return v


FAILING = {
    raises_base: "SystemExit: bye",
    says_no_text: "ValueError: \\ud800",
    returns_no_text: "UnicodeEncodeError: ",
    aborts_with_a_number: "13",
    aborts_with_none: "None",
    divides: "ZeroDivisionError: division by zero",
    overflows: "overflow",
    overflows_interpreted: "overflow",
    returns_nothing_that_fits: "TypeError: ",
    writes_what_does_not_fit: "TypeError: ",
}


@pytest.mark.parametrize("function", FAILING, ids=lambda function: function.name)
def test_an_error_in_user_code_ends_its_transaction_and_nothing_else(function: Any) -> None:
    """Before it, after it, and when the log is read again."""
    case = Case(kinds={"add": function})
    table = events([2, 1, 3], values=[1, 13, 100])
    out = case.op(table, 0)
    assert out["committed"].to_pylist() == [True, False, True]
    reasons = out["reason"].to_pylist()
    assert reasons[0] is reasons[2] is None
    assert reasons[1].startswith(FAILING[function])
    case.check({1: 101})
    again = case.operator(case.reopened())
    assert again(table, 0).equals(out)


def raises_interrupt(t, k, v):
    t[k].x += v
    if v == 13:
        raise KeyboardInterrupt
    return v


def wants_too_much(t, k, v):
    t[k].x += v
    if v == 13:
        found = str(v) * (10**15)
        t[k].x = len(found)
    return v


def says_nothing(t, k, v):
    t[k].x += v
    if v == 13:
        raise SystemError("error return without exception set")
    return v


def nests_too_deep(t, k, v):
    t[k].x += v
    if v == 13:
        found = [1]
        for _ in range(100000):
            found = [found]
        found = str(found)
    return v


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (raises_interrupt, KeyboardInterrupt),
        (wants_too_much, MemoryError),
        (says_nothing, SystemError),
        (nests_too_deep, RecursionError),
    ],
    ids=["interrupt", "memory", "system", "recursion"],
)
def test_an_error_of_the_machine_is_no_outcome(function: Any, error: type[BaseException]) -> None:
    """It may not come again from the log: the epoch is refused, and nothing of it stays."""
    case = Case(kinds={"add": function})
    for _ in range(2):
        with pytest.raises(error):
            case.op(events([2, 1, 3], values=[1, 13, 100]), 0)
        case.check({})
    case.op(events([2, 1, 3], values=[1, 12, 100]), 0)
    case.check({1: 113})


def hashing() -> Any:
    def function(t, k, v):
        t[k].x += hash(str(v))

    return function


def chance() -> Any:
    def function(t, k, v):
        t[k].x += int(np.random.randint(0, 1000))  # noqa: NPY002 - what is refused

    return function


def outside(v: int) -> int:
    return id(v)


def helped() -> Any:
    def function(t, k, v):
        t[k].x += outside(v)

    return function


def opening() -> Any:
    def function(t, k, v):
        open("a file")  # noqa: SIM115 - what is refused
        t[k].x += v

    return function


def leaving() -> Any:
    def function(t, k, v):
        if v == 13:
            exit()  # noqa: PLR1722 - what is refused
        t[k].x += v

    return function


def no_text() -> Any:
    def function(t, k, v):
        t[k].x += v
        return "\ud800"

    return function


@pytest.mark.parametrize("made", [hashing, chance, helped, opening, leaving, no_text])
def test_what_would_not_give_the_same_again_is_refused(made: Callable[[], Any]) -> None:
    with pytest.raises(BadTransaction):
        mp.transaction(made())


def test_a_field_may_have_any_name() -> None:
    @mp.transaction
    def function(t, k, id, hash):  # noqa: A002 - fields may be called anything
        t[k].x += id + hash

    case = Case(kinds={"add": function})
    case.op(events([1], id=[2], hash=[3]), 0)
    case.check({1: 5})


# Tables


def test_missing_keys_read_the_default_or_abort() -> None:
    files = LossyFiles()
    pond = LocalPond(files)
    pond.table("t", key="long", value="x long", default={"x": 7})
    pond.table("u", key="string", value="x long, s string")

    @mp.transaction(results="t_x, u_x")
    def both(t, u, k, name, v):
        t[k].x += v
        if v > 1:
            u[name].s = name
        return t[k].x, u[name].x

    op = pond.transactions("op", ["t", "u"], {"both": both})
    out = op(pa.table({"ts": [1, 2, 3], "k": [1, 1, 2], "name": ["a", "b", "b"], "v": [1, 2, 1]}), 0)
    assert out["reason"].to_pylist() == ["no such key 'a' in u", None, None]
    assert out["t_x"].to_pylist() == [None, 9, 8]
    assert out["u_x"].to_pylist() == [None, 0, 0]
    for found in (pond, LocalPond(files.crash("all"), containers=3)):
        assert found.table("t").snapshot().to_pylist() == [{"key": 1, "x": 9}, {"key": 2, "x": 8}]
        assert found.table("u").snapshot().to_pylist() == [{"key": "b", "x": 0, "s": "b"}]
        assert found.table("u").read(["a", "b", "c"]).num_rows == 1
        # A read makes no row.
        assert found.table("t").read([9]).num_rows == 0


def test_a_table_that_exists_is_opened_as_it_is_or_refused() -> None:
    files = LossyFiles()
    pond = LocalPond(files)
    pond.table("t", key="k long", value="x long, s string", default={"x": 1, "s": ""}, group="one")
    pond.state("s", key="long", value="long")
    for current in (pond, LocalPond(files.crash("all"), containers=2)):
        same = current.table(
            "t", key="k long", value="x long, s string", default={"x": 1, "s": ""}, group="one"
        )
        assert same.schema == current.table("t").schema
        assert list(current.tables()) == ["t"]
        for key, value, default, group in (
            ("k string", "x long, s string", {"x": 1, "s": ""}, "one"),
            ("key long", "x long, s string", {"x": 1, "s": ""}, "one"),
            ("k long", "x double, s string", {"x": 1, "s": ""}, "one"),
            ("k long", "s string, x long", {"x": 1, "s": ""}, "one"),
            ("k long", "x long, s string", {"x": 2, "s": ""}, "one"),
            ("k long", "x long, s string", None, "one"),
            ("k long", "x long, s string", {"x": 1, "s": ""}, "two"),
        ):
            with pytest.raises(SchemaMismatch):
                current.table("t", key=key, value=value, default=default, group=group)
        with pytest.raises(SchemaMismatch):
            current.table("v", key="long", value="x long", group="s")
        with pytest.raises(SchemaMismatch):
            current.state("one", key="long", value="long")
        with pytest.raises(UnknownTable):
            current.table("never")
        with pytest.raises(UnknownTable):
            current.transactions("op", ["never"], {"add": add})
        assert current.table("t").snapshot().num_rows == 0


@pytest.mark.parametrize(
    ("value", "default"),
    [
        ("x long", {"x": 1.5}), ("x long", {"x": "a"}), ("x long", {"x": None}), ("x long", {"x": 2**63}),
        ("x long", {"x": True}), ("x boolean", {"x": 2}), ("x string", {"x": 1}), ("x double", {"x": float("nan")}),
        ("x timestamp", {"x": "2020-01-01"}),
    ],
)  # fmt: skip
def test_a_default_that_does_not_fit_is_refused(value: str, default: dict[str, Any]) -> None:
    pond = LocalPond(LossyFiles())
    with pytest.raises((BadType, BadOption)):
        pond.table("t", key="long", value=value, default=default)
    assert pond.tables() == {}


def test_tables_of_two_groups_take_no_part_in_one_transaction() -> None:
    pond = LocalPond(LossyFiles(), containers=2)
    pond.table("t", key="long", value="x long", default={"x": 0}, group="one")
    pond.table("u", key="long", value="x long", default={"x": 0}, group="two")

    @mp.transaction
    def both(t, u, k, v):
        t[k].x += v
        u[k].x -= v

    with pytest.raises(BadOption):
        pond.transactions("op", ["t", "u"], {"both": both})
    with pytest.raises(BadTransaction):
        pond.transactions("op", ["t"], {"both": both})
    # The same name in two groups: two operators.
    for table, kind in (("t", add), ("u", add)):
        named = _renamed(table) if table == "u" else kind
        assert pond.transactions("op", [table], {"add": named})(events([5]), 0)["r0"].to_pylist() == [1]


def _renamed(_table: str) -> Any:
    @mp.transaction
    def add(u, k, v):
        u[k].x += v
        return u[k].x

    return add


def test_reads_refuse_what_is_no_key(case: Case) -> None:
    case.op(events([1, 2], keys=[1, 2]), 0)
    table = case.pond.table("t")
    assert table.read([2, 5, 1, 2])["key"].to_pylist() == [2, 1, 2]
    assert table.read(pa.chunked_array([[1], [2]])).num_rows == 2
    assert table.read([]).num_rows == 0
    assert table.read([(2,), (5,)])["key"].to_pylist() == [2]
    with pytest.raises(NullKey):
        table.read([1, None])
    for keys in (["a"], [2**63], [1.5], ["1", 1], [(1, 2)], [(1,), 2]):
        with pytest.raises(WrongType):
            table.read(keys)


# Restarts


def first_code() -> Any:
    @mp.transaction
    def change(t, k, v):
        t[k].x = t[k].x * 2 + v
        return t[k].x

    return change


def second_code() -> Any:
    @mp.transaction
    def change(t, k, v):
        t[k].x -= v
        return t[k].x, k

    return change


def test_recovery_runs_each_epoch_with_the_code_it_was_run_with() -> None:
    case = Case(kinds={"add": first_code()})
    given = {0: events([1, 2]), 1: events([3]), 2: events([4, 5], values=[10, 20])}
    first = [case.op(given[epoch], epoch) for epoch in (0, 1)]
    changed = case.operator(case.pond, {"add": second_code()})
    last = changed(given[2], 2)
    assert last["r0"].to_pylist() == [-3, -23]
    case.check({1: -23})
    again = case.reopened(2)
    # What an epoch gave it gives again, whichever code asks; the code that is there runs the next one.
    newest = case.operator(again, {"add": first_code()})
    assert [newest(given[epoch], epoch) for epoch in (0, 1)] == first
    assert newest(given[2], 2).equals(last)
    assert newest(events([6]), 3)["r0"].to_pylist() == [-45]


def test_strings_are_the_same_across_checkpoints_and_restarts() -> None:
    names = ["", "a", "ü", "\x00", "long " * 50, *(f"name {number}" for number in range(500))]
    files = LossyFiles()
    pond = LocalPond(files)
    pond.table(
        "t", key="string", value="s string, twin string, x long", default={"s": "-", "twin": "", "x": 0}
    )

    @mp.transaction(results="before, after")
    def swap(t, k, other):
        before = t[k].s
        t[k].s = other
        t[other].twin = k
        t[k].x += 1
        if t[other].s == k:
            mp.abort("pair")
        return before, t[k].s

    expected: dict[str, dict[str, Any]] = {}

    def model(pairs: list[tuple[str, str]]) -> list[tuple[str | None, str | None]]:
        out = []
        for k, other in pairs:
            rows = {name: dict(row) for name, row in expected.items()}

            def row(name: str, rows: dict[str, dict[str, Any]] = rows) -> dict[str, Any]:
                return rows.setdefault(name, {"s": "-", "twin": "", "x": 0})

            before = row(k)["s"]
            row(k)["s"] = other
            row(other)["twin"] = k
            row(k)["x"] += 1
            if row(other)["s"] == k:
                out.append((None, None))
                continue
            expected.clear()
            expected.update(rows)
            out.append((before, other))
        return out

    chance = np.random.default_rng(3)
    for epoch in range(6):
        op = pond.transactions("op", ["t"], {"swap": swap})
        pairs = [(names[a], names[b]) for a, b in chance.integers(0, 8 if epoch % 2 else 505, (80, 2))]
        table = pa.table(
            {
                "ts": np.arange(80) + 100 * epoch,
                "k": [k for k, _ in pairs],
                "other": pa.array([other for _, other in pairs]).dictionary_encode()
                if epoch == 4
                else [other for _, other in pairs],
            }
        )
        table = table.cast(table.schema.set(2, pa.field("other", pa.string())))
        out = op(table, epoch)
        wanted = model(pairs)
        assert list(zip(out["before"].to_pylist(), out["after"].to_pylist(), strict=True)) == wanted
        if epoch in (1, 4):
            pond.checkpoint()
        if epoch % 2:
            pond = LocalPond(files := files.crash("all"), containers=epoch % 4 + 1)
        found = {row.pop("key"): row for row in pond.table("t").snapshot().to_pylist()}
        assert found == expected


def test_all_types_of_columns_and_lists_as_fields() -> None:
    files = LossyFiles()
    pond = LocalPond(files)
    pond.table("t", key="k timestamp", value="n long, d double, b boolean, s string, w timestamp")

    @mp.transaction(results="d double, w timestamp")
    def write(t, k, numbers, weights, flags, words, whens):
        for number in numbers:
            t[k].n += number if t[k].b or True else 0
        for place in range(len(weights)):
            t[k].d += weights[place] * 0.5
        t[k].b = flags[0]
        t[k].s = words[1]
        t[k].w = whens[len(whens) - 1]
        return t[k].d, t[k].w

    @mp.transaction
    def make(t, k):
        t[k].n = 0

    moment = dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC)
    table = pa.table(
        {
            "ts": pa.array([moment, moment], pa.timestamp("us", "UTC")),
            "seq": [1, 0],
            "type": ["write", "make"],
            "k": pa.array([moment, moment], pa.timestamp("us", "UTC")),
            "numbers": [[1, 2, 3], None],
            "weights": [[0.5, 2.0], []],
            "flags": [[True], None],
            "words": [["a", "ü"], None],
            "whens": pa.array([[moment], None], pa.list_(pa.timestamp("us", "UTC"))),
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuleInterpreted)
        op = pond.transactions("op", ["t"], {"write": write, "make": make}, seq="seq")
        out = op(table, 0)
    assert out["reason"].to_pylist() == [None, None]
    assert out["d"].to_pylist() == [1.25, None]
    assert out["w"].to_pylist()[0].replace(tzinfo=dt.UTC) == moment
    pond.checkpoint()
    for found in (pond, LocalPond(files.crash("all"))):
        (row,) = found.table("t").snapshot().to_pylist()
        assert row == {"k": moment, "n": 6, "d": 1.25, "b": True, "s": "ü", "w": moment}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuleInterpreted)
        yield
