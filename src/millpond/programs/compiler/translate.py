"""A class as a graph."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from millpond.programs.compiler import checks
from millpond.programs.compiler.asking import LANE
from millpond.programs.compiler.columns import turned
from millpond.programs.compiler.composite import EMPTY, NULL, as_list, join, shown
from millpond.programs.compiler.escapes import check_escapes
from millpond.programs.compiler.fields import StateField, evaluated, fields_of, type_of
from millpond.programs.compiler.functions import fault_in
from millpond.programs.compiler.helpers import helper_called
from millpond.programs.compiler.lanes import lane_key
from millpond.programs.compiler.levels import Levels, Step, level, steps_of
from millpond.programs.compiler.limits import check_class
from millpond.programs.compiler.live import inputs_of
from millpond.programs.compiler.names import Resolver
from millpond.programs.compiler.normal import Normaliser
from millpond.programs.compiler.source import ProgramSource, source_of
from millpond.programs.compiler.split import Raw, Splitter, view_fields
from millpond.programs.compiler.syntax import bound_in
from millpond.programs.compiler.tasks import following, text_of
from millpond.programs.compiler.types import Types
from millpond.programs.graph import BY_COLUMN, Field, Graph, Method, OwnClass, Parameter, Task, Variable
from millpond.programs.merging import GIVEN_EVERYWHERE
from millpond.programs.values import fit, travels


def translate(cls: type, lanes: int, max_rounds: int) -> Graph:
    """The graph of a class. BadProgram, with file, line and what to do, for what it cannot be made of."""
    source = source_of(cls)
    check_class(source)
    fields = fields_of(source)
    resolver = Resolver(source, fields)
    methods = {name: resolver.method(name) for name in source.methods}
    fields = turned(source, fields, methods)
    made = [_Translated(source, fields, resolver, methods, name) for name in _entries(source)]
    if not made:
        raise source.refuse(
            source.tree, "none of its methods can be called", "write one whose name has no _ in front"
        )
    steps = [step for method in made for step in method.steps]
    levels = level(list(fields), steps)
    rounds = max(levels.of.values()) + 1
    return Graph(
        source.name,
        source.file,
        lanes,
        max_rounds,
        tuple(_field(field, levels) for field in fields.values()),
        tuple(method.finished(levels) for method in made),
        tuple(tuple(f for f in fields if levels.of[f] == n) for n in range(rounds)),
        levels.serial,
        levels.why,
        tuple(resolver.functions.values()),
        own_classes(source, fields),
    )


def _field(field: StateField, levels: Levels) -> Field:
    key = BY_COLUMN if field.by_column else field.key
    return Field(field.name, field.kind, field.element, key, field.value, levels.of[field.name], field.line)


def own_classes(source: ProgramSource, fields: Mapping[str, StateField]) -> tuple[OwnClass, ...]:
    """The classes of the user's, with the fields that are of them."""
    found: dict[str, OwnClass] = {}
    for field in fields.values():
        if field.own is not None:
            code = found.get(field.own.code.name, field.own.code)
            if code._replace(fields=()) != field.own.code:
                raise source.refuse(
                    field.line, f"two state classes are called {code.name}", "rename one of them"
                )
            for method in (*code.methods, *([code.merged] if code.merged else [])):
                fault = fault_in(method)
                if fault is not None:
                    raise source.refuse(
                        field.line, f"{code.name}.{method.name} uses {fault.what}: {fault.why}", fault.hint
                    )
            found[code.name] = code._replace(fields=(*code.fields, field.name))
    return tuple(found.values())


def _entries(source: ProgramSource) -> list[str]:
    """The methods that can be called from outside: helpers begin with _, take collections, or say no types."""
    called = {
        helper_called(node, source)
        for tree in source.methods.values()
        for node in ast.walk(tree)
        if helper_called(node, source)
    }
    found = []
    for name, tree in source.methods.items():
        annotations = [a.annotation for a in _parameters(tree)]
        names = source.globals_of(name)
        hints = [evaluated(source, a, names, name) if a is not None else None for a in annotations]
        kinds = [type_of(hint) if hint is not None else "" for hint in hints]
        is_helper = name.startswith("_") or any(kind.startswith("collection") for kind in kinds)
        if not is_helper and not (name in called and not all(kinds)):
            found.append(name)
    return found


def _parameters(tree: ast.FunctionDef) -> list[ast.arg]:
    return [*tree.args.posonlyargs, *tree.args.args][1:] + tree.args.kwonlyargs


class _Input(NamedTuple):
    name: str
    type: str


