"""What the generators of the transaction applications share: seeded, skewed keys, spread over partitions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Longs = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

QUANTILES = 1 << 20


@dataclass(frozen=True)
class Spread:
    """Where the keys of one event lie, among partitions `key % count`.

    `ratio` of the events draw their keys from `length` partitions, the others from a single one.
    """

    count: int = 16
    ratio: float = 0.25
    length: int = 4


def skewed(rng: np.random.Generator, shape: int | tuple[int, ...], keys: int, skew: float) -> Longs:
    """Keys below `keys`, the r-th most frequent of them with a weight of about 1 / r ** skew (Zipf).

    Frequent keys lie anywhere, at places that the generator decides.
    """
    key_of = rng.permutation(keys)
    weight = np.arange(1, keys + 1, dtype=np.float64) ** -skew
    until = np.cumsum(weight / weight.sum())[:-1]
    if keys > QUANTILES >> 4:
        return np.asarray(key_of[np.searchsorted(until, rng.random(shape), side="right")])
    # To search for each draw would be slow: the keys at a grid of quantiles are found once.
    grid = key_of[np.searchsorted(until, (np.arange(QUANTILES) + 0.5) / QUANTILES, side="right")]
    return np.asarray(grid[rng.integers(0, QUANTILES, shape, np.uint32)])


def spread(rng: np.random.Generator, keys: Longs, below: int, over: Spread) -> Longs:
    """A row of keys for each event, each moved to a near one in the event's partitions: that of its first key, and
    those after it."""
    if over.count <= 1:
        return keys
    away = np.arange(keys.shape[1]) % over.length
    many = rng.random((len(keys), 1)) < over.ratio
    moved = keys[:, :1] + many * away - keys
    moved -= moved // over.count * over.count
    moved += keys
    return np.where(moved < below, moved, moved - over.count)


def kinds_of(rng: np.random.Generator, count: int, weights: dict[str, float]) -> tuple[Longs, pa.Array]:
    """The number of each event's kind, and its name."""
    share = np.cumsum(list(weights.values()))
    number = np.searchsorted(share, rng.random(count) * share[-1], side="right")
    return number, pa.array(list(weights)).take(pa.array(number))


def only(values: npt.NDArray[np.generic], there: Flags) -> pa.Array:
    """A column that is null where an event has no such field."""
    return pa.array(values, mask=~there)


def lists(values: Longs, there: Flags) -> pa.Array:
    """Rows of numbers as lists for the events that have one, in order; the others have none."""
    width = values.shape[1]
    ends = np.cumsum(np.where(there, width, 0))
    offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32), mask=np.concatenate([~there, [False]]))
    return pa.ListArray.from_arrays(offsets, pa.array(values.ravel()))
