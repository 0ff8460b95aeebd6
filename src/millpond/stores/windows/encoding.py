"""Rows of Arrow batches as words, cut by group, so that those of one group can be read by themselves.

A segment is some rows of one group, column after column; each stream of a column (validity, values, sizes, bytes) takes
whole words. Streams of validity are there only if a batch has nulls in that column: the form of a segment says which.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.errors import BadType, MessageTooLarge
from millpond.kernels import segment_words, segments
from millpond.stores import views

Longs = NDArray[np.int64]
_FORM_BITS = 62
_INT32_MAX = np.iinfo(np.int32).max


class _Values(NamedTuple):
    """Values of some words each, of a column that is not in order yet."""

    values: Longs
    width: int


class _Bytes(NamedTuple):
    """Bytes in the order of segments; of segment j those from `bounds[j]` to `bounds[j + 1]`."""

    stream: NDArray[np.uint8]
    bounds: Longs


class Encoded(NamedTuple):
    """A batch about to become words. `bounds` has the words of each segment, from 0 on."""

    streams: list[_Values | _Bytes]
    order: Longs
    starts: Longs
    bounds: Longs
    form: int

    def write(self, words: Longs, begin: int) -> None:
        cursor = self.bounds[:-1] + begin
        octets = words.view(np.uint8)
        for stream in self.streams:
            if isinstance(stream, _Values):
                segment_words.put_values(stream.values, stream.width, self.order, self.starts, cursor, words)
            else:
                segment_words.put_bytes(stream.stream, stream.bounds, cursor, words, octets)


class RowCodec:
    """Of one schema. Numbers of forms are this object's own: what it wrote only it can read."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        for field in schema:
            _check_type(field.type, field)
        self._forms: list[int] = [0]

    def encode(self, rows: pa.RecordBatch, order: Longs, starts: Longs, in_place: bool) -> Encoded:
        """Rows `order[starts[j]:starts[j + 1]]` are segment j. `in_place`: the order is 0, 1, 2..."""
        writer = _Writer(starts)
        taken = order if in_place else pa.array(order)
        for column in rows.columns:
            width = _word_width(column.type)
            if width and column.null_count == 0:
                values = views.view(column.buffers()[1], np.int64, column.offset * width, len(column) * width)
                writer.nodes += 1
                writer.add_values(values, width)
            else:
                writer.add(column if in_place else column.take(taken), starts)
        # Which columns have nulls is known at the end only; streams that others of the same bit need are added then.
        if writer.form and writer.nodes > _FORM_BITS:
            writer = _Writer(starts, everywhere=True)
            for column in rows.columns:
                writer.add(column if in_place else column.take(taken), starts)
        if writer.form not in self._forms:
            self._forms.append(writer.form)
        bounds = np.zeros(len(starts), np.int64)
        np.cumsum(writer.sizes, out=bounds[1:])
        return Encoded(writer.streams, order, starts, bounds, self._forms.index(writer.form))

    def decode(self, words: Longs, addresses: Longs, rows_and_forms: Longs) -> pa.RecordBatch:
        """The rows of segments, one after another."""
        rows = rows_and_forms & segments.ROWS_MASK
        forms = rows_and_forms >> segments.FORM_SHIFT
        if len(forms) == 0 or (forms == forms[0]).all():
            return self._decode(words, addresses, rows, int(forms[0]) if len(forms) else 0)
        places = np.concatenate([[0], np.cumsum(rows)])
        batches, origins = [], []
        for form in np.unique(forms):
            chosen = np.flatnonzero(forms == form)
            batches.append(self._decode(words, addresses[chosen], rows[chosen], int(form)))
            origins.append(_expanded(places[chosen], rows[chosen]))
        origin = np.concatenate(origins)
        order = np.empty(len(origin), np.int64)
        order[origin] = np.arange(len(origin))
        return pa.concat_batches(batches).take(pa.array(order))

    def _decode(self, words: Longs, addresses: Longs, rows: Longs, form: int) -> pa.RecordBatch:
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(rows, out=starts[1:])
        reader = _Reader(words, addresses.copy(), self._forms[form])
        columns = [reader.get(field.type, starts) for field in self.schema]
        if not columns:
            return pa.RecordBatch.from_struct_array(pa.array([{}] * int(starts[-1]), pa.struct([])))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


