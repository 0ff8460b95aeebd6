"""A method in normal form: helpers are written out, a statement accesses state in one place, its key in a variable.

A loop that stays with one place is left as it is; of any other a `while` is made, whose state is in variables, so that it
can go on in another task.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence

from millpond.programs.compiler import helpers
from millpond.programs.compiler.accesses import (
    MUTATORS,
    Accesses,
    field_in,
    is_everywhere,
)
from millpond.programs.compiler.fields import StateField
from millpond.programs.compiler.limits import STATEMENTS_MAX
from millpond.programs.compiler.loops import Loops
from millpond.programs.compiler.source import ProgramSource
from millpond.programs.compiler.syntax import (
    bound_names,
    is_pure_sum,
    never_goes_on,
    placed,
)
from millpond.programs.compiler.words import REJECT


class Normaliser(Loops):
    """One method, with what it calls."""

    def __init__(
        self,
        source: ProgramSource,
        fields: dict[str, StateField],
        methods: dict[str, ast.FunctionDef],
        method: str,
    ) -> None:
        super().__init__(source, fields, methods, method)
        self.accesses = Accesses(source, fields, method)
        self.count = 0
        source.said.clear()

    def body(self) -> list[ast.stmt]:
        return self.block(self.methods[self.method].body)

    def block(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for statement in statements:
            self.count += 1
            if self.count > STATEMENTS_MAX:
                raise self.refuse(
                    statement,
                    "the method is too long once the helpers that it calls are written out",
                    "call fewer, or make two methods of it",
                )
            out += self.statement(statement)
            if out and never_goes_on(out[-1]):
                break
        return out or [placed(ast.Pass(), self.methods[self.method])]

    def statement(self, node: ast.stmt) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        match node:
            case ast.If():
                test = self.settled(node.test, out)
                return [
                    *out,
                    placed(
                        ast.If(test, self.block(node.body), self.block(node.orelse) if node.orelse else []),
                        node,
                    ),
                ]
            case ast.For():
                return self.loop(node)
            case ast.While():
                return self.repeat(node)
            case ast.Try():
                return self.guarded(node)
            case ast.Expr(value=ast.Call() as call):
                return self.called(node, call)
            case ast.Assign():
                return self.assigned(node)
            case ast.AnnAssign():
                assert node.value is not None
                value = self.settled(node.value, out)
                return [*out, placed(ast.AnnAssign(node.target, node.annotation, value, 1), node)]
            case ast.AugAssign():
                return self.augmented(node)
            case ast.Delete():
                for target in node.targets:
                    place = self.target(target, out)
                    out.append(placed(ast.Delete([place]), node))
                return out
            case ast.Assert():
                return self.asserted(node)
            case ast.Return() | ast.Raise() | ast.Expr():
                for attr in ("exc", "cause", "value"):
                    inner = getattr(node, attr, None)
                    if isinstance(inner, ast.expr):
                        setattr(node, attr, self.settled(inner, out))
                return [*out, node]
        return [node]

    # Simple statements

    def asserted(self, node: ast.Assert) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        test = self.settled(node.test, out)
        if node.msg is None or not self.touches(node.msg):
            return [*out, placed(ast.Assert(test, node.msg), node)]
        # The message is asked for where the test fails.
        branch: list[ast.stmt] = []
        branch.append(placed(ast.Assert(ast.Constant(False), self.hoisted(node.msg, branch)), node))
        return [*out, placed(ast.If(ast.UnaryOp(ast.Not(), test), branch, []), node)]

    def called(self, node: ast.Expr, call: ast.Call) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        if isinstance(call.func, ast.Name) and call.func.id == REJECT:
            if len(call.args) != 1 or call.keywords:
                raise self.refuse(call, "reject takes a reason", 'write mp.reject("why")')
            call.args = [self.hoisted(call.args[0], out)]
            return [*out, node]
        if helpers.helper_called(call, self.source):
            self.inlined(call, out)
            return out
        if (
            not isinstance(call.func, ast.Attribute)
            or not self.is_place(call.func.value)
            or self.by_key(call)
        ):
            node.value = self.settled(call, out)
            return [*out, node]
        base = call.func.value
        if is_everywhere(base):
            call.args = [self.hoisted(a, out) for a in call.args]
            self.check_everywhere(call, statement=True)
            return [*out, node]
        arguments = self.parts(call)[1:]
        far = [a for a in arguments if self.needs_hoisting(a) or self.differs(a, base)]
        if isinstance(base, ast.Subscript):
            self.place(base, out, bool(far))
        self.in_order(call, arguments, far, out)
        self.check_changed(call, call.func)
        self.named_keys(call, out)
        return [*out, node]

    def by_key(self, call: ast.Call) -> bool:
        """Whether its first argument is the key by which it accesses a field, as in `self.field.pop(key)`."""
        found = self.accesses.all(call)
        return bool(found) and found[0].node is call and found[0].key is not None

    def is_place(self, node: ast.AST) -> bool:
        """Whether it is a field, a part of one, or everywhere."""
        while isinstance(node, ast.Subscript):
            node = node.value
        return bool(field_in(node, self.fields)) or is_everywhere(node)

    def assigned(self, node: ast.Assign) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        if len(node.targets) > 1:
            value = self.hoisted(node.value, out)
            if not isinstance(value, ast.Name | ast.Constant):
                value = self.kept(value, out)
            for target in node.targets:
                out += self.statement(placed(ast.Assign([target], copy.deepcopy(value)), node))
            return out
        target = node.targets[0]
        if isinstance(target, ast.Name) and self.is_global_read(node.value):
            read = self.everywhere(node.value, out)
            return [*out, placed(ast.Assign([target], read), node)]
        value = self.settled(node.value, out)
        if self.touches(target) and (self.differs(value, target) or not self.is_pure_place(target)):
            value = self.settled_on(value, out)
        place = self.target(target, out)
        return [*out, placed(ast.Assign([place], value), node)]

    def augmented(self, node: ast.AugAssign) -> list[ast.stmt]:
        """Python finds the place and reads what is there before it comes to the value."""
        out: list[ast.stmt] = []
        far = self.needs_hoisting(node.value) or self.differs(node.value, node.target)
        place = self.target(node.target, out, far)
        if far and isinstance(place, ast.Subscript) and self.calls_helper(node.value):
            # A helper may change what is there.
            before = copy.deepcopy(place)
            before.ctx = ast.Load()
            old = self.kept(before, out)
            value = self.hoisted(node.value, out)
            return [*out, placed(ast.Assign([place], ast.BinOp(old, node.op, value)), node)]
        value = self.hoisted(node.value, out) if far else self.settled(node.value, out)
        return [*out, placed(ast.AugAssign(place, node.op, value), node)]  # type: ignore[arg-type] # a target

    def is_pure_place(self, node: ast.AST) -> bool:
        """Whether what a place is found by can be evaluated early."""
        while isinstance(node, ast.Subscript):
            if not all(
                map(
                    is_pure_sum, self.parts(node.slice) if isinstance(node.slice, ast.Tuple) else [node.slice]
                )
            ):
                return False
            node = node.value
        return True

    def target(self, node: ast.expr, out: list[ast.stmt], far: bool = False) -> ast.expr:
        """What is set or deleted, with its keys in variables. It is `far` if state is accessed before it is set."""
        match node:
            case ast.Name():
                return node
            case ast.Tuple(elts=elements) | ast.List(elts=elements) if all(
                isinstance(e, ast.Name) for e in elements
            ):
                return node
            case ast.Attribute() if field_in(node, self.fields):
                self.accesses.all(node)
            case ast.Subscript():
                base: ast.expr = node
                while isinstance(base, ast.Subscript):
                    base = base.value
                if is_everywhere(base):
                    raise self.side_effect(node)
                self.check_part(node)
                return self.place(node, out, far, again=True)
        raise self.refuse(node, f"{ast.unparse(node)} cannot be set", "set variables, and entries of fields")

    def check_part(self, node: ast.Subscript) -> None:
        """Refuses to set a part of what a field gives as a copy."""
        inner = node.value
        if isinstance(inner, ast.Subscript) and field_in(inner.value, self.fields):
            field = self.fields[field_in(inner.value, self.fields)]
            if field.element != "matrix":
                whole = ast.unparse(inner)
                raise self.refuse(
                    node,
                    f"{whole} is a copy of what the field holds: a part of it cannot be set",
                    f"write x = {whole}, change x, and then {whole} = x; a DenseMatrix takes [row, column]",
                )

    def check_changed(self, call: ast.Call, called: ast.Attribute) -> None:
        """Refuses to change what a field gives as a copy."""
        whole = called.value
        if isinstance(whole, ast.Subscript) and called.attr in MUTATORS:
            field = field_in(whole.value, self.fields)
            if field and self.fields[field].element != "matrix":
                text = ast.unparse(whole)
                raise self.refuse(
                    call,
                    f"{text} is a copy of what the field holds: to change it changes nothing",
                    f"take it out, x = {text}, change x, and put it back: {text} = x",
                )

    # try

    def guarded(self, node: ast.Try) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        self.early_keys(node, out)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and inner.id == REJECT:
                raise self.refuse(inner, "reject inside of try", "reject before, or after it")
        for attr in ("body", "orelse", "finalbody"):
            block = getattr(node, attr)
            setattr(node, attr, self.block(block) if block else [])
        for handler in node.handlers:
            handler.body = self.block(handler.body)
        sites = self.sites(node)
        bound = bound_names(node)
        if len(sites) > 1 or any(s.access == "everywhere" or s.key in bound for s in sites):
            raise self.refuse(
                node,
                f"try goes across {len(sites)} places of state, and what failed in one cannot be caught in another",
                "test what could fail with if, or keep a try to one access",
            )
        return [*out, node]
