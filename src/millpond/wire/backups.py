"""Messages about backups: slices that a container keeps for another one, and may serve one day."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from millpond.times import Progress
from millpond.wire.base import (
    LONG_CALL_S,
    Call,
    Count,
    Done,
    Exchange,
    IdOnDisk,
    Message,
    Name,
    Read,
    SliceId,
    Term,
    Turn,
    Unsigned64,
    Writer,
    check_progress,
)
from millpond.wire.roles import CONTAINERS, COORDINATOR, Senders
from millpond.wire.specs import Work

BACK_UP_S = 30.0
"""Within this time a backup has made a record durable, or counts as lost."""
SWITCH_S = 5.0
"""While slices change places, their residents' epochs wait: for no step of it longer than this."""


class Backup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A container that keeps these slices for the owner who is told of it."""

    container: Count
    term: Term
    address: str
    slices: list[SliceId]


# Container to container


class BackUp(Exchange[Done], frozen=True, tag=True):
    """Make durable what an epoch has for these slices, under the owner's ballot. Rows follow as batches grouped by slice.

    `decided` are the newest decided turns of the resident's writers when the owner prepares it: of what was backed up
    before, the rest will never be decided. F and U are as the owner knew them then. `term` is the incarnation that is meant.
    """

    senders: ClassVar[Senders] = CONTAINERS
    seconds: ClassVar[float] = BACK_UP_S

    owner: Count
    term: Term
    writer: Writer
    turn: Turn
    ballot: Count
    digest: Unsigned64
    slices: list[SliceId]
    decided: dict[Writer, Turn]
    fetch_progress: Progress
    final_below: Progress
    work: Work

    def __post_init__(self) -> None:
        check_progress(self.fetch_progress)
        check_progress(self.final_below)


class ReadHeld(Read, frozen=True, tag=True):
    """All that a slice holds of a resident, as decided epochs left it: rows as a snapshot has them.

    The schema's metadata tells where writers stood (`vector`).
    """

    senders: ClassVar[Senders] = CONTAINERS
    reads: ClassVar[bool] = False

    slice: SliceId


# Coordinator to container


class Enlist(Call[Done], frozen=True, tag=True):
    """Take what comes for these slices from now on, to be held as a backup. What was before comes by `Copy`."""

    senders: ClassVar[Senders] = COORDINATOR

    order: Count
    slices: list[SliceId]


class Copy(Call[Done], frozen=True, tag=True):
    """Take what these residents have in the slices from the container that serves there. On return it is durable here."""

    senders: ClassVar[Senders] = COORDINATOR
    seconds: ClassVar[float] = LONG_CALL_S

    order: Count
    address: str
    slices: list[SliceId]
    residents: list[IdOnDisk]


class Lag(Message, frozen=True, tag=True):
    """Records that are decided and not yet applied to a backup, and their bytes."""

    records: Count
    nbytes: Count


class AskLag(Call[Lag], frozen=True, tag=True):
    senders: ClassVar[Senders] = COORDINATOR
    slices: list[SliceId]


class Readiness(Message, frozen=True, tag=True):
    is_ready: bool


class GetReady(Call[Readiness], frozen=True, tag=True):
    """Slices are about to change hands here: apply what was decided to what is held as a backup, and then, for so many
    seconds, begin nothing that takes long and would hold that up. With 0, go on as ever.

    Not ready is who is at such work; or whose disk is slow, where that counts: what is to be left is.
    """

    senders: ClassVar[Senders] = COORDINATOR

    decided: dict[Name, dict[Writer, Turn]]
    quiet_s: Annotated[float, msgspec.Meta(ge=0, le=60)]
    disk_counts: bool = True
    seconds_max: float = LONG_CALL_S

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return self.seconds_max


class Promote(Call[Done], frozen=True, tag=True):
    """Serve these slices, which are held as a backup. `decided` are the newest decided turns: what lies beyond is void.

    `epochs` is how many each resident has. A backup that has not all of it refuses, and stays what it is.
    """

    senders: ClassVar[Senders] = COORDINATOR

    order: Count
    slices: list[SliceId]
    decided: dict[Name, dict[Writer, Turn]]
    epochs: dict[Name, Count]
    seconds_max: float = LONG_CALL_S

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return self.seconds_max


class Demote(Call[Done], frozen=True, tag=True):
    """Serve these slices no more, and hold them as a backup of whoever does. No epoch of theirs is on its way."""

    senders: ClassVar[Senders] = COORDINATOR
    seconds: ClassVar[float] = SWITCH_S

    order: Count
    slices: list[SliceId]


class Dismiss(Call[Done], frozen=True, tag=True):
    """Hold these slices as a backup no more."""

    senders: ClassVar[Senders] = COORDINATOR
    seconds: ClassVar[float] = LONG_CALL_S

    order: Count
    slices: list[SliceId]
