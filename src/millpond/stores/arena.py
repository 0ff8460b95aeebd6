"""The versions of a slice: kernels.versions and kernels.compaction with room that grows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels import compaction, versions
from millpond.kernels import control as at
from millpond.stores.growing import grown

SMALLEST_TIME = compaction.SMALLEST_TIME
# Below this many rows a rewrite is not worth its while.
_REWRITE_ROWS = 1024
# Versions that a batch may move out of the way of its rows, one by one, before the rest of it is sorted and merged.
MOVES_PER_ROW = 16
MOVES = 4096


class Arena:
    """Blocks of versions, one per entry of the index that shares `control`."""

    def __init__(self, width: int, control: NDArray[np.int64]) -> None:
        self.control = control
        self.cells: NDArray[np.int64] = np.zeros((versions.PADDING, width), np.int64)
        self.heads: NDArray[np.int64] = np.full(versions.CLASSES, -1, np.int64)

    def insert(
        self,
        ids: NDArray[np.int64],
        rows: NDArray[np.int64],
        replaces: bool,
        keep_from: int,
        alive_from: int,
        entries: NDArray[np.int64],
        done: int = 0,
    ) -> None:
        """Puts the rows under their entries; the first `done` of them are there."""
        moved_max = int(self.control[at.ROWS_MOVED]) + MOVES_PER_ROW * len(ids) + MOVES
        while True:
            done = versions.insert(
                ids,
                rows,
                done,
                replaces,
                keep_from,
                alive_from,
                moved_max,
                entries,
                self.cells,
                self.heads,
                self.control,
            )
            if done == len(ids):
                return
            if self.control[at.ROWS_MOVED] > moved_max:
                break
            # The largest block there is may have to double.
            self.reserve(2 << (int(entries[ids[done], 1]) & versions.CLASS_MASK))
        order = done + np.lexsort((rows[done:, 0], ids[done:]))
        done = 0
        while True:
            done = versions.merge(
                ids,
                rows,
                order,
                done,
                replaces,
                keep_from,
                alive_from,
                entries,
                self.cells,
                self.heads,
                self.control,
            )
            if done == len(order):
                return
            length = int(entries[ids[order[done]], 1]) >> versions.CLASS_BITS
            self.reserve(2 * (length + len(order) - done))

    def reserve(self, rows: int) -> None:
        """Room for blocks of that many rows at the unused end."""
        used = int(self.control[at.USED])
        self.cells = grown(self.cells, used, used + rows + versions.PADDING)

    def sweep(
        self,
        entries: NDArray[np.int64],
        cursor: int,
        keep_from: int,
        alive_from: int,
        budget: int,
        dirty: NDArray[np.uint8],
    ) -> int:
        return int(
            compaction.sweep(
                entries, self.cells, self.heads, self.control, cursor, keep_from, alive_from, budget, dirty
            )
        )

    def retain(
        self,
        ids: NDArray[np.int64],
        offsets: NDArray[np.int64],
        kept: NDArray[np.uint8],
        entries: NDArray[np.int64],
        dirty: NDArray[np.uint8],
    ) -> None:
        compaction.retain(ids, offsets, kept, entries, self.cells, self.heads, self.control, dirty)

    def rewrite(self, entries: NDArray[np.int64]) -> None:
        """Give back the memory of free blocks, when they are more than half of all."""
        used, free = int(self.control[at.USED]), int(self.control[at.FREE])
        if used < _REWRITE_ROWS or 2 * free <= used:
            return
        to = np.empty((used - free + versions.PADDING, self.cells.shape[1]), np.int64)
        compaction.rewrite(entries, self.cells, to, self.control)
        self.cells = to
        self.heads[:] = -1

    def widen(self) -> None:
        """Add a cell of 0 to every row."""
        rows, width = self.cells.shape
        cells = np.empty((rows, width + 1), np.int64)
        cells[:, :width] = self.cells
        cells[:, width] = 0
        self.cells = cells

    def copy(self, control: NDArray[np.int64]) -> Arena:
        other = Arena(self.cells.shape[1], control)
        other.cells = self.cells[: int(control[at.USED]) + versions.PADDING].copy()
        other.heads = self.heads.copy()
        return other

    def validate(self, entries: NDArray[np.int64], replaces: bool = True) -> None:
        """Check every invariant; slow."""
        used = int(self.control[at.USED])
        assert used + versions.PADDING <= len(self.cells)
        owned = np.zeros(used, bool)
        held = 0
        for start, meta in entries[: int(self.control[at.ENTRIES])].tolist():
            length, rows = meta >> versions.CLASS_BITS, 1 << (meta & versions.CLASS_MASK)
            assert start >= 0
            assert 0 <= length <= rows
            assert not owned[start : start + rows].any(), "blocks do not overlap"
            owned[start : start + rows] = True
            times = self.cells[start : start + length, 0]
            assert (times[:-1] < times[1:] if replaces else times[:-1] <= times[1:]).all(), "times ascend"
            held += length
        assert held == self.control[at.VERSIONS]
        free = 0
        for size_class, head in enumerate(self.heads.tolist()):
            block, rows = head, 1 << size_class
            while block >= 0:
                assert not owned[block : block + rows].any(), "a free block has no owner"
                owned[block : block + rows] = True
                free += rows
                block = int(self.cells[block, 0])
        assert free == self.control[at.FREE]
        assert owned.all(), "every row is in a block or free"
