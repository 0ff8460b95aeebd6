"""The versioned store against a naive one, over every type, rule and kind of key."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_store import NaiveStore, comparable

from millpond.code.rules import FetchRule
from millpond.errors import BadMessage, BadOption, TotalOverflow, WrongType
from millpond.stores.keys import Keys
from millpond.stores.versioned import VersionedSlice, result_schema

LOWEST, HIGHEST = -(2**63), 2**63 - 1
RULES = ("latest", "values", "count", "total", "smallest", "largest")

LONG_KEYS = [LOWEST, -1, 0, 1, 2, HIGHEST]
BYTES_KEYS = [b"", b"\0", b"a", b"a\0", b"a\0b", "kéy".encode(), b"x" * 40, b"x" * 39 + b"y"]
TIMES = st.one_of(st.integers(-3, 12), st.sampled_from([LOWEST, LOWEST + 1, HIGHEST - 1, HIGHEST]))

TYPES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "boolean": (pa.bool_(), st.booleans()),
    "byte": (pa.int8(), st.integers(-128, 127)),
    "short": (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    "int": (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    "long": (pa.int64(), st.one_of(st.integers(-5, 5), st.sampled_from([LOWEST, HIGHEST]))),
    "float": (pa.float32(), st.floats(width=32)),
    "double": (pa.float64(), st.floats()),
    "date": (pa.date32(), st.dates()),
    "timestamp": (
        pa.timestamp("us", tz="UTC"),
        st.datetimes(min_value=datetime.datetime(1, 1, 2), max_value=datetime.datetime(9999, 12, 30)).map(
            lambda t: t.replace(tzinfo=datetime.UTC)
        ),
    ),
    "string": (pa.string(), st.text(max_size=12)),
    "binary": (pa.binary(), st.binary(max_size=40)),
    "decimal": (
        pa.decimal128(20, 3),
        st.decimals(min_value=-(10**9), max_value=10**9, places=3).map(
            lambda d: d.quantize(decimal.Decimal("0.001"))
        ),
    ),
    "array": (
        pa.list_(pa.float32()),
        st.lists(st.one_of(st.none(), st.floats(width=32, allow_nan=False)), max_size=3),
    ),
    "struct": (
        pa.struct([("a", pa.int64()), ("b", pa.string())]),
        st.fixed_dictionaries({"a": st.one_of(st.none(), st.integers(-5, 5)), "b": st.text(max_size=3)}),
    ),
    "map": (
        pa.map_(pa.string(), pa.int64()),
        st.dictionaries(st.text(max_size=2), st.integers(0, 5), max_size=3).map(lambda d: list(d.items())),
    ),
}
ADDABLE = {"byte", "short", "int", "long", "float", "double"}
UNORDERED = {"array", "struct", "map"}


def fits(rule: str, names: list[str]) -> bool:
    if rule == "total":
        return set(names) <= ADDABLE
    return rule in {"latest", "values", "count"} or not set(names) & UNORDERED


def keys_of(keys: list[Any], kind: str) -> Keys:
    return Keys.from_arrow(pa.array(keys, pa.int64() if kind == "i64" else pa.binary()))


def schema_of(names: list[str]) -> pa.Schema:
    return pa.schema([pa.field(f"c{i}", TYPES[name][0]) for i, name in enumerate(names)])


def exported(store: VersionedSlice) -> dict[Any, list[Any]]:
    batch = store.export()
    batch.validate(full=True)
    found: dict[Any, list[Any]] = {}
    columns = [column.to_pylist() for column in batch.columns]
    last = object()
    for key, time, *row in zip(*columns, strict=True):
        assert key == last or key not in found, "grouped by key"
        last = key
        found.setdefault(key, []).append((time, tuple(row)))
    return found


class Pair:
    """A store and its naive twin, always given the same."""

    def __init__(self, kind: str, names: list[str]) -> None:
        self.kind, self.names = kind, names
        self.schema = schema_of(names)
        self.store = VersionedSlice(kind, self.schema)
        self.naive = NaiveStore(len(names))
        self.keep_from = LOWEST

    def insert(self, rows: list[tuple[Any, ...]], *, touch: bool = False, padding: int = 0) -> None:
        """`padding` puts rows before and after, so that Arrow arrays have an offset."""
        padded = rows[:1] * padding + rows + rows[:1] * padding
        start, stop = (padding, padding + len(rows)) if rows else (0, 0)
        keys = [row[0] for row in rows]
        columns = [
            pa.array([row[2 + c] for row in padded], field.type).slice(start, stop - start)
            for c, field in enumerate(self.schema)
        ]
        all_keys = pa.array([row[0] for row in padded], pa.int64() if self.kind == "i64" else pa.binary())
        times = np.array([row[1] for row in padded], np.int64)[start:stop]
        self.store.insert(
            Keys.from_arrow(all_keys.slice(start, stop - start)),
            times,
            columns,
            keep_from=self.keep_from if touch else None,
        )
        lists = [column.to_pylist() for column in columns]
        values = [tuple(column[i] for column in lists) for i in range(len(rows))]
        self.naive.insert(keys, times.tolist(), values)

    def compare(self, probes: Sequence[tuple[Any, int | None, int]], rule: str) -> None:
        keys = [probe[0] for probe in probes]
        hi = np.array([probe[2] for probe in probes], np.int64)
        bounded = [probe[1] for probe in probes]
        lo = None if None in bounded or not bounded else np.array(bounded, np.int64)
        wanted = [self.naive.fetch(k, None if lo is None else lo_, h, rule) for k, lo_, h in probes]
        if rule == "total" and any(
            isinstance(v, int) and not LOWEST <= v <= HIGHEST for row in wanted for v in row
        ):
            with pytest.raises(TotalOverflow):
                self.store.fetch(keys_of(keys, self.kind), lo, hi, FetchRule(rule))
            return
        found = self.store.fetch(keys_of(keys, self.kind), lo, hi, FetchRule(rule))
        schema = result_schema(self.schema, FetchRule(rule))
        assert [array.type for array in found] == schema.types
        for array in found:
            array.validate(full=True)
            assert len(array) == len(probes)
        for c, array in enumerate(found):
            assert comparable(array.to_pylist()) == comparable([row[c] for row in wanted])

    def finish(self) -> None:
        """After a whole sweep the store holds exactly what the compaction rule keeps."""
        self.store.validate()
        self.store.sweep(self.keep_from, 10**9)
        if self.keep_from > LOWEST:
            self.naive.compact(self.keep_from)
        self.store.validate()
        wanted = comparable(self.naive.export())
        assert comparable(exported(self.store)) == wanted
        copy = VersionedSlice(self.kind, self.schema)
        copy.load(self.store.export())
        copy.validate()
        assert comparable(exported(copy)) == wanted
        assert (copy.keys, copy.versions) == (self.store.keys, self.store.versions)


def batches(kind: str, names: list[str]) -> st.SearchStrategy[list[list[tuple[Any, ...]]]]:
    keys = st.sampled_from(LONG_KEYS if kind == "i64" else BYTES_KEYS)
    values = [st.one_of(st.none(), TYPES[name][1]) for name in names]
    return st.lists(st.lists(st.tuples(keys, TIMES, *values), max_size=12), max_size=4)


def every_key(kind: str) -> list[Any]:
    """And one that nobody writes."""
    return [*LONG_KEYS, 77] if kind == "i64" else [*BYTES_KEYS, b"unknown"]


def every_range(kind: str, times: tuple[int, ...]) -> list[tuple[Any, int, int]]:
    return [(key, lo, hi) for key in every_key(kind) for lo in times for hi in times]


def every_time(kind: str, times: tuple[int, ...]) -> list[tuple[Any, None, int]]:
    return [(key, None, hi) for key in every_key(kind) for hi in times]


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("kind", ["i64", "bytes"])
@settings(max_examples=20)
@given(data=st.data())
def test_every_type_under_every_rule(kind: str, name: str, data: st.DataObject) -> None:
    pair = Pair(kind, [name])
    for batch in data.draw(batches(kind, [name])):
        pair.insert(batch, padding=data.draw(st.integers(0, 3)))
    times = (LOWEST, -2, 0, 5, 12, HIGHEST)
    for rule in RULES:
        if fits(rule, [name]):
            pair.compare(every_range(kind, times), rule)
            pair.compare(every_time(kind, times), rule)
        else:
            with pytest.raises(WrongType):
                result_schema(pair.schema, FetchRule(rule))
            with pytest.raises(WrongType):
                pair.store.fetch(keys_of([], kind), None, np.empty(0, np.int64), FetchRule(rule))
    pair.finish()


@pytest.mark.parametrize("kind", ["i64", "bytes"])
@settings(max_examples=60)
@given(data=st.data())
def test_several_columns_with_compaction(kind: str, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(TYPES)), max_size=4))
    pair = Pair(kind, names)
    for batch in data.draw(batches(kind, names)):
        pair.insert(batch, touch=data.draw(st.booleans()))
        pair.keep_from = max(pair.keep_from, data.draw(TIMES))
        done = pair.store.sweep(pair.keep_from, data.draw(st.integers(0, 4)))
        if done and pair.keep_from > LOWEST:
            pair.naive.compact(pair.keep_from)
            assert comparable(exported(pair.store)) == comparable(pair.naive.export())
        pair.store.validate()
        # Below F nothing is promised; from F on everything is.
        above = tuple(t for t in (-2, 0, 5, 12, HIGHEST) if t >= pair.keep_from)
        pair.compare(every_time(kind, above), "latest")
        for rule in ("values", "count"):
            pair.compare(every_range(kind, above), rule)
    pair.finish()


@pytest.mark.parametrize("kind", ["i64", "bytes"])
@settings(max_examples=40)
@given(data=st.data())
def test_latest_of_all_keys(kind: str, data: st.DataObject) -> None:
    pair = Pair(kind, ["long", "string"])
    for batch in data.draw(batches(kind, ["long", "string"])):
        pair.insert(batch)
    for hi in (LOWEST, 0, 5, HIGHEST, None):
        batch = pair.store.latest(hi)
        batch.validate(full=True)
        limit = HIGHEST if hi is None else hi
        wanted = {
            key: [(time, row) for time, row in versions if time <= limit][-1]
            for key, versions in pair.naive.entries.items()
            if versions[0][0] <= limit
        }
        columns = [column.to_pylist() for column in batch.columns]
        assert {key: (time, tuple(row)) for key, time, *row in zip(*columns, strict=True)} == wanted
    pair.finish()


@pytest.mark.parametrize("kind", ["i64", "bytes"])
@pytest.mark.parametrize("seed", range(3))
def test_many_random_batches_across_growth(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pair = Pair(kind, ["long", "string"])

    def key(number: int) -> Any:
        return number * 7919 - 10**6 if kind == "i64" else f"key {number}".encode()

    for step in range(30):
        rows = [
            (key(int(k)), int(t), int(v), None if v % 7 == 0 else f"value {v}")
            for k, t, v in zip(
                rng.integers(0, 40 * (step + 1), 200),
                rng.integers(0, 60, 200) + 4 * step,
                rng.integers(-(10**12), 10**12, 200),
                strict=True,
            )
        ]
        pair.insert(rows, touch=bool(seed))
        pair.store.validate()
        probes = [
            (key(int(k)), int(hi) - 20, int(hi))
            for k, hi in zip(rng.integers(0, 1300, 80), rng.integers(0, 200, 80), strict=True)
        ]
        ready = [p for p in probes if p[1] >= pair.keep_from]
        for rule in ("latest", "values", "count"):
            pair.compare(ready, rule)
        if seed:
            pair.keep_from = max(pair.keep_from, 4 * step - 10)
            pair.store.sweep(pair.keep_from, 25 if seed == 1 else 10**6)
    pair.finish()


def test_a_frozen_copy_keeps_what_it_was_taken_with() -> None:
    pair = Pair("bytes", ["long", "string", "array"])
    rng = np.random.default_rng(5)

    def rows(count: int) -> list[tuple[Any, ...]]:
        return [
            (b"k%d" % rng.integers(0, 50), int(rng.integers(0, 99)), int(i), f"s{i}", [float(i)])
            for i in range(count)
        ]

    pair.insert(rows(300))
    copy = pair.store.copy()
    before = exported(copy)
    assert before == exported(pair.store)
    for _ in range(10):
        pair.insert(rows(300))
        pair.store.sweep(50, 10**6)
    assert exported(copy) == before
    assert exported(copy) != exported(pair.store)
    copy.validate()
    probe = keys_of([b"k1"], "bytes")
    assert copy.fetch(probe, None, np.array([99]), FetchRule("count"))[0].to_pylist() == [len(before[b"k1"])]
    with pytest.raises(RuntimeError):
        copy.insert(
            probe, np.array([1]), [pa.array([1]), pa.array(["x"]), pa.array([[1.0]], pa.list_(pa.float32()))]
        )
    pair.keep_from = 50
    pair.finish()


def test_a_total_may_pass_the_limit_on_its_way() -> None:
    pair = Pair("i64", ["long"])
    pair.insert([(1, 1, HIGHEST), (1, 2, 1), (1, 3, -5), (2, 1, LOWEST), (2, 2, -1)])
    assert pair.store.fetch(keys_of([1], "i64"), None, np.array([3]), FetchRule("total"))[0].to_pylist() == [
        HIGHEST - 4
    ]
    with pytest.raises(TotalOverflow) as caught:
        pair.store.fetch(keys_of([1, 1, 2], "i64"), None, np.array([2, 3, 2]), FetchRule("total"))
    assert caught.value.rows == 2
    pair.finish()


def test_nan_is_above_all_numbers() -> None:
    pair = Pair("i64", ["double"])
    nan, inf = float("nan"), float("inf")
    pair.insert([(1, 1, nan), (1, 2, inf), (1, 3, -inf), (2, 1, nan), (3, 1, None)])
    for rule in ("smallest", "largest", "total"):
        pair.compare([(1, 0, 2), (1, 0, 3), (2, 0, 3), (3, 0, 3), (1, 1, 3)], rule)
    pair.finish()


def test_more_columns_than_the_null_mask_holds() -> None:
    names = ["long", "double"] * 35 + ["string"]
    pair = Pair("i64", names)
    row = [None if i % 3 == 0 else (i if i % 2 == 0 else i / 2) for i in range(70)]
    pair.insert([(1, 1, *row, "a"), (1, 2, *reversed(range(70)), "b")])
    pair.compare([(1, 0, 1), (1, 0, 2)], "latest")
    pair.finish()


def test_a_state_without_value_columns() -> None:
    pair = Pair("i64", [])
    pair.insert([(1, 1), (1, 2), (2, 5)])
    pair.compare([(1, 0, 9), (2, 0, 4), (3, 0, 9)], "count")
    assert pair.store.fetch(keys_of([1], "i64"), None, np.array([9]), FetchRule("latest")) == []


def test_timestamps_beyond_what_python_can_say() -> None:
    type_ = pa.timestamp("us", tz="UTC")
    store = VersionedSlice("i64", pa.schema([("at", type_)]))
    values = pa.array([LOWEST, HIGHEST]).cast(type_)
    keys = keys_of([1, 2], "i64")
    store.insert(keys, np.array([0, 0]), [values])
    (found,) = store.fetch(keys, None, np.array([0, 0]), FetchRule("latest"))
    assert found.type == type_
    assert found.cast(pa.int64()).to_pylist() == [LOWEST, HIGHEST]
    store.validate()


def test_read_only_strided_and_unaligned_input() -> None:
    store = VersionedSlice("i64", pa.schema([("v", pa.int64())]))
    times = np.arange(20)[::2]
    times.flags.writeable = False
    shifted = pa.py_buffer(b"\1" + np.arange(10, dtype=np.int64).tobytes()).slice(1)
    values = pa.Array.from_buffers(pa.int64(), 10, [None, shifted])
    store.insert(Keys.from_arrow(values), times, [values])
    (found,) = store.fetch(Keys.from_arrow(values), None, times, FetchRule("latest"))
    assert found.to_pylist() == list(range(10))
    store.validate()


def test_bad_arguments_change_nothing() -> None:
    pair = Pair("i64", ["long", "string"])
    pair.insert([(1, 1, 5, "a")])
    one = keys_of([1], "i64")
    offsets = pa.py_buffer(np.array([0, 9, 3], np.int32))
    malformed = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"abc")])
    cases = [
        (WrongType, one, [2], [pa.array([1], pa.int32()), pa.array(["x"])]),
        (WrongType, one, [2], [pa.array([1])]),
        (WrongType, one, [2], [pa.array([1, 2]), pa.array(["x", "y"])]),
        (BadMessage, one, [2], [pa.array([1]), malformed.slice(0, 1)]),
        (BadMessage, one, [2, 3], [pa.array([1]), pa.array(["x"])]),
        (BadMessage, keys_of([b"1"], "bytes"), [2], [pa.array([1]), pa.array(["x"])]),
    ]
    for error, keys, times, values in cases:
        with pytest.raises(error):
            pair.store.insert(keys, np.array(times), values)
    with pytest.raises(BadOption):
        pair.store.fetch(one, None, np.array([1]), FetchRule("newest"))
    with pytest.raises(BadOption):
        result_schema(pair.schema, FetchRule("newest"))
    with pytest.raises(RuntimeError):
        pair.store.load(pair.store.export())
    with pytest.raises(BadMessage):
        VersionedSlice("i64", pair.schema).load(pair.store.export().select(["_key", "_time"]))
    pair.finish()


def test_a_sweep_under_way_comes_round_to_every_entry_when_keys_come_in() -> None:
    store = VersionedSlice("i64", pa.schema([("v", pa.int64())]))

    def insert(keys: list[int], times: list[int]) -> None:
        store.insert(keys_of(keys, "i64"), np.array(times), [pa.array(times)])

    insert([1, 2], [0, 0])
    store.sweep(1, 1)
    insert([1], [LOWEST])
    store.sweep(1, 0)
    insert([3], [1])
    while not store.sweep(1, 2):
        pass
    assert store.versions == 3


@pytest.mark.parametrize("distinct", [3, 4_000, 20_000])
def test_values_are_the_same_whether_they_repeat_or_not(distinct: int) -> None:
    """Many rows in several batches: kept once each, or from some batch on each for itself."""
    store = VersionedSlice("i64", pa.schema([("v", pa.string())]))
    chance = np.random.default_rng(distinct)
    batches = [chance.integers(0, distinct, 7_000).tolist() for _ in range(4)]
    texts = [[None if n % 11 == 0 else f"value {n}" for n in batch] for batch in batches]
    keys = keys_of(list(range(7_000)), "i64")
    frozen = []
    for number, batch in enumerate(texts):
        store.insert(keys, np.full(7_000, number), [pa.array(batch, pa.string())])
        frozen.append(store.copy())
    for number, batch in enumerate(texts):
        asked = np.full(7_000, number)
        for copy in (store, *frozen[number:]):
            assert copy.fetch(keys, None, asked, FetchRule("latest"))[0].to_pylist() == batch
