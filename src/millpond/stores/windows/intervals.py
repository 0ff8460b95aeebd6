"""An interval join: rows of one key whose times are so far apart are a pair, in the epoch that brings the second of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels import pairs as pairing
from millpond.schema import KeyKind
from millpond.stores import views
from millpond.stores.growing import grown
from millpond.stores.keys import Keys, decode_keys
from millpond.stores.outputs import Outputs
from millpond.stores.windows.celltable import new_index
from millpond.stores.windows.firing import FiringStore, Portions
from millpond.stores.windows.join_shape import JoinShape
from millpond.stores.windows.pair_windows import PAIRS_AT_ONCE, taken
from millpond.stores.windows.rowlog import RowLog, in_portions, with_keys
from millpond.stores.windows.shape import time_type
from millpond.stores.windows.store import NewRows
from millpond.times import TIME_MAX, TIME_MIN, Progress
from millpond.wire.joins import SIDES, Side

Longs = NDArray[np.int64]
DEAD_MIN = 1024
"""Stretches that are over are tidied up once there are so many, and more than others."""
_OTHER: dict[Side, Side] = {"left": "right", "right": "left"}
NO_GROUP = -1


class Matches(NamedTuple):
    """Pairs: rows that came, and rows of `batch` that were there, which has a time and values, but no key."""

    ours: Longs
    theirs: Longs
    batch: pa.RecordBatch


class TimedRows:
    """Rows of one side by key and *stretch* of time, as long as an interval: what falls into one is in two of them at most.

    A key's stretch is a *node*, which has a group in the log of rows while it has rows there.
    """

    def __init__(self, kind: KeyKind, length: int, rows: RowLog) -> None:
        self._kind = kind
        self._length = length
        self.rows = rows
        self._free: Longs = np.empty(0, np.int64)
        self._groups_made = 0
        self._reset()

    def _reset(self) -> None:
        self._keys = new_index(self._kind)
        self._stretches = new_index("i64")
        self._nodes = new_index("i64")
        self._entries: Longs = np.empty(0, np.int64)
        self._stretch: Longs = np.empty(0, np.int64)
        self._last: Longs = np.empty(0, np.int64)
        self._groups: Longs = np.empty(0, np.int64)
        self._live = 0
        self._first_last = TIME_MAX

    def __len__(self) -> int:
        """Nodes that have rows."""
        return self._live

    def insert(self, keys: Keys, batch: pa.RecordBatch) -> None:
        """Rows with a time, then values."""
        stretches = np.floor_divide(views.longs(batch.column(0)), self._length)
        nodes = self._nodes_of(keys, stretches)
        touched = _distinct(nodes, len(self._nodes))
        fresh = touched[self._groups[touched] == NO_GROUP]
        self._groups[fresh] = self._new_groups(len(fresh))
        self._live += len(fresh)
        if len(fresh):
            self._first_last = min(self._first_last, int(self._last[fresh].min()))
        self.rows.append(self._groups[nodes], batch)
        self.rows.expect(self._groups[touched], self._last[touched])

    def _nodes_of(self, keys: Keys, stretches: Longs) -> Longs:
        """The node of each, made where there is none."""
        entries = self._keys.assign(keys)
        numbers = self._stretches.assign(Keys.from_longs(stretches))
        known = len(self._nodes)
        nodes = self._nodes.assign(Keys.from_longs(entries << 32 | numbers))
        count = len(self._nodes)
        if count > known:
            for name in ("_entries", "_stretch", "_last", "_groups"):
                setattr(self, name, grown(getattr(self, name), known, count))
            new = nodes >= known
            self._entries[nodes[new]], self._stretch[nodes[new]] = entries[new], stretches[new]
            self._last[known:count] = _last_of(self._stretch[known:count], self._length)
            self._groups[known:count] = NO_GROUP
        return nodes

    def _new_groups(self, count: int) -> Longs:
        again, self._free = self._free[:count], self._free[count:]
        made = self._groups_made
        self._groups_made += count - len(again)
        return np.concatenate([again, np.arange(made, self._groups_made)])

    def near(self, keys: Keys, low: Longs, high: Longs) -> Iterator[Matches]:
        """Rows of these keys, each with times from low to high: no more than an interval's length. None where low is above.

        So many at a time that the rows, and the pairs, may be in memory at once.
        """
        count = len(keys)
        nodes = np.empty((count, 2), np.int64)
        entries = self._keys.find(keys)
        for column, times in enumerate((low, high)):
            nodes[:, column] = self._find(entries, np.floor_divide(times, self._length))
        nodes[nodes[:, 0] == nodes[:, 1], 1] = -1
        nodes[low > high] = -1
        wanted = _distinct(nodes[nodes >= 0], len(self._nodes))
        at = np.searchsorted(wanted, nodes)
        at[nodes < 0] = -1
        first = 0
        for groups in in_portions(self.rows, self._groups[wanted]):
            batch, offsets = self.rows.peek(groups)
            times = views.longs(batch.column(0))
            # Of the rows' nodes, those whose rows are there.
            places = at - first
            places[(places < 0) | (places >= len(groups)) | (at < 0)] = -1
            first += len(groups)
            mates = np.flatnonzero((places >= 0).any(axis=1))
            sizes = np.append(np.diff(offsets), 0)[places[mates]].sum(axis=1)
            for some in np.split(mates, np.flatnonzero(np.diff((np.cumsum(sizes) - 1) // PAIRS_AT_ONCE)) + 1):
                where = places[some], low[some], high[some], offsets, times
                ours, theirs = np.empty((2, 0), np.int64)
                ours, theirs = np.empty((2, pairing.near_pairs(*where, ours, theirs)), np.int64)
                if len(ours):
                    pairing.near_pairs(*where, ours, theirs)
                    yield Matches(some[ours], theirs, batch)

    def _find(self, entries: Longs, stretches: Longs) -> Longs:
        """The node of each, -1 where there is none, or none that has rows."""
        numbers = self._stretches.find(Keys.from_longs(stretches))
        known = np.flatnonzero((entries >= 0) & (numbers >= 0))
        nodes = np.full(len(entries), -1)
        some = self._nodes.find(Keys.from_longs(entries[known] << 32 | numbers[known]))
        some[(some >= 0) & (self._groups[some] == NO_GROUP)] = -1
        nodes[known] = some
        return nodes

    def drop_before(self, limit: Progress) -> None:
        """Lets go of stretches that are over before that time."""
        if limit <= self._first_last or not self._live:
            return
        used = len(self._nodes)
        live = self._groups[:used] != NO_GROUP
        over = live if limit > TIME_MAX else live & (self._last[:used] < limit)
        gone = np.flatnonzero(over)
        if len(gone):
            self.rows.drop(self._groups[gone])
            self._free = np.concatenate([self._free, self._groups[gone]])
            self._groups[gone] = NO_GROUP
            self._live -= len(gone)
        left = self._last[:used][live & ~over]
        self._first_last = int(left.min()) if len(left) else TIME_MAX
        dead = used - self._live
        if dead > DEAD_MIN and dead > self._live:
            self._tidy()

    def _tidy(self) -> None:
        """Indexes of those nodes alone that have rows; groups stay."""
        nodes = self._all()
        keys, stretches, groups = self._keys_of(nodes), self._stretch[nodes], self._groups[nodes]
        self._reset()
        made = self._nodes_of(keys, stretches)
        self._groups[made] = groups
        self._live = len(made)
        self._first_last = int(self._last[made].min()) if len(made) else TIME_MAX

    def _all(self) -> Longs:
        return np.flatnonzero(self._groups[: len(self._nodes)] != NO_GROUP)

    def _keys_of(self, nodes: Longs) -> Keys:
        return self._keys.stored_keys().take(self._entries[nodes])

    @property
    def oldest(self) -> int:
        """When the first stretch with rows begins; TIME_MAX if there is none."""
        if not self._live:
            return TIME_MAX
        # Near the end of time a stretch is shorter.
        return max(self._first_last, TIME_MIN + self._length) - self._length

    @property
    def newest(self) -> int:
        """When the last stretch with rows ends; TIME_MIN if there is none."""
        nodes = self._all()
        return int(self._last[nodes].max()) if len(nodes) else TIME_MIN

    def contents(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """All rows as they are now, with their keys before them, to be read piece by piece."""
        nodes = self._all()
        return with_keys(self._keys_of(nodes), self.rows.frozen(self._groups[nodes]), schema)

    @property
    def index_bytes(self) -> int:
        """What it takes to know where which rows are."""
        used = len(self._nodes)
        arrays = (self._entries, self._stretch, self._last, self._groups)
        indexes = self._keys.nbytes + self._stretches.nbytes + self._nodes.nbytes
        return indexes + sum(int(array[:used].nbytes) for array in arrays) + int(self._free.nbytes)

    def validate(self) -> None:
        nodes = self._all()
        assert len(nodes) == self._live
        groups = self._groups[nodes].tolist()
        assert self.rows.groups().tolist() == sorted(groups)
        assert sorted([*groups, *self._free.tolist()]) == list(range(self._groups_made)), (
            "a group is a node's, or free"
        )
        assert not len(nodes) or self._first_last <= self._last[nodes].min()


class IntervalPairs(FiringStore):
    """One slice of an interval join."""

    def __init__(self, shape: JoinShape, new_rows: NewRows, outputs: Outputs | None = None) -> None:
        super().__init__(outputs)
        assert shape.between is not None
        self.shape = shape
        self._low, self._high = shape.between.low, shape.between.high
        length = min(shape.between.span + 1, TIME_MAX)
        self._sides: dict[Side, TimedRows] = {
            side: TimedRows(shape.key_kind, length, new_rows(shape.staged[side].remove(0), "aur"))
            for side in SIDES
        }

    def results(self, time_kind: str) -> pa.Schema:
        return self.shape.results(time_kind)

    def take_in(self, portions: Portions, time_kind: str) -> Iterator[pa.Table]:
        for keys, batch in portions:
            side = self.shape.side_of(batch.schema.names)
            yield from self._pairs(side, keys, batch, time_kind)
            self._insert(side, keys, batch)

    def _pairs(self, side: Side, keys: Keys, batch: pa.RecordBatch, time_kind: str) -> Iterator[pa.Table]:
        """What has come, with what was there of the other side."""
        times = views.longs(batch.column(1))
        low, high = (self._low, self._high) if side == "left" else (-self._high, -self._low)
        for matches in self._sides[_OTHER[side]].near(keys, *_ranges(times, low, high)):
            own = decode_keys(keys.take(matches.ours).to_arrow(), self.shape.keys)
            columns = {
                side: taken(batch, matches.ours, first=1),
                _OTHER[side]: taken(matches.batch, matches.theirs, first=0),
            }
            edges = [columns[each][0].cast(time_type(time_kind)) for each in SIDES]
            values = [column for each in SIDES for column in columns[each][1:]]
            yield pa.Table.from_arrays([*own, *edges, *values], schema=self.results(time_kind))

    def _insert(self, side: Side, keys: Keys, batch: pa.RecordBatch) -> None:
        schema = self.shape.staged[side].remove(0)
        self._sides[side].insert(keys, pa.RecordBatch.from_arrays(batch.columns[1:], schema=schema))

    def restore(self, batch: pa.RecordBatch) -> None:
        side = self.shape.side_of(batch.schema.names)
        batch = batch.cast(self.shape.staged[side])
        self._insert(side, Keys.from_arrow(batch.column(0)), batch)

    def fire(self, watermark: Progress, time_kind: str) -> Iterator[pa.Table]:
        """Rows that come from now on are at the watermark or after it: what is too far before that goes."""
        if watermark > -math.inf:
            self._sides["left"].drop_before(watermark - self._high)
            self._sides["right"].drop_before(watermark + self._low)
        yield from ()

    def contents(self) -> Iterator[pa.RecordBatch]:
        return chain.from_iterable(
            [rows.contents(self.shape.staged[side]) for side, rows in self._sides.items()]
        )

    @property
    def count(self) -> int:
        return sum(map(len, self._sides.values()))

    @property
    def newest(self) -> int | None:
        return None

    @property
    def oldest(self) -> int:
        return min(side.oldest for side in self._sides.values())

    @property
    def reach(self) -> int:
        return max(side.newest for side in self._sides.values())

    @property
    def nbytes(self) -> int:
        return self.beside_bytes + sum(log.memory_bytes for log in self.logs)

    @property
    def beside_bytes(self) -> int:
        return sum(side.index_bytes for side in self._sides.values())

    @property
    def logs(self) -> Sequence[RowLog]:
        return [side.rows for side in self._sides.values()]

    def validate(self) -> None:
        super().validate()
        for side in self._sides.values():
            side.validate()


def _distinct(numbers: Longs, count: int) -> Longs:
    """Each number once, in ascending order, of so many that there are."""
    if len(numbers) < count // 16:
        return np.unique(numbers)
    # To mark them is faster than to sort or to hash them, where few are missing.
    seen = np.zeros(count, np.bool_)
    seen[numbers] = True
    return np.flatnonzero(seen)


def _ranges(times: Longs, low: int, high: int) -> tuple[Longs, Longs]:
    """From time + low to time + high, as far as there is time; the wrong way round where all of that is beyond it."""
    lows, highs = _shifted(times, low), _shifted(times, high)
    beyond = np.zeros(len(times), np.bool_)
    if low > 0:
        beyond = times > TIME_MAX - low
    elif high < 0:
        beyond = times < TIME_MIN - high
    lows[beyond], highs[beyond] = 1, 0
    return lows, highs


def _shifted(times: Longs, by: int) -> Longs:
    if by > 0:
        return np.where(times > TIME_MAX - by, TIME_MAX, times + by)
    return np.where(times < TIME_MIN - by, TIME_MIN, times + by)


def _last_of(stretches: Longs, length: int) -> Longs:
    """The last time of each stretch."""
    starts = np.where(stretches < -(TIME_MAX // length), TIME_MIN, stretches * length)
    return _shifted(starts, length - 1)
