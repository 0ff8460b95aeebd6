"""Values as columns, by their types: how calls travel from task to task.

Numbers, texts, lists of these and vectors are columns as tables have them; of all else each value is packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millpond.programs.elements import Vector
from millpond.programs.packing import pack, unpack
from millpond.programs.rows import arrow_type
from millpond.programs.values import SCALARS, fit, inner_of

_PYTHON: dict[str, type] = {"long": int, "double": float, "boolean": bool}
_MISSING = {type(None)}
_NO_ENTRIES = np.empty(0, np.int64), np.empty(0, np.float64)


@lru_cache(maxsize=256)
def column_type(kind: str) -> pa.DataType:
    return arrow_type(kind) if _has_columns(kind) else pa.large_binary()


def _has_columns(kind: str) -> bool:
    return kind in SCALARS or kind == "vector" or (kind.startswith("array<") and inner_of(kind) in SCALARS)


def column_of(values: Sequence[Any], kind: str) -> pa.Array:
    """TypeError, OverflowError or ValueError if a value is not of the type."""
    if not _has_columns(kind):
        return pa.array([pack([value], [kind]) for value in values], pa.large_binary())
    if kind in _PYTHON:
        return _numbers(values, kind)
    if kind == "vector":
        return _vectors(values)
    inner = inner_of(kind)
    if inner in _PYTHON and set(map(type, values)) == {list}:
        items = _numbers(list(chain.from_iterable(values)), inner)
        return pa.ListArray.from_arrays(_offsets(map(len, values)), items)
    return pa.array([fit(value, kind) for value in values], column_type(kind))


def _numbers(values: Sequence[Any], kind: str) -> pa.Array:
    if set(map(type, values)) - {_PYTHON[kind]} <= _MISSING:
        try:
            return pa.array(values, column_type(kind))
        except (OverflowError, pa.ArrowInvalid):
            pass  # it is told below which value it is
    return pa.array([fit(value, kind) for value in values], column_type(kind))


def _vectors(values: Sequence[Any]) -> pa.Array:
    parts = []
    for value in values:
        if not isinstance(value, Vector | None):
            raise TypeError(f"{value!r} is no Vector")
        parts.append(_NO_ENTRIES if value is None else value.arrays())
    offsets = _offsets(len(keys) for keys, _ in parts)
    if None in values:
        absent = np.array([*(value is None for value in values), False])
        offsets = pc.if_else(absent, pa.scalar(None, pa.int32()), offsets)
    keys, items = (np.concatenate([_NO_ENTRIES[n], *(part[n] for part in parts)]) for n in (0, 1))
    return pa.MapArray.from_arrays(offsets, pa.array(keys), pa.array(items))


def _offsets(lengths: Any) -> pa.Array:
    return pa.array(list(accumulate(lengths, initial=0)), pa.int32())


def values_of(column: pa.Array, kind: str) -> list[Any]:
    """The values of a column, each one's own."""
    if not _has_columns(kind):
        return [unpack(data, [kind])[0] for data in column.to_pylist()]
    if kind == "vector":
        flat = [column.keys.to_numpy(), column.items.to_numpy()]
        return _parts(column, flat, Vector.of_arrays)
    inner = inner_of(kind)
    if inner in _PYTHON and not column.values.null_count:
        return _parts(column, [_plain(column.values)], lambda items: items)
    return _plain(column)


def _parts(column: pa.Array, flat: Sequence[Any], make: Any) -> list[Any]:
    """Of a column of lists or maps, what is made of each one's items, which are parts of `flat`."""
    if not len(column):
        return []
    bounds = column.offsets.to_numpy().tolist()
    made = [make(*(items[start:stop] for items in flat)) for start, stop in pairwise(bounds)]
    if column.null_count:
        absent = column.is_null().to_pylist()
        made = [None if is_absent else each for each, is_absent in zip(made, absent, strict=True)]
    return made


def _plain(column: pa.Array) -> list[Any]:
    if column.null_count or not pa.types.is_primitive(column.type):
        found: list[Any] = column.to_pylist()
        return found
    numbers: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
    return numbers


def is_sound(column: pa.Array, kind: str) -> bool:
    """Whether a column of the right Arrow type holds values as `column_of` makes them: vectors have each index once, in order."""
    if kind != "vector" or not len(column):
        return True
    offsets: NDArray[np.int32] = column.offsets.to_numpy()
    keys = column.keys
    if keys.null_count or column.items.null_count:
        return False
    ascends = np.ones(len(keys) + 1, np.bool_)
    longs = keys.to_numpy()
    np.greater(longs[1:], longs[:-1], out=ascends[1:-1])
    ascends[offsets] = True  # where another vector begins
    return bool(ascends[offsets[0] : offsets[-1]].all())
