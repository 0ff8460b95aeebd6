"""Statements of a body as the text of a compiled function.

Kinds of all values are known, and what could differ from Python is a call of a function that tells: a long that overflows, a
division by zero, an index out of range make the first number of `control` one. Whoever runs the kernel takes back then
what it did, and has the interpreter do it. So expressions may be evaluated early, or where Python would not come to them.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import NoReturn

from millpond.code.capture import CONSTANTS, Code
from millpond.programs.machine.expressions import Expressions
from millpond.programs.machine.kinds import ARRAYS, MAPS, NUMBERS, VECTORS, CannotCompile, Value

_ZEROS = {"long": "0", "double": "0.0", "boolean": "False"}


class Function(Expressions):
    """One function, with parameters of these kinds."""

    def __init__(self, parameters: Mapping[str, str], library: Library) -> None:
        super().__init__()
        self.kinds = dict(parameters)
        self.defined = set(parameters)
        self.library = library
        self.changes_vectors = False
        """Free ones, which are no state."""

    # Ends

    def leave(self, node: ast.Return) -> None:
        """What the function returns."""
        raise NotImplementedError

    @property
    def fail(self) -> str:
        """What it returns when it cannot go on."""
        raise NotImplementedError

    # Statements

    def block(self, statements: Sequence[ast.stmt]) -> bool:
        """Whether a way leads beyond it."""
        return all(self.statement(statement) for statement in statements)

    def statement(self, node: ast.stmt) -> bool:
        match node:
            case ast.Assign(targets=[target], value=value):
                self.assign(target, value)
            case ast.AugAssign():
                self.augmented(node)
            case ast.If():
                return self.branch(node)
            case ast.While(orelse=[]):
                return self.repeat(node)
            case ast.For(orelse=[]):
                self.loop(node)
            case ast.Return():
                self.leave(node)
                return False
            case ast.Break() | ast.Continue():
                self.write("break" if isinstance(node, ast.Break) else "continue")
                return False
            case ast.Pass():
                self.write("pass")
            case ast.Expr(value=ast.Call() as call):
                self.called(call)
            case ast.Expr(value=ast.Constant()):
                pass
            case ast.Delete(targets=targets):
                for target in targets:
                    self.deleted(target)
            case ast.Assert(test=test):
                with self.under(f"if not {self.truth(self.value(test), test)}:"):
                    self.give_up()
            case ast.Raise():
                self.give_up()
                return False
            case _:
                self.refuse(node, f"{type(node).__name__.lower()} is not compiled")
        return True

    def give_up(self) -> None:
        self.write("control[0] = 1")
        self.write(f"return {self.fail}")

    def poll(self) -> None:
        """In each loop: it ends where something went wrong, or somebody wants it to."""
        with self.under("if control[0] != 0 or stopped(control):"):
            self.write(f"return {self.fail}")

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        match target, value:
            case ast.Name(id=name), _:
                self.set(name, self.value(value), target)
            case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
                kept = [self.kept(self.value(each)) for each in values]
                for each, made in zip(targets, kept, strict=True):
                    if not isinstance(each, ast.Name):
                        self.refuse(each, "of several things that are set at once each is a variable")
                    self.set(each.id, made, each)
            case ast.Subscript(value=base, slice=place), _:
                self.put(base, place, self.value(value), target)
            case _:
                self.refuse(target, f"{ast.unparse(target)} is set in a way that is not compiled")

    def set(self, name: str, value: Value, node: ast.AST) -> None:
        kind = self.kinds.setdefault(name, value.kind)
        if kind != value.kind:
            self.refuse(node, f"{name} is a {kind} and a {value.kind}")
        if value.kind not in (*NUMBERS, *ARRAYS, *VECTORS):
            self.refuse(node, f"{name} is a {value.kind}")
        self.write(f"{self.name(name)} = {value.text}")
        self.defined.add(name)

    def augmented(self, node: ast.AugAssign) -> None:
        match node.target:
            case ast.Name(id=name):
                if self.kind_of(name, node) not in NUMBERS:
                    self.refuse(node, f"{name} is changed in place")
                load = ast.copy_location(ast.Name(name, ast.Load()), node)
                self.set(name, self.arithmetic(node.op, self.value(load), self.value(node.value), node), node)
            case ast.Subscript(value=base, slice=place):
                self.increased(node, base, place)
            case _:
                self.refuse(node, "that is changed in a way that is not compiled")

    def increased(self, node: ast.AugAssign, base: ast.expr, place: ast.expr) -> None:
        """`state[i, j] += x`: in one search where that can be."""
        owner, keys = self.place(base, place)
        keys = [self.kept(key) for key in keys]
        amount = self.value(node.value)
        kind = self.entry_kind(owner, keys, node)
        self.changes_vectors |= owner.kind == "vector"
        in_place = kind in ("long", "double") and amount.kind != "boolean"
        if isinstance(node.op, ast.Add) and in_place:
            if kind == "long" and amount.kind != "long":
                self.refuse(node, "a long becomes a double")
            text = amount.text if kind == "long" else self.double(amount)
            function = "increase" if len(keys) == 2 else "increase_at"
            self.write(f"{function}({owner.text}, {', '.join(key.text for key in keys)}, {text})")
            return
        before = self.entry(owner, keys, node)
        self.put_at(owner, keys, self.arithmetic(node.op, before, amount, node), node)

    def put(self, base: ast.expr, place: ast.expr, value: Value, node: ast.AST) -> None:
        owner, keys = self.place(base, place)
        self.put_at(owner, keys, value, node)

    def put_at(self, owner: Value, keys: Sequence[Value], value: Value, node: ast.AST) -> None:
        index = ", ".join(key.text for key in keys)
        self.changes_vectors |= owner.kind == "vector"
        if owner.kind == "matrix" and len(keys) == 1:
            if value.kind not in VECTORS:
                self.refuse(node, f"a row is set to a {value.kind}")
            self.write(f"{owner.text}[{index}] = {value.text}")
            return
        kind = self.entry_kind(owner, keys, node)
        if owner.kind in MAPS and value.kind != kind and (kind, value.kind) != ("double", "long"):
            self.refuse(node, f"a {kind} is set to a {value.kind}")
        if value.kind not in NUMBERS:
            self.refuse(node, f"a number is set to a {value.kind}")
        text = self.double(value) if kind == "double" else value.text
        self.write(f"{owner.text}[{index}] = {text}")

    def deleted(self, target: ast.expr) -> None:
        if not isinstance(target, ast.Subscript):
            self.refuse(target, "a variable is deleted")
        owner, keys = self.place(target.value, target.slice)
        self.changes_vectors |= owner.kind == "vector"
        self.write(f"del {owner.text}[{', '.join(key.text for key in keys)}]")

    def called(self, call: ast.Call) -> None:
        match call.func:
            case ast.Attribute(value=base, attr=("clear" | "assign" | "add") as attr) if not call.keywords:
                owner = self.value(base)
                self.changes_vectors |= owner.kind == "vector"
                arguments = [self.value(argument) for argument in call.args]
                kinds = [argument.kind for argument in arguments]
                if owner.kind not in (*VECTORS, "matrix", *MAPS) or (
                    attr != "clear" and owner.kind not in VECTORS
                ):
                    self.refuse(call, f"{attr} of a {owner.kind} is not compiled")
                if attr != "clear" and (not kinds or kinds[0] not in (*VECTORS, "array<double>")):
                    self.refuse(call, f"{attr} takes a vector, or a list of doubles")
                if len(arguments) != (0 if attr == "clear" else 1):
                    if attr != "add" or len(arguments) != 2 or kinds[1] not in ("long", "double"):
                        self.refuse(call, f"{attr} is given something else")
                    arguments[1] = Value(self.double(arguments[1]), "double")
                self.write(f"{owner.text}.{attr}({', '.join(argument.text for argument in arguments)})")
            case _:
                # What is done with its value is nothing.
                self.kept(self.value(call))

    # Ways

    def branch(self, node: ast.If) -> bool:
        test = self.truth(self.value(node.test), node.test)
        before = set(self.defined)
        with self.under(f"if {test}:"):
            first = self.block(node.body)
        after_body, self.defined = self.defined, before
        second = True
        if node.orelse:
            with self.under("else:"):
                second = self.block(node.orelse)
        if first and second:
            self.defined &= after_body
        elif first:
            self.defined = after_body
        return first or second

    def repeat(self, node: ast.While) -> bool:
        endless = isinstance(node.test, ast.Constant) and bool(node.test.value)
        with self.under("while True:"):
            self.poll()
            if not endless:
                test = self.truth(self.value(node.test), node.test)
                with self.under(f"if not {test}:"):
                    self.write("break")
            before = set(self.defined)
            self.block(node.body)
            self.defined = before
        return not endless or any(isinstance(inner, ast.Break) for inner in ast.walk(node))

    def loop(self, node: ast.For) -> None:
        before = set(self.defined)
        head, targets = self.iterated(node.iter, node.target)
        with self.under(head):
            self.poll()
            for target, value in targets:
                if not isinstance(target, ast.Name):
                    self.refuse(target, "a loop sets variables")
                self.set(target.id, value, target)
            self.block(node.body)
        self.defined = before

    def refuse(self, node: ast.AST, why: str) -> NoReturn:
        raise CannotCompile(node, why)


class Library:
    """Functions of the user's, as bodies call them: of each a text for each choice of kinds."""

    def __init__(self, codes: Sequence[Code]) -> None:
        self._codes = {code.name: code for code in codes}
        self.names = frozenset(self._codes)
        self._stack: list[str] = []
        self.made: dict[tuple[str, ...], Called] = {}

    def called(
        self, within: Code | None, name: str, arguments: Sequence[Value], node: ast.AST
    ) -> Value | None:
        """The call, if there is such a function: of the program's, or among those that come with another one."""
        code = within or self._codes.get(name)
        tree = None if code is None else _function(code, name)
        if code is None or tree is None:
            return None
        kinds = tuple(argument.kind for argument in arguments)
        if any(kind not in (*NUMBERS, *ARRAYS) for kind in kinds):
            raise CannotCompile(node, f"{name} is given something else than numbers and lists of numbers")
        place = (code.name, name, *kinds)
        if place not in self.made:
            if name in self._stack:
                raise CannotCompile(node, f"{name} calls itself")
            self._stack.append(name)
            try:
                self.made[place] = self._translated(code, tree, kinds, len(self.made), node)
            except CannotCompile as refused:
                raise CannotCompile(node, f"{name}: {refused.why}") from None
            finally:
                self._stack.pop()
        made = self.made[place]
        return Value(f"{made.title}({', '.join([*(a.text for a in arguments), 'control'])})", made.result)

    def _translated(
        self, code: Code, tree: ast.FunctionDef, kinds: Sequence[str], number: int, node: ast.AST
    ) -> Called:
        names = [argument.arg for argument in (*tree.args.posonlyargs, *tree.args.args)]
        rest = (tree.args.vararg, tree.args.kwarg, *tree.args.kwonlyargs)
        if any(rest) or len(names) != len(kinds):
            raise CannotCompile(node, "it is called with other parameters than it has")
        made = Called(dict(zip(names, kinds, strict=True)), self, code, f"f{number}_{tree.name}")
        if made.block(tree.body) or made.result not in _ZEROS:
            raise CannotCompile(node, f"it returns a {made.result or 'None'}, or None")
        return made


