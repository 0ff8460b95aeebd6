"""How a backup comes to own its slices: a machine that is fed what happened, and tells what to do next.

While their owner lives, the two change places between two epochs: the backup serves, the owner holds a backup from then on,
and one journal entry says so. Before the entry the slices are the source's, after it the target's. Where a step fails
that may have been carried out, whoever may serve other slices than the journal says is *astray*, and goes home: it
begins anew, with those that the journal gives it.
Where their owner is gone, the backups of its slices serve, each those that it has, all at once; or, where there are none,
others rebuild them from the files that it left.
No I/O, no clock, no threads: whoever drives the machine carries its effects out, in any order, and reports each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

from millpond.coordinator.moves import Home, Recall, Settle
from millpond.errors import BackupLost, CorruptFile, MillpondError, Unavailable
from millpond.wire.base import SliceId, Term

# Effects; `Settle` and `Recall` as those of moves


class Promote(NamedTuple):
    """Have the container serve these slices, which it holds as a backup: Obeyed, or Failed."""

    container: int
    slices: Sequence[SliceId]


class Rebuild(NamedTuple):
    """Have the container serve these slices, from the files that their owner left: Obeyed, or Failed."""

    container: int
    slices: Sequence[SliceId]


class Demote(NamedTuple):
    """Have the container serve these slices no more, but hold them as a backup: Obeyed, or Failed."""

    container: int
    slices: Sequence[SliceId]


class Enter(NamedTuple):
    """Write into the journal that the slices are their targets', by container and term, if these still serve and the source
    has them: Obeyed, or Failed. `demoted` is the incarnation of the source that holds them as a backup from then on.
    """

    source: int
    targets: Mapping[int, tuple[Term, Sequence[SliceId]]]
    demoted: Term | None


class Confirm(NamedTuple):
    """Tell the container that the slices are its own: Obeyed, or Failed."""

    container: int
    slices: Sequence[SliceId]


Effect = Promote | Rebuild | Demote | Enter | Confirm | Settle | Recall

# Events


class Obeyed(NamedTuple):
    """By that incarnation."""

    container: int
    term: Term


class Failed(NamedTuple):
    container: int
    error: MillpondError


Event = Obeyed | Failed | Home


class Phase(Enum):
    PROMOTE = auto()
    DEMOTE = auto()
    ENTER = auto()
    CONFIRM = auto()
    DONE = auto()
    SETTLE = auto()
    RECALL = auto()
    GIVEN_UP = auto()


class Switch:
    """Slices of one container that go to others who hold them. `effects()` are what is to be done now; each is reported
    by `on`, then ask again.

    With `live`, the source is there, and all of it is done or nothing; without, what can be; `from_root`, nobody has to hold
    them. When there is nothing more
    to do, `phase` is DONE and `moved` says which slices went, or it is GIVEN_UP and `error` says why nothing did. Where the journal
    cannot be settled, `effects()` comes to an end in SETTLE, with somebody `astray`: `go_home()` tries again.
    """

    def __init__(
        self, source: int, targets: Mapping[int, Sequence[SliceId]], *, live: bool, from_root: bool = False
    ) -> None:
        assert not (live and from_root), "files that somebody writes are nobody else's to rebuild from"
        self.source = source
        self.live = live
        self.from_root = from_root
        self.phase = Phase.PROMOTE
        self.error: MillpondError | None = None
        self._targets = dict(targets)
        self._terms: dict[int, Term] = {}
        self._demoted: Term | None = None
        self._asked: set[int] = set(targets)
        """Who may serve other slices than the journal says."""
        self._entered = False
        self._waiting: dict[int, None] = dict.fromkeys(targets)
        self._stuck = False

    @property
    def moved(self) -> list[SliceId]:
        return [n for c in self._terms for n in self._targets[c]] if self._entered else []

    @property
    def astray(self) -> set[int]:
        return set() if self.phase in (Phase.DONE, Phase.GIVEN_UP) else set(self._asked)

    def effects(self) -> list[Effect]:
        if self._stuck:
            return []
        match self.phase:
            case Phase.PROMOTE:
                serve = Rebuild if self.from_root else Promote
                return [serve(c, self._targets[c]) for c in self._waiting]
            case Phase.DEMOTE:
                return [Demote(self.source, [n for slices in self._targets.values() for n in slices])]
            case Phase.ENTER:
                to = {c: (term, self._targets[c]) for c, term in self._terms.items()}
                return [Enter(self.source, to, self._demoted)]
            case Phase.CONFIRM:
                every = [n for slices in self._targets.values() for n in slices]
                return [Confirm(c, self._targets.get(c, every)) for c in self._waiting]
            case Phase.SETTLE:
                return [Settle()]
            case Phase.RECALL:
                return [Recall(c) for c in sorted(self._asked)]
        return []

    def go_home(self, error: MillpondError | None = None) -> None:
        """Give up: whoever is astray begins anew."""
        if self.phase not in (Phase.SETTLE, Phase.RECALL, Phase.DONE, Phase.GIVEN_UP):
            self.error = self.error or error or Unavailable("a switch was broken off", address="")
            self.phase = Phase.SETTLE if self._asked else Phase.GIVEN_UP
        self._stuck = False

    def on(self, event: Event) -> None:
        match self.phase, event:
            case Phase.SETTLE, Obeyed():
                self.phase = Phase.RECALL
            case ((Phase.SETTLE | Phase.RECALL), Failed()):
                self._stuck = True
            case Phase.RECALL, Home(container):
                self._asked.discard(container)
                if not self._asked:
                    self.phase = Phase.DONE if self._entered else Phase.GIVEN_UP
            case Phase.PROMOTE, Obeyed(container, term):
                self._terms[container] = term
                self._answered(container)
            case Phase.PROMOTE, Failed(container, error):
                self.error = self.error or error
                if isinstance(error, BackupLost | CorruptFile):
                    # It refused, and is what it was.
                    self._asked.discard(container)
                self._answered(container)
            case Phase.DEMOTE, Obeyed(_, term):
                self._demoted = term
                self.phase = Phase.ENTER
            case ((Phase.DEMOTE | Phase.ENTER), Failed(_, error)):
                self.go_home(error)
            case Phase.ENTER, Obeyed():
                self._entered = True
                self.phase = Phase.CONFIRM
                # The source, too: what they rested on while it served need not stay.
                self._waiting = dict.fromkeys([*self._terms, *([self.source] if self.live else [])])
            case Phase.CONFIRM, Obeyed(container, _):
                self._asked.discard(container)
                self._confirmed(container)
            case Phase.CONFIRM, Failed(container, _):
                # The slices are its own; it begins anew with them.
                self._confirmed(container)

    def _answered(self, container: int) -> None:
        self._waiting.pop(container, None)
        if self._waiting:
            return
        if not self._terms or (self.live and self.error is not None):
            self.go_home()
        elif self.live:
            self._asked.add(self.source)
            self.phase = Phase.DEMOTE
        else:
            self.phase = Phase.ENTER

    def _confirmed(self, container: int) -> None:
        self._waiting.pop(container, None)
        if self._waiting:
            return
        self.phase = Phase.SETTLE if self._asked else Phase.DONE
