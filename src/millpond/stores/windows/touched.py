"""Which aligned windows fire where they stay after their end, or are updated: those of keys that changed since the last time.

A window that is over is sent after each epoch that changed it. Before, it waits: for its end, or for an epoch that emits. So
it is enough to know the keys that the present epoch touched, and those touched since the last epoch that emitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from millpond.schema import KEY
from millpond.stores import views
from millpond.stores.key_index import KeyIndex
from millpond.stores.keys import Keys
from millpond.stores.windows.celltable import new_index
from millpond.stores.windows.shape import END, START, WindowShape
from millpond.stores.windows.slides import Slides, Span, between, has_ended
from millpond.times import TIME_MAX, TIME_MIN, Progress


class Due(NamedTuple):
    """A window that fires, for these keys; None for all."""

    start: int
    end: int
    keys: Keys | None

    @property
    def edges(self) -> Span:
        """Within the bounds of time."""
        return max(self.start, TIME_MIN), min(self.end, TIME_MAX)


class TouchedKeys:
    """Keys by the window that they were touched in, or by pane where windows are made of those."""

    def __init__(self, shape: WindowShape) -> None:
        self._shape = shape
        self._slides = Slides(shape) if shape.window.kind == "sliding" else None
        self._recent: dict[Span, KeyIndex] = {}
        self._waiting: dict[Span, KeyIndex] = {}
        self.fired: Progress = -math.inf
        self._is_fork = False

    def note(self, span: Span, keys: Keys) -> None:
        """Rows of the present epoch came."""
        self._put(self._recent, span, keys)

    def _put(self, where: dict[Span, KeyIndex], span: Span, keys: Keys) -> None:
        if span not in where:
            where[span] = new_index(self._shape.key_kind)
        where[span].assign(keys)

    # What fires

    def due(self, spans: Iterable[Span], watermark: Progress, closes: bool, emits: bool) -> Iterator[Due]:
        """In the order of their ends. `spans` are all windows, or panes, that there are."""
        if self._slides is not None:
            yield from self._due_slides(self._slides, spans, watermark, closes or emits)
            return
        for start, end in sorted(spans, key=lambda span: (span[1], span[0])):
            span = start, end
            if has_ended(end, self.fired):
                if span in self._recent:
                    yield Due(start, end, self._recent[span].stored_keys())
            elif closes or emits or has_ended(end, watermark):
                if not self._shape.updates:
                    yield Due(start, end, None)
                elif span in self._recent or span in self._waiting:
                    yield Due(start, end, self._keys([span], self._recent, self._waiting))

    def _due_slides(
        self, slides: Slides, spans: Iterable[Span], watermark: Progress, is_all: bool
    ) -> Iterator[Due]:
        size = self._shape.window.size
        slides.next_start = slides.first_behind(self.fired - self._shape.lateness)
        recent = sorted(self._recent)
        for start in slides.starts([begin for begin, _ in recent], self.fired):
            yield Due(start, start + size, self._keys(between(recent, start, start + size), self._recent))
        slides.next_start = slides.first_behind(self.fired)
        touched = sorted({*self._recent, *self._waiting} if self._shape.updates else spans)
        for start in slides.starts([begin for begin, _ in touched], np.inf if is_all else watermark):
            if self._shape.updates:
                own = between(touched, start, start + size)
                yield Due(start, start + size, self._keys(own, self._recent, self._waiting))
            else:
                yield Due(start, start + size, None)

    def _keys(self, spans: Iterable[Span], *where: dict[Span, KeyIndex]) -> Keys:
        parts = [each[span] for span in spans for each in where if span in each]
        if len(parts) == 1:
            return parts[0].stored_keys()
        together = new_index(self._shape.key_kind)
        for part in parts:
            together.assign(part.stored_keys())
        return together.stored_keys()

    # What becomes of it

    def settle(self, spans: Iterable[Span], watermark: Progress, closes: bool, emits: bool) -> list[Span]:
        """What is due has been sent. Gives the windows or panes that have gone for good."""
        if closes or emits:
            self._waiting.clear()
        elif self._shape.updates and not self._is_fork:
            for span, index in self._recent.items():
                self._put(self._waiting, span, index.stored_keys())
        self._recent.clear()
        self.fired = max(self.fired, watermark)
        gone = [span for span in spans if closes or self._is_gone(span)]
        for span in gone:
            self._waiting.pop(span, None)
        return gone

    def _is_gone(self, span: Span) -> bool:
        return has_ended(self._last_end(span), self.fired - self._shape.lateness)

    def _last_end(self, span: Span) -> int:
        """When the last window ends that this is one of, or a pane of."""
        if self._slides is None:
            return span[1]
        return self._slides.last_with(span[0]) + self._shape.window.size

    @property
    def withheld(self) -> bool:
        """Whether something waits for the next epoch that emits."""
        return any(not has_ended(self._last_end(span), self.fired) for span in self._waiting)

    def is_over(self, span: Span) -> bool:
        """Whether a window has been sent at its end."""
        return has_ended(span[1], self.fired)

    # As checkpoints see it

    def contents(self) -> pa.Table:
        """What waits for the next epoch that emits."""
        keys = [index.stored_keys() for index in self._waiting.values()]
        columns = [
            pa.array(
                [start for (start, _), own in zip(self._waiting, keys, strict=True) for _ in range(len(own))],
                pa.int64(),
            ),
            pa.array(
                [end for (_, end), own in zip(self._waiting, keys, strict=True) for _ in range(len(own))],
                pa.int64(),
            ),
            Keys.concat(keys).to_arrow() if keys else pa.array([], self._shape.key_type),
        ]
        return pa.table(columns, names=[START, END, KEY])

    def load(self, rows: pa.Table) -> None:
        """What was inserted before is what a snapshot holds: nothing of it is new."""
        self._recent.clear()
        for batch in rows.combine_chunks().to_batches():
            starts, ends, keys = (
                views.longs(batch.column(0)),
                views.longs(batch.column(1)),
                Keys.from_arrow(batch.column(2)),
            )
            for span in set(zip(starts.tolist(), ends.tolist(), strict=True)):
                self._put(
                    self._waiting, span, keys.take(np.flatnonzero((starts == span[0]) & (ends == span[1])))
                )

    def fork(self) -> TouchedKeys:
        """For one epoch: what is due, and what goes. These stay as they are."""
        other = TouchedKeys(self._shape)
        other._waiting = dict(self._waiting)
        other.fired = self.fired
        other._is_fork = True
        return other

    @property
    def nbytes(self) -> int:
        return sum(index.nbytes for index in [*self._recent.values(), *self._waiting.values()])
