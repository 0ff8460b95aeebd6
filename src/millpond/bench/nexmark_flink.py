"""A contender of the NEXMark benchmark: Flink SQL on RocksDB, in a virtual environment of its own.

What Flink's packages read of files is CSV and JSON, not Parquet: its rows are in CSV files, with the columns of the query
and none more. The rows of a phase are dealt out to one file for each core, in the order of arrival, as partitions of a log
would be, and put where Flink looks for files at once. The closing row is the last of each file.

The clock stops with the last answer: Flink writes the time beside each. CPU time is of Flink's processes alone, and goes on
until a look finds that nothing moves any more, half a second later at most.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv

from millpond.bench.flink_environment import (
    NO_HEADER,
    REQUIREMENT,
    cause,
    failed,
    job_command,
    job_environment,
)
from millpond.bench.nexmark_flink_sql import (
    ARROW_TYPES,
    FORMS,
    Statement,
    as_answered,
    as_read,
    statement,
)
from millpond.bench.nexmark_load import CLOSING_ID, QUERIES, Run, Staged, Workload

JOB = Path(__file__).with_name("nexmark_flink_job.py")
CHECKPOINT_S = 2
ENDS_S_MAX = 30
SETTINGS = {
    # Aggregations of windows gather rows before they ask their state, whether mini-batches are on or not; those of sessions
    # and joins by window never do. So Flink's documentation has it, and there is nothing to set.
    "taskmanager.memory.managed.size": "1g",
    "execution.checkpointing.interval": f"{CHECKPOINT_S} s",
    "execution.checkpointing.incremental": "true",
    # Of event time, 200 ms as is Flink's default: a microsecond is a millisecond to it. A row that is so far beyond the
    # last watermark sends one.
    "pipeline.auto-watermark-interval": "200 s",
}


class Took(NamedTuple):
    began_ms: float
    cpu_s: float


class FlinkSql:
    """Queries as Flink SQL says them, each run a job of one process."""

    name = "flink"

    def __init__(self, job: FlinkJob, progress: Callable[[str], None]) -> None:
        self._job = job
        self._progress = progress
        self._reading_cpu_s: dict[str, float] = {}

    def supports(self, query: str) -> bool:
        return query in FORMS

    def run(self, workload: Workload, query: str) -> Run:
        made = statement(query, workload.parameters(query), workload.delay_us(query))
        if query not in self._reading_cpu_s:
            # A first job for nothing but its rows. So the Java machine is not cold either when the query begins.
            reading = self._take(workload, query, made, counts=False)[0].cpu_s
            self._reading_cpu_s[query] = reading
            self._progress(
                f"  of its CPU time {reading:.2f} s are for reading CSV: the same files, and no query"
            )
        took, answers = self._take(workload, query, made, counts=True)
        if not len(answers):
            raise RuntimeError(f"Flink has answered nothing to {query}")
        said_ms = pc.max(answers["said"]).cast(pa.int64()).as_py()
        return Run(
            seconds=(said_ms - took.began_ms) / 1e3,
            cpu_seconds=took.cpu_s,
            events=workload.events(query),
            result=as_answered(answers.drop_columns(["said"]), made.origin_us),
            extras={
                "cpu_by_kind": {"java": took.cpu_s, "containers": 0.0},
                # The same files read, and their rows dropped: what CSV costs.
                "reading_cpu_s": self._reading_cpu_s[query],
                "flink": SETTINGS,
            },
        )

    def _take(self, workload: Workload, query: str, made: Statement, counts: bool) -> tuple[Took, pa.Table]:
        staged = workload.stage(query)
        folder = staged.run_folder / "flink"
        files = os.cpu_count() or 1
        written = write_files(staged, query, folder, made, files)
        took = self._job.run(
            {
                "folder": str(folder),
                "parallelism": files,
                "settings": SETTINGS,
                "sources": made.sources,
                "sinks": made.sinks if counts else made.drops,
                "rows": written.rows,
                "watermark": written.closing - made.behind if counts else None,
            }
        )
        answers = read_answers(folder / "answers", made.columns) if counts else pa.table({})
        shutil.rmtree(folder, ignore_errors=True)  # Flink is still clearing up, too
        return took, answers


class FlinkJob:
    """A process that runs jobs, one after the other, until it is closed."""

    def __init__(self, python: Path, folder: Path) -> None:
        self._log = folder / "flink.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(  # noqa: S603 - a path of our own, constant arguments
                job_command(python, JOB, []),
                env=job_environment(folder),
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def run(self, asked: dict[str, Any]) -> Took:
        """Raises what the process died of."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("Flink's job has no pipes")
        try:
            stdin.write(json.dumps(asked) + "\n")
            stdin.flush()
            told = stdout.readline()
        except BrokenPipeError:
            told = ""
        if not told:
            code = self._process.wait(ENDS_S_MAX)
            raise failed(cause(self._log.read_text()) or f"exit code {code}")
        return Took(**json.loads(told))

    def close(self) -> None:
        """Its Java machine ends with it."""
        try:
            self._process.communicate(timeout=ENDS_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


@contextmanager
def flink_sql(python: Path, folder: Path, progress: Callable[[str], None]) -> Iterator[FlinkSql]:
    job = FlinkJob(python, folder)
    try:
        yield FlinkSql(job, progress)
    finally:
        job.close()


def setup() -> str:
    """What it is, in a line."""
    options = ", ".join(f"{name}={value}" for name, value in SETTINGS.items())
    return (
        f"flink: {REQUIREMENT}, RocksDB, {os.cpu_count()} slots, {options}, no mini-batches to set for windows; reads the rows as CSV,"
        " since its packages have no Parquet: one file for each slot, all at once, where the others take file by file, and times in"
        " microseconds as its milliseconds;"
        " the clock stops with the last answer, which no checkpoint need hold yet"
    )


# Files


class Written(NamedTuple):
    rows: dict[str, int]
    """By phase, closing rows among them."""
    closing: int
    """The time of closing rows, as Flink has it."""


def write_files(staged: Staged, query: str, folder: Path, made: Statement, files: int) -> Written:
    """The rows of each phase and source, dealt out; the closing row comes last in each timed file."""
    tables = {}
    for phase in ("warm", "timed"):
        staged.put(phase)
        for source, described in QUERIES[query].columns.items():
            columns = [column.split()[0] for column in described.split(", ")]
            parts = sorted((staged.folder(source) / phase).iterdir())
            rows = pa.concat_tables(pq.read_table(part, columns=columns) for part in parts)
            tables[phase, source] = as_read(rows, made.origin_us)
    closing = max(pc.max(rows["date_time"]).as_py() for rows in tables.values()) + made.closes_after
    written = {"warm": 0, "timed": 0}
    for (phase, source), rows in tables.items():
        into = folder / "staged" / phase / source
        into.mkdir(parents=True)
        for number in range(files):
            part = rows.take(np.arange(number, len(rows), files))
            if phase == "timed":
                part = pa.concat_tables([part, closing_row(part.schema, closing)])
            csv.write_csv(part, into / f"{number}.csv", NO_HEADER)
            written[phase] += len(part)
    return Written(written, closing)


def closing_row(schema: pa.Schema, closing: int) -> pa.Table:
    row = {column.name: "" if pa.types.is_string(column.type) else CLOSING_ID for column in schema}
    return pa.Table.from_pylist([{**row, "date_time": closing}], schema)


def read_answers(folder: Path, columns: Sequence[str]) -> pa.Table:
    """All that is complete."""
    types = {name: ARROW_TYPES.get(name, pa.int64()) for name in columns}
    reading = csv.ReadOptions(column_names=list(columns))
    converting = csv.ConvertOptions(column_types=types)
    empty = pa.schema(types.items()).empty_table()
    files = sorted(file for file in folder.iterdir() if not file.name.startswith("."))
    return pa.concat_tables(
        [
            empty,
            *(
                csv.read_csv(file, reading, convert_options=converting)
                for file in files
                if file.stat().st_size
            ),
        ]
    )
