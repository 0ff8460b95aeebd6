"""A rule says the same compiled and interpreted, whatever else is in the slice; and both say what the oracle does.

The oracle is Python on exact integers and floats: longs are cut to 64 bits after each step.
"""

from __future__ import annotations

import math
import random
import struct
from typing import Any

import numba
import numpy as np
import pyarrow as pa
import pytest
from numba.core.errors import NumbaError

from millpond.code.capture import Code
from millpond.code.rules import CompactRule, FetchRule, UpdateRule
from millpond.errors import RuleFailed
from millpond.kernels._jit import JIT_ENABLED
from millpond.stores import arithmetic, userrules
from millpond.stores.keys import Keys
from millpond.stores.ruleset import returned
from millpond.stores.versioned import Ruleset, VersionedSlice

LOWEST, HIGHEST = -(2**63), 2**63 - 1
LONGS = [0, 0, 1, -1, 2, 3, -7, 10**9, 2**53 + 1, 2**62, HIGHEST, HIGHEST - 1, LOWEST, LOWEST + 1]
DOUBLES = [
    0.0,
    -0.0,
    1.0,
    0.1,
    -2.5,
    1e300,
    -1e300,
    5e-324,
    2.0**63,
    -(2.0**63),
    math.inf,
    -math.inf,
    math.nan,
]
SEEDS = 3
SCHEMA = pa.schema([("a", pa.int64()), ("x", pa.float64()), ("f", pa.bool_())])


# The oracle


class Failed(Exception):
    pass


