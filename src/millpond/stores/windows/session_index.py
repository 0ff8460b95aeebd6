"""The index of keys and sessions, which stays in memory: spans that overlap are one.

A session is a *node*; the sessions of a key are a list of nodes, those that begin last first.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millpond.kernels import windows as kernel
from millpond.schema import KeyKind
from millpond.stores.growing import grown
from millpond.stores.keys import Keys
from millpond.stores.windows.celltable import new_index
from millpond.times import TIME_MAX, Progress

Longs = NDArray[np.int64]
ENTRIES_MIN = 1024
"""Keys without sessions are let go of once there are so many, and more than keys with some."""


class Merged(NamedTuple):
    """What spans did to sessions: the node of each, and which nodes became parts of others, in this order.

    `roots` is where in the end what is gone went.
    """

    nodes: Longs
    into: Longs
    gone: Longs
    roots: Longs


class SessionIndex:
    """Which sessions each key has."""

    def __init__(self, kind: KeyKind, touching: bool = False) -> None:
        self._kind = kind
        self._touching = touching
        self._index = new_index(self._kind)
        self._heads: Longs = np.empty(0, np.int64)
        # While spans come: of each key the node that the last of them went to.
        self._last: Longs = np.empty(0, np.int64)
        self.starts: Longs = np.empty(0, np.int64)
        self.ends: Longs = np.empty(0, np.int64)
        self._next: Longs = np.empty(0, np.int64)
        self.entries: Longs = np.empty(0, np.int64)
        self._free: Longs = np.empty(0, np.int64)
        self._forward: Longs = np.empty(0, np.int64)
        # Nodes in use or free, free ones, pairs of merged ones.
        self._control: Longs = np.zeros(3, np.int64)
        # Nothing starts or ends before; that nothing does so then is looked up when it is asked for.
        self._first_start = self._first_end = TIME_MAX
        self._is_exact = True

    def __len__(self) -> int:
        return int(self._control[0] - self._control[1])

    @property
    def size(self) -> int:
        """Nodes, free ones included."""
        return int(self._control[0])

    def join(self, keys: Keys, starts: Longs, ends: Longs) -> Merged:
        """Puts spans into the sessions of their keys."""
        self._note(starts, ends)
        entries = self._entries_of(keys)
        nodes = np.empty(len(entries), np.int64)
        into, gone = np.empty((2, max(len(self), 0) + len(entries)), np.int64)
        self._control[2] = 0
        order = _last_first(starts)
        done = 0
        while True:
            done = kernel.join_sessions(
                entries, starts, ends, self._touching, done,
                self._heads, self.starts, self.ends, self._next, self.entries,
                self._free, self._control, nodes, into, gone, self._forward,
                order, self._last,
            )  # fmt: skip
            if done == len(entries):
                break
            self._make_room(len(entries) - done)
        self._last[entries] = -1
        pairs = int(self._control[2])
        kernel.resolve(nodes, self._forward)
        into, gone = into[:pairs].copy(), gone[:pairs].copy()
        roots = into.copy()
        if pairs:
            kernel.resolve(roots, self._forward)
            self._free[self._control[1] : self._control[1] + pairs] = gone
            self._control[1] += pairs
            self._forward[gone] = -1
        return Merged(nodes, into, gone, roots)

    def _note(self, starts: Longs, ends: Longs) -> None:
        """Of sessions that come, or become longer."""
        if len(starts):
            self._first_start = min(self._first_start, int(starts.min()))
            self._first_end = min(self._first_end, int(ends.min()))

    def _look_up_first(self) -> None:
        if not self._is_exact:
            arrays = self.entries, self.starts, self.ends
            self._first_start, self._first_end = map(int, kernel.first_times(*arrays, self.size))
            self._is_exact = True

    @property
    def oldest(self) -> int:
        """When the first session begins."""
        self._look_up_first()
        return self._first_start

    def _entries_of(self, keys: Keys) -> Longs:
        """The entry of each key, made where there is none."""
        entries = self._index.assign(keys)
        known, count = len(self._heads), len(self._index)
        if count > known:
            self._heads, self._last = grown(self._heads, known, count), grown(self._last, known, count)
            self._heads[known:] = self._last[known:] = -1
        return entries

    def _make_room(self, more: int) -> None:
        used = self.size
        needed = used + min(more, max(used, 16))
        for name in ("starts", "ends", "_next", "entries", "_free", "_forward"):
            setattr(self, name, grown(getattr(self, name), used, needed))

    def ended(self, watermark: Progress) -> Longs:
        """Sessions that are over by then, those that ended first before the others."""
        if watermark < self._first_end:
            return np.empty(0, np.int64)
        self._look_up_first()
        if watermark < self._first_end:
            return np.empty(0, np.int64)
        # What has no end of its own ends with its sources alone.
        upto = TIME_MAX if watermark == np.inf else min(int(watermark), TIME_MAX - 1)
        nodes = np.empty(len(self), np.int64)
        nodes = nodes[: kernel.ended_sessions(self.entries, self.ends, self.size, upto, nodes)]
        # Sessions have become longer since: there is none that ends so early.
        self._is_exact &= len(nodes) > 0
        return nodes[np.lexsort((nodes, self.ends[nodes]))]

    def all(self) -> Longs:
        return np.flatnonzero(self.entries[: self.size] >= 0)

    def of(self, keys: Keys) -> Longs:
        """The sessions of these keys."""
        entries = self._index.find(keys)
        entries = np.unique(entries[entries >= 0])
        nodes = np.empty(kernel.sessions_of(entries, self._heads, self._next, entries[:0]), np.int64)
        kernel.sessions_of(entries, self._heads, self._next, nodes)
        return nodes

    def nodes_at(self, keys: Keys, starts: Longs) -> Longs:
        """The sessions of keys that begin there; they must be all that there are."""
        entries, nodes = self._index.find(keys), self.all()
        wanted = np.lexsort((starts, entries))
        there = np.lexsort((self.starts[nodes], self.entries[nodes]))
        if len(wanted) != len(there):
            raise ValueError("a snapshot tells of sessions that it does not hold")
        out = np.empty(len(wanted), np.int64)
        out[wanted] = nodes[there]
        return out

    def keys(self, nodes: Longs) -> Keys:
        return self._index.stored_keys().take(self.entries[nodes])

    def remove(self, nodes: Longs) -> None:
        if len(nodes):
            first = (
                int(self.starts[nodes].min()) > self._first_start,
                int(self.ends[nodes].min()) > self._first_end,
            )
            self._is_exact &= all(first)
        kernel.unlink(nodes, self._heads, self._next, self.entries, self._free, self._control)
        if len(self._index) > ENTRIES_MIN and len(self._index) > 2 * len(self):
            self._let_go_of_keys()

    def _let_go_of_keys(self) -> None:
        """An index of those keys alone that have sessions."""
        nodes = self.all()
        old = self.entries[nodes]
        used = np.unique(old)
        index = new_index(self._kind)
        index.reserve(len(used), self._index.stored_keys().take(used).nbytes)
        entries = index.assign(self._index.stored_keys().take(used))
        renumbered = np.full(len(self._index), -1)
        renumbered[used] = entries
        heads = np.full(len(used), -1)
        heads[entries] = self._heads[used]
        self.entries[nodes] = renumbered[old]
        self._index, self._heads, self._last = index, heads, np.full(len(used), -1)

    def part(self, nodes: Longs) -> SessionIndex:
        """Another index with these sessions alone, which are numbered from 0 on there."""
        other = SessionIndex(self._kind, self._touching)
        count, starts, ends = len(nodes), self.starts[nodes], self.ends[nodes]
        if not count:
            return other
        other._note(starts, ends)
        entries = other._entries_of(self.keys(nodes))
        for name in ("starts", "ends", "_next", "entries", "_free", "_forward"):
            setattr(other, name, grown(getattr(other, name), 0, count))
        other.starts[:count], other.ends[:count], other.entries[:count] = starts, ends, entries
        other._next[:count] = other._forward[:count] = -1
        other._control[0] = count
        order = np.lexsort((starts, entries))[::-1]
        goes_on = np.concatenate(([False], entries[order[1:]] == entries[order[:-1]]))
        other._next[order[:-1][goes_on[1:]]] = order[goes_on]
        firsts = order[~goes_on]
        other._heads[entries[firsts]] = firsts
        return other

    @property
    def nbytes(self) -> int:
        arrays = (
            self._heads,
            self._last,
            self.starts,
            self.ends,
            self._next,
            self.entries,
            self._free,
            self._forward,
        )
        return self._index.nbytes + sum(int(array.nbytes) for array in arrays)

    @property
    def used_bytes(self) -> int:
        """Without the room for more."""
        return self._index.nbytes + 2 * int(self._heads[: len(self._index)].nbytes) + 6 * 8 * self.size

    def validate(self) -> None:
        self._index.validate()
        seen = []
        for entry, head in enumerate(self._heads[: len(self._index)].tolist()):
            spans = []
            node = head
            while node >= 0:
                assert self.entries[node] == entry
                spans.append((int(self.starts[node]), int(self.ends[node])))
                seen.append(node)
                node = int(self._next[node])
            starts = [start for start, _ in spans]
            assert starts == sorted(starts, reverse=True), "those that begin last come first"
            spans.sort()
            for (_, end), (start, _) in pairwise(spans):
                assert start > end if self._touching else start >= end, "sessions of a key are apart"
        assert sorted(seen) == self.all().tolist()
        assert self._first_start <= int(self.starts[seen].min(initial=TIME_MAX))
        assert self._first_end <= int(self.ends[seen].min(initial=TIME_MAX))


def _last_first(starts: Longs) -> Longs:
    """The order in which those that begin last come first."""
    if (starts[1:] < starts[:-1]).any():
        return np.argsort(starts, kind="stable")[::-1].copy()
    return np.arange(len(starts))[::-1].copy()
