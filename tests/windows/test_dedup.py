"""Deduplication answers as the oracle does, epoch by epoch, also from what the disk kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest
from reopening import Build, Disturbed
from window_driving import Operator, Shape, check, draw

from millpond.errors import (
    BadOption,
    EpochChanged,
    LateRows,
    MillpondError,
    SchemaMismatch,
    UnknownResident,
    WrongColumn,
    WrongType,
)
from millpond.pond.pond import Pond
from millpond.testing import DedupOracle, LossyFiles
from millpond.testing.local import LocalPond


def over(sources: Mapping[str, Any], within: Any, key_type: str = "long") -> Build:
    def build(pond: Pond) -> Mapping[str, Operator]:
        dedup = pond.dedup("d", key=f"key {key_type}", within=within)
        return {name: dedup.over(at="ts", delay=delay, name=name) for name, delay in sources.items()}

    return build


def run(within: int | None, seed: int, *, every: int = 0, key_type: str = "long", **shape: Any) -> None:
    driven = Disturbed(over({"feed": 10}, within, key_type), every=every)
    oracle = DedupOracle(within, sources={"feed": 10})
    check(driven.sources, oracle, draw(seed, Shape(key_type=key_type, **shape)))  # type: ignore[arg-type]
    dedup = driven.pond.dedup("d")
    assert dedup.dropped() == oracle.dropped
    assert dedup.progress().late == {"feed": oracle.late}
    assert driven.pond.metrics()["dedups"]["d"]["dropped"] == oracle.dropped
    assert dedup.remembered() <= sum(map(len, oracle.times.values()))
    driven.pond.close()


@pytest.mark.parametrize("within", [1, 15, 40, 300, None])
def test_dedup_answers_as_the_oracle(within: int | None) -> None:
    for seed in range(2):
        run(within, seed)
    run(within, 11, every=2, epochs=14)


@pytest.mark.parametrize("keys", ["hot", pytest.param("many", marks=pytest.mark.long)])
@pytest.mark.parametrize("key_type", ["long", "string"])
def test_keys(keys: str, key_type: str) -> None:
    run(30, 21, every=3, keys=keys, key_type=key_type, rows=300, disorder=60)


@pytest.mark.parametrize("start", [-(2**63) + 1, -300, 2**63 - 2000])
def test_the_ends_of_time(start: int) -> None:
    for within in (1, 30, 2**63 - 1, None):
        run(within, 31, start=start, silence=0.0, straggling=0.0, disorder=0, epochs=5)


def test_several_sources_and_timestamps() -> None:
    delays = {"left": 10, "right": 25}
    named = {name: f"{delay} microseconds" for name, delay in delays.items()}
    driven = Disturbed(over(named, "30 microseconds"), every=4)
    epochs = draw(41, Shape(sources=("left", "right"), times="timestamp"))
    check(driven.sources, DedupOracle(30, sources=delays), epochs)


def rows(*pairs: tuple[int, int], **more: Any) -> pa.Table:
    keys, times = zip(*pairs, strict=True) if pairs else ((), ())
    return pa.table({"key": pa.array(keys, pa.int64()), "ts": pa.array(times, pa.int64()), **more})


def test_rows_pass_with_all_their_columns_and_types() -> None:
    with LocalPond(LossyFiles()) as pond:
        operator = pond.dedup("d", key="a string, b long", within=100).over(at="t", delay=10)
        table = pa.table(
            {
                "n": pa.array([1, 2, None], pa.int32()),
                "b": pa.array([7, 7, 8], pa.int16()),
                "t": pa.array([5, 4, 6], pa.int64()),
                "a": ["x", "x", "x"],
                "list": [[1.5], [], None],
            }
        )
        assert operator(table, 0).equals(table.take([1, 2]))
        assert len(operator(table, 1)) == 0
        assert operator(table, 0).equals(table.take([1, 2]))
        extra = pond.dedup("d").over(at="t", name="other")
        with pytest.raises(WrongColumn):
            extra(table.drop_columns(["n"]), 0)
        assert pond.dedup("d").dropped() == 1 + 3


def test_only_columns_that_are_named_pass() -> None:
    with LocalPond(LossyFiles()) as pond:
        table = rows((1, 1), (1, 2), v=[10, 20], w=[1.0, 2.0])
        assert pond.dedup("d", "key long", 5).over(value="v")(table, 0).to_pydict() == {"v": [10]}
        typed = pond.dedup("e", "key long", 5, value="w float, key long").over()
        assert typed(table, 0).to_pydict() == {"w": [1.0], "key": [1]}


def test_keys_are_let_go_of() -> None:
    with LocalPond(LossyFiles()) as pond:
        dedup = pond.dedup("d", key="key long", within=10)
        operator = dedup.over()
        for epoch in range(40):
            assert len(operator(rows(*((100 * epoch + n, 20 * epoch) for n in range(100))), epoch)) == 100
        assert dedup.remembered() == 100
        assert operator(rows((3900, 20 * 39 + 9), (3900, 20 * 39 + 10)), 40)["ts"].to_pylist() == [790]
        assert dedup.dropped() == 1
        pond.validate()


def test_late_rows_are_no_duplicates() -> None:
    with LocalPond(LossyFiles()) as pond:
        dedup = pond.dedup("d", key="key long", within=10)
        operator = dedup.over()
        operator(rows((1, 100)), 0)
        assert len(operator(rows((1, 99), (2, 99)), 1)) == 0
        assert (dedup.dropped(), dedup.progress().late) == (0, {"source": 2})
        with pytest.raises(LateRows) as error:
            dedup.over(late="error")(rows((2, 99)), 2)
        assert error.value.hint
        taken = []
        dedup.over(late=lambda late, epoch: taken.append(late["key"].to_pylist()))(rows((5, 1), (6, 101)), 2)
        assert taken == [[5]]
        with pytest.raises(EpochChanged):
            operator(rows((7, 200)), 2)


def test_a_finished_source_has_nothing_left() -> None:
    with LocalPond(LossyFiles()) as pond:
        operator = pond.dedup("d", key="key long", within=10).over()
        given: list[tuple[int, int]] = []
        sink = operator.to(lambda passed, epoch: given.append((len(passed), epoch)))
        sink(rows((1, 1), (1, 2)), 0)
        operator.finish()
        assert given[0] == (1, 0)
        assert given[1][0] == 0
        sink(rows((1, 3)), 1)
        assert given[2] == (0, 1)


def test_a_dedup_is_forgotten() -> None:
    with LocalPond(LossyFiles()) as pond:
        operator = pond.dedup("d", key="key long", within=10).over()
        operator(rows((1, 1)), 0)
        pond.forget("d")
        assert pond.dedups() == {}
        with pytest.raises(UnknownResident) as error:
            pond.dedup("d")
        assert error.value.hint
        assert len(pond.dedup("d", key="key long", within=10).over()(rows((1, 1)), 0)) == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"within": 5}, BadOption),
        ({"key": "key long", "within": 0}, BadOption),
        ({"key": "key long", "within": -1}, MillpondError),
        ({"key": "key long", "within": "soon"}, MillpondError),
        ({"key": "key array<long>", "within": 5}, MillpondError),
    ],
)
def test_what_is_no_dedup(options: dict[str, Any], error: type[MillpondError]) -> None:
    with LocalPond(LossyFiles()) as pond:
        with pytest.raises(error) as raised:
            pond.dedup("d", **options)
        assert raised.value.hint
        assert pond.dedups() == {}


def test_bad_rows_change_nothing() -> None:
    with LocalPond(LossyFiles()) as pond:
        dedup = pond.dedup("d", key="key long", within="10 seconds")
        with pytest.raises(SchemaMismatch):
            pond.dedup("d", key="key long", within="11 seconds")
        operator = dedup.over()
        with pytest.raises(WrongType):
            operator(rows((1, 1)), 0)
        twice = rows((1, 1)).append_column("v", [[1]]).append_column("v", [[2]])
        with pytest.raises(WrongColumn):
            pond.dedup("e", key="key long", within=10).over()(twice, 0)
        with pytest.raises(MillpondError):
            operator(pa.table({"key": [None], "ts": pa.array([1], pa.timestamp("us"))}), 0)
        assert (dedup.progress().seen, dedup.remembered()) == (0, 0)
