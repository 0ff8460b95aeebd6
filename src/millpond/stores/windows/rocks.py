"""The same rows in RocksDB, as a peer to compare with: what its users would do for windows, and no slower.

Rows are grouped before they are written, one write batch an append. A key is `id|sequence`, big-endian; ids are given to
groups as they begin, so that what lives at the same time lies together. A merge moves no row.

The id stands for what would be in a key otherwise: for the window (AAR), whose rows lie together in the order in which they came and are
read and dropped as one range, or for a key's window (AUR). `window_end|key|sequence` and `key|start|sequence` would be the same in more bytes:
of a window a value for each key instead of one for all, and sessions whose start changes would have to be written again; a key of any length would
have to be compared byte by byte. So this is what is best for it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.errors import BadOption
from millpond.kernels import segments as at
from millpond.private import AnyPath
from millpond.stores.growing import grown
from millpond.stores.windows.aligned import only_share
from millpond.stores.windows.encoding import RowCodec
from millpond.stores.windows.rocks_database import RocksMemory, as_bytes, imported, open_database
from millpond.stores.windows.rowlog import check_groups, no_figures, peeked, repeated

Longs = NDArray[np.int64]
_SIZE = ">i8"


class RocksRows:
    """A `RowLog` over one database in `directory`, without a write-ahead log.

    `budget` bytes are for its block cache and its write buffers together, unless it shares `memory` with others. `drop` is how rows that were taken go: by a range
    for each run of neighbours, or key by key.
    """

    def __init__(
        self,
        schema: pa.Schema,
        directory: AnyPath,
        *,
        budget: int = 64 << 20,
        compaction: Literal["level", "universal"] = "level",
        drop: Literal["range", "keys"] = "range",
        direct: bool = False,
        memory: RocksMemory | None = None,
    ) -> None:
        self._rocks = imported()
        if compaction not in ("level", "universal") or drop not in ("range", "keys"):
            raise BadOption(
                f"compaction {compaction!r} with drops by {drop!r}",
                hint='compaction is "level" or "universal", drop is "range" or "keys"',
                option="compaction",
            )
        self.schema = schema
        self._codec = RowCodec(schema)
        self._path = os.fspath(directory)
        self._drop_by = drop
        self._memory = memory or RocksMemory(budget)
        self._options = self._memory.options(compaction=compaction, prefix_bytes=8, direct_io=direct) | {
            "drop": drop
        }
        self._cache = self._memory.cache
        self._opened: tuple[Any, Any] | None = None
        self._ids: Longs = np.empty(0, np.int64)
        self._marks: Longs = np.empty(0, np.int64)
        self._sizes: Longs = np.empty(0, np.int64)
        self._earlier: dict[int, list[int]] = {}
        """Of a group that others were merged into: the ids whose rows come before those of its own."""
        self._next_id = 0
        self._sequence = 0
        self._figures = no_figures()

    @property
    def _database(self) -> Any:
        """Opened when it is first needed: many slices stay empty."""
        if self._opened is None:
            self._opened = open_database(self._path, self._memory, self._options)
        return self._opened[0]

    @property
    def _writes(self) -> Any:
        assert self._opened is not None
        return self._opened[1]

    def options(self) -> dict[str, Any]:
        """How the database is set up, to be printed beside figures."""
        return dict(self._options)

    @property
    def memory_bytes(self) -> int:
        tables = self._ids.nbytes + self._marks.nbytes + self._sizes.nbytes
        return tables + max(int(self._cache.get_usage()), self._buffered)

    @property
    def disk_bytes(self) -> int:
        if self._opened is None:
            return 0
        return int(self._database.property_int_value("rocksdb.total-sst-files-size") or 0)

    @property
    def live_bytes(self) -> int:
        return int(self._sizes.sum())

    @property
    def _buffered(self) -> int:
        if self._opened is None:
            return 0
        return int(self._database.property_int_value("rocksdb.cur-size-all-mem-tables") or 0)

    def append(self, groups: Longs, rows: pa.RecordBatch) -> None:
        if not len(groups):
            return
        begin = time.thread_time()
        groups = self._admit(groups)
        count = len(groups)
        order, distinct = np.empty(count, np.int64), np.empty(count, np.int64)
        starts = np.empty(count + 1, np.int64)
        found, in_place = at.cluster(groups, self._marks, order, distinct, starts)
        distinct, starts = distinct[:found], starts[: found + 1]
        encoded = self._codec.encode(rows, order, starts, in_place)
        # A word more for each: how many rows, in which form.
        bounds = encoded.bounds + np.arange(found + 1)
        words = np.empty(int(bounds[-1]), np.int64)
        words[bounds[:-1]] = np.diff(starts) | (encoded.form << at.FORM_SHIFT)
        encoded._replace(bounds=bounds + 1).write(words, 0)
        new = distinct[self._ids[distinct] < 0]
        self._ids[new] = np.arange(self._next_id, self._next_id + len(new))
        self._next_id += len(new)
        self._sequence += 1
        keys = np.empty((found, 2), _SIZE)
        keys[:, 0], keys[:, 1] = self._ids[distinct], self._sequence
        content, ends = words.tobytes(), (8 * bounds).tolist()
        batch = self._rocks.WriteBatch(raw_mode=True)
        filling = time.thread_time()
        values = map(content.__getitem__, map(slice, ends, ends[1:]))
        # There is a call for each key, but no line of Python.
        deque(map(batch.put, as_bytes(keys), values), maxlen=0)
        self._memory.note(found, time.thread_time() - filling)
        self._database.write(batch, self._writes)
        self._sizes[distinct] += 8 * np.diff(bounds)
        self._figures["written_bytes"] += keys.nbytes + len(content)
        self._figures["write_s"] += time.thread_time() - begin

    def expect(self, groups: Longs, triggers: Longs) -> None:
        """Of no use to it."""
        check_groups(groups)

    def merge(self, into: Longs, gone: Longs) -> None:
        into, gone = self._admit(into), self._admit(gone)
        for name, other in zip(into.tolist(), gone.tolist(), strict=True):
            if name == other or self._ids[other] < 0:
                continue
            earlier = self._chain(name) + self._earlier.pop(other, [])
            self._ids[name], self._ids[other] = self._ids[other], -1
            self._sizes[name] += self._sizes[other]
            self._sizes[other] = 0
            if earlier:
                self._earlier[name] = earlier

    def take(self, groups: Longs) -> tuple[pa.RecordBatch, Longs]:
        begin = time.thread_time()
        groups = self._admit(groups)
        place = at.first_repeated(groups, self._marks)
        if place >= 0:
            raise repeated(int(groups[place]))
        batch, offsets, keys = self._read(groups)
        drops = self._rocks.WriteBatch(raw_mode=True)
        if self._drop_by == "range":
            ids = sorted(key for name in groups.tolist() for key in self._chain(name))
            for first, last in _neighbours(ids):
                drops.delete_range(_key(first), _key(last + 1))
        else:
            for key in keys:
                drops.delete(key)
        if len(drops):
            self._database.write(drops, self._writes)
        for name in groups.tolist():
            self._earlier.pop(name, None)
        self._ids[groups] = -1
        self._sizes[groups] = 0
        self._figures["read_s"] += time.thread_time() - begin
        return batch, offsets

    def peek(self, groups: Longs) -> tuple[pa.RecordBatch, Longs]:
        begin = time.thread_time()
        batch, offsets, _ = self._read(self._admit(groups))
        self._figures["read_s"] += time.thread_time() - begin
        return batch, offsets

    def drop(self, groups: Longs) -> None:
        self.take(groups)

    def sizes_of(self, groups: Longs) -> Longs:
        """One read for all."""
        return np.zeros(len(groups), np.int64)

    staying_bytes = 0
    """What a database keeps back of its memory is its own business."""

    def peek_share(self, groups: Longs, share: int, shares: int) -> pa.RecordBatch:
        return only_share(self.peek(groups)[0], share, shares)

    def frozen(self, groups: Longs) -> Iterator[tuple[Longs, pa.RecordBatch]]:
        """Read at once."""
        return peeked(self, groups)

    def spill(self, nbytes: int) -> int:
        """Its write buffers become files, all of them."""
        moved = self._buffered if nbytes > 0 and self.live_bytes else 0
        if moved:
            begin = time.thread_time()
            self._database.flush(True)
            moved = max(0, moved - self._buffered)
            self._figures["write_s"] += time.thread_time() - begin
        return moved

    def groups(self) -> Longs:
        return np.flatnonzero(self._ids >= 0)

    def figures(self) -> dict[str, float]:
        """Its own threads, which compact, count for nothing here: compare by the CPU time of the process."""
        return dict(self._figures)

    def close(self) -> None:
        if self._opened is not None:
            self._database.close()
            self._opened = None
            shutil.rmtree(self._path, ignore_errors=True)

    def validate(self) -> None:
        """Check every invariant; slow."""
        assert not self._marks.any()
        ids = [one for name in self.groups().tolist() for one in self._chain(name)]
        assert len(set(ids)) == len(ids)
        reads = self._rocks.ReadOptions()
        reads.set_total_order_seek(True)
        stored = list(self._database.items(read_opt=reads))
        assert {int.from_bytes(key[:8], "big") for key, _ in stored} == set(ids)
        assert sum(len(value) for _, value in stored) == self.live_bytes

    def _admit(self, groups: Longs) -> Longs:
        groups = check_groups(groups)
        known, needed = len(self._ids), int(groups.max()) + 1 if len(groups) else 0
        if needed > known:
            self._ids = grown(self._ids, known, needed)
            self._ids[known:] = -1
            self._sizes = grown(self._sizes, known, needed)
            self._sizes[known:] = 0
            self._marks = np.zeros(len(self._ids), np.int64)
        return groups

    def _chain(self, name: int) -> list[int]:
        own = int(self._ids[name])
        return [*self._earlier.get(name, ()), own] if own >= 0 else []

    def _read(self, groups: Longs) -> tuple[pa.RecordBatch, Longs, list[bytes]]:
        """Rows, offsets, and keys."""
        if self._earlier:
            chains = [self._chain(name) for name in groups.tolist()]
            ids = np.array([one for chain in chains for one in chain], np.int64)
            lengths = np.array([len(chain) for chain in chains], np.int64)
        else:
            ids = self._ids[groups]
            lengths = (ids >= 0).astype(np.int64)
            ids = ids[ids >= 0]
        keys: list[bytes] = []
        values: list[bytes] = []
        counts = np.zeros(len(ids), np.int64)
        if len(ids):
            reads = self._rocks.ReadOptions()
            reads.set_prefix_same_as_start(True)
            reads.set_iterate_upper_bound(_key(int(ids.max()) + 1))
            cursor = self._database.iter(reads)
            valid, following, key_of, value_of = cursor.valid, cursor.next, cursor.key, cursor.value
            stepping = time.thread_time()
            for place, prefix in enumerate(as_bytes(ids.astype(_SIZE))):
                # Also for a neighbour of the one before: past the end of a prefix, an iterator may miss keys.
                cursor.seek(prefix)
                before = len(values)
                while valid():
                    key = key_of()
                    if key[:8] != prefix:
                        break
                    keys.append(key)
                    values.append(value_of())
                    following()
                counts[place] = len(values) - before
            self._memory.note_steps(len(ids) + len(values), time.thread_time() - stepping)
        words = np.frombuffer(bytearray(b"".join(values)), np.int64)
        addresses = np.zeros(len(values), np.int64)
        np.cumsum([len(value) >> 3 for value in values[:-1]], out=addresses[1:])
        packed = words[addresses]
        ends = np.concatenate([[0], np.cumsum(packed & at.ROWS_MASK)])
        segment_ends = np.concatenate([[0], np.cumsum(counts)])[np.concatenate([[0], np.cumsum(lengths)])]
        self._figures["read_bytes"] += words.nbytes
        return self._codec.decode(words, addresses + 1, packed), ends[segment_ends], keys


def _key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _neighbours(ids: list[int]) -> list[tuple[int, int]]:
    """Runs of numbers without a gap: the first and the last of each."""
    runs: list[tuple[int, int]] = []
    for one in ids:
        if runs and runs[-1][1] == one - 1:
            runs[-1] = (runs[-1][0], one)
        else:
            runs.append((one, one))
    return runs
