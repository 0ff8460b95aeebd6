"""How a container comes to be a backup, alone: whatever fails, the journal names only those that have all that was decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from millpond.coordinator.copies import (
    Copy,
    Copying,
    Dismiss,
    Done,
    Effect,
    Enlist,
    Enter,
    Event,
    Failed,
    Phase,
)
from millpond.errors import BackupLost, MillpondError, Unavailable, WriteFailed
from millpond.wire.base import SliceId, Term

SOURCE, COPIER, SLICES = 1, 2, [SliceId(5), SliceId(6)]
AWAY = Unavailable("away", address="")
FULL = WriteFailed("full", path="/j")
Choose = Callable[[int], int]
"""One of so many outcomes; 0 is the one that is hoped for."""


class World:
    """An owner whose epochs go on, a copier and a journal. `choose` says what happens to each effect."""

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        self.effects: list[Effect] = []
        self.failures = 0
        self.copying = Copying(SOURCE, COPIER, SLICES)
        self.decided = 1
        self.flying_without_it = True
        """An epoch that began before the copier was enlisted is under way."""
        self.term = Term(7)
        self.enlisted: Term | None = None
        self.backup: Term | None = None
        """As the journal is remembered; and as it may be on disk all the same."""
        self.doubtful: Term | None = None
        # The copier itself: whether it takes what comes, and which epochs it has.
        self.takes = False
        self.has: set[int] = set()

    def restart(self) -> None:
        self.term = Term(self.term + 1)
        self.takes, self.has = False, set()

    def epoch(self) -> None:
        """One more is decided, as `Backing.plan` and `is_covered` have it."""
        if self.backup is not None and self.backup != self.term:
            self.backup = None
        if self.enlisted is not None and self.enlisted != self.term:
            self.enlisted = None
        sent = {self.enlisted, self.backup} - {None}
        if sent and not self.takes:
            # It refuses, and the epoch is decided without it.
            self.enlisted = self.backup = None
        elif sent:
            self.has.add(self.decided)
        self.decided += 1
        self.doubtful = None

    def land(self) -> None:
        """The epoch that does not know of the copier is decided."""
        if self.flying_without_it:
            self.flying_without_it = False
            self.decided += 1
            self.doubtful = None

    def run(self) -> None:
        for _ in range(10):
            effects = self.copying.effects()
            for effect in effects:
                self.effects.append(effect)
                self.copying.on(self.carry_out(effect))
                self.check_journal()
                self.epoch()
                self.check_journal()
            if not effects:
                return
        raise AssertionError("it does not end")

    def check_journal(self) -> None:
        for named in {self.backup, self.doubtful} - {None}:
            if named == self.term:
                assert self.has >= set(range(self.decided)), self.effects

    def fail(self, error: MillpondError) -> Event:
        self.failures += 1
        return Failed(error)

    def carry_out(self, effect: Effect) -> Event:
        match effect:
            case Enlist(container, slices):
                assert (container, slices) == (COPIER, SLICES)
                return self.enlist()
            case Copy(source, container, slices):
                assert (source, container, slices) == (SOURCE, COPIER, SLICES)
                return self.copy()
            case Enter(container, term, slices):
                assert (container, slices) == (COPIER, SLICES)
                return self.enter(term)
            case Dismiss(container, slices):
                assert (container, slices) == (COPIER, SLICES)
                return self.dismiss()

    def enlist(self) -> Event:
        match self.choose(4):
            case 1:
                return self.fail(AWAY)
            case 2:  # it is done, and nobody hears of it
                self.takes = True
                return self.fail(AWAY)
            case 3:  # it obeys, ends, and is back before anyone looks
                term = self.term
                self.enlisted = term
                self.land()
                self.restart()
                return Done(term)
        self.takes = True
        self.enlisted = self.term
        self.land()
        return Done(self.term)

    def copy(self) -> Event:
        outcome = self.choose(5)
        if not self.takes:
            return self.fail(BackupLost("not enlisted", container=COPIER, term=self.term))
        if outcome == 1:
            return self.fail(AWAY)
        self.has |= set(range(self.decided))
        if outcome == 2:
            return self.fail(AWAY)
        if outcome == 3:
            term = self.term
            self.restart()
            return Done(term)
        if outcome == 4:  # an epoch did not reach it in time, and was decided without it
            self.enlisted = None
            self.decided += 1
        return Done(self.term)

    def enter(self, term: Term) -> Event:
        outcome = self.choose(4)
        if outcome == 3:
            self.restart()
        if (term, term) != (self.term, self.enlisted):
            return self.fail(Unavailable("another one", address=""))
        if outcome == 1:
            return self.fail(FULL)
        if outcome == 2:  # it is on disk all the same
            self.doubtful = term
            return self.fail(FULL)
        self.backup, self.enlisted = term, None
        return Done(term)

    def dismiss(self) -> Event:
        """The journal first: it must not name one that lets go."""
        self.enlisted = self.backup = None
        match self.choose(4 if self.doubtful is not None else 3):
            case 1:
                self.doubtful = None
                return self.fail(AWAY)
            case 2:
                self.doubtful = None
                self.takes, self.has = False, set()
                return self.fail(AWAY)
            case 3:
                return self.fail(FULL)
        self.doubtful = None
        self.takes, self.has = False, set()
        return Done(self.term)

    def check(self) -> None:
        copying = self.copying
        assert self.enlisted is None
        if self.failures:
            assert copying.phase is Phase.GIVEN_UP
            assert copying.error is not None
            assert self.backup is None
        else:
            assert copying.phase is Phase.DONE
            assert copying.error is None
            assert self.backup == self.term


def every_plan() -> Iterator[World]:
    """All that can happen, one choice differing at a time: the last that has another outcome takes it."""
    plan: list[int] = []
    while True:
        taken: list[tuple[int, int]] = []

        def choose(outcomes: int, plan: list[int] = plan, taken: list[tuple[int, int]] = taken) -> int:
            taken.append((plan[len(taken)] if len(taken) < len(plan) else 0, outcomes))
            return taken[-1][0]

        world = World(choose)
        world.run()
        yield world
        while taken and taken[-1][0] == taken[-1][1] - 1:
            taken.pop()
        if not taken:
            return
        plan = [outcome for outcome, _ in taken[:-1]] + [taken[-1][0] + 1]


def test_every_failure_at_every_step() -> None:
    ended: Counter[Phase] = Counter()
    for world in every_plan():
        world.check()
        ended[world.copying.phase] += 1
    assert set(ended) == {Phase.DONE, Phase.GIVEN_UP}
    assert ended.total() > 30


def test_without_faults_each_step_is_asked_for_once() -> None:
    world = World(lambda outcomes: 0)
    world.run()
    world.check()
    assert [type(effect).__name__ for effect in world.effects] == ["Enlist", "Copy", "Enter"]


def test_the_world_notices_a_copy_that_was_enlisted_too_late() -> None:
    """A canary: an epoch that does not know of the copier is decided after the copy."""
    world = World(lambda outcomes: 0)
    world.land = lambda: None  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        for _ in range(3):
            (effect,) = world.copying.effects()
            if isinstance(effect, Enter):
                World.land(world)
            world.copying.on(world.carry_out(effect))
            world.check_journal()


def test_the_first_failure_tells_why() -> None:
    copying = Copying(SOURCE, COPIER, SLICES)
    copying.on(Done(Term(7)))
    copying.on(Failed(FULL))
    assert copying.effects() == [Dismiss(COPIER, SLICES)]
    copying.on(Failed(AWAY))
    assert copying.error is FULL
    assert (copying.phase, copying.effects()) == (Phase.GIVEN_UP, [])


def test_the_incarnation_that_was_copied_to_is_the_one_that_is_entered() -> None:
    copying = Copying(SOURCE, COPIER, SLICES)
    copying.on(Done(Term(7)))
    copying.on(Done(Term(9)))
    assert copying.effects() == [Enter(COPIER, Term(9), SLICES)]
