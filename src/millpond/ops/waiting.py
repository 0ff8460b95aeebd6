"""Rows of DataFrames that wait: what a turn leaves behind, and how it becomes rows of a later turn."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from millpond.errors import WrongType
from millpond.ops import frames
from millpond.stores.waiting import WaitingList

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

# A column that was kept as one of these can be read as a later one.
WIDER = (("tinyint", "smallint", "int", "bigint"), ("float", "double"))


class Left(NamedTuple):
    """What a turn leaves behind: how many rows wait, the lowest time they ask for, and a digest of what they ask."""

    waiting: int = 0
    lowest: int | None = None
    token: str = ""
    digest: int = 0


class Widening:
    """How rows that waited get the columns that the stream has now. Plain data that tasks can carry."""

    def __init__(self, schema: pa.Schema | None = None) -> None:
        self._schema = schema

    def __call__(self, table: pa.Table) -> pa.Table:
        if self._schema is None:
            return table
        columns = [
            table.column(field.name).cast(field.type)
            if field.name in table.column_names
            else pa.chunked_array([pa.nulls(table.num_rows, field.type)])
            for field in self._schema
        ]
        return pa.Table.from_arrays(columns, schema=self._schema)


def schema_of(listed: WaitingList) -> StructType:
    """The columns of rows that wait, as the stream had them."""
    from pyspark.sql.types import StructType

    return StructType.fromJson(json.loads(listed.schema))


def widening(listed: WaitingList, schema: StructType) -> Widening:
    """For rows that wait and a stream of that schema: a column that is new is null, one that became wider is cast."""
    if not listed.schema:  # they came in Arrow tables
        return Widening(frames.arrow_schema(schema))
    before = schema_of(listed)
    if before.simpleString() == schema.simpleString():
        return Widening()
    for field in schema.fields:
        if field.name not in before.names:
            continue
        wanted, actual = field.dataType.simpleString(), before[field.name].dataType.simpleString()
        is_wider = any(actual in widths and wanted in widths[widths.index(actual) :] for widths in WIDER)
        if actual != wanted and not is_wider:
            raise WrongType(
                f"rows wait whose column {field.name!r} is {actual}; now it is {wanted}",
                hint="the epoch has begun: give the column the type it had until none of them wait",
                column=field.name,
                expected=actual,
                actual=wanted,
            )
    return Widening(frames.arrow_schema(schema))
