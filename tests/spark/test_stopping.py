"""A query that is stopped in the middle of a batch ends quietly, and goes on as if it had not been."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stopping_job import FILES, ROWS, STOPS

import millpond as mp
from millpond.errors import QueryStopped
from millpond.ops import frames
from millpond.ops.interruptions import ends_with_query

JOB = Path(__file__).with_name("stopping_job.py")
RUN = "39af603c-cde2-4da9-9acd-e91d2fc7c371"


@pytest.mark.long
def test_a_query_that_is_stopped_ends_quietly_and_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, str(JOB), str(tmp_path / "job")]
    # Spark gives a worker two seconds to end, whose task was killed.
    settings = {"PYSPARK_SUBMIT_ARGS": "--conf spark.python.task.killTimeout=100ms pyspark-shell"}
    job = subprocess.run(command, capture_output=True, text=True, timeout=250, env={**os.environ, **settings})
    assert job.returncode == 0, job.stderr[-4000:]
    rows = FILES * ROWS
    assert job.stdout.splitlines() == [
        *["stopped"] * STOPS,
        f"update: {rows}, 0",
        "stopped",
        f"flow: {rows}, {rows}",
        "stopped",
        f"transactions: {rows}, {rows}",
    ]
    for word in ("StackOverflowError", "Traceback", "Py4JJavaError", "\tat "):
        assert word not in job.stderr, job.stderr[-4000:]


class Frame:
    pass


@pytest.fixture
def query(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The query that all frames are of, as far as an operator looks at it; it is being stopped."""
    query = SimpleNamespace(active=False, isActive=lambda: query.active, runId=lambda: run)
    run = SimpleNamespace(toString=lambda: RUN)
    monkeypatch.setattr(frames, "is_frame", lambda rows: isinstance(rows, Frame))
    monkeypatch.setattr(frames, "running_query", lambda frame: query)
    return query


@ends_with_query
def failing(rows: Any, error: Exception) -> None:
    raise error


def wrapped(error: Exception) -> Exception:
    """As a sink may wrap what it met."""
    wrapper = ValueError("the sink failed")
    wrapper.__cause__ = error
    return wrapper


INTERRUPTIONS = [
    RuntimeError(
        "An error occurred while calling o105.collectToPython.\n: java.lang.InterruptedException\n\tat ..."
    ),
    OSError(": java.io.InterruptedIOException: java.lang.InterruptedException"),
    RuntimeError(f"[SPARK_JOB_CANCELLED] Job 2 cancelled part of cancelled job group {RUN}"),
    wrapped(RuntimeError("java.nio.channels.ClosedByInterruptException")),
]


@pytest.mark.parametrize("error", INTERRUPTIONS)
def test_an_interruption_is_short_and_says_what_spark_looks_for(
    query: SimpleNamespace, error: Exception
) -> None:
    with pytest.raises(QueryStopped) as raised:
        failing(Frame(), error)
    trace = "".join(traceback.format_exception(raised.value))
    before, _, after = trace.partition("py4j.protocol.Py4JJavaError: An error occurred while calling")
    assert before
    assert "java.lang.InterruptedException" in after
    assert len(after) < 200
    assert str(error) not in trace


@pytest.mark.parametrize("error", INTERRUPTIONS)
def test_an_interruption_of_a_query_that_goes_on_stays_what_it_is(
    query: SimpleNamespace, error: Exception
) -> None:
    query.active = True
    with pytest.raises(type(error)) as raised:
        failing(Frame(), error)
    assert raised.value is error
    query.active = False
    with pytest.raises(type(error)) as raised:
        failing("rows of no query", error)
    assert raised.value is error


@pytest.mark.parametrize(
    "error", [ValueError("mine"), mp.errors.NullKey("a key is null"), RuntimeError("Job 2 cancelled")]
)
def test_an_error_that_is_no_interruption_stays_whole(query: SimpleNamespace, error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        failing(Frame(), error)
    assert raised.value is error


def test_an_operator_inside_another_says_it_once(query: SimpleNamespace) -> None:
    @ends_with_query
    def outer(rows: Any) -> None:
        failing(rows, INTERRUPTIONS[0])

    with pytest.raises(QueryStopped) as raised:
        outer(Frame())
    assert "".join(traceback.format_exception(raised.value)).count("Py4JJavaError") == 1
