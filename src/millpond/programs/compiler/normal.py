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
from millpond.programs.compiler.expressions import Expressions
from millpond.programs.compiler.fields import StateField
from millpond.programs.compiler.limits import STATEMENTS_MAX
from millpond.programs.compiler.source import ProgramSource
from millpond.programs.compiler.split import changed_names
from millpond.programs.compiler.syntax import (
    Loop,
    Replacing,
    assign,
    bound_names,
    constant,
    is_pure_sum,
    loaded,
    name,
    never_goes_on,
    placed,
)
from millpond.programs.compiler.words import REJECT


class Normaliser(Expressions):
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
                if is_everywhere(node.value) or any(is_everywhere(n) for n in ast.walk(node)):
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

    # Loops

    def loop(self, node: ast.For) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        self.early_keys(node, out)
        iterated = self.settled(node.iter, out)
        made = placed(ast.For(node.target, iterated, self.block(node.body), node.orelse), node)
        if self.is_whole(made):
            return [*out, made]
        self.check_else(node)
        self.check_loop(node, made.body)
        if self.touches(iterated):
            if field_in(iterated, self.fields):
                iterated = placed(ast.Call(ast.Name("list", ast.Load()), [iterated], []), iterated)
            iterated = self.kept(iterated, out)
        return [*out, *self.unrolled(made, iterated)]

    def check_loop(self, node: ast.For, body: Sequence[ast.stmt]) -> None:
        """Python goes over a list as it is by then; what goes from task to task is a copy."""
        over = [node.iter]
        match node.iter:
            case ast.Call(func=ast.Name(id="zip" | "enumerate" | "reversed"), args=args):
                over = args
        names = {part.id for part in over if isinstance(part, ast.Name)}
        for part in (n for statement in body for n in ast.walk(statement) if isinstance(n, ast.expr)):
            for changed in sorted(names & changed_names(part)):
                raise self.refuse(
                    part,
                    f"{changed} is changed while the loop on line {node.lineno} goes over it",
                    f"loop over a copy: for ... in {changed}.copy()",
                )

    def repeat(self, node: ast.While) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        self.early_keys(node, out)
        before: list[ast.stmt] = []
        test = self.settled(copy.deepcopy(node.test), before)
        body = self.block(node.body)
        made = placed(ast.While(test, body, node.orelse), node)
        if not before and self.is_whole(made):
            return [*out, made]
        self.check_else(node)
        if not before and not self.touches(test):
            return [*out, made]
        leave = placed(ast.If(ast.UnaryOp(ast.Not(), test), [ast.Break()], []), node.test)
        return [*out, placed(ast.While(ast.Constant(True), [*before, leave, *body], []), node)]

    def unrolled(self, node: ast.For, iterated: ast.expr) -> list[ast.stmt]:
        """A loop that goes from task to task: where it is, is in variables."""
        at = self.fresh("at")
        first: list[ast.stmt]
        test: ast.expr
        match iterated, node.target:
            case ast.Call(func=ast.Name(id="range"), args=args), ast.Name() if len(args) <= 2:
                start = args[0] if len(args) == 2 else constant(0, node)
                stop = self.fresh("stop")
                first = [assign(at, start, node), assign(stop, args[-1], node)]
                test = ast.Compare(name(at, node), [ast.Lt()], [name(stop, node)])
                steps: list[ast.stmt] = [placed(ast.Assign([node.target], name(at, node)), node)]
            case ast.Call(func=ast.Name(id="zip"), args=args), ast.Tuple(elts=targets) if len(args) == len(
                targets
            ):
                first, test, steps = self.through(node, args, targets, at)
            case ast.Call(func=ast.Name(id="enumerate"), args=[arg]), ast.Tuple(elts=[number, target]):
                first, test, steps = self.through(node, [arg], [target], at)
                steps.append(placed(ast.Assign([number], name(at, node)), node))
            case _, ast.Name():
                first, test, steps = self.through(node, [iterated], [node.target], at)
            case _:
                raise self.refuse(
                    node,
                    f"a loop over {ast.unparse(iterated)} accesses state in several places, and its items cannot travel",
                    "loop over a list, range, zip or enumerate",
                )
        steps.append(placed(ast.AugAssign(ast.Name(at, ast.Store()), ast.Add(), ast.Constant(1)), node))
        made = placed(ast.While(test, [*steps, *node.body], []), node)
        return [*(placed(s, node) for s in first), made]

    def through(
        self, node: ast.For, lists: Sequence[ast.expr], targets: Sequence[ast.expr], at: str
    ) -> tuple[list[ast.stmt], ast.expr, list[ast.stmt]]:
        names = [self.fresh("items") for _ in lists]
        first: list[ast.stmt] = [
            assign(own, ast.Call(ast.Name("list", ast.Load()), [given], []), node)
            for own, given in zip(names, lists, strict=True)
        ]
        first.append(assign(at, constant(0, node), node))
        lengths: list[ast.expr] = [
            ast.Call(ast.Name("len", ast.Load()), [name(own, node)], []) for own in names
        ]
        shortest = lengths[0] if len(lengths) == 1 else ast.Call(ast.Name("min", ast.Load()), lengths, [])
        test = ast.Compare(name(at, node), [ast.Lt()], [shortest])
        steps: list[ast.stmt] = [
            placed(ast.Assign([target], ast.Subscript(name(own, node), name(at, node), ast.Load())), node)
            for own, target in zip(names, targets, strict=True)
        ]
        return first, test, steps

    def early_keys(self, node: Loop | ast.Try, out: list[ast.stmt]) -> None:
        """Keys that are the same all the time are put into variables before the loop, or try."""
        bound = bound_names(node)
        instead: dict[int, ast.expr] = {}
        named: dict[str, str] = {}
        for access in self.accesses.all(node):
            key = access.key
            if key is None or isinstance(key, ast.Name) or not is_pure_sum(key) or set(bound) & loaded(key):
                continue
            text = ast.unparse(key)
            if text not in named:
                named[text] = self.fresh("key")
                out.append(assign(named[text], copy.deepcopy(key), key))
            instead[id(key)] = name(named[text], key)
        Replacing(instead).visit(node)

    def is_whole(self, node: Loop) -> bool:
        sites = self.sites(node)
        bound = bound_names(node)
        return not sites or (
            len(sites) == 1 and all(s.access != "everywhere" and s.key not in bound for s in sites)
        )

    def check_else(self, node: Loop) -> None:
        if node.orelse:
            raise self.refuse(
                node, "else of a loop that accesses state in several places", "use a variable, and if"
            )

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
