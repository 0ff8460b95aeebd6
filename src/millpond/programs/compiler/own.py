"""State classes of a user's own, as they travel: their methods as text, and which of them only read."""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import FunctionType
from typing import Any, NamedTuple

from millpond.code.capture import Code, capture
from millpond.errors import MillpondError
from millpond.programs.elements.own import MADE_HERE, StateElement, types_of
from millpond.programs.graph import OwnClass
from millpond.programs.values import travels

_READING = frozenset(["copy", "get", "items", "keys", "values"])
MERGED = "merged"
"""What a class calls its function of two values of one key that makes one of them."""
_ASKING = frozenset(["len", "list", "sorted"])


class BadElement(Exception):
    """Why a class cannot be one, and what to do."""

    def __init__(self, why: str, hint: str) -> None:
        super().__init__(why)
        self.why = why
        self.hint = hint


class Own(NamedTuple):
    """A class, what of it travels, which methods only read, and what annotations say that methods give."""

    cls: type[StateElement[Any, Any]]
    code: OwnClass
    key: str
    value: str
    reading: frozenset[str]
    methods: dict[str, FunctionType]


def own_class(cls: type[StateElement[Any, Any]]) -> Own:
    """BadElement for a class that cannot travel, or that keeps what the pond does not see."""
    key, value = types_of(cls)
    if cls.__bases__ != (StateElement,) or key not in ("long", "string") or not travels(value):
        raise BadElement(
            f"{cls.__name__} does not say what its entries are",
            f"write class {cls.__name__}(mp.StateElement[int, float]), with no other base; keys are int or str, values int, float,"
            " bool, str, lists of these, or a vector",
        )
    methods: dict[str, FunctionType] = {}
    constants: dict[str, bool | int | float | str] = {}
    merged: Code | None = None
    for name, member in vars(cls).items():
        is_method = isinstance(member, FunctionType)
        if name == MERGED and is_method:
            merged = capture(member, "state element", MERGED)
            continue
        if name == "_abc_impl" or (name.startswith("__") and not is_method):
            continue  # made by Python
        if name in MADE_HERE or name.startswith("__"):
            raise BadElement(
                f"{cls.__name__} has a {name} of its own", "leave it out, or give it another name"
            )
        if is_method:
            methods[name] = member
        elif isinstance(member, bool | int | float | str):
            constants[name] = member
        else:
            raise BadElement(
                f"{cls.__name__}.{name} is neither a method nor a number or text",
                "write methods, def name(self, ...), over self.state",
            )
    trees = {name: _checked(cls, name, method, {*methods, *constants}) for name, method in methods.items()}
    codes = tuple(capture(method, "state element", "method") for method in methods.values())
    told = OwnClass(cls.__name__, (), codes, tuple(sorted(constants.items())), merged)
    return Own(cls, told, key, value, _reading(trees), methods)


def _checked(cls: type, name: str, method: FunctionType, known: set[str]) -> ast.FunctionDef:
    """The method's text. Its only state is `self.state`."""
    where = f"{cls.__name__}.{name} (line {method.__code__.co_firstlineno} of {method.__code__.co_filename})"
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method))).body[0]
    except (OSError, TypeError):
        raise BadElement(
            f"the source of {where} cannot be found", "define it in a file or a notebook cell"
        ) from None
    if not isinstance(tree, ast.FunctionDef) or not tree.args.args or tree.args.args[0].arg != "self":
        raise BadElement(f"{where} is no plain method", f"write def {name}(self, ...), without a decorator")
    of_self = {
        id(node.value): node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "self" and id(node) not in of_self:
            raise BadElement(f"{where} uses self as a value", "use self.state, and methods of the class")
    for found in of_self.values():
        if not isinstance(found.ctx, ast.Load):
            raise BadElement(
                f"{where} sets self.{found.attr}, which the pond does not see",
                "keep it in an entry: self.state[key] = value",
            )
        if found.attr not in known | {"state", "clear"}:
            raise BadElement(
                f"{where} uses self.{found.attr}, which is not there",
                "use self.state, and methods of the class",
            )
    return tree


def _reading(trees: dict[str, ast.FunctionDef]) -> frozenset[str]:
    """The methods that surely do nothing to `self.state` but look at it, nor do those that they call."""
    calls = {name: _called(tree) for name, tree in trees.items()}
    reading = {name for name, tree in trees.items() if _only_looks(tree)}
    while True:
        found = {name for name in reading if calls[name] <= reading}
        if found == reading:
            return frozenset(reading)
        reading = found


def _called(tree: ast.FunctionDef) -> set[str]:
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and node.attr != "state"
        and not node.attr.isupper()
    }


def _only_looks(tree: ast.FunctionDef) -> bool:
    harmless: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=base, ctx=ast.Load()):
                harmless.add(id(base))
            case ast.Call(func=ast.Attribute(value=base, attr=attr)) if attr in _READING:
                harmless.add(id(base))
            case ast.Call(func=ast.Name(id=name), args=[base]) if name in _ASKING:
                harmless.add(id(base))
            case ast.For(iter=base) | ast.comprehension(iter=base):
                harmless.add(id(base))
            case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[base]):
                harmless.add(id(base))
    return all(id(node) in harmless for node in ast.walk(tree) if _is_state(node))


def _is_state(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr="state"):
            return True
    return False


def capture_errors(cls: type[StateElement[Any, Any]]) -> Own:
    """As `own_class`; what cannot travel is a BadElement, too."""
    try:
        return own_class(cls)
    except MillpondError as error:
        raise BadElement(f"{cls.__name__}: {error.message}", error.hint) from None
