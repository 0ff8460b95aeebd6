"""Rows of windows that each key has for itself: many groups of few rows each, taken at different times."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from copy import copy

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.durable.files import Files
from millpond.errors import BadOption
from millpond.kernels import segments as at
from millpond.kernels import spilled
from millpond.private import AnyPath
from millpond.stores import views
from millpond.stores.windows.grouped import GroupedRows
from millpond.stores.windows.rowlog import in_portions, no_figures
from millpond.stores.windows.spill_log import ENTRY_BYTES, SpillLog

Longs = NDArray[np.int64]
READ_BATCH_RATIO = 0.02
SPACE_AMPLIFICATION_MAX = 1.5
_FLUSH_WORDS = 1 << 19
"""What is written at once: it is in memory three times for that moment."""


class UnalignedRows:
    """A `RowLog`. In memory, an append costs its rows, a take what it takes, a merge nothing but the numbers.

    What is spilled lies in one log, sorted by expected trigger within each flush. A take that needs rows from disk scans
    the index of that log once and reads along what is expected next: `ratio` of all that is there. Once the logs take
    more than `msa` times what is live in them, the same scan leaves out what is dead.

    Hits and misses count groups with rows on disk as if those of a take were taken one at a time, in the order of their
    triggers, each scan with the next `ratio`: a miss is one for which there had to be a scan. For all misses of a take
    there is one scan.
    """

    def __init__(
        self,
        schema: pa.Schema,
        files: Files,
        directory: AnyPath,
        *,
        ratio: float = READ_BATCH_RATIO,
        msa: float = SPACE_AMPLIFICATION_MAX,
    ) -> None:
        if not 0 <= ratio <= 1:
            raise BadOption(f"a read batch ratio of {ratio}", hint="it is between 0 and 1", option="ratio")
        if not msa > 1:
            raise BadOption(f"a space amplification of {msa}", hint="it is more than 1", option="msa")
        self.schema = schema
        self.ratio = ratio
        self.msa = msa
        self._rows = GroupedRows(schema)
        self._figures = no_figures()
        self._log = SpillLog(files, directory, self._figures)
        self._horizon = at.NEVER

    @property
    def memory_bytes(self) -> int:
        return self._rows.nbytes

    @property
    def staying_bytes(self) -> int:
        return self._rows.used_table_bytes

    @property
    def disk_bytes(self) -> int:
        return self._log.nbytes

    @property
    def live_bytes(self) -> int:
        return 8 * int(self._rows.control[at.NEW_WORDS]) + self._live_disk_bytes

    @property
    def _live_disk_bytes(self) -> int:
        control = self._rows.control
        return 8 * int(control[at.LIVE_DISK_WORDS]) + ENTRY_BYTES * int(control[at.LIVE_DISK_ENTRIES])

    def append(self, groups: Longs, rows: pa.RecordBatch) -> None:
        begin = time.thread_time()
        if len(groups):
            self._rows.add(groups, rows)
        self._figures["write_s"] += time.thread_time() - begin

    def expect(self, groups: Longs, triggers: Longs) -> None:
        rows = self._rows
        groups, triggers = rows.admit(groups), views.plain(triggers)
        self._figures["evictions"] += at.expect(
            groups, triggers, self._horizon, rows.table, rows.parts, rows.segments, rows.control
        )

    def merge(self, into: Longs, gone: Longs) -> None:
        self._rows.merge(into, gone)

    def take(self, groups: Longs) -> tuple[pa.RecordBatch, Longs]:
        begin = time.thread_time()
        groups = self._rows.admit(groups)
        self._rows.check_distinct(groups)
        missing, owners, on_disk = self._missing(groups)
        if len(missing):
            ahead, queue = self._queue(len(missing))
            misses = _scans(missing, owners, ahead, queue)
            self._load(np.union1d(missing, queue[:ahead]), self._is_to_be_compacted())
            self._figures["misses"] += misses
            on_disk -= misses
        batch, offsets = self._rows.rows(groups)
        self._figures["hits"] += on_disk
        self._rows.release(groups)
        if not self._rows.control[at.PARTS_ON_DISK]:
            self._log.clear()
        self._figures["read_s"] += time.thread_time() - begin
        return batch, offsets

    def peek(self, groups: Longs) -> tuple[pa.RecordBatch, Longs]:
        begin = time.thread_time()
        rows = self._rows
        groups = rows.admit(groups)
        missing, _, _ = self._missing(groups)
        if len(missing):
            missing = np.unique(missing)
            self._load(missing, compact=False)
        try:
            answer = rows.rows(groups)
        finally:
            spilled.evict(missing, rows.parts, rows.segments, rows.control)
            rows.settle()
            self._figures["read_s"] += time.thread_time() - begin
        return answer

    def drop(self, groups: Longs) -> None:
        groups = self._rows.admit(groups)
        self._rows.release(groups)
        if not self._rows.control[at.PARTS_ON_DISK]:
            self._log.clear()
        elif self._is_to_be_compacted():
            begin = time.thread_time()
            self._load(groups[:0], compact=True)
            self._figures["read_s"] += time.thread_time() - begin

    def sizes_of(self, groups: Longs) -> Longs:
        """As if all rows that there are were alike."""
        rows = self._rows
        offsets = np.empty(len(groups) + 1, np.int64)
        at.count_rows(rows.admit(groups), rows.table, rows.parts, offsets)
        parts = rows.parts[: int(rows.control[at.PARTS_USED])]
        parts = parts[parts[:, at.OWNER] >= 0]
        every = int(parts[:, at.NEW_ROWS].sum() + parts[:, at.DISK_ROWS].sum())
        words = int(rows.control[at.NEW_WORDS] + rows.control[at.LIVE_DISK_WORDS])
        sizes: Longs = np.diff(offsets) * (8 * words // max(every, 1))
        return sizes

    def peek_share(self, groups: Longs, share: int, shares: int) -> pa.RecordBatch:
        assert shares == 1, "groups of a key of its own each are read some at a time"
        return self.peek(groups)[0]

    def frozen(self, groups: Longs) -> Iterator[tuple[Longs, pa.RecordBatch]]:
        """What is in memory is copied, and in memory twice until all is read."""
        groups = groups.copy()
        other: UnalignedRows = copy(self)
        other._rows, other._figures = self._rows.copy(), no_figures()
        other._log, pin = self._log.frozen()

        def read() -> Iterator[tuple[Longs, pa.RecordBatch]]:
            done = 0
            for some in in_portions(other, groups):
                batch, offsets = other.peek(some)
                yield done + np.repeat(np.arange(len(some)), np.diff(offsets)), batch
                done += len(some)
            pin.release()

        return read()

    def spill(self, nbytes: int) -> int:
        """Groups that are expected last go first, and half of all at least: what stays in memory is moved there.

        What was read ahead goes only if nothing else is left.
        """
        begin = time.thread_time()
        rows = self._rows
        moved = 0
        try:
            if nbytes > 0:
                for chosen in self._flushes(max(-(-nbytes // 8), int(rows.control[at.NEW_WORDS]) // 2)):
                    moved += 8 * self._flush(chosen)
                if moved < nbytes and rows.control[at.PARTS_LOADED]:
                    moved += 8 * int(rows.control[at.OLD_WORDS])
                    every = np.arange(int(rows.control[at.PARTS_USED]))
                    self._figures["evictions"] += spilled.evict(
                        every, rows.parts, rows.segments, rows.control
                    )
        finally:
            rows.tidy()
            self._figures["write_s"] += time.thread_time() - begin
        return moved

    def groups(self) -> Longs:
        return self._rows.names()

    def figures(self) -> dict[str, float]:
        return dict(self._figures)

    def close(self) -> None:
        self._log.close()

    def validate(self) -> None:
        """Check every invariant; slow."""
        rows = self._rows
        rows.validate()
        assert self._live_disk_bytes <= self.disk_bytes
        used = int(rows.control[at.PARTS_USED])
        entries = self._log.scan(rows.parts, np.ones(used, np.uint8), compact=False)
        owners = entries[:, spilled.PART] & spilled.PART_MASK
        counts = np.bincount(owners, entries[:, spilled.ROWS] & at.ROWS_MASK, minlength=used)
        live = rows.parts[:used, at.OWNER] >= 0
        assert np.array_equal(counts, np.where(live, rows.parts[:used, at.DISK_ROWS], 0)), (
            "the index has all rows"
        )
        for _ in self._log.load(entries):
            pass

    def _missing(self, groups: Longs) -> tuple[Longs, Longs, int]:
        """Parts of these groups that are on disk alone; the place of the group of each; how many groups have some there."""
        rows = self._rows
        count = at.count_parts(groups, rows.table, rows.parts) if rows.control[at.PARTS_ON_DISK] else 0
        if not count:
            nothing = np.empty(0, np.int64)
            return nothing, nothing, 0
        missing, owners = np.empty(count, np.int64), np.empty(count, np.int64)
        count, on_disk = at.missing_parts(groups, rows.table, rows.parts, missing, owners)
        return missing[:count], owners[:count], on_disk

    def _queue(self, more: int) -> tuple[int, Longs]:
        """How many parts are to be read ahead, and parts in the order in which they are expected: those, and so many more.

        What is expected later than all that are read ahead is not worth its memory from now on.
        """
        rows = self._rows
        used, on_disk = int(rows.control[at.PARTS_USED]), int(rows.control[at.PARTS_ON_DISK])
        parts, triggers = np.empty(on_disk, np.int64), np.empty(on_disk, np.int64)
        count = spilled.on_disk_alone(rows.table, rows.parts, used, parts, triggers)
        parts, triggers = parts[:count], triggers[:count]
        ahead = min(count, math.ceil(self.ratio * on_disk))
        if not ahead:
            return 0, parts[:0]
        if ahead + more < count:
            chosen = np.argpartition(triggers, ahead + more)[: ahead + more]
            parts, triggers = parts[chosen], triggers[chosen]
        order = np.argsort(triggers, kind="stable")
        self._horizon = int(triggers[order[ahead - 1]])
        return ahead, parts[order]

    def _is_to_be_compacted(self) -> bool:
        return self.disk_bytes > self.msa * self._live_disk_bytes

    def _load(self, parts: Longs, compact: bool) -> None:
        """All rows of these parts, which are on disk alone, are in memory, too."""
        rows = self._rows
        wanted = np.zeros(int(rows.control[at.PARTS_USED]), np.uint8)
        wanted[parts] = 1
        entries = self._log.scan(rows.parts, wanted, compact)
        try:
            for some, words, places in self._log.load(entries):
                bounds = np.zeros(len(some) + 1, np.int64)
                np.cumsum(some[:, spilled.WORDS], out=bounds[1:])
                bounds += rows.reserve(int(bounds[-1]))
                rows.reserve_segments(len(some))
                spilled.copy_words(words, places, bounds, rows.words)
                rows.used = int(bounds[-1])
                owners = some[:, spilled.PART] & spilled.PART_MASK
                packed = np.ascontiguousarray(some[:, spilled.ROWS])
                at.add_loaded(owners, packed, bounds, rows.parts, rows.segments, rows.control)
        except BaseException:
            # Half of a part is worse than none of it.
            spilled.evict(parts, rows.parts, rows.segments, rows.control)
            raise

    def _flushes(self, words: int) -> list[Longs]:
        """Parts whose new rows have at least so many words, the last to be expected, in portions to be written at once.

        Within all of them those that are expected next come first: they are read together.
        """
        rows = self._rows
        used = int(rows.control[at.PARTS_USED])
        table = rows.parts[:used]
        parts = np.flatnonzero((table[:, at.OWNER] >= 0) & (table[:, at.NEW_ROWS] > 0))
        if not len(parts):
            return []
        triggers = rows.table[table[parts, at.OWNER], at.TRIGGER]
        parts = parts[np.argsort(triggers, kind="stable")]
        sizes = table[parts, at.NEW_SIZE]
        from_last = np.cumsum(sizes[::-1])
        count = min(len(parts), int(np.searchsorted(from_last, words)) + 1)
        parts, sizes = parts[-count:], sizes[-count:]
        portions = np.cumsum(sizes) // _FLUSH_WORDS
        return np.split(parts, np.flatnonzero(np.diff(portions)) + 1)

    def _flush(self, parts: Longs) -> int:
        """The new rows of these parts go to disk, in one segment each. How many words they took in memory."""
        rows = self._rows
        before = rows.live
        batch, starts = rows.new_rows(parts)
        encoded = rows.codec.encode(batch, np.arange(batch.num_rows), starts, in_place=True)
        words = np.empty(int(encoded.bounds[-1]), np.int64)
        encoded.write(words, 0)
        generations = rows.parts[parts, at.GENERATION] & spilled.GENERATION_MASK
        names = parts | (generations << spilled.GENERATION_SHIFT)
        packed = np.diff(starts) | (encoded.form << at.FORM_SHIFT)
        self._log.append(names, packed, words, encoded.bounds)
        self._figures["evictions"] += spilled.add_spilled(
            parts, encoded.bounds, rows.parts, rows.segments, rows.control
        )
        return before - rows.live


def _scans(missing: Longs, owners: Longs, ahead: int, queue: Longs) -> int:
    """How many scans parts on disk would take, one at a time, if each scan read the next `ahead` of the queue, too.

    What is not in the queue takes one for each group.
    """
    if not ahead:
        return len(np.unique(owners))
    places = np.argsort(queue)
    found = np.minimum(np.searchsorted(queue, missing, sorter=places), len(queue) - 1)
    queued = queue[places[found]] == missing
    scans = len(np.unique(places[found[queued]] // ahead)) + len(np.unique(owners[~queued]))
    return min(scans, len(np.unique(owners)))
