"""Containers on Spark clusters, of several Java machines: speculation, executors that come and go, and SIGKILL for all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster import standalone, use_home
from hosting_checks import CHECKS, is_gone, wait_until

JOB = Path(__file__).with_name("hosting_job.py")
NAMES = [check.__name__ for check in CHECKS]
GONE_S_MAX = 5.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def told_by(driver: subprocess.Popen[str], errors: Path) -> dict[str, Any]:
    assert driver.stdout is not None
    line = driver.stdout.readline()
    assert line, errors.read_text()[-4000:]
    return json.loads(line)


def test_on_a_local_cluster_with_speculation(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    command = [sys.executable, str(JOB), str(tmp_path / "job"), "local-cluster[2,5,1024]"]
    with (
        errors.open("w") as file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True) as driver,
    ):
        try:
            told = told_by(driver, errors)
        finally:
            driver.kill()
    assert told["checks"] == NAMES
    assert len(set(told["executors"])) == 2, "they are spread"
    assert told["at_a_time"] <= 6, "two containers take two cores each, of ten"
    assert all("SIGKILL" in death["words"] for death in told["deaths"])
    assert len(told["deaths"]) == 6
    for lost in (*told["workers"], told["executor"]):
        assert lost["gone_s"] < GONE_S_MAX
        assert lost["words"].startswith("ended with its Spark task")
    assert told["rows"]
    assert (told["secrets"], told["logged"]) == (0, 1)
    # The driver was killed.
    wait_until(lambda: all(map(is_gone, told["pids"])), GONE_S_MAX)


def test_on_a_master_with_executors_that_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "SPARK_HOME",
        "SPARK_LOCAL_HOSTNAME",
        "SPARK_LOCAL_IP",
        "SPARK_SUBMIT_OPTS",
        "PYSPARK_PYTHON",
    ):
        monkeypatch.setenv(name, "")  # what `use_home` sets is undone
    use_home(tmp_path / "master")
    errors = tmp_path / "errors"
    with standalone(tmp_path / "master", workers=2, cores=3) as address, errors.open("w") as file:
        command = [sys.executable, str(JOB), str(tmp_path / "job"), address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True) as driver:
            try:
                told = told_by(driver, errors)
                assert driver.wait(60) == 0
            finally:
                driver.kill()
    assert told["checks"] == NAMES
    assert told["at_most"] > 2
    assert told["alive"] == [True, True]
    assert told["moved"]
    assert told["answers"]
    assert told["executor"]["gone_s"] < GONE_S_MAX
    assert (told["secrets"], told["logged"]) == (0, 1)
    assert told["close_s"] < 15
    assert all(map(is_gone, told["pids"]))
