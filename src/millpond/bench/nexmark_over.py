"""NEXMark's queries as streams with less and with more open at a time than windows have memory for.

The same streams, contenders and checks as in `nexmark`, but few, large windows: from a tenth of the budget to ten times it is
open at a time. Files of open windows stay out of the page cache, whichever store writes them. The budget is small, so that
RocksDB comes to an end: what counts is how often what is open exceeds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from millpond.bench.nexmark_load import Work
from millpond.bench.window_container import Means

ROW_BYTES = {"q11-median": 24, "q7-bidder": 40, "q11": 56}
"""About what is kept of a row, or of a session."""
GAP_S = 10
BIDS = 46 / 50
"""Of all events."""
FILES = 12
SLICES = 8
"""Each has a store of its own, and its share of the budget."""
BATCH_EVENTS_MIN = 50_000


class Scale(NamedTuple):
    """How much of everything."""

    budget: int = 4 << 20
    queries: Sequence[str] = ("q11-median", "q7-bidder", "q11")
    shares: Sequence[float] = (0.1, 1, 10)
    windows: int = 2
    """So many times what is open comes in all."""


FULL = Scale()
QUICK = Scale(budget=1 << 20, queries=("q11-median",), shares=(10,))


class Over(NamedTuple):
    """Of a query, what is open beside the budget."""

    query: str
    share: float
    work: Work

    @property
    def part(self) -> str:
        return f"{self.query}, {self.share:g} times the budget"


def means_of(scale: Scale) -> Means:
    return Means(budget=scale.budget, uncached=True)


def works(scale: Scale) -> Iterator[Over]:
    for query in scale.queries:
        for share in scale.shares:
            yield Over(query, share, work_of(query, scale, share))


def work_of(query: str, scale: Scale, share: float) -> Work:
    """Of sessions there are so many keys that each has about one row in a gap."""
    open_rows = share * scale.budget / ROW_BYTES[query]
    batch = max(BATCH_EVENTS_MIN, math.ceil(scale.windows * open_rows / BIDS / FILES) + 1)
    return Work(
        events=FILES * batch,
        batch_events=batch,
        events_per_s=max(1, round(open_rows / BIDS / GAP_S)),
        uniform_bidders=0 if query == "q7-bidder" else max(1_000, round(2 * open_rows)),
        rounds=1,
    )
