"""A class as a program in the simulated pond: streamed calls that go from key to key, and direct ones beside them.

What each call gives follows from dictionaries: that the calls of an epoch go past each other makes no difference here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, NamedTuple

import pyarrow as pa

from millpond.errors import OutputsGone
from millpond.ops.program import ProgramCall
from millpond.pond.pond import Pond
from millpond.pond.program import Program
from millpond.programs.annotations import Partial, Partitioned, everywhere, program
from millpond.programs.elements import Map, Vector
from millpond.programs.merging import total
from millpond.programs.slicing import lane_of
from millpond.testing.simulation.apps import App, Chronicle, Wrong
from millpond.testing.simulation.pond import SimPond
from millpond.testing.simulation.programs import (
    CHECKPOINTING,
    LOOKING,
    REPLAYING,
    commit_tables,
)
from millpond.testing.simulation.scheduler import Process

PLACES, LANES = 6, 3
TURNS_MIN = 8
BURST = 12
DRAWN = 0.35
"""Of programs, so many are one of these."""
DIRECT = 0.5
"""Of what happens, so much is called directly."""


@program(lanes=LANES, max_rounds=50)
class Chain:
    """Places, each of which leads to another one."""

    next_of: Partitioned[Map[int, int]]
    visits: Partitioned[Map[int, int]]
    steps: Partial[Vector]

    def link(self, at: int, to: int) -> int:
        """Where a place led before."""
        before = self.next_of[at]
        self.next_of[at] = to
        return before

    def walk(self, at: int, count: int) -> int:
        """Where one comes to in so many steps."""
        for _ in range(count):
            self.visits[at] += 1
            at = self.next_of[at]
        self.steps[0] += count
        return at

    def visited(self, at: int) -> int:
        return self.visits[at]

    def walked(self) -> float:
        walked: float = total(everywhere(self.steps)[0])
        return walked


class Walk(NamedTuple):
    at: int
    steps: int


class Turn(NamedTuple):
    """An epoch of walks, by the tasks that stage them; or a link, which is called directly with a key of its own."""

    number: int
    parts: list[list[Walk]]
    link: tuple[int, int] | None = None

    @property
    def walks(self) -> list[Walk]:
        return [walk for part in self.parts for walk in part]


class ChainState(NamedTuple):
    """What the fields hold."""

    next_of: dict[int, int]
    visits: dict[int, int]
    steps: dict[int, float]
    """By lane."""

    @property
    def walked(self) -> float:
        return sum(self.steps.values())


class ChainModel:
    """What every turn gives, and what is held after all that were acknowledged."""

    def __init__(self, name: str, slices: int, turns: list[Turn]) -> None:
        self.name = name
        self.turns = turns
        self.acknowledged = 0
        self._slices = slices
        self._compute()

    def _compute(self) -> None:
        self.expected: list[list[int]] = []
        self.states = [ChainState({}, {}, {})]
        """Before the first turn, and after each."""
        next_of: dict[int, int] = {}
        visits: dict[int, int] = defaultdict(int)
        steps: dict[int, float] = defaultdict(float)
        for turn in self.turns:
            given = []
            if turn.link is not None:
                at, to = turn.link
                given.append(next_of.get(at, 0))
                next_of[at] = to
            for at, count in turn.walks:
                here = last = at
                for _ in range(count):
                    visits[here] += 1
                    last, here = here, next_of.get(here, 0)
                steps[lane_of(last, self._slices, LANES)] += count
                given.append(here)
            self.expected.append(given)
            self.states.append(ChainState(dict(next_of), dict(visits), dict(steps)))

    def cut(self) -> None:
        """The turns that have begun stay, and some more."""
        del self.turns[max(TURNS_MIN, self.acknowledged + 1) :]
        self._compute()

    def take(self, place: int, given: list[int]) -> None:
        if given != self.expected[place]:
            turn = self.turns[place]
            raise Wrong(f"{turn} returned {given}, not {self.expected[place]}", places_of(turn))

    def check(self, opened: Program) -> None:
        expected = self.states[self.acknowledged]
        steps = {lane: entries[0] for lane, entries in opened.entries("steps").items() if entries}
        held = ChainState(opened.entries("next_of"), opened.entries("visits"), steps)
        if held != expected:
            raise Wrong(f"{self.name} holds {held}, not {expected}")


def places_of(turn: Turn) -> set[int]:
    return set(turn.link or ()) | {walk.at for walk in turn.walks}


def draw_chain(chance: Random, name: str, slices: int) -> ChainModel:
    turns = []
    for number in range(chance.randint(TURNS_MIN, 20)):
        if chance.random() < DIRECT:
            turns.append(Turn(number, [], (chance.randrange(PLACES), chance.randrange(PLACES))))
            continue
        parts = [
            [Walk(chance.randrange(PLACES), chance.randint(1, 4)) for _ in range(chance.choice((0, 1, 3)))]
            for _ in range(chance.randint(1, 3))
        ]
        turns.append(Turn(number, parts))
    return ChainModel(name, slices, turns)


class ChainCaller(App):
    """Streams walks, links directly, and looks at what it has done: one after the other."""

    def __init__(
        self, pond: SimPond, chronicle: Chronicle, model: ChainModel, chance: Random, pause_s: float
    ) -> None:
        super().__init__(pond, chronicle, f"{model.name}_caller")
        self.model = model
        self._chance = chance
        self._pause_s = pause_s

    def work(self, pond: Pond, process: Process) -> None:
        model, chance = self.model, self._chance
        opened, walk = open_chain(pond, model)
        while model.acknowledged < len(model.turns):
            self.pause(process, self._pause_s)
            place = model.acknowledged
            if place and chance.random() < REPLAYING:
                repeat(pond, model, opened, walk, chance.randrange(max(0, place - 3), place), chance)
            if chance.random() < CHECKPOINTING:
                pond.checkpoint()
            turn = model.turns[place]
            self.say(f"begins {turn}", places_of(turn))
            given = carry_out(pond, model, opened, walk, turn, chance)
            self.say(f"{turn} returned {given}", places_of(turn))
            model.take(place, given)
            self.linger(process, chance, killed=0.3)
            model.acknowledged = place + 1
            at = chance.randrange(PLACES)
            visits, expected = opened.visited(at=at), model.states[place + 1].visits.get(at, 0)
            if visits != expected:
                raise Wrong(f"{at} was visited {visits} times, not {expected}", {at})
            if chance.random() < LOOKING:
                model.check(opened)


class ChainReader(App):
    """Asks directly, again and again, how much was walked in all lanes: what whole epochs left, and never less than before."""

    def __init__(
        self, pond: SimPond, chronicle: Chronicle, model: ChainModel, chance: Random, pause_s: float
    ) -> None:
        super().__init__(pond, chronicle, f"{model.name}_reader")
        self.model = model
        self.reads = 0
        self.stopping = False
        self._chance = chance
        self._pause_s = pause_s

    def work(self, pond: Pond, process: Process) -> None:
        opened, _ = open_chain(pond, self.model)
        before = 0.0
        while not self.stopping:
            # One after the other for a while: then some come while an epoch is applied here and there.
            if self.reads % BURST == 0:
                self.pause(process, self._pause_s)
            walked = opened.walked()
            possible = [state.walked for state in self.model.states[: self.model.acknowledged + 2]]
            if walked not in possible or walked < before:
                raise Wrong(f"{walked} steps were walked, after {before}; whole epochs left {possible}")
            before = walked
            self.reads += 1


class ChainChecker(App):
    """Compares all, and does the newest turns once more, when all is done."""

    def __init__(
        self, pond: SimPond, chronicle: Chronicle, models: Iterable[ChainModel], chance: Random
    ) -> None:
        super().__init__(pond, chronicle, "chain checker")
        self._models = models
        self._chance = chance

    def work(self, pond: Pond, process: Process) -> None:
        for model in self._models:
            opened, walk = open_chain(pond, model)
            for place in range(max(0, len(model.turns) - 3), len(model.turns)):
                repeat(pond, model, opened, walk, place, self._chance)
            model.check(opened)


def open_chain(pond: Pond, model: ChainModel) -> tuple[Program, ProgramCall]:
    opened = pond.program(model.name, Chain)
    return opened, opened.call("walk", count="steps", into="given", name=f"{model.name}_walk")


def carry_out(
    pond: Pond, model: ChainModel, opened: Program, walk: ProgramCall, turn: Turn, chance: Random
) -> list[int]:
    """What a turn gives; done once, however often this is called."""
    if turn.link is not None:
        at, to = turn.link
        link: Callable[..., Any] = opened.link
        return [link(at=at, to=to, idempotency_key=f"{model.name} {turn.number}")]
    tables = [
        pa.table({name: pa.array([w[n] for w in part], pa.int64()) for n, name in enumerate(Walk._fields)})
        for part in turn.parts
    ]
    rows = commit_tables(pond, walk, tables, number_of(model, turn), chance)
    asked = [Walk(*row) for row in zip(rows["at"].to_pylist(), rows["steps"].to_pylist(), strict=True)]
    if asked != turn.walks:
        raise Wrong(f"{turn} gave back {asked}", places_of(turn))
    given: list[int] = rows["given"].to_pylist()
    return given


def number_of(model: ChainModel, turn: Turn) -> int:
    """Of an epoch of walks among all of them."""
    return sum(other.link is None for other in model.turns[: turn.number])


def repeat(
    pond: Pond, model: ChainModel, opened: Program, walk: ProgramCall, place: int, chance: Random
) -> None:
    """A turn that was acknowledged comes again. The newest epoch is always kept, and so are keys."""
    turn = model.turns[place]
    later = [each for each in model.turns[place + 1 : model.acknowledged] if each.link is None]
    try:
        model.take(place, carry_out(pond, model, opened, walk, turn, chance))
    except OutputsGone:
        if turn.link is not None or not later:
            raise
