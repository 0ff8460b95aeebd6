"""Sessions that end before their gap is over: after so long, or behind a row that says so."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels import windows as kernel
from millpond.schema import TIME
from millpond.stores import views
from millpond.stores.windows.shape import CUT, END
from millpond.times import Progress

Longs = NDArray[np.int64]


class Parts(NamedTuple):
    """Parts of sessions that are over: `rows` of them in time order, from `fired[p]` to `fired[p + 1]`, and of which session
    each part is (`groups`). What is not over is `left`, with its sessions.
    """

    rows: Longs
    fired: Longs
    groups: Longs
    starts: Longs
    ends: Longs
    left: Longs
    left_groups: Longs


def cut_sessions(
    batch: pa.RecordBatch, offsets: Longs, longest: int, touching: bool, watermark: Progress
) -> Parts:
    """Cuts the rows of sessions, those of session g from `offsets[g]` to `offsets[g + 1]`, in the order of their times."""
    times, ends = views.longs(batch.column(TIME)), views.longs(batch.column(END))
    groups = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    order = np.lexsort((times, groups))
    cuts = np.zeros(len(order), np.uint8)
    if CUT in batch.schema.names:
        cuts = views.longs(batch.column(CUT)).astype(np.uint8)
    part_of = np.empty(len(order), np.int64)
    starts, stops = np.empty((2, len(order)), np.int64)
    count = kernel.cut(
        groups[order], times[order], ends[order], cuts[order], longest, touching, part_of, starts, stops
    )
    starts, stops = starts[:count], stops[:count]
    is_over = stops <= watermark if watermark < np.inf else np.ones(count, np.bool_)
    rows = order[is_over[part_of]]
    sizes = np.bincount(part_of, minlength=count)[is_over]
    fired = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))) if count else np.zeros(1, np.int64)
    first = np.searchsorted(part_of, np.flatnonzero(is_over))
    # What is left goes back as it came: in the order of arrival.
    left = np.sort(order[~is_over[part_of]])
    return Parts(
        rows,
        fired if len(sizes) else np.empty(0, np.int64),
        groups[order][first],
        starts[is_over],
        stops[is_over],
        left,
        groups[left],
    )
