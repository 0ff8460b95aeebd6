"""Functions that are called for each row say the same whether they are compiled or not, and end all the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import millpond as mp
from millpond.code.capture import capture
from millpond.errors import RuleFailed, RuleInterpreted
from millpond.kernels._jit import JIT_ENABLED
from millpond.stores.windows import rowwise
from millpond.stores.windows.rowwise import RowFunction
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

SCHEMA = pa.schema([("v", pa.int64()), ("w", pa.float64()), ("s", pa.string())])
needs_jit = pytest.mark.skipif(not JIT_ENABLED, reason="without numba nothing is compiled")


def shifting(v: int, w: float) -> Any:
    if w > 1.0:
        return v * 4_611_686_018_427_387_904 + 7
    return v // 3 + int(w * 2)


def as_far(v: int) -> int:
    return abs(v) + 1


def is_seventh(v: int) -> bool:
    return v % 7 == 0


def loops(v: int) -> int:
    while v > 100:
        v -= 1
    return v


def made(function: Callable[..., Any], wanted: Any, rows_before: int, monkeypatch: Any) -> RowFunction:
    monkeypatch.setattr(rowwise, "COMPILED_FROM_ROWS", rows_before)
    rowwise._row_function.cache_clear()
    return rowwise.row_function(capture(function, "gap", "gap"), SCHEMA, wanted)


def columns(v: list[Any], w: list[Any]) -> list[pa.Array]:
    return [pa.array(v, pa.int64()), pa.array(w, pa.float64())]


@needs_jit
def test_compiled_and_interpreted_it_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    v, w = rng.integers(-(2**63), 2**63 - 1, 300).tolist(), (rng.random(300) * 3 - 1).tolist()
    interpreted = made(shifting, "long", 1 << 60, monkeypatch)(columns(v, w), 300)
    compiled = made(shifting, "long", 0, monkeypatch)
    assert compiled(columns(v, w), 300).tolist() == interpreted.tolist()
    assert compiled._kernel is not None
    assert not compiled.reason
    with pytest.raises(ValueError, match="NaN"):
        compiled(columns([1], [math.nan]), 1)
    # Where a column has nulls, a function gets them.
    with pytest.raises(TypeError):
        compiled(columns([1, 2], [None, 0.5]), 2)
    assert compiled(columns([9], [0.5]), 1).tolist() == [4]


@needs_jit
def test_what_is_not_compiled_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for function, why in (
        (loops, "it has a loop"),
        (lambda s: 5, "not all numbers"),
        (lambda v: [v][0], "it makes a list"),
    ):
        rule = made(function, "long", 0, monkeypatch)
        assert why in rule.reason
        assert rule([pa.array([3] if why != "not all numbers" else ["3"])], 1).tolist()[0] in (3, 5)
        assert rule._kernel is None


@needs_jit
def test_sessions_are_the_same_and_a_warning_says_what_is_interpreted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(4)
    rows = pa.table({"k": rng.integers(0, 9, 400), "t": np.arange(400), "v": rng.integers(-3, 40, 400)})
    answers = []
    for rows_before in (0, 1 << 60):
        monkeypatch.setattr(rowwise, "COMPILED_FROM_ROWS", rows_before)
        rowwise._row_function.cache_clear()
        with LocalPond(LossyFiles()) as pond:
            sessions = mp.session(as_far, ends_when=is_seventh)
            window = pond.window(
                "w", key="k long", window=sessions, aggregate={"n": mp.count()}, value="v long"
            )
            feed = window.over(key="k", at="t")
            fired = [*feed(rows, 0).to_pylist(), *feed.finish().to_pylist()]
            answers.append(sorted(map(repr, fired)))
    assert answers[0] == answers[1]
    with LocalPond(LossyFiles()) as pond, pytest.warns(RuleInterpreted, match="loops: it has a loop"):
        pond.window("w", key="k long", window=mp.session(loops), aggregate={"n": mp.count()}, value="v long")


def divides(v: int) -> int:
    return 10 // v


@needs_jit
def test_a_row_that_fails_costs_its_epoch_also_where_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowwise, "COMPILED_FROM_ROWS", 0)
    rowwise._row_function.cache_clear()
    with LocalPond(LossyFiles()) as pond:
        feed = pond.window("w", key="k long", window=mp.session(divides), aggregate={"n": mp.count()}).over(
            key="k", at="t"
        )
        with pytest.raises(RuleFailed, match="division by zero"):
            feed(pa.table({"k": [1, 1], "t": [1, 2], "v": [5, 0]}), 0)
        assert feed(pa.table({"k": [1, 1], "t": [1, 90], "v": [5, 5]}), 0).num_rows == 1
