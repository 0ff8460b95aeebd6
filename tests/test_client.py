"""A client that several threads share: whom they wait for, and whom they do not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from millpond import runtime
from millpond.client import runs
from millpond.client.client import Client
from millpond.client.runs import Run, Runs
from millpond.errors import BadOption
from millpond.pond.pond import Pond
from millpond.runtime import Serial
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.wire.base import SliceId
from millpond.wire.connection import LocalConnection
from millpond.wire.house import ContainerInfo, Locate, Placement
from millpond.wire.states import ReadSlices

WAIT_S = 10.0


class Gate:
    """Whoever passes waits until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Semaphore(0)
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.reached.release()
        assert self.opened.wait(WAIT_S)


class Peer:
    """A coordinator or a container; `before` runs before it answers."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.before = before
        self.closed = False

    def call(self, message: Any) -> Any:
        assert isinstance(message, Locate)
        self.before()
        infos = [ContainerInfo(number, number, f"c{number}", (number,)) for number in range(2)]
        return Placement("/pond", 1, [0, 1], infos)

    def read(self, message: Any) -> pa.Table:
        self.before()
        return pa.table({"slice": message.slices})

    def exchange(self, message: Any, batches: Any) -> Any:
        raise AssertionError("not asked here")

    def close(self) -> None:
        self.closed = True


def started(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def test_nobody_waits_while_another_asks_where_slices_are() -> None:
    coordinator, gate = Peer(), Gate()
    client = Client(coordinator, lambda address: Peer())
    placement = client.placement()
    coordinator.before = gate
    client._placement = None  # as a retry leaves it
    asking, _ = started(client.placement)
    assert gate.reached.acquire(timeout=WAIT_S)
    reading, connections = started(lambda: client._connection(placement, 1))
    reading.join(WAIT_S)
    assert len(connections) == 1
    assert isinstance(connections[0], Peer)
    gate.opened.set()
    asking.join(WAIT_S)
    assert client.placement() == placement
    client.close()


def test_an_answer_that_was_overtaken_is_not_taken() -> None:
    client = Client(Peer(), lambda address: Peer())
    newer = Placement("/pond", 2, [1, 1], client.placement().containers)

    def overtake() -> None:
        client._placement = newer

    client._placement = None
    client._coordinator.before = overtake  # type: ignore[attr-defined]
    assert client.placement() is newer
    client.close()


def test_it_asks_for_what_has_changed_and_for_the_whole_where_that_does_not_help() -> None:
    whole = Placement("/pond", 3, [0, 1], [ContainerInfo(0, 7, "c0", (SliceId(0),))], "a" * 32)
    news = Placement(
        "/pond", 4, [], [ContainerInfo(0, 7, "c0", ())], "a" * 32, since=3, changed={SliceId(1): 0}
    )
    replies = [whole, news, whole, msgspec.structs.replace(news, landmark="b" * 32), whole]
    asked: list[int | None] = []

    class Coordinator(Peer):
        def call(self, message: Any) -> Any:
            asked.append(message.known)
            return replies.pop(0)

    client = Client(Coordinator(), lambda address: Peer())
    seen = []
    for _ in range(4):
        client._placement = None  # as a retry leaves it
        seen.append(client.placement())
    assert asked == [None, 3, 4, 3, None], "one of another opening is asked for anew"
    assert [placement.owners for placement in seen] == [[0, 1], [0, 0], [0, 1], [0, 1]]
    assert seen[1].containers[0].slices == (0, 1)
    client.close()


def test_after_a_move_a_client_gets_what_has_changed() -> None:
    """Not the whole table, which of a large pond is long."""

    class Coordinator(LocalConnection):
        def call(self, message: Any) -> Any:
            reply = super().call(message)
            if isinstance(message, Locate):
                told.append((message.known, reply))
            return reply

    told: list[tuple[int | None, Placement]] = []
    with LocalPond(LossyFiles(), containers=2, slices=64) as pond:
        state = pond.state("s", key="long", value="long")
        keys = list(range(200))
        state.update(key="k", at="t", value="v", name="feed")(pa.table({"k": keys, "t": keys, "v": keys}), 0)
        state.finish("feed")
        with Pond(Client(Coordinator(pond.coordinator), pond.hosting.dial, Serial()), "local", None) as other:
            fetch = other.state("s").fetch(key="k", at="t", into="v")
            asked = pa.table({"k": keys, "t": keys})
            assert fetch.now(asked)["v"].to_pylist() == keys
            [(known, whole)] = told
            assert (known, whole.since, len(whole.owners)) == (None, None, 64)
            pond.move([3, 5], to=1)
            assert fetch.now(asked)["v"].to_pylist() == keys
            [_, (known, news)] = told
            assert (known, news.since) == (whole.version, whole.version)
            assert news.changed == {3: 1, 5: 1}
            assert news.owners == []
            assert [info.slices for info in news.containers] == [(), ()]
            assert list(other.placement().values()) == list(pond.placement().values())


def test_closing_waits_for_calls_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "CLOSE_S", 0.05)
    gate = Gate()
    containers: list[Peer] = []

    def dial(address: str) -> Peer:
        containers.append(Peer(gate))
        return containers[-1]

    coordinator = Peer()
    client = Client(coordinator, dial)
    reading, rows = started(lambda: client.read(lambda slices: ReadSlices("s", 0, slices)))
    for _ in range(2):
        assert gate.reached.acquire(timeout=WAIT_S)
    closing, _ = started(client.close)
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert reading.is_alive()
    assert coordinator.closed
    gate.opened.set()
    reading.join(WAIT_S)
    assert rows[0]["slice"].to_pylist() == [0, 1]
    with pytest.raises(BadOption, match="closed"):
        client.read(lambda slices: ReadSlices("s", 0, slices))


def test_of_two_operators_of_one_name_only_the_first_has_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Runs()
    first, second = known.new_operator(), known.new_operator()
    known.note("s", "views", Run("run", 3, first))
    assert known.is_taken("s", "views", Run("run", 3, second))
    # The same one again, another epoch, another run, another name, or no stream at all.
    assert not known.is_taken("s", "views", Run("run", 3, first))
    assert not known.is_taken("s", "views", Run("run", 4, second))
    assert not known.is_taken("s", "views", Run("later", 3, second))
    assert not known.is_taken("s", "clicks", Run("run", 3, second))
    assert not known.is_taken("s", "views", Run(None, 3, second))
    monkeypatch.setattr(runs, "FETCHERS_MAX", 2)
    known.note("s", "clicks", Run("run", 3, second))
    known.note("s", "views", Run("run", 4, first))
    known.note("s", "sales", Run("run", 3, second))
    assert known.is_taken("s", "views", Run("run", 4, second))
    assert not known.is_taken("s", "clicks", Run("run", 3, first))


def test_of_questions_whose_answers_are_wide_it_remembers_no_more_than_kinds_of_them() -> None:
    """Each turn of a fetch asks by another message, as more epochs have become visible."""
    with LocalPond(LossyFiles()) as pond:
        state = pond.state("s", key="long", value="string")
        feed = state.update(key="k", at="at", value="v", name="feed")
        fetch = state.fetch(key="k", at="at", into="v")
        for epoch in range(5):
            feed(pa.table({"k": [1], "at": [10 * epoch + 1], "v": ["x" * 100]}), epoch)
            fetch.now(pa.table({"k": [1], "at": [10 * epoch]}))
        assert len(pond._client._rows_max) == 1
