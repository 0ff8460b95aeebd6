"""The types of keys and values: DDL strings, Arrow schemas, and the columns that must fit them."""

from __future__ import annotations

from typing import Literal

import pyarrow as pa

from millpond.errors import BadType
from millpond.schema.casting import cast_column
from millpond.schema.ddl import KEY, LOW, SEQ, TIME, describe_type, format_ddl, format_type, parse_ddl

__all__ = [
    "KEY",
    "LOW",
    "SEQ",
    "TIME",
    "KeyKind",
    "cast_column",
    "check_key_types",
    "describe_type",
    "format_ddl",
    "format_type",
    "key_kind",
    "parse_ddl",
]

KeyKind = Literal["i64", "bytes"]

_KEY_TYPES = "boolean, byte, short, int, long, date, timestamp, timestamp_ntz, string and binary"


def check_key_types(schema: pa.Schema) -> None:
    """Raise `BadType` unless every field can be a key: equal keys must have equal bytes on every side."""
    if not len(schema):
        raise BadType("a key needs at least one column", hint='for instance key="long"')
    for field in schema:
        if not (_is_integer_like(field.type) or field.type in (pa.string(), pa.binary())):
            raise BadType(
                f"the key column '{field.name}' cannot be {describe_type(field.type)}: "
                f"a key is made of {_KEY_TYPES}",
                hint=_key_hint(field.type),
                ddl=describe_type(field.type),
            )


def key_kind(schema: pa.Schema) -> KeyKind:
    """How keys of this schema are held: one integer-like column as int64, all others as bytes."""
    return "i64" if len(schema) == 1 and _is_integer_like(schema.field(0).type) else "bytes"


def _is_integer_like(type_: pa.DataType) -> bool:
    return (
        pa.types.is_boolean(type_)
        or pa.types.is_signed_integer(type_)
        or type_ == pa.date32()
        or (pa.types.is_timestamp(type_) and type_.unit == "us" and type_.tz in (None, "UTC"))
    )


def _key_hint(type_: pa.DataType) -> str:
    if pa.types.is_floating(type_):
        return "floating-point numbers do not compare reliably; use a long or a string made from the number"
    if pa.types.is_decimal(type_):
        return "use a long that counts the smallest unit, or a string"
    if pa.types.is_struct(type_):
        return 'give the fields as columns of the key: key="ad long, region string"'
    return "use a string or binary column made from the value"
