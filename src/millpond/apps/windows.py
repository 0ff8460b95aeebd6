"""Applications on count-based windows: how they run on Arrow tables, how they are shown on a stream, how they are checked.

Events are numbered, and come out of order; their numbers are time. A State holds what the windows need of them, and
questions come with the events: each is about one key as of a time, and is asked once. An answer is final when U has
passed its time; until then the question waits.
"""

from __future__ import annotations

import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

import millpond as mp
from millpond.apps.spark_session import spark_session
from millpond.errors import BadOption
from millpond.ops.fetch import Fetch
from millpond.ops.update import Update

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DISORDER = 200
"""By how many numbers events may come out of order."""
FEED, ASKING = "feed", "asking"  # the updater and the fetcher
EVENTS_MAX = 20_000_000
LINE_EVERY_S = 2

Answers: TypeAlias = dict[Any, Any]
"""By question."""


class Windows(ABC):
    """What an application on windows is made of. Updates and questions follow from each event for itself."""

    name: ClassVar[str]
    events_are: ClassVar[str]
    step: ClassVar[int]
    """The event with the number n has the times from n * step on, so many."""
    columns: ClassVar[str]
    """Of events, as DDL; one is their `number`."""
    update_columns: ClassVar[str]

    @abstractmethod
    def events(self, count: int, *, first: int = 0, seed: int = 1) -> pa.Table:
        """So many events, with the numbers from `first` on, in the order of their arrival."""

    @abstractmethod
    def updates(self, events: pa.Table) -> pa.Table:
        """The rows that these events bring into the State."""

    @abstractmethod
    def questions(self, events: pa.Table) -> pa.Table:
        """What is asked on the occasion of these events: the key, the time `ts`, and what else tells a question."""

    @abstractmethod
    def frame_of_questions(self, events: DataFrame) -> DataFrame:
        """The same of a DataFrame, by Spark alone."""

    @abstractmethod
    def state(self, pond: mp.Pond) -> mp.State: ...

    @abstractmethod
    def update(self, state: mp.State) -> Update:
        """Takes `updates`."""

    @abstractmethod
    def fetch(self, state: mp.State) -> Fetch:
        """Takes `questions`."""

    @abstractmethod
    def pairs(self, answers: pa.Table) -> Iterator[tuple[Hashable, Any]]:
        """Questions with their answers, as the model has them."""

    @abstractmethod
    def example(self, answers: pa.Table) -> str:
        """One of these answers in words; there are some."""

    @abstractmethod
    def model(self, events: Iterable[Mapping[str, Any]]) -> Answers:
        """All questions and their right answers: plain Python, which shares no code with what it checks."""

    @property
    def delay(self) -> int:
        """How far times come out of order."""
        return DISORDER * self.step


# On Arrow tables


class Driver:
    """An application on a pond, whose epochs are driven by whoever has it. Questions wait in its memory."""

    def __init__(self, app: Windows, pond: mp.Pond) -> None:
        self.app = app
        self.state = app.state(pond)
        self._update = app.update(self.state)
        self._fetch = app.fetch(self.state)
        self._none = app.questions(app.events(1)).slice(0, 0)
        self._waiting: dict[int, pa.Table] = {}

    def epoch(self, events: pa.Table, epoch: int) -> pa.Table:
        """The events go into the State; then all questions that can be answered, with their answers.

        An epoch that failed may be tried again as it was. One that has returned may not: its questions would come twice.
        """
        self._update(self.app.updates(events), epoch)
        self._waiting[epoch] = self.app.questions(events)
        return self.answer()

    def finish(self) -> pa.Table:
        """There are no more events: the answers to all that still waits."""
        self.state.finish(FEED)
        return self.answer()

    def answer(self) -> pa.Table:
        """The questions that can be answered by now. F follows: nobody asks for an earlier time."""
        final = self.state.progress().update
        ready, waiting = [self._none], {}
        for epoch, questions in self._waiting.items():
            is_ready = questions["ts"].to_numpy() < final
            ready.append(questions.filter(pa.array(is_ready)))
            if not is_ready.all():
                waiting[epoch] = questions.filter(pa.array(~is_ready))
        answers = self._fetch.now(pa.concat_tables(ready))
        # Events below U would be late, and so would their questions.
        self.state.report(ASKING, fetch=final)
        self._waiting = waiting
        return answers


# On a stream


