"""TCP by TLS, for any address: each side shows the other a certificate of the pond's authority before anything passes.

`TlsGate` does the handshake itself, within the bounds of every gate, and passes on what it decrypts to a server at a
Unix socket; `TlsTunnel` is the client's side. Inside of TLS a client says which server it means, and waits to be
welcome: by then the certificate that it sent was looked at, too. Only TLS 1.3, in which that tells nobody else who came.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Callable
from contextlib import suppress

from millpond.errors import BadMessage, NotThePond, Unauthorised, no_answer
from millpond.wire import handshake
from millpond.wire.authority import Bundle, role_in, server_name
from millpond.wire.channel import Channel, TlsPumped
from millpond.wire.gate import Admission, Pending, Port
from millpond.wire.pumping import Check, Pumped
from millpond.wire.sockets import POND, SocketDirectory, is_name
from millpond.wire.tunnel import Tunnel

HELLO = struct.Struct("!16s64s")
MAGIC = b"millpond tls 1\n\0"
HANDSHAKE_BYTES_MAX = 16 << 10
"""Of a connection, until it is welcome. A client's part takes some 2,000."""
_READ_BYTES = 4096


class TlsGate(Port):
    """At any address, by certificates of the pond's authority.

    It passes on to servers in `sockets`: to all of them, as the coordinator's does, or to the one that is `only`, as a
    container's own. `context` is what `Bundle.serving` gives; `renew` replaces it. Connections that are there stay.
    """

    def __init__(
        self, context: ssl.SSLContext, sockets: SocketDirectory, host: str, port: int, only: str = ""
    ) -> None:
        self._context = context
        self._only = only
        self._revoked: frozenset[str] = frozenset()
        super().__init__(sockets, host, port)

    def renew(self, context: ssl.SSLContext) -> None:
        self._context = context

    def revoke(self, serials: frozenset[str]) -> None:
        """From now on, nobody is let in by these certificates; connections of theirs end."""
        self._revoked = serials
        with self._lock:
            ended = [pumped for pumped, each in self._admitted.items() if each.admission.serial in serials]
        for pumped in ended:
            pumped.shut()

    def _met(self, connection: socket.socket, deadline: float) -> Pending:
        return _ByCertificate(connection, deadline, Channel(self._context))

    def _reached(self, admission: Admission, inner: socket.socket) -> bytes:
        if admission.serial in self._revoked:
            return handshake.REFUSED
        if self._only and admission.server != self._only:
            return handshake.GONE
        return super()._reached(admission, inner)


class _ByCertificate(Pending):
    def __init__(self, connection: socket.socket, deadline: float, channel: Channel) -> None:
        super().__init__(connection, deadline)
        self._channel = channel
        self._shaken = False
        self._hello = b""
        self._left = HANDSHAKE_BYTES_MAX

    def read(self) -> Admission | None:
        try:
            data = self.connection.recv(min(_READ_BYTES, self._left))
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionResetError
        self._left -= len(data)
        self._channel.feed(data)
        if not self._shaken:
            try:
                self._shaken = self._channel.shake()
            finally:
                # Also why not. It fits into the buffer of a socket on which little was sent yet.
                answer = self._channel.take()
                self.has_spoken |= answer != b""
                self.connection.sendall(answer)
        if self._shaken:
            self._hello += self._channel.read(HELLO.size - len(self._hello))
        if len(self._hello) == HELLO.size:
            return self._admission()
        if self._left == 0:
            raise BadMessage("a handshake of too many bytes")
        return None

    def _admission(self) -> Admission:
        magic, server = HELLO.unpack(self._hello)
        name = server.rstrip(b"\0").decode("ascii", "replace")
        if magic != MAGIC or not is_name(name):
            raise BadMessage("a connection did not begin with a handshake of this version")
        certificate = self._channel.tls.getpeercert() or {}
        serial = str(certificate.get("serialNumber", "")).lower().lstrip("0")
        return Admission(role_in(certificate), name, serial)

    def answer(self, word: bytes) -> None:
        with suppress(OSError):
            self.connection.sendall(self._channel.sealed(word))

    def pumped(self, inner: socket.socket, check: Check | None, ended: Callable[[Pumped], None]) -> Pumped:
        return TlsPumped(self.connection, inner, self._channel, check=check, ended=ended)


class TlsTunnel(Tunnel):
    """To the server of a name at an address: a container at its own, or whatever is behind the pond's (`through_pond`).

    Whoever listens there must show the certificate of that container in that term, or of the pond.
    """

    def __init__(self, address: str, server: str, bundle: Callable[[], Bundle], through_pond: bool) -> None:
        self._bundle = bundle
        self._expected = POND if through_pond else server
        self._through_pond = through_pond
        bundle().connecting(through_pond)  # who has none is told here
        super().__init__(address, server)

    def _joined(self, inner: socket.socket) -> Pumped:
        context = self._bundle().connecting(self._through_pond)
        outer, deadline = self._reach()
        try:
            channel = Channel(context, server_name(self._expected))
            self._shake(outer, channel, deadline)
            return TlsPumped(outer, inner, channel, ended=self._forget)
        except BaseException:
            outer.close()
            raise

    def _shake(self, outer: socket.socket, channel: Channel, deadline: float) -> None:
        try:
            while not channel.shake():
                outer.sendall(channel.take())
                channel.feed(_some(outer, deadline))
        except ssl.SSLError as error:
            # Why not, for who listens there.
            with suppress(OSError):
                outer.sendall(channel.take())
            raise self._not_the_pond(error) from None
        except ConnectionError:
            # A network that fails, or one who has nothing to show: whoever tries again tells it as little.
            raise no_answer(
                self.address, f"it hung up before it had shown that it is {self._expected}"
            ) from None
        try:
            hello = channel.sealed(HELLO.pack(MAGIC, self._server.encode()))
            outer.sendall(hello)
            while not (answer := channel.read(1)):
                channel.feed(_some(outer, deadline))
        except ssl.SSLError as error:
            raise self._refused(error) from None
        except ConnectionError:
            answer = b""
        if answer == handshake.REFUSED:
            raise self._refused(None)
        self._check(answer)

    def _not_the_pond(self, error: OSError) -> NotThePond:
        why = getattr(error, "verify_message", "") or getattr(error, "reason", "") or str(error)
        who = "the pond" if self._expected == POND else self._expected
        return NotThePond(
            f"what listens at {self.address} did not show that it is {who} of this certificate ({why}); it was told nothing",
            hint="is the pond open at this address? Each opening has certificates of its own: copy client.pem, or"
            " client.read.pem, from its root anew",
            address=self.address,
        )

    def _refused(self, error: ssl.SSLError | None) -> Unauthorised:
        why = "it is revoked" if error is None else str(error.reason).lower().replace("_", " ")
        return Unauthorised(
            f"{self.address} refused the certificate ({why})",
            hint="copy client.pem, or client.read.pem, from the root of the pond as it is open now",
        )


def _some(connection: socket.socket, deadline: float) -> bytes:
    """What has come, at least one byte; TimeoutError if none does, ConnectionResetError if none will."""
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    data = connection.recv(HANDSHAKE_BYTES_MAX)
    if not data:
        raise ConnectionResetError
    return data
