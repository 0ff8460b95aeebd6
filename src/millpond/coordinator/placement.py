"""Which container owns each slice: decisions without I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from msgspec.structs import replace

from millpond.coordinator.records import PondRecord
from millpond.wire.base import SliceId, Term


def place(slices: int, containers: Sequence[int]) -> tuple[int, ...]:
    """The owner of each slice: contiguous runs of nearly equal length."""
    return tuple(containers[number * len(containers) // slices] for number in range(slices))


def opened(pond: PondRecord, containers: Sequence[int]) -> PondRecord:
    """The pond as these containers share it: as the journal says, if they are those that it names.

    Else slices of containers that are gone find a new one, and as few others as it takes to be even move.
    """
    if set(containers) == set(pond.owners):
        return pond
    return placed(pond, evened(pond.owners, containers))


def evened(
    before: Sequence[int],
    containers: Sequence[int],
    held: Mapping[SliceId, Sequence[int]] = MappingProxyType({}),
) -> list[int]:
    """Owners that share the slices evenly. As few slices as it takes move, where it can be to who holds a backup."""
    counts = Counter(before)
    even, left = divmod(len(before), len(containers))
    # Who has more than an even share keeps one more, as long as there are some left over.
    fullest = sorted(containers, key=lambda container: -counts[container])
    room = {container: even + (place < left) for place, container in enumerate(fullest)}
    owners: list[int | None] = []
    for owner in before:
        keeps = room.get(owner, 0) > 0
        owners.append(owner if keeps else None)
        if keeps:
            room[owner] -= 1
    for number in [number for number, owner in enumerate(owners) if owner is None]:
        holder = next((c for c in held.get(SliceId(number), ()) if room.get(c, 0) > 0), None)
        if holder is not None:
            owners[number] = holder
            room[holder] -= 1
    free = [container for container in containers for _ in range(room[container])]
    return [free.pop(0) if owner is None else owner for owner in owners]


def placed(pond: PondRecord, owners: Sequence[int]) -> PondRecord:
    """The pond with those owners; a version further if that changes anything."""
    owners = tuple(owners)
    return pond if owners == pond.owners else replace(pond, owners=owners, version=pond.version + 1)


def moves(before: Sequence[int], after: Sequence[int]) -> dict[tuple[int, int], list[SliceId]]:
    """The slices that go from one container to another."""
    out: dict[tuple[int, int], list[SliceId]] = {}
    for number, (source, target) in enumerate(zip(before, after, strict=True)):
        if source != target:
            out.setdefault((source, target), []).append(SliceId(number))
    return out


def next_term(pond: PondRecord) -> PondRecord:
    return replace(pond, term=Term(pond.term + 1))


def kept_in(pond: PondRecord, directory: str, slices: Sequence[SliceId]) -> PondRecord:
    """The pond in which that directory tells what these slices rest on, and no other does."""
    gone = set(slices)
    left = {name: tuple(n for n in numbers if n not in gone) for name, numbers in pond.directories.items()}
    left[directory] = tuple(sorted({*left.get(directory, ()), *slices}))
    return replace(pond, directories={name: numbers for name, numbers in left.items() if numbers})


def backed_up_in(pond: PondRecord, directory: str, slices: Sequence[SliceId]) -> PondRecord:
    """The pond in which that directory holds a backup of these slices, besides those that it has."""
    backups = {**pond.backups, directory: tuple(sorted({*pond.backups.get(directory, ()), *slices}))}
    return replace(pond, backups={name: numbers for name, numbers in backups.items() if numbers})


def without_backups(
    pond: PondRecord, directories: Collection[str], slices: Collection[SliceId] | None = None
) -> PondRecord:
    """The pond in which those directories hold none of these slices, or nothing at all, as a backup."""
    backups = {}
    for name, numbers in pond.backups.items():
        gone = () if name not in directories else numbers if slices is None else slices
        left = tuple(number for number in numbers if number not in gone)
        if left:
            backups[name] = left
    return pond if backups == pond.backups else replace(pond, backups=backups)


def backups_of(pond: PondRecord) -> dict[SliceId, list[str]]:
    """The directories that hold a backup of each slice, for those that have one."""
    out: dict[SliceId, list[str]] = {}
    for name, numbers in sorted(pond.backups.items()):
        for number in numbers:
            out.setdefault(number, []).append(name)
    return out


def rest_on_backups(
    pond: PondRecord, directory: str, slices: Sequence[SliceId], present: Collection[str]
) -> PondRecord:
    """The pond in which slices whose directory is lost rest on backups of them, as far as there are."""
    for name in sorted(set(pond.backups).intersection(present)):
        lost = [number for number in pond.directories.get(directory, ()) if number in pond.backups[name]]
        if lost:
            pond = without_backups(kept_in(pond, name, lost), [name], lost)
    return pond


def handed_to(pond: PondRecord, owner: int, directory: str, slices: Sequence[SliceId]) -> PondRecord:
    """The pond in which these slices are that container's, whose directory tells what they rest on."""
    gone = set(slices)
    owners = [owner if number in gone else before for number, before in enumerate(pond.owners)]
    return kept_in(placed(pond, owners), directory, slices)


def directories_of(pond: PondRecord, slices: Sequence[SliceId]) -> Mapping[SliceId, str]:
    """The directory that tells what each of these slices rests on; "" for one that nobody has had."""
    directories = {number: name for name, numbers in pond.directories.items() for number in numbers}
    return {number: directories.get(number, "") for number in slices}
