"""The commit protocol of one epoch: a machine that is fed what happened, and tells what to do next.

An epoch is *prepared* by every container that holds the resident, then *decided* by one journal entry, then *applied*
by every container, and only then *published*: U moves. Before the entry it never happened; after it, it will.
No I/O, no clock, no threads: whoever drives the machine carries its effects out, in any order, and reports each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

from msgspec.structs import replace

from millpond.coordinator.updates import digest_of, rows_of
from millpond.errors import CodeFailed, MillpondError, StageLost, Unavailable
from millpond.times import Progress
from millpond.wire.backups import Backup
from millpond.wire.base import Call, Term, Turn, writer_id
from millpond.wire.epochs import Apply, CommitEpoch, Discard, EpochCommitted, Prepare, Prepared
from millpond.wire.rounds import Peer

# Effects


class Ask(NamedTuple):
    """Send the message to the container in the incarnation `term`: reported by Replied, or Failed."""

    container: int
    term: Term
    message: Call[Any]


class Bring(NamedTuple):
    """See that the container serves again, by a new incarnation if `term` is gone or `broken`: Back, or Failed."""

    container: int
    term: Term
    broken: bool = False


class Settle(NamedTuple):
    """Write the journal as it is: an entry that failed may be on disk, and must not come to decide anything: Settled."""


class Decide(NamedTuple):
    """Write the entry, if these incarnations are still the ones that serve: Decided, or Failed, perhaps `in_doubt`."""

    terms: Mapping[int, Term]


class Publish(NamedTuple):
    """Every container shows the epoch: Published."""


Effect = Ask | Bring | Settle | Decide | Publish

# Events


class Replied(NamedTuple):
    container: int
    reply: Any


class Failed(NamedTuple):
    """`container` is None for the journal. In doubt, the entry may be on disk all the same."""

    container: int | None
    error: MillpondError
    in_doubt: bool = False


class Back(NamedTuple):
    """The container serves, in that incarnation."""

    container: int
    term: Term


class Relieved(NamedTuple):
    """The container has no slice of the resident any more: who has them holds all that was decided."""

    container: int


class Settled(NamedTuple):
    pass


class Decided(NamedTuple):
    committed: EpochCommitted


class Published(NamedTuple):
    pass


Event = Replied | Failed | Back | Relieved | Settled | Decided | Published


SILENCES_MAX = 3
"""How often a container may fail to apply an epoch while it is there, before it must begin anew."""


class Phase(Enum):
    SETTLE = auto()
    PREPARE = auto()
    DECIDE = auto()
    APPLY = auto()
    PUBLISH = auto()
    DONE = auto()
    DISCARD = auto()
    REFUSED = auto()
    IN_DOUBT = auto()


class EpochCommit:
    """One epoch on its way. `effects()` are what is to be done now; each is reported by `on`, then ask again.

    When there is nothing more to do, `phase` is DONE, or it is REFUSED or IN_DOUBT and `error` says why. In APPLY, too,
    `effects()` may come to an end with an `error`: a container does not come back. The epoch is decided all the same;
    `resume()` goes on.
    """

    def __init__(
        self,
        message: CommitEpoch,
        holders: Mapping[int, Term],
        ballot: int,
        held_back: Mapping[str, Progress],
        in_doubt: bool = False,
        backups: Mapping[int, Sequence[Backup]] | None = None,
        decided: Mapping[str, Turn] | None = None,
        number: int = 0,
        peers: Sequence[Peer] = (),
    ) -> None:
        self.message = message
        self.ballot = ballot
        self.held_back = dict(held_back)
        """Where updaters stood before, until the epoch is published."""
        self.backups = dict(backups or {})
        """Who must hold what each container prepares, too."""
        self._decided = dict(decided or {})
        self._number = number
        self._peers = list(peers)
        self.committed: EpochCommitted | None = None
        self.error: MillpondError | None = None
        self.phase = Phase.SETTLE if in_doubt else Phase.PREPARE
        self._terms = dict(holders)
        self._prepared: dict[int, Prepared] = {}
        self._waiting = dict.fromkeys(holders)
        self._away: dict[int, bool] = {}
        """Containers to be brought back, and whether each must begin anew."""
        self._stuck = False
        self._silences: dict[int, int] = {}

    def resume(self) -> None:
        """Try again what failed after the decision."""
        self._stuck = False
        self.error = None

    def effects(self) -> list[Effect]:
        message, writer = self.message, writer_id(self.message.updater, self.message.query)
        if self._stuck:
            return []
        if self._away:
            return [Bring(c, self._terms[c], broken) for c, broken in self._away.items()]
        match self.phase:
            case Phase.SETTLE:
                return [Settle()]
            case Phase.PREPARE:
                attempts = {receipt.partition: receipt.attempt for receipt in message.receipts}
                ask = Prepare(
                    message.resident,
                    writer,
                    message.turn,
                    self.ballot,
                    attempts,
                    message.work,
                    decided=self._decided,
                    peers=self._peers,
                )
                return [
                    Ask(c, self._terms[c], replace(ask, backups=list(self.backups.get(c, ()))))
                    for c in self._waiting
                ]
            case Phase.DECIDE:
                return [Decide({c: prepared.term for c, prepared in self._prepared.items()})]
            case Phase.APPLY:
                apply = Apply(message.resident, writer, message.turn, self.ballot, self._number)
                return [Ask(c, self._terms[c], apply) for c in self._waiting]
            case Phase.PUBLISH:
                return [Publish()]
            case Phase.DISCARD:
                return [Ask(c, self._terms[c], Discard(message.resident, self.ballot)) for c in self._waiting]
            case _:
                return []

    def on(self, event: Event) -> None:
        match event:
            case Settled():
                self._enter(Phase.PREPARE)
            case Replied(container, reply):
                self._replied(container, reply)
            case Back(container, term):
                self._back(container, term)
            case Relieved(container):
                self._away.pop(container, None)
                self._waiting.pop(container, None)
                self._step()
            case Failed(container, error, in_doubt):
                self._failed(container, error, in_doubt)
            case Decided(committed):
                self.committed = committed
                self._terms = {c: prepared.term for c, prepared in self._prepared.items()}
                self._enter(Phase.APPLY)
            case Published():
                self._enter(Phase.DONE)

    def _replied(self, container: int, reply: Any) -> None:
        self._waiting.pop(container, None)
        if self.phase is Phase.PREPARE:
            self._prepared[container] = reply
        self._step()

    def _back(self, container: int, term: Term) -> None:
        self._away.pop(container, None)
        if self.phase is Phase.APPLY and term > self._terms[container]:
            # A later incarnation has applied the epoch by recovering.
            self._waiting.pop(container, None)
        self._step()

    def _failed(self, container: int | None, error: MillpondError, in_doubt: bool) -> None:
        if container is None:
            self.error = error
            if self.phase is Phase.SETTLE or in_doubt:
                # What was prepared stays: the journal may hold the decision after all.
                self._enter(Phase.IN_DOUBT)
            else:
                self._enter(Phase.DISCARD)
            return
        if self.phase is Phase.APPLY:
            if container in self._away:
                self.error, self._stuck = error, True
            else:
                # One that answers, and then again not, has a slice that it cannot serve.
                self._silences[container] = self._silences.get(container, 0) + 1
                self._away[container] = (
                    not isinstance(error, Unavailable) or self._silences[container] > SILENCES_MAX
                )
            return
        if self.phase is Phase.PREPARE:
            self._waiting.pop(container, None)
            if container in self._away:
                del self._away[container]
            elif isinstance(error, CodeFailed):
                self._away[container] = False
            elif isinstance(error, Unavailable):
                self._away[container] = False
                error = StageLost(f"container {container} was restarted", container=container)
            self.error = (
                self.error if self.error is not None and not isinstance(self.error, StageLost) else error
            )
        elif self.phase is Phase.DISCARD:
            # A container that is away has nothing prepared when it comes back.
            self._waiting.pop(container, None)
        self._step()

    def _step(self) -> None:
        """All that was asked for in this phase has come: on to the next."""
        if self._waiting or self._away:
            return
        match self.phase:
            case Phase.PREPARE if self.error is not None:
                self._enter(Phase.DISCARD)
            case Phase.PREPARE:
                digest = sum(prepared.digest for prepared in self._prepared.values()) % (1 << 64)
                rows = sum(prepared.rows for prepared in self._prepared.values())
                if (digest, rows) == (digest_of(self.message), rows_of(self.message)):
                    self._enter(Phase.DECIDE)
                else:
                    # Rows that were staged before slices moved lie where nobody asks for them any more.
                    self.error = StageLost("what the containers hold is not what the receipts tell of")
                    self._enter(Phase.DISCARD)
            case Phase.APPLY:
                self._enter(Phase.PUBLISH)
            case Phase.DISCARD:
                self._enter(Phase.REFUSED)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._waiting = (
            dict.fromkeys(self._terms) if phase in (Phase.PREPARE, Phase.APPLY, Phase.DISCARD) else {}
        )
        if phase is Phase.DISCARD and not self._waiting:
            self.phase = Phase.REFUSED
