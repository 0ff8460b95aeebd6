"""What no program may do is refused where the class is defined, with file, line and what to do."""

from __future__ import annotations

import datetime
import math
import random
import time
from typing import Any

import numpy as np
import pytest
from both_ways import both, define

from millpond import reject
from millpond.errors import BadProgram

HEAD = """
@mp.program(lanes=2)
class P:
    a: mp.Partitioned[mp.Map[int, float]]
    b: mp.Partitioned[mp.Map[str, float]]
    m: mp.Partitioned[mp.Matrix]
    v: mp.Partial[mp.Vector]
    p: mp.Partial[mp.Matrix]
    lists: mp.Partitioned[mp.Map[int, list[int]]]
    words: mp.Partial[mp.Map[str, int]]

    def go(self, k: int, s: str = ""):
"""
FIRST = HEAD.count("\n") + 1
"""The line of a body's first statement."""

BODIES = [
    # recursion
    ("self.a[k] += 1\n        self.go(k - 1)", 1, "recursion", "loop"),
    # try across tasks
    ("try:\n            self.a[k] += 1\n            self.b[s] += 1\n        except ValueError:\n            pass", 0, "try", "if"),
    # state that is in no state class
    ("self.count = k", 0, "no state class", "field"),
    ("return self.count", 0, "no state class", "field"),
    ("CACHE[k] = 1", 0, "no state class", "field"),
    ("return CACHE[k]", 0, "no state class", "field"),
    # conflicting partitioning
    ("row = self.m[k]\n        return self.m[:, k]", 1, f"by row on line {FIRST}, in go, and by column here: conflicting partitioning", "[:, column]"),
    ("x = self.m.column(k)\n        return k in self.m", 1, f"by column on line {FIRST}, in go, and by row here: conflicting partitioning", "row"),
    ("return self.m[k, 1:2]", 0, "goes across rows", "entry"),
    ("return self.m[1:3]", 0, "conflicting partitioning", "row"),
    ("self.m[:, k][1] = 2\n        self.m[len(s), int(s)] = 1", 1, "both come of something else", "before"),
    ("return self.p[:, k]", 0, "goes across rows", "column(c)"),
    ("return len(self.a)", 0, "conflicting partitioning", "key"),
    ("for x in self.a:\n            pass", 0, "conflicting partitioning", "key"),
    ("self.a[s] = 1.0", 0, "a key of a is a long", "one type"),
    ("self.b[k] = 1.0", 0, "a key of b is a string", "one type"),
    ("self.a[k] = s", 0, "a value of a is a double", "convert"),
    # side effects under global access
    ("mp.everywhere(self.v)[k] += 1", 0, "side effect", "only reads"),
    ("mp.everywhere(self.v)[k] = 1", 0, "mp.everywhere(self.v)[k] has a side effect", "only reads"),
    ("mp.everywhere(self.v).add([1.0])", 0, "side effect", "only reads"),
    ("x = mp.everywhere(self.v).assign(mp.Vector())", 0, "side effect", "only reads"),
    ("mp.everywhere(self.v).copy()", 0, "nothing is done", "variable"),
    ("x = mp.everywhere(self.v)", 0, "what is to be done", "copy"),
    ("x = mp.everywhere(self.a).copy()", 0, "partial field", "everywhere"),
    # clock, randomness, I/O
    ("self.a[k] = time.time()", 0, "clock", "argument"),
    ("self.a[k] = datetime.datetime.now().timestamp()", 0, "clock", "argument"),
    ("self.a[k] = now()", 0, "clock", "argument"),
    ("self.a[k] = random.random()", 0, "chance", "argument"),
    ("self.a[k] = chance(3)", 0, "random", ""),
    ("print(k)", 0, "I/O", "return"),
    ("x = open(s).read()", 0, "I/O", "argument"),
    ("x = os.getpid()", 0, "I/O", "argument"),
    ("x = hash(s)", 0, "process to process", "key"),
    ("x = eval(s)", 0, "hides", "write out"),
    ("for x in set([s]):\n            self.b[x] += 1", 0, "another order", "sorted"),
    # the order of sets
    ('self.b[",".join(set([s, "x"]))] += 1', 0, "another order", "sorted"),
    ("x = {s, s + s}\n        self.b[x.pop()] += 1", 1, "another order", "min(...)"),
    ("x = {s, s + s}\n        self.b[str(x)] += 1", 1, "another order", "sorted"),
    ('x = {s, s + s}\n        self.b[f"{x}"] += 1', 1, "another order", "sorted"),
    ('x = {s, s + s}\n        self.b["%s" % x] += 1', 1, "another order", "sorted"),
    ("for x in sorted({s, s + s}, key=len):\n            self.b[x] += 1", 0, "another order", "no key="),
    ("x = {s, s + s}\n        self.b[min(x, key=len)] += 1", 1, "another order", "no key="),
    ("x, y = {s, s + s}\n        self.b[x] += 1", 0, "another order", "sorted"),
    ("x = [s]\n        x += {s, s + s}\n        self.b[x[0]] += 1", 1, "another order", "sorted"),
    ("x = [s]\n        x.extend({s, s + s})\n        self.b[x[0]] += 1", 1, "another order", "sorted"),
    ("x = [{s, s + s}]\n        self.b[str(x[0])] += 1", 0, "another order", "sorted"),
    ("x = sum({0.1, 0.2, 1.0 * k})\n        self.a[k] += x", 0, "another order", "sorted"),
    ("x = s\n        if k:\n            x = {s}\n        self.b[str(x)] += 1", 3, "another order", "sorted"),
    ("x: set[str] = {s}\n        self.b[str(x.union([s + s]))] += 1", 1, "another order", "sorted"),
    ("x = {s: 1}\n        for y in x.keys() & [s]:\n            self.b[y] += 1", 1, "another order", "sorted"),
    ("x = unchanged({s})\n        self.b[s] += 1", 0, "another order", "sorted"),
    ("self.b[joined(s)] += 1", 0, "joined uses set(text): a set has another order", "sorted"),
    ("self.b[letters(s)] += 1", 0, "letters uses return set(text): a set has another order", "return sorted"),
    # by way of numpy
    ("self.a[k] += by_numpy_random(k)", 0, "by_numpy_random uses np.random: chance", "seed"),
    ("self.a[k] += by_imported_random(k)", 0, "by_imported_random uses from numpy import random: chance", "seed"),
    ("self.a[k] += by_imported_numpy(k)", 0, "by_imported_numpy uses q.random: chance", "seed"),
    ("self.a[k] += by_numpy_clock(k)", 0, "by_numpy_clock uses np.datetime64: it reads the clock", "argument"),
    ("self.a[k] += by_dtype_clock(k)", 0, "by_dtype_clock uses 'datetime64[s]': it reads the clock", "argument"),
    ("self.a[k] += by_numpy_file(s)", 0, "by_numpy_file uses np.loadtxt: it reaches out", "argument"),
    ("self.a[k] += to_numpy_file(s)", 0, "to_numpy_file uses np.zeros(3).tofile: it reaches out", "return"),
    ("self.a[k] += by_numpy_memory(k)", 0, "by_numpy_memory uses np.empty: what it holds", "np.zeros"),
    ("self.a[k] += by_numpy_inside(s)", 0, "by_numpy_inside uses np.lib.format: the module numpy.lib.format", "math"),
    ("self.a[k] += by_renamed(s)", 0, "by_renamed uses np: a module is used as a value", "np.name"),
    ("self.a[k] += by_private(k)", 0, "by_private uses __mro__: it is private", "public"),
    # values that cannot travel
    ("x = {k: 1}\n        self.a[k] += 1\n        self.b[s] += x[k]", 0, "x is a dict, which cannot travel", "take out of it"),
    ("x = unchanged(s)\n        self.a[k] += 1\n        self.b[s] += len(x)", 0, "x is of a type that cannot be told", "as in x: int = ... or x: list[str] = ..."),
    ("self.a[unchanged(k) + 1] += 1", 0, "(unchanged(k) + 1) is of a type that cannot be told", "name it first, and say what it is, as in n: int = unchanged(k) + 1,"),
    ("for x in unchanged([k]):\n            self.a[x] += 1\n            self.b[s] += 1", 0, "unchanged([k]) is of a type that cannot be told", "n: list[str] = unchanged([k])"),
    ("for x, y in unchanged([k]):\n            self.a[x] += y\n            self.b[s] += 1", 0, "[x for (x, y) in unchanged([k])] is of a type", "name it first"),
    ("x = (k, s)\n        self.a[x[0]] += 1\n        self.b[x[1]] += 1", 0, "x is a tuple, which cannot travel", "take out of it before"),
    ("x: dict[int, int] = {}\n        x.update({k: 1})\n        for y in sorted(x):\n            self.b[y] += 1", 3, "y is a long, and a key of b is a string", "one type"),
    ("x = {}\n        x.update({k: 1})\n        for y in sorted(x):\n            self.a[y] += 1\n            self.b[s] += 1", 2, "sorted(x) is of a type that cannot be told", "list[str] = sorted(x)"),
    ("row = self.m[k] if s else self.m[k + 1]\n        row[1] = 2", 0, "row and (self.m[k] if s else self.m[k + 1]) are the same vector", "row = (self.m[k] if s else self.m[k + 1]).copy()"),
    ("for part in mp.everywhere(self.v).items():\n            for x, y in part:\n                self.a[x] += y", 0, "mp.everywhere(self.v).items(): what v gives there in each lane cannot travel", "[i], get, keys, values, array,"),
    ("x = mp.everywhere(self.words).copy()\n        return len(x)", 0, "x: what words gives there in each lane cannot travel", "[key], get, keys, values"),
    ("for part in mp.everywhere(self.words).items():\n            for x, y in part:\n                k = max(k, y)\n        return k", 0, "mp.everywhere(self.words).items(): what words gives there", "[key], get, keys, values"),
    ("x = {k}\n        self.a[k] += 1\n        self.b[s] += len(x)", 0, "is a set, which cannot travel", "lists"),
    ("x = k\n        if k > 1:\n            x = s\n        self.a[k] += 1\n        self.b[s] += len(x)", 2, "a long and then a string", "each"),
    ("if k > 1:\n            x = 1\n        self.a[k] += 1\n        self.b[s] += x", 1, "may have no value", "before"),
    ("return {k: 1}", -1, "the result", "say what it is"),
    # rows and lists with two lives
    ("row = self.m[k]\n        self.a[k] += 1\n        row[k] = 1", 2, "row is a copy here", "right after"),
    ("row = self.m[k]\n        self.a[k] += 1\n        self.m[k, 1] = 2\n        self.b[s] = row.total()", 2, "still be as it was", "copy"),
    ("x = [k]\n        y = x\n        y.append(1)\n        self.a[k] += len(x)", 1, "the same array<long>", "copy"),
    ("self.lists[k].append(3)", 0, "copy", "put it back"),
    ("self.lists[k][0] = 3", 0, "a copy of what the field holds", "x ="),
    # reject
    ('self.a[k] += 1\n        mp.reject("late")', 1, "after a write", "test first"),
    ('row = self.m[k]\n        row[1] = 2\n        if k:\n            mp.reject("late")', 3, "after a write", "test first"),
    ('for x in range(k):\n            if x > 1:\n                mp.reject("late")\n            self.a[x] += 1', 2, "after a write", "test first"),
    ('if self.a.pop(k, 0) > 3:\n            mp.reject("no")', 1, f"after a write, on line {FIRST}", "test first"),
    ('while self.a.pop(k, 0) > 3:\n            mp.reject("no")', 1, f"after a write, on line {FIRST}", "test first"),
    ('for x in self.lists.pop(k, []):\n            mp.reject("no")', 1, f"after a write, on line {FIRST}", "test first"),
    ('if k:\n            k = 1\n        elif self.a.pop(k, 0) > 3:\n            k = 2\n        else:\n            mp.reject("no")', 5, f"after a write, on line {FIRST + 2}", "test first"),
    ('for x in range(k):\n            self.a[k] += x\n        else:\n            mp.reject("no")', 3, f"after a write, on line {FIRST + 1}", "test first"),
    ('mp.reject(str(self.a.pop(k, 0)))', 0, f"after a write, on line {FIRST}", "test first"),
    ('try:\n            mp.reject("no")\n        except ValueError:\n            pass', 1, "reject inside of try", "before"),
    ('x = mp.reject("no")', 0, "part of an expression", "statement"),
    # functions
    ("self.a[k] += later(k)", 0, "later is async", "plain"),
    ("self.a[k] += by_reject(k)", 0, "by_reject uses reject", "in a method"),
    ("self.a[k] += of_two_names(k) + other(k)", 0, "two functions are called of_two_names", "rename"),
    ("self.a[k] += remembers(k)", 0, "'remembers' has a list for the default of seen", "numbers, strings, None"),
    ("self.a[k] += calls_what_remembers(k)", 0, "'remembers' has a list for the default of seen", "in the function"),
    ("self.a[k] += counts_itself(k)", 0, "sets counts_itself.seen, which lives on from call to call", "arguments"),
    # all else
    ("x = s._hidden", 0, "_hidden is private", "public"),
    ("try:\n            x = k\n        except* ValueError:\n            pass", 0, "except*", "plain"),
    ("class C:\n            pass", 0, "class cannot be defined inside", "outside"),
    ("x = 0\n        def f():\n            nonlocal x", 1, "defined inside", "method"),
    ("with open(s) as f:\n            pass", 0, "with", "argument"),
    ("import os", 0, "import", "math"),
    ("global CACHE", 0, "global", "fields"),
    ("yield k", 0, "yield", "list"),
    ("if (x := k) > 1:\n            pass", 0, "assignment inside", "statement"),
    ("x = max(*[k, 1])", 0, "hides", "write"),
    ("def f():\n            pass", 0, "defined inside", "method"),
    ("match k:\n            case 1:\n                pass", 0, "match", "if"),
    ("self.v = 1", 0, "cannot be set", "assign"),
    ("x = self", 0, "self is used", "fields"),
    ("x = math", 0, "used as a value", "math"),
    ("x = nothing", 0, "nothing is not defined", ""),
    ("while self.a[k] < 3:\n            self.b[s] += 1\n        else:\n            k = 1", 0, "else of a loop", "if"),
    ("f = lambda x: self.a[x]\n        return f(k)", 0, "several places", "loop"),
]  # fmt: skip


