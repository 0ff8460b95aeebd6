"""Slices that change hands in a running pond, and residents that are forgotten: nothing is lost, nothing comes back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import millpond as mp
from millpond.container.holdings import holding_of
from millpond.container.holdings.base import Means, Ready
from millpond.container.layout import slice_of_snapshot, snapshot_name
from millpond.durable.crashpoints import SimulatedCrash, armed, counted
from millpond.errors import (
    BadOption,
    MillpondError,
    Moved,
    UnknownResident,
    UnknownTable,
    UnknownUpdater,
    WriteFailed,
)
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.wire.base import SliceId
from millpond.wire.epochs import CommitEpoch
from millpond.wire.figures import AskFigures
from millpond.wire.house import ContainerStatus
from millpond.wire.states import ReadSlices

sys.path.append(str(Path(__file__).resolve().parent.parent / "durability"))
import crashes

pytestmark = pytest.mark.filterwarnings("ignore::millpond.errors.RuleInterpreted")
SLICES = 6
KEYS = range(40)


@mp.transaction(results="now long")
def add(t, k, v):  # type: ignore[no-untyped-def]
    t[k].x += v
    return t[k].x


def after(files: LossyFiles, lose: str, seed: int) -> LossyFiles:
    """What the next process would find if this one ended now. It goes on all the same."""
    halted, chance = files._halted, files.seed
    try:
        return crashes.after(files, lose, seed)
    finally:
        files._halted, files.seed = halted, chance


def outcomes_of(files: LossyFiles) -> list[tuple[str, int]]:
    halted, chance = files._halted, files.seed
    try:
        return crashes.outcomes_of(files)
    finally:
        files._halted, files.seed = halted, chance


class Scene:
    """A pond with a State and a group of tables, and what they must hold."""

    def __init__(self, files: LossyFiles, containers: int = 3) -> None:
        self.files = files
        self.pond = LocalPond(files, containers=containers, slices=SLICES)
        self.state = self.pond.state("s", key="long", value="long")
        self.table = self.pond.table("t", key="k long", value="x long", default={"x": 0})
        self.feed = self.state.update(key="k", at="t", value="v", name="feed")
        self.adding = self.pond.transactions("adding", [self.table], {"add": add})

    def epoch(self, number: int) -> None:
        """Values are the epoch's number; what a key adds up to tells how often it was added to."""
        self.feed(pa.table({"k": list(KEYS), "t": [number] * len(KEYS), "v": [number] * len(KEYS)}), number)
        self.adding(pa.table({"ts": [number] * 3, "k": [1, 2, 1], "v": [1, 10, 100]}), number)

    def place(self, *owners: int) -> None:
        self.pond.coordinator.place(owners)

    def check(self, epochs: int) -> None:
        self.pond.validate()
        if epochs:
            asked = pa.table({"k": list(KEYS), "a": [-1] * len(KEYS), "b": [epochs - 2] * len(KEYS)})
            fetch = self.state.fetch(key="k", between=("a", "b"), into="v", rule=mp.values())
            answers = fetch.now(asked)["v"].to_pylist()
            assert answers == [list(range(epochs - 1))] * len(KEYS)
            held = {
                key: time
                for service in self.pond.hosting.services.values()
                for number, one in service.core.holding("s").slices.items()
                for key, time in newest(one.store.export()).items()
            }
            assert held == dict.fromkeys(KEYS, epochs - 1)
        rows = {row["k"]: row["x"] for row in self.table.snapshot().to_pylist()}
        assert rows == ({1: 101 * epochs, 2: 10 * epochs} if epochs else {})
        for number in range(max(0, epochs - 3), epochs):
            out = self.adding(pa.table({"ts": [number] * 3, "k": [1, 2, 1], "v": [1, 10, 100]}), number)
            assert out["now"].to_pylist() == [101 * number + 1, 10 * number + 10, 101 * number + 101]

    def served(self) -> list[int]:
        """Who serves each slice, as the containers say."""
        owners = {
            number: container
            for container, service in self.pond.hosting.services.items()
            for number in service.core.owned
        }
        return [owners[number] for number in range(SLICES)]


