"""Transactions where something is odd: types, names, orders of failure. Nothing decided may ever fail to run."""

from __future__ import annotations

import math
import threading
from typing import Any

import pyarrow as pa
import pytest

import millpond as mp
from millpond.container.holdings import group
from millpond.errors import (
    BadOption,
    BadTransaction,
    MillpondError,
    OtherQuery,
    ResidentBroken,
    WrongType,
)
from millpond.ops.committing import turn_of
from millpond.ops.transactions import Transactions
from millpond.stores import outputs
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.txn import TransactionSet
from millpond.wire.figures import AskFigures

pytestmark = pytest.mark.filterwarnings("ignore::millpond.errors.RuleInterpreted")


@mp.transaction
def add(t, k, v):  # type: ignore[no-untyped-def]
    t[k].x += v


@mp.transaction
def add_one(a, k):  # type: ignore[no-untyped-def]
    a[k].n += 1


@mp.transaction
def multiply(t, k, v):  # type: ignore[no-untyped-def]
    t[k].x *= v


@mp.transaction
def add_slowly(t, k, v, w):  # type: ignore[no-untyped-def]
    t[k].x += v + 0 * len(str(w))


@mp.transaction
def raise_key(t, k, v):  # type: ignore[no-untyped-def]
    t[k].key += v


def one_event(value: Any = 1, at: int = 1, key: Any = 1, **more: Any) -> pa.Table:
    return pa.table({"ts": [at], "k": [key], "v": [value], **more})


def restart(pond: LocalPond) -> None:
    pond.hosting.kill(0)
    pond.coordinator.recover(0)


def run_in_query(op: Transactions, query: str, epoch: int, events: pa.Table) -> pa.Table:
    """As a streaming query with that id would."""
    op._commit(events, epoch, events.schema, query)
    return op._outputs(query, turn_of(epoch)).read(op._client)


def test_an_epoch_that_was_prepared_before_another_runs_again_after_it() -> None:
    pond = LocalPond(LossyFiles())
    t = pond.table("t", key="k long", value="x long", default={"x": 1})
    adding = pond.transactions("adding", [t], {"add": add})
    multiplying = pond.transactions("multiplying", [t], {"multiply": multiply})
    journal = pond.coordinator._memory.journal
    write = journal.write

    def full(record: Any) -> None:
        raise OSError("no space left")

    journal.write = full  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no space"):
        adding(one_event(10), 0)
    journal.write = write  # type: ignore[method-assign]
    multiplying(one_event(5), 0)
    adding(one_event(10), 0)
    assert t.snapshot()["x"].to_pylist() == [15]
    for _ in range(2):
        restart(pond)
        assert t.snapshot()["x"].to_pylist() == [15]
    pond.validate()


@pytest.mark.parametrize("default", [math.inf, -math.inf, -0.0, 5e-324, 1e300])
def test_any_double_may_be_a_default(default: float) -> None:
    files = LossyFiles()
    pond = LocalPond(files)
    t = pond.table("t", key="k long", value="x double", default={"x": default})
    pond.transactions("op", [t], {"multiply": multiply})(one_event(1.0), 0)
    pond.close()
    again = LocalPond(files)
    assert again.table("t").snapshot()["x"].to_pylist() == [default]
    assert again.table("t", key="k long", value="x double", default={"x": default}).default == {"x": default}


@pytest.mark.parametrize(
    ("key", "bits"), [("k byte", 8), ("k short", 16), ("k int", 32), ("k date", 32), ("k long", 64)]
)
@pytest.mark.parametrize("function", [add, add_slowly])
def test_a_key_that_its_type_does_not_hold_aborts(key: str, bits: int, function: Any) -> None:
    pond = LocalPond(LossyFiles())
    t = pond.table("t", key=key, value="x long", default={"x": 0})
    op = pond.transactions("op", [t], {"add": function})
    highest = (1 << bits - 1) - 1
    tried = [highest, -highest - 1, min(highest + 1, 2**63 - 1), max(-highest - 2, -(2**63)), 5]
    uuids = pa.array([b"0123456789abcdef"] * 5, pa.binary(16))
    done = op(pa.table({"ts": range(5), "k": pa.array(tried, pa.int64()), "v": [1] * 5, "w": uuids}), 0)
    fits = [abs(number + 0.5) < 2 ** (bits - 1) or bits == 64 for number in tried]
    assert done["committed"].to_pylist() == fits
    held = {number for number, fit in zip(tried, fits, strict=True) if fit}

    def stored() -> set[int]:
        keys = t.snapshot()["k"].combine_chunks()
        return set(keys.view(pa.int32() if bits == 32 else keys.type).to_pylist())

    assert stored() == held
    pond.checkpoint()
    restart(pond)
    assert stored() == held


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1_000_000_001], pa.timestamp("ns")),
        pa.array([2**62], pa.timestamp("s")),
        pa.array([[1_000_000_001]], pa.list_(pa.timestamp("ns"))),
        pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]),
        pa.StructArray.from_arrays([pa.array([2**30], pa.date32())], names=["a"]),
        pa.StructArray.from_arrays([pa.array([1], pa.timestamp("us", "No/Where"))], names=["a"]),
    ],
    ids=lambda column: str(column.type),
)
def test_values_that_python_does_not_have_are_refused_before_the_decision(column: pa.Array) -> None:
    pond = LocalPond(LossyFiles())
    t = pond.table("t", key="k long", value="x long", default={"x": 0})
    op = pond.transactions("op", [t], {"add": add_slowly})
    with pytest.raises(WrongType, match="'w'"):
        op(one_event(w=column), 0)
    op(one_event(w=["fine"]), 0)
    assert t.snapshot()["x"].to_pylist() == [1]
    restart(pond)
    assert t.snapshot()["x"].to_pylist() == [1]


