"""Where each value column lives in an arena row, and the way in and out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.errors import WrongType
from millpond.kernels import lookups
from millpond.stores import views

# The null mask is one int64; columns beyond live in the heap.
MAX_IN_PLACE = 63


class Column(NamedTuple):
    """`long` and `double` columns have a cell of their own and a bit in the null mask; `heap` columns share a reference."""

    field: pa.Field
    kind: Literal["long", "double", "heap"]
    cell: int
    bit: int


class Layout:
    """An arena row: the time, a cell per in-place column, the heap reference if any column needs it.

    A null mask comes last, in arenas that have met a null in an in-place column.
    """

    def __init__(self, schema: pa.Schema) -> None:
        columns = []
        cell = 1
        for field in schema:
            in_place = cell <= MAX_IN_PLACE
            if in_place and views.is_long(field.type):
                columns.append(Column(field, "long", cell, cell - 1))
            elif in_place and views.is_double(field.type):
                columns.append(Column(field, "double", cell, cell - 1))
            else:
                columns.append(Column(field, "heap", -1, -1))
                continue
            cell += 1
        self.columns = tuple(columns)
        self.reference = cell if any(column.kind == "heap" for column in columns) else -1
        self.width = cell + (self.reference >= 0)

    def check(self, values: Sequence[pa.Array], rows: int, count: int) -> None:
        """Refuse arrays that are not `count` of the layout's types, `rows` long, with offsets within their data."""
        if len(values) != count:
            raise WrongType(f"expected {count} value columns, got {len(values)}")
        for column, array in zip(self.columns, values, strict=False):
            if array.type != column.field.type or len(array) != rows:
                expected = f"{rows} rows of {column.field.type}"
                actual = f"{len(array)} rows of {array.type}"
                raise WrongType(
                    f"value column {column.field.name!r}: expected {expected}, got {actual}",
                    column=column.field.name,
                    expected=expected,
                    actual=actual,
                )
            if views.is_bytes(array.type):
                views.byte_ranges(array)

    def has_nulls(self, values: Sequence[pa.Array]) -> bool:
        """Whether an in-place column has a null."""
        return any(a.null_count for c, a in zip(self.columns, values, strict=False) if c.kind != "heap")

    def rows(
        self, times: NDArray[np.int64], values: Sequence[pa.Array], reference: int, masked: bool
    ) -> NDArray[np.int64]:
        """A batch as arena rows; its heap references count up from `reference`. Cells beyond the values are not set."""
        rows = np.empty((len(times), self.width + masked), np.int64)
        rows[:, 0] = times
        doubles = rows.view(np.float64)
        for column, array in zip(self.columns, values, strict=False):
            if column.kind == "long":
                rows[:, column.cell] = views.integers(array)
            elif column.kind == "double":
                doubles[:, column.cell] = views.floats(array)
        if self.reference >= 0:
            rows[:, self.reference] = np.arange(reference, reference + len(times))
        if masked:
            rows[:, self.width] = 0
            for column, array in zip(self.columns, values, strict=False):
                if column.kind != "heap" and array.null_count:
                    lookups.mark_nulls(views.validity(array), array.offset, column.bit, rows)
        return rows


def numbers(column: Column, cells: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[Any]:
    """An in-place column at those positions as rules see it: longs, doubles or booleans."""
    longs: NDArray[np.int64] = cells[positions, column.cell]
    if column.kind == "double":
        return longs.view(np.float64)
    return longs != 0 if pa.types.is_boolean(column.field.type) else longs


def in_place_array(
    type_: pa.DataType, cells: NDArray[np.int64], valid: pa.Buffer | None, nulls: int
) -> pa.Array:
    """Cells, longs or the bits of doubles, as an array of the column's own type."""
    data: NDArray[np.int64] | pa.Buffer = cells
    if pa.types.is_boolean(type_):
        return pa.Array.from_buffers(
            type_, len(cells), [valid, pa.array(cells != 0).buffers()[1]], null_count=nulls
        )
    if pa.types.is_float32(type_):
        with np.errstate(over="ignore"):
            data = cells.view(np.float64).astype(np.float32)
    elif type_.bit_width < 64:
        data = cells.astype(f"i{type_.bit_width // 8}")
    return pa.Array.from_buffers(type_, len(cells), [valid, pa.py_buffer(data)], null_count=nulls)
