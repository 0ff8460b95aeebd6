"""What compiled bodies call: arithmetic as Python's, or `control[0]` says that something is not as there.

Each is a part of whoever calls it. What it gives where it sets `control` counts for nothing.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

from millpond.kernels._jit import JIT_ENABLED
from millpond.programs.machine.cache import part
from millpond.programs.machine.plan import STOP
from millpond.txn.compiler.arithmetic import (
    add_overflows,
    compare,
    fits_long,
    floordiv,
    floordiv_double,
    mod,
    mod_double,
    mul_overflows,
    sub_overflows,
    to_long,
    truediv,
)

LOWEST = np.int64(-(1 << 63))
RANGE_MAX = np.int64(1 << 61)


stopped: Any
"""Whether another thread wants it to end."""

if JIT_ENABLED:

    def _stopped(_typing: Any, control: Any) -> Any:
        """Read anew each time: the compiler may not take it out of a loop."""

        def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            array = context.make_array(control)(context, builder, args[0])
            place = builder.gep(array.data, [ir.Constant(ir.IntType(64), STOP)])
            word = builder.load_atomic(place, "acquire", 8)
            return builder.icmp_signed("!=", word, ir.Constant(ir.IntType(64), 0))

        return types.boolean(control), emit

    _stopped.__name__ = "stopped"
    stopped = intrinsic(_stopped)
else:

    def stopped(control: Any) -> bool:
        return bool(control[STOP])


@part
def add_longs(a: Any, b: Any, control: Any) -> Any:
    if add_overflows(a, b):
        control[0] = 1
    return a + b


@part
def sub_longs(a: Any, b: Any, control: Any) -> Any:
    if sub_overflows(a, b):
        control[0] = 1
    return a - b


@part
def mul_longs(a: Any, b: Any, control: Any) -> Any:
    if mul_overflows(a, b):
        control[0] = 1
    return a * b


@part
def floor_longs(a: Any, b: Any, control: Any) -> Any:
    if b == 0 or (b == -1 and a == LOWEST):
        control[0] = 1
        return np.int64(0)
    return floordiv(a, b)


@part
def mod_longs(a: Any, b: Any, control: Any) -> Any:
    if b == 0:
        control[0] = 1
        return np.int64(0)
    return mod(a, b)


@part
def div_longs(a: Any, b: Any, control: Any) -> Any:
    if b == 0:
        control[0] = 1
        return 0.0
    return truediv(a, b)


@part
def abs_long(a: Any, control: Any) -> Any:
    if a == LOWEST:
        control[0] = 1
    return abs(a)


@part
def div_doubles(a: Any, b: Any, control: Any) -> Any:
    if b == 0.0:
        control[0] = 1
        return 0.0
    return a / b


@part
def floor_doubles(a: Any, b: Any, control: Any) -> Any:
    if b == 0.0:
        control[0] = 1
        return 0.0
    return floordiv_double(a, b)


@part
def mod_doubles(a: Any, b: Any, control: Any) -> Any:
    if b == 0.0:
        control[0] = 1
        return 0.0
    return mod_double(a, b)


@part
def not_zero(a: Any, control: Any) -> Any:
    """A divisor."""
    if a == 0.0:
        control[0] = 1
    return a


@part
def long_of(a: Any, control: Any) -> Any:
    """Of a whole double."""
    if math.isnan(a) or not fits_long(a):
        control[0] = 1
        return np.int64(0)
    return to_long(a)


@part
def least(a: Any, b: Any) -> Any:
    return min(a, b)


@part
def most(a: Any, b: Any) -> Any:
    return max(a, b)


# Lists, as arrays


@part
def item_at(values: Any, index: Any, control: Any) -> Any:
    count = len(values)
    if index < 0:
        index += count
    if index < 0 or index >= count:
        control[0] = 1
        return values.dtype.type(0)
    return values[index]


@part
def holds(values: Any, wanted: Any) -> bool:
    for value in values:  # noqa: SIM110 - compiled
        if value == wanted:
            return True
    return False


@part
def joined(left: Any, right: Any) -> Any:
    both = np.empty(len(left) + len(right), left.dtype)
    both[: len(left)] = left
    both[len(left) :] = right
    return both


@part
def pushed(values: Any, count: Any, value: Any) -> Any:
    """The array with one more value, or a longer one."""
    if count == len(values):
        longer = np.empty(2 * count, values.dtype)
        longer[:count] = values
        values = longer
    values[count] = value
    return values


@part
def sum_longs(values: Any, control: Any) -> Any:
    whole = np.int64(0)
    for value in values:
        whole = add_longs(whole, np.int64(value), control)
    return whole


@part
def total_doubles(values: Any, control: Any) -> Any:
    """The sum from the first one on, of which there must be one."""
    if len(values) == 0:
        control[0] = 1
        return 0.0
    whole = values[0]
    for n in range(1, len(values)):
        whole += values[n]
    return whole


@part
def min_of(values: Any, control: Any) -> Any:
    if len(values) == 0:
        control[0] = 1
        return values.dtype.type(0)
    found = values[0]
    for value in values:
        found = min(found, value)
    return found


@part
def max_of(values: Any, control: Any) -> Any:
    if len(values) == 0:
        control[0] = 1
        return values.dtype.type(0)
    found = values[0]
    for value in values:
        found = max(found, value)
    return found


if sys.version_info >= (3, 12):

    @part
    def sum_doubles(values: Any) -> Any:
        """As Python's, which keeps what rounding has lost."""
        whole, lost = 0.0, 0.0
        for value in values:
            more = whole + value
            lost += (whole - more) + value if abs(whole) >= abs(value) else (value - more) + whole
            whole = more
        return whole + lost if lost != 0.0 and math.isfinite(lost) else whole

