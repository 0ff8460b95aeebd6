"""The events of the NEXMark benchmark as Parquet files, how they reach a stream, and what it should answer to them.

Events are generated before anything runs. A file is a micro-batch, and its rows are those of so many events in a row. The
first files warm up, the others are timed. Behind them come two files of one row each, `CLOSING_AT`, long after all events:
the first raises the watermark, and by the second all windows are closed. So answers are complete, and none is left open at
the end; rows of answers that these two rows brought are left out, and the truth does not know them.

Q12 goes by the time of arrival, which no row can put forward: its closing files come once its last window is over.
Who runs it records when each file arrived.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millpond.apps.nexmark import TIMESTAMP, Nexmark
from millpond.apps.nexmark_truth import truth
from millpond.errors import BadOption

CLOSING_AT = datetime(2100, 1, 1, tzinfo=UTC)
CLOSING_FILES = 2
CLOSING_ID = -1
"""Of every column of the closing rows that is a number."""
ROW_GROUPS = 16
"""Of a file, so that it can be split among cores."""
PEOPLE_FACTOR = 12
"""Of 50 events 46 are bids and 4 are people or auctions: of queries without bids a file spans so many more events."""
PHASES = ("warm", "timed", "closing")


class Work(NamedTuple):
    """How much of everything. `events_per_s` is of event time: with `size` it makes the rows of a window."""

    events: int = 4_800_000
    batch_events: int = 800_000
    warm_files: int = 1
    events_per_s: int = 19_200
    size: str = "10 seconds"
    slide: str = "2 seconds"
    gap: str = "10 seconds"
    arrival_size: str = "1 second"
    """The windows of Q12, which are of the clock."""
    disorder: int = 1
    active_people: int = 1_000
    uniform_bidders: int = 0
    """If any, bids come from so many people, each as likely as the others, and nobody is hot."""
    whole_bids: bool = False
    """With the column `extra`, which brings bids to their size."""
    uncounted_rounds: int = 0
    """Rounds before those that count; within a run, `warm_files` do not count either."""
    rounds: int = 3

    @property
    def files(self) -> int:
        return self.events // self.batch_events


FULL = Work()
QUICK = Work(
    events=480_000,
    batch_events=80_000,
    warm_files=1,
    events_per_s=2_000,
    arrival_size="200 milliseconds",
    rounds=1,
)


class Asked(NamedTuple):
    """A query of the benchmark: which of the truth it is, what it reads, and its key, if it has one."""

    truth: str
    columns: Mapping[str, str]
    """By source, as Spark has them."""
    durations: Mapping[str, str]
    """Parameters of the truth, by the fields of `Work` that hold them."""
    parameters: Mapping[str, Any] = {}
    key: str | None = None


BIDS = "auction long, bidder long, price long, date_time timestamp"
SLIDING = {"size": "size", "slide": "slide"}
TUMBLING = {"size": "size"}
SESSION = {"gap": "gap"}
TOUCHING = {"touching": True}
QUERIES = {
    "q5": Asked("q5", {"bids": "auction long, date_time timestamp"}, SLIDING),
    "q5-append": Asked("q5-append", {"bids": "auction long, date_time timestamp"}, SLIDING),
    "q7": Asked("q7", {"bids": BIDS}, TUMBLING),
    "q7-bidder": Asked("q7", {"bids": BIDS}, TUMBLING, {"per_bidder": True}, "bidder"),
    "q7-session": Asked("q7-session", {"bids": BIDS}, SESSION, TOUCHING, "bidder"),
    "q8": Asked(
        "q8",
        {
            "persons": "id long, name string, date_time timestamp",
            "auctions": "seller long, date_time timestamp",
        },
        TUMBLING,
        key="id",
    ),
    "q11": Asked("q11", {"bids": "bidder long, date_time timestamp"}, SESSION, TOUCHING, "bidder"),
    "q11-median": Asked(
        "q11-median", {"bids": "bidder long, price long, date_time timestamp"}, SESSION, TOUCHING, "bidder"
    ),
    "q12": Asked("q12", {"bids": "bidder long"}, {"size": "arrival_size"}, key="bidder"),
}
WHOLE_BIDS = f"{BIDS}, extra string"
WHOLE = {
    "q7-bidder-whole": Asked(
        "q7", {"bids": WHOLE_BIDS}, TUMBLING, {"per_bidder": True, "whole": True}, "bidder"
    ),
    "q7-session-whole": Asked(
        "q7-session", {"bids": WHOLE_BIDS}, SESSION, {**TOUCHING, "whole": True}, "bidder"
    ),
}
"""Of works that have `whole_bids`."""
ASKED = QUERIES | WHOLE
SOURCES = {
    "bids": ["auction", "bidder", "price", "date_time"],
    "persons": ["id", "name", "date_time"],
    "auctions": ["seller", "date_time"],
}


def check_queries(queries: Sequence[str]) -> None:
    """Before anything is started."""
    for query in queries:
        if query not in QUERIES:
            raise BadOption(
                f"there is no query {query!r}", hint=f"there are {', '.join(QUERIES)}", option="--query"
            )


class Fingerprint(NamedTuple):
    """Of rows in any order: how many there are, and the sum of their hashes. It holds within one process."""

    rows: int
    hash: str


@dataclass
class Run:
    """What a contender did with one query. Time and CPU are of the timed and of the closing files."""

    seconds: float
    cpu_seconds: float
    events: int
    """Rows read meanwhile: bids, or people and auctions."""
    result: pa.Table
    """All rows of answers, those of the warm-up among them, in any order."""
    arrivals: Sequence[int] | None = None
    """For Q12, by file, closing ones left out: when its rows arrived, in microseconds since 1970."""
    extras: dict[str, Any] = field(default_factory=dict)


class Contender(Protocol):
    """A system that answers queries over streams from files."""

    name: str

    def supports(self, query: str) -> bool: ...

    def run(self, workload: Workload, query: str) -> Run:
        """One streaming query from its first file to its last answer."""
        ...


class Workload:
    """The files, in a folder, and what to answer to them. Files are written when a query first needs them."""

    def __init__(self, folder: Path, work: Work, seed: int = 1) -> None:
        if not 0 <= work.warm_files < work.files:
            raise BadOption(
                f"{work.events:,} events in files of {work.batch_events:,}, and {work.warm_files} to warm up",
                hint="have more events or smaller files: some must be left to be timed",
            )
        self.work = work
        self._folder = folder
        self._seed = seed
        self._written: set[str] = set()
        self._truths: dict[str, pa.Table] = {}
        self._runs = 0

    def parameters(self, query: str) -> dict[str, Any]:
        """Of the query's windows, as the truth names them: `size`, `slide` or `gap`, and which form it is."""
        asked = ASKED[query]
        durations = {name: getattr(self.work, place) for name, place in asked.durations.items()}
        return durations | dict(asked.parameters)

    def delay_us(self, query: str) -> int:
        """By how much the watermark must stay behind the newest event, so that none is late."""
        return self._nexmark(query).disorder_us

    def stage(self, query: str) -> Staged:
        """Folders of its own for one run, without files as yet."""
        for source in ASKED[query].columns:
            self._write(source)
        self._runs += 1
        return Staged(self._folder, self._folder / f"run-{self._runs}", list(ASKED[query].columns))

    def events(self, query: str) -> int:
        """How many rows the timed files have."""
        timed = range(self.work.warm_files, self.work.files)
        files = [self._file(source, number) for source in ASKED[query].columns for number in timed]
        return sum(pq.read_metadata(file).num_rows for file in files)

    def truth(self, query: str, arrivals: Sequence[int] | None = None) -> pa.Table:
        """What DuckDB answers over all files but the closing ones."""
        if arrivals is not None:
            return self._arrived_truth(query, arrivals)
        if query not in self._truths:
            tables = {
                source: pa.concat_tables(pq.read_table(file) for file in self._files(source))
                for source in ASKED[query].columns
            }
            if "auctions" in tables:
                # The truth can tell of auctions what this query does not ask for.
                for name in ("id", "reserve"):
                    tables["auctions"] = tables["auctions"].append_column(name, tables["auctions"]["seller"])
            self._truths[query] = truth(ASKED[query].truth, **tables, **self.parameters(query))
        return self._truths[query]

    def check(self, name: str, query: str, run: Run) -> Fingerprint:
        """Raises where the rows of answers are not exactly the truth's."""
        if (run.arrivals is None) == (query == "q12"):
            raise RuntimeError(f"{name} should record arrivals for q12, and for nothing else")
        expected = self.truth(query, run.arrivals)
        answers = self._without_closing(query, run.result)
        return compare(f"{name} in {query}", answers, expected)

    def _without_closing(self, query: str, result: pa.Table) -> pa.Table:
        of_events = pc.less_equal(result["window_end"], pa.scalar(CLOSING_AT, TIMESTAMP))
        key = ASKED[query].key
        if key is not None:
            of_events = pc.and_(of_events, pc.not_equal(result[key], CLOSING_ID))
        return result.filter(of_events)

    def _arrived_truth(self, query: str, arrivals: Sequence[int]) -> pa.Table:
        if len(arrivals) != self.work.files:
            raise RuntimeError(f"{len(arrivals)} arrivals were recorded of {self.work.files} files")
        tables = [pq.read_table(file, columns=["bidder"]) for file in self._files("bids")]
        stamped = [
            table.append_column("arrival", pa.array(np.full(len(table), arrival)).view(TIMESTAMP))
            for table, arrival in zip(tables, arrivals, strict=True)
        ]
        return truth(ASKED[query].truth, bids=pa.concat_tables(stamped), **self.parameters(query))

    # Files

    def _nexmark(self, query: str) -> Nexmark:
        return self._generator(min(ASKED[query].columns, key=list(SOURCES).index))

    def _generator(self, source: str) -> Nexmark:
        work = self.work
        factor = 1 if source == "bids" else PEOPLE_FACTOR
        return Nexmark(
            seed=self._seed,
            events_per_s=work.events_per_s * factor,
            active_people=work.active_people,
            disorder=work.disorder,
            extra=work.whole_bids,
        )

    def _files(self, source: str) -> list[Path]:
        self._write(source)
        return [self._file(source, number) for number in range(self.work.files)]

    def _file(self, source: str, number: int) -> Path:
        """Closing files have the numbers after all others."""
        if number < self.work.warm_files:
            phase = "warm"
        else:
            phase = "timed" if number < self.work.files else "closing"
        return self._folder / source / phase / f"{number:06}.parquet"

    def _write(self, source: str) -> None:
        if source in self._written:
            return
        for phase in PHASES:
            (self._folder / source / phase).mkdir(parents=True)
        generator = self._generator(source)
        batch = self.work.batch_events * (1 if source == "bids" else PEOPLE_FACTOR)
        for number in range(self.work.files + CLOSING_FILES):
            file = self._file(source, number)
            if number < self.work.files:
                names = [*SOURCES[source], *(["extra"] if self.work.whole_bids else [])]
                rows = getattr(generator, source)(number * batch, batch).select(names)
                if source == "bids" and self.work.uniform_bidders:
                    rows = self._with_uniform_bidders(rows, number)
            else:
                rows = closing_row(rows.schema)
            pq.write_table(rows, file, row_group_size=max(1, -(-len(rows) // ROW_GROUPS)))
            os.utime(file, (number + 1, number + 1))  # a stream takes the oldest first
        self._written.add(source)

    def _with_uniform_bidders(self, rows: pa.Table, number: int) -> pa.Table:
        chance = np.random.default_rng([self._seed, number])
        bidders = chance.integers(self.work.uniform_bidders, size=len(rows))
        place = rows.schema.get_field_index("bidder")
        return rows.set_column(place, "bidder", pa.array(bidders))


class Staged:
    """Where the streams of one run find their files: `folder(source)` has one folder for each phase that was put there."""

    def __init__(self, files: Path, folder: Path, sources: list[str]) -> None:
        self.run_folder = folder
        """For whatever else the run writes."""
        self._files = files
        self._sources = sources
        for source in sources:
            self.folder(source).mkdir(parents=True)

    def folder(self, source: str) -> Path:
        return self.run_folder / "sources" / source

    def put(self, phase: str) -> None:
        """All files of the phase, of each source at once: who lists a folder sees all of them or none."""
        for source in self._sources:
            beside = self.run_folder / f"{source}-{phase}"
            beside.mkdir()
            for file in (self._files / source / phase).iterdir():
                os.link(file, beside / file.name)
            beside.rename(self.folder(source) / phase)


def closing_row(schema: pa.Schema) -> pa.Table:
    values: dict[pa.DataType, Any] = {pa.int64(): CLOSING_ID, pa.string(): "", TIMESTAMP: CLOSING_AT}
    return pa.table({column.name: pa.array([values[column.type]], column.type) for column in schema})


# Comparing


def fingerprint(rows: pa.Table) -> Fingerprint:
    with duckdb.connect() as connection:
        connection.register("answers", rows)
        columns = ", ".join(f'"{name}"' for name in rows.column_names)
        sums = f"SELECT count(*), coalesce(sum(hash({columns})), 0) FROM answers"  # noqa: S608 - names of columns
        [(count, total)] = connection.sql(sums).fetchall()
    return Fingerprint(int(count), f"{int(total) % 2**64:016x}")


def compare(whose: str, answers: pa.Table, expected: pa.Table) -> Fingerprint:
    """That of the answers; raises where these are other rows than expected, or another number of them."""
    missing_columns = set(expected.column_names) - set(answers.column_names)
    if missing_columns:
        raise RuntimeError(f"the answers of {whose} lack {', '.join(sorted(missing_columns))}")
    answers = answers.select(expected.column_names).cast(expected.schema)
    own, wanted = fingerprint(answers), fingerprint(expected)
    if own == wanted:
        return own
    missing, extra = _difference(expected, answers), _difference(answers, expected)
    example = (missing if len(missing) else extra).slice(0, 1).to_pylist()
    raise RuntimeError(
        f"of the {wanted.rows} rows that DuckDB answers {whose} lacks {len(missing)}, and it has {len(extra)} others;"
        f" one of them: {example}"
    )


def _difference(rows: pa.Table, others: pa.Table) -> pa.Table:
    with duckdb.connect() as connection:
        connection.register("rows_", rows)
        connection.register("others", others)
        return connection.sql("SELECT * FROM rows_ EXCEPT ALL SELECT * FROM others").to_arrow_table()
