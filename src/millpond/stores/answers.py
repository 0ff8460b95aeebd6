"""Fetch rules: the types they give, and their answers over positions and ranges of the arena."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millpond.errors import BadOption, TotalOverflow, WrongType
from millpond.kernels import lookups
from millpond.stores import views
from millpond.stores.cells import Column, Layout, in_place_array
from millpond.stores.heaps import Heap

AGGREGATES = {"total": lookups.TOTAL, "smallest": lookups.SMALLEST, "largest": lookups.LARGEST}
RULES = ("latest", "values", "count", *AGGREGATES)


def result_schema(values: pa.Schema, rule: str) -> pa.Schema:
    """The types that `fetch` gives under a rule. `WrongType` where the rule does not fit a column's type."""
    if rule == "latest":
        return pa.schema([pa.field(field.name, field.type) for field in values])
    if rule == "values":
        return pa.schema([pa.field(field.name, pa.list_(field.type)) for field in values])
    if rule == "count":
        return pa.schema([pa.field("count", pa.int64())])
    if rule == "total":
        return pa.schema([pa.field(field.name, _total_type(field)) for field in values])
    if rule in AGGREGATES:
        return pa.schema([pa.field(field.name, _ordered_type(field, rule)) for field in values])
    raise BadOption(f"no rule {rule!r}", hint=f"one of {', '.join(RULES)}", option="rule")


def _total_type(field: pa.Field) -> pa.DataType:
    if pa.types.is_signed_integer(field.type):
        return pa.int64()
    if views.is_double(field.type):
        return pa.float64()
    raise WrongType(
        f"total() adds numbers; column {field.name!r} is {field.type}",
        hint="hold it as long or double, or use another rule",
        column=field.name,
        expected="byte, short, int, long, float or double",
        actual=str(field.type),
    )


def _ordered_type(field: pa.Field, rule: str) -> pa.DataType:
    type_ = field.type
    if views.is_long(type_) or views.is_double(type_) or views.is_bytes(type_) or pa.types.is_decimal(type_):
        return type_
    raise WrongType(
        f"{rule}() compares values; column {field.name!r} is {type_}",
        hint="use latest(), values() or count()",
        column=field.name,
        expected="a number, boolean, date, timestamp, string, binary or decimal",
        actual=str(type_),
    )


