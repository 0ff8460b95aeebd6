"""A hot lane leaves a busy container by `rebalance`, while calls go on; what they do is what the plain class does."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa

import millpond as mp
from millpond.programs.plain import state_of
from millpond.programs.slicing import lane_of

SLICES, LANES = 8, 4
HOT, WARM = 30_000, 15_000
HOME = {lane: lane * SLICES // LANES for lane in range(LANES)}
"""The slice that a lane lives in."""


@mp.program(lanes=LANES)
class Busy:
    """With a text it is not compiled: what it takes is the same all the time."""

    sums: mp.Partial[mp.Vector]

    def work(self, key: int, word: str, times: int) -> float:
        for _ in range(times):
            self.sums[key] += len(word)
        return self.sums[key]


KEYS = {lane_of(key, SLICES, LANES): key for key in range(50)}


class Feed(threading.Thread):
    """Calls without a pause: lane 0 is hot, lane 1 in the same container is warm."""

    def __init__(self, pond: mp.Pond) -> None:
        super().__init__(daemon=True)
        self.program = pond.program("busy", Busy)
        self.plain = mp.plain(Busy, slices=SLICES)
        self._call = self.program.call("work", into="sum", name="feed")
        self._epoch = 0
        self._over = threading.Event()
        self.error: BaseException | None = None

    def feed(self) -> None:
        times = {0: HOT, 1: WARM, 2: 1, 3: 1}
        rows = [{"key": KEYS[lane], "word": "x", "times": count} for lane, count in times.items()]
        given = self._call(pa.Table.from_pylist(rows), self._epoch)
        assert given["sum"].to_pylist() == [self.plain.work(**row) for row in rows]
        self._epoch += 1

    def run(self) -> None:
        try:
            while not self._over.is_set():
                self.feed()
        except BaseException as error:  # noqa: BLE001 - told in the end
            self.error = error

    def end(self) -> None:
        self._over.set()
        self.join(60)
        assert self.error is None


def busy_s(pond: mp.Pond) -> dict[int, float]:
    """The time that slices of lanes have taken, by slice, since they are where they are."""
    slices = pond.metrics()["slices"]
    return {number: slices[number]["cpu_s"] for number in HOME.values()}


def share_of_the_busiest(pond: mp.Pond, feed: Feed) -> float:
    before = busy_s(pond)
    for _ in range(4):
        feed.feed()
    grown = {number: after - before[number] for number, after in busy_s(pond).items()}
    owners = pond.placement()
    by_container = [
        sum(own for number, own in grown.items() if owners[number] == container) for container in (0, 1)
    ]
    return max(by_container) / sum(by_container)


def test_rebalancing_relieves_the_container_of_a_hot_lane(tmp_path: Path) -> None:
    with mp.open(tmp_path / "pond", containers=2, slices=SLICES, threads=1) as pond:
        pond.move(range(4), to=0)
        pond.move(range(4, SLICES), to=1)
        feed = Feed(pond)
        assert share_of_the_busiest(pond, feed) > 0.9, "both lanes are in one container"
        feed.start()
        moves = pond.rebalance("cpu")
        feed.end()
        assert {(move.cause, move.stage) for move in moves} == {("rebalance", "moved")}
        first = moves[0]
        assert (first.source, first.target, first.slices[0]) == (0, 1, HOME[0]), "the hot one goes first"
        placed = pond.placement()
        assert (placed[HOME[0]], placed[HOME[1]]) == (1, 0)
        assert share_of_the_busiest(pond, feed) < 0.85
        held = feed.program.entries("sums")
        assert [held.get(lane, {}) for lane in range(LANES)] == state_of(feed.plain)["sums"]
