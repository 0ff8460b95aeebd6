"""Which windows there are, in plain Python: where a row belongs, and which windows the rows of a key make together.

A window is half-open, [start, end). Times are int64: an edge that would lie beyond them lies at the first or the last of
them, for firing as for results.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from millpond.errors import BadOption

Progress: TypeAlias = int | float
"""A time, or -inf, or +inf."""

Span: TypeAlias = tuple[Progress, Progress]
"""What a row belongs to, or reaches over: from, and up to but not with. Of all time, the infinities."""

TIME_MIN, TIME_MAX = -(2**63), 2**63 - 1


class Arrival(NamedTuple):
    """A row as it came. Numbers go up: epoch by epoch, within one by time and then by place."""

    number: int
    key: Hashable
    time: int
    values: Mapping[str, Any]
    source: str


class Entry(NamedTuple):
    """A row in one of the places where it belongs. A row of a sliding window has several."""

    arrival: Arrival
    span: Span


class Window(NamedTuple):
    """A window of one key, with its rows."""

    start: int | None
    end: int | None
    closes_at: Progress
    """It is due once the watermark is there. -inf: at once."""
    entries: tuple[Entry, ...]

    @property
    def content(self) -> frozenset[tuple[int, Span]]:
        """Which rows are in it. Two windows with the same content are the same."""
        return frozenset((entry.arrival.number, entry.span) for entry in self.entries)


class Kind(ABC):
    """How rows become windows. Windows never hang on rows of other keys."""

    has_lateness = True
    """Whether a window that fired may stay, for rows that are late."""
    has_sessions = False
    """Whether windows grow and merge, so that they need an id to be known by."""

    @abstractmethod
    def spans(self, arrival: Arrival) -> list[Span]:
        """Where a row belongs. It is late for a span whose end, and the lateness, the watermark has passed."""

    @abstractmethod
    def windows(self, entries: Iterable[Entry]) -> list[Window]:
        """The windows that these entries of one key make. Each entry is in exactly one."""


class Assigned(Kind):
    """Windows that follow from a row's time alone."""

    def __init__(self, assign: Callable[[int], Iterable[Span]]) -> None:
        self.assign = assign

    def spans(self, arrival: Arrival) -> list[Span]:
        return sorted({_clipped(*span) for span in self.assign(arrival.time)})

    def windows(self, entries: Iterable[Entry]) -> list[Window]:
        by_span: dict[Span, list[Entry]] = {}
        for entry in _in_time(entries):
            by_span.setdefault(entry.span, []).append(entry)
        return [
            Window(_edge(start), _edge(end), end, tuple(rows))
            for (start, end), rows in sorted(by_span.items())
        ]


class Session(Kind):
    """Rows of a key that are near to each other in time; see `session`."""

    has_sessions = True

    def __init__(
        self,
        gap: int | str | Callable[[Mapping[str, Any]], int],
        longest: int | None,
        ends_when: Callable[[Mapping[str, Any]], bool] | None,
        touching: bool,
    ) -> None:
        self.gap = gap
        self.longest = longest
        self.ends_when = ends_when
        self.touching = touching

    def spans(self, arrival: Arrival) -> list[Span]:
        if callable(self.gap):
            gap = self.gap(arrival.values)
        elif isinstance(self.gap, str):
            gap = arrival.values[self.gap]
        else:
            gap = self.gap
        _at_least_one(gap, "gap")
        return [_clipped(arrival.time, arrival.time + gap)]

    def windows(self, entries: Iterable[Entry]) -> list[Window]:
        """Always all anew: rows of a key are taken in time order, and each goes on with the session before, or not."""
        sessions: list[list[Entry]] = []
        reach: Progress = -math.inf
        for entry in _in_time(entries):
            if sessions and self._goes_on(sessions[-1], reach, entry.arrival.time):
                sessions[-1].append(entry)
                reach = max(reach, entry.span[1])
            else:
                sessions.append([entry])
                reach = entry.span[1]
        return [self._window(rows) for rows in sessions]

    def _goes_on(self, session: list[Entry], reach: Progress, time: int) -> bool:
        is_near = time <= reach if self.touching else time < reach
        is_short = self.longest is None or time < session[0].arrival.time + self.longest
        return is_near and is_short and not self._ends(session[-1])

    def _ends(self, entry: Entry) -> bool:
        return self.ends_when is not None and bool(self.ends_when(entry.arrival.values))

    def _window(self, session: list[Entry]) -> Window:
        start = session[0].arrival.time
        if self._ends(session[-1]):
            end: Progress = session[-1].arrival.time + 1
        else:
            end = max(end for _, (_, end) in session)
            if self.longest is not None:
                end = min(end, start + self.longest)
        _, end = _clipped(start, end)
        return Window(start, _edge(end), end, tuple(session))


