"""Sparse vectors as two arrays: keys, ascending, none of them twice, and doubles."""

from __future__ import annotations

from typing import Any

import numpy as np

from millpond.kernels._jit import inlined, part
from millpond.kernels.cells import Doubles, Longs


@inlined
def place_of(keys: Longs, used: int, key: int) -> Any:
    """How many keys are below that one."""
    low, high = 0, used
    while low < high:
        middle = (low + high) >> 1
        if keys[middle] < key:
            low = middle + 1
        else:
            high = middle
    return low


@part
def total(values: Doubles) -> float:
    found = 0.0
    for i in range(values.shape[0]):
        found += values[i]
    return found


@part
def dot(keys: Longs, values: Doubles, other_keys: Longs, others: Doubles) -> float:
    found, i = 0.0, 0
    for j in range(other_keys.shape[0]):
        while i < keys.shape[0] and keys[i] < other_keys[j]:
            i += 1
        if i < keys.shape[0] and keys[i] == other_keys[j]:
            found += values[i] * others[j]
    return found


@part
def added(keys: Longs, values: Doubles, other_keys: Longs, others: Doubles, times: float) -> Any:
    """The first one, and the other one so many times. What is only in that is added to 0.0, as everywhere."""
    count, other_count = keys.shape[0], other_keys.shape[0]
    sum_keys, sums = np.empty(count + other_count, np.int64), np.empty(count + other_count, np.float64)
    i = j = used = 0
    while i < count or j < other_count:
        if j == other_count or (i < count and keys[i] < other_keys[j]):
            sum_keys[used], sums[used] = keys[i], values[i]
            i += 1
        else:
            before = 0.0
            if i < count and keys[i] == other_keys[j]:
                before = values[i]
                i += 1
            sum_keys[used], sums[used] = other_keys[j], before + others[j] * times
            j += 1
        used += 1
    return sum_keys[:used], sums[:used]


@part
def without(keys: Longs, values: Doubles, other_keys: Longs) -> Any:
    """The entries whose keys are not among the others."""
    left_keys, left = np.empty(keys.shape[0], np.int64), np.empty(keys.shape[0], np.float64)
    j = used = 0
    for i in range(keys.shape[0]):
        while j < other_keys.shape[0] and other_keys[j] < keys[i]:
            j += 1
        if j == other_keys.shape[0] or other_keys[j] != keys[i]:
            left_keys[used], left[used] = keys[i], values[i]
            used += 1
    return left_keys[:used], left[:used]


@part
def scaled(values: Doubles, number: float, divides: bool) -> Doubles:
    made = np.empty(values.shape[0], np.float64)
    if divides and number == 0.0 and values.shape[0] > 0:
        raise ZeroDivisionError("float division by zero")
    for i in range(values.shape[0]):
        made[i] = values[i] / number if divides else values[i] * number
    return made


@part
def full(keys: Longs, values: Doubles, length: int) -> Doubles:
    """The values from key 0 to `length`, absent ones as 0.0."""
    made = np.zeros(max(length, 0), np.float64)
    for i in range(keys.shape[0]):
        if 0 <= keys[i] < length:
            made[keys[i]] = values[i]
    return made


@inlined
def _is_before(value: float, key: int, other: float, other_key: int) -> bool:
    return value > other or (value == other and key < other_key)


@part
def top(keys: Longs, values: Doubles, k: int) -> Longs:
    """Keys of the `k` largest values, the largest first, of equals the smaller key first. ValueError if one is no number."""
    size = max(min(k, keys.shape[0]), 0)
    best, best_keys = np.empty(size, np.float64), np.empty(size, np.int64)
    # A heap: the last of those that were chosen is on top.
    used = 0
    for i in range(keys.shape[0]):
        value, key = values[i], keys[i]
        if value != value:
            raise ValueError("what is not a number has no place in an order")
        if used < size:
            at = used
            used += 1
            while at > 0:
                above = (at - 1) // 2
                if not _is_before(best[above], best_keys[above], value, key):
                    break
                best[at], best_keys[at] = best[above], best_keys[above]
                at = above
            best[at], best_keys[at] = value, key
        elif size > 0 and _is_before(value, key, best[0], best_keys[0]):
            _sift(best, best_keys, size, value, key)
    for end in range(size - 1, 0, -1):
        value, key = best[end], best_keys[end]
        best[end], best_keys[end] = best[0], best_keys[0]
        _sift(best, best_keys, end, value, key)
    return best_keys


@inlined
def _sift(best: Doubles, best_keys: Longs, size: int, value: float, key: int) -> None:
    """Puts an entry in the place of the one on top of a heap."""
    at = 0
    while 2 * at + 1 < size:
        below = 2 * at + 1
        if below + 1 < size and _is_before(
            best[below], best_keys[below], best[below + 1], best_keys[below + 1]
        ):
            below += 1
        if not _is_before(value, key, best[below], best_keys[below]):
            break
        best[at], best_keys[at] = best[below], best_keys[below]
        at = below
    best[at], best_keys[at] = value, key
