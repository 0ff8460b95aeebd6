"""Who is given what to show, as long as a pond is open: containers, tasks, clients by TLS, and the coordinator itself.

All of it is made when the pond is opened. Of the secrets, files hold what tasks show (`tasks.json` under the root, good
for some minutes and renewed ahead of time) and, where the pond is reached by TLS, what clients show (`client.pem` and
`client.read.pem`); these files are the owner's alone.
"""

from __future__ import annotations

import math
import os
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from millpond import private
from millpond.errors import MillpondError
from millpond.wire import authority
from millpond.wire.authority import LIFE_S, RENEWED_AT, Authority, Bundle
from millpond.wire.base import Message, Term
from millpond.wire.connection import Handler
from millpond.wire.credentials import Credentials, write_pass
from millpond.wire.handshake import TASK_TOKEN_S
from millpond.wire.keyring import ContainerKeys, Keyring
from millpond.wire.passes import AskTaskPass, Certify, TaskPass
from millpond.wire.roles import Role
from millpond.wire.sockets import POND, SocketDirectory, container_name
from millpond.wire.tls import TlsGate

TASKS = "tasks.json"
BUNDLES: dict[str, Role] = {"client.pem": "client", "client.read.pem": "reader"}
TASKS_RENEWED_S = min(TASK_TOKEN_S, LIFE_S["task"]) * RENEWED_AT
TRIED_AGAIN_S = 10.0
Tell = Callable[[int, Certify], Any]
"""Asks a container."""


class Given(NamedTuple):
    """A certificate and its key, in PEM, that the user gave for the pond's address."""

    certificate: str
    key: str


