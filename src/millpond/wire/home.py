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

The line is TLS, whatever the address. The driver's certificate is made for one opening of a pond, and signs itself: tasks
get it with their code, and trust no other. Its key never leaves the driver's process.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import secrets
import socket
import ssl
import struct
import tempfile
from collections.abc import AsyncIterator
from typing import Self

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from millpond.errors import BadMessage

TICK_S = 0.5
LEASE_S = 10.0
STOPPED_S = 60.0
MESSAGE_BYTES_MAX = 1 << 20
ARRIVED_BYTES_MAX = 4 << 10
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


class Certificate:
    """The driver's: `pem` is for all to see."""

    def __init__(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"millpond {secrets.token_hex(8)}")])
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))  # clocks of machines differ
            .not_valid_after(now + datetime.timedelta(days=3650))
            .sign(key, hashes.SHA256())
        )
        self.pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        _load(self.context, self.pem.encode() + secret)


def trusting(pem: str) -> ssl.SSLContext:
    """For a task: it speaks with the holder of that certificate's key, at whatever address, and nobody else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.load_verify_locations(cadata=pem)
    return context


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """Python's ssl takes keys from files only: here one in memory, where the system has those."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("millpond", os.MFD_CLOEXEC)
        with open(handle, "wb") as file:
            file.write(pem)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{handle}")
        return
    with tempfile.NamedTemporaryFile() as file:  # mode 0600
        file.write(pem)
        file.flush()
        context.load_cert_chain(file.name)


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
