"""Updaters and readers of one State, and what it must hold.

Rows are drawn before anything runs. An answer for a time below U never changes, so whatever is read there, at any
moment, is what a run without faults would hold in the end.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import pyarrow as pa

from millpond.code.rules import add, put
from millpond.errors import BelowFetchProgress, OtherQuery
from millpond.ops.committing import commit_staged, turn_of
from millpond.ops.intake import Intake, Part
from millpond.ops.update import Update
from millpond.pond.pond import Pond
from millpond.pond.snapshots import read_versions
from millpond.pond.state import State
from millpond.testing.oracle import Oracle
from millpond.testing.simulation.apps import App, Chronicle, Wrong
from millpond.testing.simulation.pond import SimPond
from millpond.testing.simulation.scheduler import Process
from millpond.times import Progress
from millpond.wire.epochs import EpochCommitted, EpochPlan, Receipt
from millpond.wire.states import RowsWork

KEYS = 6
SPAN = 10
"""How far times go on from one epoch to the next."""
WATCH_TIMES = 20
STARTING_OVER = 0.1
DESERTING = 0.3
DESERTED_AT = 10**6


class Row(NamedTuple):
    key: int
    time: int
    value: int
    seq: int


class Feed(NamedTuple):
    """The rows of one updater, epoch by epoch."""

    delay: int
    sequenced: bool
    epochs: list[list[Row]]


def draw_feed(chance: Random, number: int, feeds: int, epochs: int) -> Feed:
    """Times of different updaters differ, so that it does not matter which comes first."""
    sequenced = chance.random() < 0.3
    reach = chance.choice((0, SPAN, 3 * SPAN))
    drawn: list[list[Row]] = []
    value = 0
    for epoch in range(epochs):
        rows: dict[tuple[int, int, int], Row] = {}
        for seq in range(chance.choice((0, 1, 3, 8))):
            value += 1
            time = max(0, epoch * SPAN + chance.randint(-reach, SPAN)) * feeds + number
            row = Row(chance.randrange(KEYS), time, value * feeds + number, seq)
            # Only a column for the order tells which of two rows of one key and time comes last.
            rows[row.key, row.time, seq if sequenced else 0] = row
        drawn.append(list(rows.values()))
    return Feed(chance.choice((0, reach)) * feeds, sequenced, drawn)


class StateModel(ABC):
    """What one State holds when all its feeds have come, and how far U may be meanwhile."""

    rule = put()

    def __init__(self, name: str, feeds: dict[str, Feed]) -> None:
        self.name = name
        self.feeds = feeds
        self.watermarks: dict[str, list[Progress]] = {}
        """By updater: before its first epoch, and after each."""
        self.begun = dict.fromkeys(feeds, 0)
        self.acknowledged = dict.fromkeys(feeds, 0)
        self.visible = dict.fromkeys(feeds, 0)
        """Epochs that count in U for certain: one that was answered early may still be on its way there."""
        self.finishing: set[str] = set()
        self.finished: set[str] = set()
        self.compacts = False
        self.progress_seen: Progress = -math.inf
        self._values: dict[tuple[int, int], int | None] = {}
        self._compute()

    def cut(self) -> None:
        """Of each feed the epochs that have begun stay; one more where none is on its way.

        What holds below U holds still: a row that was to come would be late there.
        """
        for name, feed in self.feeds.items():
            del feed.epochs[self.acknowledged[name] + 1 :]
        self._values.clear()
        self._compute()

    @abstractmethod
    def _compute(self) -> None:
        """From the feeds."""

    def value_at(self, key: int, at: int) -> int | None:
        if (key, at) not in self._values:
            self._values[key, at] = self._value_at(key, at)
        return self._values[key, at]

    @abstractmethod
    def _value_at(self, key: int, at: int) -> int | None: ...

    def turning_points(self, key: int) -> set[int]:
        """Times at which another value would show, if the pond held a version too many, too few, or a wrong one."""
        times = {
            row.time for feed in self.feeds.values() for rows in feed.epochs for row in rows if row.key == key
        }
        return {time + step for time in times for step in (-1, 0, 1)}

    @abstractmethod
    def snapshot(self, below: Progress) -> dict[int, tuple[int, int]]:
        """Of each key the newest time below that, and the value."""

    @property
    def progress_min(self) -> Progress:
        """U is not below this: epochs that were acknowledged have moved it."""
        return min(
            math.inf
            if name in self.finished and self.visible[name] == self.acknowledged[name]
            else marks[self.visible[name]]
            for name, marks in self.watermarks.items()
        )

    @property
    def progress_max(self) -> Progress:
        """U is not above this: epochs that nobody sent have not moved it."""
        return min(
            math.inf if name in self.finishing else marks[self.begun[name]]
            for name, marks in self.watermarks.items()
        )

    def begin(self, name: str, epoch: int) -> None:
        self.begun[name] = max(self.begun[name], epoch + 1)

    def acknowledge(self, name: str, epoch: int, early: bool = False) -> None:
        self.acknowledged[name] = max(self.acknowledged[name], epoch + 1)
        self.visible[name] = max(self.visible[name], epoch if early else epoch + 1)

    def check_progress(self, floor: Progress, progress: Progress) -> None:
        """`floor` is what `progress_floor` was before U was asked for."""
        if not floor <= progress <= self.progress_max:
            raise Wrong(f"U of {self.name} is {progress}, not between {floor} and {self.progress_max}")
        self.progress_seen = max(self.progress_seen, progress)

    @property
    def progress_floor(self) -> Progress:
        return max(self.progress_min, self.progress_seen)


class PutModel(StateModel):
    def _compute(self) -> None:
        self._oracle = Oracle(keep="all")
        for updater in self.feeds:
            self._oracle.register_updater(updater)
        for updater, feed in self.feeds.items():
            marks = self.watermarks[updater] = [-math.inf]
            for epoch, rows in enumerate(feed.epochs):
                ordered = sorted(rows, key=lambda row: row.seq)
                self._oracle.update(updater, epoch, [row[:3] for row in ordered], feed.delay)
                marks.append(self._oracle.updaters[updater].progress)

    def _value_at(self, key: int, at: int) -> int | None:
        upto = [value for time, value in self._oracle.raw(key) if time <= at]
        return upto[-1] if upto else None

    def snapshot(self, below: Progress) -> dict[int, tuple[int, int]]:
        newest = {}
        for key in range(KEYS):
            versions = [version for version in self._oracle.raw(key) if version[0] < below]
            if versions:
                newest[key] = versions[-1]
        return newest


class AddModel(StateModel):
    """The value as of a time is the sum of all that came up to it."""

    rule = add()

    def _compute(self) -> None:
        self._timely: list[Row] = []
        for updater, feed in self.feeds.items():
            marks = self.watermarks[updater] = [-math.inf]
            for rows in feed.epochs:
                timely = [row for row in rows if row.time >= marks[-1]]
                self._timely += timely
                newest = max((row.time for row in timely), default=-math.inf)
                marks.append(max(marks[-1], newest - feed.delay))

    def _value_at(self, key: int, at: int) -> int | None:
        values = [row.value for row in self._timely if row.key == key and row.time <= at]
        return sum(values) if values else None

    def snapshot(self, below: Progress) -> dict[int, tuple[int, int]]:
        newest: dict[int, tuple[int, int]] = {}
        for key in range(KEYS):
            times = [row.time for row in self._timely if row.key == key and row.time < below]
            if times:
                value = self.value_at(key, max(times))
                assert value is not None
                newest[key] = (max(times), value)
        return newest


def open_state(pond: Pond, model: StateModel) -> State:
    return pond.state(model.name, key="long", value="long", update=model.rule)


class Updater(App):
    """Sends the epochs of one feed. Each is staged by several tasks, some of them more than once."""

    def __init__(
        self,
        pond: SimPond,
        chronicle: Chronicle,
        name: str,
        model: StateModel,
        chance: Random,
        pause_s: float,
    ) -> None:
        super().__init__(pond, chronicle, name)
        self.model = model
        self.feed = model.feeds[name]
        self.committed = 0
        """The checkpoint: epochs that returned. Their rows are those of the feed, whenever they are asked for."""
        self._chance = chance
        self._pause_s = pause_s

    def work(self, pond: Pond, process: Process) -> None:
        state = open_state(pond, self.model)
        seq = "s" if self.feed.sequenced else None
        Update(
            pond._client,  # noqa: SLF001 - tasks stage by the client itself
            state._spec,  # noqa: SLF001
            key="k",
            at="t",
            value="v",
            delay=self.feed.delay,
            late="drop",
            name=self.name,
            seq=seq,
        )
        intake = Intake(state._spec, "k", "t", "v", self.feed.delay, "drop", self.name, seq)  # noqa: SLF001
        while self.committed < len(self.feed.epochs):
            self.pause(process, self._pause_s)
            if self.committed and self._chance.random() < STARTING_OVER:
                self._start_over(pond, intake)
            self._send(pond, intake, self.committed)
            self.linger(process, self._chance)
            self.committed += 1
        if self._chance.random() < DESERTING:
            self._desert(pond, intake)
        self.model.finishing.add(self.name)
        state.finish(self.name)
        self.model.finished.add(self.name)
        self.say("finished")

    def _send(self, pond: Pond, intake: Intake, epoch: int) -> None:
        rows = self.feed.epochs[epoch]
        keys = {row.key for row in rows}
        self.model.begin(self.name, epoch)
        self.say(f"begins epoch {epoch} of {self.model.name}: {_brief(rows)}", keys)
        committed = self._commit(pond, intake, epoch, f"q-{self.name}")
        # A replay is answered when all is visible.
        self.model.acknowledge(self.name, epoch, _is_early(epoch) and not committed.replayed)
        again = ", once more" if committed.replayed else ""
        self.say(f"epoch {epoch} of {self.model.name} is acknowledged{again}", keys)

    def _start_over(self, pond: Pond, intake: Intake) -> None:
        """The checkpoint is gone: under another query id the rows would count again."""
        try:
            self._commit(pond, intake, 0, f"other-{self.name}")
        except OtherQuery:
            return
        raise Wrong(f"{self.name} began anew in another query, and was not refused")

    def _desert(self, pond: Pond, intake: Intake) -> None:
        """Stages an epoch that nobody commits."""
        part = Part(f"q-{self.name}", turn_of(len(self.feed.epochs)), 0)
        rows = [Row(key, DESERTED_AT, 0, 0) for key in range(KEYS)]
        intake.stage(pond._client, table_of(rows), EpochPlan(-math.inf, "long", False), part)  # noqa: SLF001
        self.say("stages rows and leaves them")

    def _commit(self, pond: Pond, intake: Intake, epoch: int, query: str) -> EpochCommitted:
        client, rows, turn = pond._client, self.feed.epochs[epoch], turn_of(epoch)  # noqa: SLF001

        def stage(plan: EpochPlan) -> list[Receipt]:
            parts = self._partitions(rows)

            def task(partition: int) -> Receipt:
                part = Part(query, turn, partition)
                attempts = [
                    intake.stage(client, table_of(parts[partition]), plan, part)
                    for _ in range(self._chance.choice((1, 1, 1, 2, 3)))
                ]
                return self._chance.choice(attempts)

            return client.runtime.map(task, list(range(len(parts))))

        early = _is_early(epoch)
        return commit_staged(client, intake, query, turn, stage, "long", RowsWork(), "continue", early=early)

    def _partitions(self, rows: Sequence[Row]) -> list[list[Row]]:
        """The rows in several partitions, others each time; in each of them in their order."""
        parts: list[list[Row]] = [[] for _ in range(self._chance.randint(1, 3))]
        for row in rows:
            self._chance.choice(parts).append(row)
        return parts


def _is_early(epoch: int) -> bool:
    """Every other epoch returns when it is decided; whoever asks for U waits a while for it, and not for ever."""
    return epoch % 2 == 1


class Reader(App):
    """Reads a State again and again, until all others are done."""

    def __init__(
        self,
        pond: SimPond,
        chronicle: Chronicle,
        name: str,
        model: StateModel,
        chance: Random,
        pause_s: float,
    ) -> None:
        super().__init__(pond, chronicle, name)
        self.model = model
        self.reads = 0
        self.stopping = False
        self._chance = chance
        self._pause_s = pause_s

    def work(self, pond: Pond, process: Process) -> None:
        state = open_state(pond, self.model)
        while not self.stopping:
            self.pause(process, self._pause_s)
            if self._chance.random() < 0.25:
                pond.checkpoint()
            try:
                if self._chance.random() < 0.5:
                    self._watch(state, process)
                self._chance.choice((self._fetch, self._snapshot))(state)
            except BelowFetchProgress:
                if not self.model.compacts:
                    raise
            self.reads += 1

    def _fetch(self, state: State) -> None:
        model = self.model
        newest = model.progress_max if math.isfinite(model.progress_max) else 100
        low, high = (0, 100) if model.compacts is False else (int(max(newest - 20, 0)), int(max(newest, 1)))
        questions = [(self._chance.randrange(KEYS), self._chance.randint(low, high)) for _ in range(4)]
        keys, times = zip(*questions, strict=True)
        table = pa.table({"k": keys, "t": times})
        floor = model.progress_floor
        rows = state.fetch(key="k", at="t", into="v").now(table, waiting="drop").to_pylist()
        check_answers(model, [(row["k"], row["t"], row["v"]) for row in rows])
        missing = {(k, t) for k, t in questions if t < floor} - {(row["k"], row["t"]) for row in rows}
        if missing:
            raise Wrong(f"{model.name} did not answer {sorted(missing)}, though U is {floor} at least")
        if rows:
            self.say(f"read {[tuple(row.values()) for row in rows]} of {model.name}", keys)

    def _watch(self, state: State, process: Process) -> None:
        """While an epoch is on its way, until U moves, or it takes too long: that is the moment to read."""
        for _ in range(WATCH_TIMES):
            if self.model.begun != self.model.acknowledged:
                break
            self.pause(process, self._pause_s / WATCH_TIMES)
        before = state.progress().update
        for _ in range(WATCH_TIMES):
            if self.model.begun == self.model.acknowledged:
                return
            self.pause(process, self.pond.sim.faults.weather.latency_s)
            progress = state.progress().update
            if progress > before:
                self._read_at_once(state, progress)
                return

    def _read_at_once(self, state: State, progress: Progress) -> None:
        """Before containers hear of it, if that were possible."""
        rows = read_versions(state._client, state.name, progress - 1)  # noqa: SLF001 - a snapshot asks for U once more
        columns = [column.to_pylist() for column in rows.columns]
        newest = {key: (time, value) for key, time, value in zip(*columns, strict=True)}
        check_snapshot(self.model, newest, progress)
        self.say(f"read {self.model.name} below {progress}, which has just moved")

    def _snapshot(self, state: State) -> None:
        model = self.model
        floor = model.progress_floor
        progress = state.progress().update
        model.check_progress(floor, progress)
        if progress == -math.inf:
            return
        at = None if progress == math.inf else int(progress) - 1
        rows = state.snapshot(at).to_pylist()
        check_snapshot(model, {row["key"]: (row["time"], row["value"]) for row in rows}, progress)
        self.say(f"read a snapshot of {model.name} below {progress}")


def check_answers(model: StateModel, answers: Sequence[tuple[int, int, int | None]]) -> None:
    """Each is a key, a time below U, and the value that the pond gives."""
    for key, at, value in answers:
        if not at < model.progress_max:
            raise Wrong(f"{model.name} answered {at}, and U is {model.progress_max} at most", [key])
        if value != model.value_at(key, at):
            raise Wrong(f"{model.name}[{key}] as of {at} is {value}, not {model.value_at(key, at)}", [key])


def check_snapshot(model: StateModel, rows: dict[int, tuple[int, int]], below: Progress) -> None:
    expected = model.snapshot(below)
    differ = [key for key in range(KEYS) if rows.get(key) != expected.get(key)]
    if differ:
        raise Wrong(
            f"{model.name} below {below} holds {[(key, rows.get(key)) for key in differ]},"
            f" not {[(key, expected.get(key)) for key in differ]}",
            differ,
        )


def table_of(rows: Sequence[Row]) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else ([], [], [], [])
    return pa.table(
        {name: pa.array(column, pa.int64()) for name, column in zip("ktvs", columns, strict=True)}
    )


def _brief(rows: Sequence[Row]) -> str:
    return " ".join(f"{row.key}@{row.time}={row.value}" for row in rows)
