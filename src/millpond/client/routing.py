"""Which rows go to which container, and how their answers find the way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.kernels.hashing import slices_of
from millpond.kernels.partition import partition
from millpond.stores.keys import Keys
from millpond.wire.connection import SlicedBatch
from millpond.wire.messages import Placement


class Route(NamedTuple):
    """Rows in slice order: `order[i]` is the row that comes i-th, slice s is `starts[s]:starts[s+1]`."""

    order: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]


class Portion(NamedTuple):
    """The rows for one container, and their positions in slice order."""

    container: int
    rows: SlicedBatch
    positions: npt.NDArray[np.int64]


def route(keys: Keys, slices: int) -> Route:
    order, starts = partition(slices_of(keys.hashes, slices), slices)
    return Route(order, starts)


def split(
    route: Route, schema: pa.Schema, columns: Sequence[pa.Array], placement: Placement
) -> list[Portion]:
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
        portions.append(Portion(container, SlicedBatch(rows, own_counts), positions))
    return portions


def _runs(mine: npt.NDArray[np.bool_], starts: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """The stretches of rows whose slices are ours, neighbours merged, empty ones left out."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mine.astype(np.int8), [0]))))
    runs = [(int(starts[first]), int(starts[stop])) for first, stop in edges.reshape(-1, 2).tolist()]
    return [(start, stop) for start, stop in runs if stop > start]


def inverse(order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return back
