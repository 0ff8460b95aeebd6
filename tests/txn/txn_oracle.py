"""What transactions mean: an interpreter of their syntax trees, one event after the other, over plain dicts.

It shares no code with the package. Slow, and meant to be read.
"""

from __future__ import annotations

import ast
import decimal
import math
import operator
import struct
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

LOWEST, HIGHEST = -(2**63), 2**63 - 1

OPERATIONS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
    ast.Not: operator.not_,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
CALLS: dict[str, Any] = {
    "min": min, "max": max, "abs": abs, "int": int, "float": float, "bool": bool, "len": len,
    "set": set, "range": range, "round": round, "enumerate": enumerate, "zip": zip, "sum": sum, "str": str,
}  # fmt: skip


class Abort(Exception):
    pass


class Return(Exception):
    pass


class Break(Exception):
    pass


class Continue(Exception):
    pass


def as_held(value: Any, type_: str) -> Any:
    """A value as a column of that DDL type holds it; None where it does not fit."""
    bits = {"byte": 8, "short": 16, "int": 32, "date": 32}.get(type_)
    if bits is not None:
        return value if -(2 ** (bits - 1)) <= value < 2 ** (bits - 1) else None
    if type_ == "double":
        return float(value)
    if type_ == "float":
        try:
            return struct.unpack("f", struct.pack("f", value))[0]
        except OverflowError:
            return math.copysign(math.inf, value)
    if type_.startswith("decimal"):
        precision, scale = (int(part) for part in type_[8:-1].split(","))
        unit = Decimal(1).scaleb(-scale)
        with decimal.localcontext(prec=60):
            rounded = Decimal(value).quantize(unit, decimal.ROUND_HALF_UP)
        return rounded if abs(rounded) < Decimal(10) ** (precision - scale) else None
    return value


class OracleTable:
    """Rows by key. `zero` is what a row starts from; a read of a missing key gives `default`, or aborts."""

    def __init__(
        self,
        name: str,
        zero: dict[str, Any],
        default: dict[str, Any] | None,
        types: Mapping[str, str] | None = None,
        int_key: int | None = None,
    ) -> None:
        self.name = name
        self.zero = zero
        self.default = default
        self.types = types or {}
        self.int_key = int_key  # the part of the key that has 32 bits
        self.rows: dict[Any, dict[str, Any]] = {}

    def checked(self, key: Any) -> Any:
        if self.int_key is not None and not -(2**31) <= key[self.int_key] < 2**31:
            raise Abort("a key that the type of the table's keys does not hold")
        return key

    def read(self, key: Any, column: str) -> Any:
        if key in self.rows:
            return self.rows[key][column]
        if self.default is None:
            raise Abort(f"no such key {key!r} in {self.name}")
        return self.default[column]

    def write(self, key: Any, column: str, value: Any) -> None:
        row = dict(self.rows.get(key, self.default or self.zero))
        type_ = self.types.get(column, "double" if isinstance(self.zero[column], float) else "")
        row[column] = as_held(value, type_)
        if row[column] is None:
            raise Abort(f"overflow: {self.name}.{column} is {type_}")
        self.rows[key] = row

    def delete(self, key: Any) -> None:
        if key not in self.rows:
            raise Abort(f"no such key {key!r} in {self.name}")
        del self.rows[key]


