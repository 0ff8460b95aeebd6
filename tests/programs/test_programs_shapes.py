"""Every shape of method means the same as plain Python and as a graph."""

from __future__ import annotations

import pytest
from both_ways import both, define, graph

from millpond.errors import BadOption, BadProgram, ProgramFailed
from millpond.programs.local import Call, LocalRun, Outcome

RECOMMENDER = """
    @mp.program(lanes=2)
    class P:
        user_item: mp.Partitioned[mp.Matrix]
        co_occ: mp.Partial[mp.Matrix]

        def add_rating(self, user: int, item: int, rating: float):
            row = self.user_item[user]
            fresh = item not in row
            others = row.keys()
            row[item] = rating
            if fresh:
                for other in others:
                    self.co_occ[item, other] += 1
                    self.co_occ[other, item] += 1

        def get_rec(self, user: int, k: int = 10) -> "array<long>":
            row = self.user_item[user]
            parts = mp.everywhere(self.co_occ).multiply(row)
            return self.best(parts, row, k)

        def best(self, parts: mp.Collection[mp.Vector], row: mp.Vector, k: int):
            return mp.total(parts).without(row).top(k)
"""


def test_the_recommender_is_the_papers_graph() -> None:
    found = graph(define(RECOMMENDER))
    adds, asks = found.method("add_rating"), found.method("get_rec")
    assert [(t.field, t.access, t.key, t.writes) for t in adds.tasks] == [
        ("user_item", "partitioned", "user", True),
        ("co_occ", "lane", "user", True),
    ]
    assert [(t.field, t.access, t.gathers, t.writes) for t in asks.tasks] == [
        ("user_item", "partitioned", False, False),
        ("co_occ", "everywhere", False, False),
        (None, "none", True, False),
    ]
    assert [tuple(v) for v in asks.tasks[2].inputs] == [
        ("parts", "collection<vector>"),
        ("k", "long"),
        ("row", "vector"),
    ]
    assert (adds.read_only, asks.read_only, asks.returns) == (False, True, "array<long>")
    assert found.levels == (("user_item",), ("co_occ",))
    assert found.serial
    assert [m.name for m in found.methods] == ["add_rating", "get_rec"]


def test_the_recommender_both_ways() -> None:
    calls: list[Call] = []
    for n in range(150):
        calls.append(("add_rating", {"user": n * 7 % 9, "item": n * 11 % 13, "rating": float(n % 5)}))
        if n % 3 == 0:
            calls.append(("get_rec", {"user": n % 9, "k": 4}))
    answers = both(define(RECOMMENDER), calls)
    assert any(len(o.value or []) == 4 for o in answers)


