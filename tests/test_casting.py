from __future__ import annotations

import datetime
import decimal
import math
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.errors import MessageTooLarge, WrongType
from millpond.schema import cast_column, describe_type, parse_ddl

UTC = pa.timestamp("us", tz="UTC")


def type_of(ddl: str) -> pa.DataType:
    return parse_ddl(ddl, "value").field(0).type


def cast(column: pa.Array | pa.ChunkedArray, ddl: str) -> pa.Array:
    field = parse_ddl(ddl, "value").field(0)
    result = cast_column(column, field, "col")
    assert isinstance(result, pa.Array)
    assert result.type.equals(field.type, check_metadata=True)
    assert len(result) == len(column)
    result.validate(full=True)
    return result


def refusal(column: pa.Array | pa.ChunkedArray, ddl: str) -> WrongType:
    with pytest.raises(WrongType) as caught:
        cast(column, ddl)
    assert caught.value.hint
    return caught.value


def test_a_column_of_the_right_type_is_not_copied() -> None:
    array = pa.array([1, 2, None])
    assert cast(array, "long") is array
    assert cast(pa.chunked_array([array]), "long").buffers()[1].address == array.buffers()[1].address


MOMENT = datetime.datetime(2024, 5, 1, 12, 0, 0, 5, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("column", "ddl", "expected"),
    [
        (pa.chunked_array([[1], [2, None]]), "long", [1, 2, None]),
        (pa.chunked_array([], pa.int64()), "long", []),
        (pa.chunked_array([["a"], [], ["b"]]), "string", ["a", "b"]),
        (pa.array([1, None], pa.int32()), "long", [1, None]),
        (pa.array([1, None], pa.uint64()), "long", [1, None]),
        (pa.array([127, -128]), "byte", [127, -128]),
        (pa.array([2**53, -(2**53)]), "double", [2.0**53, -(2.0**53)]),
        (pa.array([1.0, None, -3.0]), "int", [1, None, -3]),
        (pa.array([2.0**53]), "long", [2**53]),
        (pa.array([None, None], pa.float64()), "long", [None, None]),
        (pa.array([0.5, None, math.inf]), "float", [0.5, None, math.inf]),
        (pa.array([], pa.float64()), "float", []),
        (pa.array([0.5], pa.float32()), "double", [0.5]),
        (pa.array([1, None]), "decimal(5,2)", [decimal.Decimal("1.00"), None]),
        (pa.array([2**64 - 1], pa.uint64()), "decimal(38,18)", [decimal.Decimal(2**64 - 1)]),
        (pa.array([decimal.Decimal("1.50")]), "decimal(10,1)", [decimal.Decimal("1.5")]),
        (pa.array(["a", None], pa.large_string()), "string", ["a", None]),
        (pa.array(["a", None], pa.string_view()), "string", ["a", None]),
        (pa.array([b"a", None], pa.binary_view()), "binary", [b"a", None]),
        (pa.array([b"a", None], pa.large_binary()), "binary", [b"a", None]),
        (pa.array([b"ab", None], pa.binary(2)), "binary", [b"ab", None]),
        (pa.array(["a", None, "a"]).dictionary_encode(), "string", ["a", None, "a"]),
        (pa.array([7, 7, 8]).dictionary_encode(), "short", [7, 7, 8]),
        (pa.array([None, None]), "string", [None, None]),
        (pa.array([None]), "array<map<string,int>>", [None]),
        (pa.array([MOMENT], pa.timestamp("ns", tz="Asia/Tokyo")), "timestamp", [MOMENT]),
        (pa.array([MOMENT.replace(microsecond=0)], pa.timestamp("s", tz="UTC")), "timestamp", [MOMENT.replace(microsecond=0)]),
        (pa.array([MOMENT.replace(tzinfo=None)]), "timestamp", [MOMENT]),
        (pa.array([MOMENT], UTC), "timestamp_ntz", [MOMENT.replace(tzinfo=None)]),
        (pa.array([datetime.date(2024, 5, 1)]), "timestamp_ntz", [datetime.datetime(2024, 5, 1)]),
        (pa.array([datetime.date(2024, 5, 1)], pa.date64()), "date", [datetime.date(2024, 5, 1)]),
        (pa.array([datetime.datetime(2024, 5, 1), None], pa.timestamp("ns")), "date", [datetime.date(2024, 5, 1), None]),
    ],
)  # fmt: skip
def test_columns_that_fit(column: pa.Array, ddl: str, expected: list[Any]) -> None:
    assert cast(column, ddl).to_pylist() == expected


