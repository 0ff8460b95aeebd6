"""The one arithmetic of rules: longs of 64 bits that wrap around, doubles, and errors where Python has them.

A rule says the same whether it is compiled or not. Numba, NumPy and Python differ where a long overflows, a divisor is
zero, a boolean is added, doubles are summed up. So the source of a rule is rewritten: what would differ becomes a call
of a function here. A rule that uses anything else than what is known to agree is not compiled.
"""

from __future__ import annotations

import ast
import builtins
import copy
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from numba.core import ir, types
from numba.extending import overload, register_jitable

from millpond.code.capture import Code

OPERATORS = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "truediv",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
    ast.LShift: "lshift",
    ast.RShift: "rshift",
    ast.BitAnd: "and_",
    ast.BitOr: "or_",
    ast.BitXor: "xor",
    ast.USub: "neg",
    ast.UAdd: "pos",
    ast.Invert: "invert",
}
CALLS = ("int", "round", "float", "abs", "sum", "min", "max")
# What numba does as it is done here.
NATIVE = {"truediv", "mod", "and_", "or_", "xor", "neg", "pos", "invert", "float", "abs", "min", "max"}
# `x ** n` up to here is a product; beyond, and for other exponents, it is not compiled.
POWER_MAX = 64
_LONGS = {bool, int, np.bool_, np.int64}
_DOUBLES = {float, np.float64}
_NUMBERS = _LONGS | _DOUBLES
_BOOLEANS = {bool, np.bool_}


class Rewriting(ast.NodeTransformer):
    """Turns operators and calls into calls of the functions below, but for the `native` ones."""

    def __init__(self, code: Code, native: Collection[str] = ()) -> None:
        self._modules = code.modules
        self._native = native
        # A function of the user's may have one of these names.
        own = {getattr(node, "name", "") for node in ast.parse(code.source).body}
        self._calls = {*CALLS} - {*native, *own, *code.constants}

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        name = _operation(node)
        return node if name in self._native else _call(name, node.left, node.right)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        name = OPERATORS.get(type(node.op), "not")
        # A negative number is a constant, too: the smallest long is minus one that is none.
        is_plain = name in {"not", *self._native} or isinstance(node.operand, ast.Constant)
        return node if is_plain else _call(name, node.operand)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        self.generic_visit(node)
        name = OPERATORS[type(node.op)]
        if name in self._native:
            return node
        before = copy.deepcopy(node.target)
        before.ctx = ast.Load()
        return ast.Assign([node.target], _call(_in_place(name), before, node.value))

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
            return node
        function, arguments = node.func, node.args
        if isinstance(function, ast.Attribute) and function.attr in ("sum", "mean"):
            if not (isinstance(function.value, ast.Name) and function.value.id in self._modules):
                arguments = [function.value, *arguments]
            return _call(function.attr, *arguments) if len(arguments) == 1 else node
        if not isinstance(function, ast.Name) or function.id not in self._calls:
            return node
        fits = len(arguments) > 1 if function.id in ("min", "max") else len(arguments) == 1
        return _call(function.id, *arguments) if fits else node


def _operation(node: ast.BinOp) -> str:
    exponent = getattr(node.right, "value", None)
    if isinstance(node.op, ast.Pow) and type(exponent) is int and 1 <= exponent <= POWER_MAX:
        return "power"
    return OPERATORS[type(node.op)]


def _in_place(name: str) -> str:
    return f"i{name.strip('_')}"


def _call(name: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(f"__{name}__", ast.Load()), list(arguments), [])


# Interpreted


def _number(value: Any) -> Any:
    return np.int64(value) if type(value) in _LONGS else np.float64(value)


def _binary(name: str) -> Callable[[Any, Any], Any]:
    """An operator as numba has it on two numbers; on anything else, arrays too, as it is."""
    operate = getattr(operator, name)
    is_bitwise = name.strip("_") in ("and", "or", "xor", "iand", "ior", "ixor")
    divides = name in ("truediv", "itruediv", "floordiv", "ifloordiv", "mod", "imod")

    def apply(left: Any, right: Any) -> Any:
        kinds = {type(left), type(right)}
        if not kinds <= _NUMBERS or (is_bitwise and kinds <= _BOOLEANS):
            return operate(left, right)
        left, right = _number(left), _number(right)
        if divides and right == 0:
            raise ZeroDivisionError("division by zero")
        if name in ("pow", "ipow") and type(right) is np.int64 and right < 0:
            left = np.float64(left)
        return operate(left, right)

    return apply


