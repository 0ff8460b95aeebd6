"""Kernels of tasks: which there are, and when they are made."""

from __future__ import annotations

import threading
import warnings

from millpond.errors import RuleInterpreted
from millpond.kernels._jit import JIT_ENABLED
from millpond.programs.graph import Graph, Method, Task
from millpond.programs.machine.kernel import Drive, kernel_of
from millpond.programs.machine.kinds import CannotCompile
from millpond.programs.machine.plan import Plan, plan_of

COMPILE_AFTER, COMPILE_AFTER_S = 2_000, 0.3
"""A task is worth a kernel once it has run for so many calls, or for so long, in this process."""
ONE_AT_A_TIME = threading.Lock()


class TaskKernel:
    """The kernel of a task, if it can have one. Until it is there the task runs interpreted."""

    in_background = True

    def __init__(self, graph: Graph, method: Method, task: Task) -> None:
        self.plan: Plan | None = None
        self.refused = ""
        """Why the compiler did not take what a plan was made for: of that only containers know."""
        self._graph = graph
        self._method = method
        self._task = task
        self._calls = 0
        self._took_s = 0.0
        self._begun = not JIT_ENABLED
        self._drive: Drive | None = None

    def ready(self, calls: int) -> Drive | None:
        """The kernel, if it is there. So many calls are to be run: after enough of them, or of their time, it is made."""
        if self._begun:
            return self._drive
        self._calls += calls
        if self._calls < COMPILE_AFTER and self._took_s < COMPILE_AFTER_S:
            return None
        self._begun = True
        if self.in_background:
            threading.Thread(target=self._make, name="millpond-compile", daemon=True).start()
        else:
            self._make()
        return self._drive

    def interpreted(self, seconds: float) -> None:
        """Calls were run without it, for so long."""
        self._took_s += seconds

    def _make(self) -> None:
        try:
            self.plan = plan_of(self._graph, self._method, self._task)
        except CannotCompile:
            return  # whoever opened the program was told
        try:
            with ONE_AT_A_TIME:
                self._drive = kernel_of(self.plan)
        except Exception as error:  # noqa: BLE001 - numba's are of all sorts: the task stays as it is
            self.refused = next(iter(str(error).strip().splitlines()), type(error).__name__)
            text = f"line {self._task.line} of method {self._method.name!r} runs interpreted: {self.refused}"
            warnings.warn(text, RuleInterpreted, stacklevel=2)
