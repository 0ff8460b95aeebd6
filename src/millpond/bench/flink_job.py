"""Flink's side of the adcamp benchmark: a program for an environment that has PyFlink and need not have Millpond.

python -I flink_job.py bench FOLDER PARALLELISM    answers the views that `adcamp_flink` has laid out in FOLDER
python -I flink_job.py late                        shows what a version that comes late does to the answers
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pyflink.common import Configuration  # type: ignore[import-not-found]
from pyflink.table import EnvironmentSettings, TableEnvironment  # type: ignore[import-not-found]
from pyflink.table.expressions import col  # type: ignore[import-not-found]

POLL_S = 0.2
SILENT_S_MAX = 900.0
SETTINGS = {
    "execution.runtime-mode": "STREAMING",
    "table.local-time-zone": "UTC",
    # As Flink's documentation advises: timers on the heap while they fit there, memory for RocksDB from Flink's own
    # budget, objects used again, since RocksDB keeps none of them. Mini-batches are left out: they serve aggregations and
    # regular joins, and a temporal join takes its rows one by one. No checkpoint is made while views are answered.
    "state.backend.type": "rocksdb",
    "state.backend.rocksdb.timer-service.factory": "HEAP",
    "taskmanager.memory.managed.size": "4g",
    "pipeline.object-reuse": "true",
    "execution.checkpointing.storage": "filesystem",
    # A watermark goes out with the row that raises it, not with the next tick of a clock.
    "pipeline.auto-watermark-interval": "0 ms",
    "rest.address": "127.0.0.1",
    "rest.bind-address": "127.0.0.1",
    "metrics.fetcher.update-interval": "200",
}
ANSWERS = """
    SELECT q.`view`, v.campaign, CURRENT_ROW_TIMESTAMP() AS said
    FROM asked AS q LEFT JOIN versions FOR SYSTEM_TIME AS OF q.at_time AS v ON q.ad = v.ad
"""


# The benchmark


def bench(folder: Path, parallelism: int) -> None:
    """Loads the versions, then answers the views, round by round; the first round warms up.

    A round is a folder of files, one for each reader. It is asked when the round before has been answered, as the last
    row of each file lets the watermark pass all of its views. `began_ms` is when it was handed to Flink; when each
    answer was given is in the answers. So what is measured is reading a round, the join and writing its answers: not
    the start of Flink, not the compilation of the query, and not the versions, which are in RocksDB by then.
    """
    port = free_port()
    tables = table_environment(folder, port, parallelism)
    # Held back until the files end: no view is answered before all versions are there.
    tables.execute_sql(f"""
        CREATE TABLE versions (
            ad BIGINT, ts BIGINT, campaign BIGINT, at_time AS TO_TIMESTAMP_LTZ(ts, 3),
            WATERMARK FOR at_time AS at_time - INTERVAL '99' DAY, PRIMARY KEY (ad) NOT ENFORCED
        ) WITH ({files_of(folder / "versions")})
    """)
    # Each row tells up to which time its file is complete with it.
    tables.execute_sql(f"""
        CREATE TABLE asked (
            `view` BIGINT, ad BIGINT, ts BIGINT, complete BIGINT, at_time AS TO_TIMESTAMP_LTZ(ts, 3),
            WATERMARK FOR at_time AS TO_TIMESTAMP_LTZ(complete, 3)
        ) WITH ({files_of(folder / "asked", watched=True)})
    """)
    tables.execute_sql(f"""
        CREATE TABLE answers (`view` BIGINT, campaign BIGINT, said TIMESTAMP_LTZ(3))
        WITH ({files_of(folder / "answers")})
    """)
    running = tables.sql_query(ANSWERS).execute_insert("answers")
    job = Job(port, running.get_job_client())
    rounds = []
    wanted = 0
    for staged in sorted((folder / "rounds").iterdir()):
        wanted += sum(file.read_bytes().count(b"\n") for file in staged.iterdir())
        began, cpu = time.time(), cpu_seconds()
        # All files of a round at once, so that every reader gets one of them.
        staged.rename(folder / "asked" / staged.name)
        job.wait_for_answers(wanted)
        rounds.append({"began_ms": began * 1e3, "cpu_s": cpu_seconds() - cpu})
    job.stop(folder / "savepoint")
    (folder / "rounds.json").write_text(json.dumps(rounds))


def table_environment(folder: Path, port: int, parallelism: int) -> Any:
    """Flink within this program: one JVM, `parallelism` slots."""
    (folder / "asked").mkdir(exist_ok=True)
    (folder / "versions").mkdir(exist_ok=True)
    settings = {
        **SETTINGS,
        "parallelism.default": str(parallelism),
        "taskmanager.numberOfTaskSlots": str(parallelism),
        "state.backend.rocksdb.localdir": str(folder / "rocksdb"),
        "execution.checkpointing.dir": (folder / "checkpoints").as_uri(),
        "rest.port": str(port),
        "rest.bind-port": str(port),
    }
    configuration = Configuration()
    for name, value in settings.items():
        configuration.set_string(name, value)
    return TableEnvironment.create(
        EnvironmentSettings.new_instance().with_configuration(configuration).build()
    )


def files_of(folder: Path, watched: bool = False) -> str:
    more = ", 'source.monitor-interval' = '20 ms'" if watched else ""
    return f"'connector' = 'filesystem', 'format' = 'csv', 'path' = '{folder.as_uri()}'{more}"


class Job:
    """A running job, looked at through Flink's REST interface."""

    def __init__(self, port: int, client: Any) -> None:
        self._port = port
        self._client = client
        self._path = f"/jobs/{client.get_job_id()}"
        vertices = call(port, self._path)["vertices"]
        join = next(vertex["id"] for vertex in vertices if "TemporalJoin" in vertex["name"])
        self._metrics = f"{self._path}/vertices/{join}/subtasks/metrics"
        self._metric = ""

    def wait_for_answers(self, wanted: int) -> None:
        """Returns when the join has given so many answers in all."""
        seen, since = 0, time.monotonic()
        while seen < wanted:
            time.sleep(POLL_S)
            before, seen = seen, self._answers()
            if seen > before:
                since = time.monotonic()
            if call(self._port, self._path)["state"] in ("FAILING", "FAILED", "CANCELED", "FINISHED"):
                self._client.get_job_execution_result().result()  # raises what made it fail
                raise RuntimeError("Flink's job ended before all views were answered")
            if time.monotonic() - since > SILENT_S_MAX:
                raise RuntimeError(f"no answer for {SILENT_S_MAX:.0f} s, after {seen} of {wanted}")

    def _answers(self) -> int:
        if not self._metric:
            names = [metric["id"] for metric in call(self._port, self._metrics)]
            found = [name for name in names if "TemporalJoin" in name and name.endswith(".numRecordsOut")]
            if not found:  # it has not begun
                return 0
            self._metric = urllib.parse.quote(found[0])
        counts = call(self._port, f"{self._metrics}?get={self._metric}&agg=sum")
        return int(counts[0]["sum"]) if counts else 0

    def stop(self, savepoint: Path) -> None:
        """Ends the job with a savepoint, which is what completes the files of answers."""
        how = {"targetDirectory": savepoint.as_uri(), "drain": False, "formatType": "NATIVE"}
        call(self._port, f"{self._path}/stop", how)
        self._client.get_job_execution_result().result()


