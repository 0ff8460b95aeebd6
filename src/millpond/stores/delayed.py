"""Events that wait until their operator's watermark has passed them, in the order in which they came."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.stores.readiness import before
from millpond.times import Progress

# Beyond so many pieces they become one: each is looked at in every epoch.
PIECES_MAX = 64


class Since(NamedTuple):
    """When events of a writer came to be held: the number of the checkpoint before which they did."""

    writer: str
    checkpoint: int


class Piece(NamedTuple):
    """Events that came together, or what is left of them, with their times. Those of an undecided epoch are not held yet."""

    times: npt.NDArray[np.int64]
    rows: pa.Table
    lowest: int
    newest: int
    since: Since | None = None


class Changed(NamedTuple):
    """What became of a writer's events: of those in earlier files stay those from `stay_from` on, or none; `rows` came."""

    stay_from: int | None
    rows: pa.Table | None


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
        return DelayedEvents(_fewer(pieces) if many else pieces)

    def held_since(self, writer: str, checkpoint: int) -> DelayedEvents:
        """These events, of which new ones are held from now on. What came from another writer is new."""
        known = [piece.since is not None and piece.since.writer == writer for piece in self._pieces]
        if not all(known[: sum(known)]):  # they are not what was there and what came after
            known = [False] * len(known)
        since = Since(writer, checkpoint)
        return DelayedEvents(
            [
                piece if is_known else piece._replace(since=since)
                for piece, is_known in zip(self._pieces, known, strict=True)
            ]
        )

    def changed(self, checkpoint: int) -> Changed:
        """What this checkpoint has to tell. Events run in the order of their times, so those that stay are the newest."""
        new = [piece for piece in self._pieces if piece.since is None or piece.since.checkpoint >= checkpoint]
        old = self._pieces[: len(self._pieces) - len(new)]
        stay_from = min((piece.lowest for piece in old), default=None)
        return Changed(stay_from, DelayedEvents(new).export() if new else None)

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
                left = _piece(piece.times[~is_due], piece.rows.filter(pa.array(~is_due)))
                waiting.append(left._replace(since=piece.since))
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


def _fewer(pieces: Sequence[Piece]) -> list[Piece]:
    """The same events in few pieces. What a file may hold is not mixed with what none does."""
    newest = max((piece.since.checkpoint for piece in pieces if piece.since is not None), default=0)

    def kind(piece: Piece) -> tuple[str, bool] | None:
        since = piece.since
        return None if since is None else (since.writer, since.checkpoint == newest)

    groups = [list(group) for _, group in groupby(pieces, kind)]
    return [_joined(group)._replace(since=group[-1].since) for group in groups]


def _joined(pieces: Sequence[Piece]) -> Piece:
    rows = pa.concat_tables([piece.rows for piece in pieces]).combine_chunks()
    return _piece(np.concatenate([piece.times for piece in pieces]), rows)
