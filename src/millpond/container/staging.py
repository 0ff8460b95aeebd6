"""Rows that tasks have sent for epochs which are not prepared yet: bounded in number, in size and in time.

Where there is no room for all, epochs have an order, and the weakest lets go of its rows: first one to which nothing was
added for long, then one of a writer that had no epoch applied here before, then the one that began last. What arrives
for an epoch that is weaker than all others is refused, for a while. So the strongest always comes to its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from millpond.container.holdings.base import CheckedRows
from millpond.errors import MessageTooLarge, Unavailable
from millpond.wire.base import Turn

ATTEMPTS_KEPT = 8
"""Of one partition: the one that counts, its speculative twin, and some zombies."""
STAGED_S_MAX = 3600.0
"""What was staged by a driver that never came back is let go after so long."""
STAGED_S_LONG = 600.0
"""After so long without another row, those of an epoch are the first to go."""
STAGED_BYTES_MAX = 4 << 30
PART_BYTES = 1024
"""What a part takes beside its rows."""


class StagedEpoch(NamedTuple):
    resident: str
    writer: str
    turn: Turn


IsKnown = Callable[[StagedEpoch], bool]
"""Whether the writer of an epoch had one applied here before."""


class StagedPart(NamedTuple):
    """What one attempt at a partition sent."""

    parts: list[CheckedRows]
    digest: int
    at_s: float

    @property
    def rows(self) -> int:
        return sum(part.batch.num_rows for part in self.parts)

    @property
    def nbytes(self) -> int:
        return PART_BYTES + sum(int(part.batch.nbytes) for part in self.parts)


class Arrival:
    """A part that is on its way, `nbytes` of which are here."""

    def __init__(self, epoch: StagedEpoch, partition: int, at_s: float) -> None:
        self.epoch = epoch
        self.partition = partition
        self.at_s = at_s
        self.nbytes = 0


class Staged:
    """Safe to share between threads. `nbytes` is what all of it takes, `arriving` what is not yet whole."""

    def __init__(self, limit: int = STAGED_BYTES_MAX) -> None:
        self.limit = limit
        self.nbytes = 0
        self.arriving = 0
        # Held for moments, and never while anything waits: not the runtime's.
        self._lock = threading.Lock()
        self._epochs: dict[StagedEpoch, dict[tuple[int, int], StagedPart]] = {}

    def admit(self, arrival: Arrival, nbytes: int, is_known: IsKnown) -> None:
        """So many bytes more of a part have arrived. They count until it has left again.

        MessageTooLarge if the epoch alone is too large, Unavailable if others must go first.
        """
        with self._lock:
            if self._missing(nbytes) > 0:
                self._make_room(arrival, nbytes, is_known)
            if self._missing(nbytes) > 0:
                own = nbytes + arrival.nbytes + self._least(arrival)
                if own > self.limit:
                    raise MessageTooLarge(
                        f"the rows of an epoch take {own:,} bytes or more in a container, which has {self.limit:,} for them",
                        hint="let the query take smaller batches, or open the pond with a larger memory=",
                        size=own,
                        limit=self.limit,
                    )
                raise Unavailable(
                    f"rows to be committed take {self.nbytes + self.arriving:,} bytes here, of {self.limit:,} at most",
                    hint="try again in a moment, or open the pond with a larger memory=",
                    address="",
                )
            arrival.nbytes += nbytes
            self.arriving += nbytes

    def leave(self, arrival: Arrival) -> None:
        """Its part is kept, or will never be whole."""
        with self._lock:
            self._leave(arrival)

    def keep(self, arrival: Arrival, attempt: int, part: StagedPart) -> None:
        """The part is whole. The same attempt sent again replaces what it sent before."""
        with self._lock:
            self._leave(arrival)
            attempts = self._epochs.setdefault(arrival.epoch, {})
            self._remove(attempts, (arrival.partition, attempt))
            attempts[arrival.partition, attempt] = part
            self.nbytes += part.nbytes
            others = [key for key in attempts if key[0] == arrival.partition]
            for key in others[:-ATTEMPTS_KEPT]:
                self._remove(attempts, key)

    def find(self, epoch: StagedEpoch, chosen: Mapping[int, int]) -> list[StagedPart | None]:
        """What the chosen attempts sent, by partition; None for one that is not here."""
        with self._lock:
            attempts = self._epochs.get(epoch, {})
            return [attempts.get(attempt) for attempt in sorted(chosen.items())]

    def forget(self, gone: Callable[[StagedEpoch], bool]) -> None:
        with self._lock:
            for epoch in [epoch for epoch in self._epochs if gone(epoch)]:
                self._forget(epoch)

    def expire(self, now_s: float) -> None:
        """Lets go of rows that were staged long ago: whoever comes for them is told to stage again."""
        with self._lock:
            for epoch, attempts in list(self._epochs.items()):
                for key in [key for key, part in attempts.items() if now_s - part.at_s > STAGED_S_MAX]:
                    self._remove(attempts, key)
                if not attempts:
                    del self._epochs[epoch]

    @property
    def rows(self) -> int:
        with self._lock:
            return sum(part.rows for attempts in self._epochs.values() for part in attempts.values())

    def validate(self) -> None:
        """Raises AssertionError if an invariant does not hold. For tests."""
        parts = [part for attempts in self._epochs.values() for part in attempts.values()]
        assert self.nbytes == sum(part.nbytes for part in parts)

    def _missing(self, nbytes: int) -> int:
        return self.nbytes + self.arriving + nbytes - self.limit

    def _least(self, arrival: Arrival) -> int:
        """What the other partitions of its epoch take, with one attempt each."""
        sizes: dict[int, int] = {}
        for (partition, _), part in self._epochs.get(arrival.epoch, {}).items():
            if partition != arrival.partition:
                sizes[partition] = max(part.nbytes, sizes.get(partition, 0))
        return sum(sizes.values())

    def _make_room(self, arrival: Arrival, nbytes: int, is_known: IsKnown) -> None:
        """Lets go of rows of epochs that are weaker, the weakest first."""
        newest, now_s = arrival.epoch, arrival.at_s

        def rank(epoch: StagedEpoch) -> tuple[bool, bool, float, StagedEpoch]:
            times = [part.at_s for part in self._epochs.get(epoch, {}).values()] or [now_s]
            is_left = epoch != newest and now_s - max(times) > STAGED_S_LONG
            return is_left, not is_known(epoch), min(times), epoch

        ranks = {epoch: rank(epoch) for epoch in (*self._epochs, newest)}
        for epoch in sorted(self._epochs, key=ranks.__getitem__, reverse=True):
            if self._missing(nbytes) <= 0 or ranks[epoch] <= ranks[newest]:
                return
            self._forget(epoch)

    def _leave(self, arrival: Arrival) -> None:
        self.arriving -= arrival.nbytes
        arrival.nbytes = 0

    def _forget(self, epoch: StagedEpoch) -> None:
        attempts = self._epochs.pop(epoch)
        for key in list(attempts):
            self._remove(attempts, key)

    def _remove(self, attempts: dict[tuple[int, int], StagedPart], key: tuple[int, int]) -> None:
        part = attempts.pop(key, None)
        if part is not None:
            self.nbytes -= part.nbytes
