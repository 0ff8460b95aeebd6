"""NEXMark at work: its queries as windows of a pond, on streams from files, every row of answers checked with DuckDB.

Events come out of order, in groups of a thousand; `nexmark` says what they are, `nexmark_queries` how each query is put to a
pond, and `nexmark_truth` what it should answer.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

import millpond as mp
from millpond.apps.nexmark import AUCTION_COLUMNS, BID_COLUMNS, PERSON_COLUMNS, Nexmark
from millpond.apps.nexmark_queries import QUERIES, Batches, stream_of
from millpond.apps.nexmark_truth import duckdb_module, truth
from millpond.apps.spark_session import spark_session
from millpond.errors import BadOption
from millpond.times import MICROS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SHOWN = ("q5", "q7-session", "q8", "q11-median")
"""Of each store one, and a join."""
EVENTS, EVENTS_MIN, EVENTS_MAX = 200_000, 1_000, 5_000_000
FILES = 4
"""Of each source, each a micro-batch."""
EVENTS_PER_S = 2_000
DISORDER = 1_000
LINE_EVERY_S = 2
COLUMNS = {"bids": BID_COLUMNS, "persons": PERSON_COLUMNS, "auctions": AUCTION_COLUMNS}


class Form(NamedTuple):
    """What a query asks, in whose form, which of the truth it is, and with which parameters."""

    asks: str
    whose: str
    truth: str
    parameters: Mapping[str, Any]
    sources: tuple[str, ...] = ("bids",)


SLIDING = {"size": "10 seconds", "slide": "2 seconds"}
TUMBLING = {"size": "10 seconds"}
SESSION = {"gap": "10 seconds", "touching": False}
FORMS = {
    "q5": Form(
        "the auctions with the most bids of each sliding window", "Flink SQL, Beam and FlowKV", "q5", SLIDING
    ),
    "q5-append": Form("the same, with all bids kept until a window fires", "FlowKV", "q5-append", SLIDING),
    "q7": Form("the bids of the highest price of each tumbling window", "Beam", "q7", TUMBLING),
    "q7-bidder": Form(
        "the bids of the highest price of each bidder in each tumbling window",
        "FlowKV",
        "q7",
        {**TUMBLING, "per_bidder": True},
    ),
    "q7-session": Form(
        "the bids of the highest price of each bidder's session", "FlowKV", "q7-session", SESSION
    ),
    "q8": Form(
        "who registered and opened auctions in the same tumbling window, once",
        "Flink SQL",
        "q8",
        TUMBLING,
        ("persons", "auctions"),
    ),
    "q11": Form("how many bids each session of a bidder has", "Flink SQL and FlowKV", "q11", SESSION),
    "q11-median": Form("the median price of each session of a bidder", "FlowKV", "q11-median", SESSION),
    "q12": Form(
        "the bids of each bidder in each tumbling window of the time of arrival",
        "Flink SQL",
        "q12",
        {"size": "1 second"},
    ),
}


def run(query: Sequence[str] | None = None, events: int = EVENTS) -> bool:
    """These queries, or some, over so many events; True if every row was answered once, and rightly."""
    queries = list(query or SHOWN)
    for each in queries:
        if each not in FORMS:
            raise BadOption(
                f"there is no query {each!r}", hint=f"there are {', '.join(FORMS)}", option="--query"
            )
    if not EVENTS_MIN <= events <= EVENTS_MAX:
        raise BadOption(
            f"--events {events} is not within {EVENTS_MIN:,} and {EVENTS_MAX:,}", option="--events"
        )
    duckdb_module()
    out = Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="millpond-nexmark-") as folder:
        out.print("starting Spark and a pond of two containers (the first time, kernels are compiled) ...")
        with (
            spark_session("nexmark", compiled=False) as spark,
            mp.open(os.path.join(folder, "pond"), spark=spark, containers=2) as pond,
        ):
            stage = Stage(spark, pond, Path(folder), events)
            # All are shown, also after a wrong answer.
            right = [show(stage, each, out) for each in queries]
        return all(right)


class Stage:
    """A pond, and the events as files: of each source those that are needed."""

    def __init__(self, spark: SparkSession, pond: mp.Pond, folder: Path, events: int) -> None:
        self.spark = spark
        self.pond = pond
        self.folder = folder
        self.events = events
        self.generator = Nexmark(events_per_s=EVENTS_PER_S, disorder=DISORDER)
        self._tables: dict[str, pa.Table] = {}

    def table(self, source: str) -> pa.Table:
        """All rows of a source, which are in files from then on."""
        if source not in self._tables:
            folder = self.folder / source
            folder.mkdir(parents=True)
            tables = []
            for number in range(FILES):
                first, end = (self.events * at // FILES for at in (number, number + 1))
                tables.append(getattr(self.generator, source)(first, end - first))
                file = folder / f"{number:03d}.parquet"
                pq.write_table(tables[-1], file)
                os.utime(file, (number + 1, number + 1))  # a stream takes the oldest first
            self._tables[source] = pa.concat_tables(tables)
        return self._tables[source]

    def stream(self, source: str) -> DataFrame:
        """The same rows, a file in each micro-batch."""
        self.table(source)
        reading = self.spark.readStream.schema(COLUMNS[source]).option("maxFilesPerTrigger", 1)
        return reading.parquet(str(self.folder / source))


class Streaming:
    """A query while its streams run. Answers of an epoch that runs again take the place of those before."""

    def __init__(self, stage: Stage, query: str) -> None:
        self._stage = stage
        self._form = FORMS[query]
        self._answers: dict[int, pa.Table] = {}
        self._arrivals: dict[int, pa.Table] = {}
        self._epochs: Counter[str] = Counter()
        self.name = query.replace("-", "_")
        delay = f"{stage.generator.disorder_us} microseconds"
        self._batches: Batches = QUERIES[query](
            stage.pond, self.name, self._form.parameters, delay, self._collect
        )
        self._queries = []
        for source in self._form.sources:
            stream = stream_of(query, stage.stream(source))
            checkpoint = stage.folder / f"checkpoint-{self.name}-{source}"
            writer = stream.writeStream.option("checkpointLocation", str(checkpoint))
            self._queries.append(writer.foreachBatch(self._taking(source)).trigger(availableNow=True).start())

    def _collect(self, frame: DataFrame, epoch: int) -> None:
        self._answers[epoch] = frame.toArrow()

    def _taking(self, source: str) -> Any:
        def take(frame: DataFrame, epoch: int) -> None:
            if "arrival" in frame.columns:
                self._arrivals[epoch] = frame.select("bidder", "arrival").toArrow()
            self._batches[source](frame, epoch)
            self._epochs[source] += 1

        return take

    def lines(self) -> Iterator[str]:
        """How far it is, now and then, until all files have been taken; raises what ended a stream."""
        said = ""
        for running in self._queries:
            while not running.awaitTermination(LINE_EVERY_S):
                if self.line() != said:
                    said = self.line()
                    yield said
        self._batches.finish()
        yield self.line()

    def line(self) -> str:
        files = ", ".join(f"{self._epochs[source]} of {FILES} files of {source}" for source in self._batches)
        watermarks = [each.progress().update for each in self.operators()]
        rows = sum(len(table) for table in list(self._answers.values()))
        return f"{files}; watermark {_clock(min(watermarks))}; {rows:,} rows answered"

    def operators(self) -> list[mp.Window | mp.Join]:
        """The windows that the query is made of, or its join."""
        pond = self._stage.pond
        every: dict[str, Any] = {**pond.windows(), **pond.joins()}
        names = (self.name, f"{self.name}_counts", f"{self.name}_tops")
        return [every[name] for name in names if name in every]

    def late(self) -> int:
        return sum(sum(each.progress().late.values()) for each in self.operators())

    def check(self) -> Comparison:
        """All rows of answers beside DuckDB's."""
        tables = {source: self._stage.table(source) for source in self._form.sources}
        if self._arrivals:
            tables["bids"] = pa.concat_tables(self._arrivals.values())
        expected = truth(self._form.truth, **tables, **self._form.parameters)
        # What has fired nothing has no rows, and types that nobody has told.
        answers = [table for table in self._answers.values() if len(table)]
        columns = expected.column_names
        got = pa.concat_tables(
            [each.select(columns).cast(expected.schema) for each in answers] or [expected[:0]]
        )
        return compare(got, expected)


