"""Messages of an epoch's way in: stage, commit, and what the coordinator then asks of containers."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import msgspec

from millpond.errors import BadMessage
from millpond.times import Progress
from millpond.wire.backups import Backup
from millpond.wire.base import (
    LONG_CALL_S,
    Call,
    Count,
    Done,
    Exchange,
    KindOfTime,
    Message,
    Name,
    Query,
    Term,
    Turn,
    Unsigned64,
    Writer,
    check_progress,
)
from millpond.wire.roles import COORDINATOR, STAGING, Senders
from millpond.wire.rounds import Peer
from millpond.wire.specs import Work

History = Literal["continue", "new", "shared"]
"""Whose epochs count under an operator's name: of the query that began, of a new one from now on, of several at once."""

# Anyone to container


class StageDone(Message, frozen=True, tag=True):
    rows: Count
    digest: Unsigned64


class Stage(Exchange[StageDone], frozen=True, tag=True):
    """Rows follow as batches grouped by slice, each with its per-slice counts."""

    senders: ClassVar[Senders] = STAGING

    writer: Writer
    turn: Turn
    partition: Count
    attempt: Count


# Coordinator to container


class Prepared(Message, frozen=True, tag=True):
    """`term` tells which incarnation of the container vouches for it."""

    term: Term
    rows: Count
    digest: Unsigned64


class Prepare(Call[Prepared], frozen=True, tag=True):
    """Make the staged rows of exactly these attempts durable, and do all that may fail. Nothing becomes visible.

    `ballot` numbers what the coordinator asks about a resident's epochs: a message that comes late counts no more.
    """

    senders: ClassVar[Senders] = COORDINATOR
    seconds: ClassVar[float] = LONG_CALL_S

    resident: Name
    writer: Writer
    turn: Turn
    ballot: Count
    attempts: dict[int, int]
    work: Work
    backups: list[Backup] = msgspec.field(default_factory=list)
    """Who must hold it, too, before it is prepared."""
    decided: dict[Writer, Turn] = msgspec.field(default_factory=dict)
    """The newest decided turns of the resident's writers."""
    peers: list[Peer] = msgspec.field(default_factory=list)
    """All that prepare it, where they run it in rounds."""


class Discard(Call[Done], frozen=True, tag=True):
    """An epoch that was prepared will not be decided as it is."""

    senders: ClassVar[Senders] = COORDINATOR

    resident: Name
    ballot: Count


class Apply(Call[Done], frozen=True, tag=True):
    """Make a prepared epoch visible; it has been decided, as that number of the resident's epochs."""

    senders: ClassVar[Senders] = COORDINATOR
    seconds: ClassVar[float] = LONG_CALL_S

    resident: Name
    writer: Writer
    turn: Turn
    ballot: Count
    number: Count


# Anyone to coordinator


class EpochPlan(Message, frozen=True, tag=True):
    """Rows below `late_below` are late in this epoch, also when it is replayed.

    They are to be staged by a placement that is not older than `placement`: every owner must hear of the epoch, and of one
    to which it brings no rows nobody would notice that it is missing.
    """

    late_below: Progress
    time_kind: KindOfTime
    replayed: bool
    placement: Count = 0
    others: Progress = math.inf
    """How far all else that sends rows to the resident has come, as far as it counts."""


class BeginEpoch(Call[EpochPlan], frozen=True, tag=True):
    resident: Name
    updater: Name
    query: Query
    turn: Turn
    history: History
    brings_rows: bool = True
    """Whether it may: by a turn that brings none, an updater that was left out does not count again."""


class Receipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one task staged: the driver commits exactly the receipts it collected.

    `source` is a digest of the rows that the staged ones were made from, where other ones may be staged next time.
    """

    partition: Count
    attempt: Count
    rows: Count
    late: Count
    digest: Unsigned64
    time_max: int | None
    source: Unsigned64 | None = None


class EpochCommitted(Message, frozen=True, tag=True):
    """`replayed` says that the epoch was already there and nothing changed. `seen` is how many of the resident's are visible,
    which was `born` so.
    """

    turn: Turn
    rows: Count
    late: Count
    watermark: Progress
    replayed: bool
    seen: Count = 0
    born: Count = 0


class CommitEpoch(Call[EpochCommitted], frozen=True, tag=True):
    seconds: ClassVar[float] = LONG_CALL_S

    resident: Name
    updater: Name
    query: Query
    turn: Turn
    history: History
    delay: Count
    late_below: Progress
    time_kind: KindOfTime
    receipts: list[Receipt]
    work: Work
    owes: bool = False
    """Whether the epoch's outputs are to be `HandedOver` before another comes."""
    others: Progress = -math.inf
    """What it brings was worked out for others that have come so far; if one of them counts again below it, it is not."""
    early: bool = False
    """Answered as soon as it is decided: it becomes visible by itself, and nobody is told U before."""

    def __post_init__(self) -> None:
        check_progress(self.late_below)
        check_progress(self.others)
        if self.early and self.owes:
            raise BadMessage("an epoch whose outputs are to be handed over is not answered early")


class WriterTurns(Message, frozen=True, tag=True):
    """Of each query of an operator its last turn; the turns whose outputs are still to be handed over; and which version of
    code ran its newest turns, where code comes with them.
    """

    last: dict[Query, Turn]
    owed: dict[Query, Turn]
    code: dict[Query, list[tuple[Turn, str]]] = msgspec.field(default_factory=dict)


class AskTurns(Call[WriterTurns], frozen=True, tag=True):
    """Answered when all that was decided is visible."""

    seconds: ClassVar[float] = LONG_CALL_S

    resident: Name
    updater: Name


class HandedOver(Call[Done], frozen=True, tag=True):
    """What a turn gave has been taken by whoever it is for."""

    resident: Name
    updater: Name
    query: Query
    turn: Turn
