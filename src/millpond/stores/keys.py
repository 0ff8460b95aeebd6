"""Batches of normalised keys: longs, or byte strings over Arrow buffers. No Python object per key."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.errors import BadMessage, NullKey, WrongType
from millpond.kernels import buffers, encoding, hashing, partition
from millpond.schema import KeyKind
from millpond.stores import views

_NO_LONGS: NDArray[np.int64] = np.empty(0, np.int64)


class Keys:
    """A batch of keys of one kind.

    `i64`: `longs`. `bytes`: key i is `data[offsets[i]:offsets[i + 1]]`, the first offset need not be 0.
    Immutable; parts share memory with the whole.
    """

    __slots__ = ("_hashes", "data", "kind", "longs", "offsets")

    def __init__(
        self,
        kind: KeyKind,
        longs: NDArray[np.int64] = _NO_LONGS,
        offsets: NDArray[np.int64] = _NO_LONGS,
        data: NDArray[np.uint8] = views.NO_BYTES,
        hashes: NDArray[np.uint64] | None = None,
    ) -> None:
        self.kind: KeyKind = kind
        self.longs = longs
        self.offsets = offsets
        self.data = data
        self._hashes = hashes

    @staticmethod
    def from_longs(longs: NDArray[np.int64]) -> Keys:
        return Keys("i64", longs=views.plain(longs))

    @staticmethod
    def from_arrow(array: pa.Array) -> Keys:
        """Keys of a `_key` column: int64, or binary or string in any width. Nulls are refused."""
        if array.null_count:
            raise NullKey(f"{array.null_count} keys are null", column="_key", rows=array.null_count)
        if pa.types.is_int64(array.type):
            return Keys("i64", longs=views.longs(array))
        if views.is_bytes(array.type):
            offsets, data = views.byte_ranges(array)
            return Keys("bytes", offsets=offsets, data=data)
        raise WrongType(
            f"a key column is int64 or binary, not {array.type}",
            column="_key",
            expected="int64 or binary",
            actual=str(array.type),
        )

    @staticmethod
    def concat(parts: Sequence[Keys]) -> Keys:
        """The keys of all parts, of which there is at least one, in order."""
        if parts[0].kind == "i64":
            return Keys("i64", longs=np.concatenate([part.longs for part in parts]))
        offsets, data = views.byte_ranges(pa.concat_arrays([part.to_arrow() for part in parts]))
        return Keys("bytes", offsets=offsets, data=data)

    def to_arrow(self) -> pa.Array:
        """int64 or binary; large_binary where the bytes need it."""
        if self.kind == "i64":
            return pa.Array.from_buffers(
                pa.int64(), len(self), [None, pa.py_buffer(self.longs)], null_count=0
            )
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        type_ = pa.binary() if last - first <= np.iinfo(np.int32).max else pa.large_binary()
        return views.bytes_array(type_, self.offsets - first, self.data[first:last], None, 0)

    def __len__(self) -> int:
        return len(self.longs) if self.kind == "i64" else len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of the keys themselves."""
        if self.kind == "i64":
            return int(self.longs.nbytes)
        return int(self.offsets[-1] - self.offsets[0]) + int(self.offsets.nbytes)

    def hashed(self) -> Keys:
        """These keys, hashed now: neither a part of them nor a choice of them has to be hashed again."""
        self._hashes = self.hashes
        return self

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """Those that slices go by, the same everywhere. Hash tables have hashes of their own (`kernels.slot_hashing`)."""
        if self._hashes is None:
            if self.kind == "i64":
                self._hashes = hashing.hash_longs(self.longs)
            else:
                self._hashes = hashing.hash_bytes(self.offsets, self.data)
        return self._hashes

    def take(self, order: NDArray[np.int64]) -> Keys:
        """The keys at those rows, in that order; hashed if these are."""
        hashes = None if self._hashes is None else self._hashes.take(order)
        if self.kind == "i64":
            return Keys("i64", longs=self.longs.take(order), hashes=hashes)
        offsets = np.empty(len(order) + 1, np.int64)
        data = np.empty(buffers.gather_sizes(self.offsets, order, offsets), np.uint8)
        buffers.gather_bytes(self.offsets, self.data, order, offsets, data)
        return Keys("bytes", offsets=offsets, data=data, hashes=hashes)

    def spread(self, places: NDArray[np.int64]) -> Keys:
        """The keys in slice order, to be sent: key i goes to `places[i]`. Hashes stay behind."""
        if self.kind == "i64":
            longs = np.empty(len(self), np.int64)
            partition.scatter(self.longs, places, longs)
            return Keys("i64", longs=longs)
        offsets = np.empty(len(self) + 1, np.int64)
        data = np.empty(buffers.scatter_sizes(self.offsets, places, offsets), np.uint8)
        buffers.scatter_bytes(self.offsets, self.data, places, offsets, data)
        return Keys("bytes", offsets=offsets, data=data)

    def part(self, start: int, stop: int) -> Keys:
        """The keys of rows start..stop, without a copy."""
        hashes = None if self._hashes is None else self._hashes[start:stop]
        if self.kind == "i64":
            return Keys("i64", longs=self.longs[start:stop], hashes=hashes)
        return Keys("bytes", offsets=self.offsets[start : stop + 1], data=self.data, hashes=hashes)