def test_times_are_microseconds_in_functions_whatever_their_unit() -> None:
    @mp.transaction
    def note(t, k, at, all_of_them):  # type: ignore[no-untyped-def]
        t[k].x = at + all_of_them[0]

    for unit, factor in {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}.items():
        pond = LocalPond(LossyFiles())
        t = pond.table("t", key="k long", value="x long", default={"x": 0})
        type_ = pa.timestamp(unit)
        events = pa.table(
            {
                "ts": [1],
                "k": [1],
                "at": pa.array([3 * factor], type_),
                "all_of_them": pa.array([[4 * factor]], pa.list_(type_)),
            }
        )
        pond.transactions("op", [t], {"note": note})(events, 0)
        assert t.snapshot()["x"].to_pylist() == [7_000_000], unit


@pytest.mark.parametrize("key", ["id long", "id string"])
def test_a_column_may_be_called_key(key: str) -> None:
    pond = LocalPond(LossyFiles())
    t = pond.table("t", key=key, value="a long, key long, b long", default={"a": 1, "key": 2, "b": 3})
    name: Any = 7 if key == "id long" else "seven"
    pond.transactions("op", [t], {"raise_key": raise_key})(one_event(5, key=name), 0)
    rows = [{"id": name, "a": 1, "key": 7, "b": 3}]
    assert t.snapshot().to_pylist() == t.read([name]).to_pylist() == rows
    pond.checkpoint()
    restart(pond)
    assert t.snapshot().to_pylist() == t.read([name]).to_pylist() == rows


@pytest.mark.parametrize("name", ["event", "committed", "reason"])
def test_results_do_not_take_the_names_of_the_outputs(name: str) -> None:
    with pytest.raises(BadTransaction, match=repr(name)):

        @mp.transaction(results=f"{name} long")
        def give(t, k):  # type: ignore[no-untyped-def]
            return t[k].x


def test_options_that_are_no_mappings_are_named() -> None:
    pond = LocalPond(LossyFiles())
    t = pond.table("t", key="k long", value="x long", default={"x": 0})
    for kinds in (add, [add], None, "add"):
        with pytest.raises(BadOption, match="kinds"):
            pond.transactions("op", [t], kinds)  # type: ignore[arg-type]
    with pytest.raises(BadOption, match="default"):
        pond.table("u", key="k long", value="x long", default=0)  # type: ignore[arg-type]


def test_two_queries_of_one_operator_do_not_lose_each_others_outputs() -> None:
    files = LossyFiles()
    pond = LocalPond(files)
    t = pond.table("t", key="k long", value="x long", default={"x": 0})
    op = pond.transactions("op", [t], {"add": add}, history="shared")
    first = run_in_query(op, "query-a", 0, one_event(1, at=1))
    second = run_in_query(op, "query-b", 0, one_event(2, at=2))
    for _ in range(2):
        assert run_in_query(op, "query-a", 0, one_event(1, at=1)).equals(first)
        assert run_in_query(op, "query-b", 0, one_event(2, at=2)).equals(second)
        pond.checkpoint()
        pond.close()
        pond = LocalPond(files)
        op = pond.transactions("op", [pond.table("t")], {"add": add}, history="shared")
    with pytest.raises(OtherQuery):
        run_in_query(pond.transactions("op", ["t"], {"add": add}), "query-c", 0, one_event(1, at=3))
    assert pond.table("t").snapshot()["x"].to_pylist() == [3]


def test_large_answers_come_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "BATCH_BYTES", 1000)
    pond = LocalPond(LossyFiles())
    t = pond.table("t", key="k long", value="x long", default={"x": 0})
    op = pond.transactions("op", [t], {"add": add})
    many = 1000
    done = op(pa.table({"ts": range(many), "k": range(many), "v": [2] * many}), 0)
    assert done["k"].to_pylist() == list(range(many))
    assert done["k"].num_chunks > 1
    rows = t.snapshot()
    assert rows["k"].to_pylist() == list(range(many))
    assert rows["k"].num_chunks > 1


def test_a_container_answers_while_an_epoch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "REPORT_WAIT_S", 0.01)
    pond = LocalPond(LossyFiles())
    t = pond.table("t", key="k long", value="x long", default={"x": 0})
    pond.transactions("op", [t], {"add": add})(one_event(), 0)
    service = pond.hosting.services[0]
    before = service.call(AskFigures()).residents
    (held,) = service.core.holding("tables").slices.values()
    with held.lock:
        asked = threading.Thread(
            target=lambda: answers.append(service.call(AskFigures()).residents), daemon=True
        )
        answers: list[Any] = []
        asked.start()
        asked.join(10)
    assert answers == [before]


