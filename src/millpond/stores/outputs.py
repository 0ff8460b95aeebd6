"""What epochs gave back: kept while their query may run them again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol, Self

import pyarrow as pa

from millpond.errors import OutputsGone
from millpond.wire.base import Epoch, Turn, operator_of

# The newest two turns of a writer, and more of them while they are small.
KEPT = (2, 64)
BYTES_MAX = 64 << 20
# Of one operator, so many queries may run their epochs again: all that may share its name.
QUERIES_KEPT = 256
# What goes into one batch of an answer: Arrow Flight sends none of 2 GiB.
BATCH_BYTES = 64 << 20
# Of what a turn gives in a slice, what is made at once; of more, all goes to disk.
MADE_BYTES = 4 << 20


class Stored(Protocol):
    """What a turn gave, where it is not in memory, or not all of it."""

    schema: pa.Schema
    num_rows: int
    nbytes: int
    memory_bytes: int

    def __len__(self) -> int: ...

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Read when they are asked for."""

    def table(self) -> pa.Table: ...


class _Kept(NamedTuple):
    """What a turn gave, and its size, which takes time to find out."""

    rows: pa.Table | Stored
    nbytes: int

    @classmethod
    def of(cls, rows: pa.Table | Stored) -> Self:
        return cls(rows, rows.nbytes)

    @property
    def table(self) -> pa.Table:
        return self.rows if isinstance(self.rows, pa.Table) else self.rows.table()


