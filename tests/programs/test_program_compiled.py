"""Compiled bodies give what interpreted ones give, or leave it to them: results, errors, and what readers see."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from both_ways import define, graph
from kernels_at_once import kernels_at_once
from test_program_plain import entries

import millpond as mp
from millpond.container.guard import Guard
from millpond.container.holdings.base import Means
from millpond.errors import CodeTookTooLong, ProgramFailed, RuleInterpreted
from millpond.kernels._jit import JIT_ENABLED
from millpond.programs.local import LocalRun
from millpond.programs.machine import tasks
from millpond.programs.machine.plan import plan_of, why_interpreted
from millpond.testing import LossyFiles, local
from millpond.testing.local import LocalPond

needs_compiler = pytest.mark.skipif(not JIT_ENABLED, reason="nothing is compiled")

SLICES = 4
CLASS = """
import math

def weighed(x, n):
    total = 0.0
    for i in range(n):
        total += x / (i + 1)
    return math.sqrt(total) if total > 0 else -total

@mp.program(lanes=2, max_rounds=50)
class P:
    counts: mp.Partitioned[mp.Map[int, int]]
    table: mp.Partitioned[mp.Matrix]
    sums: mp.Partial[mp.Vector]

    def count(self, k: int, xs: list[int], by: int) -> int:
        before = self.counts[k]
        whole = before
        for i, x in enumerate(xs):
            if x < 0 and i > 0:
                continue
            whole += x * by
        while whole > 1_000:
            whole -= whole // 3
            if by == -7:
                whole = 5_000
        self.counts[k] = whole % 97 if by else whole // by
        return whole + len([x for x in xs if x > 1])

    def rate(self, k: int, i: int, x: float) -> float:
        row = self.table[k]
        fresh = i not in row
        if x < -100.0:
            mp.reject("too low")
        row[i] = x
        row[i + 1] += 1
        if fresh:
            for other in row.keys():
                self.sums[other] += weighed(x, 3)
        return row.total() + row.get(i, 0.0)

    def best(self, k: int, n: int) -> "array<long>":
        row = self.table[k]
        parts = mp.everywhere(self.sums).copy()
        return mp.total(parts).without(row).top(n)