def now() -> float:
    return time.time()


def chance(n: int) -> int:
    return random.randrange(n)


def unchanged(items: Any) -> Any:
    return items


def joined(text: str) -> str:
    return ",".join(set(text))


def letters(text: str) -> set[str]:
    return set(text)


def by_numpy_random(n: int) -> float:
    return float(np.random.default_rng(n).random())


def by_imported_random(n: int) -> float:
    from numpy import random as r

    return float(r.default_rng(n).random())


def by_imported_numpy(n: int) -> float:
    import numpy as q

    return float(q.random.default_rng(n).random())


def by_numpy_clock(n: int) -> float:
    return float(np.datetime64("now").astype(np.int64))


def by_dtype_clock(n: int) -> float:
    return float(np.array(["now"]).astype("datetime64[s]").astype(np.int64)[0])


def by_numpy_file(name: str) -> float:
    return float(np.loadtxt(name)[0])


def to_numpy_file(name: str) -> float:
    np.zeros(3).tofile(name)
    return 1.0


def by_numpy_memory(n: int) -> float:
    return float(np.empty(n)[0])


def by_numpy_inside(name: str) -> float:
    return float(np.lib.format.open_memmap(name)[0])


def by_renamed(name: str) -> float:
    q = np
    return float(q.loadtxt(name)[0])


