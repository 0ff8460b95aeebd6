"""What has come for epochs that containers run together in rounds: a machine that is told what happens, and asked.

Of each resident it knows one epoch, by its ballot: what comes for an older one counts no more, and a newer one ends it.
Rows that come before the epoch is prepared here are kept for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from millpond.errors import BadMessage, MessageTooLarge, StageLost
from millpond.wire.connection import SlicedBatch
from millpond.wire.rounds import Standing

ROWS_BYTES_MAX = 512 << 20
"""What all rounds may keep together in a container."""


class Arrived(NamedTuple):
    """What one peer sent after a round, with its numbers."""

    counts: list[int]
    rows: list[SlicedBatch]

    @property
    def nbytes(self) -> int:
        return sum(int(each.batch.nbytes) for each in self.rows)


class _Epoch:
    """One resident's epoch. `round` is the one that is gathered."""

    def __init__(self, ballot: int) -> None:
        self.ballot = ballot
        self.standing: Standing = "unknown"
        self.round = 0
        self.failed = ""
        self.arrived: dict[tuple[int, int], Arrived] = {}

    def close(self, standing: Standing) -> None:
        self.standing = standing
        self.arrived.clear()


class RoundBook:
    """The caller sees to it that calls do not overlap."""

    def __init__(self, bytes_max: int | None = None) -> None:
        self._epochs: dict[str, _Epoch] = {}
        self._bytes_max = ROWS_BYTES_MAX if bytes_max is None else bytes_max

    def take(self, resident: str, ballot: int, number: int, sender: int, arrived: Arrived) -> Standing:
        """Keeps what a peer sent; the same again replaces it. How this container stands."""
        epoch = self._at(resident, ballot)
        if epoch is None:
            return "over"
        if epoch.standing in ("failed", "done"):
            return epoch.standing
        # A peer is one round ahead at most: it needs this one's rows to go on.
        if number > epoch.round + 1:
            raise BadMessage(f"rows of round {number} of {resident!r} come in round {epoch.round}")
        if self.nbytes + arrived.nbytes > self._bytes_max:
            size = self.nbytes + arrived.nbytes
            raise MessageTooLarge(
                f"what calls of {resident!r} hand to one container between two rounds takes {size:,} bytes,"
                f" and there is room for {self._bytes_max:,}",
                hint="nothing was changed; send smaller batches, or let a call hand on less from one field to the next",
                size=size,
                limit=self._bytes_max,
            )
        if number >= epoch.round:
            epoch.arrived[number, sender] = arrived
        return epoch.standing

    def hear_failure(self, resident: str, ballot: int, why: str) -> Standing:
        """A peer does not go on."""
        epoch = self._at(resident, ballot)
        if epoch is None:
            return "over"
        epoch.failed = epoch.failed or why or "it failed"
        return epoch.standing

    def standing(self, resident: str, ballot: int) -> Standing:
        epoch = self._at(resident, ballot)
        return "over" if epoch is None else epoch.standing

    def begin(self, resident: str, ballot: int) -> None:
        """The epoch is prepared here; StageLost if a later one is known."""
        epoch = self._at(resident, ballot)
        if epoch is None or epoch.standing in ("failed", "done"):
            raise StageLost(f"an epoch of {resident!r} was prepared too late", container=None)
        epoch.standing = "runs"

    def supersede(self, resident: str, ballot: int) -> None:
        """Epochs below that ballot will not be decided."""
        epoch = self._epochs.get(resident)
        if epoch is not None and epoch.ballot < ballot:
            self._epochs[resident] = _Epoch(ballot)

    def gathered(
        self, resident: str, ballot: int, number: int, peers: Collection[int]
    ) -> Mapping[int, Arrived] | None:
        """What all peers sent after that round, and let go of here; None while something is missing. StageLost if it will
        not come.
        """
        epoch = self._running(resident, ballot)
        if epoch.failed:
            raise StageLost(epoch.failed, container=None)
        if any((number, peer) not in epoch.arrived for peer in peers):
            return None
        epoch.round = number + 1
        return {peer: epoch.arrived.pop((number, peer)) for peer in sorted(peers)}

    def missing(self, resident: str, ballot: int, number: int, peers: Collection[int]) -> list[int]:
        """The peers whose rows of that round have not come."""
        epoch = self._running(resident, ballot)
        return [peer for peer in sorted(peers) if (number, peer) not in epoch.arrived]

    def end(self, resident: str, ballot: int, *, failed: bool) -> None:
        epoch = self._at(resident, ballot)
        if epoch is not None:
            epoch.close("failed" if failed else "done")

    def forget(self, resident: str) -> None:
        self._epochs.pop(resident, None)

    @property
    def nbytes(self) -> int:
        return sum(arrived.nbytes for epoch in self._epochs.values() for arrived in epoch.arrived.values())

    def _running(self, resident: str, ballot: int) -> _Epoch:
        epoch = self._at(resident, ballot)
        if epoch is None or epoch.standing != "runs":
            raise StageLost(f"a later epoch of {resident!r} has begun", container=None)
        return epoch

    def _at(self, resident: str, ballot: int) -> _Epoch | None:
        """The epoch of that ballot, which ends earlier ones; None if a later one is known."""
        epoch = self._epochs.get(resident)
        if epoch is None or epoch.ballot < ballot:
            epoch = self._epochs[resident] = _Epoch(ballot)
        return epoch if epoch.ballot == ballot else None

    def validate(self) -> None:
        """Raises AssertionError if an invariant does not hold. For tests."""
        for epoch in self._epochs.values():
            assert epoch.standing in ("unknown", "runs") or not epoch.arrived
            assert all(epoch.round <= number <= epoch.round + 1 for number, _ in epoch.arrived)
