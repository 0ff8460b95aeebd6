"""Questions about, and small changes to, the text of methods that need no knowledge of fields."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

N = TypeVar("N", bound=ast.AST)
Loop = ast.For | ast.While


def bound_names(node: ast.AST) -> Counter[str]:
    """How often each name is set at or below the node."""
    return Counter(
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)
    )


def bound_in(statements: Iterable[ast.AST]) -> Counter[str]:
    return sum((bound_names(s) for s in statements), Counter[str]())


def loaded(node: ast.AST) -> set[str]:
    """The names that are read at or below the node, without those that a comprehension or a lambda in it sets itself."""
    if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
        own = {name for generator in node.generators for name in bound_names(generator.target)}
        inner = set[str]().union(*(loaded(child) for child in ast.iter_child_nodes(node)))
        return inner - own
    if isinstance(node, ast.Lambda):
        return loaded(node.body) - {a.arg for a in node.args.args}
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Load) else set()
    return set[str]().union(*(loaded(child) for child in ast.iter_child_nodes(node)))


def name(text: str, at: ast.AST) -> ast.Name:
    return ast.copy_location(ast.Name(text, ast.Load()), at)


def assign(target: str, value: ast.expr, at: ast.AST) -> ast.Assign:
    node = ast.Assign([ast.Name(target, ast.Store())], value)
    return ast.fix_missing_locations(ast.copy_location(node, at))


def placed(node: N, at: ast.AST) -> N:
    return ast.fix_missing_locations(ast.copy_location(node, at))


def constant(value: object, at: ast.AST) -> ast.Constant:
    return placed(ast.Constant(value), at)  # type: ignore[arg-type] # numbers, text, None


def is_pure_sum(node: ast.expr) -> bool:
    """Whether an expression of names, constants, + - * and text cannot fail for want of a value: it may run early."""
    match node:
        case ast.Name() | ast.Constant():
            return True
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult()):
            return is_pure_sum(node.left) and is_pure_sum(node.right)
        case ast.UnaryOp():
            return is_pure_sum(node.operand)
        case ast.JoinedStr():
            return all(is_pure_sum(v) for v in node.values)
        case ast.FormattedValue():
            return is_pure_sum(node.value)
    return False


class Renaming(ast.NodeTransformer):
    """Puts other names, or constants, in the place of names."""

    def __init__(self, given: Mapping[str, ast.expr]) -> None:
        self.given = given

    def visit_Name(self, node: ast.Name) -> ast.AST:
        instead = self.given.get(node.id)
        if instead is None:
            return node
        if isinstance(instead, ast.Name):
            return ast.copy_location(ast.Name(instead.id, node.ctx), node)
        return ast.copy_location(copy.deepcopy(instead), node)


def renamed(statements: Sequence[ast.stmt], given: Mapping[str, ast.expr]) -> list[ast.stmt]:
    """A copy of statements with other names."""
    walk = Renaming(given)
    return [walk.visit(copy.deepcopy(statement)) for statement in statements]


class Replacing(ast.NodeTransformer):
    """Puts other nodes in the place of nodes."""

    def __init__(self, given: Mapping[int, ast.expr]) -> None:
        self.given = given

    def visit(self, node: ast.AST) -> ast.AST:
        instead = self.given.get(id(node))
        if instead is not None:
            return instead
        found: ast.AST = self.generic_visit(node)
        return found


def own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement, without the statements inside it."""
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt | ast.ExceptHandler):
            yield child


def has(node: ast.AST, *kinds: type[ast.AST]) -> bool:
    return any(isinstance(n, kinds) for n in ast.walk(node))


def always_returns(statements: Sequence[ast.stmt]) -> bool:
    """Whether no path leads beyond the statements, but out of the method."""
    for statement in statements:
        if isinstance(statement, ast.Return | ast.Raise):
            return True
        if (
            isinstance(statement, ast.If)
            and statement.orelse
            and always_returns(statement.body)
            and always_returns(statement.orelse)
        ):
            return True
    return False


def never_goes_on(statement: ast.stmt) -> bool:
    """Whether nothing that follows the statement in its block is come to."""
    if isinstance(statement, ast.If):
        return all(block and never_goes_on(block[-1]) for block in (statement.body, statement.orelse))
    return isinstance(statement, ast.Return | ast.Raise | ast.Break | ast.Continue)
