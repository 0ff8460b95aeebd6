"""What NEXMark's queries should answer, as DuckDB has it: over all events at once, without streams or watermarks.

Windows are half-open, [start, end), aligned to 1970, and all of them close; one without events has no row. A session ends a
gap after its last bid. Ties are all answers.

| query | what | whose form |
|---|---|---|
| `q5` | the auctions with the most bids of each sliding window | Flink SQL, Beam and FlowKV alike |
| `q5-append` | the same rows | FlowKV: the counts of a window are kept until it fires |
| `q7` | the bids of the highest price of each tumbling window | Beam; Flink SQL takes bids at a window's end into both |
| `q7`, `per_bidder=True` | the same of each bidder | FlowKV |
| `q7`, `q7-session`, `whole=True` | the same with the column `extra` | |
| `q7-session` | the bids of the highest price of each bidder's session | FlowKV, which has Q7 by bidder |
| `q8` | who registered and opened auctions in the same tumbling window, once | Flink SQL |
| `q8`, `each_auction=True` | the same for each auction, with its reserve | Beam |
| `q11` | how many bids a session of a bidder has | Flink SQL and FlowKV; Beam cuts sessions after so many bids |
| `q11-median` | the median of their prices; of an even number, the mean of the middle two | FlowKV |
| `q12` | bids of a bidder in each tumbling window of the time of arrival | Flink SQL; Beam begins a window at its first bid, FlowKV has one window for all |

They differ in bids that come exactly a gap after the one before. In half-open windows they begin a session of their own, as
with Beam; with `touching=True` they belong to the one before, as with Flink and with Spark's `session_window`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pyarrow as pa

from millpond.errors import BadOption
from millpond.times import parse_duration

COUNTED = """
    WITH panes AS (
        -- A pane lies within a window or outside of it: all windows begin and end where panes do.
        SELECT auction, date_time - (date_time % $pane + $pane) % $pane AS pane, count(*) AS bids
        FROM bids GROUP BY ALL
    ), windows AS (
        SELECT auction, bids, unnest(generate_series(
            pane - (pane % $slide + $slide) % $slide, pane - $size + 1, -$slide
        )) AS window_start
        FROM panes
    ), counted AS (
        SELECT window_start, window_start + $size AS window_end, auction, sum(bids)::BIGINT AS bids
        FROM windows GROUP BY ALL
    )
"""
Q5 = f"""{COUNTED}
    SELECT window_start, window_end, auction, bids
    FROM counted
    QUALIFY bids = max(bids) OVER (PARTITION BY window_start)
    ORDER BY ALL
"""
Q5_APPEND = f"""{COUNTED}, collected AS (
        SELECT window_start, window_end, list(auction) AS auctions, list(bids) AS counts
        FROM counted GROUP BY ALL
    ), listed AS (
        SELECT window_start, window_end, unnest(auctions) AS auction, unnest(counts) AS bids, list_max(counts) AS most
        FROM collected
    )
    SELECT window_start, window_end, auction, bids FROM listed WHERE bids = most
    ORDER BY ALL
"""

Q7 = """
    WITH windowed AS (
        SELECT *, date_time - (date_time % $size + $size) % $size AS window_start FROM bids
    )
    SELECT window_start, window_start + $size AS window_end, auction, bidder, price, date_time
    FROM windowed
    QUALIFY price = max(price) OVER (PARTITION BY window_start, CASE WHEN $per_bidder THEN bidder END)
    ORDER BY ALL
"""

SESSIONS = """
    WITH spaced AS (
        SELECT *, date_time - lag(date_time) OVER (PARTITION BY bidder ORDER BY date_time) AS silence FROM bids
    ), numbered AS (
        -- Rows of one instant are peers: they all count the one among them that begins a session.
        SELECT *, count(*) FILTER (silence IS NULL OR silence >= $gap) OVER (
            PARTITION BY bidder ORDER BY date_time RANGE UNBOUNDED PRECEDING
        ) AS session
        FROM spaced
    ), sessions AS (
        SELECT bidder, session, min(date_time) AS window_start, max(date_time) + $length AS window_end,
            count(*) AS bids, median(price)::DOUBLE AS median, max(price) AS highest
        FROM numbered GROUP BY ALL
    )
"""
Q7_SESSION = f"""{SESSIONS}
    SELECT window_start, window_end, bidder, auction, price, date_time
    FROM numbered JOIN sessions USING (bidder, session)
    WHERE price = highest
    ORDER BY ALL
"""
Q7_WHOLE, Q7_SESSION_WHOLE = (
    sql.replace("price, date_time\n", "price, date_time, extra\n") for sql in (Q7, Q7_SESSION)
)
Q11 = f"""{SESSIONS}
    SELECT window_start, window_end, bidder, bids FROM sessions ORDER BY ALL
"""
Q11_MEDIAN = f"""{SESSIONS}
    SELECT window_start, window_end, bidder, median FROM sessions ORDER BY ALL
"""

Q8_PAIRS = """
    WITH registered AS (
        SELECT id, name, date_time - (date_time % $size + $size) % $size AS window_start FROM persons
    ), opened AS (
        SELECT seller AS id, id AS auction, reserve, date_time - (date_time % $size + $size) % $size AS window_start
        FROM auctions
    )
"""
Q8 = f"""{Q8_PAIRS}
    SELECT DISTINCT window_start, window_start + $size AS window_end, id, name
    FROM registered JOIN opened USING (window_start, id)
    ORDER BY ALL
"""
Q8_EACH_AUCTION = f"""{Q8_PAIRS}
    SELECT window_start, window_start + $size AS window_end, id, name, auction, reserve
    FROM registered JOIN opened USING (window_start, id)
    ORDER BY ALL
