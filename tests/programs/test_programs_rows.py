"""A row of a matrix that was read before other fields were accessed is what it would be in plain Python, or is refused."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from both_ways import DRAWN, EXAMPLES, both, define, graph
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from test_program_plain import entries

import millpond as mp
from millpond.errors import BadProgram
from millpond.programs.local import LocalRun
from millpond.programs.plain import state_of
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

SIMILAR = """
@mp.program(lanes=2)
class P:
    m: mp.Partitioned[mp.Matrix]
    agg: mp.Partitioned[mp.Matrix]
    near: mp.Partial[mp.Matrix]

    def rate(self, u: int, i: int, r: float) -> float:
        row = self.m[u]
        row[i] = r
        for j in row.keys():
            self.agg[i, j] += row[j]
        return row.total()

    def near_to(self, u: int, i: int, r: float):
        row = self.m[u]
        row[i] = r
        for j in row:
            self.near[i, j] += row[j] * r
"""


def test_a_row_is_read_while_another_matrix_is_written() -> None:
    cls = define(SIMILAR)
    rows = [{"u": n % 3, "i": n * n % 5, "r": 1.0 + n % 4} for n in range(12)]
    both(cls, [(method, row) for method in ("rate", "near_to") for row in rows])
    plain = mp.plain(cls, slices=8)
    with LocalPond(LossyFiles(3), containers=2, slices=8) as pond:
        program = pond.program("p", cls)
        for epoch in range(2):
            part = rows[epoch * 6 : epoch * 6 + 6]
            given_back = program.call("rate", into="out", name="rate")(pa.Table.from_pylist(part), epoch)
            assert given_back["out"].to_pylist() == [plain.rate(**row) for row in part]
            program.call("near_to", name="near_to")(pa.Table.from_pylist(part), epoch)
            for row in part:
                plain.near_to(**row)
        assert entries(program) == state_of(plain)
        pond.validate()


HEAD = """
@mp.program(lanes=2, max_rounds=200)
class P:
    m: mp.Partitioned[mp.Matrix]
    n: mp.Partitioned[mp.Matrix]
    p: mp.Partial[mp.Matrix]
    a: mp.Partitioned[mp.Map[int, int]]

    def go(self, k: int, j: int) -> float:
        x = 1.0
        row = self.m[k]
        other = self.n[j]
"""


@pytest.mark.parametrize(
    ("body", "line", "field"),
    [
        ("self.m[k, 1] = 2\n        x = row.total()", 1, "row was read before, and its field m"),
        ("self.a[k] += 1\n        self.m[j, 1] = 2\n        x = row[k]", 2, "row was read before, and its field m"),
        ("self.a[k] += 1\n        del self.m[k]\n        x = row[k]", 2, "row was read before, and its field m"),
        ("mine = row\n        self.m[k, 1] = 2\n        x = mine.total()", 2, "mine was read before, and its field m"),
        (
            "mine = row\n        self.a[k] += 1\n        mine = other\n        self.m[j, 1] = 2\n        x = mine.total()",
            4,
            "mine was read before, and its field m",
        ),
        (
            "for i in range(2):\n            self.m[i, j] += row.total()\n            self.a[i] += 1",
            2,
            "row was read before, and its field m",
        ),
        (
            "row = self.p[k]\n        self.a[k] += 1\n        mp.everywhere(self.p).clear()\n        x = row.total()",
            3,
            "row was read before, and its field p",
        ),
    ],
)  # fmt: skip
def test_a_row_whose_own_field_is_written_since_is_refused(body: str, line: int, field: str) -> None:
    with pytest.raises(BadProgram) as error:
        define(HEAD + f"        {body}\n        return x\n")
    assert field in error.value.message
    assert "copy" in error.value.hint
    assert error.value.line == HEAD.count("\n") + line


names = st.sampled_from(["row", "other"])
keys = st.sampled_from(["k", "j", "1", "int(x) % 3"])
fields = st.sampled_from(["m", "n", "p"])


@st.composite
def statements(draw: Any, depth: int, indent: str) -> str:
    own, form = draw(names), draw(st.integers(0, 10 if depth == 0 else 13))
    field, key, column = draw(fields), draw(keys), draw(keys)
    value = draw(st.sampled_from([f"{own}.total()", f"{own}[{column}]", f"len({own})", "x", "1"]))
    inner = indent + "    "
    if form <= 9:
        made = [
            f"{own} = self.{field}[{key}]",
            f"{own} = {draw(names)}",
            f"{own} = self.m[{key}] if x > 2 else self.n[j]",
            f"x += {value}",
            f"self.{field}[{key}, {column}] += {value}",
            f"self.{field}[{key}, {column}] = {value}",
            f"self.{field}[{key}][{column}] += {value}",
            f"self.a[{key}] += int({value}) % 5",
            f"del self.{field}[{key}]",
            "mp.everywhere(self.p).clear()",
        ][form]
        return f"{indent}{made}\n"
    if form == 10:
        return f"{indent}for c in {own}.keys():\n{inner}self.{field}[{key}, c] += {own}[c]\n"
    head = ["if x > 2:", "for i in range(2):", "while x < 3:"][form - 11]
    body = "".join(draw(st.lists(statements(depth - 1, inner), min_size=1, max_size=3)))
    return f"{indent}{head}\n{body}" + (f"{inner}x += 1\n" if form == 13 else "")


WHY = ("it would still be as it was", "is a copy here", "the same vector", "the same object")
seen = {"accepted": 0, "with a row that travelled": 0}


bodies = st.lists(statements(1, "        "), min_size=2, max_size=6).map("".join)


def _drawn(body: str) -> type:
    try:
        cls = define(f"{HEAD}{body}        return x + row.total() - other.total()\n")
    except BadProgram as error:
        if not any(why in error.message for why in WHY):
            raise
        reject()
    return cls


@settings(parent=DRAWN, max_examples=EXAMPLES or 80)
@given(body=bodies, seed=st.integers(0, 5))
def _draw(body: str, seed: int) -> None:
    cls = _drawn(body)
    both(cls, [("go", {"k": (n + seed) % 3, "j": n * seed % 4}) for n in range(5)])
    seen["accepted"] += 1
    seen["with a row that travelled"] += any(
        t.writes and t.field in ("m", "n", "p") and any(v.type == "vector" for v in t.inputs)
        for t in graph(cls).methods[0].tasks
    )


def test_rows_both_ways() -> None:
    _draw()
    assert seen["with a row that travelled"] > 10, seen


@settings(parent=DRAWN, max_examples=EXAMPLES // 4 or 20)
@given(body=bodies, seed=st.integers(0, 5), containers=st.integers(1, 2))
def test_rows_in_a_pond(body: str, seed: int, containers: int) -> None:
    """Several calls of an epoch read and write the same rows, one after the other."""
    cls = _drawn(body)
    calls = [{"k": (n + seed) % 2, "j": n * seed % 2} for n in range(6)]
    local = LocalRun(graph(cls), slices=4)
    with LocalPond(LossyFiles(1), containers=containers, slices=4) as pond:
        call = pond.program("p", cls).call("go", into="out", name="go")
        for epoch in range(2):
            came = call(pa.Table.from_pylist(calls), epoch)["out"].to_pylist()
            assert came == [each.value for each in local.epoch([("go", row) for row in calls])]
        pond.validate()
