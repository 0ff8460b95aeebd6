"""The one kernel of a function whose keys come from rows: it finds its rows, and makes them, while it runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from millpond.stores.tables import TableLayout
from millpond.txn.compiler import arguments
from millpond.txn.compiler.bodycode import BodyCode
from millpond.txn.compiler.facts import Slot
from millpond.txn.compiler.keycode import checked_key
from millpond.txn.compiler.statements import LoopVariable
from millpond.txn.compiler.syntax import bound_names, key_of, key_parts
from millpond.txn.compiler.values import NO_ROOM, Value

ASKED_AHEAD = (
    32  # rounds of a loop: more lines than that may be gone from the nearest cache when their turn comes
)


class LateCode(BodyCode):
    """Runs event i over the index of rows. A row that was found is known until a name in its key changes."""

    def begin(self) -> None:
        self.row_keys: dict[str, set[str]] = {}  # the names in the key of a row that is known, by the fact

    def own_statement(self, node: ast.stmt) -> bool:
        compound = isinstance(node, ast.If | ast.For | ast.While)
        if isinstance(node, ast.For | ast.While):
            self.forget_rows(set(bound_names(node)))
        goes_on = super().own_statement(node)
        if compound:
            self.forget_rows(set(bound_names(node)))
        return goes_on

    def set_variable(self, name: str, value: Value) -> None:
        super().set_variable(name, value)
        self.forget_rows({name})

    def forget_rows(self, names: set[str]) -> None:
        self.ex.known -= {fact for fact, of in self.row_keys.items() if of & names}

    def before_rounds(self, node: ast.For, count: str, targets: Sequence[LoopVariable]) -> None:
        """Memory is asked for the rows of the first rounds at once, as far as their keys are known before: the rounds
        themselves would wait for one after the other."""
        set_inside = set().union(*(bound_names(statement) for statement in node.body))
        it = self.write.fresh("it")
        values = {name: value for name, (_, value) in targets if name not in set_inside}
        fixed = {
            name: self.ex.variable(name, type_)
            for name, type_ in self.ex.env.items()
            if type_ in ("long", "string") and name not in set_inside and name not in values
        }
        keys: dict[tuple[str, tuple[str, ...]], None] = {}
        for site in _sites(node.body):
            parts = key_parts(site) if site in self.found.slot_of else []
            names = [part.id for part in parts if isinstance(part, ast.Name)]
            known = all(name in values or name in fixed for name in names)
            if len(names) == len(parts) and known and not values.keys().isdisjoint(names):
                texts = [values[name].format(it=it) if name in values else fixed[name] for name in names]
                keys[self.found.slot_of[site].table, tuple(f"to_long({text})" for text in texts)] = None
        if not keys:
            return
        rounds = self.write.fresh("n")
        self.write(f"{rounds} = min({count}, {ASKED_AHEAD})")
        for ask in (self.ask_for_slot, self.ask_for_row):
            with self.write.under(f"for {it} in range({rounds}):"):
                for table, key in keys:
                    ask(self.tables[table].number, key)

    def ask_for_slot(self, table: int, key: Sequence[str]) -> None:
        if len(key) > 1:
            slots = self.use(arguments.row_slots(table))
            self.write(f"ask_for_slot(({', '.join(key)}), {self.use('secret')}, {slots})")

    def ask_for_row(self, table: int, key: Sequence[str]) -> None:
        cells = arguments.cells(table)
        if len(key) == 1:
            self.write(f"ask_for_known({key[0]}, {self.use(arguments.known_rows(table))}, {cells})")
        else:
            names = map(self.use, ("secret", arguments.row_slots(table), arguments.row_keys(table)))
            self.write(f"ask_for_row(({', '.join(key)}), {', '.join(names)}, {cells})")

    def row_number(self, node: ast.AST, slot: Slot) -> str:
        fact = f"row {slot.table}[{slot.key}] "
        for known in self.ex.known:
            if known.startswith(fact):
                return known.removeprefix(fact)
        row, key = self.write.fresh("r"), self.key(node, slot)
        layout = self.tables[slot.table]
        if len(layout.keys) == 1:
            self.write(f"{row} = known_row({self.use(arguments.known_rows(layout.number))}, {key})")
            with self.write.under(f"if {row} < 0:"):
                self.write(f"{row} = {self.made(layout, f'({key},)')}")
        else:
            self.write(f"{row} = {self.made(layout, key)}")
        with self.write.under(f"if {row} < 0:"):
            self.leave(NO_ROOM)
        if not any(
            isinstance(part, ast.Attribute | ast.Subscript | ast.Compare | ast.Call)
            for part in ast.walk(key_of(node))
        ):
            names = {part.id for part in ast.walk(key_of(node)) if isinstance(part, ast.Name)}
            self.row_keys[fact + row] = names
            self.ex.known.add(fact + row)
        return row

    def row_there(self, node: ast.AST) -> str:
        slot = self.found.slot_of[node]
        name, layout = self.write.fresh("r"), self.tables[slot.table]
        key = self.key(node, slot)
        if len(layout.keys) == 1:
            self.write(f"{name} = known_row({self.use(arguments.known_rows(layout.number))}, {key})")
            with self.write.under(f"if {name} < 0:"):
                self.write(f"{name} = {self.looked_up(layout, f'({key},)')}")
        else:
            self.write(f"{name} = {self.looked_up(layout, key)}")
        with self.write.under(f"if {name} >= 0 and {arguments.cells(layout.number)}[{name}, 0] == 0:"):
            self.write(f"{name} = -1")
        return name

    def key(self, node: ast.AST, slot: Slot) -> str:
        parts = [
            self.ex.temporary("long", f"to_long({part.text})").text for part in checked_key(self, node, slot)
        ]
        return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"

    def made(self, layout: TableLayout, key: str) -> str:
        number = layout.number
        names = (
            arguments.row_slots(number), arguments.row_keys(number), arguments.row_count(number),
        )  # fmt: skip
        taken = ", ".join(map(self.use, ("secret", *names)))
        return f"row_of({key}, {taken}, {arguments.cells(number)}, {self.use(arguments.first_row(number))})"

    def looked_up(self, layout: TableLayout, key: str) -> str:
        names = ("secret", arguments.row_slots(layout.number), arguments.row_keys(layout.number))
        return f"find_row({key}, {', '.join(map(self.use, names))})"

    def use(self, name: str) -> str:
        self.uses.add(name)
        return name

    def will_write(self, row: str, layout: TableLayout) -> None:
        """The row as it was before the epoch is kept."""
        super().will_write(row, layout)
        if f"kept {row}" not in self.ex.known:
            names = (arguments.cells(layout.number), *map(self.use, arguments.kept(layout.number)))
            with self.write.under(f"if not keep_row({row}, {', '.join(names)}):"):
                self.leave(NO_ROOM)
            self.establish(f"kept {row}", layout.name)

    @property
    def needs_log(self) -> bool:
        """It may find no room after a write."""
        return self.fails_at_write is not None


def _sites(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """All that is below, but for the bodies of loops: those see to themselves."""
    for statement in body:
        inner = statement.body if isinstance(statement, ast.For | ast.While) else []
        for child in ast.iter_child_nodes(statement):
            if child in inner:
                continue
            if isinstance(child, ast.stmt):
                yield from _sites([child])
            else:
                yield from ast.walk(child)
