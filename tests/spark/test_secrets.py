"""Containers on Spark need many secrets, and none is where others may read it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).with_name("secrets_job.py")
PLACES = {"arguments", "environment", "pickles", "events", "local", "spark log", "log", "pond"}


@pytest.mark.long
def test_no_secret_is_where_others_may_read_it(tmp_path: Path) -> None:
    """Arguments and environment of all processes, pickles, broadcasts and all else on disk, Spark's events, logs."""
    log = tmp_path / "driver.err"
    with log.open("w+") as errors:
        command = [sys.executable, str(JOB), str(tmp_path / "job")]
        job = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=120)
    assert job.returncode == 0, log.read_text()[-4000:]
    told = json.loads(job.stdout.splitlines()[-1])
    assert told["answers"] == [[1, 40], [2, 50], [1, 4, 40], [2, 5, 50]]
    assert told["address"].startswith("tls:"), "the container has a certificate"
    assert {"token", "reader", "task", "coordinator", "container", "key 0"} <= set(told["secrets"])
    assert any(name.startswith("grant") for name in told["secrets"])
    assert told["clean"] == {place: [] for place in PLACES}
    assert told["told"] == {place: ["token"] for place in PLACES}, "what is told there is found"
