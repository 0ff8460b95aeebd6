"""Kernels of tasks: which there are, and when they are made."""

from __future__ import annotations

import threading
import warnings
from typing import Any

from millpond.errors import RuleInterpreted
from millpond.kernels._jit import JIT_ENABLED
from millpond.programs.graph import Graph, Method, Task
from millpond.programs.machine.kernel import STATES, Drive, kernel_of
from millpond.programs.machine.kinds import CannotCompile
from millpond.programs.machine.plan import Plan, plan_of

COMPILE_AFTER = 2_000
"""A task is worth a kernel once it has run for so many calls in this process."""
ONE_AT_A_TIME = threading.Lock()


class TaskKernel:
    """The kernel of a task, if it can have one. Until it is there the task runs interpreted."""

    in_background = True

    def __init__(self, graph: Graph, method: Method, task: Task) -> None:
        self.plan: Plan | None = None
        self.why = ""
        self._method = method
        self._task = task
        self._calls = 0
        self._begun = threading.Event()
        self._drive: Drive | None = None
        if JIT_ENABLED:
            try:
                plan = plan_of(graph, method, task)
                self.plan = plan if plan.state in STATES else None
            except CannotCompile as refused:
                self.why = f"line {refused.line}: {refused.why}"

    def ready(self, calls: int) -> Drive | None:
        """The kernel, if it is there. So many calls are to be run: after enough of them it is made."""
        if self._drive is not None or self.plan is None:
            return self._drive
        self._calls += calls
        if self._calls >= COMPILE_AFTER and not self._begun.is_set():
            self._begun.set()
            if not self.in_background:
                self._make()
            else:
                threading.Thread(target=self._make, name="millpond-compile", daemon=True).start()
        return self._drive

    def _make(self) -> None:
        plan = self.plan
        assert plan is not None
        try:
            with ONE_AT_A_TIME:
                self._drive = kernel_of(plan)
        except Exception as error:  # noqa: BLE001 - numba's are of all sorts: the task stays as it is
            self.plan, self.why = None, f"line {self._task.line}: {_first_line(error)}"
            text = f"method {self._method.name!r} runs interpreted: {self.why}"
            warnings.warn(text, RuleInterpreted, stacklevel=2)


def _first_line(error: Any) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
