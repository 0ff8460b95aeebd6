"""The kernel of a task as text: its body, and the loop that runs it over rows."""

from __future__ import annotations

import ast
from typing import NamedTuple

from millpond.programs.compiler.tasks import STATE
from millpond.programs.graph import REJECTS, RETURNS, Field, Graph, Method, Task
from millpond.programs.machine.kinds import GATHERED, INPUTS, OUTPUTS, VECTORS, CannotCompile, Value
from millpond.programs.machine.text import Function, Library
from millpond.programs.values import inner_of

FAILED = -9
"""What a body gives in place of the next task: what it did must be taken back."""
# Places in `control`.
WRONG = 0  # what was done must be taken back
STOP = 1  # somebody wants it to end
AT = 2  # which call runs
LANES = 3
LENGTH = 4  # of the columns of inputs
ROOM = 5  # of those of what is handed on
CONTROL_SIZE = 8


class Out(NamedTuple):
    """What goes to one task, or how calls end: the kinds of its columns, and the reasons that there are."""

    following: int
    kinds: tuple[str, ...]


class Plan(NamedTuple):
    """A kernel `drive(state, order, first, last, control, counts, following, params, grown...)`.

    It runs the calls `order[first:last]`, and gives how far it came. For each of `outs`, `counts` says how many calls there
    are; `params` are addresses: of each input its numbers; or its offsets, items (of a vector two of them) and how many; of each
    column of each of `outs` its numbers, or its offsets, whose items are in one of the `grown`.
    """

    source: str
    state: str
    inputs: tuple[str, ...]
    outs: tuple[Out, ...]
    grown: int
    reasons: tuple[str, ...]


def state_of(field: Field | None) -> str:
    """The kind of a task's state; empty where it has none. CannotCompile for what compiled code does not have."""
    if field is None:
        return ""
    if field.element == "map" and field.key == "long" and field.value in ("long", "double", "boolean"):
        return f"map<{field.value}>"
    if field.element in ("matrix", "vector"):
        return "matrix" if field.element == "matrix" else "row"
    if field.element == "dense":
        raise CannotCompile(1, f"{field.name} is a DenseMatrix")
    what = "keys are texts" if field.key == "string" else f"values are of type {field.value}"
    raise CannotCompile(1, f"{field.name} is a Map whose {what}")


def plan_of(graph: Graph, method: Method, task: Task) -> Plan:
    """CannotCompile, with the line of the user's file, if the body is to stay as it is."""
    try:
        return _planned(graph, method, task)
    except CannotCompile as refused:
        lines = task.lines
        raise CannotCompile(lines[min(max(refused.line, 1), len(lines)) - 1], refused.why) from None


def why_interpreted(graph: Graph, method: Method, task: Task) -> tuple[int, str] | None:
    """The line of the user's file that keeps a task from being compiled, and why."""
    try:
        plan_of(graph, method, task)
    except CannotCompile as refused:
        return refused.line, refused.why
    return None


def _planned(graph: Graph, method: Method, task: Task) -> Plan:
    state = state_of(None if task.field is None else graph.field(task.field))
    for number, variable in enumerate(task.inputs):
        gathered = number == 0 and task.gathers
        if variable.type not in (GATHERED if gathered else INPUTS):
            raise CannotCompile(1, f"{variable.name} is of type {variable.type}")
    tree = ast.parse(task.source).body[0]
    assert isinstance(tree, ast.FunctionDef)
    body = Body(graph, method, task, state)
    body.block(tree.body)
    driver = _Driver(task, state, body)
    functions = [called.text() for called in body.library.made.values()]
    source = "\n\n\n".join([*functions, body.text(tree.args.args[0].arg), driver.text()])
    return Plan(
        f"{source}\n",
        state,
        tuple(variable.type for variable in task.inputs),
        tuple(body.outs),
        body.grown,
        tuple(body.reasons),
    )


