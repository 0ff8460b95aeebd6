"""Typed code for decimals: a long that counts the smallest unit, and a scale that is known from the text.

Sums have the larger scale of the two, products the sum of both, as in Python. What leaves 64 bits ends the event.
"""

from __future__ import annotations

import ast

from millpond.code.tables import Type
from millpond.stores.tables import Column
from millpond.txn.compiler.expressions import Expressions
from millpond.txn.compiler.values import OVERFLOW, CannotCompile, Value, is_decimal, scale_of

_STEP_MAX = 18  # powers of ten that a long holds


class Decimals(Expressions):
    """Expressions with decimals."""

    def rescaled(self, node: ast.AST, value: Value, scale: int) -> Value:
        """The value at a larger scale, or at its own."""
        steps = scale - scale_of(value.type)
        if steps == 0:
            return Value(f"decimal{scale}", value.text)
        if not 0 < steps <= _STEP_MAX:
            raise CannotCompile(node, f"a decimal of {scale} digits after the point")
        power = 10**steps
        self.write.fail(f"mul_overflows({value.text}, {power})", OVERFLOW)
        return self.temporary(f"decimal{scale}", f"mul({value.text}, {power})")

    def rounded(self, node: ast.AST, value: Value, scale: int, half: str) -> Value:
        """The value at any scale; of those that lie half-way, "up" or "even"."""
        steps = scale_of(value.type) - scale
        if steps <= 0:
            return self.rescaled(node, value, scale)
        if steps > _STEP_MAX:
            raise CannotCompile(node, f"a decimal that loses {steps} digits")
        return self.temporary(f"decimal{scale}", f"round_half_{half}({value.text}, {10**steps})")

    def decimal_operation(self, node: ast.AST, op: ast.operator, left: Value, right: Value) -> Value:
        if not all(value.type == "long" or is_decimal(value.type) for value in (left, right)):
            raise CannotCompile(node, "arithmetic of a decimal and a double: float(...) converts")
        scales = scale_of(left.type), scale_of(right.type)
        match op:
            case ast.Add() | ast.Sub():
                scale = max(scales)
                left, right = self.rescaled(node, left, scale), self.rescaled(node, right, scale)
            case ast.Mult():
                scale = sum(scales)
            case _:
                raise CannotCompile(node, f"{type(op).__name__} of decimals")
        return Value(f"decimal{scale}", self.long_operation(node, op, left.text, right.text).text)

    def compared_decimals(self, node: ast.AST, sign: str, left: Value, right: Value) -> str:
        if not all(value.type == "long" or is_decimal(value.type) for value in (left, right)):
            raise CannotCompile(node, "a decimal beside a double: float(...) converts")
        steps = scale_of(left.type) - scale_of(right.type)
        if abs(steps) > _STEP_MAX:
            raise CannotCompile(node, "decimals of very different scales")
        if steps == 0:
            return f"{left.text} {sign} {right.text}"
        ups = (1, 10**steps) if steps > 0 else (10**-steps, 1)
        order = self.temporary("long", f"compare_units({left.text}, {ups[0]}, {right.text}, {ups[1]})")
        return f"{order.text} {sign} 0"

    def whole_decimal(self, node: ast.AST, value: Value, name: str) -> Value:
        """int, round, math.floor, math.ceil, math.trunc."""
        scale = scale_of(value.type)
        if scale == 0:
            return Value("long", value.text)
        if scale > _STEP_MAX:
            raise CannotCompile(node, f"{name} of a decimal of {scale} digits after the point")
        power = 10**scale
        forms = {
            "int": f"cut_units({value.text}, {power})",
            "trunc": f"cut_units({value.text}, {power})",
            "round": f"round_half_even({value.text}, {power})",
            "floor": f"floordiv({value.text}, {power})",
            "ceil": f"ceil_units({value.text}, {power})",
        }
        return self.temporary("long", forms[name])

    def fitted(self, node: ast.AST, value: Value, column: Column, overflow: int) -> Value | None:
        """The value as a column holds it; None if it is of a type that does not fit. `overflow` ends the event."""
        type_: Type = column.type
        if is_decimal(type_):
            if value.type not in ("long", "bool") and not is_decimal(value.type):
                return None
            scale = scale_of(type_)
            fits = self.rounded(node, self.as_long(value), scale, "up")
        elif type_ == "double" and value.type in ("double", "long", "bool", "number"):
            fits = self.as_double(value)
            return self.temporary("double", f"single({fits.text})") if column.is_float else fits
        elif type_ == "long" and value.type in ("long", "bool"):
            fits = self.as_long(value)
        elif type_ == value.type:
            return value
        else:
            return None
        if column.is_narrow:
            self.write.fail(f"{fits.text} < {column.lowest} or {fits.text} > {column.highest}", overflow)
        return fits
