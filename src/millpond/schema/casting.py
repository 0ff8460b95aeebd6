"""Columns as users have them, cast to the types a state asks for: exactly, or not at all.

Arrow's safe cast refuses most losses but not all (a double rounds to a float, 2 becomes true), and pyarrow
casts list views wrongly. So a table here says which types may become which, and nested types are rebuilt from their parts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpond.errors import MessageTooLarge, WrongType
from millpond.schema.ddl import describe_type

DOUBLE_EXACT_MAX = 2**53
"""Every integer up to here is a double of its own; beyond, several share one."""


def cast_column(column: pa.Array | pa.ChunkedArray, field: pa.Field, column_name: str) -> pa.Array:
    """The column as one array of exactly the field's type, its values unaltered; else `WrongType`.

    Encodings (chunks, dictionaries, run ends, views, large offsets, extensions) are undone. Numbers widen, and
    narrow where every value fits. A timestamp without a zone counts as UTC. Struct fields match by name.
    """
    array = plain_array(column, column_name)
    wanted = field.type
    if array.type.equals(wanted, check_metadata=True):
        return array
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), wanted)
    convert = _conversion(array.type, wanted)
    if convert is None:
        raise _wrong_type(array.type, wanted, column_name)
    try:
        return convert(array, wanted, column_name)
    except pa.ArrowInvalid as error:
        raise _does_not_fit(array.type, wanted, column_name, str(error)) from error


def plain_array(column: pa.Array | pa.ChunkedArray, column_name: str) -> pa.Array:
    """The column as one array, without chunks, dictionary, run-end encoding or extension type."""
    array = column
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks == 1 else _combine(array, column_name)
    while True:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        elif pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        elif pa.types.is_run_end_encoded(array.type):
            array = pc.run_end_decode(array)
        else:
            return array


def _combine(column: pa.ChunkedArray, column_name: str) -> pa.Array:
    try:
        return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    except pa.ArrowInvalid as error:
        raise MessageTooLarge(
            f"column '{column_name}' is too large for one batch: {error}",
            hint="pass the table in smaller parts",
            size=column.nbytes,
            limit=2**31 - 1,
        ) from error


_Conversion = Callable[[pa.Array, pa.DataType, str], pa.Array]


def _conversion(actual: pa.DataType, wanted: pa.DataType) -> _Conversion | None:
    """How arrays of one type become another without a change of meaning; None where they never do."""
    types = pa.types
    if types.is_integer(wanted):
        if types.is_integer(actual):
            return _arrow_cast
        return _floats_to_integers if types.is_floating(actual) else None
    if types.is_floating(wanted):
        return _to_floats if types.is_integer(actual) or types.is_floating(actual) else None
    if types.is_decimal(wanted):
        if types.is_decimal(actual):
            return _arrow_cast
        return _integers_to_decimals if types.is_integer(actual) else None
    if types.is_string(wanted):
        return _arrow_cast if types.is_large_string(actual) or types.is_string_view(actual) else None
    if types.is_binary(wanted):
        return _arrow_cast if _is_any_binary(actual) else None
    if types.is_date(wanted):
        if types.is_timestamp(actual) and actual.tz is None:
            return _midnights_to_dates
        return _arrow_cast if types.is_date(actual) else None
    if types.is_timestamp(wanted):
        # With another zone than UTC, which wall-clock time is meant would be a guess.
        same_meaning = types.is_timestamp(actual) and (wanted.tz is not None or actual.tz in (None, "UTC"))
        return _arrow_cast if same_meaning or types.is_date(actual) else None
    if types.is_map(wanted):
        return _rebuild_maps if types.is_map(actual) else None
    if types.is_list(wanted):
        return _rebuild_lists if _is_any_list(actual) else None
    if types.is_struct(wanted):
        return _rebuild_structs if types.is_struct(actual) else None
    return None


def _is_any_binary(type_: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_large_binary(type_) or types.is_binary_view(type_) or types.is_fixed_size_binary(type_)
    )


def _is_any_list(type_: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_list(type_)
        or types.is_large_list(type_)
        or types.is_fixed_size_list(type_)
        or types.is_list_view(type_)
        or types.is_large_list_view(type_)
    )


def _arrow_cast(array: pa.Array, wanted: pa.DataType, column_name: str) -> pa.Array:
    return array.cast(wanted)


def _floats_to_integers(array: pa.Array, wanted: pa.DataType, column_name: str) -> pa.Array:
    """Whole numbers only: pandas makes floats of integers as soon as one is missing."""
    doubles = array.cast(pa.float64())
    extremes = pc.min_max(doubles)
    if extremes["min"].is_valid and (
        extremes["min"].as_py() < -DOUBLE_EXACT_MAX or extremes["max"].as_py() > DOUBLE_EXACT_MAX
    ):
        raise pa.ArrowInvalid("a floating-point number beyond 2**53 may stand for several integers")
    return doubles.cast(wanted)


def _to_floats(array: pa.Array, wanted: pa.DataType, column_name: str) -> pa.Array:
    cast = array.cast(wanted)
    if pa.types.is_floating(array.type) and wanted.bit_width < array.type.bit_width:
        back = cast.cast(array.type)
        same = pc.or_(pc.equal(back, array), pc.and_(pc.is_nan(back), pc.is_nan(array)))
        if not pc.all(same, min_count=0).as_py():
            first = array[pc.index(same, False).as_py()]
            raise pa.ArrowInvalid(f"{first} would be rounded")
    return cast


def _integers_to_decimals(array: pa.Array, wanted: pa.DataType, column_name: str) -> pa.Array:
    """Through a decimal wide enough for every integer: Arrow judges by the types, we by the values."""
    wide = array.cast(pa.decimal256(20 + wanted.scale, wanted.scale))
    return wide.cast(wanted)


def _midnights_to_dates(array: pa.Array, wanted: pa.DataType, column_name: str) -> pa.Array:
    """Timestamps that are all midnights: pandas has no date type of its own."""
    dates = array.cast(wanted)
    if not pc.all(pc.equal(dates.cast(array.type), array), min_count=0).as_py():
        raise pa.ArrowInvalid("a timestamp has a time of day")
    return dates


def _rebuild_lists(array: pa.Array, wanted: pa.DataType, column_name: str) -> pa.Array:
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    values = cast_column(array.flatten(), wanted.value_field, f"{column_name}[]")
    return pa.ListArray.from_arrays(_offsets(lengths), values, type=wanted, mask=array.is_null())


def _rebuild_maps(array: pa.Array, wanted: pa.DataType, column_name: str) -> pa.Array:
    compact = array.take(pa.array(np.arange(len(array))))  # its keys and items hold nothing outside the slice
    keys = cast_column(compact.keys, wanted.key_field, f"{column_name}.key")
    items = cast_column(compact.items, wanted.item_field, f"{column_name}.value")
    return pa.MapArray.from_arrays(compact.offsets, keys, items, type=wanted, mask=compact.is_null())


def _rebuild_structs(array: pa.Array, wanted: pa.DataType, column_name: str) -> pa.Array:
    names = [child.name for child in array.type]
    if sorted(names) != sorted(child.name for child in wanted) or not names:
        raise _wrong_type(array.type, wanted, column_name)
    parts = dict(zip(names, array.flatten(), strict=True))
    cast = [cast_column(parts[child.name], child, f"{column_name}.{child.name}") for child in wanted]
    return pa.StructArray.from_arrays(cast, fields=list(wanted), mask=array.is_null())


def _offsets(lengths: np.ndarray[tuple[int], np.dtype[np.int64]]) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return pa.array(offsets).cast(pa.int32())


def _wrong_type(actual: pa.DataType, wanted: pa.DataType, column_name: str) -> WrongType:
    expected = describe_type(wanted)
    return WrongType(
        f"column '{column_name}' is {describe_type(actual)}, expected {expected}",
        hint=_hint(actual, wanted),
        column=column_name,
        expected=expected,
        actual=describe_type(actual),
    )


def _hint(actual: pa.DataType, wanted: pa.DataType) -> str:
    types = pa.types
    if types.is_struct(wanted) and types.is_struct(actual):
        return "the struct must have exactly the fields asked for; select them by name"
    if types.is_timestamp(actual) and types.is_timestamp(wanted):
        return "convert it to UTC or drop its zone first, so that the wall-clock time is plain"
    if types.is_decimal(wanted) and types.is_floating(actual):
        return (
            f"round it yourself, by a cast to {describe_type(wanted)}: floating-point numbers are not decimal"
        )
    return f"cast the column to {describe_type(wanted)} first, or declare its type as {describe_type(actual)}"


def _does_not_fit(actual: pa.DataType, wanted: pa.DataType, column_name: str, why: str) -> WrongType:
    expected = describe_type(wanted)
    return WrongType(
        f"column '{column_name}' is {describe_type(actual)}, and not all its values fit {expected}: {why}",
        hint="declare a wider type, or round, clip or filter the values first",
        column=column_name,
        expected=expected,
        actual=describe_type(actual),
    )
