"""What a transaction function reads and writes, and what depends on what: from its text alone.

The walk follows each local variable and remembers which rows it was made from. All that the event alone decides is
*clean*: it can be worked out for a whole epoch before anything runs. A key that was made from a row makes the function
*late*: its rows are found while it runs.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from millpond.errors import BadTransaction
from millpond.txn.compiler.facts import (
    EVENT_FRAME,
    NONE,
    WHOLE,
    Abort,
    Analysis,
    Frame,
    Late,
    Result,
    Slot,
    Sources,
    Use,
)
from millpond.txn.compiler.syntax import (
    REFUSED,
    abort_call,
    bound_names,
    is_collection,
    key_of,
    key_text,
    reason_of,
    refuse,
    table_asked,
    table_row,
    tables_in,
)

COLLECTING = ("add", "append", "discard", "remove", "clear", "extend", "update", "pop", "insert")
"""Methods that change a local list or set."""


def analyse(tree: ast.FunctionDef, tables: Sequence[str] | None = None) -> Analysis:
    """The facts of a function whose parameters named in `tables` are tables; without it, as its text has it.

    BadTransaction, with the line, for what no transaction may do.
    """
    arguments = tree.args
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults:
        raise refuse(tree, tree, "a transaction takes tables and fields, without defaults and *")
    names = tuple(a.arg for a in [*arguments.posonlyargs, *arguments.args])
    known = tables_in(tree) if tables is None else tuple(n for n in names if n in tables)
    found = Analysis(tree.name, tree, names, known, tuple(n for n in names if n not in known))
    for node in ast.walk(tree):
        if type(node) in REFUSED and node is not tree:
            raise refuse(tree, node, REFUSED[type(node)])
    unframed: set[ast.AST] = set()
    while True:
        walk = _Walk(found, unframed)
        walk.function()
        if not walk.restart:
            return found
        found = Analysis(found.name, tree, names, known, found.fields)


@dataclass
class _Loop:
    """A loop under way: the frame of its rounds, and what decides whether a round or the loop is cut short."""

    frame: int
    cut: Sources = NONE


Env = dict[str, Sources]


class _Walk:
    def __init__(self, found: Analysis, unframed: set[ast.AST]) -> None:
        self.found = found
        # Loops that turned out, in a later round of one around them, to be decided by rows.
        self.unframed = unframed
        self.restart = False
        self.tree = found.tree
        self.env: Env = dict.fromkeys(found.fields, NONE)
        self.rows: dict[str, Sources] = {}
        self.control: Sources = NONE
        self.exits: Sources = NONE  # what decided that the function has not ended yet
        self.frame = EVENT_FRAME
        self.loops: list[_Loop] = []
        self.shared: dict[tuple[str, str, int], Slot] = {}
        self.sets = {
            target.id
            for node in ast.walk(found.tree)
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(("set(", "{"))
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        bindings = bound_names(found.tree)
        self.fixed = {name: EVENT_FRAME for name in found.fields if not bindings[name]}
        self.single = {name for name, count in bindings.items() if count == 1 and name not in found.fields}

    def function(self) -> None:
        wrong = set(self.found.tables) & set(bound_names(self.tree))
        if wrong:
            raise refuse(self.tree, self.tree, f"the table {min(wrong)!r} cannot be assigned to")
        self.block(self.tree.body)
        shapes = {len(r.depends) for r in self.found.results.values() if r.depends is not None}
        if len(shapes) > 1:
            line = max(self.found.results)
            raise BadTransaction(
                f"transaction {self.tree.name!r}, line {line}: a return of another number of values",
                hint="all returns give the same number of values",
                transaction=self.tree.name,
                line=line,
            )

    # Statements

    def block(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:  # noqa: C901 - a case for each
        match node:
            case ast.If():
                self.branch(node)
            case ast.For():
                self.loop(node)
            case ast.While():
                self.repeat(node)
            case ast.Delete():
                self.delete(node)
            case ast.Assign():
                if is_collection(node.value):
                    self.late(node, "it makes a list or a set of its own")
                value = self.value_or_row(node.value)
                for target in node.targets:
                    self.assign(target, node.value, value, node)
            case ast.AnnAssign() if node.value is not None:
                self.assign(node.target, node.value, self.value_or_row(node.value), node)
            case ast.AugAssign():
                sources = self.value(node.value)
                if isinstance(node.target, ast.Attribute):
                    sources |= self.column(node.target, write=False)
                elif isinstance(node.target, ast.Name):
                    sources |= self.env.get(node.target.id, NONE)
                self.assign(node.target, node.value, sources, node)
            case ast.Return():
                self.result(node)
            case ast.Break() | ast.Continue():
                self.cut(node)
            case ast.Pass():
                self.mark(node, NONE)
            case ast.Expr() if (call := abort_call(node.value)) is not None:
                self.abort(call, node)
            case _:
                self.other(node)

    def other(self, node: ast.stmt) -> None:
        """A statement that changes local variables at most, if it is one that can be compiled at all."""
        sources = self.value(node)
        self.mark(node, sources)
        changed = set(bound_names(node))
        match node:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method))):
                if method in COLLECTING:
                    self.late(node, f"{name} is a list or a set of its own")
                    changed.add(name)
        for name in changed:
            self.env[name] = self.env.get(name, NONE) | sources | self.control

    def mark(self, node: ast.AST, sources: Sources) -> None:
        """Keeps what a statement depends on; the last look at it, in a loop, counts."""
        everything = sources | self.control
        self.found.sources[node] = everything | self.exits
        if everything:
            self.found.clean.discard(node)
        else:
            self.found.clean.add(node)

    def branch(self, node: ast.If) -> None:
        test = self.value(node.test)
        self.mark(node, test)
        self.condition(node.test, test)
        outside, env, rows = self.control, dict(self.env), dict(self.rows)
        self.control = outside | test
        self.block(node.body)
        after, after_rows = self.env, self.rows
        self.env, self.rows = env, rows
        self.block(node.orelse)
        self.control = outside
        self.env, self.rows = joined(after, self.env), joined(after_rows, self.rows)

    def condition(self, node: ast.AST, sources: Sources) -> None:
        if sources:
            self.found.clean.discard(node)
        else:
            self.found.clean.add(node)

    def loop(self, node: ast.For) -> None:
        if node.orelse:
            raise refuse(self.tree, node.orelse[0], "a loop of a transaction has no else")
        if isinstance(node.iter, ast.Name) and node.iter.id in self.sets:
            raise refuse(
                self.tree,
                node,
                f"the set {node.iter.id!r} has no order to loop in",
                hint="keep a list beside it, or count with len",
            )
        over = self.value(node.iter)
        self.mark(node, over)
        self.condition(node.iter, over)
        outside_control, outside_frame = self.control, self.frame
        if over and node in self.found.frame_of:
            self.unframed.add(node)
            self.restart = True
        elif not over and node not in self.unframed:
            # A loop that the event does not decide alone keeps to the frame around it: its keys do not change.
            if node not in self.found.frame_of:
                self.found.frame_of[node] = len(self.found.frames)
                self.found.frames.append(Frame(self.frame, self.place(self.frame)))
                self.found.frame_sizes.append(0)
            self.frame = self.found.frame_of[node]
        loop = _Loop(self.frame)
        self.loops.append(loop)
        while True:
            before = dict(self.env), dict(self.rows), loop.cut, self.exits
            self.control = outside_control | over | loop.cut
            for name in bound_names(node.target):
                self.env[name] = over
                self.rows.pop(name, None)
                if name in self.single and not over:
                    self.fixed[name] = self.frame
            self.block(node.body)
            self.env = joined(before[0], self.carried(self.env, over))
            self.rows = joined(before[1], self.carried(self.rows, over))
            loop.cut |= self.carried_sources(loop.cut, over)
            self.exits |= self.carried_sources(self.exits, over)
            for name in bound_names(node.target):
                self.env[name] |= loop.cut | outside_control
            if (self.env, self.rows, loop.cut, self.exits) == before:
                break
        self.loops.pop()
        if loop.cut:
            self.found.ragged.add(node)
        self.control, self.frame = outside_control, outside_frame

    def repeat(self, node: ast.While) -> None:
        """A loop that ends when it ends: how often it goes round, nobody knows before it runs."""
        if node.orelse:
            raise refuse(self.tree, node.orelse[0], "a loop of a transaction has no else")
        self.late(node, "how often while goes round shows only as it runs")
        outside = self.control
        loop = _Loop(self.frame)
        self.loops.append(loop)
        while True:
            before = dict(self.env), dict(self.rows), loop.cut, self.exits, self.control
            test = self.value(node.test)
            self.mark(node, test)
            self.condition(node.test, test)
            self.control = outside | test | loop.cut
            self.block(node.body)
            self.env, self.rows = joined(before[0], self.env), joined(before[1], self.rows)
            if (self.env, self.rows, loop.cut, self.exits, self.control) == before:
                break
        self.loops.pop()
        self.control = outside

    def delete(self, node: ast.Delete) -> None:
        sources = NONE
        for target in node.targets:
            if not isinstance(target, ast.Subscript) or not self.is_row(target):
                raise refuse(
                    self.tree,
                    node,
                    f"del of {ast.unparse(target)}",
                    hint="del takes a row away, as in del table[key]",
                )
            sources |= self.whole(target, write=True)
        self.mark(node, sources)

    def late(self, node: ast.AST, why: str) -> None:
        self.found.late.add(Late(getattr(node, "lineno", self.tree.lineno), why))

    def carried(self, env: Env, over: Sources) -> Env:
        """The variables as the next round finds them: what came from this loop's rows came from another round."""
        return {name: self.carried_sources(sources, over) for name, sources in env.items()}

    def carried_sources(self, sources: Sources, over: Sources) -> Sources:
        return sources if over else frozenset(self.in_other_round(slot) for slot in sources)

    def in_other_round(self, slot: int) -> int:
        frame = self.found.slots[slot].frame if slot >= 0 else EVENT_FRAME
        while frame not in (EVENT_FRAME, self.frame):
            frame = self.found.frames[frame].parent
        return ~slot if frame == self.frame and frame != EVENT_FRAME else slot

    def cut(self, node: ast.stmt) -> None:
        self.mark(node, NONE)
        if self.loops:
            self.loops[-1].cut |= self.control
            self.exits |= self.control

    def abort(self, call: ast.Call, node: ast.stmt) -> None:
        depends = self.control
        for argument in call.args:
            depends |= self.value(argument)
        self.mark(node, depends)
        depends |= self.exits
        text = reason_of(call)
        self.found.aborts.add(
            Abort(ast.unparse(call.args[0]) if text is None else text, node.lineno, depends)
        )
        self.exits |= self.control

    def result(self, node: ast.Return) -> None:
        values: list[ast.expr] | None
        if node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None):
            values = None
        else:
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        depends = None
        if values is not None:
            found = [self.value(value) for value in values]
            depends = tuple(sources | self.control | self.exits for sources in found)
        self.mark(node, frozenset().union(*(depends or ())))
        self.found.results[node.lineno] = Result(node.lineno, depends)
        self.exits |= self.control

    # Targets

    def assign(
        self, target: ast.expr, value: ast.expr, sources: Sources | tuple[Sources], node: ast.stmt
    ) -> None:
        is_row = isinstance(sources, tuple)
        plain = sources[0] if isinstance(sources, tuple) else sources
        match target:
            case ast.Name():
                if target.id in self.found.tables:
                    raise refuse(self.tree, node, f"the table {target.id!r} cannot be assigned to")
                if is_row:
                    self.rows[target.id] = plain
                    self.env.pop(target.id, None)
                    self.mark(node, plain)
                    return
                self.rows.pop(target.id, None)
                self.env[target.id] = plain | self.control
                if target.id in self.single and not plain and not self.control:
                    self.fixed[target.id] = self.frame
                self.mark(node, plain)
            case ast.Attribute():
                slots = self.column(target, write=True, sources=plain)
                self.mark(node, plain | slots)
            case ast.Tuple() | ast.List():
                parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
                if len(parts) != len(target.elts):
                    parts = [value] * len(target.elts)
                for part, source in zip(target.elts, parts, strict=True):
                    self.assign(part, source, plain, node)
            case _:
                raise refuse(
                    self.tree,
                    node,
                    f"{ast.unparse(target)} cannot be assigned to",
                    hint="a transaction assigns to variables and to columns, as in table[key].column = value",
                )

    # Expressions

    def value_or_row(self, node: ast.expr) -> Sources | tuple[Sources]:
        """What the value was made from; as a tuple, the slots of the row that it is."""
        if self.is_row(node):
            return (self.whole(node, write=False) if isinstance(node, ast.Call) else self.row(node),)
        if isinstance(node, ast.Name) and node.id in self.rows:
            return (self.rows[node.id],)
        return self.value(node)

    def is_row(self, node: ast.AST) -> bool:
        return table_row(node, self.found.tables) is not None

    def value(self, node: ast.AST) -> Sources:
        match node:
            case ast.Compare() if table_asked(node, self.found.tables) is not None:
                return self.whole(node, write=False)
            case ast.Compare(
                left=ast.Name(id=name), ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]
            ) if name in self.rows:
                return self.rows[name]
            case ast.Attribute() if self.is_row(node.value) or getattr(node.value, "id", None) in self.rows:
                return self.column(node, write=False)
            case ast.Subscript() | ast.Call() if self.is_row(node):
                raise refuse(
                    self.tree,
                    node,
                    f"the row {ast.unparse(node)} is used as a value",
                    hint="name one of its columns, as in table[key].column",
                )
            case ast.Name():
                if node.id in self.found.tables or node.id in self.rows:
                    what = "table" if node.id in self.found.tables else "row"
                    raise refuse(
                        self.tree,
                        node,
                        f"the {what} {node.id!r} is used as a value",
                        hint="a table is read and written by its keys, as in table[key].column",
                    )
                return self.env.get(node.id, NONE)
            case ast.comprehension():
                over = self.value(node.iter)
                for name in bound_names(node.target):
                    self.env[name] = over
                return over.union(*(self.value(test) for test in node.ifs))
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp() | ast.DictComp():
                # The variables of a comprehension are set before its element is looked at.
                before = dict(self.env)
                sources = NONE.union(*(self.value(part) for part in node.generators))
                parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
                sources = sources.union(*(self.value(part) for part in parts))
                self.env = before
                return sources
            case ast.Call() if abort_call(node) is not None:
                raise refuse(self.tree, node, "abort is a statement of its own")
        return NONE.union(*(self.value(child) for child in ast.iter_child_nodes(node)))

    def column(self, node: ast.Attribute, write: bool, sources: Sources = NONE) -> Sources:
        """A column of a row, read or written; the slots it may be."""
        if self.is_row(node.value):
            slots = self.row(node.value)
        elif isinstance(node.value, ast.Name) and node.value.id in self.rows:
            slots = self.rows[node.value.id]
        else:
            raise refuse(
                self.tree,
                node,
                f"{ast.unparse(node)} is no column of a table",
                hint="as in table[key].column",
            )
        for slot in slots:
            own = slot if slot >= 0 else ~slot
            depends = sources | self.control | self.exits | (slots if len(slots) > 1 else NONE)
            (self.found.writes if write else self.found.reads).add(Use(own, node.attr, node.lineno, depends))
        return slots

    def whole(self, node: ast.AST, write: bool) -> Sources:
        """A row that is asked for, or deleted, as a whole."""
        slots = self.row(node)
        for slot in slots:
            use = Use(slot, WHOLE, getattr(node, "lineno", 0), self.control | self.exits)
            (self.found.writes if write else self.found.reads).add(use)
        return slots

    def row(self, node: ast.AST) -> Sources:
        table = table_row(node, self.found.tables) or table_asked(node, self.found.tables)
        assert table is not None
        if isinstance(node, ast.Call) and (len(node.args) != 1 or node.keywords):
            raise refuse(
                self.tree,
                node,
                f"{ast.unparse(node)} takes one key",
                hint="a key of several columns is a tuple, as in table.get((a, b))",
            )
        sources = self.value(key_of(node))
        if sources:
            slots = self.found.slot_texts(sources)
            self.late(node, f"the key of {table.id}[{key_text(node)}] comes from {slots}")
        slot = self.found.slot_of.get(node)
        if slot is None:
            slot = self.found.slot_of[node] = self.slot(node, table.id)
        return frozenset([slot.number])

    def slot(self, node: ast.AST, table: str) -> Slot:
        key = key_text(node)
        frame = self.frame
        names = {n.id for n in ast.walk(key_of(node)) if isinstance(n, ast.Name)} & set(self.env)
        can_share = all(name in self.fixed for name in names)
        if can_share:
            frame = EVENT_FRAME
            for name in names:
                if self.within(self.fixed[name], frame):
                    frame = self.fixed[name]
            can_share = self.within(self.frame, frame) and all(
                self.within(frame, self.fixed[name]) for name in names
            )
        if not can_share:
            frame = self.frame
        elif (table, key, frame) in self.shared:
            return self.shared[table, key, frame]
        line = getattr(node, "lineno", self.tree.lineno)
        made = Slot(len(self.found.slots), table, key, line, frame, self.place(frame))
        self.found.slots.append(made)
        if can_share:
            self.shared[table, key, frame] = made
        return made

    def within(self, inner: int, outer: int) -> bool:
        while inner not in (outer, EVENT_FRAME):
            inner = self.found.frames[inner].parent
        return inner == outer

    def place(self, frame: int) -> int:
        self.found.frame_sizes[frame] += 1
        return self.found.frame_sizes[frame] - 1


def joined(one: Env, other: Env) -> Env:
    return {name: one.get(name, NONE) | other.get(name, NONE) for name in {**one, **other}}
