"""What runs inside a Spark task that keeps a container: a process of its own, and a line home to the driver.

The task holds a slot of the cluster's and runs in it whatever the driver says over the line, one container process after
another. It is plain data, without a secret: the grant by which the driver knows it, and it the driver, is in a private file under the root,
so that a machine that does not see the root is found out before anything else.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from millpond import private
from millpond.container.printing import log_path
from millpond.coordinator.hosting import EXIT_TIMEOUT_S, STOP_TIMEOUT_S, Child, command_of, environment_of
from millpond.durable import crashpoints
from millpond.wire.authority import server_name
from millpond.wire.home import HOME, TICK_S, Arrived, Busy, End, Ended, Grant, Greeted, Leave, Line, Start
from millpond.wire.sockets import machine

DIAL_S = 15.0
DIAL_PAUSE_S = 0.5
POLL_S = 0.02
WATCH_S = 0.5
# Of Spark's worker, and nothing to user code in a container.
_NOT_HANDED_ON = (crashpoints.ENVIRONMENT, "PYTHON_WORKER_FACTORY_SECRET", "PYTHON_WORKER_FACTORY_PORT")


class Outcome(NamedTuple):
    """How a task ended: let go by its driver (`""`), or it could not do its work on `host`."""

    kind: str
    host: str
    why: str = ""


LET_GO, ROOT_UNSEEN, NOT_AT_HOME = "", "root unseen", "not at home"


@dataclass(frozen=True)
class ContainerTask:
    """For `rdd.map`: keeps containers until the driver lets it go, or is gone."""

    host: str
    port: int
    grant_path: str
    sockets: str
    """The directory of the pond's sockets, where the driver runs."""

    def __call__(self, _: object) -> tuple[str, str, str]:
        here = socket.gethostname()
        try:
            grant = Grant.parse(private.read_text(self.grant_path))
        except OSError as error:
            return Outcome(ROOT_UNSEEN, here, error.strerror or str(error))
        return asyncio.run(_Keeper(self, grant, here).run())


def _attempt() -> int:
    """Spark's number of this attempt of a task; -1 outside of one, where Spark need not be loaded for it."""
    spark = sys.modules.get("pyspark")
    context = None if spark is None else spark.TaskContext.get()
    return -1 if context is None else int(context.taskAttemptId())


class _Keeper:
    def __init__(self, task: ContainerTask, grant: Grant, host: str) -> None:
        self._task = task
        self._grant = grant
        self._host = host
        # Spark's daemon, which ends with its executor; or the executor itself.
        self._parent = os.getppid()
        self._line: Line | None = None
        self._child: Child | None = None
        self._incarnation = 0
        self._asked_to_end = 0
        self._keeping: asyncio.Task[None] | None = None

    async def run(self) -> Outcome:
        try:
            self._line = await self._dialled()
        except OSError as error:
            why = f"{self._task.host}:{self._task.port}: {error.strerror or 'it does not answer'}"
            return Outcome(NOT_AT_HOME, self._host, why)
        where = machine(self._task.sockets)
        word = self._grant.word
        self._line.send(Arrived(word, self._host, where, str(self._parent), os.getpid(), _attempt()))
        watching = asyncio.create_task(self._watch_parent())
        listening = asyncio.create_task(self._listen())
        try:
            await asyncio.wait([watching, listening], return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            listening.cancel()
            await self._end()
            self._line.close()
        return Outcome(LET_GO, self._host)

    async def _dialled(self) -> Line:
        """Home; a driver that has much to do is given its time."""
        deadline = time.monotonic() + DIAL_S
        # It speaks with the holder of that name's key, at whatever address, and nobody else.
        host, port = self._task.host, self._task.port
        shown = self._grant.bundle.connecting(to_pond=False)
        while True:
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    streams = await asyncio.open_connection(
                        host, port, ssl=shown, server_hostname=server_name(HOME)
                    )
                return Line.patient(*streams)
            except OSError:
                if time.monotonic() + DIAL_PAUSE_S > deadline:
                    raise
            await asyncio.sleep(DIAL_PAUSE_S)

    async def _watch_parent(self) -> None:
        while os.getppid() == self._parent:
            await asyncio.sleep(WATCH_S)

    async def _listen(self) -> None:
        assert self._line is not None
        async for message in self._line.messages():
            match message:
                case Start():
                    await self._end()
                    self._keeping = asyncio.create_task(self._keep(message))
                case End(incarnation) if incarnation == self._incarnation:
                    await self._end()
                case Leave():
                    return
                case _:
                    pass

    async def _keep(self, start: Start) -> None:
        """Runs a container process to its end, and tells of it."""
        assert self._line is not None
        self._incarnation = start.incarnation
        try:
            child = self._child = _run(start)
        except OSError as error:
            self._line.send(Ended(start.incarnation, f"did not start on {self._host}: {error}"))
            return
        # The process has the other end of its line for as long as it runs.
        from_child, to_child = await asyncio.open_connection(sock=child.line)
        watching = asyncio.create_task(self._watch_work(start.incarnation, child))
        try:
            to_child.write(start.settings)
            hello = await from_child.readline()
            if hello:
                self._line.send(Greeted(start.incarnation, child.process.pid, hello))
            with suppress(OSError):
                await from_child.read()
        finally:
            watching.cancel()
            await _ended(child, EXIT_TIMEOUT_S)
            to_child.close()
            self._child = None
            asked = self._asked_to_end == start.incarnation
            words = "was ended by its pond" if asked else child.last_words()
            self._line.send(Ended(start.incarnation, words))

    async def _watch_work(self, incarnation: int, child: Child) -> None:
        """Tells of a process that is at work: one may keep its interpreter to itself, and be silent."""
        while True:
            await asyncio.sleep(TICK_S)
            # Upkeep alone takes some hundredths of a second.
            if self._line is not None and child.is_busy(TICK_S / 4):
                self._line.send(Busy(incarnation))

    async def _end(self) -> None:
        """Ends the container that runs, if one does."""
        child, keeping = self._child, self._keeping
        if child is not None and child.process.poll() is None:
            self._asked_to_end = self._incarnation
            child.hang_up()
            await _ended(child, STOP_TIMEOUT_S)
        if keeping is not None:
            await asyncio.wait([keeping])


async def _ended(child: Child, patience_s: float) -> None:
    """Returns when the process has ended; one that does not by itself is killed."""
    for _ in range(int(patience_s / POLL_S)):
        if child.process.poll() is not None:
            return
        await asyncio.sleep(POLL_S)
    child.process.kill()
    while child.process.poll() is None:
        await asyncio.sleep(POLL_S)


def _run(start: Start) -> Child:
    environment = environment_of(start.limited)
    for name in _NOT_HANDED_ON:
        environment.pop(name, None)
    root, sockets, *others = start.arguments
    # It does not see the pond's own: it listens by TLS, and its socket is for the listener alone.
    sockets = sockets or tempfile.mkdtemp(prefix="millpond-")
    command = [*command_of("hosted"), str(os.getpid()), root, sockets, *others]
    return Child(command, environment, log_path(start.root, start.container))
