"""A stream that falls silent: rows that wait are answered soon after U has passed them, once, and with no new batch."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

import millpond as mp
from millpond.errors import Unavailable
from millpond.wire.questions import Pin

SOON_S = 30.0
names = (f"s{number}" for number in itertools.count())


class Sink:
    """Keeps the rows of each turn by its number; a turn that runs again replaces its own."""

    def __init__(self) -> None:
        self.turns: dict[int, list[tuple[Any, ...]]] = {}
        self.calls: list[int] = []
        self.failures = 0

    def __call__(self, answers: DataFrame, epoch: int) -> None:
        self.calls.append(epoch)
        rows = [tuple(row) for row in answers.collect()]
        if self.failures and epoch < 0:
            self.failures -= 1
            raise RuntimeError("the sink fails")
        self.turns[epoch] = rows

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        return sorted(itertools.chain(*self.turns.values()))


class Files:
    """A source of files, one a batch."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark = spark
        self._folder = folder
        self._numbers = itertools.count()
        (folder / "in").mkdir()

    def add(self, *rows: tuple[int, int]) -> None:
        lines = "".join(f'{{"k": {key}, "t": {time}}}\n' for key, time in rows)
        path = self._folder / f"{next(self._numbers)}.json"
        path.write_text(lines)
        path.rename(self._folder / "in" / path.name)

    def stream(self) -> DataFrame:
        return self._spark.readStream.schema("k long, t long").json(str(self._folder / "in"))

    def start(self, operator: Any) -> StreamingQuery:
        writer = self.stream().writeStream.foreachBatch(operator)
        return writer.option("checkpointLocation", str(self._folder / "checkpoint")).start()


@pytest.fixture
def files(spark: SparkSession, tmp_path: Path) -> Iterator[Files]:
    yield Files(spark, tmp_path)
    for query in spark.streams.active:
        query.stop()


@pytest.fixture
def state(pond: mp.Pond, spark: SparkSession) -> mp.State:
    made = pond.state(next(names), key="long", value="v long")
    feed(made, 0, 10)
    return made


def feed(state: mp.State, epoch: int, until: int) -> None:
    """Moves U."""
    update = state.update(key="k", at="t", value="v", name="feed")
    update(pa.table({"k": [1], "t": [until], "v": [until]}), epoch)


def soon(holds: Callable[[], bool], query: StreamingQuery | None = None) -> None:
    deadline = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < deadline, "not soon enough"
        assert query is None or query.isActive, query.exception()
        time.sleep(0.02)


def test_rows_that_wait_are_answered_without_a_batch_and_then_batches_go_on(
    state: mp.State, files: Files
) -> None:
    sink = Sink()
    views = state.fetch(key="k", at="t", into="v", name="views").to(sink)
    files.add((1, 5), (1, 20), (1, 30))
    query = files.start(views)
    soon(lambda: 0 in sink.turns and views.pending().rows == 2, query)
    feed(state, 1, 25)
    soon(lambda: views.pending().rows == 1, query)
    feed(state, 2, 35)
    soon(lambda: views.pending().rows == 0, query)
    assert sink.rows == [(1, 5, None), (1, 20, 10), (1, 30, 25)]
    assert [number < 0 for number in sink.calls] == [False, True, True]
    files.add((1, 31))
    soon(lambda: 1 in sink.turns, query)
    assert sink.turns[1] == [(1, 31, 25)]
    query.stop()
    feed(state, 3, 40)
    time.sleep(0.5)
    assert len(sink.calls) == 4


def test_a_query_that_is_started_again_and_finds_no_rows_answers_what_waited(
    state: mp.State, files: Files
) -> None:
    sink = Sink()
    fetch = state.fetch(key="k", at="t", into="v", name="views")
    views = fetch.to(sink)
    files.add((1, 20))
    query = files.start(views)
    soon(lambda: views.pending().rows == 1, query)
    query.processAllAvailable()
    query.stop()
    feed(state, 1, 25)
    time.sleep(0.5)
    assert sink.rows == [], "it ends with its query"
    views = fetch.to(sink)
    query = files.start(views)
    soon(lambda: views.pending().rows == 0, query)
    assert sink.rows == [(1, 20, 10)]


def test_the_function_of_an_operator_that_was_replaced_gets_no_more_rows(
    state: mp.State, files: Files
) -> None:
    before, after = Sink(), Sink()
    fetch = state.fetch(key="k", at="t", into="v", name="views")
    replaced = fetch.to(before)
    files.add((1, 20))
    query = files.start(replaced)
    soon(lambda: replaced.pending().rows == 1, query)
    query.processAllAvailable()
    query.stop()
    views = fetch.to(after)
    query = files.start(views)  # and no new rows
    feed(state, 1, 25)
    soon(lambda: views.pending().rows == 0, query)
    assert (before.rows, after.rows) == ([], [(1, 20, 10)])


