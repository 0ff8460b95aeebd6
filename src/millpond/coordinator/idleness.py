"""Which updaters have been silent, and for how long: a machine that is told what came when. No clock of its own.

None of it is in the journal. What follows from it is: an updater that is left out is so marked, and U never falls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from millpond.coordinator.records import PondRecord, ResidentRecord

STAGING_FACTOR = 10
STAGING_S_MIN = 60.0
"""An epoch that has begun counts as rows for so long: for ten times `idle`, and for a minute at least."""


class _Updater(NamedTuple):
    resident: str
    born: int
    name: str


class _Staging(NamedTuple):
    updater: _Updater
    query: str


class Idleness:
    """Times are seconds of a clock that never goes back. An updater is known from when it is first heard of or looked at."""

    def __init__(self) -> None:
        self._last: dict[_Updater, float] = {}
        self._begun: dict[_Staging, float] = {}

    def heard(self, resident: ResidentRecord, name: str, now: float) -> None:
        """Its rows are committed, or it was registered."""
        self._last[_Updater(resident.spec.name, resident.born, name)] = now

    def begun(self, resident: ResidentRecord, name: str, query: str, now: float) -> None:
        """An epoch of it is being staged: whether it has rows is not known yet."""
        self._begun[_Staging(_Updater(resident.spec.name, resident.born, name), query)] = now

    def ended(self, resident: ResidentRecord, name: str, query: str) -> None:
        """The epoch is committed."""
        self._begun.pop(_Staging(_Updater(resident.spec.name, resident.born, name), query), None)

    def silent_s(self, resident: ResidentRecord, now: float) -> dict[str, float]:
        """For how long no rows came of each updater."""
        return {updater.name: now - self._last.setdefault(updater, now) for updater in _updaters(resident)}

    def silent(self, resident: ResidentRecord, now: float) -> list[str]:
        """Updaters that count, and have been silent for longer than they may be."""
        silent = []
        for name, seconds in self.silent_s(resident, now).items():
            record = resident.updaters[name]
            if record.idle_s is None or record.idle or seconds < record.idle_s:
                continue
            updater = _Updater(resident.spec.name, resident.born, name)
            if not self._is_staged(updater, now - max(STAGING_FACTOR * record.idle_s, STAGING_S_MIN)):
                silent.append(name)
        return silent

    def _is_staged(self, updater: _Updater, since: float) -> bool:
        """Whether an epoch of it has begun after that; what began before counts no more."""
        begun = {staging: when for staging, when in list(self._begun.items()) if staging.updater == updater}
        for staging in [staging for staging, when in begun.items() if when <= since]:
            self._begun.pop(staging, None)
        return any(when > since for when in begun.values())

    def keep_only(self, pond: PondRecord) -> None:
        """Lets go of updaters that the pond has no more."""
        known = {updater for resident in pond.residents.values() for updater in _updaters(resident)}
        for updater in self._last.keys() - known:
            self._last.pop(updater, None)
        for staging in [staging for staging in list(self._begun) if staging.updater not in known]:
            self._begun.pop(staging, None)


def _updaters(resident: ResidentRecord) -> Iterator[_Updater]:
    for name in resident.updaters:
        yield _Updater(resident.spec.name, resident.born, name)
