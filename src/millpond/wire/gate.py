"""TCP ports: they let in who shows that they may come, and pass their bytes on.

Behind them, all that serves listens on Unix sockets of the pond's owner. Until a handshake is done, nothing but the gate
itself sees a byte. `Gate` is for loopback and goes by tokens (`wire.handshake`): of a connection it takes no more than
145 bytes before. The other one goes by certificates (`wire.tls`).
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from millpond.errors import BadMessage, BadOption, MillpondError
from millpond.wire import handshake
from millpond.wire.handshake import address_of
from millpond.wire.pumping import Check, Pumped
from millpond.wire.roles import Role
from millpond.wire.sieve import Sieve, Turnstile
from millpond.wire.sockets import SocketDirectory, caller_name

LOOPBACK = ("127.0.0.1", "localhost", "::1")
PENDING_MAX = 64
"""Handshakes at a time. One more ends the oldest, of one that said nothing if there is: who means it needs a
millisecond."""
HANDSHAKE_S = 5.0
CONNECTIONS_MAX = 256
READERS_MAX = 128
"""Of these, by holders of the read-only token."""
READER_IDLE_S = 150.0
"""A question has 120 s to be answered: a reader's connection on which nothing moves for longer asks none."""
TICK_S = 0.5
_ROLES: dict[bytes, Role] = {handshake.FULL: "client", handshake.READ: "reader", handshake.TASK: "task"}


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there. Anything else needs TLS."""
    return host in LOOPBACK


class Admission(NamedTuple):
    """Who has shown that they may come, and to which server. `serial` is that of their certificate, if they have one."""

    role: Role
    server: str
    serial: str = ""

    @property
    def is_reader(self) -> bool:
        return self.role == "reader"


class Pending(ABC):
    """A connection whose handshake is under way. It never waits for the other side."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self.connection = connection
        self.deadline = deadline
        self.has_spoken = False
        """Whether it began as it should."""

    @abstractmethod
    def read(self) -> Admission | None:
        """Takes what has come; who it is, when the other side has shown it. An error ends the connection."""

    def answer(self, word: bytes) -> None:
        with suppress(OSError):
            self.connection.sendall(word)

    def pumped(self, inner: socket.socket, check: Check | None, ended: Callable[[Pumped], None]) -> Pumped:
        """The connection, joined with that of a server."""
        return Pumped(self.connection, inner, check=check, ended=ended)


