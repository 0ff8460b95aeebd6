"""How much load slices are, and where they should go by it: decisions without I/O or clock."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from millpond.wire.base import SliceId
from millpond.wire.figures import Column

MEAN_S = 30.0
"""What lies so far back counts for a third."""
COUNTS = ("cpu_us", "rows_updated", "rows_fetched")
TOLERANCE = 0.1
_NOTHING: Mapping[SliceId, Sequence[int]] = MappingProxyType({})


class Loads:
    """What slices have done of late, in counts per second, from figures that are looked at now and then.

    What a slice was is not forgotten when it moves, though its counts begin anew.
    """

    def __init__(self) -> None:
        self.watched_s = 0.0
        """For how long it has been looked at."""
        self._began_s: float | None = None
        self._looked_s: npt.NDArray[np.float64] = np.zeros(0)
        self._owners: Column = np.zeros(0, np.int64)
        self._counts: dict[str, Column] = {}
        self._rates: dict[str, npt.NDArray[np.float64]] = {}

    def looks(self, now_s: float, columns: Mapping[str, Column], told: Collection[int]) -> None:
        """`columns` are figures of all slices, and true of those that belong to containers which `told` theirs."""
        owners = columns["owners"]
        here = np.isin(owners, list(told))
        if self._began_s is None:
            self._began_s = now_s
            self._looked_s = np.full(len(owners), now_s)
            self._owners = owners.copy()
            self._counts = {name: columns[name].copy() for name in COUNTS}
            self._rates = {name: np.zeros(len(owners)) for name in COUNTS}
            return
        self.watched_s = now_s - self._began_s
        elapsed_s = now_s - self._looked_s
        # One that begins anew has lower counts, and what it did between is not known.
        goes_on = here & (owners == self._owners) & (elapsed_s > 0)
        for name in COUNTS:
            goes_on &= columns[name] >= self._counts[name]
        kept = np.exp(-elapsed_s / MEAN_S)
        for name in COUNTS:
            rates, counts = self._rates[name], self._counts[name]
            now = (columns[name] - counts) / np.where(goes_on, elapsed_s, 1.0)
            self._rates[name] = np.where(goes_on, rates * kept + now * (1 - kept), rates)
            self._counts[name] = np.where(here, columns[name], counts)
        self._owners = np.where(here, owners, self._owners)
        self._looked_s = np.where(here, now_s, self._looked_s)

    def rates(self, *names: str) -> dict[SliceId, float]:
        """Of each slice, added up over these counts."""
        total = sum((self._rates[name] for name in names if name in self._rates), np.zeros(1))
        return {SliceId(number): float(rate) for number, rate in enumerate(total)}


@dataclass
class Room:
    """What containers have left for slices, in bytes: `left`, without those of which it is not known. A container that
    holds a backup needs nothing more for it. Those that share one of the `hosts` share what is left there, too.
    """

    left: dict[int, int] = field(default_factory=dict)
    sizes: Mapping[SliceId, int] = field(default_factory=dict)
    held: Mapping[SliceId, Sequence[int]] = field(default_factory=lambda: _NOTHING)
    hosts: Mapping[int, str] = field(default_factory=dict)
    left_on: dict[str, int] = field(default_factory=dict)
    """By host."""

    def needs(self, target: int, slices: Collection[SliceId]) -> int:
        return sum(self.sizes.get(n, 0) for n in slices if target not in self.held.get(n, ()))

    def fits(self, target: int, slices: Collection[SliceId]) -> bool:
        needs = self.needs(target, slices)
        return needs == 0 or needs <= min(self.left.get(target, math.inf), self.left_beside(target))

    def left_beside(self, target: int) -> float:
        """On its host, for all containers there together; without end where that is not known."""
        return self.left_on.get(self.hosts.get(target, ""), math.inf)

    def are_together(self, one: int, another: int) -> bool:
        return self.hosts.get(one, "") == self.hosts.get(another, "")

    def take(self, target: int, slices: Collection[SliceId]) -> None:
        needs, host = self.needs(target, slices), self.hosts.get(target, "")
        if target in self.left:
            self.left[target] -= needs
        if host in self.left_on:
            self.left_on[host] -= needs


def left_in(figures: Mapping[str, float]) -> int | None:
    """Bytes that a container may still take, by its own limit; None where it does not tell."""
    most, taken = int(figures.get("memory_max_bytes", 0)), int(figures.get("rss_bytes", 0))
    return max(0, most - taken) if most and taken else None


def left_on_hosts(figures: Mapping[int, Mapping[str, float]], hosts: Mapping[int, str]) -> dict[str, int]:
    """By host, what is left for containers of that share of its memory which one alone would have by default, or of what
    one was given, if that is more. Not of a host of which one does not tell.
    """
    most: dict[str, int] = {}
    taken: dict[str, int] = {}
    silent = set()
    for container, own in figures.items():
        host = hosts.get(container, "")
        if left_in(own) is None or not own.get("memory_share_bytes"):
            silent.add(host)
            continue
        own_max = int(max(own["memory_share_bytes"], own["memory_max_bytes"]))
        most[host] = max(most.get(host, 0), own_max)
        taken[host] = taken.get(host, 0) + int(own["rss_bytes"])
    return {host: max(0, most[host] - taken[host]) for host in most if host not in silent}


@dataclass
class Plan:
    """Where slices should go, the hottest first; and those that would have gone, had there been room for them."""

    moves: dict[SliceId, int] = field(default_factory=dict)
    no_room: dict[SliceId, int] = field(default_factory=dict)


def load_moves(
    loads: Mapping[SliceId, float],
    owners: Sequence[int],
    containers: Sequence[int],
    tolerance: float = TOLERANCE,
    *,
    stay: Collection[SliceId] = (),
    room: Room | None = None,
) -> Plan:
    """Where slices should go so that no container has much more load than the mean: the hottest first, as few as it takes.

    Those that `stay` are left where they are. No container gets more than it has `room` for.
    """
    totals = dict.fromkeys(containers, 0.0)
    for number, owner in enumerate(owners):
        if owner in totals:
            totals[owner] += loads.get(SliceId(number), 0.0)
    mean = sum(totals.values()) / max(1, len(totals))
    plan, now = Plan(), list(owners)
    while len(totals) > 1 and mean > 0:
        hottest = max(totals, key=lambda c: totals[c])
        if totals[hottest] - mean <= tolerance * mean:
            break
        own = [SliceId(n) for n, owner in enumerate(now) if owner == hottest]
        own.sort(key=lambda n: -loads.get(n, 0.0))
        free = [n for n in own if n not in plan.moves and n not in stay] if len(own) > 1 else []
        chosen = _next_move(loads, totals, hottest, free, room or Room(), plan)
        if chosen is None:
            break
        number, target = chosen
        if room is not None:
            room.take(target, [number])
        plan.moves[number] = now[number] = target
        totals[hottest] -= loads[number]
        totals[target] += loads[number]
    plan.no_room = {number: target for number, target in plan.no_room.items() if number not in plan.moves}
    return plan


def _next_move(
    loads: Mapping[SliceId, float],
    totals: Mapping[int, float],
    hottest: int,
    free: Sequence[SliceId],
    room: Room,
    plan: Plan,
) -> tuple[SliceId, int] | None:
    """The largest slice that makes two containers more even, to the coolest that has room for one."""
    for target in sorted(totals, key=lambda c: totals[c]):
        gap = totals[hottest] - totals[target]
        for number in free:
            if 0 < loads.get(number, 0.0) < gap:
                if room.fits(target, [number]):
                    return number, target
                plan.no_room.setdefault(number, target)
    return None