class Reader:
    """Reads value columns of the arena and the heaps behind it. `mask` is the null mask's cell, -1 for none."""

    __slots__ = ("_cells", "_heaps", "_layout", "_mask")

    def __init__(
        self, layout: Layout, cells: NDArray[np.int64], mask: int, heaps: Mapping[int, Heap]
    ) -> None:
        self._layout = layout
        self._cells = cells
        self._mask = mask
        self._heaps = heaps

    def times(self, positions: NDArray[np.int64]) -> pa.Array:
        out, bits = _answers(len(positions))
        lookups.gather(self._cells, 0, -1, 0, positions, out, bits)
        return in_place_array(pa.int64(), out, None, 0)

    def gather(self, positions: NDArray[np.int64]) -> list[pa.Array]:
        """Each value column at those positions; null at -1."""
        refs = self._references(positions)
        return [
            self._heaps[c].take(refs) if column.kind == "heap" else self._in_place(column, positions)
            for c, column in enumerate(self._layout.columns)
        ]

    def lists(self, begin: NDArray[np.int64], end: NDArray[np.int64], total: int) -> list[pa.Array]:
        """Each value column's values over each range, oldest first."""
        offsets, positions = _expanded(begin, end, total)
        narrow = pa.py_buffer(views.narrow_offsets(offsets))
        return [
            pa.Array.from_buffers(
                pa.list_(items.type), len(begin), [None, narrow], null_count=0, children=[items]
            )
            for items in self.gather(positions)
        ]

    def aggregates(
        self, begin: NDArray[np.int64], end: NDArray[np.int64], total: int, rule: int
    ) -> list[pa.Array]:
        """Each value column's total, smallest or largest over each range."""
        name = next(name for name, code in AGGREGATES.items() if code == rule)
        types = result_schema(pa.schema([column.field for column in self._layout.columns]), name).types
        out = []
        for c, (column, type_) in enumerate(zip(self._layout.columns, types, strict=True)):
            if column.kind == "heap":
                out.append(self._ranked(c, begin, end, total, rule))
            elif column.kind == "double":
                out.append(self._doubles(column, type_, begin, end, rule))
            else:
                out.append(self._longs(column, type_, begin, end, rule))
        return out

    def _references(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        refs = np.empty(len(positions) if self._heaps else 0, np.int64)
        if self._heaps:
            lookups.gather_refs(self._cells, self._layout.reference, positions, refs)
        return refs

    def _in_place(self, column: Column, positions: NDArray[np.int64]) -> pa.Array:
        out, bits = _answers(len(positions))
        nulls = lookups.gather(self._cells, column.cell, self._mask, column.bit, positions, out, bits)
        return in_place_array(column.field.type, out, pa.py_buffer(bits) if nulls else None, nulls)

    def _longs(
        self,
        column: Column,
        type_: pa.DataType,
        begin: NDArray[np.int64],
        end: NDArray[np.int64],
        rule: int,
    ) -> pa.Array:
        out, valid = np.empty(len(begin), np.int64), np.empty(len(begin), np.uint8)
        overflows = lookups.aggregate_longs(
            self._cells, column.cell, self._mask, column.bit, begin, end, rule, out, valid
        )
        if overflows:
            raise TotalOverflow(
                f"{overflows} totals of column {column.field.name!r} do not fit a long",
                hint="hold the column as double",
                rows=overflows,
            )
        return in_place_array(type_, out, *_packed(valid))

    def _doubles(
        self,
        column: Column,
        type_: pa.DataType,
        begin: NDArray[np.int64],
        end: NDArray[np.int64],
        rule: int,
    ) -> pa.Array:
        out, valid = np.empty(len(begin), np.float64), np.empty(len(begin), np.uint8)
        cells = self._cells.view(np.float64)
        lookups.aggregate_doubles(
            self._cells, cells, column.cell, self._mask, column.bit, begin, end, rule, out, valid
        )
        return in_place_array(type_, out.view(np.int64), *_packed(valid))

    def _ranked(
        self, c: int, begin: NDArray[np.int64], end: NDArray[np.int64], total: int, rule: int
    ) -> pa.Array:
        """Smallest or largest of a heap column: of the values' places in their sorted order."""
        offsets, positions = _expanded(begin, end, total)
        items = self._heaps[c].take(self._references(positions))
        order = pc.sort_indices(items).to_numpy().astype(np.int64)
        ranks = np.empty((len(order), 2), np.int64)
        ranks[order, 0] = np.arange(len(order))
        ranks[:, 1] = views.longs(items.is_null())
        out, valid = np.empty(len(begin), np.int64), np.empty(len(begin), np.uint8)
        lookups.aggregate_longs(ranks, 0, 1, 0, offsets[:-1], offsets[1:], rule, out, valid)
        best = np.zeros(len(out), np.int64)
        best[valid != 0] = order[out[valid != 0]]
        return items.take(pa.array(best, mask=valid == 0))


def _answers(count: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    return np.empty(count, np.int64), np.empty((count + 7) // 8, np.uint8)


def _expanded(
    begin: NDArray[np.int64], end: NDArray[np.int64], total: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    offsets, positions = np.empty(len(begin) + 1, np.int64), np.empty(total, np.int64)
    lookups.expand(begin, end, offsets, positions)
    return offsets, positions


def _packed(valid: NDArray[np.uint8]) -> tuple[pa.Buffer | None, int]:
    """Validity flags as Arrow bits, and how many are not set."""
    nulls = len(valid) - int(np.count_nonzero(valid))
    return (pa.py_buffer(np.packbits(valid, bitorder="little")) if nulls else None), nulls
