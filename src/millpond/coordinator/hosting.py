"""Where containers run. `Embedded` runs them as child processes that end with their parent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

import msgspec

from millpond import private
from millpond.container.guard import DOOMED
from millpond.container.printing import log_path
from millpond.durable import crashpoints
from millpond.errors import ContainerFailed, error_named
from millpond.wire.base import Term
from millpond.wire.keyring import ContainerKeys

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
EXIT_TIMEOUT_S = 1.0
CODE_SECONDS = 60.0
_LOG_BYTES_READ = 64 << 10
_WORDS_MAX = 1000
_PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class Host(NamedTuple):
    """A running container, not yet assigned."""

    pid: int
    address: str
    host: str = ""
    """The machine: a backup is better on another one."""


class Hosting(Protocol):
    """Starts and ends containers. `start` of one that runs ends it first: two never run under one id."""

    def start(self, container: int, term: Term) -> Host: ...

    def alive(self, container: int) -> bool: ...

    def has_ended(self, container: int) -> bool:
        """Whether no process of it runs, for certain: one that is not heard of may."""
        ...

    def last_words(self, container: int) -> str:
        """How its newest incarnation that has ended did so: a text that goes on from "container 3"."""
        ...

    def is_busy(self, container: int) -> bool:
        """Whether its process is at work, though it may not answer. False where nobody knows."""
        ...

    def task_slots(self) -> dict[str, int]:
        """Of the slots for Spark's tasks, those that containers `wanted` and `had`; nothing where they take none."""
        ...

    def kill(self, container: int) -> None:
        """Ends one container at once, if that is possible, and does not wait for it."""
        ...

    def check_room(self, containers: int) -> None:
        """Raises what says why so many containers, of which some are to be started, cannot run."""
        ...

    def stop_one(self, container: int) -> None:
        """Ends one container, if it runs. The others go on."""
        ...

    def stop(self) -> None:
        """Ends all, for good."""
        ...


class Hello(msgspec.Struct, frozen=True):
    """The line by which a container process says that it serves, or why it cannot."""

    address: str = ""
    error: str = ""
    message: str = ""


