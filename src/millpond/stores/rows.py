"""Whole rows: their content digest, and the way back from slice order to batch order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.errors import WrongType
from millpond.kernels import buffers, digest, hashing, partition
from millpond.stores import views
from millpond.stores.keys import Keys

_SEED = np.uint64(0x9E3779B97F4A7C15)


def digest_rows(keys: Keys, times: NDArray[np.int64], values: Sequence[pa.Array]) -> int:
    """Digest of the rows' content, 0 for none: the same in any order, and the sum (mod 2**64) of its parts' digests.

    Floats differ when their bits do. What lies under a null, an array's offset and the width of Arrow's offsets
    make no difference; the type of a column is not part of the digest.
    """
    rows = np.full(len(keys), _SEED, np.uint64)
    words = keys.longs.view(np.uint64) if keys.kind == "i64" else keys.hashes
    digest.fold_words(rows, words, views.NO_BYTES, 0)
    digest.fold_words(rows, views.plain(times).view(np.uint64), views.NO_BYTES, 0)
    for value in values:
        _fold(rows, value)
    return int(digest.total_of(rows))


def digest_columns(columns: Sequence[pa.Array]) -> int:
    """As `digest_rows`, of rows that are columns only."""
    rows = np.full(len(columns[0]) if columns else 0, _SEED, np.uint64)
    for column in columns:
        _fold(rows, column)
    return int(digest.total_of(rows))


def _fold(rows: NDArray[np.uint64], array: pa.Array) -> None:
    """Fold a column into its rows' hashes."""
    if pa.types.is_null(array.type):
        array = pa.nulls(len(array), pa.int8())
    valid = views.validity(array)
    if pa.types.is_struct(array.type):
        words = np.full(len(array), _SEED, np.uint64)
        for i in range(array.type.num_fields):
            _fold(words, array.field(i))
    else:
        words = _words(array)
    digest.fold_words(rows, words, valid, array.offset)


def _hashes(array: pa.Array) -> NDArray[np.uint64]:
    rows = np.full(len(array), _SEED, np.uint64)
    _fold(rows, array)
    return rows


def _words(array: pa.Array) -> NDArray[np.uint64]:
    """One word per value: its bits where they fit, a hash of them where not; anything under nulls."""
    type_, types, count = array.type, pa.types, len(array)
    if isinstance(type_, pa.BaseExtensionType):
        return _words(array.storage)
    if types.is_dictionary(type_):
        return _words(array.dictionary_decode())
    if types.is_boolean(type_):
        return views.longs(array).view(np.uint64)
    if views.is_bytes(type_):
        return hashing.hash_bytes(*views.byte_ranges(array))
    if types.is_list(type_) or types.is_large_list(type_) or types.is_map(type_):
        return _list_words(array, views.offsets_of(array, types.is_large_list(type_)))
    if types.is_fixed_size_list(type_):
        return _list_words(
            array, np.arange(array.offset, array.offset + count + 1, dtype=np.int64) * type_.list_size
        )
    if types.is_primitive(type_) and type_.bit_width <= 64:
        # Sign extension: an int keeps its word when a wider type holds it.
        found = _signed(array)
        return found.astype(np.int64, copy=False).view(np.uint64)
    if types.is_decimal(type_) or types.is_fixed_size_binary(type_):
        size = type_.byte_width
        offsets = np.arange(count + 1, dtype=np.int64) * size
        return hashing.hash_bytes(
            offsets, views.view(array.buffers()[1], np.uint8, array.offset * size, count * size)
        )
    raise WrongType(f"values of type {type_} have no digest", expected="a Spark type", actual=str(type_))


def _signed(array: pa.Array) -> NDArray[np.int64]:
    return views.view(array.buffers()[1], f"i{array.type.bit_width // 8}", array.offset, len(array))


def _list_words(array: pa.Array, offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
    first, size = int(offsets[0]), int(offsets[-1] - offsets[0])
    if pa.types.is_map(array.type):
        items = _hashes(array.keys.slice(first, size))
        _fold(items, array.items.slice(first, size))
    else:
        items = _hashes(array.values.slice(first, size))
    words = np.empty(len(array), np.uint64)
    digest.fold_lists(offsets, items, words)
    return words


def spread(values: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Longs in slice order: value i goes to `places[i]`."""
    out = np.empty(len(values), np.int64)
    partition.scatter(views.plain(values), places, out)
    return out


def is_plain_long(column: pa.Array) -> bool:
    """Whether its values are 64 bits each, with no null among them."""
    return bool(pa.types.is_primitive(column.type) and column.type.bit_width == 64 and column.null_count == 0)


def spread_long(column: pa.Array, places: NDArray[np.int64]) -> pa.Array:
    """Such a column in slice order."""
    if len(column) == 0:
        return column
    words = np.frombuffer(column.buffers()[1], np.int64, len(column), 8 * column.offset)
    return pa.Array.from_buffers(column.type, len(column), [None, pa.py_buffer(spread(words, places))])


def restore(parts: Sequence[pa.Array], places: NDArray[np.int64]) -> pa.Array:
    """Answers, slice by slice, in the order of the batch whose row i went to `places[i]`."""
    whole = parts[0] if len(parts) == 1 else pa.concat_arrays(parts)
    text = views.is_bytes(whole.type)
    if not text and not (pa.types.is_primitive(whole.type) and whole.type.bit_width == 64):
        return whole.take(pa.array(places))
    valid = None
    if whole.null_count:
        bits = np.empty((len(whole) + 7) // 8, np.uint8)
        partition.gather_bits(views.validity(whole), whole.offset, places, bits)
        valid = pa.py_buffer(bits)
    if text:
        offsets, data = views.byte_ranges(whole)
        to = np.empty(len(whole) + 1, np.int64)
        copied = np.empty(buffers.gather_sizes(offsets, places, to), np.uint8)
        buffers.gather_bytes(offsets, data, places, to, copied)
        return views.bytes_array(whole.type, to, copied, valid, whole.null_count)
    out = np.empty(len(whole), np.int64)
    partition.gather(_signed(whole), places, out)
    return pa.Array.from_buffers(
        whole.type, len(whole), [valid, pa.py_buffer(out)], null_count=whole.null_count
    )
