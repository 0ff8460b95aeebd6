"""The driver is killed with SIGKILL at the steps of an epoch, and started again from its checkpoints.

What the sink and the State hold in the end must be what DuckDB makes of the same rows.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from streaming_job import DEATHS

import millpond as mp

JOB = Path(__file__).with_name("streaming_job.py")
PARTS = 4


def write_input(root: Path, parts: int = PARTS) -> tuple[pa.Table, pa.Table]:
    """Files of updates and of views, out of order; times of updates are unique to a key."""
    chance = random.Random(5)
    updates, views = [], []
    for part in range(parts):
        low, high = 100 * part - 40, 100 * part + 100
        keys_and_times = {(chance.randrange(10), chance.randrange(low, high)) for _ in range(80)}
        seen = {(row["ad"], row["ts"]) for table in updates for row in table.to_pylist()}
        fresh = sorted(keys_and_times - seen, key=lambda _: chance.random())
        updates.append(
            pa.table(
                {
                    "ad": [ad for ad, _ in fresh],
                    "ts": [ts for _, ts in fresh],
                    "campaign": [chance.randrange(1000) for _ in fresh],
                }
            )
        )
        asked = [(chance.randrange(12), chance.randrange(low, high - 60)) for _ in range(60)]
        views.append(pa.table({"ad": [ad for ad, _ in asked], "ts": [ts for _, ts in asked]}))
    for name, tables in (("updates", updates), ("views", views)):
        (root / name).mkdir(parents=True)
        for number, table in enumerate(tables):
            path = root / name / f"{number}.parquet"
            pq.write_table(table, path)
            # Spark takes files by their age; of one age, in any order.
            os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    return pa.concat_tables(updates), pa.concat_tables(views)


def run_job(root: Path, job: Path = JOB) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(job), str(root)], capture_output=True, text=True, timeout=110)


@pytest.mark.timeout(400)
def test_a_driver_killed_at_every_step_loses_and_doubles_nothing(tmp_path: Path) -> None:
    updates, views = write_input(tmp_path)
    half_written = 0
    for _ in DEATHS:
        killed = run_job(tmp_path)
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
        half_written = half_written or pq.read_table(tmp_path / "out", partitioning=None).num_rows
    assert half_written == 3
    finished = run_job(tmp_path)
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert len(list(tmp_path.glob("died *"))) == len(DEATHS)
    assert "waiting 0" in finished.stdout
    answers = pq.read_table(tmp_path / "out", partitioning=None)
    expected = duckdb.sql(
        "select v.ad, v.ts, u.campaign from views v asof left join updates u on v.ad = u.ad and v.ts >= u.ts"
    ).to_arrow_table()
    order = [("ad", "ascending"), ("ts", "ascending"), ("campaign", "ascending")]
    assert answers.sort_by(order).to_pylist() == expected.sort_by(order).to_pylist()
    with mp.open(tmp_path / "pond") as pond:
        held = pond.state("campaigns").snapshot()
    newest = duckdb.sql(
        "select ad, max(ts) as ts, arg_max(campaign, ts) as campaign from updates group by ad"
    ).to_arrow_table()
    found = {row["key"]: (row["time"], row["value"]) for row in held.to_pylist()}
    assert found == {row["ad"]: (row["ts"], row["campaign"]) for row in newest.to_pylist()}
    assert len(views) == len(answers)
    assert len(updates) > len(newest)
