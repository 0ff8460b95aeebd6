"""Rounds: containers that prepare an epoch together send each other rows, and wait for each other's.

After each round every container sends one message to every peer, also where it has no rows for it. All have then heard
the same, and stop after the same round. One that cannot go on tells the others; one that is away is found by asking.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from millpond.container.parcels import packed, unpacked
from millpond.container.round_book import Arrived, RoundBook
from millpond.durable.crashpoints import around
from millpond.errors import BadMessage, MessageTooLarge, MillpondError, StageLost, Unavailable
from millpond.runtime import Runtime, Signal
from millpond.wire.base import SliceId
from millpond.wire.connection import Connection, SlicedBatch
from millpond.wire.epochs import Prepare
from millpond.wire.rounds import Peer, RoundRows, RoundTaken

# How long one waits for a peer before it is asked whether it is there, and for its part to begin.
ASK_S = 0.5
BEGIN_S = 10.0
# A message that was lost is sent again so often.
SEND_ATTEMPTS = 3
SEND_PAUSE_S = 0.02


class Rounds:
    """The rounds of one container. `peer` gives a connection to another one."""

    def __init__(self, runtime: Runtime, peer: Callable[[str], Connection]) -> None:
        self.runtime = runtime
        self._peer = peer
        self._book = RoundBook()
        self._lock = runtime.lock()
        self._signals: dict[str, Signal] = {}

    def take(self, message: RoundRows, rows: Sequence[SlicedBatch]) -> RoundTaken:
        """What a peer sends."""
        resident, ballot = message.resident, message.ballot
        came = list(unpacked(message, rows))
        with self._lock:
            if message.failed:
                standing = self._book.hear_failure(resident, ballot, message.failed)
            elif message.asks:
                standing = self._book.standing(resident, ballot)
            else:
                arrived = Arrived(message.counts, came)
                standing = self._book.take(resident, ballot, message.round, message.sender, arrived)
            self._wake(resident)
        return RoundTaken(standing)

    def supersede(self, resident: str, ballot: int) -> None:
        """Epochs below that ballot are given up: who waits in one waits no more."""
        with self._lock:
            self._book.supersede(resident, ballot)
            self._wake(resident)

    def forget(self, resident: str) -> None:
        with self._lock:
            self._book.forget(resident)
            self._wake(resident)
            self._signals.pop(resident, None)

    def begin(self, message: Prepare, container: int) -> EpochRounds:
        """The rounds of an epoch that this container prepares."""
        with self._lock:
            self._book.begin(message.resident, message.ballot)
            signal = self._signals.setdefault(message.resident, self.runtime.signal())
        return EpochRounds(self, message, container, signal)

    def refuse(self, message: Prepare, container: int, why: str) -> None:
        """This container does not prepare the epoch: its peers need not wait. They hear it if they can."""
        with self._lock:
            self._book.end(message.resident, message.ballot, failed=True)
        others = [peer for peer in message.peers if peer.container != container and peer.address]

        def tell(peer: Peer) -> None:
            with suppress(MillpondError):
                self.send(peer, _about(message, container, 0, peer, failed=why or "it failed"), ())

        self.runtime.map(tell, others)

    def end(self, resident: str, ballot: int) -> None:
        with self._lock:
            self._book.end(resident, ballot, failed=False)

    def send(self, peer: Peer, message: RoundRows, rows: Sequence[SlicedBatch]) -> RoundTaken:
        """Again, where it is lost: it does no harm twice."""
        parcels = packed(rows)
        for attempt in range(SEND_ATTEMPTS):
            try:
                return self._peer(peer.address).exchange(message, parcels).message
            except Unavailable:
                if attempt + 1 == SEND_ATTEMPTS:
                    raise
                self.runtime.sleep(SEND_PAUSE_S)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def gather(
        self, message: Prepare, number: int, peers: Mapping[int, Peer], container: int, signal: Signal
    ) -> Mapping[int, Arrived]:
        """What all peers sent after a round, once it is there. StageLost if that cannot be."""
        resident, ballot = message.resident, message.ballot
        began = self.runtime.now()
        while True:
            signal.clear()
            with self._lock:
                arrived = self._book.gathered(resident, ballot, number, peers)
            if arrived is not None:
                return arrived
            if signal.wait(ASK_S):
                continue
            with self._lock:
                missing = self._book.missing(resident, ballot, number, peers)
            is_late = self.runtime.now() - began > BEGIN_S
            for peer in missing:
                self._check(message, number, peers[peer], container, is_late)

    def _check(self, message: Prepare, number: int, peer: Peer, container: int, is_late: bool) -> None:
        """StageLost unless the peer may still send its rows of that round."""
        ask = _about(message, container, number, peer, asks=True)
        try:
            standing = self.send(peer, ask, ()).standing
        except MillpondError as error:
            raise _lost(peer, f"is away: {error.message}") from error
        if standing == "runs" or (standing == "unknown" and not is_late):
            return
        with self._lock:
            if not self._book.missing(message.resident, message.ballot, number, [peer.container]):
                return  # it came meanwhile
        raise _lost(peer, "does not take part" if standing == "unknown" else "has given up")

    def _wake(self, resident: str) -> None:
        signal = self._signals.get(resident)
        if signal is not None:
            signal.set()

    def validate(self) -> None:
        self._book.validate()


class EpochRounds:
    """The rounds of one epoch in one container."""

    def __init__(self, rounds: Rounds, message: Prepare, container: int, signal: Signal) -> None:
        self.here = container
        self.owners: Mapping[SliceId, int] = {
            number: peer.container for peer in message.peers for number in peer.slices
        }
        self._rounds = rounds
        self._message = message
        self._signal = signal
        self._peers = {peer.container: peer for peer in message.peers if peer.container != container}
        self._number = 0

    def check_slices(self, slices: Collection[SliceId]) -> None:
        """StageLost unless these are the slices that others think are here."""
        known = {number for number, owner in self.owners.items() if owner == self.here}
        if known != set(slices):
            raise StageLost(
                "slices went to other containers before the epoch was prepared", container=self.here
            )

    def exchange(
        self, rows: Mapping[int, Sequence[SlicedBatch]], counts: Sequence[int]
    ) -> tuple[list[SlicedBatch], list[int]]:
        own = list(rows.get(self.here, ()))
        if not self._peers:
            return own, list(counts)
        number, self._number = self._number, self._number + 1

        def send(peer: Peer) -> None:
            if not peer.address:
                raise _lost(peer, "is away")
            ask = _about(self._message, self.here, number, peer, counts=counts)
            try:
                with around("round.send"):
                    taken = self._rounds.send(peer, ask, rows.get(peer.container, ()))
            except (StageLost, MessageTooLarge):
                raise
            except MillpondError as error:
                raise _lost(peer, f"is away: {error.message}") from error
            if taken.standing not in ("unknown", "runs"):
                raise _lost(peer, "has given up")

        self._rounds.runtime.map(send, list(self._peers.values()))
        with around("round.gather"):
            arrived = self._rounds.gather(self._message, number, self._peers, self.here, self._signal)
        came = {peer: one.rows for peer, one in arrived.items()} | {self.here: own}
        batches = [batch for container in sorted(came) for batch in came[container]]
        every = [counts, *(one.counts for one in arrived.values())]
        if any(len(each) != len(counts) for each in every):
            raise BadMessage("containers that run an epoch together count different things")
        return batches, [sum(each) for each in zip(*every, strict=True)]


def _about(
    message: Prepare,
    container: int,
    number: int,
    peer: Peer,
    *,
    counts: Sequence[int] = (),
    failed: str = "",
    asks: bool = False,
) -> RoundRows:
    return RoundRows(
        message.resident,
        message.ballot,
        number,
        container,
        peer.term,
        counts=list(counts),
        failed=failed,
        asks=asks,
    )


def _lost(peer: Peer, why: str) -> StageLost:
    return StageLost(
        f"container {peer.container}, which runs the epoch, too, {why}", container=peer.container
    )
