"""A pond on a simulated machine: a driver that is opened again whenever it ends, and the containers that it starts."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import msgspec

from millpond.client.client import Client
from millpond.container.holdings.base import Bounds, Means
from millpond.container.service import ContainerService
from millpond.coordinator.elasticity import Scaling
from millpond.coordinator.hosting import Host
from millpond.coordinator.service import CoordinatorService
from millpond.errors import (
    BackupLost,
    CodeFailed,
    ContainerFailed,
    CorruptFile,
    MillpondError,
    Moved,
    StageLost,
    Unavailable,
    WriteFailed,
)
from millpond.pond.pond import Pond
from millpond.stores.windows.spilling import Spilling
from millpond.testing.simulation.disk import ScratchFiles, SimFiles
from millpond.testing.simulation.faults import Faults
from millpond.testing.simulation.scheduler import Died, Process
from millpond.testing.simulation.storms import DRIVER
from millpond.wire.base import SliceId, Term
from millpond.wire.figures import PondMetrics, SliceFigures
from millpond.wire.moves import Autoscale, Cause, Moves, Rebalance

if TYPE_CHECKING:
    from millpond.testing.simulation.kernel import Simulation

ROOT = "/pond"
ADDRESS = "coordinator"
SLICES = 4
CONTAINERS_MAX = 3
BALANCED = 0.3
"""Of ponds, so many are rebalanced and scale themselves."""
ROW_S = 0.02
"""What a row costs of a processor, as far as load goes: real times would not repeat."""
BOOT_S = 0.1
REOPEN_S = 0.5
UPKEEP_S = (0.3, 30.0)
"""Of containers: how often it comes is drawn, so that slices rest on their logs for a short time, or for long."""
COORDINATOR_UPKEEP_S = 1.0
CALM_UPKEEP_S = 5.0
"""When the storms are over, it comes more rarely."""
ORPHAN_S = 0.2
BEAT_S = 0.5
ZOMBIES, ZOMBIE_S, WAKING_S = 0.8, 60.0, 5.0
UNSEEN = 0.5
"""Of applications, so many do not see the pond's root."""
BOUNDS = Bounds(log_records=64, deltas=1, deltas_share=2.0, deltas_bytes=0, delta_share=1.0)
"""So small that a few rows come to deltas, and these to merges of both kinds."""

NewMeans = Callable[[], Means]


def is_weather(error: Exception) -> bool:
    """Whether faults explain the error, so that whoever meets it tries again."""
    if isinstance(error, CorruptFile):
        return False
    if isinstance(error, MillpondError):
        # The bare class is what a handler sends of an error that is not the pond's own: a full disk, no memory.
        return type(error) is MillpondError or isinstance(
            error,
            Unavailable | Moved | StageLost | WriteFailed | ContainerFailed | CodeFailed | BackupLost,
        )
    return isinstance(error, OSError | MemoryError)


