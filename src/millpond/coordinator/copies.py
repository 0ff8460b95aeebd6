"""How a container comes to hold slices for their owner: a machine that is fed what happened, and tells what to do next.

The copier is *enlisted*: from its next epoch on, each resident sends it what it sends to backups. Then it takes a *copy* of
what was before, and where the two overlap, a slice's progress vector tells. One journal entry makes it a backup. Before
the entry it is nobody's business, and whatever fails, it is dismissed.
No I/O, no clock, no threads: whoever drives the machine carries its effects out, in any order, and reports each.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from millpond.errors import MillpondError
from millpond.wire.base import SliceId, Term

# Effects


class Enlist(NamedTuple):
    """Have the container take what comes for these slices, and have every epoch that begins from now on send it:
    Done when no epoch that began before is under way.
    """

    container: int
    slices: Sequence[SliceId]


class Copy(NamedTuple):
    """Have it take a copy of the slices from their owner, all that was decided before it was enlisted: Done."""

    source: int
    container: int
    slices: Sequence[SliceId]


class Enter(NamedTuple):
    """Write into the journal that it holds a backup, if that incarnation is still enlisted: Done."""

    container: int
    term: Term
    slices: Sequence[SliceId]


class Dismiss(NamedTuple):
    """Epochs send it nothing any more, and it lets go of what it has: Done, or Failed all the same."""

    container: int
    slices: Sequence[SliceId]


Effect = Enlist | Copy | Enter | Dismiss

# Events


class Done(NamedTuple):
    """By that incarnation of the copier."""

    term: Term


class Failed(NamedTuple):
    error: MillpondError


Event = Done | Failed


class Phase(Enum):
    ENLIST = auto()
    COPY = auto()
    ENTER = auto()
    DONE = auto()
    DISMISS = auto()
    GIVEN_UP = auto()


_FOLLOWING = {Phase.ENLIST: Phase.COPY, Phase.COPY: Phase.ENTER, Phase.ENTER: Phase.DONE}


class Copying:
    """A copy of slices on its way. `effects()` are what is to be done now; each is reported by `on`, then ask again.

    When there is nothing more to do, `phase` is DONE, or it is GIVEN_UP and `error` says why.
    """

    def __init__(self, source: int, container: int, slices: Sequence[SliceId]) -> None:
        self.source = source
        self.container = container
        self.slices = slices
        self.phase = Phase.ENLIST
        self.error: MillpondError | None = None
        self._term = Term(0)

    def effects(self) -> list[Effect]:
        match self.phase:
            case Phase.ENLIST:
                return [Enlist(self.container, self.slices)]
            case Phase.COPY:
                return [Copy(self.source, self.container, self.slices)]
            case Phase.ENTER:
                return [Enter(self.container, self._term, self.slices)]
            case Phase.DISMISS:
                return [Dismiss(self.container, self.slices)]
        return []

    def on(self, event: Event) -> None:
        match event:
            case Failed(error):
                # What it is sent after that counts for nothing: the journal does not know it.
                self.error = self.error or error
                self.phase = Phase.GIVEN_UP if self.phase is Phase.DISMISS else Phase.DISMISS
            case Done(term):
                if self.phase is Phase.DISMISS:
                    self.phase = Phase.GIVEN_UP
                    return
                self._term = term
                self.phase = _FOLLOWING[self.phase]
