"""Tasks that Spark runs twice at once, and those that lost and went on all the same: every row counts once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from twins_job import EPOCHS, FILES, PER_EPOCH, ROWS

JOB = Path(__file__).with_name("twins_job.py")
HELD = ("source", "answers", "answers together", "waited", "stage", "stage together")


@pytest.mark.long
def test_twins_and_zombies_of_a_stream_count_once(tmp_path: Path) -> None:
    root = tmp_path / "job"
    command = [sys.executable, str(JOB), str(root)]
    job = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert job.returncode == 0, job.stderr[-4000:]
    for name in HELD:
        markers = {path.name.removeprefix(f"{name} ") for path in root.glob(f"{name} *")}
        assert {"first", "twin", "over", "went on"} <= markers, name
    told = json.loads(job.stdout)
    rows = range(EPOCHS * PER_EPOCH)
    once = {str(first): 1 for first in rows[::ROWS]}

    fetch = told["fetch"]
    assert fetch["reads"] == once, "no job but the sink's has read"
    ready = [row for row in rows if row % ROWS < ROWS // 2]
    for epoch in range(EPOCHS):
        assert fetch["ready"][str(epoch)] == [row for row in ready if row // PER_EPOCH == epoch]
    assert fetch["waiting"] == [PER_EPOCH // 2 * (epoch + 1) for epoch in range(EPOCHS)]
    # One for each partition, one for those that waited, and one that nobody lists.
    assert all(files >= FILES + 2 for files in fetch["files"][1:])
    assert (fetch["left"], fetch["rest"]) == (0, sorted(set(rows) - set(ready)))

    update = told["update"]
    assert update["reads"] == once
    assert update["counts"] == {str(row): 1 for row in rows}
