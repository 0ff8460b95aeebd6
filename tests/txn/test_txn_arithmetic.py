"""Compiled arithmetic is Python's, to the last bit, on every pair of awkward numbers."""

from __future__ import annotations

import ast
import itertools
import math
import struct
import warnings
from functools import cache
from typing import Any

import pyarrow as pa
import pytest
from txn_oracle import Transaction

from millpond.code.capture import Code
from millpond.code.tables import TableSpec, TransactionCode
from millpond.errors import RuleInterpreted
from millpond.kernels._jit import JIT_ENABLED
from millpond.txn import TransactionSet, load
from millpond.txn.compiler import codegen
from millpond.txn.compiler.values import CannotCompile

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
    "math.floor(a)", "a * 0.5", "True + a", "a == b and a > 0 or b < 3", "0 < a <= b", "a + True", "-(a > b)",
    "~(a > b)", "(a > b) << 2", "abs(a > b)", "int(a > b)", "round(a)", "round(a > b)", "(a > b) / 3", "(a > b) * a",
    "(a > b) & (b > 3)", "(a > b) & b", "(a > b) // 2", "max(a > b, b > 3)", "min(a, b, 3)", "a ** 0", "a ** 1", "a ** 2",
    "(a > b) < b", "math.sqrt(abs(b))",
]  # fmt: skip
OF_DOUBLES = [
    "x + y", "x - y", "x * y", "x / y", "x // y", "x % y", "-x", "abs(x)", "min(x, y)", "max(x, y)", "x < y", "x <= y",
    "x == y", "x != y", "x > y", "x >= y", "int(x)", "round(x)", "bool(x)", "math.floor(x)", "math.ceil(x)",
    "math.trunc(x)", "math.sqrt(x)", "math.isnan(x)", "math.isinf(x)", "math.isfinite(x)", "math.fabs(x)",
    "math.exp(x)", "math.log(x)", "math.log10(x)", "math.log2(x)", "math.sin(x)", "math.cos(x)", "x if y else 2.0",
    "x * math.pi", "not x", "x in (1.0, -1.0, 0.5)", "(x > y) * x", "x + (x > y)", "math.tan(x)", "x or y", "x and y",
    "int(x) // 3", "max(x, y, 1.5)",
]  # fmt: skip
OF_BOTH = [
    "a + x", "a - x", "a * x", "a / x", "x / a", "a // x", "a % x", "a < x", "a <= x", "a == x", "a != x", "a > x", "a >= x",
    "x < a", "x >= a", "min(a, x) + 0.0", "max(x, a) + 0.0", "x // a", "x % a", "a in (x, 1.0)", "a == x or a > x",
    # A long on one path and a double on the other.
    "a if x > 1.0 else x", "x if a > 0 else a", "max(a, x)", "min(a, x)", "min(x, a, 3)", "x or a", "a and x",
    "max(a, 0.5)", "-max(a, x)", "+max(a, x)", "abs(min(a, x))", "max(a, x) + a", "max(a, x) * 2", "max(a, x) - 1",
    "a - min(a, x)", "max(a, x) // 3", "max(a, x) % -3", "max(a, x) / 3", "7 // max(a, x)", "max(a, x) + min(a, x)",
    "(a if x > 1.0 else x) * (x if a > 3 else a)",
    "int(a if x > 1.0 else x)", "int(max(a, x)) ^ 1", "round(max(a, x))", "math.floor(min(a, x))", "math.ceil(max(x, a))",
    "(a if x > 1.0 else x) == a", "max(a, x) > a - 1", "max(a, x) == min(a, x)", "a < max(a, x)", "not min(a, x)",
    "bool(max(a, x))", "float(max(a, x))", "math.isnan(max(a, x))", "math.sqrt(abs(max(a, x)))",
    "(1 if max(a, x) else 2) + a", "max(a, x) in (1, 2.5, 9007199254740993)",
]  # fmt: skip


def plain(expression: str, names: dict[str, Any]) -> Any:
    if expression == "a << b" and names["b"] > 200:
        return "overflow" if names["a"] else 0  # Python would need the memory
    try:
        return Transaction({}, names).value(parsed(expression))  # checked at every step
    except ZeroDivisionError:
        return "ZeroDivisionError: division by zero"
    except OverflowError:
        return "overflow"
    except ValueError as error:
        return f"ValueError: {error}"


@cache
def parsed(expression: str) -> ast.expr:
    return ast.parse(expression, mode="eval").body


def bits(value: Any) -> Any:
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("d", value)
    return value


OPERANDS: dict[str, tuple[str, list[tuple[Any, Any]], list[str]]] = {
    "longs": ("a, b", list(itertools.product(LONGS, LONGS)), OF_LONGS),
    "doubles": ("x, y", list(itertools.product(DOUBLES, DOUBLES)), OF_DOUBLES),
    "both": ("a, x", list(itertools.product(LONGS, DOUBLES)), OF_BOTH),
}


