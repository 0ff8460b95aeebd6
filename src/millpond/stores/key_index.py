"""The keys of a slice and their entries: kernels.index with room that grows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels import control as at
from millpond.kernels import index, slot_hashing
from millpond.schema import KeyKind
from millpond.stores import views
from millpond.stores.growing import grown
from millpond.stores.keys import Keys

_FIRST_CAPACITY = 16
_NO_TABLE: NDArray[np.int64] = np.empty((0, 2), np.int64)


class KeyIndex:
    """Key -> entry number, in order of first appearance. `entries` rows belong to the version arena.

    Stored keys are append-only, so a frozen copy shares them.
    """

    def __init__(self, kind: KeyKind, control: NDArray[np.int64]) -> None:
        self.kind = kind
        self.control = control
        self.entries: NDArray[np.int64] = np.empty((0, 2), np.int64)
        self.table: NDArray[np.int64] = np.zeros((_FIRST_CAPACITY, 2), np.int64)
        self.old = _NO_TABLE
        self._longs: NDArray[np.int64] = np.empty(0, np.int64)
        self._offsets: NDArray[np.int64] = np.zeros(1, np.int64)
        self._data: NDArray[np.uint8] = views.NO_BYTES

    def __len__(self) -> int:
        return int(self.control[at.ENTRIES])

    def find(self, keys: Keys) -> NDArray[np.int64]:
        """The entry of each key, -1 for one that is not there."""
        return self._find(keys, _slot_hashes(keys))

    def _find(self, keys: Keys, hashes: NDArray[np.int64]) -> NDArray[np.int64]:
        out = np.empty(len(keys), np.int64)
        if self.kind == "i64":
            index.find(hashes, self.table, self.old, out)
        else:
            index.find_bytes(
                keys.offsets, keys.data, hashes, self.table, self.old, self._offsets, self._data, out
            )
        return out

    def assign(self, keys: Keys) -> NDArray[np.int64]:
        """The entry of each key, made where there is none."""
        hashes = _slot_hashes(keys)
        out = self._find(keys, hashes)
        done = 0
        while True:
            if self.kind == "i64":
                done = index.create(
                    keys.longs,
                    hashes,
                    done,
                    self.table,
                    self.old,
                    self._longs,
                    self.entries,
                    self.control,
                    out,
                )
            else:
                done = index.create_bytes(
                    keys.offsets, keys.data, hashes, done, self.table, self.old,
                    self._offsets, self._data, self.entries, self.control, out,
                )  # fmt: skip
            if done == len(keys):
                break
            self._make_room(
                1, int(keys.offsets[done + 1] - keys.offsets[done]) if self.kind == "bytes" else 0
            )
        self.end_growth()
        return out

    def end_growth(self) -> None:
        """Lets go of the old table, if all of it has been moved."""
        if len(self.old) and self.control[at.MIGRATED] == len(self.old):
            self.old = _NO_TABLE

    def reserve(self, keys: int, size: int) -> None:
        """Room for that many more keys and bytes, for a bulk load into an empty index."""
        self._make_room(keys, size)
        capacity = _FIRST_CAPACITY
        while capacity < 2 * keys:
            capacity *= 2
        self.table = np.zeros((capacity, 2), np.int64)

    def advance_growth(self, budget: int) -> bool:
        """Move up to `budget` slots of a growth under way. True when none is left."""
        if len(self.old):
            index.migrate(self.table, self.old, self.control, budget)
            self.end_growth()
        return len(self.old) == 0

    @property
    def key_arrays(self) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """The stored keys, if they are longs, else their offsets and their bytes; with room for more."""
        return (self._longs if self.kind == "i64" else self._offsets), self._data

    def stored_keys(self) -> Keys:
        """All keys, in entry order. Shares memory: to be read at once, or from a frozen copy."""
        count = len(self)
        if self.kind == "i64":
            return Keys("i64", longs=self._longs[:count])
        return Keys("bytes", offsets=self._offsets[: count + 1], data=self._data)

    def copy(self, control: NDArray[np.int64]) -> KeyIndex:
        """An index with the same keys, to be read only."""
        other = KeyIndex(self.kind, control)
        other.entries = self.entries[: len(self)].copy()
        other.table, other.old = self.table.copy(), self.old.copy()
        other._longs, other._offsets, other._data = self._longs, self._offsets, self._data
        return other

    @property
    def nbytes(self) -> int:
        arrays = (self.entries, self.table, self.old, self._longs, self._offsets, self._data)
        return sum(int(array.nbytes) for array in arrays)

    def validate(self) -> None:
        """Check every invariant; slow."""
        count, capacity = len(self), len(self.table)
        assert capacity & (capacity - 1) == 0
        assert 2 * count <= capacity
        assert count <= len(self.entries)
        migrated = int(self.control[at.MIGRATED])
        assert len(self.old) == 0 or migrated < len(self.old)
        used = self.table[self.table[:, 1] != 0]
        waiting = self.old[migrated:][self.old[migrated:, 1] != 0] if len(self.old) else _NO_TABLE
        entries = np.concatenate([used[:, 1], waiting[:, 1]]) - 1
        assert np.array_equal(np.sort(entries), np.arange(count)), "each entry has one slot"
        keys = self.stored_keys()
        hashes = np.concatenate([used[:, 0], waiting[:, 0]])
        assert np.array_equal(hashes, _slot_hashes(keys)[entries])
        assert np.array_equal(self.find(keys), np.arange(count)), "each key is found where it is"

    def _make_room(self, keys: int, size: int) -> None:
        count = len(self)
        self.entries = grown(self.entries, count, count + keys)
        if self.kind == "i64":
            self._longs = grown(self._longs, count, len(self.entries))
        else:
            self._offsets = grown(self._offsets, count + 1, len(self.entries) + 1)
            used = int(self._offsets[count])
            self._data = grown(self._data, used, used + size)
        if 2 * count >= len(self.table):
            # Drained in time by design; nothing may be left behind in any case.
            self.advance_growth(len(self.old))
            larger = np.zeros((2 * len(self.table), 2), np.int64)  # first: memory may run out
            self.old, self.table = self.table, larger
            self.control[at.MIGRATED] = 0


def _slot_hashes(keys: Keys) -> NDArray[np.int64]:
    """Of these keys, in this process: those that slices are told by, whoever chose the keys knows too."""
    if keys.kind == "i64":
        return slot_hashing.hash_longs(keys.longs)
    return slot_hashing.hash_bytes(keys.offsets, keys.data)
