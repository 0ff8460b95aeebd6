"""One history, driven through a pond and through the oracle; and the picture by which the two are compared."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import pyarrow as pa
import pytest

import millpond.testing.local
from millpond.code import rules
from millpond.container.service import ContainerService
from millpond.durable.files import Files
from millpond.errors import BelowFetchProgress, RowsWaiting, Unavailable
from millpond.ops.update import Update as UpdateOperator
from millpond.testing import Oracle
from millpond.testing.local import LocalPond

ROOT = "/pond"
SLICES = 5
LONG_MIN, LONG_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True)
class Kind:
    """A State of the tests: its types, the keys and times it is asked for, and the rules that fit its values."""

    key: str
    value: str
    keys: tuple[Any, ...]
    times: tuple[int, ...]
    rules: tuple[str, ...]

    @property
    def key_type(self) -> pa.DataType:
        return pa.int64() if self.key == "long" else pa.string()

    @property
    def value_type(self) -> pa.DataType:
        return pa.int64() if self.value == "long" else pa.string()


KINDS = {
    "clicks": Kind(
        key="long",
        value="long",
        keys=(LONG_MIN, -1, 0, 1, 2, 3, LONG_MAX, 1000),
        times=tuple(range(-1, 15)),
        rules=("latest", "values", "count", "total", "smallest", "largest"),
    ),
    "ads": Kind(
        key="string",
        value="string",
        keys=("", "a", "b", "c", "long enough to leave the first cache line" * 2, "ü", "never there"),
        times=tuple(range(-1, 15)),
        rules=("latest", "values", "count"),
    ),
}

Rows = Sequence[tuple[Any, int, Any]]


def table_of(state: str, rows: Rows) -> pa.Table:
    kind = KINDS[state]
    keys, times, values = zip(*rows, strict=True) if rows else ((), (), ())
    return pa.table(
        {
            "k": pa.array(keys, kind.key_type),
            "t": pa.array(times, pa.int64()),
            "v": pa.array(values, kind.value_type),
        }
    )


class Model:
    """What the pond must hold: an oracle for each State, and how many rows of each updater came late."""

    def __init__(self) -> None:
        self.states: dict[str, Oracle] = {}
        self.late: dict[tuple[str, str], int] = {}

    def copy(self) -> Model:
        return copy.deepcopy(self)


class World:
    """The pond, and the files it stands on. `start` again is a new process on the same files."""

    def __init__(self, files: Files, root: str = ROOT) -> None:
        self.files = files
        self.root = root
        self.pond: LocalPond
        self._operators: dict[tuple[str, str], UpdateOperator] = {}

    def start(self, containers: int) -> None:
        self._operators.clear()
        self.pond = LocalPond(self.files, root=self.root, containers=containers, slices=SLICES)

    def watch(self) -> None:
        """What the coordinator does when it hears that a container has ended; nothing where all serve."""
        for container in sorted(self.pond.hosting.services):
            self.pond.coordinator.recover(container)

    def operator(self, state: str, updater: str, delay: int, late: str = "drop") -> UpdateOperator:
        if (state, updater) not in self._operators:
            self._operators[state, updater] = self.pond.state(state).update(
                key="k", at="t", value="v", delay=delay, late=late, name=updater
            )
        return self._operators[state, updater]


# Steps: each takes effect in the pond as one, or not at all


class Step(Protocol):
    def on_pond(self, world: World) -> None: ...

    def on_model(self, model: Model) -> None: ...


@dataclass(frozen=True)
class Start:
    containers: int

    def on_pond(self, world: World) -> None:
        world.start(self.containers)

    def on_model(self, model: Model) -> None:
        pass


@dataclass(frozen=True)
class OpenState:
    state: str

    def on_pond(self, world: World) -> None:
        world.pond.state(self.state, key=KINDS[self.state].key, value=KINDS[self.state].value)

    def on_model(self, model: Model) -> None:
        model.states.setdefault(self.state, Oracle())


@dataclass(frozen=True)
class Register:
    state: str
    updater: str
    delay: int

    def on_pond(self, world: World) -> None:
        world.operator(self.state, self.updater, self.delay)

    def on_model(self, model: Model) -> None:
        model.states[self.state].register_updater(self.updater)
        model.late.setdefault((self.state, self.updater), 0)


@dataclass(frozen=True)
class Update:
    state: str
    updater: str
    delay: int
    epoch: int
    rows: tuple[tuple[Any, int, Any], ...]

    def on_pond(self, world: World) -> None:
        operator = world.operator(self.state, self.updater, self.delay)
        operator(table_of(self.state, self.rows), self.epoch)

    def on_model(self, model: Model) -> None:
        receipt = model.states[self.state].update(self.updater, self.epoch, self.rows, delay=self.delay)
        model.late[self.state, self.updater] += receipt.late

    def with_other_rows(self) -> Update:
        """As a source may give them that could not say what it sent: other keys (so other slices), other values."""
        keys = KINDS[self.state].keys
        turned = {key: keys[(place + 1) % len(keys)] for place, key in enumerate(keys)}
        other = tuple((turned[key], time, value) for key, time, value in self.rows[:-1])
        return replace(self, rows=other)


@dataclass(frozen=True)
class Report:
    """Of a fetcher; the first one, with -inf, lets it exist."""

    state: str
    fetcher: str
    fetch: float

    def on_pond(self, world: World) -> None:
        world.pond.state(self.state).report(self.fetcher, fetch=self.fetch)

    def on_model(self, model: Model) -> None:
        model.states[self.state].register_fetcher(self.fetcher)
        model.states[self.state].report(self.fetcher, fetch=self.fetch)


@dataclass(frozen=True)
class Finish:
    state: str
    updater: str

    def on_pond(self, world: World) -> None:
        world.pond.state(self.state).finish(self.updater)

    def on_model(self, model: Model) -> None:
        model.states[self.state].finish(self.updater)


@dataclass(frozen=True)
class Checkpoint:
    def on_pond(self, world: World) -> None:
        world.pond.checkpoint()

    def on_model(self, model: Model) -> None:
        pass


@dataclass(frozen=True)
class Upkeep:
    def on_pond(self, world: World) -> None:
        for service in list(world.pond.hosting.services.values()):
            while not service.maintain():
                pass

    def on_model(self, model: Model) -> None:
        pass


def history(containers: int, then: int) -> list[Step]:
    """Two updaters each on two States; both progresses move, both compactions run, the pond is reopened once."""
    long = "long enough to leave the first cache line" * 2

    def clicks(updater: str, epoch: int, *rows: tuple[int, int, int | None]) -> Update:
        return Update("clicks", updater, {"web": 3, "app": 0}[updater], epoch, rows)

    def ads(updater: str, epoch: int, *rows: tuple[str, int, str | None]) -> Update:
        return Update("ads", updater, {"feed": 2, "desk": 0}[updater], epoch, rows)

    return [
        Start(containers),
        OpenState("clicks"),
        Register("clicks", "web", 3),
        OpenState("ads"),
        Register("clicks", "app", 0),
        Register("ads", "feed", 2),
        Register("ads", "desk", 0),
        # Out of order, the same key and time twice, both ends of int64.
        clicks(
            "web", 0, (1, 5, 10), (1, 3, 11), (2, 4, 12), (1, 3, 13), (LONG_MIN, 1, 14), (LONG_MAX, 2, None)
        ),
        ads("feed", 0, ("a", 4, "A4"), ("", 1, "E1"), ("b", 2, None), (long, 3, long), ("a", 1, "A1")),
        clicks("app", 0, (2, 2, 20), (3, 4, 21), (-1, 0, 22)),
        ads("desk", 0, ("ü", 3, "U3"), ("a", 2, "A2"), ("c", 0, "")),
        Checkpoint(),
        # Time 1 is late for `web`, whose watermark is 2; a time that another updater has written already.
        clicks("web", 1, (2, 8, 30), (3, 1, 31), (3, 4, 32), (0, 7, 33)),
        ads("feed", 1, ("a", 7, "A7"), ("b", 6, "B6"), ("b", 5, "B5")),
        Report("clicks", "views", -math.inf),
        Report("clicks", "views", 4),
        Upkeep(),
        clicks("app", 1, (1, 9, 40), (1, 7, 41), (2, 8, 42)),
        Start(then),
        ads("desk", 1, ("b", 6, "b6"), ("ü", 8, "U8")),
        Report("ads", "views", -math.inf),
        Report("ads", "views", 3),
        # Still below F, but not late: only the newest below F has to stay.
        clicks("web", 2, (2, 11, 50), (1, 12, 51), (0, 5, 52)),
        Checkpoint(),
        ads("feed", 2, ("a", 11, "A11"), ("c", 9, "C9"), (long, 10, "short")),
        clicks("app", 2),
        Finish("clicks", "web"),
        Upkeep(),
        clicks("app", 3, (1, 13, 60), (1, 13, 61), (LONG_MAX, 13, 62), (3, 10, 63)),
        Checkpoint(),
        Upkeep(),
        ads("desk", 2, ("a", 12, "A12")),
        Checkpoint(),
        Upkeep(),
        Finish("ads", "feed"),
        Finish("ads", "desk"),
        Finish("clicks", "app"),
    ]


def models_of(steps: Iterable[Step]) -> list[Model]:
    """The model before the first step, after the first, and so on."""
    models = [Model()]
    for step in steps:
        models.append(models[-1].copy())
        step.on_model(models[-1])
    return models


# The picture: everything that a user could see, and what is held for later


def picture_of_model(model: Model) -> dict[str, Any]:
    return {name: _state_of_model(name, model) for name in model.states}


def brief_of_model(name: str, model: Model) -> dict[str, Any]:
    """What needs no question: progress, and the versions held."""
    oracle = model.states[name]
    return {
        "progress": (oracle.update_progress, oracle.fetch_progress),
        "updaters": {name: updater.progress for name, updater in oracle.updaters.items()},
        "fetchers": dict(oracle.fetchers),
        "late": {updater: model.late[name, updater] for updater in oracle.updaters},
        "held": {
            key: _without_compactable(versions, oracle.fetch_progress)
            for key, versions in oracle.versions.items()
        },
    }


def _state_of_model(name: str, model: Model) -> dict[str, Any]:
    oracle, kind = model.states[name], KINDS[name]
    low, high = oracle.fetch_progress, oracle.update_progress
    return {
        **brief_of_model(name, model),
        "snapshots": {
            at: answer_or_error(lambda at=at: oracle.snapshot(at)) for at in (None, *kind.times[::4])
        },
        "as of": [oracle.fetch_latest(key, at) if at < high else None for key, at in _asked(kind, low)],
        **{
            rule: [oracle.fetch_range(key, lo, hi, rule) for key, lo, hi in _ranges(kind, low, high)]
            for rule in kind.rules[1::2]
        },
    }


def picture_of_pond(pond: LocalPond) -> dict[str, Any]:
    return {name: _state_of_pond(name, pond) for name in pond.states()}


def brief_of_pond(name: str, pond: LocalPond) -> dict[str, Any]:
    progress = pond.state(name).progress()
    return {
        "progress": (progress.update, progress.fetch),
        "updaters": progress.updaters,
        "fetchers": progress.fetchers,
        "late": progress.late,
        "held": {
            key: _without_compactable(versions, progress.fetch)
            for key, versions in held_versions(pond, name).items()
        },
    }


def _state_of_pond(name: str, pond: LocalPond) -> dict[str, Any]:
    state, kind = pond.state(name), KINDS[name]
    progress = state.progress()

    def snapshot(at: int | None) -> dict[Any, tuple[int, Any]]:
        rows = state.snapshot(at).to_pylist()
        newest = {row["key"]: (row["time"], row["value"]) for row in rows}
        assert len(newest) == len(rows), "a key comes twice in a snapshot"
        return newest

    asked = _asked(kind, progress.fetch)
    keys, times = zip(*asked, strict=True) if asked else ((), ())
    as_of = state.fetch(key="k", at="t", into="answer").now(
        pa.table({"k": pa.array(keys, kind.key_type), "t": pa.array(times, pa.int64())}), waiting="null"
    )
    ranges = _ranges(kind, progress.fetch, progress.update)
    keys, lows, highs = zip(*ranges, strict=True) if ranges else ((), (), ())
    questions = pa.table(
        {
            "k": pa.array(keys, kind.key_type),
            "lo": pa.array(lows, pa.int64()),
            "hi": pa.array(highs, pa.int64()),
        }
    )

    def ranged(rule: str) -> list[Any]:
        fetch = state.fetch(key="k", between=("lo", "hi"), into="answer", rule=getattr(rules, rule)())
        answers: list[Any] = fetch.now(questions)["answer"].to_pylist()
        return answers

    return {
        **brief_of_pond(name, pond),
        "snapshots": {at: answer_or_error(lambda at=at: snapshot(at)) for at in (None, *kind.times[::4])},
        "as of": as_of["answer"].to_pylist(),
        **{rule: ranged(rule) for rule in kind.rules[1::2]},
    }


def held_versions(pond: LocalPond, name: str) -> dict[Any, list[tuple[int, Any]]]:
    """All versions that the containers hold, final or not: what a crash that comes later must bring back."""
    found: dict[Any, list[tuple[int, Any]]] = {}
    for service in pond.hosting.services.values():
        for held in service.core.holding(name).slices.values():
            batch = held.store.export()
            for raw, time, value in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                found.setdefault(raw.decode() if isinstance(raw, bytes) else raw, []).append((time, value))
    for key, versions in found.items():
        times = [time for time, _ in versions]
        assert times == sorted(set(times)), f"{name}: versions of {key!r} at {times}"
    return found


def _without_compactable(versions: Sequence[tuple[int, Any]], low: float) -> list[tuple[int, Any]]:
    """What compaction may not touch. Anything below the newest below F may be there or not."""
    below = [version for version in versions if version[0] < low]
    return below[-1:] + [version for version in versions if version[0] >= low]


def _asked(kind: Kind, low: float) -> list[tuple[Any, int]]:
    return [(key, at) for key in kind.keys for at in kind.times if at >= low]


def _ranges(kind: Kind, low: float, high: float) -> list[tuple[Any, int, int]]:
    return [
        (key, lo, hi)
        for key in kind.keys
        for lo, hi in itertools.product(kind.times[::3], kind.times[::2])
        if low <= lo + 1 and lo <= hi < high
    ]


def answer_or_error(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except (BelowFetchProgress, RowsWaiting) as error:
        return type(error).__name__


def differences(expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    """In words, one for each part of the pictures that is not the same."""
    if sorted(expected) != sorted(actual):
        return [f"states: expected {sorted(expected)}, found {sorted(actual)}"]
    return [
        f"{state}, {part}: expected {_short(expected[state][part])}, found {_short(actual[state][part])}"
        for state in expected
        for part in expected[state]
        if expected[state][part] != actual[state][part]
    ]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 600 else text[:600] + "..."


def check_same(expected: dict[str, Any], pond: LocalPond, note: str = "") -> None:
    found = differences(expected, picture_of_pond(pond))
    assert not found, "\n".join([note, *found])
    pond.validate()


class ContainerDied(BaseException):
    """Not an `Exception`: nothing in the container may handle its own death."""


class MortalContainer(ContainerService):
    """A container that a crash point can end alone, by the action `die`.

    Nothing of it runs on; who called it sees that the connection broke. As with a killed process, the machine
    lives, and with it the files.
    """

    running: ClassVar[list[MortalContainer]] = []
    dead = False

    def call(self, message: Any) -> Any:
        return self._alive(lambda: super(MortalContainer, self).call(message))

    def exchange(self, message: Any, batches: Any, reads_only: bool = False) -> Any:
        return self._alive(lambda: super(MortalContainer, self).exchange(message, batches, reads_only))

    def read(self, message: Any) -> Any:
        return self._alive(lambda: super(MortalContainer, self).read(message))

    def maintain(self) -> bool:
        try:
            return self._alive(lambda: super(MortalContainer, self).maintain())
        except Unavailable:
            return True

    def _alive(self, work: Callable[[], Any]) -> Any:
        if not self.dead:
            self.running.append(self)
            try:
                return work()
            except ContainerDied:
                self.dead = True
            finally:
                self.running.pop()
        raise Unavailable("the connection broke", address="local")


def containers_of(world: World) -> list[MortalContainer]:
    return [
        service for service in world.pond.hosting.services.values() if isinstance(service, MortalContainer)
    ]


def die(_point: str) -> None:
    """The container that stands at the point ends; where none does, nothing happens."""
    if MortalContainer.running:
        raise ContainerDied


@contextmanager
def mortal_containers() -> Iterator[None]:
    """Ponds opened within the block have such containers, and nobody waits between attempts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(millpond.testing.local, "ContainerService", MortalContainer)
        yield
