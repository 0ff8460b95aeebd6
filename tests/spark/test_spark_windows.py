"""Windows on DataFrames. On a stream that falls silent the last of them fire once, by themselves, and rows that come later go on."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

import millpond as mp

SOON_S = 60.0
GAP_S = 10
Visit = tuple[int, int, int]  # key, second, price


class Kept:
    """Rows of each turn by its number; a turn that runs again replaces its own."""

    def __init__(self) -> None:
        self.turns: dict[int, list[tuple[Any, ...]]] = {}
        self.calls: list[int] = []

    def __call__(self, frame: DataFrame, epoch: int) -> None:
        self.calls.append(epoch)
        self.turns[epoch] = [tuple(map(_plain, row)) for row in frame.collect()]

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        return sorted(itertools.chain(*self.turns.values()))


def _plain(value: Any) -> Any:
    return (
        int(value.replace(tzinfo=value.tzinfo or UTC).timestamp()) if isinstance(value, datetime) else value
    )


def sessions(visits: Iterable[Visit]) -> list[tuple[Any, ...]]:
    """In plain Python: start, end, key, how many visits, and the highest price."""
    made: list[tuple[Any, ...]] = []
    for key, of_key in itertools.groupby(sorted(visits), key=lambda visit: visit[0]):
        parts: list[list[Visit]] = []
        for visit in of_key:
            if not parts or visit[1] - parts[-1][-1][1] >= GAP_S:
                parts.append([])
            parts[-1].append(visit)
        made += [
            (part[0][1], part[-1][1] + GAP_S, key, len(part), max(price for _, _, price in part))
            for part in parts
        ]
    return sorted(made)


def soon(holds: Callable[[], bool], query: StreamingQuery) -> None:
    deadline = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < deadline, "not soon enough"
        assert query.isActive, query.exception()
        time.sleep(0.02)


def test_the_last_sessions_fire_once_when_a_stream_falls_silent_and_later_rows_go_on(
    pond: mp.Pond, spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    numbers = itertools.count()

    def add(visits: Iterable[Visit]) -> None:
        file = tmp_path / f"{next(numbers)}.json"
        lines = (json.dumps({"k": key, "t": second, "price": price}) for key, second, price in visits)
        file.write_text("\n".join(lines))
        file.rename(tmp_path / "in" / file.name)

    window = pond.window(
        "visits",
        key="k long",
        window=mp.session(f"{GAP_S} seconds"),
        aggregate={"visits": mp.count(), "highest": mp.largest("price")},
    )
    fired, late = Kept(), Kept()
    over = window.over(key="k", at="at", idle="1 second", late=late, name="bids")
    stream = spark.readStream.schema("k long, t long, price long").json(str(tmp_path / "in"))
    first = [(1, 0, 5), (1, 9, 7), (2, 4, 1), (1, 30, 2), (3, 30, 3)]
    add(first)
    query = (
        stream.selectExpr("k", "timestamp_seconds(t) AS at", "price")
        .writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
        .foreachBatch(over.to(fired))
        .start()
    )
    try:
        soon(lambda: 0 in fired.turns, query)
        # By the watermark, which is at 30, two are over; the others end with the silence.
        soon(lambda: len(fired.rows) == 4, query)
        assert fired.rows == sessions(first)
        assert sorted(fired.turns[0]) == [row for row in fired.rows if row[1] <= 30]
        assert window.now().num_rows == 0
        calls = len(fired.calls)
        time.sleep(2.0)
        assert len(fired.calls) == calls, "once is enough"
        second = [(1, 50, 4), (2, 55, 6), (1, 58, 9)]
        too_late = [(1, 12, 8), (9, 2, 8)]
        add(second + too_late)
        soon(lambda: len(fired.rows) == 6, query)
        assert fired.rows == sessions(first + second)
        assert late.rows == sorted(too_late)
        assert sum(number < 0 for number in fired.calls) == 2, "twice it was silent"
        assert window.progress().late == {"bids": 2}
    finally:
        query.stop()
        pond.forget(window)


def test_windows_of_frames_that_are_no_streams_and_their_updates(pond: mp.Pond, spark: SparkSession) -> None:
    window = pond.window(
        "static", key="k long", window=mp.session(10), aggregate={"rows": mp.count()}, emit="update"
    )
    operator = window.over(key="k", at="t", delay=30)

    def updates(rows: list[tuple[int, int]], epoch: int) -> list[tuple[Any, ...]]:
        frame = spark.createDataFrame(rows, "k long, t long").repartition(2)
        columns = ("window_start", "window_end", "k", "rows", "retracted")
        return sorted(
            (tuple(row) for row in operator(frame, epoch).select(*columns).collect()), key=lambda row: row[:3]
        )

    both = [(1, 15, 1, 2, False), (3, 13, 2, 1, False), (20, 30, 1, 1, False)]
    assert updates([(1, 1), (1, 5), (2, 3), (1, 20)], 0) == both
    # What comes now belongs to both sessions of 1: the second is taken back.
    merged = [(1, 30, 1, 4, False), (20, 30, 1, None, True)]
    assert updates([(1, 12)], 1) == merged
    assert updates([(1, 12)], 1) == merged, "the same again"
    assert sorted(row["window_start"] for row in window.now().to_pylist()) == [1, 3]
    pond.forget(window)


@pytest.mark.parametrize("window", [mp.tumbling(100), mp.sliding(200, 100), mp.session(50)], ids=str)
def test_tasks_send_what_rows_come_to(pond: mp.Pond, spark: SparkSession, window: Any) -> None:
    made = pond.window("cells", key="k long", window=window, aggregate={"rows": mp.count()})
    source = made.over(key="k", at="t", delay=1000)
    # 5 keys in 2 windows each, in 4 tasks.
    frame = spark.range(0, 4000, numPartitions=4).selectExpr("id % 5 AS k", "id % 2 * 100 + id % 7 AS t")
    assert source(frame, 0).count() == 0
    assert 10 <= pond.metrics()["windows"]["cells"]["rows"] <= 4 * 10
    copies = 2 if window.kind == "sliding" else 1
    assert sum(row["rows"] for row in made.now().to_pylist()) == copies * 4000
    pond.forget(made)
