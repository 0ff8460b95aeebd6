"""Incremental aggregates as cells: a few longs and doubles for each window of a key, whatever its rows.

Rows are folded into cells, where they come from or where they go to; cells are merged; and results are made of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millpond.code.windows import Aggregate
from millpond.errors import WrongType
from millpond.kernels import windows as kernel
from millpond.stores import views
from millpond.stores.answers import packed
from millpond.stores.cells import in_place_array
from millpond.stores.windows.userfold import UserFold, user_fold

Longs = NDArray[np.int64]
Doubles = NDArray[np.float64]
LONG_MIN, LONG_MAX = -(2**63), 2**63 - 1
_IDENTITY_LONG = {kernel.MIN: LONG_MAX, kernel.MAX: LONG_MIN, kernel.TOP: LONG_MIN}
_IDENTITY_DOUBLE = {kernel.MIN: np.nan, kernel.MAX: -np.inf, kernel.TOP: -np.inf}


class Cells(NamedTuple):
    """A row for each group: its cells of longs and of doubles."""

    longs: Longs
    doubles: Doubles

    def take(self, rows: Longs) -> Cells:
        return Cells(self.longs[rows], self.doubles[rows])

    @property
    def nbytes(self) -> int:
        return int(self.longs.nbytes + self.doubles.nbytes)


class _Kept(NamedTuple):
    """Where one aggregate is kept. `valid` is the cell that counts its values, -1 where all rows count."""

    aggregate: Aggregate
    column: int
    is_double: bool
    cell: int
    width: int
    valid: int
    fold: UserFold | None = None


class CellLayout:
    """How the aggregates of one window are kept. Columns of values are by number."""

    def __init__(self, values: pa.Schema, aggregates: Mapping[str, Aggregate]) -> None:
        self.values = values
        self._long_ops: list[int] = []
        self._double_ops: list[int] = []
        self._long_widths: list[int] = []
        self._double_widths: list[int] = []
        self._long_zero: list[int] = []
        self._double_zero: list[float] = []
        self._counts: dict[int, int] = {}
        self._kept: dict[str, _Kept] = {}
        for name, aggregate in aggregates.items():
            self._kept[name] = self._place(aggregate)
        self.long_ops = np.array(self._long_ops, np.int64)
        self.double_ops = np.array(self._double_ops, np.int64)
        self.long_widths = np.array(self._long_widths, np.int64)
        self.double_widths = np.array(self._double_widths, np.int64)
        self.schema = pa.schema(
            [
                *((f"_long{number}", pa.int64()) for number in range(len(self._long_ops))),
                *((f"_double{number}", pa.float64()) for number in range(len(self._double_ops))),
            ]
        )
        """Cells as columns that travel."""

    def _place(self, aggregate: Aggregate) -> _Kept:
        if aggregate.name == "count" and not aggregate.column:
            return _Kept(aggregate, -1, False, self._count(-1), 1, -1)
        column = column_number(self.values, aggregate)
        field = self.values.field(column)
        valid = self._count(column)
        if aggregate.name == "count":
            return _Kept(aggregate, column, False, valid, 1, -1)
        if not (views.is_long(field.type) or views.is_double(field.type)):
            raise WrongType(
                f"{aggregate} is kept as numbers; column {field.name!r} is {field.type}",
                hint="cast it to long or double",
                column=field.name,
                expected="a number, boolean, date or timestamp",
                actual=str(field.type),
            )
        is_double = views.is_double(field.type)
        if aggregate.name in ("total", "mean") and not (is_double or pa.types.is_signed_integer(field.type)):
            raise WrongType(
                f"{aggregate} adds numbers; column {field.name!r} is {field.type}",
                hint="cast it to long or double",
                column=field.name,
                expected="byte, short, int, long, float or double",
                actual=str(field.type),
            )
        if aggregate.name == "fold":
            return self._place_fold(aggregate, column, is_double, valid)
        match aggregate.name:
            case "mean":
                return _Kept(aggregate, column, is_double, self._double(kernel.ADD), 1, valid)
            case "total" if is_double:
                return _Kept(aggregate, column, True, self._double(kernel.ADD), 1, valid)
            case "total":
                cell = self._long(kernel.LOW)
                self._long(kernel.HIGH)
                return _Kept(aggregate, column, False, cell, 2, valid)
            case "smallest" | "largest":
                op = kernel.MIN if aggregate.name == "smallest" else kernel.MAX
                cell = self._double(op) if is_double else self._long(op)
                return _Kept(aggregate, column, is_double, cell, 1, valid)
        width = int(aggregate.number)
        cell = self._double(kernel.TOP, width) if is_double else self._long(kernel.TOP, width)
        for _ in range(width - 1):
            (self._double if is_double else self._long)(kernel.REST, 1, kernel.TOP)
        return _Kept(aggregate, column, is_double, cell, width, valid)

    def _place_fold(self, aggregate: Aggregate, column: int, is_double: bool, valid: int) -> _Kept:
        cells = []
        for number in aggregate.zero:
            if isinstance(number, float):
                cells.append(("doubles", self._double(kernel.REST)))
                self._double_zero[-1] = number
            else:
                cells.append(("longs", self._long(kernel.REST)))
                self._long_zero[-1] = number
        return _Kept(
            aggregate, column, is_double, -1, 0, valid, user_fold(aggregate, is_double, tuple(cells))
        )

    def _count(self, column: int) -> int:
        """The cell that counts rows, or the values of a column that are not null: one for all aggregates."""
        if column not in self._counts:
            self._counts[column] = self._long(kernel.ADD)
        return self._counts[column]

    def _long(self, op: int, width: int = 1, zero_of: int | None = None) -> int:
        self._long_ops.append(op)
        self._long_widths.append(width)
        self._long_zero.append(_IDENTITY_LONG.get(op if zero_of is None else zero_of, 0))
        return len(self._long_ops) - 1

    def _double(self, op: int, width: int = 1, zero_of: int | None = None) -> int:
        self._double_ops.append(op)
        self._double_widths.append(width)
        self._double_zero.append(_IDENTITY_DOUBLE.get(op if zero_of is None else zero_of, 0.0))
        return len(self._double_ops) - 1

    @property
    def interpreted(self) -> list[str]:
        """Why folds of the user's are not compiled, where they are not."""
        return [
            kept.fold.reason for kept in self._kept.values() if kept.fold is not None and kept.fold.reason
        ]

    @property
    def has_folds(self) -> bool:
        """Whether cells are merged by functions of the user's."""
        return any(kept.fold is not None for kept in self._kept.values())

    # Cells

    def zeros(self, rows: int) -> Cells:
        """Cells that have taken in nothing yet."""
        longs = np.empty((rows, len(self._long_zero)), np.int64)
        doubles = np.empty((rows, len(self._double_zero)), np.float64)
        longs[:] = self._long_zero
        doubles[:] = self._double_zero
        return Cells(longs, doubles)

    def fold(self, groups: Longs, count: int, values: Sequence[pa.Array]) -> Cells:
        """The cells of so many groups, of which each row is in one."""
        cells = self.zeros(count)
        flags = [flags_of(column) for column in values]
        for column, cell in self._counts.items():
            kernel.count_rows(groups, views.NO_BYTES if column < 0 else flags[column], cell, cells.longs)
        for kept in self._kept.values():
            if kept.column < 0 or kept.aggregate.name == "count":
                continue
            array, valid = values[kept.column], flags[kept.column]
            if kept.fold is not None:
                kept.fold.add(groups, _numbers(array, kept.is_double), valid, cells.longs, cells.doubles)
            elif kept.is_double or kept.aggregate.name == "mean":
                op = self._double_ops[kept.cell]
                doubles = _numbers(array, kept.is_double).astype(np.float64, copy=False)
                kernel.fold_doubles(groups, doubles, valid, op, kept.width, kept.cell, cells.doubles)
            else:
                op = self._long_ops[kept.cell]
                longs = views.plain(views.longs(array))
                kernel.fold_longs(groups, longs, valid, op, kept.width, kept.cell, cells.longs)
        return cells

    def merge(self, entries: Longs, others: Cells, cells: Cells) -> None:
        """Row i of `others` is taken into row `entries[i]` of `cells`."""
        if len(self._long_ops):
            kernel.merge_longs(entries, others.longs, self.long_ops, self.long_widths, cells.longs)
        if len(self._double_ops):
            kernel.merge_doubles(entries, others.doubles, self.double_ops, self.double_widths, cells.doubles)
        for kept in self._kept.values():
            if kept.fold is not None:
                kept.fold.merge(entries, others.longs, others.doubles, cells.longs, cells.doubles)

    def to_arrow(self, cells: Cells) -> list[pa.Array]:
        """As columns of `schema`, which share no memory with the cells."""
        return [
            *(pa.array(cells.longs[:, n].copy()) for n in range(cells.longs.shape[1])),
            *(pa.array(cells.doubles[:, n].copy()) for n in range(cells.doubles.shape[1])),
        ]

    def from_arrow(self, columns: Sequence[pa.Array]) -> Cells:
        rows, first = len(columns[0]) if columns else 0, len(self._long_ops)
        longs = np.empty((rows, first), np.int64)
        doubles = np.empty((rows, len(self._double_ops)), np.float64)
        for number, column in enumerate(columns):
            if number < first:
                longs[:, number] = views.longs(column)
            else:
                doubles[:, number - first] = views.floats(column)
        return Cells(longs, doubles)

    # Results

    def results(self, cells: Cells) -> dict[str, pa.Array]:
        return {name: self._result(kept, cells) for name, kept in self._kept.items()}

    def _result(self, kept: _Kept, cells: Cells) -> pa.Array:
        longs, doubles = cells
        if kept.aggregate.name == "count":
            return pa.array(longs[:, kept.cell].copy())
        valid = (longs[:, kept.valid] > 0).astype(np.uint8)
        field = self.values.field(kept.column)
        if kept.fold is not None:
            result = kept.fold.result(longs, doubles)
            return pc.if_else(pa.array(valid.astype(np.bool_)), result, pa.scalar(None, result.type))
        if kept.aggregate.name == "top":
            source = doubles if kept.is_double else longs
            block = np.ascontiguousarray(source[:, kept.cell : kept.cell + kept.width])
            lengths = np.minimum(longs[:, kept.valid], kept.width)
            flat = block[np.arange(kept.width) < lengths[:, None]]
            items = in_place_array(field.type, flat.view(np.int64), None, 0)
            offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
            return pa.ListArray.from_arrays(pa.array(views.narrow_offsets(offsets)), items)
        if kept.aggregate.name == "mean":
            mean = doubles[:, kept.cell] / np.maximum(longs[:, kept.valid], 1)
            return in_place_array(pa.float64(), mean.view(np.int64), *packed(valid))
        if kept.is_double:
            type_ = pa.float64() if kept.aggregate.name == "total" else field.type
            bits = doubles[:, kept.cell].copy().view(np.int64)
            return in_place_array(type_, bits, *packed(valid))
        numbers = longs[:, kept.cell].copy()
        if kept.aggregate.name == "total":
            # One that a long does not hold is told as null.
            valid &= (longs[:, kept.cell + 1] == numbers >> 63).astype(np.uint8)
            return in_place_array(pa.int64(), numbers, *packed(valid))
        return in_place_array(field.type, numbers, *packed(valid))


def column_number(values: pa.Schema, aggregate: Aggregate) -> int:
    """The column that an aggregate is of."""
    if aggregate.column:
        return int(values.names.index(aggregate.column))
    assert len(values) == 1, "an aggregate without a column is of the only one"
    return 0


def flags_of(array: pa.Array) -> NDArray[np.uint8]:
    """A flag for each value that is not null; nothing where all are."""
    if array.null_count == 0:
        return views.NO_BYTES
    return views.plain(array.is_valid().cast(pa.uint8()).to_numpy(), np.uint8)


def _numbers(array: pa.Array, is_double: bool) -> NDArray[np.int64] | NDArray[np.float64]:
    if is_double:
        return views.plain(views.floats(array), np.float64)
    return views.plain(views.longs(array))
