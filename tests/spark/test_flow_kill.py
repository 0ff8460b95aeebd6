"""The driver of a flow is killed with SIGKILL in the middle of an epoch, and started again from its checkpoint.

What the sink and both States hold in the end must be what DuckDB makes of the same rows.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest
from test_exactly_once import run_job, write_input

import millpond as mp

JOB = Path(__file__).with_name("flow_job.py")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_flow_whose_driver_is_killed_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates, views = write_input(tmp_path, parts=2)
    # The Java machines live for seconds: to optimise what they run would take them longer.
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1")
    killed = run_job(tmp_path, JOB)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert len(list(tmp_path.glob("died *"))) == 1
    assert pq.read_table(tmp_path / "out" / "1.parquet").num_rows == 3, "it died with the sink half written"
    finished = run_job(tmp_path, JOB)
    assert finished.returncode == 0, finished.stderr[-4000:]
    drained = re.search(r"drained (\d+), waiting 0", finished.stdout)
    assert drained is not None, finished.stdout
    assert int(drained[1]) > 0, "some rows were still waiting when the flow ended"

    answers = pq.read_table(tmp_path / "out")
    expected = duckdb.sql(
        "select v.ad, v.ts + 40 as ts, u.campaign from views v"
        " asof left join updates u on v.ad = u.ad and v.ts + 40 >= u.ts"
    ).to_arrow_table()
    order = [("ad", "ascending"), ("ts", "ascending"), ("campaign", "ascending")]
    assert answers.sort_by(order).to_pylist() == expected.sort_by(order).to_pylist()
    assert len(answers) == len(views)

    newest = duckdb.sql("select ad, arg_max(campaign, ts) from updates group by ad").fetchall()
    counts = duckdb.sql("select campaign, count(campaign) from expected group by campaign").fetchall()
    with mp.open(tmp_path / "pond") as pond:
        held = pond.state("campaigns").snapshot().to_pylist()
        shown = pond.state("shown").snapshot().to_pylist()
    assert {row["key"]: row["value"] for row in held} == dict(newest)
    assert len(updates) > len(held)
    assert {row["key"]: row["views"] for row in shown} == {key: n for key, n in counts if key is not None}
