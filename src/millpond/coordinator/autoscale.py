"""How many containers there should be by the load that they have: a machine without I/O or clock.

It grows when containers have been busy for a while, and shrinks when fewer would have been enough for much longer; after a
change it waits, so that it judges what the change has brought. Between the two bounds nothing happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SHRINK_TIMES = 3
"""It takes so many times as long to shrink as to grow."""


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

    def looks(self, now_s: float, spent_s: Mapping[int, float], threads: int) -> int | None:
        """How many containers there should be, if not as many as there are. `spent_s` is what each has used of its
        processors so far, with so many threads each.
        """
        limits, count = self.limits, len(spent_s)
        elapsed_s = None if self._looked_s is None else now_s - self._looked_s
        both = self._spent_s.keys() & spent_s.keys()
        used_s = sum(max(0.0, spent_s[c] - self._spent_s[c]) for c in both)
        self._looked_s, self._spent_s = now_s, dict(spent_s)
        if count < limits.containers_min:
            return limits.containers_min
        if count > limits.containers_max:
            return limits.containers_max
        if not elapsed_s or not both:
            return None
        busy = used_s / (elapsed_s * threads * len(both))
        # Those that were left would share what there is.
        busy_after = busy * count / (count - 1) if count > 1 else 1.0
        self._high_since_s = _since(self._high_since_s, busy > limits.busy_max, now_s)
        self._low_since_s = _since(
            self._low_since_s, busy < limits.busy_min and busy_after < limits.busy_max, now_s
        )
        if _lasts(self._high_since_s, now_s, limits.hold_s) and count < limits.containers_max:
            return self._changed(count + 1)
        if _lasts(self._low_since_s, now_s, SHRINK_TIMES * limits.hold_s) and count > limits.containers_min:
            return self._changed(count - 1)
        return None

    def _changed(self, count: int) -> int:
        self._high_since_s = self._low_since_s = None
        return count


def _since(since_s: float | None, is_so: bool, now_s: float) -> float | None:
    if not is_so:
        return None
    return now_s if since_s is None else since_s


def _lasts(since_s: float | None, now_s: float, seconds: float) -> bool:
    return since_s is not None and now_s - since_s >= seconds
