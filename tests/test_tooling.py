"""The scripts behind `make`, on machines that exist only in a temporary directory."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHELL = shutil.which("sh") or "/bin/sh"


class Machine:
    """A PATH that holds only what the test put there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.log = folder / "log"
        self.bin.mkdir()
        for tool in ("sed", "mkdir"):
            found = shutil.which(tool)
            assert found is not None
            (self.bin / tool).symlink_to(found)
        self.has("id", "echo 1000")

    def has(self, name: str, script: str, folder: Path | None = None) -> None:
        path = (folder or self.bin) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!{SHELL}\n{script}\n")
        path.chmod(0o755)

    def has_java(self, version: str, folder: Path | None = None) -> None:
        self.has("java", java(version), folder)

    def has_apt(self, packages: dict[str, str], update: int = 0) -> None:
        """An apt-get that logs its calls and, for a package it knows, puts that version of Java on PATH."""
        self.has("id", "echo 0")
        cases = "\n".join(
            f"{package}) printf '%s\\n' '#!{SHELL}' {quoted(java(version))} >{self.bin}/java\n"
            f"{chmod()} 755 {self.bin}/java; exit 0;;"
            for package, version in packages.items()
        )
        self.has(
            "apt-get",
            f"""echo "$*" >>{self.log}
if [ "$1" = update ]; then exit {update}; fi
for word; do last=$word; done
case $last in
{cases}
esac
echo "E: Unable to locate package" >&2
exit 100""",
        )

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [SHELL, str(ROOT / "scripts" / script), *arguments],
            env={"PATH": str(self.bin), **environment},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=30,
        )

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


def java(version: str) -> str:
    return f"""echo 'openjdk version "{version}" 2024-01-16' >&2; echo 'OpenJDK Runtime Environment' >&2"""


def quoted(script: str) -> str:
    return "'" + script.replace("'", "'\\''") + "'"


def chmod() -> str:
    return shutil.which("chmod") or "/bin/chmod"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


GOOD = ["17", "17.0.1", "21", "21.0.2", "22-ea", "25.0.1+8"]
OLD = ["1.8.0_392", "11.0.2", "16.0.1", "9"]


@pytest.mark.parametrize("version", GOOD)
def test_java_on_path(machine: Machine, version: str) -> None:
    machine.has_java(version)
    done = machine.run("java.sh")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"java {version}\n", "")


@pytest.mark.parametrize("version", GOOD)
def test_java_home_alone(machine: Machine, version: str) -> None:
    home = machine.folder / "a jdk"
    machine.has_java(version, home / "bin")
    done = machine.run("java.sh", JAVA_HOME=str(home))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"java {version} (JAVA_HOME)\n", "")


@pytest.mark.parametrize("version", OLD)
def test_java_too_old(machine: Machine, version: str) -> None:
    machine.has_java(version)
    done = machine.run("java.sh")
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert f"Java 17 or newer is needed (found {version})" in done.stderr
    assert "openjdk-17-jre-headless" in done.stderr


@pytest.mark.parametrize("version", OLD)
def test_java_home_too_old(machine: Machine, version: str) -> None:
    home = machine.folder / "jdk"
    machine.has_java(version, home / "bin")
    machine.has_java("17.0.1")  # Spark would not look here
    done = machine.run("java.sh", JAVA_HOME=str(home))
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert f"JAVA_HOME={home} has Java {version}, Spark needs 17" in done.stderr


def test_java_home_without_java(machine: Machine) -> None:
    machine.has_apt({"openjdk-17-jre-headless": "17.0.1"})  # would not help: JAVA_HOME still comes first
    done = machine.run("java.sh", JAVA_HOME=str(machine.folder / "nowhere"))
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "has no Java" in done.stderr
    assert machine.calls() == []


def test_java_missing(machine: Machine) -> None:
    done = machine.run("java.sh")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "millpond: Java 17 or newer is needed: install one, for example openjdk-17-jre-headless, and set JAVA_HOME or PATH"
    ]


def test_java_missing_where_apt_is_there_but_not_the_right(machine: Machine) -> None:
    machine.has_apt({"openjdk-17-jre-headless": "17.0.1"})
    machine.has("id", "echo 1000")
    assert machine.run("java.sh").returncode == 1
    assert machine.calls() == []


def test_java_that_does_not_run(machine: Machine) -> None:
    machine.has("java", "exit 1")
    assert machine.run("java.sh").returncode == 1