class Port(ABC):
    """Listens, on a port that the system picks if it is 0; keeps a bounded number of handshakes and of connections."""

    def __init__(self, sockets: SocketDirectory, host: str, port: int) -> None:
        self._sockets = sockets
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=PENDING_MAX)
        except OSError as error:
            taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
            raise BadOption(
                f"a pond cannot listen on {host}:{port}: {error.strerror}",
                hint="choose a port that is free, or 0 to let the system pick one"
                if taken
                else "choose an address of this machine, as 127.0.0.1, or 0.0.0.0 for all that it has",
                option="port" if taken else "host",
            ) from None
        self._listener.setblocking(False)
        self.address = address_of(self._listener.getsockname())
        self._pending: list[Pending] = []
        self._admitted: dict[Pumped, _Admitted] = {}
        self._turnstile = Turnstile()
        self._lock = threading.Lock()
        self._closing = False
        # A byte here wakes the loop.
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: None)
        self._thread = threading.Thread(target=self._serve, name="millpond-gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Returns when no connection is left."""
        self._closing = True
        self._waker.send(b"x")
        self._thread.join()
        for pending in list(self._pending):
            self._end(pending)
        self._selector.close()
        for each in (self._listener, self._waker, self._woken):
            each.close()
        with self._lock:
            admitted = list(self._admitted)
        # All at once: one may wait for another.
        for pumped in admitted:
            pumped.shut()
        for pumped in admitted:
            pumped.close()

    def _serve(self) -> None:
        while not self._closing:
            events = [key for key, _ in self._selector.select(TICK_S)]
            # Who has said something is heard before one more comes, which may end another.
            for key in sorted(events, key=lambda key: key.fileobj is self._listener):
                # Whatever a stranger sends, or the system lacks, concerns one connection.
                with suppress(Exception):
                    key.data()
            now = time.monotonic()
            for pending in [pending for pending in self._pending if now > pending.deadline]:
                self._end(pending)
            with self._lock:
                ended = [
                    pumped for pumped, each in self._admitted.items() if _is_over(pumped, each.sieve, now)
                ]
            for pumped in ended:
                pumped.shut()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # No handle is left: one is freed, and who waits is let in after.
            self._end_one()
            time.sleep(0.01)
            raise
        connection.setblocking(False)
        if len(self._pending) >= PENDING_MAX:
            self._end_one()
        pending = self._met(connection, time.monotonic() + HANDSHAKE_S)
        self._pending.append(pending)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._advance(pending))

    @abstractmethod
    def _met(self, connection: socket.socket, deadline: float) -> Pending:
        """A handshake that begins."""

    def _advance(self, pending: Pending) -> None:
        try:
            admission = pending.read()
        except (OSError, MillpondError):
            self._end(pending)
            return
        if admission is not None:
            self._leave(pending)
            self._admit(pending, admission)

    def _admit(self, pending: Pending, admission: Admission) -> None:
        """Passes the connection on to the server that it means, in threads of its own."""
        pending.connection.settimeout(HANDSHAKE_S)
        inner = socket.socket(socket.AF_UNIX)
        answer = self._reached(admission, inner)
        pending.answer(answer)
        if answer != handshake.WELCOME:
            inner.close()
            pending.connection.close()
            return
        sieve = Sieve(self._turnstile) if admission.is_reader else None
        pumped = pending.pumped(inner, None if sieve is None else sieve.feed, self._forget)
        with self._lock:
            self._admitted[pumped] = _Admitted(admission, sieve)
        pumped.start()

    def _reached(self, admission: Admission, inner: socket.socket) -> bytes:
        """Connects `inner` to the server that is meant; what to tell who asked for it."""
        with self._lock:
            readers = sum(each.sieve is not None for each in self._admitted.values())
            if len(self._admitted) >= CONNECTIONS_MAX or (admission.is_reader and readers >= READERS_MAX):
                return handshake.BUSY
        try:
            # A server that accepts nobody holds nobody else up.
            inner.setblocking(False)
            own = self._sockets.path_of(caller_name(admission.role))
            inner.bind(own)
            try:
                inner.connect(self._sockets.path_of(admission.server))
            finally:
                # The name is told by then, and nobody is to connect to it.
                os.unlink(own)
        except BlockingIOError:
            return handshake.BUSY
        except OSError:
            return handshake.GONE
        return handshake.WELCOME

    def _forget(self, pumped: Pumped) -> None:
        with self._lock:
            sieve = self._admitted.pop(pumped).sieve
        if sieve is not None:
            sieve.close()

    def _end_one(self) -> None:
        oldest = sorted(self._pending, key=lambda pending: (pending.has_spoken, pending.deadline))
        for pending in oldest[:1]:
            self._end(pending)

    def _leave(self, pending: Pending) -> None:
        self._pending.remove(pending)
        self._selector.unregister(pending.connection)

    def _end(self, pending: Pending) -> None:
        self._leave(pending)
        pending.connection.close()


class _Admitted(NamedTuple):
    admission: Admission
    sieve: Sieve | None


class Gate(Port):
    """On loopback, by tokens; of tasks too, where there is a secret for them."""

    def __init__(
        self, token: str, sockets: SocketDirectory, host: str, port: int, tasks: bytes = b""
    ) -> None:
        if not is_loopback(host):
            raise BadOption(
                f"a pond does not listen on {host} without TLS",
                hint="use 127.0.0.1; from elsewhere, clients come by certificates",
                option="host",
            )
        self._doorkeeper = handshake.Doorkeeper(token, tasks)
        super().__init__(sockets, host, port)

    def _met(self, connection: socket.socket, deadline: float) -> Pending:
        return _ByToken(connection, deadline, self._doorkeeper)


class _ByToken(Pending):
    def __init__(self, connection: socket.socket, deadline: float, doorkeeper: handshake.Doorkeeper) -> None:
        super().__init__(connection, deadline)
        self._hello = b""
        self._doorkeeper = doorkeeper
        self._offer = b""
        self._read = b""
        self._address = address_of(connection.getsockname())

    def read(self) -> Admission | None:
        wanted = handshake.PROOF_BYTES if self._offer else handshake.HELLO.size
        try:
            more = self.connection.recv(wanted - len(self._read))
        except BlockingIOError:
            return None
        if not more:
            raise ConnectionResetError
        self._read += more
        if len(self._read) < wanted:
            return None
        whole, self._read = self._read, b""
        if self._offer:
            if not self._doorkeeper.admits(self._hello, self._offer, self._address, whole):
                self.answer(handshake.REFUSED)
                raise BadMessage("a wrong token")
            role, server = self._doorkeeper.heard(self._hello)
            return Admission(_ROLES[role], server)
        self._doorkeeper.heard(whole)
        self._hello = whole
        self.has_spoken = True
        self._offer = self._doorkeeper.offer(whole, self._address)
        # It fits into the buffer of a socket on which nothing was sent yet.
        self.connection.sendall(self._offer)
        return None


def _is_over(pumped: Pumped, sieve: Sieve | None, now: float) -> bool:
    """Whether a reader's connection is idle, or takes too long."""
    return sieve is not None and (pumped.idle_s(now) > READER_IDLE_S or sieve.is_overdue(now))
