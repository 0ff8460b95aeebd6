"""Updaters that fall silent: when they are left out of U, when they count again, and what is late then."""

from __future__ import annotations

import math
import random
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

from millpond.coordinator import catalogue, updates
from millpond.coordinator.idleness import STAGING_S_MIN, Idleness
from millpond.errors import BadDuration, BadMessage, RowsWaiting, StageLost
from millpond.pond.state import State
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.times import Progress
from millpond.wire.epochs import BeginEpoch, CommitEpoch, Receipt
from millpond.wire.house import Register
from millpond.wire.questions import HoldsBack
from millpond.wire.states import RowsWork

INF = math.inf
IDLE_S = 30.0


class Ponds:
    """A pond of one State on virtual time, opened again at will."""

    def __init__(self) -> None:
        self._files = LossyFiles()
        self._epochs: dict[str, int] = {}
        self.open()

    def open(self) -> None:
        self.pond = LocalPond(self._files, slices=2)
        self.state: State = self.pond.state("s", key="long", value="long")
        self.updaters: dict[str, Any] = {}

    def register(self, name: str, idle: Any = "30 seconds", **options: Any) -> None:
        self.updaters[name] = self.state.update(key="k", at="t", value="v", name=name, idle=idle, **options)

    def send(self, name: str, *times: int) -> Any:
        epoch = self._epochs.get(name, 0)
        columns = {"k": [1] * len(times), "t": list(times), "v": list(times)}
        committed = self.updaters[name](
            pa.table({c: pa.array(v, pa.int64()) for c, v in columns.items()}), epoch
        )
        self._epochs[name] = epoch + 1
        return committed

    def begin(self, name: str) -> Any:
        """An epoch is being staged, and not committed."""
        return self.pond._client.call(
            BeginEpoch("s", name, "local", _turn(self._epochs.get(name, 0)), "continue")
        )

    def wait(self, seconds: float) -> None:
        self.pond._client.runtime.sleep(seconds)
        self.pond.coordinator.maintain()

    @property
    def u(self) -> Progress:
        return self.state.progress().update

    @property
    def holders(self) -> list[str]:
        return [holder.updater for holder in self.state.progress().held_by]


def _turn(epoch: int) -> Any:
    from millpond.ops.committing import turn_of

    return turn_of(epoch)


@pytest.fixture
def two() -> Ponds:
    """`busy` at 100, `quiet` at 10 with idle=, both just heard."""
    ponds = Ponds()
    ponds.register("busy", idle=None)
    ponds.register("quiet")
    ponds.send("busy", 100)
    ponds.send("quiet", 10)
    return ponds


def test_without_idle_a_silent_updater_holds_u_for_ever() -> None:
    ponds = Ponds()
    for name in ("busy", "quiet"):
        ponds.register(name, idle=None)
    ponds.send("busy", 100)
    ponds.send("quiet", 10)
    ponds.wait(1e9)
    assert ponds.u == 10
    assert ponds.holders == ["quiet"]


def test_a_silent_updater_is_left_out_after_so_long(two: Ponds) -> None:
    two.wait(IDLE_S - 1)
    assert (two.u, two.holders) == (10, ["quiet"])
    two.wait(1)
    assert (two.u, two.holders) == (100, ["busy"])
    two.send("busy", 200)
    assert two.u == 200


def test_rows_keep_it_in_and_empty_batches_do_not(two: Ponds) -> None:
    for time in range(11, 16):
        two.wait(IDLE_S / 2)
        two.send("quiet", time)
    assert two.u == 15
    for _ in range(3):
        two.wait(IDLE_S / 2)
        two.send("quiet")
    assert two.u == 100


def test_late_rows_are_rows_too(two: Ponds) -> None:
    for _ in range(4):
        two.wait(IDLE_S / 2)
        assert two.send("quiet", 5).late == 1
    assert two.u == 10


def test_when_rows_come_it_counts_again_and_those_below_u_are_late(two: Ponds) -> None:
    two.wait(IDLE_S)
    committed = two.send("quiet", 50, 99, 100, 120)
    assert (committed.rows, committed.late) == (2, 2)
    assert two.u == 100
    two.send("busy", 300)
    assert (two.u, two.holders) == (120, ["quiet"])
    assert two.state.progress().late == {"busy": 0, "quiet": 2}
    answers = two.state.fetch(key="k", at="t", into="v").now(pa.table({"k": [1, 1], "t": [99, 119]}))
    assert answers["v"].to_pylist() == [10, 100]