def by_private(n: int) -> float:
    return float(len(n.__class__.__mro__))


async def later(n: int) -> float:
    return 1.0 * n


def by_reject(n: int) -> float:
    reject("no")
    return 1.0


def of_two_names(n: int) -> float:
    return 1.0


def other_of_two_names() -> Any:
    def of_two_names(n: int) -> float:
        return 2.0

    return of_two_names


def remembers(n: int, seen: list[int] = []) -> float:  # noqa: B006 - what is refused
    seen.append(n)
    return 1.0 * len(seen)


def calls_what_remembers(n: int) -> float:
    return remembers(n)


def counts_itself(n: int) -> float:
    counts_itself.seen = n  # type: ignore[attr-defined]
    return 1.0


FUNCTIONS = [
    remembers, calls_what_remembers, counts_itself,
    now, chance, unchanged, joined, letters, by_numpy_random, by_imported_random, by_imported_numpy, by_numpy_clock,
    by_dtype_clock, by_numpy_file, to_numpy_file, by_numpy_memory, by_numpy_inside, by_renamed, by_private, later, by_reject, of_two_names,
]  # fmt: skip


@pytest.mark.parametrize(("body", "offset", "why", "hint"), BODIES, ids=[b[0][:40] for b in BODIES])
def test_bodies(body: str, offset: int, why: str, hint: str) -> None:
    import os

    with pytest.raises(BadProgram) as error:
        define(
            HEAD + "        " + body + "\n",
            time=time, datetime=datetime, random=random, math=math, os=os, CACHE={},
            other=other_of_two_names(),
            **{function.__name__: function for function in FUNCTIONS},
        )  # fmt: skip
    assert why in error.value.message
    assert hint in error.value.hint
    assert error.value.line == FIRST + offset
    assert error.value.file in error.value.message
    assert f"line {error.value.line}" in error.value.message
    assert error.value.method == "go"