class SimHosting:
    """Containers as processes of the simulation. They end soon after the driver that started them."""

    def __init__(
        self,
        sim: Simulation,
        driver: Process,
        upkeep_s: float,
        means: NewMeans,
        on_exit: Callable[[int], None],
    ) -> None:
        self.processes: dict[int, Process] = {}
        self.services: dict[int, ContainerService] = {}
        self.zombies: list[Process] = []
        self._sim = sim
        self._driver = driver
        self._upkeep_s = upkeep_s
        self._means = means
        self._on_exit = on_exit
        self._starts = 0
        driver.on_exit.append(self._orphan)

    def start(self, container: int, term: Term) -> Host:
        self.stop_one(container)
        sim = self._sim
        self._starts += 1
        process = sim.process(f"{self._driver.name}-container-{container}.{self._starts}")
        self.processes[container] = process

        def serve() -> None:
            process.runtime.sleep(sim.faults.duration(BOOT_S))
            dial = sim.network.dialer(process)
            service = ContainerService(sim.disk.files(process), ROOT, self._means(), process.runtime, dial)
            self.services[container] = service
            sim.network.serve(process, service, process.name)
            process.runtime.spawn(lambda: self._maintain(process, service), "upkeep")
            process.runtime.spawn(lambda: beat(process, service.beat), "pulse")

        try:
            process.run(serve)
        except Died:
            raise ContainerFailed(f"container {container} ended early", container=container) from None
        process.on_exit.append(lambda: self._ended(container, process))
        return Host(self._starts, process.name)

    @property
    def is_anyone_there(self) -> bool:
        return any(process.alive for process in [*self.processes.values(), *self.zombies])

    def _maintain(self, process: Process, service: ContainerService) -> None:
        maintain(self._sim.faults, process, self._upkeep_s, service.maintain)

    def alive(self, container: int) -> bool:
        process = self.processes.get(container)
        return process is not None and process.alive

    def has_ended(self, container: int) -> bool:
        return not self.alive(container)

    def last_words(self, container: int) -> str:
        return "was killed"

    def check_room(self, containers: int) -> None:
        pass

    def task_slots(self) -> dict[str, int]:
        return {}

    def is_busy(self, container: int) -> bool:
        return False

    def kill(self, container: int) -> None:
        """One that is stopped may be out of reach: then it lives on, and wakes up some time."""
        process = self.processes.get(container)
        if process is None:
            return
        if process.stopped and self._sim.scheduler.random.random() < ZOMBIES:
            self._sim.faults.fire("out of reach", process.name)
            del self.processes[container]
            self.zombies.append(process)
            self._sim.scheduler.at(self._sim.faults.duration(WAKING_S), process.resume)
            self._sim.scheduler.at(self._sim.faults.duration(ZOMBIE_S), process.kill)
        else:
            process.kill()

    def stop_one(self, container: int) -> None:
        if process := self.processes.pop(container, None):
            process.kill()

    def stop(self) -> None:
        for container in list(self.processes):
            self.stop_one(container)

    def _ended(self, container: int, process: Process) -> None:
        if self._driver.alive and self.processes.get(container) is process:
            self._driver.spawn(lambda: self._on_exit(container), f"recover-{container}")

    def _orphan(self) -> None:
        for process in [*self.processes.values(), *self.zombies]:
            self._sim.scheduler.at(self._sim.faults.duration(ORPHAN_S), process.kill)