_BINARY = [name for kind, name in OPERATORS.items() if issubclass(kind, ast.operator)]
INTERPRETED: dict[str, Callable[..., Any]] = {
    name: _binary(name) for name in (*_BINARY, *map(_in_place, _BINARY))
}
_add, _multiply = INTERPRETED["add"], INTERPRETED["mul"]


def power(base: Any, exponent: int) -> Any:
    """A whole power, as a product: exact in longs that wrap, and rounded alike everywhere."""
    result = _multiply(base, 1)
    for _ in range(exponent - 1):
        result = _multiply(result, base)
    return result


def whole(value: Any) -> Any:
    """`int(value)`; OverflowError where that is no long."""
    return np.int64(int(value))


def _to_whole(function: Callable[[Any], Any], value: Any) -> Any:
    return np.int64(value if type(value) in _LONGS else function(value))


def rounded(value: Any) -> Any:
    return _to_whole(round, value)


def floor(value: Any) -> Any:
    return _to_whole(math.floor, value)


def ceil(value: Any) -> Any:
    return _to_whole(math.ceil, value)


def summed(values: Any) -> Any:
    """The sum, from first to last."""
    if isinstance(values, np.ndarray):
        is_flat = values.ndim == 1 and values.dtype == np.float64 and len(values) > 0
        return np.cumsum(values)[-1] if is_flat else np.sum(values)
    result: Any = np.int64(0)
    for value in values:
        result = _add(result, value)
    return result


def mean(values: Any) -> Any:
    """Of no values it is NaN."""
    doubles = np.asarray(values).astype(np.float64)
    return summed(doubles) / np.float64(doubles.size)


def _negated(operate: Callable[[Any], Any], value: Any) -> Any:
    if operate is operator.invert and type(value) in _BOOLEANS:
        return not value
    return operate(_number(value) if type(value) in _NUMBERS else value)


def _chosen(choose: Callable[..., Any], *values: Any) -> Any:
    kinds = {type(value) for value in values}
    if kinds & _LONGS and kinds & _DOUBLES and kinds <= _NUMBERS:
        values = tuple(map(np.float64, values))
    return choose(*values)


INTERPRETED |= {
    **{name: partial(_negated, getattr(operator, name)) for name in ("neg", "pos", "invert")},
    "power": power,
    "int": whole,
    "round": rounded,
    "float": lambda value: np.float64(float(value)),
    "abs": partial(_negated, abs),
    "sum": summed,
    "mean": mean,
    "min": partial(_chosen, min),
    "max": partial(_chosen, max),
}

# Compiled


def _is_long(*kinds: Any) -> bool:
    return all(isinstance(kind, types.Integer | types.Boolean) for kind in kinds)


def _wrapping(operate: Callable[[Any, Any], Any], in_place: bool) -> Callable[..., Any]:
    """How numba is to add, subtract or multiply. To it an overflow of longs cannot be; unsigned ones wrap around."""

    def of_longs(left: int, right: int) -> Any:
        return np.int64(operate(np.uint64(left), np.uint64(right)))

    def of_arrays(left: Any, right: Any) -> Any:
        return operate(_unsigned(left), _unsigned(right)).view(np.int64)

    def of_others(left: Any, right: Any) -> Any:
        return operate(left, right)

    def chosen(left: Any, right: Any) -> Callable[..., Any] | None:
        if in_place and isinstance(left, types.Array):
            return None
        if _is_long(left, right):
            return of_longs
        items = [_item(left), _item(right)]
        return (
            of_arrays
            if _is_long(*items) and any(isinstance(item, types.Integer) for item in items)
            else of_others
        )

    return chosen


def _unsigned(values: Any) -> Any:
    """Only numba calls it."""
    return values


# Not strict: numba would compare our annotations, too.
@overload(_unsigned, strict=False)
def _to_unsigned(values: Any) -> Callable[..., Any]:
    def view(values: Any) -> Any:
        return values.view(np.uint64)

    def converted(values: Any) -> Any:
        return values.astype(np.uint64)

    def number(values: Any) -> Any:
        return np.uint64(values)

    if not isinstance(values, types.Array):
        return number
    return view if isinstance(values.dtype, types.Integer) else converted


def _flooring(left: Any, right: Any) -> Callable[..., Any]:
    if _is_long(left, right):
        # Numba says 0 of the smallest long by -1.
        return lambda left, right: -left if right == -1 else left // right
    return lambda left, right: left // right


