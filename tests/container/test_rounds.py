"""Containers that run an epoch together: each hears all others after each round, or none goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millpond.container.round_book import Arrived, RoundBook
from millpond.container.rounds import Rounds
from millpond.errors import BadMessage, MessageTooLarge, StageLost, Unavailable
from millpond.runtime import Runtime, Threads
from millpond.testing.simulation import Simulation, Weather
from millpond.testing.turns import Turns
from millpond.wire.base import Epoch, SliceId, Term, Turn
from millpond.wire.connection import Answer, SlicedBatch
from millpond.wire.epochs import Prepare
from millpond.wire.rounds import Peer, RoundRows
from millpond.wire.states import RowsWork


def rows(*numbers: int) -> SlicedBatch:
    return SlicedBatch(
        pa.record_batch({"n": pa.array(numbers, pa.int64())}), np.array([len(numbers)], np.int32)
    )


def numbers_in(batches: Sequence[SlicedBatch]) -> list[int]:
    return [number for each in batches for number in each.batch.column(0).to_pylist()]


# The machine


def test_a_round_is_gathered_when_every_peer_has_sent() -> None:
    book = RoundBook()
    assert book.take("p", 1, 0, 1, Arrived([2], [rows(7)])) == "unknown", "before the epoch is prepared here"
    book.begin("p", 1)
    assert book.gathered("p", 1, 0, [1, 2]) is None
    assert book.missing("p", 1, 0, [1, 2]) == [2]
    assert book.take("p", 1, 0, 2, Arrived([3], [])) == "runs"
    assert book.take("p", 1, 1, 2, Arrived([0], [])) == "runs", "a peer may be one round ahead"
    arrived = book.gathered("p", 1, 0, [1, 2])
    assert arrived is not None
    assert {peer: one.counts for peer, one in arrived.items()} == {1: [2], 2: [3]}
    with pytest.raises(BadMessage):
        book.take("p", 1, 3, 2, Arrived([0], []))
    book.end("p", 1, failed=False)
    assert book.nbytes == 0
    assert book.take("p", 1, 1, 1, Arrived([0], [rows(1)])) == "done"
    book.validate()


def test_a_later_epoch_ends_an_earlier_one() -> None:
    book = RoundBook()
    book.begin("p", 4)
    assert book.take("p", 5, 0, 1, Arrived([0], [])) == "unknown"
    with pytest.raises(StageLost):
        book.gathered("p", 4, 0, [1])
    assert book.take("p", 4, 0, 1, Arrived([0], [])) == "over"
    with pytest.raises(StageLost):
        book.begin("p", 4)
    book.begin("p", 5)
    book.supersede("p", 5)
    assert book.standing("p", 5) == "runs", "the same ballot is no later one"
    book.supersede("p", 6)
    with pytest.raises(StageLost):
        book.gathered("p", 5, 0, [1])
    book.validate()


def test_a_failure_that_is_heard_before_the_epoch_begins_ends_it() -> None:
    book = RoundBook()
    book.hear_failure("p", 1, "container 2: no")
    book.begin("p", 1)
    with pytest.raises(StageLost, match="container 2: no"):
        book.gathered("p", 1, 0, [2])
    book.end("p", 1, failed=True)
    assert book.standing("p", 1) == "failed"


def test_what_is_kept_has_a_bound() -> None:
    book = RoundBook(bytes_max=16)
    book.take("p", 1, 0, 1, Arrived([0], [rows(1, 2)]))
    with pytest.raises(MessageTooLarge, match="room"):
        book.take("q", 1, 0, 1, Arrived([0], [rows(1)]))
    book.forget("p")
    book.take("q", 1, 0, 1, Arrived([0], [rows(1)]))


# Several containers


class House:
    """Containers that reach each other by number; those in `away` cannot be reached."""

    def __init__(self, runtime: Runtime, containers: int) -> None:
        self.runtime = runtime
        self.away: set[str] = set()
        self.lost = 0
        self.rounds = [Rounds(runtime, self._connect) for _ in range(containers)]
        self.peers = [Peer(n, Term(1), str(n), [SliceId(n)]) for n in range(containers)]

    def _connect(self, address: str) -> Any:
        house = self

        class To:
            def exchange(self, message: RoundRows, batches: Sequence[SlicedBatch]) -> Answer[Any]:
                if address in house.away:
                    raise Unavailable("away", address=address)
                if house.lost:
                    house.lost -= 1
                    raise Unavailable("lost", address=address)
                return Answer(house.rounds[int(address)].take(message, batches))

        return To()

    def prepare(self, ballot: int = 1) -> Prepare:
        return Prepare("p", "feed@q", Turn(Epoch(0)), ballot, {}, RowsWork(), peers=self.peers)

    def run(self, container: int, rounds_max: int = 9) -> list[list[int]]:
        """Each sends its number and that of the round to the next one, as often as its own number says."""
        epoch = self.rounds[container].begin(self.prepare(), container)
        heard = []
        for number in range(rounds_max):
            to = (container + 1) % len(self.rounds)
            batches, [left] = epoch.exchange(
                {to: [rows(10 * container + number)]}, [max(0, container - number)]
            )
            heard.append(numbers_in(batches))
            if not left:
                break
        self.rounds[container].end("p", 1)
        return heard


def in_simulation(check: Callable[[Runtime], None]) -> None:
    for seed in range(10):
        sim = Simulation(seed, Weather())
        process = sim.process("p")
        sim.run(lambda process=process: process.run(lambda: check(process.runtime)))


RUNTIMES: dict[str, Callable[[Callable[[Runtime], None]], None]] = {
    "threads": lambda check: check(Threads()),
    "turns": lambda check: check(Turns()),
    "simulated": in_simulation,
}


@pytest.fixture(params=RUNTIMES)
def on_runtime(request: pytest.FixtureRequest) -> Callable[[Callable[[Runtime], None]], None]:
    return RUNTIMES[request.param]


def test_all_hear_all_and_stop_after_the_same_round(
    on_runtime: Callable[[Callable[[Runtime], None]], None],
) -> None:
    def check(runtime: Runtime) -> None:
        house = House(runtime, 3)
        house.lost = 2  # is sent again
        heard = runtime.map(house.run, range(3))
        assert heard == [[[20], [21], [22]], [[0], [1], [2]], [[10], [11], [12]]]
        for each in house.rounds:
            each.validate()

    on_runtime(check)


def test_one_that_refuses_is_waited_for_no_longer(
    on_runtime: Callable[[Callable[[Runtime], None]], None],
) -> None:
    def check(runtime: Runtime) -> None:
        house = House(runtime, 3)

        def work(container: int) -> str:
            if container == 2:
                house.rounds[2].refuse(house.prepare(), 2, "container 2: user code failed")
                return "refused"
            with pytest.raises(StageLost, match=r"user code failed|given up"):
                house.run(container)
            return "lost"

        assert runtime.map(work, range(3)) == ["lost", "lost", "refused"]

    on_runtime(check)


@pytest.mark.parametrize("how", ["away", "silent", "over"])
def test_one_that_does_not_come_is_waited_for_no_longer(how: str) -> None:
    def check(runtime: Runtime) -> None:
        house = House(runtime, 2)
        if how == "away":
            house.away.add("1")
        if how == "over":
            house.rounds[1].begin(house.prepare(7), 1)
        with pytest.raises(StageLost, match=r"is away|does not take part|given up"):
            house.run(0)

    in_simulation(check)


def test_a_discarded_epoch_is_waited_for_no_longer() -> None:
    def check(runtime: Runtime) -> None:
        house = House(runtime, 2)

        def work(which: int) -> None:
            if which == 0:
                with pytest.raises(StageLost):
                    house.run(0)
            else:
                runtime.sleep(0.1)
                house.rounds[0].supersede("p", 2)

        before = runtime.now()
        runtime.map(work, range(2))
        assert runtime.now() - before < 0.4

    in_simulation(check)
