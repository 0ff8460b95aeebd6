"""The lane of a partial field is that of the last key by which the call accessed a partitioned field, in Python's order."""

from __future__ import annotations

import pytest
from both_ways import both, define, graph

from millpond.errors import BadProgram

HEAD = """
@mp.program(lanes=3)
class P:
    a: mp.Partitioned[mp.Map[int, int]]
    b: mp.Partitioned[mp.Map[int, int]]
    m: mp.Partitioned[mp.Matrix]
    w: mp.Partial[mp.Vector]
    o: mp.Partial[mp.Matrix]

    def set(self, k: int, x: int):
        self.a[k] = x
        self.m[k, x] = 1

    def _next(self, k):
        self.b[k + 1] += 1
        return k

    def go(self, k: int, j: int, xs: "array<long>") -> float:
        x = 0
        if j == 1:
            self.w[7] += 100
"""
AT_ONCE = "self.w[1] += self.a[j]"
BODIES = [
    # a key that is asked of all lanes
    "self.w[int(sum(mp.everywhere(self.w).get(k, 0.5)))] += self.a[j]",
    # operands of one statement: the field is read, or the operation done, after its index and arguments
    AT_ONCE,
    "self.w[self.a[j]] += self.a[3]",
    "x = self.w[self.a[j]] + self.w.dot([self.b[k], 2.0, self.w[1]])",
    "self.w[self.a[j]] = self.w[7] + 1",
    "self.w.add([self.a[j], 1])",
    "self.w.add([2], times=self.a[j])",
    "self.o[k][self.a[j]] += self.b[2]",
    "self.o[self.a[j]].add([self.b[2]])",
    "self.w[1] += self._next(j)",
    "self.w[1] += self._next(j) + self.w[1]",
    "self.b[j] += int(self.w[7]) + self.a[k]",
    "self.m[j][self.a[k]] = self.b[k + 1]",
    "self.m[j][self.a[k]] += self.b[k + 1]",
    "self.m[j].add([self.a[k]])",
    "x = self.m[j][self.a[k]]",
    "x = self.m[j].dot([self.a[k], 1])",
    "del self.m[j][self.a[k]]",
    "ys = xs + [1]\n        ys[self.a[j] if xs else 0 :] = [self.b[k]]\n        x = len(ys)",
    "x = self.a.get(j, self.b[2])",
    # what is not come to has no key
    "x = int(k > 1 and self.a[j] > 0)",
    "x = int(k > 1 and self.a[j] > 0 or self.b[k] > 2)",
    "x = self.a[j] if k > 1 else 0",
    "x = int(0 < k - 1 < self.a[j] < self.b[k])",
    "x = sum([self.a[y] for y in xs])",
    "x = sum(self.a[y] for y in xs if y > 1)",
    "x = int(any(self.a[y] > 0 for y in xs))",
    "x = int(all(self.a[y] > z for y in xs if y for z in [0, 1]))",
    "for y in xs:\n            x += self.a[j]",
    "for y in xs:\n            if y == 1:\n                break\n            x += self.a[y]",
    "while x < k:\n            x += 1 + self.a[j]",
    "while x < k and self.a[j] < 3:\n            x += 1\n            self.a[j] += 1",
    "try:\n            x = 1 // k + self.a[j]\n        except ZeroDivisionError:\n            x = 5",
    "if k == 2:\n            x = self.b[j]\n            return x",
    "assert k < 9, self.a[j]",
    "for y in xs:\n            continue\n            if self.w[y] > 1:\n                x = 1",
    "for y in xs:\n            if y:\n                break\n            else:\n                continue\n            x = self.w[y]",
]


@pytest.mark.parametrize("body", BODIES)
def test_the_last_key(body: str) -> None:
    cls = define(f"{HEAD}        {body}\n        self.w[9] += 1\n        return x + self.w[7]\n")
    calls = [("set", {"k": n, "x": n % 3}) for n in range(6)]
    calls += [("go", {"k": n % 4, "j": n % 5, "xs": [n % 3, n % 4][: n % 3]}) for n in range(30)]
    both(cls, calls)


def test_the_place_of_an_assignment_is_found_once() -> None:
    """`self.w[i] += x` reads and writes one lane, whatever keys x has."""
    cls = define(f"{HEAD}        {AT_ONCE}\n        return 0.0\n")
    accesses = [(t.field, t.access, t.key) for t in graph(cls).method("go").tasks if t.field]
    assert [key for field, _, key in accesses if field == "w"] == ["k", "lane_1"]


