"""A program in the simulated pond, called epoch by epoch, and what each epoch must give.

Calls are drawn before anything runs, and which task stages which of them: so plain dictionaries tell what every epoch returns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from random import Random
from typing import Any, NamedTuple

import pyarrow as pa

from millpond.errors import OutputsGone
from millpond.ops.committing import commit_staged, turn_of
from millpond.ops.intake import Part
from millpond.ops.program import ProgramCall
from millpond.pond.pond import Pond
from millpond.pond.program import Program
from millpond.programs.graph import Field, Graph, Method, Parameter, Task, Variable
from millpond.programs.slicing import lane_of
from millpond.testing.simulation.apps import App, Chronicle, Wrong
from millpond.testing.simulation.pond import SimPond
from millpond.testing.simulation.scheduler import Process
from millpond.wire.base import LOCAL_QUERY
from millpond.wire.epochs import EpochPlan, Receipt

USERS, ITEMS = 6, 8
DRAWN = 0.5
"""Of seeds, so many have a program."""
EPOCHS_MIN = 4
REPLAYING, CHECKPOINTING, LOOKING = 0.25, 0.15, 0.3
RELANED = 0.4
"""Of programs, so many get other numbers of lanes between their epochs."""


class Call(NamedTuple):
    user: int
    item: int


class Turn(NamedTuple):
    """An epoch of one operator: the calls that each of its tasks stages. Or, with `lanes`, the program gets so many."""

    operator: str
    number: int
    parts: list[list[Call]]
    lanes: int = 0

    @property
    def calls(self) -> list[Call]:
        """In their order."""
        return [call for part in self.parts for call in part]


def program(lanes: int) -> Graph:
    """Notes which items users have, and how often two of them come together, in lanes; sums that up over all lanes.

    `note` goes by user, then to the user's lane, then to the item. `ask` goes by user, to all lanes, and to the item.
    """
    user, item, pairs = Variable("user", "long"), Variable("item", "long"), Variable("others", "array<long>")
    note = (
        _task(
            0,
            "items",
            "partitioned",
            "user",
            (user, item),
            ["others = state[user].keys()", "state[user, item] += 1", "return 1, (user, item, others)"],
            writes=True,
        ),
        _task(
            1,
            "pairs",
            "lane",
            "user",
            (user, item, pairs),
            ["for other in others:", "    state[item, other] += 1", "return 2, (item, len(others))"],
            writes=True,
            level=1,
        ),
        _task(
            2,
            "seen",
            "partitioned",
            "item",
            (item, Variable("count", "long")),
            ["state[item] += 1", "return -1, (1000 * state[item] + count,)"],
            writes=True,
            level=2,
        ),
    )
    ask = (
        _task(0, "items", "partitioned", "user", (user, item), ["return 1, (state[user], item)"]),
        _task(
            1,
            "pairs",
            "everywhere",
            None,
            (Variable("row", "vector"), item),
            ["return 2, (state[item].dot(row), item)"],
            level=1,
        ),
        _task(
            2,
            "seen",
            "partitioned",
            "item",
            (Variable("parts", "collection<double>"), item),
            ["return -1, (1000 * state[item] + int(mp_total(parts)),)"],
            level=2,
            gathers=True,
        ),
    )
    parameters = (Parameter("user", "long", False, None), Parameter("item", "long", False, None))
    fields = (
        Field("items", "partitioned", "matrix", "long", "double", 0, 1),
        Field("pairs", "partial", "matrix", "long", "double", 1, 2),
        Field("seen", "partitioned", "map", "long", "long", 2, 3),
    )
    methods = (
        Method("note", parameters, "long", note, False, False, 4),
        Method("ask", parameters, "long", ask, True, False, 5),
    )
    return Graph(
        "Pairs", "pairs.py", lanes, 100, fields, methods, (("items",), ("pairs",), ("seen",)), True, (), ()
    )


def _task(
    number: int,
    field: str,
    access: Any,
    key: str | None,
    inputs: tuple[Variable, ...],
    lines: list[str],
    *,
    writes: bool = False,
    level: int = 0,
    gathers: bool = False,
) -> Task:
    names = ", ".join(variable.name for variable in inputs)
    source = "\n".join([f"def te(state, {names}):", *(f"    {line}" for line in lines)])
    return Task(number, field, access, key, inputs, source, (1,), writes, 1, gathers, level, ())


class ProgramModel:
    """What every epoch of a program returns, and what it holds after all that were acknowledged."""

    def __init__(self, name: str, lanes: int, slices: int, turns: list[Turn]) -> None:
        self.name = name
        self.lanes = lanes
        self._slices = slices
        self.turns = turns
        self.acknowledged = 0
        """How many of the turns."""
        self._compute()

    def _compute(self) -> None:
        self.expected: list[list[int]] = []
        self.states: list[dict[str, Any]] = [{"items": {}, "pairs": {}, "seen": {}}]
        """Before the first turn, and after each."""
        items: dict[tuple[int, int], float] = defaultdict(float)
        pairs: dict[int, dict[tuple[int, int], float]] = defaultdict(lambda: defaultdict(float))
        seen: dict[int, int] = defaultdict(int)
        lanes = self.lanes
        for turn in self.turns:
            given = []
            if turn.lanes:
                lanes, before, pairs = turn.lanes, pairs, defaultdict(lambda: defaultdict(float))
                for number, lane in before.items():
                    for place, count in lane.items():
                        pairs[number % lanes][place] += count
            for user, item in turn.calls:
                row = {i: x for (u, i), x in items.items() if u == user}
                if turn.operator.endswith("ask"):
                    products = (
                        count * row.get(j, 0)
                        for lane in pairs.values()
                        for (i, j), count in lane.items()
                        if i == item
                    )
                    given.append(1000 * seen[item] + int(sum(products)))
                    continue
                for other in row:
                    pairs[lane_of(user, self._slices, lanes)][item, other] += 1
                items[user, item] += 1
                seen[item] += 1
                given.append(1000 * seen[item] + len(row))
            self.expected.append(given)
            self.states.append(
                {
                    "items": dict(items),
                    "pairs": {n: dict(lane) for n, lane in pairs.items() if lane},
                    "seen": {i: count for i, count in seen.items() if count},
                }
            )

    def lanes_for(self, place: int) -> int:
        """How many lanes there are when that turn is over."""
        return next((turn.lanes for turn in reversed(self.turns[: place + 1]) if turn.lanes), self.lanes)

    def cut(self) -> None:
        """The epochs that have begun stay, and some more."""
        del self.turns[max(EPOCHS_MIN, self.acknowledged + 1) :]
        self._compute()

    def take(self, place: int, given: list[int]) -> None:
        if given != self.expected[place]:
            turn = self.turns[place]
            raise Wrong(
                f"epoch {turn.number} of {turn.operator} returned {given}, not {self.expected[place]}",
                {call.user for call in turn.calls},
            )

    def check(self, holds: dict[str, Any]) -> None:
        expected = self.states[self.acknowledged]
        for field, entries in expected.items():
            if holds[field] != entries:
                raise Wrong(f"{self.name}.{field} holds {holds[field]}, not {entries}")


def draw_program(chance: Random, name: str, slices: int) -> ProgramModel:
    counts = {f"{name}_note": 0, f"{name}_ask": 0}
    turns = []
    for _ in range(chance.randint(EPOCHS_MIN, 12)):
        operator = chance.choice((f"{name}_note", f"{name}_note", f"{name}_ask"))
        parts = [
            [
                Call(chance.randrange(USERS), chance.randrange(ITEMS))
                for _ in range(chance.choice((0, 1, 3, 6)))
            ]
            for _ in range(chance.randint(1, 3))
        ]
        turns.append(Turn(operator, counts[operator], parts))
        counts[operator] += 1
    lanes = chance.randint(1, 4)
    # By a chance of its own: what else is drawn stays as it is.
    own = Random(repr(turns))
    if own.random() < RELANED:
        for number in range(own.randint(1, 3)):
            turns.insert(own.randint(1, len(turns)), Turn("lanes", number, [], own.randint(1, 4)))
    return ProgramModel(name, lanes, slices, turns)


class ProgramCaller(App):
    """Sends the epochs, one after the other."""

    def __init__(
        self, pond: SimPond, chronicle: Chronicle, model: ProgramModel, chance: Random, pause_s: float
    ) -> None:
        super().__init__(pond, chronicle, f"{model.name}_caller")
        self.model = model
        self._chance = chance
        self._pause_s = pause_s

    def work(self, pond: Pond, process: Process) -> None:
        model = self.model
        opened, calls = open_program(pond, model, model.acknowledged)
        while model.acknowledged < len(model.turns):
            self.pause(process, self._pause_s)
            place = model.acknowledged
            if place and self._chance.random() < REPLAYING:
                replay(pond, model, calls, self._chance.randrange(max(0, place - 3), place), self._chance)
            if self._chance.random() < CHECKPOINTING:
                pond.checkpoint()
            turn = model.turns[place]
            users = {call.user for call in turn.calls}
            if turn.lanes:
                self.say(f"gives {model.name} {turn.lanes} lanes", users)
                # Operators from before go on.
                opened, _ = open_program(pond, model, place)
                self.linger(process, self._chance, killed=0.3)
                model.acknowledged = place + 1
                continue
            self.say(f"begins epoch {turn.number} of {turn.operator}: {turn.parts}", users)
            given = commit(pond, calls[turn.operator], turn, self._chance)
            self.say(f"epoch {turn.number} of {turn.operator} returned {given}", users)
            model.take(place, given)
            self.linger(process, self._chance, killed=0.3)
            model.acknowledged = place + 1
            if self._chance.random() < LOOKING:
                model.check(contents(opened))


def open_program(pond: Pond, model: ProgramModel, place: int) -> tuple[Program, dict[str, ProgramCall]]:
    """With as many lanes as it has when the turn at that place is over."""
    opened = pond.program(model.name, program(model.lanes_for(place)), migrate=True)
    calls = {
        f"{model.name}_{method}": opened.call(method, into="given", name=f"{model.name}_{method}")
        for method in ("note", "ask")
    }
    return opened, calls


def contents(opened: Program) -> dict[str, Any]:
    return {field: opened.entries(field) for field in ("items", "pairs", "seen")}


def commit(pond: Pond, call: ProgramCall, turn: Turn, chance: Random) -> list[int]:
    """What an epoch returns."""
    rows = commit_tables(pond, call, [_table(part) for part in turn.parts], turn.number, chance)
    asked = list(zip(rows["user"].to_pylist(), rows["item"].to_pylist(), strict=True))
    if asked != turn.calls:
        raise Wrong(f"epoch {turn.number} of {turn.operator} gave back {asked}, not {turn.calls}")
    given: list[int] = rows["given"].to_pylist()
    return given


def commit_tables(
    pond: Pond, call: ProgramCall, tables: list[pa.Table], number: int, chance: Random
) -> pa.Table:
    """The rows of an epoch with what they got, after they were staged by several tasks, some of them more than once."""
    client, wanted = pond._client, turn_of(number)  # noqa: SLF001 - tasks stage by the client itself
    intake = call.intake(tables[0].schema)

    def stage(plan: EpochPlan) -> list[Receipt]:
        def task(place: int) -> Receipt:
            part = Part(LOCAL_QUERY, wanted, place)
            attempts = [
                intake.stage(client, tables[place], plan, part) for _ in range(chance.choice((1, 1, 1, 2)))
            ]
            return chance.choice(attempts)

        return client.runtime.map(task, list(range(len(tables))))

    commit_staged(client, intake, LOCAL_QUERY, wanted, stage, "", call.work(intake), "continue")
    return call.returned(LOCAL_QUERY, wanted, tables[0].schema).read(client)


def replay(
    pond: Pond, model: ProgramModel, calls: dict[str, ProgramCall], place: int, chance: Random
) -> None:
    """An epoch that was acknowledged is asked for again. The newest of an operator is always kept."""
    turn = model.turns[place]
    if turn.lanes:
        return
    later = [each for each in model.turns[place + 1 : model.acknowledged] if each.operator == turn.operator]
    try:
        model.take(place, commit(pond, calls[turn.operator], turn, chance))
    except OutputsGone:
        if not later:
            raise


class ProgramChecker(App):
    """Compares what programs hold, and what the newest epochs gave, when all is done."""

    def __init__(
        self, pond: SimPond, chronicle: Chronicle, models: Iterable[ProgramModel], chance: Random
    ) -> None:
        super().__init__(pond, chronicle, "program checker")
        self._models = models
        self._chance = chance

    def work(self, pond: Pond, process: Process) -> None:
        for model in self._models:
            opened, calls = open_program(pond, model, len(model.turns))
            model.check(contents(opened))
            for place in range(max(0, len(model.turns) - 3), len(model.turns)):
                replay(pond, model, calls, place, self._chance)


def _table(calls: list[Call]) -> pa.Table:
    users, items = [call.user for call in calls], [call.item for call in calls]
    return pa.table({"user": pa.array(users, pa.int64()), "item": pa.array(items, pa.int64())})
