"""A pond on a cluster of several Java machines, in one application: it loses a machine, and no secret shows anywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

JOB = Path(__file__).with_name("cluster_job.py")
PLACES = {"arguments", "environment", "pickles", "events", "local", "spark log", "log", "pond"}
GONE_S_MAX = 5.0


def test_a_machine_is_lost_and_no_secret_is_where_others_may_read_it(tmp_path: Path) -> None:
    """Arguments and environment of all processes, pickles, broadcasts and all else on disk, Spark's events, logs."""
    log = tmp_path / "driver.err"
    with log.open("w+") as errors:
        command = [sys.executable, str(JOB), str(tmp_path / "job")]
        job = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=240)
    assert job.returncode == 0, log.read_text()[-4000:]
    told = json.loads(job.stdout.splitlines()[-1])
    assert told["answers"] == [[1, 40], [2, 50], [1, 4, 40], [2, 5, 50]]
    assert told["slots"] == {"wanted": 2, "had": 2}
    assert told["refused"] == [4, 4, 0, 1], "queries would have no slot, and nothing has changed"
    lost = told["lost"]
    assert lost["words"].startswith("ended with its Spark task")
    assert lost["gone_s"] < GONE_S_MAX, "a container ends with its executor"
    assert (lost["right"], lost["kept"], lost["elsewhere"]) == (True, True, True), "answers are right again"
    assert (told["left"], told["jobs"]) == (0, 0), "no process, and no task, outlives its pond"

    assert all(address.startswith("tls:") for address in told["addresses"]), "containers have certificates"
    assert {"token", "reader", "task", "coordinator", "container", "key 0"} <= set(told["secrets"])
    assert any(name.startswith("grant") for name in told["secrets"])
    assert told["clean"] == {place: [] for place in {*PLACES, "spark-home/work"}}
    assert {place: told["told"][place] for place in PLACES} == {place: ["token"] for place in PLACES}, (
        "what is told there is found"
    )
