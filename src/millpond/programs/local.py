"""A graph in one process: epochs of calls, in rounds, as ponds run them, over slices and lanes that are all here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from millpond.errors import BadOption, ProgramFailed
from millpond.programs.bodies import bodies, file_of
from millpond.programs.elements import DenseMatrix, Element, Map, Matrix, Vector
from millpond.programs.graph import REJECTS, RETURNS, Field, Graph, Method, Task, across
from millpond.programs.slicing import SLICES, lane_of, slice_of
from millpond.programs.values import fit

Call = tuple[str, Mapping[str, Any]]


class Outcome(NamedTuple):
    """Of a call: its result, or the reason why it was rejected."""

    value: Any
    error: str | None = None


class _Row(NamedTuple):
    """A call under way: the task that comes next, and its inputs."""

    method: Method
    task: Task
    inputs: tuple[Any, ...]
    steps: int


class LocalRun:
    """Runs a graph. An epoch whose call fails is gone as if it had not been."""

    def __init__(self, graph: Graph, *, slices: int = SLICES) -> None:
        self.graph = graph
        self.slices = slices
        self.bodies = bodies(graph)
        self.parts: dict[tuple[str, int], Element] = {
            (field.name, lane): new_element(field)
            for field in graph.fields
            if field.kind == "partial"
            for lane in range(graph.lanes)
        }

    def call(self, method: str, **arguments: Any) -> Any:
        """One call, an epoch of its own; the Outcome's value, or the reason of its rejection as an Outcome."""
        return self.epoch([(method, arguments)])[0]

    def epoch(self, calls: Sequence[Call]) -> list[Outcome]:
        """The outcomes of calls that come together, in their order."""
        before = {place: part.copy() for place, part in self.parts.items()}
        try:
            return self._epoch(calls)
        except BaseException:
            self.parts = before
            raise

    def _epoch(self, calls: Sequence[Call]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        rows: dict[int, _Row] = {}
        for number, (name, arguments) in enumerate(calls):
            method = self.graph.method(name)
            given = bound(method, arguments)
            first = method.tasks[0]
            rows[number] = _Row(method, first, tuple(given[v.name] for v in first.inputs), 0)
        while rows:
            self._stateless(rows, outcomes)
            level = min((row.task.level for row in rows.values()), default=0)
            for number in sorted(n for n, row in rows.items() if row.task.level == level):
                self._step(number, rows, outcomes)
        return [outcomes[number] for number in range(len(calls))]

    def _stateless(self, rows: dict[int, _Row], outcomes: dict[int, Outcome]) -> None:
        """Tasks without a field run at once, wherever they are."""
        for number in list(rows):
            while number in rows and rows[number].task.field is None:
                self._step(number, rows, outcomes)

    def _step(self, number: int, rows: dict[int, _Row], outcomes: dict[int, Outcome]) -> None:
        row = rows.pop(number)
        if row.steps >= self.graph.max_rounds:
            raise ProgramFailed(
                f"call {number} of {self.graph.name}.{row.method.name} went through {row.steps} tasks, and is on line"
                f" {row.task.line}",
                hint="does its loop end? @mp.program(max_rounds=...) allows for more",
                program=self.graph.name,
                method=row.method.name,
                line=row.task.line,
                row=number,
            )
        try:
            following, values = self._run(row)
        except Exception as error:
            raise _failed(self.graph, row, number, error) from error
        if following == REJECTS:
            outcomes[number] = Outcome(None, str(values[0]))
        elif following == RETURNS:
            outcomes[number] = Outcome(values[0])
        else:
            rows[number] = _Row(row.method, row.method.tasks[following], values, row.steps + 1)

    def _run(self, row: _Row) -> tuple[int, tuple[Any, ...]]:
        task = row.task
        body = self.bodies[row.method.name, task.number]
        if task.access != "everywhere":
            following, values = body(self._part(row), *row.inputs)
            return following, self._travelled(row, following, values)
        lanes = [body(self.parts[str(task.field), n], *_copied(row)) for n in range(self.graph.lanes)]
        following, values = lanes[0]
        gathered = [own[0] for _, own in lanes]
        return following, self._travelled(row, following, (gathered, *values[1:]))

    def _travelled(self, row: _Row, following: int, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Copies, of the types that the edge has."""
        if following == RETURNS:
            return (fit(values[0], row.method.returns) if row.method.returns else values[0],)
        if following == REJECTS:
            return values
        variables = row.method.tasks[following].inputs
        return tuple(fit(value, v.type) for value, v in zip(values, variables, strict=True))

    def _part(self, row: _Row) -> Element | None:
        task = row.task
        if task.field is None:
            return None
        names = [v.name for v in task.inputs]
        key = row.inputs[names.index(str(task.key))]
        if task.access == "lane":
            return self.parts[task.field, lane_of(key, self.slices, self.graph.lanes)]
        place = (task.field, slice_of(key, self.slices))
        if place not in self.parts:
            self.parts[place] = new_element(self.graph.field(task.field))
        return self.parts[place]

    def state(self) -> dict[str, Any]:
        """What the fields hold, as `plain.state_of` has it."""
        found: dict[str, Any] = {}
        for field in self.graph.fields:
            parts = sorted(place for place in self.parts if place[0] == field.name)
            entries = [self.parts[place].entries() for place in parts]
            if field.kind == "partial":
                found[field.name] = entries
            else:
                merged = {key: value for part in entries for key, value in part.items()}
                ordered = {key: merged[key] for key in sorted(merged)}  # type: ignore[type-var] # keys of one type
                found[field.name] = across(ordered) if field.by_column else ordered
        return found

    def validate(self) -> None:
        """Every key is in the slice that it belongs to."""
        for (name, number), part in self.parts.items():
            if self.graph.field(name).kind == "partitioned":
                for key in part.entries():
                    first = key[0] if isinstance(key, tuple) else key
                    assert slice_of(first, self.slices) == number, (name, number, key)  # type: ignore[arg-type] # a key


def bound(method: Method, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call, defaults included, as values of their types. BadOption for what does not fit."""
    names = [p.name for p in method.parameters]
    wrong = [name for name in arguments if name not in names]
    missing = [p.name for p in method.parameters if not p.optional and p.name not in arguments]
    if wrong or missing:
        raise BadOption(
            f"{method.name} takes ({', '.join(names)}), and "
            + (f"{missing[0]} is missing" if missing else f"no {wrong[0]}"),
            hint="give every parameter without a default, by its name",
            option=(missing or wrong)[0],
        )
    found = {}
    for parameter in method.parameters:
        value = arguments.get(parameter.name, parameter.default)
        try:
            found[parameter.name] = fit(value, parameter.type)
        except (TypeError, ValueError, OverflowError) as error:
            raise BadOption(
                f"{parameter.name} of {method.name}: {error}",
                hint=f"give a {parameter.type}",
                option=parameter.name,
            ) from None
    return found


def new_element(field: Field) -> Element:
    """An empty element for a field."""
    if field.element == "map":
        return Map(field.key, field.value)
    if field.element == "vector":
        return Vector()
    return Matrix() if field.element == "matrix" else DenseMatrix()


def _copied(row: _Row) -> tuple[Any, ...]:
    return tuple(fit(value, v.type) for value, v in zip(row.inputs, row.task.inputs, strict=True))


def _failed(graph: Graph, row: _Row, number: int, error: Exception) -> ProgramFailed:
    line = row.task.line
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file_of(row.method.name, row.task.number):
            line = row.task.lines[trace.tb_lineno - 1]
        trace = trace.tb_next
    return ProgramFailed(
        f"call {number} of {graph.name}.{row.method.name} failed on line {line}: {type(error).__name__}: {error}",
        hint="nothing of its epoch was changed",
        program=graph.name,
        method=row.method.name,
        line=line,
        row=number,
    )
