"""Small programs that nobody thought of come out the same both ways."""

from __future__ import annotations

from typing import Any

from both_ways import DRAWN, EXAMPLES, both, define
from hypothesis import given, settings
from hypothesis import strategies as st

HEAD = """
@mp.program(lanes=LANES, max_rounds=400)
class P:
    a: mp.Partitioned[mp.Map[int, int]]
    b: mp.Partitioned[mp.Map[int, int]]
    w: mp.Partial[mp.Vector]
    m: mp.Partitioned[mp.Matrix]

    def go(self, k: int, j: int, xs: "array<long>") -> int:
        x = 0
        y = j
"""
HELPER = """
    def _helper(self, p, q):
        if p == 1:
            if q > 1:
                return self.a[q + 1]
            p = self.b[q + 2] % 4
        elif q == 3:
            if self.a[p] > 1:
                return 1
        if p > q:
            return self.a[p]
        for i in range(2):
            if i == p:
                return i
        self.b[q] += 1
        return q - p
"""

TRY = """try:
{0}    {1} = {2} // {3} + self.a[{4}]
{0}except ZeroDivisionError:
{0}    pass"""

names = st.sampled_from(["k", "j", "x", "y"])
fixed = st.sampled_from(["k", "j", "k + 1", "2"])
keys = st.one_of(names, st.sampled_from(["k + 1", "x % 3", "2"]))


@st.composite
def expressions(draw: Any, depth: int = 2) -> str:
    if depth == 0:
        return str(draw(st.one_of(names, st.integers(-2, 3).map(str))))
    inner = expressions(depth - 1)
    form = draw(st.integers(0, 19))
    left, right = draw(inner), draw(inner)
    return [
        left,
        f"({left} + {right})",
        f"({left} * {right}) % 7",
        f"self.a[{draw(keys)}]",
        f"self.b[{draw(keys)}]",
        f"int(self.w[{draw(keys)}])",
        f"(self.a[{draw(keys)}] if {left} > {right} else {right})",
        f"self._helper({left} % 4, {right} % 4)",
        f"int({left} > 1 and self.b[{draw(keys)}] > {right})",
        f"int(self.w[self.a[{draw(keys)}]])",
        f"int(self.w.dot([self.a[{draw(keys)}], {left}, self.w.total()])) % 50",
        f"sum([self.a[z] for z in xs if z > {left}])",
        f"sum(self.w[z] > self.b[{draw(keys)}] for z in xs)",
        f"int(any(self.b[z] >= {left} for z in xs))",
        f"int(all(self.b[z] < z2 for z in xs if z != {left} for z2 in [1, self.a[z]]))",
        f"int({left} < self.a[{draw(keys)}] < self.b[{draw(keys)}])",
        f'len(f"{{self.a[{draw(keys)}]}} {{self.b[{draw(keys)}]:02}}")',
        f"self.a.get({draw(keys)}, {right})",
        f"int(self.m[{draw(keys)}][self.a[{draw(keys)}]] + {left})",
        f"len(xs[self.a[{draw(keys)}] % 3 : self.b[{draw(keys)}] % 5])",
    ][form]


@st.composite
def blocks(draw: Any, depth: int, indent: str, looping: bool = False) -> str:
    return "".join(draw(st.lists(statements(depth, indent, looping), min_size=1, max_size=3)))


@st.composite
def statements(draw: Any, depth: int, indent: str, looping: bool) -> str:
    value = draw(expressions())
    form = draw(st.integers(0, 16 if depth == 0 else 21))
    target = draw(st.sampled_from(["x", "y"]))
    key = draw(keys)
    inner = indent + "    "
    if form <= 15:
        return (
            indent
            + [
                f"{target} = {value}",
                f"self.a[{key}] = {value}",
                f"self.b[{key}] += {value}",
                f"self.w[{key}] += {value}",
                f"self.m[{key}][j] += {value}",
                f"{target} = int(mp.total(mp.everywhere(self.w)[{draw(names)}]))",
                f"{target} = len(self.m[{key}].keys()) + ({value})",
                f"del self.a[{key}]",
                f"self.w[self.a[{key}]] += {value}",
                f"self.m[{key}][self.b[{draw(keys)}]] = {value}",
                f"del self.m[{key}][self.a[{draw(keys)}]]",
                f"self.m[{key}].add([{value}, 1])",
                f"self.w.add([{value}])",
                f"self.w[{key}] = self.w[{draw(keys)}] + ({value})",
                f"while self.b[{key}] < {draw(st.integers(0, 3))}:\n{indent}    self.b[{key}] += 1",
                TRY.format(indent, target, draw(names), draw(names), draw(fixed)),
            ][form]
            + "\n"
        )
    if form == 16:
        return (
            indent + (draw(st.sampled_from(["break", "continue"])) if looping else f"return {value}") + "\n"
        )
    if form <= 18:
        made = f"{indent}if {value} > {draw(st.integers(0, 2))}:\n{draw(blocks(depth - 1, inner, looping))}"
        return made + (f"{indent}else:\n{draw(blocks(depth - 1, inner, looping))}" if form == 18 else "")
    head = ["for y in xs:", "for x in range(2):", "for i, y in enumerate(xs):"][form - 19]
    return f"{indent}{head}\n{draw(blocks(depth - 1, inner, True))}"


@settings(parent=DRAWN, max_examples=EXAMPLES or 60)
@given(body=blocks(2, "        "), lanes=st.integers(1, 3), seed=st.integers(0, 50))
def test_both_ways(body: str, lanes: int, seed: int) -> None:
    cls = define(HEAD + body + "        return x + y\n" + HELPER, LANES=lanes)
    calls = [
        (
            "go",
            {
                "k": (n + seed) % 4,
                "j": (n * 3 + seed) % 5,
                "xs": [(n + i) % 3 for i in range((n + seed) % 3)],
            },
        )
        for n in range(5)
    ]
    both(cls, calls)
