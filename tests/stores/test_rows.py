"""The content digest: blind to order and partition, sensitive to everything else."""

from __future__ import annotations

import decimal
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.kernels.partition import inverse, slice_places
from millpond.stores.keys import Keys
from millpond.stores.rows import digest_rows, restore

VALUES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "boolean": (pa.bool_(), [True, False, None]),
    "byte": (pa.int8(), [0, -1, None]),
    "long": (pa.int64(), [0, 1, -1, 2**63 - 1, None]),
    "float": (pa.float32(), [0.0, -0.0, 1.5, None]),
    "double": (pa.float64(), [0.0, -0.0, float("inf"), None]),
    "timestamp": (pa.timestamp("us"), [0, 1, None]),
    "date": (pa.date32(), [0, 1, None]),
    "string": (pa.string(), ["", "a", "a\0", None]),
    "binary": (pa.binary(), [b"", b"\0", b"\0\0", None]),
    "decimal": (pa.decimal128(10, 2), [decimal.Decimal("1.00"), decimal.Decimal("-1.00"), None]),
    "array": (pa.list_(pa.int32()), [[], [None], [0], [0, 0], [1, 2], [2, 1], None]),
    "nested": (pa.list_(pa.list_(pa.string())), [[["a"], []], [[], ["a"]], [["a", ""]], [[None]], None]),
    "struct": (
        pa.struct([("a", pa.int64()), ("b", pa.string())]),
        [{"a": 1, "b": ""}, {"a": None, "b": ""}, {"a": 1, "b": None}, {"a": None, "b": None}, None],
    ),
    "map": (pa.map_(pa.string(), pa.int64()), [[], [("a", 1)], [("a", None)], [("b", 1)], None]),
}


def digest_of(rows: list[tuple[int, int, Any]], type_: pa.DataType) -> int:
    keys = Keys.from_arrow(pa.array([row[0] for row in rows], pa.int64()))
    return digest_rows(
        keys, np.array([row[1] for row in rows], np.int64), [pa.array([r[2] for r in rows], type_)]
    )


@pytest.mark.parametrize("name", VALUES)
def test_different_values_have_different_digests(name: str) -> None:
    type_, values = VALUES[name]
    found = {digest_of([(1, 2, value)], type_) for value in values}
    assert len(found) == len(values)


@pytest.mark.parametrize("name", VALUES)
def test_order_partition_and_offsets_make_no_difference(name: str) -> None:
    type_, values = VALUES[name]
    rows = [(k, k % 5, values[k % len(values)]) for k in range(40)]
    whole = digest_of(rows, type_)
    shuffled = rows[:]
    random.Random(1).shuffle(shuffled)
    assert digest_of(shuffled, type_) == whole
    assert (digest_of(rows[:13], type_) + digest_of(rows[13:], type_)) % 2**64 == whole
    keys = Keys.from_arrow(pa.array([row[0] for row in rows]))
    times = np.array([row[1] for row in rows])
    column = pa.array([row[2] for row in rows], type_)
    parts = [(0, 7), (7, 8), (8, 8), (8, 40)]
    sliced = sum(digest_rows(keys.part(a, b), times[a:b], [column.slice(a, b - a)]) for a, b in parts)
    assert sliced % 2**64 == whole


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.one_of(st.none(), st.integers(0, 3))), max_size=6
    )
)
def test_equal_digests_mean_equal_bags_of_rows(rows: list[tuple[int, int, Any]]) -> None:
    whole = digest_of(rows, pa.int64())
    assert digest_of([], pa.int64()) == 0
    for i, (key, time, value) in enumerate(rows):
        for other in (
            (key + 1, time, value),
            (key, time + 1, value),
            (time + 9, key, value),
            (key, time, 99),
        ):
            assert digest_of([*rows[:i], other, *rows[i + 1 :]], pa.int64()) != whole
        assert digest_of([*rows, rows[i]], pa.int64()) != whole


def test_columns_do_not_commute() -> None:
    keys, times = Keys.from_arrow(pa.array(["k"])), np.array([0])
    one, two = pa.array([1]), pa.array([2])
    assert digest_rows(keys, times, [one, two]) != digest_rows(keys, times, [two, one])
    assert digest_rows(keys, times, [pa.array([None, 1]).slice(0, 1)]) != digest_rows(keys, times, [])


def test_what_lies_under_a_null_makes_no_difference() -> None:
    valid = pa.py_buffer(b"\1")
    keys, times = Keys.from_arrow(pa.array([1, 2])), np.array([0, 0])
    digests = set()
    for hidden in (0, 5):
        data = pa.py_buffer(np.array([7, hidden]))
        digests.add(digest_rows(keys, times, [pa.Array.from_buffers(pa.int64(), 2, [valid, data])]))
    assert len(digests) == 1


def test_the_digest_is_a_format() -> None:
    rows: list[tuple[int, int, Any]] = [(1, 10, "a"), (-5, 20, None), (2**63 - 1, -(2**63), "")]
    keys = Keys.from_arrow(pa.array([r[0] for r in rows]))
    times = np.array([r[1] for r in rows])
    columns = [
        pa.array([r[2] for r in rows], pa.string()),
        pa.array([[1.5], None, []], pa.list_(pa.float32())),
    ]
    assert digest_rows(keys, times, columns) == 8488082344007114218


@pytest.mark.parametrize("name", VALUES)
def test_answers_return_to_the_order_of_their_batch(name: str) -> None:
    type_, values = VALUES[name]
    rng = np.random.default_rng(3)
    column = pa.array([values[i] for i in rng.integers(0, len(values), 50)], type_)
    for whole in (column, column.drop_null()):
        ids = rng.integers(0, 7, len(whole)).astype(np.int32)
        places, starts = slice_places(ids, 7)
        order = np.argsort(ids, kind="stable")
        assert inverse(places).tolist() == order.tolist()
        moved = whole.take(pa.array(order))
        parts = [moved.slice(starts[s], starts[s + 1] - starts[s]) for s in range(7)]
        assert restore(parts, places).equals(whole)
