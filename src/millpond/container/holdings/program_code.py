"""A program's code as an epoch brings it: loaded once for the same text."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import msgspec
import pyarrow as pa

from millpond.errors import BadMessage, SchemaMismatch
from millpond.programs.bodies import Body, bodies
from millpond.programs.calls import calls_schema
from millpond.programs.graph import Graph, Method, Task
from millpond.programs.machine.tasks import TaskKernel
from millpond.programs.rows import ERROR, ROW, arrow_type
from millpond.programs.values import inner_of
from millpond.wire.programs import FieldSpec, ProgramSpec, ProgramWork


class LoadedTask(NamedTuple):
    """A task with its function. `parts` are the types of inputs as they travel: of what is gathered, that of a part."""

    task: Task
    function: Body
    types: tuple[str, ...]
    parts: tuple[str, ...]
    key: int | None
    """The place of the key among the inputs."""

    schema: pa.Schema
    """Of calls that wait for it."""
    kernel: TaskKernel

    @property
    def is_free(self) -> bool:
        """Whether it accesses nothing: then it can run anywhere, at any time."""
        return self.task.field is None

    @property
    def runs_anywhere(self) -> bool:
        """Whether it is free, and needs nothing from elsewhere: then it runs where the task before it ran."""
        return self.is_free and not self.task.gathers


class LoadedMethod(NamedTuple):
    graph: Graph
    method: Method
    tasks: tuple[LoadedTask, ...]

    @property
    def levels(self) -> int:
        return len(self.graph.levels)

    @property
    def returns(self) -> pa.DataType | None:
        kind = self.method.returns
        return None if kind is None else arrow_type(kind)

    def outputs(self, work: ProgramWork) -> pa.Schema:
        """The columns of what an epoch gives back: the order of rows, the rows, the results, and why calls were rejected."""
        fields = [pa.field(ROW, pa.int64()), *list(rows_schema(work))[2:]]
        if work.into is not None:
            fields.append(pa.field(work.into, self.returns or pa.null()))
        if self.method.rejects:
            fields.append(pa.field(ERROR, pa.string()))
        return pa.schema(fields)


def rows_schema(work: ProgramWork) -> pa.Schema:
    """The columns of an epoch's rows as they are staged."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(work.schema))
    except (pa.ArrowInvalid, OSError) as error:
        raise BadMessage(f"the schema of rows cannot be read: {error}") from None


def method_of(work: ProgramWork) -> LoadedMethod:
    methods = _loaded(work.graph)
    if work.method not in methods:
        raise BadMessage(f"the program has no method {work.method!r}")
    return methods[work.method]


def graph_of(data: bytes) -> Graph:
    try:
        return msgspec.msgpack.decode(data, type=Graph)
    except msgspec.DecodeError as error:
        raise BadMessage(f"a program could not be read: {error}") from None


def check_code(graph: Graph, spec: ProgramSpec) -> None:
    """SchemaMismatch if the code is for fields as they are not, or not any more. How many lanes there are is no matter of it."""
    for field in graph.fields:
        known = spec.fields.get(field.name)
        if known is None or (known.kind, known.element, known.key, known.value) != field[1:5]:
            own = FieldSpec(field.kind, field.element, field.key, field.value)
            raise SchemaMismatch(
                f"program {spec.name!r} has changed: its field {field.name!r} is no more as this code has it",
                hint=f"nothing was changed; get it again, by the class as it is now: pond.program({spec.name!r}, Class)",
                resident=spec.name,
                existing="none" if known is None else known.words,
                requested=own.words,
            )


@lru_cache(maxsize=64)
def _loaded(data: bytes) -> dict[str, LoadedMethod]:
    graph = graph_of(data)
    loaded = bodies(graph)
    return {
        method.name: LoadedMethod(
            graph,
            method,
            tuple(
                _loaded_task(graph, method, task, loaded[method.name, task.number]) for task in method.tasks
            ),
        )
        for method in graph.methods
    }


def _loaded_task(graph: Graph, method: Method, task: Task, function: Body) -> LoadedTask:
    names = [variable.name for variable in task.inputs]
    types = tuple(variable.type for variable in task.inputs)
    parts = (inner_of(types[0]), *types[1:]) if task.gathers else types
    key = None if task.key is None else names.index(task.key)
    return LoadedTask(task, function, types, parts, key, calls_schema(parts), TaskKernel(graph, method, task))