class Passes:
    """The secrets of an open pond, and its authority. `close` takes back what files hold."""

    def __init__(self, root: str, token: str, given: Given | None = None) -> None:
        self._root = root
        self._given = given
        self.keyring = Keyring(token)
        self.authority = Authority()
        if given is not None:
            self.authority.pinned = authority.first_certificate(given.certificate)
        self._lock = threading.Lock()
        self._gate: TlsGate | None = None
        self._serials: list[str] = []
        # By serial, when the certificate runs out: then nobody need know that it is revoked.
        self._revoked: dict[str, float] = {}
        # Containers that are reached by TLS.
        self._certified: dict[int, _Certified] = {}
        self._tasks_at = self._gate_at = 0.0
        self._renew_tasks()
        for name in BUNDLES:  # those of an earlier opening are worth nothing
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(root, name))

    @property
    def task_file(self) -> str:
        return os.path.join(self._root, TASKS)

    # Who shows what

    def coordinator(self) -> Credentials:
        """For the coordinator's own calls to containers."""
        return _Issued(self.authority, "coordinator", POND, bearer=self.keyring.coordinator)

    def client(self) -> Credentials:
        """For a client in the coordinator's process."""
        return _Issued(self.authority, "client", "", token=self.keyring.token)

    def container(self, container: int, term: Term, host: str = "") -> ContainerKeys:
        """For a container that is to start in that term; where there is a `host`, it listens there by TLS.

        What its incarnations before had to show is good for nothing any more: one that was stopped may wake up.
        """
        name = container_name(container, term)
        accepted = self.keyring.accepted()
        with self._lock:
            self._revoke_container(container)
        if not host:
            return ContainerKeys(name, accepted, self.keyring.container)
        bundle = self.authority.issue("container", name)
        with self._lock:
            self._certified[container] = _Certified(name, term, time.monotonic(), (bundle.serial,))
            revoked = tuple(self._revoked)
        return ContainerKeys(name, accepted, self.keyring.container, bundle, host, revoked)

    def task(self) -> TaskPass:
        return TaskPass(self.keyring.task_token(), self.authority.issue("task"))

    # The pond's own address

    def listen(self, sockets: SocketDirectory, host: str, port: int) -> TlsGate:
        """A gate to all of the pond's servers; from then on, there are bundles for clients."""
        self._gate = TlsGate(self._context(), sockets, host, port)
        self._gate_at = time.monotonic()
        self._issue_bundles()
        return self._gate

    def _context(self) -> ssl.SSLContext:
        if self._given is not None:
            return authority.serving(*self._given, self.authority.certificate)
        return self.authority.issue("coordinator", POND).serving()

    def _issue_bundles(self) -> None:
        for name, role in BUNDLES.items():
            bundle = self.authority.issue(role)
            private.write_text(os.path.join(self._root, name), bundle.text())
            self._serials.append(bundle.serial)

    def revoke(self, tell: Tell) -> None:
        """Issues the bundles of clients anew. By those that there were, nobody comes in any more, and connections end."""
        with self._lock:
            serials, self._serials = self._serials, []
            if self._gate is not None:
                self._issue_bundles()
            self._revoke(serials, LIFE_S["client"])
        self._certify_due(tell)

    def _revoke(self, serials: Sequence[str], life_s: float) -> None:
        """At the pond's own address at once, at containers with their next certificate, which is due."""
        until_s = time.monotonic() + life_s
        self._revoked |= dict.fromkeys(serials, until_s)
        if self._gate is not None:
            self._gate.revoke(frozenset(self._revoked))
        for container, certified in self._certified.items():
            self._certified[container] = certified._replace(at=-math.inf)

    def _revoke_container(self, container: int) -> None:
        certified = self._certified.pop(container, None)
        if certified is not None:
            self._revoke(certified.serials, LIFE_S["container"])

    # Upkeep

    def maintain(self, tell: Tell, has_ended: Callable[[int, Term], bool]) -> None:
        """Renews what is due; a container that does not answer gets its certificate another time.

        Whatever that incarnation of a container had to show that serves no more is revoked.
        """
        now = time.monotonic()
        with self._lock:
            for container, certified in list(self._certified.items()):
                if has_ended(container, certified.term):
                    self._revoke_container(container)
            self._revoked = {serial: until_s for serial, until_s in self._revoked.items() if now < until_s}
        if now > self._tasks_at + TASKS_RENEWED_S:
            self._renew_tasks()
        if self._gate is not None and now > self._gate_at + LIFE_S["client"] * RENEWED_AT:
            with self._lock:
                self._gate.renew(self._context())
                self._issue_bundles()
                self._gate_at = now
        self._certify_due(tell)

    def _certify_due(self, tell: Tell) -> None:
        now, renewed_s = time.monotonic(), LIFE_S["container"] * RENEWED_AT
        for container, certified in list(self._certified.items()):
            if now > certified.at + renewed_s:
                # One that does not answer gets another a while later, not at every turn.
                with self._lock:
                    if self._certified.get(container) is not certified:
                        continue
                    self._certified[container] = certified._replace(at=now - renewed_s + TRIED_AGAIN_S)
                with suppress(MillpondError):
                    self._certify(container, tell)

    def _renew_tasks(self) -> None:
        write_pass(self.task_file, self.task())
        self._tasks_at = time.monotonic()

    def _certify(self, container: int, tell: Tell) -> None:
        with self._lock:
            certified = self._certified.get(container)
            if certified is None:
                return
            bundle = self.authority.issue("container", certified.name)
            certified = certified._replace(serials=(*certified.serials, bundle.serial))
            self._certified[container] = certified
            revoked = tuple(self._revoked)
        tell(container, Certify(bundle, revoked))
        with self._lock:
            if self._certified.get(container) is certified:
                self._certified[container] = certified._replace(at=time.monotonic())

    def close(self) -> None:
        for name in (TASKS, *BUNDLES):
            with suppress(OSError):
                os.unlink(os.path.join(self._root, name))


class _Certified(NamedTuple):
    """What a container is called, when its certificate was issued, and the serials of all that it was given."""

    name: str
    term: Term
    at: float
    serials: tuple[str, ...]


class Front:
    """The handler of the coordinator's process: what is about credentials is answered here (a `Handler`)."""

    def __init__(self, coordinator: Handler, passes: Passes) -> None:
        self._coordinator = coordinator
        self._passes = passes
        self.exchange = coordinator.exchange
        self.read = coordinator.read

    def call(self, message: Any) -> Message:
        if isinstance(message, AskTaskPass):
            return self._passes.task()
        return self._coordinator.call(message)


class _Issued(Credentials):
    """Of this very process, which has the authority: certificates are issued as they are needed."""

    def __init__(
        self, issuing: Authority, role: Role, name: str, *, token: str = "", bearer: str = ""
    ) -> None:
        super().__init__(token, bearer=bearer)
        self._issuing = issuing
        self._role: Role = role
        self._name = name
        self._issued_at = 0.0

    def bundle(self) -> Bundle:
        now = time.monotonic()
        if self._bundle is None or now > self._issued_at + LIFE_S[self._role] * RENEWED_AT:
            self._bundle, self._issued_at = self._issuing.issue(self._role, self._name), now
        return self._bundle