def test_run_ends_and_extensions_are_undone() -> None:
    ends = pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array([5, None]))
    assert cast(ends, "long").to_pylist() == [5, 5, None]
    uuids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0123456789abcdef"], pa.binary(16)))
    assert cast(uuids, "binary").to_pylist() == [b"0123456789abcdef"]


def test_not_a_number_survives_narrowing() -> None:
    assert math.isnan(cast(pa.array([math.nan]), "float")[0].as_py())


NESTED = [
    pa.list_(pa.int32()),
    pa.large_list(pa.int32()),
    pa.list_view(pa.int32()),
    pa.large_list_view(pa.int32()),
    pa.list_(pa.field("element", pa.int64())),
    pa.list_(pa.field("item", pa.int64(), nullable=True)),
]


@pytest.mark.parametrize("type_", NESTED, ids=str)
@pytest.mark.parametrize("start", [0, 1, 2])
def test_lists_of_every_layout(type_: pa.DataType, start: int) -> None:
    rows = [[9, 9], [1, None], None, [], [3]]
    assert cast(pa.array(rows, type_).slice(start), "array<long>").to_pylist() == rows[start:]


def test_lists_of_a_fixed_size() -> None:
    rows = [[9, 9], None, [1, None]]
    assert cast(pa.array(rows, pa.list_(pa.int32(), 2)).slice(1), "array<long>").to_pylist() == rows[1:]


def test_non_null_items_are_made_nullable() -> None:
    strict = pa.list_(pa.field("item", pa.int64(), nullable=False))
    assert cast(pa.array([[1], []], strict), "array<long>").to_pylist() == [[1], []]


def test_values_under_a_null_list_are_not_looked_at() -> None:
    hidden = pa.ListArray.from_arrays(pa.array([0, 1, 2]), pa.array([2**40, 1]), mask=pa.array([True, False]))
    assert cast(hidden, "array<int>").to_pylist() == [None, [1]]


def test_maps() -> None:
    rows = [[("z", 0)], [("a", 1), ("b", None)], None, []]
    array = pa.array(rows, pa.map_(pa.large_string(), pa.int32()))
    for start in range(4):
        assert cast(array.slice(start), "map<string,long>").to_pylist() == rows[start:]


def test_structs_match_by_name() -> None:
    rows = [{"b": "x", "a": 0}, {"b": "y", "a": 1}, None, {"b": None, "a": None}]
    array = pa.array(rows, pa.struct([("b", pa.large_string()), ("a", pa.int32())]))
    expected = [row and {"a": row["a"], "b": row["b"]} for row in rows]
    for start in range(4):
        assert cast(array.slice(start), "struct<a:long,b:string>").to_pylist() == expected[start:]


def test_deep_nesting() -> None:
    rows = [[{"m": [(1, [0.5])]}], None]
    source = pa.large_list(pa.struct([("m", pa.map_(pa.int32(), pa.large_list(pa.float64())))]))
    assert cast(pa.array(rows, source), "array<struct<m:map<long,array<float>>>>").to_pylist() == rows


@pytest.mark.parametrize(
    ("column", "ddl", "why"),
    [
        (pa.array([2**31]), "int", "2147483648"),
        (pa.array([2**63], pa.uint64()), "long", "9223372036854775808"),
        (pa.array([128], pa.int16()), "byte", "128"),
        (pa.array([1.5]), "long", "1.5"),
        (pa.array([math.nan]), "long", "nan"),
        (pa.array([math.inf]), "long", "2**53"),
        (pa.array([2.0**60]), "long", "2**53"),
        (pa.array([2.0**63]), "long", "2**53"),
        (pa.array([2**53 + 1]), "double", "9007199254740993"),
        (pa.array([2**24 + 1]), "float", "16777217"),
        (pa.array([0.5, None, 0.1]), "float", "0.1"),
        (pa.array([1e300]), "float", "rounded"),
        (pa.array([1000]), "decimal(3,0)", "decimal"),
        (pa.array([decimal.Decimal("1.25")]), "decimal(10,1)", "decimal"),
        (pa.array([1], pa.timestamp("ns")), "timestamp", "lose data"),
        (pa.array([2**62], pa.timestamp("s")), "timestamp", "out of bounds"),
        (pa.array([MOMENT.replace(tzinfo=None)]), "date", "time of day"),
        (pa.array([[1, 2**40]]), "array<int>", "1099511627776"),
        (pa.array([[0.1]]), "array<float>", "0.1"),
    ],
)
def test_values_that_do_not_fit(column: pa.Array, ddl: str, why: str) -> None:
    error = refusal(column, ddl)
    assert "not all its values fit" in error.message
    assert why in error.message