def show(stage: Stage, query: str, out: Console) -> bool:
    form = FORMS[query]
    began = time.perf_counter()
    out.print(f"\n[bold]{query}[/bold]: {form.asks}; the form of {form.whose}")
    streaming = Streaming(stage, query)
    for line in streaming.lines():
        out.print(f"  {line}")
    for operator in streaming.operators():
        out.print("\n".join(f"  {line}" for line in operator.explain().splitlines()), markup=False)
    late, result = streaming.late(), streaming.check()
    out.print(
        f"  {stage.events:,} events ({late} rows late), {result.answers:,} rows answered,"
        f" [bold]{result.wrong} wrong[/bold] ({result.lost} lost, {result.twice} twice;"
        f" {time.perf_counter() - began:.0f} s)"
    )
    return result.is_right and late == 0


def _clock(watermark: float) -> str:
    if not abs(watermark) < 2**62:
        return "none yet" if watermark < 0 else "at the end"
    return f"{datetime.fromtimestamp(watermark / MICROS, UTC):%H:%M:%S}"


# The check


class Comparison(NamedTuple):
    """Wrong are rows that DuckDB does not answer, lost those that it alone does; `twice` counts those beyond as many as it has."""

    answers: int
    wrong: int
    lost: int
    twice: int

    @property
    def is_right(self) -> bool:
        return self.wrong == self.lost == self.twice == 0


def compare(answers: pa.Table, expected: pa.Table) -> Comparison:
    """Rows in any order, with columns in the same."""
    given, wanted = (
        Counter(zip(*(column.to_pylist() for column in table.columns), strict=True))
        for table in (answers, expected)
    )
    wrong = sum(count for row, count in given.items() if row not in wanted)
    twice = sum(count - wanted[row] for row, count in given.items() if row in wanted and count > wanted[row])
    return Comparison(len(answers), wrong, (wanted - given).total(), twice)
