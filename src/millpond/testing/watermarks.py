"""Watermarks of several sources, in plain Python: how far each is, and how far all are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from millpond.errors import UnknownUpdater, UpdaterFinished
from millpond.testing.window_kinds import TIME_MIN, Progress


@dataclass
class Source:
    delay: int
    watermark: Progress = -math.inf
    is_idle: bool = False
    is_finished: bool = False

    @property
    def mark(self) -> Progress:
        return math.inf if self.is_finished else self.watermark


class Watermarks:
    """The watermark is the lowest of the sources that are active, and never falls.

    Where none of those that have not finished is active, it is where the furthest of all was; where all have finished,
    +inf.
    """

    def __init__(self, delays: Mapping[str, int]) -> None:
        self.sources = {name: Source(delay) for name, delay in delays.items()}
        self.watermark: Progress = -math.inf

    def before(self, name: str, has_rows: bool) -> Progress:
        """What rows of the source that come now are late against. By rows, a source that was idle comes back."""
        source = self._source(name)
        if has_rows and source.is_finished:
            raise UpdaterFinished(f"{name!r} has finished", name=name)
        if has_rows and source.is_idle:
            source.is_idle = False
            source.watermark = max(source.watermark, self.watermark)
        return source.mark

    def after(self, name: str, newest: int | None) -> None:
        """An epoch of the source is over. The newest time of its rows, late ones with them."""
        source = self._source(name)
        if newest is not None and newest - source.delay >= TIME_MIN:
            source.watermark = max(source.watermark, newest - source.delay)
        self._move()

    def idle(self, name: str) -> None:
        self._source(name).is_idle = True
        self._move()

    def finish(self, name: str) -> None:
        self._source(name).is_finished = True
        self._move()

    def advance(self, watermark: Progress) -> None:
        """All sources are at least there, whatever their rows say."""
        for source in self.sources.values():
            source.watermark = max(source.watermark, watermark)
        self._move()

    def join(self, name: str, delay: int) -> None:
        """A newcomer starts where the watermark stands."""
        self.sources.setdefault(name, Source(delay, self.watermark))

    def _move(self) -> None:
        unfinished = [source for source in self.sources.values() if not source.is_finished]
        active = [source.watermark for source in unfinished if not source.is_idle]
        if active:
            watermark = min(active)
        elif unfinished:
            watermark = max(source.watermark for source in self.sources.values())
        else:
            watermark = math.inf
        self.watermark = max(self.watermark, watermark)

    def _source(self, name: str) -> Source:
        if name not in self.sources:
            raise UnknownUpdater(f"no source {name!r}", name=name)
        return self.sources[name]
