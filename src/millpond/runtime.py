"""Time, chance and concurrency, as the shells of the pond get them.

`Threads` is the real thing, `Serial` has one thread and no waiting. A simulation brings its own.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

# How long a runtime that is closed waits for work that has begun.
CLOSE_S = 5.0
T = TypeVar("T")
R = TypeVar("R")
K = TypeVar("K")


class Lock(Protocol):
    """Whoever has it may take it again, and gives it back as often."""

    def acquire(self, *, timeout: float = -1) -> bool:
        """False if it could not be had within `timeout` seconds; without one it waits for ever."""

    def release(self) -> None: ...

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class Signal(Protocol):
    """Something has happened that one waits for. Set, it stays set until it is cleared."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def wait(self, timeout: float) -> bool:
        """Until it is set: True; or until so many seconds are over: False."""


class Runtime(Protocol):
    """Time, chance and concurrency, as the shells of the pond get them: from threads, or from a simulation."""

    def now(self) -> float:
        """Seconds of a clock that never goes back. Its zero means nothing."""

    def sleep(self, seconds: float) -> None: ...

    def lock(self) -> Lock: ...

    def signal(self) -> Signal: ...

    def map(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Work on all items at the same time, and wait for all; then raise the first failure, in item order."""

    def spawn(self, work: Callable[[], object], name: str) -> None:
        """Work goes on by itself. Nobody waits for it, and it ends with the process at the latest."""

    def bits(self, count: int) -> int:
        """That many random bits."""

    def close(self) -> None:
        """No more work comes. What has begun has a few seconds to end."""


class Locks(Generic[K]):
    """A lock for each key, made when it is first asked for."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._locks: dict[K, Lock] = {}

    def __getitem__(self, key: K) -> Lock:
        return self._locks.get(key) or self._locks.setdefault(key, self._runtime.lock())


class Threads:
    """The real runtime. With `threads` it keeps that many for `map`, whose work must then not map itself."""

    def __init__(self, threads: int = 0, name: str = "millpond") -> None:
        self._pool = ThreadPoolExecutor(threads, name) if threads else None
        self._running: set[Future[Any]] = set()

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def lock(self) -> Lock:
        return threading.RLock()

    def signal(self) -> Signal:
        return threading.Event()

    def map(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        if len(items) <= 1:
            return [work(item) for item in items]
        if self._pool is not None:
            futures = [self._pool.submit(work, item) for item in items]
            self._running.update(futures)
            wait(futures)
            self._running.difference_update(futures)
        else:
            with ThreadPoolExecutor(len(items)) as pool:
                try:
                    futures = [pool.submit(work, item) for item in items]
                except RuntimeError as error:  # there is no room for a thread's stack
                    raise MemoryError(str(error)) from None
        return [future.result() for future in futures]

    def spawn(self, work: Callable[[], object], name: str) -> None:
        threading.Thread(target=work, name=name, daemon=True).start()

    def bits(self, count: int) -> int:
        return secrets.randbits(count)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            wait(list(self._running), CLOSE_S)


class Serial:
    """One thread: items are worked on in turn, what is spawned is done at once, and sleep only moves the clock."""

    def __init__(self, seed: int | None = None) -> None:
        self._now = 0.0
        self._random = random.Random(seed)  # noqa: S311 - a seed makes it repeat

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds

    def lock(self) -> Lock:
        return threading.RLock()

    def signal(self) -> Signal:
        return SerialSignal(self)

    def map(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        results, failures = [], []
        for item in items:
            try:
                results.append(work(item))
            except Exception as failure:  # noqa: BLE001 - the others are still to be done
                failures.append(failure)
        if failures:
            raise failures[0]
        return results

    def spawn(self, work: Callable[[], object], name: str) -> None:
        work()

    def pause(self, deadline: float) -> None:
        """What there is to do before that time, while one waits."""
        self._now = max(self._now, deadline)

    def bits(self, count: int) -> int:
        return self._random.getrandbits(count)

    def close(self) -> None:
        pass


class SerialSignal:
    """Nobody else runs who could set it: to wait for it moves the clock."""

    def __init__(self, runtime: Serial) -> None:
        self._runtime = runtime
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float) -> bool:
        deadline = self._runtime.now() + timeout
        while not self._is_set and self._runtime.now() < deadline:
            self._runtime.pause(deadline)
        return self._is_set
