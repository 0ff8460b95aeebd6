"""Streams from the sources that Spark ships, and several Spark applications on one pond."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from other_application import update_shared
from pyspark.sql import DataFrame, SparkSession

import millpond as mp

OTHER = Path(__file__).parent / "other_application.py"


@contextmanager
def lines_on_a_socket(lines: list[str]) -> Iterator[int]:
    """A server on loopback that sends the lines to whoever connects first; its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = threading.Event()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall("".join(f"{line}\n" for line in lines).encode())
                done.wait(60)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            done.set()
            thread.join()


def wait_for(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.1)


def test_updates_from_a_socket_and_views_from_the_rate_sources(
    pond: mp.Pond, spark: SparkSession, tmp_path: Path
) -> None:
    state = pond.state("s", key="long", value="v string")
    feed = state.update(key="k", at="t", value="v", name="feed")
    with lines_on_a_socket([f"{number % 5},{number},v{number}" for number in range(100)]) as port:
        text = spark.readStream.format("socket").option("host", "127.0.0.1").option("port", port).load()
        rows = text.selectExpr("split(value, ',') AS f").selectExpr(
            "CAST(f[0] AS LONG) AS k", "CAST(f[1] AS LONG) AS t", "f[2] AS v"
        )
        query = rows.writeStream.foreachBatch(feed).option("checkpointLocation", str(tmp_path / "c0")).start()
        wait_for(lambda: state.progress().update >= 99)
        query.stop()
    state.finish("feed")
    for number, source in enumerate(("rate", "rate-micro-batch")):
        asked = spark.readStream.format(source)
        rate = "rowsPerSecond" if source == "rate" else "rowsPerBatch"
        views = asked.option(rate, 50).load().selectExpr("value % 5 AS k", "value % 100 AS t")
        wrong: list[Any] = []
        seen: list[int] = []

        def check(answers: DataFrame, epoch: int, wrong: list[Any] = wrong, seen: list[int] = seen) -> None:
            for key, at, value in answers.collect():
                newest = max((time for time in range(at + 1) if time % 5 == key), default=None)
                seen.append(at)
                if value != (None if newest is None else f"v{newest}"):
                    wrong.append((key, at, value))

        asking = state.fetch(key="k", at="t", into="v", name=f"views_{number}").to(check)
        checkpoint = str(tmp_path / f"c{number + 1}")
        query = views.writeStream.foreachBatch(asking).option("checkpointLocation", checkpoint).start()
        wait_for(lambda seen=seen: len(seen) >= 100)
        query.stop()
        assert not wrong


@pytest.mark.long
def test_two_spark_applications_update_one_state(pond: mp.Pond, pond_root: Path, spark: SparkSession) -> None:
    state = pond.state("shared", key="long", value="v long")
    for name in ("ours", "theirs"):
        # Both are there before one of them can finish.
        state.update(key="k", at="t", value="v", name=name)
    command = [sys.executable, str(OTHER), pond.address, str(pond_root / "token"), "theirs", "2"]
    with subprocess.Popen(command) as other:
        update_shared(pond, spark, "ours", 1)
        assert other.wait(110) == 0
    assert state.progress().update == float("inf")
    assert sorted(state.snapshot().to_pylist(), key=lambda row: row["key"]) == [
        {"key": 1, "time": 29, "v": 102},
        {"key": 2, "time": 29, "v": 202},
    ]
