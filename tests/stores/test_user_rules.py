"""A user's own rules in a slice: nulls, errors of the machine, what is no answer, and the trial of updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millpond.code.capture import Code
from millpond.code.rules import CompactRule, FetchRule, UpdateRule, add, ttl
from millpond.durable.crashpoints import SimulatedCrash
from millpond.errors import RuleFailed
from millpond.stores import userrules
from millpond.stores.keys import Keys
from millpond.stores.versioned import Ruleset, VersionedSlice

LONG, DOUBLE, TEXT = pa.int64(), pa.float64(), pa.string()
MACHINE = [MemoryError, RecursionError, KeyboardInterrupt, SimulatedCrash]


def code(body: str, arguments: str = "times, v") -> Code:
    return Code("rule", f"def rule({arguments}):\n    {body}", {}, {"np": "numpy", "math": "math"})


def slice_of(
    type_: pa.DataType = LONG, update: UpdateRule | None = None, compact: CompactRule | None = None
) -> VersionedSlice:
    schema = pa.schema([("v", type_)])
    return VersionedSlice("i64", schema, Ruleset(schema, update, compact))


def insert(
    store: VersionedSlice, rows: list[tuple[int, int, Any]], how: str = "insert", **options: Any
) -> None:
    keys, times, values = zip(*rows, strict=True)
    columns = [pa.array(values, store.schema.field(0).type)]
    getattr(store, how)(Keys.from_arrow(pa.array(keys)), np.array(times), columns, **options)


def fetch(store: VersionedSlice, keys: list[int], body: str, returns: str) -> list[Any]:
    rule = FetchRule("custom", code(body), returns)
    found: list[Any] = store.fetch(Keys.from_arrow(pa.array(keys)), None, np.full(len(keys), 99), rule)[
        0
    ].to_pylist()
    return found


def custom(body: str) -> UpdateRule:
    return UpdateRule("custom", code(body, "old, new"))


# What other keys hold


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return v[0] // 0", RuleFailed),
        ("return len(v) * 10**18 * 10", -8446744073709551616),
        ("return times[0] * 10**12", 10**12),
    ],
)
def test_an_answer_does_not_depend_on_nulls_elsewhere(body: str, expected: Any) -> None:
    store = slice_of()
    insert(store, [(1, 1, 5)])
    for _ in range(2):
        if expected is RuleFailed:
            with pytest.raises(RuleFailed, match="ZeroDivisionError"):
                fetch(store, [1], body, "long")
        else:
            assert fetch(store, [1], body, "long") == [expected]
        insert(store, [(2, 1, None)])


def test_a_list_is_seen_only_where_the_range_has_a_null() -> None:
    store = slice_of()
    insert(store, [(1, 1, 5), (1, 2, 6), (2, 1, None), (2, 2, 7)])
    body = "return str([type(v).__name__, type(v[-1]).__name__, type(times[0]).__name__])"
    seen = [str([kind, "int64", "int64"]) for kind in ("ndarray", "list")]
    assert fetch(store, [1, 2], body, "string") == seen


def test_ranges_with_and_without_nulls_in_one_batch() -> None:
    store = slice_of()
    insert(store, [(1, 1, 5), (2, 1, None), (2, 2, 7), (3, 1, 8)])
    body = "return max([one for one in v if one is not None])"
    assert fetch(store, [3, 2, 9, 1], body, "long") == [8, 7, None, 5]


def test_a_failure_on_one_key_does_not_keep_the_others_from_compaction() -> None:
    for body in ("return times * (6 // v[0]) < 0", "return np.array([6 // one for one in v]) < 0"):
        store = slice_of(compact=CompactRule("custom", code(body)))
        insert(store, [(1, 1, 2), (2, 1, 0), (3, 1, 3)])
        store.sweep(5, 100)
        assert store.export()["_key"].to_pylist() == [2]
        assert store.rules.failures == 1


# The machine


def failing(monkeypatch: pytest.MonkeyPatch, error: type[BaseException], compiled: bool) -> None:
    """From now on rules fail with that error, as kernels or as Python."""

    def fail(*_: Any) -> Any:
        raise error("out of it")

    rule = userrules.UserRule(fail, fail if compiled else None, "")
    monkeypatch.setattr(userrules, "_compiled", lambda *_: rule)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("error", MACHINE)
def test_errors_of_the_machine_are_no_failures_of_a_rule(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], compiled: bool
) -> None:
    failing(monkeypatch, error, compiled)
    rows = [(1, 1, 5), (1, 2, 6)]
    folds = slice_of(update=custom("return old + new"))
    for how in ("trial", "insert"):
        with pytest.raises(error):
            insert(folds, rows, how)
    keeps = slice_of(compact=CompactRule("custom", code("return times > 0")))
    insert(keeps, rows)
    with pytest.raises(error):
        fetch(keeps, [1], "return v[0]", "long")
    with pytest.raises(error):
        keeps.sweep(5, 10)
    assert folds.rules.failures == keeps.rules.failures == 0


def test_memory_that_runs_out_in_compiled_code() -> None:
    store = slice_of(update=custom("return old + np.zeros(new)[0]"))
    with pytest.raises(MemoryError):
        insert(store, [(1, 1, 5), (1, 2, 2**59)], "trial")
    assert store.versions == 0


def test_a_rule_that_calls_itself_fails_as_python_does() -> None:
    store = slice_of()
    insert(store, [(1, 1, 5)])
    with pytest.raises(RecursionError):
        fetch(store, [1], "return rule(times, v) + 1 if len(v) else 0", "long")


# What is no answer


@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize(
    ("body", "returns", "expected"),
    [
        ("return v[0] * math.inf", "double", float("inf")),
        ("return v[0] * math.inf", "long", RuleFailed),
        ("return v[0] * math.nan", "long", RuleFailed),
        ("return v[0] * 1e300", "long", RuleFailed),
        ("return v[0] * 0.7", "long", 3),
        ("return v[0]", "boolean", True),
        ("return v > 0", "long", RuleFailed),
        ("return None", "long", None),
        ("return 'a'", "double", RuleFailed),
        ("print('hello'); return v[0]", "long", 5),
        ("if v[0] > 99: y = 1\n    return y", "long", RuleFailed),
        ("return math.sqrt(-v[0])", "double", RuleFailed),
        ("return 2**62", "int", RuleFailed),
        ("v[0] = 1e300\n    return v[0]", "long", RuleFailed),
        ("v += 0.5\n    return v[0]", "long", RuleFailed),
        ("v[0] += 3\n    v *= 2\n    return v[0]", "long", 16),
        ("return 1 if (v[0] > 1) is True else 2", "long", 2),
        ("return v[0] if v[0] is not None else 2", "long", 5),
        ("return max(10000000000000000000, v[0])", "long", RuleFailed),
        ("x = v[0] + 2**53 if len(v) else 0.5\n    return x + 1 - 2**53", "long", 6),
    ],
)
def test_strange_answers(
    monkeypatch: pytest.MonkeyPatch, body: str, returns: str, expected: Any, interpreted: bool
) -> None:
    if interpreted:
        monkeypatch.setattr(userrules, "JIT_ENABLED", False)
    userrules._compiled.cache_clear()
    store = slice_of()
    insert(store, [(1, 1, 5)])
    if expected is RuleFailed:
        with pytest.raises(RuleFailed):
            fetch(store, [1], body, returns)
    else:
        assert fetch(store, [1], body, returns) == [expected]
    userrules._compiled.cache_clear()


@pytest.mark.parametrize(
    ("type_", "body"),
    [
        (LONG, "return None"),
        (LONG, "return new * math.nan"),
        (LONG, "return new * 1e300"),
        (LONG, "return 'a'"),
        (LONG, "return old, new"),
        (LONG, "return np.zeros(2)"),
        (pa.int8(), "return old + 125"),
        (TEXT, "return 5"),
        (TEXT, "return None"),
    ],
)
@pytest.mark.parametrize("interpreted", [False, True])
def test_what_an_update_rule_cannot_give_is_counted(
    monkeypatch: pytest.MonkeyPatch, type_: pa.DataType, body: str, interpreted: bool
) -> None:
    if interpreted:
        monkeypatch.setattr(userrules, "JIT_ENABLED", False)
    userrules._compiled.cache_clear()
    store = slice_of(type_, custom(body))
    first = "x" if type_ == TEXT else 7
    insert(store, [(1, 1, first), (1, 2, first)])
    assert store.latest(None)["v"].to_pylist() == [first]
    assert store.rules.failures == 1
    userrules._compiled.cache_clear()


@pytest.mark.parametrize(
    "body", ["return True", "return times[:1] < 0", "return [None] * len(v)", "return 'ab'", "return None"]
)
def test_what_is_no_mask_keeps_all(body: str) -> None:
    store = slice_of(compact=CompactRule("custom", code(body)))
    insert(store, [(1, 1, 2), (1, 2, 0)])
    store.sweep(5, 100)
    assert (store.versions, store.rules.failures) == (2, 1)


# Trial


def exported(store: VersionedSlice) -> list[Any]:
    rows: list[Any] = store.export().to_pylist()
    return rows


TRIALS: dict[str, tuple[pa.DataType, str, Callable[[Any], Any]]] = {
    "compiled": (LONG, "return old * 3 + 12 // new", int),
    "interpreted": (LONG, "return {'a': old * 3}['a'] + 12 // new", int),
    "strings": (TEXT, "return old + new if int(new) else [][0]", str),
}


@pytest.mark.parametrize("case", TRIALS)
@pytest.mark.parametrize("span", [0, 4])
@pytest.mark.parametrize("seed", range(3))
def test_a_trial_sees_what_insert_then_gives_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, case: str, span: int, seed: int
) -> None:
    type_, body, value = TRIALS[case]
    store = slice_of(type_, custom(body), ttl(span) if span else None)
    chance = np.random.default_rng(seed)
    seen: list[VersionedSlice] = []
    sound = VersionedSlice._part

    def part(self: VersionedSlice, *given: Any) -> VersionedSlice:
        seen.append(sound(self, *given))
        return seen[-1]

    monkeypatch.setattr(VersionedSlice, "_part", part)
    for step in range(6):
        rows = [
            (int(key), int(time), value(int(one)))
            for key, time, one in zip(
                chance.integers(0, 9, 12),
                chance.integers(0, 9, 12) + 3 * step,
                chance.integers(0, 4, 12),
                strict=True,
            )
        ]
        keep_from = 3 * step if step > 2 else None
        before, failures = exported(store), store.rules.failures
        insert(store, rows, "trial", keep_from=keep_from)
        assert exported(store) == before
        assert store.rules.failures == failures
        scratch = seen[-1]
        scratch.validate()
        insert(store, rows, keep_from=keep_from)
        store.validate()
        assert store.rules.failures - failures == scratch.rules.failures - failures
        touched = {row[0] for row in rows}
        every = Keys.from_arrow(pa.array(sorted(touched)))
        for at in range(3 * step, 3 * step + 9):
            asked = np.full(len(touched), at)
            one, other = (part.fetch(every, None, asked, FetchRule("latest")) for part in (store, scratch))
            assert one == other
        store.sweep(keep_from or 0, 100)
    assert store.rules.failures > 0


def test_other_rules_have_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VersionedSlice, "_part", None)
    for update in (None, add()):
        store = slice_of(update=update)
        insert(store, [(1, 1, 5)], "trial")
        assert store.versions == 0


def test_a_slice_made_anew_runs_no_rule() -> None:
    store = slice_of(update=custom("return old + 12 // new"), compact=ttl(10))
    insert(store, [(key, 1, 5) for key in range(2000)] + [(1, 90, 7), (1, 91, 0), (1, 92, 6), (2, 93, 3)])
    before = store.rules.failures
    while not store.sweep(95, 500):
        pass
    store.validate()
    assert store.keys < 2000
    assert store.latest(95)["v"].to_pylist() == [9, 3]
    assert store.rules.failures == before == 1
