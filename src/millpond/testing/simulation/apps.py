"""Applications beside the pond: processes with queries, started again from their checkpoints when they end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Iterable
from random import Random
from typing import NamedTuple

from millpond.errors import CorruptFile
from millpond.pond.pond import Pond
from millpond.testing.simulation.pond import SimPond, is_weather
from millpond.testing.simulation.scheduler import Died, Process

RESTART_S = 1.0
RETRY_S = 0.5
CALM_PAUSE_S = 0.5
LINGERING, LINGER_S, KILLED = 0.2, 2.0, 0.15
LINES_MAX = 2000


class Wrong(AssertionError):
    """The pond broke a promise. `keys` are those that it concerns, if it concerns some."""

    def __init__(self, message: str, keys: Iterable[Hashable] = ()) -> None:
        super().__init__(message)
        self.keys = frozenset(keys)


class Line(NamedTuple):
    now: float
    who: str
    what: str
    keys: frozenset[Hashable]


class Chronicle:
    """What applications asked for and what was acknowledged, with the keys that it was about."""

    def __init__(self) -> None:
        self.lines: deque[Line] = deque(maxlen=LINES_MAX)

    def about(self, keys: frozenset[Hashable], lines: int) -> list[Line]:
        """The newest lines that concern these keys, or all if there are no keys."""
        return [line for line in self.lines if not keys or not line.keys or line.keys & keys][-lines:]


class App(ABC):
    """One application. What it must not forget when it is killed, it keeps in attributes: its checkpoint."""

    def __init__(self, pond: SimPond, chronicle: Chronicle, name: str) -> None:
        self.name = name
        self.pond = pond
        self.chronicle = chronicle
        self.done = False
        self.process: Process | None = None
        self._starts = 0

    @abstractmethod
    def work(self, pond: Pond, process: Process) -> None:
        """All that it has to do, from its checkpoint on. Called again after a failure."""

    def live(self) -> None:
        """Until its work is done. A task that no fault reaches."""
        scheduler = self.pond.sim.scheduler
        while not self.done:
            self.process = process = scheduler.process(f"{self.name}.{self._starts}")
            self._starts += 1
            try:
                process.run(lambda process=process: self._try(process))  # type: ignore[misc]
            except Died:
                self.say("was killed")
            process.kill()
            scheduler.sleep(self.pond.sim.faults.duration(RESTART_S))

    def _try(self, process: Process) -> None:
        while not self.done:
            try:
                self.work(self.pond.connect(process), process)
                self.done = True
            except Exception as error:
                if not is_weather(error) and not self._was_misread(error):
                    raise
                self.say(f"failed: {error!r}"[:200])
                process.runtime.sleep(self.pond.sim.faults.duration(RETRY_S))

    def _was_misread(self, error: Exception) -> bool:
        """Whether it says that a file is damaged that was, when it was read."""
        return isinstance(error, CorruptFile) and error.attributes().get("path") in self.pond.sim.disk.flipped

    def say(self, what: str, keys: Iterable[Hashable] = ()) -> None:
        scheduler = self.pond.sim.scheduler
        self.chronicle.lines.append(Line(scheduler.now, self.name, what, frozenset(keys)))
        scheduler.note(what, self.name)

    def linger(self, process: Process, chance: Random, killed: float = KILLED) -> None:
        """An epoch is done, and the checkpoint does not say so yet: who is killed here sends it once more."""
        draw, faults = chance.random(), self.pond.sim.faults
        if draw < LINGERING:
            self.pause(process, LINGER_S)
        elif draw > 1 - killed and faults.weather.is_foul:
            faults.fire("kill before a checkpoint", process.name)
            process.kill()

    def pause(self, process: Process, mean_s: float) -> None:
        """Short when the storms are over: then there is nothing to wait for."""
        faults = self.pond.sim.faults
        process.runtime.sleep(
            faults.duration(mean_s if faults.weather.is_foul else min(mean_s, CALM_PAUSE_S))
        )
