from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.errors import BadType
from millpond.schema import check_key_types, describe_type, format_ddl, key_kind, parse_ddl

UTC = pa.timestamp("us", tz="UTC")


def type_of(ddl: str) -> pa.DataType:
    schema = parse_ddl(ddl, "value")
    assert schema.names == ["value"]
    return schema.field(0).type


@pytest.mark.parametrize(
    ("ddl", "expected"),
    [
        ("boolean", pa.bool_()),
        ("byte", pa.int8()),
        ("tinyint", pa.int8()),
        ("short", pa.int16()),
        ("smallint", pa.int16()),
        ("int", pa.int32()),
        ("integer", pa.int32()),
        ("long", pa.int64()),
        ("bigint", pa.int64()),
        ("float", pa.float32()),
        ("real", pa.float32()),
        ("double", pa.float64()),
        ("string", pa.string()),
        ("binary", pa.binary()),
        ("date", pa.date32()),
        ("timestamp", UTC),
        ("timestamp_ltz", UTC),
        ("timestamp_ntz", pa.timestamp("us")),
        ("decimal", pa.decimal128(10, 0)),
        ("decimal(5)", pa.decimal128(5, 0)),
        ("DECIMAL( 38 , 38 )", pa.decimal128(38, 38)),
        ("numeric(4,2)", pa.decimal128(4, 2)),
        ("dec(4,2)", pa.decimal128(4, 2)),
        ("array<float>", pa.list_(pa.float32())),
        ("array<array<int>>", pa.list_(pa.list_(pa.int32()))),
        ("Map<String, BIGINT>", pa.map_(pa.string(), pa.int64())),
        ("struct<a:int,b:string>", pa.struct([("a", pa.int32()), ("b", pa.string())])),
        ("struct<a int, `b c`: array<date>>", pa.struct([("a", pa.int32()), ("b c", pa.list_(pa.date32()))])),
        ("struct<>", pa.struct([])),
        ("  LONG  ", pa.int64()),
        ("long NOT NULL", pa.int64()),
        ("long comment 'it''s \\' quoted'", pa.int64()),
        ('array<int> not null COMMENT "words"', pa.list_(pa.int32())),
    ],
)
def test_lone_type_is_one_field_with_the_given_name(ddl: str, expected: pa.DataType) -> None:
    assert type_of(ddl).equals(expected, check_metadata=True)
    assert parse_ddl(ddl, "key").names == ["key"]


@pytest.mark.parametrize(
    ("ddl", "expected"),
    [
        ("ad long, region string", [("ad", pa.int64()), ("region", pa.string())]),
        ("ad: long, region: string", [("ad", pa.int64()), ("region", pa.string())]),
        ("balance long", [("balance", pa.int64())]),
        ("`a b` int", [("a b", pa.int32())]),
        ("`a``b` int", [("a`b", pa.int32())]),
        ("`a,<b` int", [("a,<b", pa.int32())]),
        ("date date, int long", [("date", pa.date32()), ("int", pa.int64())]),
        ("date: long", [("date", pa.int64())]),
        ("array array<int>", [("array", pa.list_(pa.int32()))]),
        ("decimal decimal(3,1)", [("decimal", pa.decimal128(3, 1))]),
        ("comment string, not int", [("comment", pa.string()), ("not", pa.int32())]),
        ("a int NOT NULL COMMENT 'x', b int not null", [("a", pa.int32()), ("b", pa.int32())]),
        (
            "s struct<x: int NOT NULL COMMENT 'y', z: int>",
            [("s", pa.struct([("x", pa.int32()), ("z", pa.int32())]))],
        ),
        ("größe double, _x1 int", [("größe", pa.float64()), ("_x1", pa.int32())]),
        ("Ad LONG", [("Ad", pa.int64())]),
    ],
)
def test_columns(ddl: str, expected: list[tuple[str, pa.DataType]]) -> None:
    schema = parse_ddl(ddl, "value")
    assert schema.equals(pa.schema(expected), check_metadata=True)
    assert all(field.nullable for field in schema)


@pytest.mark.parametrize(
    ("ddl", "message", "hint"),
    [
        ("", "is empty", "long"),
        ("   ", "is empty", "long"),
        ("lnog", "unknown type 'lnog'", "the types are boolean"),
        ("a lnog", "unknown type 'lnog'", "the types are boolean"),
        ("int64", "unknown type 'int64'", "use long"),
        ("varchar(20)", "unknown type 'varchar'", "use string"),
        ("long, string", "column 'long' has no type", "name type"),
        ("a", "unknown type 'a'", "the types are"),
        ("a:", "column 'a' has no type", "name type"),
        ("a int,", "expected a column name, found the end", ""),
        ("a int b int", "found 'b'", "commas"),
        ("decimal(10,2), b int", "found ','", "give each a name"),
        ("array", "expected '<' after array, found the end", ""),
        ("array<int", "expected '>' to close array<, found the end", ""),
        ("array<>", "expected a type, found '>'", "the types are"),
        ("map<string>", "expected ',' between", ""),
        ("struct<a>", "column 'a' has no type", ""),
        ("struct<a:int", "to close struct<", ""),
        ("decimal(39,0)", "out of range", "p <= 38"),
        ("decimal(0)", "out of range", "1 <= p"),
        ("decimal(2,3)", "out of range", "s <= p"),
        ("decimal(x)", "expected a number", "decimal(10,2)"),
        ("decimal(9999999999999)", "expected a number", "decimal(10,2)"),
        ("decimal(5", "expected ')'", ""),
        ("user-id long", "unexpected '-'", "`backquotes`"),
        ("`` long", "unexpected '`'", "`backquotes`"),
        ("`a long", "unexpected '`'", "`backquotes`"),
        ("1 int", "expected a column name, found '1'", ""),
        ("a int not", "expected NULL after NOT", ""),
        ("a int comment b", "COMMENT needs a quoted text", ""),
        ("a int, a long", "'a' occurs twice", "whatever their case"),
        ("a int, A long", "'A' occurs twice", "whatever their case"),
        ("s struct<x:int,X:int>", "'X' occurs twice", "whatever their case"),
        ("_key long", "_key is reserved", "another name"),
        ("a long, _time long", "_time is reserved", "another name"),
        ("_low long", "_low is reserved", "another name"),
        ("a long, _seq long", "_seq is reserved", "another name"),
        ("array<" * 1000 + "int" + ">" * 1000, "levels deep", ""),
    ],
)
def test_bad_ddl_says_what_and_how_to_mend_it(ddl: str, message: str, hint: str) -> None:
    with pytest.raises(BadType) as caught:
        parse_ddl(ddl, "value")
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.hint
    assert caught.value.attributes() == {"ddl": ddl}


