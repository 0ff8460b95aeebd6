"""A method cut into tasks, each of which accesses state in one place.

A task begins where state is accessed elsewhere than before. Its code goes on from there to wherever the next one begins, and
there returns which one that is: branches are followed, and a loop that it is in the middle of begins again after its rest.
"""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass, field
from typing import NamedTuple

from millpond.programs.compiler.accesses import MUTATORS, AccessAt, Accesses, Site, field_in, writes_in
from millpond.programs.compiler.limits import STATEMENTS_MAX
from millpond.programs.compiler.source import ProgramSource
from millpond.programs.compiler.syntax import bound_in, bound_names, constant, loaded, placed
from millpond.programs.compiler.words import REJECT

LEAVE = "mp_leave"


class Raw(NamedTuple):
    """A task before it is known what goes into it. `gathered` is the variable that the values of all lanes come in."""

    site: Site | None
    body: list[ast.stmt]
    writes: bool
    line: int
    gathered: str


class _Owner(NamedTuple):
    """Where a list of statements is: in a statement at a place in another list."""

    node: ast.stmt | None
    outer: list[ast.stmt]
    at: int


@dataclass
class _State:
    """Along one path through a task: which names were set, and which hold rows of the state as they are there."""

    site: Site | None
    dirty: set[str] = field(default_factory=set)
    views: set[str] = field(default_factory=set)
    open: list[ast.stmt] = field(default_factory=list)

    def copy(self) -> _State:
        return _State(self.site, set(self.dirty), set(self.views), list(self.open))


