"""A pond that changes its size and loses containers while it is at work: each promise by itself; `test_chaos.py` mixes them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos import files_of
from chaos_load import Auditor, Feed, History, Ledgers, Reader, Transactions, Worker, await_true, held_by
from test_kill import await_none_at
from test_transactions_kill import operators, tables_of

import millpond as mp
from millpond.errors import BadOption, PondInUse
from millpond.pond import scaling
from millpond.pond.figures import too_few_backups

SLICES = 8
GAP_S_MAX = 5.0
"""On a machine that others use, too: what a move costs is for the bench to tell."""


class Scene:
    """A pond with a State that is updated and read, and accounts that are."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pond = mp.open(root, containers=2, threads=1, slices=SLICES, backups=1)
        self.pond.state("s", key="string", value="long")
        self.history, self.ledgers = History(11), Ledgers()
        ledger, _ = operators(self.pond)
        self.transfers = Transactions("ledger", ledger, self.ledgers.transfers, 0)
        self.reader = Reader("reader", self.pond, self.history, 1)
        self.workers: list[Worker] = [
            Feed("even", self.pond, self.history),
            Feed("odd", self.pond, self.history),
            self.reader,
            self.transfers,
            Auditor(self.pond, self.ledgers, self.transfers),
        ]
        for worker in self.workers:
            worker.start()
        self.go_on()

    def go_on(self) -> None:
        """All that is at work got somewhere, and nothing was told or done wrong."""
        before = {worker.name: worker.done for worker in self.workers}
        await_true(
            lambda: all(worker.done > before[worker.name] + 1 for worker in self.workers),
            60,
            lambda: f"stuck: {[w.name for w in self.workers if w.done <= before[w.name] + 1]}",
            self.check,
        )

    def check(self) -> None:
        for worker in self.workers:
            if worker.failure is not None:
                raise AssertionError(f"{worker.name}: {worker.failure!r}") from worker.failure

    def be_whole(self) -> None:
        """Every slice has a backup."""
        await_true(
            lambda: (
                all(move.is_over for move in self.pond.moves())
                and not too_few_backups(self.pond.metrics()["slices"])
            ),
            60,
            lambda: f"{too_few_backups(self.pond.metrics()['slices'])} have no backup",
            self.check,
        )

    def promoted(self, victim: int) -> int:
        """Slices that others than the victim serve, because they held them."""
        containers = self.pond.metrics()["containers"]
        return sum(int(own.get("slices_promoted", 0)) for c, own in containers.items() if c != victim)

    def await_restart(self, victim: int, pid: int) -> None:
        await_true(
            lambda: any(each.id == victim and each.pid != pid for each in self.pond.containers()),
            60,
            lambda: f"container {victim} is not back",
            self.check,
        )

    def end(self) -> None:
        for worker in self.workers:
            worker.end()
        for worker in self.workers:
            worker.join()
        self.check()

    def compare(self, pond: mp.Pond) -> None:
        assert held_by(pond) == self.history.below(pond.state("s").progress().update)
        tables = tables_of(pond)
        assert {name: tables[name] for name in ("accounts", "log")} == {
            name: self.ledgers.model.tables()[name] for name in ("accounts", "log")
        }


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One for all tests. At the end all that it holds is compared, and again when it was opened anew."""
    root = tmp_path_factory.mktemp("elastic") / "pond"
    scene = Scene(root)
    try:
        with scene.pond:
            yield scene
            scene.end()
            scene.compare(scene.pond)
        with mp.open(root, containers=1, threads=1) as pond:
            scene.compare(pond)
    finally:
        await_none_at(root)


def test_slices_move_while_all_goes_on(scene: Scene) -> None:
    scene.be_whole()
    placement = scene.pond.placement()
    mine = [number for number, owner in placement.items() if owner == 0][:3]
    scene.reader.gap_s_max = 0.0
    moves = scene.pond.move(mine, to=1)
    scene.go_on()
    sys.stdout.write(f"longest gap between answers: {1000 * scene.reader.gap_s_max:.0f} ms\n")
    assert [(move.source, move.target, move.stage) for move in moves] == [(0, 1, "moved")]
    assert scene.pond.placement() == {**placement, **dict.fromkeys(mine, 1)}
    assert scene.reader.gap_s_max < GAP_S_MAX
    assert scene.pond.move(mine, to=1) == [], "they are there already"


def test_moves_that_cannot_be_are_refused(scene: Scene) -> None:
    before = scene.pond.placement()
    for slices, to, option in (
        ([0, SLICES], 0, "slices"),
        (-1, 0, "slices"),
        ([True], 0, "slices"),
        (0, 7, "to"),
    ):
        with pytest.raises(BadOption) as caught:
            scene.pond.move(slices, to=to)
        assert caught.value.option == option
        assert caught.value.hint
    for containers in (0, SLICES + 1):
        with pytest.raises(BadOption) as caught:
            scene.pond.scale(containers)
        assert caught.value.option == "containers"
    with pytest.raises(BadOption):
        scene.pond.scale()
    for bounds in (3, (1, 2, 3), (2, 1), (0, 1)):
        with pytest.raises(BadOption) as caught:
            scene.pond.autoscale(bounds)  # type: ignore[arg-type]
        assert caught.value.option == "containers"
        assert caught.value.hint
    assert scene.pond.placement() == before
    assert len(scene.pond.containers()) == 2


def test_a_caller_that_is_interrupted_does_no_harm(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The move goes on by itself."""

    def interrupt(_: object) -> bool:
        raise KeyboardInterrupt

    mine = [number for number, owner in scene.pond.placement().items() if owner == 1]
    with monkeypatch.context() as patch:
        patch.setattr(scaling, "_is_over", interrupt)
        with pytest.raises(KeyboardInterrupt):
            scene.pond.move(mine, to=0)
    await_true(lambda: all(move.is_over for move in scene.pond.moves()), 60, lambda: "moves do not end")
    scene.go_on()
    assert scene.pond.placement() == dict.fromkeys(range(SLICES), 0)


