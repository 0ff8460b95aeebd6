"""Small programs that nobody thought of come out the same both ways."""

from __future__ import annotations

from typing import Any

from both_ways import DRAWN, EXAMPLES, both, define, graph
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from millpond.errors import BadProgram
from millpond.programs.local import Call

HEAD = """
@mp.program(lanes=LANES, max_rounds=400)
class P:
    a: mp.Partitioned[mp.Map[int, int]]
    b: mp.Partitioned[mp.Map[int, int]]
    w: mp.Partial[mp.Vector]
    m: mp.Partitioned[mp.Matrix]
    t: mp.Partitioned[mp.Map[str, int]]
    d: mp.Partitioned[mp.DenseMatrix]
    n: mp.Partitioned[mp.Matrix]
    lists: mp.Partitioned[mp.Map[int, list[int]]]

    def go(self, k: int, j: int, xs: "array<long>", s: str, us: list[int] = [1]) -> int:
        x = 0
        y = j
        zs: list[int] = [k]
"""
OTHER = """
    def other(self, k: int, j: int, xs: "array<long>", s: str, us: list[int] = []) -> int:
        x = k
        y = 1
        zs: list[int] = []
"""
HELPER = """
    def _helper(self, p, q, seen=[]):
        seen.append(p)
        if len(seen) > 1:
            return 9
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
texts = st.sampled_from(["s", "s + 'b'", "'c' * (x % 3)", "f'{y % 2}'"])
fixed = st.sampled_from(["k", "j", "k + 1", "2"])
keys = st.one_of(names, st.sampled_from(["k + 1", "x % 3", "2"]))


@st.composite
def expressions(draw: Any, depth: int = 2) -> str:
    if depth == 0:
        return str(draw(st.one_of(names, st.integers(-2, 3).map(str))))
    inner = expressions(depth - 1)
    form = draw(st.integers(0, 27))
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
        f"self.a.pop({draw(keys)}, {right})",
        f"self.t.get({draw(texts)}, {left})",
        f'int(self.t[{draw(texts)}] > {left} or "b" in s)',
        f"int(sum(self.d[{draw(keys)}])) + int(self.d[{draw(keys)}, 1])",
        f"sum(zs) + sum(us) + len(self.lists.get({draw(keys)}, xs))",
        f"int(sum(mp.everywhere(self.w).get({draw(names)}, 0.5)))",
        f"int(self.n[{left}, {draw(keys)}])",
        f"int(self.n[:, {draw(keys)}].total()) + len(self.n.column({draw(keys)}))",
    ][form]


@st.composite
def blocks(draw: Any, depth: int, indent: str, looping: bool = False) -> str:
    return "".join(draw(st.lists(statements(depth, indent, looping), min_size=1, max_size=3)))


@st.composite
def statements(draw: Any, depth: int, indent: str, looping: bool) -> str:
    value = draw(expressions())
    form = draw(st.integers(0, 28 if depth == 0 else 33))
    target = draw(st.sampled_from(["x", "y"]))
    key = draw(keys)
    inner = indent + "    "
    if form <= 27:
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
                f"self.t[{draw(texts)}] += {value}",
                f"del self.t[{draw(texts)}]",
                f"self.lists[{key}] = zs + [{value}]",
                f"zs = zs + self.lists.get({key}, [{value}])",
                f"zs.append({value})",
                f"self.d[{key}] = [0.5, 1.0 * ({value})]",
                f"self.d[{key}, {draw(st.integers(0, 2))}] = {value}",
                f"mp.everywhere(self.w).assign(mp.Vector([0.5, {value}]))",
                f"self.n[{value}, {key}] += 1.5",
                f"self.n[:, {key}].add([{value}, 0.5])",
                f"us.append({value})",
                f"us += [{value}]",
            ][form]
            + "\n"
        )
    if form == 28:
        return (
            indent + (draw(st.sampled_from(["break", "continue"])) if looping else f"return {value}") + "\n"
        )
    if form <= 30:
        made = f"{indent}if {value} > {draw(st.integers(0, 2))}:\n{draw(blocks(depth - 1, inner, looping))}"
        return made + (f"{indent}else:\n{draw(blocks(depth - 1, inner, looping))}" if form == 30 else "")
    head = ["for y in xs:", "for x in range(2):", "for i, y in enumerate(xs):"][form - 31]
    return f"{indent}{head}\n{draw(blocks(depth - 1, inner, True))}"


@st.composite
def programs(draw: Any) -> str:
    """The text of a class: its methods may reject, as long as nothing was written."""
    source = (
        HEAD + draw(rejections()) + draw(blocks(2, "        ")) + "        return x + y + sum(zs) + len(us)\n"
    )
    if draw(st.booleans()):
        source += (
            OTHER + draw(rejections()) + draw(blocks(1, "        ")) + "        return len(zs) + x - y\n"
        )
    return source + HELPER


@st.composite
def rejections(draw: Any) -> str:
    read = draw(
        st.sampled_from(
            ["self.a[k]", "self.t[s] + j", "len(self.lists.get(j, []))", "mp.total(mp.everywhere(self.w)[k])"]
        )
    )
    if draw(st.integers(0, 3)):
        return ""
    return f"        if {read} > {draw(st.integers(0, 3))}:\n            mp.reject(f'{{k}} ' + s)\n"


def drawn_class(source: str, lanes: int) -> type:
    """Where texts and numbers are keys, a lane may go by either: that is refused, and another is drawn."""
    try:
        return define(source, LANES=lanes)
    except BadProgram as error:
        if "in the lane of a key that may be a" not in error.message:
            raise
        reject()


def drawn_call(cls: type, number: int, seed: int) -> Call:
    methods = [method.name for method in graph(cls).methods]
    arguments: dict[str, Any] = {
        "k": (number + seed) % 4,
        "j": (number * 3 + seed) % 5,
        "xs": [(number + i) % 3 for i in range((number + seed) % 3)],
        "s": "abc"[(number * seed) % 3],
    }
    if (number + seed) % 2:
        arguments["us"] = [seed]
    return methods[number // 2 % len(methods)], arguments


@settings(parent=DRAWN, max_examples=EXAMPLES or 60)
@given(source=programs(), lanes=st.integers(1, 3), seed=st.integers(0, 50))
def test_both_ways(source: str, lanes: int, seed: int) -> None:
    cls = drawn_class(source, lanes)
    both(cls, [drawn_call(cls, number, seed) for number in range(5)])
