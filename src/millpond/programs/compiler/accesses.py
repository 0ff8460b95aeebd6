"""Where a method accesses state: by key, in the lane of its row, or everywhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Literal, NamedTuple

from millpond.errors import BadProgram
from millpond.programs.compiler.fields import StateField
from millpond.programs.compiler.source import ProgramSource
from millpond.programs.compiler.words import EVERYWHERE

MUTATORS = frozenset(
    [
        "add",
        "assign",
        "clear",
        "pop",
        "append",
        "extend",
        "insert",
        "remove",
        "sort",
        "reverse",
        "update",
        "discard",
        "setdefault",
        "popitem",
    ]
)
KEYED = ("get", "pop")


OWN_LANE, PASSED = "millpond_lane", "millpond_passed"
"""Marks on `self.field`: the variable with the key of a lane that was settled on before; that its key was noted before."""


class AccessAt(NamedTuple):
    """One access in the text: `key` is its expression, where it is by key.

    `lane` is the variable that has the key of the lane, where that is not the one of the row by now. An access that is
    `passed` came before others in Python's order, though it is carried out after them.
    """

    field: str
    access: Literal["partitioned", "lane", "everywhere"]
    key: ast.expr | None
    node: ast.expr
    lane: str = ""
    passed: bool = False


class Site(NamedTuple):
    """A place in the state: a field, by a key, which is in a variable, in the lane of one, or everywhere."""

    field: str
    access: Literal["partitioned", "lane", "everywhere"]
    key: str


def field_in(node: ast.AST, fields: dict[str, StateField]) -> str:
    """The field, if the node is `self.field`."""
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=attr) if attr in fields:
            return attr
    return ""


def is_everywhere(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=word)):
            return word == EVERYWHERE
    return False


class Accesses:
    """Finds accesses in the text of one method."""

    def __init__(self, source: ProgramSource, fields: dict[str, StateField], method: str) -> None:
        self.source = source
        self.fields = fields
        self.method = method

    def all(self, node: ast.AST) -> list[AccessAt]:
        """Every access at or below the node, in the order of the text."""
        return list(self._walk(node))

    def _walk(self, node: ast.AST) -> Iterator[AccessAt]:
        match node:
            case ast.Call(func=ast.Name(id=word)) if word == EVERYWHERE:
                yield self._global(node)
                return
            case (
                ast.Subscript(value=base) | ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[base])
            ) if self._is_own(base):
                raise self._not_a_method(node, field_in(base, self.fields))
            case ast.Subscript(value=base, slice=place) if field_in(base, self.fields):
                parts = place.elts if isinstance(place, ast.Tuple) else [place]
                yield self._keyed(base, parts[0], node)
                if any(isinstance(part, ast.Slice) for part in parts[1:]):
                    raise self.source.refuse(
                        node,
                        f"{ast.unparse(node)} goes across rows or columns",
                        "access an entry, [row, column], a row, [row], or a column, [:, column]",
                        self.method,
                    )
                for part in parts:
                    yield from self._walk(part)
                return
            case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()], comparators=[base]) if field_in(
                base, self.fields
            ):
                parts = left.elts if isinstance(left, ast.Tuple) else [left]
                yield self._keyed(base, parts[0], node)
                yield from self._walk(left)
                return
            case ast.Call(func=ast.Attribute(value=base, attr=attr), args=[key, *_]) if field_in(
                base, self.fields
            ) and (attr in KEYED or self._is_own(base)):
                self._check_own(node, field_in(base, self.fields), attr)
                yield self._keyed(base, key, node)
                for argument in node.args:
                    yield from self._walk(argument)
                return
            case ast.Attribute() if field_in(node, self.fields):
                yield self._whole(node)
                return
        for child in ast.iter_child_nodes(node):
            yield from self._walk(child)

    def _is_own(self, node: ast.expr) -> bool:
        """Whether it is a field of a class of the user's."""
        field = field_in(node, self.fields)
        return bool(field) and self.fields[field].own is not None

    def _check_own(self, node: ast.expr, field: str, method: str) -> None:
        own = self.fields[field].own
        if own is not None and method not in own.methods:
            raise self._not_a_method(node, field)

    def _not_a_method(self, node: ast.expr, field: str) -> BadProgram:
        own = self.fields[field].own
        assert own is not None
        return self.source.refuse(
            node,
            f"{ast.unparse(node)} is no call of a method of {own.cls.__name__}",
            f"it has: {', '.join(own.methods)}",
            self.method,
        )

    def _keyed(self, base: ast.expr, key: ast.expr, node: ast.expr) -> AccessAt:
        field = field_in(base, self.fields)
        if self.fields[field].kind == "partial":
            if isinstance(key, ast.Slice):
                raise self.source.refuse(
                    node,
                    f"{ast.unparse(node)} goes across rows",
                    f"write self.{field}.column(c) for a copy of a column; by column is a Partitioned matrix",
                    self.method,
                )
            return AccessAt(field, "lane", None, node, getattr(base, OWN_LANE, ""))
        if isinstance(key, ast.Slice):
            raise self.source.refuse(
                node,
                f"self.{field} is partitioned by row, and {ast.unparse(node)} goes across rows: conflicting partitioning",
                f"access it by row, as in self.{field}[row], or make it mp.Partial and use mp.everywhere(self.{field})",
                self.method,
            )
        return AccessAt(field, "partitioned", key, node, passed=getattr(base, PASSED, False))

    def _whole(self, node: ast.Attribute) -> AccessAt:
        if self.fields[node.attr].kind == "partitioned":
            raise self.source.refuse(
                node,
                f"self.{node.attr} is partitioned, and is accessed without a key here, or by another than its own:"
                " conflicting partitioning",
                f"write self.{node.attr}[key]; state that is needed as a whole is mp.Partial",
                self.method,
            )
        if not isinstance(node.ctx, ast.Load):
            raise self.source.refuse(
                node, f"self.{node.attr} cannot be set", f"write self.{node.attr}.assign(value)", self.method
            )
        return AccessAt(node.attr, "lane", None, node, getattr(node, OWN_LANE, ""))

    def _global(self, node: ast.Call) -> AccessAt:
        field = field_in(node.args[0], self.fields) if len(node.args) == 1 else ""
        if not field or self.fields[field].kind != "partial":
            raise self.source.refuse(
                node,
                "everywhere takes a partial field of the class",
                "write mp.everywhere(self.field)",
                self.method,
            )
        return AccessAt(field, "everywhere", None, node)


def writes_in(node: ast.AST, accesses: Accesses, views: frozenset[str] | set[str] = frozenset()) -> bool:
    """Whether the statement, or one inside it, may change state: a field, or a row of one that a name in `views` holds."""

    def is_reading(node: ast.expr, attr: str) -> bool:
        """Of a class of the user's, whether the method only reads; it does what its text does, whatever its name."""
        inner = node.args[0] if isinstance(node, ast.Call) and is_everywhere(node) else node
        field = field_in(inner, accesses.fields)
        own = accesses.fields[field].own if field else None
        return attr not in MUTATORS if own is None else attr in own.reading

    def is_state(target: ast.AST) -> bool:
        while isinstance(target, ast.Subscript | ast.Attribute):
            if field_in(target, accesses.fields):
                return True
            target = target.value
        return is_everywhere(target) or (isinstance(target, ast.Name) and target.id in views)

    for inner in ast.walk(node):
        match inner:
            case ast.Subscript(ctx=ast.Store() | ast.Del()) if is_state(inner):
                return True
            case ast.Call(func=ast.Attribute(value=base, attr=attr)) if not is_reading(
                base, attr
            ) and is_state(base):
                return True
    return False
