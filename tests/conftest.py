"""What starts slowly is started once: Spark for all tests of a process, a pond of processes for all tests of a file."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

import millpond as mp
from millpond.coordinator import hosting
from ready_containers import Ready

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The first example of a test may compile a kernel, and machines differ: pytest's own timeout bounds a test instead.
settings.register_profile("millpond", deadline=None, print_blob=True)
settings.load_profile("millpond")

# A Java machine that lives for minutes never earns what its second compiler and its parallel collector take. To check
# the bytes of Spark's classes, which nobody doubts, takes a quarter of its start and of its first queries.
os.environ.setdefault(
    "SPARK_SUBMIT_OPTS",
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote",
)

# What a shell starts in the background ignores interruptions, and so would what tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests run in one worker, and all files that use Spark in the same one."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "spark" if uses_spark(config.rootpath / file) else file

    return Scheduling(config, log)


@cache
def uses_spark(file: Path) -> bool:
    return "spark: SparkSession" in file.read_text()


@pytest.fixture(scope="session", autouse=True)
def ready_containers() -> Iterator[Ready]:
    """Containers of this process's ponds are forked from one that is ready."""
    ready = Ready()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosting, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": ready.popen}))
        yield ready
    ready.stop()


@pytest.fixture(scope="module")
def started_as_ever(ready_containers: Ready) -> Iterator[None]:
    """For files whose promise includes how a container starts."""
    ready_containers.forks = False
    yield
    ready_containers.forks = True


@pytest.fixture(scope="session")
def spark_to_stop() -> Iterator[None]:
    yield
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is not None:
        session.stop()


@pytest.fixture
def spark(spark_to_stop: None) -> SparkSession:
    """One for all tests; after one that stopped it, it is started again.

    Four attempts for a task: in local mode Spark gives one, and nothing could be retried.
    """
    from millpond.apps.spark_session import start_spark

    return start_spark("millpond-tests", master="local[2,4]", compiled=False)


@pytest.fixture(scope="module")
def shared_pond(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[mp.Pond, Path]]:
    root = tmp_path_factory.mktemp("shared") / "pond"
    with mp.open(root, containers=2) as opened:
        yield opened, root


@pytest.fixture
def pond(shared_pond: tuple[mp.Pond, Path], spark: SparkSession) -> Iterator[mp.Pond]:
    """An empty pond for Spark: one for all tests of a file, each of which leaves it empty."""
    shared, root = shared_pond
    with mp.connect(shared.address, (root / "token").read_text(), spark=spark) as connected:
        yield connected
        for what in [*connected.states().values(), *connected.tables().values()]:
            connected.forget(what)


@pytest.fixture
def pond_root(shared_pond: tuple[mp.Pond, Path]) -> Path:
    return shared_pond[1]
