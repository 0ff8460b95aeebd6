"""The second kernel of a function: what it does, over row numbers. Writes go to the cells, with a log to undo them."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from millpond.code.tables import Type
from millpond.stores.tables import Column, TableLayout
from millpond.txn.compiler import arguments
from millpond.txn.compiler.facts import Slot
from millpond.txn.compiler.keycode import checked_key
from millpond.txn.compiler.statements import Statements
from millpond.txn.compiler.syntax import abort_call, names_made_of_calls, reason_of, refuse
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
    declared: Sequence[Column | None] = ()  # what results were said to be

    def event(self, result_types: list[Type] | None) -> None:
        self.reasons: list[str] = []
        self.row_tables: dict[str, str] = {}  # of variables of which something is known
        self.returned: dict[int, list[ValueType]] = {}  # the types of each result
        self.result_types = result_types
        self.fails_at_start = self.write.fails
        self.fails_at_write: int | None = None
        self.writes_in_loop = False
        self.logged = 0  # as the text goes
        self.uses: set[str] = set()  # arguments beyond those of every body
        self.optional = names_made_of_calls(self.found.tree)
        single = self.apart_by_row and self.found.single
        with self.write.under("while True:"):
            self.load_fields()
            self.begin()
            if single:
                slot = self.found.slots[0]
                self.write(f"own = {arguments.slots(self.kind)}[fr0 + {slot.place}]")
                self.write(f"if own >= 0 and (own >> {PART_SHIFT}) & (parts - 1) != part:")
                self.write("    break")
            if self.block(self.found.tree.body):
                self.write("break")

    def begin(self) -> None:
        start = f"{arguments.first_slots(self.kind)}[i]" if self.has_frames else f"i * {self.first_frame}"
        self.write(f"fr0 = {start}")

    def statement(self, node: ast.stmt) -> bool:
        deleted = {
            self.found.slot_of[target].table
            for n in ast.walk(node)
            if isinstance(n, ast.Delete)
            for target in n.targets
        }
        if deleted and isinstance(node, ast.For | ast.While):
            self.forget(deleted)
        goes_on = self.own_statement(node)
        if deleted:
            self.forget(deleted)
        return goes_on

    def own_statement(self, node: ast.stmt) -> bool:
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

    def row_number(self, node: ast.AST, slot: Slot) -> str:
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
        if isinstance(node, ast.Call):
            return self.row_there(node), table
        return self.row_number(node, self.found.slot_of[node]), table

    def row_there(self, node: ast.AST) -> str:
        """The row if it is there, else -1."""
        slot = self.found.slot_of[node]
        row, name = self.row_number(node, slot), self.write.fresh()
        cells = arguments.cells(self.tables[slot.table].number)
        self.write(f"{name} = {row}")
        with self.write.under(f"if {cells}[{row}, 0] == 0:"):
            self.write(f"{name} = -1")
        return name

    def bind_row(self, name: str, node: ast.expr) -> None:
        row, _ = self.row(node)
        self.write(f"v_{name}_r = {row}")

    def checked_row(self, node: ast.Attribute) -> tuple[str, str]:
        """The row of a column, and its table. The event ends where it is None, which only `get` gives."""
        row, table = self.row(node.value)
        if isinstance(node.value, ast.Call) or getattr(node.value, "id", None) in self.optional:
            reason = f"AttributeError: 'NoneType' object has no attribute {node.attr!r}"
            self.write.fail(f"{row} < 0", self.status_of(reason))
        return row, table

    def asked(self, node: ast.Compare) -> Value | None:
        """`key in table`, `key not in table`, `row is None` and `row is not None`."""
        negated = isinstance(node.ops[0], ast.NotIn | ast.IsNot)
        if isinstance(node.ops[0], ast.Is | ast.IsNot):
            other = node.comparators[0]
            is_none = isinstance(other, ast.Constant) and other.value is None
            if not is_none or not isinstance(node.left, ast.Name) or node.left.id not in self.row_of:
                return None
            self.table_of(node.left)
            row = f"v_{node.left.id}_r"
            return self.ex.temporary("bool", f"{row} >= 0" if negated else f"{row} < 0")
        if node not in self.found.slot_of:
            return None
        row = self.row_there(node)
        return self.ex.temporary("bool", f"{row} < 0" if negated else f"{row} >= 0")

    def delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            slot = self.found.slot_of[target]
            row, layout = self.row_number(target, slot), self.tables[slot.table]
            self.check_there(row, layout)
            self.will_write(row, layout)
            cells, first = arguments.cells(layout.number), arguments.first_row(layout.number)
            self.uses.add(first)
            for cell in range(layout.width):
                self.log(row, cell, layout.number)
                self.write(f"{cells}[{row}, {cell}] = {first}[{cell}]")
            self.forget({slot.table})

    def forget(self, tables: set[str]) -> None:
        """Of rows of these tables, whether they are there: a row may have two names."""
        gone = {
            f"{what} {row}"
            for row, table in self.row_tables.items()
            if table in tables
            for what in ("live", "made")
        }
        self.ex.known -= gone

    def establish(self, fact: str, table: str) -> None:
        """Keeps what holds of a row from here on. Of a variable that holds a row it may not: it can be set again."""
        if " v_" not in fact:
            self.ex.known.add(fact)
            self.row_tables[fact.split()[1]] = table

    def cell(self, node: ast.Attribute, table: str) -> Column:
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

    def check_there(self, row: str, layout: TableLayout) -> None:
        """The event ends where the row is not there."""
        if {f"live {row}", f"made {row}"} & self.ex.known:
            return
        self.write.fails += 1
        with self.write.under(f"if {arguments.cells(layout.number)}[{row}, 0] == 0:"):
            self.write(f"detail[e] = {row}")
            self.leave(FIRST_MISSING + layout.number)
        self.establish(f"live {row}", layout.name)

    def column(self, node: ast.Attribute) -> Value:
        if not self.is_row(node.value):
            raise CannotCompile(node, f"{ast.unparse(node)} is no column")
        row, table = self.checked_row(node)
        column = self.cell(node, table)
        if not self.tables[table].has_default:
            self.check_there(row, self.tables[table])
        array = self.array(table, column.type)
        return self.ex.temporary(column.type, f"{array}[{row}, {column.cell}]{self.ex.loaded(column.type)}")

    def write_column(self, node: ast.Attribute, value: Value) -> None:
        if not self.is_row(node.value):
            raise CannotCompile(node, f"{ast.unparse(node)} is no column")
        row, table = self.checked_row(node)
        layout = self.tables[table]
        column = self.cell(node, table)
        cell, type_ = column.cell, column.type
        if (type_, value.type) == ("long", "number"):
            raise CannotCompile(node, "a number that may be a double, for a long column")
        overflow = 0
        if column.is_narrow:
            overflow = self.status_of(f"overflow: {table}.{node.attr} is {column.ddl}")
        fits = self.ex.fitted(node, value, column, overflow)
        if fits is None:
            raise refuse(
                self.found.tree,
                node,
                f"{ast.unparse(node)} is a {type_} column, the value is a {value.type}",
                hint="int(...) and float(...) convert",
            )
        text = f"to_long({fits.text})" if fits.type == "bool" else fits.text
        self.will_write(row, layout)
        if f"made {row}" not in self.ex.known:
            with self.write.under(f"if {arguments.cells(layout.number)}[{row}, 0] == 0:"):
                self.log(row, 0, layout.number)
                self.write(f"{arguments.cells(layout.number)}[{row}, 0] = 1")
            self.establish(f"made {row}", table)
        self.log(row, cell, layout.number)
        array = self.array(table, type_)
        self.write(f"{array}[{row}, {cell}] = {text}")

    def will_write(self, row: str, layout: TableLayout) -> None:
        """From here on an event that ends has something to undo."""
        if self.fails_at_write is None:
            self.fails_at_write = self.write.fails
        self.writes_in_loop = self.writes_in_loop or bool(self.rounds)

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
        for place, part in enumerate(parts):
            self.result_value(node, place, part)
        self.leave(RETURNED)

    def result_value(self, node: ast.Return, place: int, part: ast.expr) -> None:
        depends = (self.found.results[node.lineno].depends or ())[place]
        depth, known = self.write.depth, set(self.ex.known)
        if self.apart_by_row and not self.found.single and depends:
            (slot,) = depends
            if f"own {slot}" not in self.ex.known:
                self.write(f"if {self.is_own(slot)}:")
                self.write.depth += 1
        self.put_result(node, place, part)
        self.write.depth, self.ex.known = depth, known

    def put_result(self, node: ast.Return, place: int, part: ast.expr) -> None:
        """One value, or None: a null."""
        if isinstance(part, ast.Constant) and part.value is None:
            null = arguments.null_result(self.kind, place)
            self.uses.add(null)
            self.write(f"{null}[i] = 1")
            return
        if isinstance(part, ast.IfExp) and any(
            isinstance(way, ast.Constant) and way.value is None for way in (part.body, part.orelse)
        ):
            with self.ex.sometimes(), self.write.under(f"if {self.ex.test(part.test)}:"):
                self.put_result(node, place, part.body)
            with self.ex.sometimes(), self.write.under("else:"):
                self.put_result(node, place, part.orelse)
            return
        value, column = self.ex.value(part), self.declared[place]
        if column is not None:
            status = self.status_of(f"overflow: a result is {column.ddl}") if column.is_narrow else 0
            value = self.ex.fitted(node, value, column, status) or value
        self.returned.setdefault(place, []).append(value.type)
        type_ = value.type if self.result_types is None else self.result_types[place]
        value = self.ex.converted(node, value, type_)
        text = f"to_long({value.text})" if type_ == "bool" else value.text
        self.write(f"{arguments.result(self.kind, place)}[i] = {text}")

    def abort(self, node: ast.Expr) -> None:
        call = abort_call(node.value)
        assert call is not None
        reason = reason_of(call)
        if reason is None:
            raise CannotCompile(node, "abort with a reason that is not a constant")
        self.write.fails += 1
        self.leave(self.status_of(reason))

    def status_of(self, reason: str) -> int:
        """The status of events that end for this reason."""
        if reason not in self.reasons:
            self.reasons.append(reason)
        return self.first_abort + self.reasons.index(reason)

    def enter_frame(self, frame: int, count: str) -> None:
        parent, pointer = self.found.frames[frame].parent, self.found.frames[frame].pointer
        self.write(f"b{frame} = fr0 + {arguments.slots(self.kind)}[fr{parent} + {pointer}]")
