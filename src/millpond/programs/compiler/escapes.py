"""Parts of the state, as they are there, go nowhere but where it can be told whether they are changed.

A *part* is a partial field itself, a row of a matrix, or a variable that may hold one. All else that fields give is a copy.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from millpond.errors import BadProgram
from millpond.programs.compiler.accesses import Accesses, field_in, is_everywhere
from millpond.programs.compiler.limits import BUILTINS
from millpond.programs.compiler.source import ProgramSource
from millpond.programs.compiler.split import is_view
from millpond.programs.compiler.types import Types
from millpond.programs.compiler.words import REJECT, WORDS
from millpond.programs.values import ELEMENTS

_TAKING = BUILTINS | {REJECT, *WORDS.values()}
"""Functions that neither change nor keep what they are given."""
_CHOOSING = ("min", "max")


def check_escapes(source: ProgramSource, accesses: Accesses, body: list[ast.stmt], types: Types) -> None:
    """BadProgram where a part of the state goes where nobody sees what is done to it."""
    check = _Escapes(source, accesses, types, body)
    for node in (inner for statement in body for inner in ast.walk(statement)):
        check.node(node)


class _Escapes:
    def __init__(
        self, source: ProgramSource, accesses: Accesses, types: Types, body: Sequence[ast.stmt]
    ) -> None:
        self.source = source
        self.accesses = accesses
        self.types = types
        self.called: set[int] = set()
        """Attributes that are called, which is found before they are."""
        self.names: set[str] = set()
        assigned = [
            (node.targets[0].id, node.value)
            for statement in body
            for node in ast.walk(statement)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        ]
        while True:
            found = {own for own, value in assigned if any(self.parts(value))}
            if found <= self.names:
                break
            self.names |= found

    def parts(self, node: ast.expr) -> Iterator[ast.expr]:
        """The parts of the state that the value of an expression may be."""
        match node:
            case ast.IfExp(body=body, orelse=orelse):
                yield from self.parts(body)
                yield from self.parts(orelse)
            case ast.BoolOp(values=values):
                for value in values:
                    yield from self.parts(value)
            case ast.Name(id=name) if name in self.names:
                yield node
            case ast.Attribute() if field_in(node, self.accesses.fields):
                yield node
            case ast.Subscript() if is_view(node, self.accesses):
                yield node

    def node(self, node: ast.AST) -> None:
        match node:
            case ast.Call():
                self.call(node)
            case ast.Attribute(value=base) if id(node) not in self.called:
                self.refuse_all([base], node)
            case ast.List(elts=elements, ctx=ast.Load()) | ast.Set(elts=elements):
                self.refuse_all(elements, node)
            case ast.Tuple(elts=elements, ctx=ast.Load()):
                self.refuse_all(elements, node)
            case ast.Dict(values=values):
                self.refuse_all(values, node)
            case ast.ListComp(elt=made) | ast.SetComp(elt=made) | ast.GeneratorExp(elt=made):
                self.refuse_all([made], node)
            case ast.DictComp(value=made) | ast.Lambda(body=made):
                self.refuse_all([made], node)
            case ast.Assign(targets=[target], value=value):
                self.assignment(node, target, value)
            case ast.AnnAssign(value=ast.expr() as value):
                self.refuse_all([value], node)

    def assignment(self, node: ast.Assign, target: ast.expr, value: ast.expr) -> None:
        """A variable may hold a row, of which it is known then; a field takes a copy."""
        base = target
        while isinstance(base, ast.Subscript):
            base = base.value
        to_field = isinstance(target, ast.Subscript) and bool(field_in(base, self.accesses.fields))
        is_known = isinstance(target, ast.Name) and (
            isinstance(value, ast.Name) or is_view(value, self.accesses)
        )
        if not to_field and not is_known:
            self.refuse_all([value], node)

    def call(self, node: ast.Call) -> None:
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        match node.func:
            case ast.Attribute(value=base):
                self.called.add(id(node.func))
                # Operations of elements copy what they take; a list would keep it.
                if is_everywhere(base) or any(self.parts(base)) or self.types.of(base) in ELEMENTS:
                    return
            case ast.Name(id=name) if name in _TAKING and (name not in _CHOOSING or len(arguments) == 1):
                return
        self.refuse_all(arguments, node)

    def refuse_all(self, given: Sequence[ast.expr | None], node: ast.AST) -> None:
        for value in given:
            for part in self.parts(value) if value is not None else ():
                raise self.refuse(part, node)

    def refuse(self, part: ast.expr, node: ast.AST) -> BadProgram:
        text = ast.unparse(part)
        return self.source.refuse(
            node,
            f"{text} is a part of the state, and what is done to it in {ast.unparse(node)} cannot be told",
            f"use its operations, as in {text}.total(), or a copy: {text}.copy()",
            self.accesses.method,
        )
