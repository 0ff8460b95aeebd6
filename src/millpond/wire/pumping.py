"""Two connections, joined: what one sends, the other receives."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from millpond.errors import MillpondError

BUFFER_BYTES = 256 << 10
Check = Callable[[memoryview], None]
"""Looks at what the outer side sends; an error of its ends the connection."""


class Pumped:
    """Passes bytes on in both directions, in two threads, until either side ends or breaks a rule.

    `check` looks at what the outer side sends before it is passed on; an error of its ends both. `ended` is called
    once, when both are closed.
    """

    def __init__(
        self,
        outer: socket.socket,
        inner: socket.socket,
        *,
        check: Check | None = None,
        ended: Callable[[Pumped], None] = lambda pumped: None,
    ) -> None:
        self._outer, self._inner = outer, inner
        self._ended = ended
        self._lock = threading.Lock()
        self._moved_at = time.monotonic()
        if outer.family != socket.AF_UNIX:
            outer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._threads = self._made(check)
        self._running = len(self._threads)

    def _made(self, check: Check | None) -> list[threading.Thread]:
        for each in (self._outer, self._inner):
            each.settimeout(None)
        ways = ((self._outer, self._inner, check), (self._inner, self._outer, None))
        return [
            threading.Thread(target=self._pump, args=way, name="millpond-pump", daemon=True) for way in ways
        ]

    def start(self) -> None:
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:  # there is no room for its stack
            self.shut()
            self._leave(sum(thread.ident is None for thread in self._threads))

    def idle_s(self, now: float) -> float:
        return now - self._moved_at

    def close(self) -> None:
        """Returns when both directions have ended."""
        self.shut()
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join()

    def _pump(self, source: socket.socket, target: socket.socket, check: Check | None) -> None:
        buffer = memoryview(bytearray(BUFFER_BYTES))
        with suppress(OSError, MillpondError):
            while size := source.recv_into(buffer):
                self._moved_at = time.monotonic()
                if check is not None:
                    check(buffer[:size])
                target.sendall(buffer[:size])
        self.shut()
        self._leave(1)

    def shut(self) -> None:
        """Neither side waits any more."""
        for each in (self._outer, self._inner):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _leave(self, threads: int) -> None:
        with self._lock:
            self._running -= threads
            is_last = self._running == 0
        if is_last:
            self._outer.close()
            self._inner.close()
            self._ended(self)