class Transaction:
    """One event: the environment of the function, and the tables."""

    def __init__(self, tables: Mapping[str, OracleTable], event: Mapping[str, Any]) -> None:
        self.tables = tables
        self.env: dict[str, Any] = dict(event)
        self.row_of: dict[str, tuple[str, Any]] = {}

    def run(self, body: list[ast.stmt]) -> tuple[str | None, tuple[Any, ...] | None]:
        """The reason of an abort and the results."""
        before = {name: dict(table.rows) for name, table in self.tables.items()}
        try:
            with decimal.localcontext(prec=60):
                self.block(body)
        except Return as returned:
            value = returned.args[0]
            return None, value if isinstance(value, tuple) or value is None else (value,)
        except Abort as abort:
            reason = str(abort)
        except ZeroDivisionError:
            reason = "ZeroDivisionError: division by zero"
        except OverflowError:
            reason = "overflow"
        except (IndexError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
        else:
            return None, None
        for name, table in self.tables.items():
            table.rows = before[name]
        return reason, None

    def block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:  # noqa: C901 - a case for each
        match node:
            case ast.Assign():
                if self.is_row(node.value):
                    assert isinstance(node.targets[0], ast.Name)
                    self.row_of[node.targets[0].id] = self.row(node.value)
                    return
                value = self.value(node.value)
                for target in node.targets:
                    self.assign(target, value)
            case ast.AugAssign():
                left = self.value(node.target)
                self.assign(node.target, self.operation(node.op, left, self.value(node.value)))
            case ast.If():
                self.block(node.body if self.value(node.test) else node.orelse)
            case ast.Delete(targets=[target]):
                table, key = self.row(target)
                self.tables[table].delete(key)
            case ast.While():
                while self.value(node.test):
                    try:
                        self.block(node.body)
                    except Break:
                        break
                    except Continue:
                        continue
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=name, attr="add" | "append" as method))):
                getattr(self.env[name.id], method)(self.value(node.value.args[0]))
            case ast.For():
                for value in self.value(node.iter):
                    self.assign(node.target, value)
                    try:
                        self.block(node.body)
                    except Break:
                        break
                    except Continue:
                        continue
            case ast.Return():
                raise Return(None if node.value is None else self.value(node.value))
            case ast.Break():
                raise Break
            case ast.Continue():
                raise Continue
            case ast.Expr(value=ast.Call(args=[ast.Constant(value=reason)])):
                raise Abort(reason)
            case ast.Pass():
                pass
            case _:
                raise AssertionError(ast.dump(node))

    def assign(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name():
                self.env[target.id] = value
            case ast.Attribute():
                table, key = self.row(target.value)
                if key is None:
                    raise AttributeError(f"'NoneType' object has no attribute {target.attr!r}")
                self.tables[table].write(key, target.attr, value)
            case ast.Tuple():
                for part, one in zip(target.elts, value, strict=True):
                    self.assign(part, one)
            case _:
                raise AssertionError(ast.dump(target))

    def is_row(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Call):
            return isinstance(node.func, ast.Attribute) and node.func.attr == "get"
        return isinstance(node, ast.Subscript) and getattr(node.value, "id", None) in self.tables

    def row(self, node: ast.expr) -> tuple[str, Any]:
        if isinstance(node, ast.Name):
            return self.row_of[node.id]
        if isinstance(node, ast.Call):
            table = node.func.value.id
            key = self.tables[table].checked(self.value(node.args[0]))
            return table, key if key in self.tables[table].rows else None
        assert isinstance(node, ast.Subscript)
        assert isinstance(node.value, ast.Name)
        return node.value.id, self.tables[node.value.id].checked(self.value(node.slice))

    def value(self, node: ast.expr) -> Any:  # noqa: C901 - a case for each expression
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self.env[node.id]
            case ast.Attribute(value=ast.Name(id="math")):
                return getattr(math, node.attr)
            case ast.Attribute():
                table, key = self.row(node.value)
                if key is None:
                    raise AttributeError(f"'NoneType' object has no attribute {node.attr!r}")
                return self.tables[table].read(key, node.attr)
            case ast.BinOp():
                return self.operation(node.op, self.value(node.left), self.value(node.right))
            case ast.UnaryOp():
                return checked(OPERATIONS[type(node.op)](self.value(node.operand)))
            case ast.BoolOp():
                for part in node.values:
                    value = self.value(part)
                    if bool(value) is isinstance(node.op, ast.Or):
                        break
                return value
            case ast.Compare(left=ast.Name(id=name), ops=[ast.Is() | ast.IsNot() as op]):
                return (self.row_of[name][1] is None) is isinstance(op, ast.Is)
            case ast.Compare(ops=[ast.In() | ast.NotIn() as op], comparators=[ast.Name(id=name)]) if (
                name in self.tables
            ):
                key = self.tables[name].checked(self.value(node.left))
                return (key in self.tables[name].rows) is isinstance(op, ast.In)
            case ast.Compare():
                left = self.value(node.left)
                for op, part in zip(node.ops, node.comparators, strict=True):
                    right = self.value(part)
                    if isinstance(op, ast.In | ast.NotIn):
                        return (left in right) is isinstance(op, ast.In)
                    if not OPERATIONS[type(op)](left, right):
                        return False
                    left = right
                return True
            case ast.IfExp():
                return self.value(node.body if self.value(node.test) else node.orelse)
            case ast.Subscript():
                return self.value(node.value)[self.value(node.slice)]
            case ast.List():
                return [self.value(part) for part in node.elts]
            case ast.Tuple():
                return tuple(self.value(part) for part in node.elts)
            case ast.Call(func=ast.Name()):
                return checked(CALLS[node.func.id](*(self.value(part) for part in node.args)))
            case ast.Call(func=ast.Attribute()):
                return checked(getattr(math, node.func.attr)(*(self.value(part) for part in node.args)))
        raise AssertionError(ast.dump(node))

    @staticmethod
    def operation(op: ast.operator, left: Any, right: Any) -> Any:
        return checked(OPERATIONS[type(op)](left, right))


def checked(value: Any) -> Any:
    if isinstance(value, int) and not LOWEST <= value <= HIGHEST:
        raise OverflowError
    if isinstance(value, Decimal):
        sign, digits, _ = value.as_tuple()
        units = int("".join(map(str, digits)))
        if not LOWEST <= (-units if sign else units) <= HIGHEST:
            raise OverflowError
    return value


def run_serially(
    sources: Mapping[str, str], tables: Mapping[str, OracleTable], events: list[dict[str, Any]]
) -> list[tuple[str | None, tuple[Any, ...] | None]]:
    """The reason and the results of each event, in the order given; they run in that of (time, seq)."""
    bodies: dict[str, list[ast.stmt]] = {}
    for kind, source in sources.items():
        definition = ast.parse(source).body[0]
        assert isinstance(definition, ast.FunctionDef)
        bodies[kind] = definition.body
    out: list[tuple[str | None, tuple[Any, ...] | None]] = [(None, None)] * len(events)
    order = sorted(range(len(events)), key=lambda i: (events[i]["time"], events[i].get("seq", 0), i))
    for i in order:
        out[i] = Transaction(tables, events[i]).run(bodies[events[i]["kind"]])
    return out
