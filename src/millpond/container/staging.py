"""Rows that tasks have sent for epochs which are not prepared yet: bounded in number, in size and in time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from millpond.container.holdings.base import CheckedRows
from millpond.wire.base import Turn

ATTEMPTS_KEPT = 8
"""Of one partition: the one that counts, its speculative twin, and some zombies."""
STAGED_S_MAX = 3600.0
"""What was staged by a driver that never came back is let go after so long."""
STAGED_BYTES_MAX = 4 << 30


class StagedEpoch(NamedTuple):
    resident: str
    writer: str
    turn: Turn


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
        return sum(part.batch.nbytes for part in self.parts)


class Staged:
    """Not safe to share: the caller holds a lock. `nbytes` is what all of it takes."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._epochs: dict[StagedEpoch, dict[tuple[int, int], StagedPart]] = {}

    def keep(self, epoch: StagedEpoch, partition: int, attempt: int, part: StagedPart) -> None:
        """The same attempt sent again replaces what it sent before."""
        attempts = self._epochs.setdefault(epoch, {})
        self._remove(attempts, (partition, attempt))
        attempts[partition, attempt] = part
        self.nbytes += part.nbytes
        others = [key for key in attempts if key[0] == partition]
        for key in others[:-ATTEMPTS_KEPT]:
            self._remove(attempts, key)
        self._bound(epoch)

    def find(self, epoch: StagedEpoch, chosen: Mapping[int, int]) -> list[StagedPart | None]:
        """What the chosen attempts sent, by partition; None for one that is not here."""
        attempts = self._epochs.get(epoch, {})
        return [attempts.get(attempt) for attempt in sorted(chosen.items())]

    def forget(self, gone: Callable[[StagedEpoch], bool]) -> None:
        for epoch in [epoch for epoch in self._epochs if gone(epoch)]:
            self._forget(epoch)

    def expire(self, now_s: float) -> None:
        """Lets go of rows that were staged long ago: whoever comes for them is told to stage again."""
        for epoch, attempts in list(self._epochs.items()):
            for key in [key for key, part in attempts.items() if now_s - part.at_s > STAGED_S_MAX]:
                self._remove(attempts, key)
            if not attempts:
                del self._epochs[epoch]

    @property
    def rows(self) -> int:
        return sum(part.rows for attempts in self._epochs.values() for part in attempts.values())

    def validate(self) -> None:
        """Raises AssertionError if an invariant does not hold. For tests."""
        parts = [part for attempts in self._epochs.values() for part in attempts.values()]
        assert self.nbytes == sum(part.nbytes for part in parts)

    def _bound(self, newest: StagedEpoch) -> None:
        """Lets go of what was staged longest ago by others, beyond a bound."""
        if self.nbytes <= STAGED_BYTES_MAX:
            return
        ages = {
            epoch: max(part.at_s for part in attempts.values()) for epoch, attempts in self._epochs.items()
        }
        for epoch in sorted(ages, key=lambda epoch: ages[epoch]):
            if self.nbytes > STAGED_BYTES_MAX and epoch != newest:
                self._forget(epoch)

    def _forget(self, epoch: StagedEpoch) -> None:
        attempts = self._epochs.pop(epoch)
        for key in list(attempts):
            self._remove(attempts, key)

    def _remove(self, attempts: dict[tuple[int, int], StagedPart], key: tuple[int, int]) -> None:
        part = attempts.pop(key, None)
        if part is not None:
            self.nbytes -= part.nbytes
