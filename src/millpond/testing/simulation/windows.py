"""A window in the simulated pond, fed epoch by epoch, and what each epoch must give.

Rows are drawn before anything runs. Sources take turns in an order that is drawn, too, so that the oracle tells what every
epoch fires; or each goes its own way, and the oracle tells what all of them fire together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple, cast

import pyarrow as pa

from millpond.code import windows as code
from millpond.code.rules import count, total
from millpond.code.windows import WindowCode
from millpond.errors import OutputsGone
from millpond.ops.committing import commit_staged, turn_of
from millpond.ops.intake import Part
from millpond.ops.window import FiringSource
from millpond.pond.pond import Pond
from millpond.testing import window_aggregates as aggregates
from millpond.testing import window_kinds as kinds
from millpond.testing.simulation.apps import App, Chronicle, Wrong
from millpond.testing.simulation.pond import SimPond
from millpond.testing.simulation.scheduler import Process
from millpond.testing.windows import Result, WindowOracle
from millpond.wire.base import LOCAL_QUERY
from millpond.wire.epochs import EpochPlan, Receipt
from millpond.wire.windows import Emit

KEYS = 6
SPAN = 10
"""How far times go on from one epoch to the next."""
DRAWN = 0.4
"""Of seeds, so many have a window."""
STAYING = 0.5
"""Of those, so many fire more than once, where they may."""
LOOKING, REPLAYING, CHECKPOINTING = 0.4, 0.25, 0.1
WATCHED = 0.5
"""Of those whose sources take turns, so many are watched meanwhile."""
BURST, WATCH_TIMES = 12, 20
EPOCHS_MIN = 5


class Row(NamedTuple):
    key: int
    time: int
    value: int


class Turn(NamedTuple):
    """An epoch of one source."""

    source: str
    number: int
    rows: list[Row]


class Shape(NamedTuple):
    """A window as the pond and as the oracle know it. One that is `aligned` gives the same whichever source is first."""

    window: WindowCode
    kind: kinds.Kind
    aligned: bool


SHAPES: dict[str, Shape] = {
    "tumbling": Shape(code.tumbling(15), kinds.tumbling(15), True),
    "sliding": Shape(code.sliding(20, 10), kinds.sliding(20, 10), True),
    "sliding unevenly": Shape(code.sliding(25, 10), kinds.sliding(25, 10), True),
    "session": Shape(code.session(8), kinds.session(8), False),
    "session cut": Shape(code.session(12, longest=30), kinds.session(12, longest=30), False),
    "counted": Shape(code.counted(3), kinds.counted(3), False),
    "counted or after": Shape(code.counted(3, or_after=25), kinds.counted(3, or_after=25), False),
}


def reach(v: int) -> int:
    return 3 + v % 8


def is_last(v: int) -> bool:
    return v > 15


def assign(time: int) -> list[tuple[int, int]]:
    if time % 7 == 0:
        return []
    start = time // 15 * 15
    return [(start, start + 15), (start + 5, start + 40)]


FURTHER: dict[str, Shape] = {
    "everything": Shape(code.everything(), kinds.everything(), True),
    "assigned": Shape(code.windows(assign), kinds.custom(assign), True),
    "session of own gaps": Shape(code.session(reach), kinds.session(lambda row: reach(row["v"])), False),
    "session that ends": Shape(
        code.session(8, ends_when=is_last),
        kinds.session(8, ends_when=lambda row: is_last(row["v"])),
        False,
    ),
}
CELLS = (
    {"rows": count(), "total": total("v"), "mean": code.mean("v"), "top": code.top(2, "v")},
    {
        "rows": aggregates.count(),
        "total": aggregates.total("v"),
        "mean": aggregates.mean("v"),
        "top": aggregates.top(2, "v"),
    },
)
WHOLE = (
    {"rows": count(), "median": code.median("v"), "all": code.collect("v")},
    {"rows": aggregates.count(), "median": aggregates.median("v"), "all": aggregates.collect("v")},
)


class Firing(NamedTuple):
    """How often a window gives its results."""

    lateness: int = 0
    emit: Emit = "close"


ONCE = Firing()


class WindowModel:
    """What every epoch of a window gives, and what is open after each."""

    def __init__(
        self,
        name: str,
        shape: Shape,
        aggregated: tuple[dict[str, Any], dict[str, Any]],
        delays: dict[str, int],
        turns: list[Turn],
        *,
        apart: bool,
        to_sink: bool,
        firing: Firing = ONCE,
    ) -> None:
        self.name = name
        self.shape = shape
        self.aggregated = aggregated
        self.delays = delays
        self.turns = turns
        self.apart = apart
        """Whether each source goes its own way: then what one epoch gives hangs on chance."""
        self.to_sink = to_sink
        """Whether what fires goes to a function, or comes back."""
        self.firing = firing
        self.ids: dict[int, int] = {}
        """Of updates of sessions: the pond's own id by the oracle's."""
        self.begun = 0
        self.finishing = False
        self.acknowledged = dict.fromkeys(delays, 0)
        self.results: dict[tuple[str, int], list[Result]] = {}
        """What each epoch gave, and below zero what finishing did."""
        self._compute()

    @property
    def kind_name(self) -> str:
        updates = " with updates" if self.firing.emit == "update" else ""
        return self.shape.window.kind + updates

    def oracle(self) -> Any:
        return WindowOracle(
            self.shape.kind, self.aggregated[1], key="k", sources=self.delays, **self.firing._asdict()
        )

    def values(self, source: str, row: Row) -> dict[str, int]:
        """Of a row, as the oracle has them."""
        return {"v": row.value}

    def open_of(self, oracle: Any) -> list[Result]:
        return cast("list[Result]", oracle.now())

    def resident(self, pond: Pond) -> Any:
        return pond.window(
            self.name,
            key="k long",
            window=self.shape.window,
            aggregate=self.aggregated[0],
            value="v long",
            **self.firing._asdict(),
        )

    def source(self, resident: Any, name: str) -> FiringSource:
        return cast(FiringSource, resident.over(key="k", at="t", delay=self.delays[name], name=name))

    def open_in(self, resident: Any) -> list[Result]:
        """What is open."""
        return cast("list[Result]", resident.now().to_pylist())

    def _compute(self) -> None:
        oracle = self.oracle()
        self.expected: list[list[Result]] = []
        self.open: list[list[Result]] = [[]]
        """Before the first turn, and after each."""
        for turn in self.turns:
            rows = [(row.key, row.time, self.values(turn.source, row)) for row in turn.rows]
            self.expected.append(_sorted(oracle.epoch(turn.number, rows, turn.source).rows))
            self.open.append(self.open_of(oracle))
        self.left = _sorted(oracle.finish().rows)
        """What a finish gives."""

    def cut(self) -> None:
        """The epochs that have begun stay, and some of each source: what is lost shows in windows that fire later."""
        self.turns[:] = [
            turn for turn in self.turns if turn.number < max(EPOCHS_MIN, self.acknowledged[turn.source] + 1)
        ]
        self._compute()

    @property
    def done(self) -> int:
        return sum(self.acknowledged.values())

    def take(self, source: str, number: int, rows: list[Result]) -> None:
        """What a turn gave: one that comes again must give the same."""
        rows, keys = _sorted(rows), {row["k"] for row in rows}
        before = self.results.setdefault((source, number), rows)
        if before != rows:
            raise Wrong(f"turn {number} of {source} gave {rows}, and before that {before}", keys)
        if number >= 0 and not self.apart:
            place = next(
                p for p, turn in enumerate(self.turns) if (turn.source, turn.number) == (source, number)
            )
            if _nameless(rows) != _nameless(self.expected[place]):
                raise Wrong(f"epoch {number} of {source} gave {rows}, not {self.expected[place]}", keys)
            self._check_ids(rows, self.expected[place])

    def _check_ids(self, rows: list[Result], expected: list[Result]) -> None:
        """The same session has the same id for ever, whichever that is, and no other session has it."""
        for row, truth in zip(rows, expected, strict=True):
            if "session_id" in truth:
                own = self.ids.setdefault(truth["session_id"], row["session_id"])
                if own != row["session_id"] or list(self.ids.values()).count(own) > 1:
                    raise Wrong(f"{row} has an id of another session, not {own}", {row["k"]})

    def check_open(self, since: int, rows: list[Result]) -> None:
        """What is open is as one epoch left it, of all keys: none that is older than those acknowledged, nor to come."""
        allowed = [_by_key(_nameless(each)) for each in self.open[since : self.begun + 1]]
        seen = _by_key(_nameless([{n: v for n, v in row.items() if n != "retracted"} for row in rows]))
        if seen in allowed:
            return
        for key in range(KEYS):
            told = [each.get(key, []) for each in allowed]
            if seen.get(key, []) not in told:
                raise Wrong(f"open of {self.name}[{key}] is {seen.get(key, [])}, not one of {told}", [key])
        raise Wrong(f"open of {self.name} is {seen}: some of one epoch, some of another of {allowed}")

    def check_finished(self) -> None:
        """All that ever fired, each window once."""
        fired = _nameless(row for rows in self.results.values() for row in rows)
        expected = _nameless([*(row for rows in self.expected for row in rows), *self.left])
        if fired != expected:
            twice = [row for row in fired if row not in expected or fired.count(row) > expected.count(row)]
            lost = [row for row in expected if row not in fired]
            keys = {row["k"] for row in [*twice, *lost]}
            raise Wrong(f"{self.name} fired {twice} too often, or wrongly, and did not fire {lost}", keys)


def draw_firing(chance: Random, shape: Shape) -> Firing:
    """Counted windows, and those of all time, do not stay."""
    if chance.random() >= STAYING:
        return ONCE
    never_late = shape.window.kind in ("counted", "everything")
    lateness = 0 if never_late else chance.choice((0, SPAN, 4 * SPAN))
    return Firing(lateness, chance.choice(("close", "update")))


def draw_turns(chance: Random, order: Sequence[str], reach: int) -> list[Turn]:
    """Epochs of sources in this order; rows come up to `reach` late."""
    taken: set[tuple[int, int]] = set()
    counts = dict.fromkeys(order, 0)
    turns: list[Turn] = []
    value = 0
    for source in order:
        rows = []
        for _ in range(chance.choice((0, 2, 5, 10))):
            value += 1
            key, time = chance.randrange(KEYS), counts[source] * SPAN + chance.randint(-reach, SPAN)
            # Of two rows of one time the order would hang on their partitions.
            if (key, time) not in taken:
                taken.add((key, time))
                rows.append(Row(key, time, value * 7 % 20))
        turns.append(Turn(source, counts[source], rows))
        counts[source] += 1
    return turns


def draw_window(
    chance: Random, name: str, staying: Random | None = None, shapes: Mapping[str, Shape] = SHAPES
) -> WindowModel:
    """With `staying` it may fire more than once."""
    shape = shapes[chance.choice(sorted(shapes))]
    sources = [f"{name}_source{number}" for number in range(chance.choice((1, 1, 2)))]
    delays = {source: chance.choice((0, SPAN)) for source in sources}
    epochs = chance.randint(EPOCHS_MIN, 12 // len(sources))
    order = [source for source in sources for _ in range(epochs)]
    chance.shuffle(order)
    reach = chance.choice((0, SPAN, 3 * SPAN))
    if len(sources) > 1 and shape.window.kind in ("sliding", "assigned"):
        # A row that is late for some of its windows goes into them all the same while another source holds them open.
        delays = dict.fromkeys(sources, reach)
    turns = draw_turns(chance, order, reach)
    apart = shape.aligned and len(sources) > 1 and chance.random() < 0.5
    return WindowModel(
        name,
        shape,
        chance.choice((CELLS, WHOLE)),
        delays,
        turns,
        apart=apart,
        to_sink=chance.random() < 0.5,
        # What fires more than once hangs on the order of epochs.
        firing=ONCE if apart or staying is None else draw_firing(staying, shape),
    )


class WindowFeeder(App):
    """Sends the epochs of some sources of a window, one after the other; in the end it finishes them."""

    def __init__(
        self,
        pond: SimPond,
        chronicle: Chronicle,
        name: str,
        model: WindowModel,
        sources: Sequence[str],
        chance: Random,
        pause_s: float,
    ) -> None:
        super().__init__(pond, chronicle, name)
        self.model = model
        self._mine = sources
        self._chance = chance
        self._pause_s = pause_s

    def work(self, pond: Pond, process: Process) -> None:
        model = self.model
        resident = model.resident(pond)
        # All of them, whoever sends: without one that is still to come, the watermark would go too far.
        sources = {name: self._source(resident, name) for name in model.delays}
        while (turn := self._next()) is not None:
            self.pause(process, self._pause_s)
            if not model.apart and self._chance.random() < LOOKING:
                since = model.done
                model.check_open(since, model.open_in(resident))
            if self._chance.random() < REPLAYING:
                self._replay(pond, sources)
            if self._chance.random() < CHECKPOINTING:
                pond.checkpoint()
            self._send(pond, sources[turn.source], turn)
            self.linger(process, self._chance, killed=0.3)
            model.acknowledged[turn.source] = turn.number + 1
        # One that goes its own way may finish while others go on; what it fired comes back as long as nothing new does.
        while not (model.apart and model.to_sink) and model.done < len(model.turns):
            self.pause(process, self._pause_s)
        model.finishing = True
        for name in self._mine:
            self._finish(sources[name])

    def _next(self) -> Turn | None:
        """Of its own sources, the first epoch that was not acknowledged."""
        mine = (turn for turn in self.model.turns if turn.source in self._mine)
        return next((turn for turn in mine if turn.number >= self.model.acknowledged[turn.source]), None)

    def _source(self, resident: Any, name: str) -> FiringSource:
        source = self.model.source(resident, name)
        if self.model.to_sink:
            source.to(lambda rows, number: self.model.take(name, number, rows.to_pylist()))
        return source

    def _send(self, pond: Pond, source: FiringSource, turn: Turn) -> None:
        keys = {row.key for row in turn.rows}
        if not self.model.apart:
            place = self.model.turns.index(turn)
            self.model.begun = max(self.model.begun, place + 1)
        self.say(f"begins epoch {turn.number} of {source.name}: {_brief(turn.rows)}", keys)
        fired = commit(pond, source, turn, self._chance)
        self.say(f"epoch {turn.number} of {source.name} fired {fired}", keys)
        self.model.take(source.name, turn.number, fired)

    def _replay(self, pond: Pond, sources: dict[str, FiringSource]) -> None:
        """An epoch that was acknowledged is asked for again. The newest of a source is always kept."""
        done = [turn for turn in self.model.turns if turn.number < self.model.acknowledged[turn.source]]
        if done:
            turn = self._chance.choice(done[-3:])
            replay(pond, self.model, sources[turn.source], turn, self._chance)

    def _finish(self, source: FiringSource) -> None:
        model = self.model
        self.say(f"finishes {source.name}")
        rows = source.finish()
        if rows is not None:
            # Asked again, it gives the same: whoever is killed here asks again.
            model.take(source.name, -1, rows.to_pylist())
        self.say(f"{source.name} has finished")


class WindowWatcher(App):
    """Looks at what is open again and again, while epochs are applied here and there."""

    def __init__(
        self, pond: SimPond, chronicle: Chronicle, name: str, model: WindowModel, pause_s: float
    ) -> None:
        super().__init__(pond, chronicle, name)
        self.model = model
        self.reads = 0
        self.stopping = False
        self._pause_s = pause_s

    def work(self, pond: Pond, process: Process) -> None:
        model = self.model
        resident = model.resident(pond)
        while not self.stopping:
            # Most of the time no epoch is on its way, and there is nothing to be seen.
            for _ in range(WATCH_TIMES if self.reads % BURST == 0 else 0):
                self.pause(process, self._pause_s / WATCH_TIMES)
                if model.begun > model.done:
                    break
            since = model.done
            rows = model.open_in(resident)
            if model.finishing:
                return
            model.check_open(since, rows)
            self.reads += 1


def commit(pond: Pond, source: FiringSource, turn: Turn, chance: Random) -> list[Result]:
    """What an epoch fires, whose rows are staged by several tasks, some of them more than once."""
    client, wanted = pond._client, turn_of(turn.number)  # noqa: SLF001 - tasks stage by the client itself
    parts: list[list[Row]] = [[] for _ in range(chance.randint(1, 3))]
    for row in turn.rows:
        chance.choice(parts).append(row)
    tables = [_table(part) for part in parts]
    intake = source._intake(tables[0].schema)  # noqa: SLF001

    def stage(plan: EpochPlan) -> list[Receipt]:
        def task(number: int) -> Receipt:
            part = Part(LOCAL_QUERY, wanted, number)
            attempts = [
                intake.stage(client, tables[number], plan, part) for _ in range(chance.choice((1, 1, 1, 2)))
            ]
            return chance.choice(attempts)

        return client.runtime.map(task, list(range(len(tables))))

    planned = source._planned(intake, "long")  # noqa: SLF001
    commit_staged(client, intake, LOCAL_QUERY, wanted, stage, "long", planned, "continue")
    rows: list[Result] = source.fired_in(LOCAL_QUERY, wanted).to_pylist()
    return rows


def replay(pond: Pond, model: WindowModel, source: FiringSource, turn: Turn, chance: Random) -> None:
    is_newest = turn.number == model.acknowledged[turn.source] - 1
    try:
        model.take(turn.source, turn.number, commit(pond, source, turn, chance))
    except OutputsGone:
        if is_newest:
            raise


class WindowChecker(App):
    """Compares what is open, and what the newest epochs gave, when all is done."""

    def __init__(
        self, pond: SimPond, chronicle: Chronicle, models: Iterable[WindowModel], chance: Random
    ) -> None:
        super().__init__(pond, chronicle, "window checker")
        self._models = models
        self._chance = chance

    def work(self, pond: Pond, process: Process) -> None:
        for model in self._models:
            resident = model.resident(pond)
            open_now = model.open_in(resident)
            if open_now:
                raise Wrong(f"{model.name} has finished, and {open_now} are open")
            model.check_finished()
            for name, epochs in model.acknowledged.items():
                source = model.source(resident, name)
                if not model.to_sink:
                    rows = source.finish()
                    assert rows is not None
                    model.take(name, -1, rows.to_pylist())
                newest = [turn for turn in model.turns if (turn.source, turn.number) == (name, epochs - 1)]
                for turn in newest:
                    replay(pond, model, source, turn, self._chance)


def _by_key(rows: Iterable[Result]) -> dict[int, list[Result]]:
    keys: dict[int, list[Result]] = {}
    for row in _sorted(rows):
        keys.setdefault(row["k"], []).append(row)
    return keys


def _sorted(rows: Iterable[Result]) -> list[Result]:
    return sorted(
        (dict(sorted(row.items())) for row in rows),
        key=lambda row: (row["k"], row.get("window_end", 0), repr(_without_id(row))),
    )


def _nameless(rows: Iterable[Result]) -> list[Result]:
    """Without the ids of sessions, which are the pond's own, and not those of the oracle."""
    return _sorted(map(_without_id, rows))


def _without_id(row: Result) -> Result:
    return {name: value for name, value in row.items() if name != "session_id"}


def _table(rows: Sequence[Row]) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else ([], [], [])
    return pa.table({name: pa.array(column, pa.int64()) for name, column in zip("ktv", columns, strict=True)})


def _brief(rows: Sequence[Row]) -> str:
    return " ".join(f"{row.key}@{row.time}={row.value}" for row in rows)
