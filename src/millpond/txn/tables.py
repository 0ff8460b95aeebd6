"""A table in memory: a key index over rows of cells, and the strings that the tables of one group share.

A row is int64[1 + columns]: cell 0 says whether the row is there, doubles lie in the same memory as float64. A row
number is given to every key that a transaction may touch; until it is written to, the row holds the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millpond.code.tables import KEY, TableSpec, Type, type_of
from millpond.errors import WrongColumn
from millpond.kernels import control as at
from millpond.stores import views
from millpond.stores.key_index import KeyIndex
from millpond.stores.keys import Keys
from millpond.stores.room import grown
from millpond.txn._keycode import ASKED
from millpond.txn._statements import TableLayout
from millpond.txn._threads import in_parts


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


class Strings:
    """Strings and their numbers. The empty one is number 0. None is ever forgotten."""

    def __init__(self) -> None:
        self._index = KeyIndex("bytes", np.zeros(at.SIZE, np.int64))
        self.intern(pa.array([""]))

    def __len__(self) -> int:
        return len(self._index)

    def intern(self, array: pa.Array) -> NDArray[np.int64]:
        """The numbers of strings, without nulls; new ones are given where there are none."""
        if len(array) == 0:
            return np.empty(0, np.int64)
        encoded = array.dictionary_encode() if len(array) > 64 else None
        if encoded is None:
            return self._index.assign(Keys.from_arrow(array))
        numbers = self._index.assign(Keys.from_arrow(encoded.dictionary))
        return numbers[views.longs(encoded.indices)]

    def find(self, array: pa.Array) -> NDArray[np.int64]:
        """The numbers of strings, without nulls; -1 for one that was never seen."""
        return self._index.find(Keys.from_arrow(array))

    def copy(self) -> Strings:
        """The strings as they are now, to be read while this one goes on."""
        other = Strings()
        other._index = self._index.copy(self._index.control.copy())
        return other

    def number(self, text: str) -> int:
        return int(self.intern(pa.array([text]))[0])

    def take(self, numbers: NDArray[np.int64]) -> pa.Array:
        found = self._index.stored_keys().take(views.plain(numbers)).to_arrow()
        return found.cast(pa.large_string() if pa.types.is_large_binary(found.type) else pa.string())

    def text(self, number: int) -> str:
        return str(self.take(np.array([number]))[0])


class TableStore:
    """The rows of one table. Stores that one program runs over share their strings."""

    def __init__(self, spec: TableSpec, strings: Strings) -> None:
        self.spec = spec
        self.strings = strings
        self.layout = layout_of(spec, 0)
        self.index = KeyIndex("i64", np.zeros(at.SIZE, np.int64))
        self.cells: NDArray[np.int64] = np.zeros((0, self.layout.width), np.int64)
        # The rows of small keys by key, as far as they are known: no hash, no search. A copy knows none.
        self.known: NDArray[np.int64] = np.empty(0, np.int64)
        self._first = np.zeros(self.layout.width, np.int64)
        for name, value in (spec.default or {}).items():
            cell, type_ = self.layout.columns[name]
            self._first[cell] = self.encoded(value, type_)

    def encoded(self, value: Any, type_: Type) -> int:
        """A value as its cell holds it."""
        if type_ == "double":
            return int(np.array([value], np.float64).view(np.int64)[0])
        if type_ == "string":
            return self.strings.number(value)
        return int(value)

    def __len__(self) -> int:
        """Rows that are there."""
        return int(np.count_nonzero(self.cells[: len(self.index), 0]))

    @property
    def doubles(self) -> NDArray[np.float64]:
        return self.cells.view(np.float64)

    def key_numbers(self, keys: pa.Array) -> NDArray[np.int64]:
        """Keys as kernels see them: longs, or the numbers of strings."""
        if self.layout.key == "string":
            return self.strings.intern(keys)
        return views.plain(views.longs(keys))

    def find(self, keys: pa.Array) -> pa.Table:
        """The rows of those keys that are there, in their order. Reads only."""
        keys = keys.cast(self.spec.key_type).drop_null()
        is_string = self.layout.key == "string"
        numbers = self.strings.find(keys) if is_string else self.key_numbers(keys)
        rows = self.index.find(Keys.from_longs(numbers))
        rows = rows[rows >= 0]
        return self._rows(rows[self.cells[rows, 0] != 0])

    def resolve(self, keys: NDArray[np.int64], threads: int = 1) -> NDArray[np.int64]:
        """The row of each key, made ready where there is none yet."""
        before = len(self.index)
        wanted = Keys.from_longs(keys)
        found = in_parts(lambda lo, hi: self.index.find(wanted.part(lo, hi)), len(keys), threads)
        rows: NDArray[np.int64] = found[0] if len(found) == 1 else np.concatenate(found)
        missing = np.flatnonzero(rows < 0)
        if len(missing):
            rows[missing] = self.index.assign(wanted.take(missing))
        count = len(self.index)
        if count > before:
            self.index.advance_growth(len(self.index.old))
            self.cells = grown(self.cells, before, count)
            self.cells[before:count] = self._first
            self._know(before, count)
        return rows

    def _know(self, before: int, count: int) -> None:
        """New rows are known by their keys, where that takes little memory."""
        keys = self.index.stored_keys().longs[before:count]
        small = (keys >= 0) & (keys < 4 * count + 1024)
        most = int(keys[small].max(initial=-1)) + 1
        if most > len(self.known):
            longer = np.full(max(most, 2 * len(self.known)), ASKED, np.int64)
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
        rows = np.flatnonzero(self.cells[: len(self.index), 0])
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
        other.cells = self.cells[: len(self.index)].copy()
        return other

    def keep(self) -> NDArray[np.int64]:
        """The cells as they are, for `put_back`."""
        return self.cells[: len(self.index)].copy()

    def put_back(self, kept: NDArray[np.int64]) -> None:
        self.cells[: len(kept)] = kept

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + int(self.cells.nbytes)

    def validate(self) -> None:
        """Check every invariant; slow."""
        self.index.validate()
        count = len(self.index)
        assert len(self.cells) >= count
        there = self.cells[:count, 0]
        assert np.isin(there, (0, 1)).all()
        assert (self.cells[:count][there == 0] == self._first).all(), (
            "a row that is not there holds the defaults"
        )


def new_stores(specs: Mapping[str, TableSpec]) -> dict[str, TableStore]:
    """Empty tables that share their strings."""
    strings = Strings()
    return {name: TableStore(spec, strings) for name, spec in specs.items()}


def _one(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
