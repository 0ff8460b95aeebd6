"""Rows of many groups in memory: kernels.segments with room that grows and shrinks."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels import segments as at
from millpond.stores import views
from millpond.stores.growing import grown
from millpond.stores.windows.encoding import RowCodec
from millpond.stores.windows.rowlog import check_groups, repeated

Longs = NDArray[np.int64]
_DEAD_WORDS_MIN = 1 << 15
"""Less than this is not worth tidying up."""


class GroupedRows:
    """The tables of groups, parts and segments, and the arena that segments lie in."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.codec = RowCodec(schema)
        self.table: Longs = np.empty((0, at.GROUP_FIELDS), np.int64)
        self.parts: Longs = np.empty((0, at.PART_FIELDS), np.int64)
        self.segments: Longs = np.empty((0, at.SEGMENT_FIELDS), np.int64)
        self.control: Longs = np.zeros(at.CONTROL_SIZE, np.int64)
        self.control[at.PARTS_FREE] = self.control[at.SEGMENTS_FREE] = -1
        self.words: Longs = np.empty(0, np.int64)
        self.used = 0
        self._marks: Longs = np.empty(0, np.int64)

    @property
    def table_bytes(self) -> int:
        return self.table.nbytes + self.parts.nbytes + self.segments.nbytes + self._marks.nbytes

    @property
    def used_table_bytes(self) -> int:
        """Of tables what is in use: the rest is memory that was not written to."""
        parts, segments = int(self.control[at.PARTS_USED]), int(self.control[at.SEGMENTS_USED])
        in_use = self.parts[:parts].nbytes + self.segments[:segments].nbytes
        return self.table.nbytes + in_use

    @property
    def nbytes(self) -> int:
        return 8 * self.used + self.table_bytes

    def copy(self) -> GroupedRows:
        other = GroupedRows(self.schema)
        other.codec = self.codec
        for name in ("table", "parts", "segments", "control"):
            setattr(other, name, getattr(self, name).copy())
        other.words, other.used = self.words[: self.used].copy(), self.used
        other._marks = np.zeros_like(self._marks)
        return other

    def admit(self, groups: Longs) -> Longs:
        """These groups, which the tables have room for from now on."""
        groups = views.plain(check_groups(groups))
        needed = int(groups.max()) + 1 if len(groups) else 0
        known = len(self.table)
        if needed > known:
            self.table = grown(self.table, known, needed)
            self.table[known:, : at.TRIGGER] = -1
            self.table[known:, at.TRIGGER] = at.NEVER
            marks = np.zeros(len(self.table), np.int64)  # of which no page is touched
            self._marks = marks
        return groups

    def add(self, groups: Longs, rows: pa.RecordBatch) -> None:
        groups = self.admit(groups)
        count = len(groups)
        order, distinct = np.empty(count, np.int64), np.empty(count, np.int64)
        starts = np.empty(count + 1, np.int64)
        found, in_place = at.cluster(groups, self._marks, order, distinct, starts)
        distinct, starts = distinct[:found], starts[: found + 1]
        encoded = self.codec.encode(rows, order, starts, in_place)
        begin = self.reserve(int(encoded.bounds[-1]))
        self.reserve_segments(found)
        parts = int(self.control[at.PARTS_USED])
        self.parts = grown(self.parts, parts, parts + found)
        encoded.write(self.words, begin)
        self.used += int(encoded.bounds[-1])
        at.add_rows(
            distinct,
            starts,
            encoded.bounds + begin,
            encoded.form,
            self.table,
            self.parts,
            self.segments,
            self.control,
        )

    def reserve(self, words: int) -> int:
        """Room for so many more words; where it begins."""
        if self.used + words > len(self.words):
            self.tidy(max(words, self.live))
            self.words = grown(self.words, self.used, self.used + words)
        return self.used

    def reserve_segments(self, count: int) -> None:
        used = int(self.control[at.SEGMENTS_USED])
        self.segments = grown(self.segments, used, used + count)

    def rows(self, groups: Longs) -> tuple[pa.RecordBatch, Longs]:
        """All rows of these groups, none of which is on disk alone, and where those of each begin."""
        offsets = np.empty(len(groups) + 1, np.int64)
        at.count_rows(groups, self.table, self.parts, offsets)
        # A segment has a row at least. Memory that is not written to costs nothing.
        addresses, rows = np.empty(int(offsets[-1]), np.int64), np.empty(int(offsets[-1]), np.int64)
        count = at.collect(groups, self.table, self.parts, self.segments, addresses, rows)
        return self.codec.decode(self.words, addresses[:count], rows[:count]), offsets

    def new_rows(self, parts: Longs) -> tuple[pa.RecordBatch, Longs]:
        """The same of parts, without what was read back from disk."""
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum(self.parts[parts, at.NEW_ROWS], out=offsets[1:])
        addresses, rows = np.empty(int(offsets[-1]), np.int64), np.empty(int(offsets[-1]), np.int64)
        count = at.collect_new(parts, self.parts, self.segments, addresses, rows)
        return self.codec.decode(self.words, addresses[:count], rows[:count]), offsets

    def release(self, groups: Longs) -> None:
        at.release(groups, self.table, self.parts, self.segments, self.control)
        self.settle()

    def settle(self) -> None:
        """Tidies up where it is worth it: more is dead than not."""
        if self.used - self.live > max(_DEAD_WORDS_MIN, self.live):
            self.tidy()

    @property
    def live(self) -> int:
        """Words that segments have."""
        return int(self.control[at.NEW_WORDS] + self.control[at.OLD_WORDS])

    def tidy(self, room: int = 0) -> None:
        """Leaves no dead words, and room for so many more if it had any."""
        if self.used == self.live:
            return
        words = np.empty(self.live + room, np.int64)
        moved = at.move_live(self.words, words, self.parts, self.segments, self.control)
        assert moved == self.live
        self.words, self.used = words, moved
        if not moved and self.control[at.SEGMENTS_USED]:
            self.segments = np.empty((0, at.SEGMENT_FIELDS), np.int64)
            self.control[at.SEGMENTS_USED], self.control[at.SEGMENTS_FREE] = 0, -1

    def check_distinct(self, groups: Longs) -> None:
        place = at.first_repeated(groups, self._marks)
        if place >= 0:
            raise repeated(int(groups[place]))

    def merge(self, into: Longs, gone: Longs) -> None:
        into, gone = self.admit(into), self.admit(gone)
        at.merge(into, gone, self.table, self.parts)

    def names(self) -> Longs:
        return np.flatnonzero(self.table[:, at.FIRST] >= 0)

    def validate(self) -> None:
        """Check every invariant; slow."""
        parts, segments, control = self.parts, self.segments, self.control
        assert not self._marks.any()
        seen_parts: set[int] = set()
        seen_segments: set[int] = set()
        spans: list[tuple[int, int]] = []
        totals = dict.fromkeys((at.NEW_HEAD, at.OLD_HEAD), 0)
        for group in self.names():
            part, last = int(self.table[group, at.FIRST]), -1
            while part >= 0:
                assert part not in seen_parts, "a part is in one chain"
                seen_parts.add(part)
                assert parts[part, at.OWNER] == group
                assert parts[part, at.OLD_ROWS] in (0, parts[part, at.DISK_ROWS]), (
                    "loaded as a whole or not at all"
                )
                assert parts[part, at.NEW_ROWS] + parts[part, at.DISK_ROWS] > 0
                for head, rows in ((at.NEW_HEAD, at.NEW_ROWS), (at.OLD_HEAD, at.OLD_ROWS)):
                    segment, tail, count, size = int(parts[part, head]), -1, 0, 0
                    while segment >= 0:
                        assert segment not in seen_segments
                        seen_segments.add(segment)
                        address, words, packed, follower = (int(value) for value in segments[segment])
                        spans.append((address, address + words))
                        totals[head] += words
                        count += packed & at.ROWS_MASK
                        size += words
                        segment, tail = follower, segment
                    assert parts[part, head + 1] == tail
                    assert parts[part, rows] == count
                    assert parts[part, rows + 1] == size
                part, last = int(parts[part, at.NEXT]), part
            assert self.table[group, at.LAST] == last
        live = sorted(seen_parts)
        assert control[at.NEW_WORDS] == totals[at.NEW_HEAD]
        assert control[at.OLD_WORDS] == totals[at.OLD_HEAD]
        spans.sort()
        ends = [0, *(end for _, end in spans)]
        assert all(begin >= end for (begin, _), end in zip(spans, ends, strict=False)), "segments lie apart"
        assert ends[-1] <= self.used <= len(self.words)
        assert int((parts[live, at.DISK_ROWS] > 0).sum()) == control[at.PARTS_ON_DISK]
        assert int((parts[live, at.OLD_ROWS] > 0).sum()) == control[at.PARTS_LOADED]
        assert int(parts[live, at.DISK_WORDS].sum()) == control[at.LIVE_DISK_WORDS]
        assert int(parts[live, at.DISK_ENTRIES].sum()) == control[at.LIVE_DISK_ENTRIES]
        free, chain = 0, int(control[at.PARTS_FREE])
        while chain >= 0:
            assert chain not in seen_parts
            free, chain = free + 1, int(parts[chain, at.NEXT])
        assert free + len(seen_parts) == control[at.PARTS_USED]
        free, chain = 0, int(control[at.SEGMENTS_FREE])
        while chain >= 0:
            assert chain not in seen_segments
            free, chain = free + 1, int(segments[chain, at.FOLLOWER])
        assert free + len(seen_segments) == control[at.SEGMENTS_USED]
