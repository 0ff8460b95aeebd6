"""The versioned store: one slice of a State, `key -> {(time, value)}`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.errors import BadMessage, BadOption
from millpond.kernels import compaction, lookups
from millpond.kernels import control as at
from millpond.stores import views
from millpond.stores.answers import AGGREGATES, RULES, Reader, result_schema
from millpond.stores.arena import SMALLEST_TIME, Arena
from millpond.stores.cells import Layout
from millpond.stores.heaps import Heap, heap_for
from millpond.stores.key_index import KeyIndex
from millpond.stores.keys import KeyKind, Keys

__all__ = ["VersionedSlice", "result_schema"]

_LARGEST_TIME = 2**63 - 1


class VersionedSlice:
    """One slice of a State.

    Not thread-safe: the owner serialises calls. Heavy loops release the GIL. Value arrays have exactly the types of
    the schema, and so have results. A call that raises on its arguments has changed nothing.
    """

    def __init__(self, key_kind: KeyKind, values: pa.Schema) -> None:
        self.key_kind = key_kind
        self.schema = values
        self._layout = Layout(values)
        self._control: NDArray[np.int64] = np.zeros(at.SIZE, np.int64)
        self._index = KeyIndex(key_kind, self._control)
        self._arena = Arena(self._layout.width, self._control)
        self._heaps: dict[int, Heap] = {
            c: heap_for(column.field.type)
            for c, column in enumerate(self._layout.columns)
            if column.kind == "heap"
        }
        self._masked = False
        self._frozen = False
        self._swept_from = SMALLEST_TIME
        self._sweep_cursor = 0
        self._sweep_left = 0

    # Writing

    def insert(
        self,
        keys: Keys,
        times: NDArray[np.int64],
        values: Sequence[pa.Array],
        keep_from: int | None = None,
    ) -> None:
        """Add versions, in the order of the rows: at equal key and time the later row replaces the earlier one.

        `keep_from` = F lets the entries touched drop versions that no read at F or later can see.
        """
        self._check(keys, times)
        self._layout.check(values, len(keys))
        if self._frozen:
            raise RuntimeError("a frozen copy takes no inserts")
        if len(keys) == 0:
            return
        if not self._masked and self._layout.has_nulls(values):
            self._arena.widen()
            self._masked = True
        rows = self._layout.rows(views.plain(times), values, self._heap_rows(), self._masked)
        for c, heap in self._heaps.items():
            heap.append(values[c])
        ids = self._index.assign(keys)
        self._arena.insert(ids, rows, _clamped(keep_from), self._index.entries)
        if times.min() < self._swept_from:
            self._sweep_left = self.keys

    def load(self, batch: pa.RecordBatch) -> None:
        """Fill an empty slice with what `export` gave."""
        if self.versions or self._frozen:
            raise RuntimeError("only an empty slice can be loaded")
        wanted = ["_key", "_time", *self.schema.names]
        if batch.schema.names != wanted:
            raise BadMessage(f"expected the columns {wanted}, got {batch.schema.names}")
        if batch.schema.field("_time").type != pa.int64() or batch.column("_time").null_count:
            raise BadMessage("the column '_time' must be int64 without nulls")
        keys = Keys.from_arrow(batch.column("_key"))
        self._check(keys, keys)
        # Grouped by key: a key begins where the hash changes. A wrong guess costs room or time, nothing else.
        distinct = 1 + int(np.count_nonzero(np.diff(keys.hashes)))
        size = int(keys.offsets[-1] - keys.offsets[0]) if keys.kind == "bytes" else 0
        self._index.reserve(distinct, size * distinct // max(len(keys), 1))
        self._arena.reserve(len(keys))
        self.insert(keys, views.longs(batch.column("_time")), batch.columns[2:])

    def sweep(self, keep_from: int, budget: int) -> bool:
        """Compact up to `budget` entries: of the versions below `keep_from` only the newest stays.

        Moves on index growth too, and rewrites arena and heaps once more than half of them is dead.
        True when every entry has been seen since `keep_from` last rose or a version below it came in, and no growth
        is under way.
        """
        keep_from = _clamped(keep_from)
        if keep_from > self._swept_from:
            self._swept_from = keep_from
            self._sweep_left = self.keys
        if self._sweep_left:
            step = min(budget, self._sweep_left)
            self._sweep_cursor = self._arena.sweep(
                self._index.entries, self._sweep_cursor, self._swept_from, step
            )
            self._sweep_left -= step
        grown = self._index.advance_growth(budget)
        self._arena.rewrite(self._index.entries)
        self._rewrite_heaps()
        return grown and self._sweep_left == 0

    # Reading

    def fetch(
        self, keys: Keys, lo: NDArray[np.int64] | None, hi: NDArray[np.int64], rule: str
    ) -> list[pa.Array]:
        """Answer one probe per row over its versions with `lo < time <= hi` (`lo` None: unbounded below).

        An array per value column (`count`: just one), of the types that `result_schema` says. An unknown key, or no
        version in range: null under `latest`, `total`, `smallest` and `largest`, [] under `values`, 0 under `count`.
        """
        if rule not in RULES:
            raise BadOption(f"no rule {rule!r}", hint=f"one of {', '.join(RULES)}", option="rule")
        self._check(keys, hi)
        hi = views.plain(hi)
        if lo is not None:
            self._check(keys, lo)
            lo = views.plain(lo)
        ids = self._index.find(keys)
        reader = self._reader()
        if rule == "latest":
            positions = np.empty(len(ids), np.int64)
            lookups.latest_at(ids, self._index.entries, self._arena.cells, hi, positions)
            if lo is not None:
                lookups.drop_until(positions, self._arena.cells, lo)
            return reader.gather(positions)
        begin, end = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        unbounded = np.empty(0, np.int64)
        if lo is None or len(lo) == 0:
            lo = unbounded
        total = lookups.ranges(ids, self._index.entries, self._arena.cells, lo, hi, begin, end)
        if rule == "count":
            return [pa.array(end - begin)]
        if rule == "values":
            return reader.lists(begin, end, total)
        return reader.aggregates(begin, end, total, AGGREGATES[rule])

    def latest(self, hi: int | None) -> pa.RecordBatch:
        """The newest version with time <= `hi` (None: of all) of each key that has one: `_key`, `_time`, values."""
        count = self.keys
        ids = np.arange(count)
        positions = np.empty(count, np.int64)
        his = np.full(count, _LARGEST_TIME if hi is None else _clamped(hi), np.int64)
        lookups.latest_at(ids, self._index.entries, self._arena.cells, his, positions)
        found = positions >= 0
        return self._batch(ids[found], positions[found])

    def export(self) -> pa.RecordBatch:
        """All versions: `_key`, `_time`, values; grouped by key, times ascending."""
        return self._batch(*self._all_positions())

    def copy(self) -> VersionedSlice:
        """A frozen copy: the mutable arrays are copied, the append-only ones shared. It refuses inserts."""
        other = VersionedSlice(self.key_kind, self.schema)
        other._control[:] = self._control
        other._index = self._index.copy(other._control)
        other._arena = self._arena.copy(other._control)
        other._heaps = {c: heap.copy() for c, heap in self._heaps.items()}
        other._masked = self._masked
        other._frozen = True
        return other

    @property
    def keys(self) -> int:
        return len(self._index)

    @property
    def versions(self) -> int:
        return int(self._control[at.VERSIONS])

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        heaps = sum(heap.nbytes for heap in self._heaps.values())
        return self._index.nbytes + int(self._arena.cells.nbytes) + heaps

    def validate(self) -> None:
        """Check every invariant; slow, for tests."""
        self._index.validate()
        self._arena.validate(self._index.entries)
        assert self._arena.cells.shape[1] == self._layout.width + self._masked
        if self._heaps:
            assert len({heap.rows for heap in self._heaps.values()}) == 1
            _, positions = self._all_positions()
            refs = self._arena.cells[positions, self._layout.reference]
            assert len(np.unique(refs)) == self.versions, "no two versions share a heap row"
            assert ((refs >= 0) & (refs < self._heap_rows())).all()

    # Parts

    def _check(self, keys: Keys, other: Keys | NDArray[np.int64]) -> None:
        if keys.kind != self.key_kind:
            raise BadMessage(f"expected {self.key_kind} keys, got {keys.kind}")
        if len(other) != len(keys):
            raise BadMessage(f"{len(keys)} keys and {len(other)} times")

    def _reader(self) -> Reader:
        mask = self._layout.width if self._masked else -1
        return Reader(self._layout, self._arena.cells, mask, self._heaps)

    def _heap_rows(self) -> int:
        return next((heap.rows for heap in self._heaps.values()), 0)

    def _all_positions(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Entry and arena row of every version, in entry and time order."""
        count = self.keys
        begin, end = np.empty(count, np.int64), np.empty(count, np.int64)
        lookups.entry_ranges(self._index.entries, self._control, begin, end)
        positions = np.empty(self.versions, np.int64)
        lookups.expand(begin, end, np.empty(count + 1, np.int64), positions)
        return np.repeat(np.arange(count), end - begin), positions

    def _batch(self, ids: NDArray[np.int64], positions: NDArray[np.int64]) -> pa.RecordBatch:
        reader = self._reader()
        key = self._index.stored_keys().take(ids).to_arrow()
        columns = [key, reader.times(positions), *reader.gather(positions)]
        fields = [pa.field("_key", key.type), pa.field("_time", pa.int64()), *self.schema]
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))

    def _rewrite_heaps(self) -> None:
        """Make new heaps of what versions still refer to, when that is less than half."""
        if 2 * self.versions >= self._heap_rows():
            return
        _, positions = self._all_positions()
        refs = np.empty(len(positions), np.int64)
        lookups.gather_refs(self._arena.cells, self._layout.reference, positions, refs)
        heaps: dict[int, Heap] = {}
        for c, heap in self._heaps.items():
            heaps[c] = heap_for(heap.type)
            heaps[c].append(heap.take(refs))
        # All or none: references count for every heap alike.
        self._heaps = heaps
        compaction.renumber(self._index.entries, self._arena.cells, self._control, self._layout.reference)


def _clamped(time: int | None) -> int:
    """A time within int64. None is the smallest, below which nothing is."""
    return SMALLEST_TIME if time is None else max(SMALLEST_TIME, min(_LARGEST_TIME, time))
