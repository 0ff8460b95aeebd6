"""The process of an embedded container: `python -m millpond.container.process ROOT CONTAINER THREADS`.

It serves on loopback, says where in one line on standard output, and ends when its standard input does,
that is, with its parent, however that ended.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pyarrow as pa

from millpond.container.service import ContainerService
from millpond.durable.files import OsFiles
from millpond.errors import MillpondError
from millpond.kernels import warm_up
from millpond.kernels.memory import keep_freed_memory
from millpond.wire.flight import FlightService

# Below so few rows, handing work to another thread costs more than it saves.
PARALLEL_ROWS_MIN = 8192
IDLE_S = 0.2
BUSY_S = 0.01


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

        futures = [self._pool.submit(drain) for _ in range(self._helpers)]
        try:
            drain()
        finally:
            for future in futures:
                future.result()


def main(root: str, container: int, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to handle
    pa.set_cpu_count(threads)
    keep_freed_memory()
    _end_with_parent()
    # Shared by all containers for their lifetime: whoever opens the pond next waits until it is free.
    lock = open(os.path.join(root, "containers.lock"), "ab")  # noqa: SIM115 - held until the process ends
    fcntl.flock(lock, fcntl.LOCK_SH)
    try:
        with open(os.path.join(root, "token")) as file:
            token = file.read().strip()
        service = ContainerService(OsFiles(), root, ThreadRunner(threads), threads)
        server = FlightService(service, token)
    except (MillpondError, OSError) as error:
        _say({"error": type(error).__name__, "message": str(error)})
        return
    # Kernels are loaded, or compiled the very first time, while the coordinator gets ready to assign slices.
    threading.Thread(target=warm_up, name="millpond-warm-up", daemon=True).start()
    threading.Thread(target=_maintain, args=(service,), name="millpond-upkeep", daemon=True).start()
    _say({"address": server.address})
    server.serve()


def _say(hello: dict[str, str]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(hello) + b"\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    """Ends this process when the parent closes our standard input, or is no longer our parent."""
    parent = os.getppid()

    def wait_for_end_of_input() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    def wait_for_other_parent() -> None:
        # The pipe may live on in a process that the parent forked.
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(0)

    for watch in (wait_for_end_of_input, wait_for_other_parent):
        threading.Thread(target=watch, name="millpond-parent", daemon=True).start()


def _maintain(service: ContainerService) -> None:
    while True:
        try:
            idle = service.maintain()
        except Exception:  # noqa: BLE001 - upkeep goes on, whatever went wrong once; the metrics count it
            traceback.print_exc()
            service.upkeep_failures += 1
            idle = True
        time.sleep(IDLE_S if idle else BUSY_S)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
