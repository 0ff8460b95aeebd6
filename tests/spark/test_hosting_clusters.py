"""Containers on Spark clusters, of several Java machines: speculation, executors that come and go, and SIGKILL for all."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import ENVIRONMENT, HOSTS, standalone, use_home
from hosting_checks import CHECKS, is_gone, wait_until

JOB = Path(__file__).with_name("hosting_job.py")
NAMES = [check.__name__ for check in CHECKS]
GONE_S_MAX = 5.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def told_by(where: Path, master: str, scenario: str, kill: bool = False) -> dict[str, Any]:
    """What the driver of a scenario says; it ends by itself, or is killed."""
    errors = where.with_suffix(".err")
    command = [sys.executable, str(JOB), str(where), master, scenario]
    with (
        errors.open("w") as file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True) as driver,
    ):
        try:
            assert driver.stdout is not None
            line = driver.stdout.readline()
            assert line, errors.read_text()[-4000:]
            assert kill or driver.wait(60) == 0
        finally:
            driver.kill()
    told = json.loads(line)
    assert (told["secrets"], told["logged"]) == (0, 1)
    wait_until(lambda: all(map(is_gone, told["pids"])), GONE_S_MAX)
    return told


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    where = tmp_path_factory.mktemp("cluster") / "master"
    with pytest.MonkeyPatch.context() as patch:
        for name in ENVIRONMENT:
            patch.setenv(name, "")  # what `use_home` sets is undone
        use_home(where)
        with standalone(where, workers=2, cores=3) as address:
            yield address


def test_on_a_local_cluster_with_speculation(tmp_path: Path) -> None:
    told = told_by(tmp_path / "job", "local-cluster[2,5,1024]", "speculating", kill=True)
    assert told["checks"] == NAMES
    assert len(set(told["executors"])) == 2, "they are spread"
    assert told["at_a_time"] <= 6, "two containers take two cores each, of ten"
    assert all("SIGKILL" in death["words"] for death in told["deaths"])
    assert len(told["deaths"]) == 6
    for lost in (*told["workers"], told["executor"]):
        assert lost["gone_s"] < GONE_S_MAX
        assert lost["words"].startswith("ended with its Spark task")
    assert told["rows"]


def test_no_answer_is_lost_wrong_or_twice_whatever_befalls_containers(tmp_path: Path) -> None:
    told = told_by(tmp_path / "job", "local-cluster[2,2,1024]", "adcamp")
    names = ["container", "more", "move", "worker", "executor", "fewer", "move, killed", "even"]
    assert [harm[0] for harm in told["harms"]] == names + ["container"] * 5, told
    assert told["in_time"], told["harms"]
    assert (told["updates"], told["views"]) == (told["rows"], told["rows"])
    assert (told["wrong"], told["lost"], told["twice"], told["late"]) == (0, 0, 0, 0)
    assert told["task_slots"] == {"wanted": 2, "had": 2}
    assert told["refused"] == [4, 4, 0]


def test_executors_that_come_and_go(master: str, tmp_path: Path) -> None:
    told = told_by(tmp_path / "job", master, "dynamic")
    assert told["checks"] == NAMES
    assert told["at_most"] > 2
    assert told["alive"] == [True, True]
    assert told["moved"]
    assert told["answers"]
    assert told["executor"]["gone_s"] < GONE_S_MAX
    assert told["close_s"] < 15


def test_a_second_attempt_on_another_host_takes_over(master: str, tmp_path: Path) -> None:
    told = told_by(tmp_path / "job", master, "twins")
    assert told["hosts"] == sorted(HOSTS)
    assert told["took_over"]
    assert told["jobs"] == 1
    assert told["worker"]["gone_s"] < GONE_S_MAX


def test_speculation_and_dynamic_allocation_together(master: str, tmp_path: Path) -> None:
    told = told_by(tmp_path / "job", master, "all")
    assert told["answers"]
    assert len(told["executors"]) == 3
    assert len(told["deaths"]) == 5
    assert all(lost["gone_s"] < GONE_S_MAX for lost in (*told["executors"], *told["deaths"]))
