"""A fetch on a stream: rows are answered as soon as U has passed them, each once; the others wait.

`Fetcher` is an application that uses the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

import pyarrow as pa

from millpond.pond.pond import Pond
from millpond.testing.simulation.apps import App, Chronicle, Wrong
from millpond.testing.simulation.pond import SimPond
from millpond.testing.simulation.scheduler import Process
from millpond.testing.simulation.states import KEYS, SPAN, StateModel, open_state
from millpond.times import Progress
from millpond.wire.base import Turn
from millpond.wire.questions import Pending

SCHEMA = pa.schema([("id", pa.int64()), ("k", pa.int64()), ("t", pa.int64())])
Sink = Callable[[Turn, pa.Table], None]


class StreamFetch:
    """The operator, by turns."""

    def __init__(self, pond: Pond, state: str, name: str, delay: int | None, sink: Sink) -> None:
        fetch = pond.state(state).fetch(key="k", at="t", into="v", delay=delay, name=name)
        self._views = fetch.to(lambda rows, number: sink(Turn.of(number), rows))

    def __call__(self, rows: pa.Table, turn: Turn) -> None:
        self._views(rows, turn.number)

    def pending(self) -> Pending:
        return self._views.pending()

    def drain(self) -> int:
        """Answers what waits, as far as U allows; how many rows wait still."""
        return self._views.drain().rows


class Ask(NamedTuple):
    id: int
    key: int
    at: int


class FetcherModel:
    """Which rows are answered, and that each is answered once, rightly, and again the same."""

    def __init__(self, state: StateModel, delay: int | None, epochs: list[list[Ask]]) -> None:
        self.state = state
        self.delay = delay
        self.epochs = epochs
        self.committed = 0
        """The checkpoint: epochs that returned."""
        self.turns: dict[int, list[tuple[int, int, int, int | None]]] = {}
        self._answered: dict[int, int] = {}
        self.late: set[int] = set()
        watermark: Progress = -(2**63)
        for rows in epochs:
            self.late |= {row.id for row in rows if delay is not None and row.at < watermark}
            newest = max((row.at for row in rows), default=None)
            if delay is not None and newest is not None:
                watermark = max(watermark, newest - delay)

    def cut(self) -> None:
        """The epochs that have begun stay; one more where none is on its way."""
        del self.epochs[self.committed + 1 :]

    def take(self, turn: Turn, rows: Sequence[tuple[int, int, int, int | None]]) -> None:
        """A sink that knows turns by their numbers: one that comes again must bring the same."""
        number = turn.number
        if number in self.turns:
            if self.turns[number] != list(rows):
                raise Wrong(f"turn {turn} came again with {rows}, not {self.turns[number]}")
            return
        self.turns[number] = list(rows)
        for ident, key, at, value in rows:
            if ident in self._answered:
                raise Wrong(f"row {ident} is answered in turns {self._answered[ident]} and {number}", [key])
            if ident in self.late:
                raise Wrong(f"row {ident} is late, and answered in turn {turn}", [key])
            if not at < self.state.progress_max:
                raise Wrong(f"row {ident} is answered as of {at}, beyond U", [key])
            if value != self.state.value_at(key, at):
                raise Wrong(
                    f"row {ident} asks {self.state.name}[{key}] as of {at}: {value},"
                    f" not {self.state.value_at(key, at)}",
                    [key],
                )
            self._answered[ident] = number

    def check_complete(self) -> None:
        for row in (row for rows in self.epochs for row in rows):
            if row.id not in self._answered and row.id not in self.late:
                raise Wrong(f"row {row.id}, {self.state.name}[{row.key}] as of {row.at}, is lost", [row.key])


def draw_fetcher(chance: Random, state: StateModel, epochs: int) -> FetcherModel:
    feeds = len(state.feeds)
    delay = chance.choice((None, 0, 2 * SPAN * feeds))
    drawn, number = [], 0
    for epoch in range(epochs):
        rows = []
        for _ in range(chance.choice((0, 1, 4))):
            number += 1
            at = max(0, (epoch * SPAN + chance.randint(-2 * SPAN, 2 * SPAN)) * feeds)
            rows.append(Ask(number, chance.randrange(KEYS), at))
        drawn.append(rows)
    return FetcherModel(state, delay, drawn)


class Fetcher(App):
    """Sends the epochs of a stream of questions; in the end drains what waits."""

    def __init__(
        self,
        pond: SimPond,
        chronicle: Chronicle,
        name: str,
        model: FetcherModel,
        chance: Random,
        pause_s: float,
    ) -> None:
        super().__init__(pond, chronicle, name)
        self.model = model
        self._chance = chance
        self._pause_s = pause_s

    def work(self, pond: Pond, process: Process) -> None:
        model = self.model
        open_state(pond, model.state)
        fetch = StreamFetch(pond, model.state.name, self.name, model.delay, self._take)
        if not fetch.pending().unfinished:
            fetch.drain()  # one that was interrupted goes on first
        while model.committed < len(model.epochs):
            self.pause(process, self._pause_s)
            if self._chance.random() < 0.2 and not fetch.pending().unfinished:
                self.say(f"drains: {fetch.drain()} rows wait")
            rows = model.epochs[model.committed]
            self.say(f"asks epoch {model.committed}: {rows}", {row.key for row in rows})
            columns = zip(*rows, strict=True) if rows else ([], [], [])
            table = pa.table([pa.array(column, pa.int64()) for column in columns], schema=SCHEMA)
            fetch(table, Turn(model.committed))  # type: ignore[arg-type]
            model.committed += 1
        while fetch.drain():
            self.pause(process, self._pause_s)
        model.check_complete()

    def _take(self, turn: Turn, rows: pa.Table) -> None:
        taken = [(row["id"], row["k"], row["t"], row["v"]) for row in rows.to_pylist()]
        self.model.take(turn, taken)
        self.say(f"turn {turn} gave {taken}", {key for _, key, _, _ in taken})
