"""What a method does to the state can be told from its text, or it is refused; and what only reads changes nothing."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from both_ways import both, define, graph
from program_graphs import graph as made_by_hand
from program_graphs import method, task

import millpond as mp
from millpond.errors import BadProgram, ProgramFailed, Rejected
from millpond.programs.graph import Field, Graph
from millpond.programs.local import Call, LocalRun
from millpond.programs.plain import state_of
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

HEAD = """
@mp.program(lanes=2)
class P:
    m: mp.Partitioned[mp.Matrix]
    a: mp.Partitioned[mp.Map[int, int]]
    w: mp.Partial[mp.Vector]
    o: mp.Partial[mp.Matrix]

    def _row(self, k):
        return self.m[k]

    def _chosen(self, k):
        found = self.m[k]
        if self.a[k] > 0:
            found = mp.Vector()
        return found

    def go(self, k: int, j: int = 1) -> float:
"""
FIRST = HEAD.count("\n") + 1


def touch(row: mp.Vector) -> None:
    row[1] = 2


def counted(items: list[int]) -> int:
    return len(items)


def defined(body: str) -> str:
    return f"{HEAD}        {body}\n        return 0.0\n"


REFUSED = [
    ("touch(self.m[k])", 0),
    ("row = self.m[k]\n        touch(row)", 1),
    ("row = self.m[k]\n        other = row\n        touch(other)", 2),
    ("row = self._row(k)\n        touch(row)", 1),
    ("row = self._row(k)\n        row.add([1])", 0),
    ("row = self.m[k] if self.a[k] > 0 else mp.Vector()\n        row[1] = 2", 0),
    ("row = self._chosen(k)\n        row[1] = 2", 0),
    ("touch(self.w)", 0),
    ("touch(row=self.o[k])", 0),
    ("row = self.m[k] or mp.Vector()\n        row[1] = 2", 0),
    ("row = self.m[k] if k > 1 else mp.Vector()\n        row[1] = 2", 0),
    ("rows = [self.m[k]]\n        rows[0][1] = 5", 0),
    ("rows = []\n        rows.append(self.m[k])\n        rows[0][1] = 5", 1),
    ("rows = [0]\n        rows[0] = self.m[k]\n        rows[0][1] = 5", 1),
    ("rows = {1: self.m[k]}\n        rows[1][1] = 5", 0),
    ("rows = [self.m[k] for i in [1]]\n        rows[0][1] = 5", 0),
    ("rows = (self.m[k], 1)\n        rows[0][1] = 5", 0),
    ("row, x = self.m[k], 1\n        row[1] = 5", 0),
    ("add = self.m[k].add\n        add([1])", 0),
    ("max(self.m[k], self.m[k], key=len)[1] = 5", 0),
    ("w = self.w\n        w[1] = 5", 0),
    ("f = lambda: self.m[k]\n        f().add([1])", 0),
]


@pytest.mark.parametrize(("body", "offset"), REFUSED, ids=[body for body, _ in REFUSED])
def test_what_cannot_be_told_is_refused(body: str, offset: int) -> None:
    with pytest.raises(BadProgram) as error:
        define(defined(body), touch=touch)
    assert error.value.line == FIRST + offset
    assert error.value.hint


TOLD = [
    ("touch(self.m[k].copy())", True),
    ("row = self.m[k].copy()\n        touch(row)\n        rows = [row]", True),
    ("x = counted(self.m[k].keys()) + len(self.m[k]) + sum(self.w.values())", True),
    ("x = max(self.m[k]) if self.m[k] else 0", True),
    ("x = mp.Vector(self.m[k])\n        x[1] = 3", True),
    ("x = (self.m[k] + self.m[k]).dot(self.m[k])", True),
    ("x = [2 * self.m[k][i] for i in self.m[k]]", True),
    ("v = mp.Vector([1])\n        v.add(self.m[k])", True),
    ("row = self.m[k]\n        row[1] = 2", False),
    ("self.m[k] = self.m[j].copy()", False),
    ("self.w.add(self.m[k])", False),
]


@pytest.mark.parametrize(("body", "reads"), TOLD, ids=[body for body, _ in TOLD])
def test_what_can_be_told(body: str, reads: bool) -> None:
    put = "    def put(self, k: int, i: int):\n        self.m[k, i] += 1\n        self.w[i] += 1\n"
    cls = define(defined(body) + put, touch=touch, counted=counted)
    assert graph(cls).method("go").read_only == reads
    calls = [("put", {"k": n % 3, "i": n % 5}) for n in range(12)] + [("go", {"k": n % 4}) for n in range(6)]
    both(cls, calls)


def test_what_a_call_returns_is_no_part_of_the_state() -> None:
    cls = define("""
        @mp.program
        class P:
            m: mp.Partitioned[mp.Matrix]

            def put(self, k: int):
                self.m[k, 1] += 1

            def row(self, k: int) -> mp.Vector:
                return self.m[k]
    """)
    both(cls, [("put", {"k": 1}), ("row", {"k": 1}), ("put", {"k": 1}), ("row", {"k": 1})])


def lying() -> Graph:
    """Its method writes, and says that it only reads."""
    body = "state[k] = 1\nif k > 5:\n    raise ValueError(k)\nreturn -1, (state[k],)"
    step = task(0, body, "k long", "a", "partitioned", "k")
    return made_by_hand(
        "P",
        [Field("a", "partitioned", "map", "long", "long", 0, 1)],
        [method("go", "k long", "long", [step])],
    )


@pytest.mark.parametrize("k", [1, 7])
def test_a_call_that_should_only_read_changes_nothing(k: int) -> None:
    cls = define("""
        @mp.program
        class P:
            a: mp.Partitioned[mp.Map[int, int]]

            def go(self, k: int) -> int:
                return self.a[k]
    """)
    cls.__millpond_graph__ = lying()  # type: ignore[attr-defined] # as programs have it
    with LocalPond(LossyFiles(1), containers=1, slices=4) as pond:
        program = pond.program("p", cls)
        what = "should only read" if k == 1 else "ValueError"
        with pytest.raises(ProgramFailed, match=what):
            program.go(k=k)
        with pytest.raises(ProgramFailed, match=what):
            program.call("go", into="out", k="k", name="feed")(pa.table({"k": [k]}), 0)
        assert program.entries("a") == {}
        pond.validate()


def test_reject_in_a_function_is_refused() -> None:
    space: dict[str, object] = {"reject": mp.reject, "Rejected": Rejected}
    for word in ('reject("no")', 'raise Rejected("no", reason="no")'):
        exec(f"def hidden(x):\n    if x > 1:\n        {word}\n    return x\n", space)
        with pytest.raises(BadProgram, match=r"hidden uses (reject|Rejected)") as error:
            define(defined("self.a[k] += 1\n        x = hidden(k)"), hidden=space["hidden"])
        assert "in a method" in error.value.hint
        assert error.value.line == FIRST + 1


def down(n: int) -> int:
    return down(n + 1) if n else n


def test_a_function_that_calls_itself_for_ever_fails_its_row() -> None:
    cls = define(defined("self.a[k] += 1\n        self.a[k] += down(j)"), down=down)
    with LocalPond(LossyFiles(1), containers=1, slices=4) as pond:
        program = pond.program("p", cls)
        go = program.call("go", k="k", j="j", name="feed")
        with pytest.raises(ProgramFailed, match="called itself too deeply") as error:
            go(pa.table({"k": [1, 2, 3], "j": [0, 0, 1]}), 0)
        assert (error.value.method, error.value.row, error.value.line) == ("go", 2, FIRST + 1)
        assert program.entries("a") == {}
    with pytest.raises(ProgramFailed) as error:
        LocalRun(graph(cls)).call("go", k=1)
    assert error.value.line == FIRST + 1


@pytest.mark.parametrize("kind", ["int", "int | None", '"bigint"', "Key", "str", '"long"', "Optional[int]"])
def test_the_first_key_is_the_same_both_ways(kind: str) -> None:
    from typing import Optional

    cls = define(
        f"""
        @mp.program(lanes=3)
        class P:
            w: mp.Partial[mp.Vector]

            def go(self, x: float, k: {kind}, j: int):
                self.w[j] += x
        """,
        Key=int,
        Optional=Optional,
    )
    both(cls, [("go", {"x": 1.0, "k": str(n) if kind == "str" else n, "j": 2}) for n in range(9)])


BY_COLUMN = """
@mp.program(lanes=2)
class P:
    m: mp.Partitioned[mp.Matrix]
    w: mp.Partial[mp.Vector]

    def put(self, r: int, c: int, x: float) -> float:
        self.m[r, c] = x
        self.w[r] += x
        return self.m[r, c]

    def sum_up(self, c: int) -> float:
        return self.m[:, c].total()

    def scale(self, c: int, by: float) -> "array<long>":
        column = self.m[:, c]
        for r in column.keys():
            column[r] = column[r] * by
        return column.keys()

    def move(self, c: int, to: int) -> bool:
        values = self.m.column(c)
        del self.m[:, c]
        self.m[:, to] = values
        return (1, to) in self.m

    def drop(self, r: int, c: int):
        del self.m[r, c]
        self.m[r + 1, c] += 0.5
