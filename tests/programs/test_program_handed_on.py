"""A row that goes on to the next task is as it was when its call left it, whichever tasks are compiled."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from both_ways import define, graph

from millpond.container.holdings import program_code
from millpond.kernels._jit import JIT_ENABLED
from millpond.programs.local import LocalRun
from millpond.programs.machine import tasks
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

CLASS = """
@mp.program(lanes=2, max_rounds=50)
class P:
    table: mp.Partitioned[mp.Matrix]
    sums: mp.Partial[mp.Vector]

    def rate(self, k: int, i: int, x: float) -> float:
        row = self.table[k]
        fresh = i not in row
        row[i] = x
        row[i + 1] += 1
        if fresh:
            for other in row.keys():
                self.sums[other] += x
        return row.total() + row.get(i, 0.0)
"""
SLICES = 4
TASKS = [each.number for each in graph(define(CLASS)).methods[0].tasks]


@pytest.mark.parametrize(
    "interpreted", [each for n in range(len(TASKS) + 1) for each in itertools.combinations(TASKS, n)]
)
def test_a_row_goes_on_as_it_was(interpreted: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    if not JIT_ENABLED and len(interpreted) < len(TASKS):
        pytest.skip("nothing is compiled")
    original = tasks.TaskKernel.ready

    def ready(kernel: Any, calls: int) -> Any:
        return None if kernel._task.number in interpreted else original(kernel, calls)

    monkeypatch.setattr(tasks.TaskKernel, "ready", ready)
    monkeypatch.setattr(tasks, "COMPILE_AFTER", 1)
    monkeypatch.setattr(tasks.TaskKernel, "in_background", False)
    program_code._loaded.cache_clear()
    cls = define(CLASS)
    alone = LocalRun(graph(cls), slices=SLICES)
    rng = np.random.default_rng(1)
    with LocalPond(LossyFiles(1), containers=2, slices=SLICES) as pond:
        rate = pond.program("p", cls).call("rate", into="now", name="feed")
        for epoch in range(3):
            calls = [
                {
                    "k": int(rng.integers(4)),
                    "i": int(rng.integers(6)),
                    "x": float(rng.choice([-1.5, 0.25, 7.0])),
                }
                for _ in range(40)
            ]
            told = rate(pa.Table.from_pylist(calls), epoch)["now"].to_pylist()
            assert told == [each.value for each in alone.epoch([("rate", call) for call in calls])]
    program_code._loaded.cache_clear()
