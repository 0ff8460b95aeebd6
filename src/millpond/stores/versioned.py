"""The versioned store: one slice of a State, `key -> {(time, value)}`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.code.rules import FetchRule
from millpond.errors import BadMessage, BadOption, MessageTooLarge
from millpond.kernels import compaction, lookups
from millpond.kernels import control as at
from millpond.kernels.folding import NEVER
from millpond.kernels.versions import CLASS_BITS
from millpond.schema import KeyKind
from millpond.stores import views
from millpond.stores.answers import AGGREGATES, RULES, Reader, expanded, result_schema
from millpond.stores.arena import SMALLEST_TIME, Arena
from millpond.stores.budget import UNLIMITED, Budget
from millpond.stores.deltas import FrozenVersions
from millpond.stores.dirty import Dirty
from millpond.stores.heaps import Heap, heap_for
from millpond.stores.key_index import KeyIndex
from millpond.stores.keys import Keys
from millpond.stores.places import Places
from millpond.stores.ruleset import Ruleset, net_neighbours, returned
from millpond.stores.userrules import range_rule

__all__ = ["Ruleset", "VersionedSlice", "result_schema"]

_LARGEST_TIME = 2**63 - 1
# Values that the ranges of one batch of questions may hold: each question may ask for all versions of the same key.
RANGES_MAX = 1 << 22
# Below this many keys a slice is not made anew for those that are left.
_REBUILD_KEYS = 1024


class VersionedSlice:
    """One slice of a State.

    Not thread-safe: the owner serialises calls. Heavy loops release the GIL. Value arrays have exactly the types of
    the schema, and so have results. A call that raises on its arguments has changed nothing.
    """

    def __init__(self, key_kind: KeyKind, values: pa.Schema, rules: Ruleset | None = None) -> None:
        self.key_kind = key_kind
        self.schema = values
        self.rules = rules or Ruleset(values)
        self._layout = self.rules.layout
        self._control: NDArray[np.int64] = np.zeros(at.SIZE, np.int64)
        self._index = KeyIndex(key_kind, self._control)
        self._arena = Arena(self._layout.width, self._control)
        self._heaps: dict[int, Heap] = {
            c: heap_for(column.field.type)
            for c, column in enumerate(self._layout.columns)
            if column.kind == "heap"
        }
        # The oldest time at which an entry changed, while its values are folded anew.
        self._changed: NDArray[np.int64] = np.empty(0, np.int64)
        # Entries that a file does not hold as they are, and keys that were let go with their entries.
        self._dirty = Dirty()
        self._gone: list[Keys] = []
        self._masked = False
        self._frozen = False
        self._swept_from = SMALLEST_TIME
        self._sweep_cursor = 0
        self._sweep_left = 0
        # Nothing has come in since the last sweep ended.
        self._settled = False
        self._places: Places | None = None

    # Writing

    def insert(
        self,
        keys: Keys,
        times: NDArray[np.int64],
        values: Sequence[pa.Array],
        keep_from: int | None = None,
    ) -> None:
        """Add versions, in the order of the rows: at equal key and time the later row replaces or follows the earlier.

        `keep_from` = F lets the entries touched drop versions that no read at F or later can see.
        Where a user's rule runs out of memory or of stack, that is raised, and the slice is of no use any more.
        """
        self._check(keys, times)
        self._layout.check(values, len(keys), len(self.schema))
        if self._frozen:
            raise RuntimeError("a frozen copy takes no inserts")
        if len(keys) == 0:
            return
        self._settled = False
        times = views.plain(times)
        if not self._masked and self._layout.has_nulls(values):
            self._arena.widen()
            self._masked = True
        rows = self._layout.rows(times, values, self._heap_rows(), self._masked)
        for c, heap in self._heaps.items():
            # What is folded comes later.
            heap.append(values[c] if c < len(values) else pa.nulls(len(keys), heap.type))
        known = self.keys
        ids = self._index.assign(keys)
        if self._sweep_left:
            # A sweep under way passes the new entries, too, before it comes round to the first.
            self._sweep_left += self.keys - known
        self._dirty.fit(len(self._index.entries))
        compaction.mark(ids, self._dirty.flags)
        since, rules = clamped(keep_from), self.rules
        if rules.by_mask and since > SMALLEST_TIME:
            full = compaction.full_entries(ids, self._index.entries, self._arena.cells, since)
            # NumPy's sort, which a chosen order cannot slow down, as it can that of compiled code.
            self._retain(np.unique(full), since)
            since = SMALLEST_TIME
        self._arena.insert(
            ids, rows, rules.update.replaces, since, self.alive_from(since), self._index.entries
        )
        if rules.fold is not None:
            if len(self._changed) < len(self._index.entries):
                self._changed = np.full(len(self._index.entries), NEVER, np.int64)
            plan = rules.fold.plan(ids, times, self._changed, self._index.entries, self._arena.cells)
            rules.fold.run(self._arena.cells, self._heaps, *plan)
        if times.min() < self._swept_from:
            self._sweep_left = self.keys

    def trial(
        self,
        keys: Keys,
        times: NDArray[np.int64],
        values: Sequence[pa.Array],
        keep_from: int | None = None,
    ) -> None:
        """Run the update rule on all that `insert` would run it on: nothing changes, nothing is counted.

        Raises what `insert` would, such as a MemoryError. Under rules that always succeed it does nothing.
        """
        if self.rules.may_fail:
            self._check(keys, times)
            ids = np.unique(self._index.find(keys))
            self._part(ids[ids >= 0], self.rules.copy()).insert(keys, times, values, keep_from)

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
        self.clean()

    def sweep(self, keep_from: int, budget: int) -> bool:
        """Compact up to `budget` entries: of the versions below `keep_from` only those stay that the rule keeps.

        Moves on index growth too, and rewrites arena and heaps once more than half of them is dead, and the whole
        slice once more than half of its keys have no version left.
        True when every entry has been seen since `keep_from` last rose or a version below it came in, and no growth
        is under way.
        """
        keep_from = clamped(keep_from)
        if self.is_settled(keep_from):
            return True
        if keep_from > self._swept_from:
            self._swept_from = keep_from
            self._sweep_left = self.keys
        if self._sweep_left:
            step = min(budget, self._sweep_left)
            self._sweep_step(step)
            self._sweep_left -= step
            if self._sweep_left == 0:
                self._rebuild()
        settled = self._index.advance_growth(budget)
        self._arena.rewrite(self._index.entries)
        if self._heaps:
            self._rewrite_heaps()
        self._settled = settled and self._sweep_left == 0
        return self._settled

    def is_settled(self, keep_from: int) -> bool:
        """Whether a sweep would find nothing to do. It may be asked at any time, and counts for that moment."""
        return self._settled and keep_from <= self._swept_from

    def _sweep_step(self, budget: int) -> None:
        entries, since = self._index.entries, self._swept_from
        if not self.rules.by_mask:
            self._sweep_cursor = self._arena.sweep(
                entries, self._sweep_cursor, since, self.alive_from(since), budget, self._dirty.flags
            )
            return
        ids = (self._sweep_cursor + np.arange(budget)) % max(self.keys, 1)
        self._retain(ids, since)
        self._sweep_cursor = (self._sweep_cursor + budget) % max(self.keys, 1)

    def alive_from(self, since: int) -> int:
        """The oldest time whose values a read from `since` on can see, under a rule that lets them expire."""
        if self.rules.span == 0 or since == SMALLEST_TIME:
            return SMALLEST_TIME
        # One more than reads from `since` on can see: a snapshot is of the moment before.
        return max(since - self.rules.span, SMALLEST_TIME)

    def _retain(self, ids: NDArray[np.int64], since: int) -> None:
        """Of the versions below `since` of these entries keep those that the rule says."""
        if len(ids) == 0 or since == SMALLEST_TIME:
            return
        begin, end = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        cells, rules = self._arena.cells, self.rules
        total = compaction.ranges_below(ids, self._index.entries, cells, since, begin, end)
        offsets, positions = expanded(begin, end, total)
        reader = self._reader()
        if rules.keep is not None:
            kept, failures = reader.kept(rules.keep, begin, end, offsets)
            rules.compaction_failures += failures
        else:
            columns = reader.gather(positions)
            kept = net_neighbours(offsets, columns[0], columns[-1])
        if rules.span:
            kept[cells[positions, 0] < self.alive_from(since)] = 0
        self._arena.retain(ids, offsets, kept, self._index.entries, self._dirty.flags)

    def _rebuild(self) -> None:
        """Make the slice anew, without the keys that have no version, when they are more than half."""
        if self.keys < _REBUILD_KEYS:
            return
        begin, end = np.empty(self.keys, np.int64), np.empty(self.keys, np.int64)
        lookups.entry_ranges(self._index.entries, self._control, begin, end)
        if 2 * np.count_nonzero(begin == end) <= self.keys:
            return
        left, dirty = np.flatnonzero(begin < end), self._dirty.ids()
        # A file may still hold them.
        self._gone.append(self._index.stored_keys().take(dirty[begin[dirty] == end[dirty]]))
        fresh = self._part(left, self.rules)
        self._control, self._index, self._arena = fresh._control, fresh._index, fresh._arena  # noqa: SLF001 - its own class
        self._heaps, self._changed = fresh._heaps, fresh._changed  # noqa: SLF001
        self._dirty = self._dirty.only(left)
        self._dirty.fit(len(self._index.entries))
        self._sweep_cursor = 0

    # Reading

    def fetch(
        self,
        keys: Keys,
        lo: NDArray[np.int64] | None,
        hi: NDArray[np.int64],
        rule: FetchRule,
        budget: Budget = UNLIMITED,
    ) -> list[pa.Array]:
        """Answer one probe per row over its versions with `lo < time <= hi` (`lo` None: unbounded below).

        An array per column, of the types that `result_schema` says. An unknown key, or no version in range: null
        under `latest`, `as_of`, `total`, `smallest`, `largest` and a rule of one's own, [] under `values` and
        `neighbours`, 0 under `count`. What is larger than its question is claimed from the budget first.
        """
        if rule.name not in RULES:
            raise BadOption(f"no rule {rule.name!r}", hint=f"one of {', '.join(RULES)}", option="rule")
        self._check(keys, hi)
        hi = views.plain(hi)
        if lo is not None:
            self._check(keys, lo)
            lo = None if rule.name == "as_of" else views.plain(lo)
        # A walk asks once for many times, and says itself what has expired at each.
        if self.rules.span and rule.name != "changes":
            young = hi < SMALLEST_TIME + self.rules.span
            if young.any():
                return self._fetch_parts(keys, lo, hi, rule, young, budget)
            lo = self._born(lo, hi)
        return self._fetch(keys, lo, hi, rule, budget)

    def _born(self, lo: NDArray[np.int64] | None, hi: NDArray[np.int64]) -> NDArray[np.int64]:
        """The low bounds, raised to where values have expired by `hi`."""
        born = hi - self.rules.span
        return born if lo is None else np.maximum(lo, born)

    def _fetch_parts(
        self,
        keys: Keys,
        lo: NDArray[np.int64] | None,
        hi: NDArray[np.int64],
        rule: FetchRule,
        young: NDArray[np.bool_],
        budget: Budget,
    ) -> list[pa.Array]:
        """Near the beginning of time nothing can have expired: the bound below would be no time."""
        groups = [np.flatnonzero(young), np.flatnonzero(~young)]
        parts = []
        for group, spared in zip(groups, (True, False), strict=True):
            low = None if lo is None else lo[group]
            if not spared:
                low = self._born(low, hi[group])
            parts.append(self._fetch(keys.take(group), low, hi[group], rule, budget))
        order = pa.array(np.argsort(np.concatenate(groups), kind="stable"))
        return [pa.concat_arrays(columns).take(order) for columns in zip(*parts, strict=True)]

    def _fetch(
        self,
        keys: Keys,
        lo: NDArray[np.int64] | None,
        hi: NDArray[np.int64],
        rule: FetchRule,
        budget: Budget,
    ) -> list[pa.Array]:
        ids = self._index.find(keys)
        reader = self._reader(budget)
        if rule.name in ("latest", "as_of"):
            positions = np.empty(len(ids), np.int64)
            lookups.latest_at(ids, self._index.entries, self._arena.cells, hi, positions)
            if lo is not None:
                lookups.drop_until(positions, self._arena.cells, lo)
            return reader.folded(positions)
        begin, end = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        unbounded = np.empty(0, np.int64)
        if lo is None or len(lo) == 0:
            lo = unbounded
        total = lookups.ranges(ids, self._index.entries, self._arena.cells, lo, hi, begin, end)
        if rule.name == "count":
            return [pa.array(end - begin)]
        if total > RANGES_MAX and len(ids) > 1:
            raise MessageTooLarge(
                f"{len(ids)} questions are about {total} values",
                hint="ask for fewer rows at a time",
                size=total,
                limit=RANGES_MAX,
            )
        if rule.name == "values":
            return reader.lists(begin, end, total)
        if rule.name == "neighbours":
            return reader.neighbours(begin, end, total)
        if rule.name == "changes":
            return reader.changes(begin, end, total)
        if rule.code is not None:
            type_ = returned(rule)
            own = range_rule(rule.code, self.schema, self._layout, type_)
            return reader.made(own, type_, begin, end, total)
        return reader.aggregates(begin, end, total, AGGREGATES[rule.name])

    def latest(self, hi: int | None, keep_from: int | None = None) -> pa.RecordBatch:
        """The newest version with time <= `hi` (None: of all) of each key that has one: `_key`, `_time`, values.

        Of all there are just those that compaction from `keep_from` on leaves alive, whether it has come by or not. Under `edges` one row for each neighbour that is there.
        """
        count = self.keys
        ids = np.arange(count)
        his = np.full(count, _LARGEST_TIME if hi is None else clamped(hi), np.int64)
        span = self.rules.span
        ageing = bool(span) and hi is not None and clamped(hi) >= SMALLEST_TIME + span
        los = self._born(None, his) if ageing else None
        if span and hi is None and self.alive_from(clamped(keep_from)) > SMALLEST_TIME:
            los = np.full(count, self.alive_from(clamped(keep_from)) - 1, np.int64)
        reader = self._reader()
        if self.rules.update.name == "edges":
            begin, end = np.empty(count, np.int64), np.empty(count, np.int64)
            lo = np.empty(0, np.int64) if los is None else los
            total = lookups.ranges(ids, self._index.entries, self._arena.cells, lo, his, begin, end)
            offsets, positions = reader.net(begin, end, total)
            return self._batch(np.repeat(ids, np.diff(offsets)), positions, reader.gather(positions))
        positions = np.empty(count, np.int64)
        lookups.latest_at(ids, self._index.entries, self._arena.cells, his, positions)
        if los is not None:
            lookups.drop_until(positions, self._arena.cells, los)
        found = positions >= 0
        positions = positions[found]
        return self._batch(ids[found], positions, reader.folded(positions))

    def export(self) -> pa.RecordBatch:
        """All versions: `_key`, `_time`, values; grouped by key, times ascending."""
        ids, positions = self._all_positions()
        return self._frozen_versions(self._index.stored_keys(), ids, positions, self._reader()).export()

    @property
    def dirty_share(self) -> float:
        """How much of it, of 1, has changed since it was last clean."""
        ids = self._dirty.ids()
        changed = int((self._index.entries[ids, 1] >> CLASS_BITS).sum()) + len(ids)
        return changed / (self.versions + self.keys) if self.keys else 0.0

    def delta(self) -> FrozenVersions:
        """All versions of keys that have changed since it was last clean, and which have none any more."""
        ids = self._dirty.ids()
        begin, end = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        every, until = np.empty(0, np.int64), np.full(len(ids), _LARGEST_TIME)
        total = lookups.ranges(ids, self._index.entries, self._arena.cells, every, until, begin, end)
        offsets, positions = expanded(begin, end, total)
        cells = self._arena.cells.take(positions, axis=0)
        reader = self._reader(cells=cells, heaps={c: heap.copy() for c, heap in self._heaps.items()})
        keys = self._index.stored_keys()
        # A key that came again has an entry again.
        gone = [*(each.take(np.flatnonzero(self._index.find(each) < 0)) for each in self._gone)]
        gone.append(keys.take(ids[begin == end]))
        frozen = self._frozen_versions(keys, np.repeat(ids, np.diff(offsets)), np.arange(total), reader)
        return frozen._replace(gone=gone)

    def clean(self) -> None:
        """All that there is is saved."""
        self._dirty.clear()
        self._gone.clear()

    def _frozen_versions(
        self, keys: Keys, ids: NDArray[np.int64], positions: NDArray[np.int64], reader: Reader
    ) -> FrozenVersions:
        return FrozenVersions(self.schema, keys, ids, positions, reader, self.rules.fold is not None)

    def copy(self) -> VersionedSlice:
        """A frozen copy: the mutable arrays are copied, the append-only ones shared. It refuses inserts."""
        other = VersionedSlice(self.key_kind, self.schema, self.rules)
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
        self._arena.validate(self._index.entries, self.rules.update.replaces)
        assert self._arena.cells.shape[1] == self._layout.width + self._masked
        assert not self._dirty.flags[self.keys :].any(), "what is dirty is there"
        if self._heaps:
            assert len({heap.rows for heap in self._heaps.values()}) == 1
            _, positions = self._all_positions()
            refs = self._arena.cells[positions, self._layout.reference]
            assert len(np.unique(refs)) == self.versions, "no two versions share a heap row"
            assert ((refs >= 0) & (refs < self._heap_rows())).all()

    # Several slices at once, by `stores.together`

    @property
    def masked(self) -> bool:
        """Whether its rows have a null mask."""
        return self._masked

    @property
    def address(self) -> int:
        """Where its `Places` are, until anything else is done to it."""
        places, index, arena, flags = self._places, self._index, self._arena, self._dirty.flags
        if places is None or not places.are_of(index, arena, flags):
            self._places = places = Places(index, arena, flags)
        return places.address

    def go_on(self, ids: NDArray[np.int64], rows: NDArray[np.int64], done: int, since: int) -> None:
        """Places the rows behind the first `done`, which a kernel had no room for; `rows` are those of the arena."""
        replaces, alive_from = self.rules.update.replaces, self.alive_from(since)
        self._arena.insert(ids, rows, replaces, since, alive_from, self._index.entries, done)

    def took(self, new: int, smallest: int) -> None:
        """What `insert` has left to do when a kernel has made `new` keys, and all rows have their place."""
        self._settled = False
        if new:
            self._index.end_growth()
            if self._sweep_left:
                # A sweep under way passes the new entries, too, before it comes round to the first.
                self._sweep_left += new
        if smallest < self._swept_from:
            self._sweep_left = self.keys

    # Parts

    def _check(self, keys: Keys, other: Keys | NDArray[np.int64]) -> None:
        if keys.kind != self.key_kind:
            raise BadMessage(f"expected {self.key_kind} keys, got {keys.kind}")
        if len(other) != len(keys):
            raise BadMessage(f"{len(keys)} keys and {len(other)} times")

    def _reader(
        self,
        budget: Budget = UNLIMITED,
        cells: NDArray[np.int64] | None = None,
        heaps: Mapping[int, Heap] | None = None,
    ) -> Reader:
        """Of what is there, or of what was copied."""
        mask = self._layout.width if self._masked else -1
        cells, heaps = self._arena.cells if cells is None else cells, self._heaps if heaps is None else heaps
        return Reader(self._layout, len(self.schema), cells, mask, heaps, budget)

    def _part(self, ids: NDArray[np.int64], rules: Ruleset) -> VersionedSlice:
        """A slice of just these entries, with what was folded: no rule runs."""
        part = VersionedSlice(self.key_kind, self.schema, rules)
        begin, end = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        every, until = np.empty(0, np.int64), np.full(len(ids), _LARGEST_TIME)
        total = lookups.ranges(ids, self._index.entries, self._arena.cells, every, until, begin, end)
        offsets, positions = expanded(begin, end, total)
        rows = self._arena.cells[positions]
        if self._masked:
            part._arena.widen()
            part._masked = True
        if self._heaps:
            for c, heap in self._heaps.items():
                part._heaps[c].append(heap.take(rows[:, self._layout.reference]))
            rows[:, self._layout.reference] = np.arange(total)
        keys = self._index.stored_keys().take(np.repeat(ids, np.diff(offsets)))
        part._index.reserve(len(ids), 0)
        part._arena.reserve(total)
        part._arena.insert(
            part._index.assign(keys), rows, False, SMALLEST_TIME, SMALLEST_TIME, part._index.entries
        )
        return part

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

    def _batch(
        self, ids: NDArray[np.int64], positions: NDArray[np.int64], values: list[pa.Array]
    ) -> pa.RecordBatch:
        key = self._index.stored_keys().take(ids).to_arrow()
        columns = [key, self._reader().times(positions), *values]
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


def clamped(time: int | None) -> int:
    """A time within int64. None is the smallest, below which nothing is."""
    return SMALLEST_TIME if time is None else max(SMALLEST_TIME, min(_LARGEST_TIME, time))
