"""A windowed join: rows of both sides by the pane that they fall into; a window gives all pairs of a key when it ends."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels import pairs as pairing
from millpond.kernels import windows as kernel
from millpond.schema import KeyKind
from millpond.stores import views
from millpond.stores.keys import Keys, decode_keys
from millpond.stores.outputs import Outputs
from millpond.stores.windows.celltable import new_index
from millpond.stores.windows.firing import FiringStore, Portions
from millpond.stores.windows.join_shape import JoinShape
from millpond.stores.windows.rowlog import RowLog, shares_for
from millpond.stores.windows.shape import WindowShape, time_type
from millpond.stores.windows.slides import Slides, has_ended
from millpond.stores.windows.store import NewRows
from millpond.times import TIME_MAX, TIME_MIN, Progress
from millpond.wire.joins import SIDES, Side

Longs = NDArray[np.int64]
PAIRS_AT_ONCE = 1 << 17
"""About: a left row comes with all that it makes a pair with."""


class PaneRows:
    """Rows of one side, by pane: each has a group in the log of rows, and numbers are used again."""

    def __init__(self, panes: WindowShape, rows: RowLog) -> None:
        self._panes = panes
        self.rows = rows
        self.groups: dict[int, int] = {}
        self._free: list[int] = []

    def insert(self, batch: pa.RecordBatch) -> None:
        starts = np.empty(batch.num_rows, np.int64)
        kernel.pane_starts(views.longs(batch.column(1)), self._panes.pane, self._panes.window.offset, starts)
        panes, which = np.unique(starts, return_inverse=True)
        numbers = np.array([self._group(pane) for pane in panes.tolist()], np.int64)
        self.rows.append(numbers[which], batch)

    def _group(self, pane: int) -> int:
        if pane not in self.groups:
            group = self._free.pop() if self._free else len(self.groups)
            self.groups[pane] = group
            self.rows.expect(np.array([group]), np.array([self._panes.pane_end(pane)]))
        return self.groups[pane]

    def of(self, panes: Iterable[int]) -> Longs:
        """The groups of those of these panes that it has rows of."""
        return np.array([self.groups[pane] for pane in panes if pane in self.groups], np.int64)

    def drop(self, panes: Iterable[int]) -> None:
        for pane in panes:
            group = self.groups.pop(pane, None)
            if group is not None:
                self.rows.drop(np.array([group]))
                self._free.append(group)

    def contents(self) -> Iterator[pa.RecordBatch]:
        groups = [group for _, group in sorted(self.groups.items())]
        return (rows for _, rows in self.rows.frozen(np.array(groups, np.int64)))

    def validate(self) -> None:
        assert self.rows.groups().tolist() == sorted(self.groups.values())
        assert not set(self._free) & set(self.groups.values())


class PairWindows(FiringStore):
    """One slice of a windowed join."""

    def __init__(self, shape: JoinShape, new_rows: NewRows, outputs: Outputs | None = None) -> None:
        super().__init__(outputs)
        assert shape.panes is not None
        self.shape = shape
        self._panes = shape.panes
        self._window = shape.panes.window
        self._sides: dict[Side, PaneRows] = {
            side: PaneRows(shape.panes, new_rows(shape.staged[side], "aar")) for side in SIDES
        }
        self._sliding = Slides(shape.panes) if self._window.kind == "sliding" else None

    def results(self, time_kind: str) -> pa.Schema:
        return self.shape.results(time_kind)

    def take_in(self, portions: Portions, time_kind: str) -> Iterator[pa.Table]:
        for _, batch in portions:
            self.restore(batch)
        yield from ()

    def restore(self, batch: pa.RecordBatch) -> None:
        side = self.shape.side_of(batch.schema.names)
        self._sides[side].insert(batch.cast(self.shape.staged[side]))

    def fire(self, watermark: Progress, time_kind: str) -> Iterator[pa.Table]:
        closes = watermark == math.inf
        panes = self._all_panes()
        if self._sliding is None:
            done = [pane for pane in panes if closes or has_ended(self._panes.pane_end(pane), watermark)]
            windows = [self._panes.pane_start(pane) for pane in done]
        else:
            windows = list(self._sliding.due(panes, watermark, closes))
            done = [pane for pane in panes if closes or self._sliding.is_done(pane)]
        for start in windows:
            end = start + self._window.size
            own = panes[bisect_left(panes, start) : bisect_left(panes, end)]
            yield from self._pairs(own, start, end, time_kind)
        for side in self._sides.values():
            side.drop(done)

    def _all_panes(self) -> list[int]:
        return sorted({pane for side in self._sides.values() for pane in side.groups})

    def _pairs(self, panes: list[int], start: int, end: int, time_kind: str) -> Iterator[pa.Table]:
        """All pairs of a window of these panes; if it is large, of some keys after the others."""
        groups = [self._sides[side].of(panes) for side in SIDES]
        if not all(map(len, groups)):
            return
        logs = [self._sides[side].rows for side in SIDES]
        shares = shares_for(sum(int(log.sizes_of(own).sum()) for log, own in zip(logs, groups, strict=True)))
        edges = [max(start, TIME_MIN), min(end, TIME_MAX)]
        for share in range(shares):
            left, right = (log.peek_share(own, share, shares) for log, own in zip(logs, groups, strict=True))
            if not left.num_rows or not right.num_rows:
                continue
            keys = Keys.from_arrow(left.column(0))
            for ours, theirs in pairs_of_keys(self.shape.key_kind, keys, Keys.from_arrow(right.column(0))):
                spans = [pa.array(np.full(len(ours), edge)).cast(time_type(time_kind)) for edge in edges]
                own = decode_keys(keys.take(ours).to_arrow(), self.shape.keys)
                values = [*taken(left, ours), *taken(right, theirs)]
                yield pa.Table.from_arrays([*spans, *own, *values], schema=self.results(time_kind))

    def contents(self) -> Iterator[pa.RecordBatch]:
        return chain.from_iterable([side.contents() for side in self._sides.values()])

    @property
    def count(self) -> int:
        return len(self._all_panes())

    @property
    def newest(self) -> int | None:
        panes = self._all_panes()
        if not panes:
            return None
        # The last window with a pane begins with it, or less than a pane's length before.
        return min(self._panes.pane_start(panes[-1]) + self._window.size, TIME_MAX)

    @property
    def oldest(self) -> int:
        return min((min(side.groups) for side in self._sides.values() if side.groups), default=TIME_MAX)

    @property
    def reach(self) -> int:
        newest = self.newest
        return TIME_MIN if newest is None else newest

    @property
    def nbytes(self) -> int:
        return sum(log.memory_bytes for log in self.logs)

    @property
    def logs(self) -> Sequence[RowLog]:
        return [side.rows for side in self._sides.values()]

    def validate(self) -> None:
        super().validate()
        for side in self._sides.values():
            side.validate()


def pairs_of_keys(kind: KeyKind, left: Keys, right: Keys) -> Iterator[tuple[Longs, Longs]]:
    """All pairs of rows with the same key, so many at a time: the left ones in their order, for each the right ones in theirs."""
    index = new_index(kind)
    ids = index.assign(right)
    offsets, order = np.empty(len(index) + 1, np.int64), np.empty(len(ids), np.int64)
    kernel.order_by(ids, len(index), offsets, order)
    groups = index.find(left)
    mates = np.flatnonzero(groups >= 0)
    counts = (offsets[1:] - offsets[:-1])[groups[mates]]
    for some in np.split(mates, np.flatnonzero(np.diff((np.cumsum(counts) - 1) // PAIRS_AT_ONCE)) + 1):
        own = groups[some]
        ours, theirs = np.empty((2, pairing.count_pairs(own, offsets)), np.int64)
        pairing.expand_pairs(own, offsets, order, ours, theirs)
        if len(ours):
            yield some[ours], theirs


def taken(batch: pa.RecordBatch, rows: Longs, first: int = 2) -> list[pa.Array]:
    """The values of these rows: the columns behind key and time."""
    chosen = pa.array(rows)
    return [column.take(chosen) for column in batch.columns[first:]]
