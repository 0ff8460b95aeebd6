"""Python's arithmetic on int64 and float64, exactly, as parts of compiled transactions.

Values come from one function and faults from another, so that the compiled code can leave the event at a fault.
Each has a compiled form and one that runs without numba; the two give the same values.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import compiler, types
from numba.core.errors import TypingError
from numba.extending import intrinsic

from millpond.kernels._jit import JIT_ENABLED
from millpond.kernels.rows import ask_for_known, ask_for_row, ask_for_slot, find_row, keep_row, row_of

LOWEST = -(1 << 63)
HIGHEST = (1 << 63) - 1
RANGE_STEPS_MAX = 1 << 24  # a longer loop would hold up all that share the table


_TYPES = {"int": types.int64, "float": types.float64, "bool": types.boolean, "np.uint64": types.uint64}


def _part(function: Any, emit: Callable[[Any, Any, Any, Any], Any] | None = None, inline: bool = True) -> Any:
    """Compiled into whoever calls it, for the types that its annotations name. It must raise no error.

    A function of numba's would be compiled anew for every literal that it is given, and each time with entries from
    Python and C. `emit` writes the code of one that is but an instruction.
    """
    if not JIT_ENABLED:
        return function
    *named, result = function.__annotations__.values()

    def compiled(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        flags: Any = compiler.Flags()  # type: ignore[no-untyped-call]
        flags.error_model, flags.forceinline = "numpy", inline
        made = context.compile_subroutine(builder, function, signature, flags=flags)
        return context.call_internal_no_propagate(builder, made.fndesc, signature, args)[1]

    def typed(_typing: Any, *given: Any) -> Any:
        wanted = []
        for name, one in zip(named, given, strict=True):
            wanted.append(_TYPES.get(name) or types.unliteral(one))  # type: ignore[no-untyped-call]
            if name == "int" and isinstance(one, types.Float):
                raise TypingError(f"{function.__name__} takes no double")
        return _TYPES[result](*wanted), emit or compiled

    typed.__name__ = function.__name__
    own = inspect.Parameter("_typing", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    vars(typed)["__signature__"] = inspect.Signature([own, *inspect.signature(function).parameters.values()])
    return intrinsic(typed)


def _cast(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return context.cast(builder, args[0], signature.args[0], signature.return_type)


def _overflows(operation: str, plain: Callable[[int, int], int]) -> Any:
    """Whether an operation on two longs leaves their range, as the processor tells."""

    def compiled(_typing: Any, a: Any, b: Any) -> Any:
        def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            long = ir.IntType(64)
            kind = ir.FunctionType(ir.LiteralStructType([long, ir.IntType(1)]), [long, long])
            name = f"llvm.{operation}.with.overflow.i64"
            found = builder.module.globals.get(name)
            call = found if found is not None else ir.Function(builder.module, kind, name)
            return builder.extract_value(builder.call(call, args), 1)

        return types.boolean(types.int64, types.int64), emit

    def interpreted(a: int, b: int) -> bool:
        return not LOWEST <= plain(int(a), int(b)) <= HIGHEST

    return intrinsic(compiled) if JIT_ENABLED else interpreted


add_overflows = _overflows("sadd", lambda a, b: a + b)
sub_overflows = _overflows("ssub", lambda a, b: a - b)
mul_overflows = _overflows("smul", lambda a, b: a * b)

# Without the compiler, NumPy's scalars come out of arrays: their sums wrap, those of Python's integers do not.
if JIT_ENABLED:

    def add(a: int, b: int) -> int:
        return a + b

    def sub(a: int, b: int) -> int:
        return a - b

    def mul(a: int, b: int) -> int:
        return a * b

    def to_long(a: Any) -> int:
        return int(a)

    def to_double(a: Any) -> float:
        return float(a)

    add = _part(add, lambda _context, builder, _signature, args: builder.add(*args))
    sub = _part(sub, lambda _context, builder, _signature, args: builder.sub(*args))
    mul = _part(mul, lambda _context, builder, _signature, args: builder.mul(*args))
    to_long, to_double = _part(to_long, _cast), _part(to_double, _cast)

    @_part
    def exp(a: float) -> float:
        return math.exp(a)
else:

    def add(a: int, b: int) -> int:
        return int(a) + int(b)

    def sub(a: int, b: int) -> int:
        return int(a) - int(b)

    def mul(a: int, b: int) -> int:
        return int(a) * int(b)

    def to_long(a: Any) -> int:
        return int(a)

    def to_double(a: Any) -> float:
        return float(a)

    def exp(a: float) -> float:
        """Infinity where the result is out of range, as the compiled form gives."""
        try:
            return math.exp(a)
        except OverflowError:
            return math.inf


@_part
def floordiv(a: int, b: int) -> int:
    """b is not 0, nor -1 under the lowest long."""
    return a // b


@_part
def mod(a: int, b: int) -> int:
    """b is not 0."""
    return 0 if b == -1 else a % b


@_part
def floordiv_double(a: float, b: float) -> float:
    """As CPython divides doubles; b is not 0."""
    rest: float = np.fmod(a, b)
    quotient = (a - rest) / b
    if rest != 0.0 and (b < 0.0) != (rest < 0.0):
        quotient -= 1.0
    if quotient != 0.0:
        whole: float = np.floor(quotient)
        if quotient - whole > 0.5:
            whole += 1.0
        return whole
    return math.copysign(0.0, a / b)


@_part
def mod_double(a: float, b: float) -> float:
    """As CPython does: of the sign of b, which is not 0."""
    rest: float = np.fmod(a, b)
    if rest != 0.0:
        if (b < 0.0) != (rest < 0.0):
            rest += b
        return rest
    return math.copysign(0.0, b)


if JIT_ENABLED:
    one: Any = np.uint64(1)
    limit: Any = np.uint64(RANGE_STEPS_MAX)

    @_part
    def magnitude(a: int) -> np.uint64:
        return np.uint64(a) if a >= 0 else np.uint64(0) - np.uint64(a)

    @_part
    def distance(a: int, b: int) -> np.uint64:
        return np.uint64(b) - np.uint64(a) if a <= b else np.uint64(a) - np.uint64(b)

    @partial(_part, inline=False)
    def _divide_exactly(a: int, b: int) -> float:
        """The double nearest to a / b, ties to even: 55 bits of the quotient, the last one for all that follow."""
        n, d = magnitude(a), magnitude(b)
        one = np.uint64(1)
        quotient, rest = n // d, n % d
        shift = 0
        while quotient < (one << np.uint64(54)) and (rest != 0 or quotient != 0):
            if rest == 0 and shift == 0 and quotient < (one << np.uint64(53)):
                break
            above = rest >> np.uint64(63)
            rest = rest << one
            quotient = quotient << one
            if above != 0 or rest >= d:
                rest -= d
                quotient |= one
            shift += 1
        lost = rest != 0
        while quotient >= (one << np.uint64(55)):
            lost = lost or (quotient & one) != 0
            quotient = quotient >> one
            shift -= 1
        if lost:
            quotient |= one
        value = math.ldexp(np.float64(quotient), -shift)
        return -value if (a < 0) != (b < 0) else value

    @_part
    def truediv(a: int, b: int) -> float:
        """b is not 0. Longs that are doubles divide as doubles; the others go the long way."""
        if -9007199254740992 <= a <= 9007199254740992 and -9007199254740992 <= b <= 9007199254740992:
            return np.float64(a) / np.float64(b)
        result: float = _divide_exactly(a, b)
        return result
else:
    one, limit = 1, RANGE_STEPS_MAX

    def magnitude(a: int) -> Any:
        return abs(int(a))

    def distance(a: int, b: int) -> Any:
        return abs(int(a) - int(b))

    def truediv(a: int, b: int) -> float:
        return int(a) / int(b)


@_part
def compare(a: int, b: float) -> int:
    """A long beside a double, exactly: -1, 0 or 1, and 2 beside NaN."""
    if b != b:  # noqa: PLR0124 - how compiled code tests for NaN
        return 2
    if b >= 9223372036854775808.0:
        return -1
    if b < -9223372036854775808.0:
        return 1
    whole = to_long(b)
    if a != whole:
        return -1 if a < whole else 1
    rest = b - to_double(whole)
    return -1 if rest > 0.0 else (1 if rest < 0.0 else 0)


@_part
def fits_long(a: float) -> bool:
    """Whether the double, cut off, is a long. Not NaN."""
    return -9223372036854775808.0 <= a < 9223372036854775808.0


@_part
def shift_left_overflows(a: int, b: int) -> bool:
    """b is not negative."""
    if a == 0:
        return False
    if b >= 63:
        return not (b == 63 and a == -1)
    return (a >> (63 - b)) != (0 if a >= 0 else -1)


@_part
def shift_left(a: int, b: int) -> int:
    return to_long(a) << b if b < 64 else 0


@_part
def shift_right(a: int, b: int) -> int:
    return a >> min(b, 63)


@_part
def steps(start: int, stop: int, step: int) -> int:
    """The length of a range, at most one more than is allowed. The step is not 0."""
    if (step > 0 and start >= stop) or (step < 0 and start <= stop):
        return 0
    full = (distance(start, stop) - one) // magnitude(step)  # before the last
    return to_long(full) + 1 if full < limit else RANGE_STEPS_MAX + 1


@_part
def single(a: float) -> float:
    """As a float holds it."""
    return to_double(np.float32(a))


@_part
def cut_units(a: int, unit: int) -> int:
    """How many whole units there are, towards 0."""
    low: int = floordiv(a, unit)
    return low + 1 if a < 0 and a - low * unit != 0 else low


@_part
def ceil_units(a: int, unit: int) -> int:
    """How many units there are, the last one maybe not whole."""
    low: int = floordiv(a, unit)
    return low + 1 if a - low * unit != 0 else low


@_part
def round_half_up(a: int, unit: int) -> int:
    """To the nearest unit; of two, to that which is further from 0. A unit is a power of ten."""
    low: int = floordiv(a, unit)
    rest = a - low * unit
    half = floordiv(unit, 2)
    return low + 1 if rest > half or (rest == half and a >= 0) else low


@_part
def round_half_even(a: int, unit: int) -> int:
    """To the nearest unit; of two, to the even one."""
    low: int = floordiv(a, unit)
    rest = a - low * unit
    half = floordiv(unit, 2)
    return low + 1 if rest > half or (rest == half and mod(low, 2) != 0) else low


@_part
def compare_units(a: int, ups: int, b: int, other_ups: int) -> int:
    """a * ups beside b * other_ups, one of which is 1: -1, 0 or 1. Neither product is made where it would not fit."""
    if mul_overflows(a, ups):
        return 1 if a > 0 else -1
    if mul_overflows(b, other_ups):
        return -1 if b > 0 else 1
    one_side, other = mul(a, ups), mul(b, other_ups)
    return 1 if one_side > other else (-1 if one_side < other else 0)


if JIT_ENABLED:

    @_part
    def known_row(known: Any, key: int) -> int:
        """The row of a key where it is known already. An unsigned index cannot count from the end: it is one load."""
        place = np.uint64(key)
        row: int = known[place] if place < np.uint64(known.shape[0]) else -3
        return row
else:

    def known_row(known: Any, key: int) -> Any:
        return known[key] if 0 <= key < known.shape[0] else -3


NAMES: dict[str, Any] = {
    function: globals()[function]
    for function in (
        *("add", "sub", "mul", "add_overflows", "sub_overflows", "mul_overflows", "to_long", "to_double"),
        *("floordiv", "mod", "floordiv_double", "mod_double", "truediv", "compare", "fits_long"),
        *("shift_left", "shift_left_overflows", "shift_right", "steps", "exp"),
        *("single", "cut_units", "ceil_units", "round_half_up", "round_half_even", "compare_units"),
        "known_row",
    )
}
NAMES |= {
    function.__name__: function
    for function in (find_row, row_of, keep_row, ask_for_known, ask_for_slot, ask_for_row)
}
NAMES |= {"math": math, "np": np, "inf": math.inf, "nan": math.nan}
