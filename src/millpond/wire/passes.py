"""Messages by which credentials are handed out and renewed."""

from __future__ import annotations

from typing import ClassVar

from millpond.wire.authority import Bundle
from millpond.wire.base import Call, Done, Message
from millpond.wire.roles import COORDINATOR, Senders


class TaskPass(Message, frozen=True, tag=True):
    """What a client's tasks have to show: good for some minutes. Also as a private file holds it, as JSON."""

    token: str
    bundle: Bundle | None = None

    def __repr__(self) -> str:
        return "TaskPass()"


class AskTaskPass(Call[TaskPass], frozen=True, tag=True):
    """To the coordinator, of a client that has tasks."""


class Certify(Call[Done], frozen=True, tag=True):
    """Coordinator to container: a new certificate of the same name, in time; and the serials of all that are revoked."""

    senders: ClassVar[Senders] = COORDINATOR

    bundle: Bundle
    revoked: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return "Certify()"