def test_java_with_other_lines_first(machine: Machine) -> None:
    machine.has("java", "echo 'Picked up JAVA_TOOL_OPTIONS: -Xmx1g' >&2; " + java("17.0.1"))
    assert machine.run("java.sh").stdout == "java 17.0.1\n"


@pytest.mark.parametrize("before", [None, "11.0.2"])
def test_java_is_installed_by_apt_as_root(machine: Machine, before: str | None) -> None:
    if before is not None:
        machine.has_java(before)
    machine.has_apt({"openjdk-17-jre-headless": "17.0.15", "default-jre-headless": "21"})
    done = machine.run("java.sh")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("java 17.0.15 (openjdk-17-jre-headless)\n")
    assert [call.split()[0] for call in machine.calls()] == ["update", "install"]


def test_a_newer_system_gives_its_default_java(machine: Machine) -> None:
    machine.has_apt({"default-jre-headless": "21.0.8"})
    done = machine.run("java.sh")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("java 21.0.8 (default-jre-headless)\n")
    assert [call.split()[-1] for call in machine.calls()[1:]] == [
        "openjdk-17-jre-headless",
        "default-jre-headless",
    ]


def test_an_older_system_whose_java_is_too_old(machine: Machine) -> None:
    machine.has_apt({"default-jre-headless": "11.0.2"})
    done = machine.run("java.sh")
    assert done.returncode == 1
    assert "apt-get gave no Java 17" in done.stderr


def test_apt_without_a_network(machine: Machine) -> None:
    machine.has_apt({}, update=100)
    done = machine.run("java.sh")
    assert done.returncode == 1
    assert "apt-get update failed: install Java 17" in done.stderr
    assert machine.calls() == ["update -qq"]


# Python


def python(machine: Machine, version: str, new_enough: bool) -> str:
    return f"""case "$1" in
-c) exit {0 if new_enough else 1};;
--version) echo 'Python {version}';;
-m) echo '{version}' "$@" >>{machine.log}; mkdir -p "$4/bin";;
esac"""


def test_the_first_python_that_will_do(machine: Machine) -> None:
    machine.has("python3", python(machine, "3.9.2", new_enough=False))
    machine.has("python3.13", "exit 127")  # a version manager's stand-in
    machine.has("python3.12", python(machine, "3.12.1", new_enough=True))
    done = machine.run("venv.sh", "env")
    assert (done.returncode, done.stdout, done.stderr) == (0, "creating env with Python 3.12.1\n", "")
    assert machine.calls() == ["3.12.1 -m venv --clear env"]


def test_a_python_can_be_named(machine: Machine) -> None:
    machine.has("python3", python(machine, "3.11.7", new_enough=True))
    machine.has("other", python(machine, "3.13.0", new_enough=True))
    assert machine.run("venv.sh", "env", PYTHON="other").stdout == "creating env with Python 3.13.0\n"


def test_no_python_that_will_do(machine: Machine) -> None:
    machine.has("python3", python(machine, "3.9.2", new_enough=False))
    done = machine.run("venv.sh", "env")
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "Python 3.11 or newer is needed" in done.stderr


def test_an_environment_that_is_there_stays(machine: Machine) -> None:
    machine.has("python", python(machine, "3.11.7", new_enough=True), machine.folder / "env" / "bin")
    done = machine.run("venv.sh", "env")
    assert (done.returncode, done.stdout, machine.calls()) == (0, "", [])


def test_a_python_without_venv(machine: Machine) -> None:
    machine.has("python3", 'case "$1" in -m) exit 1;; --version) echo Python 3.11.2;; esac')
    done = machine.run("venv.sh", "env")
    assert done.returncode == 1
    assert "install its venv module" in done.stderr


# CI and make


@pytest.mark.parametrize("failing", [[], ["check"], ["test"], ["check", "test"]])
def test_ci_runs_both_parts_and_fails_with_either(tmp_path: Path, failing: list[str]) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    machine = Machine(tmp_path)
    conditions = "\n".join(f'[ "$1" = {part} ] && exit 1' for part in failing)
    machine.has("make", f'echo "$1" >>{machine.log}\n{conditions}\nexit 0')
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    done = subprocess.run(
        [bash, str(script)],
        env={"PATH": f"{machine.bin}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert machine.calls() == ["check", "test"]
    assert done.returncode == (1 if failing else 0)
    assert done.stderr.splitlines() == [f"failed: make {part}" for part in failing]


def test_make_help_lists_every_target() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    listed = [line.split()[1] for line in done.stdout.splitlines()]
    assert listed == ["help", "setup", "demo", "test", "soak", "simulate", "chaos", "check", "bench", "clean"]
