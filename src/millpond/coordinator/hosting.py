"""Where containers run. `Embedded` runs them as child processes that end with their parent."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from millpond.durable import crashpoints
from millpond.errors import ContainerFailed, error_named

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
_PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class Host(NamedTuple):
    """A running container, not yet assigned."""

    pid: int
    address: str


class Hosting(Protocol):
    """Starts and ends containers. `start` of one that runs ends it first: two never run under one id."""

    def start(self, container: int) -> Host: ...

    def alive(self, container: int) -> bool: ...

    def stop(self) -> None: ...


class Hello(msgspec.Struct, frozen=True):
    """The line by which a container process says that it serves, or why it cannot."""

    address: str = ""
    error: str = ""
    message: str = ""


class Embedded:
    """Containers as child processes. They notice the end of this process by the end of their standard input."""

    def __init__(self, root: str, threads: int, on_exit: Callable[[int], None]) -> None:
        self._root = root
        self._threads = threads
        self._on_exit = on_exit
        self._lock = threading.Lock()
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._watchers: list[threading.Thread] = []
        self._stopping = False
        self._started_before: set[int] = set()

    def start(self, container: int) -> Host:
        with self._lock:
            old = self._children.pop(container, None)
        if old is not None:
            _end(old)
        log = open(self._log_path(container), "ab")  # noqa: SIM115 - handed to the child
        child = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [
                sys.executable,
                "-m",
                "millpond.container.process",
                self._root,
                str(container),
                str(self._threads),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=self._environment(container),
        )
        log.close()
        with self._lock:
            if self._stopping:
                _end(child)
                raise ContainerFailed("the pond is closing", container=container)
            self._children[container] = child
        hello = self._greeting(child, container)
        watcher = threading.Thread(
            target=self._watch, args=(container, child), name=f"millpond-watch-{container}", daemon=True
        )
        watcher.start()
        self._watchers = [thread for thread in self._watchers if thread.is_alive()] + [watcher]
        return Host(child.pid, hello.address)

    def alive(self, container: int) -> bool:
        with self._lock:
            child = self._children.get(container)
        return child is not None and child.poll() is None

    def stop(self) -> None:
        with self._lock:
            self._stopping = True
            children = list(self._children.values())
            self._children.clear()
        for child in children:
            _let_go(child)
        for child in children:
            _end(child)
        for watcher in self._watchers:
            watcher.join(STOP_TIMEOUT_S)

    def _environment(self, container: int) -> dict[str, str]:
        """Ours, so that the child finds the same millpond; a crash point counts for a container's first start."""
        environment = dict(os.environ)
        if sysconfig.get_path("purelib") != _PACKAGE_PARENT:
            paths = [_PACKAGE_PARENT, environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        # Sets of strings keep their order when a user's function runs again, in another process.
        environment["PYTHONHASHSEED"] = "0"
        if container in self._started_before:
            environment.pop(crashpoints.ENVIRONMENT, None)
        self._started_before.add(container)
        return environment

    def _greeting(self, child: subprocess.Popen[bytes], container: int) -> Hello:
        timer = threading.Timer(START_TIMEOUT_S, child.kill)
        timer.start()
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            _end(child)
            raise ContainerFailed(
                f"container {container} ended while starting: {self._last_words(container)}",
                hint=f"its whole output is in {self._log_path(container)}",
                container=container,
            )
        hello = msgspec.json.decode(line, type=Hello)
        if hello.error:
            _end(child)
            raise error_named(hello.error)(hello.message)
        return hello

    def _watch(self, container: int, child: subprocess.Popen[bytes]) -> None:
        child.wait()
        with self._lock:
            unexpected = not self._stopping and self._children.get(container) is child
        if unexpected:
            self._on_exit(container)

    def _log_path(self, container: int) -> str:
        return os.path.join(self._root, f"container-{container}.log")

    def _last_words(self, container: int) -> str:
        with open(self._log_path(container), errors="replace") as log:
            return log.read()[-1000:].strip() or "it said nothing"


def _let_go(child: subprocess.Popen[bytes]) -> None:
    """Asks the child to end, by closing its standard input."""
    assert child.stdin is not None
    child.stdin.close()


def _end(child: subprocess.Popen[bytes]) -> None:
    """Returns when the child has ended."""
    _let_go(child)
    try:
        child.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    assert child.stdout is not None
    child.stdout.close()
