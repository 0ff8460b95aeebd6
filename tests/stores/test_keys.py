"""Keys: every column type in and out, sliced arrays, composite keys, malformed bytes."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.errors import BadMessage, NullKey, WrongType
from millpond.stores.keys import Keys, decode_keys, encode_keys

SINGLE: dict[str, tuple[pa.DataType, list[Any], str]] = {
    "boolean": (pa.bool_(), [True, False, True], "i64"),
    "byte": (pa.int8(), [-128, 0, 127], "i64"),
    "short": (pa.int16(), [-(2**15), 2**15 - 1], "i64"),
    "int": (pa.int32(), [-(2**31), 2**31 - 1], "i64"),
    "long": (pa.int64(), [-(2**63), 0, 2**63 - 1], "i64"),
    "date": (pa.date32(), [datetime.date(1, 1, 1), datetime.date(9999, 12, 31)], "i64"),
    "timestamp": (
        pa.timestamp("us"),
        [datetime.datetime(1969, 12, 31, 23), datetime.datetime(2024, 1, 1)],
        "i64",
    ),
    "string": (pa.string(), ["", "a\0b", "é" * 30], "bytes"),
    "binary": (pa.binary(), [b"", b"\xff\0"], "bytes"),
}


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("start", [0, 1])
def test_single_columns_round_trip(name: str, start: int) -> None:
    type_, values, kind = SINGLE[name]
    column = pa.array(values, type_).slice(start)
    schema = pa.schema([("key", type_)])
    keys = encode_keys([column], schema)
    assert (keys.kind, len(keys)) == (kind, len(values) - start)
    (back,) = decode_keys(keys.to_arrow(), schema)
    assert back.type == type_
    assert back.to_pylist() == values[start:]


COLUMNS = [
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.string(), st.text(max_size=6)),
    (pa.binary(), st.binary(max_size=6)),
    (pa.bool_(), st.booleans()),
    (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    (pa.date32(), st.dates()),
]


@settings(max_examples=100)
@given(data=st.data())
def test_composite_keys_round_trip_and_differ_when_their_columns_do(data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(COLUMNS), min_size=2, max_size=4))
    rows = data.draw(st.lists(st.tuples(*(values for _, values in chosen)), max_size=8))
    skip = data.draw(st.integers(0, len(rows)))
    schema = pa.schema([(f"k{i}", type_) for i, (type_, _) in enumerate(chosen)])
    columns = [pa.array([row[i] for row in rows], type_).slice(skip) for i, (type_, _) in enumerate(chosen)]
    keys = encode_keys(columns, schema)
    assert keys.kind == "bytes"
    encoded = keys.to_arrow()
    assert [column.to_pylist() for column in decode_keys(encoded, schema)] == [c.to_pylist() for c in columns]
    assert len(set(encoded.to_pylist())) == len(set(rows[skip:]))


@settings(max_examples=200)
@given(st.lists(st.binary(max_size=24), max_size=4))
def test_arbitrary_bytes_decode_to_what_encodes_to_them_or_are_refused(raw: list[bytes]) -> None:
    schema = pa.schema([("a", pa.string()), ("b", pa.bool_()), ("c", pa.binary())])
    array = pa.array(raw, pa.binary())
    try:
        columns = decode_keys(array, schema)
    except BadMessage:
        return
    assert encode_keys(columns, schema).to_arrow().to_pylist() == raw


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "ends within column 'a'"),
        (b"\1\0\0", "ends within column 'a'"),
        (b"\xff\xff\xff\xff", "ends within column 'a'"),
        (b"\1\0\0\0x" + b"\0" * 7, "ends within column 'b'"),
        (b"\1\0\0\0x" + b"\0" * 9, "longer than its columns"),
        (b"\1\0\0\0\xff" + b"\0" * 8, "not UTF-8"),
        (b"\1\0\0\0x" + b"\1" * 8, "does not fit"),
    ],
)
def test_malformed_composite_keys(raw: bytes, why: str) -> None:
    schema = pa.schema([("a", pa.string()), ("b", pa.int32())])
    with pytest.raises(BadMessage, match=why):
        decode_keys(pa.array([raw], pa.binary()), schema)


def test_the_encoding_is_a_format() -> None:
    schema = pa.schema([("a", pa.string()), ("b", pa.int32())])
    keys = encode_keys([pa.array(["hé"]), pa.array([-2], pa.int32())], schema)
    assert keys.to_arrow().to_pylist() == [b"\3\0\0\0h\xc3\xa9\xfe\xff\xff\xff\xff\xff\xff\xff"]


@pytest.mark.parametrize("type_", [pa.string(), pa.binary(), pa.large_string(), pa.large_binary()])
def test_takes_and_parts_of_bytes_keys(type_: pa.DataType) -> None:
    values = ["", "a", "b\0", "long " * 9, "a"]
    keys = Keys.from_arrow(pa.array(values, type_).slice(1))
    whole = keys.hashes.copy()
    order = np.array([3, 0, 0, 2])
    taken = keys.take(order)
    assert [v.decode() for v in taken.to_arrow().to_pylist()] == [values[1:][i] for i in order]
    assert (taken.hashes == whole[order]).all()
    places = np.array([2, 0, 3, 1])
    spread = Keys.from_arrow(pa.array(values, type_).slice(1)).spread(places).to_arrow().to_pylist()
    assert [spread[i].decode() for i in places] == values[1:]
    fresh = Keys.from_arrow(pa.array(values, type_)).part(2, 4)
    assert [v.decode() for v in fresh.to_arrow().to_pylist()] == values[2:4]
    assert (fresh.hashes == whole[1:3]).all()
    assert len(keys.part(2, 2)) == len(keys.take(np.empty(0, np.int64))) == 0


def test_the_same_key_hashes_the_same_in_any_batch() -> None:
    longs = pa.array([5, 6, 7])
    assert (Keys.from_arrow(longs.slice(1)).hashes == Keys.from_arrow(longs).hashes[1:]).all()
    wide = Keys.from_arrow(pa.array(["x", "key"], pa.large_string()))
    assert wide.hashes[1] == Keys.from_arrow(pa.array([b"key"])).hashes[0]


def test_empty_batches() -> None:
    for array in (pa.array([], pa.int64()), pa.array([], pa.binary()), pa.array(["x"]).slice(1)):
        keys = Keys.from_arrow(array)
        assert len(keys) == len(keys.hashes) == len(keys.to_arrow()) == 0
    schema = pa.schema([("a", pa.string()), ("b", pa.int64())])
    empty = [pa.array([], pa.string()), pa.array([], pa.int64())]
    assert [len(c) for c in decode_keys(encode_keys(empty, schema).to_arrow(), schema)] == [0, 0]


def test_refused() -> None:
    schema = pa.schema([("key", pa.int64())])
    with pytest.raises(NullKey):
        encode_keys([pa.array([1, None])], schema)
    with pytest.raises(WrongType):
        encode_keys([pa.array([1], pa.int32())], schema)
    with pytest.raises(NullKey):
        Keys.from_arrow(pa.array([1, None]))
    with pytest.raises(WrongType):
        Keys.from_arrow(pa.array([1.5]))
    with pytest.raises(BadMessage):
        decode_keys(pa.array([b"x"]), schema)
    with pytest.raises(BadMessage):
        decode_keys(pa.array([2]), pa.schema([("key", pa.bool_())]))


@pytest.mark.parametrize("offsets", [[0, 9, 3], [1, 0, 2], [0, -5, 2]])
def test_offsets_outside_the_data_are_seen_before_a_kernel_reads(offsets: list[int]) -> None:
    buffers = [None, pa.py_buffer(np.array(offsets, np.int32)), pa.py_buffer(b"abc")]
    with pytest.raises(BadMessage):
        Keys.from_arrow(pa.Array.from_buffers(pa.binary(), 2, buffers))
