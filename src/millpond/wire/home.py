"""The line between a Spark task that keeps a container and the driver: what is said on it, and how.

    task      Arrived: the grant, which it read from a file under the root, and where it runs
    driver    Start: a container, in one incarnation
    task      Greeted, or Ended, and Ended whenever it ends
    driver    End: that container; Leave: the task ends, and with it what it keeps

Both sides send a beat twice a second. A driver that hears nothing for `LEASE_S` takes the task for gone. A task is more
patient, as all containers would end with their driver: one that has ended hangs up at once, and of a machine that is gone, or
out of reach, nothing that was sent is acknowledged for `LEASE_S`. Whose system acknowledges it and who says nothing has been
stopped, and is given `STOPPED_S`. Silence is counted in turns of the own loop, not by a clock: a process that was stopped for
a while has heard nothing, but gives the other its time.

The line is TLS, whatever the address, with certificates on both sides, of an authority that is made for this line at each opening of a
pond, and whose key never leaves the driver's process. It is another one than the pond's: what it issues lasts as long as a task
may be tried again, and is good for this line alone. A task has its certificate from where it has the grant.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
from collections.abc import AsyncIterator
from typing import Self

import msgspec

from millpond.errors import BadMessage
from millpond.wire.authority import HOUR_S, Authority, Bundle

TICK_S = 0.5
LEASE_S = 10.0
STOPPED_S = 60.0
MESSAGE_BYTES_MAX = 1 << 20
ARRIVED_BYTES_MAX = 4 << 10
HOME = "home"
"""What the driver's end is called in its certificate."""
GRANT_LIFE_S = 3650 * 24 * HOUR_S
_LENGTH = struct.Struct("!I")


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """The task's first words. `executor` names the process in which it runs, `machine` from where it reaches the
    pond's sockets, `attempt` is Spark's own number of it.
    """

    grant: str
    host: str
    machine: str
    executor: str
    pid: int
    attempt: int = -1

    def __repr__(self) -> str:
        return f"Arrived({self.host}, {self.pid})"


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Says nothing but that the sender lives."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """Runs a container process with these arguments; `settings` are written to its line as they are."""

    incarnation: int
    container: int
    root: str
    arguments: list[str]
    limited: bool
    settings: bytes = b""

    def __repr__(self) -> str:
        return f"Start({self.container}, {self.incarnation})"


class End(msgspec.Struct, frozen=True, tag=True):
    incarnation: int


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The task is no longer needed."""


class Greeted(msgspec.Struct, frozen=True, tag=True):
    """What the container process said when it was ready, or why it could not be: its own bytes."""

    incarnation: int
    pid: int
    hello: bytes


class Busy(msgspec.Struct, frozen=True, tag=True):
    """The process is at work, whether it answers or not: it has used its processors since the last beat."""

    incarnation: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The process has ended, or never began; `words` tell how, and go on from "container 3"."""

    incarnation: int
    words: str


Message = Arrived | Beat | Start | End | Leave | Greeted | Busy | Ended
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Grant(msgspec.Struct, frozen=True):
    """What a task shows: by TLS the bundle, and then the word by which the driver knows for which container it came."""

    word: str
    bundle: Bundle

    def __repr__(self) -> str:
        return "Grant()"

    def text(self) -> str:
        """As its file has it."""
        return f"{self.word}\n{self.bundle.text()}"

    @classmethod
    def parse(cls, text: str) -> Self:
        return cls(text.partition("\n")[0], Bundle.parse(text, "a grant"))


class Door:
    """The driver's: `context` lets in whoever has a grant of this opening, and shows them that it is the driver."""

    def __init__(self) -> None:
        self._authority = Authority()
        self.context = self._authority.issue("coordinator", HOME, GRANT_LIFE_S).serving()

    def grant(self) -> Grant:
        return Grant(secrets.token_hex(32), self._authority.issue("task", seconds=GRANT_LIFE_S))


class Line:
    """One end of a line. All of it runs in the thread of one event loop. The other end is gone after `silent_s_max`, by
    default `LEASE_S`.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silent_s_max: float | None = None
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._silent_ticks_max = int((silent_s_max or LEASE_S) / TICK_S)
        self.fell_silent = False
        """Whether the line ended as nothing was heard any more."""

    @classmethod
    def patient(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Self:
        """A task's end, which tells a driver that was stopped from a machine that is gone; where the system cannot, neither
        is waited for.
        """
        option = getattr(socket, "TCP_USER_TIMEOUT", None)
        if option is None:
            return cls(reader, writer)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, option, int(1000 * LEASE_S))
        return cls(reader, writer, STOPPED_S)

    def send(self, message: Message) -> None:
        data = msgspec.msgpack.encode(message)
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(data)) + data)

    async def receive(self, bytes_max: int = MESSAGE_BYTES_MAX) -> Message | None:
        """The next message; None when the other side has hung up. A message that is none raises BadMessage."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > bytes_max:
                raise BadMessage(f"a message of {length:,} bytes is beyond {bytes_max:,}")
            return _DECODER.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            return None
        except msgspec.MsgspecError as error:
            raise BadMessage(f"that is no message: {error}") from None

    async def messages(self) -> AsyncIterator[Message]:
        """What the other side says, beats left out, until it hangs up, falls silent or says nonsense; beats meanwhile."""
        beating = asyncio.create_task(self._beat())
        receiving: asyncio.Task[Message | None] | None = None
        silent_ticks = 0
        try:
            while True:
                receiving = receiving or asyncio.create_task(self.receive())
                if not (await asyncio.wait([receiving], timeout=TICK_S))[0]:
                    silent_ticks += 1
                    if silent_ticks >= self._silent_ticks_max:
                        self.fell_silent = True
                        return
                    continue
                silent_ticks = 0
                try:
                    message = receiving.result()
                except BadMessage:
                    return
                receiving = None
                if message is None:
                    return
                if not isinstance(message, Beat):
                    yield message
        finally:
            beating.cancel()
            if receiving is not None:
                receiving.cancel()

    async def _beat(self) -> None:
        while True:
            self.send(Beat())
            await asyncio.sleep(TICK_S)

    def close(self) -> None:
        """What was sent is still delivered, unless the other side fell silent."""
        if self.fell_silent:
            self.abort()
        else:
            self._writer.close()

    def abort(self) -> None:
        """Ends the line at once: nobody is waited for."""
        self._writer.transport.abort()
