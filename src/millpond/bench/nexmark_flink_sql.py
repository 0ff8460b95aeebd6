"""NEXMark's queries as Flink SQL has them, and their rows as it reads and writes them.

- Q5, Q7 and Q8 are aggregations of windows and joins by window; ties are joined back in, as a window's top N has none. They
  are joined by what is not below the highest: by what is equal, each price would be a key of its own, which took Q7 four times
  as much CPU time.
- Q7-Session joins bids with the highest price of their session. Flink has no join by window for sessions: it takes a regular
  join, which keeps all bids for good. Sessions with a list of their bids, to be filtered, took six times as much.
- Q11 and Q11-Median aggregate sessions, which Flink merges where they touch.
- Q5-Append has no form of its own: Flink keeps counts. Of Q12 one cannot tell when a row arrived: Flink asks its clock for
  each row, and nothing records what it said.

Flink's event time has milliseconds, and the benchmark's microseconds: to Flink a microsecond is a millisecond, and a window
of ten seconds one of 10,000. Times are told from `origin_us` on, where windows of all sizes begin.
"""

# ruff: noqa: S608 - statements are made of constants and of numbers
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from millpond.apps.nexmark import START, TIMESTAMP
from millpond.bench.nexmark_load import QUERIES
from millpond.times import parse_duration, time_of

TYPES = {"long": "BIGINT", "string": "STRING"}
WINDOW = "window_start TIMESTAMP(3), window_end TIMESTAMP(3)"
SAID = "said TIMESTAMP_LTZ(3)"
ARROW_TYPES = {
    "window_start": pa.timestamp("ms"),
    "window_end": pa.timestamp("ms"),
    "name": pa.string(),
    "median": pa.float64(),
    "said": pa.timestamp("ms", "UTC"),
}
"""Of answers in files; all others are numbers."""
TIMES = ("window_start", "window_end", "date_time")


class Form(NamedTuple):
    answers: Mapping[str, str]
    """Columns behind the window's, with their types."""
    query: str
    """Its rows, without the time at which they were said; with `{size}`, `{slide}` and `{gap}` for intervals."""


BID = {"auction": "BIGINT", "bidder": "BIGINT", "price": "BIGINT", "date_time": "BIGINT"}
SLIDING = "HOP(TABLE bids, DESCRIPTOR(at_time), {slide}, {size})"
SESSION = "SESSION(TABLE bids PARTITION BY bidder, DESCRIPTOR(at_time), {gap})"
OF_WINDOW = "window_start, window_end"


def _tumbling(source: str) -> str:
    return f"TUMBLE(TABLE {source}, DESCRIPTOR(at_time), {{size}})"


def _highest(window: str, per_bidder: bool, joined_by: str) -> Form:
    """The bids beside the highest price of their window."""
    key = ", bidder" if per_bidder else ""
    same_bidder = " AND b.bidder = h.bidder" if per_bidder else ""
    return Form(
        BID,
        f"""
        SELECT b.window_start, b.window_end, b.auction, b.bidder, b.price, b.date_time
        FROM (SELECT * FROM TABLE({window})) AS b JOIN (
            SELECT {OF_WINDOW}{key}, MAX(price) AS highest FROM TABLE({window}) GROUP BY {OF_WINDOW}{key}
        ) AS h
        ON b.window_start = h.window_start AND b.window_end = h.window_end{same_bidder}
            AND b.price {joined_by} h.highest
        """,
    )


def _sessions(aggregate: str, name: str, kind: str) -> Form:
    return Form(
        {"bidder": "BIGINT", name: kind},
        f"SELECT {OF_WINDOW}, bidder, {aggregate} FROM TABLE({SESSION}) GROUP BY {OF_WINDOW}, bidder",
    )


