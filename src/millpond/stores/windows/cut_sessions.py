"""Sessions that are cut, where they stay after their end or are updated.

Where a session is cut hangs on all of its rows, and a row that comes may have it cut anew. So each row knows with which
others it was last sent, and the first row of each part which session that is. Sessions whose rows changed are looked at as a
whole in the same epoch, the others once one of their parts is over.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.schema import KEY, TIME
from millpond.stores import views
from millpond.stores.growing import grown
from millpond.stores.keys import Keys
from millpond.stores.windows.celltable import Fired
from millpond.stores.windows.cutting import Parts, cut_sessions
from millpond.stores.windows.overlay import Overlay, OverlayRows
from millpond.stores.windows.rowlog import RowLog, in_portions, with_keys
from millpond.stores.windows.session_index import Merged, SessionIndex
from millpond.stores.windows.session_marks import (
    ABSORBED_BYTES,
    NONE,
    Absorbed,
    SessionIds,
    absorbed_from,
    absorbed_table,
    retracted,
)
from millpond.stores.windows.shape import END, RETRACTED, SESSION_ID, START, WindowShape
from millpond.stores.windows.whole import Rows, WholeWindows
from millpond.times import TIME_MAX, Progress

Longs = NDArray[np.int64]
Flags = NDArray[np.bool_]
MARKS = pa.schema({"_sending": pa.int64(), "_together": pa.int64(), "_session": pa.int64()})
"""Of a row: the number of the result that it was last in, of how many rows that was, and whose first row it is."""


class _Cut(NamedTuple):
    """Rows of some sessions, in the order in which they came, their parts, and the rows' marks."""

    keys: Keys
    batch: pa.RecordBatch
    parts: Parts
    sendings: Longs
    together: Longs
    sessions: Longs

    @property
    def firsts(self) -> Longs:
        """The first row of each part."""
        return self.parts.rows[self.parts.fired[:-1]]

    @property
    def sizes(self) -> Longs:
        return np.diff(self.parts.fired)

    @property
    def part_of(self) -> Longs:
        """The part of each row, in the order of `parts.rows`."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def changed(self) -> Flags:
        """Which parts were not sent like that."""
        begins, rows = self.parts.fired[:-1], self.parts.rows
        lowest = np.minimum.reduceat(self.sendings[rows], begins)
        highest = np.maximum.reduceat(self.sendings[rows], begins)
        is_new: Flags = (lowest != highest) | (lowest == NONE) | (self.together[self.firsts] != self.sizes)
        return is_new


class CutSessions:
    """AUR: the rows of sessions with their marks, in a log of rows under the number of the session's node."""

    def __init__(self, shape: WindowShape, rows: RowLog, slices: int) -> None:
        self._shape = shape
        self._slices = slices
        self._whole = WholeWindows(shape.values, shape.aggregates)
        self._index = SessionIndex(shape.key_kind, shape.window.touching)
        self._schema = row_schema(shape)
        self.rows = rows
        self._ids = SessionIds(slices)
        self._sendings = 0
        self._sent_as: MutableMapping[int, tuple[int, int]] = {}
        self._absorbed: MutableMapping[int, list[Absorbed]] = {}
        self._fired: Progress = -np.inf
        # By node: whether rows came for it, whether a part of it is to be sent, and when to look at it next.
        self._touched: Flags = np.empty(0, np.bool_)
        self._waiting: Flags = np.empty(0, np.bool_)
        self._triggers: Longs = np.empty(0, np.int64)

    # Rows in

    def insert(self, portions: list[tuple[Keys, pa.RecordBatch]]) -> None:
        for keys, batch in portions:
            marks = [pa.array(np.full(batch.num_rows, NONE))] * len(MARKS)
            merged = self._append(keys, [*batch.columns[1:], *marks])
            self._touched[merged.nodes] = True

    def load(self, batch: pa.RecordBatch) -> None:
        """Rows of `contents`, with their marks. All are looked at in the next epoch, which changes nothing by itself."""
        merged = self._append(Keys.from_arrow(batch.column(0)), batch.columns[1:])
        self._touched[merged.nodes] = True

    def _append(self, keys: Keys, columns: list[pa.Array]) -> Merged:
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        merged = self._index.join(keys, views.longs(batch.column(TIME)), views.longs(batch.column(END)))
        known = len(self._touched)
        if self._index.size > known:
            for name in ("_touched", "_waiting", "_triggers"):
                setattr(self, name, grown(getattr(self, name), known, self._index.size))
            self._clear(np.arange(known, len(self._touched)))
        if len(merged.gone):
            self.rows.merge(merged.into, merged.gone)
            self._clear(merged.gone)
        self.rows.append(merged.nodes, batch)
        return merged

    def _clear(self, nodes: Longs) -> None:
        self._touched[nodes] = self._waiting[nodes] = False
        self._triggers[nodes] = TIME_MAX

    # What fires

    def fire(self, watermark: Progress, closes: bool, emits: bool = False) -> Iterator[Fired]:
        self._fired = max(self._fired, watermark)
        nodes = self._due(watermark, closes, emits)
        # By key: what is looked at together does not tell in which order sessions get their ids.
        hashes = self._index.keys(nodes).hashes
        order = np.argsort(hashes, kind="stable")
        for some in in_portions(self.rows, nodes[order], hashes[order]):
            yield from self._fire(some, watermark, closes, emits)

    def _due(self, watermark: Progress, closes: bool, emits: bool) -> Longs:
        """The sessions to be looked at."""
        nodes = self._index.all()
        if closes:
            return nodes
        is_due = (self._triggers[nodes] <= watermark) & (self._triggers[nodes] < TIME_MAX)
        return nodes[self._touched[nodes] | is_due | (self._waiting[nodes] & emits)]

    def _fire(self, nodes: Longs, watermark: Progress, closes: bool, emits: bool) -> Iterator[Fired]:
        keys, (batch, offsets) = self._index.keys(nodes), self.rows.take(nodes)
        self._index.remove(nodes)
        self._clear(nodes)
        cut = self._cut(keys, batch, offsets)
        ids = self._name(cut)
        parts, changed = cut.parts, cut.changed()
        sends = changed & (np.full(len(ids), closes or emits) | self._is_over(parts.ends, watermark))
        goes = np.full(len(ids), closes) | self._is_over(parts.ends, watermark - self._shape.lateness)
        chosen = np.flatnonzero(sends)
        if len(chosen):
            results = self._results(cut, chosen, ids)
            yield results
            yield from self._send(cut, chosen, ids, results)
        for session in ids[goes].tolist() if self._shape.has_ids else ():
            self._sent_as.pop(session, None)
            self._absorbed.pop(session, None)
        self._put_back(cut, np.flatnonzero(~goes), changed & ~sends)

    def _cut(self, keys: Keys, batch: pa.RecordBatch, offsets: Longs) -> _Cut:
        window = self._shape.window
        parts = cut_sessions(batch, offsets, window.longest, window.touching, np.inf)
        # `left` is of parts that are not over: of all time there is none.
        marks = [views.longs(batch.column(name)).copy() for name in MARKS.names]
        return _Cut(keys.take(parts.groups), batch, parts, *marks)

    @staticmethod
    def _is_over(ends: Longs, watermark: Progress) -> Flags:
        if watermark == np.inf:
            return np.ones(len(ends), np.bool_)
        return (ends <= watermark) & (ends < TIME_MAX)

    def _name(self, cut: _Cut) -> Longs:
        """The session of each part: the one made first of those whose first row it has, or a new one."""
        ids = np.full(len(cut.sizes), NONE)
        if not self._shape.has_ids:
            return ids
        sessions = cut.sessions[cut.parts.rows]
        begins = cut.parts.fired[:-1]
        of_known = np.where(sessions == NONE, TIME_MAX, sessions)
        ids = np.minimum.reduceat(of_known, begins)
        for part in np.flatnonzero(np.add.reduceat((sessions != NONE).astype(np.int64), begins) > 1).tolist():
            known = sessions[cut.parts.fired[part] : cut.parts.fired[part + 1]]
            self._absorb(int(ids[part]), sorted(set(known[known != NONE].tolist()) - {int(ids[part])}))
        fresh = np.flatnonzero(ids == TIME_MAX)
        fresh = fresh[np.lexsort((cut.parts.starts[fresh], cut.keys.take(fresh).hashes))]
        ids[fresh] = self._ids.next(cut.keys.take(fresh))
        cut.sessions[:] = NONE
        cut.sessions[cut.firsts] = ids
        return ids

    def _absorb(self, into: int, others: list[int]) -> None:
        for other in others:
            waiting = list(self._absorbed.pop(other, ()))
            if other in self._sent_as:
                waiting.append(Absorbed(other, *self._sent_as.pop(other)))
            if waiting:
                # A new list: that of a fork is not its own.
                self._absorbed[into] = [*self._absorbed.get(into, ()), *waiting]

    def _results(self, cut: _Cut, chosen: Longs, ids: Longs) -> Fired:
        """Of these parts; their rows are in time order."""
        picked = np.zeros(len(cut.sizes), np.bool_)
        picked[chosen] = True
        rows = cut.batch.take(pa.array(cut.parts.rows[picked[cut.part_of]]))
        offsets = np.concatenate(([0], np.cumsum(cut.sizes[chosen], dtype=np.int64)))
        values = [rows.column(name) for name in self._shape.values.names]
        columns = self._whole.results(Rows(views.longs(rows.column(TIME)), values, offsets))
        if self._shape.has_ids:
            columns |= {
                SESSION_ID: pa.array(ids[chosen]),
                RETRACTED: pa.array(np.zeros(len(chosen), np.bool_)),
            }
        return Fired(cut.keys.take(chosen), cut.parts.starts[chosen], cut.parts.ends[chosen], columns)

    def _send(self, cut: _Cut, chosen: Longs, ids: Longs, results: Fired) -> Iterator[Fired]:
        """Notes what has been sent, and takes back what merged into it."""
        number = np.full(len(cut.sizes), NONE)
        number[chosen] = np.arange(self._sendings, self._sendings + len(chosen))
        self._sendings += len(chosen)
        is_sent = number[cut.part_of] != NONE
        rows, part = cut.parts.rows[is_sent], cut.part_of[is_sent]
        cut.sendings[rows], cut.together[rows] = number[part], cut.sizes[part]
        if not self._shape.has_ids:
            return
        edges = zip(results.starts.tolist(), results.ends.tolist(), strict=True)
        self._sent_as.update(zip(ids[chosen].tolist(), edges, strict=True))
        absorbing = [part for part in chosen.tolist() if int(ids[part]) in self._absorbed]
        if absorbing:
            lists = [self._absorbed.pop(int(ids[part])) for part in absorbing]
            of_part = np.repeat(np.array(absorbing), list(map(len, lists)))
            yield retracted(cut.keys.take(of_part), [each for one in lists for each in one], results)

    def _put_back(self, cut: _Cut, staying: Longs, waits: Flags) -> None:
        """Parts that stay, and when to look at them next: at their end if they wait for it, or when they go."""
        if not len(staying):
            return
        stays = np.zeros(len(cut.sizes), np.bool_)
        stays[staying] = True
        part_of_row = np.empty(len(cut.parts.rows), np.int64)
        part_of_row[cut.parts.rows] = cut.part_of
        # In the order in which they came.
        chosen = np.flatnonzero(stays[part_of_row])
        own = part_of_row[chosen]
        marks = [pa.array(array[chosen]) for array in (cut.sendings, cut.together, cut.sessions)]
        columns = cut.batch.take(pa.array(chosen)).columns[: -len(MARKS)]
        nodes = self._append(cut.keys.take(own), [*columns, *marks]).nodes
        ends, lateness = cut.parts.ends, self._shape.lateness
        later = np.where(ends > TIME_MAX - lateness, TIME_MAX, ends + lateness)
        np.minimum.at(self._triggers, nodes, np.where(waits, ends, later)[own])
        self._waiting[nodes[waits[own]]] = True
        touched = np.unique(nodes)
        self.rows.expect(touched, self._triggers[touched])

    def open(self, keys: Keys | None = None) -> Iterator[Fired]:
        nodes = self._index.all() if keys is None else self._index.of(keys)
        for some in in_portions(self.rows, nodes):
            batch, offsets = self.rows.peek(some)
            cut = self._cut(self._index.keys(some), batch, offsets)
            chosen = np.flatnonzero(~self._is_over(cut.parts.ends, self._fired))
            if len(chosen):
                yield self._results(cut, chosen, cut.sessions[cut.firsts])

    # As checkpoints see it

    def contents(self) -> Iterator[pa.RecordBatch]:
        nodes = self._index.all()
        schema = pa.schema([pa.field(KEY, self._shape.key_type), *self._schema])
        return with_keys(self._index.keys(nodes), self.rows.frozen(nodes), schema)

    def marked(self) -> Iterator[tuple[str, pa.Table]]:
        longs = np.array([(id_, *edges) for id_, edges in self._sent_as.items()], np.int64).reshape(-1, 3)
        yield "sent", pa.table(list(longs.T.copy()), names=[SESSION_ID, START, END])
        yield (
            "absorbed",
            absorbed_table([(into, each) for into, own in self._absorbed.items() for each in own]),
        )
        yield "ids", pa.table({"ids": [self._ids.given_out], "sendings": [self._sendings]})

    def load_marks(self, name: str, rows: pa.Table) -> None:
        if name == "ids":
            self._ids.given_out, self._sendings = (column[0].as_py() for column in rows.columns)
        elif name == "sent":
            for id_, start, end in zip(*(column.to_pylist() for column in rows.columns), strict=True):
                self._sent_as[id_] = start, end
        else:
            for into, each in absorbed_from(rows):
                self._absorbed.setdefault(into, []).append(each)

    def recode(self, shape: WindowShape) -> None:
        self._shape, self._whole = shape, WholeWindows(shape.values, shape.aggregates)

    def fork(self, keys: Keys, watermark: Progress, closes: bool, emits: bool) -> CutSessions:
        nodes = np.union1d(self._index.of(keys), self._due(watermark, closes, emits))
        other = CutSessions(self._shape, OverlayRows(self.rows, self._schema, nodes.tolist()), self._slices)
        other._index, other._fired, other._sendings = self._index.part(nodes), self._fired, self._sendings
        other._ids.given_out = self._ids.given_out
        other._sent_as, other._absorbed = Overlay(self._sent_as), Overlay(self._absorbed)
        for name in ("_touched", "_waiting", "_triggers"):
            setattr(other, name, getattr(self, name)[nodes])
        return other

    @property
    def withheld(self) -> bool:
        # What was loaded has not been looked at yet.
        nodes = self._index.all()
        return bool((self._waiting[nodes] | self._touched[nodes]).any())

    @property
    def oldest(self) -> int:
        return self._index.oldest

    @property
    def newest(self) -> int | None:
        nodes = self._index.all()
        return int(self._index.ends[nodes].max()) if len(nodes) else None

    @property
    def count(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        return self._index_bytes + self.rows.memory_bytes

    @property
    def staying_bytes(self) -> int:
        return self._index_bytes + self.rows.staying_bytes

    @property
    def _index_bytes(self) -> int:
        """What it takes to know of each session."""
        arrays = (self._touched, self._waiting, self._triggers)
        told = ABSORBED_BYTES * (len(self._sent_as) + len(self._absorbed))
        return self._index.used_bytes + sum(int(array.nbytes) for array in arrays) + told

    def validate(self) -> None:
        self._index.validate()
        self.rows.validate()
        assert set(self.rows.groups().tolist()) <= set(self._index.all().tolist())


def row_schema(shape: WindowShape) -> pa.Schema:
    """Rows as the log keeps them."""
    return pa.schema([*shape.staged.remove(0), *MARKS])
