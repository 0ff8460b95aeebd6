"""What no program may do is refused where the class is defined, with file, line and what to do."""

from __future__ import annotations

import datetime
import math
import random
import time

import pytest
from both_ways import define

from millpond.errors import BadProgram

HEAD = """
@mp.program(lanes=2)
class P:
    a: mp.Partitioned[mp.Map[int, float]]
    b: mp.Partitioned[mp.Map[str, float]]
    m: mp.Partitioned[mp.Matrix]
    v: mp.Partial[mp.Vector]
    lists: mp.Partitioned[mp.Map[int, list[int]]]

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
    ("return self.m[:, k]", 0, "conflicting partitioning", "row"),
    ("return self.m.column(k)", 0, "conflicting partitioning", "Partial"),
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
    # values that cannot travel
    ("x = {k: 1}\n        self.a[k] += 1\n        self.b[s] += x[k]", 0, "cannot be told, or cannot travel", "say what it is"),
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
    ('if self.a.pop(k, 0) > 3:\n            mp.reject("no")', 1, "after a write, on line 11", "test first"),
    ('while self.a.pop(k, 0) > 3:\n            mp.reject("no")', 1, "after a write, on line 11", "test first"),
    ('for x in self.lists.pop(k, []):\n            mp.reject("no")', 1, "after a write, on line 11", "test first"),
    ('if k:\n            k = 1\n        elif self.a.pop(k, 0) > 3:\n            k = 2\n        else:\n            mp.reject("no")', 5, "after a write, on line 13", "test first"),
    ('for x in range(k):\n            self.a[k] += x\n        else:\n            mp.reject("no")', 3, "after a write, on line 12", "test first"),
    ('mp.reject(str(self.a.pop(k, 0)))', 0, "after a write, on line 11", "test first"),
    ('x = mp.reject("no")', 0, "part of an expression", "statement"),
    # all else
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


@pytest.mark.parametrize(("body", "offset", "why", "hint"), BODIES, ids=[b[0][:40] for b in BODIES])
def test_bodies(body: str, offset: int, why: str, hint: str) -> None:
    import os

    with pytest.raises(BadProgram) as error:
        define(
            HEAD + "        " + body + "\n",
            time=time, datetime=datetime, random=random, math=math, os=os, now=now, chance=chance, CACHE={},
        )  # fmt: skip
    assert why in error.value.message
    assert hint in error.value.hint
    assert error.value.line == FIRST + offset
    assert error.value.file in error.value.message
    assert f"line {error.value.line}" in error.value.message
    assert error.value.method == "go"


CLASSES = [
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