def wrapped(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def calculated(operator: str, left: Any, right: Any) -> Any:
    if isinstance(left, float) or isinstance(right, float):
        one, other = float(left), float(right)
        if operator in "/ // %" and other == 0:
            raise Failed
        if operator in ("//", "%") and not math.isfinite(one):
            return math.nan
        return {
            "+": lambda: one + other,
            "-": lambda: one - other,
            "*": lambda: one * other,
            "/": lambda: one / other,
            "//": lambda: one // other,
            "%": lambda: one % other,
        }[operator]()
    if operator in "/ // %" and right == 0:
        raise Failed
    if operator == "/":
        return float(left) / float(right)
    exact = {"+": left + right, "-": left - right, "*": left * right}
    return wrapped(
        exact[operator] if operator in exact else left // right if operator == "//" else left % right
    )


Tree = tuple[Any, ...]


def drawn(chance: random.Random, depth: int) -> Tree:
    """An expression of the first and the last version of each column, as a tree."""
    if depth == 0 or chance.random() < 0.15:
        if chance.random() < 0.2:
            return ("number", chance.choice([0, 1, 2, -3, 10**12, 0.5, -1.5]))
        return ("cell", chance.choice("axf"), chance.choice([0, -1]))
    kind = chance.choice(["binary"] * 6 + ["negative", "absolute", "power", "choice", "int", "float", "max"])
    parts = [drawn(chance, depth - 1) for _ in range({"binary": 2, "max": 2, "choice": 3}.get(kind, 1))]
    if kind == "binary":
        return (kind, chance.choice(["+", "-", "*", "/", "//", "%"]), *parts)
    return (kind, chance.randint(1, 4), *parts) if kind == "power" else (kind, *parts)


def text(tree: Tree) -> str:
    kind, *parts = tree
    if kind == "number":
        return repr(parts[0])
    if kind == "cell":
        return f"{parts[0]}[{parts[1]}]"
    if kind == "binary":
        return f"({text(parts[1])} {parts[0]} {text(parts[2])})"
    if kind == "power":
        return f"({text(parts[1])} ** {parts[0]})"
    if kind == "choice":
        return f"({text(parts[0])} if {text(parts[1])} > 0 else {text(parts[2])})"
    inner = ", ".join(map(text, parts))
    return f"(-{inner})" if kind == "negative" else f"{'abs' if kind == 'absolute' else kind}({inner})"


def value(tree: Tree, cells: dict[str, list[Any]]) -> Any:
    kind, *parts = tree
    if kind == "number":
        return parts[0]
    if kind == "cell":
        return cells[parts[0]][parts[1]]
    if kind == "choice":
        return value(parts[0] if value(parts[1], cells) > 0 else parts[2], cells)
    if kind == "binary":
        left, right = value(parts[1], cells), value(parts[2], cells)
        return calculated(parts[0], left, right)
    if kind == "power":
        base = value(parts[1], cells)
        result = calculated("*", base, 1)
        for _ in range(parts[0] - 1):
            result = calculated("*", result, base)
        return result
    given = [value(part, cells) for part in parts]
    if kind == "max":
        if any(isinstance(one, float) for one in given):
            given = [float(one) for one in given]
        return max(given)
    (one,) = given
    if kind == "negative":
        return -one if isinstance(one, float) else wrapped(-one)
    if kind == "absolute":
        return abs(one) if isinstance(one, float) else wrapped(abs(one))
    if kind == "float":
        return float(one)
    return whole(one)


def whole(one: Any) -> int:
    if isinstance(one, float) and not -(2.0**63) <= one < 2.0**63:
        raise Failed
    return int(one)


def expected(tree: Tree, cells: dict[str, list[Any]], returns: str) -> Any:
    try:
        result = value(tree, cells)
        return {"long": whole, "double": float, "boolean": lambda one: one != 0}[returns](result)
    except Failed:
        return "failed"


# What is compared


def bits(answer: Any) -> Any:
    """-0.0 is not 0.0 here, and NaN is NaN."""
    if isinstance(answer, float):
        return "nan" if math.isnan(answer) else struct.pack("d", answer)
    return answer


def answers(store: VersionedSlice, rule: FetchRule, count: int) -> list[Any]:
    """Key by key: one that fails would take the others with it."""
    found = []
    for key in range(count):
        try:
            (column,) = store.fetch(keys_of([key]), None, np.array([9]), rule)
            found.append(bits(column.to_pylist()[0]))
        except RuleFailed:
            found.append("failed")
    return found


def keys_of(keys: list[int]) -> Keys:
    return Keys.from_arrow(pa.array(keys, pa.int64()))


def filled(data: list[dict[str, list[Any]]], null: bool, **rules: Any) -> VersionedSlice:
    """A slice of those keys; with `null` another key of it has nulls."""
    store = VersionedSlice("i64", SCHEMA, Ruleset(SCHEMA, **rules))
    rows = [
        (key, time, *(cells[name][time] for name in "axf"))
        for key, cells in enumerate(data)
        for time in range(2)
    ]
    if null:
        rows.append((10**6, 0, None, None, None))
    columns = [pa.array([row[2 + n] for row in rows], field.type) for n, field in enumerate(SCHEMA)]
    store.insert(keys_of([row[0] for row in rows]), np.array([row[1] for row in rows]), columns)
    return store


def some_data(chance: random.Random, count: int) -> list[dict[str, list[Any]]]:
    return [
        {
            "a": [chance.choice(LONGS) for _ in range(2)],
            "x": [chance.choice(DOUBLES) for _ in range(2)],
            "f": [chance.random() < 0.5 for _ in range(2)],
        }
        for _ in range(count)
    ]


def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(userrules, "JIT_ENABLED", False)
    userrules._compiled.cache_clear()


@pytest.fixture(autouse=True)
def fresh() -> Any:
    userrules._compiled.cache_clear()
    yield
    userrules._compiled.cache_clear()


@pytest.mark.long
def test_a_fetch_rule_says_the_same_in_every_way() -> None:
    compiled = sum(
        agrees(seed, returns) for seed in range(SEEDS) for returns in ("long", "double", "boolean")
    )
    assert compiled >= SEEDS or not JIT_ENABLED, "else the comparison would say nothing"


def agrees(seed: int, returns: str) -> bool:
    """Whether the rule was compiled."""
    chance = random.Random(f"{seed} {returns}")
    tree = drawn(chance, 3)
    code = Code("rule", f"def rule(times, a, x, f):\n    return {text(tree)}")
    rule = FetchRule("custom", code, returns)
    data = some_data(chance, 60)
    right = [bits(expected(tree, cells, returns)) for cells in data]
    store = filled(data, null=False)
    assert answers(store, rule, 60) == right, (seed, text(tree))
    own = userrules.range_rule(code, SCHEMA, store.rules.layout, returned(rule))
    store = filled(data, null=True)
    assert answers(store, rule, 60) == right, (seed, text(tree), "with a null elsewhere")
    with pytest.MonkeyPatch.context() as patch:
        interpreted(patch)
        assert answers(store, rule, 60) == right, (seed, text(tree), "interpreted")
    userrules._compiled.cache_clear()
    return own.kernel is not None


def fold_text(tree: Tree) -> str:
    """The same expression of the fields of two rows."""
    written = text(tree)
    for name in "axf":
        written = written.replace(f"{name}[0]", f"old.{name}").replace(f"{name}[-1]", f"new.{name}")
    return written


def folded(trees: list[Tree], updates: list[tuple[Any, ...]]) -> tuple[list[Any], int]:
    """What an update rule makes of those updates, and how often it fails."""
    old, failures = updates[0], 0
    for new in updates[1:]:
        cells = {name: [old[n], new[n]] for n, name in enumerate("axf")}
        made = [
            expected(tree, cells, of) for tree, of in zip(trees, ("long", "double", "boolean"), strict=True)
        ]
        if "failed" in made:
            failures += 1
        else:
            old = tuple(made)
    return [bits(one) for one in old], failures


@pytest.mark.parametrize("seed", range(6))
def test_an_update_rule_says_the_same_in_every_way(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    chance = random.Random(seed)
    trees = [drawn(chance, 2) for _ in range(3)]
    source = f"def rule(old, new):\n    return {', '.join(map(fold_text, trees))}"
    update = UpdateRule("custom", Code("rule", source))
    data = [
        [(chance.choice(LONGS), chance.choice(DOUBLES), chance.random() < 0.5) for _ in range(5)]
        for _ in range(80)
    ]
    rows = [(key, time, *one) for key, updates in enumerate(data) for time, one in enumerate(updates)]
    columns = [pa.array([row[2 + n] for row in rows], field.type) for n, field in enumerate(SCHEMA)]
    right = [folded(trees, updates) for updates in data]
    for way in ("compiled where it can be", "interpreted"):
        if way == "interpreted":
            interpreted(monkeypatch)
        store = VersionedSlice("i64", SCHEMA, Ruleset(SCHEMA, update))
        store.insert(keys_of([row[0] for row in rows]), np.array([row[1] for row in rows]), columns)
        found = store.fetch(keys_of(list(range(80))), None, np.full(80, 9), FetchRule("latest"))
        lists = [column.to_pylist() for column in found]
        assert [[bits(one) for one in row] for row in zip(*lists, strict=True)] == [
            made for made, _ in right
        ], source
        assert store.rules.failures == sum(failures for _, failures in right), source


@pytest.mark.parametrize("seed", range(4))
def test_a_compaction_rule_says_the_same_in_every_way(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    chance = random.Random(seed)
    tree = drawn(chance, 2)
    source = f"def rule(times, a, x, f):\n    limit = {text(tree)}\n    return times < limit"
    compact = CompactRule("custom", Code("rule", source))
    data = some_data(chance, 60)
    for cells in data:
        cells["f"][0] = not cells["f"][1]
    right = []
    for cells in data:
        try:
            limit = value(tree, cells)
            right.append([time for time in range(2) if time < limit])
        except Failed:
            right.append([0, 1])
    for null in (False, True):
        for way in ("compiled where it can be", "interpreted"):
            with monkeypatch.context() as patch:
                if way == "interpreted":
                    interpreted(patch)
                store = filled(data, null, compact=compact)
                store.sweep(5, 10**6)
            found: list[list[int]] = [[] for _ in data]
            batch = store.export()
            for key, time in zip(batch["_key"].to_pylist(), batch["_time"].to_pylist(), strict=True):
                if key < len(data):
                    found[key].append(time)
            assert found == right, (source, way, null)
            store.validate()
        userrules._compiled.cache_clear()


# Functions

NUMBERS = [np.int64(one) for one in LONGS] + [np.float64(one) for one in DOUBLES] + [np.True_, np.False_]
OF_NUMBERS = [
    *(f"math.{name}(v)" for name in (arithmetic._CHECKED + " " + arithmetic._OVERFLOWING).split()),
    *("math.floor(v)", "math.ceil(v)", "math.isnan(v)", "math.isinf(v)", "math.isfinite(v)"),
    *("math.atan2(v, 2.0)", "math.copysign(v, -1.0)", "np.sqrt(v)", "np.abs(v)", "np.isnan(v)"),
    *(
        "np.maximum(v, 1)",
        "np.minimum(v, 0.5)",
        "np.float64(v)",
        "np.bool_(v)",
        "int(v)",
        "round(v)",
        "float(v)",
    ),
    *("bool(v)", "abs(v)", "-v", "+v", "not v", "max(v, 1, 0.5)", "min(1, v)", "v ** 3", "v // -1", "v % -3"),
    *(
        "v * v % v",
        "v + 1 > v",
        "-3 - v",
        "v - 1 < v",
        "v == 1",
        "v < 2.5",
        "v and 3",
        "v or True",
        "3 if v else 4",
        "len((v, v)) * 10**18 * 10",
        "~(v > 1)",
    ),
    *("2**64 + v", "-9223372036854775807 + v", "10**12 * v", "True + (v > 0)", "(v > 0) & (v < 5)"),
]
ARRAYS = [
    np.array(LONGS),
    np.array(DOUBLES),
    np.array(DOUBLES[:-3]),
    np.array([0.1] * 23),
    np.array([2**62] * 9),
    np.array([True, False, True]),
    np.array([7]),
    np.array([], np.float64),
]
OF_ARRAYS = [
    *(f"v.{name}()" for name in ("sum", "mean", "min", "max", "any", "all", "argmin", "argmax")),
    *("np.sum(v)", "np.mean(v)", "np.max(v)", "np.any(v)"),
    *(
        "v / 0",
        "v // 0",
        "v % 0",
        "v * 2",
        "v + v",
        "v - 1.5",
        "v > 1",
        "v[1:]",
        "v[-2:].copy()",
        "v[v > 0]",
        "v * v[0]",
    ),
    *("sum(v)", "min(v)", "max(v)", "len(v)", "v[5]", "v[-1]", "v.size", "v ** 2", "v[::-1]", "np.sqrt(v)"),
    *("sum([one for one in v if one > 0])", "np.zeros(len(v))", "np.ones_like(v)", "np.full(len(v), 3)"),
    *("np.zeros(len(v), dtype=np.bool_)", "np.isnan(v)", "np.minimum(v, 1)", "np.abs(v)", "v == v[0]"),
]


def both_ways(expression: str) -> list[Any]:
    code = Code("rule", f"def rule(v):\n    return {expression}", {}, {"np": "numpy", "math": "math"})
    rule, why = arithmetic.compiled(
        code, (), lambda one: numba.njit(one, boundscheck=True, error_model="python")
    )
    assert why == ""
    return [rule, arithmetic.interpreted(code)]


def outcome(rule: Any, argument: Any) -> Any:
    """As doubles where there is one: the column that takes a number makes a long and a double of one value the same."""
    try:
        with np.errstate(all="ignore"):
            answer = rule(argument.copy())
    except NumbaError:
        return "not compiled"
    except Exception:  # noqa: BLE001
        return "failed"
    return answer.tolist() if isinstance(answer, np.ndarray | np.generic) else answer


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) or isinstance(other, float):
        return "failed" not in (one, other) and bits(float(one)) == bits(float(other))
    return bool(one == other)


@pytest.mark.long
@pytest.mark.skipif(not JIT_ENABLED, reason="nothing is compiled")
@pytest.mark.parametrize("expression", OF_NUMBERS + OF_ARRAYS)
def test_functions_say_the_same(expression: str) -> None:
    compiled, plain = both_ways(expression)
    compared = 0
    for argument in NUMBERS if expression in OF_NUMBERS else ARRAYS:
        found = outcome(compiled, argument)
        compared += found != "not compiled"
        assert found == "not compiled" or same(found, outcome(plain, argument)), argument
    assert compared >= 5
