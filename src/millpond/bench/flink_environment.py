"""Flink as a peer of benchmarks: a virtual environment of its own, and jobs that run in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pyarrow import csv

from millpond.errors import MillpondError

REQUIREMENT = "apache-flink==2.3.*"
PYTHONS = ((3, 12), (3, 11))  # what both Flink's packages and its jobs here run on
STAMP = "millpond-flink"
NO_HEADER = csv.WriteOptions(include_header=False)
HINT = "see that a Java of 17 or newer is on PATH, or leave --flink out"


def environment_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "millpond", "flink-venv")


def installed_python() -> Path | None:
    """The Python of Flink's environment, if that is complete and holds the release wanted."""
    folder = environment_folder()
    stamp = folder / STAMP
    complete = stamp.is_file() and stamp.read_text() == REQUIREMENT
    return folder / "bin" / "python" if complete else None


def prepare(progress: Callable[[str], None]) -> Path:
    """The Python of Flink's environment, which is made where it is not there: a minute or two, and some 850 MB."""
    found = installed_python()
    if found is not None:
        return found
    base = find_python()
    folder = environment_folder()
    progress(f"installing {REQUIREMENT} into {folder} (once)")
    shutil.rmtree(folder, ignore_errors=True)
    python = folder / "bin" / "python"
    _install([base, "-m", "venv", str(folder)], "make a virtual environment")
    options = ("--quiet", "--no-input", "--disable-pip-version-check")
    _install([str(python), "-m", "pip", "install", *options, REQUIREMENT], f"install {REQUIREMENT}")
    (folder / STAMP).write_text(REQUIREMENT)
    return python


def find_python() -> str:
    """A Python that Flink's packages are made for: this one, or one on PATH."""
    if sys.version_info[:2] in PYTHONS:
        return sys.executable
    for major, minor in PYTHONS:
        found = shutil.which(f"python{major}.{minor}")
        if found is not None:
            return found
    names = " or ".join(f"{major}.{minor}" for major, minor in sorted(PYTHONS))
    raise MillpondError(
        f"--flink needs Python {names}, and there is none on PATH",
        hint="install one of them with its venv module, or leave --flink out",
    )


def _install(command: Sequence[str], aim: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - no words from outside
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        raise MillpondError(
            f"could not {aim}: {said[-1]}",
            hint="pip needs a package index that has it, and Python its venv module; or leave --flink out",
        )


def job_command(python: Path, job: Path, arguments: Sequence[str]) -> list[str]:
    """A program of this folder in Flink's environment."""
    # -I: the modules beside the job are not for it, but for the one that it takes itself.
    return [str(python), "-I", str(job), *arguments]


def job_environment(folder: Path) -> dict[str, str]:
    """Variables of a job that writes its log into a folder."""
    # Another Flink's settings are not meant for this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLINK_")}
    return {**environment, "FLINK_LOG_DIR": str(folder)}


def run_job(python: Path, job: Path, folder: Path, arguments: Sequence[str]) -> str:
    """What a job prints that runs in a folder, to its end."""
    done = subprocess.run(  # noqa: S603 - a path of our own, constant arguments
        job_command(python, job, arguments),
        env=job_environment(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise failed(cause(done.stderr) or f"exit code {done.returncode}")
    return done.stdout


def failed(why: str) -> MillpondError:
    return MillpondError(f"Flink's job failed: {why}", hint=HINT)


def cause(said: str) -> str:
    """The line that tells most, out of the traces of Python and Java."""
    lines = [line for line in said.splitlines() if line and not line[0].isspace()]
    causes = [line for line in lines if line.startswith("Caused by: ")]
    return (causes or lines or [""])[-1]