class Splitter:
    """Makes the tasks of one method in normal form."""

    def __init__(
        self,
        source: ProgramSource,
        accesses: Accesses,
        method: str,
        body: list[ast.stmt],
        parameters: list[str],
        lane_key: str,
    ) -> None:
        self.source = source
        self.accesses = accesses
        self.method = method
        self.body = body
        self.parameters = parameters
        self.lane_key = lane_key
        self.owners: dict[int, _Owner] = {}
        self._own(body, _Owner(None, [], 0))
        self.numbers: dict[tuple[int, int, str], int] = {}
        self.waiting: list[tuple[list[ast.stmt], int, Site | None, str]] = []
        self.canonical = canonical(body, parameters)
        self.views = frozenset(view_fields(body, accesses))
        self.count = 0
        self.writing = False

    def tasks(self) -> list[Raw]:
        """The tasks, the first of which begins the method."""
        self.waiting.append((self.body, 0, self.adopted(self.body, 0, set(self.parameters)), ""))
        made: list[Raw] = []
        while len(made) < len(self.waiting):
            made.append(self.task(*self.waiting[len(made)]))
        return made

    def task(self, statements: list[ast.stmt], index: int, site: Site | None, gathered: str) -> Raw:
        self.writing = False
        line = (
            statements[index].lineno if index < len(statements) else self.source.methods[self.method].lineno
        )
        if site is not None and site.access == "everywhere":
            return Raw(site, self.global_task(statements, index), self.writing, line, gathered)
        body = self.follow(statements, index, _State(site))
        return Raw(site, body, self.writing, line, gathered)

    # Where things are

    def _own(self, statements: list[ast.stmt], owner: _Owner) -> None:
        self.owners[id(statements)] = owner
        for i, statement in enumerate(statements):
            for attr in ("body", "orelse"):
                inner = getattr(statement, attr, None)
                if isinstance(inner, list) and isinstance(statement, ast.If | ast.While):
                    self._own(inner, _Owner(statement, statements, i))

    def site_of(self, node: ast.AST) -> Site | None:
        """The one place that a statement in normal form, or a test, accesses."""
        return next((self.site(access) for access in self.accesses.all(node)), None)

    def is_at(self, state: _State, site: Site) -> bool:
        """Whether the task is where the access must be."""
        here = state.site
        if (
            here is None
            or (here.field, here.access) != (site.field, site.access)
            or site.access == "everywhere"
        ):
            return False
        mine, other = self.canonical.get(here.key, here.key), self.canonical.get(site.key, site.key)
        if mine != other:
            return False
        return not (state.dirty & loaded(ast.parse(mine)))

    def is_whole(self, node: ast.stmt) -> bool:
        """Whether a loop, or try, stays with one place."""
        sites = {self.site(a) for a in self.accesses.all(node)}
        bound = bound_names(node)
        return len(sites) <= 1 and all(s.access != "everywhere" and s.key not in bound for s in sites)

    def site(self, access: AccessAt) -> Site:
        by_lane = (access.lane or self.lane_key) if access.access == "lane" else ""
        return Site(access.field, access.access, by_lane if access.key is None else ast.unparse(access.key))

    def adopted(self, statements: list[ast.stmt], index: int, known: set[str] | None) -> Site | None:
        """Where a task that accesses nothing at first had best be: where the first access will be, if that is known."""
        bound: set[str] = set()
        for statement in statements[index:]:
            sites = {self.site(a) for a in self.accesses.all(statement)}
            if sites:
                first = next(iter(sites))
                key = self.canonical.get(first.key, first.key)
                bound |= set(bound_names(statement))
                names = loaded(ast.parse(key))
                fits = key.isidentifier() and not names & bound and (known is None or names <= known)
                if len(sites) > 1 or first.access == "everywhere" or not fits:
                    return None
                return first._replace(key=key)
            bound |= set(bound_names(statement))
        return None

    # Code

    def follow(self, statements: list[ast.stmt], index: int, state: _State) -> list[ast.stmt]:
        """The code from a place on, to the end of the method or of the task."""
        out, goes_on = self.block(statements, index, state)
        owner = self.owners[id(statements)]
        while goes_on and owner.node is not None:
            if isinstance(owner.node, ast.While):
                more, goes_on = self.loop(owner.node, state, owner.outer, owner.at)
                out += more
            if goes_on:
                more, goes_on = self.block(owner.outer, owner.at + 1, state)
                out += more
            owner = self.owners[id(owner.outer)]
        if goes_on:
            at = statements[-1] if statements else self.source.methods[self.method]
            out.append(placed(ast.Return(), at))
        return out

    def block(self, statements: list[ast.stmt], index: int, state: _State) -> tuple[list[ast.stmt], bool]:
        """The code of a list of statements from one on, and whether a path leads beyond it."""
        out: list[ast.stmt] = []
        for i in range(index, len(statements)):
            made, goes_on = self.statement(statements, i, state)
            out += made
            if not goes_on:
                return out, False
        return out, True

    def statement(self, statements: list[ast.stmt], i: int, state: _State) -> tuple[list[ast.stmt], bool]:
        node = statements[i]
        self.count += 1
        if self.count > STATEMENTS_MAX:
            raise self.source.refuse(
                node,
                "the method goes too many ways from task to task",
                "make it shorter, or two methods of it",
                self.method,
            )
        if isinstance(node, ast.If):
            return self.branch(node, statements, i, state)
        if isinstance(node, ast.While) and not self.is_whole(node):
            return self.loop(node, state, statements, i)
        if isinstance(node, ast.Break | ast.Continue):
            return self.jump(node, statements, state)
        site = self.site_of(node)
        if site is not None and not self.is_at(state, site):
            return [self.leave(statements, i, site)], False
        self.note(node, state)
        if isinstance(node, ast.Return | ast.Raise) or _rejects(node):
            return [copy.deepcopy(node)], False
        return [copy.deepcopy(node)], True

    def branch(
        self, node: ast.If, statements: list[ast.stmt], i: int, state: _State
    ) -> tuple[list[ast.stmt], bool]:
        site = self.site_of(node.test)
        if site is not None and not self.is_at(state, site):
            return [self.leave(statements, i, site)], False
        self.note(ast.copy_location(ast.Expr(node.test), node), state)
        other = state.copy()
        body, first = self.block(node.body, 0, state)
        orelse, second = self.block(node.orelse, 0, other)
        state.dirty |= other.dirty
        if first and second:
            state.views &= other.views
        elif second:
            state.views = other.views
        made = ast.If(copy.deepcopy(node.test), body or [ast.Pass()], orelse)
        return [placed(made, node)], first or second

    def loop(
        self, node: ast.While, state: _State, statements: list[ast.stmt], i: int
    ) -> tuple[list[ast.stmt], bool]:
        site = self.site_of(node.test)
        if site is not None and not self.is_at(state, site):
            return [self.leave(statements, i, site)], False
        bound = set(bound_names(node))
        state.dirty |= bound
        state.views -= bound
        inner = state.copy()
        inner.open.append(node)
        body, _ = self.block(node.body, 0, inner)
        endless = isinstance(node.test, ast.Constant) and node.test.value is True
        goes_on = not endless or _breaks(body)
        return [placed(ast.While(copy.deepcopy(node.test), body, []), node)], goes_on

    def jump(
        self, node: ast.Break | ast.Continue, statements: list[ast.stmt], state: _State
    ) -> tuple[list[ast.stmt], bool]:
        owner = self.owners[id(statements)]
        while not isinstance(owner.node, ast.While):
            owner = self.owners[id(owner.outer)]
        if owner.node in state.open:
            return [copy.deepcopy(node)], False
        after = state.copy()
        if isinstance(node, ast.Break):
            return self.follow(owner.outer, owner.at + 1, after), False
        return self.follow(owner.outer, owner.at, after), False

    def leave(self, statements: list[ast.stmt], i: int, site: Site) -> ast.stmt:
        """The end of a task where another one begins."""
        return _leave(self.number(statements, i, site, ""), statements[i])

    def number(self, statements: list[ast.stmt], i: int, site: Site | None, gathered: str) -> int:
        place = (id(statements), i, gathered)
        if place not in self.numbers:
            self.numbers[place] = len(self.waiting)
            self.waiting.append((statements, i, site, gathered))
        return self.numbers[place]

    def global_task(self, statements: list[ast.stmt], i: int) -> list[ast.stmt]:
        """What each lane does, and then the task that takes what all gave."""
        node = statements[i]
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            assert isinstance(target, ast.Name)
            gathered, first = target.id, node.value
            before: list[ast.stmt] = []
        else:
            gathered, first = "done_everywhere", constant(True, node)
            before = [copy.deepcopy(node)]
            self.writing = True
        following = self.number(statements, i + 1, self.adopted(statements, i + 1, None), gathered)
        return [*before, _leave(following, node, copy.deepcopy(first))]

    # What a statement does

    def note(self, node: ast.stmt, state: _State) -> None:
        """Keeps account of rows that are held as they are in the state, and of what is changed."""
        for changed in changed_names(node):
            if changed in self.views and changed not in state.views:
                raise self.source.refuse(
                    node,
                    f"{changed} is a copy here: it was read from a field, and another one was accessed since",
                    "change it right after it was read, or write to the field itself: self.field[key][index] = x",
                    self.method,
                )
        self.writing |= writes_in(node, self.accesses, self.views)
        for bound in bound_names(node):
            state.dirty.add(bound)
            state.views.discard(bound)
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and is_view(node.value, self.accesses)
        ):
            state.views.add(node.targets[0].id)