@pytest.mark.parametrize(
    ("operands", "compiled"),
    [
        ("longs", True),
        pytest.param("doubles", True, marks=pytest.mark.long),
        pytest.param("both", True, marks=pytest.mark.long),
        *((operands, False) for operands in OPERANDS),
    ],
)
def test_every_operation(operands: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fields, values, expressions = OPERANDS[operands]
    if not compiled:
        monkeypatch.setattr(
            codegen, "check", lambda function, _: CannotCompile(function.found.tree, "asked for")
        )
        warnings.simplefilter("ignore", RuleInterpreted)
    if not (JIT_ENABLED and compiled):
        values = values[::7]
    names = fields.split(", ")
    # One function, whose first field says which expression to work out: one compilation for all of them.
    lines = [f"def f(t, which, {fields}):", "    t[0].n += 1"]
    groups: dict[str, list[int]] = {"long": [], "double": [], "bool": []}
    for number, expression in enumerate(expressions):
        kinds = {type(plain(expression, dict(zip(names, pair, strict=True)))) for pair in values} - {str}
        kind = float if kinds == {int, float} else next(iter(kinds))
        assert kinds <= {int, float} or len(kinds) == 1, expression
        groups[{int: "long", float: "double", bool: "bool"}[kind]].append(number)
    for numbers in filter(None, groups.values()):
        chosen = [expressions[number] for number in numbers]
        body = [
            f"    if which == {number}:\n        return {text}"
            for number, text in zip(numbers, chosen, strict=True)
        ]
        source = "\n".join(["import math", *lines, *body])
        code = Code("f", source, {}, {"math": "math"})
        transactions = TransactionSet(
            {"f": load(TransactionCode(code))}, {"t": TableSpec("long", "n long", {"n": 0})}
        )
        rows = [(number, *pair) for number in numbers for pair in values]
        columns = {
            "time": pa.array(range(len(rows))),
            "which": pa.array([row[0] for row in rows]),
            names[0]: pa.array([row[1] for row in rows]),
            names[1]: pa.array([row[2] for row in rows]),
        }
        stores = transactions.stores()
        outcome = transactions.run(pa.table(columns), stores)
        assert bool(outcome.figures["interpreted"]) is not compiled
        found = zip(outcome.outputs["reason"].to_pylist(), outcome.outputs["r0"].to_pylist(), strict=True)
        wrong = []
        for (number, *pair), (reason, value) in zip(rows, found, strict=True):
            wanted = plain(expressions[number], dict(zip(names, pair, strict=True)))
            if outcome.outputs["r0"].type == pa.float64() and isinstance(wanted, int):
                wanted = float(wanted)  # the column decides, of the exact value
            if bits(wanted) != bits(value if reason is None else reason):
                wrong.append((expressions[number], pair, wanted, reason, value))
        assert not wrong, wrong[:5]
        committed = sum(outcome.outputs["committed"].to_pylist())
        assert stores["t"].snapshot()["n"].to_pylist() == [committed]


RANGES = [
    (LOWEST, HIGHEST, 2**62), (HIGHEST, LOWEST, -(2**62)), (LOWEST, HIGHEST, HIGHEST), (HIGHEST, LOWEST, LOWEST),
    (LOWEST, HIGHEST, 2**40), (LOWEST, HIGHEST, 2**39), (-(2**62), 2**62, 2**39 + 1), (HIGHEST, LOWEST, -(2**40) + 1),
    (0, 10, 3), (10, 0, -3), (0, 10, -1), (5, 5, 1), (HIGHEST - 1, HIGHEST, 1), (LOWEST, LOWEST + 3, 2), (3, 4, HIGHEST),
    (LOWEST, 0, 1), (0, HIGHEST, 1), (0, 2**24, 1), (0, 2**24 + 1, 1), (-(2**63), 2**63 - 1, 2**41 - 1), (1, 2, 0),
]  # fmt: skip


@pytest.mark.parametrize("compiled", [True, False])
def test_every_range(compiled: bool) -> None:
    """How many rounds there are and which the last one is, from ends as far apart as can be."""
    source = """
def f(t, start, stop, step):
    count = 0
    last = 0
    for i in range(start, stop, step):
        last = i
        count += 1
        if count > 3000:
            break
    t[0].n += 1
    return count, last
"""
    if not compiled:
        source = source.replace("count = 0", "count = sum([0])")
    transactions = TransactionSet(
        {"f": load(TransactionCode(Code("f", source, {}, {})))}, {"t": TableSpec("long", "n long", {"n": 0})}
    )
    columns = dict(zip(("start", "stop", "step"), map(pa.array, zip(*RANGES, strict=True)), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuleInterpreted)
        outcome = transactions.run(pa.table({"time": range(len(RANGES)), **columns}), transactions.stores())
    assert bool(outcome.figures["interpreted"]) is not compiled
    for row, (start, stop, step) in zip(outcome.outputs.to_pylist(), RANGES, strict=True):
        if step == 0:
            assert row["reason"] == "ValueError: range() arg 3 must not be zero"
            continue
        rounds = range(start, stop, step)
        if max(0, (abs(stop - start) - 1) // abs(step) + 1) > 2**24 and rounds:
            assert row["reason"] == "a range of more than 16777216 steps"
            continue
        taken = list(itertools.islice(rounds, 3001))
        assert (row["reason"], row["r0"], row["r1"]) == (None, len(taken), taken[-1] if taken else 0)