class Body(Function):
    """The body of a task: `te`, which gives the number of the next task when it has put what goes there in columns."""

    def __init__(self, graph: Graph, method: Method, task: Task, state: str) -> None:
        kinds = {variable.name: _inside(variable.type) for variable in task.inputs}
        super().__init__({**kinds, **({STATE: state} if state else {})}, Library(graph.functions))
        self._method = method
        self.task = task
        self.outs: list[Out] = []
        self.columns: list[str] = []
        """The names of columns, as parameters."""
        self.reasons: list[str] = []
        self.grown = 0
        following = sorted({REJECTS, RETURNS, *task.next}) if method.rejects else [RETURNS, *task.next]
        for number in following:
            self._add_out(number)
        self.defined |= set(kinds)

    def _add_out(self, number: int) -> None:
        if number == REJECTS:
            kinds: tuple[str, ...] = ("long",)
        elif number == RETURNS:
            kinds = () if self._method.returns is None else (self._method.returns,)
        else:
            target = self._method.tasks[number]
            types = [variable.type for variable in target.inputs]
            kinds = tuple([inner_of(types[0]), *types[1:]] if target.gathers else types)
        self.outs.append(Out(number, kinds))
        place = len(self.outs) - 1
        for n, kind in enumerate(kinds):
            self.columns.append(f"o{place}_{n}")
            if kind not in ("long", "double", "boolean"):
                self.columns.append(f"g{place}_{n}")
                self.grown += 1

    @property
    def fail(self) -> str:
        return str(FAILED)

    def called_function(self, name: str, node: ast.Call) -> Value | None:
        if name in self.kinds:
            self.refuse(node, f"{name} is a variable")
        if name not in self.library.names:
            return None
        return self.library.called(None, name, [self.value(a) for a in node.args], node)

    def leave(self, node: ast.Return) -> None:
        match node.value:
            case ast.Tuple(elts=[first, ast.Tuple(elts=values)]):
                number = ast.literal_eval(first)
            case _:
                self.refuse(node, "a task ends in another way")
        place = next((n for n, out in enumerate(self.outs) if out.following == number), -1)
        if place < 0:
            self.refuse(node, f"it hands on to a task {number}, which it does not name")
        kinds = self.outs[place].kinds
        if any(kind not in OUTPUTS for kind in kinds):
            kind = next(kind for kind in kinds if kind not in OUTPUTS)
            self.refuse(node, f"a value of type {kind} is handed on")
        if number == RETURNS and not kinds:
            made: list[Value] = []
        elif number == REJECTS:
            made = [self.reason(values[0])]
        else:
            made = [self.kept(self.value(value)) for value in values]
        self.write(f"c = counts[{place}]")
        for n, (value, kind) in enumerate(zip(made, kinds, strict=True)):
            self.hand_on(value, kind, f"o{place}_{n}", f"g{place}_{n}", node)
        self.write(f"counts[{place}] = c + 1")
        self.write(f"return {number}")

    def reason(self, node: ast.expr) -> Value:
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            self.refuse(node, "the reason of a rejection is made as the method runs")
        if node.value not in self.reasons:
            self.reasons.append(node.value)
        return Value(str(self.reasons.index(node.value)), "long")

    def hand_on(self, value: Value, kind: str, column: str, grown: str, node: ast.AST) -> None:
        if kind == "double" and value.kind in ("long", "double"):
            self.write(f"{column}[c] = {self.double(value)}")
        elif kind == value.kind and kind in ("long", "boolean"):
            self.write(f"{column}[c] = {value.text}")
        elif kind == value.kind and kind in ("array<long>", "array<double>"):
            self.write(f"put_{'longs' if kind == 'array<long>' else 'doubles'}({grown}, {value.text})")
            self.write(f"{column}[c + 1] = {grown}.used")
        elif kind == "vector" and value.kind in VECTORS:
            keys, values = self.fresh(), self.fresh()
            self.write(f"{keys}, {values} = arrays_in({value.text})")
            self.write(f"put_entries({grown}, {keys}, {values})")
            self.write(f"{column}[c + 1] = {grown}.used")
        else:
            self.refuse(node, f"a {value.kind} is handed on as a {kind}")

    def text(self, state: str) -> str:
        names = [variable.name for variable in self.task.inputs]
        head = ", ".join([state, *map(self.name, names), "control", "counts", *self.columns])
        # What came with the call stays as it is: it may have to run again.
        vectors = [self.name(n) for n in names if self.kinds[n] == "vector" and self.changes_vectors]
        copied = [f"    {name} = {name}.copy()" for name in vectors]
        return "\n".join([f"def te({head}):", *copied, *self.lines, f"    return {FAILED}"])


