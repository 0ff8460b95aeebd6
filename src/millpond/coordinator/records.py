"""What the coordinator remembers: all of it immutable, all of it in the journal, none of it without end."""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from millpond.times import Progress
from millpond.wire.base import (
    Directory,
    KindOfTime,
    ListToken,
    Name,
    Query,
    SliceId,
    Term,
    Turn,
    writer_id,
)
from millpond.wire.specs import Resident, Spec

TURNS_REMEMBERED = 64
"""Of a writer. What its epochs gave is kept no longer (`stores.outputs.KEPT`): a replay must know how many rows it had."""
ENDED_REMEMBERED = 1024
"""More than a log holds before it is snapshotted: none of its records is of a query that is not known any more."""
QUERIES_MAX = 256
"""Queries that share one operator's name."""


class EpochRecord(msgspec.Struct, frozen=True):
    """One decided turn: enough to recognise its replay and to filter late rows in it alike.

    A turn that has a `source` is recognised by that, not by what was made from it. `code` is the version of what ran it.
    """

    turn: Turn
    digest: int
    rows: int
    late: int
    late_below: Progress
    watermark: Progress
    source: int | None = None
    code: str = ""


class QueryRecord(msgspec.Struct, frozen=True):
    """The turns of one updater in one query; `recent` holds the newest, oldest first.

    `owed` is the last of them, if what it gave is still to be handed over.
    """

    first: Turn
    recent: tuple[EpochRecord, ...]
    owed: Turn | None = None

    @property
    def last(self) -> Turn:
        return self.recent[-1].turn

    @property
    def watermark(self) -> Progress:
        return self.recent[-1].watermark


class UpdaterRecord(msgspec.Struct, frozen=True):
    """`watermark` is the updater's progress: -inf before its first epoch, +inf once it has finished.

    `ended` are queries that a new history took the place of, and where they stood: what they did stays done.
    One that is `idle` is left out of U: no rows came of it for `idle_s` seconds. U may be above its watermark then;
    when it counts again, it begins where U stands. `finished_at` is the watermark that it finished with.
    """

    watermark: Progress
    late: int = 0
    queries: dict[Query, QueryRecord] = {}
    ended: dict[Query, Turn] = {}
    idle_s: float | None = None
    idle: bool = False
    finished_at: Progress = -math.inf


class PinRecord(msgspec.Struct, frozen=True):
    """What one turn of a fetcher saw; once it was answered, also what is left waiting of it."""

    turn: Turn
    update: Progress
    late_below: Progress
    answered: bool = False
    waiting: int = 0
    lowest: Progress | None = None
    token: ListToken = ""
    digest: int = 0


class AskingRecord(msgspec.Struct, frozen=True):
    """The turns of one fetcher in one query: the last epoch and the one before it, with the drains after them.

    Below `watermark` the query asks for no new rows.
    """

    watermark: Progress = -math.inf
    pins: tuple[PinRecord, ...] = ()


class FetcherRecord(msgspec.Struct, frozen=True):
    """`progress` is the lowest time that the fetcher may still ask for: of new rows, of those that wait, of repeats.

    `reported` is what was said of new rows from outside. `ended` are queries that a new history took the place of, and
    where they stood; one whose rows still wait is among `queries`, too, until they are drained.
    """

    progress: Progress
    reported: Progress = -math.inf
    late: int = 0
    queries: dict[Query, AskingRecord] = {}
    ended: dict[Query, Turn] = {}


class ResidentRecord(msgspec.Struct, frozen=True):
    """Of a resident of any kind. `update_progress` and `fetch_progress` are U and F; neither ever falls."""

    spec: Spec
    born: int
    time_kind: KindOfTime = ""
    updaters: dict[Name, UpdaterRecord] = {}
    fetchers: dict[Name, FetcherRecord] = {}
    update_progress: Progress = -math.inf
    fetch_progress: Progress = -math.inf
    epochs: int = 0
    """How many were decided, of all writers."""

    @property
    def resident(self) -> Resident:
        """As containers learn of it."""
        return Resident(self.spec, self.born, self.fetch_progress, self.update_progress, self.epochs)

    def decided(self) -> dict[str, Turn]:
        """The newest decided turn of every writer."""
        return {
            writer_id(updater, query): turn
            for updater, record in self.updaters.items()
            for query, turn in (
                *record.ended.items(),
                *((query, turns.last) for query, turns in record.queries.items()),
            )
        }


class PondRecord(msgspec.Struct, frozen=True):
    """`term` numbers the incarnations of containers, `born` the residents: each takes the next.

    `owners[slice]` is the container of each slice as of `version`; `directories` are those of containers that tell what
    slices rest on, and of which. `backups` are those of incarnations that hold slices for their owners, with every
    epoch that was decided: one that does not is not among them.
    """

    owners: tuple[int, ...]
    version: int = 0
    directories: dict[Directory, tuple[SliceId, ...]] = {}
    backups: dict[Directory, tuple[SliceId, ...]] = {}
    term: Term = Term(0)
    born: int = 0
    residents: dict[Name, ResidentRecord] = {}

    @property
    def slices(self) -> int:
        return len(self.owners)

    def decided(self) -> dict[str, dict[str, Turn]]:
        """The newest decided turn of every writer of every resident."""
        return {name: resident.decided() for name, resident in self.residents.items()}

    def slices_of(self, container: int) -> list[SliceId]:
        return [SliceId(number) for number, owner in enumerate(self.owners) if owner == container]

    def with_resident(self, resident: ResidentRecord) -> PondRecord:
        """The pond in which that resident is as given."""
        return replace(self, residents={**self.residents, resident.spec.name: resident})
