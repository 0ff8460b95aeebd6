"""Expressions taken apart, in the order in which Python evaluates them, until each accesses state in one place."""

from __future__ import annotations

import ast
import copy
from typing import TYPE_CHECKING

from millpond.programs.compiler import helpers
from millpond.programs.compiler.accesses import (
    OWN_LANE,
    PASSED,
    field_in,
    is_everywhere,
)
from millpond.programs.compiler.asking import LANE, Asking
from millpond.programs.compiler.syntax import (
    Replacing,
    assign,
    bound_names,
    name,
    placed,
    renamed,
)
from millpond.programs.compiler.words import REJECT
from millpond.programs.merging import READING_EVERYWHERE, WRITING_EVERYWHERE

if TYPE_CHECKING:
    from collections.abc import Sequence

EXHAUSTING = frozenset(
    ["sum", "list", "tuple", "sorted", "min", "max", "set", "frozenset", "dict", "any", "all"]
)


class Expressions(Asking):
    """What `Normaliser` does with expressions; `out` takes the statements that come before."""

    def block(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        raise NotImplementedError

    # Taking apart

    def settled(self, node: ast.expr, out: list[ast.stmt]) -> ast.expr:
        """The expression with at most one place in it, its key in a variable."""
        self.check_reject(node)
        if self.needs_hoisting(node):
            return self.hoisted(node, out)
        self.named_keys(node, out)
        return node

    def check_reject(self, node: ast.expr) -> None:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and inner.id == REJECT:
                raise self.refuse(
                    inner,
                    "reject is part of an expression",
                    'write mp.reject("why") as a statement of its own',
                )

    def named_keys(self, node: ast.expr, out: list[ast.stmt]) -> None:
        """Puts keys into variables; they may be evaluated early."""
        instead: dict[int, ast.expr] = {}
        named: dict[str, str] = {}
        for access in self.accesses.all(node):
            if access.key is not None and not isinstance(access.key, ast.Name):
                text = ast.unparse(access.key)
                if text not in named:
                    named[text] = self.fresh("key")
                    self.source.said[named[text]] = text
                    out.append(assign(named[text], copy.deepcopy(access.key), access.key))
                instead[id(access.key)] = name(named[text], access.key)
        Replacing(instead).visit(node)

    def kept(self, node: ast.expr, out: list[ast.stmt]) -> ast.Name:
        """The value of an expression in a variable of its own."""
        own = self.passing("value")
        self.source.said[own] = ast.unparse(node)
        out.append(assign(own, node, node))
        return name(own, node)

    def hoisted(self, node: ast.expr, out: list[ast.stmt]) -> ast.expr:
        """The expression without any access in it."""
        if isinstance(node, ast.Name | ast.Constant):
            return node
        said = ast.unparse(node)
        made = self.taken_apart(node, out)
        if isinstance(made, ast.Name) and made.id in self.temporary:
            self.source.said[made.id] = said
        return made

    def taken_apart(self, node: ast.expr, out: list[ast.stmt]) -> ast.expr:
        self.check_reject(node)
        if not self.touches(node):
            return node
        if not self.needs_hoisting(node):
            self.named_keys(node, out)
            return self.kept(node, out)
        if self.is_global_read(node):
            return self.kept(self.everywhere(node, out), out)
        match node:
            case ast.BoolOp():
                return self.short_circuit(node, out)
            case ast.IfExp():
                own = self.passing("value")
                test = self.hoisted(node.test, out)
                branches: list[list[ast.stmt]] = [[], []]
                for branch, value in zip(branches, (node.body, node.orelse), strict=True):
                    branch.append(assign(own, self.hoisted(value, branch), value))
                out.append(placed(ast.If(test, branches[0], branches[1]), node))
                return name(own, node)
            case ast.Compare() if any(map(self.touches, node.comparators[1:])):
                return self.chain(node, out)
            case ast.Call(func=ast.Name(id="any" | "all" as word), args=[ast.GeneratorExp() as items]):
                return self.quantified(word, items, out)
            case ast.ListComp() | ast.GeneratorExp():
                return self.comprehension(node, out)
            case ast.Call() if helpers.helper_called(node, self.source):
                return self.inlined(node, out)
            case ast.Lambda() | ast.SetComp() | ast.DictComp():
                raise self.refuse(
                    node, f"{ast.unparse(node)} accesses state in several places", "write it as a loop"
                )
        match node:
            case ast.Subscript(value=row) | ast.Call(func=ast.Attribute(value=row)) if self.is_row(row):
                # A row is no copy: what is asked of it is what it has then.
                rest = [part for part in self.parts(node) if part is not row]
                self.place(row, out, any(map(self.touches, rest)))  # type: ignore[arg-type] # a subscript
                self.in_order(node, rest, [p for p in rest if self.touches(p)], out)
            case _:
                self.parts_hoisted(node, out)
        if self.touches(node):  # itself: its key, and all else in it, is in variables now
            self.named_keys(node, out)
            return self.kept(node, out)
        return node

    def parts_hoisted(self, node: ast.expr, out: list[ast.stmt]) -> ast.expr:
        """The parts of an expression, each without an access; what comes before the last that had one keeps its value."""
        if not isinstance(node, ast.Tuple) and not list(ast.iter_child_nodes(node)):
            return node
        parts = [p for p in self.parts(node) if not self.is_field(p)]
        self.in_order(node, parts, [p for p in parts if self.touches(p)], out)
        return node

    def in_order(
        self, node: ast.expr, parts: Sequence[ast.expr], touching: Sequence[ast.expr], out: list[ast.stmt]
    ) -> None:
        """Hoists those of the parts that are `touching`; the ones before the last of them keep the value that they have."""
        last = parts.index(touching[-1]) if touching else -1
        instead: dict[int, ast.expr] = {}
        for i, part in enumerate(parts[: last + 1]):
            made = self.hoisted(part, out)
            instead[id(part)] = self.settled_on(made, out) if i < last else made
        Replacing(instead).generic_visit(node)

    def settled_on(self, node: ast.expr, out: list[ast.stmt]) -> ast.expr:
        """The expression with the value that it has now."""
        match node:
            case ast.Name() | ast.Constant():
                return node
            case ast.Tuple() | ast.Slice():
                instead = {id(part): self.settled_on(part, out) for part in self.parts(node)}
                Replacing(instead).generic_visit(node)
                return node
        return self.kept(node, out)

    def parts(self, node: ast.AST) -> list[ast.expr]:
        """The expressions that a node evaluates, in that order."""
        if isinstance(node, ast.Call):
            called = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            found = [*called, *node.args, *(k.value for k in node.keywords)]
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple | ast.Slice):
            found = [node.value, *self.parts(node.slice)]
        elif isinstance(node, ast.Dict):
            found = [e for pair in zip(node.keys, node.values, strict=True) for e in pair if e is not None]
        elif isinstance(node, ast.JoinedStr):
            found = [v.value for v in node.values if isinstance(v, ast.FormattedValue)]
        else:
            found = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        self.check_generators(node, found)
        return found

    def check_generators(self, node: ast.AST, parts: Sequence[ast.expr]) -> None:
        """A generator that accesses state runs to its end at once: nothing may stop it before."""
        match node:
            case ast.Call(func=ast.Name(id=word)) if word in EXHAUSTING:
                return
            case ast.Call(func=ast.Attribute(attr="join")):
                return
        for part in parts:
            if isinstance(part, ast.GeneratorExp) and self.touches(part):
                raise self.refuse(
                    part,
                    f"{ast.unparse(node)} may stop in the middle of what accesses state",
                    "write it as a list, [...], or as a loop",
                )

    def short_circuit(self, node: ast.BoolOp, out: list[ast.stmt]) -> ast.expr:
        own = self.passing("value")
        out.append(assign(own, self.hoisted(node.values[0], out), node))
        inner = out
        for value in node.values[1:]:
            test: ast.expr = name(own, node)
            if isinstance(node.op, ast.Or):
                test = ast.UnaryOp(ast.Not(), test)
            branch: list[ast.stmt] = []
            branch.append(assign(own, self.hoisted(value, branch), value))
            inner.append(placed(ast.If(test, branch, []), node))
            inner = branch
        return name(own, node)

    def chain(self, node: ast.Compare, out: list[ast.stmt]) -> ast.expr:
        """`a < b < c`, which asks for c only where a < b."""
        own, inner = self.passing("value"), out
        left = self.settled_on(self.hoisted(node.left, out), out)
        for i, (op, value) in enumerate(zip(node.ops, node.comparators, strict=True)):
            branch = inner if i == 0 else []
            right = self.settled_on(self.hoisted(value, branch), branch)
            branch.append(assign(own, ast.Compare(copy.deepcopy(left), [op], [right]), value))
            if i:
                inner.append(placed(ast.If(name(own, node), branch, []), node))
            inner, left = branch, right
        return name(own, node)

    def quantified(self, word: str, items: ast.GeneratorExp, out: list[ast.stmt]) -> ast.expr:
        """`any` or `all` as a loop, which ends as soon as they do."""
        own, targets = self.fresh("found"), self.own_targets(items)
        test = items.elt if word == "any" else ast.UnaryOp(ast.Not(), items.elt)
        body: list[ast.stmt] = [
            placed(ast.If(test, [assign(own, ast.Constant(True), items), ast.Break()], []), items)
        ]
        for generator in reversed(items.generators):
            for inner in reversed(generator.ifs):
                body = [placed(ast.If(inner, body, []), items)]
            body = [placed(ast.For(generator.target, generator.iter, body, []), items)]
            body.append(placed(ast.If(name(own, items), [ast.Break()], []), items))
        out.append(assign(own, ast.Constant(False), items))
        out += self.block(renamed(body[:1], targets))
        return name(own, items) if word == "any" else placed(ast.UnaryOp(ast.Not(), name(own, items)), items)

    def own_targets(self, node: ast.ListComp | ast.GeneratorExp) -> dict[str, ast.expr]:
        return {n: name(self.of_its_own(n), node) for g in node.generators for n in bound_names(g.target)}

    def of_its_own(self, base: str) -> str:
        own = self.fresh(base)
        self.source.said[own] = base
        return own

    def comprehension(self, node: ast.ListComp | ast.GeneratorExp, out: list[ast.stmt]) -> ast.expr:
        own = self.passing("values")
        targets = self.own_targets(node)
        add = ast.Call(ast.Attribute(name(own, node), "append", ast.Load()), [node.elt], [])
        body: ast.stmt = placed(ast.Expr(add), node)
        for generator in reversed(node.generators):
            for test in reversed(generator.ifs):
                body = placed(ast.If(test, [body], []), node)
            body = placed(ast.For(generator.target, generator.iter, [body], []), node)
        out.append(assign(own, placed(ast.List([], ast.Load()), node), node))
        out += self.block(renamed([body], targets))
        return name(own, node)

    # Places

    def place(
        self, node: ast.Subscript, out: list[ast.stmt], far: bool, again: bool = False
    ) -> ast.Subscript:
        """A part of a field or of a variable, with its keys in variables, in the order in which Python finds it.

        It is `far` if state is accessed before what is to be done there; that accesses a key `again` if it is by that key.
        """
        chain: list[ast.Subscript] = []
        base: ast.expr = node
        while isinstance(base, ast.Subscript):
            chain.insert(0, base)
            base = base.value
        if not isinstance(base, ast.Name) and not field_in(base, self.fields):
            raise self.refuse(
                node, f"{ast.unparse(node)} cannot be changed", "change variables, and entries of fields"
            )
        for i, part in enumerate(chain):
            later = far or any(self.touches(inner.slice) for inner in chain[i + 1 :])
            if isinstance(part.slice, ast.Tuple | ast.Slice):
                part.slice = self.parts_hoisted(part.slice, out)
            else:
                part.slice = self.hoisted(part.slice, out)
            if later:
                part.slice = self.settled_on(part.slice, out)
                if i == 0 and self.lanes and field_in(base, self.fields):
                    self.pass_by(base, part.slice, out, again and len(chain) == 1)
        self.named_keys(node, out)
        return node

    def pass_by(self, base: ast.expr, key: ast.expr, out: list[ast.stmt], again: bool) -> None:
        """Python accesses the place now, and what follows before it is set; where a key is set itself, that is again."""
        if self.fields[field_in(base, self.fields)].kind == "partial":
            own = self.fresh("lane")
            out.append(assign(own, name(LANE, base), base))
            setattr(base, OWN_LANE, own)
            return
        out.append(assign(LANE, key.elts[0] if isinstance(key, ast.Tuple) else key, base))
        if not again:
            setattr(base, PASSED, True)

    # Everywhere

    def is_global_read(self, node: ast.expr) -> bool:
        match node:
            case ast.Call(func=ast.Attribute(value=base)) | ast.Subscript(value=base):
                return is_everywhere(base)
        return is_everywhere(node)

    def everywhere(self, node: ast.expr, out: list[ast.stmt]) -> ast.expr:
        """A read of all lanes, whose arguments access nothing."""
        if is_everywhere(node):
            raise self.refuse(
                node,
                "it is not said what is to be done everywhere",
                f"write for example {ast.unparse(node)}.copy()",
            )
        if isinstance(node, ast.Subscript):
            if self.touches(node.slice):
                node.slice = self.hoisted(node.slice, out)
            return node
        assert isinstance(node, ast.Call)
        self.accesses.all(node)
        node.args = [self.hoisted(a, out) for a in node.args]
        self.check_everywhere(node, statement=False)
        return node

    def check_everywhere(self, call: ast.Call, statement: bool) -> None:
        assert isinstance(call.func, ast.Attribute)
        operation = call.func.attr
        own = self.fields[call.func.value.args[0].attr].own  # type: ignore[attr-defined] # a field, by everywhere
        reading = READING_EVERYWHERE if own is None else own.reading
        if operation in reading and not statement:
            return
        if operation in (WRITING_EVERYWHERE if own is None else {"clear"}) and statement:
            return
        if operation in reading:
            raise self.refuse(
                call, f"{ast.unparse(call)} gives values that nothing is done with", "set a variable to it"
            )
        raise self.side_effect(call)

    # Helpers

    def inlined(self, call: ast.Call, out: list[ast.stmt]) -> ast.expr:
        helper = self.methods[helpers.helper_called(call, self.source)]
        if helper.name in self.stack:
            raise self.refuse(
                call,
                f"{' calls '.join([*self.stack[self.stack.index(helper.name) :], helper.name])}: recursion cannot be"
                " written out as a graph",
                "write it as a loop",
            )
        said = ast.unparse(call)
        self.parts_hoisted(call, out)
        arguments = helpers.bind(self.source, helper, call, self.stack[-1])
        self.stack.append(helper.name)
        body, result = helpers.body_of(helper, arguments, self.of_helper)
        self.temporary.add(result)
        self.source.said[result] = said
        out += self.block(body)
        self.stack.pop()
        return name(result, call)