def _inside(kind: str) -> str:
    """What a body takes the values of an input for."""
    return f"array<{inner_of(kind)}>" if kind in ("collection<long>", "collection<double>") else kind


class _Driver:
    """The loop over calls."""

    def __init__(self, task: Task, state: str, body: Body) -> None:
        self.task = task
        self.body = body
        self.lines: list[str] = []
        self.inner: list[str] = []
        self.params = 0

    def param(self) -> str:
        self.params += 1
        return f"params[{self.params - 1}]"

    def text(self) -> str:
        arguments = [
            self.given(f"i{n}", variable.type, n == 0 and self.task.gathers)
            for n, variable in enumerate(self.task.inputs)
        ]
        grown = []
        for place, out in enumerate(self.body.outs):
            for n, kind in enumerate(out.kinds):
                name = f"o{place}_{n}"
                if kind in ("long", "double", "boolean"):
                    self.lines.append(f"{name} = {_view(kind)}({self.param()}, control[{ROOM}])")
                else:
                    self.lines.append(f"{name} = longs_at({self.param()}, control[{ROOM}] + 1)")
                    grown.append(f"g{place}_{n}")
        call = ", ".join([STATE, *arguments, "control", "counts", *self.body.columns])
        lanes = f" * control[{LANES}]" if self.task.gathers else ""
        return "\n".join(
            [
                f"def drive({', '.join([STATE, 'order', 'first', 'last', 'control', 'counts', 'following', 'params', *grown])}):",
                *(f"    {line}" for line in self.lines),
                "    for n in range(first, last):",
                f"        i = order[n{lanes}]",
                f"        control[{AT}] = n",
                *(f"        {line}" for line in self.inner),
                f"        k = te({call})",
                f"        if control[{WRONG}] != 0 or stopped(control):",
                "            return n",
                "        following[n] = k",
                "    return last",
            ]
        )

    def given(self, name: str, kind: str, gathered: bool) -> str:
        """An argument of the body, from the columns of the input."""
        if gathered:
            return self.gathered(name, inner_of(kind))
        if kind in ("long", "double", "boolean"):
            self.lines.append(f"{name} = {_view(kind)}({self.param()}, control[{LENGTH}])")
            return f"{name}[i] != 0" if kind == "boolean" else f"{name}[i]"
        self.columns(name, kind)
        start, stop = f"{name}_o[i]", f"{name}_o[i + 1]"
        if kind == "vector":
            return f"vector_of({name}_k[{start} : {stop}], {name}_x[{start} : {stop}])"
        return f"{name}[{start} : {stop}]"

    def columns(self, name: str, kind: str) -> None:
        """Of lists and vectors."""
        self.lines.append(f"{name}_o = longs_at({self.param()}, control[{LENGTH}] + 1)")
        if kind == "vector":
            keys, items, count = self.param(), self.param(), self.param()
            self.lines.append(f"{name}_k = longs_at({keys}, {count})")
            self.lines.append(f"{name}_x = doubles_at({items}, {count})")
        else:
            items, count = self.param(), self.param()
            self.lines.append(f"{name} = {_view(inner_of(kind))}({items}, {count})")

    def gathered(self, name: str, kind: str) -> str:
        if kind == "vector":
            self.columns(name, kind)
            of_lane = f"{name}_o[j] : {name}_o[j + 1]"
            self.inner += [
                f"{name}_all = [vector_of({name}_k[{name}_o[i] : {name}_o[i + 1]], {name}_x[{name}_o[i] : {name}_o[i + 1]])]",
                f"for lane in range(1, control[{LANES}]):",
                f"    j = order[n * control[{LANES}] + lane]",
                f"    {name}_all.append(vector_of({name}_k[{of_lane}], {name}_x[{of_lane}]))",
            ]
            return f"{name}_all"
        self.lines.append(f"{name} = {_view(kind)}({self.param()}, control[{LENGTH}])")
        self.inner += [
            f"{name}_all = np.empty(control[{LANES}], np.{'int64' if kind == 'long' else 'float64'})",
            f"for lane in range(control[{LANES}]):",
            f"    {name}_all[lane] = {name}[order[n * control[{LANES}] + lane]]",
        ]
        return f"{name}_all"


def _view(kind: str) -> str:
    return {"long": "longs_at", "double": "doubles_at", "boolean": "bytes_at"}[kind]
