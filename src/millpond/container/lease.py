"""Whether a container may answer: it hears of its coordinator often enough, and tells how long its disk takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count

from millpond.container.log import Log
from millpond.errors import Unavailable
from millpond.runtime import Runtime
from millpond.wire.house import Pulse

# Answers to the coordinator whose times are remembered: more than it asks for in the time of a lease.
PULSES_MAX = 64


class Lease:
    """Who was not asked for long may have been stopped, and its slices be served elsewhere, from the same files."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._until_s: float | None = None
        self._pulses = count(1)
        self._answered_s: dict[int, float] = {}
        self._writing_since_s: float | None = None
        self._write_s = 0.0

    def pulse(self, lease_s: float | None, heard: int) -> Pulse:
        """The coordinator asks who is there; it has heard the answer of that number, and grants so many seconds from then."""
        now_s = self._runtime.now()
        number = next(self._pulses)
        if lease_s is not None:
            # The first has nothing that it could go on from; of answers that are forgotten by now, none counts.
            since_s = self._answered_s.get(heard, now_s if not self._answered_s else -math.inf)
            self._until_s = max(self._until_s or -math.inf, since_s + lease_s)
            self._answered_s[number] = now_s
            self._answered_s.pop(number - PULSES_MAX, None)
        return Pulse(self.write_s, number)

    @property
    def write_s(self) -> float:
        """How long the last small write to the disk took, or has taken so far."""
        began_s, took_s = self._writing_since_s, self._write_s
        return took_s if began_s is None else max(took_s, self._runtime.now() - began_s)

    def beat(self, log: Log, is_there: Callable[[], bool]) -> None:
        """Writes a little to the disk, and notes how long that takes, and whether all is there. In a thread of its own."""
        self._writing_since_s = started_s = self._runtime.now()
        gone = False
        try:
            log.probe()
            gone = not is_there()
        except FileNotFoundError:
            gone = True  # somebody removed the directory: nothing will ever be durable there
        except OSError:
            pass  # one that is full is there; one that hangs takes long
        self._write_s = math.inf if gone else self._runtime.now() - started_s
        self._writing_since_s = None

    def holds(self) -> bool:
        return self._until_s is None or self._runtime.now() <= self._until_s

    def check(self) -> None:
        if not self.holds():
            raise Unavailable(
                "the container has not heard of its coordinator for long",
                hint="try again in a moment",
                address="",
            )
