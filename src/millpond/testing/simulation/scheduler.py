"""Tasks that take turns on virtual time: one thread, and every choice from one seed.

A task runs until it waits: for time, for a lock, for other tasks, for an answer. Who runs next is chosen by the
seed, and when nobody can, the clock goes to the next moment at which somebody may. Nothing takes real time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import count
from types import FrameType
from typing import Any, NoReturn, TypeVar

from greenlet import getcurrent, greenlet

from millpond.testing.simulation.history import History
from millpond.testing.simulation.runtime import SimRuntime

R = TypeVar("R")

STEPS_MAX = 5_000_000
STEP_S = 1e-6
"""What a turn costs, so that no loop can hold up time."""


class Killed(BaseException):
    """The process of this task is no more. Not an `Exception`: no handler may survive it."""


class Died(Exception):
    """The process ended before the task did."""


class Stuck(Exception):
    """Tasks wait for each other, or for nothing that could come, or go on without end."""


class Task:
    """One thread of a process. Made by `Process.spawn`."""

    def __init__(self, process: Process, work: Callable[[], Any], name: str) -> None:
        self.process = process
        self.name = name
        self.done = False
        self.waits_for = ""
        self.blockers: Callable[[], Iterable[Task]] = tuple
        """Without these it cannot go on."""
        self.waits = 0
        """Numbers its waits: a timer of an earlier one means nothing."""
        self.timed_out = False
        self.joiners: list[Task] | None = None
        self.result: Any = None
        self.failure: BaseException | None = None
        self.green: greenlet | None = None
        """Where it runs, once it has begun."""
        self._work = work

    def run(self) -> None:
        try:
            self.end(result=self._work())
        except Killed:
            self.end(failure=Died(f"{self} was killed"))
        except BaseException as failure:  # noqa: BLE001 - who waits for it gets it
            self.end(failure=failure)

    def end(self, result: Any = None, failure: BaseException | None = None) -> None:
        self.done, self.result, self.failure = True, result, failure
        self.process.scheduler.ended(self)

    def outcome(self) -> Any:
        if self.failure is not None:
            raise self.failure
        return self.result

    def __str__(self) -> str:
        return f"{self.process.name}/{self.name}"


class Process:
    """What is killed and stopped as one: tasks, and the locks and the clock that they share."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self.scheduler = scheduler
        self.name = name
        self.alive = True
        self.stopped = False
        self.clock_ahead_s = 0.0
        self.on_exit: list[Callable[[], None]] = []
        self.tasks: dict[Task, None] = {}
        self.parked: list[Task] = []
        self.runtime = SimRuntime(self)

    def spawn(self, work: Callable[[], Any], name: str, joined: bool = False) -> Task:
        """A task of its own. If it fails and nobody is to join it, the simulation fails."""
        self.check_alive()
        task = Task(self, work, name)
        task.joiners = [] if joined else None
        self.tasks[task] = None
        self.scheduler.ready.append(task)
        return task

    def run(self, work: Callable[[], R], name: str = "run") -> R:
        """Work in this process, for a task of whichever process; `Died` if it is killed meanwhile."""
        if not self.alive:
            raise Died(f"{self.name} is dead")
        task = self.spawn(work, name, joined=True)
        self.scheduler.join([task])
        result: R = task.outcome()
        return result

    def kill(self) -> None:
        """As SIGKILL: nothing of it happens from here on. A task that kills its own process does not return."""
        if not self.alive:
            return
        self.alive = False
        scheduler = self.scheduler
        scheduler.note("killed", self.name)
        scheduler.ready = [task for task in scheduler.ready if task.process is not self]
        scheduler.processes.remove(self)
        here = scheduler.current
        for task in list(self.tasks):
            if task is here:
                continue
            if task.green is not None:
                # It unwinds here and now; whatever it tries on its way out is refused.
                scheduler.current = task
                task.green.parent = getcurrent()
                task.green.throw(Killed())
            else:  # it had not begun
                task.end(failure=Died(f"{task} was killed"))
        scheduler.current = here
        for tell in self.on_exit:
            tell()
        if here is not None and here.process is self:
            raise Killed

    def stop(self) -> None:
        """As SIGSTOP: no task of it runs until `resume`. Its time goes on."""
        if self.alive and not self.stopped:
            self.scheduler.note("stopped", self.name)
            self.stopped = True

    def resume(self) -> None:
        if self.alive and self.stopped:
            self.scheduler.note("resumed", self.name)
            self.stopped = False
            self.scheduler.ready.extend(self.parked)
            self.parked.clear()

    def check_alive(self) -> None:
        if not self.alive:
            raise Killed


