"""A window on the wire: its spec, what its epochs bring, and what it is asked."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import msgspec

from millpond.code.windows import Aggregate, WindowCode
from millpond.times import Progress
from millpond.wire.base import Ask, Count, Done, KindOfTime, Read, SliceId, Turn, Writer, check_progress
from millpond.wire.resident import ResidentSpec

Pattern = Literal["rmw", "aar", "aur"]
"""How a store will be read: numbers changed in place, rows by window for all keys at once, rows by key."""
Emit = Literal["close", "update"]


class WindowSpec(ResidentSpec, frozen=True, tag="window", forbid_unknown_fields=True):
    """What a window is: its types as canonical DDL, which rows belong together, and what becomes of them.

    `value` is None until the first rows tell its types. It lives in all slices.
    """

    kind: ClassVar[str] = "window"
    plural: ClassVar[str] = "windows"

    key: str
    value: str | None
    window: WindowCode
    aggregates: dict[str, Aggregate]
    pattern: Pattern | Literal[""] = ""
    emit: Emit = "close"
    lateness: Count = 0
    every: Count = 0
    """Between two updates, in microseconds of the driver's clock."""

    @property
    def runs_code(self) -> bool:
        return any(aggregate.codes for aggregate in self.aggregates.values())

    @property
    def span_kind(self) -> str:
        return self.window.span_kind


class WindowWork(msgspec.Struct, frozen=True, tag="window", forbid_unknown_fields=True):
    """The epoch's rows go into a window, and what ends at `watermark` or before fires. Its times are of that kind.

    With `closes` all that is open ends. An epoch that does not emit lies between two updates: what has changed and does not
    end waits for the next. `after` is up to where windows had fired before, as its container notes in the log: a record can
    then be the first that a slice rests on.
    """

    watermark: Progress = -math.inf
    time_kind: KindOfTime = ""
    closes: bool = False
    emits: bool = True
    after: Progress = -math.inf

    def __post_init__(self) -> None:
        check_progress(self.watermark)
        check_progress(self.after)


class ReadFired(Read, frozen=True, tag=True):
    """What a turn fired in these slices."""

    writer: Writer
    turn: Turn
    slices: list[SliceId]


class ReadOpen(Read, frozen=True, tag=True):
    """What the open windows of these slices hold, as whole epochs left them."""

    slices: list[SliceId]


class FindOpen(Ask[Done], frozen=True, tag=True):
    """Keys follow as one batch grouped by slice, with its per-slice counts. Answers are the open windows of each."""


class AskOpen(Read, frozen=True, tag=True):
    """Of each of these slices: how many windows are open, when the last of them ends, and what has fired."""

    slices: list[SliceId]
