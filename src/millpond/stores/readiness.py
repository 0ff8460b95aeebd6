"""When a question can be answered, when a row is late, and how far back an answer reaches. Said here, and only here.

A question asks for the values with low < time <= high; as of a time it has no low. `before`, `ready` and `late` say the
same of one int, an int64 array and a Spark column. They give a plain bool where it is the same for all times.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from millpond.times import TIME_MAX, TIME_MIN, Progress, TimeKind, below_fetch_progress

if TYPE_CHECKING:
    from millpond.code.rules import FetchRule
    from millpond.wire.states import StateSpec

Times: TypeAlias = Any
"""An int, an int64 array or a Spark column."""
WALKS = ("paths", "changes")
Truth: TypeAlias = Any
"""For each time whether it is so: a bool, an array of bool or a Spark column."""


def before(times: Times, progress: Progress) -> Truth:
    """Which times a progress has passed."""
    if not TIME_MIN < progress <= TIME_MAX:
        return progress > 0
    return times < int(progress)


def ready(low: Times | None, high: Times, update_progress: Progress, committed: bool = True) -> Truth:
    """Which questions can be answered: a committed answer once U has passed the end of its range, for then it is
    final; an uncommitted one once U has passed the beginning, of which a question without a low has none.
    """
    if committed:
        return before(high, update_progress)
    return update_progress > -math.inf if low is None else before(low, update_progress)


def late(low: Times | None, high: Times, watermark: Progress) -> Truth:
    """Which questions begin below the watermark of their fetcher."""
    return before(high, watermark) if low is None else before(low, watermark - 1)


def late_rows(times: npt.NDArray[np.int64], watermark: Progress) -> npt.NDArray[np.int64]:
    """Positions of the rows whose time is below the watermark of their updater."""
    return positions(before(times, watermark), len(times))


def positions(truth: Truth, rows: int) -> npt.NDArray[np.int64]:
    """Where it is true, of so many rows."""
    return np.flatnonzero(np.broadcast_to(truth, rows))


def lowest_asked(
    lows: npt.NDArray[np.int64] | None,
    highs: npt.NDArray[np.int64],
    rule: FetchRule,
    spec: StateSpec,
) -> Progress:
    """The lowest time that an answer depends on, as far as compaction goes; +inf where nothing is asked.

    Without a low bound an answer depends on the upper bound alone if compaction keeps what it needs: the newest value
    below F, under `edges` the neighbours, under a user's own rule whatever the user's reads need. Else it depends on
    all values of its range. A walk looks at each neighbour's last update up to the upper bound, so that what it needs is
    there whatever the low bound.
    """
    if len(highs) == 0:
        return math.inf
    if rule.name in WALKS and served_below(rule, spec):
        return int(highs.min())
    if served_below(rule, spec) and (lows is None or rule.name == "as_of"):
        return int(highs.min())
    return int(lows.min()) + 1 if lows is not None and rule.name != "as_of" else -math.inf


def served_below(rule: FetchRule, spec: StateSpec) -> bool:
    """Whether compaction keeps what the rule needs of the values below F."""
    kept = ("neighbours", *WALKS) if spec.update.name == "edges" else ("latest", "as_of")
    return rule.name in kept or spec.compact.name == "custom"


def check_not_below(time: Progress, fetch_progress: Progress, kind: TimeKind) -> None:
    """Refuses a read that depends on values below F: they may have been compacted."""
    if time < fetch_progress:
        raise below_fetch_progress(time, fetch_progress, kind)
