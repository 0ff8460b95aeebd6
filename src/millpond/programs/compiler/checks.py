"""What is refused once a method is in normal form: it would not mean the same in tasks as in plain Python."""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence

from millpond.programs.compiler.accesses import Accesses, field_in, writes_in
from millpond.programs.compiler.composite import as_list, join
from millpond.programs.compiler.limits import BUILTINS
from millpond.programs.compiler.live import read_after
from millpond.programs.compiler.order import HINT, order_seen
from millpond.programs.compiler.source import ProgramSource
from millpond.programs.compiler.split import LEAVE, changed_names, is_view, view_fields
from millpond.programs.compiler.types import Types
from millpond.programs.compiler.words import REJECT, WORDS
from millpond.programs.values import SCALARS

_KNOWN = BUILTINS | {REJECT, *WORDS.values(), LEAVE}
"""Functions that neither change nor give back what they are given."""
_CHOOSING = ("min", "max")


def check_rejects(source: ProgramSource, accesses: Accesses, body: list[ast.stmt]) -> bool:
    """Whether the method rejects. BadProgram if it may have written before."""
    views = frozenset(view_fields(body, accesses))
    found = False

    def line_of_write(node: ast.stmt | ast.expr) -> int:
        return node.lineno if writes_in(node, accesses, views) else 0

    def block(statements: Sequence[ast.stmt], written: int) -> int:
        """`written` is the line of the first write so far, 0 if there is none."""
        nonlocal found
        for node in statements:
            match node:
                case ast.If(test=test):
                    written = written or line_of_write(test)
                    written = max(block(node.body, written), block(node.orelse, written))
                case ast.While(test=test):
                    # The second time around, what the body has written comes before the test.
                    for _ in range(2):
                        written = written or line_of_write(test)
                        written = max(written, block(node.body, written))
                    written = max(written, block(node.orelse, written))
                case ast.For(iter=iterated):
                    written = written or line_of_write(iterated)
                    for _ in range(2):
                        written = max(written, block(node.body, written))
                    written = max(written, block(node.orelse, written))
                case ast.Expr(value=ast.Call(func=ast.Name(id=word))) if word == REJECT:
                    found = True
                    # Its reason may be what a write gave.
                    written = written or line_of_write(node)
                    if written:
                        raise source.refuse(
                            node,
                            f"reject comes after a write, on line {written}: what was written cannot be taken back",
                            "test first, and write when nothing can be rejected any more",
                            accesses.method,
                        )
                case _:
                    written = written or line_of_write(node)
        return written

    block(body, 0)
    return found


def check_aliases(
    source: ProgramSource,
    accesses: Accesses,
    body: list[ast.stmt],
    types: Types,
    temporary: Collection[str],
    of_helpers: Collection[str],
) -> None:
    """A list or vector that has two names, and is changed by one, would be two of them in another task.

    A name is none any more where it is set to something else before it is read again. A temporary variable is no such
    name: nobody reads it once it was given on. Nor are those of a helper, then. But where they hold a row of the state
    they are: whoever changes it must name it.
    """
    changed = {name for statement in body for name in changed_names(statement)} | _extended(body, types)
    handed_over = {name for statement in body for name in _handed_over(statement)}
    assigned = [
        (node, own.id, _same_as(value), value)
        for statement in body
        for node in ast.walk(statement)
        for own, value in _assignments(node)
    ]
    given: dict[str, set[str]] = {}
    for _, own, others, _ in assigned:
        given.setdefault(own, set()).update(others)
    rows = {own for _, own, _, value in assigned if is_view(value, accesses)}
    while True:
        found = rows | {own for own, others in given.items() if others & rows}
        if found == rows:
            break
        rows = found
    moved = _moved(assigned, given, rows, read_after(body))
    passing, gone = set(temporary) - rows, set(of_helpers) - rows
    taken: dict[str, set[str]] = {}

    def behind(name: str, seen: frozenset[str]) -> set[str]:
        """The names that a value may have which came by a temporary variable."""
        if name in seen or not (name in passing or (seen and name in gone)):
            return {name} - seen
        return set[str]().union(*(behind(other, seen | {name}) for other in given.get(name, ())))

    for node, own, others, value in assigned:
        # What a function of the user's gives is mostly new: it counts where the method itself changes it.
        touched = changed if isinstance(value, ast.Call) else changed | handed_over
        if (id(node), own) in moved or (own in passing and own not in changed):
            continue
        same: set[str] = set()
        for other in others:
            same |= behind(other, frozenset())
            if other in passing:
                same |= taken.setdefault(other, set())
                taken[other].add(own)
        for other in sorted(same - {own}):
            kind = types.names.get(other, "")
            is_scalar = {kind, types.names.get(own, "")} & {*SCALARS, "null"}
            if {own, other} & touched and not is_scalar:
                raise source.refuse(
                    node,
                    f"{own} and {other} are the same {kind or 'object'}, which is changed by one of the names",
                    f"make a copy: {own} = {other}.copy()",
                    accesses.method,
                )


