"""A window that rests on the log: which records it needs, when it leaves its snapshot, and what is given again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import millpond as mp
import millpond.testing.local
from millpond.container.checkpoints import Checkpoints
from millpond.container.holdings import log_needs
from millpond.container.holdings.log_needs import LogNeeds
from millpond.errors import MillpondError
from millpond.ops.window import WindowSource
from millpond.stores.outputs import Outputs
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.times import TIME_MAX, TIME_MIN
from millpond.wire.base import Epoch, Turn

AGGREGATE = {"rows": mp.count(), "total": mp.total("v")}
ROWS = {"every": mp.collect("v")}


def is_last(v: int) -> bool:
    return v > 40


def turn(number: int) -> Turn:
    return Turn(Epoch(number))


def after(needs: LogNeeds, covered: int, oldest_open: int) -> int:
    return needs.after(covered, needs.oldest(oldest_open))


def test_records_of_rows_that_are_open_are_needed() -> None:
    needs = LogNeeds()
    for number in range(6):
        needs.logged(10 + number, "a", turn(number), newest=10 * number, oldest_open=10 * number)
    assert after(needs, 15, oldest_open=0) == 9
    assert after(needs, 15, oldest_open=25) == 12
    assert after(needs, 15, oldest_open=20) == 12, "what was let go is gone"


def test_the_last_turns_of_each_writer_are_needed_and_what_they_fired() -> None:
    needs = LogNeeds()
    needs.logged(1, "a", turn(0), newest=5, oldest_open=TIME_MAX)
    needs.logged(2, "a", turn(1), newest=15, oldest_open=5)
    needs.logged(3, "a", turn(2), newest=25, oldest_open=15)
    needs.logged(4, "a", turn(3), newest=35, oldest_open=25)
    # Nothing is open. Turns 2 and 3 may come again, and 2 fired rows of 1.
    assert after(needs, 4, TIME_MAX) == 1
    needs.logged(5, "a", turn(4), newest=TIME_MIN, oldest_open=TIME_MAX)
    assert after(needs, 5, TIME_MAX) == 2
    needs.forget(["a"])
    assert after(needs, 5, TIME_MAX) == 5


def test_a_writer_that_is_silent_keeps_its_records() -> None:
    needs = LogNeeds()
    needs.logged(1, "silent", turn(0), newest=0, oldest_open=TIME_MAX)
    for number in range(5):
        needs.logged(2 + number, "a", turn(number), newest=10, oldest_open=TIME_MAX)
    assert after(needs, 6, TIME_MAX) == 0


def test_what_is_not_applied_is_needed() -> None:
    needs = LogNeeds()
    for number in range(5):
        needs.logged(1 + number, "a", turn(number), newest=TIME_MIN, oldest_open=TIME_MAX)
    assert after(needs, 2, TIME_MAX) == 2


def test_outputs_that_came_since_the_last_snapshot() -> None:
    outputs = Outputs()
    rows = pa.table({"x": [1]})
    for number in range(3):
        outputs.keep("a@q", turn(number), rows)
    assert outputs.are_new(["a@q"])
    assert not outputs.are_new(["a@q", "b@q"]), "of which nothing is known here"
    outputs.clean()
    outputs.keep("a@q", turn(3), rows)
    assert not outputs.are_new(["a@q"])
    outputs.keep("a@q", turn(4), rows)
    assert outputs.are_new(["a@q"])


class Fed:
    """A window in a pond whose upkeep comes after every epoch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, window: Any, log_records: int = 4) -> None:
        bounds = millpond.testing.local.BOUNDS._replace(log_records=log_records)
        monkeypatch.setattr(millpond.testing.local, "BOUNDS", bounds)
        self.files = LossyFiles()
        self.window = window
        self.open()

    def open(self) -> None:
        self.pond = LocalPond(self.files, containers=1, slices=2)
        window = self.pond.window("w", key="k long", window=self.window, aggregate=AGGREGATE, value="v long")
        self.operator = window
        self.source: WindowSource = window.over(key="k", at="t", name="feed")

    def feed(self, epoch: int, times: list[int]) -> list[Any]:
        rows = pa.table({"k": [1] * len(times), "t": pa.array(times, pa.int64()), "v": times})
        fired: list[Any] = self.source(rows, epoch).to_pylist()
        self.pond.maintain()
        return fired

    @property
    def snapshots(self) -> list[str]:
        return [path for path in self.files._names if "/snapshots/" in path]

    @property
    def records(self) -> int:
        return self.pond.hosting.services[0].log.records


