"""Messages about slices on their way: anyone asks the coordinator to move them, and how far they are."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from millpond.errors import BadMessage
from millpond.wire.base import LONG_CALL_S, Call, Count, Done, Message, SliceId
from millpond.wire.roles import COORDINATOR, Senders

Cause = Literal["move", "scale", "rebalance", "autoscale", "return"]
"""Who wants a move. "return" is of slices that left a container only because it ended."""
Stage = Literal["waiting", "copying", "catching up", "switching", "moved", "failed", "cancelled"]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=9_999)]


class MoveInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Slices that go from one container to another. `progress` goes from 0 to 1; `left_s` is a guess, None without one."""

    id: Count
    slices: list[SliceId]
    source: Count
    target: Count
    cause: Cause
    stage: Stage
    progress: float
    seconds: float
    left_s: float | None = None
    error: str = ""

    @property
    def is_over(self) -> bool:
        return self.stage in ("moved", "failed", "cancelled")


class Moves(Message, frozen=True, tag=True):
    """The moves asked about. Where that is asked, too: what a change of the number of containers is at, or why it failed.

    `notes` tell what was left out, and why.
    """

    moves: list[MoveInfo]
    scaling: str = ""
    error: str = ""
    notes: list[str] = msgspec.field(default_factory=list)


class MoveSlices(Call[Moves], frozen=True, tag=True):
    """Have that container serve these slices. Answered at once: `AskMoves` tells when they are there."""

    slices: list[SliceId]
    to: Count


class Scale(Call[Moves], frozen=True, tag=True):
    """Have so many containers share the slices evenly, with so many threads each. Answered at once."""

    seconds: ClassVar[float] = LONG_CALL_S

    containers: AtLeastOne | None = None
    threads: AtLeastOne | None = None


class Rebalance(Call[Moves], frozen=True, tag=True):
    """Move slices from containers with much load to those with little. Answered at once."""

    by: Literal["cpu", "rows", "bytes"] = "cpu"


class Autoscale(Call[Done], frozen=True, tag=True):
    """Change the number of containers by itself, between these; without them, no more.

    It grows when containers are busier than `busy_max` for `hold_s` seconds, and shrinks when they are less than `busy_min`
    for three times as long.
    """

    containers_min: AtLeastOne | None = None
    containers_max: AtLeastOne | None = None
    busy_min: float = 0.2
    busy_max: float = 0.75
    hold_s: float = 30.0

    def __post_init__(self) -> None:
        bounds = (self.containers_min, self.containers_max)
        if (bounds[0] is None) != (bounds[1] is None) or (bounds[0] or 1) > (bounds[1] or 9_999):
            raise BadMessage(f"{bounds} are no bounds on the number of containers")
        if bounds[0] is not None and not (0 <= self.busy_min < self.busy_max <= 1 and self.hold_s > 0):
            raise BadMessage("busy_min, busy_max and hold_s do not go together")


class AskMoves(Call[Moves], frozen=True, tag=True):
    """Of these moves, or of all that are remembered; with `scaling`, of those by which the number of containers changes."""

    reads: ClassVar[bool] = True

    ids: list[Count] | None = None
    scaling: bool = False


class CancelMoves(Call[Done], frozen=True, tag=True):
    """Moves that have not been switched yet come to nothing."""

    ids: list[Count] | None = None


# Coordinator to container


class SetThreads(Call[Done], frozen=True, tag=True):
    """Work on slices with so many threads from now on. Nothing moves."""

    senders: ClassVar[Senders] = COORDINATOR

    threads: AtLeastOne