class Scheduler:
    """Runs tasks until the first one ends. `switching` is how often a task that need not wait gives way."""

    def __init__(self, seed: int, history: History | None = None, steps_max: int = STEPS_MAX) -> None:
        self.random = random.Random(seed)
        self._chance = self.random.random
        self.switching = self.random.choice((0.02, 0.1, 0.5))
        self.history = history or History()
        self.now = 0.0
        self.steps = 0
        self.steps_max = steps_max
        self.hub = getcurrent()
        self.current: Task | None = None
        self.ready: list[Task] = []
        self.processes: list[Process] = []
        self._timers: list[tuple[float, float, int, Task | Callable[[], None], int]] = []
        self._numbers = count()
        self._failure: BaseException | None = None
        self._idle: list[greenlet] = []
        self.world = self.process("world")

    def process(self, name: str) -> Process:
        process = Process(self, name)
        self.processes.append(process)
        return process

    def note(self, what: str, who: str = "") -> None:
        self.history.add(self.now, who or str(self.current or "-"), what)

    # The loop

    def run(self, work: Callable[[], R]) -> R:
        """The work, as a task that no fault reaches, and all that it starts. Everything ends with it."""
        main = self.world.spawn(work, "main", joined=True)
        chance = self.random.random
        try:
            while not main.done:
                timers = self._timers
                if not self.ready or (timers and timers[0][0] <= self.now):
                    self._pass_time()
                ready = self.ready
                place = int(chance() * len(ready)) if len(ready) > 1 else 0
                task = ready[place]
                ready[place] = ready[-1]
                ready.pop()
                if task.process.stopped:
                    task.process.parked.append(task)
                    continue
                self.steps += 1
                self.now += STEP_S
                if self.steps > self.steps_max:
                    raise Stuck(f"no end after {self.steps_max} steps\n{self.dump()}")
                self.current = task
                if task.green is None:
                    self._begin(task)
                else:
                    task.green.switch()
                self.current = None
                if self._failure is not None:
                    raise self._failure
        finally:
            self.current = None
            for process in list(self.processes):
                process.kill()
            for idle in self._idle:
                idle.switch(None)
        result: R = main.outcome()
        return result

    def _begin(self, task: Task) -> None:
        """In a greenlet that an earlier task has left, if there is one: a new one costs more than most tasks."""
        task.green = self._idle.pop() if self._idle else greenlet(self._run_tasks, self.hub)
        task.green.switch(task)

    def _run_tasks(self, task: Task | None) -> None:
        """One after another; where a task was killed, who killed it goes on instead."""
        here = getcurrent()
        while task is not None:
            task.run()
            if here.parent is not self.hub:
                return
            del task
            self._idle.append(here)
            task = self.hub.switch()

    def _pass_time(self) -> None:
        """Fires what is due; if nobody is ready, goes on to the next moment at which somebody is."""
        timers = self._timers
        while timers and (timers[0][0] <= self.now or not self.ready):
            when, _, _, event, wait = heappop(timers)
            if not isinstance(event, Task):
                self.now = max(self.now, when)
                event()
            elif event.waits_for and event.waits == wait:
                self.now = max(self.now, when)
                event.timed_out = True
                self.wake(event)
        if not self.ready:
            raise Stuck(f"no task can go on\n{self.dump()}")

    def at(self, seconds: float, event: Callable[[], None]) -> None:
        """The event happens after so many seconds, between two turns. It does not wait."""
        self._timer(seconds, event, 0)

    def _timer(self, seconds: float, event: Task | Callable[[], None], wait: int) -> None:
        heappush(self._timers, (self.now + seconds, self._chance(), next(self._numbers), event, wait))

    # For tasks

    def task(self) -> Task:
        """The one that runs; ends it if its process is dead."""
        task = self.current
        if task is None:
            raise RuntimeError("this waits, and only a task can: run it by Scheduler.run or Process.run")
        if not task.process.alive:
            raise Killed
        return task

    def wait(
        self, what: str, seconds: float | None = None, blockers: Callable[[], Iterable[Task]] = tuple
    ) -> bool:
        """Until somebody wakes this task: True; or until the seconds are over: False."""
        task = self.task()
        task.waits += 1
        task.waits_for = what
        task.timed_out = False
        if seconds is not None:
            self._timer(max(seconds, 0.0), task, task.waits)
        else:
            task.blockers = blockers
            if blockers is not tuple and self._needs(task, task, set()):
                self._fail(Stuck(f"{task} waits for itself\n{self.dump()}"))
        self.hub.switch()
        return not task.timed_out

    def wake(self, task: Task) -> None:
        """Goes on from its `wait`; nothing happens where it does not wait, or no more."""
        if task.waits_for and task.process.alive:
            task.waits_for = ""
            task.blockers = tuple
            self.ready.append(task)

    def give_way(self) -> None:
        """Others may run first."""
        self.ready.append(self.task())
        self.hub.switch()

    def pause(self) -> None:
        """A place where the seed may let others run first."""
        if self._chance() < self.switching:
            self.give_way()
        else:
            self.task()

    def sleep(self, seconds: float) -> None:
        self.wait("time", seconds)

    def join(self, tasks: Sequence[Task]) -> None:
        """Until all have ended."""
        joiner = self.task()
        for task in tasks:
            assert task.joiners is not None
            task.joiners.append(joiner)
        while unfinished := [task for task in tasks if not task.done]:
            names = ", ".join(map(str, unfinished))
            self.wait(f"the end of {names}", blockers=lambda: [task for task in tasks if not task.done])

    def ended(self, task: Task) -> None:
        task.process.tasks.pop(task, None)
        for joiner in task.joiners or ():
            self.wake(joiner)
        if task.failure is not None and task.joiners is None and task.process.alive:
            self._failure = task.failure

    # Failures

    def _fail(self, failure: BaseException) -> NoReturn:
        """Ends the simulation, whatever the task would do about it."""
        self._failure = failure
        self.hub.switch()
        raise AssertionError("unreachable: a failed simulation runs no task")

    def _needs(self, task: Task, wanted: Task, seen: set[Task]) -> bool:
        """Whether `task` cannot go on before `wanted` does."""
        for blocker in task.blockers():
            if blocker is wanted:
                return True
            if blocker not in seen:
                seen.add(blocker)
                if self._needs(blocker, wanted, seen):
                    return True
        return False

    def dump(self) -> str:
        """What each task waits for, and where."""
        return "\n".join(
            f"  {task}: {'stopped, ' if process.stopped else ''}waits for {task.waits_for or 'its turn'}"
            f"{_place(task.green.gr_frame if task.green else None)}"
            for process in self.processes
            for task in process.tasks
        )


def _place(frame: FrameType | None) -> str:
    """The innermost line that is not the simulator's own."""
    while frame is not None and "simulation" in frame.f_globals.get("__name__", "").split("."):
        frame = frame.f_back
    return f" in {frame.f_globals['__name__']}.{frame.f_code.co_name}:{frame.f_lineno}" if frame else ""