class Outputs:
    """Tables by writer and turn. The writer that was heard of last comes last."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[Turn, _Kept]] = {}
        # Those that came since all were last clean.
        self._new: set[tuple[str, Turn]] = set()

    def keep(self, writer: str, turn: Turn, rows: pa.Table | Stored) -> None:
        operator = operator_of(writer)
        others = [other for other in self._kept if other != writer and operator_of(other) == operator]
        for other in others[: max(0, len(others) + 1 - QUERIES_KEPT)]:
            del self._kept[other]
        # Turns only go on: what is not before this one is of a writer of the same name that was forgotten.
        turns = {known: kept for known, kept in self._kept.pop(writer, {}).items() if known < turn}
        self._kept[writer] = turns
        turns[turn] = _Kept.of(rows)
        self._new.add((writer, turn))
        least, most = KEPT
        while len(turns) > least and (
            len(turns) > most or sum(kept.nbytes for kept in turns.values()) > BYTES_MAX
        ):
            del turns[min(turns)]

    def find(self, writer: str, turn: Turn) -> pa.Table:
        """What the turn gave; OutputsGone if that is no longer kept."""
        return self._find(writer, turn).table

    def find_batches(self, writer: str, turn: Turn) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """The same in batches that travel, to be read at any time."""
        rows = self._find(writer, turn).rows
        return rows.schema, in_batches(rows) if isinstance(rows, pa.Table) else rows.batches()

    def _find(self, writer: str, turn: Turn) -> _Kept:
        kept = self._kept.get(writer, {}).get(turn)
        if kept is None:
            raise OutputsGone(
                f"what epoch {turn} of {operator_of(writer)!r} gave is no longer kept",
                hint="only the newest epochs can run again; what it did stays done, and so does what came after",
                epoch=turn.epoch,
            )
        return kept

    def read(self, writer: str, turn: Turn, start: int, stop: int) -> pa.Table:
        """Rows `start` to `stop` of what the turn gave, as far as there are; OutputsGone if that is no longer kept."""
        return self.find(writer, turn).slice(start, max(stop - start, 0))

    def forget(self, writer: str) -> None:
        self._kept.pop(writer, None)

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for turns in list(self._kept.values()) for kept in list(turns.values()))

    @property
    def memory_bytes(self) -> int:
        return sum(
            kept.nbytes if isinstance(kept.rows, pa.Table) else kept.rows.memory_bytes
            for turns in list(self._kept.values())
            for kept in list(turns.values())
        )

    def spill(self, nbytes: int) -> int:
        """Moves at least so many bytes from memory to disk, or all that can be; how many it were."""
        return 0

    def collect(self, tables: Iterator[pa.Table], schema: pa.Schema) -> pa.Table | Stored:
        """What a turn gives, piece by piece, as one."""
        made = list(tables)
        return pa.concat_tables(made) if made else schema.empty_table()

    def set_aside(self, rows: pa.Table) -> pa.Table | Stored:
        """The same rows, where they take no memory until they are read."""
        return rows

    def in_memory(self) -> list[tuple[str, Turn, pa.Table]]:
        """What is there, the oldest of each writer first."""
        return [
            (writer, turn, kept.rows)
            for writer, turns in self._kept.items()
            for turn, kept in turns.items()
            if isinstance(kept.rows, pa.Table)
        ]

    def replace(self, writer: str, turn: Turn, rows: Stored) -> None:
        """The same rows, elsewhere."""
        self._kept[writer][turn] = _Kept.of(rows)

    def copy(self) -> Outputs:
        other = Outputs()
        other._kept = {writer: dict(turns) for writer, turns in self._kept.items()}
        return other

    def export(self) -> list[tuple[str, pa.Table]]:
        """For a snapshot: each turn's rows under a name, from which `load` reads them."""
        return [(_name(*key), rows) for key, rows in self._all()]

    def pieces(self) -> Iterator[tuple[str, pa.Table]]:
        """The same as it is now, some rows of a turn after the others: what is elsewhere is read when it is asked for."""
        kept = [
            (_name(writer, turn), kept.rows)
            for writer, turns in self._kept.items()
            for turn, kept in turns.items()
        ]

        def read() -> Iterator[tuple[str, pa.Table]]:
            for name, rows in kept:
                if isinstance(rows, pa.Table):
                    yield name, rows
                    continue
                yield name, rows.schema.empty_table()
                for batch in rows.batches():
                    yield name, pa.Table.from_batches([batch])

        return read()

    def changed(self) -> tuple[list[tuple[str, pa.Table]], list[str]]:
        """What came since all were last clean, under names; and the names of all that are kept, in their order."""
        every = self._all()
        new = [(_name(*key), rows) for key, rows in every if key in self._new]
        return new, [_name(*key) for key, _ in every]

    def are_new(self, writers: Iterable[str]) -> bool:
        """Whether of each of these writers the newest turns, those that are kept in any case, came since all were clean."""
        least, _ = KEPT
        newest = {writer: sorted(self._kept.get(writer, {}))[-least:] for writer in writers}
        return all(
            turns and all((writer, turn) in self._new for turn in turns) for writer, turns in newest.items()
        )

    def clean(self) -> None:
        """All that are kept are saved."""
        self._new.clear()

    def _all(self) -> list[tuple[tuple[str, Turn], pa.Table]]:
        return [
            ((writer, turn), kept.table)
            for writer, turns in self._kept.items()
            for turn, kept in turns.items()
        ]

    def load(self, name: str, rows: pa.Table) -> None:
        """Rows of a turn, behind those that were loaded of it before."""
        writer, epoch, drain = name.split(" ")
        turn = Turn(Epoch(int(epoch)), int(drain))
        turns = self._kept.setdefault(writer, {})
        before = turns.get(turn)
        turns[turn] = _Kept.of(rows if before is None else pa.concat_tables([before.table, rows]))


def _name(writer: str, turn: Turn) -> str:
    return f"{writer} {turn.epoch} {turn.drain}"


def tables_together(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Those that are small in one, up to some bytes; none is empty."""
    some: list[pa.Table] = []
    size = 0
    for table in tables:
        if len(table):
            some.append(table)
            size += int(table.nbytes)
        if size > MADE_BYTES:
            yield pa.concat_tables(some)
            some, size = [], 0
    if some:
        yield pa.concat_tables(some)


def in_batches(rows: pa.Table) -> Iterator[pa.RecordBatch]:
    """The rows in batches that travel."""
    most = max(1, len(rows) * BATCH_BYTES // max(rows.nbytes, 1))
    return iter(rows.to_batches(max_chunksize=most))