def _extended(body: Sequence[ast.stmt], types: Types) -> set[str]:
    """The lists and sets that `+=` and its like change where they are."""
    return {
        node.target.id
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.AugAssign)
        and isinstance(node.target, ast.Name)
        and (types.names.get(node.target.id, "").startswith("array<") or node.target.id in types.sets)
    }


def _moved(
    assigned: Sequence[tuple[ast.AST, str, set[str], ast.expr]],
    given: dict[str, set[str]],
    rows: set[str],
    read: dict[int, set[str]],
) -> set[tuple[int, str]]:
    """Assignments of a variable that nobody reads any more as it is, nor has under a third name, as in `old = new`."""
    moves: dict[str, set[tuple[int, str]]] = {}
    kept: set[str] = set(rows)
    for node, own, others, value in assigned:
        is_last = isinstance(value, ast.Name) and value.id not in read.get(id(node), others) | {own}
        if is_last:
            moves.setdefault(value.id, set()).add((id(node), own))  # type: ignore[attr-defined] # a name
        else:
            kept |= others
    alone = [found for name, found in moves.items() if name not in kept and not given.get(name)]
    return set[tuple[int, str]]().union(*alone)


def _same_as(node: ast.expr) -> set[str]:
    """The variables whose value an expression may be, as it is."""
    match node:
        case ast.Name(id=name):
            return {name}
        case ast.IfExp(body=body, orelse=orelse):
            return _same_as(body) | _same_as(orelse)
        case ast.BoolOp(values=values):
            return set().union(*map(_same_as, values))
        case ast.Call(func=ast.Attribute(attr="get" | "pop"), args=[_, default]):
            return _same_as(default)
        case ast.Call(func=ast.Name(id=function)) if function in _CHOOSING or function not in _KNOWN:
            return set().union(*map(_same_as, _given(node)))
    return set()


def _given(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _handed_over(statement: ast.stmt) -> set[str]:
    """The variables that functions of the user's get, which may change them."""
    return {
        name
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in _KNOWN
        for value in _given(node)
        for name in _same_as(value)
    }


def _assignments(node: ast.AST) -> list[tuple[ast.Name, ast.expr]]:
    """The variables that a statement sets, each with what to."""
    match node:
        case ast.Assign(targets=[ast.Name() as own], value=value):
            return [(own, value)]
        case ast.AnnAssign(target=ast.Name() as own, value=ast.expr() as value):
            return [(own, value)]
        case ast.Assign(targets=[ast.Tuple(elts=targets) | ast.List(elts=targets)], value=value):
            values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
            pairs = zip(targets, values, strict=False)
            return [(own, value) for own, value in pairs if isinstance(own, ast.Name)]
    return []


def check_order(source: ProgramSource, accesses: Accesses, body: list[ast.stmt], types: Types) -> None:
    """Sets have another order in every process: nothing may depend on it."""
    for found in order_seen(body, types):
        raise source.refuse(found, "a set has another order in every process", HINT, accesses.method)


def check_values(source: ProgramSource, accesses: Accesses, body: list[ast.stmt], types: Types) -> None:
    """Keys and values must be of the types that fields have."""
    for access in (found for statement in body for found in accesses.all(statement)):
        if access.key is not None:
            wanted = accesses.fields[access.field].key
            _check(source, accesses, access.key, types, wanted, f"a key of {access.field}")
    for node in (inner for statement in body for inner in ast.walk(statement)):
        match node:
            case ast.Assign(targets=[ast.Subscript(value=base) as target], value=value) if field_in(
                base, accesses.fields
            ):
                field = field_in(base, accesses.fields)
                load = ast.copy_location(ast.Subscript(target.value, target.slice, ast.Load()), target)
                _check(source, accesses, value, types, types.of(load), f"a value of {field}")


def _check(
    source: ProgramSource, accesses: Accesses, node: ast.expr, types: Types, wanted: str, what: str
) -> None:
    kind = as_list(types.of(node))
    if kind and wanted and join(wanted, kind) != wanted:
        raise source.refuse(
            node,
            f"{ast.unparse(node)} is a {kind}, and {what} is a {wanted}",
            "convert it, or give the field another type; a field has keys of one type",
            accesses.method,
        )
