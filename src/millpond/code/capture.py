"""A user's functions on their way to the containers: source text and constants, nothing pickled.

A function is captured where the user wrote it, with the numbers and strings that it names, the plain functions that
it calls, and `math` and `numpy`. It is loaded where the state is, also years later from the journal.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import math
import symtable
import textwrap
from collections.abc import Callable, Collection, Mapping
from types import FunctionType, ModuleType
from typing import Any

import msgspec
import numpy as np

from millpond.errors import BadOption, BadRule

MODULES = ("math", "numpy")
CONSTANTS: dict[str, Callable[[str], Any]] = {
    "bool": lambda text: text == "True",
    "int": int,
    "float": float,
    "str": str,
}
SOURCE_BYTES_MAX = 64 << 10


OF_THE_MACHINE = (MemoryError, RecursionError, SystemError)
"""What user code raises where the machine has come to its end, not the code: no outcome, as it may not come again.

Short of memory, Python at times has none left to say so, and a SystemError is what comes out.
"""


OF_USER_CODE = (Exception, SystemExit, GeneratorExit)
"""What user code raises on its own account."""
DESCRIBED_MAX = 10_000


def described(error: BaseException) -> str:
    """What user code raised, in words that a message can carry, whatever the code made of it."""
    try:
        text = f"{type(error).__name__}: {error}"
    except OF_THE_MACHINE:
        raise
    except OF_USER_CODE:
        return type(error).__name__
    return text[:DESCRIBED_MAX].encode(errors="backslashreplace").decode()


class Code(msgspec.Struct, frozen=True):
    """Functions as text, the one called `name` among them, and what their global names stand for.

    A constant is a type and a text, so that NaN is equal to itself and 1 is not True.
    """

    name: str
    source: str
    constants: dict[str, tuple[str, str]] = {}
    modules: dict[str, str] = {}

    def load(
        self,
        wrap: Callable[[FunctionType], Any] = lambda function: function,
        rewrite: Callable[[ast.Module], ast.Module] = lambda tree: tree,
        given: Mapping[str, Any] | None = None,
        modules: Mapping[str, ModuleType] | None = None,
    ) -> Any:
        """The function; it and those that it calls go through `wrap`, the source of all through `rewrite`.

        `given` are global names that `rewrite` uses, `modules` stand for those of the same name.
        """
        names: dict[str, Any] = {
            name: CONSTANTS[kind](text) for name, (kind, text) in self.constants.items() if kind in CONSTANTS
        }
        for alias, module in self.modules.items():
            if module not in MODULES:
                raise BadRule(f"a rule may not import {module!r}", rule=self.name)
            names[alias] = (modules or {}).get(module) or importlib.import_module(module)
        try:
            tree = ast.fix_missing_locations(rewrite(ast.parse(self.source)))
            exec(compile(tree, f"<rule {self.name}>", "exec"), names)  # noqa: S102 - what a rule is
        except SyntaxError as error:
            raise BadRule(f"the rule {self.name!r} cannot be read: {error}", rule=self.name) from None
        if not isinstance(names.get(self.name), FunctionType):
            raise BadRule(f"the source of rule {self.name!r} does not define it", rule=self.name)
        for name, value in list(names.items()):
            if isinstance(value, FunctionType):
                names[name] = wrap(value)
        names.update(given or {})
        return names[self.name]


_RULES = {
    "update": "one of Millpond's, as mp.add(), or ",
    "compaction": "one of Millpond's, as mp.keep_all(), or ",
    "fetch": "one of Millpond's, as mp.count(), or ",
}
"""What may be given in place of a function, by what it is for."""


def capture(function: Any, role: str, option: str, given: Collection[str] = ()) -> Code:
    """A function as text. BadRule, with the reason, if it is no plain function that can travel.

    What the names in `given` stand for is left to whoever loads the function.
    """
    if not isinstance(function, FunctionType) or function.__module__ == "millpond.code.rules":
        raise BadOption(
            f"{option}={function!r} is no {role} {'rule' if role in _RULES else 'function'}",
            hint=f"give {_RULES.get(role, '')}a plain Python function",
            option=option,
        )
    found = _Captured(role, given)
    name = found.add(function)
    source = "\n\n".join(found.sources.values())
    if len(source) > SOURCE_BYTES_MAX:
        raise BadRule(f"the rule {name!r} is {len(source):,} characters long", rule=name)
    return Code(name, source, found.constants, found.modules)


class _Captured:
    def __init__(self, role: str, given: Collection[str]) -> None:
        self.role = role
        self.given = given
        self.sources: dict[str, str] = {}
        self.constants: dict[str, tuple[str, str]] = {}
        self.modules: dict[str, str] = {}
        self._functions: dict[str, FunctionType] = {}

    def add(self, function: FunctionType) -> str:
        name = "rule" if function.__name__ == "<lambda>" else function.__name__
        if self._functions.setdefault(name, function) is not function:
            raise self._refuse(name, f"calls two functions of the name {name!r}")
        if name not in self.sources:
            tree = self._definition(function, name)
            self._keep_defaults(function, tree, name)
            self.sources[name] = ast.unparse(tree)
            names_used = self._names_used(self.sources[name], name)
            self._check_attributes(tree, names_used | {name}, name)
            for used in sorted(names_used - set(self.given)):
                self._resolve(function, used, name)
        return name

    def _keep_defaults(self, function: FunctionType, tree: ast.stmt, name: str) -> None:
        """Puts values that never change in the place of defaults; all others would live on from call to call."""
        given = tree.value.args if isinstance(tree, ast.Assign) else tree.args  # type: ignore[attr-defined] # a lambda, or a function
        plain = [*given.posonlyargs, *given.args]
        values = dict(zip(reversed(plain), reversed(function.__defaults__ or ()), strict=False))
        by_name = function.__kwdefaults__ or {}
        values |= {
            argument: by_name[argument.arg] for argument in given.kwonlyargs if argument.arg in by_name
        }
        instead = {argument.arg: expression_of(value) for argument, value in values.items()}
        for argument, value in values.items():
            if instead[argument.arg] is None:
                raise BadRule(
                    f"the {self.role} rule {name!r} has a {type(value).__name__} for the default of {argument.arg}",
                    hint="let defaults be numbers, strings, None and tuples of these; make all else in the function",
                    rule=name,
                )
        first = len(plain) - len(given.defaults)
        given.defaults = [
            unless_said(said, instead[argument.arg])
            for argument, said in zip(plain[first:], given.defaults, strict=True)
        ]
        given.kw_defaults = [
            said and unless_said(said, instead[argument.arg])
            for argument, said in zip(given.kwonlyargs, given.kw_defaults, strict=True)
        ]

    def _check_attributes(self, tree: ast.stmt, known: set[str], name: str) -> None:
        """Functions and modules live on from call to call: nothing may be kept in them."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
                base: ast.expr = node
                while isinstance(base, ast.Attribute | ast.Subscript):
                    base = base.value
                if isinstance(base, ast.Name) and base.id in known:
                    raise self._refuse(name, f"sets {ast.unparse(node)}, which lives on from call to call")

    def _resolve(self, function: FunctionType, used: str, name: str) -> None:
        """Keeps what a global name of the function stands for."""
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if used in cells:
            value = cells[used].cell_contents
        elif used in function.__globals__:
            value = function.__globals__[used]
        elif hasattr(builtins, used):
            return
        else:
            raise self._refuse(name, f"uses {used!r}, which is not defined")
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, ModuleType) and value.__name__ in MODULES:
            kept: Any = self.modules.setdefault(used, value.__name__) == value.__name__
        elif isinstance(value, FunctionType):
            kept = self.add(value) == used
        elif isinstance(value, (bool, int, float, str)):
            constant = (type(value).__name__, str(value))
            kept = constant[0] in CONSTANTS and self.constants.setdefault(used, constant) == constant
        else:
            what = (
                f"the module {value.__name__}"
                if isinstance(value, ModuleType)
                else f"a {type(value).__name__}"
            )
            raise self._refuse(name, f"uses {used!r}, {what}")
        if not kept:
            raise self._refuse(name, f"and a function that it calls mean different things by {used!r}")

    def _refuse(self, name: str, why: str) -> BadRule:
        return BadRule(
            f"the {self.role} rule {name!r} {why}",
            hint="a rule may use its arguments, numbers and strings, math, numpy, and plain functions that do the same",
            rule=name,
        )

    def _definition(self, function: FunctionType, name: str) -> ast.stmt:
        """The function's definition, without annotations and docstring."""
        try:
            # A function among the arguments of a call begins in the middle of a line.
            source = textwrap.dedent(inspect.getsource(function)).strip()
        except (OSError, TypeError):
            raise BadRule(
                f"the source of the {self.role} rule {name!r} cannot be found",
                hint="define it in a file or a notebook cell, not in text that is executed",
                rule=name,
            ) from None
        if function.__name__ == "<lambda>":
            value = self._lambda(source, function)
            return ast.Assign([ast.Name("rule", ast.Store())], value, lineno=1, col_offset=0)
        try:
            nodes = list(ast.walk(ast.parse(source)))
        except SyntaxError:
            nodes = []
        tree = next((node for node in nodes if getattr(node, "name", None) == name), None)
        if not isinstance(tree, ast.FunctionDef):
            raise self._refuse(name, "is no plain function, or its file has changed since it was loaded")
        if hasattr(function, "__wrapped__") or not all(map(self._is_given, tree.decorator_list)):
            raise self._refuse(name, "has a decorator, which would not travel with it")
        tree.decorator_list = []
        tree.returns = None
        for argument in ast.walk(tree.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        if ast.get_docstring(tree) is not None:
            tree.body = tree.body[1:] or [ast.Pass()]
        for node in ast.walk(tree):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or "."]
            for module in modules:
                if module not in MODULES:
                    raise self._refuse(name, f"imports {module!r}")
        return tree

    def _is_given(self, decorator: ast.expr) -> bool:
        """Whether it is the name, or belongs to the module, that made this a rule."""
        while isinstance(decorator, ast.Call | ast.Attribute):
            decorator = decorator.func if isinstance(decorator, ast.Call) else decorator.value
        return isinstance(decorator, ast.Name) and decorator.id in self.given

    def _lambda(self, source: str, function: FunctionType) -> ast.expr:
        """The one lambda of the source that it can be: of several with the same arguments it cannot be told."""
        arguments = list(function.__code__.co_varnames[: function.__code__.co_argcount])
        found: dict[str, ast.Lambda] = {}
        at = source.find("lambda")
        while at >= 0:
            # The lines that hold it may be half a statement: the longest text from there on that can be read.
            for cut in range(len(source), at, -1):
                try:
                    node = ast.parse(source[at:cut], mode="eval").body
                except SyntaxError:
                    continue
                node = node.elts[0] if isinstance(node, ast.Tuple) else node
                if isinstance(node, ast.Lambda) and [a.arg for a in node.args.args] == arguments:
                    found[ast.unparse(node)] = node
                break
            at = source.find("lambda", at + 1)
        if len(found) != 1:
            raise BadRule(
                f"the source of the {self.role} rule cannot be told apart from what is around it",
                hint="write it as a function: def rule(...): ...",
                rule="rule",
            )
        return next(iter(found.values()))

    def _names_used(self, source: str, name: str) -> set[str]:
        """The names that a definition takes from outside, as Python itself reads them."""
        used: set[str] = set()
        tables = list(symtable.symtable(source, "<rule>", "exec").get_children())
        while tables:
            table = tables.pop()
            tables += table.get_children()
            # Symbol.is_global takes a function that is called "top" for the module.
            in_function = table.get_globals() if isinstance(table, symtable.Function) else None
            for symbol in table.get_symbols():
                name_used = symbol.get_name()
                is_global = symbol.is_global() if in_function is None else name_used in in_function
                if is_global and symbol.is_assigned():
                    raise self._refuse(name, f"sets the global name {name_used!r}")
                if is_global and symbol.is_referenced():
                    used.add(name_used)
        return used - {name}


def expression_of(value: Any) -> ast.expr | None:
    """An expression for a value that never changes; None if it is none that a default may be."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, tuple):
        parts = [expression_of(part) for part in value]
        return None if None in parts else ast.Tuple([part for part in parts if part], ast.Load())
    if type(value) is float and not math.isfinite(value):
        return ast.Call(ast.Name("float", ast.Load()), [ast.Constant(str(value))], [])
    if value is None or type(value) in (bool, int, float, str, bytes):
        return ast.Constant(value)
    name = getattr(value, "__name__", "")
    return ast.Name(name, ast.Load()) if name and getattr(builtins, name, None) is value else None


def unless_said(said: ast.expr, value: ast.expr | None) -> ast.expr:
    """A default as it was written, if that says all: else its value, as what it was made of would not be there.

    ValueError if there is none.
    """
    try:
        ast.literal_eval(said)
    except ValueError:
        if value is None:
            raise
        return value
    return said
