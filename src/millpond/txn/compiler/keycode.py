"""The first kernel of a function: the keys that its events may touch, from the events alone.

It follows what the event decides and takes both ways where a row decides, so that it finds every key that the
function can come to, and maybe some that it does not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from millpond.stores.tables import NOT_KNOWN, KeyColumn
from millpond.txn.compiler import arguments
from millpond.txn.compiler.facts import Slot
from millpond.txn.compiler.statements import Statements
from millpond.txn.compiler.syntax import abort_call, key_parts, refuse
from millpond.txn.compiler.values import BEYOND, CannotCompile, Value

UNKNOWN = -1  # no key was asked for at this place
FAULTY = -2  # the key cannot be worked out: whoever comes to it fails


class KeyCode(Statements):
    """Writes the keys of event i, table by table, with their places in `flat`."""

    give_up = ""  # how to end where there is no room, with minus the room that is needed as the end

    def event(self) -> None:
        """The code of one event."""
        self.unsure = False  # within what a row decides
        self.frame_stack: tuple[int, ...] = (0,)
        self.written = {use.slot for use in self.found.writes}
        self.sites: set[int] = set()
        with self.write.under("while True:"):
            self.load_fields()
            if self.block(self.found.tree.body):
                self.write("break")

    def statement(self, node: ast.stmt) -> bool:
        found = self.found
        match node:
            case ast.If():
                self.ask(node.test)
                if node.test not in found.clean:
                    self.both(node.body, node.orelse)
                    return True
                return self.swallowed(node)
            case ast.For():
                self.ask(node.iter)
                if node.iter not in found.clean:
                    self.both(node.body)
                    return True
                return self.swallowed(node)
            case ast.Return():
                if node.value is not None:
                    self.ask(node.value)
                return self.ended()
            case ast.Break() | ast.Continue() | ast.Pass():
                return True if self.unsure else super().statement(node)
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for part in (node.value, *targets):
                    if part is not None:
                        self.ask(part)
                if node in found.clean and not self.unsure:
                    return super().statement(node)
                return True
            case ast.Delete():
                for target in node.targets:
                    self.ask(target)
                return True
            case ast.Expr() if abort_call(node.value) is not None:
                return self.ended()
        return super().statement(node)

    def both(self, *bodies: list[ast.stmt]) -> None:
        before, self.unsure = self.unsure, True
        for body in bodies:
            self.block(body)
        self.unsure = before

    def swallowed(self, node: ast.If | ast.For) -> bool:
        """A clean condition or loop. Where it may never be come to, a fault in it ends only itself."""
        if not self.unsure:
            if isinstance(node, ast.For) and node in self.found.ragged:
                self.unsure = True
                super().statement(node)
                self.unsure = False
                return True
            return super().statement(node)
        with self.write.under("while True:"):
            if super().statement(node):
                self.write("break")
        self.write("st = 0")
        return True

    def ended(self) -> bool:
        if self.unsure:
            return True
        self.leave()
        return False

    # Rows

    def ask(self, node: ast.AST) -> None:
        for place in self.places(node):
            self.ask_key(place, self.found.slot_of[place])

    def places(self, node: ast.AST) -> Iterator[ast.AST]:
        if node in self.found.slot_of:
            yield node
            return
        for child in ast.iter_child_nodes(node):
            yield from self.places(child)

    def ask_key(self, node: ast.AST, slot: Slot) -> None:
        name = f"asked {slot.number}"
        if name in self.ex.known:
            return
        write = self.write
        frame = self.frame_stack[-1]
        at = write.fresh("at")
        write(f"{at} = fr{slot.frame} + {slot.place}")
        depth = write.depth
        if slot.number in self.sites or frame != slot.frame:
            write(f"if flat[{at}] == {UNKNOWN}:")
            write.depth += 1
        self.sites.add(slot.number)
        fails = write.fails
        with self.apart() as lines:
            self.emit(slot, checked_key(self, node, slot), at)
            write("break")
        if write.fails > fails:
            write("while True:")
            write.lines += lines
            with write.under("if st != 0:"):
                write(f"flat[{at}] = {FAULTY}")
                write("st = 0")
        else:
            write.lines += [line[4:] for line in lines[:-1]]
        write.depth = depth
        self.ex.known.add(name)

    def emit(self, slot: Slot, key: list[Value], at: str) -> None:
        number = self.tables[slot.table].number
        row = self.write.fresh("row")
        if len(key) == 1:
            self.write(f"{row} = known_row({arguments.known_rows(number)}, {key[0].text})")
            self.write(f"flat[{at}] = {row}")
            self.write("touches += 1")
            self.write(f"if {row} < 0:")
            self.write.depth += 1
        else:
            self.write(f"flat[{at}] = {NOT_KNOWN}")
            self.write("touches += 1")
        for place, part in enumerate(key):
            self.write(f"key_{number}[m_{number}, {place}] = {part.text}")
        self.write(f"at_{number}[m_{number}] = {at} * 2 + {int(slot.number in self.written)}")
        self.write(f"m_{number} += 1")
        self.write.depth -= len(key) == 1

    def enter_frame(self, frame: int, count: str) -> None:
        parent, pointer = self.found.frames[frame].parent, self.found.frames[frame].pointer
        write, size = self.write, self.found.frame_sizes[frame]
        with write.under(f"if end + {count} * {size} > flat.shape[0]:"):
            write(f"end = -(end + {count} * {size})")
            write(self.give_up)
        write(f"flat[fr{parent} + {pointer}] = end - fr0")
        write(f"b{frame} = end")
        write(f"end += {count} * {size}")
        with write.under(f"for at in range(b{frame}, end):"):
            write(f"flat[at] = {UNKNOWN}")

    def loop(self, node: ast.For) -> None:
        frame = self.found.frame_of.get(node)
        outer = self.frame_stack
        self.frame_stack = outer if frame is None else (*outer, frame)
        super().loop(node)
        self.frame_stack = outer

    def asked(self, node: ast.Compare) -> Value | None:
        return None

    def column(self, node: ast.Attribute) -> Value:
        raise CannotCompile(node, f"{ast.unparse(node)} is no column")


def checked_key(code: Statements, node: ast.AST, slot: Slot) -> list[Value]:
    """The values of a key's columns. BadTransaction where they are not those of the table's keys."""
    layout = code.tables[slot.table]
    parts = key_parts(node)
    if len(parts) != len(layout.keys) or any(isinstance(part, ast.Slice) for part in parts):
        columns = "one column" if len(layout.keys) == 1 else f"{len(layout.keys)} columns"
        raise refuse(
            code.found.tree, node, f"{ast.unparse(node)}: the key of table {slot.table!r} has {columns}"
        )
    return [_checked_part(code, part, key) for part, key in zip(parts, layout.keys, strict=True)]


def _checked_part(code: Statements, node: ast.expr, wanted: KeyColumn) -> Value:
    key = code.ex.value(node)
    if wanted.type == "long" and key.type == "bool":
        key = code.ex.as_long(key)
    if key.type == "number":
        raise CannotCompile(node, f"the key {ast.unparse(node)} may be a double")
    if key.type != wanted.type:
        raise refuse(
            code.found.tree,
            node,
            f"the key {ast.unparse(node)} is a {key.type}, the table's is a {wanted.type}",
        )
    if wanted.is_narrow:
        code.write.fail(f"{key.text} < {wanted.lowest} or {key.text} > {wanted.highest}", BEYOND)
    return key
