"""A table as its users see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import pyarrow as pa

from millpond.client.client import Client
from millpond.errors import BadOption, MillpondError, NullKey, WrongType
from millpond.schema import cast_column, describe_type
from millpond.wire.groups import FindRows, GroupSpec, ReadTable


def default_row(columns: pa.Schema, default: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A default as a table keeps it: every value of its column's type, times as microseconds, dates as days, decimals
    as texts."""
    if default is None:
        return None
    if not isinstance(default, Mapping):
        raise BadOption(
            f"default={default!r} gives no value for each column",
            hint=f"default={dict.fromkeys(columns.names, 0)!r}",
            option="default",
        )
    out: dict[str, Any] = {}
    for name, value in default.items():
        out[name] = value
        if name not in columns.names:
            continue  # the spec refuses it, and names what there is
        type_ = columns.field(name).type
        try:
            held = _default_value(value, pa.field(name, type_))
        except (MillpondError, pa.ArrowException, OverflowError, InvalidOperation):
            held = pa.scalar(None)
        if not held.is_valid:
            raise BadOption(
                f"the default {value!r} is no {describe_type(type_)}",
                hint=f"give column {name!r} a value of its type",
                option="default",
            )
        if pa.types.is_timestamp(type_) or pa.types.is_date32(type_):
            out[name] = held.value
        else:
            out[name] = str(held.as_py()) if pa.types.is_decimal(type_) else held.as_py()
    return out


def _default_value(value: Any, field: pa.Field) -> pa.Scalar:
    """Also a decimal's text and a date's days, as `Table.default` has them."""
    plain = not isinstance(value, bool)
    if pa.types.is_decimal(field.type) and plain and isinstance(value, str | int | float):
        return pa.array([Decimal(str(value))], field.type)[0]
    if pa.types.is_date32(field.type) and plain and isinstance(value, int):
        return pa.array([value], pa.int32()).cast(field.type)[0]
    return cast_column(pa.array([value]), field, field.name)[0]


class Table:
    """Rows by key, which transactions read and write. Made by `pond.table(...)`.

    Holds nothing itself: two `Table` objects of one name are the same table. Reads see whole epochs only.
    """

    def __init__(self, client: Client, group: GroupSpec, name: str) -> None:
        spec = group.tables[name]
        self._client = client
        self._spec = spec
        self._group = group
        self.name = name
        self.group = group.name
        self.key = spec.key
        self.value = spec.value
        self.default = spec.default

    def __repr__(self) -> str:
        return f"Table({self.name!r}, key={self.key!r}, value={self.value!r}, default={self.default!r})"

    @property
    def place(self) -> tuple[str, str]:
        """The resident that it is a part of, and its name there."""
        return self.group, self.name

    @property
    def schema(self) -> pa.Schema:
        """The key and the columns."""
        return self._spec.schema

    def snapshot(self) -> pa.Table:
        """Every row that a transaction has written, in the order of keys."""
        message = ReadTable(self._group.name, self.name)
        return self._client.read_home(message, self._group.home_slice)

    def read(self, keys: Sequence[Any] | pa.Array | pa.ChunkedArray | pa.Table) -> pa.Table:
        """The rows of those keys that are there, in the order of the keys.

        A key of several columns is a tuple, one of a single column may be; many come as a `pa.Table` that has those columns.
        """
        schema = self._spec.keys
        try:
            columns = [
                _key_column(column, field.type)
                for column, field in zip(self._key_columns(keys), schema, strict=True)
            ]
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            raise WrongType(
                f"these are no keys of table {self.name!r}: {error}",
                hint=f"its key is {self.key!r}; give a list of keys, tuples where it has several columns",
                column=schema.names[0],
                expected=self.key,
                actual="",
            ) from None
        for name, column in zip(schema.names, columns, strict=True):
            if column.null_count:
                raise NullKey("a key is null", column=name, rows=column.null_count)
        batch = pa.RecordBatch.from_arrays(columns, schema=schema)
        return self._client.ask_home(FindRows(self._group.name, self.name), self._group.home_slice, batch)

    def _key_columns(self, keys: Any) -> Sequence[Any]:
        names = self._spec.keys.names
        if isinstance(keys, pa.Table):
            missing = sorted(set(names) - set(keys.column_names))
            if missing:
                raise ValueError(f"there is no column {missing[0]!r}")
            return [keys[name] for name in names]
        tuples = isinstance(keys, list | tuple) and any(isinstance(key, tuple) for key in keys)
        if len(names) == 1 and not tuples:
            return [keys]
        if isinstance(keys, pa.Array | pa.ChunkedArray):
            raise TypeError("a key of several columns comes in tuples, or as a table")
        rows = list(keys)
        for row in rows:
            if not isinstance(row, tuple | list) or len(row) != len(names):
                values = "one value" if len(names) == 1 else f"{len(names)} values"
                raise TypeError(f"{row!r} is no tuple of {values}")
        return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in names]


def _key_column(keys: Any, type_: pa.DataType) -> pa.Array:
    if isinstance(keys, pa.ChunkedArray):
        keys = keys.combine_chunks()
    # A cast to strings takes anything; all other casts refuse what would not be the same key.
    if pa.types.is_string(type_):
        return pa.array(keys, type_)
    return (keys if isinstance(keys, pa.Array) else pa.array(keys)).cast(type_)
