"""What no transaction may do is refused where it is defined, with the line."""

from __future__ import annotations

import ast
import textwrap

import pytest

from millpond import txn
from millpond.code.tables import TableSpec
from millpond.errors import BadTransaction
from millpond.txn import TransactionSet, transaction
from millpond.txn.compiler.analysis import analyse

REFUSED = [
    ("try:\n    t[k].x = 1\nexcept ValueError:\n    pass", 2, "try"),
    ("import os", 2, "import"),
    ("f = lambda: 1", 2, "function"),
    ("y = t", 2, "the table 't' is used as a value"),
    ("return t[k]", 2, "is used as a value"),
    ("t = 1", 1, "cannot be assigned to"),
    ("items[0] = 1", 2, r"items\[0\] cannot be assigned to"),
    ("if k:\n    return 1\nreturn 1, 2", 4, "another number of values"),
    ("del k", 2, "del of k"),
    ("del t[k].x", 2, r"del of t\[k\].x"),
    ("y = t.get(k, 1).x", 2, "takes one key"),
    ("y = k + (t.get(k))", 2, "is used as a value"),
    ("seen = set()\nfor i in seen:\n    t[i].x = 1", 3, "no order"),
    ("while k:\n    k -= 1\nelse:\n    k = 1", 5, "no else"),
]

LATE = [
    ("t[t[k].next].x = 1", 2, "the key of t[t[k].next] comes from t[k]"),
    ("n = t[k].x\nt[n].x = 1", 3, "comes from t[k]"),
    ("n = k\nif t[k].x > 0:\n    n = k + 1\nt[n].x = 1", 5, "comes from t[k]"),
    ("n = k\nif k in t:\n    n = k + 1\nt[n].x = 1", 5, "comes from t[k]"),
    ("r = t.get(k)\nif r is None:\n    k = 3\ndel t[k]", 5, "comes from t[k]"),
    ("n = 0\nfor i in range(t[k].x):\n    n += 1\nt[n].x = 1", 5, "comes from"),
    ("for i in range(t[k].x):\n    t[i].x = 1", 3, "comes from"),
    ("n = 0\nfor i in items:\n    if t[i].x > 0:\n        break\n    n += 1\nt[n].x = 1", 7, "comes from"),
    ("n = 0\nfor i in items:\n    t[n].x = 1\n    n = t[i].x", 4, "comes from"),
    ("seen = []\nseen.append(t[k].x)\nfor i in seen:\n    t[i].x = 1", 5, "comes from t[k]"),
    ("while k > 0:\n    k -= 1", 2, "how often while goes round"),
    ("seen = set()", 2, "a list or a set of its own"),
]


@pytest.mark.parametrize(("body", "line", "why"), LATE)
def test_late(body: str, line: int, why: str) -> None:
    """Keys that the event alone does not tell: the rows are found while the function runs, and nothing beside it."""
    source = "def f(t, k, items):\n" + textwrap.indent(body, "    ")
    tree = ast.parse(source).body[0]
    assert isinstance(tree, ast.FunctionDef)
    found = analyse(tree, ["t"])
    assert any(late.line == line and why in late.why for late in found.late), found.late
    assert found.coupling()


@pytest.mark.parametrize(("body", "line", "message"), REFUSED)
def test_refused(body: str, line: int, message: str) -> None:
    source = "def f(t, k, items):\n" + textwrap.indent(body, "    ")
    tree = ast.parse(source).body[0]
    assert isinstance(tree, ast.FunctionDef)
    with pytest.raises(BadTransaction, match=message) as caught:
        analyse(tree, ["t"])
    assert caught.value.line == line  # type: ignore[attr-defined]
    assert f"line {line}:" in str(caught.value)


def test_the_decorator_refuses_with_the_line_of_the_file() -> None:
    with pytest.raises(BadTransaction, match="is used as a value") as caught:

        @transaction
        def follow(accounts, k: int):  # type: ignore[no-untyped-def]
            accounts[k].x = 1
            accounts[k].friend = 1 + accounts[k]

    with open(__file__) as file:
        wanted = [number for number, text in enumerate(file, 1) if "friend = 1 + accounts[k]" in text]
    assert caught.value.line in wanted  # type: ignore[attr-defined]


def test_binding_refuses_what_the_tables_do_not_have() -> None:
    @transaction
    def f(accounts, k: int):  # type: ignore[no-untyped-def]
        accounts[k].x = 1

    with pytest.raises(BadTransaction, match="has no column 'x'"):
        TransactionSet({"f": f}, {"accounts": TableSpec("long", "balance long")})
    with pytest.raises(BadTransaction, match="there is none of that name"):
        TransactionSet({"f": f}, {"books": TableSpec("long", "x long")})


def test_only_abort_may_be_used_of_the_package() -> None:
    with pytest.raises(BadTransaction, match="abort only"):

        @txn.transaction
        def f(accounts, k: int):  # type: ignore[no-untyped-def]
            accounts[k].x = txn.something(k)


def test_clean_keys_are_taken() -> None:
    source = """
def f(t, k, items, prices):
    n = k + 1
    if k > 3:
        n = items[0]
    t[n].x = t[k].x
    for i, item in enumerate(items):
        t[item + prices[i]].x += t[n].x
        if item > 2:
            break
"""
    tree = ast.parse(source).body[0]
    assert isinstance(tree, ast.FunctionDef)
    found = analyse(tree, ["t"])
    assert [slot.key for slot in found.slots] == ["k", "n", "n", "item + prices[i]"]
    assert not found.is_late
