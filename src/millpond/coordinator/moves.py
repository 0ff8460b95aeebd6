"""How slices change hands: a machine that is fed what happened, and tells what to do next.

The source releases them, the target adopts them, one journal entry makes them the target's. Before the entry they are
the source's, after it the target's. Where a step fails, whoever may serve other slices than the journal says is *astray*,
and goes home: it begins anew, with those that the journal gives it.
No I/O, no clock, no threads: whoever drives the machine carries its effects out, in any order, and reports each.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from millpond.errors import MillpondError, Unavailable
from millpond.wire.base import SliceId, Term

# Effects


class Release(NamedTuple):
    """Have the container serve these slices no more: Obeyed, or Failed."""

    container: int
    slices: Sequence[SliceId]


class Adopt(NamedTuple):
    """Have the container rebuild and serve these slices: Adopted, or Failed."""

    container: int
    slices: Sequence[SliceId]


class Enter(NamedTuple):
    """Write into the journal that the slices are the container's, if that incarnation still serves and the source still has
    them: Obeyed, or Failed.
    """

    container: int
    term: Term
    slices: Sequence[SliceId]
    source: int


class Confirm(NamedTuple):
    """Tell the container that the slices are its own: Obeyed, or Failed."""

    container: int
    slices: Sequence[SliceId]


class Settle(NamedTuple):
    """Write the journal as it is: an entry that failed may be on disk, and must not come to count: Obeyed, or Failed."""


class Recall(NamedTuple):
    """Have the container begin anew, with the slices that the journal gives it: Home."""

    container: int


Effect = Release | Adopt | Enter | Confirm | Settle | Recall

# Events


class Obeyed(NamedTuple):
    pass


class Adopted(NamedTuple):
    """By that incarnation of the target."""

    term: Term


class Failed(NamedTuple):
    """`stale` says that what the slices rest on was written down elsewhere while they were adopted."""

    error: MillpondError
    stale: bool = False


class Home(NamedTuple):
    container: int


Event = Obeyed | Adopted | Failed | Home


class Phase(Enum):
    RELEASE = auto()
    ADOPT = auto()
    ENTER = auto()
    CONFIRM = auto()
    LEAVE = auto()
    """An incarnation of the source that came up meanwhile took the slices for its own: it releases them again."""
    DONE = auto()
    SETTLE = auto()
    RECALL = auto()
    GIVEN_UP = auto()


_FOLLOWING = {
    Phase.RELEASE: Phase.ADOPT,
    Phase.ENTER: Phase.CONFIRM,
    Phase.CONFIRM: Phase.LEAVE,
    Phase.LEAVE: Phase.DONE,
    Phase.SETTLE: Phase.RECALL,
}


class Move:
    """Slices on their way. `effects()` are what is to be done now; each is reported by `on`, then ask again.

    When there is nothing more to do, `phase` is DONE, or it is GIVEN_UP and `error` says why. Where the journal cannot be
    settled, `effects()` comes to an end in SETTLE, with somebody still `astray`: `go_home()` tries again.
    """

    def __init__(self, source: int, target: int, slices: Sequence[SliceId]) -> None:
        self.source = source
        self.target = target
        self.slices = slices
        self.phase = Phase.RELEASE
        self.error: MillpondError | None = None
        self._term = Term(0)
        self._recalled: set[int] = set()
        self._stuck = False

    @property
    def is_over(self) -> bool:
        return self.phase in (Phase.DONE, Phase.GIVEN_UP)

    @property
    def astray(self) -> set[int]:
        """Containers that may serve other slices than the journal says, unless all that is asked for is done."""
        return set(self._recalled) if self.error is not None else self._touched()

    def _touched(self) -> set[int]:
        match self.phase:
            case Phase.RELEASE | Phase.LEAVE:
                return {self.source}
            case Phase.ADOPT | Phase.ENTER | Phase.CONFIRM:
                return {self.source, self.target}
        return set()

    def go_home(self, error: MillpondError | None = None) -> None:
        """Give up: whoever is astray begins anew."""
        if self.error is None and self.phase is not Phase.DONE:
            self._recalled = self._touched()
            self.error = error or Unavailable("a move was broken off", address="")
            self.phase = Phase.SETTLE
        self._stuck = False

    def effects(self) -> list[Effect]:
        if self._stuck:
            return []
        match self.phase:
            case Phase.RELEASE | Phase.LEAVE:
                return [Release(self.source, self.slices)]
            case Phase.ADOPT:
                return [Adopt(self.target, self.slices)]
            case Phase.ENTER:
                return [Enter(self.target, self._term, self.slices, self.source)]
            case Phase.CONFIRM:
                return [Confirm(self.target, self.slices)]
            case Phase.SETTLE:
                return [Settle()]
            case Phase.RECALL:
                return [Recall(container) for container in sorted(self._recalled)]
        return []

    def on(self, event: Event) -> None:
        match event:
            case Obeyed():
                self.phase = _FOLLOWING[self.phase]
            case Adopted(term):
                self._term = term
                self.phase = Phase.ENTER
            case Failed() if self.phase in (Phase.SETTLE, Phase.RECALL):
                self._stuck = True
            case Failed(_, stale=True):
                # A source that began anew wrote down elsewhere what they rest on, and tidied up: no file is missing.
                self.go_home(Unavailable(f"container {self.source} was restarted", address=""))
            case Failed(error):
                self.go_home(error)
            case Home(container):
                self._recalled.discard(container)
                if not self._recalled:
                    self.phase = Phase.GIVEN_UP
