"""A pond that `millpond serve` runs is killed in the middle of a move, at one step after the other, and served again.

Run as a script, this file is `millpond serve` in a process that kills itself at a step.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from chaos_load import FEEDS, Feed, History, Reader, Worker, await_true, held_by
from test_kill import await_none_at

import millpond as mp
from millpond.coordinator.membership import Membership
from millpond.coordinator.migrations import Migrations
from millpond.coordinator.slices import Slices
from millpond.errors import BadOption, MillpondError, StageLost, Unavailable
from millpond.pond.figures import too_few_backups

SLICES = 9
MOMENTS = [
    *("copies.Copy before", "copies.Enter after", "wire.GetReady before", "switches.Promote after"),
    *("switches.Demote after", "switches.Enter before", "switches.Enter after", "switches.Confirm after"),
]
AWAY = (Unavailable, StageLost, BadOption)
"""While nobody serves; the last is of a pond that the test has closed."""


class Served:
    """A process that serves the pond, and clients that update and fetch."""

    def __init__(
        self, process: subprocess.Popen[str], root: Path, history: History, feeds: list[Feed]
    ) -> None:
        self.process = process
        assert process.stdout is not None
        address = process.stdout.readline().split(" at ")[1].partition(",")[0]
        self.pond = mp.connect(address, (root / "token").read_text())
        self.pond.state("s", key="string", value="long")
        self._history = history
        self.check()
        self.feeds = [Feed(name, self.pond, history, AWAY) for name in FEEDS]
        for before, feed in zip(feeds, self.feeds, strict=False):
            feed._next = before._next  # what was not acknowledged comes again
        self.workers: list[Worker] = [*self.feeds, Reader("reader", self.pond, history, 1, AWAY)]
        for worker in self.workers:
            worker.start()

    def check(self) -> None:
        """Each slice has one owner, and all that is final is there, once."""
        until = self.pond.state("s").progress().update
        assert until == -math.inf or held_by(self.pond) == self._history.below(until)
        owners = list(self.pond.placement().values())
        assert len(owners) == SLICES
        containers = self.pond.metrics()["containers"]
        owned = {container: own["slices"] for container, own in containers.items()}
        assert owned == {container: owners.count(container) for container in owned}

    def go_on(self) -> None:
        before = {worker.name: worker.done for worker in self.workers}
        await_true(
            lambda: all(worker.done > before[worker.name] + 1 for worker in self.workers),
            60,
            lambda: f"stuck: {[w.name for w in self.workers if w.done <= before[w.name] + 1]}",
            self.check_workers,
        )

    def check_workers(self) -> None:
        for worker in self.workers:
            if worker.failure is not None:
                raise AssertionError(f"{worker.name}: {worker.failure!r}") from worker.failure

    def be_whole(self) -> None:
        await_true(
            lambda: not too_few_backups(self.pond.metrics()["slices"]),
            60,
            lambda: "backups are missing",
            self.check_workers,
        )

    def move_until_killed(self, containers: int) -> None:
        """Slices to and fro: which of them must be copied hangs on who holds backups."""
        with suppress(MillpondError):
            for target in [*range(containers)] * 3:
                source = (target + 1) % containers
                mine = [number for number, owner in self.pond.placement().items() if owner == source]
                self.pond.move(mine, to=target)
        assert self.process.wait(30) == -signal.SIGKILL, "the planned end did not come"

    def end(self) -> None:
        for worker in self.workers:
            worker.end()
        if self.process.poll() is not None:
            self.pond.close()  # else they go on asking for long
        for worker in self.workers:
            worker.join()
        self.check_workers()

    def finish(self) -> None:
        """Nothing comes any more: all is there, and nothing twice."""
        self.end()
        for feed in self.feeds:
            if feed._next is not None:
                feed.work()
        for name in FEEDS:
            self.pond.state("s").finish(name)
        self.check()
        versions = sum(len(own) for own in self._history.oracle.versions.values())
        assert self.pond.metrics()["states"]["s"]["versions"] == versions


@contextmanager
def served(root: Path, moment: str, containers: int, history: History, feeds: list[Feed]) -> Iterator[Served]:
    command = [sys.executable, __file__, moment, "serve", "--root", str(root), "--slices", str(SLICES)]
    options = ["--containers", str(containers), "--threads", "1", "--backups", str(containers - 2)]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Served(process, root, history, feeds)
        finally:
            process.kill()
    await_none_at(root)


@pytest.mark.long
@pytest.mark.parametrize("containers", [2, 3], ids=["without backups", "with backups"])
def test_the_process_that_serves_is_killed_while_slices_move(tmp_path: Path, containers: int) -> None:
    root, history, feeds = tmp_path / "pond", History(23), list[Feed]()
    for moment in MOMENTS:
        with served(root, moment, containers, history, feeds) as server:
            server.be_whole()
            server.go_on()
            server.move_until_killed(containers)
            feeds = server.feeds
            server.end()
    with served(root, "", containers, history, feeds) as server:
        server.go_on()
        server.finish()


def die_at(moment: str) -> None:
    """This process kills itself when it comes to that step of a move."""
    moving: list[int] = []

    def around(owner: type, name: str, name_of: Any) -> None:
        work = getattr(owner, name)

        def wrapped(*given: Any, **named: Any) -> Any:
            step = name_of(*given)
            for side in ("before", "after"):
                if side == "after":
                    done = work(*given, **named)
                if moving and f"{step} {side}" == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
            return done

        setattr(owner, name, wrapped)

    around(Migrations, "_copy", lambda self, effect: f"copies.{type(effect).__name__}")
    around(Slices, "_switch", lambda self, switch, effect: f"switches.{type(effect).__name__}")
    around(Membership, "ask", lambda self, container, message: f"wire.{type(message).__name__}")
    move = Migrations.move

    def moves(*given: Any, **named: Any) -> None:
        moving.append(1)
        move(*given, **named)
        moving.pop()

    Migrations.move = moves  # type: ignore[method-assign]


if __name__ == "__main__":
    from millpond.cli import main

    die_at(sys.argv.pop(1))
    main()
