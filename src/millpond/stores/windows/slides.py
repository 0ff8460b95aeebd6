"""Which windows there are over panes, and which of them are over."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

from millpond.stores.windows.shape import WindowShape
from millpond.times import TIME_MAX, Progress

Span = tuple[int, int]


def has_ended(end: int, watermark: Progress) -> bool:
    # Where time itself ends, a window was cut short: it ends with its sources alone.
    return end <= watermark and (end < TIME_MAX or watermark == np.inf)


def between(spans: list[Span], start: int, end: int) -> list[Span]:
    """Of spans in ascending order those that begin from `start` on, and before `end`."""
    return spans[bisect_left(spans, (start,)) : bisect_left(spans, (end,))]


class Slides:
    """Which windows there are over panes. `next_start` is the beginning of the first that has not fired, once one has."""

    def __init__(self, shape: WindowShape) -> None:
        self._size, self._slide = shape.window.size, shape.window.slide
        self._pane, self._offset = shape.pane, shape.window.offset
        self._start_of = shape.pane_start
        self.next_start: int | None = None

    def first_with(self, pane: int) -> int:
        """The beginning of the first window that has a pane."""
        last, pane = self.last_with(pane), self._start_of(pane)
        return last - (self._size - self._pane - (pane - last)) // self._slide * self._slide

    def last_with(self, pane: int) -> int:
        """The beginning of the last window that has a pane."""
        return pane - (pane - self._offset) % self._slide

    def first_behind(self, time: Progress) -> int | None:
        """The beginning of the first window that ends after that time; None if all do."""
        if time == -np.inf:
            return None
        reached = int(min(time, TIME_MAX)) - self._size
        return self.last_with(reached) + self._slide

    def starts(self, panes: list[int], upto: Progress) -> Iterator[int]:
        """The beginnings of windows that have rows, have not fired, and end at that time or before."""
        if not panes:
            return
        start = self.first_with(panes[0])
        if self.next_start is not None:
            start = max(start, self.next_start)
        while start + self._size <= upto:
            at = bisect_left(panes, start)
            if at == len(panes):
                return
            if panes[at] >= start + self._size:
                start = max(self.first_with(panes[at]), start + self._slide)
                continue
            yield start
            start += self._slide

    def due(self, begins: list[int], watermark: Progress, closes: bool) -> Iterator[int]:
        """The beginnings of windows that fire; once it has come to its end, they have fired. `begins` are the panes'."""
        for start in self.starts(begins, np.inf if closes else watermark):
            yield start
            self.next_start = start + self._slide
        beyond = self.first_behind(watermark)
        if beyond is not None and not closes:
            self.next_start = beyond if self.next_start is None else max(self.next_start, beyond)

    def is_done(self, pane: int) -> bool:
        """Whether all windows that have this pane have fired."""
        return self.next_start is not None and pane < self.next_start