def encode_keys(columns: Sequence[pa.Array], schema: pa.Schema) -> Keys:
    """The user's key columns, already of the schema's types and without nulls, as keys.

    One integer-like column gives longs, one string or binary column its own bytes, several a row encoding.
    """
    for field, column in zip(schema, columns, strict=True):
        if column.type != field.type:
            raise WrongType(
                f"key column {field.name!r} is {column.type}, not {field.type}",
                column=field.name,
                expected=str(field.type),
                actual=str(column.type),
            )
        if column.null_count:
            raise NullKey(
                f"{column.null_count} rows have a null in key column {field.name!r}",
                column=field.name,
                rows=column.null_count,
            )
    if len(columns) == 1:
        if views.is_bytes(schema.field(0).type):
            offsets, data = views.byte_ranges(columns[0])
            return Keys("bytes", offsets=offsets, data=data)
        return Keys("i64", longs=views.longs(columns[0]))
    return _encode_rows(columns)


def _encode_rows(columns: Sequence[pa.Array]) -> Keys:
    count = len(columns[0])
    ranges = {c: views.byte_ranges(column) for c, column in enumerate(columns) if views.is_bytes(column.type)}
    sizes = np.full(count, encoding.LONG_SIZE * (len(columns) - len(ranges)), np.int64)
    for offsets, _ in ranges.values():
        encoding.add_sizes(offsets, sizes)
    row_offsets = np.zeros(count + 1, np.int64)
    np.cumsum(sizes, out=row_offsets[1:])
    out = np.empty(int(row_offsets[-1]), np.uint8)
    cursor = row_offsets[:-1].copy()
    for c, column in enumerate(columns):
        if c in ranges:
            offsets, data = ranges[c]
            encoding.write_bytes(offsets, data, cursor, out)
        else:
            encoding.write_longs(views.longs(column), cursor, out)
    return Keys("bytes", offsets=row_offsets, data=out)


def decode_keys(array: pa.Array, schema: pa.Schema) -> list[pa.Array]:
    """A `_key` column as the user's key columns. Bytes that no key of that schema encodes to are `BadMessage`."""
    keys = Keys.from_arrow(array)
    if len(schema) == 1:
        type_ = schema.field(0).type
        if (keys.kind == "bytes") != views.is_bytes(type_):
            raise BadMessage(f"a key of type {type_} cannot be read from a column of {array.type}")
        if keys.kind == "i64":
            return [_narrow(keys.longs, type_)]
        offsets = keys.offsets - keys.offsets[0]
        return [_text(offsets, keys.data[keys.offsets[0] : keys.offsets[-1]], type_)]
    if keys.kind != "bytes":
        raise BadMessage(f"a key of {len(schema)} columns cannot be read from a column of {array.type}")
    cursor, stops = keys.offsets[:-1].copy(), keys.offsets[1:]
    columns = [_decode_column(field, keys.data, cursor, stops) for field in schema]
    if not np.array_equal(cursor, stops):
        raise BadMessage("a composite key is longer than its columns")
    return columns


def _decode_column(
    field: pa.Field, data: NDArray[np.uint8], cursor: NDArray[np.int64], stops: NDArray[np.int64]
) -> pa.Array:
    if views.is_bytes(field.type):
        offsets = np.zeros(len(cursor) + 1, np.int64)
        malformed = encoding.read_sizes(data, cursor, stops, offsets)
        if malformed < 0:
            out = np.empty(int(offsets[-1]), np.uint8)
            encoding.read_bytes(data, cursor, offsets, out)
            return _text(offsets, out, field.type)
    else:
        values = np.empty(len(cursor), np.int64)
        malformed = encoding.read_longs(data, cursor, stops, values)
        if malformed < 0:
            return _narrow(values, field.type)
    raise BadMessage(f"the composite key in row {malformed} ends within column {field.name!r}")


def _narrow(values: NDArray[np.int64], type_: pa.DataType) -> pa.Array:
    """Longs as an array of an integer-like type that they came from."""
    if pa.types.is_boolean(type_):
        if np.any((values != 0) & (values != 1)):
            raise BadMessage("a boolean key is neither 0 nor 1")
        return pa.array(values != 0)
    found = values.astype(f"i{type_.bit_width // 8}")
    if found.dtype != values.dtype and not np.array_equal(found, values):
        raise BadMessage(f"a key does not fit its type {type_}")
    return pa.Array.from_buffers(type_, len(values), [None, pa.py_buffer(found)], null_count=0)


def _text(offsets: NDArray[np.int64], data: NDArray[np.uint8], type_: pa.DataType) -> pa.Array:
    found = views.bytes_array(type_, offsets, data, None, 0)
    if pa.types.is_string(type_) or pa.types.is_large_string(type_):
        try:
            found.validate(full=True)
        except pa.ArrowInvalid as error:
            raise BadMessage("a string key is not UTF-8") from error
    return found
