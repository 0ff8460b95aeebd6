"""Updaters that fall silent and come again, and what must hold all the same.

Which rows are late depends on when U went on without an updater; but U never falls, what was answered below U is never
answered otherwise, and what was timely when its epoch began is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, combinations
from random import Random

import pyarrow as pa

from millpond.ops.committing import commit_staged, turn_of
from millpond.ops.intake import Intake, Part
from millpond.pond.pond import Pond
from millpond.pond.state import State
from millpond.testing.simulation.apps import App, Chronicle, Wrong
from millpond.testing.simulation.pond import SimPond
from millpond.testing.simulation.scheduler import Process
from millpond.testing.simulation.states import KEYS, Feed, Row, table_of
from millpond.times import Progress
from millpond.wire.epochs import EpochPlan, Receipt
from millpond.wire.states import RowsWork

IDLE_S = 2
SILENT = 0.4
SILENCE_S = 5 * IDLE_S
NEWEST = 300


class SilenceModel:
    """One State with updaters that may be left out, as far as they tell what they sent."""

    def __init__(self, name: str, feeds: dict[str, Feed]) -> None:
        self.name = name
        self.feeds = feeds
        self.progress_seen: Progress = -math.inf
        self.done: set[str] = set()
        self._acknowledged: dict[tuple[str, int], list[Row]] = {}
        self._on_its_way: dict[str, tuple[int, list[Row]]] = {}
        self._answers: dict[tuple[int, int], int | None] = {}

    def send(self, feed: str, epoch: int, rows: list[Row]) -> None:
        """Timely ones of an epoch that is being staged: the pond may hold them from now on, all or none."""
        self._on_its_way[feed] = epoch, rows

    def acknowledge(self, feed: str) -> None:
        epoch, rows = self._on_its_way.pop(feed)
        self._acknowledged[feed, epoch] = rows

    def check_progress(self, floor: Progress, progress: Progress) -> None:
        if progress < floor:
            raise Wrong(f"U of {self.name} fell from {floor} to {progress}")
        self.progress_seen = max(self.progress_seen, progress)

    def check_answer(self, key: int, at: int, value: int | None) -> None:
        """Of a time below U."""
        before = self._answers.setdefault((key, at), value)
        if before != value:
            raise Wrong(f"{self.name}[{key}] as of {at} was {before}, and is {value}", [key])
        possible = {self._value(rows, key, at) for rows in self._possible()}
        if value not in possible:
            raise Wrong(f"{self.name}[{key}] as of {at} is {value}, not one of {possible}", [key])

    def _possible(self) -> Iterator[list[Row]]:
        """All that the pond may hold: what was acknowledged, and of what is on its way some."""
        ways = [((feed, epoch), rows) for feed, (epoch, rows) in self._on_its_way.items()]
        for some in chain.from_iterable(combinations(ways, count) for count in range(len(ways) + 1)):
            yield [row for _, rows in sorted((self._acknowledged | dict(some)).items()) for row in rows]

    @staticmethod
    def _value(rows: list[Row], key: int, at: int) -> int | None:
        """Of one key and time, the row that was sent last counts; times of different updaters differ."""
        upto = [(row.time, number) for number, row in enumerate(rows) if row.key == key and row.time <= at]
        return rows[max(upto)[1]].value if upto else None


class _SilenceApp(App):
    def __init__(
        self,
        pond: SimPond,
        chronicle: Chronicle,
        name: str,
        model: SilenceModel,
        chance: Random,
        pause_s: float,
    ) -> None:
        super().__init__(pond, chronicle, name)
        self._model = model
        self._chance = chance
        self._pause_s = pause_s


class SilentUpdater(_SilenceApp):
    """Sends the epochs of a feed, at times after a silence for which U does not wait."""

    _committed = 0

    @property
    def _feed(self) -> Feed:
        return self._model.feeds[self.name]

    def work(self, pond: Pond, process: Process) -> None:
        state = pond.state(self._model.name, key="long", value="long")
        delay, idle = self._feed.delay, f"{IDLE_S} seconds"
        state.update(key="k", at="t", value="v", seq="s", delay=delay, idle=idle, name=self.name)
        while self._committed < len(self._feed.epochs):
            silent = self._chance.random() < SILENT
            process.runtime.sleep(SILENCE_S if silent else self.pond.sim.faults.duration(self._pause_s))
            self._send(pond, state, self._committed)
            self._committed += 1
        self._model.done.add(self.name)
        self.say("is done, and says nothing of it")

    def _send(self, pond: Pond, state: State, epoch: int) -> None:
        client, spec = pond._client, state._spec  # noqa: SLF001 - which rows are late is said to tasks alone
        rows = sorted(self._feed.epochs[epoch], key=lambda row: row.seq)
        intake = Intake(spec, "k", "t", "v", self._feed.delay, "drop", self.name, "s")
        query, turn = f"q-{self.name}", turn_of(epoch)
        self.say(f"begins epoch {epoch} of {self._model.name}", {row.key for row in rows})

        def stage(plan: EpochPlan) -> list[Receipt]:
            self._model.send(self.name, epoch, [row for row in rows if row.time >= plan.late_below])
            return [intake.stage(client, table_of(rows), plan, Part(query, turn, 0))]

        committed = commit_staged(client, intake, query, turn, stage, "long", RowsWork(), "continue")
        self._model.acknowledge(self.name)
        self.say(f"epoch {epoch} of {self._model.name} is acknowledged, {committed.late} rows were late")


class SilenceReader(_SilenceApp):
    """Reads below U until all updaters are done, and then all that there is below U."""

    def work(self, pond: Pond, process: Process) -> None:
        state = pond.state(self._model.name, key="long", value="long")
        while len(self._model.done) < len(self._model.feeds):
            self.pause(process, self._pause_s)
            self._read(
                state, [(self._chance.randrange(KEYS), self._chance.randrange(NEWEST)) for _ in range(4)]
            )
        self._read(state, [(key, at) for key in range(KEYS) for at in range(NEWEST)])

    def _read(self, state: State, questions: list[tuple[int, int]]) -> None:
        model = self._model
        floor = model.progress_seen
        progress = state.progress()
        model.check_progress(floor, progress.update)
        keys, times = zip(*questions, strict=True)
        fetch = state.fetch(key="k", at="t", into="v")
        answers = fetch.now(pa.table({"k": keys, "t": times}), waiting="drop").to_pylist()
        for row in answers:
            model.check_answer(row["k"], row["t"], row["v"])
        missing = {(k, t) for k, t in questions if t < progress.update} - {(r["k"], r["t"]) for r in answers}
        if missing:
            raise Wrong(f"{model.name} did not answer {sorted(missing)}, though U is {progress.update}")
