"""Who may call: what a certificate lets in, and what a call's bearer says that the caller may ask."""

from __future__ import annotations

from typing import Literal, get_args

Role = Literal["coordinator", "container", "client", "task", "reader"]
"""A *client* holds the full token, a *reader* the read-only one; a *task* stages and fetches for a client, and no more."""
ROLES: tuple[Role, ...] = get_args(Role)

Senders = frozenset[Role]
COORDINATOR: Senders = frozenset({"coordinator"})
CONTAINERS: Senders = frozenset({"container"})
CLIENTS: Senders = frozenset({"client"})
STAGING: Senders = CLIENTS | {"task"}
READING: Senders = STAGING | {"reader"}
SENDING_CODE: Senders = STAGING

LETS_USE: dict[Role, Senders] = {
    "coordinator": COORDINATOR,
    "container": CONTAINERS,
    "client": READING,
    "task": frozenset({"task", "reader"}),
    "reader": frozenset({"reader"}),
}
"""Whoever was let in by a gate in a role may call in these, whatever else they know."""

NAMES: dict[Role, str] = {
    "coordinator": "the coordinator",
    "container": "a container",
    "client": "a client",
    "task": "a task",
    "reader": "a read-only token",
}
"""What a role is called in a message to who has it."""
