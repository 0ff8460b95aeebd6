"""What variables are is told from dicts, sets, tuples and pairs, too, so that what is made of them can travel."""

from __future__ import annotations

import textwrap

import pyarrow as pa
import pytest
from both_ways import both, define, graph
from test_program_plain import entries

from millpond.programs.compiler.composite import as_list, join, parts_of
from millpond.programs.local import Call, LocalRun
from millpond.programs.merging import GIVEN_EVERYWHERE, READING_EVERYWHERE
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

HEAD = """
@mp.program(lanes=2)
class P:
    seen: mp.Partitioned[mp.Map[str, int]]
    m: mp.Partitioned[mp.Matrix]
    w: mp.Partitioned[mp.Map[int, float]]
    b: mp.Partitioned[mp.Map[int, int]]
    near: mp.Partial[mp.Map[str, int]]
    lists: mp.Partitioned[mp.Map[int, list[int]]]

    def go(self, k: int, words: list[str], xs: list[int]) -> "array<long>":
        self.m[k, len(words)] += 1.5
"""


def halves(number: int) -> tuple[int, str]:
    return number // 2, f"{number}"


def counted(words: list[str]) -> dict[str, int]:
    return {word: len(word) for word in words}


COUNTS = """
counts: dict[str, int] = {}
for word in words:
    counts[word] = counts.get(word, 0) + 1
"""
BODIES = {
    "a dict by its keys": COUNTS
    + """
ws = sorted(counts)
ns: list[int] = [counts[word] for word in ws]
for i in range(len(ws)):
    self.seen[ws[i]] += ns[i]
""",
    "zip": COUNTS
    + """
ws = sorted(counts)
for word, n in zip(ws, [counts[word] for word in ws]):
    self.seen[word] += n
""",
    "pairs of a dict": COUNTS
    + """
for word, n in sorted(counts.items()):
    self.seen[word] += n
""",
    "a dict that is filled": """
counts = {}
for word in words:
    if word in counts:
        counts[word] += 1
    else:
        counts[word] = 1
for number, (word, n) in enumerate(sorted(counts.items())):
    self.seen[word] += n
    self.b[number] += counts_of(n)
""",
    "a dict written out": """
for x in [{"a": 1, "b": 2}[word] for word in words]:
    self.b[x] += 1
    self.seen[words[0]] += 1
""",
    "a dict comprehension": """
of = {x: x * 0.5 for x in xs}
best = max(of.values(), default=0.5)
for x in sorted(of):
    self.b[x] += 1
    self.w[x] += 1
self.w[k] += best
self.b[k] += 1
""",
    "a dict that a function gives": """
for word, n in sorted(counted(words).items()):
    self.seen[word] += n
""",
    "pairs of a row": """
for c, x in self.m[k].items():
    self.w[c] += x
    self.b[c] += 1
""",
    "pairs of a row with a name": """
row = self.m[k]
for c, x in row.items():
    self.w[c] += x
    self.b[c] += 1
""",
    "pairs of a lane": """
self.near[words[0]] += k
for word, n in self.near.items():
    self.seen[word] += n
""",
    "sets": """
found = {x % 3 for x in xs} | {7}
found.add(k)
for x in sorted(found - {1}):
    self.b[x] += 1
    self.w[x] += 1
for x in sorted(set(xs).union([9])):
    self.w[x] += 1
    self.b[x] += 1
""",
    "a set that is filled": """
found = set()
for x in xs:
    found.add(x)
most = max(found)
self.b[min(found)] += 1
self.w[most] += 1
""",
    "divmod": """
x, y = divmod(k * 7, 3)
self.b[x] += y
self.w[y] += x
""",
    "a tuple": """
pair = (k, k + 1)
self.b[pair[1]] += 1
""",
    "a tuple from the end": """
pair = (words[0], k)
n = pair[-1]
self.seen[pair[0]] += n
self.b[n] += n
""",
    "a tuple that a function gives": """
x, text = halves(k)
self.b[x] += 1
self.seen[text] += 1
""",
    "a tuple where a list is wanted": """
self.lists[k] = (k, 1)
xs = xs + self.lists[k]
""",
    "nested": """
for i, (x, word) in enumerate(zip(xs, words)):
    self.b[x] += i
    self.seen[word] += 1
""",
    "zip of another length": """
for x, word in zip(xs, words[:1]):
    self.b[x] += 1
    self.seen[word] += 1
""",
    "enumerate from a number": """
for i, x in enumerate(xs, 5):
    self.b[x] += i
    self.w[i] += x
""",
    "a generator": """
for x in sorted(x * 2 for x in xs):
    self.b[x] += 1
    self.w[x] += 1
""",
}


def counts_of(number: int) -> int:
    return number * 2


@pytest.mark.parametrize("name", BODIES)
def test_what_comes_of_dicts_sets_and_tuples_travels(name: str) -> None:
    body = textwrap.indent(BODIES[name], "        ")
    cls = define(f"{HEAD}{body}        return xs\n", halves=halves, counted=counted, counts_of=counts_of)
    calls: list[Call] = [("go", {"k": k % 2, "words": list("aba"), "xs": [k, 4, 2, 4]}) for k in range(4)]
    both(cls, calls)


