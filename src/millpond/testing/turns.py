"""A serial runtime whose `map` lets items wait for each other: they take turns in one thread, and always the same ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from greenlet import getcurrent, greenlet

from millpond.runtime import Serial

T = TypeVar("T")
R = TypeVar("R")
# What a turn in which one only waits takes of its own clock.
TURN_S = 1e-3


class _Turn(greenlet):  # type: ignore[misc] # it has no types
    """One item of a `map`. Who waits in it lets the others of that `map` go on."""


class Turns(Serial):
    """As `Serial`, as long as nobody waits for a signal."""

    def map(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        if len(items) <= 1:
            return super().map(work, items)
        results: dict[int, R] = {}
        failures: dict[int, Exception] = {}

        def run(place: int, item: T) -> None:
            try:
                results[place] = work(item)
            except Exception as failure:  # noqa: BLE001 - the others are still to be done
                failures[place] = failure

        waiting = [(_Turn(run), place, item) for place, item in enumerate(items)]
        for turn, place, item in waiting:
            turn.switch(place, item)
        turns = [turn for turn, _, _ in waiting if not turn.dead]
        while turns:
            # They may wait for those who wait with this one.
            self.pause(self.now())
            for turn in turns:
                turn.switch()
            turns = [turn for turn in turns if not turn.dead]
        if failures:
            raise failures[min(failures)]
        return [results[place] for place in range(len(items))]

    def pause(self, deadline: float) -> None:
        here = getcurrent()
        if isinstance(here, _Turn):
            here.parent.switch()
            self.sleep(TURN_S)
        else:
            super().pause(deadline)