def test_one_that_never_had_rows_is_left_out_after_it_was_registered(two: Ponds) -> None:
    two.wait(IDLE_S - 1)
    two.register("new")
    two.send("quiet", 90)
    two.send("busy", 101)
    assert two.u == 10  # where U stood when it came
    two.wait(IDLE_S - 1)
    assert two.u == 10
    two.wait(1)
    assert two.u == 101
    assert two.state.progress().updaters == {"busy": 101, "quiet": 90, "new": 10}


def test_an_epoch_that_has_begun_counts_as_rows_for_a_while(two: Ponds) -> None:
    two.begin("quiet")
    two.wait(IDLE_S)
    assert two.u == 10
    assert two.send("quiet", 10).late == 0
    two.begin("quiet")
    two.wait(10 * IDLE_S)  # whoever staged it is gone
    assert two.u == 100


def test_an_epoch_that_has_begun_is_not_ended_by_another_query_of_the_name(two: Ponds) -> None:
    two.register("quiet", history="shared")
    two.pond._client.call(BeginEpoch("s", "quiet", "other", _turn(0), "shared"))
    two.send("quiet")
    two.register("quiet", history="shared")
    two.wait(IDLE_S)
    assert two.u == 10
    rows = pa.table({"k": [1], "t": [50], "v": [50]})
    assert two.updaters["quiet"].commit(rows, 0, "other").late == 0


def test_an_epoch_of_one_that_is_left_out_holds_u_where_it_is_until_it_is_committed(two: Ponds) -> None:
    two.wait(IDLE_S)
    assert two.u == 100
    assert two.begin("quiet").late_below == 100
    two.send("busy", 200)
    assert two.u == 100
    assert two.send("quiet", 150).late == 0
    assert two.u == 150


def test_empty_epochs_of_one_that_is_left_out_hold_u_no_longer_than_they_take(two: Ponds) -> None:
    two.wait(IDLE_S)
    two.send("quiet")
    two.send("busy", 200)
    assert two.u == 100
    two.wait(0.5)
    assert two.u == 200


def test_where_all_are_silent_u_is_where_the_furthest_is() -> None:
    for first, second in (("a", "b"), ("b", "a")):
        ponds = Ponds()
        ponds.register("a")
        ponds.register("b")
        ponds.register("done")
        ponds.send("done", 1)
        ponds.state.finish("done")
        ponds.send(first, 100 if first == "a" else 10)
        ponds.wait(1)
        ponds.send(second, 100 if second == "a" else 10)
        ponds.wait(10 * IDLE_S)
        progress = ponds.state.progress()
        assert progress.update == 100
        assert all(holder.idle for holder in progress.held_by)
        assert ponds.send("b", 90, 110).late == 1
        assert ponds.u == 110  # `a` is left out


def test_beside_one_that_finished_a_silent_one_is_left_out_as_well() -> None:
    ponds = Ponds()
    ponds.register("load", idle=None, delay=5)
    ponds.register("live")
    ponds.send("load", 100)
    ponds.state.finish("load")
    assert ponds.u == -INF
    ponds.send("load")  # its query may go on, without rows
    ponds.pond.close()
    ponds.open()
    ponds.wait(1)
    ponds.wait(IDLE_S)
    assert ponds.u == 95, "as far as it was when it finished"
    assert ponds.holders == ["live"]
    ponds.register("live")
    assert ponds.send("live", 90, 200).late == 1
    assert ponds.u == 200


def test_u_and_who_is_left_out_outlast_the_pond(two: Ponds) -> None:
    two.wait(IDLE_S)
    two.pond.close()
    two.open()
    assert two.u == 100
    assert two.state.progress().updaters["quiet"] == 10
    two.register("busy", idle=None)
    two.register("quiet")
    assert two.u == 100
    assert two.send("quiet", 60, 130).late == 1
    two.send("busy", 500)
    assert two.u == 130
    two.pond.close()
    two.open()
    two.wait(IDLE_S - 1)  # silence counts from when the pond was opened
    assert two.u == 130
    two.wait(1)
    two.wait(IDLE_S)
    assert two.u == 500


