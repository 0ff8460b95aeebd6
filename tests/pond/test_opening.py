"""What opening a pond with a Spark session looks at first: whether its workers can do a pond's work."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import millpond as mp
from millpond.coordinator.journal import Journal
from millpond.coordinator.service import CoordinatorService
from millpond.durable.files import OsFiles
from millpond.errors import PondInUse, WorkersUnfit
from millpond.pond.workers import check_workers
from patience import wait_until

OTHER = "/nowhere/bin/python3"


class Context:
    """A session, as far as it is looked at. `answer` is what its one task gives, or fails with."""

    def __init__(self, answer: Any, master: str = "local[2]", python: str = "python3") -> None:
        self.sparkContext = self
        self.master = master
        self.pythonExec = python
        self.jobs = 0
        self._answer = answer

    def parallelize(self, rows: list[int], slices: int) -> Any:
        assert (rows, slices) == ([0], 1)
        return SimpleNamespace(map=lambda task: SimpleNamespace(collect=lambda: self._collect(task)))

    def _collect(self, task: Callable[[int], Any]) -> list[Any]:
        self.jobs += 1
        if isinstance(self._answer, Exception):
            raise self._answer
        return [task(0) if self._answer is None else self._answer]


@pytest.fixture(autouse=True)
def python_of_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The `python3` of PATH is another one than this, and nobody chose."""
    python = tmp_path / "python3"
    python.touch(mode=0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    return python


def test_on_this_machine_workers_run_this_python_unless_another_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unchosen = Context(None)
    check_workers(unchosen)
    assert unchosen.pythonExec == sys.executable
    cluster, chosen = Context(None, "yarn"), Context(None, python=OTHER)
    check_workers(cluster)
    check_workers(chosen)
    assert (cluster.pythonExec, chosen.pythonExec) == ("python3", OTHER)
    monkeypatch.setenv("PYSPARK_PYTHON", "python3")
    chosen = Context(None)
    check_workers(chosen)
    assert chosen.pythonExec == "python3"


def test_the_python_of_an_active_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    active = Context(None)
    check_workers(active)
    assert active.pythonExec == "python3"


def test_a_session_is_looked_at_once() -> None:
    context = Context(None)
    check_workers(context)
    check_workers(context)
    assert context.jobs == 1
    context.pythonExec = OTHER
    check_workers(context)
    assert context.jobs == 2


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((OTHER, "", "ModuleNotFoundError: No module named 'millpond'"), "No module named 'millpond'"),
        ((OTHER, "", "ImportError: No module named 'pyarrow'"), "'pyarrow'"),
        ((OTHER, "9.9", ""), f"millpond 9.9, and here is {mp.__version__}"),
        (RuntimeError("o1\n[PYTHON_VERSION_MISMATCH] Python in worker has 3.9"), "Python in worker has 3.9"),
        (
            RuntimeError(f'x: java.io.IOException: Cannot run program "{OTHER}": error=2'),
            "Cannot run program",
        ),
        (
            RuntimeError("Traceback\n  File\npyspark.errors.PickleError: no way\n\tat java"),
            "PickleError: no way",
        ),
        (RuntimeError("gone"), "gone"),
    ],
)
def test_what_is_wrong_with_workers_is_said_before_anything_is_opened(
    tmp_path: Path, answer: Any, says: str
) -> None:
    for master, mends in (("local[2]", f"PYSPARK_PYTHON={sys.executable}"), ("yarn", "spark.pyspark.python")):
        context = Context(answer, master, OTHER)
        with pytest.raises(WorkersUnfit) as refused:
            mp.open(tmp_path / "pond", spark=context)
        assert says in refused.value.message
        assert mends in refused.value.hint
        assert refused.value.python == OTHER
        with pytest.raises(WorkersUnfit):
            mp.connect("127.0.0.1:1", "token", spark=context)
        assert context.jobs == 2
    assert not (tmp_path / "pond").exists()


def test_upkeep_goes_on_whatever_went_wrong_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A pond whose upkeep had ended would bring back no container, and renew no credentials."""
    twice = threading.Event()
    failures: list[str] = []

    def fail(coordinator: CoordinatorService) -> None:
        failures.append("can't start new thread")
        if len(failures) == 2:
            twice.set()
        raise RuntimeError(failures[-1])

    monkeypatch.setattr(CoordinatorService, "maintain", fail)
    with mp.open(tmp_path / "pond"):
        assert twice.wait(20)


def test_a_pond_whose_root_is_anothers_ends_its_containers_and_leaves_all_files(tmp_path: Path) -> None:
    """As where a file system's locks do not work: the journal tells who has it."""
    root = tmp_path / "pond"
    with mp.open(root, threads=1, slices=1) as pond:
        state = pond.state("s", key="long", value="long")
        state.update(key="k", at="t", value="v", name="feed")(pa.table({"k": [1], "t": [1], "v": [1]}), 0)
        (container,) = pond.containers()
        journal = Journal(OsFiles(), str(root))
        record = journal.load()
        assert record is not None
        journal.write(record)
        wait_until(lambda: not Path(f"/proc/{container.pid}").exists(), 30)
        with pytest.raises(PondInUse, match="another coordinator"):
            state.snapshot()
        before = {path for path in root.rglob("*") if not path.is_socket()}
    assert {root / "tasks.json", root / "sockets"} < before
    assert all(path.exists() for path in before), "they are the other one's by now"
    with mp.open(root, threads=1) as pond:
        pond.state("s").finish("feed")
        assert pond.state("s").snapshot()["value"].to_pylist() == [1]
