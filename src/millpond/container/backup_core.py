"""The core of the slices that a container holds as a backup: it takes records, and applies those that were decided.

Nobody asks it anything. A record is *kept* when it is durable, *settled* when a later one tells whether it was decided,
and then applied, in the order in which epochs were prepared. A slice of which no copy has come yet lets its records wait.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from millpond.container.core import Core
from millpond.container.holdings.base import HeldSlice, Holding, Means, Record
from millpond.errors import BackupLost, StageLost
from millpond.times import Progress
from millpond.wire.backups import BackUp
from millpond.wire.base import ResidentId, SliceId, Term, Turn
from millpond.wire.specs import Resident

Decided = Mapping[str, Turn]

_NONE_YET = 0
_LOST = -1
"""In place of the order of a copy: none is on its way yet, and one that was here lacks something."""


class Kept:
    """A record that is durable as number `seq`, and the slices that it is still to be applied to."""

    def __init__(
        self, seq: int, owner: int, record: Record, slices: Collection[SliceId], follows: Decided
    ) -> None:
        self.seq = seq
        self.owner = owner
        self.record = record
        self.left = set(slices)
        self.follows = follows
        """What was decided before it: a slice that has not seen that lacks something."""
        self.decided = False

    @property
    def nbytes(self) -> int:
        return sum(int(part.batch.nbytes) for part in self.record.parts)


class BackupCore(Core):
    """`owned` are the slices that are held here for others."""

    def __init__(self, container: int, term: Term, pond_slices: int, means: Means | None = None) -> None:
        super().__init__(container, term, pond_slices, means)
        self._kept: dict[str, list[Kept]] = {}
        self._writing: set[int] = set()
        # Slices of which nothing is applied until the copy with that order has come.
        self._uncopied: dict[tuple[ResidentId, SliceId], int] = {}
        # F and U of each resident as of a ballot: they hold here once all that came before it is applied.
        self._progress: dict[str, tuple[int, Progress, Progress]] = {}

    # Residents

    def add(self, resident: Resident) -> None:
        with self._lock:
            earlier = self.holdings.get(resident.spec.name)
            if earlier is not None and earlier.resident.born < resident.born:
                self.drop(earlier.name, earlier.resident.born)
            super().add(resident)

    def drop(self, name: str, born: int) -> Holding[Any] | None:
        with self._lock:
            dropped = super().drop(name, born)
            if dropped is not None:
                # One of the same name must get nothing of what this one was sent.
                self.void |= {kept.seq for kept in self._kept.pop(name, ())}
                self._progress.pop(name, None)
                own = dropped.resident.id
                self._uncopied = {each: order for each, order in self._uncopied.items() if each[0] != own}
            return dropped

    # Records in

    def accept(self, message: BackUp) -> bool:
        """Whether its record is new. It is refused if it comes too late, or for slices that are not held here."""
        with self._lock:
            holding = self.holdings.get(message.resident)
            if (
                holding is None
                or message.term != self.term
                or not self.owned.issuperset(message.slices)
                or any(self._uncopied.get((holding.resident.id, n)) == _LOST for n in message.slices)
            ):
                raise BackupLost(
                    f"container {self.container} does not hold these slices of {message.resident!r} as a backup",
                    container=self.container,
                    term=self.term,
                )
            if message.ballot < self._ballots.get(message.resident, 0):
                raise StageLost(f"epoch {message.turn} was backed up too late", container=self.container)
            self._ballots[message.resident] = message.ballot
            self._progress[message.resident] = (message.ballot, message.fetch_progress, message.final_below)
            self.settle(message.resident, message.decided, below=message.ballot)
            return not any(
                (kept.record.ballot, kept.owner) == (message.ballot, message.owner)
                for kept in self._kept.get(message.resident, ())
            )

    def number(self, resident: str) -> int:
        with self._lock:
            self._writing.add(self.seq + 1)
            return self.seq + 1

    def keep(self, seq: int, message: BackUp, record: Record) -> None:
        """The record is durable under that number."""
        with self._lock:
            self._writing.discard(seq)
            if message.ballot < self._ballots.get(message.resident, 0):
                # It took so long that its epoch came again: its owner did not wait for it.
                self.void.add(seq)
                return
            kept = self._kept.setdefault(message.resident, [])
            mine = self.owned.intersection(message.slices)
            kept.append(Kept(seq, message.owner, record, mine, message.decided))
            # Those of one ballot are for different slices: among them there is no order.
            kept.sort(key=lambda one: (one.record.ballot, one.seq))

    def not_written(self, seq: int) -> None:
        with self._lock:
            self._writing.discard(seq)

    def settle(self, resident: str, decided: Decided, below: int | None = None) -> None:
        """What was decided is to be applied. What was not, under a ballot below that, never will be."""
        with self._lock:
            left = []
            for kept in self._kept.get(resident, ()):
                newest = decided.get(kept.record.writer)
                kept.decided |= newest is not None and kept.record.turn <= newest
                if not kept.decided and below is not None and kept.record.ballot < below:
                    self.void.add(kept.seq)
                else:
                    left.append(kept)
            self._kept[resident] = left

    # Slices

    def enlist(self, slices: Collection[SliceId]) -> None:
        """Records for these slices are taken from now on; a copy of what was before is still to come, whatever is here."""
        with self._lock:
            new = set(slices) - self.owned
            self.install({number: {} for number in new})
            self._await(list(self.holdings.values()), slices, _NONE_YET)

    def await_copies(
        self, order: int, residents: Collection[ResidentId], slices: Collection[SliceId]
    ) -> None:
        """The copies of these that come by that order count, and no others. Until then nothing is applied.

        `residents` are all that there were once slices had been enlisted. Of another that was heard of by then, no epoch had
        begun: all that it ever has comes as records, and nothing is to be copied.
        """
        with self._lock:
            known = [holding for holding in self.holdings.values() if holding.resident.id in residents]
            self._await(known, slices, order)
            self._uncopied = {
                (each, number): awaited
                for (each, number), awaited in self._uncopied.items()
                if awaited != _NONE_YET or each in residents or number not in slices
            }

    def _await(self, holdings: Collection[Holding[Any]], slices: Collection[SliceId], order: int) -> None:
        for holding in holdings:
            for number in holding.places(self.owned.intersection(slices)):
                self._uncopied[holding.resident.id, number] = order

    def copied(self, order: int, resident_id: ResidentId, number: SliceId, held: HeldSlice[Any]) -> None:
        """The copy has come. What it has seen is not applied again."""
        with self._lock:
            holding = next((h for h in self.holdings.values() if h.resident.id == resident_id), None)
            if holding is None:
                return
            if self._uncopied.get((resident_id, number)) != order:
                # Records were applied, or not taken, since it was read.
                raise BackupLost(
                    f"a copy of slice {number} of {holding.name!r} came too late",
                    container=self.container,
                    term=self.term,
                )
            held.dirty = True
            holding.slices = {**holding.slices, number: held}
            del self._uncopied[resident_id, number]

    def lost(self, holding: Holding[Any], slices: Collection[SliceId]) -> None:
        """These lack something: they are of no use until a copy of them has come."""
        with self._lock:
            self._await([holding], slices, _LOST)

    def take_in(self, slices: Mapping[SliceId, Mapping[str, HeldSlice[Any]]]) -> None:
        """Slices that are whole, as their owner held them."""
        with self._lock:
            self.install(slices)
            self._forget_copies(slices)

    def release(self, slices: Collection[SliceId]) -> dict[SliceId, dict[str, HeldSlice[Any]]]:
        with self._lock:
            released = super().release(slices)
            self._forget_copies(released)
            for records in self._kept.values():
                for kept in records:
                    kept.left.difference_update(released)
            return released

    def _forget_copies(self, slices: Collection[SliceId]) -> None:
        self._uncopied = {each: order for each, order in self._uncopied.items() if each[1] not in slices}

    def missing(self, slices: Collection[SliceId], decided: Mapping[str, Decided]) -> str:
        """What these slices lack of what was decided, applied or kept to be; empty if nothing.

        `decided` has all residents that there are. Of one that was forgotten, word of its beginning may have come late: it
        is copied by nobody.
        """
        with self._lock:
            for name, holding in self.holdings.items():
                for number in holding.places(slices) if name in decided else ():
                    held = holding.slices.get(number)
                    if held is None or (holding.resident.id, number) in self._uncopied:
                        return f"slice {number} of {name!r} was not copied"
                    for writer, turn in decided.get(name, {}).items():
                        if not held.has_seen(writer, turn):
                            return f"slice {number} of {name!r} has not epoch {turn} of {writer}"
        return ""

    # Upkeep

    def lag(self, slices: Collection[SliceId]) -> tuple[int, int]:
        """Records that are to be applied to these slices, and their bytes."""
        with self._lock:
            waiting = [
                kept
                for records in self._kept.values()
                for kept in records
                if kept.decided and kept.left.intersection(slices)
            ]
            return len(waiting), sum(kept.nbytes for kept in waiting)

    def unsettled(self) -> list[ResidentId]:
        """Residents of which decided records are still to be applied."""
        with self._lock:
            return [
                holding.resident.id
                for name, holding in self.holdings.items()
                if any(kept.decided and kept.left for kept in self._kept.get(name, ()))
            ]

    @property
    def kept_bytes(self) -> int:
        with self._lock:
            return sum(kept.nbytes for records in self._kept.values() for kept in records)

    def next_decided(self, resident: str) -> tuple[Kept, dict[SliceId, HeldSlice[Any]]] | None:
        """The first record that is decided and can be applied to some of its slices; and these."""
        with self._lock:
            holding = self.holdings.get(resident)
            records = self._kept.get(resident, [])
            if holding is None:
                self.void |= {kept.seq for kept in records}
                self._kept.pop(resident, None)
                return None
            self._kept[resident] = records = [kept for kept in records if kept.left or not kept.decided]
            blocked: set[SliceId] = set()
            for kept in records:
                ready = {
                    number: holding.slices[number]
                    for number in sorted(kept.left - blocked)
                    if number in holding.slices and (holding.resident.id, number) not in self._uncopied
                }
                if kept.decided and ready:
                    # Whatever it is that kept a record from them, they tell nobody anything wrong.
                    gaps = [number for number, held in ready.items() if not _has_seen(held, kept.follows)]
                    self.lost(holding, gaps)
                    whole = {number: held for number, held in ready.items() if number not in gaps}
                    if whole:
                        return kept, whole
                blocked |= kept.left
            ballot, *progress = self._progress.get(resident, (0, -math.inf, -math.inf))
            if all(kept.record.ballot >= ballot for kept in records):
                holding.advance(*progress)
            return None

    def applied(self, kept: Kept, slices: Collection[SliceId]) -> None:
        with self._lock:
            kept.left.difference_update(slices)

    @property
    def residents_kept(self) -> list[str]:
        """Those of which there are records."""
        with self._lock:
            return list(self._kept)

    def undecided(self) -> list[int]:
        kept = (kept.seq for records in self._kept.values() for kept in records if not kept.decided)
        return [*kept, *self._writing]

    def unfinished(self) -> list[int]:
        kept = (kept.seq for records in self._kept.values() for kept in records if kept.left)
        return [*kept, *self._writing]


def _has_seen(held: HeldSlice[Any], decided: Decided) -> bool:
    return all(held.has_seen(writer, turn) for writer, turn in decided.items())