else:

    @part
    def sum_doubles(values: Any) -> Any:
        whole = 0.0
        for value in values:
            whole += value
        return whole


@part
def check_range(start: Any, stop: Any, step: Any, control: Any) -> None:
    """Far from where its length would overflow."""
    far = max(abs(start), abs(stop), abs(step)) >= RANGE_MAX
    if step == 0 or far or LOWEST in (start, stop, step):
        control[0] = 1


@part
def whole_step(step: Any) -> Any:
    return step if step != 0 else np.int64(1)


@part
def same_length(left: Any, right: Any, control: Any) -> Any:
    if left != right:
        control[0] = 1
    return min(left, right)


# math


def _function(function: Any, *, positive: bool) -> Any:
    """One of `math` that fails where Python's does: it gives no number for one, or an infinite one for one that is not."""

    @part
    def checked(a: Any, control: Any) -> Any:
        if positive and a <= 0.0:
            control[0] = 1
            return 0.0
        found = function(a)
        if (math.isnan(found) and not math.isnan(a)) or (math.isinf(found) and not math.isinf(a)):
            control[0] = 1
        return found

    return checked


def _of_double(function: Any) -> Any:
    @part
    def rounded(a: Any) -> Any:
        return function(a)

    return rounded


NAMES: dict[str, Any] = {
    function.__name__: function
    for function in (
        *(add_longs, sub_longs, mul_longs, floor_longs, mod_longs, div_longs, abs_long),
        *(div_doubles, floor_doubles, mod_doubles, not_zero, least, most),
        *(item_at, holds, joined, pushed, sum_longs, sum_doubles, total_doubles, min_of, max_of),
        *(check_range, whole_step, same_length, stopped),
    )
}
NAMES |= {
    f"math_{name}": _function(getattr(math, name), positive=False)
    for name in ("sqrt", "exp", "sin", "cos", "tanh", "atan", "fabs")
}
NAMES |= {f"math_{name}": _function(getattr(math, name), positive=True) for name in ("log", "log2", "log10")}
NAMES |= {
    "math_floor": _of_double(np.floor),
    "math_ceil": _of_double(np.ceil),
    "math_trunc": _of_double(np.trunc),
}
NAMES |= {"to_long": long_of, "compare": compare, "math": math, "np": np}
