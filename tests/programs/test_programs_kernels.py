"""Small programs over numbers, as nobody thought of them: compiled in a pond they come out as they do in plain Python."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from both_ways import DRAWN, EXAMPLES, define, graph, plainly
from hypothesis import given, note, settings
from hypothesis import strategies as st
from kernels_at_once import kernels_at_once
from test_program_plain import entries

import millpond as mp
from millpond.errors import ProgramFailed
from millpond.kernels._jit import JIT_ENABLED
from millpond.programs.graph import Graph
from millpond.programs.local import Call, LocalRun
from millpond.programs.machine.plan import why_interpreted
from millpond.programs.plain import state_of
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

SLICES = 4
EPOCHS, CALLS = 4, 40
PROGRAMS = 3
DEPTH, STATEMENTS = 3, 5
"""So many are drawn in the suite: what takes time is to compile them."""
RAN_MIN = 150
HEAD = """
import math

def weighed(x: float, n: int) -> float:
    total = 0.0
    for i in range(n % 5):
        total += x / (i + 1)
    return -total if total < 0 else total

@mp.program(lanes=LANES)
class P:
    a: mp.Partitioned[mp.Map[int, int]]
    f: mp.Partitioned[mp.Map[int, float]]
    g: mp.Partitioned[mp.Map[int, bool]]
    m: mp.Partitioned[mp.Matrix]
    d: mp.Partitioned[mp.Map[int, list[int]]]
    w: mp.Partial[mp.Vector]
    c: mp.Partial[mp.Matrix]
    n: mp.Partial[mp.Map[int, int]]

    def go(self, k: int, j: int, y: float, xs: list[int], ys: list[float]) -> "RETURNS":
        x = j
        b = False
