"""Radix partition of a batch by slice, and the way back.

Two forms of one permutation. `order[i]` is the row that comes i-th; Arrow's `take` wants it. `places[i]` is where row
i goes; with it both ways read and write in runs, one per slice, which is kinder to caches when batches are large.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import jit


@jit
def _place(ids: NDArray[np.int32], places: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
    slices = starts.shape[0] - 1
    for i in range(ids.shape[0]):
        starts[ids[i] + 1] += 1
    for s in range(slices):
        starts[s + 1] += starts[s]
    cursor = starts[:slices].copy()
    for i in range(ids.shape[0]):
        s = ids[i]
        places[i] = cursor[s]
        cursor[s] += 1


@jit
def scatter(values: NDArray[np.int64], places: NDArray[np.int64], out: NDArray[np.int64]) -> None:
    """out[places[i]] = values[i]."""
    for i in range(places.shape[0]):
        out[places[i]] = values[i]


@jit
def gather(values: NDArray[np.int64], places: NDArray[np.int64], out: NDArray[np.int64]) -> None:
    """out[i] = values[places[i]]."""
    for i in range(places.shape[0]):
        out[i] = values[places[i]]


@jit
def gather_bits(
    bits: NDArray[np.uint8], offset: int, places: NDArray[np.int64], out: NDArray[np.uint8]
) -> None:
    """Arrow validity bits of gathered values; `bits` are read from bit `offset` on."""
    for byte in range(out.shape[0]):
        packed = 0
        for i in range(8 * byte, min(8 * byte + 8, places.shape[0])):
            bit = offset + places[i]
            packed |= ((bits[bit >> 3] >> (bit & 7)) & 1) << (i & 7)
        out[byte] = packed


def slice_places(slice_ids: NDArray[np.int32], slices: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`(places, starts)`: row i goes to `places[i]`, those of slice `s` to `starts[s]..starts[s + 1]`, in order."""
    places = np.empty(len(slice_ids), np.int64)
    starts = np.zeros(slices + 1, np.int64)
    _place(slice_ids, places, starts)
    return places, starts


def inverse(order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places from an order, or an order from places."""
    out = np.empty(len(order), np.int64)
    scatter(np.arange(len(order)), order, out)
    return out
