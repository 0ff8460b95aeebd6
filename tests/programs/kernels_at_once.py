"""Kernels of tasks as soon as a task runs, which else takes thousands of calls: for tests of what they give."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from millpond.container.holdings import program_code
from millpond.programs.machine import tasks


@contextmanager
def kernels_at_once() -> Iterator[list[int]]:
    """Kernels are made when a task first runs; the list tells how many calls each of their runs had."""
    ran: list[int] = []
    original = tasks.kernel_of

    def counting(plan: Any) -> Any:
        drive = original(plan)

        def run(state: Any, order: Any, first: int, last: int, *rest: Any) -> int:
            done = drive(state, order, first, last, *rest)
            ran.append(done)
            return done

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "kernel_of", counting)
        patch.setattr(tasks, "COMPILE_AFTER", 1)
        patch.setattr(tasks.TaskKernel, "in_background", False)
        program_code._loaded.cache_clear()
        try:
            yield ran
        finally:
            program_code._loaded.cache_clear()
