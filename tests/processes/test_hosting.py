"""Containers as child processes: how they start, end, and tell why."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import millpond as mp
from millpond.coordinator import hosting
from millpond.coordinator.hosting import Embedded
from millpond.coordinator.passes import Passes
from millpond.coordinator.service import CoordinatorService
from millpond.errors import ContainerFailed
from millpond.wire.base import Term
from millpond.wire.sockets import SocketDirectory
from patience import wait_until

pytestmark = pytest.mark.usefixtures("started_as_ever")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def exits() -> list[int]:
    return []


@pytest.fixture
def embedded(root: Path, exits: list[int]) -> Iterator[Embedded]:
    sockets = SocketDirectory.under(str(root))
    embedded = Embedded(str(root), sockets.path, 1, exits.append, Passes(str(root), "secret").container)
    yield embedded
    embedded.stop()
    sockets.remove()


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def traces() -> tuple[int, set[str], list[str]]:
    """What a start that failed must not leave: open files, threads, children."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return len(os.listdir("/proc/self/fd")), {t.name for t in threading.enumerate()}, children


def test_containers_come_go_and_tell_how_they_ended(
    embedded: Embedded, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = [embedded.start(0, Term(1)), embedded.start(1, Term(2))]
    assert embedded.last_words(0) == "has not ended"
    os.kill(hosts[0].pid, signal.SIGSEGV)
    wait_until(lambda: exits == [0])
    assert not embedded.alive(0)
    assert embedded.alive(1)
    assert embedded.last_words(0).startswith("ended by signal 11 (SIGSEGV): ")
    assert "(most recent call first)" in embedded.last_words(0), "its threads, or the last of them"
    # One that does not listen is killed.
    monkeypatch.setattr(hosting, "STOP_TIMEOUT_S", 0.5)
    os.kill(hosts[1].pid, signal.SIGSTOP)
    again = embedded.start(1, Term(3))
    assert is_gone(hosts[1].pid)
    assert again.pid != hosts[1].pid
    assert embedded.last_words(1) == "was ended by its pond"
    embedded.stop_one(1)
    assert is_gone(again.pid)
    assert not embedded.alive(1)
    assert exits == [0]


@pytest.mark.parametrize("cause", ["no interpreter", "no log", "no package"])
def test_a_start_that_fails_says_why_and_leaves_nothing(
    cause: str, root: Path, embedded: Embedded, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = traces()
    if cause == "no interpreter":
        monkeypatch.setattr(sys, "executable", str(root / "nothing"))
    elif cause == "no log":
        (root / "container-0.log").mkdir()
    else:
        monkeypatch.setattr(hosting, "_PACKAGE_PARENT", str(root))
        monkeypatch.setenv("PYTHONPATH", "")
        (root / "millpond").mkdir()
        (root / "millpond" / "__init__.py").write_text("raise ImportError('no such luck')")
    with pytest.raises(ContainerFailed) as raised:
        embedded.start(0, Term(1))
    assert raised.value.container == 0
    expected = {"no interpreter": "nothing", "no log": "Is a directory", "no package": "no such luck"}
    assert expected[cause] in str(raised.value)
    assert traces() == before
    assert not embedded.alive(0)
    assert not exits


def test_several_that_do_not_listen_are_ended_at_once(
    embedded: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "STOP_TIMEOUT_S", 4.0)
    pids = [embedded.start(number, Term(1)).pid for number in range(2)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    embedded.stop()
    assert time.monotonic() - started < 7.8, "not one after the other"
    assert all(map(is_gone, pids))


def test_upkeep_goes_on_after_a_thread_could_not_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[float] = []

    def no_thread(_coordinator: CoordinatorService) -> None:
        calls.append(time.monotonic())
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(CoordinatorService, "maintain", no_thread)
    with mp.open(tmp_path / "pond", threads=1):
        deadline = time.monotonic() + 30
        while len(calls) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
    assert len(calls) >= 2
