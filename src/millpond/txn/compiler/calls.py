"""Typed code for the functions that a transaction may call: some built-in ones, and some of math."""

from __future__ import annotations

import ast

from millpond.txn.compiler.arithmetic import LOWEST
from millpond.txn.compiler.decimals import Decimals
from millpond.txn.compiler.values import DOMAIN, NAN, OVERFLOW, CannotCompile, Value, is_decimal


class Calls(Decimals):
    """Expressions with calls."""

    def call(self, node: ast.Call) -> Value:
        if node.keywords:
            raise CannotCompile(node, f"{ast.unparse(node.func)} with named arguments")
        match node.func:
            case ast.Name(id=name) if name not in self.env and name not in self.fields:
                return self.builtin(node, name)
            case ast.Attribute(value=ast.Name(id=module), attr=name) if self.modules.get(module) == "math":
                return self.math(node, name)
        raise CannotCompile(node, f"a call of {ast.unparse(node.func)}")

    def builtin(self, node: ast.Call, name: str) -> Value:
        match name, len(node.args):
            case "len", 1:
                found = self.list_field(node.args[0])
                if found is not None:
                    return Value("long", f"size_{found.name}")
                own = self.collection(node.args[0])
                if own is not None:
                    return self.temporary("long", f"len({own.variable})")
            case (("min" | "max"), n) if n >= 2:
                return self.extreme(node, "<" if name == "min" else ">")
            case "abs", 1:
                return self.either(node, self.number(node, self.value(node.args[0])), self.absolute)
            case "int", 1:
                return self.whole(node, "{0}", "int")
            case "round", 1:
                return self.whole(node, "np.rint({0})", "round")
            case "round", 2:
                return self.to_digits(node)
            case "float", 1:
                return self.temporary(
                    "double", self.as_double(self.number(node, self.value(node.args[0]))).text
                )
            case "bool", 1:
                return self.temporary("bool", self.truth(self.value(node.args[0])))
        raise CannotCompile(node, f"a call of {name}")

    def absolute(self, value: Value) -> Value:
        if value.type == "long" or is_decimal(value.type):
            self.write.fail(f"{value.text} == {LOWEST + 1} - 1", OVERFLOW)
        return self.temporary(value.type, f"abs({value.text})")

    def extreme(self, node: ast.Call, sign: str) -> Value:
        """min and max: the first of equals, and whatever NaN makes of it, as in Python."""
        values = [self.value(argument) for argument in node.args]
        best = Value(self.joined(node, [value.type for value in values]), self.write.fresh())
        if best.type == "string":
            raise CannotCompile(node, "min and max of strings")
        self.store(node, best.text, values[0], best.type)
        for value in values[1:]:
            beats = self.compared(node, ast.Lt() if sign == "<" else ast.Gt(), value, best)
            with self.write.under(f"if {beats}:"):
                self.store(node, best.text, value, best.type)
        return best

    def to_digits(self, node: ast.Call) -> Value:
        """round(x, n) of a decimal."""
        value, digits = self.value(node.args[0]), node.args[1]
        if not isinstance(digits, ast.Constant) or type(digits.value) is not int or digits.value < 0:
            raise CannotCompile(node, "round to other than a constant number of digits")
        if not is_decimal(value.type):
            raise CannotCompile(node, "round to digits of other than a decimal")
        return self.rounded(node, value, digits.value, "even")

    def whole(self, node: ast.Call, form: str, name: str) -> Value:
        """A double made a long: int, round, math.floor, math.ceil, math.trunc."""
        value = self.number(node, self.value(node.args[0]))
        if is_decimal(value.type):
            return self.whole_decimal(node, value, name)
        return self.either(node, value, lambda way: self.cut_off(way, form))

    def cut_off(self, value: Value, form: str) -> Value:
        if value.type == "long":
            return self.temporary("long", value.text)
        self.write.fail(f"{value.text} != {value.text}", NAN)
        rounded = self.temporary("double", form.format(value.text))
        self.write.fail(f"not fits_long({rounded.text})", OVERFLOW)
        return self.temporary("long", f"to_long({rounded.text})")

    def math(self, node: ast.Call, name: str) -> Value:
        if len(node.args) != 1:
            raise CannotCompile(node, f"math.{name} with {len(node.args)} arguments")
        if name in ("floor", "ceil", "trunc"):
            return self.whole(node, "{0}" if name == "trunc" else f"np.{name}({{0}})", name)
        x = self.temporary("double", self.as_double(self.number(node, self.value(node.args[0]))).text).text
        match name:
            case "isnan":
                return self.temporary("bool", f"{x} != {x}")
            case "isinf":
                return self.temporary("bool", f"abs({x}) == inf")
            case "isfinite":
                return self.temporary("bool", f"abs({x}) < inf")
            case "fabs":
                return self.temporary("double", f"abs({x})")
            case "sqrt":
                self.write.fail(f"{x} < 0.0", DOMAIN)
                return self.temporary("double", f"math.sqrt({x})")
            case "log" | "log2" | "log10":
                self.write.fail(f"{x} <= 0.0", DOMAIN)
                return self.temporary("double", f"math.{name}({x})")
            case "sin" | "cos" | "tan":
                self.write.fail(f"abs({x}) == inf", DOMAIN)
                return self.temporary("double", f"math.{name}({x})")
            case "exp":
                found = self.temporary("double", f"exp({x})")
                self.write.fail(f"{found.text} == inf and {x} != inf", OVERFLOW)
                return found
        raise CannotCompile(node, f"math.{name}")