SHAPES: list[tuple[str, list[Call]]] = [
    (  # defaults, if without else, early returns, two fields
        """
        def step(self, k: int, j: int = 3, add: float = 0.5) -> float:
            if k == 0:
                return -1.0
            self.a[k] += add
            if k % 2 == 0:
                self.b[j] += self.a[k]
            if k == 4:
                return self.b[j]
            return self.a[k] + self.b[k]
        """,
        [("step", {"k": n % 6}) for n in range(20)] + [("step", {"k": 4, "j": 2, "add": 2.0})],
    ),
    (  # a helper with several returns, and one that writes
        """
        def step(self, k: int) -> float:
            x = self._of(k) + self._of(k + 1)
            self._put(k, x=x + 1)
            return x

        def _of(self, key):
            if key > 3:
                return self.a[key]
            for n in range(3):
                if n == key:
                    return 10.0
            return 0.0

        def _put(self, key, x):
            self.b[key] = x
            self.a[key] += x
        """,
        [("step", {"k": n % 7}) for n in range(20)],
    ),
    (  # a loop from key to key, with break and continue
        """
        def step(self, k: int, n: int) -> int:
            steps = 0
            while k != 0 and steps < n:
                steps += 1
                if k == 5:
                    k = 1
                    continue
                self.a[k] += 1
                if self.a[k] > 4:
                    break
                k = k // 2
            self.b[k] += steps
            return steps
        """,
        [("step", {"k": n % 11, "n": 4}) for n in range(40)],
    ),
    (  # for over lists, range, zip and enumerate, each item elsewhere
        """
        def step(self, ks: "array<long>", n: int) -> float:
            found = 0.0
            for i, k in enumerate(ks):
                self.a[k] += i
            for k in range(1, n):
                found += self.a[k]
            for k, j in zip(ks, ks[1:]):
                self.b[j] += self.a[k]
            for k in ks:
                for j in range(2):
                    self.b[k + j] += 0.5
            return found + sum(self.b[k] for k in ks) + sum([self.a[k] for k in ks if k > 1])
        """,
        [("step", {"ks": [n % 3, 2, n % 5], "n": n % 4}) for n in range(12)] + [("step", {"ks": [], "n": 2})],
    ),
    (  # and, or, conditional expressions: what is not reached is not read
        """
        def step(self, k: int, j: int) -> bool:
            both = j != 0 and self.a[k // j] > 1 or self.b[k] > 2
            x = self.a[k] if both else self.b[j]
            self.a[j] = x + 1
            self.b[k] += 1 if not both else self.a[j]
            return both
        """,
        [("step", {"k": n % 5, "j": n % 3}) for n in range(25)],
    ),
    (  # keys from the state, of the state, and the same twice
        """
        def step(self, k: int) -> int:
            self.n[k] += 1
            other = self.n[self.n[k]]
            self.a[other + 1] += self.n[k]
            self.names[f"{k % 3}"] = str(other)
            return len(self.names.get(str(k), ""))
        """,
        [("step", {"k": n % 4}) for n in range(20)],
    ),
    (  # lanes: by the last key, and by the first argument before any
        """
        def step(self, k: int, j: int) -> float:
            self.w[k] += 1
            x = self.a[j]
            self.a[j] += 2
            self.w[j] += x
            if k > 2:
                self.b[k] += 1
            self.w[9] += self.w.total()
            for i in range(k):
                self.a[i] += 1
                self.w[i] += 0.25
            return mp.total(mp.everywhere(self.w)[9])
        """,
        [("step", {"k": n % 5, "j": n % 7}) for n in range(25)],
    ),
    (  # everywhere: reads whose arguments come from elsewhere, gathering by key, and the same to all
        """
        def step(self, k: int) -> float:
            self.w[k] += 1
            sums = mp.everywhere(self.w).dot([self.a[k], 2.0, 1.0])
            self.a[k] = mp.total(sums)
            highest = max(sums)
            whole = mp.average(mp.everywhere(self.w).copy())
            if k % 4 == 0:
                mp.everywhere(self.w).assign(whole)
            if k % 5 == 4:
                mp.everywhere(self.w).clear()
            return highest + len(mp.everywhere(self.w).keys())
        """,
        [("step", {"k": n % 9}) for n in range(25)],
    ),
    (  # rejected before anything is written
        """
        def step(self, k: int, x: float) -> float:
            if x < 0:
                mp.reject("below zero")
            self._check(k, x)
            self.a[k] += x
            return self.a[k]

        def _check(self, k, x):
            if self.b[k] + x > 4:
                mp.reject(f"{k} has too much")
        """,
        [("step", {"k": n % 3, "x": float(n % 7 - 1)}) for n in range(20)],
    ),
    (  # lists and vectors that travel, and rows that are changed in place
        """
        def step(self, k: int, i: int) -> "array<double>":
            row = self.m[k]
            row[i] += 1
            del row[i + 1]
            seen: list[float] = []
            seen.append(row[i])
            self.a[k] += row.total()
            seen.append(self.b[k])
            seen.append(len(row) + row[i])
            v = mp.Vector(seen)
            v[3] = 1
            self.m[k + 100] = v
            del self.m[k + 1]
            self.lists[k] = self.lists.get(k, []) + [i]
            return seen + v.values() + [1.0 * x for x in self.lists[k]]
        """,
        [("step", {"k": n % 4, "i": n % 3}) for n in range(20)],
    ),
    (  # multiple targets, asserts, constants, module functions, try in one place
        """
        LIMIT = 3

        def step(self, k: int) -> float:
            x = y = self.a[k]
            z, w = x + 1, self.LIMIT
            assert z > 0, "never"
            try:
                self.b[k] += 1 / (k - w)
            except ZeroDivisionError:
                self.b[k] = -1.0
            self.a[k] = half(z) + math.sqrt(w)
            return min(y, z) + SCALE
        """,
        [("step", {"k": n % 5}) for n in range(15)],
    ),
]


def half(x: float) -> float:
    return x / 2


@pytest.mark.parametrize(("body", "calls"), SHAPES, ids=range(len(SHAPES)))
@pytest.mark.parametrize("lanes", [1, 3])
def test_shapes(body: str, calls: list[Call], lanes: int) -> None:
    import math

    fields = """
@mp.program(lanes=LANES)
class P:
        a: mp.Partitioned[mp.Map[int, float]]
        b: mp.Partitioned[mp.Vector]
        n: mp.Partitioned[mp.Map[int, int]]
        m: mp.Partitioned[mp.Matrix]
        names: mp.Partitioned[mp.Map[str, str]]
        lists: mp.Partitioned[mp.Map[int, list[int]]]
        w: mp.Partial[mp.Vector]
"""
    cls = define(fields + body, LANES=lanes, half=half, math=math, SCALE=0.5)
    outcomes = both(cls, calls)
    assert len(set(map(str, outcomes))) > 1