"""
COUNTS = pa.schema({"k": pa.int64(), "xs": pa.list_(pa.int64()), "by": pa.int64()})
RATES = pa.schema({"k": pa.int64(), "i": pa.int64(), "x": pa.float64()})


@pytest.fixture
def at_once() -> Iterator[list[int]]:
    """How many calls each run of a kernel had."""
    with kernels_at_once() as ran:
        yield ran


def calls_of(seed: int, count: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rng = np.random.default_rng(seed)
    counts = [
        {
            "k": int(rng.integers(5)),
            "xs": rng.integers(-3, 9, rng.integers(6)).tolist(),
            "by": int(rng.integers(1, 90)),
        }
        for _ in range(count)
    ]
    rates = [
        {
            "k": int(rng.integers(4)),
            "i": int(rng.integers(6)),
            "x": float(rng.choice([-200.0, -1.5, 0.25, 7.0])),
        }
        for _ in range(count)
    ]
    return counts, rates


@needs_compiler
def test_a_pond_and_one_process(at_once: list[int]) -> None:
    """Kernels run, and their results, rejections and state are those of the interpreter, which is run in this process."""
    cls = define(CLASS)
    found = graph(cls)
    assert [why_interpreted(found, method, task) for method in found.methods for task in method.tasks] == [
        None
    ] * 6
    alone = LocalRun(found, slices=SLICES)
    with LocalPond(LossyFiles(1), containers=2, slices=SLICES) as pond:
        program = pond.program("p", cls)
        count, rate = program.call("count", into="n", name="c"), program.call("rate", into="x2", name="r")
        best = program.call("best", into="top", name="b")
        for epoch in range(3):
            counts, rates = calls_of(epoch, 40)
            given = count(pa.Table.from_pylist(counts, COUNTS), epoch)["n"].to_pylist()
            assert given == [each.value for each in alone.epoch([("count", call) for call in counts])]
            given_back = rate(pa.Table.from_pylist(rates, RATES), epoch)
            wanted = alone.epoch([("rate", call) for call in rates])
            assert given_back["x2"].to_pylist() == [each.value for each in wanted]
            assert given_back["error"].to_pylist() == [each.error for each in wanted]
            asked = [{"k": k, "n": n} for k in range(5) for n in (0, 3)]
            told = best(pa.Table.from_pylist(asked), epoch)["top"].to_pylist()
            assert told == [each.value for each in alone.epoch([("best", call) for call in asked])]
        assert entries(program) == {
            name: held for name, held in alone.state().items() if name in program._spec.fields
        }
        # What compiled code does not hold comes out of the interpreter: longs that are too long on the way, None.
        large = [{"k": 1, "xs": [1 << 62, 1 << 62, 5, 5], "by": 3}, {"k": 2, "xs": [4], "by": 3}]
        runs = len(at_once)
        given = count(pa.Table.from_pylist(large, COUNTS), 3)["n"].to_pylist()
        assert given == [each.value for each in alone.epoch([("count", call) for call in large])]
        assert len(at_once) > runs
        pond.validate()
        # An error is told as ever, and nothing is changed.
        before = entries(program)
        wrong = [*calls_of(9, 30)[0], {"k": 3, "xs": [1], "by": 0}]
        with pytest.raises(
            ProgramFailed, match=r"line 27 of .*, row 30: ZeroDivisionError: integer"
        ) as failed:
            count(pa.Table.from_pylist(wrong, COUNTS), 4)
        assert (failed.value.method, failed.value.line, failed.value.row) == ("count", 27, 30)
        assert entries(program) == before
        pond.validate()
    assert sum(at_once) > 300


@needs_compiler
def test_an_endless_loop_is_ended_by_its_limit(at_once: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    doomed: list[str] = []
    monkeypatch.setattr(local, "Means", partial(Means, limits=Guard(60.0, doomed.append)))
    cls = define(CLASS)
    with LocalPond(LossyFiles(1), containers=1, slices=SLICES) as pond:
        program = pond.program("p", cls)
        quick = program.call("count", name="quick")
        quick(pa.Table.from_pylist([{"k": 1, "xs": [2], "by": 3}], COUNTS), 0)
        assert at_once == [1]
        before = entries(program)
        endless = program.call("count", name="endless", limit="200 milliseconds")
        rows = [{"k": 1, "xs": [2], "by": 3}, {"k": 1, "xs": [-9_000], "by": -7}]
        with pytest.raises(CodeTookTooLong, match=r"method 'count' .* at line \d+ of .*, row 1"):
            endless(pa.Table.from_pylist(rows, COUNTS), 0)
        assert entries(program) == before
        assert not doomed
        pond.validate()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("self.m[k] = str(n)", None),
        ("try:\n    self.a[k] = 1 // n\nexcept ZeroDivisionError:\n    pass", "line 3: try is not compiled"),
        ("x = n\nif k > 1:\n    x = 0.5\nself.a[k] = int(x)", "line 5: x is a long and a double"),
        ("if k > 1:\n    x = n\nself.a[k] = x", "line 5: x may have no value"),
        ("self.a[k] = n ** 2", "line 3: Pow on a long and a long is not compiled"),
        ("xs = [n]\nxs.append(k)\nself.a[k] = len(xs)", "line 4: append of a array<long> is not compiled"),
    ],
)
def test_what_stays_interpreted_is_told_with_its_line(body: str, why: str | None) -> None:
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    cls = define(
        "@mp.program\nclass P:\n    a: mp.Partitioned[mp.Map[int, int]]\n    m: mp.Partitioned[mp.Map[int, str]]\n"
        f"    def go(self, k: int, n: int):\n{lines}\n"
    )
    words = mp.explain(cls)
    expected = "m is a Map whose values are of type string" if why is None else why.partition(": ")[2]
    assert expected in words
    with (
        LocalPond(LossyFiles(1), containers=1, slices=SLICES) as pond,
        pytest.warns(RuleInterpreted, match=r"method 'go' of program P runs interpreted.*line \d+: ") as told,
    ):
        pond.program("p", cls)
    assert expected in str(told[0].message)


def test_what_is_compiled_is_not_told(recwarn: pytest.WarningsRecorder) -> None:
    with LocalPond(LossyFiles(1), containers=1, slices=SLICES) as pond:
        pond.program("p", define(CLASS))
    assert not [each for each in recwarn if each.category is RuleInterpreted]
    found = graph(define(CLASS))
    plan = plan_of(found, found.method("rate"), found.method("rate").tasks[0])
    assert plan.reasons == ("too low",)


@needs_compiler
def test_what_the_compiler_refuses_late_is_in_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task goes on as it was. That it is warned of in a container, nobody would see."""

    def refusing(plan: Any) -> Any:
        raise TypeError("no such kernel\nand a long story")

    cls = define(CLASS)
    line = graph(cls).method("count").tasks[0].line
    with LocalPond(LossyFiles(1), containers=2, slices=SLICES) as pond:
        program = pond.program("p", cls)
        count = program.call("count", into="n", name="c")
        rows = pa.Table.from_pylist([{"k": k, "xs": [2, 3], "by": 3} for k in range(9)], COUNTS)
        assert count(rows, 0)["n"].to_pylist() == [17] * 9
        assert "interpreted" not in pond.metrics()["programs"]["p"]
        with kernels_at_once():
            monkeypatch.setattr(tasks, "kernel_of", refusing)
            with pytest.warns(
                RuleInterpreted, match=f"line {line} of method 'count' runs .*: no such kernel$"
            ):
                assert len(set(count(rows, 1)["n"].to_pylist())) == 1
            told = pond.metrics()["programs"]["p"]
            assert told["interpreted"] == {f"count, line {line}": "no such kernel"}
            # Also when containers that know nothing of it are asked as well, and as Prometheus has it, where texts are none.
            pond.move(range(SLICES), to=0)
            assert pond.metrics()["programs"]["p"]["interpreted"]
            assert "no such kernel" not in pond.metrics_text()