class SimPond:
    """What outlives its processes: whoever drives it, there is one driver at a time."""

    def __init__(self, sim: Simulation, chance: Random) -> None:
        self.sim = sim
        self.chance = chance
        self.driver: Process | None = None
        self.hosting: SimHosting | None = None
        self.coordinator: CoordinatorService | None = None
        low, high = UPKEEP_S
        self.upkeep_s = math.exp(chance.uniform(math.log(low), math.log(high)))
        self.containers = 0
        self.opened = 0
        # Not from `chance`: what is drawn after it stays as it is without.
        self.elastic = Random(f"elastic {sim.seed}")
        self.backups = self.elastic.choice((0, 0, 1, 1, 1, 2))
        # Not from `elastic`, either: seeds that are not balanced are as they were.
        self.balance = Random(f"balance {sim.seed}")
        self.is_balanced = self.balance.random() < BALANCED
        self.window_bytes: int | None = None
        """Of windows' rows, what may stay in memory; None where none go to disk."""
        self.log_records = BOUNDS.log_records

    def supervise(self) -> None:
        """Opens the pond, and again whenever it has ended."""
        sim = self.sim
        while True:
            self.driver = driver = sim.process(f"{DRIVER}-{self.opened}")
            self.coordinator = None
            self.opened += 1
            self.containers = self.chance.randint(1, CONTAINERS_MAX)
            sim.scheduler.note(f"opens with {self.containers} containers", driver.name)
            with suppress(Died):
                driver.run(self._drive)
            driver.kill()
            sim.scheduler.sleep(sim.faults.duration(REOPEN_S))

    def _drive(self) -> None:
        """The driver's life: it opens the pond, and looks after it until something ends it."""
        sim, driver = self.sim, self.driver
        assert driver is not None
        while self.hosting is not None and self.hosting.is_anyone_there:
            driver.runtime.sleep(ORPHAN_S)
        coordinator = CoordinatorService(
            sim.disk.files(driver), ROOT, sim.network.dialer(driver), driver.runtime
        )
        sim.network.serve(driver, coordinator, ADDRESS)
        if self.is_balanced:
            self._count_load(coordinator)
        self.hosting = SimHosting(sim, driver, self.upkeep_s, self._means, coordinator.recover)
        try:
            coordinator.start(self.hosting, self.containers, SLICES, self.backups)
        except Exception as error:
            if not is_weather(error):
                raise
            sim.scheduler.note(f"cannot open: {error!r}"[:200])
            return
        self.coordinator = coordinator
        driver.runtime.spawn(lambda: beat(driver, coordinator.beat), "beat")
        maintain(sim.faults, driver, COORDINATOR_UPKEEP_S, coordinator.maintain)

    def _means(self) -> Means:
        """What a container begins with."""
        bounds = BOUNDS._replace(log_records=self.log_records)
        if self.window_bytes is None:
            return Means(bounds=bounds)
        return Means(
            bounds=bounds, spilling=Spilling(ScratchFiles(self.sim.disk), "/scratch", self.window_bytes)
        )

    def move_slices(self, every_s: float) -> None:
        """Gives slices to other containers, again and again."""
        while True:
            self.sim.scheduler.sleep(self.sim.faults.duration(every_s))
            with suppress(Died):
                if self.driver is not None and self.driver.alive and self.sim.faults.weather.is_foul:
                    self.driver.run(self._move, "move")

    def move_once(self) -> None:
        """Some slices go to one container, while all goes on."""
        with suppress(Died):
            if self.driver is not None and self.driver.alive and self.coordinator is not None:
                self.driver.run(self._move_live, "move")

    def _move(self) -> None:
        if self.coordinator is None:
            return
        kind = self.elastic.random()
        if kind < 0.5:
            self._move_live()
            return
        if kind < 0.75:
            self._scale()
            return
        ids = self.coordinator.elasticity.containers
        owners = [self.chance.choice(ids) for _ in range(SLICES)]
        self.sim.scheduler.note(f"places slices {owners}")
        try:
            self.coordinator.place(owners)
        except Exception as error:
            if not is_weather(error):
                raise
            self.sim.faults.fire("move failed", repr(error)[:80])
        else:
            self.sim.faults.fire("slices moved", str(owners))

    def _move_live(self) -> None:
        assert self.coordinator is not None
        slices = [SliceId(n) for n in self.elastic.sample(range(SLICES), self.elastic.randint(1, SLICES))]
        elasticity = self.coordinator.elasticity
        target = self.elastic.choice([c for c in elasticity.containers if c not in elasticity.leaving])
        self.sim.scheduler.note(f"moves slices {slices} to {target}")
        try:
            self._await_moves([ticket.id for ticket in elasticity.move(slices, target)])
        except Exception as error:
            if not is_weather(error):
                raise
            self.sim.faults.fire("live move failed", repr(error)[:80])
        else:
            self.sim.faults.fire("slices moved live", f"{slices} to {target}")

    def _await_moves(self, ids: list[int]) -> None:
        """As a client does. Moves of a driver that ended are nobody's any more."""
        coordinator, driver = self.coordinator, self.driver
        assert coordinator is not None
        assert driver is not None
        while True:
            moves = coordinator.elasticity.moves(ids)
            if all(move.is_over for move in moves):
                break
            driver.runtime.sleep(0.5)
        for move in moves:
            if move.stage != "moved":
                raise Unavailable(f"{move.stage}: {move.error}", address="")

    def _scale(self) -> None:
        assert self.coordinator is not None
        assert self.driver is not None
        wanted = self.elastic.randint(1, CONTAINERS_MAX)
        self.sim.scheduler.note(f"scales to {wanted} containers")
        try:
            scaling = self.coordinator.elasticity.scale(wanted)
            while scaling.what:
                self.driver.runtime.sleep(0.5)
            if scaling.error is not None:
                raise scaling.error
        except Exception as error:
            if not is_weather(error):
                raise
            self.sim.faults.fire("scaling failed", repr(error)[:80])
        else:
            self.sim.faults.fire("scaled", str(wanted))

    def balance_load(self, every_s: float) -> None:
        """Has slices go where there is less load, and the number of containers follow it, until the storms are over."""
        while self.sim.faults.weather.is_foul:
            self.sim.scheduler.sleep(self.sim.faults.duration(every_s))
            with suppress(Died):
                if self.driver is not None and self.driver.alive and self.coordinator is not None:
                    self.driver.run(self._balance, "balance")

    def _balance(self) -> None:
        coordinator, chance = self.coordinator, self.balance
        assert coordinator is not None
        if not self.sim.faults.weather.is_foul:
            coordinator.call(Autoscale())
            return
        try:
            if chance.random() < 0.5:
                low = chance.randint(1, 2)
                high, hold_s = chance.randint(low, CONTAINERS_MAX), chance.uniform(0.5, 5.0)
                self.sim.scheduler.note(f"scales itself between {low} and {high} containers")
                coordinator.call(Autoscale(low, high, 0.02, 0.1, hold_s))
                return
            moves = coordinator.call(Rebalance(chance.choice(("cpu", "rows", "bytes"))))
            assert isinstance(moves, Moves)
            self._await_moves([move.id for move in moves.moves])
        except Exception as error:
            if not is_weather(error):
                raise
            self.sim.faults.fire("rebalancing failed", repr(error)[:80])
        else:
            if moves.moves:
                self.sim.faults.fire("rebalanced", f"{len(moves.moves)} moves")

    def _count_load(self, coordinator: CoordinatorService) -> None:
        """By rows; and what comes of it is counted."""
        gather, scale, faults = coordinator.figures.gather, coordinator.elasticity.scale, self.sim.faults

        def gathered() -> PondMetrics:
            figures = gather()
            columns = figures.slices.columns()
            rows = columns["rows_updated"] + columns["rows_fetched"]
            columns["cpu_us"] = (1e6 * ROW_S * rows).astype(int)
            containers = {
                container: {**own, "cpu_s": ROW_S * (own["rows_applied"] + own["rows_fetched"])}
                for container, own in figures.containers.items()
            }
            return msgspec.structs.replace(figures, slices=SliceFigures.of(columns), containers=containers)

        def scaled(containers: int, cause: Cause = "scale") -> Scaling:
            if cause == "autoscale":
                faults.fire("autoscaled", str(containers))
            return scale(containers, cause)

        coordinator.figures.gather = gathered  # type: ignore[method-assign]
        coordinator.elasticity.scale = scaled  # type: ignore[method-assign, assignment]

    def checkpoint_soon(self, process: Process) -> None:
        """Upkeep comes to a container, of all moments, now."""
        assert self.hosting is not None
        for container, own in self.hosting.processes.items():
            if own is process:
                process.spawn(
                    partial(_once, process, self.hosting.services[container].checkpoint), "checkpoint"
                )

    def crash(self) -> None:
        """The machine goes down, but for whoever else calls this kills."""
        if self.hosting is not None:
            for process in [*self.hosting.processes.values(), *self.hosting.zombies]:
                process.kill()
        if self.driver is not None:
            self.driver.kill()

    def processes(self) -> list[Process]:
        held = [] if self.hosting is None else [*self.hosting.processes.values(), *self.hosting.zombies]
        return [*([self.driver] if self.driver else []), *held]

    @property
    def is_whole(self) -> bool:
        """Whether every container serves."""
        coordinator = self.coordinator
        return coordinator is not None and set(coordinator.elasticity.containers) <= set(
            coordinator._containers.live  # noqa: SLF001
        )

    def containers_up(self) -> list[Process]:
        return [] if self.hosting is None else list(self.hosting.processes.values())

    def connect(self, process: Process) -> Pond:
        """Every other process, by its name, is on a machine that does not have the root: its own disk is nobody's."""
        dial = self.sim.network.dialer(process)
        files: SimFiles | None = self.sim.disk.files(process)
        if Random(f"sight {self.sim.seed} {process.name}").random() < UNSEEN:
            files = None
            self.sim.faults.fire("root unseen", process.name)
        return Pond(Client(dial(ADDRESS), dial, process.runtime, files=files), ADDRESS)

    def expire(self, seconds: float) -> None:
        """So much time passes for containers: nothing is staged any more."""
        assert self.hosting is not None
        for container, process in list(self.hosting.processes.items()):
            if not process.alive:  # it had no room to start, and is tried again
                continue
            process.clock_ahead_s += seconds
            service = self.hosting.services[container]
            try:
                process.run(service.maintain)
            except Died:  # its clock jumped while it wrote to its disk: it counted as away
                continue
            staged = process.run(lambda core=service.core: core.rows_staged)  # type: ignore[misc]
            assert staged == 0, f"container {container} holds {staged} rows that were staged long ago"

    def validate(self) -> None:
        """Every container serves, and its invariants hold."""
        assert self.hosting is not None
        for container, process in self.hosting.processes.items():
            assert process.alive, f"container {container} has ended"
            self.hosting.services[container].validate()


def beat(process: Process, work: Callable[[], object]) -> None:
    while True:
        _once(process, work)
        process.runtime.sleep(BEAT_S)


def maintain(faults: Faults, process: Process, every_s: float, work: Callable[[], object]) -> None:
    """Upkeep goes on, whatever went wrong once."""
    while True:
        _once(process, work)
        calm_s = 0.0 if faults.weather.is_foul else CALM_UPKEEP_S
        process.runtime.sleep(faults.duration(max(every_s, calm_s)))


def _once(process: Process, work: Callable[[], object]) -> None:
    try:
        work()
    except Exception as error:
        if not is_weather(error):
            raise
        process.scheduler.note(f"upkeep failed: {error!r}"[:200])
