"""How long rows waited: for U to pass them, then for a turn to begin. Worked out by the tasks that answer them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.times import TIME_MAX, TIME_MIN
from millpond.wire.questions import Passed, Waits

ARRIVED = "__millpond_arrived"
"""The last column of rows that wait: when the turn began that met them first, in microseconds since 1970."""


def with_arrival(table: pa.Table, arrived: int | npt.NDArray[np.int64]) -> pa.Table:
    column = np.broadcast_to(np.int64(arrived), table.num_rows) if isinstance(arrived, int) else arrived
    return table.append_column(ARRIVED, pa.array(column, pa.int64()))


def without_arrival(table: pa.Table) -> tuple[pa.Table, npt.NDArray[np.int64] | None]:
    """The rows as their stream had them, and when they arrived, if that was written down."""
    if not table.column_names or table.column_names[-1] != ARRIVED:
        return table, None
    last = table.num_columns - 1
    return table.remove_column(last), table.column(last).to_numpy()


def waits_of(
    highs: npt.NDArray[np.int64], arrived: npt.NDArray[np.int64], began: int, passed: Sequence[Passed]
) -> Waits:
    """Of rows that arrived then, and are answered in a turn that `began` after U had passed those times."""
    steps = np.array([min(max(step.update, TIME_MIN), TIME_MAX) for step in passed], np.int64)
    moments = np.array([began - int(step.ago_s * 1e6) for step in passed], np.int64)
    # The first step above a time passed it. What no step did had been passed when the row came.
    places = np.searchsorted(steps, highs, side="right")
    passing = arrived.copy()
    known = places < len(steps)
    passing[known] = np.maximum(moments[places[known]], arrived[known])
    passing = np.minimum(passing, began)
    for_update = np.maximum(passing - arrived, 0) / 1_000
    for_turn = np.maximum(began - np.maximum(passing, arrived), 0) / 1_000
    return Waits(
        rows=len(highs),
        waited=len(highs),
        update_ms=float(for_update.sum()),
        turn_ms=float(for_turn.sum()),
        update_histogram=_histogram(for_update),
        turn_histogram=_histogram(for_turn),
    )


def total(parts: Iterable[Waits], batch_ms: float = 0.0) -> Waits:
    """All of them together, of a turn that took so long."""
    every = list(parts)
    return Waits(
        rows=sum(part.rows for part in every),
        waited=sum(part.waited for part in every),
        update_ms=sum(part.update_ms for part in every),
        turn_ms=sum(part.turn_ms for part in every),
        update_histogram=_added(part.update_histogram for part in every),
        turn_histogram=_added(part.turn_histogram for part in every),
        batch_ms=batch_ms,
    )


def _histogram(waits_ms: npt.NDArray[np.float64]) -> list[int]:
    places = np.searchsorted(np.array(Waits.BOUNDS_MS), waits_ms, side="left")
    return [int(count) for count in np.bincount(places, minlength=len(Waits.BOUNDS_MS))]


def _added(histograms: Iterable[list[int]]) -> list[int]:
    filled = [histogram for histogram in histograms if histogram]
    return [sum(counts) for counts in zip(*filled, strict=True)]
