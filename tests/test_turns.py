"""What the coordinator decides about a fetcher's epochs and drains: replays find what they need, drains come once."""

from __future__ import annotations

import itertools
import math

import pytest

from millpond.code.rules import keep_latest, put
from millpond.coordinator import catalogue, fetches, updates
from millpond.coordinator.records import PondRecord
from millpond.errors import EpochChanged, EpochOutOfOrder, OtherQuery
from millpond.ops import own_turns
from millpond.times import Progress
from millpond.wire.base import DRAINS_MAX, Turn
from millpond.wire.epochs import History
from millpond.wire.house import Forget, Register
from millpond.wire.questions import Answered, AskPending, Drain, Pending, Pin, Pinned, Report
from millpond.wire.states import StateSpec


class Fetcher:
    """One fetcher of one State, driven by hand."""

    def __init__(self) -> None:
        spec = StateSpec("s", "key long", "value long", put(), keep_latest())
        self.pond = catalogue.open_resident(PondRecord(owners=(0,) * 4), spec)
        for name, role in (("feed", "updater"), ("views", "fetcher")):
            self.pond = catalogue.register(self.pond, Register("s", name, role))

    def pin(
        self, epoch: int, drain: int = 0, u: Progress = 5, query: str = "q", history: History = "continue"
    ) -> Pinned:
        message = Pin("s", "views", query, Turn(epoch, drain), history)
        self.pond, pinned = fetches.pin(self.pond, message, u)
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
        message = Answered("s", "views", query, Turn(epoch, drain), waiting, 0, lowest, watermark)
        self.pond = fetches.answered(self.pond, message)

    def pending(self, u: Progress = math.inf) -> Pending:
        return fetches.pending(self.pond, AskPending("s", "views"), u)

    @property
    def progress(self) -> Progress:
        return self.pond.residents["s"].fetch_progress


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
    views.pin(0, history="shared")
    views.answer(0, watermark=90)
    views.pin(1)
    assert views.progress == -math.inf


def test_of_a_query_that_a_new_one_replaced_only_rows_that_wait_hold_f_back() -> None:
    views = Fetcher()
    views.pin(0, query="old")
    views.answer(0, waiting=1, lowest=7, watermark=10, query="old")
    views.pin(5, history="new")
    views.answer(5, watermark=90)
    views.pin(6)
    assert views.progress == 7
    views.pin(0, 1, query="old", u=20)
    assert views.progress == 7
    views.answer(0, 1, query="old")
    assert views.progress == 90
    assert views.pending().rows == 0
    with pytest.raises(OtherQuery):
        views.pin(1, query="old")


def test_each_of_the_queries_that_share_a_name_holds_f_back() -> None:
    views = Fetcher()
    views.pin(0, query="one", history="shared")
    views.answer(0, watermark=10, query="one")
    views.pin(0, query="two", history="shared")
    views.answer(0, watermark=90, query="two")
    views.pin(1, query="one")
    views.pin(1, query="two")
    assert views.progress == 10
    views.answer(1, waiting=1, lowest=95, watermark=120, query="one")
    views.answer(1, watermark=200, query="two")
    views.pin(2, query="one")
    views.pin(2, query="two")
    views.answer(2, waiting=1, lowest=95, watermark=300, query="one")
    views.answer(2, watermark=300, query="two")
    views.pin(3, query="two")
    assert views.progress == 95


def test_a_name_belongs_to_the_query_that_began() -> None:
    views = Fetcher()
    views.pin(0)
    views.answer(0)
    with pytest.raises(OtherQuery, match="belongs to the query q"):
        views.pin(0, query="other")
    assert views.pin(0).previous is None


def test_the_first_epoch_is_0_unless_the_history_is_new() -> None:
    for history in ("continue", "shared"):
        with pytest.raises(EpochOutOfOrder, match="those before it are missing"):
            Fetcher().pin(3, history=history)
    views = Fetcher()
    views.pin(3, history="new")
    views.answer(3)
    views.pin(4)


def test_an_epoch_that_is_not_answered_is_followed_by_none() -> None:
    views = Fetcher()
    views.pin(0)
    with pytest.raises(EpochOutOfOrder, match=r"an epoch .* was interrupted"):
        views.pin(1)
    views.answer(0)
    views.pin(1)


