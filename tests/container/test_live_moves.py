"""A slice moves while all goes on, and somebody ends at each step: it is served by one, nothing is lost, nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest
from test_backups import KEYS, ROOT, SLICES, Scene, after, made, numbers

from millpond.errors import MillpondError, Unavailable
from millpond.kernels.hashing import slices_of
from millpond.stores.keys import Keys
from millpond.testing import LossyFiles

STEPS = [
    *("copies.Enlist", "copies.Copy", "copies.Enter", "wire.AskLag", "wire.GetReady"),
    *("switches.Promote", "switches.Demote", "switches.Enter", "switches.Confirm"),
]


def scene_of_two() -> Scene:
    """Slices are copied when they move: there are no backups."""
    scene = Scene(LossyFiles(), containers=2, backups=0)
    scene.epoch()
    scene.upkeep()
    scene.epoch()
    return scene


def scene_of_three() -> Scene:
    """Slices have their backups, and those that move to who holds none of them are copied as well."""
    scene = made(3, epochs=1)
    mine = scene.record.slices_of(0)
    assert {holder for number in mine for holder in scene.holders()[number]} == {1, 2}
    return scene


SCENES = {2: scene_of_two, 3: scene_of_three}


def stepped(scene: Scene, happens: Callable[[str, str], None]) -> None:
    """`happens` is called before and after each step of moves; the last of release is `released`."""
    coordinator = scene.coordinator
    migrations, slices = coordinator._migrations, coordinator._slices

    def around(work: Callable[..., Any], name_of: Callable[..., str]) -> Callable[..., Any]:
        def wrapped(*given: Any) -> Any:
            name = name_of(*given)
            happens(name, "before")
            done = work(*given)
            happens(name, "after")
            return done

        return wrapped

    migrations._copy = around(migrations._copy, lambda effect: f"copies.{type(effect).__name__}")
    slices._switch = around(slices._switch, lambda switch, effect: f"switches.{type(effect).__name__}")
    ask = slices.containers.ask
    slices.containers.ask = around(ask, lambda container, message: f"wire.{type(message).__name__}")


@pytest.mark.parametrize("containers", SCENES, ids=["without backups", "with backups"])
def test_a_move_has_these_steps_and_the_coordinator_may_end_at_each(containers: int) -> None:
    """Containers end with it. Who opens the pond again finds the slices where the journal says, and moves them again."""
    scene = SCENES[containers]()
    left: list[tuple[str, LossyFiles]] = []
    stepped(scene, lambda name, when: left.append((name, after(scene.files))) if name in STEPS else None)
    mine = scene.record.slices_of(0)
    scene.move(mine, 1)
    assert list(dict.fromkeys(name for name, _ in left)) == STEPS
    assert scene.record.slices_of(0) == []
    for number, (name, files) in enumerate(left):
        again = Scene(files, containers, scene.backups, scene.model, number)
        # A pond that opens gives slices to those that have none.
        assert len(again.record.slices_of(0)) >= 1, name
        again.check()
        if name.startswith("switches"):
            again.move(again.record.slices_of(0), 1)
            again.check()
        if again.backups:
            # The journal tells of no backup that is none.
            again.upkeep()
            again.lose(1)
            again.check()
        again.pond.close()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("containers", "victim"),
    [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)],
    ids=["source", "target", "source with backups", "target with backups", "holder of backups"],
)
def test_a_side_that_ends_at_a_step(containers: int, victim: int, step: str, when: str) -> None:
    scene, ended = SCENES[containers](), []

    def happens(name: str, moment: str) -> None:
        if (name, moment) == (step, when) and not ended:
            ended.append(name)
            scene.pond.hosting.kill(victim)

    stepped(scene, happens)
    migrations = scene.coordinator._migrations
    move = migrations.move

    def moving(*given: Any) -> None:
        try:
            move(*given)
        finally:
            if victim not in scene.pond.hosting.services:
                scene.coordinator.recover(victim)

    migrations.move = moving
    mine = scene.record.slices_of(0)
    tickets = scene.coordinator.elasticity.move(mine, 1)
    assert ended
    assert [ticket.stage for ticket in tickets] == ["moved"]
    scene.coordinator.maintain()
    assert not scene.coordinator._slices.astray
    if victim == 0 or not step.startswith("switches"):
        assert {scene.record.owners[number] for number in mine} == {1}
    # Else it had them by the journal when it was found to have ended, and is relieved as ever: `check` sees who serves.
    scene.epoch()
    scene.check()
    scene.reopened(upkeep=False).check()
    if scene.backups:
        # Whoever holds a backup now, by the journal, does.
        scene.upkeep()
        scene.lose(1)
        scene.check()


@pytest.mark.parametrize(
    "step", ["copies.Enlist", "copies.Copy", "copies.Enter", "wire.AskLag", "wire.GetReady"]
)
def test_a_move_that_is_cancelled_leaves_nothing(step: str) -> None:
    scene = scene_of_two()
    cancelled: list[str] = []

    def happens(name: str, moment: str) -> None:
        if name == step and not cancelled:
            cancelled.append(name)
            scene.coordinator.elasticity.cancel()

    before = files_of(scene)
    stepped(scene, happens)
    mine = scene.record.slices_of(0)
    [ticket] = scene.coordinator.elasticity.move(mine, 1)
    assert (ticket.stage, scene.record.slices_of(0)) == ("cancelled", mine)
    scene.epoch()
    for _ in range(3):
        scene.coordinator.maintain()
        scene.pond.checkpoint()
    backing = scene.coordinator._backing
    assert not backing._enlisted
    assert not any(scene.record.backups.values())
    for service in scene.pond.hosting.services.values():
        assert not service.backups.core.owned
        assert not service.backups.core.unfinished()
    assert files_of(scene) == before
    scene.check()


def files_of(scene: Scene) -> list[str]:
    """Snapshots and records that are kept for others."""
    files = scene.files
    directories = [f"{ROOT}/backups/{name}" for name in listed(files, f"{ROOT}/backups")]
    snapshots = [
        f"{directory}/{resident}/{file}"
        for directory in directories
        for resident in listed(files, directory)
        for file in listed(files, f"{directory}/{resident}")
    ]
    logs = [
        f"{name}/{file}"
        for name in listed(files, f"{ROOT}/containers")
        if name.endswith("b")
        for file in listed(files, f"{ROOT}/containers/{name}")
        if file != "manifest.arrow"
    ]
    return snapshots + [log for log in logs if listed(files, f"{ROOT}/containers/{log}")]


def listed(files: LossyFiles, path: str) -> list[str]:
    return sorted(files.list(path)) if files.is_dir(path) else []


def test_no_backup_is_let_go_before_others_hold_the_slice() -> None:
    """The source of a move holds one. Where that is not to stay, the new one comes first, or nothing goes."""
    scene = made(3)
    mine = scene.record.slices_of(0)
    scene.move(mine, 1)
    before = scene.holders()
    mine = [number for number in mine if before[number] == [0]]
    assert mine
    migrations = scene.coordinator._migrations
    copy = migrations.copy

    def fails(*given: Any) -> None:
        assert all(scene.holders()[number] == [0] for number in mine)
        raise Unavailable("the disk is full there", address="")

    migrations.copy = fails
    with suppress(MillpondError):
        migrations.replicate(1, leaving={0})
    assert all(scene.holders()[number] == [0] for number in mine)
    migrations.copy = copy
    for _ in range(4):
        migrations.replicate(1, leaving={0})
    assert all(scene.holders()[number] == [2] for number in numbers(*mine))


def test_slices_that_stay_are_asked_at_every_step_of_a_move() -> None:
    """Questions wait for nothing; those about slices that move, for the switch at most."""
    scene = scene_of_two()
    mine = scene.record.slices_of(0)
    moving, staying = mine[0], [number for number in range(SLICES) if number != mine[0]]
    places = slices_of(Keys.from_arrow(pa.array(KEYS, pa.int64())).hashes, SLICES).tolist()
    keys = {number: [key for key in KEYS if places[key] == number] for number in range(SLICES)}
    fetch = scene.state.fetch(key="k", at="at", into="v")
    asked: list[tuple[str, str]] = []

    def right(numbers: list[int]) -> None:
        at = 10 * scene.model.epochs - 20
        own = [key for number in numbers for key in keys[number]]
        answers = fetch.now(pa.table({"k": own, "at": [at] * len(own)}))["v"].to_pylist()
        assert answers == [scene.model.oracle.fetch_latest(key, at) for key in own]

    def happens(name: str, when: str) -> None:
        if name in STEPS:
            asked.append((name, when))
            before = scene.pond.hosting.services[0]._runtime.now(), scene.coordinator._runtime.now()
            right(staying)
            after = scene.pond.hosting.services[0]._runtime.now(), scene.coordinator._runtime.now()
            assert after == before, f"they waited {when} {name}"
            if not name.startswith("switches"):
                right([moving])

    stepped(scene, happens)
    scene.move([moving], 1)
    right(list(range(SLICES)))
    assert list(dict.fromkeys(name for name, _ in asked)) == STEPS