@pytest.mark.parametrize("ddl", [None, 3, pa.int64(), b"long"])
def test_a_type_must_be_a_string(ddl: Any) -> None:
    with pytest.raises(BadType, match="DDL string"):
        parse_ddl(ddl, "value")


def test_reserved_names_are_free_inside_structs() -> None:
    assert type_of("struct<_key:int>") == pa.struct([("_key", pa.int32())])


def names() -> st.SearchStrategy[str]:
    characters = st.characters(blacklist_categories=["Cs"])
    return st.one_of(
        st.sampled_from(
            ["a", "date", "int", "array", "not", "null", "comment", "decimal", "Ad", "x y", "`", "1"]
        ),
        st.text(characters, min_size=1, max_size=8),
    ).filter(lambda name: name not in ("_key", "_time"))


def structs(types: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[list[pa.Field]]:
    pairs = st.lists(
        st.tuples(names(), types), min_size=1, max_size=4, unique_by=lambda pair: pair[0].lower()
    )
    return pairs.map(lambda fields: [pa.field(name, type_) for name, type_ in fields])


def arrow_types() -> st.SearchStrategy[pa.DataType]:
    plain = st.sampled_from(
        [
            *(pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()),
            *(pa.string(), pa.binary(), pa.date32(), UTC, pa.timestamp("us"), pa.struct([])),
        ]
    )
    decimals = st.integers(1, 38).flatmap(lambda p: st.integers(0, p).map(lambda s: pa.decimal128(p, s)))
    return st.recursive(
        plain | decimals,
        lambda inner: st.one_of(
            inner.map(pa.list_), st.builds(pa.map_, inner, inner), structs(inner).map(pa.struct)
        ),
        max_leaves=8,
    )


@given(structs(arrow_types()).map(pa.schema))
def test_format_and_parse_round_trip(schema: pa.Schema) -> None:
    ddl = format_ddl(schema)
    parsed = parse_ddl(ddl, "unused")
    assert parsed.equals(schema, check_metadata=True)
    assert format_ddl(parsed) == ddl


@given(st.text(st.sampled_from("ab `<>(),:1'\"\\\n-"), max_size=20) | st.text(max_size=20))
def test_any_text_parses_or_is_a_bad_type(text: str) -> None:
    try:
        schema = parse_ddl(text, "value")
    except BadType:
        return
    assert parse_ddl(format_ddl(schema), "value") == schema


@pytest.mark.parametrize(
    "type_", [pa.uint8(), pa.timestamp("ns"), pa.large_string(), pa.decimal256(50, 2), pa.null()]
)
def test_format_refuses_types_without_a_name(type_: pa.DataType) -> None:
    with pytest.raises(BadType, match="no DDL name"):
        format_ddl(pa.schema([("a", type_)]))
    assert describe_type(type_) == str(type_)


def test_canonical_words() -> None:
    assert format_ddl(parse_ddl("a BIGINT, `b` array< tinyint >, `c d` numeric", "x")) == (
        "a long, b array<byte>, `c d` decimal(10,0)"
    )


# Keys


@pytest.mark.parametrize(
    ("ddl", "kind"),
    [
        *(
            (ddl, "i64")
            for ddl in ("long", "int", "short", "byte", "date", "timestamp", "timestamp_ntz", "boolean")
        ),
        *((ddl, "bytes") for ddl in ("string", "binary", "a long, b long", "ad long, region string")),
    ],
)
def test_key_kinds(ddl: str, kind: str) -> None:
    schema = parse_ddl(ddl, "key")
    check_key_types(schema)
    assert key_kind(schema) == kind


@pytest.mark.parametrize(
    ("ddl", "hint"),
    [
        ("double", "floating-point"),
        ("a long, b float", "floating-point"),
        ("decimal(10,2)", "smallest unit"),
        ("struct<a:int>", "columns of the key"),
        ("array<int>", "string or binary"),
        ("map<int,int>", "string or binary"),
    ],
)
def test_types_that_cannot_be_keys(ddl: str, hint: str) -> None:
    with pytest.raises(BadType, match="cannot be") as caught:
        check_key_types(parse_ddl(ddl, "key"))
    assert hint in caught.value.hint


def test_a_key_has_columns() -> None:
    with pytest.raises(BadType, match="at least one"):
        check_key_types(pa.schema([]))
