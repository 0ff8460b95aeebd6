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
from millpond.stores.rows import restore
from millpond.wire.connection import SlicedBatch
from millpond.wire.house import Placement


class Route(NamedTuple):
    """Rows in slice order: row i goes to `places[i]`, slice s is `starts[s]:starts[s+1]`."""

    places: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]


class ContainerRows(NamedTuple):
    """The rows for one container, and their positions in slice order."""

    container: int
    rows: SlicedBatch
    positions: npt.NDArray[np.int64]


def route(keys: Keys, slices: int) -> Route:
    return Route(*slice_places(slices_of(keys.hashes, slices), slices))


def arrange(columns: Sequence[pa.Array], places: npt.NDArray[np.int64]) -> list[pa.Array]:
    """The columns in slice order."""
    order = pa.array(inverse(places)) if columns else None
    return [column.take(order) for column in columns]


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
        positions = np.concatenate([np.arange(start, stop) for start, stop in runs])
        portions.append(ContainerRows(container, SlicedBatch(rows, own_counts), positions))
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
    positions = np.concatenate([portion.positions for portion in portions])
    if len(portions) > 1 and not np.array_equal(positions, np.arange(len(positions))):
        places = inverse(positions)[places]
    return [restore(parts, places) for parts in zip(*(answer.columns for answer in answers), strict=True)]


def counts_of(home: int, pond_slices: int, rows: int) -> npt.NDArray[np.int32]:
    """The per-slice counts of a batch of events: all for the home."""
    counts = np.zeros(pond_slices, np.int32)
    counts[home] = rows
    return counts
