"""A table as its users see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from millpond.client.client import Client
from millpond.errors import BadOption, MillpondError, NullKey, WrongType
from millpond.schema import cast_column, describe_type
from millpond.wire.groups import FindRows, GroupSpec, ReadTable


def default_row(columns: pa.Schema, default: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A default as a table keeps it: every value of its column's type, times as microseconds."""
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
            held = cast_column(pa.array([value]), pa.field(name, type_), name)[0]
        except (MillpondError, pa.ArrowException, OverflowError):
            held = pa.scalar(None)
        if not held.is_valid:
            raise BadOption(
                f"the default {value!r} is no {describe_type(type_)}",
                hint=f"give column {name!r} a value of its type",
                option="default",
            )
        out[name] = held.value if pa.types.is_timestamp(type_) else held.as_py()
    return out


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

    def read(self, keys: Sequence[Any] | pa.Array | pa.ChunkedArray) -> pa.Table:
        """The rows of those keys that are there, in the order of the keys."""
        if isinstance(keys, pa.ChunkedArray):
            keys = keys.combine_chunks()
        try:
            type_ = self._spec.key_type
            array = keys if isinstance(keys, pa.Array) else pa.array(keys)
            # A cast to strings takes anything; all other casts refuse what would not be the same key.
            array = pa.array(keys, type_) if pa.types.is_string(type_) else array.cast(type_)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError) as error:
            raise WrongType(
                f"these are no keys of table {self.name!r}: {error}",
                hint=f"its key is {self.key!r}",
                column=self._spec.key_field.name,
                expected=self.key,
                actual="",
            ) from None
        if array.null_count:
            raise NullKey("a key is null", column=self._spec.key_field.name, rows=array.null_count)
        batch = pa.RecordBatch.from_arrays([array], schema=pa.schema([self._spec.key_field]))
        return self._client.ask_home(FindRows(self._group.name, self.name), self._group.home_slice, batch)
