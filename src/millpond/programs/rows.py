"""Calls as rows: the columns that they have beside the user's, and the types of arguments and results."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from millpond.programs.elements import DenseMatrix, Matrix, Vector
from millpond.schema import parse_ddl

KEY, ROW, ERROR = "_key", "_row", "error"
"""Columns: the key by which a row comes in, its order among all rows of the epoch, and why a call was rejected."""
ONCE = "_once"
"""The column of idempotency keys, where calls have one."""
PARTITION_BITS = 40
"""The order of a row is its place in its partition, and above so many bits the number of that."""


_ELEMENTS = {
    "vector": "map<long, double>",
    "matrix": "array<struct<row: long, column: long, value: double>>",
    "dense": "map<long, array<double>>",
}


def arrow_type(kind: str) -> pa.DataType:
    """Of an argument or a result as users have it in tables: elements as maps, or as lists of entries."""
    return parse_ddl(f"value {_ELEMENTS.get(kind, kind)}", "value").field(0).type


def as_value(found: Any, kind: str) -> Any:
    """What a method gets, of what a table has."""
    if found is None or kind not in _ELEMENTS:
        return found
    if kind == "matrix":
        return Matrix({(entry["row"], entry["column"]): entry["value"] for entry in found})
    return Vector(dict(found)) if kind == "vector" else DenseMatrix(dict(found))


def in_table(value: Any, kind: str) -> Any:
    """What a table has, of what a method gets or gives."""
    if value is None or kind not in _ELEMENTS:
        return value
    if kind == "matrix":
        return [{"row": r, "column": c, "value": x} for (r, c), x in value.entries().items()]
    return list(value.entries().items())


def place_in_partition(row: int) -> int:
    return row & ((1 << PARTITION_BITS) - 1)


def described(row: int) -> str:
    partition, place = row >> PARTITION_BITS, place_in_partition(row)
    return f"row {place}" + (f" of partition {partition}" if partition else "")
