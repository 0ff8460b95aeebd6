"""Which container owns each slice: decisions without I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from msgspec.structs import replace

from millpond.container.layout import incarnation_of
from millpond.coordinator.records import PondRecord
from millpond.wire.base import SliceId, Term

VERSIONS_MAX = 16
NEWS_SHARE = 4
"""An owner by its slice takes so many times the room of one in its place."""


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


def changed(before: Sequence[int], after: Sequence[int]) -> dict[SliceId, int]:
    """The owners that are others than before."""
    return {
        SliceId(number): owner
        for number, (was, owner) in enumerate(zip(before, after, strict=True))
        if was != owner
    }


class Versions:
    """Owners as clients were told them, the last few: of those it can be said what has changed since."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[int, ...]] = {}

    def since(self, pond: PondRecord, known: int | None) -> dict[SliceId, int] | None:
        """What has changed since that version; None where it is not remembered, or the whole is as short."""
        before = self._told.get(-1 if known is None else known)
        self._told[pond.version] = pond.owners
        while len(self._told) > VERSIONS_MAX:
            del self._told[min(self._told)]
        if before is None:
            return None
        news = changed(before, pond.owners)
        return news if len(news) * NEWS_SHARE <= len(pond.owners) else None


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


def without_ended(pond: PondRecord, serving: Mapping[int, Term]) -> PondRecord:
    """The pond without the backups of incarnations that do not serve: they get nothing any more.

    Where the owner of a slice does not serve either, no epoch is decided; if its disk is lost, they are what is left.
    """
    ended = [name for name in pond.backups if serving.get(incarnation_of(name)[0]) != incarnation_of(name)[1]]
    served = [SliceId(number) for number, owner in enumerate(pond.owners) if owner in serving]
    return without_backups(pond, ended, served)


def holders(pond: PondRecord, serving: Mapping[int, Term]) -> dict[SliceId, list[int]]:
    """Of each slice the containers that hold a backup, in the incarnations that serve."""
    out: dict[SliceId, list[int]] = {SliceId(number): [] for number in range(pond.slices)}
    for name, numbers in sorted(pond.backups.items()):
        container, term = incarnation_of(name)
        if serving.get(container) == term:
            for number in numbers:
                out[number].append(container)
    return out


def rest_on_backups(pond: PondRecord, slices: Collection[SliceId], present: Collection[str]) -> PondRecord:
    """The pond in which those of the slices whose directory is lost rest on backups of them, as far as there are."""
    lost = {
        number
        for name, numbers in pond.directories.items()
        if name not in present
        for number in numbers
        if number in slices
    }
    for name in sorted(set(pond.backups).intersection(present)):
        own = sorted(lost.intersection(pond.backups[name]))
        if own:
            pond = without_backups(kept_in(pond, name, own), [name], own)
            lost.difference_update(own)
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