def test_an_epoch_that_comes_again_with_other_rows_is_refused() -> None:
    """Else what waits of the first would be lost."""
    fetcher = Fetcher()
    fetcher.pin(0)
    fetcher.answer(0, waiting=2, lowest=7)
    fetcher.pin(0)
    fetcher.answer(0, waiting=2, lowest=7)
    before = fetcher.pond
    for waiting, lowest in ((0, None), (1, 7), (2, 8)):
        with pytest.raises(EpochChanged) as caught:
            fetcher.answer(0, waiting=waiting, lowest=lowest)
        assert caught.value.hint
    assert fetcher.pond == before


def test_rows_below_a_reported_progress_are_late() -> None:
    views = Fetcher()
    views.pond = updates.report(views.pond, Report("s", "views", None, 50))
    assert views.pin(0).late_below == 50


def test_a_drain_takes_up_what_waits_and_the_next_epoch_what_the_drain_left() -> None:
    views = Fetcher()
    views.pin(0)
    views.answer(0, waiting=3, lowest=7)
    assert views.pending().drains == {"q": Drain(Turn(0, 1), Turn(0, 0), "")}
    assert views.pin(0, 1, u=9).previous == Turn(0, 0)
    views.answer(0, 1, waiting=1, lowest=9)
    assert views.pin(1).previous == Turn(0, 1)
    views.answer(1)
    assert views.pin(2).previous is None


def test_no_drain_without_progress_of_u() -> None:
    views = Fetcher()
    views.pin(0, u=5)
    views.answer(0, waiting=3, lowest=7)
    assert views.pending(u=5).drains == {}
    assert views.pending(u=6).drains == {"q": Drain(Turn(0, 1), Turn(0, 0), "", pays=False)}
    assert views.pending(u=8).drains == {"q": Drain(Turn(0, 1), Turn(0, 0), "")}


def test_a_drain_that_was_interrupted_is_repeated_from_what_was_left_before_it() -> None:
    views = Fetcher()
    views.pin(0)
    views.answer(0, waiting=3, lowest=7)
    views.pin(0, 1)
    assert views.pending(u=5).drains == {"q": Drain(Turn(0, 1), Turn(0, 0), "", begun=True)}
    with pytest.raises(EpochOutOfOrder, match=r"a drain .* was interrupted"):
        views.pin(1)
    with pytest.raises(EpochOutOfOrder, match=r"a drain .* was interrupted"):
        views.pin(0, 2)
    assert views.pin(0, 1).previous == Turn(0, 0)
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
    assert views.pin(1).previous == Turn(0, 0)


def test_no_epoch_while_the_one_before_it_is_unanswered() -> None:
    """An error that a user's code has swallowed must not lose what waits."""
    views = Fetcher()
    views.pin(0)
    views.answer(0, waiting=3, lowest=7)
    views.pin(1)
    with pytest.raises(EpochOutOfOrder, match=r"an epoch .* was interrupted"):
        views.pin(2)
    assert views.pin(1).previous == Turn(0)
    views.answer(1, waiting=3, lowest=7)
    assert views.pin(2).previous == Turn(1)


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
    assert (again.previous, again.oldest) == (Turn(0), Turn(0))
    views.answer(1, waiting=3, lowest=7)
    following = views.pin(2)
    assert (following.previous, following.oldest) == (Turn(1, 7), Turn(1, 0))


def test_an_epoch_that_runs_again_after_its_drain_follows_the_drain_before_it() -> None:
    """What a drain before the epoch had answered must not come again (seed 20009)."""
    views = Fetcher()
    for epoch in range(3):
        for drain in range(2):
            views.pin(epoch, drain, u=5 + 2 * epoch + drain)
            views.answer(epoch, drain, waiting=4 - drain, lowest=20)
    assert views.pin(2).previous == Turn(1, 1)


def test_an_epoch_has_so_many_drains_at_most() -> None:
    views = Fetcher()
    views.pin(0)
    views.answer(0, waiting=3, lowest=7)
    for drain in range(1, DRAINS_MAX - 1):
        views.pin(0, drain)
        views.answer(0, drain, waiting=3, lowest=7)
    # What is offered is a turn that can be told of, also where it is refused.
    offered = Drain(Turn(0, DRAINS_MAX - 1), Turn(0, DRAINS_MAX - 2), "", pays=False)
    assert views.pending().drains == {"q": offered}
    with pytest.raises(EpochOutOfOrder, match="drained 1022 times"):
        views.pin(0, DRAINS_MAX - 1)
    assert views.pin(1).previous == Turn(0, DRAINS_MAX - 2)