def test_the_last_key_is_of_one_type() -> None:
    body = "if k > 1:\n            self.t[str(k)] = 1\n        self.w[1] += 1\n        return 0.0\n"
    with pytest.raises(BadProgram, match="may be a long or a string") as error:
        define(
            f"{HEAD}        {body}".replace(
                "    w: mp", "    t: mp.Partitioned[mp.Map[str, int]]\n    w: mp", 1
            )
        )
    assert "one type" in error.value.hint


def test_what_stops_in_the_middle_takes_no_generator() -> None:
    with pytest.raises(BadProgram, match="may stop in the middle") as error:
        define(f"{HEAD}        x = k in (self.a[y] for y in xs)\n        return self.w[x]\n")
    assert "list" in error.value.hint


@pytest.mark.parametrize(
    "body",
    [
        "x = len(xs[self.a[k] : self.b[k]]) + self.a[j]",
        'x = len(f"{self.a[k]:03} {self.b[j]!r} {xs}") + self.a[j]',
        "xs = xs + [7, 8]\n        self.a[xs.pop()] = xs.pop()",
        "self.m[j][self.b[k]] += self.a[xs[self.a[0] % 1]] if xs else 1",
        "zs = [1, 2]\n        zs[self.a[j] % 2] += self._next(self.b[k])\n        x = zs[0]",
        "self.m[k].add([self.a[j]], times=self.b[k])",
        "x = self.b.pop(self.a[j], self.a[k])",
    ],
)
def test_parts_are_evaluated_in_pythons_order(body: str) -> None:
    cls = define(f"{HEAD}        {body}\n        return 1.0 * x\n")
    calls = [("set", {"k": n, "x": n % 3}) for n in range(6)]
    calls += [("go", {"k": n % 4, "j": n % 5, "xs": [n % 3, n % 4][: n % 3]}) for n in range(20)]
    both(cls, calls)


HELPERS = """
@mp.program(lanes=3)
class P:
    a: mp.Partitioned[mp.Map[int, int]]
    b: mp.Partitioned[mp.Map[int, int]]
    w: mp.Partial[mp.Vector]

    def set(self, k: int, x: int):
        self.a[k] = x

    def go(self, k: int, j: int) -> int:
        x = self._h(k, j) + self._h(j, k)
        self.w[1] += x
        return x
"""


def test_a_helper_that_may_have_returned_is_written_out_once() -> None:
    cls = define(
        HELPERS
        + """
    def _h(self, p, q):
        if p > 1:
            if q > 1:
                return 5
        elif q == 1:
            if self.a[p + 1] > 1:
                return 7
        x = self.a[p + 1]
        self.b[q + 2] += self.a[x % 3] + 1
        for i in range(q):
            if i == x:
                return self.b[p + x]
        return x + self.a[q + 2] * 2 + self.b[p + x]
"""
    )
    calls = [("set", {"k": n, "x": n % 5}) for n in range(8)]
    both(cls, calls + [("go", {"k": n % 4, "j": n % 3}) for n in range(12)])


def test_the_graph_does_not_grow_with_the_ways_through_a_helper() -> None:
    ways = "".join(
        f"        if p > {i}:\n            if q > {i}:\n                return self.a[{i}]\n"
        for i in range(9)
    )
    cls = define(f"{HELPERS}\n    def _h(self, p, q):\n{ways}        return 0\n")
    assert len(graph(cls).method("go").tasks) < 30
    both(
        cls, [("set", {"k": n, "x": n}) for n in range(5)] + [("go", {"k": n, "j": 9 - n}) for n in range(9)]
    )


def test_helpers_of_helpers_are_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.programs.compiler.normal.STATEMENTS_MAX", 500)
    towers = "".join(
        f"\n    def _h{i}(self, p):\n        return self._h{i - 1}(p) + self._h{i - 1}(p + 1)\n"
        for i in range(1, 30)
    )
    with pytest.raises(BadProgram, match="too long once the helpers") as error:
        define(
            f"{HELPERS}\n    def _h(self, p, q):\n        return self._h29(p)\n"
            f"\n    def _h0(self, p):\n        return self.a[p]\n{towers}"
        )
    assert error.value.hint
