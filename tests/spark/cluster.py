"""Spark clusters on this machine, from the jars that PySpark brings: their files lie under a directory of the test's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyspark

# The Java machines live for a minute or two.
HOSTS = ("localhost", "127.0.0.1")
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"
ENVIRONMENT = ("SPARK_HOME", "SPARK_LOCAL_HOSTNAME", "SPARK_LOCAL_IP", "SPARK_SUBMIT_OPTS", "PYSPARK_PYTHON")


def use_home(where: Path) -> None:
    """Makes a home of Spark that is PySpark's, but for `work`: what clusters write there goes with the test."""
    home = where / "spark-home"
    home.mkdir(parents=True)
    for entry in Path(pyspark.__file__).parent.iterdir():
        if entry.name != "work":
            (home / entry.name).symlink_to(entry)
    values = (str(home), "localhost", "127.0.0.1", JAVA_OPTIONS, sys.executable)
    os.environ.update(zip(ENVIRONMENT, values, strict=True))


@contextmanager
def standalone(where: Path, workers: int, cores: int) -> Iterator[str]:
    """A master and its workers, on hosts of two names; gives the master's address."""
    home = os.environ["SPARK_HOME"]
    environment = {**os.environ, "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS, "SPARK_DAEMON_MEMORY": "256m"}
    processes = []

    def start(name: str, *arguments: str) -> Path:
        log = where / f"{name}.log"
        command = [f"{home}/bin/spark-class", f"org.apache.spark.deploy.{name.partition('-')[0]}", *arguments]
        with log.open("wb") as file:
            processes.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment))
        return log

    try:
        log = start("master.Master", "--host", "localhost", "--port", "0", "--webui-port", "0")
        address = said(log, r"Starting Spark master at (spark://\S+)")
        logs = [
            start(
                f"worker.Worker-{number}",
                *("--host", HOSTS[number % 2], "--webui-port", "0", "--cores", str(cores), "--memory", "2g"),
                *("--work-dir", str(where / f"work-{number}"), address),
            )
            for number in range(workers)
        ]
        for log in logs:
            said(log, r"(Successfully registered with master)")
        yield address
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def said(log: Path, pattern: str, seconds: float = 120) -> str:
    deadline = time.monotonic() + seconds
    while not (found := re.search(pattern, log.read_text())):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return found[1]
