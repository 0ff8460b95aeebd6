"""TLS without sockets, and two connections joined of which the outer one speaks it."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from millpond.errors import MillpondError
from millpond.wire.pumping import BUFFER_BYTES, Check, Pumped


class Channel:
    """TLS without a socket: what was received goes in, and what is to be sent comes out."""

    def __init__(self, context: ssl.SSLContext, server: str | None = None) -> None:
        """Of a server, or of a client that means the `server` of that name."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server is None, server_hostname=server
        )

    def feed(self, data: bytes | memoryview) -> None:
        self._incoming.write(data)

    def take(self) -> bytes:
        return self._outgoing.read()

    def shake(self) -> bool:
        """Goes on with the handshake; whether it is done."""
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def read(self, size: int) -> bytes:
        """At most that many bytes; none if there are none yet. ConnectionResetError when the other side has ended."""
        try:
            data = self.tls.read(size)
        except ssl.SSLWantReadError:
            return b""
        if not data:
            raise ConnectionResetError
        return data

    def read_into(self, buffer: memoryview) -> int | None:
        """As far as has come; None if nothing has, 0 at the end."""
        done = 0
        while done < len(buffer):
            try:
                size = self.tls.read(len(buffer) - done, buffer[done:])
            except ssl.SSLWantReadError:
                return done or None
            if not size:
                return done
            done += int(size)
        return done

    def sealed(self, data: bytes | memoryview) -> bytes:
        """What to send, so that the other side reads `data`."""
        done = 0
        while done < len(data):
            done += self.tls.write(data[done:])
        return self.take()


class TlsPumped(Pumped):
    """As `Pumped`, where the outer side speaks TLS. One thread, for both directions: OpenSSL allows no two at once."""

    def __init__(
        self,
        outer: socket.socket,
        inner: socket.socket,
        channel: Channel,
        *,
        check: Check | None = None,
        ended: Callable[[Pumped], None] = lambda pumped: None,
    ) -> None:
        self._channel = channel
        super().__init__(outer, inner, check=check, ended=ended)

    def _made(self, check: Check | None) -> list[threading.Thread]:
        for each in (self._outer, self._inner):
            each.setblocking(False)
        return [threading.Thread(target=self._both, args=(check,), name="millpond-pump", daemon=True)]

    def _both(self, check: Check | None) -> None:
        with suppress(OSError, MillpondError):
            sides = self._outer, self._inner, self._channel
            inwards, outwards = _Inwards(*sides, check), _Outwards(*sides)
            waiting = select.poll()
            while not (inwards.ended or outwards.ended):
                moved = [way.move() for way in (inwards, outwards)]
                if any(moved):
                    self._moved_at = time.monotonic()
                    continue
                for source, events in (
                    (self._outer, inwards.wants_source | outwards.wants_target),
                    (self._inner, outwards.wants_source | inwards.wants_target),
                ):
                    # One of which nothing is wanted would wake this thread by its end, again and again.
                    with suppress(KeyError):
                        waiting.unregister(source)
                    if events:
                        waiting.register(source, events)
                waiting.poll()
        self.shut()
        self._leave(1)


class _Way:
    """Bytes on their way from one side to the other, as many as a buffer holds."""

    def __init__(self, outer: socket.socket, inner: socket.socket, channel: Channel) -> None:
        self._outer, self._inner, self._channel = outer, inner, channel
        self.ended = False
        self._plain = memoryview(bytearray(BUFFER_BYTES))
        self._ready = memoryview(b"")

    @property
    def wants_source(self) -> int:
        return 0 if self._ready else select.POLLIN

    @property
    def wants_target(self) -> int:
        return select.POLLOUT if self._ready else 0

    def _send(self, target: socket.socket) -> bool:
        """Whether some went."""
        try:
            self._ready = self._ready[target.send(self._ready) :]
        except BlockingIOError:
            return False
        return True


class _Inwards(_Way):
    def __init__(
        self, outer: socket.socket, inner: socket.socket, channel: Channel, check: Check | None
    ) -> None:
        super().__init__(outer, inner, channel)
        self._check = check
        self._raw = memoryview(bytearray(BUFFER_BYTES))

    def move(self) -> bool:
        """Whether it came further."""
        if not self._ready:
            size = self._channel.read_into(self._plain)
            if size is None:
                with suppress(BlockingIOError):
                    received = self._outer.recv_into(self._raw)
                    self.ended = received == 0
                    self._channel.feed(self._raw[:received])
                    return True
                return False
            self.ended = size == 0
            self._ready = self._plain[:size]
            if self._check is not None:
                self._check(self._ready)
        return self._send(self._inner)


class _Outwards(_Way):
    def move(self) -> bool:
        """Whether it came further."""
        if not self._ready:
            try:
                size = self._inner.recv_into(self._plain)
            except BlockingIOError:
                return False
            self.ended = size == 0
            self._ready = memoryview(self._channel.sealed(self._plain[:size]))
        return self._send(self._outer)