def test_what_a_helper_gives_is_told_as_it_is_written() -> None:
    helper = "    def _given(self, n):\n        return unchanged(n)\n"
    with pytest.raises(
        BadProgram, match=r"line 13\): self._given\(k\) is of a type that cannot be told"
    ) as error:
        define(f"{HEAD}        self.a[self._given(k)] += self.b[s]\n\n{helper}", unchanged=unchanged)
    assert "n: int = self._given(k)" in error.value.hint


def test_a_method_of_too_many_ways() -> None:
    ways = "".join(
        f"        if k > {n}:\n            x += self.a[{n}] > 0\n        else:\n            x -= self.b[s] > 0\n"
        for n in range(60)
    )
    with pytest.raises(BadProgram, match="too many ways") as error:
        define(HEAD + "        x = 0\n" + ways)
    assert "two methods" in error.value.hint
    assert error.value.line is not None
    assert error.value.line > FIRST


def test_state_of_a_function_around() -> None:
    with pytest.raises(BadProgram, match=r"line 9\): state of another function") as error:
        define("""
            def made():
                count = 0
                @mp.program
                class P:
                    a: mp.Partitioned[mp.Vector]
                    def go(self, k: int):
                        self.a[k] += 1
                        nonlocal count
                        count += k
                return P
            P = made()
        """)
    assert "fields" in error.value.hint


