"""NEXMark's queries as streams with less and with more open at a time than windows have memory for.

The same streams, contenders and checks as in `nexmark`, but with much open: from a tenth of the budget to ten times it, over 20
windows of event time and more. Files of open windows stay out of the page cache, whichever store writes them, Spark's too.

To have ten times the budget open in 20 windows that follow each other, 200 times the budget would have to come: so what is over it are sessions
that last for many gaps, of whole bids. Each key has some rows in a gap, so that what is kept of a session, beside its rows, is little:
that counts for the budget of the pond, as ever. RocksDB has all of the budget for its cache and its write buffers, and what is kept of sessions
beside them. Spark's memory for RocksDB has the same bound; it keeps the bids of the highest price alone, and so less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from millpond.bench.nexmark_load import Work
from millpond.bench.window_container import Means

ROW_BYTES = {"q11-median": 24, "q7-bidder": 40, "q12": 56, "q7-session-whole": 104, "q7-bidder-whole": 112}
"""About what is kept of a row, or of a cell."""
SESSIONS = ("q11-median", "q7-session-whole")
GAP_S = 10
ROWS_IN_GAP = 5
"""Of a key of sessions, in the mean."""
GAPS_MEAN = (math.exp(ROWS_IN_GAP) - 1) / ROWS_IN_GAP
"""How many gaps a session lasts in the mean, as keys come at random: until one of them brings no row."""
BIDS = 46 / 50
"""Of all events."""
FILES = 11
"""Of each session there is something to be known in memory for each file that brought rows of it, once these are on disk."""
BATCH_EVENTS_MIN = 20_000
SPARK_SHARE_MAX = 1
"""Of the budget, up to which Spark takes part."""


class Scale(NamedTuple):
    """How much of everything."""

    budget: int = 64 << 20
    shares: Mapping[str, Sequence[float]] = {
        "q11-median": (0.1, 1),
        "q7-session-whole": (0.1, 1, 10),
        "q7-bidder-whole": (0.1,),  # at once the budget Spark takes minutes a round
    }
    windows: int = 20
    """Of event time, at least: so many gaps of sessions."""
    rounds: int = 3
    uncounted_rounds: int = 1
    """Before those of the smallest share of each query: whoever comes first would have code compiled for the others."""


FULL = Scale()
QUICK = Scale(budget=2 << 20, shares={"q7-session-whole": (1, 10)}, rounds=1, uncounted_rounds=0)


class Over(NamedTuple):
    """Of a query, what is open beside the budget."""

    query: str
    share: float
    work: Work

    @property
    def part(self) -> str:
        return f"{self.query}, {self.share:g} times the budget"


class Volume(NamedTuple):
    """Of rows, so that there is so much open at the end."""

    rows: int
    per_window: int
    keys: int


def volume(query: str, open_bytes: float, windows: int) -> Volume:
    """Of tumbling windows one is open at a time; all keys of sessions have one that is open, and began a while ago."""
    open_rows = math.ceil(open_bytes / ROW_BYTES[query])
    if query not in SESSIONS:
        return Volume(windows * open_rows, open_rows, max(1_000, open_rows // 4))
    gaps = GAPS_MEAN * (1 - math.exp(-windows / GAPS_MEAN))
    keys = math.ceil(open_rows / (ROWS_IN_GAP * gaps))
    return Volume(windows * ROWS_IN_GAP * keys, ROWS_IN_GAP * keys, keys)


def means_of(scale: Scale) -> Means:
    return Means(budget=scale.budget, uncached=True)


def works(scale: Scale) -> Iterator[Over]:
    for query, shares in scale.shares.items():
        for share in shares:
            yield Over(query, share, work_of(query, scale, share))


def work_of(query: str, scale: Scale, share: float) -> Work:
    """The first file warms up; the windows are of those after it."""
    rows, per_window, keys = volume(query, share * scale.budget, scale.windows)
    batch = max(BATCH_EVENTS_MIN, math.ceil(rows / BIDS / (FILES - 1)) + 1)
    return Work(
        events=FILES * batch,
        batch_events=batch,
        events_per_s=max(1, math.ceil(per_window / BIDS / GAP_S)),
        uniform_bidders=keys,
        whole_bids=query.endswith("-whole"),
        uncounted_rounds=scale.uncounted_rounds * (share == min(scale.shares[query])),
        rounds=scale.rounds,
    )
