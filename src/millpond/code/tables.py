"""Tables and transaction functions as they travel: text only."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import msgspec
import pyarrow as pa

from millpond.code.capture import Code
from millpond.errors import BadType, WrongColumn
from millpond.schema import describe_type, parse_ddl

Type = Literal["long", "double", "bool", "string"]
KEY = "key"


def type_of(type_: pa.DataType) -> Type | None:
    """How a transaction sees values of an Arrow type; None if it cannot. Timestamps are microseconds, dates days."""
    types = pa.types
    if types.is_boolean(type_):
        return "bool"
    if types.is_timestamp(type_):
        return "long" if type_.unit == "us" else None
    if types.is_signed_integer(type_) or types.is_date32(type_):
        return "long"
    if types.is_float32(type_) or types.is_float64(type_):
        return "double"
    return "string" if types.is_string(type_) or types.is_large_string(type_) else None


class TableSpec(msgspec.Struct, frozen=True, dict=True):
    """The types of a table, as DDL, and the row that a missing key reads. Without one, such a read aborts.

    Keys are one long-like or string column. Columns are long, double, boolean, timestamp or string, never null. A
    write to a missing key makes the row: of the defaults, or of zeros, False and "".
    """

    key: str
    value: str
    default: dict[str, bool | int | float | str] | None = None

    @cached_property
    def key_field(self) -> pa.Field:
        schema = parse_ddl(self.key, KEY)
        if len(schema) != 1 or type_of(schema.field(0).type) not in ("long", "string"):
            raise BadType(
                f"the key of a table of transactions cannot be {self.key!r}",
                hint="one column: byte, short, int, long, date, timestamp or string",
            )
        return schema.field(0)

    @property
    def schema(self) -> pa.Schema:
        """The columns as users see them: the key, then the rest."""
        return pa.schema([self.key_field, *self.columns])

    @property
    def key_type(self) -> pa.DataType:
        return self.key_field.type

    @cached_property
    def columns(self) -> pa.Schema:
        schema = parse_ddl(self.value, "value")
        for field in schema:
            if field.type not in (pa.int64(), pa.float64(), pa.bool_(), pa.string()) and not (
                pa.types.is_timestamp(field.type)
            ):
                raise BadType(
                    f"column {field.name!r} of a table of transactions cannot be {describe_type(field.type)}",
                    hint="the types are long, double, boolean, timestamp and string",
                )
        unknown = set(self.default or {}) ^ set(schema.names) if self.default is not None else set()
        if unknown:
            raise WrongColumn(
                f"the default names {sorted(self.default or {})}, the columns are {schema.names}",
                hint="a default gives a value for each column",
                column=min(unknown),
                available=schema.names,
            )
        for name, value in (self.default or {}).items():
            if not _fits(value, schema.field(name).type):
                raise BadType(
                    f"the default {value!r} of column {name!r} is no {describe_type(schema.field(name).type)}",
                    hint="a timestamp's default is its microseconds; a double's is a number, not NaN",
                )
        return schema


def _fits(value: object, type_: pa.DataType) -> bool:
    """Whether a default can stand in a column. NaN cannot: it is no default that could be compared with another."""
    match type_of(type_):
        case "bool":
            return isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "double":
            return isinstance(value, int | float) and not isinstance(value, bool) and value == value  # noqa: PLR0124
        case _:
            return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


class TransactionCode(msgspec.Struct, frozen=True):
    """A transaction function. `results` are the names of its result columns, maybe with types."""

    code: Code
    results: str = ""


class TransactionSetCode(msgspec.Struct, frozen=True):
    """Transaction functions by kind, over tables by name."""

    kinds: dict[str, TransactionCode]
    tables: dict[str, TableSpec]
