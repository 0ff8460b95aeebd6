"""What a State with rules must answer: every update is kept for ever, and every answer is worked out from all of them.

Nothing is compacted here, nothing is kept sorted, no sum is carried along. Whatever a pond compacts, folds ahead of time
or reads from its files, an answer that it gives must be the one given here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeAlias

Columns: TypeAlias = tuple[Any, ...]
"""One value: its columns."""

Rule: TypeAlias = Callable[[Any, Any], Any]


class Given(NamedTuple):
    """One update as it came: `epoch` counts epochs of all updaters, `place` orders the rows of one."""

    time: int
    epoch: int
    place: int
    value: Columns


class Entry(NamedTuple):
    """A value that holds from `time` on."""

    time: int
    value: Columns


@dataclass
class RuleOracle:
    """One State with one updater. `update` is a rule's name or an `(old, new)` function; `span` the life of a value.

    `names` are the value's columns: a function gets rows with these fields where there is more than one.
    """

    update: Literal["put", "add", "edges"] | Rule = "put"
    names: tuple[str, ...] = ("value",)
    span: int | None = None
    delay: int = 0
    given: dict[Hashable, list[Given]] = field(default_factory=dict)
    update_progress: int | float = -math.inf
    fetch_progress: int | float = -math.inf
    epochs: int = 0
    late: int = 0
    _ordered: dict[tuple[Hashable, int], list[Entry]] = field(default_factory=dict)

    # What happens

    def epoch(self, rows: Sequence[tuple[Hashable, int, Columns]], seq: Sequence[int] | None = None) -> None:
        """The rows of an epoch; `seq` orders those of one key and time, without it the order of the rows."""
        places = range(len(rows)) if seq is None else seq
        timely = []
        for (key, time, value), place in zip(rows, places, strict=True):
            if time < self.update_progress:
                self.late += 1
            else:
                timely.append(time)
                self.given.setdefault(key, []).append(Given(time, self.epochs, place, value))
        self.epochs += 1
        if timely:
            self.update_progress = max(self.update_progress, max(timely) - self.delay)

    def finish(self) -> None:
        self.update_progress = math.inf

    def report(self, fetch: int) -> None:
        """No read below `fetch` from now on."""
        self.fetch_progress = max(self.fetch_progress, fetch)

    # What a State holds

    def updates(self, key: Hashable) -> list[Entry]:
        """The updates of a key, in the order in which they take effect."""
        seen = (key, self.epochs)
        if seen not in self._ordered:
            self._ordered[seen] = self._in_order(key)
        return self._ordered[seen]

    def _in_order(self, key: Hashable) -> list[Entry]:
        ordered = sorted(self.given.get(key, []), key=lambda given: given[:3])
        if self.update != "put":
            return [Entry(given.time, given.value) for given in ordered]
        last = {given.time: given.value for given in ordered}
        return [Entry(time, value) for time, value in last.items()]

    def alive(self, key: Hashable, low: int | None, high: int) -> list[Entry]:
        """The updates with low < time <= high that a read at `high` still sees."""
        return [
            entry
            for entry in self.updates(key)
            if entry.time <= high
            and (low is None or low < entry.time)
            and (self.span is None or high - entry.time < self.span)
        ]

    def folded(self, key: Hashable, high: int) -> Columns | None:
        """The value that all updates up to `high` make together; what is over when its time has come is left out."""
        value: Columns | None = None
        before = 0
        for entry in self.updates(key):
            if entry.time > high:
                break
            over = self.span is not None and entry.time - before >= self.span
            value = entry.value if value is None or over else self._fold(value, entry.value)
            before = entry.time
        return value

    def _fold(self, old: Columns, new: Columns) -> Columns:
        if self.update == "add":
            return tuple(_sum(one, other) for one, other in zip(old, new, strict=True))
        if not callable(self.update):
            return new
        try:
            if len(self.names) == 1:
                return (self.update(old[0], new[0]),)
            return tuple(self.update(self._row(old), self._row(new)))
        except (ArithmeticError, ValueError, LookupError):
            return old

    def _row(self, value: Columns) -> SimpleNamespace:
        return SimpleNamespace(**dict(zip(self.names, value, strict=True)))

    # What a State answers

    def allowed(self, low: int | None, high: int, newest: bool) -> bool:
        """Whether a read must be answered: U has passed it, and it is not below F.

        `newest`: the answer is made of what holds at `high`, which compaction must leave as it is.
        """
        if not high < self.update_progress:
            return False
        if newest and low is None:
            return high >= self.fetch_progress
        return (-math.inf if low is None else low + 1) >= self.fetch_progress

    def latest(self, key: Hashable, low: int | None, high: int) -> Columns | None:
        """What holds at `high`, if there was an update in the range."""
        return self.folded(key, high) if self.alive(key, low, high) else None

    def as_of(self, key: Hashable, low: int | None, high: int) -> Columns | None:
        """What holds at `high`, wherever the range begins."""
        return self.latest(key, None, high)

    def column(self, key: Hashable, low: int | None, high: int, number: int = 0) -> list[Any]:
        """One column of the updates of the range, in order."""
        return [entry.value[number] for entry in self.alive(key, low, high)]

    def times(self, key: Hashable, low: int | None, high: int) -> list[int]:
        return [entry.time for entry in self.alive(key, low, high)]

    def snapshot(self, key: Hashable, high: int) -> list[Entry]:
        """The key's rows of a snapshot: what holds at `high`, or under `edges` a row for each neighbour."""
        alive = self.alive(key, None, high)
        if self.update == "edges":
            last = {entry.value[0]: entry for entry in alive}
            return sorted(
                (entry for entry in last.values() if entry.value[-1]), key=lambda e: (e.time, e.value[0])
            )
        value = self.folded(key, high)
        return [Entry(alive[-1].time, value)] if alive and value is not None else []

    def neighbours(self, key: Hashable, low: int | None, high: int) -> list[Columns]:
        """Neighbours, with the columns of their edges, that the last word of the range adds; oldest word first."""
        last: dict[Any, Columns] = {}
        for entry in self.alive(key, low, high):
            last.pop(entry.value[0], None)
            last[entry.value[0]] = entry.value
        return [value[:-1] for value in last.values() if value[-1]]


def _sum(one: Any, other: Any) -> Any:
    """Of numbers, or of vectors item by item; where one vector has ended it counts as 0."""
    if isinstance(one, list):
        items = range(max(len(one), len(other)))
        return [
            one[n] if n >= len(other) else other[n] if n >= len(one) else _sum(one[n], other[n])
            for n in items
        ]
    if isinstance(one, int):
        return (one + other + 2**63) % 2**64 - 2**63
    return one + other
