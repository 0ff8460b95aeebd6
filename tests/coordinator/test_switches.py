"""How backups come to own slices, alone: whatever fails, each is served by whom the journal says, or is about to be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from millpond.coordinator.moves import Home, Recall, Settle
from millpond.coordinator.switches import (
    Confirm,
    Demote,
    Effect,
    Enter,
    Event,
    Failed,
    Obeyed,
    Phase,
    Promote,
    Rebuild,
    Switch,
)
from millpond.errors import BackupLost, CorruptFile, MillpondError, Unavailable, WriteFailed
from millpond.wire.base import SliceId, Term

SOURCE = 0
ONE: Mapping[int, Sequence[SliceId]] = {1: [SliceId(3), SliceId(4)]}
TWO: Mapping[int, Sequence[SliceId]] = {1: [SliceId(3), SliceId(4)], 2: [SliceId(5)]}
AWAY = Unavailable("away", address="")
FULL = WriteFailed("full", path="/j")
LOST = BackupLost("it lacks an epoch", container=1, term=1)
Choose = Callable[[int], int]
"""One of so many outcomes; 0 is the one that is hoped for."""
Files = set[tuple[str, SliceId]]


class Container:
    """`serves` and `holds` are in memory; what slices rest on, while they are served ("own") or held ("backup"), is on disk."""

    def __init__(self, serves: set[SliceId], holds: set[SliceId]) -> None:
        self.term = Term(1)
        self.serves = serves
        self.holds = holds
        self.files: Files = {("own", n) for n in serves} | {("backup", n) for n in holds}


class World:
    """A source, those that hold its slices, and a journal. `choose` says what happens to each effect."""

    def __init__(self, choose: Choose, targets: Mapping[int, Sequence[SliceId]], live: bool) -> None:
        self.choose = choose
        self.targets = targets
        self.live = live
        self.slices = {n for slices in targets.values() for n in slices}
        self.owners = dict.fromkeys(self.slices, SOURCE)
        self.backups = {c: set(slices) for c, slices in targets.items()}
        self.doubtful: dict[SliceId, int] | None = None
        """Owners as they may be on disk, though nobody knows."""
        self.containers = {c: Container(set(), set(slices)) for c, slices in targets.items()}
        if live:
            self.containers[SOURCE] = Container(set(self.slices), set())
        self.effects: list[Effect] = []
        self.failures = 0
        self.switch = Switch(SOURCE, targets, live=live)

    def owned(self, container: int) -> set[SliceId]:
        return {n for n, owner in self.owners.items() if owner == container}

    def restart(self, container: int) -> None:
        """It begins anew, with what the journal says; as a backup it is nobody any more."""
        one = self.containers[container]
        own = self.owned(container)
        assert {("own", n) for n in own} <= one.files, f"{container} lacks what the journal says it has"
        one.term = Term(one.term + 1)
        one.serves, one.holds = own, set()
        # What the journal may say on disk stays until that is settled.
        doubtful = {n for n, owner in (self.doubtful or {}).items() if owner == container}
        one.files = {("own", n) for n in own | doubtful}
        self.backups.pop(container, None)

    def run(self) -> None:
        for _ in range(20):
            effects = self.switch.effects()
            for effect in effects:
                self.effects.append(effect)
                self.switch.on(self.carry_out(effect))
                self.check_always()
            if not effects:
                return
        raise AssertionError("it does not end")

    def check_always(self) -> None:
        for number, owner in [*self.owners.items(), *(self.doubtful or {}).items()]:
            if owner in self.containers:
                assert ("own", number) in self.containers[owner].files, "the owner's files are lost"
        for container, one in self.containers.items():
            # Who serves otherwise than the journal says is known to be astray, from its first step on.
            if one.serves != self.owned(container):
                assert container in self.switch.astray, self.effects
            if self.doubtful is not None and any(
                container in (owner, self.owners[n])
                for n, owner in self.doubtful.items()
                if owner != self.owners[n]
            ):
                assert container in self.switch.astray, self.effects
            # A backup by the journal is whole, in memory and on disk.
            named = self.backups.get(container, set())
            assert named <= one.holds | one.serves, self.effects
            assert {("backup", n) for n in named - one.serves} <= one.files
            assert not named & self.owned(container), "it is a backup of its own slices"

    def fail(self, container: int, error: MillpondError) -> Event:
        self.failures += 1
        return Failed(container, error)

    def carry_out(self, effect: Effect) -> Event:
        match effect:
            case Promote(container, slices):
                assert slices == self.targets[container]
                return self.promote(container, set(slices))
            case Demote(container, slices):
                assert (container, set(slices)) == (SOURCE, self.slices)
                return self.demote()
            case Enter():
                return self.enter(effect)
            case Confirm(container, slices):
                return self.confirm(container, set(slices))
            case Settle():
                if self.choose(2):
                    return self.fail(SOURCE, FULL)
                self.doubtful = None
                return Obeyed(SOURCE, Term(0))
            case Recall(container):
                assert self.doubtful is None, "the journal is not settled"
                if self.choose(2):
                    return self.fail(container, AWAY)
                self.restart(container)
                return Home(container)

    def promote(self, container: int, slices: set[SliceId]) -> Event:
        one = self.containers[container]
        outcome = self.choose(5)
        if outcome == 1:
            return self.fail(container, AWAY)
        if outcome == 3:
            return self.fail(container, LOST)
        term = one.term
        one.serves |= slices
        one.holds -= slices
        one.files |= {("own", n) for n in slices}
        if outcome == 2:  # it is done, and nobody hears of it
            return self.fail(container, AWAY)
        if outcome == 4:  # it obeys, ends, and is back before anyone looks
            self.restart(container)
        return Obeyed(container, term)

    def demote(self) -> Event:
        one = self.containers[SOURCE]
        outcome = self.choose(4)
        if outcome == 1:
            return self.fail(SOURCE, AWAY)
        term = one.term
        one.serves -= self.slices
        one.holds |= self.slices
        one.files |= {("backup", n) for n in self.slices}
        if outcome == 2:
            return self.fail(SOURCE, AWAY)
        if outcome == 3:
            self.restart(SOURCE)
        return Obeyed(SOURCE, term)

    def enter(self, effect: Enter) -> Event:
        assert effect.source == SOURCE
        outcome = self.choose(3)
        for container, (term, slices) in effect.targets.items():
            assert slices == self.targets[container]
            if self.containers[container].term != term:
                return self.fail(SOURCE, AWAY)
        assert (effect.demoted is not None) == self.live
        if self.live and self.containers[SOURCE].term != effect.demoted:
            return self.fail(SOURCE, AWAY)
        owners = {**self.owners, **{n: c for c, (_, slices) in effect.targets.items() for n in slices}}
        if outcome:  # 2: it is on disk all the same
            self.doubtful = owners if outcome == 2 else None
            return self.fail(SOURCE, FULL)
        self.owners = owners
        for container, (_, slices) in effect.targets.items():
            self.backups[container] -= set(slices)
        if self.live:
            self.backups[SOURCE] = set(self.slices)
        return Obeyed(SOURCE, Term(0))

    def confirm(self, container: int, slices: set[SliceId]) -> Event:
        """What they rested on in the role before need not stay."""
        one = self.containers[container]
        expected = self.slices if container == SOURCE else set(self.targets[container])
        assert slices == expected
        assert all(self.owners[n] != SOURCE for n in slices), "before the journal says so"
        outcome = self.choose(4)
        if outcome == 1:
            return self.fail(container, AWAY)
        if outcome == 3:
            self.restart(container)
            return self.fail(container, AWAY)
        one.files -= {("own" if container == SOURCE else "backup", n) for n in slices}
        return self.fail(container, AWAY) if outcome == 2 else Obeyed(container, one.term)

    def check(self) -> None:
        """At the end: every slice is served by its owner alone, if that one is there."""
        switch = self.switch
        assert self.doubtful is None
        assert not switch.astray
        for container, one in self.containers.items():
            assert one.serves == self.owned(container)
        moved = {n for n, owner in self.owners.items() if owner != SOURCE}
        assert set(switch.moved) == moved
        assert all(self.owners[n] in (SOURCE, c) for c, slices in self.targets.items() for n in slices)
        if self.live:
            assert moved in (set(), self.slices), "all of it or nothing"
        if moved:
            assert switch.phase is Phase.DONE
        else:
            assert switch.phase is Phase.GIVEN_UP
            assert switch.error is not None
        if not self.failures:
            assert moved == self.slices
            assert switch.error is None


def every_plan(targets: Mapping[int, Sequence[SliceId]], live: bool) -> Iterator[World]:
    """All that can happen, one choice differing at a time: the last that has another outcome takes it."""
    plan: list[int] = []
    while True:
        taken: list[tuple[int, int]] = []

        def choose(outcomes: int, plan: list[int] = plan, taken: list[tuple[int, int]] = taken) -> int:
            taken.append((plan[len(taken)] if len(taken) < len(plan) else 0, outcomes))
            return taken[-1][0]

        world = World(choose, targets, live)
        world.run()
        yield world
        while taken and taken[-1][0] == taken[-1][1] - 1:
            taken.pop()
        if not taken:
            return
        plan = [outcome for outcome, _ in taken[:-1]] + [taken[-1][0] + 1]


def come_home(world: World) -> None:
    """No more faults, and whoever is astray is called home."""
    world.choose = lambda outcomes: 0
    if world.switch.astray:
        world.switch.go_home()
        world.run()


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("targets", [ONE, TWO], ids=["one target", "two targets"])
def test_every_failure_at_every_step(targets: Mapping[int, Sequence[SliceId]], live: bool) -> None:
    ended: Counter[tuple[Phase, int]] = Counter()
    for world in every_plan(targets, live):
        come_home(world)
        world.check()
        ended[world.switch.phase, len(world.switch.moved)] += 1
    wanted = {(Phase.GIVEN_UP, 0), (Phase.DONE, sum(map(len, targets.values())))}
    if not live and targets is TWO:
        wanted |= {(Phase.DONE, 1), (Phase.DONE, 2)}
    assert set(ended) == wanted
    assert ended.total() > 30


def test_without_faults_each_is_told_once() -> None:
    for live, names in (
        (True, ["Promote", "Demote", "Enter", "Confirm", "Confirm"]),
        (False, ["Promote", "Enter", "Confirm"]),
    ):
        world = World(lambda outcomes: 0, ONE, live)
        world.run()
        world.check()
        assert [type(effect).__name__ for effect in world.effects] == names


def test_the_owner_that_was_is_a_backup_from_then_on() -> None:
    world = World(lambda outcomes: 0, TWO, live=True)
    world.run()
    world.check()
    assert world.backups == {SOURCE: world.slices, 1: set(), 2: set()}
    assert world.containers[SOURCE].files == {("backup", n) for n in world.slices}
    assert world.containers[1].files == {("own", n) for n in TWO[1]}


def test_of_those_that_are_gone_what_can_be_is_served() -> None:
    """One refuses and is what it was; one does not answer, and begins anew."""
    slices = {c: [SliceId(c)] for c in (1, 2, 3, 4)}
    switch = Switch(SOURCE, slices, live=False)
    assert switch.effects() == [Promote(c, slices[c]) for c in (1, 2, 3, 4)]
    assert switch.astray == {1, 2, 3, 4}
    switch.on(Failed(2, LOST))
    switch.on(Failed(3, AWAY))
    assert switch.effects() == [Promote(1, slices[1]), Promote(4, slices[4])], "the others are still asked"
    switch.on(Obeyed(4, Term(9)))
    switch.on(Obeyed(1, Term(8)))
    entry = {1: (Term(8), slices[1]), 4: (Term(9), slices[4])}
    (effect,) = switch.effects()
    assert isinstance(effect, Enter)
    assert (dict(effect.targets), effect.demoted) == (entry, None)
    assert (switch.astray, switch.moved) == ({1, 3, 4}, [])
    switch.on(Obeyed(SOURCE, Term(0)))
    assert sorted(switch.moved) == [1, 4]
    assert sorted(switch.effects()) == [Confirm(1, slices[1]), Confirm(4, slices[4])]
    switch.on(Obeyed(1, Term(8)))
    switch.on(Obeyed(4, Term(9)))
    assert (switch.phase, switch.astray) == (Phase.SETTLE, {3})
    switch.on(Obeyed(SOURCE, Term(0)))
    assert switch.effects() == [Recall(3)]
    switch.on(Home(3))
    assert (switch.phase, switch.astray, switch.effects()) == (Phase.DONE, set(), [])
    assert sorted(switch.moved) == [1, 4]


@pytest.mark.parametrize("live", [True, False])
def test_where_all_refuse_nobody_begins_anew(live: bool) -> None:
    switch = Switch(SOURCE, TWO, live=live)
    switch.on(Failed(1, LOST))
    switch.on(Failed(2, LOST))
    assert (switch.phase, switch.astray, switch.effects()) == (Phase.GIVEN_UP, set(), [])
    assert switch.error is LOST
    assert switch.moved == []


def test_while_the_owner_lives_one_that_refuses_is_enough_to_give_up() -> None:
    """The other has obeyed, and begins anew; the source was never asked, and serves on."""
    switch = Switch(SOURCE, TWO, live=True)
    switch.on(Failed(2, LOST))
    switch.on(Obeyed(1, Term(1)))
    assert (switch.phase, switch.astray) == (Phase.SETTLE, {1})
    switch.on(Obeyed(SOURCE, Term(0)))
    switch.on(Home(1))
    assert (switch.phase, switch.moved) == (Phase.GIVEN_UP, [])


@pytest.mark.parametrize(
    ("steps", "astray"),
    [(0, {1}), (1, {0, 1}), (2, {0, 1}), (3, {0, 1}), (4, {0}), (5, set())],
)
def test_who_is_astray_when_a_switch_is_broken_off(steps: int, astray: set[int]) -> None:
    world = World(lambda outcomes: 0, ONE, live=True)
    for _ in range(steps):
        effect = world.switch.effects()[0]
        world.switch.on(world.carry_out(effect))
    assert world.switch.astray == astray
    world.switch.go_home()
    assert world.switch.astray == astray
    world.failures = 1 if astray else 0
    world.run()
    world.check()
    assert set(world.owners.values()) == ({SOURCE} if steps < 3 else {1})


def test_a_journal_that_cannot_be_settled_keeps_all_where_they_are() -> None:
    switch = Switch(SOURCE, ONE, live=False)
    switch.on(Failed(1, AWAY))
    for _ in range(3):
        assert switch.effects() == [Settle()]
        switch.on(Failed(SOURCE, FULL))
        assert switch.effects() == []
        assert switch.astray == {1}
        switch.go_home()
    switch.on(Obeyed(SOURCE, Term(0)))
    for _ in range(2):
        assert switch.effects() == [Recall(1)]
        switch.on(Failed(1, AWAY))
        assert (switch.effects(), switch.astray) == ([], {1})
        switch.go_home()
    switch.on(Home(1))
    assert switch.error is AWAY, "the first failure tells why"
    assert (switch.phase, switch.astray) == (Phase.GIVEN_UP, set())


def test_from_the_root_slices_are_rebuilt_in_place_of_being_promoted() -> None:
    """A damaged file is a refusal: who met it is what it was."""
    switch = Switch(SOURCE, TWO, live=False, from_root=True)
    assert switch.effects() == [Rebuild(c, slices) for c, slices in TWO.items()]
    switch.on(Failed(1, CorruptFile("it is cut", path="f")))
    switch.on(Obeyed(2, Term(5)))
    assert switch.astray == {2}
    (effect,) = switch.effects()
    assert isinstance(effect, Enter)
    assert (dict(effect.targets), effect.demoted) == ({2: (Term(5), TWO[2])}, None)
    switch.on(Obeyed(SOURCE, Term(0)))
    switch.on(Obeyed(2, Term(5)))
    assert (switch.phase, switch.astray) == (Phase.DONE, set())
    assert switch.moved == list(TWO[2])
