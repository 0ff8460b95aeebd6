"""From a user's table to what the pond takes: keys, times and values, each checked by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.errors import (
    BadOption,
    NullKey,
    NullValue,
    WrongColumn,
    WrongType,
    check_not_connect,
    wrong_time_kind,
)
from millpond.schema import cast_column
from millpond.stores.keys import Keys, encode_keys
from millpond.times import TimeKind, time_column

Names: TypeAlias = str | Sequence[str]


def as_table(rows: object) -> pa.Table:
    if isinstance(rows, pa.Table):
        return rows
    if isinstance(rows, pa.RecordBatch):
        return pa.Table.from_batches([rows])
    check_not_connect(rows, "rows")
    how = "table(...)" if isinstance(rows, dict) else "Table.from_pandas(df, preserve_index=False)"
    raise WrongType(
        f"the operator takes a pyarrow.Table, not a {type(rows).__module__}.{type(rows).__qualname__}",
        hint=f"convert it, for example with pyarrow.{how}",
        column="",
        expected="pyarrow.Table",
        actual=type(rows).__qualname__,
    )


def as_names(names: Names, schema: pa.Schema, option: str) -> tuple[str, ...]:
    """The columns an option names: one for each field of the schema."""
    given = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, Iterable) else ()
    if len(given) != len(schema) or not all(isinstance(name, str) for name in given):
        raise BadOption(
            f"{option}={names!r} names {len(given)} columns, but the state has {len(schema)}: {', '.join(schema.names)}",
            hint=f"for example {option}={schema.names if len(schema) > 1 else schema.names[0]!r}",
            option=option,
        )
    return given


def check_column_name(name: object, option: str) -> str:
    if not isinstance(name, str):
        raise BadOption(
            f"{option}={name!r} is not the name of a column", hint=f'for example {option}="ts"', option=option
        )
    return name


def column_of(table: pa.Table, name: str) -> pa.ChunkedArray:
    found = table.schema.get_all_field_indices(name)
    if len(found) != 1:
        raise WrongColumn(
            f"the table has {'no' if not found else 'more than one'} column {name!r}",
            hint=f"it has: {', '.join(table.column_names)}",
            column=name,
            available=table.column_names[:50],
        )
    return table.column(found[0])


def keys_of(table: pa.Table, names: Sequence[str], schema: pa.Schema) -> Keys:
    columns = []
    for name, field in zip(names, schema, strict=True):
        column = cast_column(column_of(table, name), field, name)
        if column.null_count:
            raise NullKey(
                f"the key column {name!r} is null in {column.null_count:,} of {len(column):,} rows",
                hint="filter these rows out, or give them a key",
                column=name,
                rows=column.null_count,
            )
        columns.append(column)
    return encode_keys(columns, schema)


def values_of(table: pa.Table, names: Sequence[str], schema: pa.Schema) -> list[pa.Array]:
    return [
        cast_column(column_of(table, name), field, name) for name, field in zip(names, schema, strict=True)
    ]


def times_of(table: pa.Table, name: str, expected: str) -> tuple[npt.NDArray[np.int64], TimeKind]:
    """The times of a column. `expected` is the kind of time that the State has; empty if it has none yet."""
    times, kind = time_column(column_of(table, name), name)
    check_kind(name, kind, expected)
    return times, kind


def time_kind_in(table: pa.Table, name: str) -> TimeKind:
    """What kind of time a column holds."""
    return time_column(column_of(table, name).slice(0, 0), name)[1]


def check_kind(name: str, kind: TimeKind, expected: str) -> None:
    """Refuses a time column of another kind than the State's; any will do where that is empty."""
    if expected and kind != expected:
        raise wrong_time_kind("this state", expected, kind, name)


def sequence_of(table: pa.Table, name: str) -> pa.Array:
    """The column by which rows of one key and time are ordered, as longs."""
    column = column_of(table, name)
    if column.null_count:
        raise NullValue(
            f"the column {name!r} that orders rows is null in {column.null_count:,} of {len(column):,} rows",
            hint="give every row its place, or leave seq= out",
            column=name,
            rows=column.null_count,
        )
    if not (pa.types.is_integer(column.type) or pa.types.is_temporal(column.type)):
        raise WrongType(
            f"the column {name!r} that orders rows is {column.type}",
            hint="cast it to long",
            column=name,
            expected="an integer or a timestamp",
            actual=str(column.type),
        )
    return pa.array(time_column(column, name)[0])
