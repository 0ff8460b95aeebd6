"""How epochs of updaters are numbered, recognised and decided, and whose history they go on with."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from millpond.code.rules import keep_latest, put
from millpond.coordinator import catalogue, updates
from millpond.coordinator.records import QUERIES_MAX, TURNS_REMEMBERED, PondRecord
from millpond.errors import (
    EpochChanged,
    EpochOutOfOrder,
    OtherQuery,
    StageLost,
    UnknownResident,
    UnknownUpdater,
    UpdaterFinished,
    WrongType,
)
from millpond.stores.outputs import KEPT
from millpond.times import Progress
from millpond.wire.base import Turn
from millpond.wire.epochs import BeginEpoch, CommitEpoch, EpochCommitted, EpochPlan, History, Receipt
from millpond.wire.house import Forget, Register
from millpond.wire.questions import Report
from millpond.wire.states import RowsWork, StateSpec


class Feeding:
    """One State and its updaters, driven by hand."""

    def __init__(self, *updaters: str) -> None:
        spec = StateSpec("s", "key long", "value long", put(), keep_latest())
        self.pond = catalogue.open_resident(PondRecord(owners=(0, 0)), spec)
        for name in updaters or ("feed",):
            self.pond = catalogue.register(self.pond, Register("s", name, "updater"))

    def begin(
        self, turn: Turn, query: str = "q", history: History = "continue", name: str = "feed"
    ) -> EpochPlan:
        return updates.begin_epoch(self.pond, BeginEpoch("s", name, query, turn, history))

    def message(
        self,
        turn: Turn,
        newest: int | None = None,
        query: str = "q",
        history: History = "continue",
        name: str = "feed",
        **other: Any,
    ) -> CommitEpoch:
        plan = self.begin(turn, query, history, name)
        rows = 0 if newest is None else 1
        receipts = [Receipt(0, 1, rows, 0, (newest or 0) % 2**64, newest)]
        kind = "long" if rows else ""
        made = CommitEpoch("s", name, query, turn, history, 0, plan.late_below, kind, receipts, RowsWork())
        return replace(made, **other)

    def commit(self, turn: Turn, newest: int | None = None, **given: Any) -> EpochCommitted:
        message = self.message(turn, newest, **given)
        if updates.begin_epoch(self.pond, message).replayed:
            return updates.replay_epoch(self.pond, message)
        self.pond, committed = updates.commit_epoch(self.pond, message)
        return committed

    @property
    def u(self) -> Progress:
        return self.pond.residents["s"].update_progress


def test_the_first_epoch_is_0() -> None:
    feeding = Feeding()
    for turn in (Turn(1), Turn(7), Turn(3, 1)):
        for history in ("continue", "shared"):
            with pytest.raises(EpochOutOfOrder) as caught:
                feeding.begin(turn, history=history)
            assert caught.value.expected == 0
    assert not feeding.begin(Turn(0)).replayed
    assert not feeding.begin(Turn(7), history="new").replayed


def test_turns_follow_one_another_and_drains_come_between() -> None:
    feeding = Feeding()
    feeding.commit(Turn(0), 5)
    for turn in (Turn(2), Turn(1, 1), Turn(2, 1)):
        with pytest.raises(EpochOutOfOrder):
            feeding.begin(turn)
    feeding.commit(Turn(0, 1), 6)
    feeding.commit(Turn(0, 3), 7)
    assert feeding.begin(Turn(0, 2)).replayed, "it was passed over: nothing of it comes any more"
    feeding.commit(Turn(1), 8)
    assert feeding.begin(Turn(0, 3)).replayed


def test_a_name_belongs_to_the_query_that_began() -> None:
    feeding = Feeding()
    feeding.commit(Turn(0), 5)
    with pytest.raises(OtherQuery) as caught:
        feeding.begin(Turn(0), query="other")
    assert (caught.value.resident, caught.value.name, caught.value.query) == ("s", "feed", "other")
    assert caught.value.hint
    feeding.commit(Turn(1), 6)
    with pytest.raises(OtherQuery):
        feeding.begin(Turn(1), query="other")


def test_a_new_history_begins_anywhere_and_ends_the_old_one() -> None:
    feeding = Feeding()
    feeding.commit(Turn(0), 5)
    feeding.commit(Turn(1), 10)
    # Asking changes nothing: the other goes on until the first epoch is decided.
    assert feeding.begin(Turn(40), query="other", history="new").late_below == 10
    assert not feeding.begin(Turn(2)).replayed
    feeding.commit(Turn(40), 30, query="other", history="new")
    assert list(feeding.pond.residents["s"].updaters["feed"].queries) == ["other"]
    assert feeding.u == 30
    with pytest.raises(OtherQuery):
        feeding.begin(Turn(2))
    # Once it has begun, it is one like any other.
    with pytest.raises(EpochOutOfOrder):
        feeding.begin(Turn(39), query="other", history="new")
    with pytest.raises(EpochOutOfOrder):
        feeding.begin(Turn(42), query="other", history="new")
    feeding.commit(Turn(41), 31, query="other")


def test_queries_that_share_a_name_have_watermarks_of_their_own() -> None:
    feeding = Feeding()
    feeding.commit(Turn(0), 100, query="one", history="shared")
    assert feeding.u == 100
    # A newcomer begins where the name stands: what is final stays final.
    assert feeding.begin(Turn(0), query="two", history="shared").late_below == 100
    feeding.commit(Turn(0), 120, query="two", history="shared")
    assert feeding.u == 100
    feeding.commit(Turn(1), 500, query="one", history="shared")
    assert feeding.u == 120, "the slower one counts"
    assert feeding.begin(Turn(1), query="two", history="shared").late_below == 120
    assert feeding.begin(Turn(2), query="one", history="shared").late_below == 500
    feeding.commit(Turn(1), 600, query="two", history="shared")
    assert feeding.u == 500
    # Epochs are numbered for each.
    with pytest.raises(EpochOutOfOrder):
        feeding.begin(Turn(3), query="two", history="shared")


def test_a_name_is_shared_by_so_many_at_most() -> None:
    feeding = Feeding()
    for number in range(QUERIES_MAX):
        feeding.commit(Turn(0), query=f"q{number}", history="shared")
    with pytest.raises(OtherQuery, match="share the name"):
        feeding.begin(Turn(0), query="more", history="shared")
    feeding.pond = catalogue.forget(feeding.pond, Forget("s", "feed", "q7"))
    feeding.commit(Turn(0), query="more", history="shared")


def test_a_report_counts_for_every_query() -> None:
    feeding = Feeding()
    feeding.commit(Turn(0), 10, query="one", history="shared")
    feeding.commit(Turn(0), 10, query="two", history="shared")
    feeding.pond = updates.report(feeding.pond, Report("s", "feed", 50, None))
    for query in ("one", "two"):
        assert feeding.begin(Turn(1), query=query, history="shared").late_below == 50
    assert feeding.u == 50
    feeding.pond = updates.report(feeding.pond, Report("s", "feed", 20, None))
    assert feeding.u == 50, "progress never falls"


def test_u_is_the_slowest_updaters_and_never_falls() -> None:
    feeding = Feeding("feed", "other")
    feeding.commit(Turn(0), 100)
    assert feeding.u == -math.inf
    feeding.commit(Turn(0), 40, name="other")
    assert feeding.u == 40
    feeding.pond = catalogue.register(feeding.pond, Register("s", "late", "updater"))
    assert feeding.u == 40
    assert feeding.begin(Turn(0), name="late").late_below == 40
    feeding.commit(Turn(1), 90, name="other")
    assert feeding.u == 40
    feeding.pond = catalogue.forget(feeding.pond, Forget("s", "late"))
    assert feeding.u == 90
    feeding.pond = catalogue.forget(feeding.pond, Forget("s", "other"))
    feeding.pond = catalogue.forget(feeding.pond, Forget("s", "feed"))
    assert feeding.u == 100, "with nobody left it stays"


def test_a_replay_answers_the_same_or_is_refused() -> None:
    feeding = Feeding()
    first = feeding.commit(Turn(0), 5)
    feeding.commit(Turn(1), 20)
    before = feeding.pond
    again = feeding.commit(Turn(0), 5)
    assert again == replace(first, replayed=True)
    with pytest.raises(EpochChanged):
        feeding.commit(Turn(0), 6)
    assert feeding.pond is before
    assert feeding.begin(Turn(0)).late_below == -math.inf, "late rows are filtered as they were then"
    assert feeding.begin(Turn(1)).late_below == 5


def test_turns_are_remembered_as_long_as_outputs_are_and_then_known_by_number() -> None:
    assert KEPT[1] <= TURNS_REMEMBERED
    feeding = Feeding()
    for epoch in range(TURNS_REMEMBERED + 5):
        feeding.commit(Turn(epoch), epoch)
    assert len(feeding.pond.residents["s"].updaters["feed"].queries["q"].recent) == TURNS_REMEMBERED
    assert feeding.commit(Turn(5), 5).rows == 1
    old = feeding.commit(Turn(4), 999)
    assert old.replayed
    assert feeding.u == TURNS_REMEMBERED + 4


def test_an_epoch_that_was_staged_under_another_watermark_is_staged_again() -> None:
    feeding = Feeding()
    message = feeding.message(Turn(0), 60)
    feeding.pond = updates.report(feeding.pond, Report("s", "feed", 50, None))
    with pytest.raises(StageLost):
        updates.check_epoch(feeding.pond, message)
    with pytest.raises(StageLost):
        updates.commit_epoch(feeding.pond, message)


def test_who_has_finished_sends_empty_epochs_only() -> None:
    feeding = Feeding("feed", "other")
    feeding.pond = updates.report(feeding.pond, Report("s", "feed", math.inf, None))
    with pytest.raises(UpdaterFinished):
        feeding.commit(Turn(0), 5)
    feeding.commit(Turn(0))
    feeding.pond = updates.report(feeding.pond, Report("s", "other", math.inf, None))
    with pytest.raises(UpdaterFinished):
        catalogue.register(feeding.pond, Register("s", "third", "updater"))


def test_the_first_rows_settle_the_kind_of_time() -> None:
    feeding = Feeding("feed", "other")
    other = feeding.message(Turn(0), 5, name="other", time_kind="timestamp")
    feeding.commit(Turn(0), 5)
    with pytest.raises(WrongType):
        updates.check_epoch(feeding.pond, other)


def test_what_is_not_known_is_said() -> None:
    feeding = Feeding()
    with pytest.raises(UnknownUpdater):
        feeding.begin(Turn(0), name="nobody")
    with pytest.raises(UnknownResident):
        updates.begin_epoch(feeding.pond, BeginEpoch("t", "feed", "q", Turn(0), "continue"))


def test_an_updater_whose_last_epoch_is_not_visible_holds_u_back() -> None:
    feeding = Feeding()
    feeding.commit(Turn(0), 5)
    feeding.commit(Turn(1), 50)
    resident = feeding.pond.residents["s"]
    assert updates.progress(resident, {}).update == 50
    held = updates.progress(resident, {"feed": 5})
    assert (held.update, held.updaters) == (5, {"feed": 5})


def test_an_epoch_with_a_source_is_known_by_that_alone() -> None:
    """What was made of the source may differ from one run to the next."""

    def receipts(*made: tuple[int, int, int | None]) -> list[Receipt]:
        return [Receipt(at, 1, rows, 0, digest, 5, source) for at, (rows, digest, source) in enumerate(made)]

    feeding = Feeding()
    feeding.commit(Turn(0), 5, receipts=receipts((1, 11, 2**64 - 1), (2, 12, 3)))
    again = feeding.commit(Turn(0), 5, receipts=receipts((0, 0, 2)))
    assert (again.rows, again.replayed) == (3, True)
    for other in (receipts((1, 11, 3), (2, 12, 3)), receipts((3, 23, None)), []):
        with pytest.raises(EpochChanged) as caught:
            feeding.commit(Turn(0), 5, receipts=other)
        assert caught.value.hint
    # One that had no rows, and one whose rows are their own source.
    feeding.commit(Turn(1), receipts=[])
    for none in ([], receipts((0, 0, 0)), receipts((0, 0, 0), (0, 0, 0))):
        assert feeding.commit(Turn(1), receipts=none).replayed
    with pytest.raises(EpochChanged):
        feeding.commit(Turn(1), receipts=receipts((0, 0, 7)))
    feeding.commit(Turn(2), 6)
    assert feeding.commit(Turn(2), 6).replayed
    with pytest.raises(EpochChanged):
        feeding.commit(Turn(2), receipts=receipts((0, 0, 0)))
    # Partitions without rows, which another run may not have.
    feeding.commit(Turn(3), receipts=receipts((0, 0, 0)))
    assert feeding.commit(Turn(3), receipts=[]).replayed
    with pytest.raises(EpochChanged):
        feeding.commit(Turn(3), receipts=receipts((1, 5, None)))
