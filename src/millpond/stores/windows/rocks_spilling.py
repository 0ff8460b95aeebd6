"""Windows over RocksDB, in the place of stores of our own: for benchmarks, and for tests that compare both."""

from __future__ import annotations

from typing import Any, Literal

import pyarrow as pa

from millpond.durable.files import Files
from millpond.stores.windows.rocks import RocksRows
from millpond.stores.windows.rocks_cells import RocksCells, RocksPanes, RocksSessions
from millpond.stores.windows.rocks_database import RocksMemory
from millpond.stores.windows.rowlog import InMemory, RowLog
from millpond.stores.windows.shape import WindowShape
from millpond.stores.windows.spilling import Spilling


class RocksSpilling(Spilling):
    """Gives out the same as `Spilling`, over databases that share one cache and its write buffers: the budget."""

    def __init__(
        self, files: Files, directory: str, budget: int, compaction: Literal["level", "universal"] = "level"
    ) -> None:
        super().__init__(files, directory, budget)
        self._memory = RocksMemory(budget, shared=True)
        self._compaction = compaction

    def options(self) -> dict[str, Any]:
        """How databases are set up, to be printed beside figures."""
        return self._memory.options(compaction=self._compaction)

    def loops(self) -> dict[str, float]:
        """What calls for each key took so far, in all databases: see `RocksMemory`."""
        return dict(self._memory.loops)

    def new_rows(self, schema: pa.Schema, pattern: str) -> RowLog:
        return RocksRows(schema, self._new_directory(), compaction=self._compaction, memory=self._memory)

    def new_cells(self, shape: WindowShape, slices: int = 1) -> RocksPanes | RocksSessions:  # type: ignore[override]
        assert shape.layout is not None
        cells = RocksCells(shape.layout, self._new_directory(), self._memory, self._compaction)
        return RocksSessions(shape, cells) if shape.window.kind == "session" else RocksPanes(shape, cells)

    def relieve(self, store: InMemory) -> None:
        """A database knows by itself when to write."""
