"""Which container owns each slice: decisions without I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

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
    counts = Counter(pond.owners)
    even, left = divmod(pond.slices, len(containers))
    # Who has more than an even share keeps one more, as long as there are some left over.
    fullest = sorted(containers, key=lambda container: -counts[container])
    room = {container: even + (place < left) for place, container in enumerate(fullest)}
    owners: list[int | None] = []
    for owner in pond.owners:
        keeps = room.get(owner, 0) > 0
        owners.append(owner if keeps else None)
        if keeps:
            room[owner] -= 1
    free = [container for container in containers for _ in range(room[container])]
    return placed(pond, [free.pop(0) if owner is None else owner for owner in owners])


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


def directories_of(pond: PondRecord, slices: Sequence[SliceId]) -> Mapping[SliceId, str]:
    """The directory that tells what each of these slices rests on; "" for one that nobody has had."""
    directories = {number: name for name, numbers in pond.directories.items() for number in numbers}
    return {number: directories.get(number, "") for number in slices}