overload(INTERPRETED["floordiv"], strict=False)(_flooring)
overload(INTERPRETED["ifloordiv"], strict=False)(
    lambda left, right: None if isinstance(left, types.Array) else _flooring(left, right)
)
for _name in ("add", "sub", "mul"):
    _operate = getattr(operator, _name)
    overload(INTERPRETED[_name], strict=False)(_wrapping(_operate, in_place=False))
    overload(INTERPRETED[_in_place(_name)], strict=False)(_wrapping(_operate, in_place=True))


@overload(power, strict=False)
def _power(base: Any, exponent: Any) -> Callable[..., Any]:
    def product(base: Any, exponent: int) -> Any:
        result = _multiply(base, 1)
        for _ in range(exponent - 1):
            result = _multiply(result, base)
        return result

    return product


def _to_long(function: Callable[[Any], Any]) -> Callable[..., Any]:
    """How numba is to make a long of a double with this function. A long it leaves as it is."""

    def convert(value: float) -> Any:
        if math.isnan(value):
            raise ValueError("cannot convert float NaN to integer")
        if not -(2.0**63) <= value < 2.0**63:
            raise OverflowError("the number does not fit a long")
        return function(value)

    def convert_long(value: int) -> int:
        return int(value)

    return lambda value: convert_long if _is_long(value) else convert


for _function, _numba in ((whole, int), (rounded, round), (floor, math.floor), (ceil, math.ceil)):
    overload(_function, strict=False)(_to_long(_numba))


@overload(summed, strict=False)
def _total(values: Any) -> Callable[..., Any] | None:
    if not _is_flat(values):
        return None
    zero = 0 if _is_long(values.dtype) else 0.0

    def summed(values: Any) -> Any:
        result = zero
        for value in values:
            result = _add(result, value)
        return result

    return summed


@overload(mean, strict=False)
def _mean(values: Any) -> Callable[..., Any] | None:
    def averaged(values: Any) -> Any:
        result = 0.0
        for value in values:
            result += value
        return result / len(values) if len(values) else np.nan

    return averaged if _is_flat(values) else None


def _is_flat(values: Any) -> bool:
    return isinstance(values, types.List) or (isinstance(values, types.Array) and values.ndim == 1)


def _checked(function: Callable[[float], float], overflows: bool) -> Callable[[float], float]:
    """A function of `math` that fails where Python's does."""

    @register_jitable
    def checked(value: float) -> float:
        result = function(value)
        if math.isnan(result) and not math.isnan(value):
            raise ValueError("math domain error")
        if math.isinf(result) and not math.isinf(value):
            if overflows:
                raise OverflowError("math range error")
            raise ValueError("math domain error")
        return result

    return checked


def _module(name: str, names: Mapping[str, Any]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    return module


_OVERFLOWING = "exp expm1 sinh cosh"
_CHECKED = "sqrt log log2 log10 log1p sin cos tan asin acos atan tanh fabs"
_MATH = "isnan isinf isfinite copysign atan2 pi e inf nan"
_NUMPY = (
    "abs all any argmax argmin bool_ float64 full inf int64 isfinite isinf isnan max maximum min minimum "
    "nan ones ones_like pi sqrt zeros zeros_like"
)
MODULES = {
    "math": _module(
        "math",
        {name: getattr(math, name) for name in _MATH.split()}
        | {name: _checked(getattr(math, name), overflows=True) for name in _OVERFLOWING.split()}
        | {name: _checked(getattr(math, name), overflows=False) for name in _CHECKED.split()}
        | {"floor": floor, "ceil": ceil},
    ),
    "numpy": _module("numpy", {name: getattr(np, name) for name in _NUMPY.split()}),
}
COMPILED = {
    name: INTERPRETED[name]
    for name in (
        *("add", "sub", "mul", "floordiv", "iadd", "isub", "imul", "ifloordiv"),
        *("power", "int", "round", "sum", "mean"),
    )
}
_METHODS = {"all", "any", "argmax", "argmin", "copy", "max", "min", "shape", "size"}
_BUILTINS = {"abs", "bool", "enumerate", "float", "len", "max", "min", "range", "zip"} | {
    name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)
}