def test_the_same_epoch_again_drops_the_same_rows(two: Ponds) -> None:
    two.wait(IDLE_S)
    rows = pa.table({"k": [1, 1], "t": [50, 120], "v": [50, 120]})
    first = two.updaters["quiet"](rows, 1)
    two.send("busy", 400)
    two.wait(10 * IDLE_S)
    again = two.updaters["quiet"](rows, 1)
    assert again.replayed
    assert (again.rows, again.late) == (first.rows, first.late) == (1, 1)
    assert two.u == 400  # a replay brings nothing


def test_idle_can_be_given_later_and_taken_back(two: Ponds) -> None:
    two.register("quiet", idle=None)
    two.wait(IDLE_S)
    assert two.u == 10
    two.register("quiet", idle=timedelta(seconds=5))
    two.wait(5)
    assert two.u == 100
    two.register("quiet", idle=None)
    two.send("busy", 200)
    assert two.u == 100
    assert two.send("quiet", 99).late == 1


@pytest.mark.parametrize("idle", [5, 0, "0 seconds", timedelta(0), "soon", "-1 second", True])
def test_idle_is_a_duration(idle: Any) -> None:
    ponds = Ponds()
    with pytest.raises(BadDuration) as refused:
        ponds.register("feed", idle=idle)
    assert refused.value.hint
    assert ponds.state.progress().updaters == {}
    for seconds in (0.0, -1.0, INF, math.nan):
        with pytest.raises(BadMessage):
            Register("s", "feed", "updater", seconds)


def test_an_epoch_staged_before_u_went_on_without_it_is_staged_again() -> None:
    from test_updates import Feeding

    feeding = Feeding("feed", "other")
    feeding.pond = catalogue.register(feeding.pond, Register("s", "feed", "updater", IDLE_S))
    feeding.commit(_turn(0), 10)
    feeding.commit(_turn(0), 100, name="other")
    staged = feeding.message(_turn(1), 50)
    feeding.pond = updates.leave_out(feeding.pond, "s", ["feed"])
    assert feeding.u == 100
    with pytest.raises(StageLost):
        updates.commit_epoch(feeding.pond, staged)
    began = updates.awaken(feeding.pond, BeginEpoch("s", "feed", "q", _turn(1), "continue"))
    assert updates.begin_epoch(began, staged).late_below == 100
    replay = BeginEpoch("s", "feed", "q", _turn(0), "continue")
    assert updates.awaken(feeding.pond, replay) is feeding.pond


def test_an_epoch_that_is_not_visible_holds_u_back_though_its_updater_is_left_out() -> None:
    from test_updates import Feeding

    feeding = Feeding("feed", "other")
    feeding.commit(_turn(0), 10)
    feeding.commit(_turn(0), 100, name="other")
    feeding.commit(_turn(1), 60)
    resident = feeding.pond.residents["s"]
    assert updates.progress(resident, {"feed": 10}).update == 10
    resident = updates.leave_out(feeding.pond, "s", ["feed"]).residents["s"]
    assert updates.progress(resident, {"feed": 10}).update == 10
    assert updates.progress(resident, {}).update == 100


def test_what_is_remembered_has_an_end() -> None:
    ponds = Ponds()
    idleness = Idleness()
    for name in ("a", "b"):
        ponds.register(name)
    record = ponds.pond.coordinator._record
    resident = record.residents["s"]
    for name in ("a", "b"):
        idleness.heard(resident, name, 1.0)
        idleness.begun(resident, name, "q", 2.0)
    ponds.pond.forget(ponds.state, name="a")
    after = ponds.pond.coordinator._record
    idleness.keep_only(after)
    assert idleness.silent_s(after.residents["s"], 5.0) == {"b": 4.0}
    assert len(idleness._last) == len(idleness._begun) == 1
    assert idleness.silent(after.residents["s"], 2.0 + max(10 * IDLE_S, STAGING_S_MIN)) == ["b"]
    assert not idleness._begun