@pytest.mark.parametrize("turn", [(0, 0), (0, 1), (7, 0), (7, 1), (7, DRAINS_MAX - 1), (2**40, 3)])
def test_a_number_says_which_turn_it_is(turn: tuple[int, int]) -> None:
    known = Turn(*turn)
    assert Turn.of(known.number) == known
    assert (known.number < 0) == (known.drain > 0)


def test_turns_are_ordered_as_they_come() -> None:
    turns = [Turn(epoch, drain) for epoch in range(3) for drain in range(3)]
    assert all(before < after for before, after in itertools.pairwise(turns))


def test_a_new_history_ends_the_others_and_loses_none_of_their_rows() -> None:
    views = Fetcher()
    views.pin(0, query="a")
    views.answer(0, query="a", waiting=2, lowest=7)
    views.pin(1, query="a")
    views.pin(0, query="b", history="new")
    views.answer(0, query="b", waiting=1, lowest=9)
    with pytest.raises(OtherQuery, match="has ended"):
        views.pin(1, query="a", history="new")
    with pytest.raises(OtherQuery, match="has ended"):
        views.pin(0, query="a")
    pending = views.pending()
    assert (pending.rows, pending.since, sorted(pending.drains)) == (3, 7, ["a", "b"])
    # What waits for the one that ended is drained, and then nothing of it is left.
    drain = pending.drains["a"]
    assert drain.left == Turn(0)
    views.pin(drain.turn.epoch, drain.turn.drain, query="a", u=20)
    views.answer(drain.turn.epoch, drain.turn.drain, query="a")
    assert (views.pending().rows, sorted(views.pending().drains)) == (1, ["b"])
    with pytest.raises(OtherQuery, match="has ended"):
        views.pin(1, query="a", history="new")
    views.pin(1, query="b")
    views.pond = catalogue.forget(views.pond, Forget("s", "views", "a"))
    views.pin(0, query="a", history="new")


def test_many_histories_are_forgotten_but_for_their_waiting_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches, "ENDED_REMEMBERED", 3)
    views = Fetcher()
    for number in range(8):
        views.pin(0, query=f"q{number}", history="new")
        views.answer(0, query=f"q{number}", waiting=number == 1, lowest=7 if number == 1 else None)
    fetcher = views.pond.residents["s"].fetchers["views"]
    assert sorted(fetcher.queries) == ["q1", "q7"]
    assert sorted(fetcher.ended) == ["q1", "q5", "q6"]


def test_a_turn_that_came_again_with_other_questions_is_refused() -> None:
    views = Fetcher()
    views.pin(0)
    told = Answered("s", "views", "q", Turn(0), 1, 0, 50, None, "ab", digest=1)
    views.pond = fetches.answered(views.pond, told)
    views.pond = fetches.answered(views.pond, told)
    with pytest.raises(EpochChanged):
        fetches.answered(views.pond, Answered("s", "views", "q", Turn(0), 1, 0, 50, None, "cd", digest=2))


def test_so_is_one_before_the_last_for_what_it_left_waiting_would_be_lost() -> None:
    views = Fetcher()
    views.pin(0)
    views.answer(0, waiting=2, lowest=50)
    views.pin(0, 1, u=55)
    views.answer(0, 1, waiting=1, lowest=60)
    views.answer(0, waiting=2, lowest=50)
    with pytest.raises(EpochChanged):
        views.answer(0, waiting=3, lowest=50)


class Operator:
    name = "views"
    place = ("root", "s", "views")

    def __init__(self, is_shared: bool = False) -> None:
        self.is_shared = is_shared

    def due(self) -> dict[str, Drain]:
        return {}

    def take(self, query: str, spark: object) -> None: ...


@pytest.mark.parametrize("is_shared", [False, True])
def test_rows_of_a_query_go_to_the_operator_that_had_its_batch(
    is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_turns.OwnTurns, "watch", lambda self, spark: None)
    older, newer = Operator(is_shared), Operator(is_shared)
    first, second = own_turns.OwnTurns(older), own_turns.OwnTurns(newer)

    def takers(query: str, run: str = "1") -> list[bool]:
        return [first.may_take(older, query, run), second.may_take(newer, query, run)]

    takers("a")
    assert takers("a") == [False, not is_shared], (
        "the newest, where nobody can tell; unless several run at once"
    )
    with first.batch(None, "a", "1"):  # type: ignore[arg-type]
        pass
    assert takers("a") == [True, False]
    with second.batch(None, "b", "1"):  # type: ignore[arg-type]
        pass
    assert takers("b") == [False, True]
    assert takers("a") == [True, False]
    assert takers("a", "2") == [False, not is_shared], "another run, of which nobody had a batch"
