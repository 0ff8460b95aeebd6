"""What a State must answer, in plain Python: a dict of sorted lists, nothing fast, nothing shared.

The oracle shares no code with what it checks. It is slow, keeps every epoch it ever saw, and knows no disk,
process or slice: a pond that was restarted, scaled or compacted must still answer as this does.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from millpond.errors import (
    BadOption,
    BelowFetchProgress,
    EpochChanged,
    EpochOutOfOrder,
    LateRows,
    RowsWaiting,
    TotalOverflow,
    UnknownUpdater,
    UpdaterFinished,
)

Progress: TypeAlias = int | float
"""A time, or -inf, or +inf."""

TIME_MIN = -(2**63)
"""The first time there is. A watermark that would lie before it does not move."""

Version: TypeAlias = tuple[int, Any]
"""A time and the value that holds from it on."""

Row: TypeAlias = tuple[Hashable, int, Any]
"""A key, a time and a value."""


class Receipt(NamedTuple):
    """What one call of `update` changed. A replay changed nothing: no rows, none late."""

    rows_applied: int
    late: int
    replayed: bool


@dataclass
class Updater:
    progress: Progress
    epochs: dict[int, tuple[Progress, list[str]]] = field(default_factory=dict)
    """For each epoch seen: the watermark it met, and the fingerprint of its rows that were not late."""


class Oracle:
    """One State, with `mp.put()` as its update rule.

    `keep="latest"` lets `compact` drop what no read at or above fetch progress can see; `keep="all"` keeps
    everything. A call that raises has changed nothing.
    """

    def __init__(self, keep: Literal["latest", "all"] = "latest") -> None:
        if keep not in ("latest", "all"):
            raise BadOption(f"keep={keep!r}", hint='"latest" or "all"', option="keep")
        self.keep = keep
        self.versions: dict[Hashable, list[Version]] = {}
        self.updaters: dict[str, Updater] = {}
        self.fetchers: dict[str, Progress] = {}

    # Progress

    @property
    def update_progress(self) -> Progress:
        """U: every version with time < U is final. It never falls."""
        return min((updater.progress for updater in self.updaters.values()), default=-math.inf)

    @property
    def fetch_progress(self) -> Progress:
        """F: no fetch asks for a time < F again. It never falls."""
        return min(self.fetchers.values(), default=-math.inf)

    def register_updater(self, name: str) -> None:
        """A newcomer starts at U, for what is final stays final; again by the same name is no change.

        Where U is +inf there is nothing left to update, and no newcomer.
        """
        if name not in self.updaters:
            if self.update_progress == math.inf:
                raise UpdaterFinished("every updater has finished", name=name)
            self.updaters[name] = Updater(self.update_progress)

    def register_fetcher(self, name: str) -> None:
        """A newcomer starts at F, for what was compacted stays so; again by the same name is no change."""
        self.fetchers.setdefault(name, self.fetch_progress)

    def report(self, name: str, update: Progress | None = None, fetch: Progress | None = None) -> None:
        """Explicit progress of the updater or the fetcher of that name. A lower value is ignored."""
        if update is not None:
            updater = self._updater(name)
        if fetch is not None and name not in self.fetchers:
            raise UnknownUpdater(f"no fetcher {name!r}", name=name)
        if update is not None:
            updater.progress = max(updater.progress, update)
        if fetch is not None:
            self.fetchers[name] = max(self.fetchers[name], fetch)

    def finish(self, name: str) -> None:
        """The updater will send no more. Whoever has progress +inf is finished, however it came to that."""
        self._updater(name).progress = math.inf

    # Updates

    def update(
        self,
        name: str,
        epoch: int,
        rows: Iterable[Row],
        delay: int = 0,
        late: Literal["drop", "error"] = "drop",
    ) -> Receipt:
        """One epoch of one updater; rows in the order in which they take effect."""
        rows = list(rows)
        updater = self._updater(name)
        if epoch in updater.epochs:
            watermark, seen = updater.epochs[epoch]
            if _fingerprint(row for row in rows if row[1] >= watermark) != seen:
                raise EpochChanged(f"epoch {epoch} of {name!r} came again with other rows", epoch=epoch)
            return Receipt(0, 0, replayed=True)
        expected = max(updater.epochs) + 1 if updater.epochs else 0
        if epoch != expected:
            raise EpochOutOfOrder(f"epoch {epoch}, not {expected}", epoch=epoch, expected=expected)
        if updater.progress == math.inf and rows:
            raise UpdaterFinished(f"{name!r} has finished", name=name)

        watermark = updater.progress
        timely = [row for row in rows if row[1] >= watermark]
        late_rows = len(rows) - len(timely)
        if late_rows and late == "error":
            raise LateRows(f"{late_rows} rows below {watermark}", rows=late_rows, watermark=watermark)

        for key, time, value in timely:
            self._put(key, time, value)
        updater.epochs[epoch] = (watermark, _fingerprint(timely))
        newest = max((time for _, time, _ in timely), default=None)
        if newest is not None and newest - delay >= TIME_MIN:
            updater.progress = max(watermark, newest - delay)
        return Receipt(len(timely), late_rows, replayed=False)

    def _put(self, key: Hashable, time: int, value: Any) -> None:
        versions = self.versions.setdefault(key, [])
        place = bisect_left(versions, time, key=_time)
        if place < len(versions) and versions[place][0] == time:
            versions[place] = (time, value)
        else:
            insort(versions, (time, value), key=_time)

    # Reads

    def fetch_latest(self, key: Hashable, at: int) -> Any:
        """The value of the newest version with time <= at; None if there is none."""
        self._check_asked(at, at)
        upto = [value for time, value in self.raw(key) if time <= at]
        return upto[-1] if upto else None

    def fetch_range(self, key: Hashable, lo: Progress, hi: int, rule: str) -> Any:
        """The rule over the versions with lo < time <= hi. Nulls count for `count`, `values` and `latest`."""
        if rule not in RULES:
            raise BadOption(f"rule {rule!r}", hint=f"one of {', '.join(RULES)}", option="rule")
        self._check_asked(lo + 1, hi)
        return RULES[rule]([value for time, value in self.raw(key) if lo < time <= hi])

    def snapshot(self, at: int | None = None) -> dict[Hashable, Version]:
        """Each key's newest version with time <= at; without `at`, its newest final one (time < U)."""
        if at is not None:
            self._check_asked(at, at)
            end: Progress = at + 1
        else:
            end = self.update_progress
            # F = U is well: compaction keeps the newest version below F.
            if -math.inf < end < self.fetch_progress:
                raise self._below(end - 1)
        newest = {}
        for key, versions in self.versions.items():
            for version in versions:
                if version[0] < end:
                    newest[key] = version
        return newest

    def raw(self, key: Hashable) -> list[Version]:
        """All versions held of the key, oldest first."""
        return list(self.versions.get(key, []))

    def _check_asked(self, lowest: Progress, highest: Progress) -> None:
        # A time below F will never be answered, so that is the news even where the row would also wait.
        if lowest < self.fetch_progress:
            raise self._below(lowest)
        if not highest < self.update_progress:
            raise RowsWaiting(
                f"{highest} is not below {self.update_progress}", rows=1, update_progress=self.update_progress
            )

    def _below(self, time: Progress) -> BelowFetchProgress:
        return BelowFetchProgress(
            f"{time} is below {self.fetch_progress}", time=time, fetch_progress=self.fetch_progress
        )

    # Compaction

    def compact(self) -> None:
        """Of each key, drops all versions below F but the newest. No permitted read can tell."""
        if self.keep == "all":
            return
        for key, versions in self.versions.items():
            below = [version for version in versions if version[0] < self.fetch_progress]
            self.versions[key] = below[-1:] + versions[len(below) :]

    # For tests

    def copy(self) -> Oracle:
        """An oracle of its own, equal to this one now."""
        return copy.deepcopy(self)

    def validate(self) -> None:
        """Raises AssertionError where the oracle itself is broken."""
        for key, versions in self.versions.items():
            times = [time for time, _ in versions]
            assert versions, f"{key!r} holds nothing"
            assert times == sorted(set(times)), f"{key!r} holds {times}"
        for name, updater in self.updaters.items():
            epochs = list(updater.epochs)
            assert not epochs or epochs == list(range(epochs[0], epochs[-1] + 1)), f"{name!r} saw {epochs}"

    def _updater(self, name: str) -> Updater:
        if name not in self.updaters:
            raise UnknownUpdater(f"no updater {name!r}", name=name)
        return self.updaters[name]


