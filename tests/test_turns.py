"""What the coordinator decides about a fetcher's epochs and drains: replays find what they need, drains come once."""

from __future__ import annotations

import math

import pytest

from millpond.code.rules import keep_latest, put
from millpond.coordinator import decisions, opening
from millpond.coordinator.records import PondRecord
from millpond.errors import EpochOutOfOrder
from millpond.ops.answering import number_of, turn_of
from millpond.times import Progress
from millpond.wire.messages import (
    DRAINS_MAX,
    Answered,
    AskPending,
    Pending,
    Pin,
    Pinned,
    Register,
    Report,
    StateSpec,
)


class Fetcher:
    """One fetcher of one State, driven by hand."""

    def __init__(self) -> None:
        spec = StateSpec("s", "key long", "value long", put(), keep_latest())
        self.pond = opening.open_state(PondRecord(slices=4), spec)
        for name, role in (("feed", "updater"), ("views", "fetcher")):
            self.pond = decisions.register(self.pond, Register("s", name, role))

    def pin(self, epoch: int, drain: int = 0, u: Progress = 5, query: str = "q") -> Pinned:
        self.pond, pinned = decisions.pin(self.pond, Pin("s", "views", query, epoch, drain), u)
        return pinned

    def answer(
        self,
        epoch: int,
        drain: int = 0,
        waiting: int = 0,
        lowest: int | None = None,
        watermark: int | None = None,
        query: str = "q",
    ) -> None:
        message = Answered("s", "views", query, epoch, waiting, 0, lowest, watermark, drain)
        self.pond = decisions.answered(self.pond, message)

    def pending(self, u: Progress = math.inf) -> Pending:
        return decisions.pending(self.pond, AskPending("s", "views"), u)

    @property
    def progress(self) -> Progress:
        return self.pond.states["s"].fetch_progress


def test_f_moves_only_when_the_epoch_that_moved_it_cannot_run_again() -> None:
    views = Fetcher()
    assert views.pin(0).late_below == -math.inf
    views.answer(0, watermark=90)
    assert views.progress == -math.inf, "epoch 0 may run again, and ask for anything"
    assert views.pin(0).late_below == -math.inf
    assert views.pin(1).late_below == 90
    assert views.progress == 90
    views.answer(1, watermark=200)
    assert views.progress == 90
    views.pin(2)
    assert views.progress == 200


def test_what_waited_before_the_last_epoch_holds_f_back_while_that_may_run_again() -> None:
    views = Fetcher()
    views.pin(0)
    views.answer(0, waiting=1, lowest=30, watermark=90)
    views.pin(1)
    views.answer(1, watermark=200)
    assert views.progress == 30
    views.pin(2)
    assert views.progress == 200


def test_an_epoch_of_another_query_that_runs_holds_f_back() -> None:
    views = Fetcher()
    views.pin(0, query="other")
    views.pin(0)
    views.answer(0, watermark=90)
    views.pin(1)
    assert views.progress == -math.inf


def test_a_query_that_was_given_up_holds_f_back_by_what_waits_in_it_alone() -> None:
    views = Fetcher()
    views.pin(0, query="old")
    views.answer(0, watermark=10, query="old")
    views.pin(0)
    views.answer(0, watermark=90)
    views.pin(1)
    assert views.progress == 90
    views.pin(1, query="old")
    views.answer(1, waiting=1, lowest=95, watermark=120, query="old")
    for epoch in range(1, 4):
        views.pin(epoch)
        views.answer(epoch, watermark=100 * (epoch + 1))
    assert views.progress == 95


def test_rows_below_a_reported_progress_are_late() -> None:
    views = Fetcher()
    views.pond = decisions.report(views.pond, Report("s", "views", None, 50))
    assert views.pin(0).late_below == 50


def test_a_drain_takes_up_what_waits_and_the_next_epoch_what_the_drain_left() -> None:
    views = Fetcher()
    views.pin(0)
    views.answer(0, waiting=3, lowest=7)
    assert views.pending().drains == {"q": ((0, 1), (0, 0))}
    assert views.pin(0, 1, u=9).previous == (0, 0)
    views.answer(0, 1, waiting=1, lowest=9)
    assert views.pin(1).previous == (0, 1)
    views.answer(1)
    assert views.pin(2).previous is None


def test_no_drain_without_progress_of_u() -> None:
    views = Fetcher()
    views.pin(0, u=5)
    views.answer(0, waiting=3, lowest=7)
    assert views.pending(u=5).drains == {}
    assert views.pending(u=6).drains == {"q": ((0, 1), (0, 0))}


def test_a_drain_that_was_interrupted_is_repeated_from_what_was_left_before_it() -> None:
    views = Fetcher()
    views.pin(0)
    views.answer(0, waiting=3, lowest=7)
    views.pin(0, 1)
    assert views.pending(u=5).drains == {"q": ((0, 1), (0, 0))}
    with pytest.raises(EpochOutOfOrder, match=r"a drain .* was interrupted"):
        views.pin(1)
    with pytest.raises(EpochOutOfOrder, match=r"a drain .* was interrupted"):
        views.pin(0, 2)
    assert views.pin(0, 1).previous == (0, 0)
    views.answer(0, 1)
    assert views.pin(1).previous is None


def test_no_drain_after_an_epoch_that_was_interrupted() -> None:
    views = Fetcher()
    views.pin(0)
    views.answer(0, waiting=3, lowest=7)
    views.pin(1)
    assert views.pending().drains == {}
    assert views.pending().unfinished == ["q"]
    with pytest.raises(EpochOutOfOrder, match=r"an epoch .* was interrupted"):
        views.pin(1, 1)
    assert views.pin(1).previous == (0, 0)


def test_the_last_epoch_runs_again_after_its_drains() -> None:
    views = Fetcher()
    views.pin(0)
    views.answer(0, waiting=3, lowest=7)
    views.pin(1)
    views.answer(1, waiting=3, lowest=7)
    for drain in range(1, 8):
        views.pin(1, drain)
        views.answer(1, drain, waiting=3, lowest=7)
    again = views.pin(1)
    assert (again.previous, again.oldest) == ((0, 0), (0, 0))
    views.answer(1, waiting=3, lowest=7)
    following = views.pin(2)
    assert (following.previous, following.oldest) == ((1, 7), (1, 0))


def test_an_epoch_has_so_many_drains_at_most() -> None:
    views = Fetcher()
    views.pin(0)
    views.answer(0, waiting=3, lowest=7)
    for drain in range(1, DRAINS_MAX):
        views.pin(0, drain)
        views.answer(0, drain, waiting=3, lowest=7)
    with pytest.raises(EpochOutOfOrder, match="drained 1023 times"):
        views.pin(0, DRAINS_MAX)
    assert views.pin(1).previous == (0, DRAINS_MAX - 1)


@pytest.mark.parametrize("turn", [(0, 0), (0, 1), (7, 0), (7, 1), (7, DRAINS_MAX - 1), (2**40, 3)])
def test_a_number_says_which_turn_it_is(turn: tuple[int, int]) -> None:
    assert turn_of(number_of(*turn)) == turn
    assert (number_of(*turn) < 0) == (turn[1] > 0)
