"""Containers that tests fork are as those that users start: children, with their own command line, that end as they do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

import millpond as mp
from ready_containers import Ready


def await_true(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def pids(pond: mp.Pond) -> list[int]:
    return [each.pid for each in pond.containers()]


def command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")


def test_what_is_forked_is_as_what_is_started(tmp_path: Path, ready_containers: Ready) -> None:
    started = []
    for forks in (True, False):
        ready_containers.forks = forks
        try:
            with mp.open(tmp_path / "pond", slices=2) as pond:
                state = pond.state("s", key="long", value="long")
                update = state.update(key="k", at="t", value="v", name="feed")
                update(pa.table({"k": [1], "t": [len(started)], "v": [7]}), len(started))
                [pid] = pids(pond)
                started.append((pid, command_of(pid)[:-1]))
                assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == str(os.getpid())
                os.kill(pid, signal.SIGKILL)
                await_true(lambda pid=pid, pond=pond: pids(pond) not in ([], [pid]))  # type: ignore[misc]
                [last] = pids(pond)
        finally:
            ready_containers.forks = True
        assert not any(Path(f"/proc/{each}").exists() for each in (pid, last))
    forked, other = (command for _, command in started)
    where = [word for word in forked if word not in other]
    assert forked[:6] == other[:6]
    assert len(forked) == len(other)
    assert len(where) <= 1, "only the directory of sockets is a new one"