def call(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read().decode()
    finally:
        connection.close()
    if answer.status >= http.client.BAD_REQUEST:
        raise RuntimeError(f"Flink answers {path} with {answer.status}: {content}")
    return json.loads(content)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def cpu_seconds() -> float:
    """CPU seconds so far of this process and its children, the JVM among them; 0 where the system does not tell."""
    ticks = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if os.getpid() in (int(process.name), int(fields[1])):
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


# A version that comes late


class Version(NamedTuple):
    ad: str
    ts: int
    campaign: str


class View(NamedTuple):
    view: int
    ad: str
    ts: int


# What comes in two steps. The second step's first version is behind the watermark, which the first step took to 40.
VERSIONS = (
    (Version("shoe", 10, "spring"), Version("hat", 40, "sale")),
    (Version("shoe", 20, "winter"), Version("hat", 60, "sale")),
)
VIEWS = (
    (View(1, "shoe", 30), View(2, "hat", 40)),
    (View(3, "shoe", 30), View(4, "shoe", 50), View(5, "hat", 60)),
)


def late(folder: Path) -> None:
    """Prints Flink's answers beside the right ones."""
    tables = table_environment(folder, free_port(), 1)
    tables.execute_sql(f"""
        CREATE TABLE versions (
            ad STRING, ts BIGINT, campaign STRING, at_time AS TO_TIMESTAMP_LTZ(ts, 3),
            WATERMARK FOR at_time AS at_time, PRIMARY KEY (ad) NOT ENFORCED
        ) WITH ({files_of(folder / "versions", watched=True)})
    """)
    tables.execute_sql(f"""
        CREATE TABLE asked (
            `view` BIGINT, ad STRING, ts BIGINT, at_time AS TO_TIMESTAMP_LTZ(ts, 3),
            WATERMARK FOR at_time AS at_time
        ) WITH ({files_of(folder / "asked", watched=True)})
    """)
    running = tables.sql_query(ANSWERS).select(col("view"), col("campaign")).execute()
    answers: dict[int, str | None] = {}
    with running.collect() as rows:
        for step, (versions, views) in enumerate(zip(VERSIONS, VIEWS, strict=True)):
            hand_over(folder, "versions", step, versions)
            hand_over(folder, "asked", step, views)
            answers.update(take(rows, len(views)))
    running.get_job_client().cancel().result()
    print_answers(answers)


def hand_over(folder: Path, table: str, step: int, rows: tuple[NamedTuple, ...]) -> None:
    """A file that is there with all its rows at once."""
    staged = folder / f"{table}-{step}.csv"
    staged.write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    staged.rename(folder / table / staged.name)


def take(rows: Iterator[Any], count: int) -> dict[int, str | None]:
    return {row[0]: row[1] for row in (next(rows) for _ in range(count))}


def print_answers(answers: dict[int, str | None]) -> None:
    print(f"{'':32}{'Flink':9}right")
    for versions, views in zip(VERSIONS, VIEWS, strict=True):
        for version in versions:
            print(f"version of {version.ad} at {version.ts}: {version.campaign}")
        for view in views:
            asked = f"view {view.view} of {view.ad} at {view.ts}"
            found, right = answers[view.view], right_answer(view)
            print(f"{asked:32}{found!s:9}{right!s:9}{'' if found == right else 'wrong'}".rstrip())


def right_answer(view: View) -> str | None:
    """The newest of all versions of the ad up to the view's time, whenever they came."""
    known = [
        version for step in VERSIONS for version in step if version.ad == view.ad and version.ts <= view.ts
    ]
    return max(known, key=lambda version: version.ts).campaign if known else None


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["bench", folder, parallelism]:
            bench(Path(folder), int(parallelism))
        case ["late"]:
            with tempfile.TemporaryDirectory(prefix="millpond-flink-") as folder:
                late(Path(folder))
        case _:
            sys.exit(__doc__)
