"""Programs through the lives of containers: moves of slices and lanes, backups that take over, code that changes."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest
from test_program_plain import Recommender, draw_recommender, entries, in_pond, outcome

import millpond as mp
from millpond.container.core import Core
from millpond.coordinator.loads import Loads, load_moves
from millpond.errors import SchemaMismatch, UnknownResident
from millpond.programs.plain import state_of
from millpond.programs.slicing import lane_of
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.wire.base import SliceId

SLICES = 8


@mp.program
class Counter:
    counts: mp.Partitioned[mp.Map[int, int]]

    def add(self, key: int, by: int) -> int:
        self.counts[key] += by
        return self.counts[key]


@mp.program
class CounterTimesTen:
    counts: mp.Partitioned[mp.Map[int, int]]
    last: mp.Partitioned[mp.Map[int, int]]

    def add(self, key: int, by: int) -> int:
        self.counts[key] += 10 * by
        now = self.counts[key]
        self.last[key] = by
        return now


def test_slices_and_lanes_move_while_epochs_come() -> None:
    plain = mp.plain(Recommender, slices=SLICES)
    chance = random.Random(3)
    with LocalPond(LossyFiles(3), containers=3, slices=SLICES) as pond:
        program = pond.program("rec", Recommender)
        counts: dict[str, int] = {}
        for method, calls in draw_recommender(random.Random(4)):
            slices = chance.sample(range(SLICES), 3)
            pond.move(slices, to=chance.randrange(3))
            epoch = counts.get(method, 0)
            counts[method] = epoch + 1
            assert in_pond(program, method, calls, epoch) == [outcome(plain, method, call) for call in calls]
        assert entries(program) == state_of(plain)
        pond.validate()


@mp.program(lanes=4)
class Busy:
    sums: mp.Partial[mp.Vector]

    def work(self, key: int, times: int):
        for _ in range(times):
            self.sums[key] += 1.0


def test_a_hot_lane_is_seen_and_moved() -> None:
    """Lanes 0 and 1 are in slices 0 and 2 of eight, which one container has: what is done there is told of these slices."""
    keys = {lane_of(key, SLICES, 4): key for key in range(50)}
    plain = mp.plain(Busy, slices=SLICES)
    with LocalPond(LossyFiles(1), containers=2, slices=SLICES) as pond:
        busy = pond.program("busy", Busy)
        loads = Loads()
        for epoch in range(3):
            calls = [{"key": keys[lane], "times": 5_000 if lane < 2 else 1} for lane in range(4)]
            in_pond(busy, "work", calls, epoch)
            for call in calls:
                plain.work(**call)
            figures = pond.coordinator.figures.gather()
            loads.looks(10.0 * epoch, figures.slices.columns(), figures.containers)
        rates = loads.rates("cpu_us")
        assert set(sorted(rates, key=lambda number: rates[number])[-2:]) == {0, 2}
        owners = list(pond.placement().values())
        assert owners[0] == owners[2] == 0
        plan = load_moves(rates, owners, [0, 1])
        assert {*plan.moves} & {0, 2}
        assert set(plan.moves.values()) == {1}, "one of the two goes to the other container"
        pond.coordinator.place([plan.moves.get(SliceId(n), owner) for n, owner in enumerate(owners)])
        in_pond(busy, "work", calls, 3)
        for call in calls:
            plain.work(**call)
        assert entries(busy) == state_of(plain)
        pond.validate()


def test_a_backup_takes_over_and_runs_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = mp.plain(Recommender, slices=SLICES)
    files = LossyFiles(3)
    with LocalPond(files, containers=3, slices=SLICES, backups=1) as pond:
        program = pond.program("rec", Recommender)
        pond.coordinator.maintain()
        for epoch, (method, calls) in enumerate(draw_recommender(random.Random(5))[:6:2]):
            in_pond(program, method, calls, epoch)
            for call in calls:
                outcome(plain, method, call)
        # Where the record is replayed, nothing is loaded.
        with monkeypatch.context() as patch:
            patch.setattr("millpond.container.holdings.program_code._loaded", _refuse)
            pond.hosting.kill(1)
            pond.coordinator.recover(1)
            assert entries(program) == state_of(plain)
        in_pond(program, "add_rating", [{"user": 1, "item": 99, "rating": 1.0}], 3)
        plain.add_rating(1, 99, 1.0)
        assert entries(program) == state_of(plain)
        pond.validate()


def _refuse(data: bytes) -> Any:
    raise AssertionError("code was loaded")


def test_an_epoch_stays_what_it_was_when_the_code_changes() -> None:
    files = LossyFiles(3)
    rows = pa.table({"key": [1, 2, 1], "by": [1, 2, 3]})
    with LocalPond(files, containers=2, slices=SLICES) as pond:
        add = pond.program("c", Counter).call("add", into="now", name="feed")
        assert add(rows, 0)["now"].to_pylist() == [1, 2, 4]
    with LocalPond(files.crash(), containers=2, slices=SLICES) as pond:
        program = pond.program("c", CounterTimesTen)
        add = program.call("add", into="now", name="feed")
        assert add(rows, 0)["now"].to_pylist() == [1, 2, 4], "a replay"
        assert (program.entries("counts"), program.entries("last")) == ({1: 4, 2: 2}, {})
        assert add(rows, 1)["now"].to_pylist() == [14, 22, 44]
        assert (program.entries("counts"), program.entries("last")) == ({1: 44, 2: 22}, {1: 3, 2: 2})


def test_a_program_that_is_forgotten_is_gone() -> None:
    with LocalPond(LossyFiles(3), containers=2, slices=SLICES) as pond:
        counter = pond.program("c", Counter)
        assert counter.add(key=1, by=2) == 2
        metrics = pond.metrics()["programs"]["c"]
        assert (metrics["calls"], metrics["entries"]) == (1, 1)
        pond.forget("c")
        with pytest.raises(UnknownResident):
            counter.add(key=1, by=2)
        assert pond.programs() == []
        assert pond.program("c", Counter).add(key=1, by=5) == 5


def test_code_of_a_program_that_was_made_anew_runs_only_where_it_fits() -> None:
    """Who still has the earlier one sees all lanes that there are, and takes no values for others."""
    other = CounterTimesTen.__millpond_graph__
    fewer = Recommender.__millpond_graph__._replace(lanes=2)
    counts = other.fields[0]._replace(value="double")
    with LocalPond(LossyFiles(3), containers=2, slices=SLICES) as pond:
        rec, counter = pond.program("rec", Recommender), pond.program("c", CounterTimesTen)
        feed = rec.call("add_rating")
        rec.add_rating(1, 2, 3.0)
        pond.forget("rec")
        pond.forget("c")
        anew = pond.program("rec", fewer)
        anew.add_rating(1, 2, 3.0)
        pond.program("c", other._replace(fields=(counts, other.fields[1]))).call("add")
        rows = pa.table({"user": [1], "item": [2], "rating": [3.0]})
        anew.call("add_rating")
        assert rec.get_rec(user=1) == []
        rec.add_rating(1, 4, 3.0)
        feed(rows, 0)
        assert anew.entries("user_item") == {(1, 2): 3.0, (1, 4): 3.0}
        assert sum(sum(lane.values()) for lane in rec.entries("co_occ").values()) == 2.0
        with pytest.raises(SchemaMismatch, match="'counts' is no more as this code has it"):
            counter.call("add", name="feed")(pa.table({"key": [1], "by": [1]}), 0)
        pond.validate()


def test_containers_that_lose_what_was_staged_are_sent_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them refuses its part: the others do not wait, and the epoch comes again."""
    with LocalPond(LossyFiles(3), containers=3, slices=SLICES) as pond:
        counter = pond.program("c", Counter)
        add = counter.call("add", into="now", name="feed")
        rows = pa.table({"key": list(range(20)), "by": [1] * 20})
        begin, refused = Core.begin, []

        def forgetful(core: Core, message: Any) -> Any:
            if core.container == 2 and not refused:
                refused.append(message)
                core._staged.forget(lambda epoch: True)
            return begin(core, message)

        monkeypatch.setattr(Core, "begin", forgetful)
        assert add(rows, 0)["now"].to_pylist() == [1] * 20
        assert refused
        pond.validate()
