"""The pond's balance: load is looked at now and then, and slices and containers follow it; slices go back where they were."""

from __future__ import annotations

import logging

from millpond.coordinator.autoscale import Autoscaler
from millpond.coordinator.backing import Backing
from millpond.coordinator.elasticity import Elasticity, Ticket
from millpond.coordinator.figures import Figures
from millpond.coordinator.loads import Loads, Plan, Room, left_in, left_on_hosts, load_moves
from millpond.coordinator.memory import Memory
from millpond.coordinator.migrations import Migrations
from millpond.coordinator.slices import Slices
from millpond.errors import MillpondError
from millpond.runtime import Runtime
from millpond.wire.base import SliceId
from millpond.wire.figures import PondMetrics
from millpond.wire.moves import Cause

LOOK_S = 5.0
AUTOSCALE_S = 2.0
"""How often load is looked at; and where the number of containers follows it."""
WATCHED_S_MIN = 1.0
"""What was looked at for less long tells nothing."""
MOVED_AT_ONCE = 8
"""Slices of one move: those that are hot are there before others begin."""
_log = logging.getLogger("millpond")


class Balancing:
    """What the pond does by itself with its slices. All of it is done by moves, which `elasticity` carries out."""

    def __init__(
        self,
        memory: Memory,
        slices: Slices,
        backing: Backing,
        migrations: Migrations,
        elasticity: Elasticity,
        figures: Figures,
        runtime: Runtime,
    ) -> None:
        self._memory = memory
        self._slices = slices
        self._containers = slices.containers
        self._backing = backing
        self._migrations = migrations
        self._elasticity = elasticity
        self._figures = figures
        self._runtime = runtime
        self._looking = runtime.lock()
        self._look_at_s = 0.0
        self._loads = Loads()
        self.autoscaler: Autoscaler | None = None
        elasticity.rooms = self.room

    def maintain(self) -> None:
        """To be called often, by nothing that must not wait. One at a time."""
        if not self._looking.acquire(timeout=0):
            return
        try:
            self._give_back()
            if self._runtime.now() >= self._look_at_s:
                scaler = self.autoscaler
                self._look_at_s = self._runtime.now() + (LOOK_S if scaler is None else AUTOSCALE_S)
                figures = self._look()
                if scaler is not None:
                    self._autoscale(scaler, figures)
        except MillpondError as error:
            _log.info("the pond's balance was not looked at: %s", error)
        finally:
            self._looking.release()

    def _look(self) -> PondMetrics:
        figures = self._figures.gather()
        self._loads.looks(self._runtime.now(), figures.slices.columns(), figures.containers)
        return figures

    # Load

    def rebalance(self, by: str, cause: Cause) -> tuple[list[Ticket], list[str]]:
        """Moves hot slices from containers with much load to those with little. Tells what had no room where it should go."""
        with self._looking:
            figures = self._look()
            if self._loads.watched_s < WATCHED_S_MIN:
                self._runtime.sleep(WATCHED_S_MIN)
                figures = self._look()
        self._elasticity.stay()
        plan = self._plan(by, figures)
        return self._move(plan, cause), _notes(plan)

    def _plan(self, by: str, figures: PondMetrics) -> Plan:
        columns = figures.slices.columns()
        sizes = {SliceId(number): int(size) for number, size in enumerate(columns["held_bytes"])}
        loads = {
            "cpu": lambda: self._loads.rates("cpu_us"),
            "rows": lambda: self._loads.rates("rows_updated", "rows_fetched"),
            "bytes": lambda: {number: float(size) for number, size in sizes.items()},
        }[by]()
        owners, moving = self._elasticity.expected
        leaving = self._elasticity.leaving
        # Nothing is given to those that do not answer, nor can they give anything.
        ids = [c for c in self._containers.ids if c not in leaving and c in figures.containers]
        left = {c: left for c in ids if (left := left_in(figures.containers[c])) is not None}
        hosts = self._hosts()
        room = Room(left, sizes, self._backing.held(), hosts, left_on_hosts(figures.containers, hosts))
        return load_moves(loads, owners, ids, stay=moving, room=room)

    def _move(self, plan: Plan, cause: Cause) -> list[Ticket]:
        """A few slices at a time, in the plan's order."""
        tickets: list[Ticket] = []
        owners = self._memory.record.owners
        waiting = list(plan.moves.items())
        while waiting:
            number, target = waiting[0]
            way = (owners[number], target)
            together = [n for n, to in waiting if (owners[n], to) == way][:MOVED_AT_ONCE]
            tickets += self._elasticity.move(together, target, cause)
            waiting = [(n, to) for n, to in waiting if n not in together]
        return tickets

    def room(self, owner: int, target: int) -> Room:
        """What the target and its host have left, and the sizes of the owner's slices; nothing where they do not tell."""
        hosts = self._hosts()
        beside = [container for container in hosts if hosts[container] == hosts.get(target)]
        told = self._figures.of(sorted({owner, target, *beside}))
        left = left_in(told[target].metrics) if target in told else None
        if left is None or owner not in told:
            return Room()  # the move itself finds out what is the matter
        columns = told[owner].slices.columns()
        numbers = [SliceId(number) for number in columns["slices"].tolist()]
        sizes = dict(zip(numbers, columns["held_bytes"].tolist(), strict=True))
        figures = {container: told[container].metrics for container in beside if container in told}
        return Room({target: left}, sizes, self._backing.held(), hosts, left_on_hosts(figures, hosts))

    def _hosts(self) -> dict[int, str]:
        return {container: live.host.host for container, live in list(self._containers.live.items())}

    # The number of containers

    def _autoscale(self, scaler: Autoscaler, figures: PondMetrics) -> None:
        """Changes the number of containers by the load that they have; and where that is right, who has the load."""
        elasticity = self._elasticity
        containers = self._containers.ids
        # Whoever is away comes back with other figures; and what is on its way is load of its own.
        if not elasticity.is_idle or set(figures.containers) != set(containers):
            scaler.interrupted()
            return
        threads = max(int(own["threads"]) for own in figures.containers.values())
        spent_s = {container: float(own["cpu_s"]) for container, own in figures.containers.items()}
        wanted = scaler.looks(self._runtime.now(), spent_s, threads)
        if wanted is not None and wanted != len(containers):
            _log.info("autoscale: from %d to %d containers", len(containers), wanted)
            elasticity.scale(wanted, "autoscale")
        elif scaler.is_uneven:
            plan = self._plan("cpu", figures)
            if plan.moves:
                _log.info("autoscale: %d slices move to containers with less load", len(plan.moves))
                elasticity.stay()
                self._move(plan, "autoscale")
            for note in _notes(plan):
                _log.warning("autoscale: %s", note)

    # Slices that go back

    def _give_back(self) -> None:
        """Slices whose container ended go back to it, once all has been well for a while."""
        # Whoever wants slices elsewhere says so under this lock, before asking for it.
        with self._memory.lock:
            to_return = self._slices.homes.to_return(
                self._runtime.now(), self._memory.record.owners, self._containers.ids, self._is_well()
            )
            for home, slices in to_return.items():
                self._elasticity.move(slices, home, "return")

    def _is_well(self) -> bool:
        """All containers serve, slices have the backups that they should have, and nothing is on its way."""
        members = self._containers.members
        if self._slices.astray or not self._elasticity.is_idle:
            return False
        if not all(members.serves(c, members.term_of(c)) for c in self._containers.ids):
            return False
        wanted = min(self._migrations.wanted, len(self._containers.ids) - 1)
        return all(len(holders) >= wanted for holders in self._backing.held().values())


def _notes(plan: Plan) -> list[str]:
    return [
        f"slice {number} stays where it is: container {target} has no memory left for it"
        for number, target in plan.no_room.items()
    ]
