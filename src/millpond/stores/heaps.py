"""Value columns that do not fit a cell: append-only heaps, referred to by row number.

References are shared by all heap columns of a slice. What was appended never changes, so a frozen copy shares it;
compaction makes a new heap of what is still referred to.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels import buffers
from millpond.kernels import control as at
from millpond.stores import views
from millpond.stores.budget import UNLIMITED, Budget, bytes_of_ranges
from millpond.stores.growing import grown
from millpond.stores.key_index import KeyIndex
from millpond.stores.keys import Keys

# So many distinct values are always kept once each; more only while there are this many rows for each.
_DISTINCT_MIN = 4096
_ROWS_PER_DISTINCT = 4
# A chunk at least this many times its successor stays apart: few chunks to look in, few copies per row.
_CHUNK_RATIO = 8
# Concatenating beyond this many bytes could overflow 32-bit offsets.
_CHUNK_BYTES = 1 << 30


class BytesHeap:
    """Strings and binaries in one growing buffer: each distinct value once, while values repeat.

    Then a row is a code, the number of its value; else it is a value of its own. Few distinct values stay in the
    cache, and fetches then read little memory.
    """

    def __init__(self, type_: pa.DataType) -> None:
        self.type = type_
        self.rows = 0
        self._distinct: KeyIndex | None = KeyIndex("bytes", np.zeros(at.SIZE, np.int64))
        # The value of each row; empty where a row is its own.
        self._codes: NDArray[np.int32] = np.empty(0, np.int32)
        self._coded = True
        self._offsets: NDArray[np.int64] = np.zeros(1, np.int64)
        self._data: NDArray[np.uint8] = views.NO_BYTES
        # One flag per row once a null has been met; empty before.
        self._valid: NDArray[np.uint8] = views.NO_BYTES

    def append(self, array: pa.Array) -> None:
        offsets, data = views.byte_ranges(array)
        rows = self.rows + len(array)
        if self._distinct is not None:
            self._append_codes(self._distinct, Keys("bytes", offsets=offsets, data=data), rows)
        else:
            self._append_values(offsets, data, self.rows)
        if array.null_count or len(self._valid):
            if len(self._valid) == 0:
                self._valid = np.ones(self.rows, np.uint8)
            self._valid = grown(self._valid, self.rows, rows)
            self._valid[self.rows : rows] = views.integers(array.is_valid())
        self.rows = rows

    def _append_codes(self, distinct: KeyIndex, values: Keys, rows: int) -> None:
        self._codes = grown(self._codes, self.rows, rows)
        self._codes[self.rows : rows] = distinct.assign(values)
        stored = distinct.stored_keys()
        self._offsets, self._data = stored.offsets, stored.data
        if len(distinct) > _DISTINCT_MIN and len(distinct) * _ROWS_PER_DISTINCT > rows:
            offsets, data = self._gathered(self._codes[:rows].astype(np.int64))
            self._distinct, self._coded = None, False
            self._codes = np.empty(0, np.int32)
            self._offsets, self._data = offsets, data

    def _append_values(self, offsets: NDArray[np.int64], data: NDArray[np.uint8], first: int) -> None:
        rows = first + len(offsets) - 1
        used = int(self._offsets[first])
        size = int(offsets[-1] - offsets[0])
        self._offsets = grown(self._offsets, first + 1, rows + 1)
        self._data = grown(self._data, used, used + size)
        self._offsets[first + 1 : rows + 1] = offsets[1:] + (used - offsets[0])
        self._data[used : used + size] = data[offsets[0] : offsets[-1]]

    def take(self, refs: NDArray[np.int64], budget: Budget = UNLIMITED) -> pa.Array:
        """The values at those references; null at -1."""
        found = refs
        if self._coded:
            found = np.empty(len(refs), np.int64)
            buffers.gather_codes(self._codes, refs, found)
        offsets, data = self._gathered(found, budget)
        bits = np.zeros((len(refs) + 7) // 8, np.uint8)
        nulls = buffers.pack_valid(self._valid, refs, bits)
        return views.bytes_array(self.type, offsets, data, pa.py_buffer(bits) if nulls else None, nulls)

    def _gathered(
        self, numbers: NDArray[np.int64], budget: Budget = UNLIMITED
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        offsets = np.empty(len(numbers) + 1, np.int64)
        size = buffers.gather_sizes(self._offsets, numbers, offsets)
        budget.claim(size)
        if size > np.iinfo(np.int32).max:
            views.narrow_offsets(offsets)  # before so much memory is asked for
        data = np.empty(size, np.uint8)
        buffers.gather_bytes(self._offsets, self._data, numbers, offsets, data)
        return offsets, data

    def copy(self) -> BytesHeap:
        """A heap with the same rows, to be read only: it shares memory that this one may append behind."""
        other = BytesHeap(self.type)
        other.rows = self.rows
        other._distinct, other._codes, other._coded = None, self._codes, self._coded
        other._offsets, other._data, other._valid = self._offsets, self._data, self._valid
        return other

    @property
    def nbytes(self) -> int:
        values = self._offsets.nbytes + self._data.nbytes if self._distinct is None else self._distinct.nbytes
        return int(values + self._codes.nbytes + self._valid.nbytes)


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

    def take(self, refs: NDArray[np.int64], budget: Budget = UNLIMITED) -> pa.Array:
        """The values at those references; null at -1."""
        if not self._chunks:
            return pa.nulls(len(refs), self.type)
        if budget is not UNLIMITED:
            budget.claim(self._size_of(refs))
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

    def _size_of(self, refs: NDArray[np.int64]) -> int:
        """How many bytes the values at those references take, roughly."""
        size = first = 0
        for chunk in self._chunks:
            here = refs[(refs >= first) & (refs < first + len(chunk))] - first
            size += bytes_of_ranges(chunk, here, here + 1)
            first += len(chunk)
        return size

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