def spread(numbers: list[int]) -> float:
    seen = set(numbers)
    return float(np.linalg.norm(np.array(sorted(seen))) + math.sqrt(len(seen)))


def test_what_does_not_show_the_order_of_a_set_is_fine() -> None:
    cls = define(
        """
        @mp.program
        class P:
            a: mp.Partitioned[mp.Map[str, float]]

            def go(self, words: list[str], numbers: list[int]) -> list[str]:
                seen = set(words) | {"x"}
                seen -= {"y"}
                seen.update(words)
                other = seen.union(["z"]) if "x" in seen else seen & {"z"}
                found: list[str] = sorted(other, reverse=True) + [min(seen), max(seen), str(len(seen)), str(sum(set(numbers)))]
                if any(seen) and all(other) and seen <= other and not seen.isdisjoint(other):
                    self.a[found[0]] += spread(numbers)
                return found
        """,
        spread=spread,
    )
    both(
        cls, [("go", {"words": ["b", "a", "b"], "numbers": [3, 1, 3]}), ("go", {"words": [], "numbers": []})]
    )


CLASSES = [
    ("a: mp.Partitioned[mp.Vector]\n    def go(this, k: int): pass", 5, "first parameter is not self"),
    ("a: mp.Partitioned[mp.Vector]\n    def go(): pass", 5, "first parameter is not self"),
    ("a: mp.Partitioned[mp.Vector] = None\n    def go(self, k: int): pass", 4, "the field a has a value"),
    ("a: mp.Partitioned[mp.Vector]\n    async def go(self, k: int): pass", 5, "async"),
    ("a: mp.Partitioned[mp.Vector]\n    def go(self, *args): pass", 5, r"\*args"),
    ("a: mp.Partitioned[mp.Vector]\n    def go(self, **kw): pass", 5, r"\*args"),
    ("a: mp.Partitioned[mp.Vector]\n    @staticmethod\n    def go(k: int): pass", 5, "travel"),
    ("a: mp.Partitioned[mp.Vector]\n    def go(self, k): pass", 5, "does not say its type"),
    ("a: mp.Partitioned[mp.Vector]\n    def go(self, k: dict): pass", 5, "cannot travel"),
    ("a: mp.Partitioned[mp.Vector]\n    def go(self, k: int = 'x'): pass", 5, "default of k is no long"),
    (
        "a: mp.Partitioned[mp.Vector]\n    def go(self, k: int) -> int: return 'x'",
        5,
        "the result is a string",
    ),
    (
        "a: mp.Partitioned[mp.Vector]\n    def __init__(self): self.x = 1\n    def go(self, k: int): pass",
        5,
        "__init__",
    ),
    ("a: mp.Partitioned[mp.Vector]\n    seen = []\n    def go(self, k: int): pass", 5, "no state class"),
    ("a: mp.Partitioned[dict]\n    def go(self, k: int): pass", 4, "no state class"),
    ("a: mp.Partitioned[mp.Map]\n    def go(self, k: int): pass", 4, "what its Map holds"),
    ("a: mp.Partitioned[mp.Map[float, int]]\n    def go(self, k: int): pass", 4, "cannot hold"),
    ("a: dict\n    def go(self, k: int): pass", 4, "neither Partitioned nor Partial"),
    ("def go(self, k: int): pass", 3, "no state"),
    ("a: mp.Partial[mp.Vector]\n    def go(self, x: float): self.a[1] += x", 5, "no key tells in which lane"),
    ("a: mp.Partial[mp.Vector]\n    def _go(self, x: float): pass", 3, "none of its methods"),
]


@pytest.mark.parametrize(("body", "line", "why"), CLASSES)
def test_classes(body: str, line: int, why: str) -> None:
    with pytest.raises(BadProgram, match=why) as error:
        define(f"\n@mp.program\nclass P:\n    {body}\n")
    assert error.value.hint
    assert error.value.line == line


def test_a_program_inherits_from_nothing_and_has_a_source() -> None:
    with pytest.raises(BadProgram, match="inherits from"):
        define("""
            class Base:
                pass

            @mp.program
            class P(Base):
                a: mp.Partitioned[mp.Vector]
                def go(self, k: int):
                    self.a[k] += 1
        """)
    import millpond as mp

    names: dict[str, object] = {"mp": mp}
    exec("class P:\n    def go(self, k: int): pass", names)
    with pytest.raises(BadProgram, match="cannot be found") as error:
        mp.program(names["P"])  # type: ignore[call-overload]
    assert "notebook" in error.value.hint
