"""Times in which nothing that takes long holds up slices: they are about to change hands."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from millpond.runtime import Lock, Runtime

LOOK_S = 0.02


class Quiet:
    """Of one container. `keep` begins such a time, which ends by itself; what may hold a lock for long does it by `work`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._until_s = -math.inf

    def keep(self, locks: Sequence[Lock], seconds: float, patience_s: float) -> bool:
        """From now on for so many seconds; False if somebody is at work for longer than one has patience."""
        deadline = self._runtime.now() + patience_s
        with ExitStack() as stack:
            for lock in locks:
                if not lock.acquire(timeout=max(0.0, deadline - self._runtime.now())):
                    return False
                stack.callback(lock.release)
            # Whoever has had none of the locks looks at this when it has one.
            self._until_s = max(self._until_s, self._runtime.now() + seconds)
        return True

    def end(self) -> None:
        self._until_s = -math.inf

    @contextmanager
    def work(self, lock: Lock) -> Iterator[None]:
        """Holds the lock, perhaps for long: not before it is quiet no more."""
        while True:
            with lock:
                if self._runtime.now() >= self._until_s:
                    yield
                    return
            self._runtime.sleep(LOOK_S)