class _Writer:
    def __init__(self, starts: Longs, everywhere: bool = False) -> None:
        self.streams: list[_Values | _Bytes] = []
        self.sizes: Longs = np.zeros(len(starts) - 1, np.int64)
        self.form = (1 << _FORM_BITS + 1) - 1 if everywhere else 0
        self.nodes = 0
        self._everywhere = everywhere
        self._starts = starts

    def add_values(self, values: Longs, width: int) -> None:
        self.streams.append(_Values(values, width))
        segment_words.add_words(self._starts, 8 * width, self.sizes)

    def add(self, array: pa.Array, bounds: Longs) -> None:
        """An array in the order of segments, with the bounds of each in it."""
        type_ = array.type
        if isinstance(type_, pa.BaseExtensionType):
            self.add(array.storage, bounds)
            return
        if pa.types.is_dictionary(type_):
            self.add(array.dictionary_decode(), bounds)
            return
        bit = 1 << min(self.nodes, _FORM_BITS)
        self.nodes += 1
        if pa.types.is_null(type_):
            return
        if array.null_count or self._everywhere:
            self.form |= bit
            self._add_bytes(_octets(array.is_valid()), bounds, 1)
        types = pa.types
        if types.is_boolean(type_):
            self._add_bytes(_octets(array), bounds, 1)
        elif types.is_struct(type_):
            for place in range(type_.num_fields):
                self.add(array.field(place), bounds)
        elif types.is_fixed_size_list(type_):
            self.add(array.values, (bounds + array.offset) * type_.list_size)
        elif _is_sized(type_):
            large = _is_large(type_)
            offsets = views.offsets_of(array, large)
            sizes = np.diff(offsets)
            self._add_bytes(
                (sizes if large else sizes.astype(np.int32)).view(np.uint8), bounds, 8 if large else 4
            )
            inner = offsets[bounds]
            if _is_nested(type_):
                self.add(_items(array), inner)
            else:
                buffer = array.buffers()[2]
                self._add_bytes(_whole(buffer), inner, 1)
        else:
            width = type_.bit_width // 8
            values = views.view(array.buffers()[1], np.uint8, array.offset * width, len(array) * width)
            self._add_bytes(values, bounds, width)

    def _add_bytes(self, stream: NDArray[np.uint8], bounds: Longs, width: int) -> None:
        self.streams.append(_Bytes(views.plain(stream, np.uint8), bounds * width if width > 1 else bounds))
        segment_words.add_words(bounds, width, self.sizes)


