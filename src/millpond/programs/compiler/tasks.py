"""Tasks as text: the function that each becomes."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from millpond.programs.compiler.accesses import field_in, is_everywhere
from millpond.programs.compiler.fields import StateField
from millpond.programs.compiler.split import LEAVE, Raw
from millpond.programs.compiler.words import REJECT
from millpond.programs.graph import REJECTS, RETURNS

STATE = "mp_state"


def following(task: Raw) -> tuple[int, ...]:
    """The tasks that it may name as the next one."""
    found: set[int] = set()
    for node in (inner for statement in task.body for inner in ast.walk(statement)):
        match node:
            case ast.Call(func=ast.Name(id=word), args=[ast.Constant(value=int() as number), *_]) if (
                word == LEAVE
            ):
                found.add(number)
    return tuple(sorted(found))


def text_of(
    task: Raw, inputs: Sequence[Sequence[str]], own: Sequence[str], fields: dict[str, StateField]
) -> tuple[str, tuple[int, ...]]:
    """The source of a task, and for each line of it the line in the file. `inputs` are those of all tasks."""
    walk = _Body(inputs, fields)
    body = [walk.visit(statement) for statement in task.body]
    arguments = ast.arguments([], [ast.arg(a) for a in (STATE, *own)], None, [], [], None, [])
    tree = ast.FunctionDef("te", arguments, body, [], None, lineno=task.line, col_offset=0)
    module = ast.fix_missing_locations(ast.Module([tree], []))
    source = ast.unparse(module)
    lines = [task.line] * (source.count("\n") + 1)
    again = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.stmt)]
    before = [n for n in ast.walk(module) if isinstance(n, ast.stmt)]
    for new, old in zip(again, before, strict=True):
        lines[new.lineno - 1] = old.lineno
    return source, tuple(lines)


class _Body(ast.NodeTransformer):
    def __init__(self, inputs: Sequence[Sequence[str]], fields: dict[str, StateField]) -> None:
        self.inputs = inputs
        self.fields = fields

    def visit_Return(self, node: ast.Return) -> ast.AST:
        match node.value:
            case ast.Call(func=ast.Name(id=word), args=[ast.Constant(value=int() as number), *first]) if (
                word == LEAVE
            ):
                given = [self.visit(value) for value in first]
                names = self.inputs[number][len(first) :]
                return _ends(node, number, [*given, *(ast.Name(n, ast.Load()) for n in names)])
            case None:
                return _ends(node, RETURNS, [ast.Constant(None)])
        return _ends(node, RETURNS, [self.visit(node.value)])

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        match node.value:
            case ast.Call(func=ast.Name(id=word), args=[reason]) if word == REJECT:
                return _ends(node, REJECTS, [self.visit(reason)])
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        assert node.value is not None
        return ast.copy_location(ast.Assign([node.target], self.visit(node.value)), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if is_everywhere(node):
            return ast.copy_location(ast.Name(STATE, ast.Load()), node)
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if field_in(node, self.fields):
            return ast.copy_location(ast.Name(STATE, ast.Load()), node)
        return self.generic_visit(node)


def _ends(at: ast.AST, number: int, values: list[ast.expr]) -> ast.stmt:
    pair = ast.Tuple([ast.Constant(number), ast.Tuple(values, ast.Load())], ast.Load())
    return ast.copy_location(ast.Return(pair), at)
