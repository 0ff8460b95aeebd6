"""Partitioned matrices by column: those of which methods access columns. They are kept turned, with columns in the place of rows."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from millpond.errors import BadProgram
from millpond.programs.compiler.accesses import field_in
from millpond.programs.compiler.fields import StateField
from millpond.programs.compiler.source import ProgramSource


class _Seen(NamedTuple):
    """An access to a whole row or column."""

    by: str
    node: ast.expr
    method: str


def turned(
    source: ProgramSource, fields: Mapping[str, StateField], methods: Mapping[str, ast.FunctionDef]
) -> dict[str, StateField]:
    """The fields, of which matrices whose columns are accessed are by column. Their accesses in the methods are turned.

    BadProgram for one of which rows are accessed, too.
    """
    found = dict(fields)
    for name, field in fields.items():
        if field.element != "matrix" or field.kind != "partitioned":
            continue
        seen = [each for method, tree in methods.items() for each in _seen(tree, name, method)]
        columns = [each for each in seen if each.by == "column"]
        rows = [each for each in seen if each.by == "row"]
        if columns and rows:
            raise _conflict(source, name, rows[0], columns[0])
        if columns:
            found[name] = field._replace(by_column=True)
    by_column = {name: field for name, field in found.items() if field.by_column}
    if by_column:
        for method, tree in methods.items():
            _Turning(source, by_column, method).visit(tree)
            ast.fix_missing_locations(tree)
    return found


def _seen(tree: ast.AST, field: str, method: str) -> Iterator[_Seen]:
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=base, slice=place) if _is(base, field):
                if is_column(place):
                    yield _Seen("column", node, method)
                elif not isinstance(place, ast.Tuple):
                    yield _Seen("row", node, method)
            case ast.Call(func=ast.Attribute(value=base, attr="column")) if _is(base, field):
                yield _Seen("column", node, method)
            case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()], comparators=[base]) if _is(base, field):
                if not isinstance(left, ast.Tuple):
                    yield _Seen("row", node, method)


def is_column(place: ast.expr) -> bool:
    """Whether it is `:, column`."""
    match place:
        case ast.Tuple(elts=[ast.Slice(lower=None, upper=None, step=None), _]):
            return True
    return False


def _is(node: ast.AST, field: str) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=attr):
            return attr == field
    return False


def _conflict(source: ProgramSource, name: str, row: _Seen, column: _Seen) -> BadProgram:
    first, last = sorted((row, column), key=lambda each: each.node.lineno)
    return source.refuse(
        last.node,
        f"self.{name} is accessed by {first.by} on line {first.node.lineno}, in {first.method}, and by {last.by} here:"
        " conflicting partitioning",
        f"access it by one of them, as in self.{name}[row] or self.{name}[:, column]; or keep a second matrix, the other way round",
        last.method,
    )


class _Turning(ast.NodeTransformer):
    def __init__(self, source: ProgramSource, fields: dict[str, StateField], method: str) -> None:
        self.source = source
        self.fields = fields
        self.method = method

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if field_in(node.value, self.fields):
            node.slice = self.place(node.slice)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Attribute(value=base, attr="column"), args=[column], keywords=[]) if (
                field_in(base, self.fields)
            ):
                whole = ast.copy_location(ast.Subscript(base, column, ast.Load()), node)
                copied = ast.Attribute(whole, "copy", ast.Load())
                return ast.copy_location(ast.Call(copied, [], []), node)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()], comparators=[base]) if field_in(
                base, self.fields
            ):
                node.left = self.place(left)
        return node

    def place(self, place: ast.expr) -> ast.expr:
        """Column before row. What both do to find out must not show."""
        match place:
            case ast.Tuple(elts=[ast.Slice(), column]) if is_column(place):
                return column
            case ast.Tuple(elts=[row, column]):
                if _does_something(row) and _does_something(column):
                    raise self.source.refuse(
                        place,
                        f"row and column of {ast.unparse(place)} both come of something else",
                        "put the row into a variable before",
                        self.method,
                    )
                return ast.copy_location(ast.Tuple([column, row], place.ctx), place)
        return place


def _does_something(node: ast.expr) -> bool:
    return any(isinstance(inner, ast.Call | ast.Attribute | ast.Subscript) for inner in ast.walk(node))