COUNTED = f"SELECT {OF_WINDOW}, auction, COUNT(*) AS bids FROM TABLE({SLIDING}) GROUP BY {OF_WINDOW}, auction"
FORMS = {
    "q5": Form(
        {"auction": "BIGINT", "bids": "BIGINT"},
        f"""
        SELECT c.window_start, c.window_end, c.auction, c.bids
        FROM ({COUNTED}) AS c JOIN (
            SELECT {OF_WINDOW}, MAX(bids) AS highest FROM ({COUNTED}) GROUP BY {OF_WINDOW}
        ) AS h
        ON c.window_start = h.window_start AND c.window_end = h.window_end AND c.bids >= h.highest
        """,
    ),
    "q7": _highest(_tumbling("bids"), per_bidder=False, joined_by=">="),
    "q7-bidder": _highest(_tumbling("bids"), per_bidder=True, joined_by=">="),
    "q7-session": _highest(SESSION, per_bidder=True, joined_by="="),
    "q8": Form(
        {"id": "BIGINT", "name": "STRING"},
        f"""
        SELECT p.window_start, p.window_end, p.id, p.name
        FROM (SELECT * FROM TABLE({_tumbling("persons")})) AS p JOIN (
            SELECT {OF_WINDOW}, seller FROM TABLE({_tumbling("auctions")})
            GROUP BY {OF_WINDOW}, seller
        ) AS a
        ON p.window_start = a.window_start AND p.window_end = a.window_end AND p.id = a.seller
        """,
    ),
    "q11": _sessions("COUNT(*)", "bids", "BIGINT"),
    "q11-median": _sessions("PERCENTILE(price, 0.5)", "median", "DOUBLE"),
}


class Statement(NamedTuple):
    """A query with its windows' parameters and the delay of its rows."""

    sources: dict[str, str]
    """Columns of the tables that it reads, by name."""
    sinks: dict[str, tuple[str, str]]
    """The columns of `answers`, and the query that answers."""
    drops: dict[str, tuple[str, str]]
    """The same to read the sources and nothing else."""
    columns: tuple[str, ...]
    """Names of the answers' columns."""
    origin_us: int
    behind: int
    """So far is the watermark behind the newest row. As the next, in Flink's milliseconds, which are microseconds."""
    closes_after: int
    """A row so long after all others ends their windows by its watermark."""


def statement(query: str, parameters: Mapping[str, Any], delay_us: int) -> Statement:
    form = FORMS[query]
    durations = {
        name: parse_duration(parameters[name]) for name in ("size", "slide", "gap") if name in parameters
    }
    intervals = {name: interval(micros) for name, micros in durations.items()}
    columns = ", ".join(f"`{name}` {kind}" for name, kind in form.answers.items())
    behind = delay_us + 1  # a row is not late if it comes at the same time as the one before
    read = {
        source: {name: TYPES.get(kind, "BIGINT") for name, kind in map(str.split, described.split(", "))}
        for source, described in QUERIES[query].columns.items()
    }
    physical = {
        source: ", ".join(f"`{name}` {kind}" for name, kind in kinds.items())
        for source, kinds in read.items()
    }
    return Statement(
        sources={
            source: f"{described}, at_time AS TO_TIMESTAMP_LTZ(date_time, 3),"
            f" WATERMARK FOR at_time AS at_time - {interval(behind)}"
            for source, described in physical.items()
        },
        sinks={
            "answers": (
                f"{WINDOW}, {columns}, {SAID}",
                f"SELECT *, CURRENT_ROW_TIMESTAMP() FROM ({form.query.format(**intervals)})",
            )
        },
        drops={
            f"no_{source}": (
                described,
                f"SELECT {', '.join(f'`{name}`' for name in read[source])} FROM {source}",
            )
            for source, described in physical.items()
        },
        columns=("window_start", "window_end", *form.answers, "said"),
        origin_us=origin_us(*durations.values()),
        behind=behind,
        closes_after=behind + 2 * max(durations.values()),
    )


def interval(micros: int) -> str:
    """A microsecond is a millisecond to Flink."""
    seconds, millis = divmod(micros, 1_000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"INTERVAL '{days} {hours:02}:{minutes:02}:{seconds:02}.{millis:03}' DAY TO SECOND(3)"


def origin_us(*durations_us: int) -> int:
    """The last time before all events at which windows of these lengths begin."""
    began = time_of(START)
    return began - began % math.lcm(*durations_us)


def as_read(rows: pa.Table, origin: int) -> pa.Table:
    """Rows as they go into files."""
    micros = rows["date_time"].cast(pa.int64()).to_numpy() - origin
    return rows.set_column(rows.column_names.index("date_time"), "date_time", pa.array(micros))


def as_answered(rows: pa.Table, origin: int) -> pa.Table:
    """Answers as they come from files, with the benchmark's times."""
    for place, name in enumerate(rows.column_names):
        if name in TIMES:
            micros = rows[name].cast(pa.int64()).to_numpy() + origin
            rows = rows.set_column(place, name, pa.array(micros).view(TIMESTAMP))
    return rows
