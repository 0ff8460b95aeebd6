"""Radix partition of a batch by slice, and the way back."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import jit


@jit
def _partition(ids: NDArray[np.int32], order: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
    slices = starts.shape[0] - 1
    for i in range(ids.shape[0]):
        starts[ids[i] + 1] += 1
    for s in range(slices):
        starts[s + 1] += starts[s]
    cursor = starts[:slices].copy()
    for i in range(ids.shape[0]):
        s = ids[i]
        order[cursor[s]] = i
        cursor[s] += 1


@jit
def _inverse(order: NDArray[np.int64], out: NDArray[np.int64]) -> None:
    for i in range(order.shape[0]):
        out[order[i]] = i


@jit
def scatter(values: NDArray[np.int64], order: NDArray[np.int64], out: NDArray[np.int64]) -> None:
    """out[order[i]] = values[i]."""
    for i in range(order.shape[0]):
        out[order[i]] = values[i]


def partition(slice_ids: NDArray[np.int32], slices: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`(order, starts)`: the rows of slice `s` are `order[starts[s]:starts[s + 1]]`, in their original order."""
    order = np.empty(len(slice_ids), np.int64)
    starts = np.zeros(slices + 1, np.int64)
    _partition(slice_ids, order, starts)
    return order, starts


def inverse(order: NDArray[np.int64]) -> NDArray[np.int64]:
    """The permutation that undoes `order`: `x[order][inverse(order)] == x`."""
    out = np.empty(len(order), np.int64)
    _inverse(order, out)
    return out
