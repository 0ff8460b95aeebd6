"""A container that is killed between two rounds of an epoch, after each of them in turn: the epoch comes again, and gives the same.

In the simulator, so that it is that container alone, at that moment, and nobody else has to be lucky.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import pytest

from millpond.container.round_book import Arrived, RoundBook
from millpond.container.rounds import EpochRounds
from millpond.durable.crashpoints import ROUND_POINTS, armed
from millpond.testing.simulation import Simulation, Weather
from millpond.testing.simulation.apps import Chronicle, Wrong
from millpond.testing.simulation.pond import SLICES, SimPond
from millpond.testing.simulation.programs import (
    Call,
    ProgramCaller,
    ProgramChecker,
    ProgramModel,
    Turn,
)
from millpond.wire.connection import SlicedBatch
from millpond.wire.rounds import Standing

SEED = 3
LANES = 2


class Most(Random):
    """A pond of as many containers as there may be, and nothing that comes again unasked."""

    def randint(self, a: int, b: int) -> int:
        return b

    def random(self) -> float:
        return 0.9


class Moment(NamedTuple):
    """A container in a round of an epoch."""

    process: str
    ballot: int
    round: int


class Run:
    """Two epochs that write and one that reads, over three containers in calm weather; a container may be killed at a point."""

    def __init__(self, point: str = "", hit: int = 1) -> None:
        self.gathered: list[Moment] = []
        self.entered: list[Moment] = []
        self.killed: Moment | None = None
        self._sim = Simulation(SEED, Weather())
        turns = [
            Turn("p_note", 0, [[Call(1, 2), Call(2, 3)], [Call(1, 4), Call(3, 2)]]),
            Turn("p_note", 1, [[Call(2, 2), Call(1, 3), Call(3, 5)]]),
            Turn("p_ask", 0, [[Call(1, 2), Call(2, 4), Call(3, 3)]]),
        ]
        self.model = ProgramModel("p", LANES, SLICES, turns)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EpochRounds, "exchange", self._watched(EpochRounds.exchange))
            if point:
                with armed(point, hit, self._kill) as plan:
                    self._sim.run(self._work)
                self.fired = plan.fired
            else:
                self._sim.run(self._work)

    def _watched(self, exchange: Callable[..., Any]) -> Callable[..., Any]:
        def watched(rounds: EpochRounds, *given: Any) -> Any:
            process = self._sim.scheduler.task().process.name
            moment = Moment(process, rounds._message.ballot, rounds._number)
            self.entered.append(moment)
            came = exchange(rounds, *given)
            self.gathered.append(moment)
            return came

        return watched

    def _kill(self, point: str) -> None:
        process = self._sim.scheduler.task().process
        self.killed = next(moment for moment in reversed(self.entered) if moment.process == process.name)
        process.kill()

    def _work(self) -> None:
        sim, chance = self._sim, Most(SEED)
        pond = SimPond(sim, chance)
        pond.backups = 0
        sim.scheduler.world.spawn(pond.supervise, "supervisor")
        ProgramCaller(pond, Chronicle(), self.model, chance, 0.01).live()
        assert self.model.acknowledged == len(self.model.turns)
        ProgramChecker(pond, Chronicle(), [self.model], chance).live()
        pond.validate()


@cache
def calm() -> Run:
    return Run()


def moments_between() -> list[int]:
    """The hits of `round.gather.after` after which another round follows."""
    gathered = calm().gathered
    last = {moment.ballot: moment.round for moment in sorted(gathered, key=lambda each: each.round)}
    return [n for n, moment in enumerate(gathered, 1) if moment.round < last[moment.ballot]]


def killed_between(hit: int) -> Run:
    """That the planned kill came where it was planned, and the rounds began anew."""
    run = Run("round.gather.after", hit)
    assert run.fired, "the planned kill should have come"
    assert run.killed == calm().gathered[hit - 1], "between two rounds of the epoch that was planned"
    again = [m for m in run.entered if m.ballot > run.killed.ballot]
    assert {0, run.killed.round + 1} <= {moment.round for moment in again}, "the rounds began anew"
    return run


def one_of_each_round(hits: list[int]) -> list[int]:
    """Of the containers in each round of each epoch one, not always the same."""
    found: dict[tuple[int, int], list[int]] = {}
    for hit in hits:
        found.setdefault(calm().gathered[hit - 1][1:], []).append(hit)
    return [some[n % len(some)] for n, some in enumerate(found.values())]


def test_a_kill_after_each_round_but_the_last() -> None:
    hits = one_of_each_round(moments_between())
    moments = [calm().gathered[hit - 1] for hit in hits]
    assert len({moment.process for moment in moments}) == 3
    assert len({moment.round for moment in moments if moment.ballot == moments[-1].ballot}) > 1
    for hit in hits:
        killed_between(hit)


def test_a_canary_that_takes_what_came_before_a_kill_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: WeakKeyDictionary[RoundBook, dict[tuple[int, int], list[SlicedBatch]]] = WeakKeyDictionary()
    take, gather = RoundBook.take, RoundBook.gathered

    def takes_again(
        book: RoundBook, resident: str, ballot: int, number: int, sender: int, arrived: Arrived
    ) -> Standing:
        """Rows that a peer sent in an epoch that was given up, and sends again."""
        earlier = kept.setdefault(book, {}).get((number, sender), [])
        standing = take(
            book, resident, ballot, number, sender, Arrived(arrived.counts, earlier + arrived.rows)
        )
        if standing in ("unknown", "runs"):
            kept[book][number, sender] = arrived.rows
        return standing

    def gathered(book: RoundBook, resident: str, ballot: int, number: int, peers: Any) -> Any:
        came = gather(book, resident, ballot, number, peers)
        for peer in came or ():
            kept[book].pop((number, peer), None)
        return came

    hits = moments_between()
    monkeypatch.setattr(RoundBook, "take", takes_again)
    monkeypatch.setattr(RoundBook, "gathered", gathered)
    Run()  # Where nobody is killed it does no harm.
    with pytest.raises(Wrong, match="returned"):
        for hit in hits:
            Run("round.gather.after", hit)


@pytest.mark.long
def test_a_kill_of_each_container_after_each_round_but_the_last() -> None:
    for hit in moments_between():
        killed_between(hit)


@pytest.mark.long
@pytest.mark.parametrize("point", ROUND_POINTS)
def test_a_kill_anywhere_in_the_rounds(point: str) -> None:
    hit = 1
    while (run := Run(point, hit)).fired:
        hit += 1
    assert hit > 3 * 3 * 3, "three containers, epochs and rounds at least"
    assert run.model.acknowledged
