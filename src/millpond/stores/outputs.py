"""What epochs gave back: kept while their query may run them again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Self

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


class _Kept(NamedTuple):
    """What a turn gave, and its size, which takes time to find out."""

    rows: pa.Table
    nbytes: int

    @classmethod
    def of(cls, rows: pa.Table) -> Self:
        return cls(rows, rows.nbytes)


class Outputs:
    """Tables by writer and turn. The writer that was heard of last comes last."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[Turn, _Kept]] = {}
        # Those that came since all were last clean.
        self._new: set[tuple[str, Turn]] = set()

    def keep(self, writer: str, turn: Turn, rows: pa.Table) -> None:
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
        kept = self._kept.get(writer, {}).get(turn)
        if kept is None:
            raise OutputsGone(
                f"what epoch {turn} of {operator_of(writer)!r} gave is no longer kept",
                hint="only the newest epochs can run again; what it did stays done, and so does what came after",
                epoch=turn.epoch,
            )
        return kept.rows

    def read(self, writer: str, turn: Turn, start: int, stop: int) -> pa.Table:
        """Rows `start` to `stop` of what the turn gave, as far as there are; OutputsGone if that is no longer kept."""
        return self.find(writer, turn).slice(start, max(stop - start, 0))

    def forget(self, writer: str) -> None:
        self._kept.pop(writer, None)

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for turns in list(self._kept.values()) for kept in list(turns.values()))

    def copy(self) -> Outputs:
        other = Outputs()
        other._kept = {writer: dict(turns) for writer, turns in self._kept.items()}
        return other

    def export(self) -> list[tuple[str, pa.Table]]:
        """For a snapshot: each turn's rows under a name, from which `load` reads them."""
        return [(_name(*key), rows) for key, rows in self._all()]

    def changed(self) -> tuple[list[tuple[str, pa.Table]], list[str]]:
        """What came since all were last clean, under names; and the names of all that are kept, in their order."""
        every = self._all()
        new = [(_name(*key), rows) for key, rows in every if key in self._new]
        return new, [_name(*key) for key, _ in every]

    def clean(self) -> None:
        """All that are kept are saved."""
        self._new.clear()

    def _all(self) -> list[tuple[tuple[str, Turn], pa.Table]]:
        return [
            ((writer, turn), kept.rows)
            for writer, turns in self._kept.items()
            for turn, kept in turns.items()
        ]

    def load(self, name: str, rows: pa.Table) -> None:
        writer, epoch, drain = name.split(" ")
        self._kept.setdefault(writer, {})[Turn(Epoch(int(epoch)), int(drain))] = _Kept.of(rows)


def _name(writer: str, turn: Turn) -> str:
    return f"{writer} {turn.epoch} {turn.drain}"


def in_batches(rows: pa.Table) -> Iterator[pa.RecordBatch]:
    """The rows in batches that travel."""
    most = max(1, len(rows) * BATCH_BYTES // max(rows.nbytes, 1))
    return iter(rows.to_batches(max_chunksize=most))
