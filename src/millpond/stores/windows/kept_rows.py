"""What the last epochs fired, where memory has no room for it: in scratch files, read piece by piece.

Nothing here is durable: what a turn gave comes back by a replay of the log of epochs, or from a snapshot.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import pyarrow as pa

from millpond.stores.outputs import Outputs, Stored
from millpond.stores.windows.cellruns import CellRuns, Run

PIECE_BYTES = 1 << 20
"""What is written and read at once, about."""


class RowsOnDisk:
    """Rows of a turn in a file, and those behind them that the disk had no room for.

    The file goes when nobody has a use for the rows any more: whoever reads them may take its time.
    """

    def __init__(self, runs: CellRuns, run: Run, rest: list[pa.Table], schema: pa.Schema) -> None:
        self.schema = schema
        self.num_rows = run.rows + sum(int(table.num_rows) for table in rest)
        self.memory_bytes = sum(int(table.nbytes) for table in rest)
        self.nbytes = run.nbytes + self.memory_bytes
        self._runs = runs
        self._run = run
        self._rest = rest
        weakref.finalize(self, runs.drop, [run]).atexit = False

    def __len__(self) -> int:
        return self.num_rows

    def batches(self) -> Iterator[pa.RecordBatch]:
        for part in range(len(self._run.checksums)):
            yield self._runs.read(self._run, part, self.schema)
        for table in self._rest:
            yield from table.to_batches()

    def table(self) -> pa.Table:
        return pa.Table.from_batches(self.batches(), self.schema)


class SpilledOutputs(Outputs):
    """`Outputs` that can leave memory. One caller at a time, but for who reads what it was given."""

    def __init__(self, runs: CellRuns) -> None:
        super().__init__()
        self._runs = runs

    def collect(self, tables: Iterator[pa.Table], schema: pa.Schema) -> pa.Table | Stored:
        """All of these as one: one stays in memory, and several go to disk, one by one as they are made."""
        first = next(tables, None)
        second = next(tables, None)
        if first is None or second is None:
            return schema.empty_table() if first is None else first
        return self._written(_chained(first, second, tables), schema)

    def set_aside(self, rows: pa.Table) -> pa.Table | Stored:
        return self._written([rows], rows.schema) if len(rows) else rows

    def spill(self, nbytes: int) -> int:
        moved = 0
        for writer, turn, rows in self.in_memory():
            if moved >= nbytes:
                break
            stored = self._written([rows], rows.schema)
            moved += rows.nbytes - stored.memory_bytes
            self.replace(writer, turn, stored)
        return moved

    def _written(self, tables: Iterable[pa.Table], schema: pa.Schema) -> RowsOnDisk:
        writing = self._runs.begin()
        rest: list[pa.Table] = []
        for table in tables:
            done = 0
            try:
                rows = max(1, table.num_rows * PIECE_BYTES // max(table.nbytes, 1))
                # The pieces of a table may be smaller than one is meant to be.
                for start in range(0, table.num_rows if not rest else 0, rows):
                    (batch,) = table.slice(start, rows).combine_chunks().to_batches()
                    writing.add(batch)
                    done = start + batch.num_rows
            except OSError:
                pass  # a disk that is full is no reason to fail: memory has to do
            if done < table.num_rows:
                rest.append(table.slice(done))
        return RowsOnDisk(self._runs, writing.done(), rest, schema)


def _chained(first: pa.Table, second: pa.Table, others: Iterator[pa.Table]) -> Iterator[pa.Table]:
    yield first
    yield second
    yield from others