class _Translated:
    """One method, but for the levels of its tasks."""

    def __init__(
        self,
        source: ProgramSource,
        fields: dict[str, StateField],
        resolver: Resolver,
        methods: dict[str, ast.FunctionDef],
        name: str,
    ) -> None:
        self.source = source
        self.fields = fields
        self.name = name
        self.tree = source.methods[name]
        self.parameters = self._typed_parameters()
        kinds = {p.name: p.type for p in self.parameters}
        normal = Normaliser(source, fields, methods, name)
        body = normal.body()
        accesses = normal.accesses
        key, self.body = lane_key(source, accesses, body, kinds)
        self.types = Types(fields, kinds, resolver.returns)
        self.types.infer(self.body)
        self.rejects = checks.check_rejects(source, accesses, self.body)
        check_escapes(source, accesses, self.body, self.types)
        checks.check_aliases(source, accesses, self.body, self.types, normal.temporary, normal.of_helpers)
        checks.check_order(source, accesses, self.body, self.types)
        checks.check_values(source, accesses, self.body, self.types)
        self.views = view_fields(self.body, accesses)
        self.raw = Splitter(source, accesses, name, self.body, list(kinds), key).tasks()
        self.next = {number: following(task) for number, task in enumerate(self.raw)}
        self.inputs = self._inputs()
        self.returns = self._result()
        self._check_views()

    @property
    def steps(self) -> list[Step]:
        sites = [task.site.field if task.site else None for task in self.raw]
        return steps_of(self.name, sites, self.next, [task.line for task in self.raw])

    def finished(self, levels: Levels) -> Method:
        tasks = tuple(self._task(number, task, levels) for number, task in enumerate(self.raw))
        read_only = not any(task.writes for task in tasks)
        return Method(
            self.name, self.parameters, self.returns, tasks, read_only, self.rejects, self.tree.lineno
        )

    def _task(self, number: int, task: Raw, levels: Levels) -> Task:
        names = [[i.name for i in inputs] for inputs in self.inputs]
        source, lines = text_of(task, names, names[number], self.fields)
        site = task.site
        return Task(
            number,
            site.field if site else None,
            site.access if site else "none",
            site.key or None if site else None,
            tuple(Variable(*i) for i in self.inputs[number]),
            source,
            lines,
            task.writes,
            task.line,
            bool(task.gathered),
            levels.of[site.field] if site else 0,
            self.next[number],
        )

    def _typed_parameters(self) -> tuple[Parameter, ...]:
        arguments = self.tree.args
        plain = [*arguments.posonlyargs, *arguments.args]
        defaults: dict[str, ast.expr] = {
            a.arg: d for a, d in zip(reversed(plain), reversed(arguments.defaults), strict=False)
        }
        defaults |= {
            a.arg: d
            for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            if d is not None
        }
        names = self.source.globals_of(self.name)
        found = []
        for argument in _parameters(self.tree):
            hint = argument.annotation
            kind = type_of(evaluated(self.source, hint, names, self.name)) if hint is not None else ""
            if not kind:
                what = (
                    f"is a {ast.unparse(hint)}, which cannot travel"
                    if hint is not None
                    else "does not say its type"
                )
                raise self.source.refuse(
                    argument,
                    f"the parameter {argument.arg} {what}",
                    f'write for example {argument.arg}: int; types are int, float, bool, str, lists of these, "array<long>"',
                    self.name,
                )
            default = defaults.get(argument.arg)
            found.append(
                Parameter(argument.arg, kind, default is not None, self._default(argument, kind, default))
            )
        return tuple(found)

    def _default(self, argument: ast.arg, kind: str, default: ast.expr | None) -> Any:
        if default is None:
            return None
        value = inspect.signature(self.source.functions[self.name]).parameters[argument.arg].default
        try:
            return fit(value, kind)
        except (TypeError, ValueError, OverflowError):
            raise self.source.refuse(
                default, f"the default of {argument.arg} is no {kind}", f"write a {kind}, or None", self.name
            ) from None

    def _inputs(self) -> list[list[_Input]]:
        known = {p.name for p in self.parameters}
        live = inputs_of(self.raw, known | set(bound_in(self.body)))
        later = set[str]().union(*live[1:])
        for name in sorted(live[0] - known):
            if name in later:
                raise self.source.refuse(
                    _line_of(self.body, name),
                    f"{name} may have no value when another task needs it",
                    f"set {name} before, on every way that leads there",
                    self.name,
                )
        live[0] &= known
        order = [p.name for p in self.parameters]
        found = []
        for task, names in zip(self.raw, live, strict=True):
            ranked = sorted(names, key=lambda n: (order.index(n) if n in order else len(order), n))
            gathered = [_Input(task.gathered, self._gathered(task))] if task.gathered else []
            found.append(gathered + [_Input(n, self._type(n, task)) for n in ranked])
        return found

    def _gathered(self, task: Raw) -> str:
        if task.gathered == "done_everywhere":
            return "collection<boolean>"
        number = next(n for n, each in enumerate(self.raw) if each is task)
        site = next(each.site for n, each in enumerate(self.raw) if number in self.next[n])
        field = self.fields[site.field] if site is not None else None
        if field is not None and field.own is None and not travels(self.types.names.get(task.gathered, "")):
            raise self.source.refuse(
                _line_of(self.body, task.gathered) or task.line,
                f"{task.gathered}: what {field.name} gives there in each lane cannot travel to another task",
                f"ask for what travels: {', '.join(GIVEN_EVERYWHERE[field.element])}",
                self.name,
            )
        return self._type(task.gathered, task)

    def _type(self, name: str, task: Raw) -> str:
        kind = self.types.names.get(name, "")
        if kind == NULL:
            return "long"
        kind = "array<long>" if kind == EMPTY else kind
        if name in self.types.conflicts:
            left, right, line = self.types.conflicts[name]
            if name == LANE:
                raise self.source.refuse(
                    line,
                    f"a partial field is accessed in the lane of a key that may be a {left} or a {right}",
                    "let keys be of one type, or access by one of them right before",
                    self.name,
                )
            raise self.source.refuse(
                line,
                f"{name} is a {left} and then a {right}, and goes from task to task",
                "use a variable for each",
                self.name,
            )
        if not travels(kind):
            what = (
                f"is a {shown(kind)}, which cannot travel"
                if kind
                else "is of a type that cannot be told, or cannot travel"
            )
            raise self.source.refuse(
                _line_of(self.body, name) or task.line,
                f"{name} {what} to another task, on line {task.line}",
                f"{self._how_to_say(name, kind)}; what travels is int, float, bool, str, lists of these, and vectors",
                self.name,
            )
        return kind

    def _how_to_say(self, name: str, kind: str) -> str:
        if kind:
            return "take out of it before what is needed then"
        said = self.source.said.get(name, name)
        if said.isidentifier():
            return f"say what it is where it is set, as in {name}: int = ... or {name}: list[str] = ..."
        return f"name it first, and say what it is, as in n: int = {said}, or n: list[str] = {said}"

    def _result(self) -> str | None:
        wanted = ""
        if self.tree.returns is not None:
            hint = evaluated(self.source, self.tree.returns, self.source.globals_of(self.name), self.name)
            if hint is None and self.types.result in (None, NULL):
                return None
            wanted = type_of(hint)
            if not wanted:
                raise self.source.refuse(
                    self.tree,
                    f"{ast.unparse(self.tree.returns)} is no type that a result can have",
                    'write for example -> int, -> float, or -> "array<long>"',
                    self.name,
                )
        kind = self.types.result
        if self.types.result_conflict is not None:
            left, right, line = self.types.result_conflict
            raise self.source.refuse(
                line, f"the method returns a {left} and a {right}", "return one type", self.name
            )
        if kind is None or kind == NULL:
            return wanted or None
        kind = "array<long>" if kind == EMPTY and not wanted else kind
        if wanted:
            kind = as_list(kind)
        if wanted and (not kind or join(wanted, kind) == wanted):
            return wanted
        if wanted or not travels(kind) or kind.startswith("collection"):
            what = f"is a {kind}" if kind else "is of a type that cannot be told"
            raise self.source.refuse(
                self.tree,
                f"the result {what}" + (f", and {wanted} is what the method says" if wanted else ""),
                'say what it is, as in -> "array<long>", and return that',
                self.name,
            )
        return kind

    def _check_views(self) -> None:
        """A row that travelled is as it was; in plain Python it has what was written to its field since."""
        for task, inputs in zip(self.raw, self.inputs, strict=True):
            for name in [i.name for i in inputs if task.writes and task.site is not None]:
                if task.site is not None and task.site.field in self.views.get(name, ()):
                    raise self.source.refuse(
                        task.line,
                        f"{name} was read before, and its field {task.site.field} is written here: it would still be as it was",
                        f"read the row again, or take a copy: {name}.copy()",
                        self.name,
                    )


def _line_of(body: list[ast.stmt], name: str) -> int:
    lines = [n.lineno for s in body for n in ast.walk(s) if isinstance(n, ast.Name) and n.id == name]
    return min(lines, default=0)
