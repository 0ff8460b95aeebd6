"""Elements whose entries are cells of `kernels.cells`: sparse matrices, vectors, and maps from longs to numbers.

They are what plain elements are, but for where entries lie: code that is compiled reads and changes the same cells.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from functools import lru_cache
from typing import Any, cast

import numpy as np
from numba import types
from numba.extending import typeof_impl

from millpond.kernels import cell_columns, cell_grid, cell_log
from millpond.kernels._jit import JIT_ENABLED
from millpond.kernels.cell_types import MAPS, MATRIX, ROW
from millpond.kernels.cells import CELLS, NOW, NULL, PRESENT, new_cells
from millpond.programs.columns import Doubles, Longs, present, values_of, words_of
from millpond.programs.elements import Map, Matrix, Vector
from millpond.programs.elements.element import index_of
from millpond.programs.elements.vector import Numbers, pairs_of
from millpond.programs.values import LONG_MAX, LONG_MIN, NUMBERS, fit, zero_of

_LONG, _DOUBLE, _LONGS, _DOUBLES, _FLAGS = (
    types.int64,
    types.float64,
    types.int64[::1],
    types.float64[::1],
    types.uint8[::1],
)
_KERNELS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "get_double": (cell_columns.get_double, (CELLS, _LONG, _LONG, _LONG, _DOUBLE)),
    "get_number": (cell_columns.get_number, (CELLS, _LONG, _LONG, _LONG)),
    "get_word": (cell_columns.get_word, (CELLS, _LONG, _LONG, _LONG)),
    "set_double": (cell_columns.set_double, (CELLS, _LONG, _LONG, _DOUBLE)),
    "set_word": (cell_columns.set_word, (CELLS, _LONG, _LONG, _LONG, _LONG)),
    "delete": (cell_columns.delete, (CELLS, _LONG, _LONG)),
    "clear": (cell_log.clear, (CELLS, _LONG, types.boolean)),
    "settle": (cell_log.settle, (CELLS,)),
    "mark": (cell_log.mark, (CELLS,)),
    "undo_to": (cell_log.undo_to, (CELLS, _LONG)),
    "clean": (cell_log.clean, (CELLS,)),
    "row_columns": (cell_columns.row_columns, (CELLS, _LONG, _LONG)),
    "row_length": (cell_columns.row_length, (CELLS, _LONG, _LONG)),
    "keys_of_rows": (cell_columns.keys_of_rows, (CELLS, _LONG)),
    "all_columns": (cell_columns.all_columns, (CELLS, _LONG)),
    "column": (cell_columns.column, (CELLS, _LONG, _LONG)),
    "changed_columns": (cell_columns.changed_columns, (CELLS,)),
    "decided_columns": (cell_columns.decided_columns, (CELLS, _LONGS, _LONGS)),
    "put_columns": (cell_columns.put_columns, (CELLS, _LONGS, _LONGS, _LONGS, _FLAGS, types.boolean)),
    "change_columns": (
        cell_columns.change_columns,
        (CELLS, _LONG, _LONGS, _LONGS, _FLAGS, types.boolean, _DOUBLE),
    ),
    "copied": (cell_columns.copied, (CELLS, CELLS)),
    "arrays_of": (cell_columns.arrays_of, (CELLS,)),
    "multiply": (cell_grid.multiply, (CELLS, _LONG, _LONGS, _DOUBLES, _LONG)),
}


class _Kernels:
    """The kernels by name, each loaded or compiled when it is first asked for.

    To have numba find out the types of what it is called with takes much longer than most of them do.
    """

    def __getattr__(self, name: str) -> Any:
        function, signature = _KERNELS[name]
        entry = function.compile(signature) if JIT_ENABLED else function
        setattr(self, name, entry)
        return entry


kernels: Any = _Kernels()


@lru_cache(maxsize=1)
def warm_up() -> None:
    """Load all kernels, or compile them the very first time: where no call waits for it, whose time is limited."""
    new_cells()
    for name in _KERNELS:
        getattr(kernels, name)


def warm_up_for(fields: Iterable[tuple[str, str, str]]) -> None:
    """The same, if one of these fields (element, key, value) is of cells."""
    if any(is_of_cells(*types_) for types_ in fields):
        warm_up()


def is_of_cells(kind: str, key: str, value: str) -> bool:
    """Whether a field of that kind is of cells: a matrix, a vector, or a map from longs to numbers."""
    return kind in ("matrix", "vector") or (kind == "map" and key == "long" and value in NUMBERS)


def _arrays(entries: Vector | Numbers | Mapping[int, float]) -> tuple[Longs, Doubles]:
    if isinstance(entries, Vector):
        keys, values = entries.arrays()
        return np.ascontiguousarray(keys), np.ascontiguousarray(values)
    pairs = pairs_of(entries)
    return np.array([i for i, _ in pairs], np.int64), np.array([float(x) for _, x in pairs], np.float64)


def _long(key: Any) -> Any:
    """A key of a map, or None."""
    return fit(key, "long")


class _Cells:
    """Of decided cells, whose `limit` is not NOW, nothing is changed."""

    __slots__ = ()
    _cells: Any
    _limit: int

    def _changing(self) -> Any:
        if self._limit != NOW:
            raise TypeError("what decided epochs left is only read")
        return self._cells


class CellVector(_Cells, Vector):
    """A row of cells: a vector, or a row where it is in a matrix."""

    __slots__ = ("_cells", "_limit", "_row")

    def __init__(self, cells: Any, row: int = 0, limit: int = NOW) -> None:
        self._cells = cells
        self._row = row
        self._limit = limit

    @property
    def _entries(self) -> Mapping[int, float]:
        return dict(self.items())

    def arrays(self) -> tuple[Longs, Doubles]:
        keys, words, _ = kernels.row_columns(self._cells, self._limit, self._row)
        return keys, words.view(np.float64)

    def __getitem__(self, index: int) -> float:
        found: float = kernels.get_double(self._cells, self._limit, self._row, index_of(index), 0.0)
        return found

    def __setitem__(self, index: int, value: float) -> None:
        kernels.set_double(self._changing(), self._row, index_of(index), float(value))

    def __delitem__(self, index: int) -> None:
        kernels.delete(self._changing(), self._row, index_of(index))

    def __contains__(self, index: int) -> bool:
        return bool(kernels.get_word(self._cells, self._limit, self._row, index_of(index))[0])

    def __len__(self) -> int:
        return int(kernels.row_length(self._cells, self._limit, self._row))

    def get(self, index: int, default: float = 0.0) -> float:
        flags, found = kernels.get_number(self._cells, self._limit, self._row, index_of(index))
        return found if flags else default

    def keys(self) -> list[int]:
        keys: list[int] = self.arrays()[0].tolist()
        return keys

    def items(self) -> list[tuple[int, float]]:
        keys, values = self.arrays()
        return list(zip(keys.tolist(), values.tolist(), strict=True))

    def add(self, other: Vector | Numbers, times: float = 1.0) -> None:
        keys, values = _arrays(other)
        self._change(keys, values, True, float(times))

    def assign(self, other: Vector | Numbers) -> None:
        keys, values = _arrays(other)
        self.clear()
        self._change(keys, values, False, 1.0)

    def _change(self, keys: Longs, values: Doubles, adds: bool, times: float) -> None:
        words, flags = values.view(np.int64), present(len(keys))
        kernels.change_columns(self._changing(), self._row, keys, words, flags, adds, times)

    def clear(self) -> None:
        kernels.clear(self._changing(), self._row, False)

    def copy(self) -> Vector:  # type: ignore[override] # a copy is not part of the state
        return Vector.of_arrays(*self.arrays())


class CellMatrix(_Cells, Matrix):
    """All rows of cells."""

    __slots__ = ("_cells", "_limit")

    def __init__(self, cells: Any, limit: int = NOW) -> None:
        self._cells = cells
        self._limit = limit

    @property
    def _rows(self) -> dict[int, dict[int, float]]:  # type: ignore[override] # what copies are made of
        rows: dict[int, dict[int, float]] = {}
        for place, x in self.entries().items():
            row, key = cast(tuple[int, int], place)
            rows.setdefault(row, {})[key] = x
        return rows

    def __getitem__(self, place: Any) -> Any:
        if type(place) is not tuple:
            return CellVector(self._cells, index_of(place), self._limit)
        row, key = place
        if type(row) is not int or type(key) is not int:
            row, key = index_of(row), index_of(key)
        try:
            return kernels.get_double(self._cells, self._limit, row, key, 0.0)
        except OverflowError:
            index_of(row), index_of(key)  # says which
            raise

    def __setitem__(self, place: Any, value: Any) -> None:
        if type(place) is tuple:
            row, key = place
            if type(row) is not int or type(key) is not int:
                row, key = index_of(row), index_of(key)
            try:
                kernels.set_double(self._changing(), row, key, float(value))
            except OverflowError:
                index_of(row), index_of(key)  # says which
                raise
        elif isinstance(value, Vector):
            self[place].assign(value)
        else:
            raise TypeError(f"a row of a matrix is a Vector, not {value!r}")

    def __delitem__(self, place: Any) -> None:
        if isinstance(place, tuple):
            row, key = place
            kernels.delete(self._changing(), index_of(row), index_of(key))
        else:
            kernels.clear(self._changing(), index_of(place), False)

    def __contains__(self, place: Any) -> bool:
        if isinstance(place, tuple):
            row, key = place
            return bool(kernels.get_word(self._cells, self._limit, index_of(row), index_of(key))[0])
        return bool(kernels.row_length(self._cells, self._limit, index_of(place)))

    def entries(self) -> dict[Hashable, Any]:
        rows, keys, words, _ = kernels.all_columns(self._cells, self._limit)
        places = zip(rows.tolist(), keys.tolist(), strict=True)
        return dict(zip(places, words.view(np.float64).tolist(), strict=True))

    def keys(self) -> list[int]:
        keys: list[int] = kernels.keys_of_rows(self._cells, self._limit).tolist()
        return keys

    def column(self, index: int) -> Vector:
        rows, words = kernels.column(self._cells, self._limit, index_of(index))
        return Vector.of_arrays(rows, words.view(np.float64))

    def multiply(self, vector: Vector) -> Vector:
        keys, values = _arrays(vector)
        return Vector.of_arrays(*kernels.multiply(self._cells, self._limit, keys, values, len(keys)))

    def copy(self) -> Matrix:  # type: ignore[override] # a copy is not part of the state
        made = Matrix()
        made.assign(self)
        return made

    def assign(self, other: Matrix) -> None:
        rows = {row: Vector(other[row]) for row in other.keys()}  # noqa: SIM118 - rows with entries
        self.clear()
        for row, entries in rows.items():
            self[row].assign(entries)

    def clear(self) -> None:
        kernels.clear(self._changing(), 0, True)


class CellMap(_Cells, Map[int, Any]):
    """A map from longs to numbers in row 0 of cells."""

    __slots__ = ("_cells", "_limit")

    def __init__(self, cells: Any, key: str, value: str, limit: int = NOW) -> None:
        self._cells = cells
        self._limit = limit
        self._key = key
        self._value = value

    @property
    def value_type(self) -> str:
        return self._value

    def __getitem__(self, key: int) -> Any:
        return self.get(key, zero_of(self._value))

    def get(self, key: int, default: Any = None) -> Any:
        place = key if type(key) is int and LONG_MIN <= key <= LONG_MAX else _long(key)
        if place is None:
            return default
        if self._value == "double":
            flags, value = kernels.get_number(self._cells, self._limit, 0, place)
        else:
            flags, value = kernels.get_word(self._cells, self._limit, 0, place)
        if flags != PRESENT:
            return None if flags else default
        return bool(value) if self._value == "boolean" else value

    def __setitem__(self, key: int, value: Any) -> None:
        place = key if type(key) is int and LONG_MIN <= key <= LONG_MAX else _long(key)
        if place is None:
            raise TypeError("None is no key")
        fitted = fit(value, self._value)
        if fitted is None:
            kernels.set_word(self._changing(), 0, place, 0, PRESENT | NULL)
        elif self._value == "double":
            kernels.set_double(self._changing(), 0, place, fitted)
        else:
            kernels.set_word(self._changing(), 0, place, int(fitted), PRESENT)

    def __delitem__(self, key: int) -> None:
        place = _long(key)
        if place is not None:
            kernels.delete(self._changing(), 0, place)

    def __contains__(self, key: int) -> bool:
        place = _long(key)
        return place is not None and bool(kernels.get_word(self._cells, self._limit, 0, place)[0])

    def __len__(self) -> int:
        return int(kernels.row_length(self._cells, self._limit, 0))

    def keys(self) -> list[int]:
        keys: list[int] = kernels.row_columns(self._cells, self._limit, 0)[0].tolist()
        return keys

    def values(self) -> list[Any]:
        _, words, flags = kernels.row_columns(self._cells, self._limit, 0)
        return values_of(self._value, words, flags)

    def items(self) -> list[tuple[int, Any]]:
        keys, words, flags = kernels.row_columns(self._cells, self._limit, 0)
        return list(zip(keys.tolist(), values_of(self._value, words, flags), strict=True))

    def entries(self) -> dict[Hashable, Any]:
        return dict(self.items())

    def copy(self) -> Map[int, Any]:  # type: ignore[override] # a copy is not part of the state
        made: Map[int, Any] = Map(self._key, self._value)
        made.assign(self)
        return made

    def assign(self, other: Map[int, Any]) -> None:
        entries = {_long(key): fit(value, self._value) for key, value in other.items()}
        words, flags = words_of(self._value, list(entries.values()))
        self.clear()
        kernels.change_columns(
            self._changing(), 0, np.array(list(entries), np.int64), words, flags, False, 1.0
        )

    def clear(self) -> None:
        kernels.clear(self._changing(), 0, True)


# What compiled code takes for them.
typeof_impl.register(CellMatrix)(lambda element, context: MATRIX)
typeof_impl.register(CellVector)(lambda element, context: ROW)
typeof_impl.register(CellMap)(lambda element, context: MAPS[element.value_type])
