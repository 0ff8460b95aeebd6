"""Which events run in an epoch: of those that come and those that waited, what the watermark has passed."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.errors import OutOfMemory, SchemaMismatch
from millpond.stores.delayed import DelayedEvents, delayed, nullable
from millpond.stores.readiness import before
from millpond.times import time_column
from millpond.wire.base import operator_of
from millpond.wire.groups import TransactionWork

Delayed = dict[str, DelayedEvents]
"""Events that wait, by writer. Replaced as a whole, never changed."""
LATE = "late"
"""The reason of events that came below the watermark."""


class DueEvents(NamedTuple):
    """`events` run, in the order of times, then as they came. `new_waiting` came and wait, with all others of `waiting`.

    `shown` are the rows of the epoch's outputs: those that run, and where `ran` is not true, late ones.
    """

    events: pa.Table
    new_waiting: pa.Table
    waiting: DelayedEvents
    shown: pa.Table
    ran: npt.NDArray[np.bool_] | None = None

    @property
    def late(self) -> int:
        return len(self.shown) - len(self.events)

    def outputs(self, outcomes: pa.Table) -> pa.Table:
        """The rows with what became of them. `outcomes` has a row for each event that ran, as it came."""
        if self.ran is not None:
            place = np.cumsum(self.ran) - 1
            outcomes = outcomes.take(pa.array(place, mask=~self.ran))
            committed = outcomes["committed"].fill_null(False)
            reason = pc.if_else(pa.array(self.ran), outcomes["reason"], LATE)
            outcomes = outcomes.set_column(outcomes.column_names.index("committed"), "committed", committed)
            outcomes = outcomes.set_column(outcomes.column_names.index("reason"), "reason", reason)
        shown = self.shown
        for field, column in zip(outcomes.schema, outcomes.columns, strict=True):
            shown = shown.append_column(field, column)
        return shown


def apart(delayed: Delayed, writer: str, takes_over: bool) -> tuple[Delayed, DelayedEvents]:
    """What waits for other writers; and what waited for this one, and for those that it takes the place of."""
    mine, others = DelayedEvents(), Delayed()
    for other, rows in delayed.items():
        if other == writer or (takes_over and operator_of(other) == operator_of(writer)):
            mine = mine.followed_by(rows)
        else:
            others[other] = rows
    return others, mine


def check_room(group: str, after: Delayed, before: Delayed, limit: int) -> None:
    """Events that wait have a bound. To be asked before the decision: what was decided is never refused."""
    nbytes, known = (sum(rows.nbytes for rows in delayed.values()) for delayed in (after, before))
    if nbytes > max(known, limit):
        raise OutOfMemory(
            f"{sum(map(len, after.values())):,} events of group {group!r} would wait, {nbytes:,} bytes"
            f" of {limit:,} at most; nothing was changed",
            hint="a shorter delay= lets more of them run; or open the pond with a larger memory=",
            what=f"group {group!r}",
        )


def due_events(new: pa.Table, waited: DelayedEvents, work: TransactionWork) -> DueEvents:
    """Deterministic: the same events, and the same that waited, give the same again."""
    if work.late_below == -math.inf and work.watermark is None and not len(waited):
        return DueEvents(new, new.slice(0, 0), waited, new)
    new = new.cast(nullable(new.schema))
    times, _ = time_column(new.column(work.at), work.at)
    is_late = np.broadcast_to(before(times, work.late_below), len(new))
    # Without a delay the watermark is the newest time, and what is at it runs.
    newest = int(times.max()) + 1 if len(times) else -math.inf
    watermark = newest if work.watermark is None else work.watermark
    is_due = ~is_late & before(times, watermark)
    waits = ~is_late & ~is_due
    older, waiting = waited.split(watermark)
    if not waited.are_like(new.schema):
        raise SchemaMismatch(
            "events wait that have other columns than those that come",
            hint="run those that wait first: finish(), with the functions that they are for",
            resident="",
            existing=str(waited.schema),
            requested=str(new.schema),
        )
    older = [rows.cast(new.schema) for rows in older]
    new_waiting = new.filter(pa.array(waits)) if waits.any() else new.slice(0, 0)
    events = _together(older, new, is_due)
    left = waiting.followed_by(delayed(times[waits], new_waiting))
    if not is_late.any():
        return DueEvents(events, new_waiting, left, events)
    first = np.ones(sum(len(rows) for rows in older), np.bool_)
    is_shown = is_due | is_late
    return DueEvents(
        events,
        new_waiting,
        left,
        _together(older, new, is_shown),
        np.concatenate([first, is_due[is_shown]]),
    )


def _together(older: list[pa.Table], new: pa.Table, chosen: npt.NDArray[np.bool_]) -> pa.Table:
    rows = new if chosen.all() else new.filter(pa.array(chosen))
    return pa.concat_tables([*older, rows]).combine_chunks() if older else rows