def interpreted(code: Code) -> Any:
    """The rule as Python."""
    # Python's own lose digits of a NumPy long.
    own = _module("math", vars(math) | {"floor": floor, "ceil": ceil})
    return code.load(rewrite=Rewriting(code).visit, given=_given(INTERPRETED), modules={"math": own})


def compiled(code: Code, fields: Collection[str], wrap: Callable[[FunctionType], Any]) -> tuple[Any, str]:
    """The rule for numba, and what in it would not be the same there; that is empty if there is nothing.

    `wrap` compiles a function, and `fields` are those of the rule's rows.
    """
    functions: dict[str, FunctionType] = {}

    def keep(function: FunctionType) -> Any:
        functions[function.__name__] = function
        return wrap(function)

    rule = code.load(keep, Rewriting(code, NATIVE).visit, _given(COMPILED), MODULES)
    return rule, _difference(code, functions, fields)


def _given(functions: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    return {f"__{name}__": function for name, function in functions.items()}


def _difference(code: Code, functions: Mapping[str, FunctionType], fields: Collection[str]) -> str:
    for node in ast.walk(ast.parse(code.source)):
        if isinstance(node, ast.Try):
            return "it handles errors"
        if isinstance(node, ast.List) and node.elts:
            return "it makes a list"
        if (
            isinstance(node, ast.Compare)
            and "is" in ast.unparse(node).split()
            and "None" not in ast.unparse(node)
        ):
            return "it asks with 'is'"
    known = {*_METHODS, *_BUILTINS, *fields, *_given(COMPILED), *code.constants, *code.modules, *functions}
    known |= {name for module in MODULES.values() for name in vars(module)}
    parts = {name: list(_parts(function.__code__)) for name, function in functions.items()}
    names = {name: {one for part in own for one in part.co_names} for name, own in parts.items()}
    unknown = set().union(*names.values()) - known
    if unknown:
        return f"it uses {min(unknown).strip('_')!r}"
    numbers = {name: int(text) for name, (kind, text) in code.constants.items() if kind == "int"}
    constants = (one for own in parts.values() for part in own for one in _flat(part.co_consts))
    numbers |= {str(one): one for one in constants if type(one) is int}
    for name, number in numbers.items():
        # The smallest long is one, but numba does not know it when it stands in the source.
        if not -(2**63) < number < 2**63:
            return f"{name} is no long"
    for _ in names:
        names = {name: used.union(*(names.get(one, ()) for one in used)) for name, used in names.items()}
    return "it calls itself" if any(name in used for name, used in names.items()) else ""


def _parts(code: CodeType) -> Iterator[CodeType]:
    """A function, and those within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)


def _flat(constants: Collection[Any]) -> Iterator[Any]:
    for constant in constants:
        if isinstance(constant, tuple | frozenset):
            yield from _flat(constant)
        else:
            yield constant


def mixes(dispatcher: Any) -> bool:
    """Whether a compiled function takes a long for a double, or a double for a long, where Python would not."""
    return any(
        _mixes(statement, compilation.type_annotation.typemap)
        for compilation in dispatcher.overloads.values()
        for block in compilation.type_annotation.blocks.values()
        for statement in block.body
    )


def _mixes(statement: Any, typemap: Mapping[str, Any]) -> bool:
    if isinstance(statement, ir.SetItem | ir.StaticSetItem):
        return _is_narrow(typemap[statement.target.name]) and not _is_long(
            _item(typemap[statement.value.name])
        )
    source = getattr(statement, "value", None) if isinstance(statement, ir.Assign) else None
    if isinstance(source, ir.Expr) and source.op == "inplace_binop":
        return _is_narrow(typemap[source.lhs.name])
    if isinstance(source, ir.Expr) and source.op == "cast":
        source = source.value
    return isinstance(source, ir.Var) and _loses(typemap[source.name], typemap[statement.target.name])


def _is_narrow(kind: Any) -> bool:
    """An array that cannot take doubles: NumPy refuses some, numba cuts them."""
    return isinstance(kind, types.Array) and _is_long(kind.dtype)


def _item(kind: Any) -> Any:
    return getattr(kind, "dtype", kind)


def _loses(source: Any, target: Any) -> bool:
    if isinstance(source, types.BaseTuple):
        return any(map(_loses, getattr(source, "types", ()), getattr(target, "types", ())))
    if not (isinstance(source, types.Integer) and isinstance(target, types.Float)):
        return False
    # A small number that stands in the source is as exact either way.
    return not isinstance(source, types.Literal) or abs(source.literal_value) > 2**53
