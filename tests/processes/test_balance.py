"""A pond that balances itself: by load, within memory and limits, and after a container has come back."""

from __future__ import annotations

import io
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from chaos_load import await_true
from test_kill import await_none_at

import millpond as mp
from millpond.coordinator import balancing, homes
from millpond.coordinator.elasticity import AT_ONCE_MAX
from millpond.coordinator.migrations import Migrations
from millpond.errors import NoRoom, Unavailable
from millpond.kernels.hashing import slices_of
from millpond.pond.figures import too_few_backups
from millpond.stores.keys import Keys

SLICES = 8
ROWS = 400


def keys_by_slice() -> dict[int, list[int]]:
    numbers = np.arange(4096)
    places = slices_of(Keys("i64", longs=numbers).hashes, SLICES)
    return {number: numbers[places == number].tolist() for number in range(SLICES)}


KEYS = keys_by_slice()


class Feed:
    """Updates that go to some slices, as many rows to each as is said."""

    def __init__(self, pond: mp.Pond) -> None:
        self.state = pond.state("s", key="long", value="long")
        self.op = self.state.update(key="k", at="t", value="v", name="feed")
        self.epoch = 0

    def feed(self, rows: dict[int, int]) -> None:
        keys = [
            KEYS[number][row % len(KEYS[number])] for number, count in rows.items() for row in range(count)
        ]
        times = [self.epoch] * len(keys)
        self.op(pa.table({"k": keys, "t": times, "v": list(range(len(keys)))}), self.epoch)
        self.epoch += 1

    def check(self) -> None:
        """All of the last epoch is there."""
        assert len(self.state.snapshot()) > 0


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[mp.Pond, Feed]]:
    root = tmp_path_factory.mktemp("balance") / "pond"
    with mp.open(root, containers=2, threads=1, slices=SLICES) as pond:
        yield pond, Feed(pond)


