"""A table in memory: a key index over rows of cells, whose strings the tables of one group share.

A row is int64[1 + columns]: cell 0 says whether the row is there, doubles lie in the same memory as float64. A row
number is given to every key that a transaction may touch; until it is written to, the row holds the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millpond.code.tables import KEY, TableSpec, Type, type_of
from millpond.errors import WrongColumn
from millpond.kernels import control as at
from millpond.stores import views
from millpond.stores.budget import UNLIMITED, Budget
from millpond.stores.growing import grown
from millpond.stores.key_index import KeyIndex
from millpond.stores.keys import Keys
from millpond.stores.strings import Strings
from millpond.stores.threads import in_parts

_INDEX_BYTES = 64  # of one key: itself, its entry, and the slots that it takes
NOT_KNOWN = -3  # in place of the row of a key: it is yet to be looked for


@dataclass(frozen=True)
class TableLayout:
    """Where the columns of a table lie in its cells. Cell 0 says whether the row is there."""

    number: int
    key: Type
    columns: Mapping[str, tuple[int, Type]]
    has_default: bool
    key_bits: int = 64  # of keys that are numbers

    @property
    def key_range(self) -> tuple[int, int]:
        """The lowest and the highest key."""
        return -(1 << self.key_bits - 1), (1 << self.key_bits - 1) - 1

    @property
    def width(self) -> int:
        return 1 + len(self.columns)

    @property
    def string_cells(self) -> list[int]:
        return [cell for cell, type_ in self.columns.values() if type_ == "string"]


def layout_of(spec: TableSpec, number: int) -> TableLayout:
    """Where the columns of a table lie in its rows."""
    columns: dict[str, tuple[int, Type]] = {}
    for cell, field in enumerate(spec.columns, start=1):
        type_ = type_of(field.type)
        assert type_ is not None
        columns[field.name] = (cell, type_)
    key = type_of(spec.key_type)
    assert key is not None
    bits = 64 if key == "string" else spec.key_type.bit_width
    return TableLayout(number, key, columns, spec.default is not None, bits)


class TableStore:
    """The rows of one table. Stores that transactions run over together share their strings."""

    def __init__(self, spec: TableSpec, strings: Strings) -> None:
        self.spec = spec
        self.strings = strings
        self.layout = layout_of(spec, 0)
        self.index = KeyIndex("i64", np.zeros(at.SIZE, np.int64))
        self.cells: NDArray[np.int64] = np.zeros((0, self.layout.width), np.int64)
        # Rows that are made ready. The index may have more, where memory ran out in between.
        self.count = 0
        # The rows of small keys by key, as far as they are known: no hash, no search. A copy knows none.
        self.known: NDArray[np.int64] = np.empty(0, np.int64)
        self.first = np.zeros(self.layout.width, np.int64)
        for name, value in (spec.default or {}).items():
            cell, type_ = self.layout.columns[name]
            self.first[cell] = self.encoded(value, type_)

    def encoded(self, value: Any, type_: Type) -> int:
        """A value as its cell holds it."""
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

    def key_numbers(self, keys: pa.Array) -> NDArray[np.int64]:
        """Keys as kernels see them: longs, or the numbers of strings."""
        if self.layout.key == "string":
            return self.strings.intern(keys)
        return views.plain(views.longs(keys))

    def find(self, keys: pa.Array, budget: Budget = UNLIMITED) -> pa.Table:
        """The rows of those keys that are there, in their order. Reads only."""
        keys = keys.cast(self.spec.key_type).drop_null()
        is_string = self.layout.key == "string"
        numbers = self.strings.find(keys) if is_string else self.key_numbers(keys)
        rows = self.index.find(Keys.from_longs(numbers))
        rows = rows[(rows >= 0) & (rows < self.count)]
        rows = rows[self.cells[rows, 0] != 0]
        if budget is not UNLIMITED:
            budget.claim(self._size_of(rows))
        return self._rows(rows)

    def _size_of(self, rows: NDArray[np.int64]) -> int:
        """How many bytes these rows take as Arrow columns, roughly."""
        numbers = [
            self.cells[rows, cell] for cell, type_ in self.layout.columns.values() if type_ == "string"
        ]
        if self.layout.key == "string":
            numbers.append(self.index.stored_keys().longs[rows])
        cells = 8 * len(rows) * (1 + len(self.layout.columns))
        return cells + sum(self.strings.size_of(each) for each in numbers)

    def resolve(self, keys: NDArray[np.int64], threads: int = 1) -> NDArray[np.int64]:
        """The row of each key, made ready where there is none yet."""
        wanted = Keys.from_longs(keys)
        found = in_parts(lambda lo, hi: self.index.find(wanted.part(lo, hi)), len(keys), threads)
        rows: NDArray[np.int64] = found[0] if len(found) == 1 else np.concatenate(found)
        missing = np.flatnonzero(rows < 0)
        if len(missing):
            rows[missing] = self.index.assign(wanted.take(missing))
        if len(self.index) > self.count:
            self._make_ready(self.count, len(self.index))
        return rows

    def _make_ready(self, before: int, count: int) -> None:
        self.index.advance_growth(len(self.index.old))
        self.cells = grown(self.cells, before, count)
        self.cells[before:count] = self.first
        self._know(before, count)
        self.count = count

    def _know(self, before: int, count: int) -> None:
        """New rows are known by their keys, where that takes little memory."""
        keys = self.index.stored_keys().longs[before:count]
        small = (keys >= 0) & (keys < 4 * count + 1024)
        most = int(keys[small].max(initial=-1)) + 1
        if most > len(self.known):
            longer = np.full(max(most, 2 * len(self.known)), NOT_KNOWN, np.int64)
            longer[: len(self.known)] = self.known
            self.known = longer
        self.known[keys[small]] = np.arange(before, count)[small]

    def resolve_one(self, key: int) -> int:
        return int(self.resolve(np.array([key], np.int64))[0])

    def key_of(self, row: int) -> int | str:
        key = int(self.index.stored_keys().longs[row])
        return self.strings.text(key) if self.layout.key == "string" else key

    def snapshot(self) -> pa.Table:
        """All rows that are there, in the order of their keys: equal tables give equal bytes."""
        rows = np.flatnonzero(self.cells[: self.count, 0])
        out = self._rows(rows)
        return out.take(pc.sort_indices(out.column(0))).combine_chunks()

    export = snapshot

    def _rows(self, rows: NDArray[np.int64]) -> pa.Table:
        keys = self.index.stored_keys().longs[rows]
        columns = [self._arrow(keys, self.spec.key_type, self.layout.key)]
        for field in self.spec.columns:
            cell, type_ = self.layout.columns[field.name]
            source = self.doubles if type_ == "double" else self.cells
            columns.append(self._arrow(source[rows, cell], field.type, type_))
        fields = [pa.field(KEY, self.spec.key_type), *self.spec.columns]
        return pa.table(columns, schema=pa.schema(fields))

    def _arrow(self, values: NDArray[Any], type_: pa.DataType, held: Type) -> pa.Array:
        if held == "string":
            return self.strings.take(values).cast(type_)
        if pa.types.is_date32(type_):
            values = values.astype(np.int32)
        return pa.array(values != 0 if held == "bool" else values).cast(type_)

    def load(self, rows: pa.Table) -> None:
        """Adds rows, as `export` gave them; those that are there already are replaced."""
        rows = rows.combine_chunks()
        # A column may be called as the key is.
        places_of = rows.schema.get_all_field_indices
        numbers = self.key_numbers(_one(rows.column(places_of(KEY)[0])).cast(self.spec.key_type))
        places = self.resolve(numbers)
        for field in self.spec.columns:
            cell, type_ = self.layout.columns[field.name]
            column = _one(rows.column(places_of(field.name)[-1])).cast(field.type)
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
        other.index = self.index.copy(self.index.control.copy())
        other.cells = self.cells[: self.count].copy()
        other.count = self.count
        return other

    @property
    def row_bytes(self) -> int:
        """Of one row and its key, roughly."""
        return 8 * self.layout.width + _INDEX_BYTES

    def only(self, rows: NDArray[np.int64], strings: Strings, number_of: NDArray[np.int64]) -> TableStore:
        """A table of these rows alone, over other strings; `number_of` are their numbers there."""
        other = TableStore(self.spec, strings)
        keys = self.index.stored_keys().longs[rows]
        other.resolve(number_of[keys] if self.layout.key == "string" else keys)
        other.cells[: len(rows)] = self.cells[rows]
        for cell in self.layout.string_cells:
            other.cells[: len(rows), cell] = number_of[self.cells[rows, cell]]
        return other

    def take_over(self, other: TableStore) -> None:
        """Becomes what the other is, but for the strings, which do the same."""
        self.index, self.cells, self.count = other.index, other.cells, other.count
        self.known, self.first = other.known, other.first

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + int(self.cells.nbytes)

    def validate(self) -> None:
        """Check every invariant; slow."""
        self.index.validate()
        count = self.count
        assert len(self.cells) >= count
        assert len(self.index) >= count
        there = self.cells[:count, 0]
        assert np.isin(there, (0, 1)).all()
        assert (self.cells[:count][there == 0] == self.first).all(), (
            "a row that is not there holds the defaults"
        )


def new_stores(specs: Mapping[str, TableSpec]) -> dict[str, TableStore]:
    """Empty tables that share their strings."""
    strings = Strings()
    return {name: TableStore(spec, strings) for name, spec in specs.items()}


def _one(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