"""

Q12 = """
    WITH arrived AS (
        SELECT bidder, arrival - (arrival % $size + $size) % $size AS window_start FROM bids
    )
    SELECT window_start, window_start + $size AS window_end, bidder, count(*) AS bids
    FROM arrived GROUP BY ALL
    ORDER BY ALL
"""


@dataclass(frozen=True)
class Query:
    """A query as DuckDB takes it. Its times are integers."""

    sql: str
    parameters: Mapping[str, Any]
    """With their defaults: those of Flink SQL."""
    tables: tuple[str, ...] = ("bids",)
    variants: Mapping[str, str] = field(default_factory=dict)
    """SQL by the parameter that chooses it."""


SLIDING = {"size": "10 seconds", "slide": "2 seconds"}
TUMBLING = {"size": "10 seconds"}
SESSION = {"gap": "10 seconds", "touching": False}

QUERIES = {
    "q5": Query(Q5, SLIDING),
    "q5-append": Query(Q5_APPEND, SLIDING),
    "q7": Query(Q7, {**TUMBLING, "per_bidder": False, "whole": False}, variants={"whole": Q7_WHOLE}),
    "q7-session": Query(Q7_SESSION, {**SESSION, "whole": False}, variants={"whole": Q7_SESSION_WHOLE}),
    "q8": Query(
        Q8,
        {**TUMBLING, "each_auction": False},
        tables=("persons", "auctions"),
        variants={"each_auction": Q8_EACH_AUCTION},
    ),
    "q11": Query(Q11, SESSION),
    "q11-median": Query(Q11_MEDIAN, SESSION),
    "q12": Query(Q12, {**TUMBLING, "arrival": "arrival"}),
}
DURATIONS = ("size", "slide", "gap")


def truth(
    query: str,
    *,
    bids: pa.Table | None = None,
    auctions: pa.Table | None = None,
    persons: pa.Table | None = None,
    **parameters: Any,
) -> pa.Table:
    """The whole answer to one of `QUERIES`, sorted: `window_start`, `window_end`, the key, and what is asked for.

    Durations are written as everywhere ("10 seconds"). `arrival` names the column of `bids` with the time of arrival.
    Where times are timestamps, so are those of the answer; where they are integers, durations are integers, too.
    """
    if query not in QUERIES:
        raise BadOption(
            f"there is no query {query!r}", hint=f"there are {', '.join(QUERIES)}", option="query"
        )
    asked = QUERIES[query]
    unknown = set(parameters) - set(asked.parameters)
    if unknown:
        raise BadOption(
            f"{query} has no {' and no '.join(sorted(unknown))}",
            hint=f"it has {', '.join(asked.parameters)}",
            option=min(unknown),
        )
    chosen = {**asked.parameters, **parameters}
    sql = next((sql for name, sql in asked.variants.items() if chosen.pop(name)), asked.sql)
    tables = {"bids": bids, "auctions": auctions, "persons": persons}
    with duckdb_module().connect() as connection:
        connection.execute("SET enable_progress_bar = false")
        times = pa.int64()
        for name in asked.tables:
            table = tables[name]
            if table is None:
                raise BadOption(f"{query} needs {name}", hint=f"give {name}=, a table", option=name)
            if "arrival" in chosen:
                table = _with_arrival(table, chosen.pop("arrival"))
            times = table["date_time"].type
            connection.register(name, _with_numbers(table))
        rows = connection.sql(sql, params=_numbers(query, chosen)).to_arrow_table()
    return _with_times(rows, times)


def _numbers(query: str, chosen: dict[str, Any]) -> dict[str, Any]:
    """The parameters as the SQL has them."""
    values = {name: parse_duration(value) if name in DURATIONS else value for name, value in chosen.items()}
    for name in DURATIONS:
        if values.get(name, 1) < 1:
            raise BadOption(f"{query} with a {name} of {chosen[name]!r}", hint="make it longer", option=name)
    if "slide" in values:
        values["pane"] = math.gcd(values["size"], values["slide"])
    if "gap" in values:
        # With whole microseconds, to belong together over a gap is to be apart from one more on.
        values["length"] = values["gap"]
        values["gap"] += bool(values.pop("touching"))
    return values


def _with_arrival(bids: pa.Table, column: str) -> pa.Table:
    if column not in bids.column_names:
        raise BadOption(
            f"the bids have no column {column!r}",
            hint="arrival= names the one with their times",
            option="arrival",
        )
    times = bids[column]
    return bids.select(["bidder"]).append_column("arrival", times).append_column("date_time", times)


def _with_numbers(table: pa.Table) -> pa.Table:
    """Timestamps as microseconds."""
    for place, column in enumerate(table.schema):
        if pa.types.is_timestamp(column.type):
            numbers = table[column.name].cast(pa.timestamp("us", tz=column.type.tz)).cast(pa.int64())
            table = table.set_column(place, column.name, numbers)
    return table


def _with_times(rows: pa.Table, times: pa.DataType) -> pa.Table:
    """The answer's times as timestamps, if those of the events are."""
    for place, name in enumerate(rows.column_names):
        if name in ("window_start", "window_end", "date_time") and pa.types.is_timestamp(times):
            rows = rows.set_column(place, name, rows[name].cast(pa.timestamp("us", tz=times.tz)))
    return rows.combine_chunks()


def duckdb_module() -> ModuleType:
    """BadOption where it is not installed."""
    try:
        return importlib.import_module("duckdb")
    except ImportError as error:
        raise BadOption("NEXMark's truth needs duckdb", hint='pip install "millpond[bench]"') from error
