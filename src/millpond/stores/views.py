"""Arrow arrays as NumPy arrays that kernels take, without a copy where there can be none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.errors import BadMessage, MessageTooLarge, WrongType
from millpond.kernels.buffers import offsets_in_bounds

NO_BYTES: NDArray[np.uint8] = np.empty(0, np.uint8)


class _Pinned:
    """Memory that belongs to `owner`, in NumPy's terms. Flagged writeable only so that numba sees one array type."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, owner: object, address: int, dtype: np.dtype[Any], count: int) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (address, False),
            "typestr": dtype.str,
            "shape": (count,),
            "version": 3,
        }


def view(buffer: pa.Buffer | None, dtype: Any, skip: int, count: int) -> NDArray[Any]:
    """`count` elements of an Arrow buffer, after the first `skip`. Never to be written to."""
    kind = np.dtype(dtype)
    if count == 0:
        return np.empty(0, kind)
    if buffer is None or buffer.size < (skip + count) * kind.itemsize:
        raise BadMessage(f"a column says it has {skip + count} values and its buffer is shorter")
    found = np.asarray(_Pinned(buffer, buffer.address + skip * kind.itemsize, kind, count))
    return found if found.flags.aligned else found.copy()


def plain(array: NDArray[Any], dtype: Any = np.int64) -> NDArray[Any]:
    """The array as kernels want it: that type, C-contiguous, aligned, flagged writeable."""
    array = np.ascontiguousarray(array, dtype)
    if not array.flags.aligned:
        return array.copy()
    if not array.flags.writeable:
        if len(array) == 0:
            return np.empty(0, array.dtype)
        return np.asarray(_Pinned(array, array.ctypes.data, array.dtype, len(array)))
    return array


def is_long(type_: pa.DataType) -> bool:
    """Whether values of the type are held in place as an int64."""
    types = pa.types
    return bool(
        types.is_boolean(type_)
        or types.is_signed_integer(type_)
        or types.is_date32(type_)
        or types.is_timestamp(type_)
    )


def is_double(type_: pa.DataType) -> bool:
    """Whether values of the type are held in place as a float64."""
    return bool(pa.types.is_float32(type_) or pa.types.is_float64(type_))


def is_bytes(type_: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(type_)
        or types.is_binary(type_)
        or types.is_large_string(type_)
        or types.is_large_binary(type_)
    )


def integers(array: pa.Array) -> NDArray[Any]:
    """The values of an integer-like or boolean array, in their own width; anything under nulls."""
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.int8())
    return view(array.buffers()[1], f"i{array.type.bit_width // 8}", array.offset, len(array))


def longs(array: pa.Array) -> NDArray[np.int64]:
    """The values of an integer-like, boolean or short decimal array as int64; anything under nulls."""
    if pa.types.is_decimal128(array.type):  # the lower half of each: 18 digits need no more
        halves = view(array.buffers()[1], np.int64, 2 * array.offset, 2 * len(array))
        return np.ascontiguousarray(halves[::2])
    return integers(array).astype(np.int64, copy=False)


def floats(array: pa.Array) -> NDArray[Any]:
    """The values of a float or double array, in their own width; anything under nulls."""
    return view(array.buffers()[1], f"f{array.type.bit_width // 8}", array.offset, len(array))


def offsets_of(array: pa.Array, large: bool) -> NDArray[np.int64]:
    """The n + 1 offsets of a variable-length array."""
    if len(array) == 0:
        return np.zeros(1, np.int64)
    found = view(array.buffers()[1], np.int64 if large else np.int32, array.offset, len(array) + 1)
    return found.astype(np.int64, copy=False)


def byte_ranges(array: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """`(offsets, data)` of a string or binary array. The first offset need not be 0."""
    type_ = array.type
    if not is_bytes(type_):
        raise WrongType(
            f"expected string or binary, got {type_}", expected="string or binary", actual=str(type_)
        )
    offsets = offsets_of(array, pa.types.is_large_string(type_) or pa.types.is_large_binary(type_))
    buffer = array.buffers()[2]
    data = NO_BYTES if buffer is None else view(buffer, np.uint8, 0, buffer.size)
    if not offsets_in_bounds(offsets, len(data)):
        raise BadMessage("a string or binary column has offsets outside its data")
    return offsets, data


def validity(array: pa.Array) -> NDArray[np.uint8]:
    """Arrow's validity bits, to be read from bit `array.offset` on; empty where there are no nulls."""
    if array.null_count == 0:
        return NO_BYTES
    return view(array.buffers()[0], np.uint8, 0, (array.offset + len(array) + 7) // 8)


def bytes_array(
    type_: pa.DataType,
    offsets: NDArray[np.int64],
    data: NDArray[np.uint8],
    valid: pa.Buffer | None,
    nulls: int,
) -> pa.Array:
    """A string or binary array over `data`; `offsets` start at 0. 2 GiB at most, unless the type is large."""
    count = len(offsets) - 1
    large = pa.types.is_large_string(type_) or pa.types.is_large_binary(type_)
    buffers = [valid, pa.py_buffer(offsets if large else narrow_offsets(offsets)), pa.py_buffer(data)]
    return pa.Array.from_buffers(type_, count, buffers, null_count=nulls)


def narrow_offsets(offsets: NDArray[np.int64]) -> NDArray[np.int32]:
    if offsets[-1] > np.iinfo(np.int32).max:
        limit = int(np.iinfo(np.int32).max)
        raise MessageTooLarge(
            f"a column of {offsets[-1]} bytes or items does not fit one Arrow array",
            hint="ask for fewer rows at a time",
            size=int(offsets[-1]),
            limit=limit,
        )
    return offsets.astype(np.int32)