"""
ROWS = pa.schema(
    {
        "k": pa.int64(),
        "j": pa.int64(),
        "y": pa.float64(),
        "xs": pa.list_(pa.int64()),
        "ys": pa.list_(pa.float64()),
    }
)
RETURNS = {
    "x": "long",
    "y": "double",
    "b": "boolean",
    "xs + [x, int(b)]": "array<long>",
    "ys + [y, float(x)]": "array<double>",
}

PLACES = ("k", "j", "x % 4", "2", "len(xs)")
"""Where an entry is, within what one key reaches."""
ENDS = {
    "I": ("k", "j", "x", "3", "-2"),
    "F": ("y", "y", "0.1", "-0.0", "2.5"),
    "B": ("b", "x > k", "y < j"),
    "S": ("x += 1", "y -= x"),
}
Access = dict[str, Sequence[str]]
"""What may stand in an expression or a statement, by its type. `I`, `F`, `B`, `S` and `K` are drawn in turn: an int, a float, a
bool, a statement and a place."""
NUMBERS: Access = {
    "I": (
        *("len(xs)", "sum(xs)", "(I + I)", "(I - I)", "(I * I) % 97", "I // 3", "I % -5"),
        *("-I", "abs(I)", "min(I, I)", "max(I, I, I)", "(I if B else I)", "int(F % 1e6)", "math.floor(F % 7.5)"),
        *("sum([z * I for z in xs if B]) % 1000", "sum(z > I for z in xs)", "(I & I)", "(I or I)", "(I and I)"),
        *("len([v for v in ys if v > F])", "sum(xs[1:])", "int(B)", "(I | 3)", "I // (I % 4 + 1)", "I % (I % 3 - 4)"),
    ),
    "F": (
        *("(F + F)", "(F - F)", "(F * F)", "F / 3.0", "F % 1.5", "-F", "abs(F)", "F // 0.3"),
        *("min(F, F)", "max(F, F)", "float(I)", "I / 7", "(F if B else F)", "sum(ys)", "sum([v * F for v in ys])"),
        *("math.sqrt(abs(F))", "weighed(F, I)", "(F and F)", "(F or F)", "(I * F)", "(F - I)", "math.tanh(F)"),
    ),
    "B": (
        *("I < I", "F <= F", "I < F", "F == I", "I != I", "I in xs", "(B and B)", "(B or B)", "not B", "F > I"),
        *("0 < I <= 5", "any(z > I for z in xs)", "all(v > F for v in ys)", "math.isinf(F)", "bool(I)", "B != B"),
    ),
    "S": (
        *("x = I", "y = F", "b = B", "x += I", "x -= I", "y *= F", "y /= 3", "xs = [z - I for z in xs]", "ys = [F, F]"),
        *("xs = xs[:2] + [I]", "y = y if B else F", "if B:\n    S", "if B:\n    S\nelse:\n    S", "x, y = I, F"),
        *("for x in xs:\n    S", "for i, e in enumerate(xs):\n    x += e * i\n    S", "for x in range(I % 4):\n    S"),
        *("for p, q in zip(xs, ys):\n    y += p * q", "for r in ys:\n    if y > r or B:\n        break\n    S"),
        "while abs(x) > 5:\n    x = -x // 2\n    S",
    ),
}  # fmt: skip
MAY_FAIL: Access = {
    "I": ("I // I", "I % I", "int(F)", "xs[K]", "sorted(xs)[-1]", "(I * I)", "max(xs)"),
    "F": ("F / F", "I / I", "F % F", "ys[K]", "min(ys)", "math.exp(F)", "math.log(F)"),
    "B": ("xs[0] > I",),
    "S": ("assert B", "x *= I"),
}
"""Rarely, as it fails an epoch whole."""


def of_map(name: str, key: str, kind: str) -> Access:
    own = f"self.{name}[{key}]"
    reads = (own, own, f"self.{name}.get({key}, {kind})")
    return {
        kind: reads,
        "B": (f"{key} in self.{name}",),
        "S": (
            f"{own} = {kind}",
            f"{own} = {kind}",
            f"del {own}",
            *([f"{own} += {kind}"] if kind != "B" else []),
        ),
    }


def of_vector(own: str) -> Access:
    return {
        "I": (f"len({own})", f"len({own}.keys())", f"sum({own}.top(2))"),
        "F": (f"{own}[K]", f"{own}.get(K, F)", f"{own}.total()", f"{own}.dot(ys)", f"sum({own}.values())"),
        "B": (f"K in {own}",),
        "S": (
            *(f"{own}[K] = F", f"{own}[K] += F", f"{own}[K] -= F", f"del {own}[K]", f"{own}[I] += I", f"{own}.add(ys)"),
            *(f"for x in {own}.keys():\n    S", f"for x, y in {own}.items():\n    S", f"{own}[K] = {own}[K] * 0.5"),
        ),
    }  # fmt: skip


BLOCKS: dict[str, tuple[str, Access]] = {
    "a": ("", of_map("a", "k", "I")),
    "f": ("", of_map("f", "j", "F")),
    "g": ("", of_map("g", "k", "B")),
    "m": ("row = self.m[k]", of_vector("row")),
    "d": ("", {"I": ("len(self.d.get(k, xs))",), "S": ("self.d[k] = xs", "self.d[k] = [I, x]")}),
    "w": ("", of_vector("self.w")),
    "c": (
        "",
        {
            "F": ("self.c[K, K]", "self.c[K].total()", "self.c.column(K).total()"),
            "I": ("len(self.c[K])", "len(self.c.keys())"),
            "S": ("self.c[K, K] += F", "self.c[K, K] = F", "self.c[K][K] -= F", "del self.c[K, K]", "del self.c[K]"),
        },
    ),
    "n": ("", {**of_map("n", "K", "I"), "B": ("K in self.n",)}),
    "all w": ("", {"S": ("y = mp.total(mp.everywhere(self.w)[k])", "y = mp.total(mp.everywhere(self.w).copy()).total()")}),
    "all c": ("", {"S": ("xs = mp.total(mp.everywhere(self.c).column(j)).top(3)",)}),
    "all n": ("", {"S": ("x = mp.total(mp.everywhere(self.n).get(j, 1))",)}),
}  # fmt: skip


class Writer:
    """Writes a class. Of each kind all forms come in turn, so that few programs have many of them."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._decks = {kind: chance.sample(forms, len(forms)) for kind, forms in NUMBERS.items()}

    def _form(self, kind: str, access: Access, depth: int) -> str:
        own, chance = access.get(kind, ()), self._chance
        if depth <= 0:
            return chance.choice(ENDS[kind])
        if own and chance.random() < (0.6 if depth == DEPTH else 0.3):
            return chance.choice(own)
        if chance.random() < 0.01:
            return chance.choice(MAY_FAIL[kind])
        deck = self._decks[kind]
        deck.append(deck.pop(0))
        return deck[-1]

    def text(self, kind: str, access: Access, depth: int = DEPTH) -> str:
        """An expression or a statement of a kind."""
        made, form = "", self._form(kind, access, depth)
        for place, letter in enumerate(form):
            if letter == "K":
                made += self._chance.choice(PLACES)
            elif letter == "S":
                indent = " " * (place - form.rfind("\n", 0, place) - 1)
                made += self.text("S", access, depth - 1).replace("\n", "\n" + indent)
            elif letter in NUMBERS:
                made += self.text(letter, access, depth - 1)
            else:
                made += letter
        return f"({made})" if kind != "S" and " " in made else made

    def program(self) -> str:
        """Its method comes to two fields, one after the other."""
        lines = []
        fields = self._chance.sample(sorted(BLOCKS), 2)
        names = [name.rpartition(" ")[2] for name in fields]
        if names[0] == names[1]:
            fields.pop()
        for name in fields:
            first, access = BLOCKS[name]
            lines += [first] if first else []
            if name in ("w", "c", "n") and "a" not in names:
                lines.append(f"x += self.a[{self._chance.choice('kj')}]")
                names.append("a")
            if name.startswith("all"):
                lines.append(self._chance.choice(access["S"]))
            else:
                lines += [self.text("S", access) for _ in range(STATEMENTS)]
        result = self._chance.choice(sorted(RETURNS))
        body = "\n".join([*lines, f"return {result}"])
        return HEAD.replace("RETURNS", RETURNS[result]) + "        " + body.replace("\n", "\n        ") + "\n"


