"""What is known of sessions where they stay after their end, or are updated: which have changed, and their ids.

A session gets its id with the epoch that made it. Where sessions merge, the lowest id goes on; the others, if they were ever
sent, are retracted when the session that they went into is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels.hashing import slices_of
from millpond.schema import KEY
from millpond.stores import views
from millpond.stores.growing import grown
from millpond.stores.keys import Keys
from millpond.stores.windows.celltable import Fired
from millpond.stores.windows.session_index import Merged, SessionIndex
from millpond.stores.windows.shape import END, RETRACTED, SESSION_ID, START, WindowShape
from millpond.times import Progress

Longs = NDArray[np.int64]
NONE = -1
"""Instead of an id."""
ABSORBED_BYTES = 250
"""What it takes to know of a session that it absorbed others, about."""
_ARRAYS = ("changed", "ids", "sent", "sent_starts", "sent_ends")


class Absorbed(NamedTuple):
    """A session that went into another, with its start and end when it was last sent."""

    id: int
    start: int
    end: int


class SessionIds:
    """Ids for the sessions of one slice: no other slice gives the same."""

    def __init__(self, slices: int) -> None:
        self.slices = slices
        self.given_out = 0

    def next(self, keys: Keys) -> Longs:
        """For new sessions of these keys, in this order."""
        if not len(keys):
            return np.empty(0, np.int64)
        own = int(slices_of(keys.hashes[:1], self.slices)[0])
        numbers = np.arange(self.given_out, self.given_out + len(keys))
        self.given_out += len(keys)
        return numbers * self.slices + own


class SessionMarks:
    """By node of the index of sessions."""

    def __init__(self, shape: WindowShape, slices: int) -> None:
        self._shape = shape
        self._ids = SessionIds(slices)
        self.changed = np.empty(0, np.bool_)
        """Whether a session is another than when it was last sent."""
        self.ids: Longs = np.empty(0, np.int64)
        self.sent = np.empty(0, np.bool_)
        self.sent_starts: Longs = np.empty(0, np.int64)
        self.sent_ends: Longs = np.empty(0, np.int64)
        self._absorbed: dict[int, list[Absorbed]] = {}
        self._used = 0
        self._fired: Progress = -np.inf

    # Sessions change

    def joined(self, merged: Merged, size: int) -> None:
        """Rows went into sessions, and some of these into others. `size` is the number of nodes, free ones included."""
        if size > self._used:
            for name in _ARRAYS:
                setattr(self, name, grown(getattr(self, name), self._used, size))
            fresh = np.arange(self._used, size)
            self._used = size
            self._clear(fresh)
        if self._shape.has_ids:
            # Most that go were made by the same rows, and nobody knows of them yet.
            known = (self.ids[merged.gone] != NONE) | np.isin(merged.gone, merged.into)
            for into, gone in zip(merged.into[known].tolist(), merged.gone[known].tolist(), strict=True):
                self._absorb(into, gone)
        self._clear(merged.gone)
        self.changed[merged.nodes] = True

    def _clear(self, nodes: Longs) -> None:
        self.changed[nodes] = self.sent[nodes] = False
        self.ids[nodes] = NONE

    def _absorb(self, into: int, gone: int) -> None:
        """The one that was made first goes on."""
        waiting = self._absorbed.pop(gone, [])
        if self.ids[gone] != NONE:
            if self.ids[into] == NONE or self.ids[gone] < self.ids[into]:
                for array in (self.ids, self.sent, self.sent_starts, self.sent_ends):
                    array[into], array[gone] = array[gone], array[into]
            if self.sent[gone] and self.ids[gone] != NONE:
                waiting.append(
                    Absorbed(*(int(a[gone]) for a in (self.ids, self.sent_starts, self.sent_ends)))
                )
        if waiting:
            self._absorbed.setdefault(into, []).extend(waiting)

    def removed(self, nodes: Longs) -> None:
        self._clear(nodes)

    # What fires

    def fire(
        self,
        index: SessionIndex,
        watermark: Progress,
        closes: bool,
        emits: bool,
        results_of: Callable[[Longs], Iterator[tuple[Longs, Fired]]],
        drop: Callable[[Longs], None],
    ) -> Iterator[Fired]:
        """Sends sessions that have changed and are over, or all that have changed; lets go of those that nothing comes for."""
        self._fired = max(self._fired, watermark)
        if not len(index):
            return
        self._name(index)
        nodes = self.due(index, watermark, closes, emits)
        if len(nodes):
            for some, results in results_of(nodes):
                yield results
                yield from self._retractions(index, some, results)
            self.changed[nodes], self.sent[nodes] = False, True
            self.sent_starts[nodes], self.sent_ends[nodes] = index.starts[nodes], index.ends[nodes]
        gone = index.ended(np.inf if closes else watermark - self._shape.lateness)
        if len(gone):
            drop(gone)
            index.remove(gone)
            self.removed(gone)

    def is_open(self, index: SessionIndex, nodes: Longs) -> NDArray[np.bool_]:
        """Which of these sessions are not over."""
        return ~np.isin(nodes, index.ended(self._fired))

    def _name(self, index: SessionIndex) -> None:
        """Ids for sessions that have none. Their order hangs on nothing but the rows: a replay gives the same."""
        if not self._shape.has_ids:
            return
        nodes = index.all()
        fresh = nodes[self.ids[nodes] == NONE]
        fresh = fresh[np.lexsort((index.keys(fresh).hashes, index.starts[fresh]))]
        self.ids[fresh] = self._ids.next(index.keys(fresh))

    def columns(self, nodes: Longs) -> dict[str, pa.Array]:
        """What results tell of sessions beside their aggregates."""
        if not self._shape.has_ids:
            return {}
        return {SESSION_ID: pa.array(self.ids[nodes]), RETRACTED: pa.array(np.zeros(len(nodes), np.bool_))}

    def _retractions(self, index: SessionIndex, nodes: Longs, results: Fired) -> Iterator[Fired]:
        absorbing = [node for node in nodes.tolist() if node in self._absorbed] if self._absorbed else []
        if absorbing:
            lists = [self._absorbed.pop(node) for node in absorbing]
            of_node = np.repeat(np.array(absorbing), list(map(len, lists)))
            yield retracted(index.keys(of_node), [each for one in lists for each in one], results)

    # As checkpoints see it

    def contents(self, index: SessionIndex) -> Iterator[tuple[str, pa.Table]]:
        nodes = index.all()
        where = [pa.array(index.starts[nodes]), index.keys(nodes).to_arrow()]
        arrays = [pa.array(getattr(self, name)[nodes]) for name in _ARRAYS]
        yield "sessions", pa.table([*where, *arrays], names=[START, KEY, *_ARRAYS])
        pairs = [(int(self.ids[node]), each) for node, own in self._absorbed.items() for each in own]
        yield "absorbed", absorbed_table(pairs)
        yield "ids", pa.table({"ids": [self._ids.given_out]})

    def load(self, name: str, rows: pa.Table, index: SessionIndex) -> None:
        """Of the sessions that the same snapshot holds, which are in the index by now."""
        rows = rows.combine_chunks()
        if name == "ids":
            self._ids.given_out = rows.column(0)[0].as_py()
        elif name == "sessions":
            for batch in rows.to_batches():
                nodes = index.nodes_at(Keys.from_arrow(batch.column(1)), views.longs(batch.column(0)))
                for place, array in enumerate(_ARRAYS, 2):
                    getattr(self, array)[nodes] = views.longs(batch.column(place))
        else:
            nodes_by_id = {int(self.ids[node]): node for node in index.all().tolist()}
            for into, each in absorbed_from(rows):
                self._absorbed.setdefault(nodes_by_id[into], []).append(each)

    def fork(self) -> SessionMarks:
        """Of no session yet."""
        other = SessionMarks(self._shape, self._ids.slices)
        other._fired, other._ids.given_out = self._fired, self._ids.given_out
        return other

    def copy_from(self, other: SessionMarks, theirs: Longs, nodes: Longs) -> None:
        """What another knows of some sessions, which are these here."""
        for name in _ARRAYS:
            getattr(self, name)[nodes] = getattr(other, name)[theirs]
        if other._absorbed:
            for node, their in zip(nodes.tolist(), theirs.tolist(), strict=True):
                if their in other._absorbed:
                    self._absorbed[node] = list(other._absorbed[their])

    def withheld(self, index: SessionIndex) -> bool:
        """Whether a session is another than it was sent as."""
        return bool(self.changed[index.all()].any())

    def due(self, index: SessionIndex, watermark: Progress, closes: bool, emits: bool) -> Longs:
        """What `fire` would send of what there is."""
        nodes = index.ended(np.inf if closes or emits else watermark)
        return nodes[self.changed[nodes]]

    @property
    def nbytes(self) -> int:
        absorbed = ABSORBED_BYTES * len(self._absorbed)
        return absorbed + sum(int(getattr(self, name).nbytes) for name in _ARRAYS)

    def validate(self, index: SessionIndex) -> None:
        nodes = index.all()
        ids = self.ids[nodes]
        if self._shape.has_ids:
            assert (ids != NONE).all()
            assert len(set(ids.tolist())) == len(ids)
        assert set(self._absorbed) <= set(nodes[self.changed[nodes]].tolist()), (
            "what merged waits to be retracted"
        )


def retracted(keys: Keys, absorbed: list[Absorbed], results: Fired) -> Fired:
    """Rows that take sessions back; their columns are those of the results."""
    count = len(absorbed)
    columns = {name: pa.nulls(count, array.type) for name, array in results.columns.items()}
    columns[SESSION_ID] = pa.array([each.id for each in absorbed], pa.int64())
    columns[RETRACTED] = pa.array([True] * count, pa.bool_())
    starts, ends = ([getattr(each, name) for each in absorbed] for name in ("start", "end"))
    return Fired(keys, np.array(starts, np.int64), np.array(ends, np.int64), columns)


def absorbed_table(pairs: list[tuple[int, Absorbed]]) -> pa.Table:
    """Sessions with the id of the one that each went into."""
    longs = np.array([(into, *each) for into, each in pairs], np.int64).reshape(-1, 4)
    return pa.table(list(longs.T.copy()), names=["into", SESSION_ID, START, END])


def absorbed_from(rows: pa.Table) -> Iterator[tuple[int, Absorbed]]:
    for row in zip(*(column.to_pylist() for column in rows.columns), strict=True):
        yield row[0], Absorbed(*row[1:])
