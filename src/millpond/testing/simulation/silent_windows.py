"""A window whose sources fall silent and come again: what is open fires by turns of the operator's own, without a finish.

Which rows are late hangs on when the watermark went on without a source; but each row that was timely is in one window, each
window fires once, and once all are silent nothing stays open.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

import pyarrow as pa

from millpond.code import windows as code
from millpond.code.rules import count, total
from millpond.ops.committing import commit_staged, turn_of
from millpond.ops.intake import Part
from millpond.ops.window import FiringSource
from millpond.pond.pond import Pond
from millpond.testing.simulation.apps import App, Chronicle, Wrong
from millpond.testing.simulation.pond import SimPond
from millpond.testing.simulation.scheduler import Process
from millpond.testing.simulation.windows import SPAN, Row, Turn, draw_turns
from millpond.wire.base import LOCAL_QUERY
from millpond.wire.epochs import EpochPlan, Receipt

SIZE = 15
IDLE_S = 2
SILENT = 0.3
SILENCE_S = 3 * IDLE_S
EPOCHS_MIN = 4
Result = dict[str, Any]


class SilentWindowModel:
    """What was sent, which rows of it were timely, and what each turn gave."""

    def __init__(self, name: str, delays: dict[str, int], turns: list[Turn]) -> None:
        self.name = name
        self.delays = delays
        self.turns = turns
        self.acknowledged = dict.fromkeys(delays, 0)
        self.timely: dict[tuple[str, int], list[Row]] = {}
        self.results: dict[tuple[str, int], list[Result]] = {}
        """By source and number: what a sink got, the last time that it was called."""

    def cut(self) -> None:
        """The epochs that have begun stay, and some more."""
        self.turns[:] = [
            turn for turn in self.turns if turn.number < max(EPOCHS_MIN, self.acknowledged[turn.source] + 1)
        ]

    def turns_of(self, source: str) -> list[Turn]:
        return [turn for turn in self.turns if turn.source == source]

    @property
    def all_sent(self) -> bool:
        return sum(self.acknowledged.values()) == len(self.turns)

    def resident(self, pond: Pond) -> Any:
        aggregate = {"rows": count(), "total": total("v")}
        return pond.window(
            self.name, key="k long", window=code.tumbling(SIZE), aggregate=aggregate, value="v long"
        )

    def source(self, resident: Any, name: str) -> FiringSource:
        made: FiringSource = resident.over(
            key="k", at="t", delay=self.delays[name], name=name, idle=f"{IDLE_S} seconds"
        )
        made.to(lambda rows, number: self.take(name, number, rows.to_pylist()))
        return made

    def take(self, source: str, number: int, rows: list[Result]) -> None:
        """What a turn gave: one that comes again must give the same."""
        rows = sorted(rows, key=lambda row: (row["k"], row["window_start"]))
        before = self.results.setdefault((source, number), rows)
        if before != rows:
            keys = {row["k"] for row in [*before, *rows]}
            raise Wrong(f"turn {number} of {source} gave {rows}, and before that {before}", keys)

    def check(self) -> None:
        """All that fired is all that was timely, each row in its window, each window once."""
        expected: dict[tuple[int, int], tuple[int, int]] = {}
        for rows in self.timely.values():
            for key, time, value in rows:
                place = key, time // SIZE * SIZE
                had = expected.get(place, (0, 0))
                expected[place] = had[0] + 1, had[1] + value
        fired = [row for rows in self.results.values() for row in rows]
        found = {(row["k"], row["window_start"]): (row["rows"], row["total"]) for row in fired}
        differ = {place for place in {*expected, *found} if expected.get(place) != found.get(place)}
        if differ:
            told = {place: (found.get(place), expected.get(place)) for place in sorted(differ)}
            raise Wrong(f"{self.name} fired otherwise than it should: {told}", {key for key, _ in differ})
        if len(found) != len(fired):
            raise Wrong(f"{self.name} fired a window twice")


def draw_silent_window(chance: Random, name: str) -> SilentWindowModel:
    sources = [f"{name}_source{number}" for number in range(chance.choice((1, 2, 2)))]
    delays = {source: chance.choice((0, SPAN)) for source in sources}
    epochs = chance.randint(EPOCHS_MIN, 6)
    return SilentWindowModel(
        name, delays, draw_turns(chance, [source for source in sources for _ in range(epochs)], 2 * SPAN)
    )


class SilentFeeder(App):
    """Sends the epochs of one source, at times after a silence, and takes the turns that are due meanwhile."""

    def __init__(
        self,
        pond: SimPond,
        chronicle: Chronicle,
        name: str,
        model: SilentWindowModel,
        chance: Random,
        pause_s: float,
    ) -> None:
        super().__init__(pond, chronicle, name)
        self._model = model
        self._chance = chance
        self._pause_s = pause_s
        self.own_turns = 0

    def work(self, pond: Pond, process: Process) -> None:
        model, name = self._model, self.name
        resident = model.resident(pond)
        # Whoever comes first waits for the others.
        sources = {each: model.source(resident, each) for each in model.delays}
        while model.acknowledged[name] < len(model.turns_of(name)):
            silent = self._chance.random() < SILENT
            process.runtime.sleep(SILENCE_S if silent else self.pond.sim.faults.duration(self._pause_s))
            self._take_due(sources[name])
            if self._chance.random() < 0.1:
                pond.checkpoint()
            self._send(pond, sources[name], model.turns_of(name)[model.acknowledged[name]])
            self.linger(process, self._chance, killed=0.3)
            model.acknowledged[name] += 1
        # Nobody finishes: once all are silent, what is open fires.
        while not model.all_sent or sources[name].waits():
            process.runtime.sleep(IDLE_S / 2)
            self._take_due(sources[name])
        self.say("is silent for good")

    def _take_due(self, source: FiringSource) -> None:
        if LOCAL_QUERY in source.due():
            self.say(f"takes a turn of its own of {source.name}")
            no_session: Any = None  # frames alone need one
            source.take(LOCAL_QUERY, no_session)
            self.own_turns += 1

    def _send(self, pond: Pond, source: FiringSource, turn: Turn) -> None:
        self.say(f"begins epoch {turn.number} of {source.name}: {turn.rows}", {row.key for row in turn.rows})
        # What is owed comes first, as it does where an operator is called.
        source._hand_over_owed(LOCAL_QUERY, None)  # noqa: SLF001
        fired = commit(pond, self._model, source, turn)
        self._model.take(source.name, turn.number, fired)
        self.say(f"epoch {turn.number} of {source.name} fired {fired}", {row.key for row in turn.rows})


def commit(pond: Pond, model: SilentWindowModel, source: FiringSource, turn: Turn) -> list[Result]:
    """What an epoch fires; the model gets to know which of its rows were timely."""
    client, wanted = pond._client, turn_of(turn.number)  # noqa: SLF001 - tasks stage by the client itself
    columns = zip(*turn.rows, strict=True) if turn.rows else ([], [], [])
    table = pa.table(
        {name: pa.array(values, pa.int64()) for name, values in zip("ktv", columns, strict=True)}
    )
    intake: Any = source._intake(table.schema)  # noqa: SLF001
    late: list[bool] = []

    def stage(plan: EpochPlan) -> list[Receipt]:
        late[:] = intake.late_flags(table, plan).tolist()
        return [intake.stage(client, table, plan, Part(LOCAL_QUERY, wanted, 0))]

    planned = source._planned(intake, "long")  # noqa: SLF001
    commit_staged(client, intake, LOCAL_QUERY, wanted, stage, "long", planned, "continue")
    timely = [row for row, is_late in zip(turn.rows, late, strict=True) if not is_late]
    before = model.timely.setdefault((turn.source, turn.number), timely)
    if before != timely:
        raise Wrong(f"of epoch {turn.number} of {turn.source} {timely} were timely, and before that {before}")
    rows: list[Result] = source.fired_in(LOCAL_QUERY, wanted).to_pylist()
    return rows


class SilentWindowChecker(App):
    """Compares what fired, when all is done; nothing is open."""

    def __init__(self, pond: SimPond, chronicle: Chronicle, models: Iterable[SilentWindowModel]) -> None:
        super().__init__(pond, chronicle, "silent window checker")
        self._models = models

    def work(self, pond: Pond, process: Process) -> None:
        for model in self._models:
            resident = model.resident(pond)
            if resident.now().num_rows:
                raise Wrong(f"{model.name} is silent, and {resident.now().to_pylist()} are open")
            for name, epochs in model.acknowledged.items():
                source = model.source(resident, name)
                for turn in model.turns_of(name)[epochs - 1 : epochs]:
                    model.take(name, turn.number, commit(pond, model, source, turn))
            model.check()
            late = sum(len(turn.rows) for turn in model.turns) - sum(map(len, model.timely.values()))
            if sum(resident.progress().late.values()) != late:
                raise Wrong(f"{model.name} counted {resident.progress().late} late rows, not {late}")
