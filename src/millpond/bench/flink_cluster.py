"""Flink within a program, and its jobs by its REST interface: what the jobs of benchmarks share.

They run in an environment that has PyFlink and need not have Millpond.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyflink.common import Configuration  # type: ignore[import-not-found]
from pyflink.table import EnvironmentSettings, TableEnvironment  # type: ignore[import-not-found]

POLL_S = 0.2
ENDED = ("FAILING", "FAILED", "CANCELED", "FINISHED")
SETTINGS = {
    "execution.runtime-mode": "STREAMING",
    "table.local-time-zone": "UTC",
    # As Flink's documentation advises: timers on the heap while they fit there, memory for RocksDB from Flink's own
    # budget, objects used again, since RocksDB keeps none of them.
    "state.backend.type": "rocksdb",
    "state.backend.rocksdb.timer-service.factory": "HEAP",
    "pipeline.object-reuse": "true",
    "execution.checkpointing.storage": "filesystem",
    "rest.address": "127.0.0.1",
    "rest.bind-address": "127.0.0.1",
    "metrics.fetcher.update-interval": "200",
}


def table_environment(folder: Path, port: int, parallelism: int, settings: Mapping[str, str]) -> Any:
    """Flink within this program: one JVM, `parallelism` slots. `settings` come on top of those above."""
    chosen = {
        **SETTINGS,
        **settings,
        "parallelism.default": str(parallelism),
        "taskmanager.numberOfTaskSlots": str(parallelism),
        "state.backend.rocksdb.localdir": str(folder / "rocksdb"),
        "execution.checkpointing.dir": (folder / "checkpoints").as_uri(),
        "rest.port": str(port),
        "rest.bind-port": str(port),
    }
    configuration = Configuration()
    for name, value in chosen.items():
        configuration.set_string(name, value)
    return TableEnvironment.create(
        EnvironmentSettings.new_instance().with_configuration(configuration).build()
    )


def files_of(folder: Path, watched: bool = False) -> str:
    """Options of a table that is the CSV files of a folder; those that come later, too, if it is watched."""
    more = ", 'source.monitor-interval' = '20 ms'" if watched else ""
    return f"'connector' = 'filesystem', 'format' = 'csv', 'path' = '{folder.as_uri()}'{more}"


class Job:
    """A running job, looked at through Flink's REST interface."""

    def __init__(self, port: int, client: Any) -> None:
        self._port = port
        self._client = client
        self._path = f"/jobs/{client.get_job_id()}"

    def look(self) -> dict[str, Any]:
        """What Flink tells of it; raises what made it fail, or that it has ended."""
        told: dict[str, Any] = call(self._port, self._path)
        if told["state"] in ENDED:
            self._client.get_job_execution_result().result()
            raise RuntimeError("Flink's job ended before it should")
        return told

    def metrics(self, vertex: str, of: tuple[str, ...], taken: str = "sum") -> dict[str, int]:
        """Of the metrics of a vertex whose names end so: of each the sum over its subtasks, or `min`. None before it has begun."""
        path = f"{self._path}/vertices/{vertex}/subtasks/metrics"
        names = [metric["id"] for metric in call(self._port, path) if metric["id"].endswith(of)]
        if not names:
            return {}
        query = ",".join(urllib.parse.quote(name) for name in names)
        told = call(self._port, f"{path}?get={query}&agg={taken}")
        return {each["id"]: int(float(each[taken])) for each in told}

    def stop(self, savepoint: Path) -> None:
        """Ends the job with a savepoint, which is what completes the files that it writes."""
        how = {"targetDirectory": savepoint.as_uri(), "drain": False, "formatType": "NATIVE"}
        call(self._port, f"{self._path}/stop", how)
        self._client.get_job_execution_result().result()


class Patience:
    """Ends what waits for something that no longer changes."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen: object = None
        self._since = time.monotonic()

    def see(self, now: object) -> None:
        if now != self._seen:
            self._seen, self._since = now, time.monotonic()
        elif time.monotonic() - self._since > self._seconds:
            raise RuntimeError(f"Flink has done nothing for {self._seconds:.0f} s, at {now}")


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