def newest(batch: pa.RecordBatch) -> dict[int, int]:
    return dict(zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True))


def reopened(files: LossyFiles, lose: str = "all", seed: int = 0, containers: int = 3) -> Scene:
    return Scene(after(files, lose, seed), containers)


@pytest.mark.parametrize("closed", [True, False])
def test_slices_are_where_they_were_when_the_pond_opens_again(closed: bool) -> None:
    files, owners = LossyFiles(), [2, 0, 0, 1, 0, 2]
    scene = Scene(files)
    scene.epoch(0)
    scene.place(*owners)
    version = scene.pond.coordinator._record.version
    if closed:
        scene.pond.close()
    scene = reopened(files)
    assert scene.served() == owners
    assert scene.pond.coordinator._record.version == version
    scene.check(1)
    scene = reopened(scene.files, containers=4)
    assert sorted(scene.served()) == [0, 0, 1, 2, 2, 3], "one that is new serves, too"
    scene.check(1)
    scene = reopened(scene.files, containers=2)
    assert sorted(scene.served()) == [0, 0, 0, 1, 1, 1]
    scene.check(1)


PLACES = [(1, 1, 1, 1, 2, 2), (2, 2, 0, 0, 0, 0), (0, 0, 1, 1, 2, 2), (1, 1, 2, 2, 0, 0), (0, 0, 1, 1, 2, 2)]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_slices_move_with_all_that_is_in_them(checkpoint: bool) -> None:
    """There and back, also to an incarnation that had them before."""
    scene = Scene(LossyFiles())
    version = scene.pond._client.placement().version
    for number, owners in enumerate(PLACES):
        scene.epoch(number)
        scene.place(*owners)
        assert scene.served() == list(owners)
        assert list(scene.pond.placement().values()) == list(owners)
        scene.check(number + 1)
        if checkpoint and number % 2:
            scene.pond.checkpoint()
        reopened(scene.files).check(number + 1)
    assert scene.pond._client.placement().version > version
    for container in list(scene.pond.hosting.services):
        scene.pond.hosting.kill(container)
        scene.pond.coordinator.recover(container)
    scene.check(len(PLACES))
    scene.epoch(len(PLACES))
    scene.check(len(PLACES) + 1)


def test_a_slice_that_comes_back_is_rebuilt_in_the_order_of_its_owners() -> None:
    """Its log is in one directory, then in another, then in the first again."""
    scene = Scene(LossyFiles(), containers=2)
    both = {0: [0] * SLICES, 1: [1] * SLICES}
    for number in range(5):
        scene.place(*both[number % 2])
        scene.epoch(number)
    scene.check(5)
    for containers in (2, 1, 3):
        again = reopened(scene.files, containers=containers)
        again.check(5)


def test_a_place_that_changes_nothing_does_nothing() -> None:
    scene = Scene(LossyFiles())
    scene.epoch(0)
    with counted() as plans:
        scene.place(*scene.served())
    assert not any(plan.hits for plan in plans.values())


def test_who_does_not_know_that_a_slice_moved_finds_its_way() -> None:
    scene = Scene(LossyFiles())
    scene.epoch(0)
    stale = scene.pond._client.placement()
    scene.place(1, 1, 1, 2, 2, 2)
    assert scene.pond._client._placement is stale, "nobody has told it"
    service = scene.pond.hosting.services[0]
    with pytest.raises(Moved) as caught:
        service.read(ReadSlices("s", 0, [0]))
    assert caught.value.slice_id == 0
    scene.check(1)
    scene.epoch(1)
    scene.place(0, 0, 0, 0, 0, 0)
    scene.epoch(2)
    scene.check(3)


def test_rows_that_were_staged_before_a_move_are_staged_again() -> None:
    scene = Scene(LossyFiles())
    scene.epoch(0)
    intake, moved = scene.feed._intake, []
    stage = intake.stage

    def staged(*given: Any) -> Any:
        done = stage(*given)
        if not moved:
            moved.append(scene.place(2, 2, 1, 1, 0, 0))
        return done

    intake.stage = staged  # type: ignore[method-assign]
    scene.epoch(1)
    assert moved
    scene.check(2)


