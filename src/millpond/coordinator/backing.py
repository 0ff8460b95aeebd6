"""Who holds a backup of which slices: what epochs must be sent to whom, and which backups are wanted."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from millpond.container.layout import backup_directory_name, incarnation_of
from millpond.coordinator import placement
from millpond.coordinator.membership import Membership
from millpond.coordinator.memory import Memory
from millpond.coordinator.records import PondRecord
from millpond.wire.backups import Backup
from millpond.wire.base import SliceId, Term


class Backing:
    """Backups are in the journal, and have all that was decided. Those that are *enlisted* become backups when they have it.

    Both are sent every epoch, and an epoch that one of them does not hold is not decided.
    """

    def __init__(self, memory: Memory, containers: Membership) -> None:
        self._memory = memory
        self._containers = containers
        self._enlisted: dict[tuple[int, Term], set[SliceId]] = {}

    def enlist(self, container: int, term: Term, slices: Collection[SliceId]) -> None:
        """Every epoch that begins from now on is sent there, too."""
        with self._memory.lock:
            self._enlisted.setdefault((container, term), set()).update(slices)

    def is_enlisted(self, container: int, term: Term, slices: Collection[SliceId]) -> bool:
        return self._enlisted.get((container, term), set()).issuperset(slices)

    def discharge(self, container: int, term: Term, slices: Collection[SliceId]) -> None:
        """It is a backup by now, or will never be one."""
        with self._memory.lock:
            left = self._enlisted.pop((container, term), set()).difference(slices)
            if left:
                self._enlisted[container, term] = left

    def lose(self, container: int, term: Term, slices: Collection[SliceId] | None = None) -> None:
        """That incarnation does not hold these slices, or any, as a backup any more."""
        with self._memory.lock:
            self.discharge(
                container, term, self._enlisted.get((container, term), set()) if slices is None else slices
            )
            directory = backup_directory_name(term, container)
            self._memory.change(lambda record: placement.without_backups(record, [directory], slices))

    def plan(self, resident: str) -> dict[int, list[Backup]]:
        """By container, who else must hold what it prepares of a resident. The caller holds the memory's lock."""
        self._drop_ended()
        record = self._memory.record
        places = set(record.residents[resident].spec.places(record.slices))
        held: dict[tuple[int, Term], set[SliceId]] = {
            incarnation: set(slices) for incarnation, slices in self._enlisted.items()
        }
        for name, numbers in record.backups.items():
            container, number = incarnation_of(name)
            held.setdefault((container, Term(number)), set()).update(numbers)
        plan: dict[int, list[Backup]] = {}
        for (container, term), known in sorted(held.items()):
            live = self._containers.live.get(container)
            if live is None or live.term != term:
                continue
            by_owner: dict[int, list[SliceId]] = {}
            for number in sorted(known & places):
                by_owner.setdefault(record.owners[number], []).append(number)
            for owner, slices in by_owner.items():
                if owner != container:
                    plan.setdefault(owner, []).append(Backup(container, term, live.host.address, slices))
        return plan

    def is_covered(self, resident: str, plan: Mapping[int, Sequence[Backup]]) -> bool:
        """Whether all backups that there are now were asked to hold it. The caller holds the memory's lock."""
        record = self._memory.record
        places = set(record.residents[resident].spec.places(record.slices))
        asked = {
            (record.owners[number], backup_directory_name(backup.term, backup.container), number)
            for owner, backups in plan.items()
            for backup in backups
            for number in backup.slices
            if record.owners[number] == owner
        }
        return all(
            (record.owners[number], name, number) in asked
            for name, numbers in record.backups.items()
            for number in places.intersection(numbers)
        )

    def _drop_ended(self) -> None:
        """A backup whose incarnation has ended lacks something from the next epoch on."""
        members = self._containers.members
        self._memory.change(lambda record: placement.without_ended(record, members.serving))
        for incarnation in [each for each in self._enlisted if not members.serves(*each)]:
            del self._enlisted[incarnation]

    def held(self) -> dict[SliceId, list[int]]:
        """Of each slice the containers that hold a backup, and serve."""
        return placement.holders(self._memory.record, self._containers.members.serving)

    def holders(self, number: SliceId) -> list[int]:
        """The containers that hold a backup of the slice, and serve."""
        return self.held()[number]


def wanted_backups(
    record: PondRecord,
    containers: Collection[int],
    hosts: Mapping[int, str],
    wanted: int,
    held: Mapping[SliceId, Sequence[int]],
) -> dict[SliceId, list[int]]:
    """Of each slice the containers that should hold a backup: on other hosts where there are any, those that do, and then
    peers in turn.

    The l-th backup of the m-th slice of a container goes to its peer m + l: so the slices of one that ends come back on
    all the others.
    """
    ring = sorted(containers)
    places: dict[int, int] = {}
    out: dict[SliceId, list[int]] = {}
    for number, owner in enumerate(record.owners):
        place = places[owner] = places.get(owner, -1) + 1
        peers = [container for container in ring if container != owner]
        elsewhere = [container for container in peers if hosts.get(container) != hosts.get(owner)]
        holders = [container for container in held.get(SliceId(number), ()) if container in peers]
        # Each list begins with those that hold one: what was chosen once stays, and nothing is copied to and fro.
        preferred = (
            *(container for container in holders if container in elsewhere),
            *(elsewhere[(place + step) % len(elsewhere)] for step in range(len(elsewhere))),
            *holders,
            *(peers[(place + step) % len(peers)] for step in range(len(peers))),
        )
        out[SliceId(number)] = list(dict.fromkeys(preferred))[:wanted]
    return out