def drawn_call(chance: random.Random, *, wild: bool) -> dict[str, Any]:
    """`wild` ones are at the ends of what numbers may be."""
    ints = [0, 1, 2, 3, 5, 7, -3, *([1 << 62, -(1 << 63), (1 << 63) - 1] if wild else [])]
    floats = [
        0.0,
        -0.0,
        0.1,
        1.5,
        -2.25,
        3.0,
        1e9,
        *([float("inf"), float("nan"), 1e308, 1e19] if wild else []),
    ]
    return {
        "k": chance.randrange(4),
        "j": chance.choice(ints),
        "y": chance.choice(floats),
        "xs": chance.choices(ints, k=chance.randrange(5)),
        "ys": chance.choices(floats, k=chance.randrange(4)),
    }


def compiled_tasks(found: Graph) -> int:
    [method] = found.methods
    return sum(why_interpreted(found, method, task) is None for task in method.tasks)


@pytest.mark.skipif(not JIT_ENABLED, reason="nothing is compiled")
def test_kernels_and_plain_python() -> None:
    with kernels_at_once() as ran:
        came_out = 0

        @settings(parent=DRAWN, max_examples=EXAMPLES // 50 or PROGRAMS)
        @given(seed=st.integers(0, 1 << 32), lanes=st.integers(1, 3), containers=st.integers(1, 2))
        def run(seed: int, lanes: int, containers: int) -> None:
            nonlocal came_out
            chance = random.Random(seed)
            source = Writer(chance).program()
            note(source)
            came_out += both_ways(define(source, LANES=lanes), chance, containers)

        run()
    assert came_out >= PROGRAMS, "of too few epochs there was anything to compare"
    assert sum(ran) >= RAN_MIN, "kernels should have run"


def both_ways(cls: type, chance: random.Random, containers: int) -> int:
    """How many epochs came out; the others failed here and there."""
    found = graph(cls)
    assert found.serial
    plain, local, came_out = mp.plain(cls, slices=SLICES), LocalRun(found, slices=SLICES), 0
    with LocalPond(LossyFiles(1), containers=containers, slices=SLICES) as pond:
        program = pond.program("p", cls)
        call = program.call("go", into="out")
        for epoch in range(EPOCHS):
            rows = [drawn_call(chance, wild=epoch >= EPOCHS // 2) for _ in range(CALLS)]
            calls: list[Call] = [("go", row) for row in rows]
            table = pa.Table.from_pylist(rows, ROWS)
            try:
                alone = local.epoch(calls)
            except ProgramFailed:
                with pytest.raises(ProgramFailed):
                    call(table, came_out)
            else:
                wanted = plainly(plain, calls)
                given_back = call(table, came_out)["out"].to_pylist()
                assert repr(given_back) == repr([each.value for each in wanted])
                assert repr(alone) == repr(wanted)
                came_out += 1
        assert repr(entries(program)) == repr(state_of(plain))
        pond.validate()
    return came_out
