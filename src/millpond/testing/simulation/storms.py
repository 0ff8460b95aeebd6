"""Faults that come by themselves, each kind in its own time, as the weather has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from millpond.testing.simulation.disk import Disk
from millpond.testing.simulation.faults import Faults
from millpond.testing.simulation.network import Network
from millpond.testing.simulation.scheduler import Process, Scheduler

DRIVER = "driver"
"""How the names of processes begin that have a pond open: its coordinator is in them."""

CHANGES_MAX = 12
DELAY_S = 2.0
CONTAINERS_CUT = 0.4
"""Of cuts: those between two containers, where there are two."""


class Storms:
    """Strikes the processes that `victims` names; `containers` are some of them. What a crash of the machine is, `crash` says.

    Who is killed stays dead: whoever watches it starts another.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        faults: Faults,
        network: Network,
        disk: Disk,
        victims: Callable[[], Sequence[Process]],
        crash: Callable[[], None],
        containers: Callable[[], Sequence[Process]] = tuple,
    ) -> None:
        self._scheduler = scheduler
        self._faults = faults
        self._network = network
        self._disk = disk
        self._victims = victims
        self._crash = crash
        self._containers = containers

    def begin(self) -> None:
        weather = self._faults.weather
        for every_s, strike in (
            (weather.kill_every_s, self._kill),
            (weather.stop_every_s, self._stop),
            (weather.cut_every_s, self._cut),
            (weather.full_every_s, self._fill),
            (weather.jump_every_s, self._jump),
            (weather.crash_every_s, self._crash_machine),
        ):
            if every_s < math.inf:
                self._next(every_s, strike)

    def end(self) -> None:
        """No fault comes from here on, and those that last are over. The dead stay dead."""
        self._faults.calm()
        self._disk.make_room()
        self._network.mend()
        for process in self._scheduler.processes:
            process.resume()

    def _next(self, every_s: float, strike: Callable[[], float]) -> None:
        """Strikes again and again; the time between two of a kind begins when the first is over."""

        def come() -> None:
            if self._faults.weather.is_foul:
                lasting_s = strike()
                self._scheduler.at(lasting_s, partial(self._next, every_s, strike))

        self._scheduler.at(self._faults.duration(every_s), come)

    def _victim(self) -> Process | None:
        living = [process for process in self._victims() if process.alive]
        return self._scheduler.random.choice(living) if living else None

    # Each kind of fault returns how many seconds it lasts.

    def _kill(self) -> float:
        victim = self._victim()

        def kill() -> None:
            if victim and victim.alive and self._faults.weather.is_foul:
                self._faults.fire("kill", victim.name)
                victim.kill()

        return self._now_or_at_a_change(victim, kill)

    def _crash_machine(self) -> float:
        def crash() -> None:
            if self._faults.weather.is_foul:
                self._faults.fire("crash")
                self._crash()

        return self._now_or_at_a_change(None, crash)

    def _now_or_at_a_change(self, victim: Process | None, event: Callable[[], None]) -> float:
        """What matters most happens between two changes of the disk, or just after a reply: all over in no time."""
        chance = self._scheduler.random.random()
        if chance < 0.3:
            event()
        elif chance < 0.5 and victim is not None:
            self._network.strike(victim, event)
        elif chance < 0.7 and victim is not None:
            # What it vouched for is in doubt, while others are still at it.
            self._network.strike(victim, lambda: self._delay_another(victim, event), "Prepare")
        else:
            self._disk.strike(victim, self._scheduler.random.randint(1, CHANGES_MAX), event)
        return 0.0

    def _delay_another(self, victim: Process, event: Callable[[], None]) -> None:
        others = [other for other in self._victims() if other.alive and other is not victim]
        if others and self._faults.weather.is_foul:
            self._hold(self._scheduler.random.choice(others), self._faults.duration(DELAY_S))
        event()

    def _hold(self, victim: Process, seconds: float) -> None:
        self._faults.fire("stop", f"{victim.name} for {seconds:.3f} s")
        if victim in self._containers():
            self._faults.fire("stop of a container")
        elif victim.name.startswith(DRIVER):
            self._faults.fire("stop of the coordinator")
        victim.stop()
        self._scheduler.at(seconds, victim.resume)

    def _stop(self) -> float:
        victim, seconds = self._victim(), self._faults.duration(self._faults.weather.stop_s)
        if victim:
            self._hold(victim, seconds)
        return seconds

    def _cut(self) -> float:
        one, other = self._victim(), self._victim()
        seconds = self._faults.duration(self._faults.weather.cut_s)
        containers = [process for process in self._containers() if process.alive]
        if len(containers) > 1 and self._scheduler.random.random() < CONTAINERS_CUT:
            one, other = self._scheduler.random.sample(containers, 2)
            self._faults.fire("cut between containers")
        if one and other and one is not other:
            self._faults.fire("cut", f"between {one.name} and {other.name} for {seconds:.3f} s")
            self._network.cut(one, other, seconds)
        return seconds

    def _fill(self) -> float:
        seconds = self._faults.duration(self._faults.weather.full_s)
        self._scheduler.note(f"the disk fills up for {seconds:.3f} s", "fault")
        self._disk.fill(seconds)
        return seconds

    def _jump(self) -> float:
        if victim := self._victim():
            seconds = self._faults.duration(self._faults.weather.jump_s)
            self._faults.fire("clock jump", f"of {victim.name} by {seconds:.3f} s")
            victim.clock_ahead_s += seconds
        return 0.0
