"""Messages that ask, whatever the kind: outputs of epochs, progress, and the turns of fetchers."""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec

from millpond.times import Progress
from millpond.wire.base import (
    Call,
    Count,
    Done,
    KindOfTime,
    Landmark,
    ListToken,
    Message,
    Name,
    Query,
    Read,
    Turn,
    Writer,
    check_progress,
)
from millpond.wire.epochs import History

# Anyone to container


class ReadOutputs(Read, frozen=True, tag=True):
    """What an epoch gave in a slice: rows `start` to `stop` of its outputs there, as far as there are."""

    writer: Writer
    turn: Turn
    slice: Count
    start: Count
    stop: Count


# Anyone to coordinator


class Passed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """U came to `update` so many seconds ago."""

    update: Progress
    ago_s: float


class Pinned(Message, frozen=True, tag=True):
    """Rows below `late_below` are too late to be asked. `previous` is the turn whose waiting rows join, `token` names
    the list of those that count.

    `oldest` is the oldest turn whose waiting rows may be asked for again. `passed` tells how U came to where it is since
    those rows were kept, lowest first, as far as that is remembered. Who finds the `landmark` under the root may keep and
    read waiting rows there by itself.
    """

    update: Progress
    late_below: Progress
    time_kind: KindOfTime
    previous: Turn | None
    token: ListToken
    oldest: Turn
    passed: list[Passed] = msgspec.field(default_factory=list)
    seen: Count = 0
    """How many of the State's epochs were visible when U was where it is, or are now."""
    born: Count = 0
    landmark: Landmark = ""


class Pin(Call[Pinned], frozen=True, tag=True):
    """Fix what a fetcher's turn sees, before anything of it runs. Asked again, the answer is the same."""

    resident: Name
    fetcher: Name
    query: Query
    turn: Turn
    history: History


class Waits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long the `rows` that a turn answered took: those that `waited` first for U, then for a turn to begin.

    A histogram has a count for each bound, of the rows that waited longer than the bound before it and no longer than
    this one. `batch_ms` is how long the turn itself took.
    """

    BOUNDS_MS: ClassVar[tuple[float, ...]] = (*(float(round(2 ** (n / 4), 1)) for n in range(104)), math.inf)

    rows: Count = 0
    waited: Count = 0
    update_ms: float = 0.0
    turn_ms: float = 0.0
    update_histogram: list[int] = []
    turn_histogram: list[int] = []
    batch_ms: float = 0.0


class Answered(Call[Done], frozen=True, tag=True):
    """A fetcher's turn is answered, but for the rows that wait. Moves the fetcher's progress.

    `lowest` is the lowest time that a waiting row asks for, `token` names the list of these rows, `digest` is of what they
    ask. `watermark` is the time below which the fetcher will ask for no more new rows; None while it cannot tell.
    """

    resident: Name
    fetcher: Name
    query: Query
    turn: Turn
    waiting: Count
    late: Count
    lowest: Progress | None
    watermark: Progress | None
    token: ListToken = ""
    digest: Count = 0
    waits: Waits | None = None

    def __post_init__(self) -> None:
        check_progress(self.lowest)
        check_progress(self.watermark)


class Drain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A turn in which waiting rows can be answered: the one that `left` them, and the `token` of their list.

    One that was `begun` and interrupted goes on before anything else. It `pays` if some of the rows may be ready.
    """

    turn: Turn
    left: Turn
    token: ListToken
    begun: bool = False
    pays: bool = True


class HoldsBack(msgspec.Struct, frozen=True, forbid_unknown_fields=True, eq=False):
    """An updater that U waits for. `silent_s` is how long no rows have come of it, as far back as the pond has been open.

    One that has not `has_run` has committed no epoch so far. If all are `idle`, U stands where the furthest of them is.
    """

    updater: Name
    has_run: bool
    silent_s: float
    idle: bool = False

    # Who it is, and not when it was asked: two looks at the same progress are equal.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, HoldsBack) and (self.updater, self.has_run, self.idle) == (
            other.updater,
            other.has_run,
            other.idle,
        )

    def __hash__(self) -> int:
        return hash((self.updater, self.has_run, self.idle))

    def __str__(self) -> str:
        since = f"for {self.silent_s:,.0f} s"
        what = f"no rows {since}" if self.has_run else f"it never ran: registered, and no epoch {since}"
        return f"updater {self.updater!r} ({what}{', idle' if self.idle else ''})"


def held_back_by(holders: list[HoldsBack]) -> str:
    """Who holds U back, in words."""
    if not holders:
        return "no updater of it is registered"
    names = " and ".join(str(holder) for holder in holders[:3])
    more = f" and {len(holders) - 3} more" if len(holders) > 3 else ""
    return f"it is held back by {names}{more}"


class Pending(Message, frozen=True, tag=True):
    """Rows of a fetcher that wait for U, since the time `since`, as of its last turn.

    `drains` are the queries that have such rows, if U has moved since they were last asked, and the turn in which they can
    be answered next. `unfinished` queries were stopped in their last epoch. `held_by` are the updaters that U waits for.
    `turns` are the last of each query.
    """

    rows: Count
    since: Progress | None
    late: Count
    drains: dict[Query, Drain] = msgspec.field(default_factory=dict)
    unfinished: list[Query] = msgspec.field(default_factory=list)
    turns: dict[Query, Turn] = msgspec.field(default_factory=dict)
    held_by: list[HoldsBack] = msgspec.field(default_factory=list)


class AskPending(Call[Pending], frozen=True, tag=True):
    reads: ClassVar[bool] = True

    resident: Name
    fetcher: Name


class Report(Call[Done], frozen=True, tag=True):
    """Explicit progress of an updater or a fetcher. A value below the present one changes nothing.

    `time_kind` is what the values are times of; empty for infinite ones. An updater that `rests` is left out of U until rows
    of it come.
    """

    resident: Name
    name: Name
    update: Progress | None
    fetch: Progress | None
    time_kind: KindOfTime = ""
    rests: bool = False

    def __post_init__(self) -> None:
        check_progress(self.update)
        check_progress(self.fetch)


class ResidentProgress(Message, frozen=True, tag=True):
    """U, F and the progress of all that have a part in them. `held_by` are the updaters that U waits for."""

    update: Progress
    fetch: Progress
    updaters: dict[str, Progress]
    fetchers: dict[str, Progress]
    late: dict[str, int]
    time_kind: KindOfTime
    held_by: list[HoldsBack] = msgspec.field(default_factory=list)
    seen: Count = 0
    """How many of its epochs are visible."""
    pending: bool = False
    """Whether one more is decided: it may be visible in some slices, and in others not yet."""
    born: Count = 0


class AskProgress(Call[ResidentProgress], frozen=True, tag=True):
    reads: ClassVar[bool] = True

    resident: Name
    waits: bool = True
    """For an epoch that is decided, and not yet visible: U is to be with it. Not for who asks for something else."""