class Embedded:
    """Containers as child processes, at sockets in the directory `sockets`. They notice the end of this process by the
    end of the line to it.

    User code in them has `code_seconds` to end in, or with another `trust` than "all" does not run; they have `memory`
    bytes each, by default most of the machine's.
    `on_exit` is called, in a thread of its own, when one has ended that was not asked to. `keys` says what each
    incarnation is handed of secrets: by the line, which nobody else can read.
    """

    def __init__(
        self,
        root: str,
        sockets: str,
        threads: int,
        on_exit: Callable[[int], None],
        keys: Callable[[int, Term], ContainerKeys],
        code_seconds: float = CODE_SECONDS,
        memory: int | None = None,
        trust: str = "all",
    ) -> None:
        self._root = root
        self._sockets = sockets
        self._threads = threads
        self._on_exit = on_exit
        self._keys = keys
        self._code_seconds = code_seconds
        self._memory = memory
        self._trust = trust
        self._lock = threading.Lock()
        self._children: dict[int, Child] = {}
        self._last_words: dict[int, str] = {}
        self._watchers: list[threading.Thread] = []
        self._stopping = False
        self._started_before: set[int] = set()

    def start(self, container: int, term: Term) -> Host:
        self.stop_one(container)
        keys = self._keys(container, term)
        try:
            child = Child(
                self._command(container), self._environment(container), log_path(self._root, container)
            )
        except OSError as error:
            raise cannot_start(container, str(error)) from error
        try:
            with self._lock:
                if self._stopping:
                    raise ContainerFailed("the pond is closing", container=container)
                self._children[container] = child
            child.hand_over(keys)
            address = self._greeting(child, container)
            self._start_watching(child, container)
        except BaseException:
            with self._lock:
                if self._children.get(container) is child:
                    del self._children[container]
            child.end(STOP_TIMEOUT_S)
            raise
        return Host(child.process.pid, address)

    def alive(self, container: int) -> bool:
        with self._lock:
            child = self._children.get(container)
        return child is not None and child.process.poll() is None

    def has_ended(self, container: int) -> bool:
        return not self.alive(container)

    def check_room(self, containers: int) -> None:
        pass

    def task_slots(self) -> dict[str, int]:
        return {}

    def is_busy(self, container: int) -> bool:
        with self._lock:
            child = self._children.get(container)
        return child is not None and child.is_busy()

    def kill(self, container: int) -> None:
        with self._lock:
            child = self._children.get(container)
        if child is not None:
            child.kill()

    def last_words(self, container: int) -> str:
        with self._lock:
            child = self._children.get(container)
        if child is not None and child.process.poll() is not None:
            return child.last_words()
        return self._last_words.get(container, "has not ended")

    def stop_one(self, container: int) -> None:
        with self._lock:
            child = self._children.pop(container, None)
        if child is not None:
            ended_before = child.process.poll() is not None and not child.is_unwanted
            child.end(STOP_TIMEOUT_S)
            self._last_words[container] = child.last_words() if ended_before else "was ended by its pond"

    def stop(self) -> None:
        with self._lock:
            self._stopping = True
            children = list(self._children.values())
            self._children.clear()
            watchers = list(self._watchers)
        for child in children:
            child.hang_up()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for child in children:
            child.end(max(0.0, deadline - time.monotonic()))
        for watcher in watchers:
            watcher.join(STOP_TIMEOUT_S)

    def _command(self, container: int) -> list[str]:
        limits = [str(self._code_seconds), str(self._memory or 0), self._trust]
        where = [self._root, self._sockets]
        return [*command_of("process"), *where, str(container), str(self._threads), *limits]

    def _environment(self, container: int) -> dict[str, str]:
        """A crash point counts for a container's first start."""
        environment = environment_of(limited=self._memory is not None)
        if container in self._started_before:
            environment.pop(crashpoints.ENVIRONMENT, None)
        self._started_before.add(container)
        return environment

    def _greeting(self, child: Child, container: int) -> str:
        """The address at which the child serves."""
        hello = child.hello()
        if hello is None:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(EXIT_TIMEOUT_S)
            why = f"it was not ready after {START_TIMEOUT_S:g} s"
            if child.process.returncode is not None:
                self._last_words[container] = child.last_words()
                why = f"it {self._last_words[container]}"
            raise cannot_start(container, why, f"its whole output is in {log_path(self._root, container)}")
        if hello.error:
            raise error_named(hello.error)(hello.message)
        return hello.address

    def _start_watching(self, child: Child, container: int) -> None:
        watcher = threading.Thread(
            target=self._watch, args=(container, child), name=f"millpond-watch-{container}", daemon=True
        )
        try:
            watcher.start()
        except RuntimeError as error:
            raise cannot_start(container, str(error)) from error
        with self._lock:
            self._watchers = [thread for thread in self._watchers if thread.is_alive()] + [watcher]

    def _watch(self, container: int, child: Child) -> None:
        child.process.wait()
        with self._lock:
            unexpected = not self._stopping and self._children.get(container) is child
        if unexpected:
            self._last_words[container] = child.last_words()
            self._on_exit(container)


