"""A table in memory: a key index over rows of cells, whose strings the tables of one group share.

A row is int64[1 + columns]: cell 0 says whether the row is there, doubles lie in the same memory as float64, decimals
are numbers of their smallest unit. A row number is given to every key that a transaction may touch; until it is written
to, and after it was deleted, the row holds the defaults. A key is a long for each of its columns: of a string, its number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millpond.code.tables import KEY, TableSpec, Type, range_of, type_of, units_of
from millpond.errors import WrongColumn
from millpond.schema import describe_type
from millpond.stores import views
from millpond.stores.budget import UNLIMITED, Budget
from millpond.stores.dirty import Dirty
from millpond.stores.growing import grown
from millpond.stores.parts import one_array
from millpond.stores.row_index import RowIndex
from millpond.stores.strings import Strings
from millpond.stores.threads import in_parts

Longs = NDArray[np.int64]

_INDEX_BYTES = 64  # of one key: itself, its entry, and the slots that it takes
NOT_KNOWN = -3  # in place of the row of a key: it is yet to be looked for


@dataclass(frozen=True)
class KeyColumn:
    """One column of a key: how transactions see it, and what it holds."""

    type: Type
    lowest: int
    highest: int

    @property
    def is_narrow(self) -> bool:
        """Whether there are longs that it does not hold."""
        return self.type == "long" and self.highest < (1 << 63) - 1


@dataclass(frozen=True)
class Column:
    """A column: its cell, how transactions see it, and what it holds. A float is held as the double that it is."""

    cell: int
    type: Type
    ddl: str
    lowest: int
    highest: int

    @property
    def is_narrow(self) -> bool:
        """Whether there are longs that it does not hold."""
        return self.type not in ("bool", "string", "double") and self.highest < (1 << 63) - 1

    @property
    def is_float(self) -> bool:
        return self.ddl == "float"


@dataclass(frozen=True)
class TableLayout:
    """Where the columns of a table lie in its cells. Cell 0 says whether the row is there."""

    name: str
    number: int
    keys: tuple[KeyColumn, ...]
    columns: Mapping[str, Column]
    has_default: bool

    @property
    def width(self) -> int:
        return 1 + len(self.columns)

    @property
    def string_cells(self) -> list[int]:
        return [column.cell for column in self.columns.values() if column.type == "string"]

    @property
    def string_keys(self) -> list[int]:
        """The places of strings in the key."""
        return [place for place, key in enumerate(self.keys) if key.type == "string"]


def layout_of(spec: TableSpec, number: int, name: str = "") -> TableLayout:
    """Where the columns of a table lie in its rows."""
    columns = {field.name: column_of(field.type, cell) for cell, field in enumerate(spec.columns, start=1)}
    keys = tuple(KeyColumn(c.type, c.lowest, c.highest) for c in (column_of(f.type) for f in spec.keys))
    return TableLayout(name, number, keys, columns, spec.default is not None)


def column_of(type_: pa.DataType, cell: int = 0) -> Column:
    """A column of a type that transactions know."""
    held = type_of(type_)
    assert held is not None
    lowest, highest = (0, 0) if held in ("string", "double") else range_of(type_)
    return Column(cell, held, describe_type(type_), lowest, highest)


class TableStore:
    """The rows of one table. Stores that transactions run over together share their strings."""

    def __init__(self, spec: TableSpec, strings: Strings) -> None:
        self.spec = spec
        self.strings = strings
        self.layout = layout_of(spec, 0)
        self.index = RowIndex(len(self.layout.keys))
        self.cells: Longs = np.zeros((0, self.layout.width), np.int64)
        # Rows that are made ready. The index may have more, where memory ran out in between.
        self.count = 0
        # Rows that decided epochs have changed since the table was last clean.
        self.dirty = Dirty()
        # The rows of small keys by key, as far as they are known: no hash, no search. A copy knows none.
        self.known: Longs = np.empty(0, np.int64)
        self.first = np.zeros(self.layout.width, np.int64)
        for name, value in (spec.default or {}).items():
            column = self.layout.columns[name]
            self.first[column.cell] = self.encoded(value, column.type)

    def encoded(self, value: Any, type_: Type) -> int:
        """A value as its cell holds it."""
        if type_.startswith("decimal"):
            units = units_of(value, int(type_[7:]))
            assert units is not None, "a decimal of its scale"
            return units
        if type_ == "double":
            return int(np.array([value], np.float64).view(np.int64)[0])
        if type_ == "string":
            return self.strings.number(value)
        return int(value)

    def __len__(self) -> int:
        """Rows that are there."""
        return int(np.count_nonzero(self.cells[: self.count, 0]))

    @property
    def doubles(self) -> NDArray[np.float64]:
        return self.cells.view(np.float64)

    def key_numbers(self, keys: Sequence[pa.Array], known_only: bool = False) -> Longs:
        """Key columns as kernels see them: longs, or the numbers of strings, -1 for those not known if none is given."""
        strings = self.strings.find if known_only else self.strings.intern
        parts = [
            strings(column) if key.type == "string" else views.longs(column)
            for key, column in zip(self.layout.keys, keys, strict=True)
        ]
        return views.plain(parts[0].reshape(-1, 1) if len(parts) == 1 else np.stack(parts, axis=1))

    def find(self, keys: Sequence[pa.Array], budget: Budget = UNLIMITED) -> pa.Table:
        """The rows of those keys, given by column, that are there, in their order. Reads only."""
        cast = [column.cast(field.type) for column, field in zip(keys, self.spec.keys, strict=True)]
        whole = pa.table(cast, [str(place) for place in range(len(cast))]).drop_null().combine_chunks()
        rows = self.index.find(
            self.key_numbers([one_array(whole, place) for place in range(len(cast))], known_only=True)
        )
        rows = rows[(rows >= 0) & (rows < self.count)]
        rows = rows[self.cells[rows, 0] != 0]
        if budget is not UNLIMITED:
            budget.claim(self._size_of(rows))
        return self._rows(rows)

    def _size_of(self, rows: Longs) -> int:
        """How many bytes these rows take as Arrow columns, roughly."""
        numbers = [self.cells[rows, cell] for cell in self.layout.string_cells]
        numbers += [self.index.keys[rows, place] for place in self.layout.string_keys]
        cells = 8 * len(rows) * (len(self.layout.keys) + len(self.layout.columns))
        return cells + sum(self.strings.size_of(each) for each in numbers)

    def resolve(self, keys: Longs, threads: int = 1) -> Longs:
        """The row of each key, made ready where there is none yet."""
        wanted = views.plain(keys).reshape(-1, len(self.layout.keys))
        found = in_parts(lambda lo, hi: self.index.find(wanted[lo:hi]), len(wanted), threads)
        rows: Longs = found[0] if len(found) == 1 else np.concatenate(found)
        missing = np.flatnonzero(rows < 0)
        if len(missing):
            rows[missing] = self.index.assign(wanted.take(missing, axis=0))
        self.settle()
        return rows

    def settle(self) -> None:
        """Every key has its row, also where memory ran out before it was made ready."""
        if len(self.index) > self.count:
            self._make_ready(self.count, len(self.index))

    def _make_ready(self, before: int, count: int) -> None:
        self.cells = grown(self.cells, before, count)
        self.cells[before:count] = self.first
        self._know(before, count)
        self.count = count

    def _know(self, before: int, count: int) -> None:
        """New rows are known by their keys, where that takes little memory."""
        if len(self.layout.keys) > 1:
            return
        keys = self.index.keys[before:count, 0]
        small = (keys >= 0) & (keys < 4 * count + 1024)
        most = int(keys[small].max(initial=-1)) + 1
        if most > len(self.known):
            longer = np.full(max(most, 2 * len(self.known)), NOT_KNOWN, np.int64)
            longer[: len(self.known)] = self.known
            self.known = longer
        self.known[keys[small]] = np.arange(before, count)[small]

    def resolve_one(self, key: tuple[int, ...]) -> int:
        return int(self.resolve(np.array([key], np.int64))[0])

    def find_one(self, key: tuple[int, ...]) -> int:
        """The row of a key, -1 where it has none."""
        row = int(self.index.find(np.array([key], np.int64))[0])
        return row if row < self.count else -1

    def key_of(self, row: int) -> int | str | tuple[int | str, ...]:
        parts = tuple(
            self.strings.text(int(number)) if key.type == "string" else int(number)
            for key, number in zip(self.layout.keys, self.index.keys[row], strict=True)
        )
        return parts[0] if len(parts) == 1 else parts

    def make_room(self) -> None:
        """For rows that kernels make themselves, if there is none left."""
        rows = len(self.index)
        if not self.index.has_room or rows >= len(self.cells):
            more = max(1024, rows)
            self.index.reserve(more)
            self.cells = grown(self.cells, rows, rows + more)

    def take_in(self) -> None:
        """Rows that kernels have made count from now on."""
        if len(self.index) > self.count:
            self._know(self.count, len(self.index))
            self.count = len(self.index)

    def snapshot(self) -> pa.Table:
        """All rows that are there, in the order of their keys: equal tables give equal bytes."""
        rows = np.flatnonzero(self.cells[: self.count, 0])
        out = self._rows(rows)
        names = [str(place) for place in range(out.num_columns)]  # a column may be called as a key is
        order = [(name, "ascending") for name in names[: len(self.layout.keys)]]
        return out.take(pc.sort_indices(out.rename_columns(names), order)).combine_chunks()

    export = snapshot

    def _rows(self, rows: Longs) -> pa.Table:
        return self._arrow_rows(self.index.keys[rows], self.cells[rows])

    def changed(self, cells_before: Callable[[Longs], Longs] | None = None) -> tuple[pa.Table, pa.Table]:
        """Rows that have changed since the table was last clean, and the keys of those that are gone.

        `cells_before` tells of rows what they held before an epoch that is not decided.
        """
        rows = self.dirty.ids()
        cells = self.cells[rows] if cells_before is None else cells_before(rows)
        there, keys = cells[:, 0] != 0, self.index.keys[rows]
        gone = self._arrow_rows(keys[~there], cells[~there])
        return self._arrow_rows(keys[there], cells[there]), gone.select(range(len(self.layout.keys)))

    def _arrow_rows(self, keys: Longs, cells: Longs) -> pa.Table:
        columns = [
            self._arrow(keys[:, place], field.type, key.type)
            for place, (field, key) in enumerate(zip(self.spec.keys, self.layout.keys, strict=True))
        ]
        for field in self.spec.columns:
            column = self.layout.columns[field.name]
            source = cells.view(np.float64) if column.type == "double" else cells
            columns.append(self._arrow(source[:, column.cell], field.type, column.type))
        # One key column is called KEY, as it always was.
        keys_as = (
            self.spec.keys if len(self.layout.keys) > 1 else [pa.field(KEY, self.spec.keys.field(0).type)]
        )
        return pa.table(columns, schema=pa.schema([*keys_as, *self.spec.columns]))

    def _arrow(self, values: NDArray[Any], type_: pa.DataType, held: Type) -> pa.Array:
        if held == "string":
            return self.strings.take(values).cast(type_)
        return arrow_of(values, type_, None)

    def load(self, rows: pa.Table) -> None:
        """Adds rows, as `export` gave them; those that are there already are replaced."""
        rows = rows.combine_chunks()
        # By place: a column may be called as a key is.
        count = len(self.layout.keys)
        keys = [one_array(rows, place).cast(field.type) for place, field in enumerate(self.spec.keys)]
        places = self.resolve(self.key_numbers(keys))
        for place, field in enumerate(self.spec.columns, start=count):
            found = self.layout.columns[field.name]
            cell, type_ = found.cell, found.type
            column = one_array(rows, place).cast(field.type)
            if column.null_count:
                raise WrongColumn(
                    f"column {field.name!r} has nulls", column=field.name, available=rows.column_names
                )
            if type_ == "double":
                self.doubles[places, cell] = views.floats(column)
            elif type_ == "string":
                self.cells[places, cell] = self.strings.intern(column)
            else:
                self.cells[places, cell] = views.longs(column)
        self.cells[places, 0] = 1

    def copy(self, strings: Strings) -> TableStore:
        """The table as it is now, to be read while this one goes on, with a copy of its strings."""
        other = TableStore(self.spec, strings)
        other.index = self.index.copy()
        other.cells = self.cells[: self.count].copy()
        other.count = self.count
        return other

    @property
    def row_bytes(self) -> int:
        """Of one row and its key, roughly."""
        return 8 * self.layout.width + _INDEX_BYTES

    def only(self, rows: Longs, strings: Strings, number_of: Longs) -> TableStore:
        """A table of these rows alone, over other strings; `number_of` are their numbers there."""
        other = TableStore(self.spec, strings)
        keys = self.index.keys[rows]
        for place in self.layout.string_keys:
            keys[:, place] = number_of[keys[:, place]]
        other.resolve(keys)
        other.cells[: len(rows)] = self.cells[rows]
        for cell in self.layout.string_cells:
            other.cells[: len(rows), cell] = number_of[self.cells[rows, cell]]
        other.dirty = self.dirty.only(rows)
        return other

    def take_over(self, other: TableStore) -> None:
        """Becomes what the other is, but for the strings, which do the same."""
        self.index, self.cells, self.count = other.index, other.cells, other.count
        self.known, self.first = other.known, other.first
        self.dirty = other.dirty

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + int(self.cells.nbytes)

    def validate(self) -> None:
        """Check every invariant; slow."""
        self.index.validate()
        count = self.count
        assert len(self.cells) >= count
        assert len(self.index) >= count
        assert not self.dirty.flags[count:].any(), "what is dirty is there"
        there = self.cells[:count, 0]
        assert np.isin(there, (0, 1)).all()
        assert (self.cells[:count][there == 0] == self.first).all(), (
            "a row that is not there holds the defaults"
        )


def new_stores(specs: Mapping[str, TableSpec]) -> dict[str, TableStore]:
    """Empty tables that share their strings."""
    strings = Strings()
    return {name: TableStore(spec, strings) for name, spec in specs.items()}


def arrow_of(values: NDArray[Any], type_: pa.DataType, valid: NDArray[np.uint8] | None) -> pa.Array:
    """Numbers as cells hold them, all within its range, as an array of a type other than string."""
    bits, nulls, count = None, 0, len(values)
    if valid is not None:
        bits, nulls = (
            pa.py_buffer(np.packbits(valid, bitorder="little")),
            count - int(np.count_nonzero(valid)),
        )
    if pa.types.is_boolean(type_):
        data = np.packbits(values != 0, bitorder="little")
    elif pa.types.is_decimal128(type_):
        data = np.empty((count, 2), np.int64)
        data[:, 0], data[:, 1] = values, values >> 63
    else:
        width = type_.bit_width // 8
        data = np.ascontiguousarray(values, f"f{width}" if pa.types.is_floating(type_) else f"i{width}")
    return pa.Array.from_buffers(type_, count, [bits, pa.py_buffer(data)], nulls)