def test_threads_change_and_nothing_moves(scene: Scene) -> None:
    placement, moves = scene.pond.placement(), len(scene.pond.moves())
    pids = {each.pid for each in scene.pond.containers()}
    for threads in (2, 1):
        scene.pond.scale(threads=threads)
        assert [own["threads"] for own in scene.pond.metrics()["containers"].values()] == [threads] * 2
    scene.go_on()
    assert (scene.pond.placement(), len(scene.pond.moves())) == (placement, moves)
    assert {each.pid for each in scene.pond.containers()} == pids


def test_the_number_of_containers_changes_while_all_goes_on(scene: Scene) -> None:
    for containers in (3, 1, 2):
        before = scene.pond.placement()
        scene.pond.scale(containers)
        scene.go_on()
        after = scene.pond.placement()
        shares = [list(after.values()).count(each.id) for each in scene.pond.containers()]
        assert len(shares) == containers
        assert max(shares) - min(shares) <= 1
        if containers == 2:
            moved = [number for number in before if before[number] != after[number]]
            assert len(moved) == SLICES // 2, "only those move that must"


def test_a_killed_container_is_relieved_by_those_who_hold_its_slices(scene: Scene) -> None:
    scene.be_whole()
    victim = next(each for each in scene.pond.containers() if each.slices)
    promoted = scene.promoted(victim.id)
    os.kill(victim.pid, signal.SIGKILL)
    await_true(lambda: victim.id not in scene.pond.placement().values(), 20, lambda: "it is not relieved")
    scene.go_on()
    scene.await_restart(victim.id, victim.pid)
    assert scene.promoted(victim.id) >= promoted + len(victim.slices), (
        "slices came from elsewhere than from backups"
    )


def test_a_stopped_container_is_relieved(scene: Scene) -> None:
    scene.be_whole()
    victim = next(each for each in scene.pond.containers() if each.slices)
    began = time.monotonic()
    os.kill(victim.pid, signal.SIGSTOP)
    await_true(lambda: victim.id not in scene.pond.placement().values(), 30, lambda: "it is not relieved")
    sys.stdout.write(f"relieved after {time.monotonic() - began:.1f} s\n")
    scene.await_restart(victim.id, victim.pid)
    scene.go_on()


def test_a_container_is_lost_with_its_disk(scene: Scene) -> None:
    scene.be_whole()
    victim = next(each for each in scene.pond.containers() if each.slices)
    os.kill(victim.pid, signal.SIGSTOP)
    files = files_of(scene.root, victim.id)
    assert files
    os.kill(victim.pid, signal.SIGKILL)
    for path in files:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    scene.await_restart(victim.id, victim.pid)
    scene.go_on()
    scene.be_whole()


def test_a_directory_that_is_removed_under_a_container_that_serves(scene: Scene) -> None:
    scene.be_whole()
    victim = next(each for each in scene.pond.containers() if each.slices)
    # Stopped for a moment: what it writes while a directory is removed would keep the directory there.
    os.kill(victim.pid, signal.SIGSTOP)
    for path in files_of(scene.root, victim.id):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    os.kill(victim.pid, signal.SIGCONT)
    scene.await_restart(victim.id, victim.pid)
    scene.go_on()
    scene.be_whole()


def test_another_process_does_not_open_the_same_root(scene: Scene) -> None:
    script = "import sys, millpond as mp\ntry: mp.open(sys.argv[1])\nexcept mp.MillpondError as e: print(type(e).__name__, e)"
    told = subprocess.run(
        [sys.executable, "-c", script, str(scene.root)], capture_output=True, text=True, timeout=60
    )
    assert told.stdout.startswith(PondInUse.__name__), told
    assert str(scene.root) in told.stdout
    scene.go_on()
