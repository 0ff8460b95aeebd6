"""What variables are: the type of each, over all that it is set to in a method. Empty for what cannot be told.

None is of every type, a long beside doubles is a double.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from types import FunctionType

from millpond.programs.compiler.accesses import field_in, is_everywhere
from millpond.programs.compiler.fields import StateField, type_of
from millpond.programs.values import ELEMENTS, inner_of

NULL, UNKNOWN, SET, EMPTY = "null", "", "set", "array<null>"
_METHODS: dict[str, dict[str, str]] = {
    "string": {
        **dict.fromkeys(["lower", "upper", "strip", "lstrip", "rstrip", "replace", "join", "title", "capitalize", "removeprefix", "removesuffix", "format"], "string"),
        **dict.fromkeys(("split", "splitlines", "rsplit"), "array<string>"),
        **dict.fromkeys(("find", "count", "index", "rfind"), "long"),
        **dict.fromkeys(["startswith", "endswith", "isdigit", "isalpha", "isalnum", "islower", "isupper", "isspace"], "boolean"),
    },
    "vector": {
        "keys": "array<long>", "values": "array<double>", "array": "array<double>", "total": "double", "dot": "double",
        "get": "double", "top": "array<long>", "without": "vector", "copy": "vector",
    },
    "matrix": {"keys": "array<long>", "column": "vector", "multiply": "vector", "copy": "matrix"},
    "dense": {"keys": "array<long>", "copy": "dense"},
    SET: {
        **dict.fromkeys(["copy", "union", "intersection", "difference", "symmetric_difference"], SET),
        **dict.fromkeys(["isdisjoint", "issubset", "issuperset"], "boolean"),
    },
}  # fmt: skip
_BUILTINS = {
    **dict.fromkeys(("len", "int"), "long"),
    "float": "double",
    "str": "string",
    **dict.fromkeys(("bool", "all", "any", "isinstance"), "boolean"),
    "mp_Vector": "vector",
    "mp_Matrix": "matrix",
    "mp_DenseMatrix": "dense",
    "set": SET,
    "frozenset": SET,
}
_LONG_MATH = ("floor", "ceil", "trunc", "gcd", "lcm", "comb", "perm", "factorial", "isqrt")


def join(left: str, right: str) -> str | None:
    """The type of what is one or the other; None if there is none."""
    if right in (left, NULL):
        return left
    if left == NULL:
        return right
    if {left, right} == {"long", "double"}:
        return "double"
    for kind in ("array", "collection"):
        if left.startswith(f"{kind}<") and right.startswith(f"{kind}<"):
            inner = join(inner_of(left), inner_of(right))
            return f"{kind}<{inner}>" if inner is not None else None
    return None if left and right else UNKNOWN


def returned_by(method: FunctionType) -> str:
    """The type that a method of a class of the user's says that it returns."""
    hint = method.__annotations__.get("return")
    if isinstance(hint, str) and not type_of(hint):
        try:
            hint = eval(hint, method.__globals__)  # noqa: S307 - as Python itself does with annotations
        except (SyntaxError, NameError, TypeError, AttributeError):
            return UNKNOWN
    return NULL if hint is None and "return" in method.__annotations__ else type_of(hint)