def test_an_empty_epoch_of_many_types_runs() -> None:
    pond = LocalPond(LossyFiles())
    t = pond.table("t", key="k long", value="x long", default={"x": 0})
    op = pond.transactions("op", [t], {"add": add_slowly})
    types = (pa.string(), pa.decimal128(5), pa.null(), pa.list_(pa.int64()), pa.float16())
    for epoch, type_ in enumerate(types):
        events = one_event(w=pa.array([0.0], pa.float64())).slice(0, 0)
        done = op(events.set_column(3, "w", pa.array([], type_)), epoch)
        assert len(done) == 0
        assert done.schema.field("w").type == type_
    assert len(t.snapshot()) == 0


def none_left(self: TransactionSet, *args: Any, **kwargs: Any) -> Any:
    raise MemoryError("none left")


def test_an_epoch_that_cannot_run_is_refused_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs before it is decided: whatever fails, fails then, and the next one finds the tables as they were."""
    pond = LocalPond(LossyFiles())
    table = pond.table("a", key="long", value="n long", default={"n": 0})
    op = pond.transactions("o", [table], {"add": add_one})
    op(pa.table({"ts": [1], "k": [1]}), 0)
    with monkeypatch.context() as broken:
        broken.setattr(TransactionSet, "execute", none_left)
        for _ in range(2):
            with pytest.raises((MillpondError, MemoryError)):
                op(pa.table({"ts": [2], "k": [1]}), 1)
            assert table.snapshot().to_pylist() == [{"key": 1, "n": 1}]
    for _ in range(2):
        assert op(pa.table({"ts": [2], "k": [1]}), 1)["committed"].to_pylist() == [True]
        assert table.snapshot().to_pylist() == [{"key": 1, "n": 2}]
        restart(pond)
    pond.validate()


@pytest.mark.parametrize("containers", [1, 2])
def test_a_resident_that_cannot_be_rebuilt_leaves_the_rest_of_its_container_alone(
    monkeypatch: pytest.MonkeyPatch, containers: int
) -> None:
    """Whatever fails after the decision fails again from the log: States in the same container must come back."""
    files = LossyFiles()
    pond = LocalPond(files, containers=containers)
    table = pond.table("a", key="long", value="n long", default={"n": 0})
    other = pond.table("b", key="long", value="n long", default={"n": 0}, group="others")
    state = pond.state("s", key="long", value="long")
    feed = state.update(key="k", at="t", value="v", name="feed")
    op = pond.transactions("o", [table], {"add": add_one})
    op(pa.table({"ts": [1], "k": [1]}), 0)
    feed(pa.table({"k": [1, 2, 3, 4], "t": [1] * 4, "v": [7] * 4}), 0)
    with monkeypatch.context() as broken:
        broken.setattr(TransactionSet, "execute", none_left)
        for container in list(pond.hosting.services):
            pond.hosting.kill(container)
            pond.coordinator.recover(container)
        for ask in (table.snapshot, lambda: op(pa.table({"ts": [3], "k": [1]}), 1)):
            with pytest.raises(ResidentBroken, match="MemoryError") as caught:
                ask()
            assert caught.value.resident == "tables"
            assert caught.value.hint
        assert len(other.snapshot()) == 0
    # Also when the cause is gone, until it is rebuilt; all else is served, and checkpointed.
    with pytest.raises(ResidentBroken):
        table.snapshot()
    feed(pa.table({"k": [1, 2, 3, 4], "t": [2] * 4, "v": [8] * 4}), 1)
    state.finish("feed")
    pond.checkpoint()
    pond.checkpoint()
    wanted = [{"key": k, "time": 2, "value": 8} for k in (1, 2, 3, 4)]
    assert state.snapshot().sort_by("key").to_pylist() == wanted
    assert "MemoryError" in pond.metrics()["groups"]["tables"]["broken"]
    home = table._group.home
    for service in pond.hosting.services.values():
        for number, ground in service.checkpoints.grounds.items():
            if number in service.core.owned and number != home:
                assert service.log.directory == ground.logs[0].directory
                assert len(ground.logs) == 1
    pond.close()
    pond = LocalPond(files, containers=2)
    assert pond.table("a").snapshot().to_pylist() == [{"key": 1, "n": 1}]
    assert pond.state("s").snapshot().sort_by("key").to_pylist() == wanted
    op = pond.transactions("o", ["a"], {"add": add_one})
    assert op(pa.table({"ts": [1], "k": [1]}), 0)["committed"].to_pylist() == [True]
    assert op(pa.table({"ts": [2], "k": [1]}), 1)["committed"].to_pylist() == [True]
    assert op(pa.table({"ts": [3], "k": [1]}), 2)["committed"].to_pylist() == [True]
    assert pond.table("a").snapshot().to_pylist() == [{"key": 1, "n": 3}]
    pond.close()
