"""The process of an embedded container, `python -m millpond.container.process ROOT SOCKETS CONTAINER THREADS ... LINE`.

It serves at a Unix socket in the directory SOCKETS, says where on the socket that it inherits as file descriptor LINE,
and ends when the parent hangs up, that is, with its parent, however that ended. Its standard output is its log, its
standard input empty.
"""

from __future__ import annotations

import faulthandler
import fcntl
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import msgspec
import pyarrow as pa

from millpond import private
from millpond.container.guard import Guard, limit_memory, shared
from millpond.container.holdings.base import Means, NoCode
from millpond.container.printing import Printed, log_path
from millpond.container.service import ContainerService
from millpond.durable.files import OsFiles
from millpond.errors import MillpondError
from millpond.kernels import warm_up
from millpond.kernels.memory import keep_freed_memory
from millpond.runtime import Threads
from millpond.wire.flight import FlightDialer, FlightService
from millpond.wire.sockets import SocketDirectory, container_name

# Below so few rows, handing work to another thread costs more than it saves.
PARALLEL_ROWS_MIN = 8192
# What a container takes before it holds anything, roughly.
OWN_BYTES = 300 << 20
IDLE_S = 0.2
BUSY_S = 0.01
WATCH_S = 0.5
# Beyond the time that user code has: code that keeps the interpreter to itself is ended from outside of it.
STANDSTILL_S = 15.0


class ThreadRunner:
    """Shares items out to the container's threads; the caller's own is one of them."""

    def __init__(self, threads: int) -> None:
        self._helpers = threads - 1
        self._pool = ThreadPoolExecutor(max(1, self._helpers), "millpond-slices")

    def __call__(self, work: Callable[[Any], None], items: Sequence[Any], rows: int) -> None:
        if self._helpers == 0 or rows < PARALLEL_ROWS_MIN or len(items) < 2:
            for item in items:
                work(item)
            return
        rest = iter(items)
        taking = threading.Lock()

        def take() -> Iterator[Any]:
            while True:
                with taking:
                    item = next(rest, taking)
                if item is taking:
                    return
                yield item

        def drain() -> None:
            for item in take():
                work(item)

        futures = [self._pool.submit(shared(drain)) for _ in range(self._helpers)]
        try:
            drain()
        finally:
            for future in futures:
                # One that has not begun has nothing left to do.
                if not future.cancel():
                    future.result()


def main(
    root: str,
    sockets: str,
    container: int,
    threads: int,
    code_seconds: float,
    memory: int,
    trust: str,
    line: socket.socket,
) -> None:
    printed = Printed(log_path(root, container))
    printed.take_over()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to handle
    memory = limit_memory(memory)
    pa.set_cpu_count(threads)
    keep_freed_memory(memory, threads)
    _start("millpond-parent", _end_with_line, line)
    _start("millpond-watch", _watch, os.getppid(), printed, code_seconds)
    # Shared by all containers for their lifetime: whoever opens the pond next waits until it is free.
    lock = private.append_to(os.path.join(root, "containers.lock"))  # held until the process ends
    fcntl.flock(lock, fcntl.LOCK_SH)
    try:
        token = private.read_text(os.path.join(root, "token")).strip()
        limits = Guard(code_seconds) if trust == "all" else NoCode()
        for_rows = max(memory - OWN_BYTES, memory // 4)
        means = Means(ThreadRunner(threads), threads, limits, memory=for_rows)
        service = ContainerService(OsFiles(), root, means, Threads(), FlightDialer(token))
        server = FlightService(service, token, SocketDirectory(sockets), container_name(container))
    except (MillpondError, OSError) as error:
        _say(line, {"error": type(error).__name__, "message": str(error)})
        return
    # Kernels are loaded, or compiled the very first time, while the coordinator gets ready to assign slices.
    _start("millpond-warm-up", warm_up)
    _start("millpond-upkeep", _maintain, service)
    _say(line, {"address": server.address})
    server.serve()


def _start(name: str, work: Callable[..., Any], *args: Any) -> None:
    threading.Thread(target=work, args=args, name=name, daemon=True).start()


def _say(line: socket.socket, hello: dict[str, str]) -> None:
    line.sendall(msgspec.json.encode(hello) + b"\n")


def _end_with_line(line: socket.socket) -> None:
    """The parent says nothing. When it hangs up, or ends, this process does."""
    line.recv(1)
    os._exit(0)


def _watch(parent: int, printed: Printed, code_seconds: float) -> None:
    """What must be looked after even while upkeep is busy."""
    # The line may live on in a process that the parent forked.
    while os.getppid() == parent:
        with suppress(Exception):
            printed.turn_over()
            if math.isfinite(code_seconds):
                # It runs out when this thread does not get to run any more.
                faulthandler.dump_traceback_later(code_seconds + STANDSTILL_S, exit=True, file=2)
        time.sleep(WATCH_S)
    os._exit(0)


def _maintain(service: ContainerService) -> None:
    while True:
        try:
            idle = service.maintain()
        except Exception:  # noqa: BLE001 - upkeep goes on, whatever went wrong once; the metrics count it
            traceback.print_exc()
            service.upkeep_failures += 1
            idle = True
        time.sleep(IDLE_S if idle else BUSY_S)


def run(arguments: Sequence[str]) -> None:
    root, sockets, container, threads, seconds, memory, trust, line = arguments
    main(
        root,
        sockets,
        int(container),
        int(threads),
        float(seconds),
        int(memory),
        trust,
        socket.socket(fileno=int(line)),
    )


if __name__ == "__main__":
    run(sys.argv[1:])
