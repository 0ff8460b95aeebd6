"""Memory that the events of one epoch after another are joined in: asked for anew, every page of it costs a fault."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.stores import views

BYTES_MAX = 256 << 20
"""What is kept from one epoch to the next, in all columns; those beyond it are joined in memory of their own."""
IDLE_MAX = 50
"""Looked at so many times without an epoch in between, it is let go."""


class Scratch:
    """Columns of several chunks as one array each. What `joined` gave counts until it is called again."""

    def __init__(self) -> None:
        self._columns: dict[str, NDArray[np.uint8]] = {}
        self._idle = 0

    def joined(self, table: pa.Table, names: Iterable[str]) -> pa.Table:
        """The table with these columns in one chunk; the others, and names that it does not have, are left alone."""
        self._idle = 0
        for name in dict.fromkeys(names):
            place = table.schema.get_field_index(name)
            if place >= 0 and table.column(place).num_chunks > 1:
                table = table.set_column(
                    place, table.schema.field(place), self._joined(name, table.column(place))
                )
        return table

    def rest(self) -> None:
        """To be called from time to time, when no epoch runs: lets go of what none has needed for long."""
        self._idle += 1
        if self._idle >= IDLE_MAX:
            self._columns.clear()

    @property
    def nbytes(self) -> int:
        return sum(len(column) for column in self._columns.values())

    def _joined(self, name: str, column: pa.ChunkedArray) -> pa.Array:
        type_ = column.type
        if _is_fixed(type_):
            return self._values(name, type_, column.chunks)
        if (pa.types.is_list(type_) or pa.types.is_large_list(type_)) and _is_fixed(type_.value_type):
            return self._lists(name, type_, column.chunks)
        return pa.concat_arrays(column.chunks)

    def _values(self, name: str, type_: pa.DataType, chunks: Sequence[pa.Array]) -> pa.Array:
        width, rows = type_.bit_width // 8, sum(map(len, chunks))
        room = self._room(name, rows * width)
        at = 0
        for chunk in chunks:
            size = len(chunk) * width
            room[at : at + size] = views.view(chunk.buffers()[1], np.uint8, chunk.offset * width, size)
            at += size
        return pa.Array.from_buffers(type_, rows, [_validity(chunks), pa.py_buffer(room)])

    def _lists(self, name: str, type_: pa.DataType, chunks: Sequence[pa.Array]) -> pa.Array:
        large = pa.types.is_large_list(type_)
        ranges = [views.view(c.buffers()[1], "i8" if large else "i4", c.offset, len(c) + 1) for c in chunks]
        values = [
            chunk.values.slice(int(one[0]), int(one[-1] - one[0]))
            for chunk, one in zip(chunks, ranges, strict=True)
        ]
        rows = sum(map(len, chunks))
        if not large and sum(map(len, values)) > np.iinfo(np.int32).max:
            return pa.concat_arrays(chunks)  # says what is wrong
        room = self._room(f"{name} offsets", (rows + 1) * (8 if large else 4))
        offsets = room.view("i8" if large else "i4")
        row = end = 0
        for one in ranges:
            np.add(one[:-1], end - one[0], out=offsets[row : row + len(one) - 1])
            row, end = row + len(one) - 1, end + int(one[-1] - one[0])
        offsets[row] = end
        inner = self._values(f"{name} values", type_.value_type, values)
        return pa.Array.from_buffers(type_, rows, [_validity(chunks), pa.py_buffer(room)], children=[inner])

    def _room(self, name: str, size: int) -> NDArray[np.uint8]:
        room = self._columns.pop(name, None)
        if room is None or len(room) < size:
            room = np.empty(size + size // 4, np.uint8)
        if self.nbytes + len(room) <= BYTES_MAX:
            self._columns[name] = room
        return room[:size]


def _is_fixed(type_: pa.DataType) -> bool:
    """Whether a value takes so many whole bytes."""
    return bool(pa.types.is_primitive(type_)) and type_.bit_width >= 8


def _validity(chunks: Sequence[pa.Array]) -> pa.Buffer | None:
    if not any(chunk.null_count for chunk in chunks):
        return None
    return pa.concat_arrays([chunk.is_valid() for chunk in chunks]).buffers()[1]
