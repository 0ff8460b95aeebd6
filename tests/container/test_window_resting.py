"""A window that rests on the log: which records it needs, when it leaves its snapshot, and what is given again."""

from __future__ import annotations

from typing import Any

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

    def __init__(self, monkeypatch: pytest.MonkeyPatch, window: Any) -> None:
        bounds = millpond.testing.local.BOUNDS._replace(log_records=4)
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