def test_a_loop_without_end_fails_its_epoch_and_changes_nothing() -> None:
    cls = define("""
        @mp.program(max_rounds=20)
        class P:
            a: mp.Partitioned[mp.Vector]

            def go(self, k: int):
                while True:
                    self.a[k] += 1
                    k += 1
    """)
    run = LocalRun(graph(cls))
    with pytest.raises(ProgramFailed, match="20 tasks") as failure:
        run.call("go", k=1)
    assert (failure.value.method, failure.value.row, failure.value.line) == ("go", 0, 8)
    assert run.state() == {"a": {}}


def test_a_failure_names_row_method_and_line() -> None:
    cls = define("""
        @mp.program
        class P:
            a: mp.Partitioned[mp.Vector]

            def go(self, k: int) -> float:
                self.a[k] += 1
                x = self.a[k]
                return x / (k - 2)
    """)
    run = LocalRun(graph(cls))
    with pytest.raises(ProgramFailed, match="ZeroDivisionError") as failure:
        run.epoch([("go", {"k": 1}), ("go", {"k": 2})])
    assert (failure.value.method, failure.value.row, failure.value.line) == ("go", 1, 9)
    assert run.state() == {"a": {}}
    assert run.call("go", k=3) == Outcome(1.0)


def test_arguments_are_checked() -> None:
    run = LocalRun(graph(define(RECOMMENDER)))
    for arguments, what in (
        ({}, "user is missing"),
        ({"user": 1, "z": 2}, "no z"),
        ({"user": "x"}, "no long"),
    ):
        with pytest.raises(BadOption, match=what) as error:
            run.call("get_rec", **arguments)
        assert error.value.hint


ALIASES = """
    @mp.program(lanes=2)
    class P:
        lists: mp.Partitioned[mp.Map[int, list[int]]]
        vectors: mp.Partitioned[mp.Map[int, mp.Vector]]
        n: mp.Partitioned[mp.Map[int, int]]

        def go(self, k: int, xs: list[int]) -> list[int]:
{0}

        def _plain(self, k):
            return self.lists[k] or []

        def _built(self, k):
            found = self.lists[k] or []
            found.append(self.n[k])
            return found

        def _given(self, k, ys):
            found = ys
            if self.n[k] > 0:
                found = self.lists[k]
            return found
"""


def shortened(items: list[int]) -> list[int]:
    del items[3:]
    return items


MINE = "\n            mine.append(3)\n            self.lists[k] = mine\n            return mine + xs"
VECTOR = "\n            v[3] += 1\n            self.vectors[k] = v\n            self.n[k] = 1\n            return v.keys()"


@pytest.mark.parametrize(
    "body",
    [
        "mine = self._plain(k)" + MINE,
        "mine = self._built(k)" + MINE,
        "mine = self.lists[k] if self.n[k] > 0 else []" + MINE,
        "mine = [self.n[x] for x in xs]" + MINE,
        "some = shortened(xs)\n            self.n[k] += len(some)\n            return some + xs",
        "v = self.vectors[k] if self.n[k] > 0 else mp.Vector()" + VECTOR,
    ],
)
def test_what_a_helper_or_an_expression_gives_may_be_changed(body: str) -> None:
    calls: list[Call] = [("go", {"k": n % 2, "xs": [n]}) for n in range(5)]
    both(define(ALIASES.format("            " + body), shortened=shortened), calls)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("mine = self._given(k, xs)" + MINE, "mine and xs"),
        ("w = [1]\n            mine = (self.lists[k] or w) if self.n[k] > 0 else []" + MINE, "mine and w"),
        ("mine = other = [self.n[k]]" + MINE, "other and mine"),
        ("other = self._plain(k)\n            mine = other" + MINE, "mine and other"),
        ("mine, other = xs, self.n[k]" + MINE, "mine and xs"),
        ("mine: list[int] = xs" + MINE, "mine and xs"),
        ("mine = self.lists.get(k, xs)" + MINE, "mine and xs"),
        ("mine = max(xs, [1])" + MINE, "mine and xs"),
        ("mine = shortened(xs)" + MINE, "mine and xs"),
        (
            "mine = xs\n            shortened(mine)\n            self.n[k] += 1\n            return mine + xs",
            "mine and xs",
        ),
    ],
)
def test_two_names_of_the_method_are_told(body: str, names: str) -> None:
    with pytest.raises(BadProgram, match=f"{names} are the same"):
        define(ALIASES.format("            " + body), shortened=shortened)
