"""Lists that calls are given, that have a default, or two names: they are in tasks what they are in plain Python."""

from __future__ import annotations

from typing import Any

import pytest
from both_ways import DRAWN, EXAMPLES, both, define
from hypothesis import given, settings
from hypothesis import strategies as st

import millpond as mp
from millpond.errors import BadProgram

HEAD = """
@mp.program(lanes=2)
class P:
    a: mp.Partitioned[mp.Map[int, int]]
    edges: mp.Partitioned[mp.Map[int, list[int]]]

"""
START, MANY, TEXT = [1, 2], 3, "x"


def test_a_list_that_is_given_or_a_default_is_each_calls_own() -> None:
    cls = define(
        HEAD
        + """
    def go(self, k: int, xs: list[int] = [], *, by: float = 2) -> list[int]:
        xs.append(k)
        self.a[k] += len(xs)
        xs.append(self.a[k])
        return xs

    def of_helper(self, k: int) -> int:
        self.a[k] += self._longer(k)
        return self._longer(self.a[k], most=1)

    def _longer(self, k, seen=[], *, most=2):
        seen.append(k)
        return len(seen) + most

    def outside(self, k: int, xs: list[int] = START, s: str = TEXT + "y") -> int:
        xs.append(k)
        self.a[k] += self._many()
        return len(xs) + len(s)

    def _many(self, n=MANY):
        return n
""",
        START=START,
        MANY=MANY,
        TEXT=TEXT,
    )
    given = [5]
    calls = [
        ("go", {"k": 1}),
        ("go", {"k": 1}),
        ("go", {"k": 1, "xs": given}),
        ("of_helper", {"k": 2}),
        ("of_helper", {"k": 2}),
        ("outside", {"k": 3}),
        ("outside", {"k": 3}),
    ]
    assert [each.value for each in both(cls, calls)] == [[1, 1], [1, 2], [5, 1, 4], 2, 2, 5, 5]
    assert (given, START) == ([5], [1, 2])


def test_arguments_of_the_plain_class_are_of_their_types() -> None:
    cls = define(
        HEAD + "    def go(self, k: int, x: float) -> str:\n        self.a[k] += 1\n        return str(x)\n"
    )
    both(cls, [("go", {"k": 1, "x": 3})])
    plain = mp.plain(cls)
    assert plain.go(1, 3) == "3.0"
    with pytest.raises(TypeError, match="no long"):
        plain.go("1", 3)
    with pytest.raises(OverflowError, match="64 bits"):
        plain.go(2**63, 3)


def test_a_name_that_is_set_anew_before_it_is_read_is_no_second_one() -> None:
    """A search in breadth, whose next frontier becomes the one at hand."""
    cls = define(
        HEAD
        + """
    def link(self, k: int, to: int):
        self.edges[k] = self.edges.get(k, []) + [to]

    def reached(self, k: int, most: int = 4) -> list[int]:
        found = [k]
        frontier: list[int] = [k]
        for step in range(most):
            nxt: list[int] = []
            for x in frontier:
                for y in self.edges.get(x, []):
                    if y not in found:
                        found.append(y)
                        nxt.append(y)
            frontier = nxt
            frontier.sort()
            self.a[step] += len(frontier)
        return found
"""
    )
    links = [("link", {"k": n % 5, "to": n * n % 7}) for n in range(12)]
    asked = [("reached", {"k": n, "most": n % 4}) for n in range(7)]
    assert any(len(each.value) > 3 for each in both(cls, links + asked)[len(links) :])


TWO = [
    "old = xs\n        xs.append(1)",
    "old = [k]\n        other = old\n        old = xs\n        other.append(1)\n        xs.append(len(old))",
    "new = [k]\n        other = new\n        old = new\n        old.append(1)\n        xs = other",
    "new = [k]\n        old = new if k else xs\n        old.append(1)",
    "old, other = xs, [k]\n        new, xs = other, xs\n        self.a[k] += 1\n        new.append(1)\n        xs = xs + other",
    "old = xs\n        self.a[k] += 1\n        old += [1]",
    "for x in [1, 2]:\n            new = xs\n            self.a[x] += 1\n            new.append(1)",
]


@pytest.mark.parametrize("body", TWO)
def test_a_list_with_two_names_is_changed_by_neither(body: str) -> None:
    with pytest.raises(BadProgram, match=r"are the same array<long>, which is changed by one of the names"):
        define(
            HEAD
            + f"    def go(self, k: int, xs: list[int]) -> list[int]:\n        {body}\n        self.a[k] += 1\n        return xs\n"
        )


names = st.sampled_from(["p", "q", "r"])


@st.composite
def statements(draw: Any, indent: str, depth: int) -> str:
    """Lists get names from each other, are changed, and go from task to task."""
    own, other, form = draw(names), draw(names), draw(st.integers(0, 8 if depth else 6))
    inner = indent + "    "
    if form <= 6:
        return (
            indent
            + [
                f"{own} = {other}",
                f"{own} = [k, len({other})]",
                f"{own} = {other} + [j]",
                f"{own}.append(len({other}))",
                f"{own} += [j]",
                f"self.a[k] += sum({own})",
                f"self.a[j] += len({own})",
            ][form]
            + "\n"
        )
    head = ["for x in range(2):", f"for x in {own}[:3]:"][form - 7]
    return f"{indent}{head}\n" + "".join(draw(st.lists(statements(inner, depth - 1), min_size=1, max_size=4)))


seen = {"drawn": 0, "accepted": 0}


@settings(parent=DRAWN, max_examples=EXAMPLES or 150)
@given(body=st.lists(statements("        ", 1), min_size=3, max_size=8).map("".join))
def _draw(body: str) -> None:
    head = "    def go(self, k: int, j: int, p: list[int]) -> list[int]:\n        q = [j]\n        r: list[int] = []\n"
    seen["drawn"] += 1
    try:
        cls = define(f"{HEAD}{head}{body}        self.a[k] += 1\n        return p + q + r\n")
    except BadProgram as error:
        if "the same array<long>" not in error.message and "while the loop" not in error.message:
            raise
        return
    seen["accepted"] += 1
    both(cls, [("go", {"k": n % 2, "j": n % 3, "p": [n]}) for n in range(3)])


def test_names_of_lists_both_ways() -> None:
    _draw()
    assert seen["drawn"] / 5 < seen["accepted"] < seen["drawn"], seen


@pytest.mark.parametrize(
    ("body", "line", "why", "hint"),
    [
        (
            "for x in xs:\n            self.a[x] += 1\n            if x < 5:\n                xs.append(x + 1)",
            4,
            "xs is changed while the loop on line 8 goes over it",
            "xs.copy()",
        ),
        (
            "for x in xs:\n            self.a[x] += 1\n            ys = xs\n            ys.append(x)",
            4,
            "ys is changed while the loop on line 8 goes over it",
            "ys.copy()",
        ),
        (
            "for i, x in enumerate(xs):\n            self.a[x] += i\n            xs[i] = self.a[k]",
            3,
            "xs is changed while the loop on line 8 goes over it",
            "xs.copy()",
        ),
        ("self._longer(k)", 3, "the default of seen is a list from outside", "written there"),
    ],
)
def test_what_lists_may_not_do(body: str, line: int, why: str, hint: str) -> None:
    helper = "\n    def _longer(self, k, seen=START):\n        seen.append(k)\n        return len(seen)\n"
    with pytest.raises(BadProgram) as error:
        define(HEAD + f"    def go(self, k: int, xs: list[int]):\n        {body}\n{helper}", START=START)
    assert why in error.value.message
    assert hint in error.value.hint
    assert error.value.line == 7 + line