@pytest.mark.parametrize("seed", range(40))
def test_u_never_falls_and_what_is_final_stays(seed: int) -> None:
    """Updaters come, go silent, and come again, while the pond is closed and opened; checked by plain Python."""
    chance = random.Random(seed)
    ponds = Ponds()
    names = ["a", "b", "c"][: chance.choice((2, 3))]
    idle = {name: chance.choice((None, "10 seconds", "20 seconds")) for name in names}
    delay = {name: chance.choice((0, 20)) for name in names}
    for name in names:
        ponds.register(name, idle=idle[name], delay=delay[name])
    timely: dict[int, int] = {}
    final: dict[int, Any] = {}
    floor: Progress = -INF
    for step in range(40):
        match chance.choice(("send", "send", "send", "wait", "begin", "open")):
            case "send":
                name = chance.choice(names)
                marks = ponds.state.progress()
                below = max(marks.updaters[name], floor)
                start = 10 * step + chance.choice((-60, 0))
                times = sorted({start + chance.randrange(40) for _ in range(chance.choice((0, 1, 4)))})
                committed = ponds.send(name, *times)
                assert committed.late == sum(time < below for time in times)
                timely.update({time: time for time in times if time >= below})
            case "wait":
                ponds.wait(chance.choice((0.5, 9.0, 25.0)))
            case "begin":
                ponds.begin(chance.choice(names))
            case "open":
                ponds.pond.close()
                ponds.open()
                for name in names:
                    ponds.register(name, idle=idle[name], delay=delay[name])
        progress = ponds.state.progress()
        assert progress.update >= floor
        floor = progress.update
        if floor > -INF:
            asked = [int(floor) - 1 - back for back in (0, 7, 50)]
            table = pa.table({"k": [1] * 3, "t": asked})
            answers = ponds.state.fetch(key="k", at="t", into="v").now(table)["v"].to_pylist()
            for at, answer in zip(asked, answers, strict=True):
                assert answer == max((time for time in timely if time <= at), default=None)
                assert final.setdefault(at, answer) == answer
    ponds.pond.validate()


def test_an_error_for_waiting_rows_says_who_holds_u_back() -> None:
    ponds = Ponds()
    asked = pa.table({"k": [1], "t": [50]})
    fetch = ponds.state.fetch(key="k", at="t", into="v")
    with pytest.raises(RowsWaiting, match="no updater of it is registered") as refused:
        fetch.now(asked)
    assert "state.update" in refused.value.hint
    ponds.register("feed", idle=None)
    ponds.register("other", idle=None)
    ponds.send("other", 70)
    ponds.wait(42)
    with pytest.raises(
        RowsWaiting, match=r"updater 'feed' \(it never ran: registered, and no epoch for 42 s\)"
    ) as refused:
        fetch.now(asked)
    assert refused.value.held_by == ["feed"]
    assert "finish('feed')" in refused.value.hint
    assert "idle=" in refused.value.hint
    ponds.send("feed", 20)
    ponds.wait(8)
    with pytest.raises(RowsWaiting, match=r"U = 20 .* updater 'feed' \(no rows for 8 s\)"):
        fetch.now(asked)
    assert ponds.state.progress().held_by == [HoldsBack("feed", True, 8.0)]


def test_pending_says_who_holds_u_back(two: Ponds) -> None:
    sink: list[Any] = []
    views = two.state.fetch(key="k", at="t", into="v", name="views").to(lambda rows, epoch: sink.append(rows))
    views(pa.table({"k": [1], "t": [50]}), 0)
    two.wait(5)
    pending = views.pending()
    assert pending.rows == 1
    assert [holder.updater for holder in pending.held_by] == ["quiet"]
    assert str(pending.held_by[0]) == "updater 'quiet' (no rows for 5 s)"
    two.wait(IDLE_S)
    assert [holder.updater for holder in views.pending().held_by] == ["busy"]
    views.drain()
    assert views.pending().rows == 0
    assert sink[-1]["v"].to_pylist() == [10]


def test_several_that_hold_u_back_are_named_up_to_three() -> None:
    from millpond.wire.questions import held_back_by

    four = [HoldsBack(name, True, 1.0) for name in "abcd"]
    assert held_back_by(four[:2]).count("updater") == 2
    assert held_back_by(four).endswith("updater 'c' (no rows for 1 s) and 1 more")
    assert held_back_by([HoldsBack("a", True, 1.0, idle=True)]).endswith("(no rows for 1 s, idle)")


def test_messages_with_receipts_of_late_rows_alone_have_rows() -> None:
    message = CommitEpoch(
        "s", "feed", "q", _turn(0), "continue", 0, 0, "long", [Receipt(0, 1, 0, 2, 0, None)], RowsWork()
    )
    assert updates.has_rows(message)
