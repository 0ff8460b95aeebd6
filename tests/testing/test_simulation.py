"""A whole pond in all weathers: two hundred seeds, each of which keeps every promise and repeats exactly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from functools import cache

import pytest

from millpond.testing import simulate
from millpond.testing.simulation import Report
from millpond.testing.simulation.seeds import main

STARTS = range(0, 125, 25)
MORE = range(125, 200, 25)
FAULTS = {
    "autoscaled",
    "clock jump",
    "crash",
    "cut",
    "cut between containers",
    "disk full",
    "disk lost",
    "kill",
    "out of memory",
    "rebalanced",
    "reply delayed",
    "reply lost",
    "request cut off",
    "request delayed",
    "request doubled",
    "request lost",
    "request reordered",
    "root unseen",
    "silence",
    "scaled",
    "slices moved",
    "slices moved live",
    "slow sync",
    "stop",
    "stop of a container",
    "stop of the coordinator",
    "bit flipped",
    "kill before a checkpoint",
    "out of memory in a transaction",
    "out of memory in a window",
    "rows spilled",
    "unsynced lost",
}


@cache
def reports(start: int) -> list[Report]:
    return [simulate(seed) for seed in range(start, start + 25)]


@pytest.mark.parametrize("start", [*STARTS, *(pytest.param(start, marks=pytest.mark.long) for start in MORE)])
def test_every_promise_is_kept(start: int) -> None:
    for report in reports(start):
        assert report.passed, report


def test_every_kind_of_fault_came_about() -> None:
    every = [report for start in STARTS for report in reports(start)]
    fired = sum((report.fired for report in every), Counter())
    assert not FAULTS - set(fired)
    did = sum((report.did for report in every), Counter())
    assert did["epochs"] > 450
    assert did["reads"] > 500
    assert did["openings"] > 2 * len(every)
    assert did["window epochs"] > 200
    assert did["windows fired"] > 500
    assert did["silent window epochs"] > 20
    assert did["own turns"] > 3
    for kind in ("assigned", "everything", "session with updates"):
        assert did[f"windows: {kind}"] > 0
    assert did["program epochs"] > 120
    assert did["chain turns"] > 80
    for kind in ("window join", "interval join", "dedup"):
        assert did[f"{kind} epochs"] > 5


def test_a_seed_repeats_exactly_in_every_process() -> None:
    code = "from millpond.testing import simulate; print(*(simulate(seed).digest for seed in range(25, 30)))"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    told = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert told.split() == [report.digest for report in reports(25)[:5]]


def test_seeds_are_run_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--start", "3", "--seeds", "2", "--jobs", "1"]) == 0
    told = capsys.readouterr().out
    assert "2 seeds in" in told
    assert "0 failed" in told


def test_a_failure_is_told_with_its_seed_and_what_went_before(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millpond.testing.simulation.states.AddModel.value_at", lambda *_: -1)
    monkeypatch.setattr("millpond.testing.simulation.states.PutModel.value_at", lambda *_: -1)
    assert main(["--start", "3", "--seeds", "1", "--jobs", "1"]) == 1
    told = capsys.readouterr().out
    assert "seed 3: Wrong: " in told
    assert "is acknowledged" in told
    assert "--start 3 --seeds 1" in told
    assert len(told.splitlines()) < 80