def fresh(pond: mp.Pond) -> None:
    """Slices as at the beginning, nothing under way, and no load that would count."""
    service = pond._owner._coordinator  # type: ignore[union-attr]
    pond.cancel_moves()
    await_true(lambda: all(move.is_over for move in pond.moves()), 20, lambda: "moves do not end")
    for container in (0, 1):
        pond.move([n for n in range(SLICES) if n // 4 == container], to=container)
    service._balancing._loads = balancing.Loads()
    service._balancing._look()
    time.sleep(balancing.WATCHED_S_MIN)


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Moves get no further than to where they catch up, until the event is set."""
    may_go_on = threading.Event()
    catch_up = Migrations._catch_up

    def wait(self: Migrations, *given: object) -> None:
        assert may_go_on.wait(60)
        catch_up(self, *given)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Migrations, "_catch_up", wait)
        try:
            yield may_go_on
        finally:
            may_go_on.set()


@pytest.mark.parametrize("by", ["rows", "cpu"])
def test_the_hot_ones_move_first_and_what_is_even_stays(scene: tuple[mp.Pond, Feed], by: str) -> None:
    pond, feed = scene
    fresh(pond)
    for _ in range(10):
        feed.feed({0: 40 * ROWS, 1: 8 * ROWS, 2: 4 * ROWS, 3: ROWS})
    moves = pond.rebalance(by)
    assert moves
    assert {(move.source, move.target, move.cause, move.stage) for move in moves} == {
        (0, 1, "rebalance", "moved")
    }
    assert moves[0].slices[0] == 0, "the hottest goes first"
    assert pond.placement()[1] == 0
    # Counts of a slice begin anew where it went to: that it was hot is not forgotten.
    after = pond.placement()
    assert pond.rebalance(by) == []
    assert pond.placement() == after
    feed.check()


def test_what_was_long_ago_moves_nothing(scene: tuple[mp.Pond, Feed]) -> None:
    pond, feed = scene
    for _ in range(10):
        feed.feed({0: ROWS, 1: ROWS, 2: ROWS, 3: ROWS})
    fresh(pond)
    assert pond.rebalance("rows") == []


def test_moves_under_way_are_kept_and_only_some_run_at_once(
    scene: tuple[mp.Pond, Feed], monkeypatch: pytest.MonkeyPatch
) -> None:
    pond, feed = scene
    fresh(pond)
    for _ in range(10):
        feed.feed({0: 20 * ROWS, 1: 20 * ROWS, 2: ROWS, 3: ROWS})
    before = {move.id for move in pond.moves()}
    callers = [threading.Thread(target=pond.move, args=(slices, 1)) for slices in ([0], [2], [3])]
    with held_up(monkeypatch) as may_go_on:
        for caller in callers:
            caller.start()
        await_true(
            lambda: len([move for move in pond.moves() if move.id not in before]) == 3,
            10,
            lambda: "not asked",
        )
        balanced: list[mp.MoveInfo] = []
        callers.append(threading.Thread(target=lambda: balanced.extend(pond.rebalance("rows"))))
        callers[-1].start()
        time.sleep(0.5)
        new = [move for move in pond.moves() if move.id not in before]
        stages = Counter(move.stage for move in new)
        assert stages == {"catching up": AT_ONCE_MAX, "waiting": len(new) - AT_ONCE_MAX}
        shown = pond.metrics()["moves"]
        assert [move["id"] for move in shown] == [move.id for move in new]
        assert {move["phase"] for move in shown} == {"catching up", "waiting"}
        may_go_on.set()
        for caller in callers:
            caller.join(30)
    asked = [move for move in pond.moves() if move.id not in before]
    assert {move.stage for move in asked} == {"moved"}, "none was cancelled"
    moved = [number for move in asked for number in move.slices]
    assert len(moved) == len(set(moved)), "none was repeated"
    # With slice 0 on its way, the two are even, and slice 1 stays.
    assert balanced == []
    assert [pond.placement()[number] for number in range(4)] == [1, 0, 1, 1]


def test_interrupted_it_goes_on_by_itself(
    scene: tuple[mp.Pond, Feed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a real Ctrl-C, while it waits and shows how far it is."""
    pond, feed = scene
    fresh(pond)
    for _ in range(5):
        feed.feed({0: 10 * ROWS, 1: 10 * ROWS})
    screen = io.StringIO()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with held_up(monkeypatch) as may_go_on:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt), redirect_stderr(screen):
            pond.rebalance("rows", progress=True)
        assert [move.stage for move in pond.moves()][-1] == "catching up"
        may_go_on.set()
        await_true(lambda: all(move.is_over for move in pond.moves()), 20, lambda: "it does not go on")
    assert "rebalancing" in screen.getvalue()
    assert "90%" in screen.getvalue()
    assert pond.moves()[-1].stage == "moved"
    assert sorted(pond.placement()[number] for number in (0, 1)) == [0, 1]


def test_a_container_gets_no_more_than_it_has_memory_for(
    scene: tuple[mp.Pond, Feed], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pond, feed = scene
    fresh(pond)
    for _ in range(5):
        feed.feed({0: 10 * ROWS, 1: 9 * ROWS, 2: ROWS})
    sizes = {number: int(own["bytes"]) for number, own in pond.metrics()["slices"].items()}
    assert sizes[0] > 1000
    own = pond.metrics()["containers"][1]
    assert own["memory_max_bytes"] >= own["memory_share_bytes"] > own["rss_bytes"] > 0, (
        "what it has left is known"
    )
    monkeypatch.setattr(balancing, "left_in", lambda figures: 1000)
    before = pond.placement()
    with caplog.at_level(logging.WARNING, "millpond"):
        assert pond.rebalance("rows") == []
    assert "slice 0 stays where it is: container 1 has no memory left for it" in caplog.text
    with pytest.raises(Unavailable, match="1,000 left"):
        pond.move(0, to=1)
    assert pond.placement() == before
    assert issubclass(NoRoom, MemoryError)
    with pytest.raises(Unavailable, match="1,000 left"):
        pond.scale(1)
    assert len(pond.containers()) == 2
    # What a change of their number came to is nothing to other moves.
    pond.move(7, to=0)
    pond.move(7, to=1)
    monkeypatch.setattr(balancing, "left_in", lambda figures: max(sizes.values()))
    with monkeypatch.context() as patch:
        patch.setattr(balancing, "left_on_hosts", lambda figures, hosts: {hosts[1]: len(figures)})
        assert pond.rebalance("rows") == []
        with pytest.raises(Unavailable, match="the machine of container 1 has 2 left"):
            pond.move(0, to=1)
    assert [move.slices for move in pond.rebalance("rows")] == [[0]]


class Load(threading.Thread):
    """Updates without a pause."""

    def __init__(self, feed: Feed) -> None:
        super().__init__(daemon=True)
        self.feed = feed
        self.ended = threading.Event()
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            while not self.ended.is_set():
                self.feed.feed(dict.fromkeys(range(SLICES), 1000))
        except Exception as error:
            self.failure = error
            raise

    def end(self) -> None:
        self.ended.set()
        self.join(30)
        assert self.failure is None


def test_the_number_of_containers_follows_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balancing, "AUTOSCALE_S", 0.4)
    with mp.open(tmp_path / "pond", containers=1, threads=1, slices=SLICES) as pond:
        counts: list[int] = [1]
        feed = Feed(pond)

        def watch() -> int:
            count = len(set(pond.placement().values()))
            if count != counts[-1]:
                counts.append(count)
            return count

        # A little is enough for one more, on a machine that others use, too.
        pond.autoscale((1, 2), busy=(0.06, 0.1), hold=1.0)
        pond.autoscale(None)
        load = Load(feed)
        load.start()
        time.sleep(1.5)  # longer than `hold`
        assert len(pond.containers()) == 1, "it is off"
        pond.autoscale((1, 2), busy=(0.06, 0.1), hold=1.0)
        await_true(lambda: watch() == 2, 30, lambda: f"{counts}")
        until_s = time.monotonic() + 2.0
        while time.monotonic() < until_s:
            watch()
            time.sleep(0.05)
        load.end()
        assert counts == [1, 2], "it does not go to and fro"
        assert {move.cause for move in pond.moves()} == {"autoscale"}
        quiet_s = time.monotonic()
        await_true(lambda: watch() == 1, 30, lambda: f"{counts}")
        assert time.monotonic() - quiet_s > 2.0, "after a while"
        until_s = time.monotonic() + 1.5
        while time.monotonic() < until_s:
            watch()
            time.sleep(0.05)
        assert counts == [1, 2, 1]
        await_true(lambda: len(pond.containers()) == 1, 10, lambda: "it does not go")
        rows = len(feed.state.snapshot())
        # Limits count at once; and a pond that closes while it changes its size is whole.
        pond.autoscale((3, 3), hold=1.0)
        await_true(lambda: len(pond.containers()) > 1, 20, lambda: "none comes")
    await_none_at(tmp_path / "pond")
    with mp.open(tmp_path / "pond", containers=2, threads=1) as pond:
        assert len(pond.states()["s"].snapshot()) == rows
        time.sleep(0.5)
        assert len(pond.containers()) == 2, "limits are not remembered"


def test_slices_go_back_to_a_container_that_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those that were moved by hand."""
    monkeypatch.setattr(homes, "PAUSE_S", 0.5)
    with mp.open(tmp_path / "pond", containers=3, threads=1, slices=SLICES, backups=1) as pond:
        feed = Feed(pond)
        feed.feed(dict.fromkeys(range(SLICES), 100))

        def is_whole() -> bool:
            return not too_few_backups(pond.metrics()["slices"])

        await_true(is_whole, 30, lambda: "backups are missing")
        before = pond.placement()
        victim = pond.containers()[0]
        os.kill(victim.pid, signal.SIGKILL)
        await_true(lambda: 0 not in pond.placement().values(), 10, lambda: "it is not relieved")
        by_hand = victim.slices[0]
        stays = pond.placement()[by_hand]
        # It is there already: that somebody wants it there is what counts.
        with suppress(Unavailable):
            pond.move(by_hand, to=stays)
        wanted = {**before, by_hand: stays}
        await_true(lambda: pond.placement() == wanted, 30, lambda: f"{pond.placement()}, not {wanted}")
        assert {move.cause for move in pond.moves()} == {"return"}
        await_true(is_whole, 30, lambda: "backups are missing")
        moves = len(pond.moves())
        time.sleep(2.0)
        assert (pond.placement(), len(pond.moves())) == (wanted, moves), "all is at rest"
        feed.feed(dict.fromkeys(range(SLICES), 100))
        feed.check()
