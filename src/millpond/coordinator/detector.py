"""Which containers are away though nobody saw them end: a machine without I/O or clock.

It is told when each was heard of, and when somebody looks. One that was silent for long, or whose disk was, is suspected;
so is one that is busy, but much later: user code may keep an interpreter to itself. Whoever looks for the first time in
long may have been stopped itself: then everybody gets another chance to be heard.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond.wire.base import Term

BEAT_S = 0.5
"""How often containers are asked."""
SILENT_S_MAX = 5.0
BUSY_S_MAX = 120.0
DISK_S_MAX = 15.0
"""Of a container whose disk takes longer than this for a small write, nothing will be durable."""
GAP_S_MAX = 2.0
"""Who looks more rarely than this was held up itself."""
LEASE_S = 4.0
"""So long after an answer of its that was heard, a container answers others: less than it may be silent, so that one which
was stopped and is relieved does not answer when it wakes up, whatever questions had waited for it."""


@dataclass
class Heard:
    term: Term
    at_s: float
    disk_s: float = 0.0
    number: int = 0
    """Of its answer."""


@dataclass
class Detector:
    looked_s: float | None = None
    heard: dict[int, Heard] = field(default_factory=dict)
    graces: int = 0

    def hears(self, container: int, term: Term, now_s: float, disk_s: float = 0.0, number: int = 0) -> None:
        """It answered, or has just begun; its last small write took so long, or has taken so far."""
        known = self.heard.get(container)
        if known is None or term >= known.term:
            self.heard[container] = Heard(term, now_s, disk_s, number)

    def is_silent(self, container: int, now_s: float) -> bool:
        known = self.heard.get(container)
        return known is not None and now_s - known.at_s > SILENT_S_MAX

    def looks(self, serving: dict[int, Term], busy: set[int], now_s: float) -> list[tuple[int, Term]]:
        """Those that serve by name, and are suspected."""
        held_up = self.looked_s is not None and now_s - self.looked_s > GAP_S_MAX
        self.looked_s = now_s
        self.heard = {c: known for c, known in self.heard.items() if serving.get(c) == known.term}
        for container, term in serving.items():
            known = self.heard.setdefault(container, Heard(term, now_s))
            if held_up:
                known.at_s = now_s
        self.graces += held_up
        return [
            (container, known.term)
            for container, known in sorted(self.heard.items())
            if now_s - known.at_s > (BUSY_S_MAX if container in busy else SILENT_S_MAX)
            or known.disk_s > DISK_S_MAX
        ]