class Counted(Kind):
    """So many rows of a key, in the order in which they came; see `counted`."""

    has_lateness = False

    def __init__(self, n: int, or_after: int | None) -> None:
        self.n = n
        self.or_after = or_after

    def spans(self, arrival: Arrival) -> list[Span]:
        return [(arrival.time, math.inf)]

    def windows(self, entries: Iterable[Entry]) -> list[Window]:
        rows = sorted(entries, key=lambda entry: entry.arrival.number)
        return [self._window(rows[first : first + self.n]) for first in range(0, len(rows), self.n)]

    def _window(self, rows: list[Entry]) -> Window:
        times = [entry.arrival.time for entry in rows]
        closes_at: Progress = math.inf
        if len(rows) == self.n:
            closes_at = -math.inf
        elif self.or_after is not None:
            closes_at = min(times[0] + self.or_after, TIME_MAX)
        start, end = _clipped(min(times), max(times) + 1)
        return Window(_edge(start), _edge(end), closes_at, tuple(_in_time(rows)))


def tumbling(size: int, offset: int = 0) -> Kind:
    """[k * size + offset, (k + 1) * size + offset) for every whole k."""
    _at_least_one(size, "size")

    def assign(time: int) -> list[Span]:
        start = (time - offset) // size * size + offset
        return [(start, start + size)]

    return Assigned(assign)


def sliding(size: int, slide: int) -> Kind:
    """[k * slide, k * slide + size) for every whole k. With a slide longer than the size, some rows are in none."""
    _at_least_one(size, "size")
    _at_least_one(slide, "slide")

    def assign(time: int) -> list[Span]:
        newest = time // slide * slide
        return [(start, start + size) for start in range(newest, time - size, -slide)]

    return Assigned(assign)


def session(
    gap: int | str | Callable[[Mapping[str, Any]], int],
    *,
    longest: int | None = None,
    ends_when: Callable[[Mapping[str, Any]], bool] | None = None,
    touching: bool = False,
) -> Kind:
    """A row reaches over [time, time + gap); rows of a key that reach over a common time are of one session.

    The gap is a number, a column of the row, or a function of its columns. A row exactly where the reach of those before
    ends begins a session of its own, unless `touching`. The window is from the first row's time to the end of the reach.

    In time order (at one time, by arrival): a row at or after the first one's time + `longest` begins a session, and the
    window ends there at the latest. A row of which `ends_when` is true is the last of its session, which ends right after
    it, at its time + 1.
    """
    if isinstance(gap, int):
        _at_least_one(gap, "gap")
    if longest is not None:
        _at_least_one(longest, "longest")
    return Session(gap, longest, ends_when, touching)


def counted(n: int, *, or_after: int | None = None) -> Kind:
    """Every n rows of a key, from their lowest time to their highest + 1; rows are never late, nor is a window.

    They are taken as they come, those of one epoch by time and then by place. With `or_after`, what is there is also a
    window once the watermark is at the time of the row that came first, + `or_after`.
    """
    _at_least_one(n, "n")
    return Counted(n, or_after)


def everything() -> Kind:
    """One window of all time, without start and end. It fires when all is finished, and nothing is late."""
    return Assigned(lambda _time: [(-math.inf, math.inf)])


def custom(assign: Callable[[int], Iterable[tuple[int, int]]]) -> Kind:
    """Windows by a function of a row's time. A row that it has none for is in none, and not late."""
    return Assigned(assign)


def _in_time(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: (entry.arrival.time, entry.arrival.number))


def _clipped(start: Progress, end: Progress) -> Span:
    """Within int64. Infinities stay."""
    return (
        start if math.isinf(start) else max(start, TIME_MIN),
        end if math.isinf(end) else min(end, TIME_MAX),
    )


def _edge(time: Progress) -> int | None:
    return None if math.isinf(time) else int(time)


def _at_least_one(amount: int, option: str) -> None:
    if amount < 1:
        raise BadOption(f"{option}={amount!r}", hint="make it 1 or more", option=option)
