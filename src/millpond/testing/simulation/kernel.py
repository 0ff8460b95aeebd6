"""One simulated machine: its scheduler, its disk, its network and its weather."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from millpond.testing.simulation.disk import Disk
from millpond.testing.simulation.faults import Faults, Weather
from millpond.testing.simulation.history import History
from millpond.testing.simulation.network import Network
from millpond.testing.simulation.scheduler import STEPS_MAX, Process, Scheduler
from millpond.testing.simulation.storms import Storms

R = TypeVar("R")


class Simulation:
    """One machine, its disk and its network. The same seed gives the same history, to the last line.

    That holds within one Python version, for code that takes all its time, chance and concurrency from the
    `runtime` of its process and does not depend on the order of a set.
    """

    def __init__(self, seed: int, weather: Weather | None = None, steps_max: int = STEPS_MAX) -> None:
        self.seed = seed
        self.history = History()
        self.scheduler = Scheduler(seed, self.history, steps_max)
        self.faults = Faults(self.scheduler, weather or Weather.of(self.scheduler.random))
        self.network = Network(self.scheduler, self.faults)
        self.disk = Disk(self.scheduler, self.faults, seed)

    def process(self, name: str) -> Process:
        return self.scheduler.process(name)

    def storms(
        self,
        victims: Callable[[], Sequence[Process]],
        crash: Callable[[], None],
        containers: Callable[[], Sequence[Process]] = tuple,
    ) -> Storms:
        return Storms(self.scheduler, self.faults, self.network, self.disk, victims, crash, containers)

    def run(self, work: Callable[[], R]) -> R:
        """The work, as a task that no fault reaches. A failure tells the seed and what happened last."""
        try:
            return self.scheduler.run(work)
        except BaseException as failure:
            failure.add_note(f"seed {self.seed}, {dict(self.faults.fired)}\n{self.history.tail()}")
            raise
