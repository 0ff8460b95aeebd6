"""Columns in and out of the words of segments: each stream of a segment takes whole words, one stream after another.

Each kernel moves one stream of all segments. The cursor of a segment says at which word its next stream is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import jit
from millpond.kernels._prefetch import FAR_AHEAD, prefetch

Longs = NDArray[np.int64]


@jit
def put_values(values: Longs, width: int, order: Longs, starts: Longs, cursor: Longs, words: Longs) -> None:
    """Values of so many words each, taken in that order, go to where the cursor of their segment is, and it moves on."""
    for j in range(cursor.shape[0]):
        at = cursor[j]
        for i in range(starts[j], starts[j + 1]):
            begin = order[i] * width
            for w in range(width):
                words[at] = values[begin + w]
                at += 1
        cursor[j] = at


@jit
def get_values(words: Longs, width: int, starts: Longs, cursor: Longs, values: Longs) -> None:
    """The way back: values of segment j are `starts[j]..starts[j + 1]`."""
    last = cursor.shape[0] - 1
    for j in range(cursor.shape[0]):
        at = cursor[j]
        prefetch(words, cursor[min(j + FAR_AHEAD, last)])
        for i in range(starts[j] * width, starts[j + 1] * width):
            values[i] = words[at]
            at += 1
        cursor[j] = at


@jit
def put_bytes(
    stream: NDArray[np.uint8], bounds: Longs, cursor: Longs, words: Longs, octets: NDArray[np.uint8]
) -> None:
    """Bytes `bounds[j]..bounds[j + 1]` go to the cursor of segment j, in whole words. `octets` are the bytes of `words`."""
    for j in range(cursor.shape[0]):
        size = bounds[j + 1] - bounds[j]
        if size > 0:
            count = (size + 7) >> 3
            words[cursor[j] + count - 1] = 0
            at = cursor[j] << 3
            begin = bounds[j]
            for i in range(size):
                octets[at + i] = stream[begin + i]
            cursor[j] += count


@jit
def get_bytes(octets: NDArray[np.uint8], bounds: Longs, cursor: Longs, stream: NDArray[np.uint8]) -> None:
    """The way back."""
    for j in range(cursor.shape[0]):
        size = bounds[j + 1] - bounds[j]
        at = cursor[j] << 3
        begin = bounds[j]
        for i in range(size):
            stream[begin + i] = octets[at + i]
        cursor[j] += (size + 7) >> 3


@jit
def add_words(bounds: Longs, width: int, sizes: Longs) -> None:
    """Adds the words that elements `bounds[j]..bounds[j + 1]` of so many bytes take."""
    for j in range(sizes.shape[0]):
        sizes[j] += ((bounds[j + 1] - bounds[j]) * width + 7) >> 3