@pytest.mark.parametrize("epochs", range(6, 18))
def test_an_epoch_gives_the_same_from_a_log_that_was_let_go_from_the_front(
    monkeypatch: pytest.MonkeyPatch, epochs: int
) -> None:
    fed = Fed(monkeypatch, mp.tumbling(10))
    for epoch in range(epochs):
        fired = fed.feed(epoch, [epoch * 5, epoch * 5 + 1])
    open_now = fed.operator.now().to_pylist()
    fed.open()
    assert fed.feed(epochs - 1, [epochs * 5 - 5, epochs * 5 - 4]) == fired
    assert fed.operator.now().to_pylist() == open_now


def test_the_log_stays_short_without_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = Fed(monkeypatch, mp.tumbling(2))
    for epoch in range(60):
        fed.feed(epoch, [epoch])
    assert not fed.snapshots
    assert fed.records < 12


def test_a_snapshot_is_left_once_all_of_it_has_fired(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = Fed(monkeypatch, mp.tumbling(2))
    for epoch in range(5):
        fed.feed(epoch, [epoch])
    fed.pond.checkpoint()
    assert fed.snapshots
    for epoch in range(5, 30):
        fed.feed(epoch, [epoch])
    assert not fed.snapshots
    fed.open()
    assert fed.operator.now().to_pylist() == [
        {"window_start": 28, "window_end": 30, "k": 1, "rows": 2, "total": 57}
    ]


def test_rows_that_a_snapshot_counted_do_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = Fed(monkeypatch, mp.counted(3))
    fed.feed(0, [1, 2])
    fed.pond.checkpoint()
    assert [row["total"] for row in fed.feed(1, [3])] == [6]
    for epoch in range(2, 12):
        assert fed.feed(epoch, []) == []
    fed.open()
    assert not fed.operator.now().num_rows
    assert fed.feed(12, [7]) == []


def test_sessions_that_are_cut_are_open_as_they_would_fire(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = Fed(monkeypatch, mp.session(12, longest=30))
    fed.feed(0, [18, 27, 36, 40])
    [row] = fed.operator.now().to_pylist()
    assert (row["window_start"], row["window_end"], row["rows"]) == (18, 48, 4)
    fed.source = fed.operator.over(key="k", at="t", name="feed", delay=100)
    fed.feed(1, [47, 50])
    spans = [(row["window_start"], row["window_end"], row["rows"]) for row in fed.operator.now().to_pylist()]
    assert sorted(spans) == [(18, 48, 5), (50, 62, 1)]


def test_where_a_session_is_cut_hangs_on_the_part_before(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = Fed(monkeypatch, mp.session(14, longest=30), log_records=7)
    for epoch, times in enumerate([[0], [10], [20], [29, 31], [40], [50], [], []]):
        fed.feed(epoch, times)
    assert fed.records < 8, "some are let go"
    open_now = fed.operator.now().to_pylist()
    assert [(row["window_start"], row["window_end"]) for row in open_now] == [(31, 61)]
    fed.open()
    assert fed.operator.now().to_pylist() == open_now


@pytest.mark.parametrize("reopened", [False, True])
def test_a_finish_gives_the_same_until_something_comes(
    monkeypatch: pytest.MonkeyPatch, reopened: bool
) -> None:
    fed = Fed(monkeypatch, mp.tumbling(10))
    for epoch in range(3):
        fed.feed(epoch, [epoch])
    finished = []
    for _ in range(7):
        finished.append(fed.source.finish())
        fed.pond.maintain()
        if reopened:
            fed.open()
    assert [table.to_pylist() for table in finished] == [finished[0].to_pylist()] * 7
    assert finished[0]["rows"].to_pylist() == [3]
    assert fed.feed(3, [25]) == []
    assert fed.source.finish()["total"].to_pylist() == [25]


def goes_on(monkeypatch: pytest.MonkeyPatch, window: Any, epochs: int, saved_at: int | None) -> bool:
    """Whether a pond that is opened again gives what the last epoch gave, and holds what was open."""
    fed = Fed(monkeypatch, window)
    rows = [[epoch * 5 - 9, epoch * 5, epoch * 5 + 1] for epoch in range(epochs)]
    for epoch, times in enumerate(rows):
        fired = fed.feed(epoch, times)
        if epoch == saved_at:
            fed.open()
            fed.pond.checkpoint()
    open_now = fed.operator.now().to_pylist()
    try:
        fed.open()
        return fed.feed(epochs - 1, rows[-1]) == fired and fed.operator.now().to_pylist() == open_now
    except MillpondError:
        return False


HISTORIES = [
    (window, epochs, saved_at)
    for saved_at in (None, 5, 7)
    for window in (mp.tumbling(10), mp.sliding(20, 5), mp.counted(4))
    for epochs in (10, 12, 15)
]
BROKEN: dict[str, tuple[Any, str, Any]] = {
    "records of the last turns are let go": (log_needs, "_lasting", lambda records: []),
    "records of open windows are let go": (LogNeeds, "oldest", lambda self, oldest_open: TIME_MAX),
    "what the last turns fired is made of fewer rows": (
        LogNeeds,
        "oldest",
        lambda self, oldest_open: oldest_open,
    ),
    "a snapshot that was left comes back": (Checkpoints, "_leaves_snapshot", lambda self, *_: False),
}


def test_what_is_open_and_what_was_fired_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in HISTORIES:
        assert goes_on(monkeypatch, *each), each


@pytest.mark.parametrize("name", BROKEN)
def test_a_promise_that_is_broken_on_purpose_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BROKEN[name])
    assert not all(goes_on(monkeypatch, *each) for each in HISTORIES)


# Beside a pond that is never opened again

STAYS = {"lateness": 15}
UPDATED = {"emit": "update"}
PACED = {"every": "4 seconds", "lateness": 15}
SESSION = mp.session(6)
KINDS: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "tumbling, late": (mp.tumbling(10), STAYS, True),
    "sliding, late": (mp.sliding(20, 5), STAYS, True),
    "session, late": (SESSION, STAYS, True),
    "rows of a session, late": (SESSION, STAYS | {"aggregate": ROWS}, True),
    "rows of a session that is cut, late": (
        mp.session(6, ends_when=is_last),
        STAYS | {"aggregate": ROWS},
        True,
    ),
    "tumbling, updated": (mp.tumbling(10), UPDATED, True),
    "sliding, at times": (mp.sliding(20, 5), PACED, True),
    "rows, at times": (mp.tumbling(10), PACED | {"aggregate": ROWS}, True),
    "counted, updated": (mp.counted(4), UPDATED, False),
    "session": (SESSION, {}, True),
    "session, updated": (SESSION, UPDATED, False),
    "session of some length": (mp.session(9, longest=30), {}, False),
    "join": (mp.tumbling(10), {}, True),
    "sliding join": (mp.sliding(20, 5), {}, True),
    "join between": ((-7, 4), {}, True),
    "dedup": (9, {}, False),
}


IN_CI = (
    "sliding, late",
    "rows of a session, late",
    "rows, at times",
    "session of some length",
    "sliding join",
    "join between",
)


class Twin:
    """An operator over a window, a join or a dedup, in a pond of its own. Opened again, it gives its last epoch again."""

    def __init__(self, name: str, is_kept_up: bool) -> None:
        self.name = name
        self.is_kept_up = is_kept_up
        self.files = LossyFiles()
        self.last: tuple[int, list[pa.Table]] = 0, []
        self.snapshots = 0
        self.open()

    def open(self) -> None:
        self.pond = pond = LocalPond(self.files, containers=1, slices=2)
        window, options, _ = KINDS[self.name]
        self.now: Any = lambda: None
        if self.name == "dedup":
            self.feeds = [pond.dedup("w", key="k long", within=window).over(key="k", at="t", delay=8)]
        elif "join" in self.name:
            how = {"between": window} if isinstance(window, tuple) else {"window": window}
            join = pond.join("w", key="k long", left="a long", right="b long", **how)
            self.feeds = [join.left(key="k", at="t", delay=8), join.right(key="k", at="t", delay=8)]
        else:
            options = {"aggregate": AGGREGATE, **options}
            made = pond.window("w", key="k long", window=window, value="v long", **options)
            self.feeds, self.now = [made.over(key="k", at="t", delay=8)], lambda: rows_of(made.now())

    def run(self, epoch: int, rows: list[pa.Table]) -> list[list[str]]:
        self.last = epoch, rows
        answers = [rows_of(feed(own, epoch)) for feed, own in zip(self.feeds, rows, strict=True)]
        if self.is_kept_up:
            self.pond.maintain()
            self.snapshots += any("/snapshots/" in path for path in self.files._names)
        return answers

    def again(self) -> list[list[str]]:
        return [rows_of(feed(own, self.last[0])) for feed, own in zip(self.feeds, self.last[1], strict=True)]

    @property
    def records(self) -> int:
        return self.pond.hosting.services[0].log.records

    def paced_as(self, other: Twin) -> None:
        """A driver that has just begun gives updates at once; these are those of one that has gone on."""
        ahead = self.pond._client.runtime.now() - other.pond._client.runtime.now()
        for feed, theirs in zip(self.feeds, other.feeds, strict=True):
            feed._pace._last = theirs._pace._last + ahead


def rows_of(table: pa.Table) -> list[str]:
    return sorted(map(repr, table.to_pylist()))


def drawn(rng: np.random.Generator, epoch: int, name: str) -> list[pa.Table]:
    count = int(rng.integers(2, 9))
    keys, times = rng.integers(0, 5, count), 4 * epoch + rng.integers(-8, 9, count)
    if "join" not in name:
        return [pa.table({"k": keys, "t": times, "v": rng.integers(0, 50, count)})]
    half = count // 2
    return [
        pa.table({"k": keys[:half], "t": times[:half], "a": times[:half]}),
        pa.table({"k": keys[half:], "t": times[half:], "b": times[half:]}),
    ]


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        *(pytest.param(name, 0, marks=() if name in IN_CI else pytest.mark.long) for name in KINDS),
        *(pytest.param(name, seed, marks=pytest.mark.long) for name in KINDS for seed in range(1, 6)),
    ],
)
def test_what_rests_on_a_log_is_the_same_again(monkeypatch: pytest.MonkeyPatch, name: str, seed: int) -> None:
    _, _, rests = KINDS[name]
    bounds = millpond.testing.local.BOUNDS._replace(log_records=48 if "join" in name else 20)
    monkeypatch.setattr(millpond.testing.local, "BOUNDS", bounds)
    rng = np.random.default_rng(seed)
    plain, kept_up = Twin(name, False), Twin(name, True)
    for epoch in range(58):
        rows = drawn(rng, epoch, name)
        assert kept_up.run(epoch, rows) == plain.run(epoch, rows), epoch
        assert kept_up.now() == plain.now()
        for twin in (plain, kept_up):
            twin.pond._client.runtime.sleep(1)
        if epoch in (43, 50):
            if epoch == 43:
                assert (kept_up.snapshots == 0) == rests
                assert kept_up.records < 2 * bounds.log_records
            kept_up.pond.close()
            kept_up.open()
            assert kept_up.again() == plain.again(), epoch
            kept_up.paced_as(plain)
            assert kept_up.now() == plain.now()
    for twin in (plain, kept_up):
        twin.pond.close()