class _Reader:
    def __init__(self, words: Longs, cursor: Longs, form: int) -> None:
        self._words = words
        self._octets = words.view(np.uint8)
        self._cursor = cursor
        self._form = form
        self._nodes = 0

    def get(self, type_: pa.DataType, starts: Longs) -> pa.Array:
        """The array whose elements of segment j are `starts[j]..starts[j + 1]`."""
        if isinstance(type_, pa.BaseExtensionType):
            return pa.ExtensionArray.from_storage(type_, self.get(type_.storage_type, starts))
        if pa.types.is_dictionary(type_):
            return self.get(type_.value_type, starts).dictionary_encode().cast(type_)
        count = int(starts[-1])
        bit = 1 << min(self._nodes, _FORM_BITS)
        self._nodes += 1
        types = pa.types
        if types.is_null(type_):
            return pa.nulls(count)
        valid = _bits(self._bytes(starts, 1)) if self._form & bit else None
        if types.is_boolean(type_):
            return pa.Array.from_buffers(type_, count, [valid, _bits(self._bytes(starts, 1))])
        if types.is_struct(type_):
            children = [self.get(type_.field(place).type, starts) for place in range(type_.num_fields)]
            return pa.Array.from_buffers(type_, count, [valid], children=children)
        if types.is_fixed_size_list(type_):
            items = self.get(type_.value_type, starts * type_.list_size)
            return pa.Array.from_buffers(type_, count, [valid], children=[items])
        if _is_sized(type_):
            large = _is_large(type_)
            sizes = self._bytes(starts, 8 if large else 4).view(np.int64 if large else np.int32)
            offsets = np.zeros(count + 1, np.int64)
            np.cumsum(sizes, out=offsets[1:])
            if not large and int(offsets[-1]) > _INT32_MAX:
                raise MessageTooLarge(
                    f"{count} rows have {int(offsets[-1])} bytes or items in one column of type {type_}",
                    hint="take fewer groups at once, or use the large type",
                )
            content = offsets if large else offsets.astype(np.int32)
            inner = offsets[starts]
            if _is_nested(type_):
                items = self.get(_item_type(type_), inner)
                return pa.Array.from_buffers(type_, count, [valid, pa.py_buffer(content)], children=[items])
            data = pa.py_buffer(self._bytes(inner, 1))
            return pa.Array.from_buffers(type_, count, [valid, pa.py_buffer(content), data])
        width = type_.bit_width // 8
        if width % 8 == 0:
            values: NDArray[Any] = np.empty(count * (width // 8), np.int64)
            segment_words.get_values(self._words, width // 8, starts, self._cursor, values)
        else:
            values = self._bytes(starts, width)
        return pa.Array.from_buffers(type_, count, [valid, pa.py_buffer(values)])

    def _bytes(self, starts: Longs, width: int) -> NDArray[np.uint8]:
        bounds = starts * width if width > 1 else starts
        stream = np.empty(int(bounds[-1]), np.uint8)
        segment_words.get_bytes(self._octets, bounds, self._cursor, stream)
        return stream


def _word_width(type_: pa.DataType) -> int:
    """How many whole words a value takes; 0 if it is not of that kind."""
    if pa.types.is_primitive(type_) or pa.types.is_decimal(type_):
        return int(type_.bit_width // 64) if type_.bit_width % 64 == 0 else 0
    return 0


def _is_sized(type_: pa.DataType) -> bool:
    return views.is_bytes(type_) or _is_nested(type_)


def _is_nested(type_: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(type_) or types.is_large_list(type_) or types.is_map(type_))


def _is_large(type_: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_large_string(type_) or types.is_large_binary(type_) or types.is_large_list(type_))


def _item_type(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_map(type_):
        return pa.struct([type_.key_field, type_.item_field])
    return type_.value_type


def _items(array: pa.Array) -> pa.Array:
    """All items of a list or map array, those outside a slice of it, too."""
    if pa.types.is_map(array.type):
        keys, items = array.keys, array.items
        return pa.StructArray.from_arrays([keys, items], fields=[array.type.key_field, array.type.item_field])
    return array.values


def _check_type(type_: pa.DataType, field: pa.Field) -> None:
    types = pa.types
    if isinstance(type_, pa.BaseExtensionType):
        _check_type(type_.storage_type, field)
    elif types.is_dictionary(type_):
        _check_type(type_.value_type, field)
    elif types.is_struct(type_):
        for place in range(type_.num_fields):
            _check_type(type_.field(place).type, field)
    elif types.is_fixed_size_list(type_) or _is_nested(type_):
        _check_type(type_.value_type if types.is_fixed_size_list(type_) else _item_type(type_), field)
    elif not (
        types.is_null(type_)
        or views.is_bytes(type_)
        or types.is_primitive(type_)
        or types.is_decimal(type_)
        or types.is_fixed_size_binary(type_)
    ):
        raise BadType(
            f"column {field.name} of type {field.type} cannot be kept in a window",
            hint="cast it to a type with offsets, such as string, binary, list or struct",
            ddl=str(field.type),
        )


def _octets(array: pa.Array) -> NDArray[np.uint8]:
    """A boolean array with a byte for each; 0 under nulls."""
    return (
        views.view(array.cast(pa.uint8()).fill_null(0).buffers()[1], np.uint8, 0, len(array))
        if len(array)
        else (views.NO_BYTES)
    )


def _bits(octets: NDArray[np.uint8]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(octets, bitorder="little"))


def _whole(buffer: pa.Buffer | None) -> NDArray[np.uint8]:
    return views.NO_BYTES if buffer is None else views.view(buffer, np.uint8, 0, buffer.size)


def _expanded(begins: Longs, counts: Longs) -> Longs:
    """begins[0], begins[0] + 1, ... counts[0] of them, and so on."""
    ends = np.cumsum(counts)
    places: Longs = np.repeat(begins - (ends - counts), counts)
    places += np.arange(len(places))
    return places
