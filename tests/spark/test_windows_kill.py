"""The driver of a window is killed with SIGKILL while windows fire, and started again from its checkpoint."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from test_exactly_once import run_job, write_input
from windows_job import DEATHS, GAP

JOB = Path(__file__).with_name("windows_job.py")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_windows_whose_driver_is_killed_fire_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, views = write_input(tmp_path)
    # The Java machines live for seconds: to optimise what they run would take them longer.
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1")
    for _ in DEATHS:
        killed = run_job(tmp_path, JOB)
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert len(list(tmp_path.glob("died *"))) == len(DEATHS)
    finished = run_job(tmp_path, JOB)
    assert finished.returncode == 0, finished.stderr[-4000:]

    expected = []
    rows = sorted((row["ad"], row["ts"]) for row in views.to_pylist())
    for ad, own in itertools.groupby(rows, key=lambda row: row[0]):
        session: list[int] = []
        for _, ts in [*own, (ad, 1 << 40)]:
            if session and ts - session[-1] >= GAP:
                expected.append((session[0], session[-1] + GAP, ad, len(session), session))
                session = []
            session.append(ts)
    fired = [tuple(row.values()) for row in pq.read_table(tmp_path / "out", partitioning=None).to_pylist()]
    assert sorted(fired) == sorted(expected)
