"""The code of tasks, ready to run."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

from millpond.programs.elements import DenseMatrix, Matrix, StateElement, Vector
from millpond.programs.elements.own import Bound
from millpond.programs.graph import Graph, OwnClass, Task
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
    own = {field: each for each in graph.own for field in each.fields}
    classes = {each.name: _class(each) for each in graph.own}
    return {
        (m.name, t.number): _over(_loaded(m.name, t, functions), t, classes[own[t.field].name])
        if t.field in own
        else _loaded(m.name, t, functions)
        for m in graph.methods
        for t in m.tasks
    }


def _class(own: OwnClass) -> type[StateElement[Any, Any]]:
    """The user's class again, from its text."""
    members: dict[str, Any] = {code.name: code.load() for code in own.methods}
    return type(own.name, (StateElement,), {**dict(own.constants), **members})


def _over(body: Body, task: Task, cls: type[StateElement[Any, Any]]) -> Body:
    """The task with an object of that class for the map that it is over."""

    def over(state: Any, *inputs: Any) -> tuple[int, tuple[Any, ...]]:
        return body(Bound(cls, state, task.access == "partitioned"), *inputs)

    return over


def _loaded(method: str, task: Task, functions: dict[str, Any]) -> Body:
    names: dict[str, Any] = {"__builtins__": _BUILTINS, **NAMES, **functions}
    exec(compile(task.source, file_of(method, task.number), "exec"), names)  # noqa: S102 - what a task is
    made: Body = names["te"]
    return made


def file_of(method: str, number: int) -> str:
    """What stands for the file of a task in tracebacks."""
    return f"<task {method} {number}>"
