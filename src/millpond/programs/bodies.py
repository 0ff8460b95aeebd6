"""The code of tasks, ready to run."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

from millpond.programs.elements import DenseMatrix, Matrix, Vector
from millpond.programs.graph import Graph, Task
from millpond.programs.merging import average, total

Body = Callable[..., tuple[int, tuple[Any, ...]]]
NAMES = {
    "math": math,
    "mp_total": total,
    "mp_average": average,
    "mp_Vector": Vector,
    "mp_Matrix": Matrix,
    "mp_DenseMatrix": DenseMatrix,
}
_REFUSED = ("open", "input", "print", "eval", "exec", "compile", "__import__", "breakpoint")
_BUILTINS = {name: value for name, value in vars(builtins).items() if name not in _REFUSED}


def bodies(graph: Graph) -> dict[tuple[str, int], Body]:
    """The function of each task, by method and number."""
    functions = {code.name: code.load() for code in graph.functions}
    return {(m.name, t.number): _loaded(m.name, t, functions) for m in graph.methods for t in m.tasks}


def _loaded(method: str, task: Task, functions: dict[str, Any]) -> Body:
    names: dict[str, Any] = {"__builtins__": _BUILTINS, **NAMES, **functions}
    exec(compile(task.source, file_of(method, task.number), "exec"), names)  # noqa: S102 - what a task is
    made: Body = names["te"]
    return made


def file_of(method: str, number: int) -> str:
    """What stands for the file of a task in tracebacks."""
    return f"<task {method} {number}>"
