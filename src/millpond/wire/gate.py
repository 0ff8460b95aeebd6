"""The pond's only TCP port: it lets in who shows that they know the pond's secret, and passes their bytes on.

Behind it, all that serves listens on Unix sockets of the pond's owner. Until a handshake is done (`wire.handshake`),
nothing but the gate itself sees a byte, and of a connection it takes no more than 145.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from contextlib import suppress

from millpond.errors import BadMessage, BadOption, MillpondError
from millpond.wire import handshake
from millpond.wire.handshake import address_of
from millpond.wire.pumping import Pumped
from millpond.wire.sieve import Sieve, Turnstile
from millpond.wire.sockets import SocketDirectory

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


def check_host(host: str) -> None:
    """Only loopback: what a pond sends is not encrypted."""
    if host not in LOOPBACK:
        raise BadOption(
            f"a pond does not listen on {host}: its traffic is not encrypted",
            hint="use 127.0.0.1 and reach it from elsewhere through a tunnel that keeps the port,"
            " for example ssh -L 8815:127.0.0.1:8815",
            option="host",
        )


class Gate:
    """Listens on loopback, on a port that the system picks if it is 0."""

    def __init__(self, token: str, sockets: SocketDirectory, host: str, port: int) -> None:
        check_host(host)
        self._doorkeeper = handshake.Doorkeeper(token)
        self._sockets = sockets
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=PENDING_MAX)
        except OSError as error:
            raise BadOption(
                f"a pond cannot listen on {host}:{port}: {error.strerror}",
                hint="choose a port that is free, or 0 to let the system pick one",
                option="port",
            ) from None
        self._listener.setblocking(False)
        self.address = address_of(self._listener.getsockname())
        self._pending: list[_Pending] = []
        self._admitted: dict[Pumped, Sieve | None] = {}
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
                ended = [pumped for pumped, sieve in self._admitted.items() if _is_over(pumped, sieve, now)]
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
        pending = _Pending(connection, self._doorkeeper, time.monotonic() + HANDSHAKE_S)
        self._pending.append(pending)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._advance(pending))

    def _advance(self, pending: _Pending) -> None:
        try:
            is_done = pending.read()
        except (OSError, MillpondError):
            self._end(pending)
            return
        if is_done:
            self._leave(pending)
            self._admit(pending)

    def _admit(self, pending: _Pending) -> None:
        """Passes the connection on to the server that it means, in threads of its own."""
        connection = pending.connection
        connection.settimeout(HANDSHAKE_S)
        role, name = self._doorkeeper.heard(pending.hello)
        is_reader = role == handshake.READ
        inner = socket.socket(socket.AF_UNIX)
        answer = self._reached(name, is_reader, inner)
        with suppress(OSError):
            connection.sendall(answer)
        if answer != handshake.WELCOME:
            inner.close()
            connection.close()
            return
        sieve = Sieve(self._turnstile) if is_reader else None
        pumped = Pumped(connection, inner, check=None if sieve is None else sieve.feed, ended=self._forget)
        with self._lock:
            self._admitted[pumped] = sieve
        pumped.start()

    def _reached(self, name: str, is_reader: bool, inner: socket.socket) -> bytes:
        """Connects `inner` to the server of that name; what to tell who asked for it."""
        with self._lock:
            readers = sum(sieve is not None for sieve in self._admitted.values())
            if len(self._admitted) >= CONNECTIONS_MAX or (is_reader and readers >= READERS_MAX):
                return handshake.BUSY
        try:
            # A server that accepts nobody holds nobody else up.
            inner.setblocking(False)
            inner.connect(self._sockets.path_of(name))
        except BlockingIOError:
            return handshake.BUSY
        except OSError:
            return handshake.GONE
        return handshake.WELCOME

    def _forget(self, pumped: Pumped) -> None:
        with self._lock:
            sieve = self._admitted.pop(pumped)
        if sieve is not None:
            sieve.close()

    def _end_one(self) -> None:
        oldest = sorted(self._pending, key=lambda pending: (pending.hello != b"", pending.deadline))
        for pending in oldest[:1]:
            self._end(pending)

    def _leave(self, pending: _Pending) -> None:
        self._pending.remove(pending)
        self._selector.unregister(pending.connection)

    def _end(self, pending: _Pending) -> None:
        self._leave(pending)
        pending.connection.close()


class _Pending:
    """A connection whose handshake is under way. It never waits for the other side."""

    def __init__(self, connection: socket.socket, doorkeeper: handshake.Doorkeeper, deadline: float) -> None:
        self.connection = connection
        self.deadline = deadline
        self.hello = b""
        self._doorkeeper = doorkeeper
        self._offer = b""
        self._read = b""
        self._address = address_of(connection.getsockname())

    def read(self) -> bool:
        """Takes what has come; True when the other side has shown who it is. An error ends the connection."""
        wanted = handshake.PROOF_BYTES if self._offer else handshake.HELLO.size
        try:
            more = self.connection.recv(wanted - len(self._read))
        except BlockingIOError:
            return False
        if not more:
            raise ConnectionResetError
        self._read += more
        if len(self._read) < wanted:
            return False
        whole, self._read = self._read, b""
        if self._offer:
            if self._doorkeeper.admits(self.hello, self._offer, self._address, whole):
                return True
            _refuse(self.connection, handshake.REFUSED)
            raise BadMessage("a wrong token")
        self._doorkeeper.heard(whole)
        self.hello = whole
        self._offer = self._doorkeeper.offer(whole, self._address)
        # It fits into the buffer of a socket on which nothing was sent yet.
        self.connection.sendall(self._offer)
        return False


def _is_over(pumped: Pumped, sieve: Sieve | None, now: float) -> bool:
    """Whether a reader's connection is idle, or takes too long."""
    return sieve is not None and (pumped.idle_s(now) > READER_IDLE_S or sieve.is_overdue(now))


def _refuse(connection: socket.socket, why: bytes) -> None:
    with suppress(OSError):
        connection.sendall(why)
