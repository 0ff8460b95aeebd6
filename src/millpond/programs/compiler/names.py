"""What the names in a method stand for: numbers and text are put in, Millpond's own words are marked, all else is refused."""

from __future__ import annotations

import ast
import builtins
import copy
import dis
import inspect
import math
import types
from typing import Any

from millpond.code.capture import Code, capture
from millpond.errors import MillpondError, Rejected
from millpond.programs.annotations import everywhere, reject
from millpond.programs.compiler.composite import composite_of
from millpond.programs.compiler.fields import StateField, evaluated, type_of
from millpond.programs.compiler.functions import fault_in
from millpond.programs.compiler.limits import BUILTINS, REFUSED_BUILTINS, why_not_module
from millpond.programs.compiler.source import ProgramSource
from millpond.programs.compiler.syntax import bound_names
from millpond.programs.compiler.words import WORDS


class Resolver:
    """Resolves the names of all methods of a class; `functions` are the plain functions that they call."""

    def __init__(self, source: ProgramSource, fields: dict[str, StateField]) -> None:
        self.source = source
        self.fields = fields
        self.functions: dict[str, Code] = {}
        self.returns: dict[str, str] = {}

    def method(self, name: str) -> ast.FunctionDef:
        """A copy of a method without docstring, its names resolved."""
        tree = copy.deepcopy(self.source.methods[name])
        if ast.get_docstring(tree) is not None:
            tree.body = tree.body[1:] or [ast.copy_location(ast.Pass(), tree)]
        walk = _Names(self, name, tree)
        tree.body = [walk.visit(statement) for statement in tree.body]
        return ast.fix_missing_locations(tree)


