"""Where Spark tasks that keep containers dial home to: a port of the driver's, at the address that executors know it by.

Nothing that a stranger sends goes further than the handshake of TLS, in which it has no certificate to show, and of strangers
only so many are heard at a time.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from millpond.errors import BadMessage, BadOption
from millpond.wire.home import ARRIVED_BYTES_MAX, Arrived, Door, Grant, Line, Message

PENDING_MAX = 64
HANDSHAKE_S = 10.0
CLOSE_S = 5.0


class TaskLine:
    """The driver's end of the line to one attempt of a task. For any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, line: Line, arrived: Arrived) -> None:
        self._loop = loop
        self._line = line
        self.arrived = arrived

    @property
    def fell_silent(self) -> bool:
        return self._line.fell_silent

    def send(self, message: Message) -> None:
        self._do(lambda: self._line.send(message))

    def close(self) -> None:
        self._do(self._line.close)

    def _do(self, work: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended, and the line with it
            self._loop.call_soon_threadsafe(work)


class Visits(Protocol):
    """Who is told of tasks that come home. All is called in the thread of `Home`, and must not wait."""

    def arrived(self, line: TaskLine) -> bool:
        """Whether its grant is good. One that is not is hung up on."""

    def said(self, line: TaskLine, message: Message) -> None: ...

    def lost(self, line: TaskLine) -> None: ...


class Home:
    """Listens at the address `bind`, on a port that the system picks; executors reach it at `host`."""

    def __init__(self, bind: str, host: str, visits: Visits) -> None:
        self._visits = visits
        self._door = Door()
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        try:
            self._listener = socket.create_server((bind.strip("[]"), 0), family=family, backlog=PENDING_MAX)
        except OSError as error:
            raise BadOption(
                f"the driver cannot listen on {bind}, where its executors would dial home: {error.strerror}",
                hint="set spark.driver.host to an address of this machine that executors reach,"
                " and spark.driver.bindAddress to one that it has",
                option="hosting",
            ) from None
        self._listener.setblocking(False)
        self.host = host.strip("[]")
        self.port = int(self._listener.getsockname()[1])
        # Who has not shown a grant yet, the oldest first.
        self._strangers: dict[asyncio.Task[None], None] = {}
        self._meetings: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="millpond-home", daemon=True)
        self._thread.start()

    def grant(self) -> Grant:
        """For the attempts of one task."""
        return self._door.grant()

    def close(self) -> None:
        """Hangs up on all."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop)
            self._thread.join(CLOSE_S)
        self._listener.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._accepting = self._loop.create_task(self._accept())
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._accepting)
            meetings = list(self._meetings)
            for meeting in meetings:
                meeting.cancel()
            self._loop.run_until_complete(asyncio.gather(*meetings, return_exceptions=True))
        finally:
            self._loop.close()

    def _stop(self) -> None:
        self._accepting.cancel()

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
            except OSError:
                # No handle is left: one is freed, and who waits is let in after.
                self._end_oldest()
                await asyncio.sleep(0.1)
                continue
            if len(self._strangers) >= PENDING_MAX:
                self._end_oldest()
            meeting = self._loop.create_task(self._meet(connection))
            self._strangers[meeting] = None
            self._meetings.add(meeting)
            meeting.add_done_callback(self._meetings.discard)

    def _end_oldest(self) -> None:
        """It has had its chance: who means it needs a moment only."""
        for oldest in list(self._strangers)[:1]:
            del self._strangers[oldest]
            oldest.cancel()

    async def _meet(self, connection: socket.socket) -> None:
        # From here on, the connection is its transport's to close.
        try:
            task = await self._admitted(connection)
        finally:
            meeting = asyncio.current_task()
            assert meeting is not None
            self._strangers.pop(meeting, None)
        if task is None:
            return
        line, visitor = task
        try:
            async for message in line.messages():
                self._visits.said(visitor, message)
        finally:
            line.close()
            self._visits.lost(visitor)

    async def _admitted(self, connection: socket.socket) -> tuple[Line, TaskLine] | None:
        line = admitted = None
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                reader = asyncio.StreamReader(limit=ARRIVED_BYTES_MAX)
                protocol = asyncio.StreamReaderProtocol(reader)
                transport, _ = await self._loop.connect_accepted_socket(
                    lambda: protocol,
                    connection,
                    ssl=self._door.context,
                    ssl_handshake_timeout=HANDSHAKE_S,
                )
                line = Line(reader, asyncio.StreamWriter(transport, protocol, reader, self._loop))
                first = await line.receive(ARRIVED_BYTES_MAX)
            if isinstance(first, Arrived):
                visitor = TaskLine(self._loop, line, first)
                if self._visits.arrived(visitor):
                    admitted = line, visitor
        except (OSError, BadMessage):
            pass
        finally:
            if line is not None and admitted is None:
                line.abort()
        return admitted
