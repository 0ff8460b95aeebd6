"""What plain functions that methods call may not do: they run again, and elsewhere, as the methods do."""

from __future__ import annotations

import ast
import importlib
import types as python
from collections.abc import Iterator
from typing import Any, NamedTuple

from millpond.code.capture import MODULES, Code
from millpond.programs.compiler.limits import (
    NUMPY_MODULES,
    REFUSED_BUILTINS,
    REFUSED_IN_NUMPY,
    REFUSED_OF_ARRAYS,
    why_not_module,
)
from millpond.programs.compiler.order import HINT, may_be_set, order_seen
from millpond.programs.compiler.types import Types


class Fault(NamedTuple):
    """What is wrong, why, and what to do."""

    what: str
    why: str
    hint: str


def fault_in(code: Code) -> Fault | None:
    """The first thing that a captured function, or one that it calls, may not do."""
    tree = ast.parse(code.source)
    aliases = dict(code.modules)
    return next((fault for look in (_reaching, _ordered) for fault in look(tree, aliases)), None)


def _reaching(tree: ast.Module, aliases: dict[str, str]) -> Iterator[Fault]:
    """Chance, the clock and files, by builtins and by numpy."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname or alias.name: alias.name for alias in node.names}
    of_attributes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module="numpy", names=names):
                for alias in names:
                    yield from _of_numpy("numpy", alias.name, f"from numpy import {alias.name}")
            case ast.Name(id=name) if name in REFUSED_BUILTINS:
                yield Fault(name, *REFUSED_BUILTINS[name])
            case ast.Name(id=name) | ast.Attribute(attr=name) if id(node) not in of_attributes and _is_module(
                _module(node, aliases)
            ):
                yield Fault(
                    name, "a module is used as a value", f"write what is used of it, as in {name}.name(...)"
                )
            case ast.Attribute(value=ast.Name(id="self"), attr=attr) if not attr.startswith("__"):
                pass  # a method of the user's own class
            case ast.Attribute(attr=attr) if attr.startswith("_"):
                yield Fault(attr, "it is private to what it belongs to", "use its public operations")
            case ast.Attribute(attr=attr) if attr in REFUSED_OF_ARRAYS:
                yield Fault(ast.unparse(node), *REFUSED_OF_ARRAYS[attr])
            case ast.Attribute(value=base, attr=attr):
                module = _module(base, aliases)
                if module.split(".")[0] == "numpy":
                    yield from _of_numpy(module, attr, ast.unparse(node))
            case ast.Constant(value=str() as text) if text.lstrip("<>=").startswith(("datetime64", "M8")):
                yield Fault(repr(text), *REFUSED_IN_NUMPY["datetime64"])


def _module(node: ast.expr, aliases: dict[str, str]) -> str:
    """The name of the module that an expression is; empty if it is none."""
    match node:
        case ast.Name(id=name):
            return aliases.get(name, "")
        case ast.Attribute(value=base, attr=attr):
            outer = _module(base, aliases)
            return f"{outer}.{attr}" if outer else ""
    return ""


def _is_module(name: str) -> bool:
    """Of math, numpy and what is in them."""
    outer, *inner = name.split(".")
    found: Any = importlib.import_module(outer) if outer in MODULES else None
    for part in inner:
        found = getattr(found, part, None)
    return isinstance(found, python.ModuleType)


def _of_numpy(module: str, attr: str, text: str) -> Iterator[Fault]:
    if attr in REFUSED_IN_NUMPY:
        yield Fault(text, *REFUSED_IN_NUMPY[attr])
    elif _is_module(f"{module}.{attr}") and f"{module}.{attr}" not in NUMPY_MODULES:
        yield Fault(text, *why_not_module(f"{module}.{attr}"))


def _ordered(tree: ast.Module, aliases: dict[str, str]) -> Iterator[Fault]:
    """Sets whose order shows, or that are given back to where nobody knows that they are sets."""
    types = Types({}, {}, {})
    types.infer(tree.body)
    for found in order_seen([tree], types):
        yield Fault(ast.unparse(found), "a set has another order in every process", HINT)
    for node in ast.walk(tree):
        if isinstance(node, ast.Return) and node.value is not None and may_be_set(node.value, types):
            yield Fault(
                ast.unparse(node),
                "a set has another order in every process, and cannot be followed out of a function",
                "return sorted(...) of it",
            )
