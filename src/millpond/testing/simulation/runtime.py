"""What a simulated process gets for threads, locks, time and chance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from millpond.testing.simulation.scheduler import Process, Task

T = TypeVar("T")
R = TypeVar("R")


class SimLock:
    """Re-entrant for a task. Who gets it when it becomes free is chosen by the seed; it ends with its process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._scheduler = process.scheduler
        self._owner: Task | None = None
        self._depth = 0
        self._waiters: list[Task] = []

    def acquire(self, *, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        task = scheduler.task()
        assert task.process is self._process, f"{task} takes a lock of {self._process.name}"
        if self._owner is not task:
            scheduler.pause()
            deadline = scheduler.now + timeout
            while self._owner is not None:
                seconds = None if timeout < 0 else deadline - scheduler.now
                if seconds is not None and seconds <= 0:
                    return False
                self._waiters.append(task)
                if not scheduler.wait(f"a lock of {self._owner}", seconds, self._owners):
                    self._waiters.remove(task)
            self._owner = task
        self._depth += 1
        return True

    def release(self) -> None:
        task = self._scheduler.task()
        if self._owner is not task:
            raise RuntimeError(f"{task} releases a lock that it does not have")
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            if self._waiters:
                place = int(self._scheduler.random.random() * len(self._waiters))
                self._scheduler.wake(self._waiters.pop(place))

    def _owners(self) -> tuple[Task, ...]:
        return () if self._owner is None else (self._owner,)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.release()


class SimSignal:
    """Who waits for it goes on when the seed says so, once it is set."""

    def __init__(self, process: Process) -> None:
        self._scheduler = process.scheduler
        self._is_set = False
        self._waiters: list[Task] = []

    def set(self) -> None:
        self._is_set = True
        waiters, self._waiters = self._waiters, []
        for task in waiters:
            self._scheduler.wake(task)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float) -> bool:
        task = self._scheduler.task()
        if not self._is_set:
            self._waiters.append(task)
            if not self._scheduler.wait("a signal", timeout) and task in self._waiters:
                self._waiters.remove(task)
        return self._is_set


class SimRuntime:
    """The runtime of one simulated process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._scheduler = process.scheduler

    def now(self) -> float:
        return self._scheduler.now + self._process.clock_ahead_s

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(seconds)

    def lock(self) -> SimLock:
        return SimLock(self._process)

    def signal(self) -> SimSignal:
        return SimSignal(self._process)

    def map(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        if len(items) <= 1:
            return [work(item) for item in items]
        name = self._scheduler.task().name
        tasks = [
            self._process.spawn(partial(work, item), f"{name}.{place}", joined=True)
            for place, item in enumerate(items)
        ]
        self._scheduler.join(tasks)
        return [task.outcome() for task in tasks]

    def spawn(self, work: Callable[[], object], name: str) -> None:
        self._process.spawn(work, name)

    def bits(self, count: int) -> int:
        return self._scheduler.random.getrandbits(count)

    def close(self) -> None:
        pass