class Types:
    """The types of a method's variables; `conflicts` are those that are two things at once, with the line."""

    def __init__(
        self, fields: dict[str, StateField], parameters: Mapping[str, str], returns: Mapping[str, str]
    ) -> None:
        self.fields = fields
        self.of_function = returns
        self.names: dict[str, str] = dict(parameters)
        self.declared: dict[str, str] = {}
        self.conflicts: dict[str, tuple[str, str, int]] = {}
        self.sets: set[str] = set()
        """The variables that may be sets, whatever else they are."""
        self.result: str | None = None
        self.result_conflict: tuple[str, str, int] | None = None

    def infer(self, body: list[ast.stmt]) -> None:
        """Until nothing changes any more."""
        while True:
            before = dict(self.names), self.result
            for statement in body:
                self.statement(statement)
            if before == (self.names, self.result):
                return

    def set(self, name: str, kind: str, line: int) -> None:
        if kind == SET:
            self.sets.add(name)
        if name in self.declared and kind in (UNKNOWN, NULL, EMPTY):
            kind = self.declared[name]
        if name not in self.names:
            self.names[name] = kind
            return
        found = join(self.names[name], kind)
        if found is None:
            self.conflicts.setdefault(name, (self.names[name], kind, line))
            found = UNKNOWN
        if name not in self.conflicts and self.names[name] != UNKNOWN:
            self.names[name] = found

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=[target], value=value):
                self.target(target, value)
            case ast.AnnAssign(
                target=ast.Name(id=name), annotation=ast.Constant(value=str() as kind), value=value
            ):
                self.declared[name] = kind
                self.set(name, kind, node.lineno)
                if value is not None:
                    self.set(name, self.of(value), node.lineno)
            case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=value):
                load = ast.copy_location(ast.Name(name, ast.Load()), target)
                self.set(name, self.of(ast.BinOp(load, op, value)), node.lineno)
            case ast.For(target=target, iter=iterated):
                self.iterate(target, iterated)
            case ast.Return(value=value) if value is not None:
                self.returned(self.of(value), node.lineno)
            case ast.Expr(
                value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[item])
            ):
                self.set(name, f"array<{self.of(item)}>" if self.of(item) else UNKNOWN, node.lineno)
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.stmt):
                self.statement(inner)
            elif isinstance(inner, ast.ExceptHandler):
                for statement in inner.body:
                    self.statement(statement)

    def returned(self, kind: str, line: int) -> None:
        if self.result is None:
            self.result = kind
            return
        found = join(self.result, kind)
        if found is None:
            self.result_conflict = self.result_conflict or (self.result, kind, line)
        else:
            self.result = found

    def target(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.set(target.id, self.of(value), target.lineno)
        elif isinstance(target, ast.Tuple | ast.List):
            kinds = [self.of(v) for v in value.elts] if isinstance(value, ast.Tuple | ast.List) else []
            whole = self.of(value)
            for i, inner in enumerate(target.elts):
                if isinstance(inner, ast.Name):
                    self.set(inner.id, kinds[i] if i < len(kinds) else inner_of(whole), inner.lineno)

    def iterate(self, target: ast.expr, iterated: ast.expr) -> None:
        match target, iterated:
            case ast.Name(id=name), _:
                self.set(name, self.item_of(iterated), target.lineno)
            case ast.Tuple(elts=elements), ast.Call(func=ast.Name(id="zip"), args=args):
                self.each(elements, [self.item_of(a) for a in args])
            case ast.Tuple(elts=elements), ast.Call(func=ast.Name(id="enumerate"), args=[arg, *_]):
                self.each(elements, ["long", self.item_of(arg)])
            case ast.Tuple(elts=elements), ast.Call(func=ast.Attribute(value=base, attr="items")):
                self.each(elements, self.entry_of(base))
            case ast.Tuple(elts=elements), _:
                self.each(elements, [UNKNOWN] * len(elements))

    def each(self, targets: Iterable[ast.expr], kinds: list[str]) -> None:
        for target, kind in zip(targets, kinds, strict=False):
            if isinstance(target, ast.Name):
                self.set(target.id, kind, target.lineno)

    def entry_of(self, node: ast.expr) -> list[str]:
        """Types of key and value of what has entries."""
        field = field_in(node, self.fields)
        if field:
            return [self.fields[field].key, self.fields[field].value]
        return ["long", "double"] if self.of(node) == "vector" else [UNKNOWN, UNKNOWN]

    def item_of(self, node: ast.expr) -> str:
        match node:
            case ast.Call(func=ast.Name(id="range")):
                return "long"
            case ast.Call(func=ast.Name(id="reversed" | "sorted" | "list" | "set"), args=[inner, *_]):
                return self.item_of(inner)
        kind = self.of(node)
        if kind == "vector":
            return "long"
        if kind == "string":
            return "string"
        field = field_in(node, self.fields)
        return self.fields[field].key if field else inner_of(kind)

    def of(self, node: ast.expr) -> str:
        """The type of an expression."""
        match node:
            case ast.Constant(value=value):
                names = {bool: "boolean", int: "long", float: "double", str: "string", type(None): NULL}
                return names.get(type(value), UNKNOWN)
            case ast.Name(id=name):
                return self.names.get(name, UNKNOWN)
            case ast.JoinedStr():
                return "string"
            case ast.Compare() | ast.UnaryOp(op=ast.Not()):
                return "boolean"
            case ast.UnaryOp(operand=operand):
                return self.of(operand)
            case ast.BinOp():
                return self.arithmetic(node)
            case ast.BoolOp(values=values):
                return self.joined(self.of(v) for v in values)
            case ast.IfExp(body=body, orelse=orelse):
                return self.joined([self.of(body), self.of(orelse)])
            case ast.List(elts=elements):
                inner = self.joined(self.of(e) for e in elements) if elements else NULL
                return f"array<{inner}>" if inner else UNKNOWN
            case ast.ListComp(elt=elt, generators=generators):
                for generator in generators:
                    self.iterate(generator.target, generator.iter)
                return f"array<{self.of(elt)}>" if self.of(elt) else UNKNOWN
            case ast.Set() | ast.SetComp():
                return SET
            case ast.Subscript():
                return self.subscript(node)
            case ast.Call():
                return self.call(node)
        return UNKNOWN

    def joined(self, kinds: Iterable[str]) -> str:
        found = NULL
        for kind in kinds:
            both = join(found, kind)
            if not both:
                return UNKNOWN
            found = both
        return found

    def arithmetic(self, node: ast.BinOp) -> str:
        left, right = self.of(node.left), self.of(node.right)
        numbers = {"long", "double", "boolean"}
        if isinstance(node.op, ast.Div) and {left, right} <= numbers:
            return "double"
        if left in numbers and right in numbers:
            return "double" if "double" in (left, right) else "long"
        if left == "string":
            return "string"
        if left in ELEMENTS or right in ELEMENTS:
            return left if left in ELEMENTS else right
        if isinstance(node.op, ast.Mult) and left.startswith("array<"):
            return left
        return join(left, right) or UNKNOWN

    def subscript(self, node: ast.Subscript) -> str:
        if is_everywhere(node.value):
            one = ast.Subscript(node.value.args[0], node.slice, ast.Load())  # type: ignore[attr-defined] # a call
            return f"collection<{self.of(one)}>"
        field = field_in(node.value, self.fields)
        if field:
            found = self.fields[field]
            if found.element in ("map", "vector") or isinstance(node.slice, ast.Tuple):
                return found.value
            return "vector" if found.element == "matrix" else "array<double>"
        kind = self.of(node.value)
        if isinstance(node.slice, ast.Slice):
            return kind if kind == "string" or kind.startswith("array<") else UNKNOWN
        if kind == "dense" and not isinstance(node.slice, ast.Tuple):
            return "array<double>"
        if kind in ("vector", "matrix", "dense"):
            return "vector" if kind == "matrix" and not isinstance(node.slice, ast.Tuple) else "double"
        return "string" if kind == "string" else inner_of(kind)

    def call(self, node: ast.Call) -> str:
        match node.func:
            case ast.Attribute(value=ast.Name(id="math"), attr=attr):
                return "long" if attr in _LONG_MATH else "boolean" if attr.startswith("is") else "double"
            case ast.Attribute(value=base, attr=attr):
                return self.method(base, attr)
            case ast.Name(id=name):
                return self.function(name, node.args)
        return UNKNOWN

    def method(self, base: ast.expr, attr: str) -> str:
        if is_everywhere(base):
            field = self.fields[base.args[0].attr]  # type: ignore[attr-defined] # a call with a field
            return f"collection<{self.of_field(field, attr)}>"
        field_name = field_in(base, self.fields)
        if field_name:
            return self.of_field(self.fields[field_name], attr)
        kind = self.of(base)
        if kind.startswith("array<"):
            return {"copy": kind, "index": "long", "count": "long", "pop": inner_of(kind)}.get(attr, UNKNOWN)
        return _METHODS.get(kind, {}).get(attr, UNKNOWN)

    def of_field(self, field: StateField, attr: str) -> str:
        if field.own is not None:
            method = field.own.methods.get(attr)
            return UNKNOWN if method is None else returned_by(method)
        if field.element == "map":
            return {
                "get": field.value,
                "pop": field.value,
                "keys": f"array<{field.key}>",
                "values": f"array<{field.value}>",
            }.get(attr, UNKNOWN)
        return _METHODS[field.element].get(attr, UNKNOWN)

    def function(self, name: str, args: list[ast.expr]) -> str:
        if name in self.of_function:
            return self.of_function[name]
        if name in _BUILTINS:
            return _BUILTINS[name]
        if name in ("mp_total", "mp_average") and args:
            inner = inner_of(self.of(args[0]))
            return "double" if name == "mp_average" and inner == "long" else inner
        if name in ("sorted", "list") and args:
            return f"array<{self.item_of(args[0])}>" if self.item_of(args[0]) else UNKNOWN
        if name == "list":
            return EMPTY
        if name == "sum" and args:
            return {"boolean": "long"}.get(self.item_of(args[0]), self.item_of(args[0])) or self.generated(
                args[0]
            )
        if name in ("min", "max") and len(args) == 1:
            return self.item_of(args[0]) or self.generated(args[0])
        if name in ("min", "max", "pow"):
            return self.joined(self.of(a) for a in args)
        if name == "abs":
            return self.of(args[0])
        if name == "round":
            return "long" if len(args) == 1 else "double"
        return UNKNOWN

    def generated(self, node: ast.expr) -> str:
        if not isinstance(node, ast.GeneratorExp | ast.ListComp):
            return UNKNOWN
        for generator in node.generators:
            self.iterate(generator.target, generator.iter)
        kind = self.of(node.elt)
        return "long" if kind == "boolean" else kind
