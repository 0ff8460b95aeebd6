"""Lists that calls are given, that have a default, or two names: they are in tasks what they are in plain Python."""

from __future__ import annotations

import pytest
from both_ways import both, define

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
