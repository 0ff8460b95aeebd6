"""Sets have another order in every process: where it could be seen, in methods and in functions that they call."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from millpond.programs.compiler.composite import is_set
from millpond.programs.compiler.types import Types

HINT = "write sorted(...) around it, with no key=; for one of its items, min(...) or max(...)"
_SET_OPERATORS = (ast.BitOr, ast.BitAnd, ast.BitXor, ast.Sub)
_SET_METHODS = frozenset(
    [
        "add",
        "clear",
        "copy",
        "difference",
        "difference_update",
        "discard",
        "intersection",
        "intersection_update",
        "isdisjoint",
        "issubset",
        "issuperset",
        "remove",
        "symmetric_difference",
        "symmetric_difference_update",
        "union",
        "update",
    ]
)
"""All but pop."""
_ORDER_FREE = frozenset(["all", "any", "bool", "frozenset", "isinstance", "len", "set"])
_UNLESS_BY_KEY = frozenset(["max", "min", "sorted"])
"""Of items that a key makes equal, they take them as they come."""


def order_seen(body: Iterable[ast.AST], types: Types) -> Iterator[ast.expr]:
    """The sets in the text whose order could be seen, or that go where they cannot be followed."""
    for parent in (node for statement in body for node in ast.walk(statement)):
        for child in ast.iter_child_nodes(parent):
            if (
                isinstance(child, ast.expr)
                and may_be_set(child, types)
                and not _is_free(parent, child, types)
            ):
                yield child


def may_be_set(node: ast.expr, types: Types) -> bool:
    match node:
        case ast.Name(id=name, ctx=ast.Load()):
            return name in types.sets
        case ast.Name():
            return False
        case ast.IfExp(body=body, orelse=orelse):
            return may_be_set(body, types) or may_be_set(orelse, types)
        case ast.BoolOp(values=values):
            return any(may_be_set(value, types) for value in values)
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _SET_OPERATORS):
            return any(may_be_set(side, types) or _is_view(side) for side in (left, right))
        case ast.Call(func=ast.Attribute(value=base, attr=attr)) if attr in _SET_METHODS:
            given = types.method(base, attr)
            return may_be_set(base, types) and (not given or is_set(given))
    return is_set(types.of(node))


def _is_view(node: ast.expr) -> bool:
    """Whether it is what operators make a set of: the keys of a dict."""
    match node:
        case ast.Call(func=ast.Attribute(attr="keys" | "items"), args=[]):
            return True
    return False


def _is_free(parent: ast.AST, child: ast.expr, types: Types) -> bool:
    """Whether what a statement or expression does with a set is the same whatever its order."""
    match parent:
        case ast.Assign(targets=targets):
            return all(isinstance(target, ast.Name) for target in targets)
        case ast.AugAssign(target=ast.Name(id=name), op=op):
            return isinstance(op, _SET_OPERATORS) and name in types.sets
        case ast.BinOp(op=op):
            return isinstance(op, _SET_OPERATORS)
        case ast.Attribute(attr=attr):
            return attr in _SET_METHODS
        case ast.Call(func=ast.Attribute(value=base, attr=attr)):
            return attr in _SET_METHODS and may_be_set(base, types)
        case ast.Call(func=ast.Name(id="sum"), args=[items]):
            return types.item_of(items) in ("long", "boolean")
        case ast.Call(func=ast.Name(id=name), keywords=keywords):
            by_key = any(keyword.arg == "key" for keyword in keywords)
            return name in _ORDER_FREE or (name in _UNLESS_BY_KEY and not by_key)
    # What a method returns is told by its type.
    return isinstance(
        parent,
        ast.AnnAssign
        | ast.Assert
        | ast.BoolOp
        | ast.Compare
        | ast.Expr
        | ast.If
        | ast.IfExp
        | ast.Return
        | ast.UnaryOp
        | ast.While,
    )
