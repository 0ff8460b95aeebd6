"""Row encoding of composite keys.

Column by column: an integer-like value as 8 little-endian bytes, a string or binary one as its size in 4
little-endian bytes, then the bytes. Equal keys have equal encodings and the other way round. Decoding reads
nothing outside a row's bytes, whatever they hold.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import jit

LONG_SIZE = 8
PREFIX_SIZE = 4


@jit
def add_sizes(offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
    """Add the encoded size of a bytes column to each row's size."""
    for i in range(sizes.shape[0]):
        sizes[i] += PREFIX_SIZE + offsets[i + 1] - offsets[i]


@jit
def write_longs(values: NDArray[np.int64], cursor: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    for i in range(values.shape[0]):
        at = cursor[i]
        for j in range(8):
            out[at + j] = np.uint8((values[i] >> (8 * j)) & 255)
        cursor[i] = at + LONG_SIZE


@jit
def write_bytes(
    offsets: NDArray[np.int64], data: NDArray[np.uint8], cursor: NDArray[np.int64], out: NDArray[np.uint8]
) -> None:
    for i in range(cursor.shape[0]):
        at = cursor[i]
        size = offsets[i + 1] - offsets[i]
        for j in range(4):
            out[at + j] = np.uint8((size >> (8 * j)) & 255)
        at += PREFIX_SIZE
        for j in range(size):
            out[at + j] = data[offsets[i] + j]
        cursor[i] = at + size


@jit
def read_longs(
    data: NDArray[np.uint8], cursor: NDArray[np.int64], stops: NDArray[np.int64], out: NDArray[np.int64]
) -> int:
    """Read a long at each row's cursor and move it on. Returns the first malformed row, or -1."""
    for i in range(out.shape[0]):
        at = cursor[i]
        if stops[i] - at < LONG_SIZE:
            return i
        word = np.int64(0)
        for j in range(8):
            word |= np.int64(data[at + j]) << np.int64(8 * j)
        out[i] = word
        cursor[i] = at + LONG_SIZE
    return -1


@jit
def read_sizes(
    data: NDArray[np.uint8], cursor: NDArray[np.int64], stops: NDArray[np.int64], out: NDArray[np.int64]
) -> int:
    """Read the size of a bytes value at each row's cursor, move the cursor to its first byte.

    `out` becomes the values' offsets, from 0. Returns the first malformed row, or -1.
    """
    out[0] = 0
    for i in range(cursor.shape[0]):
        at = cursor[i]
        if stops[i] - at < PREFIX_SIZE:
            return i
        size = np.int64(0)
        for j in range(4):
            size |= np.int64(data[at + j]) << np.int64(8 * j)
        at += PREFIX_SIZE
        if stops[i] - at < size:
            return i
        out[i + 1] = out[i] + size
        cursor[i] = at
    return -1


@jit
def read_bytes(
    data: NDArray[np.uint8], cursor: NDArray[np.int64], offsets: NDArray[np.int64], out: NDArray[np.uint8]
) -> None:
    """Copy the values that `read_sizes` found, and move each cursor past its value."""
    for i in range(cursor.shape[0]):
        at = cursor[i]
        size = offsets[i + 1] - offsets[i]
        for j in range(size):
            out[offsets[i] + j] = data[at + j]
        cursor[i] = at + size
