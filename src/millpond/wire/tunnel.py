"""The client's side of a gate: a Unix socket of its own process, from which every connection goes through a handshake.

Flight connects anew by itself whenever it sees fit, and sends headers at once. Here it never reaches a server that
has not shown who it is: each of its connections ends in this process.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

from millpond.errors import MillpondError, NotThePond, no_answer, token_refused
from millpond.wire import handshake
from millpond.wire.pumping import Pumped
from millpond.wire.sockets import SocketDirectory

_SOCKET = "tunnel"
HANDSHAKE_S = 10.0


class Tunnel(ABC):
    """From `path`, a Unix socket of this process, to one server behind the gate at `address`. How each connection gets
    through it, other classes say.
    """

    def __init__(self, address: str, server: str) -> None:
        self.address = address
        self._server = server
        self.problem: MillpondError | None = None
        """Why the last connection could not be made, if so."""
        self._directory = SocketDirectory(tempfile.mkdtemp(prefix="millpond-"))
        self.path = self._directory.path_of(_SOCKET)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._stop = weakref.finalize(self, _stop, self._listener, self._directory.path, os.getpid())
        self._open: set[Pumped] = set()
        self._lock = threading.Lock()
        # It does not keep a tunnel that is forgotten: that stops the listener, and it ends.
        threading.Thread(
            target=_accept, args=(self._listener, weakref.ref(self)), name="millpond-tunnel", daemon=True
        ).start()

    def join(self, inner: socket.socket) -> None:
        """Lets a connection of this process go on to the server; closes it where that cannot be."""
        try:
            pumped = self._joined(inner)
        except Exception as error:  # noqa: BLE001 - told to who asked, in another thread
            self.problem = error if isinstance(error, MillpondError) else no_answer(self.address, repr(error))
            inner.close()
            return
        self.problem = None
        with self._lock:
            self._open.add(pumped)
        pumped.start()

    @abstractmethod
    def _joined(self, inner: socket.socket) -> Pumped:
        """That connection, joined with one to the server, which has shown that it is the one."""

    def _reach(self) -> tuple[socket.socket, float]:
        """A connection to the address, by no proxy, and until when a handshake on it must be done."""
        host, _, port = self.address.rpartition(":")
        deadline = time.monotonic() + HANDSHAKE_S
        try:
            return socket.create_connection((host.strip("[]"), int(port)), HANDSHAKE_S), deadline
        except (OSError, OverflowError, ValueError) as error:
            raise no_answer(self.address, str(error)) from None

    def _check(self, answer: bytes) -> None:
        if answer == handshake.WELCOME:
            return
        why = {handshake.BUSY: "it has too many connections", handshake.GONE: f"{self._server} has ended"}
        raise no_answer(self.address, why.get(answer, "it hung up"))

    def _forget(self, pumped: Pumped) -> None:
        with self._lock:
            self._open.discard(pumped)

    def close(self) -> None:
        self._stop()
        with self._lock:
            pumped = list(self._open)
        for each in pumped:
            each.close()
        self._directory.close()


class TokenTunnel(Tunnel):
    """Through a gate on loopback, by a token."""

    def __init__(self, address: str, server: str, token: Callable[[], str]) -> None:
        self._token = token
        handshake.Credentials(token())  # what is no token is refused here
        super().__init__(address, server)

    def _joined(self, inner: socket.socket) -> Pumped:
        credentials = handshake.Credentials(self._token())
        outer, deadline = self._reach()
        try:
            hello = credentials.hello(self._server)
            outer.sendall(hello)
            offer = _received(outer, handshake.OFFER.size, deadline)
            if len(offer) < handshake.OFFER.size:
                raise NotThePond(
                    f"what listens at {self.address} did not show that it is a pond; it was told nothing",
                    hint="is a pond of the same version of millpond open at this address? At other addresses than"
                    " loopback it also asks for a certificate: give certificate= (--certificate), a copy of client.pem from"
                    " its root",
                    address=self.address,
                )
            outer.sendall(credentials.proof(hello, offer, handshake.address_of(outer.getpeername())))
            answer = _received(outer, 1, deadline)
            if answer == handshake.REFUSED:
                raise token_refused(self.address)
            self._check(answer)
        except OSError as error:
            outer.close()
            raise error if isinstance(error, MillpondError) else no_answer(self.address, str(error)) from None
        return Pumped(outer, inner, ended=self._forget)


def _stop(listener: socket.socket, directory: str, pid: int) -> None:
    if os.getpid() != pid:
        return  # a child that was forked: all this is its parent's
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    shutil.rmtree(directory, ignore_errors=True)


def _accept(listener: socket.socket, tunnel: weakref.ref[Tunnel]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        here = tunnel()
        if here is None:
            connection.close()
            return
        threading.Thread(target=here.join, args=(connection,), name="millpond-dial", daemon=True).start()
        del here


def _received(connection: socket.socket, size: int, deadline: float) -> bytes:
    """That many bytes, or fewer if the other side hangs up; TimeoutError if it does neither."""
    data = b""
    while len(data) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        more = connection.recv(size - len(data))
        if not more:
            break
        data += more
    return data