class Child:
    """A container process, and a line to it: it says hello there, and ends when we hang up."""

    def __init__(self, command: list[str], environment: dict[str, str], log: str) -> None:
        self.is_unwanted = False
        self._log = log
        self._spent: int | None = None
        self.line, theirs = socket.socketpair()
        try:
            with theirs, private.append_to(log) as file:
                self._log_start = file.tell()
                self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    [*command, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    pass_fds=[theirs.fileno()],
                    env=environment,
                    umask=private.OTHERS,  # what numba and user code write is for this user alone, too
                )
        except BaseException:
            self.line.close()
            raise

    def hand_over(self, keys: ContainerKeys) -> None:
        """What the child waits for first. It is small: nobody waits here. Of a child that has ended, `hello` tells."""
        with suppress(OSError):
            self.line.sendall(msgspec.json.encode(keys) + b"\n")

    def hello(self) -> Hello | None:
        """What it says when it has started; None if it ends, or does not come to it."""
        self.line.settimeout(START_TIMEOUT_S)
        with suppress(OSError, msgspec.MsgspecError), self.line.makefile("rb") as line:
            return msgspec.json.decode(line.readline(), type=Hello)
        return None

    def is_busy(self, least_s: float = 0.0) -> bool:
        """Whether it has used its processors since this was asked before, for longer than that: one that is stopped has not."""
        spent, self._spent = self._spent, _processor_time(self.process.pid)
        least = least_s * os.sysconf("SC_CLK_TCK")
        return spent is not None and self._spent is not None and self._spent - spent > least

    def kill(self) -> None:
        # One that has ended by itself tells how.
        self.is_unwanted |= self.process.poll() is None
        self.process.kill()

    def hang_up(self) -> None:
        with suppress(OSError):
            self.line.shutdown(socket.SHUT_WR)

    def end(self, patience_s: float) -> None:
        """Returns when the child has ended."""
        self.hang_up()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.line.close()

    def last_words(self) -> str:
        """How it ended; it has."""
        said = self._said()
        own = [line for line in said.splitlines() if line.startswith(DOOMED)]
        if own:
            return f"ended itself: {own[-1].removeprefix(DOOMED)}"
        code = self.process.returncode
        # Where Python says what it was at when it was ended: from inside by a signal, or by its watch.
        start = said.rfind("Current thread" if code < 0 else "Timeout (")
        said = (said[start:][:_WORDS_MAX] if start >= 0 else said[-_WORDS_MAX:]).strip()
        if code < 0:
            how = f"ended by signal {-code} ({_signal_name(-code)})"
        elif start >= 0:
            how = "ended itself: its interpreter stood still"
        else:
            how = f"ended with exit code {code}"
        return f"{how}: {said}" if said else f"{how}, and said nothing"

    def _said(self) -> str:
        """The end of what it printed."""
        with suppress(OSError), open(self._log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            # A log that is shorter than it was has been begun anew.
            start = self._log_start if size >= self._log_start else 0
            file.seek(max(start, size - _LOG_BYTES_READ))
            return file.read().decode(errors="replace")
        return ""


def _processor_time(pid: int) -> int | None:
    """What a process has used of its processors, in the system's own units; None where that cannot be known."""
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return None


def command_of(module: str) -> list[str]:
    """Runs a module of the container's, by this interpreter."""
    # -P: nothing is imported from the present directory, which may be the root.
    return [sys.executable, "-P", "-X", "faulthandler", "-m", f"millpond.container.{module}"]


def environment_of(limited: bool) -> dict[str, str]:
    """A container's: this process's, so that it finds the same millpond. `limited` is one with a bound on its memory."""
    environment = dict(os.environ)
    if sysconfig.get_path("purelib") != _PACKAGE_PARENT:
        paths = [_PACKAGE_PARENT, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    # Sets of strings keep their order when a user's function runs again, in another process.
    environment["PYTHONHASHSEED"] = "0"
    # Arrow's own allocator gives back large arrays that another thread lets go of, as epochs' are: then every page
    # of the next ones costs a fault.
    environment.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    # Slices are what runs in parallel. Threads of numpy's own would each reserve memory that counts as used.
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    if limited:
        # Arrow's allocator would take a GiB at once, which counts from then on.
        environment.setdefault("MIMALLOC_ARENA_EAGER_COMMIT", "0")
    return environment


def cannot_start(container: int, why: str, hint: str = "") -> ContainerFailed:
    return ContainerFailed(f"container {container} cannot be started: {why}", hint=hint, container=container)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "which has no name"
