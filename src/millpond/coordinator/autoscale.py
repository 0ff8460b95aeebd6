"""How many containers there should be by the load that they have: a machine without I/O or clock.

It grows when containers have been busy for a while, and shrinks when fewer would have been enough for much longer; after a
change it waits, so that it judges what the change has brought. Between the two bounds the number stays, and where one
container has much more load than the others for a while, slices should go to those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SHRINK_TIMES = 3
"""It takes so many times as long to shrink as to grow."""
HEADROOM = 0.9
"""After it has shrunk, containers must not be busier than this share of what makes it grow."""
UNEVEN = 1.5
"""A container with so many times the mean load has too much."""


@dataclass(frozen=True)
class Limits:
    """Between so many containers; their processors are to be busy for no less and no more than these shares."""

    containers_min: int
    containers_max: int
    busy_min: float
    busy_max: float
    hold_s: float
    """For so long it must have been so."""


@dataclass
class Autoscaler:
    limits: Limits
    _spent_s: dict[int, float] = field(default_factory=dict)
    _looked_s: float | None = None
    _high_since_s: float | None = None
    _low_since_s: float | None = None
    _uneven_since_s: float | None = None
    _changed_s: float | None = None
    is_uneven: bool = False
    """Whether slices should go from the busiest container to others, as of the last look."""

    def looks(self, now_s: float, spent_s: Mapping[int, float], threads: int) -> int | None:
        """How many containers there should be, if not as many as there are. `spent_s` is what each has used of its
        processors so far, with so many threads each.
        """
        limits, count = self.limits, len(spent_s)
        self.is_uneven = False
        elapsed_s = None if self._looked_s is None else now_s - self._looked_s
        both = self._spent_s.keys() & spent_s.keys()
        used_s = {c: max(0.0, spent_s[c] - self._spent_s[c]) for c in both}
        self._looked_s, self._spent_s = now_s, dict(spent_s)
        within = min(max(count, limits.containers_min), limits.containers_max)
        if within != count:
            # A change that came to nothing is not tried again at once.
            if self._changed_s is None or now_s - self._changed_s >= limits.hold_s:
                return self._changes(within, now_s)
            return None
        if not elapsed_s or not both:
            return None
        busy = sum(used_s.values()) / (elapsed_s * threads * len(both))
        # Those that were left would share what there is.
        busy_after = busy * count / (count - 1) if count > 1 else 1.0
        mean_s = sum(used_s.values()) / len(both)
        uneven = busy >= limits.busy_min and max(used_s.values()) > UNEVEN * mean_s
        self._high_since_s = _since(self._high_since_s, busy > limits.busy_max, now_s)
        self._low_since_s = _since(
            self._low_since_s, busy < limits.busy_min and busy_after < HEADROOM * limits.busy_max, now_s
        )
        self._uneven_since_s = _since(self._uneven_since_s, uneven, now_s)
        if _lasts(self._high_since_s, now_s, limits.hold_s) and count < limits.containers_max:
            return self._changes(count + 1, now_s)
        if _lasts(self._low_since_s, now_s, SHRINK_TIMES * limits.hold_s) and count > limits.containers_min:
            return self._changes(count - 1, now_s)
        if _lasts(self._uneven_since_s, now_s, limits.hold_s):
            self._uneven_since_s = None
            self.is_uneven = True
        return None

    def interrupted(self) -> None:
        """What containers do now says nothing of their load: a look begins anew."""
        self._spent_s, self._looked_s = {}, None
        self._high_since_s = self._low_since_s = self._uneven_since_s = None

    def _changes(self, count: int, now_s: float) -> int:
        self._changed_s = now_s
        self._high_since_s = self._low_since_s = self._uneven_since_s = None
        return count


def _since(since_s: float | None, is_so: bool, now_s: float) -> float | None:
    if not is_so:
        return None
    return now_s if since_s is None else since_s


def _lasts(since_s: float | None, now_s: float, seconds: float) -> bool:
    return since_s is not None and now_s - since_s >= seconds