class Streaming:
    """An application as a flow on files of events, which keeps the answers as files."""

    def __init__(self, spark: SparkSession, pond: mp.Pond, app: Windows, folder: str) -> None:
        self._app = app
        self._folder = folder
        self._sent = 0
        self._answered: dict[int, int] = {}  # by epoch
        self._example = ""
        self.state = app.state(pond)
        for part in ("events", "answers"):
            os.makedirs(os.path.join(folder, part))
        arriving = spark.readStream.schema(app.columns).parquet(os.path.join(folder, "events"))
        self._flow = pond.flow(app.name)
        source = self._flow.source(arriving)
        source.map(partial(frame_of_updates, app)).into(app.update(self.state))
        source.map(app.frame_of_questions).ask(app.fetch(self.state)).to(self._keep)
        self.query = self._flow.start(
            checkpoint=os.path.join(folder, "checkpoint"), processingTime="1 second"
        )

    def _keep(self, answers: DataFrame, epoch: int) -> None:
        """A file for each epoch, drains among them: their numbers are below zero."""
        table = answers.toArrow()
        pq.write_table(table, os.path.join(self._folder, "answers", f"{epoch}.parquet"))
        self._answered[epoch] = len(table)
        if len(table):
            self._example = f"; {self._app.example(table)}"

    def send(self, events: pa.Table) -> None:
        """One more file for the query to read; it is there whole or not at all."""
        hidden, file = (
            os.path.join(self._folder, "events", f"{dot}{self._sent:09d}.parquet") for dot in (".", "")
        )
        pq.write_table(events, hidden)
        os.rename(hidden, file)
        self._sent += len(events)

    def wait(self, seconds: int) -> None:
        """Lets the query work; raises what ended it."""
        self.query.awaitTermination(seconds)

    def finish(self) -> int:
        """When all is sent: U passes everything, and what waits is answered. How many rows came late."""
        self.query.processAllAvailable()
        self.query.stop()
        self.state.finish(FEED)
        pending = self._flow.drain()
        return sum(self.state.progress().late.values()) + sum(each.late for each in pending)

    def line(self) -> str:
        """How far it is."""
        progress, step = self.state.progress(), self._app.step
        return (
            f"{self._sent:,} {self._app.events_are} sent; U {progress.update / step:,.0f}, F {progress.fetch / step:,.0f}"
            f" {self._app.events_are}; {sum(self._answered.values()):,} answers{self._example}"
        )

    def answers(self) -> pa.Table:
        return pq.read_table(os.path.join(self._folder, "answers"))


def frame_of_updates(app: Windows, events: DataFrame) -> DataFrame:
    """`app.updates`, in Spark's workers."""

    def updates(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from app.updates(pa.Table.from_batches([batch])).to_batches()

    return events.mapInArrow(updates, app.update_columns)


def show(app: Windows, seconds: int, rate: int) -> bool:
    """So many events a second for so long; True if every question was answered once, and rightly."""
    if not 1 <= seconds * rate <= EVENTS_MAX:
        raise BadOption(f"{seconds} seconds of {rate:,} events are too many", option="--rate")
    out = Console(highlight=False, soft_wrap=True)
    began = time.perf_counter()
    events = app.events(seconds * rate)
    with tempfile.TemporaryDirectory(prefix=f"millpond-{app.name}-") as folder:
        out.print("starting Spark and a pond of two containers (the first time, kernels are compiled) ...")
        with (
            spark_session(app.name, compiled=False) as spark,
            mp.open(os.path.join(folder, "pond"), spark=spark, containers=2) as pond,
        ):
            streaming = Streaming(spark, pond, app, folder)
            try:
                streaming.send(events.slice(0, rate))
                streaming.query.processAllAvailable()  # the first epoch takes longer: it loads code
                for second in range(1, seconds):
                    streaming.send(events.slice(second * rate, rate))
                    streaming.wait(1)
                    if second % LINE_EVERY_S == 0:
                        out.print(f"  {streaming.line()}")
                out.print(f"  all {app.events_are} are sent")
                late = streaming.finish()
                out.print(f"  {streaming.line()}")
            finally:
                streaming.query.stop()
        out.print("comparing every answer with those of plain Python ...")
        result = compare(app.pairs(streaming.answers()), app.model(events.to_pylist()))
    out.print(
        f"{len(events):,} {app.events_are} ({late} late), {result.answers:,} answers, [bold]{result.wrong} wrong[/bold]"
        f" ({result.lost} lost, {result.twice} twice; {time.perf_counter() - began:.0f} s)"
    )
    return result.is_right and late == 0


# The check


class Comparison(NamedTuple):
    """Wrong are answers that differ, and answers to what nobody asked. `twice` counts those beyond the first of a question."""

    answers: int
    wrong: int
    lost: int
    twice: int

    @property
    def is_right(self) -> bool:
        return self.wrong == self.lost == self.twice == 0


def compare(answers: Iterable[tuple[Hashable, Any]], expected: Answers) -> Comparison:
    """Every answer beside that of the model."""
    times: Counter[Hashable] = Counter()
    wrong = 0
    for question, answer in answers:
        times[question] += 1
        wrong += question not in expected or expected[question] != answer
    lost = sum(question not in times for question in expected)
    return Comparison(times.total(), wrong, lost, times.total() - len(times))
