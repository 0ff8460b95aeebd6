"""The second kernel of a function: what it does, over row numbers. Writes go to the cells, with a log to undo them."""

from __future__ import annotations

import ast

from millpond.code.tables import Type
from millpond.txn.compiler import arguments
from millpond.txn.compiler.facts import Slot
from millpond.txn.compiler.keycode import checked_key
from millpond.txn.compiler.statements import Statements
from millpond.txn.compiler.syntax import abort_call, reason_of, refuse
from millpond.txn.compiler.values import (
    FIRST_MISSING,
    FULL,
    INDEX,
    RETURNED,
    RETURNED_NOTHING,
    CannotCompile,
    Value,
    ValueType,
)

LOG_FIRST = 256  # cells that the log has room for at first
PART_SHIFT = 5  # rows of one part lie in blocks, so that two threads do not write to one cache line


class BodyCode(Statements):
    """Runs event i. `apart` writes the form whose operations run on the thread that owns their row."""

    apart_by_row = False
    logs = True
    first_abort = 0

    def event(self, result_types: list[Type] | None) -> None:
        self.reasons: list[str] = []
        self.returned: list[list[ValueType]] = []
        self.result_types = result_types
        self.fails_at_start = self.write.fails
        self.fails_at_write: int | None = None
        self.writes_in_loop = False
        self.logged = 0  # as the text goes
        single = self.apart_by_row and self.found.single
        with self.write.under("while True:"):
            self.load_fields()
            start = f"{arguments.first_slots(self.kind)}[i]" if self.has_frames else f"i * {self.first_frame}"
            self.write(f"fr0 = {start}")
            if single:
                slot = self.found.slots[0]
                self.write(f"own = {arguments.slots(self.kind)}[fr0 + {slot.place}]")
                self.write(f"if own >= 0 and (own >> {PART_SHIFT}) & (parts - 1) != part:")
                self.write("    break")
            if self.block(self.found.tree.body):
                self.write("break")

    def statement(self, node: ast.stmt) -> bool:
        sources = self.found.sources.get(node, frozenset())
        if (
            not self.apart_by_row
            or self.found.single
            or not sources
            or isinstance(node, (ast.For, ast.Return))
        ):
            return super().statement(node)
        (slot,) = sources
        name = f"own {slot}"
        if name in self.ex.known:
            return super().statement(node)
        with self.write.under(f"if {self.is_own(slot)}:"):
            known = set(self.ex.known)
            self.ex.known.add(name)
            super().statement(node)
            self.ex.known = known
        # Elsewhere the function goes on: what depends on this row is not done there.
        return True

    # Rows

    def is_own(self, slot: int) -> str:
        """Whether the row is this thread's. Where its key is at fault, all threads find that out in due order."""
        found, name = self.found.slots[slot], f"q{slot}"
        self.write(f"{name} = {arguments.slots(self.kind)}[fr{found.frame} + {found.place}]")
        return f"{name} < 0 or ({name} >> {PART_SHIFT}) & (parts - 1) == part"

    def row_number(self, node: ast.Subscript, slot: Slot) -> str:
        name = f"r{slot.number}"
        if name in self.ex.known:
            return name
        self.write(f"{name} = {arguments.slots(self.kind)}[fr{slot.frame} + {slot.place}]")
        kept, fails = len(self.write.lines), self.write.fails
        with self.ex.sometimes():
            self.write(f"if {name} < 0:")
            self.write.depth += 1
            checked_key(self, node, slot)
            self.leave(INDEX)
        if self.write.fails == fails:
            del self.write.lines[kept:]
        self.ex.known.add(name)
        return name

    def row(self, node: ast.expr) -> tuple[str, str]:
        """The variable that holds the row's number, and the row's table."""
        table = self.table_of(node)
        if isinstance(node, ast.Name):
            return f"v_{node.id}_r", table
        assert isinstance(node, ast.Subscript)
        return self.row_number(node, self.found.slot_of[node]), table

    def bind_row(self, name: str, node: ast.expr) -> None:
        row, _ = self.row(node)
        self.write(f"v_{name}_r = {row}")

    def establish(self, fact: str) -> None:
        """Keeps what holds of a row from here on. Of a variable that holds a row it may not: it can be set again."""
        if " v_" not in fact:
            self.ex.known.add(fact)

    def cell(self, node: ast.Attribute, table: str) -> tuple[int, Type]:
        found = self.tables[table].columns.get(node.attr)
        if found is None:
            raise refuse(
                self.found.tree,
                node,
                f"table {table!r} has no column {node.attr!r}",
                hint=f"its columns are {', '.join(self.tables[table].columns)}",
            )
        return found

    def array(self, table: str, type_: Type) -> str:
        number = self.tables[table].number
        return arguments.doubles(number) if type_ == "double" else arguments.cells(number)

    def column(self, node: ast.Attribute) -> Value:
        if not self.is_row(node.value):
            raise CannotCompile(node, f"{ast.unparse(node)} is no column")
        row, table = self.row(node.value)
        number = self.tables[table].number
        cell, type_ = self.cell(node, table)
        if not self.tables[table].has_default and not {f"live {row}", f"made {row}"} & self.ex.known:
            self.write.fails += 1
            with self.write.under(f"if {arguments.cells(number)}[{row}, 0] == 0:"):
                self.write(f"detail[e] = {row}")
                self.leave(FIRST_MISSING + number)
            self.establish(f"live {row}")
        array = self.array(table, type_)
        return self.ex.temporary(type_, f"{array}[{row}, {cell}]{self.ex.loaded(type_)}")

    def write_column(self, node: ast.Attribute, value: Value) -> None:
        if not self.is_row(node.value):
            raise CannotCompile(node, f"{ast.unparse(node)} is no column")
        row, table = self.row(node.value)
        layout = self.tables[table]
        cell, type_ = self.cell(node, table)
        match type_, value.type:
            case ("long", "long") | ("string", "string") | ("double", "double"):
                text = value.text
            case ("long", "bool") | ("bool", "bool"):
                text = f"to_long({value.text})"
            case ("double", "long" | "bool" | "number"):
                text = self.ex.as_double(value).text
            case ("long", "number"):
                raise CannotCompile(node, "a number that may be a double, for a long column")
            case _:
                raise refuse(
                    self.found.tree,
                    node,
                    f"{ast.unparse(node)} is a {type_} column, the value is a {value.type}",
                    hint="int(...) and float(...) convert",
                )
        if self.fails_at_write is None:
            self.fails_at_write = self.write.fails
        self.writes_in_loop = self.writes_in_loop or bool(self.rounds)
        if f"made {row}" not in self.ex.known:
            with self.write.under(f"if {arguments.cells(layout.number)}[{row}, 0] == 0:"):
                self.log(row, 0, layout.number)
                self.write(f"{arguments.cells(layout.number)}[{row}, 0] = 1")
            self.establish(f"made {row}")
        self.log(row, cell, layout.number)
        array = self.array(table, type_)
        self.write(f"{array}[{row}, {cell}] = {text}")

    def log(self, row: str, cell: int, number: int) -> None:
        if not self.logs:
            return
        width = max(layout.width for layout in self.tables.values())
        self.logged += 1
        if self.writes_in_loop or self.logged > LOG_FIRST:
            with self.write.under("if n_log == room:"):
                self.leave(FULL)
        self.write(f"log_at[n_log] = ({row} * {width} + {cell}) * {len(self.tables)} + {number}")
        self.write(f"log_old[n_log] = {arguments.cells(number)}[{row}, {cell}]")
        self.write("n_log += 1")

    @property
    def needs_log(self) -> bool:
        """Whether it can fail after a write. A fault in a loop may find the writes of an earlier round."""
        if self.fails_at_write is None:
            return False
        start = self.fails_at_start if self.writes_in_loop else self.fails_at_write
        return self.write.fails > start

    # Ends

    def result(self, node: ast.Return) -> None:
        if node.lineno in self.found.results and self.found.results[node.lineno].depends is None:
            self.leave(RETURNED_NOTHING)
            return
        assert node.value is not None
        parts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        self.returned.append([self.result_value(node, place, part) for place, part in enumerate(parts)])
        self.leave(RETURNED)

    def result_value(self, node: ast.Return, place: int, part: ast.expr) -> ValueType:
        depends = (self.found.results[node.lineno].depends or ())[place]
        depth, known = self.write.depth, set(self.ex.known)
        if self.apart_by_row and not self.found.single and depends:
            (slot,) = depends
            if f"own {slot}" not in self.ex.known:
                self.write(f"if {self.is_own(slot)}:")
                self.write.depth += 1
        value = self.ex.value(part)
        given = value.type
        type_ = given if self.result_types is None else self.result_types[place]
        value = self.ex.converted(node, value, type_)
        text = f"to_long({value.text})" if type_ == "bool" else value.text
        self.write(f"{arguments.result(self.kind, place)}[i] = {text}")
        self.write.depth, self.ex.known = depth, known
        return given

    def abort(self, node: ast.Expr) -> None:
        call = abort_call(node.value)
        assert call is not None
        reason = reason_of(call)
        if reason is None:
            raise CannotCompile(node, "abort with a reason that is not a constant")
        if reason not in self.reasons:
            self.reasons.append(reason)
        self.write.fails += 1
        self.leave(self.first_abort + self.reasons.index(reason))

    def enter_frame(self, frame: int, count: str) -> None:
        parent, pointer = self.found.frames[frame].parent, self.found.frames[frame].pointer
        self.write(f"b{frame} = fr0 + {arguments.slots(self.kind)}[fr{parent} + {pointer}]")
