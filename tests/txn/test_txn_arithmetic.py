"""Compiled arithmetic is Python's, to the last bit, on every pair of awkward numbers."""

from __future__ import annotations

import itertools
import math
import struct
from typing import Any

import pyarrow as pa
import pytest

from millpond.code.capture import Code
from millpond.kernels._jit import JIT_ENABLED
from millpond.txn import TableSpec, TransactionCode, bind, load

LOWEST, HIGHEST = -(2**63), 2**63 - 1
LONGS = [
    0, 1, -1, 2, -2, 3, -3, 7, 10, -10, 62, 63, 64, 65, 2**31, -(2**31), 2**32 + 1, 2**52 + 1, 2**53, 2**53 + 1,
    -(2**53) - 1, 2**54 + 3, 3037000500, -3037000500, 2**62, -(2**62), 2**62 + 1, HIGHEST - 1, HIGHEST, LOWEST,
    LOWEST + 1, 10**18 + 7,
]  # fmt: skip
DOUBLES = [
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, 0.1, -7.3, 1e-310, 1e300, -1e300, 2.0**52 + 0.5, 2.0**53,
    2.0**62, 2.0**63, -(2.0**63), 9007199254740993.0, 1e16, 700.0, 709.9, math.inf, -math.inf, math.nan,
]  # fmt: skip

OF_LONGS = [
    "a + b", "a - b", "a * b", "a / b", "a // b", "a % b", "a & b", "a | b", "a ^ b", "a << b", "a >> b", "-a", "~a",
    "+a", "abs(a)", "min(a, b)", "max(a, b)", "a < b", "a <= b", "a == b", "a != b", "a > b", "a >= b", "float(a)",
    "int(a)", "bool(a)", "a and b", "a or b", "not a", "a if b else 3", "a ** 3", "(a - 1) * 2 + b", "a in (1, 2, b)",
    "math.floor(a)", "a * 0.5", "True + a", "a == b and a > 0 or b < 3", "0 < a <= b",
]  # fmt: skip
OF_DOUBLES = [
    "x + y", "x - y", "x * y", "x / y", "x // y", "x % y", "-x", "abs(x)", "min(x, y)", "max(x, y)", "x < y", "x <= y",
    "x == y", "x != y", "x > y", "x >= y", "int(x)", "round(x)", "bool(x)", "math.floor(x)", "math.ceil(x)",
    "math.trunc(x)", "math.sqrt(x)", "math.isnan(x)", "math.isinf(x)", "math.isfinite(x)", "math.fabs(x)",
    "math.exp(x)", "math.log(x)", "math.log10(x)", "math.log2(x)", "math.sin(x)", "math.cos(x)", "x if y else 2.0",
    "x * math.pi", "not x",
]  # fmt: skip
OF_BOTH = [
    "a + x", "a - x", "a * x", "a / x", "x / a", "a // x", "a % x", "a < x", "a <= x", "a == x", "a != x", "a > x", "a >= x",
    "x < a", "x >= a", "min(a, x) + 0.0", "max(x, a) + 0.0",
]  # fmt: skip


def plain(expression: str, names: dict[str, Any]) -> Any:
    if expression == "a << b" and names["b"] > 200:
        return "overflow" if names["a"] else 0  # Python would need the memory
    try:
        value = eval(expression, {"math": math}, dict(names))
    except ZeroDivisionError:
        return "ZeroDivisionError: division by zero"
    except OverflowError:
        return "overflow"
    except ValueError as error:
        return f"ValueError: {error}"
    if isinstance(value, int) and not isinstance(value, bool) and not LOWEST <= value <= HIGHEST:
        return "overflow"
    return value


def bits(value: Any) -> Any:
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("d", value)
    return value


@pytest.mark.parametrize(
    ("fields", "values", "expressions"),
    [
        ("a, b", list(itertools.product(LONGS, LONGS)), OF_LONGS),
        ("x, y", list(itertools.product(DOUBLES, DOUBLES)), OF_DOUBLES),
        ("a, x", list(itertools.product(LONGS, DOUBLES)), OF_BOTH),
    ],
    ids=["longs", "doubles", "both"],
)
def test_every_operation(fields: str, values: list[tuple[Any, Any]], expressions: list[str]) -> None:
    if not JIT_ENABLED:
        values = values[::7]
    names = fields.split(", ")
    # One function, whose first field says which expression to work out: one compilation for all of them.
    lines = [f"def f(t, which, {fields}):", "    t[0].n += 1"]
    groups: dict[str, list[int]] = {"long": [], "double": [], "bool": []}
    for number, expression in enumerate(expressions):
        kinds = {type(plain(expression, dict(zip(names, pair, strict=True)))) for pair in values} - {str}
        (kind,) = kinds
        groups[{int: "long", float: "double", bool: "bool"}[kind]].append(number)
    for numbers in filter(None, groups.values()):
        chosen = [expressions[number] for number in numbers]
        body = [
            f"    if which == {number}:\n        return {text}"
            for number, text in zip(numbers, chosen, strict=True)
        ]
        source = "\n".join(["import math", *lines, *body])
        code = Code("f", source, {}, {"math": "math"})
        program = bind({"f": load(TransactionCode(code))}, {"t": TableSpec("long", "n long", {"n": 0})})
        rows = [(number, *pair) for number in numbers for pair in values]
        columns = {
            "time": pa.array(range(len(rows))),
            "which": pa.array([row[0] for row in rows]),
            names[0]: pa.array([row[1] for row in rows]),
            names[1]: pa.array([row[2] for row in rows]),
        }
        stores = program.stores()
        outcome = program.run(pa.table(columns), stores)
        assert not outcome.figures["interpreted"]
        found = zip(outcome.outputs["reason"].to_pylist(), outcome.outputs["r0"].to_pylist(), strict=True)
        wrong = []
        for (number, *pair), (reason, value) in zip(rows, found, strict=True):
            wanted = plain(expressions[number], dict(zip(names, pair, strict=True)))
            if "** 3" in expressions[number] or "(a - 1)" in expressions[number]:
                # Checked at every step, where Python's integers only grow.
                wanted = "overflow" if reason == "overflow" else wanted
            if bits(wanted) != bits(value if reason is None else reason):
                wrong.append((expressions[number], pair, wanted, reason, value))
        assert not wrong, wrong[:5]
        committed = sum(outcome.outputs["committed"].to_pylist())
        assert stores["t"].snapshot()["n"].to_pylist() == [committed]