@pytest.mark.parametrize(
    ("column", "ddl"),
    [
        (pa.array([1]), "boolean"),
        (pa.array([True]), "long"),
        (pa.array(["1"]), "long"),
        (pa.array([1]), "string"),
        (pa.array([b"a"]), "string"),
        (pa.array(["a"]), "binary"),
        (pa.array(["1"]), "double"),
        (pa.array([1.0]), "decimal(3,1)"),
        (pa.array([decimal.Decimal(1)]), "long"),
        (pa.array([decimal.Decimal(1)]), "double"),
        (pa.array([1]), "timestamp"),
        (pa.array([MOMENT]), "long"),
        (pa.array([MOMENT]), "date"),
        (pa.array([MOMENT], pa.timestamp("us", tz="Asia/Tokyo")), "timestamp_ntz"),
        (pa.array([1]), "date"),
        (pa.array([1]), "array<long>"),
        (pa.array([[1]]), "long"),
        (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), "array<long>"),
        (pa.array([{"a": 1}]), "map<string,long>"),
        (pa.array([{"a": 1}]), "struct<b:long>"),
        (pa.array([{"a": 1}]), "struct<a:long,b:long>"),
        (pa.array([{"a": 1, "b": 1}]), "struct<a:long>"),
        (pa.array([datetime.time(1)]), "long"),
        (pa.array([datetime.timedelta(1)]), "long"),
    ],
)
def test_types_that_never_fit(column: pa.Array, ddl: str) -> None:
    error = refusal(column, ddl)
    assert error.attributes() == {
        "column": "col",
        "expected": describe_type(type_of(ddl)),
        "actual": describe_type(column.type),
    }
    for part in ("'col'", describe_type(type_of(ddl)), describe_type(column.type)):
        assert part in error.message


def test_a_nested_refusal_names_the_place() -> None:
    column = pa.array([{"a": [{"b": "x"}]}])
    assert refusal(column, "struct<a:array<struct<b:long>>>").attributes()["column"] == "col.a[].b"


def test_pandas_columns() -> None:
    frame = pd.DataFrame(
        {
            "whole": [1, None],
            "text": ["a", None],
            "category": pd.Categorical(["x", "y"]),
            "moment": pd.Series([pd.Timestamp("2024-05-01 12:00:00.000001"), pd.NaT]),
            "nullable": pd.array([3, None], dtype="Int32"),
            "day": [datetime.date(2024, 5, 1), None],
        }
    )
    table = pa.Table.from_pandas(frame)
    expected: dict[str, tuple[str, list[Any]]] = {
        "whole": ("long", [1, None]),
        "text": ("string", ["a", None]),
        "category": ("string", ["x", "y"]),
        "moment": ("timestamp", [datetime.datetime(2024, 5, 1, 12, 0, 0, 1, tzinfo=datetime.UTC), None]),
        "nullable": ("long", [3, None]),
        "day": ("date", [datetime.date(2024, 5, 1), None]),
    }
    for name, (ddl, values) in expected.items():
        assert cast(table[name], ddl).to_pylist() == values


def test_chunks_that_do_not_fit_one_array() -> None:
    part = pa.array(["x" * 2**20])
    column = pa.chunked_array([part] * 2**11)
    with pytest.raises(MessageTooLarge, match="too large for one batch") as caught:
        cast(column, "string")
    assert "smaller parts" in caught.value.hint


@given(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)))
def test_integers_narrow_exactly_or_not_at_all(values: list[int | None]) -> None:
    column = pa.array(values, pa.int64())
    fits = all(value is None or -(2**15) <= value < 2**15 for value in values)
    if fits:
        assert cast(column, "short").to_pylist() == values
    else:
        refusal(column, "short")


@given(st.lists(st.none() | st.floats(allow_nan=False)))
def test_doubles_become_integers_exactly_or_not_at_all(values: list[float | None]) -> None:
    column = pa.array(values, pa.float64())
    fits = all(value is None or (value.is_integer() and abs(value) <= 2**53) for value in values)
    if fits:
        assert cast(column, "long").to_pylist() == values
    else:
        refusal(column, "long")
