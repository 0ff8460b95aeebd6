"""The process of an embedded container, `python -m millpond.container.process ROOT SOCKETS CONTAINER THREADS ... LINE`.

On the socket that it inherits as file descriptor LINE it is handed its name and its secrets, which are in no argument
and no variable. It serves at a Unix socket in the directory SOCKETS, and by TLS where it is told to, says where on LINE,
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
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import msgspec
import pyarrow as pa

from millpond import private
from millpond.container.certified import Certified, OwnCertificate
from millpond.container.guard import Guard, limit_memory, shared
from millpond.container.holdings.base import Means, NoCode
from millpond.container.printing import Printed, log_path
from millpond.container.service import ContainerService
from millpond.durable.files import OsFiles, remove_tree
from millpond.errors import MillpondError
from millpond.kernels import warm_up
from millpond.kernels.memory import data_bytes, keep_freed_memory
from millpond.runtime import Threads
from millpond.stores.windows.spilling import Spilling
from millpond.wire.flight import FlightDialer, FlightService
from millpond.wire.keyring import ContainerKeys
from millpond.wire.sockets import SocketDirectory

# Below so few rows, handing work to another thread costs more than it saves.
PARALLEL_ROWS_MIN = 8192
# What a container takes before it holds anything, roughly.
OWN_BYTES = 300 << 20
WINDOWS_SHARE = 4
"""Of what is left for rows, one part in so many is for those of open windows; more of them go to disk."""
SHORT_SHARE = 0.85
"""Of what a container may take: beyond it, windows leave memory whatever they take themselves."""
SCRATCH = "scratch"
IDLE_S = 0.2
BUSY_S = 0.01
WATCH_S = 0.5
BEAT_S = 1.0
# Beyond the time that user code has: code that keeps the interpreter to itself is ended from outside of it.
STANDSTILL_S = 15.0


class ThreadRunner:
    """Shares items out to the container's threads; the caller's own is one of them."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(max(1, threads - 1), "millpond-slices")

    def resize(self, threads: int) -> None:
        before, self._pool = self._pool, ThreadPoolExecutor(max(1, threads - 1), "millpond-slices")
        self.threads = threads
        before.shutdown(wait=False)
        pa.set_cpu_count(threads)

    def __call__(self, work: Callable[[Any], None], items: Sequence[Any], rows: int) -> None:
        helpers, pool = self.threads - 1, self._pool
        if helpers == 0 or rows < PARALLEL_ROWS_MIN or len(items) < 2:
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

        futures = _submitted(pool, shared(drain), helpers)
        try:
            drain()
        finally:
            for future in futures:
                # One that has not begun has nothing left to do.
                if not future.cancel():
                    future.result()


def _spilling(root: str, container: int, budget: int, memory: int) -> Spilling:
    """Rows of windows go to a directory of this process. What processes before it left there goes now."""
    files, base, own = OsFiles(), os.path.join(root, SCRATCH), f"c{container:04d}"
    for name in files.list(base):
        if name.partition("-")[0] == own:
            remove_tree(files, os.path.join(base, name))
    return Spilling(
        files,
        os.path.join(base, f"{own}-{os.getpid()}"),
        budget,
        lambda: data_bytes() > SHORT_SHARE * memory,
        most=budget * WINDOWS_SHARE,
        spare=lambda: SHORT_SHARE * memory - data_bytes(),
    )


def _submitted(pool: ThreadPoolExecutor, work: Callable[[], None], times: int) -> list[Future[None]]:
    """The work as often, unless the pool has just been replaced: whoever asks does it all."""
    with suppress(RuntimeError):
        return [pool.submit(work) for _ in range(times)]
    return []


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
    keys = _handed_over(line)
    _start("millpond-parent", _end_with_line, line)
    _start("millpond-watch", _watch, os.getppid(), printed, code_seconds)
    # Shared by all containers for their lifetime: whoever opens the pond next waits until it is free.
    lock = private.append_to(os.path.join(root, "containers.lock"))  # held until the process ends
    fcntl.flock(lock, fcntl.LOCK_SH)
    try:
        limits = Guard(code_seconds) if trust == "all" else NoCode()
        for_rows = max(memory - OWN_BYTES, memory // 4)
        spilling = _spilling(root, container, for_rows // WINDOWS_SHARE, memory)
        means = Means(ThreadRunner(threads), limits, memory=for_rows, memory_max=memory, spilling=spilling)
        own = OwnCertificate(keys)
        service = ContainerService(OsFiles(), root, means, Threads(), FlightDialer(own.credentials))
        directory = SocketDirectory(sockets)
        server = FlightService(Certified(service, own), keys.accepted, directory, keys.name)
        address = own.listen(directory) or server.address
    except (MillpondError, OSError) as error:
        _say(line, {"error": type(error).__name__, "message": str(error)})
        return
    # Kernels are loaded, or compiled the very first time, while the coordinator gets ready to assign slices.
    _start("millpond-warm-up", warm_up)
    _start("millpond-upkeep", _maintain, service)
    _start("millpond-pulse", _beat, service)
    _say(line, {"address": address})
    server.serve()


def _start(name: str, work: Callable[..., Any], *args: Any) -> None:
    threading.Thread(target=work, args=args, name=name, daemon=True).start()


def _say(line: socket.socket, hello: dict[str, str]) -> None:
    line.sendall(msgspec.json.encode(hello) + b"\n")


def _handed_over(line: socket.socket) -> ContainerKeys:
    """What the parent says first, and all that it says."""
    data = b""
    while not data.endswith(b"\n"):
        more = line.recv(1 << 16)
        if not more:
            os._exit(0)
        data += more
    return msgspec.json.decode(data, type=ContainerKeys)


def _end_with_line(line: socket.socket) -> None:
    """The parent says nothing more. When it hangs up, or ends, this process does."""
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


def _beat(service: ContainerService) -> None:
    while True:
        with suppress(Exception):
            service.beat()
        time.sleep(BEAT_S)


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
