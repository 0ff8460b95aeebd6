"""Which rows go to which container, and how their answers find the way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.kernels.hashing import slices_of
from millpond.kernels.partition import inverse, slice_places
from millpond.stores.keys import Keys
from millpond.stores.rows import is_plain_long, restore, spread_long
from millpond.wire.connection import SlicedBatch
from millpond.wire.house import Placement


class Route(NamedTuple):
    """Rows in slice order: row i goes to `places[i]`, slice s is `starts[s]:starts[s+1]`."""

    places: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]


class ContainerRows(NamedTuple):
    """The rows for one container, and the stretches that they are in slice order."""

    container: int
    rows: SlicedBatch
    runs: list[tuple[int, int]]

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        return np.concatenate([np.arange(start, stop) for start, stop in self.runs])


def route(keys: Keys, slices: int) -> Route:
    return Route(*slice_places(slices_of(keys.hashes, slices), slices))


def arrange(columns: Sequence[pa.Array], places: npt.NDArray[np.int64]) -> list[pa.Array]:
    """The columns in slice order."""
    longs = [is_plain_long(column) for column in columns]
    order = None if all(longs) else pa.array(inverse(places))
    return [
        spread_long(column, places) if plain else column.take(order)
        for column, plain in zip(columns, longs, strict=True)
    ]


def split(
    route: Route, schema: pa.Schema, columns: Sequence[pa.Array], placement: Placement
) -> list[ContainerRows]:
    """Cuts columns, which are in slice order already, into one batch for each container that has rows."""
    batch = pa.RecordBatch.from_arrays(list(columns), schema=schema)
    counts = np.diff(route.starts).astype(np.int32)
    portions = []
    owners = np.asarray(placement.owners)
    for container in np.unique(owners[counts > 0]).tolist():
        mine = owners == container
        own_counts = np.where(mine, counts, 0).astype(np.int32)
        runs = _runs(mine, route.starts)
        parts = [batch.slice(start, stop - start) for start, stop in runs]
        rows = parts[0] if len(parts) == 1 else pa.concat_batches(parts)
        portions.append(ContainerRows(container, SlicedBatch(rows, own_counts), runs))
    return portions


def _runs(mine: npt.NDArray[np.bool_], starts: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """The stretches of rows whose slices are ours, neighbours merged, empty ones left out."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mine.astype(np.int8), [0]))))
    runs = [(int(starts[first]), int(starts[stop])) for first, stop in edges.reshape(-1, 2).tolist()]
    return [(start, stop) for start, stop in runs if stop > start]


def in_order_asked(
    portions: Sequence[ContainerRows], answers: Sequence[pa.RecordBatch], places: npt.NDArray[np.int64]
) -> list[pa.Array]:
    """The answers of all portions, column by column, in the order that the rows had before they were routed."""
    if len(portions) > 1:
        positions = np.concatenate([portion.positions for portion in portions])
        if not np.array_equal(positions, np.arange(len(positions))):
            places = inverse(positions)[places]
    return [restore(parts, places) for parts in zip(*(answer.columns for answer in answers), strict=True)]


def counts_of(home: int, pond_slices: int, rows: int) -> npt.NDArray[np.int32]:
    """The per-slice counts of a batch of events: all for the home."""
    counts = np.zeros(pond_slices, np.int32)
    counts[home] = rows
    return counts