def _leave(number: int, at: ast.AST, *first: ast.expr) -> ast.stmt:
    call = ast.Call(ast.Name(LEAVE, ast.Load()), [ast.Constant(number), *first], [])
    return placed(ast.Return(call), at)


def _rejects(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Name(id=word))):
            return word == REJECT
    return False


def _breaks(body: list[ast.stmt]) -> bool:
    """Whether a loop of the body is left by break."""
    for statement in body:
        if isinstance(statement, ast.Break):
            return True
        if isinstance(statement, ast.If) and (_breaks(statement.body) or _breaks(statement.orelse)):
            return True
    return False


def is_view(node: ast.expr, accesses: Accesses) -> bool:
    """Whether it is a row of a matrix in the state."""
    match node:
        case ast.Subscript(value=base, slice=place) if not isinstance(place, ast.Tuple):
            field_name = field_in(base, accesses.fields)
            return bool(field_name) and accesses.fields[field_name].element == "matrix"
    return False


def view_fields(body: list[ast.stmt], accesses: Accesses) -> dict[str, set[str]]:
    """The variables that may hold a row as it is in the state, each with the fields that it may be of."""
    found: dict[str, set[str]] = {}
    assigned = [
        (node.targets[0].id, node.value)
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    ]
    for own, value in assigned:
        if is_view(value, accesses):
            found.setdefault(own, set()).add(field_in(value.value, accesses.fields))  # type: ignore[attr-defined] # a subscript
    while True:
        given = [(own, found[v.id]) for own, v in assigned if isinstance(v, ast.Name) and v.id in found]
        if all(fields <= found.get(own, set()) for own, fields in given):
            return found
        for own, fields in given:
            found.setdefault(own, set()).update(fields)


def changed_names(node: ast.AST) -> set[str]:
    """The variables whose content is changed: an entry set or deleted, or a method called that does so."""
    found = set()
    for inner in ast.walk(node):
        target: ast.AST | None = None
        match inner:
            case ast.Subscript(value=base, ctx=ast.Store() | ast.Del()):
                target = base
            case ast.Call(func=ast.Attribute(value=base, attr=attr)) if attr in MUTATORS:
                target = base
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Name):
            found.add(target.id)
    return found


def canonical(body: list[ast.stmt], parameters: list[str]) -> dict[str, str]:
    """For variables that are set once, outside of loops, to names and constants that stay: what they are set to."""
    counts = bound_in(body)
    fixed = {p for p in parameters if not counts[p]}
    found: dict[str, str] = {}
    pending = [*body]
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.If):
            pending = [*node.body, *node.orelse, *pending]
        match node:
            case ast.Assign(targets=[ast.Name(id=own)], value=value) if (
                counts[own] == 1 and own not in parameters
            ):
                simple = isinstance(value, ast.Name | ast.Constant | ast.BinOp | ast.JoinedStr)
                inner = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
                if simple and inner <= fixed | set(found):
                    text = ast.unparse(value)
                    found[own] = ast.unparse(_substituted(value, found)) if inner else text
    return found


def _substituted(node: ast.expr, found: dict[str, str]) -> ast.expr:
    class Put(ast.NodeTransformer):
        def visit_Name(self, inner: ast.Name) -> ast.AST:
            return ast.parse(found[inner.id], mode="eval").body if inner.id in found else inner

    made: ast.expr = Put().visit(copy.deepcopy(node))
    return made
