"""Epochs that are decided and not yet visible, whose drivers did not wait: who waits, who tries again, who is told."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from millpond.coordinator.commits import VISIBLE_S_MAX, Commits, Unseen
from millpond.coordinator.epochs import Decided, EpochCommit, Replied
from millpond.errors import BadMessage, ContainerFailed, Unavailable
from millpond.runtime import Serial
from millpond.wire.base import Done, Term, Turn
from millpond.wire.epochs import CommitEpoch, EpochCommitted, Prepared
from millpond.wire.states import RowsWork


class Containers:
    """One, that is away until it is said to be there."""

    ids = (0,)

    def __init__(self) -> None:
        self.live: tuple[int, ...] = ()
        self.brought = 0

    def ask(self, container: int, message: Any) -> Done:
        if not self.live:
            raise Unavailable("away", address="")
        return Done()

    def await_back(self, container: int, term: Term, is_needed: object = None) -> Term:
        self.brought += 1
        if self.live:
            return term
        raise ContainerFailed("it does not start", container=container)


def message(**options: Any) -> CommitEpoch:
    whole = {"delay": 0, "late_below": -math.inf, "time_kind": "", "receipts": [], "work": RowsWork()}
    return CommitEpoch("s", "feed", "q", Turn(0), "continue", **(whole | options))


class Scene:
    """A State with an epoch that is decided, and was answered early."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runtime = Serial()
        self.containers = Containers()
        memory: Any = SimpleNamespace(lock=self.runtime.lock(), record=None, in_doubt=False)
        self.commits = Commits(memory, self.containers, None, None, self.runtime)  # type: ignore[arg-type]
        monkeypatch.setattr(self.commits, "tell_progress", lambda name: None)
        monkeypatch.setattr(self.commits, "_note_end", lambda message: None)
        commit = EpochCommit(message(early=True), {0: Term(1)}, 1, {"feed": -math.inf})
        commit.on(Replied(0, Prepared(term=Term(1), rows=0, digest=0)))
        commit.on(Decided(EpochCommitted(Turn(0), 0, 0, 0, replayed=False)))
        self.commits._unseen["s"] = Unseen(commit, self.runtime.now())

    @property
    def is_visible(self) -> bool:
        return not self.commits._unseen


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_who_asks_waits_once_and_starts_nothing(scene: Scene) -> None:
    scene.commits.await_visible("s")
    assert scene.runtime.now() == pytest.approx(VISIBLE_S_MAX, abs=0.1)
    scene.commits.await_all_visible()
    assert scene.runtime.now() == pytest.approx(VISIBLE_S_MAX, abs=0.1), "counted from the decision"
    assert scene.containers.brought == 0
    assert not scene.is_visible


def test_upkeep_tries_again_once_containers_serve(scene: Scene) -> None:
    scene.commits.show_early()
    assert scene.containers.brought == 0, "that is done elsewhere, with pauses"
    scene.containers.live = (0,)
    scene.commits.show_early()
    assert scene.is_visible
    scene.commits.await_visible("s")
    assert scene.runtime.now() == 0


def test_whoever_comes_next_is_told_why_it_is_not_visible(scene: Scene) -> None:
    with pytest.raises(ContainerFailed), scene.commits.paused(["s"]):
        pass
    assert not scene.is_visible
    scene.containers.live = (0,)
    with scene.commits.paused(["s"]):
        assert scene.is_visible


def test_no_thread_to_be_had_is_no_error(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn(work: Any, name: str) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(scene.runtime, "spawn", spawn)
    scene.containers.live = (0,)
    scene.commits.show_early()
    assert not scene.is_visible


def test_outputs_that_are_owed_are_not_early() -> None:
    with pytest.raises(BadMessage):
        message(early=True, owes=True)


def test_slices_that_are_to_move_wait_no_longer_for_what_is_not_visible_than_for_epochs(scene: Scene) -> None:
    """It may take minutes, and epochs of other residents are held up meanwhile."""
    left: list[Any] = []
    scene.runtime.spawn = lambda work, name: left.append(work)  # type: ignore[method-assign]
    with scene.commits.paused_soon(["a", "s"], 0.2) as is_paused:
        assert not is_paused
        assert scene.commits._locks["a"].acquire(timeout=0)
    assert scene.runtime.now() == pytest.approx(0.2, abs=0.02)
    assert scene.containers.brought == 0, "not by that hand"
    assert len(left) == 1
    scene.containers.live = (0,)
    left.pop()()
    assert scene.is_visible
    with scene.commits.paused_soon(["a", "s"], 0.2) as is_paused:
        assert is_paused
