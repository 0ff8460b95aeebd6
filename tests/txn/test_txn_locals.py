"""Local variables: rows that may be None, lists and sets, `while`, quotients. Compiled and interpreted, they are the same."""

from __future__ import annotations

import textwrap
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from millpond.code.capture import Code
from millpond.code.tables import TableSpec, TransactionCode
from millpond.errors import RuleInterpreted
from millpond.txn import TransactionSet
from millpond.txn.compiler import codegen
from millpond.txn.compiler.values import CannotCompile
from millpond.txn.functions import load
from millpond.txn.run import interpreter

TABLES = {"t": TableSpec("long", "x long, d decimal(9,2)", {"x": 0, "d": "0.00"})}
NONE = "AttributeError: 'NoneType' object has no attribute 'x'"
UNSET = "UnboundLocalError: cannot access local variable 'xs' where it is not associated with a value"


def outcomes(body: str, keys: list[int], results: str = "") -> tuple[list[Any], dict[int, int]]:
    """The reasons or results of events with these keys, over rows of 1 and 2; and the rows after them."""
    source = "def f(t, k):\n" + textwrap.indent(textwrap.dedent(body).strip(), "    ")
    transactions = TransactionSet({"f": load(TransactionCode(Code("f", source), results))}, TABLES)
    stores = transactions.stores()
    rows = {
        "key": [1, 2],
        "x": [10, 20],
        "d": pa.array([Decimal("1.10"), Decimal("-2.35")], pa.decimal128(9, 2)),
    }
    stores["t"].load(pa.table(rows))
    # Whoever mistakes "no row" for the last one finds it.
    stores["t"].cells = stores["t"].cells[:2].copy()
    out = transactions.run(pa.table({"time": range(len(keys)), "k": keys}), stores).outputs.to_pylist()
    stores["t"].validate()
    after = {row["key"]: row["x"] for row in stores["t"].snapshot().to_pylist()}
    return [row["reason"] or row[(results or "r0").split()[0]] for row in out], after


@pytest.fixture(params=["compiled", "interpreted"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "interpreted":
        monkeypatch.setattr(codegen, "check", lambda function, _: CannotCompile(function.found.tree, "asked"))
    return str(request.param)


@pytest.mark.filterwarnings("ignore::millpond.errors.RuleInterpreted")
@pytest.mark.parametrize(
    "body",
    [
        "a = t.get(k)\nb = a\nb.x += 1\nreturn b.x",
        "a: object = t.get(k)\na.x += 1\nreturn a.x",
        "c = t[1]\na = t.get(k)\nif k > 1:\n    c = a\nelse:\n    c = a\nc.x += 1\nreturn c.x",
        "n = t[k].x * 0 + k\na = t.get(n)\nb = a\nd = b\nd.x += 1\nreturn d.x",
        "while True:\n    a = t.get(k)\n    b = a\n    b.x += 1\n    return b.x",
    ],
)
def test_a_row_that_is_none_is_none_under_every_name(body: str, way: str) -> None:
    assert outcomes(body, [1, 5, 2]) == ([11, NONE, 21], {1: 11, 2: 21})


@pytest.mark.filterwarnings("ignore::millpond.errors.RuleInterpreted")
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "xs = [k]\nn = 0\nfor x in xs:\n    n += x\n    if x > 0:\n        xs.append(x - 1)\nreturn n",
            [3, 1, 6],
        ),
        ("xs = [k, 3]\nn = 0\nfor x in xs:\n    n += x\n    xs = []\nreturn n", [5, 4, 6]),
        ("if k > 1:\n    xs = [k]\nxs.append(2)\nreturn len(xs)", [2, UNSET, 2]),
        ("if k > 1:\n    xs = {k}\nreturn int(2 in xs)", [1, UNSET, 0]),
        ("for i in range(k - 1):\n    xs = [i]\nreturn len(xs)", [1, UNSET, 1]),
        ("for i in range(k):\n    xs = [i]\n    xs.append(i)\nxs = [k]\nreturn len(xs)", [1, 1, 1]),
        ("if k > 1:\n    xs = [k]\nelse:\n    xs = [k, k]\nreturn len(xs)", [1, 2, 1]),
    ],
)
def test_lists_and_sets_are_those_of_their_event(body: str, expected: list[Any], way: str) -> None:
    assert outcomes(body, [2, 1, 3])[0] == expected


def test_lists_that_are_set_on_every_path_are_compiled(recwarn: pytest.WarningsRecorder) -> None:
    outcomes("if k > 1:\n    xs = [k]\nelse:\n    xs = []\nfor x in xs:\n    k += x\nreturn k", [1, 2])
    assert not [warning for warning in recwarn if issubclass(warning.category, RuleInterpreted)]


@pytest.mark.filterwarnings("ignore::millpond.errors.RuleInterpreted")
def test_while_has_an_end(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "RANGE_STEPS_MAX", 1000)
    found, rows = outcomes(
        "t[k].x = 5\nwhile k > 0:\n    if k == 1:\n        continue\n    k -= 2\nreturn k", [1, 2, 4]
    )
    assert found == ["a loop of more than 16777216 rounds", 0, 0]
    assert rows == {1: 10, 2: 5, 4: 5}


@pytest.mark.filterwarnings("ignore::millpond.errors.RuleInterpreted")
@pytest.mark.parametrize(
    "body",
    [
        "t[k].d = t[k].d / 3\nreturn t[k].d",
        "t[k].d /= 3\nreturn t[k].d",
        "return t[k].d / 3",
        "x = t[k].d\nx /= 3\nreturn round(x, 2)",
    ],
)
def test_a_quotient_is_rounded_where_it_is_written_or_returned(body: str) -> None:
    assert outcomes(body, [1, 2, 5], "q decimal(9,2)")[0] == [
        Decimal("0.37"),
        Decimal("-0.78"),
        Decimal("0.00"),
    ]
    assert outcomes("return t[k].d / 3", [1])[0] == ["overflow"], "of no known scale"
