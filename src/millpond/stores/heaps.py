"""Value columns that do not fit a cell: append-only heaps, referred to by row number.

References are shared by all heap columns of a slice. What was appended never changes, so a frozen copy shares it;
compaction makes a new heap of what is still referred to.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels import buffers
from millpond.stores import views

T = TypeVar("T", bound=np.generic)

# A chunk at least this many times its successor stays apart: few chunks to look in, few copies per row.
_CHUNK_RATIO = 8
# Concatenating beyond this many bytes could overflow 32-bit offsets.
_CHUNK_BYTES = 1 << 30


class BytesHeap:
    """Strings and binaries in one growing buffer."""

    def __init__(self, type_: pa.DataType) -> None:
        self.type = type_
        self.rows = 0
        self._offsets: NDArray[np.int64] = np.zeros(1, np.int64)
        self._data: NDArray[np.uint8] = np.empty(0, np.uint8)
        # One flag per row once a null has been met; empty before.
        self._valid: NDArray[np.uint8] = views.NO_BYTES

    def append(self, array: pa.Array) -> None:
        offsets, data = views.byte_ranges(array)
        rows = self.rows + len(array)
        used = int(self._offsets[self.rows])
        size = int(offsets[-1] - offsets[0])
        self._offsets = grown(self._offsets, self.rows + 1, rows + 1)
        self._data = grown(self._data, used, used + size)
        self._offsets[self.rows + 1 : rows + 1] = offsets[1:] + (used - offsets[0])
        self._data[used : used + size] = data[offsets[0] : offsets[-1]]
        if array.null_count or len(self._valid):
            if len(self._valid) == 0:
                self._valid = np.ones(self.rows, np.uint8)
            self._valid = grown(self._valid, self.rows, rows)
            self._valid[self.rows : rows] = views.integers(array.is_valid())
        self.rows = rows

    def take(self, refs: NDArray[np.int64]) -> pa.Array:
        """The values at those references; null at -1."""
        offsets = np.empty(len(refs) + 1, np.int64)
        data = np.empty(buffers.gather_sizes(self._offsets, refs, offsets), np.uint8)
        buffers.gather_bytes(self._offsets, self._data, refs, offsets, data)
        bits = np.zeros((len(refs) + 7) // 8, np.uint8)
        nulls = buffers.pack_valid(self._valid, refs, bits)
        return views.bytes_array(self.type, offsets, data, pa.py_buffer(bits) if nulls else None, nulls)

    def copy(self) -> BytesHeap:
        """A heap with the same rows, to be read only: it shares memory that this one may append behind."""
        other = BytesHeap(self.type)
        other.rows = self.rows
        other._offsets, other._data, other._valid = self._offsets, self._data, self._valid
        return other

    @property
    def nbytes(self) -> int:
        return int(self._offsets.nbytes + self._data.nbytes + self._valid.nbytes)


class ArrowHeap:
    """Any other Arrow type, in chunks that are merged as they pile up."""

    def __init__(self, type_: pa.DataType) -> None:
        self.type = type_
        self.rows = 0
        self._chunks: list[pa.Array] = []

    def append(self, array: pa.Array) -> None:
        if len(array) == 0:
            return
        if array.get_total_buffer_size() > 2 * array.nbytes:
            # A slice of a large batch would keep all of it alive.
            array = array.take(pa.array(np.arange(len(array))))
        self.rows += len(array)
        chunks = [*self._chunks, array]
        while (
            len(chunks) > 1
            and len(chunks[-2]) < _CHUNK_RATIO * len(chunks[-1])
            and chunks[-2].nbytes + chunks[-1].nbytes < _CHUNK_BYTES
        ):
            chunks[-2:] = [pa.concat_arrays(chunks[-2:])]
        self._chunks = chunks

    def take(self, refs: NDArray[np.int64]) -> pa.Array:
        """The values at those references; null at -1."""
        if not self._chunks:
            return pa.nulls(len(refs), self.type)
        if len(self._chunks) == 1:
            return self._chunks[0].take(pa.array(refs, mask=refs < 0))
        parts, places = [pa.nulls(1, self.type)], np.zeros(len(refs), np.int64)
        first, taken = 0, 1
        for chunk in self._chunks:
            (here,) = np.nonzero((refs >= first) & (refs < first + len(chunk)))
            parts.append(chunk.take(pa.array(refs[here] - first)))
            places[here] = np.arange(taken, taken + len(here))
            taken += len(here)
            first += len(chunk)
        return pa.concat_arrays(parts).take(pa.array(places))

    def copy(self) -> ArrowHeap:
        """A heap with the same rows, to be read only."""
        other = ArrowHeap(self.type)
        other.rows, other._chunks = self.rows, self._chunks
        return other

    @property
    def nbytes(self) -> int:
        return sum(int(chunk.nbytes) for chunk in self._chunks)


Heap = BytesHeap | ArrowHeap


def heap_for(type_: pa.DataType) -> Heap:
    return BytesHeap(type_) if views.is_bytes(type_) else ArrowHeap(type_)


def grown(array: NDArray[T], used: int, needed: int) -> NDArray[T]:
    """The array with room for `needed` elements along its first axis; the first `used` are kept."""
    if needed <= len(array):
        return array
    # Memory that was not written to yet costs nothing, so room may be generous.
    out = np.empty((max(needed, 2 * len(array), 16), *array.shape[1:]), array.dtype)
    out[:used] = array[:used]
    return out
