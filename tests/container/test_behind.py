"""An owner that was stopped while its slices went elsewhere, and wakes up, answers nobody wrongly: whatever it is asked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import millpond as mp
from millpond.client.client import Client
from millpond.container.service import ContainerService
from millpond.pond.pond import Pond
from millpond.runtime import Serial
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.wire.connection import LocalConnection
from millpond.wire.house import Ping
from millpond.wire.questions import AskProgress
from millpond.wire.states import ReadSlices
from millpond.wire.windows import ReadOpen

sys.path.append(str(Path(__file__).resolve().parent.parent / "programs"))
from program_graphs import store

pytestmark = pytest.mark.filterwarnings("ignore::millpond.errors.RuleInterpreted")
SLICES = 2
KEYS = list(range(8))


@mp.transaction
def add(t: Any, k: int, v: int) -> None:
    t[k].x += v


class Scene:
    """Container 0 had all slices, was stopped, and relieved; then epochs came, and it wakes up. A client knows it as it was."""

    def __init__(self) -> None:
        self.pond = LocalPond(LossyFiles(), containers=2, slices=SLICES, backups=1)
        self.pond.coordinator.place([0] * SLICES)
        state = self.pond.state("s", key="long", value="long")
        self.feed = state.update(key="k", at="t", value="v", name="feed")
        table = self.pond.table("t", key="k long", value="x long", default={"x": 0}, group="g")
        self.adding = self.pond.transactions("adding", [table], {"add": add})
        window = self.pond.window("w", key="k long", window=mp.tumbling(1000), aggregate={"n": mp.count()})
        self.counting = window.over(key="k", at="t", name="feed")
        dedup = self.pond.dedup("d", key="k long")
        self.dropping = dedup.over(key="k", at="t", name="feed")
        self.calling = self.pond.program("p", store()).call("put", name="feed")
        self.epoch(0)
        for _ in range(4):
            self.pond.coordinator.maintain()
            self.pond.maintain()
        # One that was stopped is not reached, and does not end.
        self.before = self.pond._client.placement()
        self.zombie = self.stop()
        self.epoch(1)

    def client(self) -> Client:
        return Client(LocalConnection(self.pond.coordinator), self.pond.hosting.dial, Serial())

    def stop(self) -> ContainerService:
        hosting = self.pond.hosting
        service, address = hosting.services[0], hosting._current[0]
        connection = hosting._connections[address]
        self.pond.coordinator._containers.recover(0, broken=True)
        hosting._connections[address] = connection
        connection._handler = service
        return service

    def epoch(self, number: int) -> None:
        size = len(KEYS)
        rows = pa.table({"k": KEYS, "t": [number] * size, "v": [number] * size})
        self.feed(rows, number)
        self.adding(pa.table({"ts": [number] * size, "k": KEYS, "v": [1] * size}), number)
        self.counting(rows, number)
        self.dropping(rows, number)
        self.calling(pa.table({"key": KEYS, "value": [str(number)] * size}), number)

    def knows(self) -> None:
        """The stale client is told of progress, as by any answer of the coordinator; not where slices are."""
        client = self.stale._client
        for name in ("s", "g", "w", "d", "p"):
            client.call(AskProgress(name))
        assert client._placement is self.before


def newest(pond: Pond, keys: list[int]) -> list[Any]:
    """Asked without word from the coordinator, whose answer would tell how many epochs there are."""
    asking = pond.state("s").fetch(key="k", at="t", into="v", rule=mp.latest())._asking
    questions = asking.questions(pa.table({"k": keys, "t": [10] * len(keys)}), "long")
    answers: list[Any] = asking.ask(pond._client, questions)[0].to_pylist()
    return answers


READS: dict[str, Callable[[Pond], Any]] = {
    "a state": lambda pond: newest(pond, KEYS),
    "slices of a state": lambda pond: pond._client.read(lambda some: ReadSlices("s", 10, some)).to_pylist(),
    "rows of a table": lambda pond: pond.table("t").read(KEYS).to_pylist(),
    "a table": lambda pond: pond.table("t").snapshot().to_pylist(),
    "a window": lambda pond: pond._client.read(lambda some: ReadOpen("w", some)).sort_by("k").to_pylist(),
    "keys of a window": lambda pond: pond.window("w").now(KEYS).sort_by("k").to_pylist(),
    "a dedup": lambda pond: pond.dedup("d").dropped(),
    "a program": lambda pond: pond.program("p", store()).get(key=3),
    "entries of a program": lambda pond: pond.program("p", store()).entries("kept"),
}


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_an_owner_that_is_behind_is_found_out_by_whoever_knows_better(scene: Scene) -> None:
    """Its lease holds, as far as it knows. Nobody is asked for this but whom a reader asks anyway."""
    for name, read in READS.items():
        wanted = read(scene.pond)
        scene.stale = Pond(scene.client(), "local", None)
        scene.stale._client._placement = scene.before
        # What asks the coordinator first knows better by itself.
        assert (read(scene.stale) == wanted) == (name == "keys of a window"), name
        scene.stale._client._placement = scene.before
        scene.knows()
        assert read(scene.stale) == wanted, name


def test_an_owner_without_a_lease_answers_nobody_at_all(scene: Scene) -> None:
    """Who asks does not know better. One cannot tell from the other what it has missed."""
    scene.zombie.call(Ping(lease_s=1.0))
    scene.zombie._runtime.sleep(2.0)
    for name, read in READS.items():
        wanted = read(scene.pond)
        scene.stale = Pond(scene.client(), "local", None)
        scene.stale._client._placement = scene.before
        assert read(scene.stale) == wanted, name


def test_an_owner_that_has_not_heard_that_a_resident_was_made_anew(scene: Scene) -> None:
    """It has as many epochs as the new one, of the one that was forgotten, and its lease holds as far as it knows."""
    pond = scene.pond
    stale = scene.stale = Pond(scene.client(), "local", None)
    stale._client._placement = scene.before
    scene.knows()
    for was in (pond.state("s"), pond.table("t"), pond.window("w")):
        pond.forget(was)
    state = pond.state("s", key="long", value="long")
    table = pond.table("t", key="k long", value="x long", default={"x": 0}, group="g")
    window = pond.window("w", key="k long", window=mp.tumbling(1000), aggregate={"n": mp.count()})
    rows = pa.table({"k": [1], "t": [0], "v": [77]})
    state.update(key="k", at="t", value="v", name="feed")(rows, 0)
    adding = pond.transactions("adding", [table], {"add": add})
    adding(pa.table({"ts": [0], "k": [1], "v": [77]}), 0)
    window.over(key="k", at="t", name="feed")(rows, 0)
    for name in ("a state", "slices of a state", "rows of a table", "a table", "a window"):
        read, wanted = READS[name], READS[name](pond)
        assert "77" in str(wanted) or name == "a window"
        stale._client._placement = scene.before
        for resident in ("s", "g", "w"):
            stale._client.call(AskProgress(resident))
        assert read(stale) == wanted, name
    # Who knows of an earlier one only is answered of the one that there is.
    early = Pond(scene.client(), "local", None)
    early._client.placement()
    early._client._seen["s"] = (1, 1000)
    assert newest(early, [1]) == [77]
