"""Flink as a peer of the adcamp benchmark: what goes to it in files and comes back, and errors that say what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

pytest.importorskip("duckdb")
pytest.importorskip("redis")
from millpond import cli
from millpond.bench import adcamp, adcamp_flink, flink_environment
from millpond.errors import BadOption, MillpondError


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder in the place of the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


# Options


def test_only_adcamp_measures_flink() -> None:
    ended = CliRunner().invoke(cli.app, ["bench", "kernels", "--flink"])
    assert isinstance(ended.exception, BadOption)
    assert ended.exception.message == "the bench 'kernels' has no --flink"


def test_adcamp_is_told_of_the_option_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(progress: object) -> Path:
        raise MillpondError("no Flink today")

    monkeypatch.setattr(flink_environment, "prepare", refuse)
    monkeypatch.setattr(adcamp, "spark_session", lambda name: pytest.fail("Spark was started"))
    ended = CliRunner().invoke(cli.app, ["bench", "adcamp", "--quick", "--flink"])
    assert isinstance(ended.exception, MillpondError)
    assert ended.exception.message == "no Flink today"


# The environment


def test_this_python_is_taken_where_it_is_suitable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flink_environment.shutil, "which", lambda name: f"/some/{name}")
    for minor in (11, 12):
        monkeypatch.setattr(
            flink_environment, "sys", SimpleNamespace(version_info=(3, minor, 1), executable="/this")
        )
        assert flink_environment.find_python() == "/this"
    monkeypatch.setattr(
        flink_environment, "sys", SimpleNamespace(version_info=(3, 14, 1), executable="/this")
    )
    assert flink_environment.find_python() == "/some/python3.12"


def test_no_suitable_python_is_said_kindly(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(
        flink_environment, "sys", SimpleNamespace(version_info=(3, 14, 1), executable="/this")
    )
    monkeypatch.setattr(flink_environment.shutil, "which", lambda name: None)
    said: list[str] = []
    with pytest.raises(MillpondError, match=r"needs Python 3\.11 or 3\.12, and there is none") as caught:
        flink_environment.prepare(said.append)
    assert "leave --flink out" in caught.value.hint
    assert said == []


def test_a_failed_install_is_said_kindly_and_leaves_nothing_to_trust(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if "pip" in command:
            return subprocess.CompletedProcess(
                command, 1, "", "Looking\nERROR: No matching distribution found\n"
            )
        (cache / "millpond" / "flink-venv").mkdir(parents=True)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(flink_environment.subprocess, "run", run)
    said: list[str] = []
    for _ in range(2):
        with pytest.raises(
            MillpondError, match=r"could not install apache-flink==2\.3\.\*: ERROR: No matching"
        ):
            flink_environment.prepare(said.append)
        assert flink_environment.installed_python() is None
    assert said[0].startswith("installing apache-flink==2.3.* into ")


def test_an_environment_is_made_once_and_again_for_another_release(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        (cache / "millpond" / "flink-venv").mkdir(parents=True, exist_ok=True)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(flink_environment.subprocess, "run", run)
    python = cache / "millpond" / "flink-venv" / "bin" / "python"
    for _ in range(2):
        assert flink_environment.prepare(lambda line: None) == python
    assert [command[2] for command in commands] == ["venv", "pip"]
    monkeypatch.setattr(flink_environment, "REQUIREMENT", "apache-flink==9.9.*")
    assert flink_environment.prepare(lambda line: None) == python
    assert commands[-1][-1] == "apache-flink==9.9.*"


def test_a_failed_job_tells_its_cause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(
        MillpondError, match="Flink's job failed: ModuleNotFoundError: No module named 'pyflink"
    ):
        adcamp_flink.late_example(Path(sys.executable))
    trace = (
        "Traceback\n  File x\nJavaError: o1\n\tat a.b\nCaused by: A\nCaused by: B: no space\n\t... 4 more\n"
    )
    assert flink_environment.cause(trace) == "Caused by: B: no space"
    assert flink_environment.cause("") == ""


# Files


def test_each_row_says_what_its_file_is_complete_up_to() -> None:
    times = np.array([1, 3, 3, 5, 8], np.int64)
    assert adcamp_flink.complete_up_to(times, np.array([3, 6, 9])).tolist() == [-1, -1, 3, 6, 9]
    assert adcamp_flink.complete_up_to(times, np.array([0])).tolist() == [0, 0, 0, 0, 0]
    assert adcamp_flink.complete_up_to(np.array([], np.int64), np.array([3])).tolist() == []


def test_a_round_is_complete_only_with_the_last_row_of_each_file(tmp_path: Path) -> None:
    times = np.sort(np.random.default_rng(1).integers(0, 300, 1_000))
    views = pa.table({"view": np.arange(1_000), "ad": np.arange(1_000) % 7, "ts": times})
    adcamp_flink.write_round(tmp_path / "round", views, 2, 64)
    rows = []
    for number in range(2):
        part = np.loadtxt(tmp_path / "round" / f"{number}.csv", np.int64, delimiter=",")
        rows.append(part)
        complete = part[:, 3]
        assert (np.diff(complete) >= 0).all()
        assert len(np.unique(complete)) > 10
        for row, so_far in enumerate(complete.tolist()):
            assert (part[row + 1 :, 2] > so_far).all()
        assert complete[-1] == times[-1]
    together = np.concatenate(rows)
    together = together[np.argsort(together[:, 0])]
    assert together[:, 0].tolist() == list(range(1_000))
    assert together[:, 2].tolist() == times.tolist()


def test_versions_are_dealt_out_without_loss(tmp_path: Path) -> None:
    versions = pa.table({"ad": [7, 8, 9], "ts": [1, 2, 3], "campaign": [10, 20, 30]})
    adcamp_flink.write_versions(tmp_path / "versions", versions, 2)
    files = sorted((tmp_path / "versions").iterdir())
    assert [file.read_text() for file in files] == ["7,1,10\n9,3,30\n", "8,2,20\n"]


def test_answers_come_back_from_all_files(tmp_path: Path) -> None:
    (tmp_path / "part-0").write_text("1,7,2026-01-02 03:04:05.006Z\n2,,2026-01-02 03:04:05Z\n")
    (tmp_path / "part-1").write_text("3,9,2026-01-02 03:04:05.6Z\n")
    (tmp_path / "part-2").write_text("")
    (tmp_path / ".part-3.inprogress").write_text("4,9,2026-01-02 03:04:05.6Z\n")
    found = adcamp_flink.read_answers(tmp_path)
    assert found["view"].to_pylist() == [1, 2, 3]
    assert found["campaign"].to_pylist() == [7, None, 9]
    said_ms = found["said"].to_numpy().astype("int64")
    assert (said_ms - said_ms[1]).tolist() == [6, 0, 600]


# Flink itself


@pytest.fixture
def flink() -> Path:
    python = flink_environment.installed_python()
    if python is None:
        pytest.skip("Flink's environment is not there: `millpond bench adcamp --flink` makes it")
    return python


@pytest.mark.long
@pytest.mark.timeout(600)
def test_flink_gives_the_answers_of_duckdb(flink: Path) -> None:
    random = np.random.default_rng(7)
    versions = pa.table(
        {"ad": random.integers(0, 50, 500), "ts": np.arange(500), "campaign": random.integers(0, 9, 500)}
    )
    views = pa.table(
        {"view": np.arange(900), "ad": random.integers(0, 55, 900), "ts": random.integers(0, 500, 900)}
    )
    done = adcamp_flink.run_flink(flink, versions, views, 3, 100)
    adcamp.compare("flink", done.answers, adcamp.expected(versions, views))
    assert done.rows_per_s > 0
    assert done.rows_per_cpu_s > 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_flink_answers_wrongly_where_a_version_comes_late(flink: Path) -> None:
    lines = adcamp_flink.late_example(flink).splitlines()
    wrong = [line.split() for line in lines if line.endswith("wrong")]
    assert [" ".join(words) for words in wrong] == ["view 1 of shoe at 30 spring winter wrong"]
