"""Code for the statements that both kernels share: variables, conditions and loops.

A variable may change its type from line to line. Where paths meet, a long and a double make a number, which is either.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from millpond.code.capture import CONSTANTS, Code
from millpond.code.tables import Type
from millpond.stores.tables import TableLayout
from millpond.txn.compiler import arguments
from millpond.txn.compiler.arithmetic import RANGE_STEPS_MAX
from millpond.txn.compiler.calls import Calls
from millpond.txn.compiler.expressions import COLLECTION, Collection
from millpond.txn.compiler.facts import Analysis
from millpond.txn.compiler.syntax import abort_call, bound_names, changes_list, is_collection, refuse
from millpond.txn.compiler.values import (
    RETURNED,
    ROUNDS,
    STEP,
    STEPS,
    CannotCompile,
    CodeWriter,
    EventField,
    Value,
    ValueType,
)


@dataclass
class _Rounds:
    """A loop under way, and the types that its variables have at the start of each round."""

    types: dict[str, ValueType]
    rows: dict[str, str]
    wider: dict[str, ValueType]


LoopVariable = tuple[str, tuple[Type, str]]
"""A variable of a loop, its type, and its value in the round {it}."""


def constants_of(code: Code) -> dict[str, bool | int | float | str]:
    """The numbers and strings that a function names."""
    return {name: CONSTANTS[kind](text) for name, (kind, text) in code.constants.items() if kind in CONSTANTS}


class Statements:
    """One function on its way to one kernel. Subclasses say what becomes of rows, results and aborts."""

    def __init__(
        self,
        kind: int,
        found: Analysis,
        code: Code,
        fields: Mapping[str, EventField],
        tables: Mapping[str, TableLayout],
        write: CodeWriter,
        strings: list[str],
    ) -> None:
        self.kind = kind
        self.found = found
        self.tables = tables
        self.write = write
        self.fields = fields
        self.ex = Calls(
            kind, write, fields, constants_of(code), code.modules, self.column, self.asked, strings
        )
        self.row_of: dict[str, str] = {}  # variables that hold a row: its table
        self.rounds: list[_Rounds] = []
        self.first_frame = found.frame_sizes[0]
        self.has_frames = found.has_frames and not found.is_late

    # What the two kernels do differently

    def column(self, node: ast.Attribute) -> Value:
        raise NotImplementedError

    def asked(self, node: ast.Compare) -> Value | None:
        """A question about a row, or None if the comparison is none."""
        raise NotImplementedError

    def delete(self, node: ast.Delete) -> None:
        raise NotImplementedError

    def write_column(self, node: ast.Attribute, value: Value) -> None:
        raise NotImplementedError

    def bind_row(self, name: str, node: ast.expr) -> None:
        raise NotImplementedError

    def result(self, node: ast.Return) -> None:
        raise NotImplementedError

    def abort(self, node: ast.Expr) -> None:
        raise NotImplementedError

    def enter_frame(self, frame: int, count: str) -> None:
        raise NotImplementedError

    def before_rounds(self, node: ast.For, count: str, targets: Sequence[LoopVariable]) -> None:
        """Code before the rounds of a loop; none, unless a kernel has a use for it."""

    # The event

    def load_fields(self) -> None:
        self.write(f"w = {arguments.event_rows(self.kind)}[i]")
        for name, found in self.fields.items():
            array = arguments.field(self.kind, name)
            if found.is_list:
                offsets = arguments.list_offsets(self.kind, name)
                self.write(f"start_{name} = {offsets}[w]")
                self.write(f"size_{name} = {offsets}[w + 1] - start_{name}")
            else:
                self.ex.env[name] = found.type
                self.write(f"{self.ex.variable(name, found.type)} = {array}[w]{self.ex.loaded(found.type)}")

    # Statements

    def block(self, body: Sequence[ast.stmt]) -> bool:
        """Whether the code goes on after it."""
        return all(self.statement(node) for node in body)

    def statement(self, node: ast.stmt) -> bool:
        match node:
            case ast.If():
                return self.branch(node)
            case ast.For():
                self.loop(node)
            case ast.While():
                self.repeat(node)
            case ast.Delete():
                self.delete(node)
            case ast.Assign():
                self.assign(node)
            case ast.AnnAssign() if node.value is not None:
                self.set_target(node.target, node.value)
            case ast.AugAssign():
                self.augment(node)
            case ast.Return():
                self.result(node)
                return False
            case ast.Break() | ast.Continue():
                self.meet(node)
                self.write("break" if isinstance(node, ast.Break) else "continue")
                return False
            case ast.Pass():
                pass
            case ast.Expr() if abort_call(node.value) is not None:
                self.abort(node)
                return False
            case ast.Expr(value=ast.Call() as call):
                self.called(call)
            case _:
                raise CannotCompile(node, f"{ast.unparse(node).splitlines()[0]}: {type(node).__name__}")
        return True

    def leave(self, status: int | str = RETURNED) -> None:
        self.write(f"st = {status}")
        self.write("break")

    def assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if len(node.targets) == 1 and isinstance(target, ast.Tuple):
            if not isinstance(node.value, ast.Tuple) or len(node.value.elts) != len(target.elts):
                raise CannotCompile(node, "an assignment of other than as many values as names")
            # All values first: the targets may be among them.
            values = [self.ex.value(part) for part in node.value.elts]
            kept = [self.ex.copied(value) for value in values]
            for part, value in zip(target.elts, kept, strict=True):
                self.set_value(part, value)
        elif len(node.targets) == 1:
            self.set_target(target, node.value)
        else:
            value = self.ex.copied(self.ex.value(node.value))
            for part in node.targets:
                self.set_value(part, value)

    def set_target(self, target: ast.expr, value: ast.expr) -> None:
        if is_collection(value) and isinstance(target, ast.Name):
            self.collect(target.id, value)
        elif self.is_row(value):
            if not isinstance(target, ast.Name):
                raise refuse(self.found.tree, value, "a row is used as a value")
            self.bind_row(target.id, value)
            self.row_of[target.id] = self.table_of(value)
            self.ex.env.pop(target.id, None)
            self.ex.maybe.discard(target.id)
        else:
            self.set_value(target, self.ex.value(value))

    def collect(self, name: str, value: ast.expr) -> None:
        """A new list or set."""
        if isinstance(value, ast.Call) and (value.args or value.keywords):
            raise CannotCompile(value, f"{ast.unparse(value)}: an empty one is filled")
        is_set = isinstance(value, ast.Set) or ast.unparse(value).startswith("set")
        own = self.ex.collections.setdefault(name, Collection(name, is_set))
        known_as = self.ex.env.get(name, COLLECTION)
        if own.is_set != is_set or known_as != COLLECTION or name in self.fields or name in self.row_of:
            raise CannotCompile(value, f"{name!r} is something else elsewhere")
        first = "{to_long(0)}" if is_set else "[to_long(0)]"
        elements = [self.ex.value(part) for part in getattr(value, "elts", [])]
        self.write(f"{own.variable} = {first}")
        self.write(f"{own.variable}.clear()")
        self.ex.env[name] = COLLECTION
        self.ex.maybe.discard(name)
        for element in elements:
            self.put_in(value, own, element)

    def put_in(self, node: ast.AST, own: Collection, value: Value) -> None:
        own.holds(node, value.type)
        self.write(f"{own.variable}.{'add' if own.is_set else 'append'}(to_long({value.text}))")

    def called(self, node: ast.Call) -> None:
        """A call that stands alone."""
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name() as name, attr=method), args=[part], keywords=[]
            ):
                own = self.ex.collection(name)
                if own is not None and method == ("add" if own.is_set else "append"):
                    self.put_in(node, own, self.ex.value(part))
                    return
        raise CannotCompile(node, f"{ast.unparse(node)}: a call of its own")

    def is_row(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self.row_of
        return node in self.found.slot_of and not isinstance(node, ast.Compare)

    def table_of(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            if node.id in self.ex.maybe:
                raise CannotCompile(node, f"{node.id!r} is set on some paths only")
            return self.row_of[node.id]
        return self.found.slot_of[node].table

    def set_value(self, target: ast.expr, value: Value) -> None:
        match target:
            case ast.Name():
                self.set_variable(target.id, value)
            case ast.Attribute():
                self.write_column(target, value)
            case _:
                raise CannotCompile(target, f"an assignment to {ast.unparse(target)}")

    def set_variable(self, name: str, value: Value) -> None:
        if name in self.ex.collections:
            raise CannotCompile(self.found.tree, f"{name!r} is a list or a set elsewhere")
        if name in self.fields and self.fields[name].is_list:
            raise CannotCompile(self.found.tree, f"the list {name!r} is assigned to")
        self.ex.env[name] = value.type
        self.ex.maybe.discard(name)
        self.row_of.pop(name, None)
        self.ex.store(self.found.tree, self.ex.variable(name, value.type), value, value.type)

    def augment(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            left = self.ex.name(node.target)
        elif isinstance(node.target, ast.Attribute):
            left = self.ex.value(node.target)
        else:
            raise CannotCompile(node, f"an assignment to {ast.unparse(node.target)}")
        self.set_value(node.target, self.ex.operation(node, node.op, left, self.ex.value(node.value)))

    # Paths

    def branch(self, node: ast.If) -> bool:
        test = self.ex.test(node.test)
        before = self.state()
        ends: list[tuple[list[str], dict[str, ValueType], set[str], dict[str, str], bool]] = []
        for body in (node.body, node.orelse):
            self.restore(before)
            with self.apart() as lines:
                goes_on = self.block(body)
            ends.append((lines, self.ex.env, self.ex.maybe, self.row_of, goes_on))
        self.restore(before)
        alive = [end for end in ends if end[4]]
        types, maybe, rows = self.joined(node, alive)
        for word, (lines, env, _, _, goes_on) in zip((f"if {test}:", "else:"), ends, strict=True):
            with self.apart() as conversions:
                if goes_on:
                    self.convert(env, types)
            if lines or conversions or word != "else:":
                with self.write.under(word):
                    self.write.lines += [*lines, *conversions]
        if alive:
            self.ex.env, self.ex.maybe, self.row_of = types, maybe, rows
        return bool(alive)

    def state(self) -> tuple[dict[str, ValueType], set[str], dict[str, str], set[str]]:
        return dict(self.ex.env), set(self.ex.maybe), dict(self.row_of), set(self.ex.known)

    def restore(self, state: tuple[dict[str, ValueType], set[str], dict[str, str], set[str]]) -> None:
        self.ex.env, self.ex.maybe = dict(state[0]), set(state[1])
        self.row_of, self.ex.known = dict(state[2]), set(state[3])

    @contextmanager
    def apart(self) -> Iterator[list[str]]:
        """Code one level deeper, kept aside."""
        kept, lines = self.write.lines, list[str]()
        self.write.lines = lines
        self.write.depth += 1
        yield lines
        self.write.depth -= 1
        self.write.lines = kept

    def joined(
        self,
        node: ast.AST,
        ends: Sequence[tuple[list[str], dict[str, ValueType], set[str], dict[str, str], bool]],
    ) -> tuple[dict[str, ValueType], set[str], dict[str, str]]:
        types: dict[str, ValueType] = {}
        maybe: set[str] = set()
        rows: dict[str, str] = {}
        for _, env, unset, row_of, _ in ends:
            maybe |= unset
            for name in (*env, *row_of):
                everywhere = all(name in end[1] for end in ends)
                tables = {end[3].get(name) for end in ends}
                if everywhere:
                    try:
                        types[name] = self.ex.joined(node, [end[1][name] for end in ends])
                    except CannotCompile:
                        maybe.add(name)
                elif len(tables) == 1 and None not in tables:
                    rows[name] = row_of[name]
                else:
                    maybe.add(name)
        return types, maybe, rows

    def convert(self, env: Mapping[str, ValueType], types: Mapping[str, ValueType]) -> None:
        """The variables under the types that they have on another path."""
        for name, type_ in types.items():
            if name in env and env[name] != type_:
                value = Value(env[name], self.ex.variable(name, env[name]))
                self.ex.store(self.found.tree, self.ex.variable(name, type_), value, type_)

    # Loops

    def loop(self, node: ast.For) -> None:
        count, targets = self.iteration(node)
        n = self.write.fresh("n")
        self.write(f"{n} = {count}")
        frame = self.found.frame_of.get(node, 0)
        framed = self.has_frames and frame > 0 and self.found.frame_sizes[frame] > 0
        if framed:
            self.enter_frame(frame, n)
        self.before_rounds(node, n, targets)
        it = self.write.fresh("it")

        def begin() -> str:
            if framed:
                self.write(f"fr{frame} = b{frame} + {it} * {self.found.frame_sizes[frame]}")
            for target, form in targets:
                self.set_variable(target, Value(form[0], form[1].format(it=it)))
            return ""

        self.rounds_of(node, f"for {it} in range({n}):", begin)

    def repeat(self, node: ast.While) -> None:
        count = self.write.fresh("n")
        self.write(f"{count} = 0")

        def begin() -> str:
            self.write.fail(f"{count} > {RANGE_STEPS_MAX}", ROUNDS)
            self.write(f"{count} = {count} + 1")
            return self.ex.test(node.test)

        self.rounds_of(node, "while True:", begin)

    def rounds_of(self, node: ast.For | ast.While, head: str, begin: Callable[[], str]) -> None:
        """The rounds of a loop. `begin` writes what each begins with, and gives the condition on which it goes on."""
        before = self.state()
        start = before[0]
        while True:
            self.restore(before)
            self.ex.env = dict(start)
            rounds = _Rounds(dict(start), dict(before[2]), {})
            self.rounds.append(rounds)
            with self.apart() as lines:
                test = begin()
                if test:
                    with self.write.under(f"if not ({test}):"):
                        self.write("break")
                if self.block(node.body):
                    self.meet(node)
            self.rounds.pop()
            if not rounds.wider:
                break
            start = {**start, **rounds.wider}
        set_inside = set(bound_names(node)) & (set(self.ex.env) | set(self.row_of) | self.ex.maybe)
        self.restore(before)
        self.convert(before[0], start)
        with self.write.under(head):
            self.write.lines += lines
        with self.write.under("if st != 0:"):
            self.write("break")
        self.ex.env = dict(start)
        for name in set_inside:
            if name not in start and name not in before[2]:
                self.ex.maybe.add(name)

    def meet(self, node: ast.stmt) -> None:
        """The end of a round: its variables take the types that the next one, or what follows, expects."""
        rounds = self.rounds[-1]
        for name, type_ in rounds.types.items():
            if name in self.ex.maybe or name not in self.ex.env:
                raise CannotCompile(node, f"{name!r} is set on some paths of a loop only")
            wider = self.ex.joined(node, [type_, self.ex.env[name]])
            if wider != type_:
                rounds.wider[name] = wider
        for name, table in rounds.rows.items():
            if self.row_of.get(name) != table:
                raise CannotCompile(node, f"{name!r} is a row of {table!r} in some rounds of a loop only")
        if not rounds.wider:  # or else the round is written again, of wider types
            self.convert(self.ex.env, rounds.types)

    def iteration(self, node: ast.For) -> tuple[str, list[LoopVariable]]:
        """How many rounds, and what each of the loop's variables is in one."""
        over = node.iter
        names = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
        if not all(isinstance(name, ast.Name) for name in names):
            raise CannotCompile(node, f"a loop over {ast.unparse(node.target)}")
        targets = [name.id for name in names if isinstance(name, ast.Name)]
        own = self.ex.collection(over)
        if own is not None:
            if own.type is None or own.is_set:
                raise CannotCompile(node, f"a loop over {ast.unparse(over)}")
            if changes_list(node.body, own.name):
                raise CannotCompile(node, f"the list {own.name!r} changes while a loop goes over it")
            values, count = [(own.type, f"{own.variable}[{{it}}]")], f"len({own.variable})"
        elif self.ex.list_field(over) is not None:
            values, count = [self.of_list(over)], f"size_{self.list_name(over)}"
        elif isinstance(over, ast.Call) and isinstance(over.func, ast.Name) and not over.keywords:
            name = over.func.id
            lists = all(self.ex.list_field(a) is not None for a in over.args)
            if name == "range" and 1 <= len(over.args) <= 3:
                values, count = self.of_range(over)
            elif name == "enumerate" and len(over.args) == 1 and lists:
                values = [("long", "{it}"), self.of_list(over.args[0])]
                count = f"size_{self.list_name(over.args[0])}"
            elif name == "zip" and over.args and lists:
                values = [self.of_list(a) for a in over.args]
                sizes = [f"size_{self.list_name(a)}" for a in over.args]
                count = sizes[0] if len(sizes) == 1 else f"min({', '.join(sizes)})"
            else:
                raise CannotCompile(node, f"a loop over {ast.unparse(over)}")
        else:
            raise CannotCompile(node, f"a loop over {ast.unparse(over)}")
        if len(values) != len(targets):
            raise CannotCompile(node, f"{len(values)} values for {len(targets)} names")
        return count, list(zip(targets, values, strict=True))

    @staticmethod
    def list_name(node: ast.expr) -> str:
        assert isinstance(node, ast.Name)
        return node.id

    def of_list(self, node: ast.expr) -> tuple[Type, str]:
        found = self.ex.list_field(node)
        assert found is not None
        return found.type, self.ex.list_item(found, "{it}")

    def of_range(self, node: ast.Call) -> tuple[list[tuple[Type, str]], str]:
        values = [self.ex.number(node, self.ex.value(argument)) for argument in node.args]
        if any(value.type != "long" for value in values):
            raise CannotCompile(node, "a range over other than longs")
        parts = [self.ex.temporary("long", value.text).text for value in values]
        start, stop, step = ("0", parts[0], "1") if len(parts) == 1 else (*parts, "1")[:3]
        if step != "1":
            self.write.fail(f"{step} == 0", STEP)
        count = self.ex.temporary("long", f"steps({start}, {stop}, {step})").text
        self.write.fail(f"{count} > {RANGE_STEPS_MAX}", STEPS)
        return [("long", f"add({start}, mul({{it}}, {step}))")], count
