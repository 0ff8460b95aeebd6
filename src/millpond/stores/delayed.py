"""Events that wait until their operator's watermark has passed them, in the order in which they came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.stores.readiness import before
from millpond.times import Progress

# Beyond so many pieces they become one: each is looked at in every epoch.
PIECES_MAX = 64


class Piece(NamedTuple):
    """Events that came together, or what is left of them, with their times."""

    times: npt.NDArray[np.int64]
    rows: pa.Table
    lowest: int
    newest: int


class DelayedEvents:
    """The events of one writer that wait. Immutable: an epoch that is not decided leaves no trace."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: Sequence[Piece] = ()) -> None:
        self._pieces = tuple(pieces)

    def __len__(self) -> int:
        return sum(len(piece.times) for piece in self._pieces)

    @property
    def nbytes(self) -> int:
        return sum(piece.rows.nbytes + piece.times.nbytes for piece in self._pieces)

    @property
    def lowest(self) -> int:
        """The oldest time; there must be one."""
        return min(piece.lowest for piece in self._pieces)

    @property
    def newest(self) -> int:
        return max(piece.newest for piece in self._pieces)

    @property
    def schema(self) -> pa.Schema | None:
        return self._pieces[0].rows.schema if self._pieces else None

    def are_like(self, schema: pa.Schema) -> bool:
        """Whether all have these columns; which of them may be null is no matter."""
        wanted = schema.names, schema.types
        return all((piece.rows.schema.names, piece.rows.schema.types) == wanted for piece in self._pieces)

    def followed_by(self, other: DelayedEvents) -> DelayedEvents:
        """Both, this one's events first."""
        pieces = (*self._pieces, *other._pieces)
        many = len(pieces) > PIECES_MAX and DelayedEvents(pieces).are_like(pieces[0].rows.schema)
        return DelayedEvents([_joined(pieces)] if many else pieces)

    def split(self, watermark: Progress) -> tuple[list[pa.Table], DelayedEvents]:
        """The events that the watermark has passed, and those that wait on. Only pieces that it divides are copied."""
        due, waiting = [], []
        for piece in self._pieces:
            if before(piece.newest, watermark):
                due.append(piece.rows)
            elif not before(piece.lowest, watermark):
                waiting.append(piece)
            else:
                is_due = before(piece.times, watermark)
                due.append(piece.rows.filter(pa.array(is_due)))
                waiting.append(_piece(piece.times[~is_due], piece.rows.filter(pa.array(~is_due))))
        return due, DelayedEvents(waiting)

    def export(self) -> pa.Table:
        """For a snapshot: the times, then the events' own columns."""
        one = _joined(self._pieces)
        return one.rows.add_column(0, pa.field("", pa.int64()), pa.array(one.times))


def delayed(times: npt.NDArray[np.int64], rows: pa.Table) -> DelayedEvents:
    """These events, which begin to wait."""
    return DelayedEvents([_piece(times, rows.cast(nullable(rows.schema)))] if len(rows) else [])


def nullable(schema: pa.Schema) -> pa.Schema:
    """The same columns, each of which may be null: what comes later may have nulls where this has none."""
    return pa.schema([field.with_nullable(True) for field in schema])


def load_delayed(rows: pa.Table) -> DelayedEvents:
    """What `export` gave."""
    times = rows.column(0).combine_chunks().to_numpy()
    return delayed(times, rows.remove_column(0).combine_chunks())


def _piece(times: npt.NDArray[np.int64], rows: pa.Table) -> Piece:
    return Piece(times, rows, int(times.min()), int(times.max()))


def _joined(pieces: Sequence[Piece]) -> Piece:
    rows = pa.concat_tables([piece.rows for piece in pieces]).combine_chunks()
    return _piece(np.concatenate([piece.times for piece in pieces]), rows)
