"""Calls as columns: values come back as they went, what is of another type is refused, and so is what no peer sends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_graphs import recommender

from millpond.container.holdings.base import Means
from millpond.container.holdings.program_code import method_of
from millpond.container.holdings.program_run import EpochCalls
from millpond.errors import BadMessage
from millpond.programs.call_columns import column_of, column_type, is_sound, values_of
from millpond.programs.calls import Heads, Place, by_place, calls_of, calls_schema
from millpond.programs.elements import DenseMatrix, Matrix, Vector
from millpond.programs.entries import field_specs
from millpond.programs.packing import pack, unpack
from millpond.wire.programs import ProgramSpec, ProgramWork

longs = st.integers(-(1 << 63), (1 << 63) - 1)
doubles = st.floats(width=64)
OF_KIND: dict[str, st.SearchStrategy[Any]] = {
    "long": longs,
    "double": doubles,
    "boolean": st.booleans(),
    "string": st.text(max_size=3),
    "array<long>": st.lists(longs, max_size=3),
    "array<double>": st.lists(doubles | st.none(), max_size=3),
    "array<boolean>": st.lists(st.booleans(), max_size=3),
    "array<string>": st.lists(st.text(max_size=2), max_size=3),
    "vector": st.dictionaries(longs, doubles, max_size=3).map(Vector),
    "matrix": st.dictionaries(st.tuples(longs, longs), doubles, max_size=3).map(Matrix),
    "dense": st.dictionaries(longs, st.lists(doubles, max_size=2), max_size=2).map(DenseMatrix),
    "collection<vector>": st.lists(st.dictionaries(longs, doubles, max_size=2).map(Vector), max_size=2),
}


@pytest.mark.parametrize("kind", OF_KIND)
@settings(max_examples=15, derandomize=True, database=None, deadline=None)
@given(data=st.data())
def test_values_come_back_as_they_went(kind: str, data: st.DataObject) -> None:
    values = data.draw(st.lists(OF_KIND[kind] | st.none(), max_size=5))
    column = column_of(values, kind)
    assert column.type == column_type(kind)
    assert is_sound(column, kind)
    alike = [unpack(pack([value], [kind]), [kind])[0] for value in values]
    assert repr(values_of(column, kind)) == repr(alike)
    first = len(values) // 2
    assert repr(values_of(column.slice(first), kind)) == repr(alike[first:])


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("long", True),
        ("long", 1.5),
        ("long", 1 << 63),
        ("double", "1"),
        ("double", False),
        ("boolean", 1),
        ("string", 1),
        ("string", "\ud800"),
        ("array<long>", [1, True]),
        ("array<long>", 3),
        ("array<double>", [1.0, "x"]),
        ("vector", [1.0]),
        ("matrix", Vector()),
    ],
)
def test_what_is_of_another_type_fails_as_where_it_is_packed(kind: str, wrong: Any) -> None:
    with pytest.raises((TypeError, OverflowError, ValueError)) as packed:
        pack([wrong], [kind])
    with pytest.raises(packed.type) as found:
        column_of([None, wrong], kind)
    assert str(found.value) == str(packed.value)


def test_numbers_become_those_of_their_type() -> None:
    assert values_of(column_of([1, 2.5], "double"), "double") == [1.0, 2.5]
    assert values_of(column_of([np.int64(3)], "long"), "long") == [3]
    assert values_of(column_of([(1, 2)], "array<long>"), "array<long>") == [[1, 2]]


def test_vectors_out_of_order_are_told() -> None:
    def column(keys: list[int], offsets: list[int]) -> pa.Array:
        items = pa.array([1.0] * len(keys))
        return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(keys, pa.int64()), items)

    assert is_sound(column([3, 7, 1, 2], [0, 2, 4]), "vector")
    assert is_sound(column([3, 1], [0, 1, 1, 2]), "vector")
    assert not is_sound(column([3, 7, 2, 2], [0, 2, 4]), "vector")
    assert not is_sound(column([3, 7, 1], [0, 1, 3]), "vector")
    assert is_sound(column([9, 7, 3, 7], [0, 2, 4]).slice(1), "vector")


def head(rows: list[int], task: int, at: list[int], entry: int = 0) -> Heads:
    numbers = [np.full(len(rows), each, np.int32) for each in (entry, task, 0)]
    return Heads(np.array(rows, np.int64), *numbers, np.array(at, np.int32))


def test_calls_run_by_place_and_row() -> None:
    lanes = np.array([1, 1, 0, 0], np.int32)
    found = by_place(head([5, 3, 9, 3], 1, [1, 1, 0, 0]), np.array([2, 2, 0, 0], np.int32), lanes, 2)
    assert {place: order.tolist() for place, order in found.items()} == {
        Place(0, 0): [3, 2],  # type: ignore[arg-type] # a number
        Place(2, 1): [1, 0],  # type: ignore[arg-type] # the same
    }


@pytest.fixture
def calls() -> EpochCalls:
    """An epoch of `get_rec`, in a container without slices."""
    import msgspec

    graph = recommender()
    work = ProgramWork(msgspec.msgpack.encode(graph), "get_rec", {}, b"")
    spec = ProgramSpec(name="rec", lanes=2, fields=field_specs(graph))
    return EpochCalls(spec, method_of(work), work, {}, 4, Means())


def batch(task: int, columns: list[pa.Array], kinds: tuple[str, ...]) -> pa.RecordBatch:
    return calls_of(head([1], task, [0]), columns, calls_schema(kinds))


def test_what_no_peer_sends_is_refused(calls: EpochCalls) -> None:
    whole = batch(1, [column_of([Vector([1.0])], "vector"), column_of([3], "long")], ("vector", "long"))
    waiting: dict[int, list[pa.RecordBatch]] = {}
    calls._take(whole, waiting)
    assert waiting == {1: [whole]}
    keys = pa.MapArray.from_arrays(pa.array([0, 2], pa.int32()), pa.array([2, 1]), pa.array([1.0, 1.0]))
    unknown = whole.set_column(0, pa.field("row", pa.int64(), nullable=False), pa.array([None], pa.int64()))
    for wrong, why in [
        (pa.record_batch({"x": [1]}), "no calls of one task"),
        (pa.concat_batches([whole, whole]).set_column(2, whole.schema.field(2), pa.array([1, 0], pa.int32())), "one task"),
        (batch(3, [], ()), "has no task 3"),
        (batch(-3, [], ()), "has no task -3"),
        (batch(1, [column_of([3], "long")], ("long",)), "of other types"),
        (batch(-1, [column_of([3], "long")], ("long",)), "of other types"),
        (batch(1, [keys, column_of([3], "long")], ("vector", "long")), "out of order"),
        (unknown, "nothing is known"),
    ]:  # fmt: skip
        with pytest.raises(BadMessage, match=why):
            calls._take(wrong, waiting)
    assert waiting == {1: [whole]}
    for due, why in [({1: [whole]}, "slices of others"), ({1: [at(whole, 2)]}, "no lane")]:
        with pytest.raises(BadMessage, match=why):
            calls._run_level(due)


def at(calls: pa.RecordBatch, lane: int) -> pa.RecordBatch:
    return calls.set_column(4, calls.schema.field(4), pa.array([lane], pa.int32()))
