"""Paths between vertices: edges are asked for hop by hop, for all rows at once, and joined here.

A path is walked from both ends, so that five hops take three rounds of questions, and each vertex is asked about once
for all rows: the answers are all changes of its edges, of which each row takes what holds at its own time.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.client.client import Client
from millpond.code.rules import FetchRule, Walk
from millpond.errors import BadRule, MessageTooLarge
from millpond.kernels import control as at
from millpond.kernels import walks
from millpond.schema import key_kind
from millpond.stores import views
from millpond.stores.key_index import KeyIndex
from millpond.stores.keys import Keys, decode_keys, encode_keys
from millpond.stores.readiness import check_not_below
from millpond.stores.versioned import result_schema
from millpond.times import TIME_MAX, TIME_MIN, TimeKind
from millpond.wire.questions import AskProgress
from millpond.wire.states import Question, StateSpec

# Edges that are looked at together: some hundred bytes each, on their way and here.
EDGES_MAX = 1 << 24
# Vertices that are asked about at once.
VERTICES_AT_ONCE = 1 << 17
VERTICES_MET = 1 << 19
# Room for paths, beyond what one row may have: as much as is handed on at once.
PATHS_AT_ONCE = 1 << 18
# Rows whose paths are worth a thread of their own.
ROWS_A_THREAD = 1 << 10

CHANGES = FetchRule("changes")

_Longs: TypeAlias = NDArray[np.int64]
_Lists: TypeAlias = tuple[_Longs, _Longs, _Longs, _Longs, _Longs]
_Ranges: TypeAlias = tuple[_Longs, _Longs, _Longs, _Longs]


class Walker:
    """How one fetch finds paths in a State that holds each edge at both its ends. Plain data, as `Asking` is."""

    def __init__(self, spec: StateSpec, walk: Walk) -> None:
        keys, values = spec.shape.keys, spec.shape.values
        fits = (
            spec.update.name == "edges"
            and len(keys) == 2
            and pa.types.is_boolean(keys.field(1).type)
            and values.field(0).type == keys.field(0).type
        )
        if not fits:
            raise BadRule(
                "paths() walks in a State of edges() whose key is a vertex and whether the edges lead away from it; this one"
                f" has key={spec.key!r}, value={spec.value!r}, update={spec.update.name}()",
                hint='for example key="vertex long, outgoing boolean", value="neighbour long, added boolean",'
                " update=mp.edges()",
                rule="paths",
            )
        self._spec = spec
        self._walk = walk
        self.vertex = pa.schema([keys.field(0)])
        self.answers = pa.schema([pa.field("paths", pa.list_(pa.list_(keys.field(0).type)))])

    def paths(
        self,
        client: Client,
        starts: Keys,
        targets: Keys,
        lows: NDArray[np.int64] | None,
        highs: NDArray[np.int64],
        kind: TimeKind,
        seen: tuple[int, int] = (0, 0),
    ) -> pa.ChunkedArray:
        """The paths of each row by edges of low < time <= high, and not older than the walk says."""
        lives = self._spec.compact.span
        spans = [min(span or lives, lives or span) for span in self._walk.spans.values()]
        since = np.stack([_since(highs, lows, span) for span in spans])
        empty = np.zeros(len(highs), bool) if lows is None else lows >= highs
        rows = _Rows(starts, targets, since, views.plain(highs), empty)
        chunks = self._chunks(client, rows, seen)
        if len(highs):
            # What was read may be compacted from F on. Containers learn it from the coordinator: asked now, it says at least
            # what any of them knew.
            progress = client.call(AskProgress(self._spec.name, waits=False))
            check_not_below(int(highs.min()), progress.fetch, kind)
        return pa.chunked_array(chunks, self.answers.field(0).type)

    def _chunks(self, client: Client, rows: _Rows, seen: tuple[int, int]) -> list[pa.Array]:
        """In halves, where all at once would look at too many edges."""
        try:
            return _Walking(client, self._spec, self._walk, self.vertex, seen).run(rows)
        except _TooManyEdges as error:
            half = len(rows.highs) // 2
            if half == 0:
                raise MessageTooLarge(
                    f"the paths of one row lead by more than {EDGES_MAX:,} edges",
                    hint="ask for fewer hops, or for shorter spans",
                    size=error.edges,
                    limit=EDGES_MAX,
                ) from None
        return self._chunks(client, rows.part(0, half), seen) + self._chunks(
            client, rows.part(half, len(rows.highs)), seen
        )


class _TooManyEdges(Exception):
    def __init__(self, edges: int) -> None:
        self.edges = edges


class _Rows(NamedTuple):
    """What is asked: `since` has a row of times for each number of hops. An `empty` range has no time in it."""

    starts: Keys
    targets: Keys
    since: NDArray[np.int64]
    highs: NDArray[np.int64]
    empty: NDArray[np.bool_]

    def part(self, start: int, stop: int) -> _Rows:
        return _Rows(
            self.starts.part(start, stop),
            self.targets.part(start, stop),
            np.ascontiguousarray(self.since[:, start:stop]),
            self.highs[start:stop],
            self.empty[start:stop],
        )


def _since(highs: NDArray[np.int64], lows: NDArray[np.int64] | None, span: int) -> NDArray[np.int64]:
    """The first time that counts for each row: after its low, and less than the span, if it has one, before its high."""
    since = np.full(len(highs), TIME_MIN)
    if span:
        old = highs >= TIME_MIN + span
        since[old] = _after(highs[old] - span)
    return since if lows is None else np.maximum(since, _after(lows))


def _after(times: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.minimum(times, TIME_MAX - 1) + 1


class _Edges:
    """The edges of one direction, as far as they were asked for, in the form that `kernels.walks` takes."""

    def __init__(self, outgoing: bool) -> None:
        self.outgoing = outgoing
        self.begin = self.end = np.zeros(0, np.int64)
        self.ends = self.times = self.until = np.zeros(0, np.int64)

    def make_room(self, vertices: int) -> None:
        """A vertex that was not asked about begins at -1 and has no edges."""
        more = np.full(vertices - len(self.begin), -1, np.int64)
        self.begin, self.end = np.append(self.begin, more), np.append(self.end, more)

    @property
    def lists(self) -> _Lists:
        return self.begin, self.end, self.ends, self.times, self.until

    @property
    def ranges(self) -> _Ranges:
        return self.begin, self.end, self.times, self.until

    def append(
        self,
        vertices: NDArray[np.int64],
        offsets: NDArray[np.int64],
        ends: NDArray[np.int64],
        times: NDArray[np.int64],
        until: NDArray[np.int64],
    ) -> None:
        first = len(self.ends)
        self.begin[vertices], self.end[vertices] = first + offsets[:-1], first + offsets[1:]
        self.ends = np.concatenate((self.ends, ends))
        self.times = np.concatenate((self.times, times))
        self.until = np.concatenate((self.until, until))


class _Walking:
    """One walk for all rows: the vertices it has met, as numbers, and their edges."""

    def __init__(
        self,
        client: Client,
        spec: StateSpec,
        walk: Walk,
        vertex: pa.Schema,
        seen: tuple[int, int] = (0, 0),
    ) -> None:
        self._client = client
        self._seen = seen
        self._spec = spec
        self._walk = walk
        self._vertex = vertex
        self._answers = result_schema(spec.shape.values, CHANGES)
        self._index = KeyIndex(key_kind(vertex), np.zeros(at.SIZE, np.int64))
        self._out = _Edges(True)
        self._in = _Edges(False)
        self._edges = 0

    def run(self, rows: _Rows) -> list[pa.Array]:
        # An index that need not grow on the way costs less; a wrong guess costs room or time, nothing else.
        self._index.reserve(min(16 * len(rows.highs), VERTICES_MET), 0)
        starts, targets = self._numbers(rows.starts), self._numbers(rows.targets)
        # There is no path from a vertex to itself.
        targets[rows.empty] = starts[rows.empty]
        hops = np.array(list(self._walk.spans), np.int64)
        backward = hops // 2
        forward = hops - backward
        widest = rows.since.min(axis=0)
        self._ask(self._out, np.unique(starts), widest, rows.highs)
        wanted = _any_edge(starts, widest, rows.highs, self._out)
        if backward.any():
            self._ask(self._in, np.unique(targets[wanted != 0]), widest, rows.highs)
            if hops[0] > 1:
                wanted &= _any_edge(targets, widest, rows.highs, self._in)
        for edges, ends, steps in ((self._out, starts, forward), (self._in, targets, backward)):
            for step in range(1, int(steps.max())):
                # Those of the widest span: the walk itself looks again.
                since = rows.since[steps > step].min(axis=0)
                marks = np.zeros(len(self._index), np.uint8)
                walks.mark_ahead(ends, step, wanted, since, rows.highs, *edges.lists, marks)
                self._ask(edges, np.flatnonzero((marks != 0) & (edges.begin < 0)), since, rows.highs)
        return self._join(starts, targets, hops, rows)

    def _numbers(self, keys: Keys) -> NDArray[np.int64]:
        numbers = self._index.assign(keys)
        for edges in (self._out, self._in):
            edges.make_room(len(self._index))
        return numbers

    def _ask(
        self, edges: _Edges, vertices: NDArray[np.int64], since: NDArray[np.int64], highs: NDArray[np.int64]
    ) -> None:
        """The edges of these vertices, of all times that any row may look at."""
        low, high = (int(since.min()), int(highs.max())) if len(highs) else (TIME_MIN, TIME_MIN)
        for first in range(0, len(vertices), VERTICES_AT_ONCE):
            self._ask_some(edges, vertices[first : first + VERTICES_AT_ONCE], low, high)

    def _ask_some(self, edges: _Edges, vertices: NDArray[np.int64], low: int, high: int) -> None:
        shape = self._spec.shape
        (column,) = decode_keys(self._index.stored_keys().take(vertices).to_arrow(), self._vertex)
        direction = pa.array(np.full(len(vertices), edges.outgoing))
        keys = encode_keys([column, direction], shape.keys)
        asked, longs = shape.questions, [np.full(len(vertices), high)]
        if low > TIME_MIN:
            asked, longs = shape.ranged_questions, [*longs, np.full(len(vertices), low - 1)]
        message = Question(self._spec.name, "changes", born=self._seen[0], seen=self._seen[1])
        columns = self._client.ask(message, asked, keys, longs, self._answers)
        for chunks in zip(*(column.chunks for column in columns), strict=True):
            self._append(edges, vertices[: len(chunks[0])], *chunks)
            vertices = vertices[len(chunks[0]) :]

    def _append(
        self,
        edges: _Edges,
        vertices: NDArray[np.int64],
        times: pa.ListArray,
        neighbours: pa.ListArray,
        added: pa.ListArray,
    ) -> None:
        offsets = views.plain(times.offsets.to_numpy()).astype(np.int64)
        offsets -= offsets[0]
        self._edges += int(offsets[-1])
        if self._edges > EDGES_MAX:
            raise _TooManyEdges(self._edges)
        ends = self._numbers(encode_keys([neighbours.flatten()], self._vertex))
        moments = views.plain(times.flatten().to_numpy())
        lasting = views.longs(added.flatten()).copy()
        until = np.empty(len(ends), np.int64)
        walks.mark_until(offsets, ends, moments, len(self._index), lasting, until)
        chosen = lasting != 0
        kept = np.concatenate(([0], np.cumsum(chosen)))[offsets]
        edges.append(vertices, kept, ends[chosen], moments[chosen], until[chosen])

    def _join(
        self, starts: NDArray[np.int64], targets: NDArray[np.int64], hops: NDArray[np.int64], rows: _Rows
    ) -> list[pa.Array]:
        """The paths of all rows. Stretches of them are joined at the same time: this is most of a walk."""
        threads = max(1, min(os.cpu_count() or 1, len(starts) // ROWS_A_THREAD))
        cuts = np.linspace(0, len(starts), threads + 1).astype(np.int64).tolist()

        def join(span: tuple[int, int]) -> list[pa.Array]:
            start, stop = span
            part = rows.part(start, stop)
            return self._join_part(starts[start:stop], targets[start:stop], hops, part)

        return [chunk for chunks in self._client.runtime.map(join, list(pairwise(cuts))) for chunk in chunks]

    def _join_part(
        self, starts: NDArray[np.int64], targets: NDArray[np.int64], hops: NDArray[np.int64], rows: _Rows
    ) -> list[pa.Array]:
        room = max(self._walk.limit, PATHS_AT_ONCE)
        path_stops = np.empty(room, np.int64)
        vertices = np.empty(room * int(hops[-1] + 1), np.int64)
        row_stops = np.empty(len(starts), np.int64)
        chunks: list[pa.Array] = []
        done = 0
        while done < len(starts):
            stop = walks.paths(
                done, starts, targets, hops, rows.since, rows.highs, self._walk.limit,
                *self._out.lists, *self._in.lists, row_stops, path_stops, vertices,
            )  # fmt: skip
            paths = int(row_stops[stop - 1])
            stops = path_stops[:paths]
            flat = vertices[: int(stops[-1]) if paths else 0]
            chunks.append(self._chunk(row_stops[done:stop], stops, flat))
            done = stop
        return chunks

    def _chunk(
        self, row_stops: NDArray[np.int64], path_stops: NDArray[np.int64], vertices: NDArray[np.int64]
    ) -> pa.Array:
        (flat,) = decode_keys(self._index.stored_keys().take(vertices).to_arrow(), self._vertex)
        paths = pa.ListArray.from_arrays(_offsets(path_stops), flat)
        return pa.ListArray.from_arrays(_offsets(row_stops), paths)


def _any_edge(
    vertices: NDArray[np.int64], since: NDArray[np.int64], highs: NDArray[np.int64], edges: _Edges
) -> NDArray[np.uint8]:
    out = np.empty(len(vertices), np.uint8)
    walks.any_edge(vertices, since, highs, *edges.ranges, out)
    return out


def _offsets(stops: NDArray[np.int64]) -> pa.Array:
    return pa.array(np.concatenate(([0], stops)).astype(np.int32))
