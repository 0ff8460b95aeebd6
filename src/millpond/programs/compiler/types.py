"""What variables are: the type of each, over all that it is set to in a method. Empty for what cannot be told.

None is of every type, a long beside doubles is a double.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from types import FunctionType

from millpond.programs.compiler.accesses import field_in, is_everywhere
from millpond.programs.compiler.composite import (
    DICT,
    EMPTY,
    NULL,
    SET,
    TUPLE,
    UNKNOWN,
    head_of,
    is_set,
    join,
    joined,
    made,
    parts_of,
)
from millpond.programs.compiler.fields import StateField, type_of
from millpond.programs.compiler.signatures import LONG_MATH, METHODS, OF_BUILTINS, OF_SETS
from millpond.programs.values import ELEMENTS, inner_of


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
        self.settled = False
        """Whether all has been seen that a dict is filled with."""
        self.result: str | None = None
        self.result_conflict: tuple[str, str, int] | None = None

    def infer(self, body: list[ast.stmt]) -> None:
        """Until nothing changes any more."""
        for self.settled in (False, True):
            before = None
            while before != (self.names, self.result):
                before = dict(self.names), self.result
                for statement in body:
                    self.statement(statement)

    def set(self, name: str, kind: str, line: int) -> None:
        if is_set(kind):
            self.sets.add(name)
        declared = self.declared.get(name, "")
        if name in self.declared and (
            kind in (UNKNOWN, NULL, EMPTY)
            or (
                head_of(declared)
                and head_of(kind) == head_of(declared)
                and {UNKNOWN, NULL} & {*parts_of(kind)}
            )
        ):
            kind = declared
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
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self.set(name, self.of(value), node.lineno)
            case ast.AugAssign(target=ast.Subscript() as place, op=op, value=value):
                before = ast.copy_location(ast.Subscript(place.value, place.slice, ast.Load()), place)
                self.entry(place, self.of(ast.BinOp(before, op, value)))
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
            case ast.Expr(
                value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="add"), args=[item])
            ) if is_set(self.names.get(name, "")):
                self.set(name, made(SET, self.of(item)), node.lineno)
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
            whole = self.of(value)
            if isinstance(value, ast.Tuple | ast.List):
                self.each(target.elts, [self.of(v) for v in value.elts])
            else:
                self.each(target.elts, self.unpacked(whole, len(target.elts)))
        elif isinstance(target, ast.Subscript):
            self.entry(target, self.of(value))

    def entry(self, target: ast.Subscript, kind: str) -> None:
        """What a dict is filled with is what it holds."""
        if isinstance(target.value, ast.Name) and head_of(self.names.get(target.value.id, "")) == DICT:
            self.set(target.value.id, made(DICT, self.of(target.slice), kind), target.lineno)

    def unpacked(self, kind: str, count: int) -> list[str]:
        """The types of so many items of a value."""
        if head_of(kind) == TUPLE:
            return parts_of(kind) if len(parts_of(kind)) == count else [UNKNOWN] * count
        return ["string" if kind == "string" else inner_of(kind)] * count

    def iterate(self, target: ast.expr, iterated: ast.expr) -> None:
        kind = self.item_of(iterated)
        if isinstance(target, ast.Name):
            self.set(target.id, kind, target.lineno)
        elif isinstance(target, ast.Tuple | ast.List):
            self.each(target.elts, self.unpacked(kind, len(target.elts)))

    def each(self, targets: Sequence[ast.expr], kinds: Sequence[str]) -> None:
        for target, kind in zip(targets, kinds, strict=False):
            if isinstance(target, ast.Name):
                self.set(target.id, kind, target.lineno)
            elif isinstance(target, ast.Tuple | ast.List):
                self.each(target.elts, self.unpacked(kind, len(target.elts)))

    def entry_of(self, node: ast.expr) -> list[str]:
        """Types of key and value of what has entries."""
        field = field_in(node, self.fields)
        if field:
            own = self.fields[field].own is not None
            return [UNKNOWN, UNKNOWN] if own else [self.fields[field].key, self.fields[field].value]
        kind = self.of(node)
        if head_of(kind) == DICT:
            return [self.told(part) for part in parts_of(kind)]
        return ["long", "double"] if kind == "vector" else [UNKNOWN, UNKNOWN]

    def told(self, part: str) -> str:
        """The type of what a dict or set holds; unknown where nobody says."""
        return UNKNOWN if part == NULL and self.settled else part

    def item_of(self, node: ast.expr) -> str:
        match node:
            case ast.Call(func=ast.Name(id="range")):
                return "long"
            case ast.Call(
                func=ast.Name(id="reversed" | "sorted" | "list" | "set" | "frozenset" | "tuple"),
                args=[inner, *_],
            ):
                return self.item_of(inner)
            case ast.Call(func=ast.Name(id="zip"), args=args):
                return made(TUPLE, *map(self.item_of, args))
            case ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]):
                return made(TUPLE, "long", self.item_of(inner))
            case ast.Call(
                func=ast.Attribute(value=base, attr="keys" | "values" | "items" as attr), args=[]
            ) if not is_everywhere(base):
                entry = self.entry_of(base)
                if any(entry):
                    return made(TUPLE, *entry) if attr == "items" else entry[attr == "values"]
            case ast.GeneratorExp(elt=elt, generators=generators):
                for generator in generators:
                    self.iterate(generator.target, generator.iter)
                return self.of(elt)
        kind = self.of(node)
        if head_of(kind):
            parts = parts_of(kind)
            return joined(parts) if head_of(kind) == TUPLE else self.told(parts[0])
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
                return joined(self.of(v) for v in values)
            case ast.IfExp(body=body, orelse=orelse):
                return joined([self.of(body), self.of(orelse)])
            case ast.List(elts=elements):
                inner = joined(self.of(e) for e in elements) if elements else NULL
                return f"array<{inner}>" if inner else UNKNOWN
            case ast.ListComp(elt=elt, generators=generators):
                for generator in generators:
                    self.iterate(generator.target, generator.iter)
                return f"array<{self.of(elt)}>" if self.of(elt) else UNKNOWN
            case ast.Subscript():
                return self.subscript(node)
            case ast.Call():
                return self.call(node)
        return self.composite(node)

    def composite(self, node: ast.expr) -> str:
        """The type of what is written as a tuple, set or dict."""
        match node:
            case ast.Tuple(elts=elements):
                return made(TUPLE, *map(self.of, elements))
            case ast.Set(elts=elements):
                return made(SET, joined(map(self.of, elements)))
            case ast.Dict(keys=keys, values=values):
                known = [self.of(key) if key else UNKNOWN for key in keys]
                return made(DICT, joined(known), joined(map(self.of, values)))
            case ast.SetComp(generators=generators) | ast.DictComp(generators=generators):
                for generator in generators:
                    self.iterate(generator.target, generator.iter)
                if isinstance(node, ast.DictComp):
                    return made(DICT, self.of(node.key), self.of(node.value))
                return made(SET, self.of(node.elt))
        return UNKNOWN

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
        if TUPLE in (head_of(left), head_of(right)):
            return UNKNOWN
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
        if head_of(kind) == DICT:
            return self.told(parts_of(kind)[1])
        if head_of(kind) == TUPLE:
            parts = parts_of(kind)
            try:
                return str(parts[ast.literal_eval(node.slice)])
            except (ValueError, TypeError, IndexError):
                return joined(parts)
        if kind in ("vector", "matrix", "dense"):
            return "vector" if kind == "matrix" and not isinstance(node.slice, ast.Tuple) else "double"
        return "string" if kind == "string" else inner_of(kind)

    def call(self, node: ast.Call) -> str:
        match node.func:
            case ast.Attribute(value=ast.Name(id="math"), attr=attr):
                return "long" if attr in LONG_MATH else "boolean" if attr.startswith("is") else "double"
            case ast.Attribute(value=base, attr=attr):
                return self.method(base, attr, node.args)
            case ast.Name(id=name):
                return self.function(name, node.args)
        return UNKNOWN

    def method(self, base: ast.expr, attr: str, args: Sequence[ast.expr] = ()) -> str:
        if is_everywhere(base):
            field = self.fields[base.args[0].attr]  # type: ignore[attr-defined] # a call with a field
            return f"collection<{self.of_field(field, attr)}>"
        field_name = field_in(base, self.fields)
        if field_name:
            return self.of_field(self.fields[field_name], attr)
        kind = self.of(base)
        if kind.startswith("array<"):
            return {"copy": kind, "index": "long", "count": "long", "pop": inner_of(kind)}.get(attr, UNKNOWN)
        if head_of(kind):
            return self.of_composite(kind, attr, args)
        return METHODS.get(kind, {}).get(attr, UNKNOWN)

    def of_composite(self, kind: str, attr: str, args: Sequence[ast.expr]) -> str:
        parts = parts_of(kind)
        match head_of(kind), attr:
            case _, "copy":
                return kind
            case "dict", "get" | "pop" | "setdefault":
                return joined([parts[1], self.of(args[1])]) if len(args) > 1 else self.told(parts[1])
            case "set", _ if OF_SETS.get(attr) == SET:
                return made(SET, joined([parts[0], *map(self.item_of, args)]))
            case "set", _:
                return OF_SETS.get(attr, UNKNOWN)
            case "tuple", "count" | "index":
                return "long"
        return UNKNOWN

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
                "items": f"array<{made(TUPLE, field.key, field.value)}>",
            }.get(attr, UNKNOWN)
        return METHODS[field.element].get(attr, UNKNOWN)

    def function(self, name: str, args: list[ast.expr]) -> str:
        if name in self.of_function:
            return self.of_function[name]
        if name in OF_BUILTINS:
            return OF_BUILTINS[name]
        if name in ("mp_total", "mp_average") and args:
            inner = inner_of(self.of(args[0]))
            return "double" if name == "mp_average" and inner == "long" else inner
        if name in ("sorted", "list") and args:
            return f"array<{self.item_of(args[0])}>" if self.item_of(args[0]) else UNKNOWN
        if name == "list":
            return EMPTY
        if name in ("set", "frozenset"):
            return made(SET, self.item_of(args[0]) if args else NULL)
        if name == "dict":
            pair = self.unpacked(self.item_of(args[0]), 2) if args else [NULL, NULL]
            return made(DICT, *pair)
        if name == "divmod" and len(args) == 2:
            return made(TUPLE, *2 * [self.arithmetic(ast.BinOp(args[0], ast.FloorDiv(), args[1]))])
        if name == "sum" and args:
            return {"boolean": "long"}.get(self.item_of(args[0]), self.item_of(args[0])) or self.generated(
                args[0]
            )
        if name in ("min", "max") and len(args) == 1:
            return self.item_of(args[0]) or self.generated(args[0])
        if name in ("min", "max", "pow"):
            return joined(self.of(a) for a in args)
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
