"""A join of two streams on the wire: its spec. Its epochs bring, and it is asked, what a window's do and is."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from millpond.code.windows import WindowCode
from millpond.errors import BadMessage
from millpond.times import TIME_MAX
from millpond.wire.base import KindOfTime
from millpond.wire.resident import ResidentSpec

Side = Literal["left", "right"]
SIDES: tuple[Side, Side] = ("left", "right")


class Between(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Left time + `low` <= right time <= left time + `high`, in units of times of the kind `span_kind`; empty for any."""

    low: int
    high: int
    span_kind: KindOfTime = ""

    def __post_init__(self) -> None:
        if not -TIME_MAX <= self.low <= self.high <= TIME_MAX or self.span >= TIME_MAX:
            raise BadMessage(f"no time lies between {self.low} and {self.high}")

    @property
    def span(self) -> int:
        return self.high - self.low


class JoinSpec(ResidentSpec, frozen=True, tag="join", forbid_unknown_fields=True):
    """What a join is: its types as canonical DDL, empty for no columns, and which rows of a key are a pair.

    They are if they fall into the same `window`, or if their times are so far apart as `between` says: one of the two.
    """

    kind: ClassVar[str] = "join"
    plural: ClassVar[str] = "joins"

    key: str
    left: str
    right: str
    window: WindowCode | None = None
    between: Between | None = None

    @property
    def runs_code(self) -> bool:
        return False

    @property
    def span_kind(self) -> str:
        if self.window is not None:
            return self.window.span_kind
        return "" if self.between is None else self.between.span_kind

    @property
    def fires(self) -> bool:
        """Whether pairs come out when time has come so far; else they do in the epoch that brings the second row."""
        return self.window is not None
