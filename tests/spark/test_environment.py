"""Spark's workers in an environment that is not active, where `python3` is an interpreter without millpond."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import millpond as mp

JOB = Path(__file__).with_name("environment_job.py")
# Without the packages of its site, and without the path that millpond is on, if one was set.
PYTHON = """#!/bin/sh
export PYTHONPATH=$(echo "$PYTHONPATH" | tr : '\\n' | grep -vx '{source}' | paste -sd:)
exec {python} -S "$@"
"""


@pytest.mark.long
def test_the_readme_runs_where_python3_is_another(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    source = Path(mp.__file__).parents[1]
    python.write_text(PYTHON.format(source=source, python=sys.executable))
    python.chmod(0o700)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_")}
    # Plans that see two rows are not worth compiling.
    environment["PYSPARK_SUBMIT_ARGS"] = (
        "--conf spark.sql.codegen.wholeStage=false --conf spark.sql.codegen.factoryMode=NO_CODEGEN pyspark-shell"
    )
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"
    job = subprocess.run(
        [sys.executable, str(JOB), str(tmp_path), str(python)],
        capture_output=True,
        text=True,
        timeout=110,
        env=environment,
    )
    assert job.returncode == 0, job.stderr[-4000:]
    refusal, hint, *rest = job.stdout.splitlines()
    assert refusal.startswith(
        f"Spark's workers run {sys.executable}: ModuleNotFoundError: No module named"
    ), refusal
    assert hint == f"  hint: set PYSPARK_PYTHON={sys.executable} before the session is started"
    assert rest == ["[('shoe', 30, 'spring')]", "1 waits, 1 read"]
    assert "Traceback" not in job.stderr, job.stderr[-4000:]
