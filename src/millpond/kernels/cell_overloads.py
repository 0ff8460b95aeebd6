"""Elements in compiled code, spelt as in Python. What an operation gives is what Python gives, or it raises, or does not compile:
where it raises, what was done is to be taken back, and done again by Python, which knows what is to be said.

Lists are arrays here: of `keys()`, `values()`, `top()` and `array()`. What loops over an element loops over its `keys()`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload, overload_method

from millpond.kernels import cell_vectors as vectors
from millpond.kernels.cell_columns import change_columns, column, keys_of_rows, row_columns, row_length
from millpond.kernels.cell_grid import multiply
from millpond.kernels.cell_log import add_to_cell, clear, read, remove, write
from millpond.kernels.cell_types import (
    MAP_BOOLEAN,
    MAP_DOUBLE,
    MAP_LONG,
    MapType,
    MatrixType,
    RowType,
    VectorType,
    row_of,
    vector_of,
)
from millpond.kernels.cells import NOW, NULL, PRESENT, as_double, as_word

_DOUBLES = (types.Array(types.float64, 1, "C"), types.Array(types.float64, 1, "C", readonly=True))
ANY_VECTOR = (RowType, VectorType)
READ_ONLY = "what decided epochs left is only read"
NO_NUMBER = "there is no number"

Implementation = Callable[..., Any]


def compiled_as(register: Any) -> Callable[[Any], Any]:
    """Registers what chooses an implementation by types. Numba would compare the hints of both."""

    def registered(chooses: Any) -> Any:
        chooses.__annotations__ = {}

        @functools.wraps(chooses)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            implementation = chooses(*args, **kwargs)
            if implementation is not None:
                implementation.__annotations__ = {}
            return implementation

        return register(chosen)

    return registered


def is_key(kind: Any) -> bool:
    return isinstance(kind, types.Integer) and bool(getattr(kind, "signed", False))


def is_place(kind: Any) -> bool:
    items = getattr(kind, "types", ()) if isinstance(kind, types.BaseTuple) else ()
    return len(items) == 2 and all(map(is_key, items))


def is_number(kind: Any) -> bool:
    return is_key(kind) or kind == types.float64


def is_vector(kind: Any) -> bool:
    return isinstance(kind, ANY_VECTOR)


def is_numbers(kind: Any) -> bool:
    """What can stand for a vector: one, or a list of doubles from key 0 on."""
    return is_vector(kind) or kind in _DOUBLES


# Vectors as arrays


def arrays_in(numbers: Any) -> Any:
    """Keys and values of a vector; of an array the keys from 0 on. They are not to be changed."""
    raise NotImplementedError("in compiled code")


@compiled_as(overload(arrays_in))
def _arrays_in(numbers: Any) -> Implementation | None:
    if isinstance(numbers, RowType):

        def of_row(numbers: Any) -> Any:
            keys, words, _ = row_columns(numbers.cells, numbers.limit, numbers.row)
            return keys, words.view(np.float64)

        return of_row
    if isinstance(numbers, VectorType):
        return lambda numbers: (numbers.keys_[: numbers.used], numbers.values_[: numbers.used])
    if numbers in _DOUBLES:
        return lambda numbers: (np.arange(numbers.shape[0]), numbers.copy())
    return None


def increase(state: Any, row: Any, key: Any, x: Any) -> Any:
    """The same as `state[row, key] += x`, of a matrix, in less time."""
    raise NotImplementedError("in compiled code")


def increase_at(state: Any, key: Any, x: Any) -> Any:
    """The same as `state[key] += x`, of a vector or a map."""
    raise NotImplementedError("in compiled code")


# Reading


@compiled_as(overload(operator.getitem))
def _getitem(state: Any, place: Any) -> Implementation | None:
    if isinstance(state, MatrixType) and is_place(place):

        def of_matrix(state: Any, place: Any) -> Any:
            mark, word = read(state.cells, state.limit, place[0], place[1])
            return as_double(word) if mark & PRESENT else 0.0

        return of_matrix
    if isinstance(state, MatrixType) and is_key(place):
        return lambda state, place: row_of(state.cells, state.limit, place)
    if isinstance(state, RowType) and is_key(place):

        def of_row(state: Any, place: Any) -> Any:
            mark, word = read(state.cells, state.limit, state.row, place)
            return as_double(word) if mark & PRESENT else 0.0

        return of_row
    if isinstance(state, VectorType) and is_key(place):

        def of_vector(state: Any, place: Any) -> Any:
            at = vectors.place_of(state.keys_, state.used, place)
            return state.values_[at] if at < state.used and state.keys_[at] == place else 0.0

        return of_vector
    if state == MAP_LONG and is_key(place):

        def of_longs(state: Any, place: Any) -> Any:
            mark, word = read(state.cells, state.limit, 0, place)
            if mark & NULL:
                raise TypeError(NO_NUMBER)
            return word if mark & PRESENT else np.int64(0)

        return of_longs
    if state == MAP_DOUBLE and is_key(place):

        def of_doubles(state: Any, place: Any) -> Any:
            mark, word = read(state.cells, state.limit, 0, place)
            if mark & NULL:
                raise TypeError(NO_NUMBER)
            return as_double(word) if mark & PRESENT else 0.0

        return of_doubles
    if state == MAP_BOOLEAN and is_key(place):

        def of_booleans(state: Any, place: Any) -> Any:
            mark, word = read(state.cells, state.limit, 0, place)
            if mark & (NULL | PRESENT) != PRESENT:
                raise TypeError(NO_NUMBER)
            return word != 0

        return of_booleans
    return None


@compiled_as(overload(operator.contains))
def _contains(state: Any, place: Any) -> Implementation | None:
    if isinstance(state, MatrixType) and is_place(place):
        return lambda state, place: read(state.cells, state.limit, place[0], place[1])[0] & PRESENT != 0
    if isinstance(state, MatrixType) and is_key(place):
        return lambda state, place: row_length(state.cells, state.limit, place) > 0
    if isinstance(state, (RowType, MapType)) and is_key(place):
        return lambda state, place: read(state.cells, state.limit, state.row, place)[0] & PRESENT != 0
    if isinstance(state, VectorType) and is_key(place):

        def of_vector(state: Any, place: Any) -> Any:
            at = vectors.place_of(state.keys_, state.used, place)
            return at < state.used and state.keys_[at] == place

        return of_vector
    return None


@compiled_as(overload(len))
def _len(state: Any) -> Implementation | None:
    if isinstance(state, (RowType, MapType)):
        return lambda state: row_length(state.cells, state.limit, state.row)
    return (lambda state: state.used) if isinstance(state, VectorType) else None


def _get(state: Any, key: Any, default: Any) -> Implementation | None:
    if not is_key(key):
        return None
    if isinstance(state, RowType) and default == types.float64:

        def of_row(state: Any, key: Any, default: Any = None) -> Any:
            mark, word = read(state.cells, state.limit, state.row, key)
            return as_double(word) if mark & PRESENT else default

        return of_row
    if isinstance(state, VectorType) and default == types.float64:

        def of_vector(state: Any, key: Any, default: Any = None) -> Any:
            at = vectors.place_of(state.keys_, state.used, key)
            return state.values_[at] if at < state.used and state.keys_[at] == key else default

        return of_vector
    if state == MAP_DOUBLE and default == types.float64:

        def of_doubles(state: Any, key: Any, default: Any = None) -> Any:
            mark, word = read(state.cells, state.limit, 0, key)
            if mark & NULL:
                raise TypeError(NO_NUMBER)
            return as_double(word) if mark & PRESENT else default

        return of_doubles
    if state == MAP_LONG and is_key(default):

        def of_longs(state: Any, key: Any, default: Any = None) -> Any:
            mark, word = read(state.cells, state.limit, 0, key)
            if mark & NULL:
                raise TypeError(NO_NUMBER)
            return word if mark & PRESENT else np.int64(default)

        return of_longs
    if state == MAP_BOOLEAN and isinstance(default, types.Boolean):

        def of_booleans(state: Any, key: Any, default: Any = None) -> Any:
            mark, word = read(state.cells, state.limit, 0, key)
            if mark & NULL:
                raise TypeError(NO_NUMBER)
            return word != 0 if mark & PRESENT else default

        return of_booleans
    return None


for _type in (*ANY_VECTOR, MapType):

    @compiled_as(overload_method(_type, "get"))
    def _get_or(state: Any, key: Any, default: Any = None) -> Implementation | None:
        if not isinstance(default, (types.Omitted, types.NoneType)) and default is not None:
            return _get(state, key, default)
        if not is_vector(state) or not is_key(key) or isinstance(default, types.NoneType):
            return None
        return lambda state, key, default=None: state[key]


for _type in ANY_VECTOR:

    @compiled_as(overload_method(_type, "keys"))
    def _keys(state: Any) -> Implementation:
        return lambda state: arrays_in(state)[0].copy()

    @compiled_as(overload_method(_type, "values"))
    def _values(state: Any) -> Implementation:
        return lambda state: arrays_in(state)[1].copy()

    @compiled_as(overload_method(_type, "total"))
    def _total(state: Any) -> Implementation:
        return lambda state: vectors.total(arrays_in(state)[1])

    @compiled_as(overload_method(_type, "array"))
    def _array(state: Any, length: Any) -> Implementation | None:
        def full(state: Any, length: Any) -> Any:
            keys, values = arrays_in(state)
            return vectors.full(keys, values, length)

        return full if is_key(length) else None

    @compiled_as(overload_method(_type, "top"))
    def _top(state: Any, k: Any) -> Implementation | None:
        def top(state: Any, k: Any) -> Any:
            keys, values = arrays_in(state)
            return vectors.top(keys, values, k)

        return top if is_key(k) else None

    @compiled_as(overload_method(_type, "dot"))
    def _dot(state: Any, other: Any) -> Implementation | None:
        def dot(state: Any, other: Any) -> Any:
            keys, values = arrays_in(state)
            other_keys, others = arrays_in(other)
            return vectors.dot(keys, values, other_keys, others)

        return dot if is_numbers(other) else None

    @compiled_as(overload_method(_type, "without"))
    def _without(state: Any, other: Any) -> Implementation | None:
        def without(state: Any, other: Any) -> Any:
            keys, values = arrays_in(state)
            left_keys, left = vectors.without(keys, values, arrays_in(other)[0])
            return vector_of(left_keys, left)

        return without if is_vector(other) else None

    @compiled_as(overload_method(_type, "copy"))
    def _copy(state: Any) -> Implementation:
        def copy(state: Any) -> Any:
            keys, values = arrays_in(state)
            return vector_of(keys.copy(), values.copy())

        return copy


@compiled_as(overload_method(MapType, "keys"))
def _map_keys(state: Any) -> Implementation:
    return lambda state: row_columns(state.cells, state.limit, 0)[0]


@compiled_as(overload_method(MapType, "values"))
def _map_values(state: Any) -> Implementation | None:
    if state == MAP_LONG:

        def longs(state: Any) -> Any:
            _, words, flags = row_columns(state.cells, state.limit, 0)
            for flag in flags:
                if flag & NULL:
                    raise TypeError(NO_NUMBER)
            return words

        return longs
    if state == MAP_DOUBLE:

        def doubles(state: Any) -> Any:
            _, words, flags = row_columns(state.cells, state.limit, 0)
            for flag in flags:
                if flag & NULL:
                    raise TypeError(NO_NUMBER)
            return words.view(np.float64)

        return doubles
    return None


@compiled_as(overload_method(MatrixType, "keys"))
def _row_keys(state: Any) -> Implementation:
    return lambda state: keys_of_rows(state.cells, state.limit)


@compiled_as(overload_method(MatrixType, "column"))
def _column(state: Any, key: Any) -> Implementation | None:
    def of_matrix(state: Any, key: Any) -> Any:
        rows, words = column(state.cells, state.limit, key)
        return vector_of(rows, words.view(np.float64))

    return of_matrix if is_key(key) else None


@compiled_as(overload_method(MatrixType, "multiply"))
def _multiply(state: Any, vector: Any) -> Implementation | None:
    def of_matrix(state: Any, vector: Any) -> Any:
        keys, values = arrays_in(vector)
        rows, sums = multiply(state.cells, state.limit, keys, values, keys.shape[0])
        return vector_of(rows, sums)

    return of_matrix if is_vector(vector) else None


# Writing


@compiled_as(overload(operator.setitem))
def _setitem(state: Any, place: Any, value: Any) -> Implementation | None:
    if isinstance(state, MatrixType) and is_place(place) and is_number(value):

        def in_matrix(state: Any, place: Any, value: Any) -> None:
            if state.limit != NOW:
                raise TypeError(READ_ONLY)
            write(state.cells, place[0], place[1], as_word(float(value)), PRESENT)

        return in_matrix
    if isinstance(state, MatrixType) and is_key(place) and is_vector(value):

        def row(state: Any, place: Any, value: Any) -> None:
            state[place].assign(value)

        return row
    if isinstance(state, RowType) and is_key(place) and is_number(value):

        def in_row(state: Any, place: Any, value: Any) -> None:
            if state.limit != NOW:
                raise TypeError(READ_ONLY)
            write(state.cells, state.row, place, as_word(float(value)), PRESENT)

        return in_row
    if isinstance(state, VectorType) and is_key(place) and is_number(value):
        return lambda state, place, value: _set_in_vector(state, place, float(value))
    if state == MAP_DOUBLE and is_key(place) and (value == types.float64 or is_key(value)):

        def in_doubles(state: Any, place: Any, value: Any) -> None:
            if state.limit != NOW:
                raise TypeError(READ_ONLY)
            write(state.cells, 0, place, as_word(float(value)), PRESENT)

        return in_doubles
    is_long = state == MAP_LONG and is_key(value)
    if is_key(place) and (is_long or (state == MAP_BOOLEAN and isinstance(value, types.Boolean))):

        def in_map(state: Any, place: Any, value: Any) -> None:
            if state.limit != NOW:
                raise TypeError(READ_ONLY)
            word: Any = np.int64(value)
            write(state.cells, 0, place, word, PRESENT)

        return in_map
    return None


def _set_in_vector(state: Any, key: Any, value: Any) -> None:
    raise NotImplementedError("in compiled code")


@compiled_as(overload(_set_in_vector))
def _set_in_vector_(state: Any, key: Any, value: Any) -> Implementation:
    def set_(state: Any, key: Any, value: Any) -> None:
        used = state.used
        at = vectors.place_of(state.keys_, used, key)
        if at < used and state.keys_[at] == key:
            state.values_[at] = value
            return
        if used == state.keys_.shape[0]:
            keys, values = np.empty(2 * used + 4, np.int64), np.empty(2 * used + 4, np.float64)
            for i in range(used):
                keys[i], values[i] = state.keys_[i], state.values_[i]
            state.keys_ = keys
            state.values_ = values
        for i in range(used, at, -1):
            state.keys_[i], state.values_[i] = state.keys_[i - 1], state.values_[i - 1]
        state.keys_[at], state.values_[at] = key, value
        state.used = used + 1

    return set_


@compiled_as(overload(operator.delitem))
def _delitem(state: Any, place: Any) -> Implementation | None:
    if isinstance(state, MatrixType) and is_place(place):

        def in_matrix(state: Any, place: Any) -> None:
            if state.limit != NOW:
                raise TypeError(READ_ONLY)
            remove(state.cells, place[0], place[1])

        return in_matrix
    if isinstance(state, MatrixType) and is_key(place):

        def row(state: Any, place: Any) -> None:
            if state.limit != NOW:
                raise TypeError(READ_ONLY)
            clear(state.cells, place, False)

        return row
    if isinstance(state, (RowType, MapType)) and is_key(place):

        def in_row(state: Any, place: Any) -> None:
            if state.limit != NOW:
                raise TypeError(READ_ONLY)
            remove(state.cells, state.row, place)

        return in_row
    if isinstance(state, VectorType) and is_key(place):

        def in_vector(state: Any, place: Any) -> None:
            used = state.used
            at = vectors.place_of(state.keys_, used, place)
            if at < used and state.keys_[at] == place:
                for i in range(at, used - 1):
                    state.keys_[i], state.values_[i] = state.keys_[i + 1], state.values_[i + 1]
                state.used = used - 1

        return in_vector
    return None


for _view in (MatrixType, RowType, MapType):

    @compiled_as(overload_method(_view, "clear"))
    def _clear(state: Any) -> Implementation:
        whole = not isinstance(state, RowType)

        def cleared(state: Any) -> None:
            if state.limit != NOW:
                raise TypeError(READ_ONLY)
            clear(state.cells, state.row, whole)

        return cleared


@compiled_as(overload_method(VectorType, "clear"))
def _clear_vector(state: Any) -> Implementation:
    def cleared(state: Any) -> None:
        state.used = 0

    return cleared


@compiled_as(overload_method(RowType, "assign"))
def _assign_row(state: Any, other: Any) -> Implementation | None:
    def assigned(state: Any, other: Any) -> None:
        if state.limit != NOW:
            raise TypeError(READ_ONLY)
        keys, values = arrays_in(other)
        flags = np.full(keys.shape[0], PRESENT, np.uint8)
        clear(state.cells, state.row, False)
        change_columns(state.cells, state.row, keys, values.view(np.int64), flags, False, 1.0)

    return assigned if is_numbers(other) else None


@compiled_as(overload_method(VectorType, "assign"))
def _assign_vector(state: Any, other: Any) -> Implementation | None:
    def assigned(state: Any, other: Any) -> None:
        keys, values = arrays_in(other)
        state.keys_ = keys.copy()
        state.values_ = values.copy()
        state.used = keys.shape[0]

    return assigned if is_numbers(other) else None


def _add(mine: Any, other: Any, times: Any) -> None:
    raise NotImplementedError("in compiled code")


@compiled_as(overload(_add))
def _add_(mine: Any, other: Any, times: Any) -> Implementation | None:
    if isinstance(mine, RowType):

        def to_row(mine: Any, other: Any, times: Any) -> None:
            if mine.limit != NOW:
                raise TypeError(READ_ONLY)
            keys, values = arrays_in(other)
            flags = np.full(keys.shape[0], PRESENT, np.uint8)
            change_columns(mine.cells, mine.row, keys, values.view(np.int64), flags, True, times)

        return to_row

    def to_vector(mine: Any, other: Any, times: Any) -> None:
        keys, values = arrays_in(mine)
        other_keys, others = arrays_in(other)
        keys, values = vectors.added(keys, values, other_keys, others, times)
        mine.keys_ = keys
        mine.values_ = values
        mine.used = keys.shape[0]

    return to_vector


for _type in ANY_VECTOR:

    @compiled_as(overload_method(_type, "add"))
    def _add_times(state: Any, other: Any, times: Any = 1.0) -> Implementation | None:
        if not is_numbers(other):
            return None
        if isinstance(times, (float, types.Omitted)):
            return lambda state, other, times=1.0: _add(state, other, 1.0)
        return (
            (lambda state, other, times=1.0: _add(state, other, float(times))) if is_number(times) else None
        )


@compiled_as(overload(operator.add))
def _plus(mine: Any, other: Any) -> Implementation | None:
    def plus(mine: Any, other: Any) -> Any:
        keys, values = arrays_in(mine)
        other_keys, others = arrays_in(other)
        keys, values = vectors.added(keys, values, other_keys, others, 1.0)
        return vector_of(keys, values)

    return plus if is_vector(mine) and is_vector(other) else None


@compiled_as(overload(operator.sub))
def _minus(mine: Any, other: Any) -> Implementation | None:
    def minus(mine: Any, other: Any) -> Any:
        keys, values = arrays_in(mine)
        other_keys, others = arrays_in(other)
        keys, values = vectors.added(keys, values, other_keys, others, -1.0)
        return vector_of(keys, values)

    return minus if is_vector(mine) and is_vector(other) else None


@compiled_as(overload(operator.mul))
def _times(mine: Any, other: Any) -> Implementation | None:
    def times(mine: Any, other: Any) -> Any:
        keys, values = arrays_in(mine)
        return vector_of(keys.copy(), vectors.scaled(values, float(other), False))

    def reversed_(mine: Any, other: Any) -> Any:
        keys, values = arrays_in(other)
        return vector_of(keys.copy(), vectors.scaled(values, float(mine), False))

    if is_vector(mine) and is_number(other):
        return times
    return reversed_ if is_vector(other) and is_number(mine) else None


@compiled_as(overload(operator.truediv))
def _over(mine: Any, other: Any) -> Implementation | None:
    def over(mine: Any, other: Any) -> Any:
        keys, values = arrays_in(mine)
        return vector_of(keys.copy(), vectors.scaled(values, float(other), True))

    return over if is_vector(mine) and is_number(other) else None


# What takes one look instead of two


@compiled_as(overload(increase))
def _increase(state: Any, row: Any, key: Any, x: Any) -> Implementation | None:
    def in_matrix(state: Any, row: Any, key: Any, x: Any) -> None:
        if state.limit != NOW:
            raise TypeError(READ_ONLY)
        add_to_cell(state.cells, row, key, float(x))

    is_one = isinstance(state, MatrixType) and is_key(row) and is_key(key)
    return in_matrix if is_one and (is_key(x) or x == types.float64) else None


@compiled_as(overload(increase_at))
def _increase_at(state: Any, key: Any, x: Any) -> Implementation | None:
    if not is_key(key) or not (is_key(x) or x == types.float64):
        return None
    if isinstance(state, RowType):

        def in_row(state: Any, key: Any, x: Any) -> None:
            if state.limit != NOW:
                raise TypeError(READ_ONLY)
            add_to_cell(state.cells, state.row, key, float(x))

        return in_row
    if isinstance(state, VectorType):

        def in_vector(state: Any, key: Any, x: Any) -> None:
            state[key] = state[key] + float(x)

        return in_vector
    if state == MAP_LONG and is_key(x):

        def in_longs(state: Any, key: Any, x: Any) -> None:
            before = state[key]
            after = before + x
            if (before ^ after) & (x ^ after) < 0:
                raise OverflowError("beyond the 64 bits of a long")
            state[key] = after

        return in_longs
    if state == MAP_DOUBLE:

        def in_doubles(state: Any, key: Any, x: Any) -> None:
            state[key] = state[key] + float(x)

        return in_doubles
    return None


def total_of(parts: Any) -> Any:
    """Of a tuple or a typed list of VECTORs: their sum, from the first one on."""
    raise NotImplementedError("in compiled code")


@compiled_as(overload(total_of))
def _total_of(parts: Any) -> Implementation | None:
    kind = getattr(parts, "dtype", None)
    if not isinstance(kind, VectorType):
        return None

    def summed(parts: Any) -> Any:
        keys, values = arrays_in(parts[0])
        for i in range(1, len(parts)):
            other_keys, others = arrays_in(parts[i])
            keys, values = vectors.added(keys, values, other_keys, others, 1.0)
        return vector_of(keys.copy(), values.copy())

    return summed


def average_of(parts: Any) -> Any:
    """The same divided by how many they are."""
    raise NotImplementedError("in compiled code")


@compiled_as(overload(average_of))
def _average_of(parts: Any) -> Implementation | None:
    if not isinstance(getattr(parts, "dtype", None), VectorType):
        return None
    return lambda parts: total_of(parts) / float(len(parts))
