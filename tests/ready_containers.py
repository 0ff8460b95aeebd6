"""Containers for tests, forked from a process that has imported all and loaded every kernel already.

To import and to load takes a container nearly two seconds of a processor, and a suite starts hundreds. What is forked
is a process of its own in all else: its pid, its files, its end. In files that use `started_as_ever`, in processes that
tests start, in Spark's tasks, and where the environment is another one, containers start as users' do.

The process they are forked from is a child of this one, and has one thread. It forks twice, and what is in between ends:
so the container becomes a child of this process, which for that moment takes orphans in.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec

PR_SET_CHILD_SUBREAPER = 36
MAY_DIFFER = ("PATH", "PYTEST_CURRENT_TEST", "PYSPARK_", "SPARK_")
"""Variables that change from test to test, by how they begin; nothing that is imported looks at them."""
COMMAND_BYTES = 8192
"""Room for the command line of a container, by which tests look for those that are left."""
ARGUMENTS = 8
"""Of a container's command, what comes after its module."""


class Order(msgspec.Struct):
    """A container to fork. What a child has of its parent is told, for it comes from another process."""

    command: list[str]
    environment: dict[str, str]
    umask: int
    parent: int
    directory: str


class Forked:
    """A container that was forked: of `subprocess.Popen` what its host uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._end = os.pidfd_open(pid)
        self._reaping = threading.Lock()

    def __del__(self) -> None:
        os.close(self._end)

    def poll(self) -> int | None:
        with self._reaping:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = select.poll()
        end.register(self._end, select.POLLIN)
        end.poll(None if timeout is None else timeout * 1000)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("container", timeout or 0.0)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Ready:
    """The process that containers are forked from; started when the first is wanted."""

    def __init__(self) -> None:
        self.forks = True
        self._lock = threading.Lock()
        self._environment: dict[str, str] = {}
        self._command: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None

    def popen(self, command: list[str], **options: Any) -> subprocess.Popen[bytes] | Forked:
        """As `subprocess.Popen`, for the command of a container."""
        if not self.forks:
            return subprocess.Popen(command, **options)
        environment = {key: value for key, value in options["env"].items() if not key.startswith(MAY_DIFFER)}
        with self._lock:
            if self._process is None:
                self._environment, self._command = environment, command[:-ARGUMENTS]
                self._start()
            if environment != self._environment or command[:-ARGUMENTS] != self._command:
                return subprocess.Popen(command, **options)
            return self._fork(command, options)

    def stop(self) -> None:
        if self._line is not None and self._process is not None:
            self._line.close()
            self._process.wait(20)

    def _start(self) -> None:
        interpreter = self._command[: self._command.index("-m")]
        self._line, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*interpreter, os.path.abspath(__file__), str(theirs.fileno()), "-" * COMMAND_BYTES],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=self._environment,
            )

    def _fork(self, command: list[str], options: dict[str, Any]) -> Forked:
        assert self._line is not None
        order = Order(
            command,
            options["env"],
            options["umask"],
            os.getpid(),
            os.getcwd(),
        )
        given = [*options["pass_fds"], options["stdout"].fileno(), options["stderr"].fileno()]
        _take_orphans(True)
        try:
            socket.send_fds(self._line, [msgspec.json.encode(order)], given)
            answer = self._line.recv(64)
        finally:
            _take_orphans(False)
        assert answer, "the process that containers are forked from has ended"
        return Forked(int(answer))


def _take_orphans(takes: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(takes), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _serve(line: socket.socket) -> None:
    from millpond.container import process
    from millpond.programs.cells import warm_up

    process.warm_up()
    warm_up()
    names = [
        Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in os.listdir("/proc/self/task")
    ]
    # That one is Arrow's, of an allocator that sees to forks.
    assert len([name for name in names if name != "jemalloc_bg_thd"]) == 1, f"{names} cannot be forked"
    while True:
        data, given, _, _ = socket.recv_fds(line, 1 << 16, 3)
        if not data:
            return
        order = msgspec.json.decode(data, type=Order)
        says, hears = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid:
                os.write(hears, str(pid).encode())
                os._exit(0)
            line.close()
            os.close(says)
            os.close(hears)
            _become(order, given)
        os.close(hears)
        os.waitpid(between, 0)
        pid_said = os.read(says, 64)
        os.close(says)
        for descriptor in given:
            os.close(descriptor)
        line.sendall(pid_said)


def _call_oneself(command: list[str]) -> None:
    """Others see this command line."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = "\0".join([*command, ""]).encode()
    assert len(text) < end - start, "too long"
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _become(order: Order, given: list[int]) -> None:
    from millpond.container import process

    code = 1
    try:
        while os.getppid() != order.parent:
            if os.getppid() == 1:
                os._exit(0)
            time.sleep(0.001)
        container_line, out, err = given
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (out, 1), (err, 2)):
            os.dup2(source, target)
            os.close(source)
        os.umask(order.umask)
        os.chdir(order.directory)
        os.environ.clear()
        os.environ.update(order.environment)
        command = [*order.command[:-1], str(container_line)]
        _call_oneself(command)
        process.run(command[-ARGUMENTS:])
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except Exception:  # noqa: BLE001 - as the interpreter would end
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
