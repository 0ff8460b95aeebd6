"""Named places where a process may die, so that tests can make it die there.

Code that keeps a promise about durability says where it stands: `reach("log.sync.after")`. Nothing happens
there, unless a test armed the point: in its own process with `armed`, which raises `SimulatedCrash`, or in a
real process with `MILLPOND_CRASH=log.sync.after:2`, which kills it with SIGKILL at the second hit.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NoReturn

from millpond.errors import BadOption

FILE_KINDS: Final = ("log", "snapshot", "delta", "manifest", "journal")
FILE_STEPS: Final = ("append", "sync", "rename", "dirsync")
STEPS: Final = ("apply", "acknowledge", "publish", "truncate", "merge")

POINTS: Final[tuple[str, ...]] = tuple(
    f"{step}.{side}"
    for step in (*(f"{kind}.{step}" for kind in FILE_KINDS for step in FILE_STEPS), *STEPS)
    for side in ("before", "after")
)
"""Every crash point of coordinator and containers. A test that enumerates this tuple has covered them all."""

WAITING_POINTS: Final[tuple[str, ...]] = tuple(
    f"waiting.{step}.{side}" for step in FILE_STEPS for side in ("before", "after")
)
"""Those of whoever writes rows that wait: tasks and drivers of Spark, and containers for those who do not see the root."""

SCRATCH_STEPS: Final = ("flush", "index", "read", "compact", "fire")
SCRATCH_POINTS: Final[tuple[str, ...]] = tuple(
    f"scratch.{step}.{side}" for step in SCRATCH_STEPS for side in ("before", "after")
)
"""Those of what open windows have on disk: rows and cells appended, the index of rows, ranges read, files written anew, and
files let go of. Nothing there is durable: a crash may leave what it likes.
"""

ROUND_POINTS: Final[tuple[str, ...]] = tuple(
    f"round.{step}.{side}" for step in ("send", "gather") for side in ("before", "after")
)
"""Those of containers that run an epoch together: what one sends to one peer, and what it waits for from all. After
`round.gather.after` comes the next round, or the end of all.
"""

ENVIRONMENT: Final = "MILLPOND_CRASH"


class SimulatedCrash(BaseException):
    """The process is taken to have died here. Not an `Exception`: no handler for errors may survive it."""

    def __init__(self, point: str) -> None:
        super().__init__(point)
        self.point = point


Action = Callable[[str], None]


def raise_crash(point: str) -> NoReturn:
    raise SimulatedCrash(point)


def kill_process(point: str) -> NoReturn:
    """Ends this process as `kill -9` does: no handler, no flush. One line on stderr says where."""
    os.write(2, f"millpond: killed at crash point {point}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable: SIGKILL cannot be handled")


class Plan:
    """One armed point: acts at its `hit`-th hit, once. `hits` counts on; `fired` says that it acted."""

    def __init__(self, point: str, hit: int, action: Action) -> None:
        _check_declared(point)
        if hit < 1:
            raise BadOption(f"hit {hit} of {point} can never come", hint="hits count from 1", option="hit")
        self.point = point
        self.hit = hit
        self.action = action
        self.hits = 0
        self.fired = False
        self._lock = threading.Lock()

    def count(self) -> None:
        with self._lock:
            self.hits += 1
            if self.hits != self.hit:
                return
            self.fired = True
        self.action(self.point)


# One lookup answers both "is it declared?" and "is it armed?". Tuples are replaced whole, never changed,
# so `reach` needs no lock.
_plans: dict[str, tuple[Plan, ...]] = dict.fromkeys(
    (*POINTS, *WAITING_POINTS, *SCRATCH_POINTS, *ROUND_POINTS), ()
)
_arming = threading.Lock()


def reach(point: str) -> None:
    """Says that the process stands at `point`; raises `BadOption` for one that is not declared."""
    try:
        plans = _plans[point]
    except KeyError:
        _check_declared(point)
        raise
    for plan in plans:
        plan.count()


@contextmanager
def around(step: str) -> Iterator[None]:
    """`reach` before a step, and after it if it was done."""
    reach(f"{step}.before")
    yield
    reach(f"{step}.after")


@contextmanager
def armed(point: str, hit: int = 1, action: Action = raise_crash) -> Iterator[Plan]:
    """Arms `point` in this process, in all its threads, for the block.

    A `SimulatedCrash` that the block lets through goes on to the caller. The plan tells afterwards
    whether it fired; a test asserts that it did.
    """
    plan = Plan(point, hit, action)
    _add(plan)
    try:
        yield plan
    finally:
        _discard(plan)


@contextmanager
def counted() -> Iterator[Mapping[str, Plan]]:
    """Counts the hits of every point during the block, without acting: `plans["log.sync.after"].hits`.

    A test that enumerates crashes runs once under this, to learn which hits there are to crash at.
    """
    plans = {point: Plan(point, 1, lambda _: None) for point in POINTS}
    for plan in plans.values():
        _add(plan)
    try:
        yield plans
    finally:
        for plan in plans.values():
            _discard(plan)


def parse(text: str) -> tuple[str, int]:
    """`"log.sync.after:2"` -> `("log.sync.after", 2)`; the hit is 1 where none is given."""
    point, _, hit = text.partition(":")
    _check_declared(point)
    if hit and not hit.isdecimal():
        raise BadOption(
            f"{ENVIRONMENT}={text!r}: the hit {hit!r} is not a number",
            hint=f"for example {ENVIRONMENT}={point}:2",
            option=ENVIRONMENT,
        )
    return point, int(hit or 1)


def _check_declared(point: str) -> None:
    if point not in _plans:
        raise BadOption(
            f"there is no crash point {point!r}",
            hint="millpond.durable.crashpoints declares them all: POINTS, and those of waiting rows, scratch and rounds",
            option=point,
        )


def _add(plan: Plan) -> None:
    with _arming:
        _plans[plan.point] += (plan,)


def _discard(plan: Plan) -> None:
    with _arming:
        _plans[plan.point] = tuple(other for other in _plans[plan.point] if other is not plan)


def _arm_from_environment() -> None:
    text = os.environ.get(ENVIRONMENT)
    if text:
        _add(Plan(*parse(text), kill_process))


_arm_from_environment()
