"""The keys of a table and the rows that they have: kernels.rows with room that grows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels import index, rows, slot_hashing
from millpond.stores import views
from millpond.stores.growing import grown

Longs = NDArray[np.int64]

_FIRST_CAPACITY = 16
_NO_SLOTS: Longs = np.empty((0, 2), np.int64)


class RowIndex:
    """Key -> row number, in order of first appearance. A key is a row of int64[n, parts]."""

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.control: Longs = np.zeros(1, np.int64)
        self.slots: Longs = np.zeros((_FIRST_CAPACITY, 2), np.int64)
        self.room: Longs = np.empty((0, parts), np.int64)  # the keys, and place for more

    def __len__(self) -> int:
        return int(self.control[rows.ROWS])

    @property
    def keys(self) -> Longs:
        """All keys, by row. Shares memory."""
        return self.room[: len(self)]

    def find(self, keys: Longs) -> Longs:
        """The row of each key, -1 for one that has none."""
        return self._find(keys, self._hashes(keys))

    def _find(self, keys: Longs, hashes: Longs) -> Longs:
        out = np.empty(len(keys), np.int64)
        if self.parts == 1:
            index.find(hashes, self.slots, _NO_SLOTS, out)
        else:
            rows.find_rows(keys, hashes, self.slots, self.room, out)
        return out

    def assign(self, keys: Longs) -> Longs:
        """The row of each key, made where there is none."""
        hashes = self._hashes(keys)
        out = self._find(keys, hashes)
        done = 0
        while True:
            done = rows.make_rows(keys, hashes, done, self.slots, self.room, self.control, out)
            if done == len(keys):
                return out
            self.reserve(1)

    @property
    def has_room(self) -> bool:
        """For one more key."""
        return len(self) < len(self.room) and 2 * len(self) < len(self.slots)

    def reserve(self, count: int) -> None:
        """Room for that many more keys. Where memory runs out, nothing has changed."""
        used = len(self)
        self.room = grown(self.room, used, used + count)
        capacity = len(self.slots)
        while 2 * (used + count - 1) >= capacity:
            capacity *= 2
        if capacity > len(self.slots):
            larger = np.zeros((capacity, 2), np.int64)
            rows.move(self.slots, larger)
            self.slots = larger

    def copy(self) -> RowIndex:
        """The same keys, to be read only."""
        other = RowIndex(self.parts)
        other.control, other.slots, other.room = self.control.copy(), self.slots.copy(), self.room
        return other

    @property
    def nbytes(self) -> int:
        return int(self.slots.nbytes + self.room.nbytes)

    def validate(self) -> None:
        """Check every invariant; slow."""
        count, capacity = len(self), len(self.slots)
        assert capacity & (capacity - 1) == 0
        assert 2 * count <= capacity
        assert count <= len(self.room)
        used = self.slots[self.slots[:, 1] != 0]
        assert np.array_equal(np.sort(used[:, 1] - 1), np.arange(count)), "each row has one slot"
        assert np.array_equal(used[:, 0], self._hashes(views.plain(self.keys))[used[:, 1] - 1])
        assert np.array_equal(self.find(views.plain(self.keys)), np.arange(count)), (
            "each key is found where it is"
        )

    def _hashes(self, keys: Longs) -> Longs:
        if self.parts == 1:
            return slot_hashing.hash_longs(keys.reshape(-1))
        out = np.empty(len(keys), np.uint64)
        rows.hash_keys(keys.view(np.uint64), slot_hashing.SECRET, out)
        return out.view(np.int64)
