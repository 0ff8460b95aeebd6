"""Slices that left a container only because it ended: whether they may go back, decided without I/O or clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from millpond.wire.base import SliceId

PAUSE_S = 5.0
"""For so long all must have been well before slices go back; where that fails, twice as long each time."""
TIMES_MAX = 64


class Homes:
    """Where slices were before their container ended, and who took them over. In memory only.

    Whoever has a slice moved by wish, or moves it elsewhere, has the last word: it has no other home then.
    """

    def __init__(self) -> None:
        self._away: dict[SliceId, tuple[int, int]] = {}
        self._well_since_s: float | None = None
        self._times = 1

    def left(self, home: int, taken: Mapping[SliceId, int]) -> None:
        """These slices were taken over by others. One that is a guest's already keeps the home that it had."""
        self._well_since_s, self._times = None, 1
        for number, owner in taken.items():
            before = self._away.get(number)
            self._away[number] = (before[0] if before is not None and before[1] == home else home, owner)

    def forget(self, slices: Collection[SliceId] | None = None) -> None:
        """They are where they should be; without any, all are."""
        for number in list(self._away) if slices is None else slices:
            self._away.pop(number, None)

    def to_return(
        self, now_s: float, owners: Sequence[int], containers: Collection[int], is_well: bool
    ) -> dict[int, list[SliceId]]:
        """By home, the slices that should go back now: not before all has been well for a while.

        Well is a pond whose containers serve, whose slices have their backups, and in which nothing is on its way.
        """
        self._away = {
            number: (home, owner)
            for number, (home, owner) in self._away.items()
            if owners[number] == owner != home and home in containers
        }
        if not is_well or not self._away:
            self._well_since_s = None
            return {}
        if self._well_since_s is None:
            self._well_since_s = now_s
        if now_s - self._well_since_s < PAUSE_S * self._times:
            return {}
        self._well_since_s = None
        self._times = min(2 * self._times, TIMES_MAX)
        out: dict[int, list[SliceId]] = {}
        for number, (home, _) in sorted(self._away.items()):
            out.setdefault(home, []).append(number)
        return out
