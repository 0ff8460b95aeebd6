"""Flink's side of the NEXMark benchmark: a program for an environment that has PyFlink and need not have Millpond.

python -I nexmark_flink_job.py    takes a run by line of its input, as JSON, and says what it took in a line of its output

All runs are jobs of one JVM, so that what it has compiled serves the next ones, as in Spark's session.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond.bench.flink_cluster import (
        Job,
        Patience,
        cpu_seconds,
        files_of,
        free_port,
        table_environment,
    )
else:  # where Millpond need not be: last, so that no other module of this folder is taken for one of Flink's
    sys.path.append(str(Path(__file__).parent))
    from flink_cluster import Job, Patience, cpu_seconds, files_of, free_port, table_environment

SILENT_S_MAX = 300.0
POLL_S = 0.5
"""To look takes CPU time, which counts."""
STILL_S = 1.0
"""What has not moved for so long has come to its end."""


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """One job: rows of `sources` that warm up, then those that count, put into its folders at once.

    What goes to a sink named `answers` is written into files, all else is dropped.

    It has ended when the last watermark has come to every operator, and nothing moves any more. `cpu_s` is up to then, give
    or take a poll; the clock's end is in the answers.
    """
    folder = Path(asked["folder"])
    port = free_port()
    tables = table_environment(folder, port, asked["parallelism"], asked["settings"])
    sources = asked["sources"]
    for source, columns in sources.items():
        (folder / "sources" / source).mkdir(parents=True)
        files = files_of(folder / "sources" / source, watched=True)
        tables.execute_sql(f"CREATE TABLE {source} ({columns}) WITH ({files})")
    statements = tables.create_statement_set()
    for sink, (columns, query) in asked["sinks"].items():
        to = files_of(folder / sink) if sink == "answers" else "'connector' = 'blackhole'"
        tables.execute_sql(f"CREATE TABLE {sink} ({columns}) WITH ({to})")
        statements.add_insert_sql(f"INSERT INTO {sink} {query}")
    reading = Reading(Job(port, statements.execute().get_job_client()))
    reading.wait(reading.begun)
    rows = 0
    for phase in ("warm", "timed"):
        rows += asked["rows"][phase]
        began, cpu = time.time(), cpu_seconds()
        for source in sources:
            (folder / "staged" / phase / source).rename(folder / "sources" / source / phase)
        last = asked["watermark"] if phase == "timed" else None
        ended = reading.wait(partial(reading.has_passed, rows, last))
    reading.job.stop(folder / "savepoint")
    return {"began_ms": began * 1e3, "cpu_s": ended - cpu}


class Reading:
    """How far a job is."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._vertices = job.look()["vertices"]
        self._counts: dict[str, int] = {}

    def begun(self) -> bool:
        return all(vertex["status"] == "RUNNING" for vertex in self.job.look()["vertices"])

    def has_passed(self, rows: int, watermark: int | None) -> bool:
        """Whether so many rows have been read, and, if one is given, this watermark has come everywhere."""
        read = sum(
            count
            for name, count in self._counts.items()
            if name.startswith("Source__") and name.endswith(".numRecordsOut")
        )
        return read >= rows and (watermark is None or self._watermark() >= watermark)

    def wait(self, is_so: Callable[[], bool]) -> float:
        """Until it is, and nothing moves any more. The CPU seconds when all was first seen as it is then."""
        patience = Patience(SILENT_S_MAX)
        since, cpu = time.monotonic(), cpu_seconds()
        while True:
            counts = self._look()
            if counts != self._counts:
                self._counts, since, cpu = counts, time.monotonic(), cpu_seconds()
            if time.monotonic() - since >= STILL_S and is_so():
                return cpu
            patience.see(counts)
            time.sleep(POLL_S)

    def _look(self) -> dict[str, int]:
        self.job.look()
        counts = {}
        for vertex in self._vertices:
            counts.update(self.job.metrics(vertex["id"], (".numRecordsIn", ".numRecordsOut")))
        return counts

    def _watermark(self) -> int:
        """The lowest that has come to an operator behind the sources. One has fired what a watermark ends before it hands it on."""
        behind = [vertex["id"] for vertex in self._vertices if not vertex["name"].startswith("Source")]
        told = [self.job.metrics(vertex, (".currentInputWatermark",), "min") for vertex in behind]
        return min((lowest for each in told for lowest in each.values()), default=-1)


def main() -> None:
    # What else writes to the output, a Java machine for one, must not come between the lines.
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        said.write(json.dumps(run(json.loads(line))) + "\n")
        said.flush()


if __name__ == "__main__":
    main()
