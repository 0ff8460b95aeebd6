"""A container that is lost together with its disk: as long as its slices have backups elsewhere, nothing else is."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pyarrow as pa

from millpond.container.checkpoints import Checkpoints
from millpond.container.core import Core
from millpond.container.layout import (
    BACKUPS,
    CONTAINERS,
    SNAPSHOTS,
    container_of_snapshot,
    incarnation_of,
    is_directory_of,
)
from millpond.container.service import ContainerService
from millpond.coordinator.service import CoordinatorService
from millpond.pond.pond import Pond
from millpond.testing.files import LossyFiles
from millpond.testing.simulation.apps import App, Chronicle, Wrong
from millpond.testing.simulation.pond import ROOT, SimHosting, SimPond
from millpond.testing.simulation.scheduler import Process
from millpond.wire.base import SliceId

READY_S_MAX = 60.0
LOOK_S = 0.5
MOVING = 0.5
KEYS = 16


def lose_a_disk(pond: SimPond) -> bool:
    """Ends a container and takes its files away, at a moment when that is all that is wrong; False if there was none.

    One failure at a time is promised: its slices have backups where they serve, nobody else rests on what it wrote, and
    no slice is on its way. Some have just come.
    """
    scheduler = pond.sim.scheduler
    if pond.elastic.random() < MOVING:
        pond.move_once()
    deadline = scheduler.now + READY_S_MAX
    while scheduler.now < deadline:
        if pond.hosting is not None and pond.coordinator is not None:
            dispensable = list(_dispensable(pond.hosting, pond.coordinator))
            if dispensable:
                victim = pond.elastic.choice(dispensable)
                pond.hosting.processes[victim].kill()
                lost = files_of(pond.sim.disk.content, victim)
                for path in lost:
                    pond.sim.disk.content.lose(path)
                pond.sim.faults.fire("disk lost", f"of container {victim}: {len(lost)} files and directories")
                return True
        scheduler.sleep(LOOK_S)
    return False


def files_of(files: LossyFiles, container: int) -> list[str]:
    """All that incarnations of a container have written: logs, backups, snapshots."""
    directories = [
        os.path.join(ROOT, base, name)
        for base in (CONTAINERS, BACKUPS)
        for name in files.list(os.path.join(ROOT, base))
        if is_directory_of(name, container)
    ]
    base = os.path.join(ROOT, SNAPSHOTS)
    snapshots = [
        os.path.join(base, resident, name)
        for resident in files.list(base)
        for name in files.list(os.path.join(base, resident))
        if container_of_snapshot(name) == container
    ]
    return [*directories, *snapshots]


def _dispensable(hosting: SimHosting, coordinator: CoordinatorService) -> Iterator[int]:
    """Who may be lost now. It is looked up without locks, which are the driver's: nothing passes until it happens."""
    elasticity, record = coordinator.elasticity, coordinator._memory.record  # noqa: SLF001 - the journal's
    if (
        coordinator._slices.astray  # noqa: SLF001
        or any(not ticket.is_over for ticket in elasticity._tickets.values())  # noqa: SLF001
        or any(not process.alive for process in hosting.processes.values())
    ):
        return
    backing = elasticity._backing  # noqa: SLF001
    for container in sorted(hosting.processes):
        slices = record.slices_of(container)
        if slices and all(backing.holders(SliceId(number)) for number in slices):
            others = [service for other, service in hosting.services.items() if other != container]
            if not any(_rests_on(service, container) for service in others):
                yield container


def _rests_on(service: ContainerService, container: int) -> bool:
    """Whether slices that are served or held there rest on what that container wrote, or may soon."""
    placing = service._placing  # noqa: SLF001 - one that comes up has none yet
    return placing is None or any(
        container in _writers(core, checkpoints) for core, checkpoints in placing.both
    )


def _writers(core: Core, checkpoints: Checkpoints) -> set[int | None]:
    """The containers whose files slices rest on."""
    grounds = [ground for number, ground in checkpoints.grounds.items() if number in core.owned]
    files = (file for ground in grounds for each in ground.snapshots for file in ground.files_of(each))
    return {
        *(incarnation_of(span.directory)[0] for ground in grounds for span in ground.spans),
        *map(container_of_snapshot, files),
    }


class Witness(App):
    """Sends an epoch to a State of its own, and finds those that it sent before."""

    def __init__(self, pond: SimPond, chronicle: Chronicle, epoch: int) -> None:
        super().__init__(pond, chronicle, f"witness{epoch}")
        self._epoch = epoch

    def work(self, pond: Pond, process: Process) -> None:
        state = pond.state("witness", key="long", value="long")
        update = state.update(key="k", at="t", value="v", name="only")
        keys, epoch = range(KEYS), self._epoch
        update(pa.table({"k": keys, "t": [epoch] * KEYS, "v": [key + epoch for key in keys]}), epoch)
        self.say(f"epoch {epoch} of witness is acknowledged")
        for before in range(epoch):
            asked = pa.table({"k": keys, "t": [before] * KEYS})
            answers = state.fetch(key="k", at="t", into="v").now(asked)["v"].to_pylist()
            if answers != [key + before for key in keys]:
                raise Wrong(f"of epoch {before} the witness finds {answers}")
