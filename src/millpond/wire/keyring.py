"""The secrets of an open pond, and by what its servers know whose call it is.

Clients and readers are known by what follows from the pond's token. The coordinator, containers and tasks have secrets
of their own, made when the pond is opened: they follow from nothing, and no file holds them, but for the tasks' tokens
of the present minutes.
"""

from __future__ import annotations

import hashlib
import secrets
import time

import msgspec

from millpond.errors import BadOption
from millpond.wire.authority import Bundle
from millpond.wire.handshake import bearer, read_only_token, task_bearers, task_token
from millpond.wire.roles import Role


class Accepted(msgspec.Struct, frozen=True):
    """By what a server knows the role of a call. It holds digests of bearers, by which nobody can call; of tasks, whose
    bearers change with time, the secret that they follow from.
    """

    bearers: dict[str, Role]
    tasks: bytes = b""

    def __repr__(self) -> str:
        return f"Accepted({sorted(self.bearers.values())})"

    def role_of(self, given: str) -> Role | None:
        """None for one that nobody has. What is compared are digests: how long that takes tells nothing of a bearer."""
        digest = _digest(given)
        role = self.bearers.get(digest)
        if role is None and self.tasks:
            good = {_digest(known) for known in task_bearers(self.tasks, time.time())}
            role = "task" if digest in good else None
        return role


class ContainerKeys(msgspec.Struct, frozen=True):
    """What a container is handed when it starts: who it is, whom it believes, and what it has to show to others.

    One that is to be reached from other machines has a `bundle`, and listens at `host`; whose certificate is among the
    `revoked` serials is not let in.
    """

    name: str
    accepted: Accepted
    bearer: str
    bundle: Bundle | None = None
    host: str = ""
    revoked: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"ContainerKeys({self.name!r})"


class Keyring:
    """In the coordinator's process, and nowhere else."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.tasks = secrets.token_bytes(32)
        self.coordinator = _made()
        self.container = _made()

    def __repr__(self) -> str:
        return "Keyring()"

    def accepted(self) -> Accepted:
        return Accepted(
            accepted_by(self.token).bearers
            | {_digest(self.coordinator): "coordinator", _digest(self.container): "container"},
            self.tasks,
        )

    def task_token(self) -> str:
        return task_token(self.token, self.tasks, time.time())


def accepted_by(token: str) -> Accepted:
    """Those who hold the full token or the read-only one, and nobody else."""
    if not token:
        raise BadOption("a pond does not listen without a token", option="token")
    return Accepted({_digest(bearer(token)): "client", _digest(bearer(read_only_token(token))): "reader"})


def _made() -> str:
    return f"Bearer {secrets.token_hex(32)}"


def _digest(given: str) -> str:
    return hashlib.sha256(given.encode()).hexdigest()