"""


def test_a_matrix_whose_columns_are_accessed_is_by_column() -> None:
    cls = define(BY_COLUMN)
    assert "m: partitioned matrix, by column" in mp.explain(cls)
    assert "TE 1, line 8: writes m[c]" in mp.explain(cls)
    chance = random.Random(4)
    calls: list[Call] = []
    for _ in range(60):
        c = chance.randrange(4)
        calls += [("put", {"r": chance.randrange(5), "c": c, "x": float(chance.randrange(9))})] * 2
        calls.append(
            chance.choice(
                [
                    ("sum_up", {"c": c}),
                    ("scale", {"c": c, "by": 2.0}),
                    ("move", {"c": c, "to": chance.randrange(4)}),
                    ("drop", {"r": chance.randrange(5), "c": c}),
                ]
            )
        )
    both(cls, calls, epochs=1)
    plain = mp.plain(cls)
    plain.put(r=7, c=2, x=1.5)
    assert state_of(plain)["m"] == {(7, 2): 1.5}, "the row first, as users name places"


@pytest.mark.parametrize(
    "returned",
    [
        "self.w.dot(self.w)",
        "row.dot(self.w)",
        "row.without(self.w).total()",
        "(row + self.w).total()",
        "(self.w + self.w - self.w * 0.5 / 2.0).total()",
    ],
)
def test_a_partial_field_is_given_to_operations_in_the_plain_class_too(returned: str) -> None:
    cls = define(
        f"""
@mp.program(lanes=2)
class P:
    w: mp.Partial[mp.Vector]
    m: mp.Partitioned[mp.Matrix]

    def go(self, k: int, x: float) -> float:
        row = self.m[k].copy()
        self.m[k, 2] = x
        self.m[k, 9] = x
        self.w[2] = 3.0
        self.w[k] += x
        return {returned}
"""
    )
    calls = [{"k": number % 3, "x": float(number)} for number in range(9)]
    told = [each.value for each in LocalRun(graph(cls), slices=4).epoch([("go", call) for call in calls])]
    plain = mp.plain(cls)
    assert [plain.go(**call) for call in calls] == told
    assert any(told)
