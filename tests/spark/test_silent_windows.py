"""Windows, chains and joins on streams that fall silent: also after a restart, and where the sink fails."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

import millpond as mp

SOON_S = 60.0
names = (f"silent{number}" for number in itertools.count())


class Sink:
    """Keeps the rows of each turn by its number; a turn that runs again replaces its own."""

    def __init__(self) -> None:
        self.turns: dict[int, list[tuple[Any, ...]]] = {}
        self.calls: list[int] = []
        self.failures = 0

    def __call__(self, frame: DataFrame, number: int) -> None:
        self.calls.append(number)
        if number < 0 and self.failures:
            self.failures -= 1
            raise ConnectionError("the sink is away")
        self.turns[number] = [tuple(map(plain, row)) for row in frame.collect()]

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        return sorted(itertools.chain(*self.turns.values()))


def plain(value: Any) -> Any:
    return (
        int(value.replace(tzinfo=value.tzinfo or UTC).timestamp()) if isinstance(value, datetime) else value
    )


class Stream:
    """A source of files, one a batch, and a checkpoint."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark = spark
        self._folder = folder
        self._numbers = itertools.count()
        (folder / "in").mkdir(parents=True)

    def add(self, *rows: tuple[int, int]) -> None:
        file = self._folder / f"{next(self._numbers)}.json"
        file.write_text("\n".join(json.dumps({"k": key, "t": second}) for key, second in rows))
        file.rename(self._folder / "in" / file.name)

    def start(self, operator: Callable[[Any, int], None]) -> StreamingQuery:
        rows = self._spark.readStream.schema("k long, t long").json(str(self._folder / "in"))
        writer = rows.selectExpr("k", "timestamp_seconds(t) AS at", "t AS v").writeStream
        return writer.option("checkpointLocation", str(self._folder / "state")).foreachBatch(operator).start()


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> Iterator[Stream]:
    yield Stream(spark, tmp_path / "one")
    for query in spark.streams.active:
        query.stop()


def soon(holds: Callable[[], bool], *queries: StreamingQuery) -> None:
    deadline = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < deadline, "not soon enough"
        for query in queries:
            assert query.isActive, query.exception()
        time.sleep(0.02)


def visits(pond: mp.Pond, name: str, window: Any = None) -> mp.Window:
    window = window or mp.tumbling("10 seconds")
    return pond.window(name, key="k long", window=window, aggregate={"rows": mp.count()})


def test_a_query_that_is_started_again_and_gets_no_rows_fires_its_last_windows(
    pond: mp.Pond, stream: Stream
) -> None:
    window, before, sink = visits(pond, next(names)), Sink(), Sink()
    stream.add((1, 1), (1, 12))
    query = stream.start(window.over(at="at", idle="1 hour").to(before))
    query.processAllAvailable()
    query.stop()
    query = stream.start(window.over(at="at", idle="1 second").to(sink))
    soon(lambda: len(sink.rows) == 1, query)
    assert (before.rows, sink.rows) == ([(0, 10, 1, 1)], [(10, 20, 1, 1)])
    pond.forget(window)


@pytest.mark.parametrize("restart", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_sink_that_fails_in_a_turn_of_its_own_gets_it_before_the_next_rows(
    pond: mp.Pond, stream: Stream, restart: bool
) -> None:
    window, sink = visits(pond, next(names)), Sink()
    stream.add((1, 1))
    query = stream.start(window.over(at="at", idle="1 second").to(sink))
    sink.failures = 1
    soon(lambda: len(sink.calls) > 1, query)
    if restart:
        query.stop()
        stream.add((1, 25))
        query = stream.start(window.over(at="at", idle="1 second").to(sink))
    else:
        stream.add((1, 25))
    soon(lambda: len(sink.rows) == 2, query)
    assert sink.rows == [(0, 10, 1, 1), (20, 30, 1, 1)]
    again = sink.calls.index(sink.calls[1], 2)
    assert again < sink.calls.index(1), "what is owed goes first"
    pond.forget(window)


def test_a_chain_fires_all_its_windows_after_a_restart_without_rows(pond: mp.Pond, stream: Stream) -> None:
    first, sink = visits(pond, next(names)), Sink()
    aggregate = {"windows": mp.count(), "rows": mp.total("rows")}
    second = pond.window(next(names), key="k long", window=mp.session("30 seconds"), aggregate=aggregate)

    def chained(idle: str) -> Any:
        return first.over(at="at", idle=idle).then(second.over(at="window_time")).to(sink)

    stream.add((1, 1), (1, 2), (2, 3), (1, 12))
    query = stream.start(chained("1 hour"))
    query.processAllAvailable()
    query.stop()
    assert sink.rows == []
    query = stream.start(chained("1 second"))
    soon(lambda: len(sink.rows) == 2, query)
    assert [row[2:] for row in sink.rows] == [(2, 1, 1), (1, 2, 3)]
    stream.add((1, 5), (1, 200))
    soon(lambda: len(sink.rows) == 3, query)
    assert sink.rows[2][2:] == (1, 1, 1)
    for window in (first, second):
        pond.forget(window)


def test_both_sides_of_a_join_fall_silent(
    pond: mp.Pond, spark: SparkSession, stream: Stream, tmp_path: Path
) -> None:
    join = pond.join(
        next(names), key="k long", left="l long", right="r long", window=mp.tumbling("10 seconds")
    )
    other, sinks = Stream(spark, tmp_path / "other"), (Sink(), Sink())

    def sides() -> list[StreamingQuery]:
        left = join.left(at="at", value="v", idle="1 second").to(sinks[0])
        right = join.right(at="at", value="v", idle="1 second").to(sinks[1])
        return [stream.start(left), other.start(right)]

    stream.add((1, 1), (1, 12), (2, 13))
    other.add((1, 2), (1, 3), (1, 14))
    queries = sides()
    soon(lambda: len(sinks[0].rows + sinks[1].rows) == 3, *queries)
    expected = [(0, 10, 1, 1, 2), (0, 10, 1, 1, 3), (10, 20, 1, 12, 14)]
    assert sorted(sinks[0].rows + sinks[1].rows) == expected
    for query in queries:
        query.stop()
    stream.add((1, 5), (1, 41))
    other.add((1, 42))
    queries = sides()
    soon(lambda: len(sinks[0].rows + sinks[1].rows) == 4, *queries)
    assert sorted(sinks[0].rows + sinks[1].rows) == [*expected, (40, 50, 1, 41, 42)]
    assert join.progress().late == {"left": 1, "right": 0}
    for query in queries:
        query.stop()
    pond.forget(join)
