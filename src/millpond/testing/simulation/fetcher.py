"""A fetch on a stream: rows are answered as soon as U has passed them, each once; the others wait.

`Fetcher` is an application that uses the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import NamedTuple

import pyarrow as pa

from millpond.errors import EpochOutOfOrder, UnknownUpdater
from millpond.pond.pond import Pond
from millpond.testing.simulation.apps import App, Chronicle, Wrong
from millpond.testing.simulation.pond import SimPond
from millpond.testing.simulation.scheduler import Process
from millpond.testing.simulation.states import KEYS, SPAN, StateModel, open_state
from millpond.times import Progress
from millpond.wire.base import LOCAL_QUERY, Epoch, Turn
from millpond.wire.questions import Pending, Pin

SCHEMA = pa.schema([("id", pa.int64()), ("k", pa.int64()), ("t", pa.int64())])
Sink = Callable[[Turn, pa.Table], None]


class StreamFetch:
    """The operator, by turns, in one query."""

    def __init__(self, pond: Pond, model: FetcherModel, sink: Sink) -> None:
        self._state = pond.state(model.state.name)
        self._model = model
        fetch = self._state.fetch(
            key="k",
            at="t",
            into="v",
            delay=model.delay,
            name=model.name,
            history="continue" if model.partner is None else "shared",
        )
        self._views = fetch.to(lambda rows, number: sink(Turn.of(number), rows))
        self._client = pond._client  # noqa: SLF001 - turns are pinned out of order

    def __call__(self, rows: pa.Table, turn: Turn) -> None:
        self._views._answer_table(rows, turn.number, self._model.query)  # noqa: SLF001 - Spark tells the query

    def pin(self, turn: Turn) -> None:
        """Begins a turn, and goes no further."""
        self._client.call(Pin(self._state.name, self._model.name, self._model.query, turn, "continue"))

    def pending(self) -> Pending:
        return self._views.pending()

    def unfinished(self) -> bool:
        """Whether an epoch of this query has begun, and is not answered."""
        return self._model.query in self.pending().unfinished

    def drain(self) -> int:
        """Answers what waits in this query, as far as U allows; how many rows wait still, in all."""
        return self._views.drain(self._model.query).rows

    def report(self, progress: int) -> None:
        self._state.report(self._model.name, fetch=progress)


class Ask(NamedTuple):
    id: int
    key: int
    at: int


class FetcherModel:
    """Which rows are answered, and that each is answered once, rightly, and again the same."""

    def __init__(
        self,
        state: StateModel,
        name: str,
        query: str,
        delay: int | None,
        epochs: list[list[Ask]],
        reports: bool = False,
    ) -> None:
        self.state = state
        self.name = name
        self.query = query
        self.partner: FetcherModel | None = None
        """Another query that shares the name."""
        self.gives_up_after: int | None = None
        """So many epochs: then it is forgotten, with what waits."""
        self.reports = reports
        """Whether it says in the end that no more rows come: those that wait are still to be answered."""
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


def draw_fetcher(chance: Random, state: StateModel, name: str, epochs: int) -> list[FetcherModel]:
    """The queries in which a fetcher runs: one, or two that share its name."""
    feeds = len(state.feeds)
    delay = chance.choice((None, 0, 2 * SPAN * feeds))
    if delay is None or chance.random() < 0.6:
        drawn = _draw_epochs(chance, feeds, epochs, 0)
        return [FetcherModel(state, name, LOCAL_QUERY, delay, drawn, chance.random() < 0.5)]
    # The first is empty: from then on both are known, and what is late hangs on the query's own rows.
    one, other = (
        FetcherModel(state, name, f"query{n}", delay, [[], *_draw_epochs(chance, feeds, epochs, n * 1000)])
        for n in range(2)
    )
    one.partner, other.partner = other, one
    if chance.random() < 0.5:
        other.gives_up_after = chance.randint(1, epochs)
    return [one, other]


def _draw_epochs(chance: Random, feeds: int, epochs: int, number: int) -> list[list[Ask]]:
    drawn = []
    for epoch in range(epochs):
        rows = []
        for _ in range(chance.choice((0, 1, 4))):
            number += 1
            at = max(0, (epoch * SPAN + chance.randint(-2 * SPAN, 2 * SPAN)) * feeds)
            rows.append(Ask(number, chance.randrange(KEYS), at))
        drawn.append(rows)
    return drawn


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
        fetch = StreamFetch(pond, model, self._take)
        if fetch.unfinished():
            self._hurry(fetch)
        else:
            fetch.drain()  # one that was interrupted goes on first
        while model.committed < len(model.epochs):
            self.pause(process, self._pause_s)
            if model.gives_up_after is not None and model.committed >= model.gives_up_after:
                break
            if self._chance.random() < 0.2 and not fetch.unfinished():
                self.say(f"drains: {fetch.drain()} rows wait")
            rows = model.epochs[model.committed]
            self.say(f"asks epoch {model.committed}: {rows}", {row.key for row in rows})
            columns = zip(*rows, strict=True) if rows else ([], [], [])
            table = pa.table([pa.array(column, pa.int64()) for column in columns], schema=SCHEMA)
            fetch(table, Turn(Epoch(model.committed)))
            self.linger(process, self._chance, killed=0.3)
            model.committed += 1
            while model.partner is not None and not model.partner.committed:
                self.pause(process, self._pause_s)
        if model.gives_up_after is not None:
            self._give_up(pond)
            return
        if model.reports:
            fetch.report(max((row.at for rows in model.epochs for row in rows), default=0) + 1)
        while fetch.drain():
            self.pause(process, self._pause_s)
        model.check_complete()

    def _hurry(self, fetch: StreamFetch) -> None:
        """Tries the epoch after the one that was interrupted: what waits there would be lost.

        Where the sink has the interrupted one, word that it is answered may still be on its way.
        """
        interrupted = Turn(Epoch(self.model.committed))
        if interrupted.number in self.model.turns or self._chance.random() < 0.5:
            return
        try:
            fetch.pin(interrupted.next_epoch)
        except EpochOutOfOrder:
            return
        raise Wrong(f"{self.name} began {interrupted.next_epoch}, and {interrupted} is not answered")

    def _give_up(self, pond: Pond) -> None:
        self.say("gives up")
        with suppress(UnknownUpdater):  # it was forgotten before
            pond.forget(self.model.state.name, name=self.model.name, query=self.model.query)

    def _take(self, turn: Turn, rows: pa.Table) -> None:
        taken = [(row["id"], row["k"], row["t"], row["v"]) for row in rows.to_pylist()]
        self.model.take(turn, taken)
        self.say(f"turn {turn} gave {taken}", {key for _, key, _, _ in taken})
