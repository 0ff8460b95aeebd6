"""Memory that the rows and cells of all windows of a container share. Over it, they go to scratch files on its disk.

Nothing there is durable: they come back from the log of epochs, and whoever starts begins with an empty directory.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Protocol

import pyarrow as pa

from millpond.durable.files import Files, remove_tree
from millpond.errors import CorruptFile, OutOfMemory
from millpond.schema import KEY
from millpond.stores.windows.aligned import AlignedRows
from millpond.stores.windows.cellruns import CellRuns
from millpond.stores.windows.kept_rows import SpilledOutputs
from millpond.stores.windows.panes import PaneStore
from millpond.stores.windows.rowlog import InMemory, RowLog
from millpond.stores.windows.sessions import SessionCells
from millpond.stores.windows.shape import WindowShape
from millpond.stores.windows.unaligned import UnalignedRows

RELIEVED_SHARE = 0.8
"""Of the budget, what is left in memory by whoever has to make room: so that not every epoch has to."""


WORTH_BYTES = 256 << 10
"""What is worth to be written when memory is short: of less, each epoch would write a little."""
STAYING_BYTES_MIN = 1 << 20
"""What may be in memory that cannot leave it, however small the budget is; else all of that."""
SPARE_SHARE = 0.5
"""Of what cannot leave memory, what must be free for that to be more than the budget: its tables grow by copies."""
MOVABLE_SHARE = 0.25
"""Of the budget, what rows have that can leave memory, however much cannot."""


class Kept(Protocol):
    """What is open in a slice: what of it can leave memory, and what cannot."""

    @property
    def spillables(self) -> Sequence[InMemory]: ...

    @property
    def beside_bytes(self) -> int:
        """In memory, and not in any of those."""

    @property
    def staying_bytes(self) -> int:
        """In memory, there or in those, in any case."""


class Spilling:
    """Gives out logs of rows and stores of cells, and keeps count of them. Each has one user at a time; this has many."""

    def __init__(
        self,
        files: Files,
        directory: str,
        budget: int,
        is_short: Callable[[], bool] = lambda: False,
        *,
        most: int = 0,
        spare: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """What cannot leave memory may be up to `most` bytes, where `spare`, the bytes that nothing takes, allows it."""
        self.budget = budget
        self._most = most
        self._spare = spare
        self._is_short = is_short
        self._files = files
        self._directory = directory
        self._numbers = count()
        self._lock = threading.Lock()
        self._sizes: weakref.WeakKeyDictionary[InMemory, int] = weakref.WeakKeyDictionary()
        self._beside: weakref.WeakKeyDictionary[Kept, int] = weakref.WeakKeyDictionary()
        self._staying: weakref.WeakKeyDictionary[Kept, int] = weakref.WeakKeyDictionary()
        remove_tree(files, directory)

    def new_rows(self, schema: pa.Schema, pattern: str) -> RowLog:
        """A log of rows of that schema, for windows that are read by that pattern; its files go with it."""
        directory = self._new_directory()
        log: RowLog
        if pattern == "aar":
            log = AlignedRows(schema, self._files, directory, by_key=schema.names[0] == KEY)
        else:
            log = UnalignedRows(schema, self._files, directory)
        weakref.finalize(log, remove_tree, self._files, directory).atexit = False
        return log

    def new_cells(self, shape: WindowShape, slices: int = 1) -> PaneStore | SessionCells:
        """Windows of that shape, whose aggregates are cells; their files go with them."""
        directory = self._new_directory()
        runs = CellRuns(self._files, directory)
        weakref.finalize(runs, remove_tree, self._files, directory).atexit = False
        return SessionCells(shape, slices, runs) if shape.window.kind == "session" else PaneStore(shape, runs)

    def new_outputs(self) -> SpilledOutputs:
        """What epochs gave; its files go with it."""
        directory = self._new_directory()
        runs = CellRuns(self._files, directory)
        weakref.finalize(runs, remove_tree, self._files, directory).atexit = False
        return SpilledOutputs(runs)

    def _new_directory(self) -> str:
        return os.path.join(self._directory, f"{next(self._numbers):06d}")

    def relieve(self, store: InMemory) -> None:
        """Whoever has just changed one says so: if all together are over the budget, this one goes to disk, as far as it takes.

        If the process is short of memory, whatever takes it, all of this one does that is worth a file.
        """
        over = self._note(store)
        if store.memory_bytes > WORTH_BYTES and self._is_short():
            over = store.memory_bytes
        if over > 0:
            store.spill(over)
            self._note(store)

    def make_room(self, kept: Kept) -> None:
        """`relieve` for all of it. A disk that is full is no reason to fail, memory has to do; damage that is found there is."""
        self.count_what_stays(kept)
        for store in kept.spillables:
            try:
                self.relieve(store)
            except CorruptFile:
                raise
            except OSError:
                continue

    def count_what_stays(self, kept: Kept) -> None:
        with self._lock:
            self._beside[kept] = kept.beside_bytes
            self._staying[kept] = kept.staying_bytes

    def check_room(self, what: str, slices: Iterable[Kept]) -> None:
        """OutOfMemory where what cannot leave memory takes too much of it, and some of that is of these slices."""
        own = list(slices)
        with self._lock:
            used = sum(self._staying.values())
            mine = sum(self._staying.get(kept, 0) for kept in own)
        limit = max(self.budget, STAYING_BYTES_MIN)
        if used <= limit or not mine:
            return
        spare = max(0, int(self._spare()))
        if used > self._most or spare < SPARE_SHARE * used:
            raise OutOfMemory(
                f"what open windows keep in memory in any case takes {used:,} bytes in a container, which has {limit:,}"
                f" for it, and {spare:,} to spare; {what} has {mine:,} of them, and takes no more rows",
                hint="open the pond with a larger memory=, or on more containers; or keep less open: shorter gaps, within=,"
                " between= or lateness=. Epochs without rows, and finish(), still fire",
                what=what,
            )

    def _note(self, store: InMemory) -> int:
        """By how much all are over what they may take."""
        with self._lock:
            self._sizes[store] = store.memory_bytes
            total = sum(self._sizes.values()) + sum(self._beside.values())
            budget = max(self.budget, sum(self._staying.values()) + int(self.budget * MOVABLE_SHARE))
            return total - int(budget * RELIEVED_SHARE) if total > budget else 0

    @property
    def memory_bytes(self) -> int:
        with self._lock:
            return sum(self._sizes.values()) + sum(self._beside.values())
