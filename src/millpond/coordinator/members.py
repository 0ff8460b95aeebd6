"""Which containers there are and when one that ended is started again: a machine without I/O or clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from millpond.errors import MillpondError
from millpond.wire.base import Term

NONE = Term(0)
BACKOFF_S = (0.1, 10.0)
"""The pause after a start that failed, and the longest that it grows to."""


@dataclass
class Member:
    """`term` is the incarnation that serves, or that served last. `failures` are starts that failed since then."""

    term: Term = NONE
    serving: bool = False
    failures: int = 0
    retry_at_s: float = 0.0
    error: MillpondError | None = None
    careful: Term = NONE
    """The first term in which a start failed since the container served last."""


@dataclass
class Members:
    """By id. Ids come by `join` and go by `leave`."""

    members: dict[int, Member] = field(default_factory=dict)
    restarts: int = 0

    def join(self, ids: Iterable[int]) -> None:
        for container in ids:
            self.members.setdefault(container, Member())

    def leave(self, container: int) -> None:
        self.members.pop(container, None)

    @property
    def ids(self) -> list[int]:
        return sorted(self.members)

    def serves(self, container: int, term: Term) -> bool:
        """Whether that very incarnation is the one that serves."""
        member = self.members.get(container)
        return member is not None and member.serving and member.term == term

    def has_ended(self, container: int, term: Term) -> bool:
        """Whether that incarnation serves no more; one that has not served yet has not."""
        member = self.members.get(container)
        if member is None or member.term > term:
            return True
        return member.term == term and not member.serving

    @property
    def serving(self) -> dict[int, Term]:
        """The incarnations that serve."""
        return {container: member.term for container, member in list(self.members.items()) if member.serving}

    def term_of(self, container: int) -> Term:
        """Of the incarnation that serves, or that served last; of one that left, of none."""
        member = self.members.get(container)
        return NONE if member is None else member.term

    def started(self, container: int, term: Term) -> None:
        """An incarnation has its slices, and the journal knows it."""
        member = self.members[container]
        self.restarts += member.term > 0
        self.members[container] = Member(term, serving=True)

    def ended(self, container: int) -> None:
        if container in self.members:
            self.members[container].serving = False

    def failed(self, container: int, term: Term, error: MillpondError, now_s: float) -> None:
        """A start came to nothing: it is tried again, after a pause that grows."""
        member = self.members[container]
        first, longest = BACKOFF_S
        member.serving = False
        member.error = error
        member.careful = member.careful or term
        member.retry_at_s = now_s + min(longest, first * 2.0 ** min(member.failures, 32))
        member.failures += 1

    def due(self, now_s: float) -> list[int]:
        """Containers to be started now."""
        return [
            container
            for container, member in sorted(self.members.items())
            if not member.serving and now_s >= member.retry_at_s
        ]