def _time(version: Version) -> int:
    return version[0]


def _fingerprint(rows: Iterable[Row]) -> list[str]:
    """Equal for the same rows in any order, and only for those: 1, 1.0 and True differ, NaN equals NaN."""
    return sorted(repr(row) for row in rows)


# Rules over the values of a range, oldest first


def _latest(values: list[Any]) -> Any:
    return values[-1] if values else None


def _total(values: list[Any]) -> Any:
    """Exact for integers: only a total that does not fit a long overflows, not the way to it."""
    total: Any = None
    for value in _without_nulls(values):
        total = value if total is None else total + value
    if isinstance(total, int) and not -(2**63) <= total < 2**63:
        raise TotalOverflow(f"the total {total} does not fit a long", rows=1)
    return total


def _smallest(values: list[Any]) -> Any:
    return min(_without_nulls(values), key=_nan_last, default=None)


def _largest(values: list[Any]) -> Any:
    return max(_without_nulls(values), key=_nan_last, default=None)


def _without_nulls(values: list[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def _nan_last(value: Any) -> tuple[bool, Any]:
    """NaN is above every number, as in Spark."""
    is_nan = isinstance(value, float) and math.isnan(value)
    return is_nan, 0 if is_nan else value


RULES: dict[str, Callable[[list[Any]], Any]] = {
    "latest": _latest,
    "values": list,
    "count": len,
    "total": _total,
    "smallest": _smallest,
    "largest": _largest,
}
