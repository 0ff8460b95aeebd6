"""What goes wrong in a simulation: how often, drawn from the seed; and what did, counted."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from random import Random

from millpond.testing.simulation.scheduler import Scheduler

LAST_MAX = 200


@dataclass(frozen=True)
class Weather:
    """How often each fault comes. Without arguments: none, and messages and files take a little time."""

    latency_s: float = 0.001
    """A message's way, on average."""
    delayed: float = 0.0
    """Of messages: those that take up to `delay_s`."""
    delay_s: float = 10.0
    lost: float = 0.0
    """Of messages, requests and replies alike."""
    doubled: float = 0.0
    """Of requests."""
    silent: float = 0.0
    """Of calls to an address where nothing serves: those that are not refused, but never answered."""
    patience_s: float = math.inf
    """A call that is not answered within this time is given up, however long it may take."""
    disk_s: float = 0.001
    """A change of the disk, on average."""
    slow: float = 0.0
    """Of syncs: those that take up to `slow_s`."""
    slow_s: float = 20.0
    flipped: float = 0.0
    """Of files of waiting rows: those that are read with a bit flipped. The next time they are read as they are."""
    short: float = 0.0
    """Of slices that an epoch is applied to: those at which memory runs out."""
    # On average so many seconds pass between two of a kind.
    kill_every_s: float = math.inf
    stop_every_s: float = math.inf
    stop_s: float = 10.0
    cut_every_s: float = math.inf
    cut_s: float = 10.0
    full_every_s: float = math.inf
    full_s: float = 10.0
    jump_every_s: float = math.inf
    jump_s: float = 100.0
    crash_every_s: float = math.inf

    @property
    def is_foul(self) -> bool:
        return self != Weather()

    @staticmethod
    def of(chance: Random) -> Weather:
        """Another weather for each seed: some kinds of faults are in it and some are not, rare or frequent."""

        def between(low: float, high: float) -> float:
            return math.exp(chance.uniform(math.log(low), math.log(high)))

        def rate(high: float) -> float:
            return between(high / 100, high) if chance.random() < 0.5 else 0.0

        def every(low: float, high: float) -> float:
            return between(low, high) if chance.random() < 0.5 else math.inf

        return Weather(
            latency_s=between(0.0001, 0.1),
            delayed=rate(0.2),
            delay_s=between(1, 200),
            lost=rate(0.1),
            doubled=rate(0.2),
            silent=chance.choice((0.0, 0.1, 1.0)),
            patience_s=between(2, 60),
            disk_s=between(0.00001, 0.1),
            slow=rate(0.3),
            slow_s=between(0.1, 50),
            short=rate(0.3),
            kill_every_s=every(1, 100),
            stop_every_s=every(1, 100),
            stop_s=between(0.1, 300),
            cut_every_s=every(2, 200),
            cut_s=between(0.1, 300),
            full_every_s=every(5, 200),
            full_s=between(0.1, 60),
            jump_every_s=every(5, 200),
            jump_s=between(0.1, 1000),
            crash_every_s=every(20, 500),
            flipped=rate(0.6),
        )


class Faults:
    """The weather of now, and how often each kind of fault came about."""

    def __init__(self, scheduler: Scheduler, weather: Weather) -> None:
        self.weather = weather
        self.fired: Counter[str] = Counter()
        self.last: deque[tuple[float, str]] = deque(maxlen=LAST_MAX)
        """The newest, with their times."""
        self._scheduler = scheduler

    def strikes(self, rate: float) -> bool:
        return rate > 0 and self._scheduler.random.random() < rate

    def fire(self, kind: str, what: str = "") -> None:
        """It came about."""
        self.fired[kind] += 1
        self.last.append((self._scheduler.now, f"{kind} {what}"))
        self._scheduler.note(f"{kind} {what}" if what else kind, "fault")

    def duration(self, mean_s: float) -> float:
        return self._scheduler.random.expovariate(1 / mean_s) if mean_s > 0 else 0.0

    def calm(self) -> None:
        """No fault comes from here on."""
        self.weather = Weather()
