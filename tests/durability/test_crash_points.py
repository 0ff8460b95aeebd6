"""Every crash point, at every kind of moment, under every kind of loss: what was acknowledged is there, whole."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import driving
import pytest
from crashes import (
    AGAIN,
    CONTAINERS,
    LOSSES,
    THEN,
    Cut,
    Moment,
    after,
    chosen,
    content,
    cuts_at_changes,
    cuts_of,
    hits_of,
    outcomes_of,
    run_until_crash,
)
from driving import Checkpoint, Finish, Model, Report, Start, Step, Update, Upkeep, World, history, models_of

from millpond.durable.crashpoints import POINTS, SimulatedCrash, armed, counted
from millpond.errors import Unavailable, WriteFailed
from millpond.testing import LossyFiles
from millpond.wire.figures import AskFigures


@cache
def steps_of(containers: int) -> tuple[Step, ...]:
    return tuple(history(containers, THEN[containers]))


@cache
def models(containers: int) -> list[Model]:
    return models_of(steps_of(containers))


@cache
def picture(containers: int, steps_done: int, finished: bool = False) -> dict[str, Any]:
    """What must be seen after that many steps of the history."""
    model = models(containers)[steps_done]
    if finished:
        model = model.copy()
        for oracle in model.states.values():
            for updater in oracle.updaters:
                oracle.finish(updater)
    return driving.picture_of_model(model)


@cache
def hits(containers: int) -> dict[str, int]:
    return hits_of(World(LossyFiles()), steps_of(containers))


@cache
def cuts(containers: int) -> dict[Moment, Cut]:
    """What crashes at the chosen hits of every point leave."""
    reached = hits(containers).items()
    moments = [(point, hit) for point, count in reached for hit in chosen(range(1, count + 1))]
    return cuts_of(World(LossyFiles()), steps_of(containers), moments)


@cache
def checked(containers: int) -> set[Any]:
    """Which files were found right. Crashes that leave the same files behind are told apart by nobody."""
    return set()


def recovered_steps(world: World, containers: int, acknowledged: int, note: str) -> int:
    """How many steps the recovered pond shows: those acknowledged, or the one in flight as well, whole."""
    seen = driving.picture_of_pond(world.pond)
    world.pond.validate()
    without = driving.differences(picture(containers, acknowledged), seen)
    if not without:
        return acknowledged
    assert acknowledged < len(steps_of(containers)), "\n".join([note, *without])
    with_it = driving.differences(picture(containers, acknowledged + 1), seen)
    assert not with_it, "\n".join(
        [
            note,
            "is neither the history that was acknowledged:",
            *without,
            "nor that and the step in flight:",
            *with_it,
        ]
    )
    return acknowledged + 1


class Crash:
    """One crash in one run of the history: the files as the dead process left them, and what it had acknowledged."""

    def __init__(self, files: LossyFiles, acknowledged: int, containers: int, where: str) -> None:
        self.files = files
        self.containers = containers
        self.acknowledged = acknowledged
        self.steps = steps_of(containers)
        self.where = where

    def note(self, lose: str, seed: int, again: int) -> str:
        in_flight = self.steps[self.acknowledged :][:1]
        return f"{self.where}: {self.acknowledged} steps, in {in_flight}, lost {lose} ({seed}), reopened with {again}"

    def check_recovered(self, lose: str, seed: int, again: int) -> None:
        case = ("recovered", *self.found_by(lose, seed, again))
        if case not in checked(self.containers):
            self.recover(lose, seed, again)
            checked(self.containers).add(case)

    def check_to_the_end(self, lose: str, seed: int, again: int, other_rows: bool = True) -> None:
        """Compares what was recovered, runs the history to its end, and compares again."""
        case = ("to the end", other_rows, *self.found_by(lose, seed, again))
        if case not in checked(self.containers):
            self.run_to_the_end(lose, seed, again, other_rows)
            checked(self.containers).add(case)

    def found_by(self, lose: str, seed: int, again: int) -> tuple[Any, ...]:
        """All that what comes after the crash depends on."""
        files = after(self.files, lose, seed)
        return content(files), frozenset(files._directories), self.acknowledged, again

    def recover(self, lose: str, seed: int, again: int) -> tuple[World, int]:
        world = World(after(self.files, lose, seed))
        world.start(again)
        note = self.note(lose, seed, again)
        return world, recovered_steps(world, self.containers, self.acknowledged, note)

    def run_to_the_end(self, lose: str, seed: int, again: int, other_rows: bool) -> None:
        world, done = self.recover(lose, seed, again)
        note = self.note(lose, seed, again)

        visible = World(after(self.files, lose, seed))
        visible.start(again)
        for name, oracle in models(self.containers)[done].states.items():
            for updater in oracle.updaters:
                visible.pond.state(name).finish(updater)
        expected = picture(self.containers, done, finished=True)
        driving.check_same(expected, visible.pond, note + ", all finished")

        retried = self.steps[self.acknowledged : self.acknowledged + 1]
        expected = picture(self.containers, len(self.steps))
        in_flight = retried[0] if retried else None
        if other_rows and done == self.acknowledged and isinstance(in_flight, Update):
            # Never acknowledged and not there: the source owes nobody the same rows again.
            retried = (in_flight.with_other_rows(),)
            model = models(self.containers)[done].copy()
            for step in (*retried, *self.steps[done + 1 :]):
                step.on_model(model)
            expected = driving.picture_of_model(model)
        for step in (*retried, *self.steps[self.acknowledged + 1 :]):
            step.on_pond(world)
        driving.check_same(expected, world.pond, note + ", at the end")
        # What was made of the crash must itself survive one.
        last = World(after(world.files, "all", 0))  # type: ignore[arg-type]
        last.start(again % 3 + 1)
        driving.check_same(expected, last.pond, note + ", at the end and reopened")


def crash_at(point: str, hit: int, containers: int) -> Crash:
    assert (point, hit) in cuts(containers), f"{point} was not reached {hit} times"
    return Crash(*cuts(containers)[point, hit], containers, f"{point}:{hit}")


@pytest.mark.parametrize("containers", CONTAINERS)
@pytest.mark.parametrize("point", POINTS)
def test_a_crash_at_any_point_loses_nothing_and_repeats_nothing(point: str, containers: int) -> None:
    for number, hit in enumerate(chosen(range(1, hits(containers)[point] + 1))):
        crash = crash_at(point, hit, containers)
        outcomes = outcomes_of(crash.files)
        for turn, (lose, seed) in enumerate(outcomes):
            again = AGAIN[(number + turn) % len(AGAIN)]
            if number % 2 and turn == number % len(outcomes):
                crash.check_to_the_end(lose, seed, again, other_rows=number == 1)
            else:
                crash.check_recovered(lose, seed, again)


@pytest.mark.parametrize("containers", CONTAINERS)
def test_the_history_comes_to_every_point(containers: int) -> None:
    assert [point for point, count in hits(containers).items() if count < 3] == []


@pytest.mark.parametrize("containers", CONTAINERS)
def test_nothing_is_final_before_it_is_visible(containers: int) -> None:
    """While an epoch is decided and not yet applied everywhere, readers see the pond as it was before it."""
    world = World(LossyFiles())
    looked = 0
    for done, step in enumerate(steps_of(containers)):
        if not isinstance(step, Update):
            step.on_pond(world)
            continue

        def look(point: str, done: int = done) -> None:
            nonlocal looked
            looked += 1
            found = driving.differences(
                visible(picture(containers, done)), visible(driving.picture_of_pond(world.pond))
            )
            assert not found, "\n".join([f"at {point} in {steps_of(containers)[done]}", *found])

        with ExitStack() as stack:
            for point in ("apply.before", "apply.after", "publish.before"):
                for hit in range(1, len(world.pond.hosting.services) + 1):
                    stack.enter_context(armed(point, hit, action=look))
            step.on_pond(world)
    assert looked > 60


def visible(seen: dict[str, Any]) -> dict[str, Any]:
    return {
        state: {part: answer for part, answer in parts.items() if part not in ("held", "late")}
        for state, parts in seen.items()
    }


def test_what_a_snapshot_holds_is_not_applied_again() -> None:
    """A record whose decision is in doubt keeps the log from being truncated beyond it, until its State goes on."""
    world, model = World(LossyFiles()), Model()

    def full_disk(_point: str) -> None:
        raise OSError(28, "No space left on device")

    for step in steps_of(1)[:7]:
        step.on_pond(world)
        step.on_model(model)
    with armed("journal.append.before", action=full_disk) as plan, pytest.raises(WriteFailed):
        steps_of(1)[7].on_pond(world)
    assert plan.fired
    driving.check_same(driving.picture_of_model(model), world.pond, "an epoch that failed")
    for step in (step for step in steps_of(1)[8:12] if getattr(step, "state", "") != "clicks"):
        step.on_pond(world)
        step.on_model(model)
    (service,) = world.pond.hosting.services.values()
    assert service.checkpoints.taken == 1
    assert service.checkpoints.covered == 0
    with driving.mortal_containers():
        world = World(after(world.files, "all", 0))  # type: ignore[arg-type]
        world.start(1)
    (figures,) = [container.call(AskFigures()).metrics for container in driving.containers_of(world)]
    assert figures["snapshots_loaded"] > 0
    assert figures["rows_replayed"] == 0
    assert figures["records_discarded"] == 1
    driving.check_same(driving.picture_of_model(model), world.pond)


def test_a_log_that_nobody_needs_any_more_is_not_read_even_if_it_is_still_there() -> None:
    """It may hold an epoch that was never decided; later the epoch was, with other rows and in another log."""
    steps = steps_of(1)
    second = [place for place, step in enumerate(steps) if isinstance(step, Update)][1]
    files = LossyFiles()
    with armed("journal.append.before", hits_before(second) + 1, action=files.halt):
        assert run_until_crash(World(files), steps) == second
    world, model = World(after(files, "all", 0)), models(1)[second].copy()
    world.start(1)
    # A single row: the slices of the others have never seen the epoch.
    other = replace(steps[second], rows=steps[second].rows[:1])  # type: ignore[type-var, attr-defined]
    other.on_pond(world)
    other.on_model(model)
    for service in world.pond.hosting.services.values():
        service.checkpoint()
    assert len(world.files.list("/pond/containers")) == 2
    again = World(after(world.files, "all", 0))  # type: ignore[arg-type]
    again.start(1)
    driving.check_same(driving.picture_of_model(model), again.pond)


@pytest.mark.parametrize("containers", CONTAINERS)
def test_a_decision_whose_journal_entry_failed_is_not_mixed_with_the_next(containers: int) -> None:
    """The entry may be on the disk all the same. Whoever crashes then finds that epoch or none, never parts of two."""
    steps = steps_of(containers)
    place = [place for place, step in enumerate(steps) if isinstance(step, Update)][3]
    step = steps[place]
    assert isinstance(step, Update)

    def broken_disk(_point: str) -> None:
        raise OSError(5, "Input/output error")

    for hit in range(1, containers + 1):
        files = LossyFiles()
        world = World(files)
        for earlier in steps[:place]:
            earlier.on_pond(world)
        with armed("journal.dirsync.before", action=broken_disk), pytest.raises(WriteFailed):
            step.on_pond(world)
        with armed("log.dirsync.after", hit, action=files.halt) as plan, pytest.raises(SimulatedCrash):
            step.with_other_rows().on_pond(world)
        assert plan.fired
        crash = Crash(files, place, containers, f"a failed entry, then log.dirsync.after:{hit}")
        for lose, seed in outcomes_of(crash.files):
            crash.check_recovered(lose, seed, containers)


def hits_before(steps_done: int) -> int:
    """How many journal entries the first steps write."""
    world = World(LossyFiles())
    with counted() as plans:
        for step in steps_of(1)[:steps_done]:
            step.on_pond(world)
    return plans["journal.append.before"].hits


# Crashes where no point has a name, and crashes upon crashes


@pytest.mark.parametrize("containers", CONTAINERS)
def test_a_crash_before_any_change_of_the_disk(containers: int) -> None:
    """Every fourth change, by turns under each loss."""
    cuts = cuts_at_changes(World, steps_of(containers), 1 + containers, 4)
    assert len(cuts) > 100
    for number, cut in enumerate(cuts):
        crash = Crash(*cut, containers, f"cut {number}")
        crash.check_recovered(*LOSSES[number % len(LOSSES)], AGAIN[number % len(AGAIN)])


@pytest.mark.parametrize(
    "point", ["log.dirsync.after", "journal.rename.after", "manifest.rename.after", "truncate.after"]
)
def test_a_crash_while_recovering_from_a_crash(point: str) -> None:
    """At every point that recovery comes to."""
    containers = 3
    middle = hits(containers)[point] // 2 + 1
    first = crash_at(point, middle, containers)
    for turn, (lose, seed) in enumerate((("nothing", 0), ("some", 4))):
        again = AGAIN[turn]
        with counted() as plans:
            World(after(first.files, lose, seed)).start(again)
        reached = [(point, hit) for point, plan in plans.items() for hit in range(1, plan.hits + 1)[-1:]]
        assert len(reached) > 10
        found = cuts_of(World(after(first.files, lose, seed)), [Start(again)], reached)
        assert found.keys() == set(reached)
        for number, (second, hit) in enumerate(reached):
            files = found[second, hit].files
            crash = Crash(files, first.acknowledged, containers, f"{point}:{middle}, then {second}:{hit}")
            check = crash.check_to_the_end if number % 8 == 0 else crash.check_recovered
            check(*LOSSES[number % len(LOSSES)], AGAIN[number % len(AGAIN)])


# One container dies, the coordinator lives on


@cache
def container_hits(containers: int) -> dict[str, list[tuple[int, int]]]:
    """In which step, and at which of its hits there, each point is reached by a container."""
    found: dict[str, list[tuple[int, int]]] = {point: [] for point in POINTS}
    place = 0
    before: dict[str, int] = {}

    def note(point: str, hit: int) -> None:
        if driving.MortalContainer.running:
            found[point].append((place, hit - before[point]))

    with driving.mortal_containers(), counted() as plans, ExitStack() as stack:
        for point, count in hits(containers).items():
            for hit in range(1, count + 1):
                stack.enter_context(armed(point, hit, action=lambda point, hit=hit: note(point, hit)))
        world = World(LossyFiles())
        for place, step in enumerate(steps_of(containers)):  # noqa: B007 - `note` reads it
            before = {point: plan.hits for point, plan in plans.items()}
            step.on_pond(world)
    return found


def test_containers_come_to_every_point_that_is_not_the_coordinators() -> None:
    for containers in THEN:
        reached = {point for point, found in container_hits(containers).items() if len(found) >= 3}
        assert reached == {point for point in POINTS if not point.startswith(("journal.", "publish."))}


@pytest.mark.parametrize("containers", CONTAINERS)
@pytest.mark.parametrize(
    "point", [point for point in POINTS if not point.startswith(("journal.", "publish."))]
)
def test_a_container_that_dies_at_any_point_comes_back_with_all_it_acknowledged(
    point: str, containers: int
) -> None:
    """At its first and at its last hit, in one run where these are in different steps."""
    first, *others = chosen(container_hits(containers)[point])[::2]
    runs: list[dict[int, int]] = [dict([first])]
    for place, hit in others:
        # After a death there may be other files to merge than before.
        if place in runs[-1] or point.startswith("merge."):
            runs.append({})
        runs[-1][place] = hit
    for number, deaths in enumerate(runs, start=POINTS.index(point)):
        world = World(LossyFiles())
        with driving.mortal_containers():
            for place, step in enumerate(steps_of(containers)):
                if place in deaths:
                    die_in(step, world, point, deaths[place])
                    note = f"{point}:{deaths[place]} in {step}"
                    driving.check_same(picture(containers, place + 1), world.pond, note)
                else:
                    step.on_pond(world)
        check_the_end(world, containers, number, f"{point}, died in steps {sorted(deaths)}")


def die_in(step: Step, world: World, point: str, hit: int) -> None:
    assert isinstance(step, (Start, Checkpoint, Update, Upkeep, Report, Finish))
    with armed(point, hit, action=driving.die) as plan:
        try:
            step.on_pond(world)
        except Unavailable:
            # Whoever opens or checkpoints hears of it; an epoch and a report get through by themselves.
            assert isinstance(step, (Start, Checkpoint)), f"{point}:{hit} in {step}"
            if isinstance(step, Checkpoint):
                world.watch()
            step.on_pond(world)
    if isinstance(step, Upkeep):
        world.watch()
    assert plan.fired, f"{point} was not reached {hit} times in {step}"


def check_the_end(world: World, containers: int, number: int, note: str) -> None:
    expected = picture(containers, len(steps_of(containers)))
    driving.check_same(expected, world.pond, f"{note}, at the end")
    last = World(after(world.files, *LOSSES[number % len(LOSSES)]))  # type: ignore[arg-type]
    last.start(AGAIN[number % len(AGAIN)])
    driving.check_same(expected, last.pond, f"{note}, reopened")
