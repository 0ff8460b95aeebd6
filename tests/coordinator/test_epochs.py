"""The commit protocol alone: whatever fails, in whatever order, an epoch is decided whole, seen whole, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.coordinator.epochs import (
    Ask,
    Back,
    Bring,
    Decide,
    Decided,
    Effect,
    EpochCommit,
    Event,
    Failed,
    Phase,
    Publish,
    Published,
    Replied,
    Settle,
    Settled,
)
from millpond.errors import (
    BadMessage,
    CodeFailed,
    MillpondError,
    ResidentBroken,
    StageLost,
    Unavailable,
    WriteFailed,
)
from millpond.wire.base import Done, Term, Turn
from millpond.wire.epochs import Apply, CommitEpoch, Discard, EpochCommitted, Prepare, Prepared, Receipt
from millpond.wire.states import RowsWork

BALLOT = 7
ROWS, DIGEST = 6, (1 << 64) - 3
Choose = Callable[[int], int]
"""One of so many outcomes; 0 is the one that is hoped for."""


def message() -> CommitEpoch:
    receipts = [Receipt(0, 11, 2, 0, DIGEST - 1, 5), Receipt(1, 12, 4, 0, 1, 9)]
    return CommitEpoch("s", "feed", "q", Turn(3), "continue", 0, -float("inf"), "long", receipts, RowsWork())


class Container:
    """What one container knows of the epoch."""

    def __init__(self, rows: int, digest: int) -> None:
        self.share = rows, digest
        self.term = Term(1)
        self.up = True
        self.prepared = False
        self.applied = False


class World:
    """Containers, a journal, and the machine between them. `choose` says what happens to each effect."""

    def __init__(self, choose: Choose, containers: int, in_doubt: bool = False) -> None:
        self.choose = choose
        shares = [(ROWS, DIGEST)] if containers == 1 else [(ROWS - 1, DIGEST), (1, 0), (0, 0)][:containers]
        self.containers = {number: Container(*share) for number, share in enumerate(shares)}
        holders = {number: each.term for number, each in self.containers.items()}
        self.commit = EpochCommit(message(), holders, BALLOT, {"feed": -1}, in_doubt)
        self.decided = False
        self.doubtful = False
        self.published = False
        self.lied = False
        self.history: list[Any] = []

    # What happens

    def restart(self, container: Container) -> None:
        """A new incarnation: it has what was decided, and nothing else."""
        container.term = Term(container.term + 1)
        container.up = True
        container.prepared = False
        container.applied = self.decided

    def carry_out(self, effect: Effect) -> Event:
        match effect:
            case Ask(number, term, asked):
                assert asked.resident == "s"
                assert asked.ballot == BALLOT
                event = self.ask(number, self.containers[number], term, asked)
            case Bring(number, term, broken):
                event = self.bring(number, self.containers[number], term, broken)
            case Settle():
                event = [Settled(), Failed(None, write_failed(), in_doubt=True)][self.choose(2)]
            case Decide(terms):
                event = self.decide(terms)
            case Publish():
                assert self.decided
                assert all(each.applied for each in self.containers.values() if each.up), (
                    "not visible everywhere"
                )
                self.published = True
                event = Published()
        self.history.append((effect, event))
        return event

    def ask(self, number: int, container: Container, term: Term, asked: Any) -> Event:
        away = Failed(number, Unavailable("away", address=""))
        if not container.up:
            return away
        match asked:
            case Prepare():
                assert not self.decided
                assert asked.attempts == {0: 11, 1: 12}
                if container.term != term:
                    return Failed(number, StageLost("nothing was staged here", container=number))
                match self.choose(6):
                    case 1:  # it ends before
                        container.up = False
                        return away
                    case 2:  # it ends after, and nobody hears of it
                        container.up, container.prepared = False, True
                        return away
                    case 3:
                        return Failed(number, CodeFailed("mend it", resident="s"))
                    case 4:
                        self.lied = True
                        container.prepared = True
                        return Replied(number, Prepared(container.term, container.share[0], 99))
                    case 5:  # it answers, ends, and is back before anyone looks
                        reply = Prepared(container.term, *container.share)
                        self.restart(container)
                        return Replied(number, reply)
                container.prepared = True
                return Replied(number, Prepared(container.term, *container.share))
            case Apply():
                assert self.decided, "applied before it is decided"
                match self.choose(4):
                    case 1:
                        container.up = False
                        return away
                    case 2:  # it is done, and nobody hears of it
                        container.applied = True
                        return away
                    case 3 if not container.applied:  # torn
                        return Failed(number, BadMessage("the pond failed: MemoryError"))
                assert container.applied or container.prepared, "nothing to apply"
                container.applied = True
                return Replied(number, Done())
            case Discard():
                assert not self.decided, "given up after it was decided"
                assert not self.doubtful, "the journal may hold the decision"
                if self.choose(2):
                    container.up = False
                    return away
                container.prepared = False
                return Replied(number, Done())
        raise AssertionError(asked)

    def bring(self, number: int, container: Container, term: Term, broken: bool) -> Event:
        match self.choose(3):
            case 1:
                return Failed(number, Unavailable("does not come back", address=""))
            case 2:
                return Failed(number, ResidentBroken("cannot be rebuilt", resident="s"))
        if not container.up or (broken and container.term == term):
            self.restart(container)
        return Back(number, container.term)

    def decide(self, terms: Any) -> Event:
        assert not self.decided
        assert not self.lied, "the digests do not match"
        assert set(terms) == set(self.containers), "somebody has not prepared"
        if any(self.containers[number].term != term for number, term in terms.items()):
            return Failed(None, StageLost("restarted", container=0))
        assert all(each.prepared for each in self.containers.values())
        match self.choose(3):
            case 1:
                self.doubtful = True
                return Failed(None, write_failed(), in_doubt=True)
            case 2:
                return Failed(None, StageLost("progress was reported", container=0))
        self.decided = True
        return Decided(EpochCommitted(Turn(3), ROWS, 0, 9, replayed=False))

    # The driver

    def run(self, rounds_max: int = 60) -> None:
        for _ in range(rounds_max):
            effects = self.commit.effects()
            if not effects:
                return
            for event in self.in_some_order([self.carry_out(effect) for effect in effects]):
                self.commit.on(event)
            self.check()

    def in_some_order(self, events: list[Event]) -> Iterator[Event]:
        while events:
            yield events.pop(self.choose(len(events)) if len(events) > 1 else 0)

    def check(self) -> None:
        commit = self.commit
        assert (commit.committed is not None) == self.decided
        if self.decided:
            assert commit.phase in (Phase.APPLY, Phase.PUBLISH, Phase.DONE)
        assert (commit.phase in (Phase.APPLY, Phase.PUBLISH)) == (self.decided and not self.published)
        assert (commit.phase is Phase.DONE) == self.published

    def check_end(self) -> None:
        """What the machine comes to when it has nothing more to do."""
        self.check()
        commit = self.commit
        assert commit.effects() == []
        if commit.phase is Phase.DONE:
            assert commit.error is None
            assert commit.committed is not None
            return
        assert isinstance(commit.error, MillpondError)
        if self.decided:
            assert commit.phase is Phase.APPLY
        elif self.doubtful:
            assert commit.phase is Phase.IN_DOUBT
            assert all(each.prepared for each in self.containers.values() if each.term == 1 and each.up)
        else:
            assert commit.phase in (Phase.REFUSED, Phase.IN_DOUBT)
            assert not any(each.prepared for each in self.containers.values() if each.up), "kept for ever"

    def check_resumed(self) -> None:
        """A decided epoch comes to its end as soon as nothing fails any more."""
        if self.decided and not self.published:
            for _ in range(2):
                self.commit.resume()
                self.run()
            self.choose = lambda outcomes: 0
            self.commit.resume()
            self.run()
            assert self.commit.phase is Phase.DONE
            assert self.published
            assert self.commit.error is None


def write_failed() -> WriteFailed:
    return WriteFailed("no space left", path="journal")


def live(choose: Choose, containers: int, in_doubt: bool) -> World:
    world = World(choose, containers, in_doubt)
    try:
        world.run()
        world.check_end()
        world.check_resumed()
    except AssertionError as error:
        error.add_note("\n".join(str(one) for one in world.history))
        raise
    return world


@settings(max_examples=500, deadline=None)
@given(st.data(), st.integers(1, 3), st.booleans())
def test_whatever_happens_an_epoch_is_whole(data: st.DataObject, containers: int, in_doubt: bool) -> None:
    # Hope is more likely than each failure: else nothing would ever be decided.
    live(lambda n: max(0, data.draw(st.integers(-n, n - 1))), containers, in_doubt)


def every_life(containers: int, in_doubt: bool, faults_max: int) -> Iterator[World]:
    """All lives in which at most so many things go otherwise than hoped."""
    pending: list[list[int]] = [[]]
    while pending:
        script = pending.pop()
        asked: list[int] = []

        def choose(outcomes: int, script: list[int] = script, asked: list[int] = asked) -> int:
            asked.append(outcomes)
            return script[len(asked) - 1] if len(asked) <= len(script) else 0

        yield live(choose, containers, in_doubt)
        if sum(map(bool, script)) < faults_max:
            for place in range(len(script), len(asked)):
                hoped = [0] * (place - len(script))
                pending += [[*script, *hoped, outcome] for outcome in range(1, asked[place])]


@pytest.mark.parametrize(("containers", "faults"), [(1, 4), (2, 3), (3, 2)])
@pytest.mark.parametrize("in_doubt", [False, True])
def test_every_life_with_a_few_faults(containers: int, faults: int, in_doubt: bool) -> None:
    lives = list(every_life(containers, in_doubt, faults))
    ends = {world.commit.phase for world in lives}
    assert ends == {Phase.DONE, Phase.REFUSED, Phase.IN_DOUBT}
    # The planned failures did come: after the decision, too.
    assert sum(world.decided and len(world.history) > 2 * containers + 3 for world in lives) > 5
    assert len(lives) > 100


def test_without_faults_every_message_goes_out_once() -> None:
    for containers in (1, 2, 3):
        world = live(lambda outcomes: 0, containers, in_doubt=False)
        sent = [type(getattr(effect, "message", effect)).__name__ for effect, _ in world.history]
        assert sent == ["Prepare"] * containers + ["Decide"] + ["Apply"] * containers + ["Publish"]
        assert world.commit.held_back == {"feed": -1}


def test_an_entry_in_doubt_is_settled_before_anything_is_prepared() -> None:
    world = live(lambda outcomes: 0, 2, in_doubt=True)
    assert isinstance(world.history[0][0], Settle)
    assert world.commit.phase is Phase.DONE


def test_what_may_not_be_asked_again_says_why_it_was_refused() -> None:
    """A container that was restarted is a reason to stage again; user code that fails is not, whoever else failed."""
    commit = EpochCommit(message(), {0: Term(1), 1: Term(1)}, BALLOT, {})
    commit.on(Failed(0, Unavailable("away", address="")))
    commit.on(Failed(1, CodeFailed("mend it", resident="s")))
    assert commit.effects() == [Bring(0, Term(1)), Bring(1, Term(1))], (
        "code that fails so has ended its container"
    )
    commit.on(Back(0, Term(2)))
    commit.on(Failed(1, Unavailable("does not come back", address="")))
    assert all(isinstance(effect.message, Discard) for effect in commit.effects())  # type: ignore[union-attr]
    for number in (0, 1):
        commit.on(Replied(number, Done()))
    assert commit.phase is Phase.REFUSED
    assert isinstance(commit.error, CodeFailed)


def test_a_container_that_was_restarted_is_a_reason_to_stage_again() -> None:
    commit = EpochCommit(message(), {0: Term(1)}, BALLOT, {})
    commit.on(Failed(0, Unavailable("away", address="")))
    commit.on(Back(0, Term(2)))
    commit.on(Replied(0, Done()))
    assert commit.phase is Phase.REFUSED
    assert isinstance(commit.error, StageLost)


def test_what_cannot_be_applied_is_applied_by_a_new_incarnation() -> None:
    commit = EpochCommit(message(), {0: Term(1)}, BALLOT, {})
    commit.on(Replied(0, Prepared(Term(1), ROWS, DIGEST)))
    commit.on(Decided(EpochCommitted(Turn(3), ROWS, 0, 9, replayed=False)))
    commit.on(Failed(0, BadMessage("the pond failed: MemoryError")))
    assert commit.effects() == [Bring(0, Term(1), broken=True)]
    commit.on(Failed(0, Unavailable("does not start", address="")))
    assert commit.effects() == []
    assert commit.phase is Phase.APPLY
    assert isinstance(commit.error, Unavailable)
    commit.resume()
    assert commit.error is None
    assert commit.effects() == [Bring(0, Term(1), broken=True)]
    commit.on(Back(0, Term(2)))
    assert commit.effects() == [Publish()]
