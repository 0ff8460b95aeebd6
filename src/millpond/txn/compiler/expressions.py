"""Typed code for the expressions of a transaction: Python's semantics, spelled out step by step for numba.

Every step that can fail is followed by a test that leaves the event. Values are held in variables of one type each.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from millpond.code.tables import Type
from millpond.txn.compiler import arguments
from millpond.txn.compiler.arithmetic import HIGHEST, LOWEST
from millpond.txn.compiler.values import (
    INDEX,
    OVERFLOW,
    SHIFT,
    ZERO,
    CannotCompile,
    CodeWriter,
    EventField,
    Value,
    ValueType,
    is_decimal,
    scale_of,
)

_COMPARE = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
_MIXED = {"<": "{c} == -1", "<=": "{c} == -1 or {c} == 0", ">": "{c} == 1", ">=": "{c} == 0 or {c} == 1",
          "==": "{c} == 0", "!=": "{c} != 0"}  # fmt: skip
_CHECKED = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul"}
_PLAIN = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}
_BITS = {ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^"}
_POWER_MAX = 64
COLLECTION = "collection"
"""In place of a type: the variable holds a list or a set."""


@dataclass
class Collection:
    """A local list or set of longs or strings. What it holds shows where something is first put in or looked for."""

    name: str
    is_set: bool
    type: Type | None = None

    def holds(self, node: ast.AST, type_: ValueType) -> None:
        if type_ not in ("long", "string") or self.type not in (None, type_):
            raise CannotCompile(node, f"a {type_} in the {'set' if self.is_set else 'list'} {self.name!r}")
        self.type = type_

    @property
    def variable(self) -> str:
        return f"v_{self.name}_c"


@dataclass
class Expressions:
    """The compiler of expressions. `column` gives the value of an attribute of a row, `asked` that of a question about
    one."""

    kind: int  # the number of the function in its set
    write: CodeWriter
    fields: Mapping[str, EventField]
    constants: Mapping[str, bool | int | float | str]
    modules: Mapping[str, str]
    column: Callable[[ast.Attribute], Value]
    asked: Callable[[ast.Compare], Value | None]
    strings: list[str]  # constants, to be interned: known in the code by their place
    env: dict[str, ValueType] = field(default_factory=dict)
    maybe: set[str] = field(default_factory=set)  # variables that only some paths have set
    collections: dict[str, Collection] = field(default_factory=dict)  # local lists and sets
    known: set[str] = field(default_factory=set)  # what the code before this place has established

    # Variables

    def variable(self, name: str, type_: ValueType) -> str:
        """A variable of the user has one name in the code for each type that it takes."""
        return f"v_{name}_{f'm{scale_of(type_)}' if is_decimal(type_) else type_[0]}"

    def temporary(self, type_: ValueType, text: str) -> Value:
        name = self.write.fresh()
        self.write(f"{name} = {text}")
        return Value(type_, name)

    def copied(self, value: Value) -> Value:
        """The value in a variable of its own."""
        name = self.write.fresh()
        self.store(ast.Pass(), name, value, value.type)
        return Value(value.type, name)

    def store(self, node: ast.AST, name: str, value: Value, type_: ValueType) -> None:
        """Sets a variable of that type to a value of that type or of one that it holds."""
        if type_ != "number":
            self.write(f"{name} = {self.converted(node, value, type_).text}")
            return
        to = Value("number", name)
        parts = {"number": (value.is_double, value.double.text, value.long.text),
                 "double": ("True", value.text, "0"), "long": ("False", "0.0", value.text)}  # fmt: skip
        if value.type not in parts:
            raise CannotCompile(node, f"a {value.type} where there is a number on another path")
        for place, text in zip((to.is_double, to.double.text, to.long.text), parts[value.type], strict=True):
            self.write(f"{place} = {text}")

    def either(self, node: ast.AST, value: Value, function: Callable[[Value], Value]) -> Value:
        """What the function makes of the value: of a number, as the double and as the long that it may be."""
        if value.type != "number":
            return function(value)
        ways = {f"if {value.is_double}:": value.double, "else:": value.long}
        type_ = self.joined(node, [self.tried(lambda: function(way)) for way in ways.values()])  # noqa: B023
        name = self.write.fresh()
        for word, way in ways.items():
            with self.sometimes(), self.write.under(word):
                self.store(node, name, function(way), type_)
        return Value(type_, name)

    def name(self, node: ast.Name) -> Value:
        found = node.id
        if found in self.maybe:
            raise CannotCompile(node, f"{found!r} is set on some paths only")
        if self.env.get(found) == COLLECTION:
            raise CannotCompile(node, f"the list or set {found!r} is used as a value")
        if found in self.env:
            return Value(self.env[found], self.variable(found, self.env[found]))
        if found in self.fields:
            raise CannotCompile(node, f"the list {found!r} is used as a value")
        if found in self.constants:
            return self.constant(node, self.constants[found])
        raise CannotCompile(node, f"{found!r} has no value here")

    def constant(self, node: ast.AST, value: object) -> Value:
        match value:
            case bool():
                return Value("bool", str(value))
            case int() if LOWEST <= value <= HIGHEST:
                # Numba takes the lowest literal for an unsigned number.
                return Value("long", str(value) if value > LOWEST else f"({LOWEST + 1} - 1)")
            case float():
                if math.isnan(value):
                    return Value("double", "nan")
                if math.isinf(value):
                    return Value("double", "inf" if value > 0 else "(-inf)")
                return Value("double", f"({value!r})" if value < 0 else repr(value))
            case str():
                if value not in self.strings:
                    self.strings.append(value)
                return Value("string", f"strings[{self.strings.index(value)}]")
        raise CannotCompile(node, f"the constant {value!r}")

    # Conversions

    def as_double(self, value: Value) -> Value:
        if value.type == "number":
            text = f"({value.double.text} if {value.is_double} else to_double({value.long.text}))"
            return Value("double", text)
        if is_decimal(value.type):
            return Value("double", f"truediv({value.text}, {10 ** scale_of(value.type)})")
        return value if value.type == "double" else Value("double", f"to_double({value.text})")

    def as_long(self, value: Value) -> Value:
        return Value("long", f"to_long({value.text})") if value.type == "bool" else value

    def converted(self, node: ast.AST, value: Value, type_: ValueType) -> Value:
        """The value under a wider type: bool < long < double."""
        if value.type == type_:
            return value
        if is_decimal(type_) and (value.type == "long" or is_decimal(value.type)):
            return self.rescaled(node, value, scale_of(type_))
        if type_ == "double" and value.type != "string":
            return self.as_double(value)
        if type_ == "long" and value.type == "bool":
            return self.as_long(value)
        raise CannotCompile(node, f"a {value.type} where there is a {type_} on another path")

    def number(self, node: ast.AST, value: Value) -> Value:
        if value.type == "string":
            raise CannotCompile(node, "arithmetic with a string")
        return self.as_long(value)

    def truth(self, value: Value) -> str:
        match value.type:
            case "bool":
                return value.text
            case "double":
                return f"{value.text} != 0.0"
            case "number":
                return f"({value.double.text} != 0.0 if {value.is_double} else {value.long.text} != 0)"
            case _:
                return f"{value.text} != 0"  # the empty string is number 0

    def call(self, node: ast.Call) -> Value:
        raise NotImplementedError

    def rescaled(self, node: ast.AST, value: Value, scale: int) -> Value:
        raise NotImplementedError

    def decimal_operation(self, node: ast.AST, op: ast.operator, left: Value, right: Value) -> Value:
        raise NotImplementedError

    def compared_decimals(self, node: ast.AST, sign: str, left: Value, right: Value) -> str:
        raise NotImplementedError

    # Expressions

    def value(self, node: ast.expr) -> Value:
        match node:
            case ast.Constant():
                return self.constant(node, node.value)
            case ast.Name():
                return self.name(node)
            case ast.Attribute():
                return self.attribute(node)
            case ast.BinOp():
                return self.operation(node, node.op, self.value(node.left), self.value(node.right))
            case ast.UnaryOp():
                return self.unary(node)
            case ast.BoolOp():
                return self.boolean(node)
            case ast.Compare():
                return self.comparison(node)
            case ast.IfExp():
                return self.choice(node)
            case ast.Call():
                return self.call(node)
            case ast.Subscript():
                return self.item(node)
        raise CannotCompile(node, f"{ast.unparse(node)}: {type(node).__name__}")

    def attribute(self, node: ast.Attribute) -> Value:
        if isinstance(node.value, ast.Name) and self.modules.get(node.value.id) == "math":
            value = getattr(math, node.attr, None)
            if isinstance(value, float):
                return self.constant(node, value)
            raise CannotCompile(node, f"math.{node.attr}")
        if isinstance(node.value, ast.Name) and node.value.id in self.modules:
            raise CannotCompile(node, f"{self.modules[node.value.id]}.{node.attr}")
        return self.column(node)

    def operation(self, node: ast.AST, op: ast.operator, left: Value, right: Value) -> Value:
        if type(op) in _BITS and left.type == right.type == "bool":
            return self.temporary("bool", f"{left.text} {_BITS[type(op)]} {right.text}")
        left, right = self.number(node, left), self.number(node, right)
        if is_decimal(left.type) or is_decimal(right.type):
            return self.decimal_operation(node, op, left, right)
        if left.type == "number":
            return self.either(node, left, lambda way: self.operation(node, op, way, right))
        if right.type == "number":
            return self.either(node, right, lambda way: self.operation(node, op, left, way))
        if isinstance(op, ast.Pow):
            return self.power(node, left, right)
        if left.type == right.type == "long":
            return self.long_operation(node, op, left.text, right.text)
        a, b = self.as_double(left).text, self.as_double(right).text
        if type(op) in _PLAIN:
            return self.temporary("double", f"{a} {_PLAIN[type(op)]} {b}")
        forms = {
            ast.Div: f"{a} / {b}",
            ast.FloorDiv: f"floordiv_double({a}, {b})",
            ast.Mod: f"mod_double({a}, {b})",
        }
        if type(op) not in forms:
            raise CannotCompile(node, f"{type(op).__name__} of doubles")
        self.write.fail(f"{right.text} == 0", ZERO)
        return self.temporary("double", forms[type(op)])

    def long_operation(self, node: ast.AST, op: ast.operator, a: str, b: str) -> Value:
        write = self.write
        if type(op) in _CHECKED:
            name = _CHECKED[type(op)]
            write.fail(f"{name}_overflows({a}, {b})", OVERFLOW)
            return self.temporary("long", f"{name}({a}, {b})")
        if type(op) in _BITS:
            return self.temporary("long", f"{a} {_BITS[type(op)]} {b}")
        match op:
            case ast.Div():
                write.fail(f"{b} == 0", ZERO)
                return self.temporary("double", f"truediv({a}, {b})")
            case ast.FloorDiv():
                write.fail(f"{b} == 0", ZERO)
                write.fail(f"{b} == -1 and {a} == {LOWEST + 1} - 1", OVERFLOW)
                return self.temporary("long", f"floordiv({a}, {b})")
            case ast.Mod():
                write.fail(f"{b} == 0", ZERO)
                return self.temporary("long", f"mod({a}, {b})")
            case ast.LShift():
                write.fail(f"{b} < 0", SHIFT)
                write.fail(f"shift_left_overflows({a}, {b})", OVERFLOW)
                return self.temporary("long", f"shift_left({a}, {b})")
            case ast.RShift():
                write.fail(f"{b} < 0", SHIFT)
                return self.temporary("long", f"shift_right({a}, {b})")
        raise CannotCompile(node, type(op).__name__)

    def power(self, node: ast.AST, left: Value, right: Value) -> Value:
        """A long to a constant: multiplications. What else ** can give depends on the values."""
        if left.type != "long" or not right.text.isdecimal() or int(right.text) > _POWER_MAX:
            raise CannotCompile(node, "** of other than a long and a small constant")
        out = Value("long", "1")
        for _ in range(int(right.text)):
            out = self.long_operation(node, ast.Mult(), out.text, left.text)
        return out

    def unary(self, node: ast.UnaryOp) -> Value:
        if isinstance(node.op, ast.Not):
            return self.temporary("bool", f"not ({self.test(node.operand)})")
        literal = node.operand.value if isinstance(node.operand, ast.Constant) else None
        if isinstance(node.op, ast.USub) and isinstance(literal, (int, float)):
            return self.constant(node, -literal)
        number = self.number(node, self.value(node.operand))
        return self.either(node, number, lambda way: self.signed(node, way))

    def signed(self, node: ast.UnaryOp, number: Value) -> Value:
        match node.op:
            case ast.USub() if number.type == "double":
                return self.temporary("double", f"-{number.text}")
            case ast.USub():
                return Value(number.type, self.long_operation(node, ast.Sub(), "0", number.text).text)
            case ast.UAdd():
                return number
            case ast.Invert() if number.type == "long":
                return self.temporary("long", f"~{number.text}")
        raise CannotCompile(node, ast.unparse(node))

    def boolean(self, node: ast.BoolOp) -> Value:
        """`and`, `or`: the value that decides, as in Python. Their types are one."""
        types = [self.type_of(part) for part in node.values]
        type_ = self.joined(node, types)
        name = self.write.fresh()
        self.store(node, name, self.value(node.values[0]), type_)
        with self.sometimes():
            for part in node.values[1:]:
                test = self.truth(Value(type_, name))
                self.write(f"if {test}:" if isinstance(node.op, ast.And) else f"if not ({test}):")
                self.write.depth += 1
                self.store(node, name, self.value(part), type_)
        return Value(type_, name)

    @contextmanager
    def sometimes(self) -> Iterator[None]:
        """Code that runs on some paths only: what it establishes is not known after it."""
        depth, known = self.write.depth, set(self.known)
        yield
        self.write.depth, self.known = depth, known

    def test(self, node: ast.expr) -> str:
        """A condition: of a value its truth only, so that the types may differ."""
        if not isinstance(node, ast.BoolOp):
            return self.truth(self.value(node))
        name = self.write.fresh()
        self.write(f"{name} = {self.test(node.values[0])}")
        with self.sometimes():
            for part in node.values[1:]:
                self.write(f"if {name}:" if isinstance(node.op, ast.And) else f"if not {name}:")
                self.write.depth += 1
                self.write(f"{name} = {self.test(part)}")
        return name

    def choice(self, node: ast.IfExp) -> Value:
        type_ = self.joined(node, [self.type_of(node.body), self.type_of(node.orelse)])
        name = self.write.fresh()
        with self.sometimes(), self.write.under(f"if {self.test(node.test)}:"):
            self.store(node, name, self.value(node.body), type_)
        with self.sometimes(), self.write.under("else:"):
            self.store(node, name, self.value(node.orelse), type_)
        return Value(type_, name)

    def type_of(self, node: ast.expr) -> ValueType:
        return self.tried(lambda: self.value(node))

    def tried(self, function: Callable[[], Value]) -> ValueType:
        """The type of a value, whose code is thrown away."""
        kept, fails = len(self.write.lines), self.write.fails
        with self.sometimes():
            type_ = function().type
        del self.write.lines[kept:]
        self.write.fails = fails
        return type_

    def joined(self, node: ast.AST, types: Sequence[ValueType]) -> ValueType:
        """The one type that holds them all: a long on one path and a double on another make a number."""
        found = set(types)
        if len(found) == 1:
            return types[0]
        if found <= {"long", "double", "number"}:
            return "number"
        if all(type_ == "long" or is_decimal(type_) for type_ in types):
            return f"decimal{max(map(scale_of, types))}"
        raise CannotCompile(node, f"a {types[0]} on one path and a {types[-1]} on another")

    def comparison(self, node: ast.Compare) -> Value:
        if len(node.ops) == 1 and isinstance(node.ops[0], ast.In | ast.NotIn | ast.Is | ast.IsNot):
            answer = self.asked(node)
            if answer is not None:
                return answer
        name = self.write.fresh()
        left, op = self.value(node.left), node.ops[0]
        if isinstance(op, (ast.In, ast.NotIn)):
            self.write(f"{name} = {self.member(node, left, isinstance(op, ast.NotIn))}")
            return Value("bool", name)
        right = self.value(node.comparators[0])
        self.write(f"{name} = {self.compared(node, op, left, right)}")
        with self.sometimes():
            for op, part in zip(node.ops[1:], node.comparators[1:], strict=True):
                self.write(f"if {name}:")
                self.write.depth += 1
                left, right = right, self.value(part)
                self.write(f"{name} = {self.compared(node, op, left, right)}")
        return Value("bool", name)

    def member(self, node: ast.Compare, left: Value, negated: bool) -> str:
        right = node.comparators[0]
        collection = self.collection(right)
        if len(node.ops) == 1 and collection is not None:
            collection.holds(node, left.type)
            return f"{left.text} {'not in' if negated else 'in'} {collection.variable}"
        if len(node.ops) > 1 or not isinstance(right, (ast.Tuple, ast.List, ast.Set)) or not right.elts:
            raise CannotCompile(node, "in of other than a tuple of values")
        tests = []
        for element in right.elts:
            value = self.value(element)
            if {left.type, value.type} <= {"double", "number"} and not _is_number(value.text):
                # NaN is not equal to itself, and yet it is in a tuple of itself.
                raise CannotCompile(node, "in of doubles other than constants")
            tests.append(self.compared(node, ast.Eq(), left, value))
        text = " or ".join(f"({test})" for test in tests)
        return f"not ({text})" if negated else text

    def compared(self, node: ast.AST, op: ast.cmpop, left: Value, right: Value) -> str:
        sign = _COMPARE.get(type(op))
        if sign is None:
            raise CannotCompile(node, type(op).__name__)
        if "string" in (left.type, right.type):
            if left.type != right.type or sign not in ("==", "!="):
                raise CannotCompile(node, "strings can be compared with == and != only")
            return f"{left.text} {sign} {right.text}"
        left, right = self.as_long(left), self.as_long(right)
        if is_decimal(left.type) or is_decimal(right.type):
            return self.compared_decimals(node, sign, left, right)
        if "number" in (left.type, right.type):
            return self.compared_number(node, op, left, right)
        if left.type == right.type:
            return f"{left.text} {sign} {right.text}"
        if left.type == "double":
            left, right, sign = right, left, _MIRRORED[sign]
        found = self.temporary("long", f"compare({left.text}, {right.text})")
        return _MIXED[sign].format(c=found.text)

    def compared_number(self, node: ast.AST, op: ast.cmpop, left: Value, right: Value) -> str:
        def test(a: Value, b: Value) -> Value:
            return self.temporary("bool", self.compared(node, op, a, b))

        if left.type == "number":
            return self.either(node, left, lambda way: test(way, right)).text
        return self.either(node, right, lambda way: test(left, way)).text

    # Lists

    def collection(self, node: ast.AST) -> Collection | None:
        """The local list or set that is named. One that was not set on every path here is none that is known."""
        if not isinstance(node, ast.Name) or node.id not in self.collections:
            return None
        if self.env.get(node.id) != COLLECTION or node.id in self.maybe:
            raise CannotCompile(node, f"{node.id!r} is set on some paths only")
        return self.collections[node.id]

    def list_field(self, node: ast.AST) -> EventField | None:
        if isinstance(node, ast.Name) and node.id not in self.env:
            found = self.fields.get(node.id)
            return found if found is not None and found.is_list else None
        return None

    def item(self, node: ast.Subscript) -> Value:
        own = self.collection(node.value)
        if own is not None and not own.is_set and own.type is not None:
            at = self.index(node, f"len({own.variable})")
            return self.temporary(own.type, f"{own.variable}[{at}]")
        found = self.list_field(node.value)
        if found is None or isinstance(node.slice, ast.Slice):
            raise CannotCompile(node, f"{ast.unparse(node)} is no item of a list of the event")
        at = self.index(node, f"size_{found.name}")
        return self.temporary(found.type, self.list_item(found, at))

    def index(self, node: ast.Subscript, size: str) -> str:
        """A place in a list of that size; the event ends where there is none."""
        index = self.number(node, self.value(node.slice))
        if index.type != "long":
            raise CannotCompile(node, "a list index is a long")
        at = self.temporary("long", index.text)
        with self.write.under(f"if {at.text} < 0:"):
            self.write(f"{at.text} = {at.text} + {size}")
        self.write.fail(f"{at.text} < 0 or {at.text} >= {size}", INDEX)
        return at.text

    def list_item(self, found: EventField, at: str) -> str:
        array = arguments.field(self.kind, found.name)
        return f"{array}[start_{found.name} + {at}]" + self.loaded(found.type)

    @staticmethod
    def loaded(type_: Type) -> str:
        """Booleans lie in arrays as 0 and 1."""
        return " != 0" if type_ == "bool" else ""


def _is_number(text: str) -> bool:
    """Whether the code is a literal, other than NaN."""
    try:
        return not math.isnan(float(text.strip("()")))
    except ValueError:
        return False
