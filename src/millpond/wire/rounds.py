"""Messages of containers that prepare an epoch together: rows go from one to another, round by round."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from millpond.wire.base import Count, Exchange, Message, SliceId, Term
from millpond.wire.roles import CONTAINERS, Senders

SEND_S = 30.0
"""Within this time a container has taken the rows of a round, or counts as away."""

Standing = Literal["unknown", "runs", "done", "failed", "over"]
"""How a container is at an epoch: it was not asked to prepare it yet, is at it, is done, could not, is at a later one."""


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A container that takes part, and the slices of the resident that it has; an empty address where it is away."""

    container: Count
    term: Term
    address: str
    slices: list[SliceId]


class RoundTaken(Message, frozen=True, tag=True):
    standing: Standing


class RoundRows(Exchange[RoundTaken], frozen=True, tag=True):
    """What a container has for another one after a round; rows follow as batches, grouped as the resident does.

    `counts` are numbers that all add up: who has heard all knows what comes next, and whether anything does. `failed` says why the sender does not go on. One that `asks` brings nothing: it is to learn how the other one stands. `term` is
    the incarnation that is meant.
    """

    senders: ClassVar[Senders] = CONTAINERS
    seconds: ClassVar[float] = SEND_S

    ballot: Count
    round: Count
    sender: Count
    term: Term
    counts: list[Count] = msgspec.field(default_factory=list)
    failed: str = ""
    asks: bool = False