NUMBERS = """
@mp.program(lanes=2)
class P:
    m: mp.Partitioned[mp.Matrix]
    w: mp.Partitioned[mp.Map[int, float]]
    b: mp.Partitioned[mp.Map[int, int]]
    n: mp.Partitioned[mp.Matrix]

    def pairs(self, k: int, xs: list[int]) -> float:
        row = self.m[k]
        row[len(xs)] += 1.5
        for c, x in row.items():
            self.w[c] += x
            self.b[c] += k
        for i, number in enumerate(xs, 5):
            self.b[i] += number
            self.w[number] += i
        return row.total()

    def parts(self, k: int, xs: list[int]) -> list[int]:
        x, y = divmod(k * 7, 3)
        self.b[x] += y
        pair = (k, y)
        self.w[pair[1]] += x
        for z in sorted({each % 3 for each in xs}):
            self.w[z] += 1
            self.b[z] += 1
        xs.append(x)
        return xs

    def near(self, k: int, xs: list[int]) -> float:
        row = self.m[k]
        row[len(xs)] += 1.0
        for j in row.keys():
            self.n[k, j] += row[j]
        return row.total() + self.n[k, len(xs)]
"""


def test_a_pond_does_the_same() -> None:
    cls = define(NUMBERS)
    rows = [{"k": n % 3, "xs": [n % 4, 2, n % 5][: n % 4]} for n in range(30)]
    schema = pa.schema({"k": pa.int64(), "xs": pa.list_(pa.int64())})
    local = LocalRun(graph(cls), slices=4)
    with LocalPond(LossyFiles(1), containers=2, slices=4) as pond:
        program = pond.program("p", cls)
        for epoch in range(2):
            for method in ("pairs", "parts", "near"):
                call = program.call(method, into="out", name=method, history="shared")
                came = call(pa.Table.from_pylist(rows, schema), epoch)["out"].to_pylist()
                assert came == [each.value for each in local.epoch([(method, row) for row in rows])]
        assert entries(program) == local.state()


def test_items_that_are_not_of_so_many_parts_fail_as_in_python() -> None:
    cls = define(
        HEAD
        + """
        for left, right in words:
            self.seen[left] += 1
            self.seen[right] += 1
        return xs
"""
    )
    both(cls, [("go", {"k": 1, "words": ["ab", "cd"], "xs": []})])
    with pytest.raises(ValueError, match="too many values"):
        both(cls, [("go", {"k": 1, "words": ["ab", "cde"], "xs": []})])


ASKED = {
    "[key]": "[s]", "[i]": "[k]", "[row]": "[k]", "[row, column]": "[k, j]", "get": ".get({})", "array": ".array(3)",
    "dot": ".dot([1.0, 2.0])", "top": ".top(2)", "without": ".without(mp.Vector([1.0]))", "column": ".column(j)", "multiply": ".multiply(mp.Vector([1.0, 2.0]))",
}  # fmt: skip


@pytest.mark.parametrize("element", GIVEN_EVERYWHERE)
def test_what_is_said_to_be_asked_everywhere_can_be(element: str) -> None:
    kinds = {
        "map": "mp.Map[str, int]",
        "vector": "mp.Vector",
        "matrix": "mp.Matrix",
        "dense": "mp.DenseMatrix",
    }
    fill = {"map": "[s] += j", "vector": "[j] += k", "matrix": "[k, j] += 1", "dense": "[k] = [1.0, j]"}
    for word in GIVEN_EVERYWHERE[element]:
        asked = ASKED.get(word, f".{word}()").format({"map": "s"}.get(element, "k"))
        assert word in READING_EVERYWHERE or word.startswith("[")
        cls = define(f"""
            @mp.program(lanes=2)
            class P:
                f: mp.Partial[{kinds[element]}]
                b: mp.Partitioned[mp.Map[int, int]]
                def fill(self, k: int, j: int, s: str):
                    self.f{fill[element]}
                def ask(self, k: int, j: int, s: str) -> int:
                    parts = mp.everywhere(self.f){asked}
                    self.b[k] += 1
                    return len(parts) + self.b[k]
        """)
        rows = [{"k": n, "j": n % 2, "s": "ab"[n % 2]} for n in range(4)]
        both(cls, [(method, row) for method in ("fill", "ask") for row in rows])
        assert [task.gathers for task in graph(cls).method("ask").tasks].count(True) == 1


def test_types_and_what_they_have_in_common() -> None:
    assert parts_of("dict<string,array<tuple<long,double>>>") == ["string", "array<tuple<long,double>>"]
    assert join("dict<null,null>", "dict<string,long>") == "dict<string,long>"
    assert join("tuple<long,string>", "tuple<double,string>") == "tuple<double,string>"
    assert join("tuple<long>", "tuple<long,long>") == ""
    assert join("set<long>", "set<string>") == "set<>"
    assert join("set<long>", "array<long>") is None
    assert as_list("tuple<long,double>") == "array<double>"
    assert as_list("tuple<long,string>") == ""
    assert as_list("dict<long,long>") == "dict<long,long>"
