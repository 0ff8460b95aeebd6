"""How slices change hands, alone: whatever fails, each slice is served by whom the journal says, or is about to be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from millpond.coordinator.moves import (
    Adopt,
    Adopted,
    Confirm,
    Effect,
    Enter,
    Event,
    Failed,
    Home,
    Move,
    Obeyed,
    Phase,
    Recall,
    Release,
    Settle,
)
from millpond.errors import CorruptFile, MillpondError, Unavailable, WriteFailed
from millpond.wire.base import SliceId, Term

SOURCE, TARGET, SLICE = 1, 2, SliceId(5)
AWAY = Unavailable("away", address="")
Choose = Callable[[int], int]
"""One of so many outcomes; 0 is the one that is hoped for."""


class World:
    """Two containers and a journal. `choose` says what happens to each effect."""

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        self.owner = SOURCE
        self.serves = {SOURCE: True, TARGET: False}
        self.confirmed = {SOURCE: True, TARGET: False}
        self.doubtful: int | None = None
        self.effects: list[Effect] = []
        self.failures = 0
        self.move = Move(SOURCE, TARGET, [SLICE])

    def restart(self, container: int) -> None:
        self.serves[container] = self.confirmed[container] = self.owner == container

    def run(self) -> None:
        for _ in range(20):
            effects = self.move.effects()
            for effect in effects:
                self.effects.append(effect)
                self.move.on(self.carry_out(effect))
                self.check_astray()
            if not effects:
                return
        raise AssertionError("it does not end")

    def check_astray(self) -> None:
        """Who serves otherwise than the journal says is known to be astray, from its first step on."""
        for container, serves in self.serves.items():
            if serves != (self.owner == container):
                assert container in self.move.astray, self.effects
        if self.doubtful is not None:
            assert {SOURCE, TARGET} <= self.move.astray

    def fail(self, error: MillpondError, stale: bool = False) -> Event:
        self.failures += 1
        return Failed(error, stale)

    def carry_out(self, effect: Effect) -> Event:
        match effect:
            case Release(container, slices):
                assert (container, list(slices)) == (SOURCE, [SLICE])
                return self.release()
            case Adopt(container, slices):
                assert (container, list(slices)) == (TARGET, [SLICE])
                return self.adopt()
            case Enter(container, term, slices):
                assert (container, term, list(slices)) == (TARGET, 7, [SLICE])
                return self.enter()
            case Confirm(container, slices):
                assert (container, list(slices)) == (TARGET, [SLICE])
                assert self.owner == TARGET, "before the journal says so"
                if self.choose(2):
                    return self.fail(AWAY)
                self.confirmed[container] = True
                return Obeyed()
            case Settle():
                if self.choose(2):
                    return self.fail(WriteFailed("full", path="/j"))
                self.doubtful = None
                return Obeyed()
            case Recall(container):
                assert self.doubtful is None, "the journal is not settled"
                self.restart(container)
                return Home(container)

    def release(self) -> Event:
        match self.choose(4):
            case 1:
                return self.fail(AWAY)
            case 2:  # it is done, and nobody hears of it
                self.serves[SOURCE] = False
                return self.fail(AWAY)
            case 3:  # it obeys, ends, and is back before anyone looks
                self.restart(SOURCE)
                return Obeyed()
        self.serves[SOURCE] = False
        return Obeyed()

    def adopt(self) -> Event:
        match self.choose(5):
            case 1:
                return self.fail(AWAY)
            case 2:
                self.serves[TARGET] = True
                return self.fail(AWAY)
            case 3:
                return self.fail(CorruptFile("it is gone", path="/x"), stale=True)
            case 4:
                return self.fail(CorruptFile("it is gone", path="/x"))
        self.serves[TARGET] = True
        return Adopted(Term(7))

    def enter(self) -> Event:
        match self.choose(4):
            case 1:  # another incarnation serves
                self.restart(TARGET)
                return self.fail(AWAY)
            case 2:
                return self.fail(WriteFailed("full", path="/j"))
            case 3:  # it is on disk all the same
                self.doubtful = TARGET
                return self.fail(WriteFailed("full", path="/j"))
        self.owner = TARGET
        return Obeyed()

    def check(self) -> None:
        """At the end: the slice is served by its owner alone, who knows that it is its own."""
        move = self.move
        assert self.doubtful is None
        assert self.serves == {container: container == self.owner for container in (SOURCE, TARGET)}
        assert self.confirmed[self.owner]
        assert not move.astray
        if self.failures:
            assert move.phase is Phase.GIVEN_UP
            assert move.error is not None
        else:
            assert move.phase is Phase.DONE
            assert move.error is None
            assert self.owner == TARGET


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
    """Then no more faults, and whoever is astray is called home."""
    ended: Counter[Phase] = Counter()
    for world in every_plan():
        world.choose = lambda outcomes: 0
        if world.move.astray:
            world.move.go_home()
            world.run()
        world.check()
        ended[world.move.phase] += 1
    assert set(ended) == {Phase.DONE, Phase.GIVEN_UP}
    assert ended.total() > 30


def test_without_faults_each_is_told_once_and_the_source_twice() -> None:
    world = World(lambda outcomes: 0)
    world.run()
    world.check()
    assert [type(effect).__name__ for effect in world.effects] == [
        "Release",
        "Adopt",
        "Enter",
        "Confirm",
        "Release",
    ]


@pytest.mark.parametrize(
    ("steps", "astray"),
    [
        (0, {SOURCE}),
        (1, {SOURCE, TARGET}),
        (2, {SOURCE, TARGET}),
        (3, {SOURCE, TARGET}),
        (4, {SOURCE}),
        (5, set()),
    ],
)
def test_who_is_astray_when_a_move_is_broken_off(steps: int, astray: set[int]) -> None:
    world = World(lambda outcomes: 0)
    for _ in range(steps):
        (effect,) = world.move.effects()
        world.move.on(world.carry_out(effect))
    assert world.move.astray == astray
    world.move.go_home()
    assert world.move.astray == astray
    world.failures = 1 if astray else 0
    world.run()
    world.check()
    assert world.owner == (SOURCE if steps < 3 else TARGET)


def test_a_source_that_began_anew_is_not_taken_for_a_missing_file() -> None:
    for stale, kind in ((True, Unavailable), (False, CorruptFile)):
        move = Move(SOURCE, TARGET, [SLICE])
        move.on(Obeyed())
        move.on(Failed(CorruptFile("it is gone", path="/x"), stale))
        assert isinstance(move.error, kind)


def test_a_journal_that_cannot_be_settled_keeps_all_where_they_are() -> None:
    move = Move(SOURCE, TARGET, [SLICE])
    move.on(Failed(Unavailable("away", address="")))
    for _ in range(3):
        assert move.effects() == [Settle()]
        move.on(Failed(WriteFailed("full", path="/j")))
        assert move.effects() == []
        assert move.astray == {SOURCE}
        move.go_home()
    move.on(Obeyed())
    assert move.effects() == [Recall(SOURCE)]
    move.on(Home(SOURCE))
    assert isinstance(move.error, Unavailable), "the first failure tells why"
    assert (move.phase, move.astray) == (Phase.GIVEN_UP, set())