def test_a_sink_that_fails_is_tried_again_and_the_next_batch_waits_for_it(
    state: mp.State, files: Files
) -> None:
    sink = Sink()
    views = state.fetch(key="k", at="t", into="v", name="views").to(sink)
    files.add((1, 20))
    query = files.start(views)
    soon(lambda: views.pending().rows == 1, query)
    sink.failures = 1
    feed(state, 1, 25)
    soon(lambda: len(sink.calls) > 1, query)
    # Whoever comes first, the turn that failed goes before the batch, and under its own number.
    files.add((1, 21))
    soon(lambda: 1 in sink.turns and views.pending().rows == 0, query)
    assert sink.calls[1] == sink.calls[2] < 0
    assert sink.calls[3] == 1
    assert sink.rows == [(1, 20, 10), (1, 21, 10)]


class HeldSink(Sink):
    """Does not return from a turn below zero before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def __call__(self, answers: DataFrame, epoch: int) -> None:
        super().__call__(answers, epoch)
        if epoch < 0:
            assert self.let_go.wait(SOON_S)


def test_a_drain_and_a_turn_of_its_own_are_not_taken_at_the_same_time(state: mp.State, files: Files) -> None:
    sink = HeldSink()
    views = state.fetch(key="k", at="t", into="v", name="views").to(sink)
    files.add((1, 20))
    query = files.start(views)
    soon(lambda: views.pending().rows == 1, query)
    query.processAllAvailable()
    feed(state, 1, 25)
    soon(lambda: len(sink.calls) == 2, query)
    drain = threading.Thread(target=views.drain, daemon=True)
    drain.start()
    drain.join(1.0)
    assert drain.is_alive()
    assert len(sink.calls) == 2, "the turn is the query's own"
    sink.let_go.set()
    drain.join(SOON_S)
    assert (sink.rows, len(sink.calls), views.pending().rows) == ([(1, 20, 10)], 2, 0)


def test_a_flow_that_is_drained_while_it_takes_a_turn_of_its_own_hands_rows_on_once(
    pond: mp.Pond, state: mp.State, files: Files, tmp_path: Path
) -> None:
    sink = HeldSink()
    flow = pond.flow("drained")
    flow.source(files.stream()).ask(state.fetch(key="k", at="t", into="v", name="views")).to(sink)
    files.add((1, 20))
    query = flow.start(str(tmp_path / "checkpoint"))
    query.processAllAvailable()
    feed(state, 1, 25)
    soon(lambda: len(sink.calls) == 2, query)
    threading.Timer(1.0, sink.let_go.set).start()
    assert [pending.rows for pending in flow.drain()] == [0]
    assert (sink.rows, len(sink.calls)) == ([(1, 20, 10)], 2)


def test_a_turn_that_outlives_its_query_ends_before_the_next_run_of_it_goes_on(
    state: mp.State, files: Files
) -> None:
    sink = HeldSink()
    fetch = state.fetch(key="k", at="t", into="v", name="views")
    views = fetch.to(sink)
    files.add((1, 20))
    query = files.start(views)
    soon(lambda: views.pending().rows == 1, query)
    query.processAllAvailable()
    feed(state, 1, 25)
    soon(lambda: len(sink.turns) == 2, query)
    query.stop()
    files.add((1, 21))
    query = files.start(fetch.to(sink))  # another operator, of the same name
    time.sleep(2.0)
    assert len(sink.calls) == 2
    sink.let_go.set()
    soon(lambda: 1 in sink.turns, query)
    assert [number < 0 for number in sink.calls] == [False, True, False]
    assert sink.rows == [(1, 20, 10), (1, 21, 10)]


def test_a_flow_that_falls_silent_goes_on_through_all_its_fetches(
    pond: mp.Pond, state: mp.State, files: Files, tmp_path: Path
) -> None:
    sink = Sink()
    flow = pond.flow("silent")
    first = flow.source(files.stream()).ask(state.fetch(key="k", at="t", into="v", name="first"))
    second = first.ask(state.fetch(key="k", at="t", into="w", name="second"))
    second.to(sink)
    files.add((1, 5), (1, 20))
    query = flow.start(str(tmp_path / "checkpoint"))
    soon(lambda: 0 in sink.turns and flow.fetchers[0].pending().rows == 1, query)
    feed(state, 1, 25)
    soon(lambda: flow.fetchers[0].pending().rows == 0 and len(sink.rows) == 2, query)
    assert sink.rows == [(1, 5, None, None), (1, 20, 10, 10)]
    files.add((1, 21))
    soon(lambda: 1 in sink.turns, query)
    assert sink.turns[1] == [(1, 21, 10, 10)]


def test_turns_of_its_own_end_with_the_query_and_begin_with_it_again(state: mp.State, files: Files) -> None:
    sink = Sink()
    views = state.fetch(key="k", at="t", into="v", name="views").to(sink)
    files.add((1, 20))
    query = files.start(views)
    soon(lambda: views.pending().rows == 1, query)
    query.processAllAvailable()
    watching = [thread for thread in threading.enumerate() if thread.name == "millpond-turns"]
    query.stop()
    feed(state, 1, 25)
    time.sleep(1.0)
    assert sink.rows == []
    query = files.start(views)  # the same operator, and no new rows
    soon(lambda: views.pending().rows == 0, query)
    assert sink.rows == [(1, 20, 10)]
    query.stop()
    soon(lambda: not any(thread.is_alive() for thread in watching))


def test_where_the_time_of_rows_that_waited_went_is_told(
    pond: mp.Pond, state: mp.State, spark: SparkSession
) -> None:
    sink = Sink()
    views = state.fetch(key="k", at="t", into="v", name="views").to(sink)
    views(spark.createDataFrame([(1, 5), (1, 20), (1, 21)], "k long, t long"), 0)
    time.sleep(0.6)
    feed(state, 1, 25)
    time.sleep(1.2)
    views(spark.createDataFrame([(1, 22)], "k long, t long"), 1)
    figures = pond.metrics()["states"][state.name]["fetchers"]["views"]
    assert (figures["rows"], figures["rows_waited"]) == (4, 2)
    assert 600 <= figures["wait_for_update_ms_mean"] < 1_200 * 4
    assert 1_200 <= figures["wait_for_turn_ms_mean"] < 2_400 * 4
    assert figures["wait_for_update_ms_p50"] >= 600
    assert 0 < figures["batch_ms_p50"] <= figures["batch_ms_p99"]


def test_queries_that_share_a_fetch_have_their_rows_handed_to_their_own_functions(
    state: mp.State, spark: SparkSession, tmp_path: Path
) -> None:
    fetch = state.fetch(key="k", at="t", into="v", name="views", history="shared")
    sinks, queries = [Sink(), Sink()], []
    try:
        for key, sink in enumerate(sinks):
            folder = tmp_path / str(key)
            folder.mkdir()
            source = Files(spark, folder)
            source.add((key, 20), (key, 30))
            queries.append(source.start(fetch.to(sink)))
            queries[-1].processAllAvailable()
        views = fetch.to(Sink())
        for epoch, (until, left) in enumerate([(25, 2), (35, 0)], 1):
            feed(state, epoch, until)
            soon(lambda left=left: views.pending().rows == left)  # type: ignore[misc]
        for key, sink in enumerate(sinks):
            assert [row[:2] for row in sink.rows] == [(key, 20), (key, 30)]
    finally:
        for query in queries:
            query.stop()


def test_a_flow_whose_turn_broke_off_between_two_fetches_goes_on(
    pond: mp.Pond, state: mp.State, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = pond.state(next(names), key="long", value="v long")
    feed(other, 0, 10)
    sinks = [Sink(), Sink()]
    flow = pond.flow("broken")
    source = flow.source(files.stream())
    for sink, (name, asked) in zip(sinks, [("first", state), ("second", other)], strict=True):
        source.ask(asked.fetch(key="k", at="t", into="v", name=name)).to(sink)
    files.add((1, 20), (1, 30))
    query = flow.start(str(tmp_path / "checkpoint"))
    query.processAllAvailable()
    call, lost = flow.client.call, [True]

    def lossy(message: Any) -> Any:
        if isinstance(message, Pin) and message.fetcher == "second" and lost:
            lost.clear()
            raise Unavailable("lost on the way")
        return call(message)

    monkeypatch.setattr(flow.client, "call", lossy)
    feed(state, 1, 25)
    soon(lambda: not lost, query)
    feed(state, 2, 35)
    soon(lambda: flow.fetchers[0].pending().rows == 0, query)
    other.finish("feed")
    soon(lambda: flow.fetchers[1].pending().rows == 0, query)
    for sink in sinks:
        assert [row[:2] for row in sink.rows] == [(1, 20), (1, 30)]
