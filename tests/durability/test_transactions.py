"""Transactions under crashes: the tables are those of the epochs that were acknowledged, whole, and so are outputs."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import driving
import pytest
import txn_driving
from crashes import (
    AGAIN,
    CONTAINERS,
    LOSSES,
    THEN,
    Cut,
    Moment,
    after,
    chosen,
    cuts_at_changes,
    cuts_of,
    hits_of,
    outcomes_of,
)
from txn_driving import Again, Checkpoint, Finish, Model, Run, Start, Step, Upkeep, World, history, models_of

from millpond.durable.crashpoints import POINTS, armed, counted
from millpond.errors import EpochChanged, OutputsGone, Unavailable, WriteFailed
from millpond.testing import LossyFiles
from millpond.wire.figures import AskFigures

RECOVERED_FROM = ("log.dirsync.after", "manifest.rename.after", "truncate.before")


@cache
def steps_of(containers: int) -> tuple[Step, ...]:
    steps = tuple(history(containers, THEN[containers]))
    models_of(steps)
    return steps


@cache
def models(containers: int) -> list[Model]:
    return models_of(steps_of(containers))


@cache
def hits(containers: int) -> dict[str, int]:
    return hits_of(World(LossyFiles()), steps_of(containers))


@cache
def cuts(containers: int) -> dict[Moment, Cut]:
    """What crashes at the chosen hits of every point leave, and in the middle of what is recovered from later."""
    reached = hits(containers)
    moments = [(point, hit) for point, count in reached.items() for hit in chosen(range(1, count + 1))]
    moments += [(point, reached[point] // 2 + 1) for point in RECOVERED_FROM]
    return cuts_of(World(LossyFiles()), steps_of(containers), dict.fromkeys(moments))


class Crash:
    """One crash in one run of the history: the files as the dead process left them, and what it had acknowledged."""

    def __init__(self, files: LossyFiles, acknowledged: int, containers: int, where: str) -> None:
        self.files = files
        self.containers = containers
        self.acknowledged = acknowledged
        self.steps = steps_of(containers)
        self.where = where

    def recovered(self, lose: str, seed: int, again: int) -> tuple[World, int, str]:
        """The pond after the crash, and how many steps it shows: those acknowledged, or also the one in flight."""
        in_flight = self.steps[self.acknowledged :][:1]
        note = f"{self.where}: {self.acknowledged} steps, in {in_flight}, lost {lose} ({seed}), reopened with {again}"
        world = World(after(self.files, lose, seed))
        world.start(again)
        world.pond.validate()
        seen = txn_driving.picture_of_pond(world.pond)
        found = []
        for done in (self.acknowledged, self.acknowledged + 1)[: len(in_flight) + 1]:
            model = models(self.containers)[done]
            found.append(txn_driving.differences(txn_driving.picture_of_model(model), seen))
            if not found[-1]:
                return world, done, note
        raise AssertionError("\n".join([note, *(line for lines in found for line in ["is not", *lines])]))

    def check(self, lose: str, seed: int, again: int) -> None:
        """What was recovered; then the last epochs and the one in flight give what they gave or would have given."""
        world, done, note = self.recovered(lose, seed, again)
        last = {step.program.name: step for step in self.steps[:done] if isinstance(step, Run)}
        for step in last.values():
            Again(step).on_pond(world)
        for step in self.steps[self.acknowledged :][:1]:
            step.on_pond(world)
            txn_driving.check_same(models(self.containers)[self.acknowledged + 1], world.pond, note)

    def check_to_the_end(self, lose: str, seed: int, again: int) -> None:
        """Runs the history to its end. Events that were never acknowledged, and are not there, come as others."""
        world, done, note = self.recovered(lose, seed, again)
        retried = self.steps[self.acknowledged :][:1]
        model = models(self.containers)[done].copy()
        if retried and isinstance(retried[0], Run) and done == self.acknowledged:
            retried = (retried[0].with_other_events(),)
        rest = [
            replace(step, expected=[]) if isinstance(step, Run | Finish) else step
            for step in self.steps[self.acknowledged + 1 :]
        ]
        for place, step in enumerate((*retried, *rest)):
            if isinstance(step, Again):
                continue
            if place or done == self.acknowledged:
                step.on_model(model)
            step.on_pond(world)
        txn_driving.check_same(model, world.pond, note + ", at the end")
        last = World(after(world.files, "all", 0))  # type: ignore[arg-type]
        last.start(again % 3 + 1)
        txn_driving.check_same(model, last.pond, note + ", at the end and reopened")


def crash_at(point: str, hit: int, containers: int) -> Crash:
    assert (point, hit) in cuts(containers), f"{point} was not reached {hit} times"
    return Crash(*cuts(containers)[point, hit], containers, f"{point}:{hit}")


def test_the_whole_history_is_what_serial_execution_gives() -> None:
    for containers in THEN:
        world = World(LossyFiles())
        for done, step in enumerate(steps_of(containers), start=1):
            step.on_pond(world)
            txn_driving.check_same(models(containers)[done], world.pond, repr(step))
    given = [row["reason"] for step in steps_of(1) if isinstance(step, Run) for row in step.expected]
    assert {"poor", "full", "nothing there", "too many", "nine", "no such key 9 in c"} < set(given)
    assert given.count(None) > len(given) // 2
    assert sum(sum(group.late.values()) for group in models(1)[-1].groups.values()) == 4


def test_groups_live_in_containers_of_their_own() -> None:
    world = World(LossyFiles())
    for step in steps_of(3)[:12]:
        step.on_pond(world)
    homes = {name: table._group.home for name, table in world.pond.tables().items()}
    owners = world.pond.placement()
    assert homes["a"] == homes["b"] == homes["c"]
    assert owners[homes["a"]] != owners[homes["d"]]


@pytest.mark.parametrize("containers", CONTAINERS)
@pytest.mark.parametrize("point", POINTS)
def test_a_crash_at_any_point_leaves_whole_epochs(point: str, containers: int) -> None:
    """At some hits of each, the histories of different numbers of containers at others; two losses each, by turns."""
    for number, hit in enumerate(chosen(range(1, hits(containers)[point] + 1))[containers // 3 :: 2]):
        crash = crash_at(point, hit, containers)
        outcomes = outcomes_of(crash.files)
        for turn, (lose, seed) in enumerate(outcomes[number % max(1, len(outcomes) - 1) :][:2]):
            again = AGAIN[(number + turn) % len(AGAIN)]
            check = crash.check_to_the_end if (number + turn) % 3 == 1 else crash.check
            check(lose, seed, again)


@pytest.mark.parametrize("containers", CONTAINERS)
def test_the_history_comes_to_every_point(containers: int) -> None:
    assert [point for point, count in hits(containers).items() if count < 3] == []


@pytest.mark.parametrize("containers", CONTAINERS)
def test_a_crash_before_any_change_of_the_disk(containers: int) -> None:
    """Every sixth change, by turns under each loss."""
    cuts = cuts_at_changes(World, steps_of(containers), 1 + containers, 6)
    assert len(cuts) > 30
    for number, cut in enumerate(cuts):
        crash = Crash(*cut, containers, f"cut {number}")
        crash.check(*LOSSES[number % len(LOSSES)], AGAIN[number % len(AGAIN)])


@pytest.mark.parametrize("containers", CONTAINERS)
@pytest.mark.parametrize("point", RECOVERED_FROM)
def test_a_crash_while_recovering_from_a_crash(point: str, containers: int) -> None:
    first = crash_at(point, hits(containers)[point] // 2 + 1, containers)
    with counted() as plans:
        World(after(first.files, "some", 4)).start(2)
    reached = [(point, plan.hits) for point, plan in plans.items() if plan.hits]
    assert len(reached) > 10
    seconds = reached[containers // 3 :: 3]
    found = cuts_of(World(after(first.files, "some", 4)), [Start(2)], seconds)
    assert found.keys() == set(seconds)
    for number, (second, hit) in enumerate(seconds):
        files = found[second, hit].files
        crash = Crash(files, first.acknowledged, containers, f"{first.where}, then {second}:{hit}")
        crash.check(*LOSSES[number % len(LOSSES)], AGAIN[number % len(AGAIN)])


CONTAINERS_POINTS = [point for point in POINTS if not point.startswith(("journal.", "publish."))]


@pytest.mark.parametrize("containers", CONTAINERS)
@pytest.mark.parametrize("point", CONTAINERS_POINTS)
def test_a_container_that_dies_alone_comes_back_with_all_it_acknowledged(point: str, containers: int) -> None:
    """The coordinator lives on, and whoever runs an epoch notices nothing."""
    steps, died = steps_of(containers), 0
    for hit in chosen(range(1, hits(containers)[point] + 1))[1::containers]:
        world, plan_seen = World(LossyFiles()), False
        with driving.mortal_containers(), armed(point, hit, action=driving.die) as plan:
            for done, step in enumerate(steps, start=1):
                try:
                    step.on_pond(world)
                except Unavailable:
                    assert isinstance(step, (Start, Checkpoint)), f"{point}:{hit} in {step}"
                    if isinstance(step, Checkpoint):
                        world.watch()
                    step.on_pond(world)
                if isinstance(step, Upkeep):
                    world.watch()
                if plan.fired and not plan_seen:
                    txn_driving.check_same(models(containers)[done], world.pond, f"{point}:{hit} in {step}")
                plan_seen = plan.fired
        txn_driving.check_same(models(containers)[-1], world.pond, f"{point}:{hit}, at the end")
        died += plan.fired
    assert died


@pytest.mark.parametrize("containers", CONTAINERS)
def test_readers_see_whole_epochs_only(containers: int) -> None:
    """An epoch runs when it is prepared. Until it is applied, readers see the tables as they were before it."""
    world, looked = World(LossyFiles()), 0
    before = ("acknowledge.before", "journal.append.before", "apply.before")
    for done, step in enumerate(steps_of(containers)):

        def look(point: str, done: int = done, step: Step = step) -> None:
            nonlocal looked
            looked += 1
            seen = txn_driving.picture_of_pond(world.pond)["tables"]
            wanted = [
                {name: table.rows for name, table in models(containers)[place].tables.items()}
                for place in (done, done + 1)
            ]
            assert seen == wanted[0 if point in before else 1], f"at {point} in {step}"

        if isinstance(step, Run):
            with ExitStack() as stack:
                for point in (
                    "acknowledge.before",
                    "journal.append.before",
                    "apply.before",
                    "apply.after",
                    "publish.before",
                ):
                    stack.enter_context(armed(point, action=look))
                step.on_pond(world)
        else:
            step.on_pond(world)
    assert looked == 5 * sum(isinstance(step, Run) for step in steps_of(containers))


def test_an_epoch_whose_decision_failed_runs_with_the_program_that_comes_next() -> None:
    """The events are the same, the functions are not: what was prepared with the old ones does not count."""

    def broken_disk(_point: str) -> None:
        raise OSError(5, "Input/output error")

    steps = steps_of(1)
    place = next(
        place for place, step in enumerate(steps) if getattr(step, "program", None) is txn_driving.DEARER
    )
    step = steps[place]
    assert isinstance(step, Run)
    files = LossyFiles()
    world, model = World(files), models(1)[place].copy()
    for earlier in steps[:place]:
        earlier.on_pond(world)
    with armed("journal.dirsync.before", action=broken_disk), pytest.raises(WriteFailed):
        step.on_pond(world)
    other = Run(txn_driving.MAIN, step.epoch, step.events)
    expected = model.run(other.program, other.epoch, other.events)
    assert world.run(other.program, other.epoch, other.events) == expected
    txn_driving.check_same(model, world.pond)
    again = World(after(files, "all", 0))
    again.start(2)
    txn_driving.check_same(model, again.pond)


def test_outputs_are_kept_for_the_last_epochs_and_then_gone() -> None:
    """Whoever asks for more is told so, and nothing runs twice. A checkpoint and a crash change nothing about it."""
    world, model = World(LossyFiles()), Model()
    for step in (Start(2), txn_driving.Open("d"), txn_driving.Register(txn_driving.ASIDE)):
        step.on_pond(world)
        step.on_model(model)
    runs = [Run(txn_driving.ASIDE, n, (txn_driving.event("visit", n, g=f"g{n % 5}"),)) for n in range(70)]
    for run in runs:
        run.on_model(model)
        run.on_pond(world)
        if run.epoch in (20, 66):
            world.pond.checkpoint()
    for containers in (2, 1):
        for run in runs[-64:]:
            Again(run).on_pond(world)
        for run in runs[:6]:
            with pytest.raises(OutputsGone):
                world.run(run.program, run.epoch, run.events)
        with pytest.raises(EpochChanged):
            world.run(runs[69].program, 69, (txn_driving.event("visit", 69, g="other"),))
        txn_driving.check_same(model, world.pond)
        world = World(after(world.files, "all", 0))  # type: ignore[arg-type]
        world.start(containers)


def test_what_a_snapshot_holds_is_not_run_again() -> None:
    """A record whose decision is in doubt keeps the log from being truncated beyond it. Snapshots hold nothing of it."""

    def full_disk(_point: str) -> None:
        raise OSError(28, "No space left on device")

    steps = steps_of(1)
    places = [
        place for place, step in enumerate(steps) if isinstance(step, Run) and step.program.name == "other"
    ]
    world, model = World(LossyFiles()), Model()
    for step in steps[: places[0]]:
        step.on_pond(world)
        step.on_model(model)
    with armed("journal.append.before", action=full_disk), pytest.raises(WriteFailed):
        steps[places[0]].on_pond(world)
    # Nothing of its group comes: that would put what was prepared aside.
    beside = Run(txn_driving.ASIDE, 1, (txn_driving.event("visit", 60, g="u", n=3),))
    for step in (beside, Checkpoint()):
        step.on_model(model)
        step.on_pond(world)
    txn_driving.check_same(model, world.pond)
    (service,) = world.pond.hosting.services.values()
    assert service.core.plan_checkpoint().covered < service.core.seq
    with driving.mortal_containers():
        again = World(after(world.files, "all", 0))  # type: ignore[arg-type]
        again.start(1)
    (figures,) = [container.call(AskFigures()).metrics for container in driving.containers_of(again)]  # type: ignore[arg-type]
    assert figures["snapshots_loaded"] == 2
    assert figures["rows_replayed"] == 0
    assert figures["records_discarded"] == 1
    txn_driving.check_same(model, again.pond)