def test_a_slice_that_goes_while_its_rows_are_staged_loses_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever rows lie, they are of the right number and digest; they must lie where their slice is."""
    scene = Scene(LossyFiles())
    scene.place(0, 0, 1, 1, 2, 2)
    scene.epoch(0)
    holding = type(scene.pond.hosting.services[0].core.holding("s"))
    check, moved = holding.check, []

    def checked(self: Any, rows: Any) -> Any:
        out = check(self, rows)
        if not moved:
            # The others take what they are sent: nobody notices.
            moved.append(scene.place(1, 0, 1, 1, 2, 2))
        return out

    monkeypatch.setattr(holding, "check", checked)
    scene.epoch(1)
    assert moved
    scene.check(2)


def test_rows_of_a_slice_that_is_not_there_are_not_prepared() -> None:
    scene = Scene(LossyFiles())
    scene.epoch(0)
    core = scene.pond.hosting.services[0].core
    commit, staged = scene.pond._client._coordinator.call, []

    def without_the_slice(message: Any, *given: Any) -> Any:
        if isinstance(message, CommitEpoch) and not staged:
            staged.append(core._staged.rows)
            core.holding("s").slices.pop(min(core.owned))
        return commit(message, *given)

    scene.pond._client._coordinator.call = without_the_slice  # type: ignore[method-assign]
    with pytest.raises(Moved):
        scene.epoch(1)
    assert staged[0] > 0
    assert not core._logged


def steps(owners: tuple[int, ...]) -> list[Callable[[Scene], None]]:
    return [
        lambda scene: scene.epoch(0),
        lambda scene: scene.pond.checkpoint(),
        lambda scene: scene.epoch(1),
        lambda scene: scene.place(*owners),
        lambda scene: scene.epoch(2),
        lambda scene: scene.place(0, 0, 1, 1, 2, 2),
        lambda scene: scene.pond.checkpoint(),
    ]


EPOCHS = [0, 1, 1, 2, 2, 3, 3, 3]
OWNERS = (1, 1, 1, 0, 2, 0)


@cache
def reached() -> list[tuple[str, int]]:
    """Every point that moving comes to, at the first, a middle and the last of its hits in each of the moves."""
    scene = Scene(LossyFiles())
    found: dict[str, list[int]] = {}
    with counted() as plans:
        for number, step in enumerate(steps(OWNERS)):
            before = {point: plan.hits for point, plan in plans.items()}
            step(scene)
            if number in (3, 5):
                for point, plan in plans.items():
                    hits = range(before[point] + 1, plan.hits + 1)
                    found.setdefault(point, []).extend({*hits[:1], *hits[-1:], *hits[len(hits) // 2 :][:1]})
    return [(point, hit) for point, hits in found.items() for hit in sorted(set(hits))]


def test_moving_writes_manifests_and_journal_entries() -> None:
    points = {point for point, _ in reached()}
    assert {"manifest.append.before", "manifest.dirsync.after", "journal.rename.before"} <= points


@pytest.mark.long
def test_a_crash_at_any_point_of_a_move_loses_nothing() -> None:
    for number, (point, hit) in enumerate(reached()):
        files = LossyFiles()
        scene, done = Scene(files), 0
        with armed(point, hit, action=files.halt) as plan, suppress(SimulatedCrash):
            for step in steps(OWNERS):
                step(scene)
                done += 1
        # Hits count from the opening on, as in `reached`.
        assert plan.fired or done == len(EPOCHS) - 1, (point, hit)
        for turn, (lose, seed) in enumerate(outcomes_of(files)):
            again = reopened(files, lose, seed, containers=(3, 1, 2)[(number + turn) % 3])
            with suppress(AssertionError):
                again.check(EPOCHS[done])
                continue
            again.check(EPOCHS[done + 1])


@pytest.mark.parametrize(
    "point", ["manifest.append.before", "manifest.dirsync.after", "journal.append.before"]
)
def test_a_move_that_fails_leaves_every_slice_served(point: str) -> None:
    """A disk that fails once: whoever had a slice has it again, or whoever was to have it."""

    def full_disk(_point: str) -> None:
        raise OSError(28, "No space left on device")

    for hit in (1, 2):
        scene = Scene(LossyFiles())
        scene.epoch(0)
        with armed(point, hit, action=full_disk) as plan, suppress(WriteFailed):
            scene.place(1, 1, 1, 0, 2, 0)
        assert plan.fired
        scene.check(1)
        scene.epoch(1)
        scene.check(2)
        for lose, seed in outcomes_of(scene.files):
            reopened(scene.files, lose, seed).check(2)


def test_a_journal_entry_in_doubt_does_not_leave_a_move_half_way() -> None:
    """The entry may be on the disk all the same: whoever crashes then finds the slices with either owner."""

    def broken_disk(_point: str) -> None:
        raise OSError(5, "Input/output error")

    scene = Scene(LossyFiles())
    scene.epoch(0)
    with armed("journal.dirsync.before", action=broken_disk) as plan, pytest.raises(WriteFailed):
        scene.place(1, 1, 1, 1, 1, 1)
    assert plan.fired
    for lose, seed in outcomes_of(scene.files):
        reopened(scene.files, lose, seed).check(1)


def test_a_container_that_ends_while_slices_are_moved() -> None:
    scene = Scene(LossyFiles())
    scene.epoch(0)
    for number, (container, point) in enumerate(
        (container, point)
        for container in (0, 1, 2)
        for point in ("manifest.append.before", "manifest.dirsync.after", "journal.append.before")
    ):

        def ends(_point: str, container: int = container) -> None:
            scene.pond.hosting.kill(container)

        owners = ((2, 2, 1, 1, 0, 0), (0, 0, 1, 1, 2, 2))[number % 2]
        with armed(point, action=ends) as plan, suppress(MillpondError):
            scene.place(*owners)
        assert plan.fired
        for each in (0, 1, 2):
            scene.pond.coordinator.recover(each)
        scene.place(*owners)
        scene.epoch(number + 1)
        scene.check(number + 2)
        reopened(scene.files).check(number + 2)


def test_what_moved_and_is_snapshotted_leaves_no_files_behind() -> None:
    scene = Scene(LossyFiles())
    for number, owners in enumerate(PLACES):
        scene.epoch(number)
        scene.place(*owners)
    for _ in range(3):
        scene.pond.checkpoint()
    for service in scene.pond.hosting.services.values():
        assert service.call(ContainerStatus()).needs == []
        assert set(service.checkpoints.grounds) == service.core.owned
        assert service.call(AskFigures()).metrics["log_records"] == 0
    directories = {name for name in scene.files.list("/pond/containers") if name.startswith("t")}
    assert len(directories) == 3
    named = {
        name
        for service in scene.pond.hosting.services.values()
        for ground in service.checkpoints.grounds.values()
        for name in ground.snapshots.values()
    }
    on_disk = {
        file
        for name in scene.files.list("/pond/snapshots")
        for file in scene.files.list(f"/pond/snapshots/{name}")
    }
    assert on_disk == named
    reopened(scene.files).check(len(PLACES))


def test_a_snapshot_of_any_checkpoint_is_told_from_other_files() -> None:
    for number in (1, 999_999, 1_000_000):
        name = snapshot_name(7, 3, number)
        assert slice_of_snapshot(name) == slice_of_snapshot(f"{name}.tmp") == 7
    assert slice_of_snapshot("manifest.arrow") is None


# A record that is cut


def test_a_record_cut_to_slices_gives_exactly_these() -> None:
    scene = Scene(LossyFiles(), containers=1)
    scene.epoch(0)
    service = scene.pond.hosting.services[0]
    holding = service.core.holding("s")
    taken: list[Any] = []
    apply = holding.apply

    def applied(ready: Ready) -> int:
        taken.append(ready.record)
        return apply(ready)

    holding.apply = applied  # type: ignore[method-assign]
    scene.epoch(1)
    (record,) = taken
    for mine in ([], [0], [1, 4], [5, 2, 3], list(range(SLICES))):
        numbers = [SliceId(number) for number in mine]
        cut = record.cut(numbers)
        assert cut.digest == record.digest
        assert cut.rows == sum(int(part.counts[numbers].sum()) for part in record.parts)
        fresh = holding_of(holding.resident, SLICES, Means())
        fresh.slices = {number: fresh.new_slice() for number in map(SliceId, range(SLICES))}
        assert fresh.apply(Ready(cut)) == cut.rows
        for number, held in fresh.slices.items():
            rows = held.store.export()
            if number not in numbers:
                assert len(rows) == 0
                continue
            whole = holding.slices[number].store.export()
            wanted = whole.filter(pa.array(np.asarray(whole.column(1)) == 1))
            assert rows.to_pylist() == wanted.to_pylist()
            assert len(rows)


# What is forgotten


def files_of(scene: Scene) -> Iterator[str]:
    for name in scene.files.list("/pond/snapshots"):
        for file in scene.files.list(f"/pond/snapshots/{name}"):
            yield f"{name}/{file}"


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_state_that_is_forgotten_is_gone_and_so_are_its_files(checkpoint: bool, by_name: bool) -> None:
    scene = Scene(LossyFiles())
    scene.epoch(0)
    if checkpoint:
        scene.pond.checkpoint()
        assert any(file.startswith("s.") for file in files_of(scene))
    scene.pond.forget("s" if by_name else scene.state)
    assert list(scene.pond.states()) == []
    with pytest.raises(UnknownResident):
        scene.state.progress()
    with pytest.raises(UnknownResident):
        scene.feed(pa.table({"k": [1], "t": [1], "v": [1]}), 1)
    scene.pond.checkpoint()
    assert not any(file.startswith("s.") for file in files_of(scene))
    scene.pond.checkpoint()
    for service in scene.pond.hosting.services.values():
        assert service.call(AskFigures()).metrics["log_records"] == 0
    again = LocalPond(after(scene.files, "all", 0), containers=2)
    assert list(again.states()) == []
    assert again.table("t").snapshot().num_rows == 2


@pytest.mark.parametrize("when", ["at once", "after a checkpoint", "before a crash"])
def test_a_state_of_the_same_name_is_another_one(when: str) -> None:
    """Neither the log nor snapshots of the one before come back, whatever its types were."""
    scene = Scene(LossyFiles())
    scene.epoch(0)
    if when == "after a checkpoint":
        scene.pond.checkpoint()
    scene.epoch(1)
    scene.pond.forget(scene.state)
    other = scene.pond.state("s", key="string", value="double")
    assert other.progress().updaters == {}
    assert other.snapshot().num_rows == 0
    feed = other.update(key="k", at="t", value="v", name="feed")
    feed(pa.table({"k": ["a"], "t": [0], "v": [0.5]}), 0)
    other.finish("feed")
    wanted = [{"key": "a", "time": 0, "value": 0.5}]
    assert other.snapshot().to_pylist() == wanted
    for lose, seed in outcomes_of(scene.files):
        again = LocalPond(after(scene.files, lose, seed), containers=2, slices=SLICES)
        assert again.state("s").snapshot().to_pylist() == wanted
        again.validate()
    for container in list(scene.pond.hosting.services):
        scene.pond.hosting.kill(container)
        scene.pond.coordinator.recover(container)
    assert other.snapshot().to_pylist() == wanted


def held_rows(pond: LocalPond) -> list[int]:
    """How many rows of the State `s` each container holds."""
    return [
        sum(held.store.versions for held in service.core.holding("s").slices.values())
        for service in pond.hosting.services.values()
    ]


@pytest.mark.long
def test_a_crash_at_any_point_of_forgetting_a_state() -> None:
    def life(scene: Scene) -> None:
        scene.epoch(0)
        scene.pond.checkpoint()
        scene.epoch(1)
        scene.pond.forget(scene.state)
        scene.pond.state("s", key="string", value="string")
        scene.pond.checkpoint()

    with counted() as plans:
        life(Scene(LossyFiles()))
    total = {point: plan.hits for point, plan in plans.items()}
    crashes = 0
    for point, count in total.items():
        for hit in sorted({count, count - 2, count * 3 // 4}):
            if hit < 1:
                continue
            files = LossyFiles()
            with armed(point, hit, action=files.halt), suppress(SimulatedCrash):
                life(Scene(files))
            crashes += 1
            for lose, seed in outcomes_of(files)[:3]:
                again = LocalPond(after(files, lose, seed), containers=2, slices=SLICES)
                again.validate()
                if "s" in again.states():
                    state = again.state("s")
                    if "string" in state.value:
                        assert state.snapshot().num_rows == 0
                        assert not any(held_rows(again))
                    else:
                        assert sum(held_rows(again)) in (0, len(KEYS), 2 * len(KEYS))
                again.state("other", key="long", value="long")
    assert crashes > 40


def test_a_table_that_is_forgotten_comes_back_empty() -> None:
    scene = Scene(LossyFiles())
    beside = scene.pond.table("beside", key="k long", value="x long", default={"x": 5})
    scene.epoch(0)
    scene.pond.forget(scene.table)
    with pytest.raises(UnknownTable):
        scene.pond.table("t")
    assert beside.snapshot().num_rows == 0
    again = LocalPond(after(scene.files, "all", 0), containers=2, slices=SLICES)
    with pytest.raises(UnknownTable):
        again.table("t")
    for pond in (again, scene.pond):
        other = pond.table("t", key="k string", value="y double", default={"y": 1.0})
        assert other.snapshot().num_rows == 0
        pond.validate()
    third = LocalPond(after(scene.files, "all", 0), containers=1, slices=SLICES)
    assert third.table("t").snapshot().num_rows == 0
    assert third.table("t").value == "y double"


def test_a_table_of_the_same_types_comes_back_empty_too() -> None:
    scene = Scene(LossyFiles())
    scene.pond.table("beside", key="k long", value="x long", default={"x": 5})
    scene.epoch(0)
    scene.pond.checkpoint()
    scene.epoch(1)
    scene.pond.forget("t")
    table = scene.pond.table("t", key="k long", value="x long", default={"x": 0})
    assert table.snapshot().num_rows == 0
    for container in list(scene.pond.hosting.services):
        scene.pond.hosting.kill(container)
        scene.pond.coordinator.recover(container)
    assert table.snapshot().num_rows == 0
    again = LocalPond(after(scene.files, "all", 0), containers=2, slices=SLICES)
    assert again.table("t").snapshot().num_rows == 0


def test_u_moves_on_without_an_updater_that_is_forgotten() -> None:
    scene = Scene(LossyFiles())
    slow = scene.state.update(key="k", at="t", value="v", name="slow")
    slow(pa.table({"k": [7], "t": [3], "v": [70]}), 0)
    scene.feed(pa.table({"k": [1], "t": [100], "v": [1]}), 0)
    assert scene.state.progress().update == 3
    scene.pond.forget(scene.state, name="slow")
    progress = scene.state.progress()
    assert progress.update == 100
    assert list(progress.updaters) == ["feed"]
    wanted = [{"key": 7, "time": 3, "value": 70}]
    assert scene.state.snapshot(50).to_pylist() == wanted, "what it did stays"
    again = LocalPond(after(scene.files, "all", 0), containers=2, slices=SLICES)
    assert again.state("s").snapshot(50).to_pylist() == wanted
    # Built again, it is a new one: its epochs begin at 0, where U stands.
    slow = scene.state.update(key="k", at="t", value="v", name="slow")
    done = slow(pa.table({"k": [7, 7], "t": [3, 200], "v": [71, 72]}), 0)
    assert (done.rows, done.late, done.replayed) == (1, 1, False)
    scene.pond.validate()
    scene.state.finish("slow")
    scene.state.finish("feed")
    for lose, seed in outcomes_of(scene.files):
        again = LocalPond(after(scene.files, lose, seed), containers=2, slices=SLICES)
        rows = {row["key"]: row["value"] for row in again.state("s").snapshot().to_pylist()}
        assert rows == {1: 1, 7: 72}, "nor is it taken for the one before"


def test_a_query_that_is_forgotten_leaves_its_rows_and_the_others() -> None:
    scene = Scene(LossyFiles())
    shared = scene.state.update(key="k", at="t", value="v", name="shared", history="shared")
    for query, time in (("one", 10), ("two", 20)):
        shared.commit(pa.table({"k": [time], "t": [time], "v": [time]}), 0, query)
    scene.state.finish("feed")
    assert scene.state.progress().update == 10
    scene.pond.forget(scene.state, name="shared", query="one")
    shared.commit(pa.table({"k": [30], "t": [30], "v": [30]}), 1, "two")
    assert scene.state.progress().update == 30
    assert sorted(scene.state.snapshot(25)["value"].to_pylist()) == [10, 20]
    again = LocalPond(after(scene.files, "all", 0), containers=2, slices=SLICES)
    assert sorted(again.state("s").snapshot(25)["value"].to_pylist()) == [10, 20]
    # As a new one, from its first epoch on.
    assert not shared.commit(pa.table({"k": [40], "t": [40], "v": [40]}), 0, "one").replayed


def test_transactions_of_an_operator_that_is_forgotten_stay_done() -> None:
    scene = Scene(LossyFiles())
    for number in range(3):
        scene.epoch(number)
    scene.pond.forget(scene.table, name="adding")
    assert {row["k"]: row["x"] for row in scene.table.snapshot().to_pylist()} == {1: 303, 2: 30}
    again = LocalPond(after(scene.files, "all", 0), containers=2, slices=SLICES)
    assert {row["k"]: row["x"] for row in again.table("t").snapshot().to_pylist()} == {1: 303, 2: 30}
    adding = again.transactions("adding", ["t"], {"add": add})
    out = adding(pa.table({"ts": [50], "k": [1], "v": [1]}), 0)
    assert out["now"].to_pylist() == [304]


def test_slices_move_to_one_that_has_not_heard_yet_of_a_forgotten_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their last owner has, and its files are gone."""
    scene = Scene(LossyFiles(), containers=2)
    scene.place(0, 0, 0, 1, 1, 1)
    scene.epoch(0)
    scene.pond.checkpoint()
    telling = scene.pond.coordinator._telling
    with monkeypatch.context() as patch:
        patch.setattr(telling, "tell", lambda containers, name: telling._tell(containers, 0, name))
        scene.pond.forget(scene.state)
    scene.pond.checkpoint()
    assert "s" not in scene.pond.hosting.services[0].core.holdings
    assert "s" in scene.pond.hosting.services[1].core.holdings
    scene.place(1, 1, 1, 1, 1, 1)
    assert "s" not in scene.pond.hosting.services[1].core.holdings
    assert scene.served() == [1] * 6
    assert {row["k"]: row["x"] for row in scene.table.snapshot().to_pylist()} == {1: 101, 2: 10}
    scene.pond.validate()


