"""Messages that ask, whatever the kind: outputs of epochs, progress, and the turns of fetchers."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from millpond.times import Progress
from millpond.wire.base import (
    Call,
    Count,
    Done,
    KindOfTime,
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


class Pinned(Message, frozen=True, tag=True):
    """Rows below `late_below` are too late to be asked. `previous` is the turn whose waiting rows join, `token` names
    the list of those that count.

    `oldest` is the oldest turn whose waiting rows may be asked for again.
    """

    update: Progress
    late_below: Progress
    time_kind: KindOfTime
    previous: Turn | None
    token: ListToken
    oldest: Turn


class Pin(Call[Pinned], frozen=True, tag=True):
    """Fix what a fetcher's turn sees, before anything of it runs. Asked again, the answer is the same."""

    resident: Name
    fetcher: Name
    query: Query
    turn: Turn
    history: History


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

    def __post_init__(self) -> None:
        check_progress(self.lowest)
        check_progress(self.watermark)


class Drain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A turn in which waiting rows can be answered: the one that `left` them, and the `token` of their list."""

    turn: Turn
    left: Turn
    token: ListToken


class Pending(Message, frozen=True, tag=True):
    """Rows of a fetcher that wait for U, since the time `since`, as of its last turn.

    `drains` are the queries that have such rows, if U has moved since they were last asked, and the turn in which they can
    be answered next. `unfinished` queries were stopped in their last epoch.
    """

    rows: Count
    since: Progress | None
    late: Count
    drains: dict[Query, Drain] = msgspec.field(default_factory=dict)
    unfinished: list[Query] = msgspec.field(default_factory=list)


class AskPending(Call[Pending], frozen=True, tag=True):
    reads: ClassVar[bool] = True

    resident: Name
    fetcher: Name


class Report(Call[Done], frozen=True, tag=True):
    """Explicit progress of an updater or a fetcher. A value below the present one changes nothing.

    `time_kind` is what the values are times of; empty for infinite ones.
    """

    resident: Name
    name: Name
    update: Progress | None
    fetch: Progress | None
    time_kind: KindOfTime = ""

    def __post_init__(self) -> None:
        check_progress(self.update)
        check_progress(self.fetch)


class ResidentProgress(Message, frozen=True, tag=True):
    """U, F and who holds them."""

    update: Progress
    fetch: Progress
    updaters: dict[str, Progress]
    fetchers: dict[str, Progress]
    late: dict[str, int]
    time_kind: KindOfTime


class AskProgress(Call[ResidentProgress], frozen=True, tag=True):
    reads: ClassVar[bool] = True

    resident: Name
