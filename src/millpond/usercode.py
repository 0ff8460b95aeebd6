"""A user's functions on their way to the containers: source text and constants, nothing pickled.

A function is captured where the user wrote it, with the numbers and strings that it names, the plain functions that
it calls, and `math` and `numpy`. It is loaded where the state is, also years later from the journal.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import msgspec
import numpy as np

from millpond.errors import BadOption, BadRule

MODULES = ("math", "numpy")
SOURCE_BYTES_MAX = 64 << 10


class Code(msgspec.Struct, frozen=True):
    """Functions as text, the one called `name` among them, and what their global names stand for."""

    name: str
    source: str
    constants: dict[str, bool | int | float | str] = {}
    modules: dict[str, str] = {}

    def load(self, wrap: Callable[[FunctionType], Any] = lambda function: function) -> Any:
        """The function; it and those that it calls go through `wrap`."""
        names: dict[str, Any] = dict(self.constants)
        for alias, module in self.modules.items():
            if module not in MODULES:
                raise BadRule(f"a rule may not import {module!r}", rule=self.name)
            names[alias] = importlib.import_module(module)
        try:
            exec(compile(self.source, f"<rule {self.name}>", "exec"), names)  # noqa: S102 - what a rule is
        except SyntaxError as error:
            raise BadRule(f"the rule {self.name!r} cannot be read: {error}", rule=self.name) from None
        if not isinstance(names.get(self.name), FunctionType):
            raise BadRule(f"the source of rule {self.name!r} does not define it", rule=self.name)
        for name, value in list(names.items()):
            if isinstance(value, FunctionType):
                names[name] = wrap(value)
        return names[self.name]


def capture(function: Any, role: str, option: str) -> Code:
    """A function as text. BadRule, with the reason, if it is no plain function that can travel."""
    if not isinstance(function, FunctionType) or function.__module__ == "millpond.rules":
        raise BadOption(
            f"{option}={function!r} is no {role} rule",
            hint="give one of Millpond's, as in mp.put() or mp.latest(), or a plain Python function",
            option=option,
        )
    found = _Captured(role)
    name = found.add(function)
    source = "\n\n".join(found.sources.values())
    if len(source) > SOURCE_BYTES_MAX:
        raise BadRule(f"the rule {name!r} is {len(source):,} characters long", rule=name)
    return Code(name, source, found.constants, found.modules)


class _Captured:
    def __init__(self, role: str) -> None:
        self.role = role
        self.sources: dict[str, str] = {}
        self.constants: dict[str, bool | int | float | str] = {}
        self.modules: dict[str, str] = {}
        self._functions: dict[str, FunctionType] = {}

    def add(self, function: FunctionType) -> str:
        name = "rule" if function.__name__ == "<lambda>" else function.__name__
        if self._functions.setdefault(name, function) is not function:
            raise self._refuse(name, f"calls two functions of the name {name!r}")
        if name not in self.sources:
            tree = _definition(function, name, self.role)
            self.sources[name] = ast.unparse(tree)
            for used in sorted(_names_used(tree)):
                self._resolve(function, used, name)
        return name

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
            kept = repr(self.constants.setdefault(used, value)) == repr(value)
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


def _definition(function: FunctionType, name: str, role: str) -> ast.stmt:
    """The function's definition, without decorators, annotations and docstring."""
    try:
        # A function among the arguments of a call begins in the middle of a line.
        source = textwrap.dedent(inspect.getsource(function)).strip()
    except (OSError, TypeError):
        raise BadRule(
            f"the source of the {role} rule {name!r} cannot be found",
            hint="define it in a file or a notebook cell, not in text that is executed",
            rule=name,
        ) from None
    if function.__name__ == "<lambda>":
        return ast.Assign(
            [ast.Name("rule", ast.Store())], _lambda(source, function, role), lineno=1, col_offset=0
        )
    tree = next((node for node in ast.walk(ast.parse(source)) if getattr(node, "name", None) == name), None)
    if not isinstance(tree, ast.FunctionDef):
        raise BadRule(f"the {role} rule {name!r} is no plain function", rule=name)
    tree.decorator_list = []
    tree.returns = None
    for argument in ast.walk(tree.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:] or [ast.Pass()]
    return tree


def _lambda(source: str, function: FunctionType, role: str) -> ast.expr:
    """The one lambda of the source that it can be: of several with the same arguments it cannot be told."""
    found: list[ast.Lambda] = []
    for cut in range(len(source), 0, -1):
        # The lines that hold the lambda may be half a statement.
        try:
            tree = ast.parse(source[source.index("lambda") : cut] if cut < len(source) else source)
        except (SyntaxError, ValueError):
            continue
        arguments = list(function.__code__.co_varnames[: function.__code__.co_argcount])
        found = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Lambda) and [a.arg for a in node.args.args] == arguments
        ]
        break
    if len(found) != 1:
        raise BadRule(
            f"the source of the {role} rule cannot be told apart from what is around it",
            hint="write it as a function: def rule(...): ...",
            rule="rule",
        )
    return found[0]


def _names_used(tree: ast.AST) -> set[str]:
    """The names that the definition reads and does not set itself."""
    read = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    bound = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    bound |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    bound |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    bound |= {n.asname or n.name for n in ast.walk(tree) if isinstance(n, ast.alias)}
    return read - bound
