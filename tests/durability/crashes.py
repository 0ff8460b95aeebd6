"""What tests of crashes share: losses, files that die, and how a history runs until it is cut off."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import pytest

from millpond.durable.crashpoints import SimulatedCrash, armed, counted
from millpond.testing import LossyFiles

_T = TypeVar("_T")

THEN = {1: 3, 3: 2}
"""How many containers each history goes on with when it reopens the pond."""

CONTAINERS = (pytest.param(1, marks=pytest.mark.long), 3)
"""With how many each history begins. One container alone shows little that three do not, nor the simulator."""

LOSSES = (("nothing", 0), ("all", 0), ("content", 0), ("names", 0), ("some", 1), ("some", 2))
AGAIN = (3, 1, 2, 4)
"""How many containers reopen the pond after a crash, by turns."""


class Step(Protocol):
    """One step of a history, in a world that has a pond."""

    def on_pond(self, world: Any) -> None: ...


def hits_of(world: Any, steps: Sequence[Step]) -> dict[str, int]:
    """How often a history comes to each crash point when nothing fails."""
    with counted() as plans:
        for step in steps:
            step.on_pond(world)
    return {point: plan.hits for point, plan in plans.items()}


def run_until_crash(world: Any, steps: Sequence[Step]) -> int:
    """How many steps were acknowledged."""
    for done, step in enumerate(steps):
        try:
            step.on_pond(world)
        except SimulatedCrash:
            return done
    return len(steps)


class Cut(NamedTuple):
    """A history that ended at some moment: the files as they were, and how many steps were acknowledged."""

    files: LossyFiles
    acknowledged: int


Moment = tuple[str, int]
"""A crash point, and at which of its hits."""


def cuts_of(world: Any, steps: Sequence[Step], moments: Iterable[Moment]) -> dict[Moment, Cut]:
    """What a crash at each of the moments would leave. One run finds it for all: a crash writes nothing more."""
    cuts: dict[Moment, Cut] = {}
    done = 0

    def cut(moment: Moment) -> None:
        cuts[moment] = Cut(frozen(world.files), done)

    with ExitStack() as stack:
        for moment in moments:
            stack.enter_context(armed(*moment, action=lambda _, moment=moment: cut(moment)))
        for done, step in enumerate(steps):  # noqa: B007 - `cut` reads it
            step.on_pond(world)
    return cuts


def frozen(files: LossyFiles) -> LossyFiles:
    """The files as they are now, with all that is not synced: what `halt` would keep of them."""
    twins: dict[Any, Any] = {}

    def twin(inode: Any) -> Any:
        return inode and twins.setdefault(inode, replace(inode))

    copied = LossyFiles(files.seed)
    copied.crashes = files.crashes
    copied._names = {path: twin(inode) for path, inode in files._names.items()}
    copied._durable_names = {path: twin(inode) for path, inode in files._durable_names.items()}
    copied._directories = set(files._directories)
    copied._pending = [
        replace(change, inode=twin(change.inode)) if hasattr(change, "inode") else change
        for change in files._pending
    ]
    return copied


def chosen(hits: Sequence[_T]) -> list[_T]:
    """One in the middle, and the last; in a soak also the first, and the two before the last."""
    soaked = {0, len(hits) - 3, len(hits) - 2} if "MILLPOND_SOAK" in os.environ else set()
    places = {len(hits) // 2, len(hits) - 1, *soaked}
    return [hit for place, hit in enumerate(hits) if place in places]


def after(files: LossyFiles, lose: str, seed: int) -> LossyFiles:
    """What the next process finds. May be asked again and again, for other losses."""
    files.seed = seed
    return files.crash(lose)  # type: ignore[arg-type]


def content(files: LossyFiles) -> frozenset[tuple[str, bytes]]:
    return frozenset((path, inode.content) for path, inode in files._names.items())


def outcomes_of(files: LossyFiles) -> list[tuple[str, int]]:
    """The losses that leave different files behind."""
    distinct: dict[frozenset[tuple[str, bytes]], tuple[str, int]] = {}
    for lose, seed in LOSSES:
        distinct.setdefault(content(after(files, lose, seed)), (lose, seed))
    return list(distinct.values())


def cuts_at_changes(
    make: Callable[[LossyFiles], Any], steps: Sequence[Step], first: int, every: int
) -> list[Cut]:
    """What a crash before the first change of the disk, and before every so many after it, would leave."""
    cuts: list[Cut] = []
    done = 0

    def cut(change: int) -> None:
        if change % every == first % every:
            cuts.append(Cut(frozen(files), done))

    files = CountedFiles(cut)
    world = make(files)
    for done, step in enumerate(steps):  # noqa: B007 - `cut` reads it
        step.on_pond(world)
    return cuts


class CountedFiles(LossyFiles):
    """Calls `before` with the number of each change of the disk, before it is made."""

    def __init__(self, before: Callable[[int], None]) -> None:
        super().__init__()
        self.changes = 0
        self.before = before

    def _count(self) -> None:
        self.changes += 1
        self.before(self.changes)


def _counting(name: str) -> Any:
    def change(self: CountedFiles, *arguments: Any, **named: Any) -> Any:
        self._count()
        return getattr(LossyFiles, name)(self, *arguments, **named)

    return change


for _name in ("write", "sync", "rename", "sync_dir", "remove", "remove_dir"):
    setattr(CountedFiles, _name, _counting(_name))
