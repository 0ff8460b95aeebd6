"""By which key the lane of a row goes: the last one that it accessed a partitioned field by, before any its first argument.

A *note* is a statement that sets the variable `LANE` to a key, where it becomes the last one.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from millpond.programs.compiler.accesses import Accesses
from millpond.programs.compiler.asking import LANE
from millpond.programs.compiler.source import ProgramSource
from millpond.programs.compiler.split import canonical
from millpond.programs.compiler.syntax import Renaming, assign, bound_in, name
from millpond.programs.graph import first_key

_Notes = frozenset[ast.stmt | None]
"""The notes that may be the last one; None stands for the first argument."""


def lane_key(
    source: ProgramSource,
    accesses: Accesses,
    body: list[ast.stmt],
    parameters: dict[str, str],
) -> tuple[str, list[ast.stmt]]:
    """The variable that holds the key, and the statements, which set it where it has to change.

    BadProgram if a lane is accessed, and there may be no key.
    """
    first = first_key(parameters)
    noted = _noted(body, accesses)
    walk = _Reaching(accesses)
    walk.block(noted, frozenset({None}))
    if None in walk.reached and not first:
        raise source.refuse(
            walk.reached[None],
            "a partial field is accessed, and no key tells in which lane",
            "access a partitioned field before, or give the method a parameter that is an int or a str: the first one counts",
            accesses.method,
        )
    keys = {first if note is None else ast.unparse(note.value) for note in walk.reached}  # type: ignore[attr-defined] # assignments
    only = next(iter(keys), "")
    stays = only in canonical(body, list(parameters)) or (only in parameters and not bound_in(body)[only])
    if not keys or (len(keys) == 1 and stays):
        without = _kept(noted, frozenset())
        return (only or LANE), [
            Renaming({LANE: name(only, s)}).visit(s) for s in without
        ] if only else without
    made = _kept(noted, frozenset(walk.reached))
    return LANE, [assign(LANE, name(first, made[0]), made[0]), *made] if None in walk.reached else made


def is_note(node: ast.AST) -> bool:
    match node:
        case ast.Assign(targets=[ast.Name(id=word)]):
            return word == LANE
    return False


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """The lists of statements in a statement."""
    handlers = getattr(statement, "handlers", [])
    own = [getattr(statement, part, None) for part in ("body", "orelse", "finalbody")]
    return [block for block in [*own, *(handler.body for handler in handlers)] if block]


def _own(statement: ast.stmt) -> list[ast.AST]:
    """What a statement evaluates itself."""
    match statement:
        case ast.If() | ast.While():
            return [statement.test]
        case ast.For():
            return [statement.iter]
        case ast.Try():
            return []
    return [statement]


def _noted(block: Sequence[ast.stmt], accesses: Accesses) -> list[ast.stmt]:
    """The statements, with a note before each that accesses a key."""
    out: list[ast.stmt] = []
    for statement in block:
        found = [access for node in _own(statement) for access in accesses.all(node)]
        keys = dict.fromkeys(ast.unparse(a.key) for a in found if a.key is not None and not a.passed)
        for inner in _blocks(statement):
            inner[:] = _noted(inner, accesses)
        out += [assign(LANE, name(key, statement), statement) for key in keys]
        out.append(statement)
    return out


def _kept(block: Sequence[ast.stmt], notes: _Notes) -> list[ast.stmt]:
    """The statements without all other notes."""
    out: list[ast.stmt] = []
    for statement in block:
        for inner in _blocks(statement):
            inner[:] = _kept(inner, notes) or [ast.copy_location(ast.Pass(), statement)]
        if not is_note(statement) or statement in notes:
            out.append(statement)
    return out


class _Reaching:
    """Which notes may be the last ones where the key of a lane is asked for."""

    def __init__(self, accesses: Accesses) -> None:
        self.accesses = accesses
        self.reached: dict[ast.stmt | None, ast.AST] = {}

    def block(self, statements: Sequence[ast.stmt], notes: _Notes) -> _Notes:
        for statement in statements:
            notes = self.statement(statement, notes)
        return notes

    def statement(self, node: ast.stmt, notes: _Notes) -> _Notes:
        if isinstance(node, ast.For | ast.While | ast.Try):
            # From anywhere in it one may come to its beginning, or to what follows.
            notes |= {inner for inner in ast.walk(node) if isinstance(inner, ast.stmt) and is_note(inner)}
        for own in _own(node):
            self.asked(own, notes)
        if is_note(node):
            return frozenset({node})
        if isinstance(node, ast.If):
            return self.block(node.body, notes) | self.block(node.orelse, notes)
        for block in _blocks(node):
            self.block(block, notes)
        return frozenset() if isinstance(node, ast.Return | ast.Raise | ast.Break | ast.Continue) else notes

    def asked(self, node: ast.AST, notes: _Notes) -> None:
        """Whether a lane is accessed, or its key kept."""
        found = [a.node for a in self.accesses.all(node) if a.access == "lane" and not a.lane]
        found += [
            n
            for n in ast.walk(node)
            if isinstance(n, ast.Name) and n.id == LANE and isinstance(n.ctx, ast.Load)
        ]
        for place in found:
            self.reached.update(dict.fromkeys(notes, place))