def test_of_two_with_one_name_none_is_forgotten_unasked() -> None:
    pond = LocalPond(LossyFiles(), slices=SLICES)
    state, table = pond.state("x", key="long", value="long"), pond.table("x", key="k long", value="v long")
    with pytest.raises(BadOption, match="a State and a table") as raised:
        pond.forget("x")
    assert "pond.forget(pond.state('x'))" in raised.value.hint
    assert (list(pond.states()), list(pond.tables())) == (["x"], ["x"])
    pond.forget(table)
    assert (list(pond.states()), list(pond.tables())) == (["x"], [])
    with pytest.raises(MillpondError, match="'x'"):
        pond.forget(table)
    pond.forget(state)
    assert pond.states() == {}


def test_what_is_not_there_is_not_forgotten() -> None:
    scene = Scene(LossyFiles())
    with pytest.raises(UnknownResident):
        scene.pond.forget("nobody")
    with pytest.raises(MillpondError):
        scene.pond.forget(scene.state, name="nobody")
    with pytest.raises(MillpondError):
        scene.pond.forget(scene.state, query="q")
    scene.epoch(0)
    (updater,) = scene.state.progress().updaters
    with pytest.raises(UnknownUpdater, match="has no query 'q'"):
        scene.pond.forget(scene.state, name=updater, query="q")
    scene.check(1)
