"""Windows under crashes: what is open is what acknowledged epochs left, and what each fired is given again as it was."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import pytest
from crashes import AGAIN, Cut, Moment, after, chosen, content, cuts_of, hits_of, outcomes_of

import millpond.testing.local
from millpond.durable.crashpoints import POINTS, SCRATCH_POINTS, armed
from millpond.ops.window import WindowSource
from millpond.stores.windows import spill_log
from millpond.stores.windows.spilled_panes import SpilledPanes
from millpond.stores.windows.unaligned import UnalignedRows
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.testing.simulation.windows import (
    CELLS,
    SHAPES,
    WHOLE,
    WindowModel,
    commit,
    draw_window,
)

CASES = {
    "tumbling": (SHAPES["tumbling"], CELLS, None),
    "session on disk": (SHAPES["session"], WHOLE, 0),
    "counted": (SHAPES["counted"], WHOLE, None),
    "tumbling rows on disk": (SHAPES["tumbling"], WHOLE, 0),
    "tumbling cells on disk": (SHAPES["tumbling"], CELLS, 0),
}
FIRST, *OTHERS = list(CASES)[:3]
ON_DISK = [case for case, (_, _, window_bytes) in CASES.items() if window_bytes == 0]
EPOCHS = 12
RECORDS = 3
"""Of a log, so many until upkeep looks whether it is too long."""


@pytest.fixture(autouse=True)
def short_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = millpond.testing.local.BOUNDS._replace(log_records=RECORDS)
    monkeypatch.setattr(millpond.testing.local, "BOUNDS", bounds)


@cache
def model_of(case: str) -> WindowModel:
    """Two sources by turns."""
    shape, aggregated, _ = CASES[case]
    drawn = next(
        model
        for seed in range(1000)
        if len((model := draw_window(Random(seed), "w")).delays) == 2 and len(model.turns) >= EPOCHS
    )
    return WindowModel("w", shape, aggregated, drawn.delays, drawn.turns[:EPOCHS], apart=False, to_sink=False)


class World:
    """A pond that may be started again and again on the same files."""

    def __init__(self, files: LossyFiles, case: str) -> None:
        self.files = files
        self.case = case
        self.model = model_of(case)
        self.pond: LocalPond

    def start(self, containers: int) -> None:
        self.pond = LocalPond(self.files, containers=containers, slices=4, window_bytes=CASES[self.case][2])
        window = self.model.resident(self.pond)
        self.window = window
        self.sources: dict[str, WindowSource] = {
            name: window.over(key="k", at="t", delay=delay, name=name)
            for name, delay in self.model.delays.items()
        }

    def feed(self, place: int) -> None:
        turn = self.model.turns[place]
        fired = commit(self.pond, self.sources[turn.source], turn, Random(place))
        assert in_order(fired) == in_order(self.model.expected[place]), f"turn {place}: {turn}"

    def finish(self) -> None:
        fired = [row for source in self.sources.values() for row in source.finish().to_pylist()]
        assert in_order(fired) == in_order(self.model.left)


@dataclass(frozen=True)
class Start:
    containers: int

    def on_pond(self, world: World) -> None:
        world.start(self.containers)


@dataclass(frozen=True)
class Feed:
    place: int

    def on_pond(self, world: World) -> None:
        world.feed(self.place)


class Upkeep:
    """Windows rest on the log, or do not."""

    def on_pond(self, world: World) -> None:
        world.pond.maintain()


class Checkpoint:
    def on_pond(self, world: World) -> None:
        world.pond.checkpoint()


class Finish:
    def on_pond(self, world: World) -> None:
        world.finish()


def history() -> list[Any]:
    """Windows rest on the log from the first; are in a snapshot; are left to the log again; and move."""
    steps: list[Any] = [Start(2)]
    for place in range(EPOCHS):
        steps += [Feed(place), Upkeep()]
        if place == EPOCHS // 3:
            steps.append(Checkpoint())
        if place == 2 * EPOCHS // 3:
            steps += [Start(3), Upkeep()]
    return [*steps, Finish(), Upkeep()]


@cache
def cuts(case: str) -> dict[Moment, Cut]:
    hits = hits_of(World(LossyFiles(), case), history())
    moments = [(point, hit) for point, count in hits.items() for hit in chosen(range(1, count + 1))]
    # Every record that upkeep lets go, and every manifest that says so.
    moments += [(point, hit) for point in RESTING for hit in range(1, hits[point] + 1, 3)]
    return cuts_of(World(LossyFiles(), case), history(), dict.fromkeys(moments))


RESTING = ("manifest.rename.after", "truncate.after")


def in_order(rows: list[Any]) -> list[str]:
    return sorted(repr(sorted(row.items())) for row in rows)


def check(case: str, cut: Cut, lose: str, seed: int, again: int) -> None:
    steps = history()
    world = World(after(cut.files, lose, seed), case)
    world.start(again)
    world.pond.validate()
    acknowledged = sum(isinstance(step, Feed) for step in steps[: cut.acknowledged])
    in_flight = [step for step in steps[cut.acknowledged :][:1] if isinstance(step, Feed | Finish)]
    finished = any(isinstance(step, Finish) for step in steps[: cut.acknowledged])
    allowed = [[] if finished else world.model.open[acknowledged]]
    if in_flight:
        allowed.append(world.model.open[acknowledged + 1] if isinstance(in_flight[0], Feed) else [])
    assert in_order(world.window.now().to_pylist()) in [in_order(each) for each in allowed]
    newest = {world.model.turns[place].source: place for place in range(acknowledged)}
    for place in newest.values():
        world.feed(place)
    for place in range(acknowledged, EPOCHS):
        world.feed(place)
    for _ in range(2):
        world.finish()
    assert not world.window.now().num_rows


@pytest.mark.parametrize("case", [FIRST, *(pytest.param(case, marks=pytest.mark.long) for case in OTHERS)])
@pytest.mark.parametrize("step", sorted({point.rpartition(".")[0] for point in POINTS}))
def test_a_crash_leaves_what_was_acknowledged(case: str, step: str) -> None:
    seen = set()
    for number, ((point, _), cut) in enumerate(cuts(case).items()):
        if point.rpartition(".")[0] == step:
            for lose, seed in outcomes_of(cut.files):
                left = content(after(cut.files, lose, seed))
                if left not in seen:
                    seen.add(left)
                    check(case, cut, lose, seed, AGAIN[number % len(AGAIN)])


STEPS_ON_DISK = {
    "session on disk": {"flush", "index", "read", "compact", "fire"},
    "tumbling rows on disk": {"flush", "read", "fire"},
    "tumbling cells on disk": {"flush", "read", "compact", "fire"},
}


@pytest.mark.parametrize(
    "case", [ON_DISK[0], *(pytest.param(case, marks=pytest.mark.long) for case in ON_DISK[1:])]
)
def test_a_crash_at_a_scratch_file_loses_nothing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a flush, an append to the index, a compaction, a read, and when what has fired is let go."""
    # However short ranges are, they go from file to file; and what is dead is never left for long.
    monkeypatch.setattr(spill_log, "_COPIED_BYTES_MIN", 0)
    monkeypatch.setattr(UnalignedRows.__init__, "__kwdefaults__", {"ratio": 0.02, "msa": 1.01})
    monkeypatch.setattr(SpilledPanes.__init__, "__kwdefaults__", {"msa": 1.01, "runs_max": 1})
    hits = dict.fromkeys(SCRATCH_POINTS, 0)
    with ExitStack() as stack:
        plans = {point: stack.enter_context(armed(point, 1 << 40)) for point in hits}
        world = World(LossyFiles(), case)
        for step in history():
            step.on_pond(world)
        hits = {point: plan.hits for point, plan in plans.items() if plan.hits}
    assert {point.split(".")[1] for point in hits} == STEPS_ON_DISK[case]
    # Files of what epochs gave go when nobody has a use for them: in another run some later.
    moments = [(point, hit) for point, count in hits.items() for hit in {1, -(-count // 2)}]
    crashed = set()
    for number, ((point, _), cut) in enumerate(
        cuts_of(World(LossyFiles(), case), history(), dict.fromkeys(moments)).items()
    ):
        crashed.add(point)
        check(case, cut, "nothing" if number % 2 else "all", 0, AGAIN[number % len(AGAIN)])
    assert crashed == set(hits)


@pytest.mark.parametrize("case", [FIRST, *(pytest.param(case, marks=pytest.mark.long) for case in OTHERS)])
def test_windows_rest_on_the_log_meanwhile(case: str) -> None:
    world = World(LossyFiles(), case)
    resting = []
    for step in history():
        step.on_pond(world)
        if isinstance(step, Upkeep):
            services = world.pond.hosting.services.values()
            resting.append(any(service.checkpoints.behind() for service in services))
    assert any(resting)