class _Names(ast.NodeTransformer):
    def __init__(self, resolver: Resolver, method: str, tree: ast.FunctionDef) -> None:
        self.resolver = resolver
        self.source = resolver.source
        self.name = method
        self.names = resolver.source.globals_of(method)
        inner = [n for n in ast.walk(tree) if isinstance(n, ast.arg)]
        self.local = {a.arg for a in inner} | set(bound_names(tree)) - {"self"}

    def refuse(self, node: ast.AST, why: str, hint: str = "") -> MillpondError:
        return self.source.refuse(node, why, hint, self.name)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        hint = evaluated(self.source, node.annotation, self.names, self.name)
        kind = type_of(hint) or composite_of(hint, type_of)
        target, value = self.visit(node.target), self.visit(node.value) if node.value else None
        if value is None:
            return ast.copy_location(ast.Pass(), node)
        if not isinstance(target, ast.Name):
            return ast.copy_location(ast.Assign([target], value), node)
        return ast.copy_location(ast.AnnAssign(target, ast.Constant(kind), value, 1), node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if not isinstance(node.value, bool | int | float | str | type(None)):
            raise self.refuse(node, f"{node.value!r} cannot travel", "use numbers, text and lists")
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return self.of_self(node)
        found = self.looked_up(node)
        if found is not _LOCAL:
            return self.meaning(node, found)
        if node.attr.startswith("_"):
            raise self.refuse(
                node, f"{node.attr} is private to what it belongs to", "use its public operations"
            )
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id == "self" or node.id in self.local:
            if node.id == "self":
                raise self.refuse(node, "self is used as a value", "use its fields and methods")
            return node
        return self.meaning(node, self.looked_up(node))

    def of_self(self, node: ast.Attribute) -> ast.AST:
        if node.attr in self.resolver.fields or node.attr in self.source.methods:
            return node
        if node.attr in self.source.attributes and isinstance(node.ctx, ast.Load):
            return ast.copy_location(ast.Constant(self.source.attributes[node.attr]), node)
        raise self.refuse(
            node,
            f"self.{node.attr} is state that is in no state class",
            f"add a field to the class, as in {node.attr}: mp.Partitioned[mp.Map[str, int]]",
        )

    def looked_up(self, node: ast.expr) -> Any:
        """What a global name, or an attribute of a module, stands for; _LOCAL for all else."""
        if isinstance(node, ast.Attribute):
            value = self.looked_up(node.value)
            if not isinstance(value, types.ModuleType):
                return (
                    _LOCAL if value is _LOCAL or not isinstance(value, type) else self.of_class(node, value)
                )
            if not hasattr(value, node.attr):
                raise self.refuse(node, f"the module {value.__name__} has no {node.attr}")
            return getattr(value, node.attr)
        if not isinstance(node, ast.Name) or node.id in self.local or node.id == "self":
            return _LOCAL
        if node.id in self.names:
            return self.names[node.id]
        if hasattr(builtins, node.id):
            return getattr(builtins, node.id)
        raise self.refuse(node, f"{node.id} is not defined")

    def of_class(self, node: ast.Attribute, value: type) -> Any:
        if getattr(builtins, value.__name__, None) is value:
            return _LOCAL
        why, hint = why_not_module(value.__module__)
        raise self.refuse(node, f"{ast.unparse(node)}: {why}", hint)

    def meaning(self, node: ast.expr, value: Any) -> ast.AST:
        """What takes the place of a name that stands for something outside of the method."""
        made: ast.expr
        own_name = str(getattr(value, "__name__", ""))
        if isinstance(value, bool | int | float | str | type(None)):
            made = ast.Constant(value)
        elif _word(value):
            made = ast.Name(_word(value), ast.Load())
        elif isinstance(value, types.ModuleType):
            why, hint = why_not_module(value.__name__)
            raise self.refuse(
                node, f"the module {value.__name__} is used as a value" if value is math else why, hint
            )
        elif getattr(math, own_name, None) is value:
            made = ast.Attribute(ast.Name("math", ast.Load()), own_name, ast.Load())
        elif getattr(builtins, own_name, None) is value:
            self.check_builtin(node, own_name)
            made = ast.Name(own_name, ast.Load())
        elif isinstance(value, types.FunctionType):
            made = ast.Name(self.function(node, value), ast.Load())
        else:
            raise self.outside(node, value)
        return ast.copy_location(made, node)

    def outside(self, node: ast.expr, value: Any) -> MillpondError:
        text = ast.unparse(node)
        module = getattr(value, "__module__", None) or type(value).__module__
        if callable(value):
            # A bound method, as of random's hidden generator, tells its module by its owner.
            owner = getattr(value, "__self__", None)
            module = (
                module if owner is None or isinstance(owner, types.ModuleType) else type(owner).__module__
            )
            why, hint = why_not_module(module)
            return self.refuse(node, f"{text}: {why}", hint)
        return self.refuse(
            node,
            f"{text} is a {type(value).__name__} outside of the class: state that is in no state class",
            "make it a field of the class, or an argument; numbers and text can be used as they are",
        )

    def check_builtin(self, node: ast.expr, name: str) -> None:
        if name not in BUILTINS:
            why, hint = REFUSED_BUILTINS.get(
                name, (f"{name} has no place in a program", "write out what it does")
            )
            raise self.refuse(node, f"{name}: {why}", hint)

    def function(self, node: ast.expr, function: types.FunctionType) -> str:
        """Takes a plain function along, with those that it calls."""
        if inspect.iscoroutinefunction(function):
            raise self.refuse(node, f"{function.__name__} is async", "call plain functions")
        for used, module in _from_outside(function).items():
            if module in (reject, everywhere, Rejected):
                raise self.refuse(
                    node,
                    f"{function.__name__} uses {used}: what a function does to the call cannot be told",
                    f"let it return what it finds, and use {used} in a method",
                )
            if isinstance(module, types.ModuleType) and module.__name__ not in ("math", "numpy"):
                why, hint = why_not_module(module.__name__)
                raise self.refuse(node, f"{function.__name__} uses {used}: {why}", hint)
        try:
            code = capture(function, "program", "function")
        except MillpondError as error:
            raise self.refuse(
                node, f"{function.__name__} cannot be called here: {error.message}", error.hint
            ) from None
        fault = fault_in(code)
        if fault is not None:
            raise self.refuse(node, f"{function.__name__} uses {fault.what}: {fault.why}", fault.hint)
        if self.resolver.functions.setdefault(code.name, code) != code:
            raise self.refuse(node, f"two functions are called {code.name}", "rename one of them")
        returns = getattr(function, "__annotations__", {}).get("return")
        annotation = ast.Constant(returns) if isinstance(returns, str) else None
        told: Any = evaluated(self.source, annotation, function.__globals__) if annotation else returns
        self.resolver.returns[code.name] = type_of(told) or composite_of(told, type_of)
        return code.name


def _from_outside(function: types.FunctionType) -> dict[str, Any]:
    """What the names stand for that a function has from around it."""
    loaded = [i.argval for i in dis.get_instructions(function) if i.opname == "LOAD_GLOBAL"]
    found = {name: function.__globals__[name] for name in loaded if name in function.__globals__}
    return found | dict(inspect.getclosurevars(function).nonlocals)


def _word(value: Any) -> str:
    try:
        return WORDS.get(value, "")
    except TypeError:  # not hashable
        return ""


class _Local:
    """Stands for what the method itself has set."""


_LOCAL = _Local()
