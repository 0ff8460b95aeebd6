"""Tables and transaction functions as they travel: text only."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from functools import cached_property

import msgspec
import pyarrow as pa

from millpond.code.capture import Code
from millpond.errors import BadType, WrongColumn
from millpond.schema import describe_type, parse_ddl

Type = str
"""How a transaction sees a value: "long", "double", "bool", "string", or "decimal" and its scale, as in "decimal2"."""

KEY = "key"
DIGITS_MAX = 18  # of a decimal: it is held as a long, a number of its smallest unit


def type_of(type_: pa.DataType) -> Type | None:
    """How a transaction sees values of an Arrow type; None if it cannot. Timestamps are microseconds, dates days."""
    types = pa.types
    if types.is_decimal128(type_):
        return f"decimal{type_.scale}" if type_.precision <= DIGITS_MAX and type_.scale >= 0 else None
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

    Keys are long-like or string columns. Other columns may be decimals, doubles, floats and booleans, too; none is
    ever null. A write to a missing key makes the row: of the defaults, or of zeros, False and "". In a default, times
    are microseconds, dates days and decimals texts.
    """

    key: str
    value: str
    default: dict[str, bool | int | float | str] | None = None

    @cached_property
    def keys(self) -> pa.Schema:
        """The key columns."""
        schema = parse_ddl(self.key, KEY)
        for field in schema:
            if type_of(field.type) not in ("long", "string"):
                raise BadType(
                    f"the key of a table of transactions cannot be {self.key!r}",
                    hint="its columns are byte, short, int, long, date, timestamp or string",
                )
        return schema

    @property
    def schema(self) -> pa.Schema:
        """The columns as users see them: the key, then the rest."""
        return pa.schema([*self.keys, *self.columns])

    @cached_property
    def columns(self) -> pa.Schema:
        schema = parse_ddl(self.value, "value")
        for field in schema:
            if type_of(field.type) is None:
                raise BadType(
                    f"column {field.name!r} of a table of transactions cannot be {describe_type(field.type)}",
                    hint=f"the types are byte, short, int, long, float, double, decimal of at most {DIGITS_MAX} "
                    "digits, boolean, date, timestamp and string",
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
                    hint="a timestamp's default is its microseconds, a date's its days, a decimal's a text as in "
                    "'0.00'; a double's is a number, not NaN",
                )
        return schema


def range_of(type_: pa.DataType) -> tuple[int, int]:
    """The lowest and the highest long that a column of the type holds; of a decimal, in its smallest unit."""
    if pa.types.is_decimal128(type_):
        return 1 - 10**type_.precision, 10**type_.precision - 1
    bits = 1 if pa.types.is_boolean(type_) else type_.bit_width
    return -(1 << bits - 1), (1 << bits - 1) - 1


def units_of(value: int | str | Decimal, scale: int) -> int | None:
    """A decimal as a number of its smallest unit; None if it is none, or finer than that."""
    try:
        units = Decimal(value).scaleb(scale)
    except InvalidOperation:
        return None
    return int(units) if units.is_finite() and units == int(units) else None


def _fits(value: object, type_: pa.DataType) -> bool:
    """Whether a default can stand in a column. NaN cannot: it is no default that could be compared with another."""
    held = type_of(type_)
    if held is not None and held.startswith("decimal"):
        if not isinstance(value, int | str) or isinstance(value, bool):
            return False
        units = units_of(value, type_.scale)
        lowest, highest = range_of(type_)
        return units is not None and lowest <= units <= highest
    match held:
        case "bool":
            return isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "double":
            return isinstance(value, int | float) and not isinstance(value, bool) and value == value  # noqa: PLR0124
        case _:
            lowest, highest = range_of(type_)
            return isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest


class TransactionCode(msgspec.Struct, frozen=True):
    """A transaction function. `results` are the names of its result columns, maybe with types."""

    code: Code
    results: str = ""


class TransactionSetCode(msgspec.Struct, frozen=True):
    """Transaction functions by kind, over tables by name."""

    kinds: dict[str, TransactionCode]
    tables: dict[str, TableSpec]