def _function(code: Code, name: str) -> ast.FunctionDef | None:
    for node in ast.parse(code.source).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    return None


class Called(Function):
    """A function of the user's, as it is called with values of these kinds."""

    RESULT = "@result@"

    def __init__(self, parameters: Mapping[str, str], library: Library, code: Code, title: str) -> None:
        super().__init__(parameters, library)
        self.title = title
        self.result = ""
        self._code = code
        self._parameters = list(parameters)

    @property
    def fail(self) -> str:
        return self.RESULT

    def leave(self, node: ast.Return) -> None:
        if node.value is None:
            self.refuse(node, "it returns None")
        value = self.value(node.value)
        if self.result not in ("", value.kind):
            self.refuse(node, f"it returns a {self.result} and a {value.kind}")
        self.result = value.kind
        self.write(f"return {value.text}")

    def called_function(self, name: str, node: ast.Call) -> Value | None:
        if _function(self._code, name) is None:
            return None
        return self.library.called(self._code, name, [self.value(a) for a in node.args], node)

    def constant_of(self, name: str, node: ast.AST) -> Value:
        if name not in self._code.constants:
            self.refuse(node, f"{name} is not known")
        kind, text = self._code.constants[name]
        return self.constant(CONSTANTS[kind](text), node)

    def text(self) -> str:
        head = ", ".join([*map(self.name, self._parameters), "control"])
        lines = [f"def {self.title}({head}):", *self.lines, f"    return {self.RESULT}"]
        return "\n".join(lines).replace(self.RESULT, _ZEROS[self.result])
