"""A join or a deduplication in the simulated pond: fed, asked again and finished as windows are."""

from __future__ import annotations

from random import Random
from typing import Any, Literal, cast

from millpond.code import windows as code
from millpond.ops.window import FiringSource
from millpond.pond.pond import Pond
from millpond.testing import window_kinds as kinds
from millpond.testing.simulation.windows import (
    CELLS,
    EPOCHS_MIN,
    SPAN,
    Row,
    Shape,
    Turn,
    WindowModel,
    draw_turns,
)
from millpond.testing.window_joins import LEFT, RIGHT, DedupOracle, IntervalJoinOracle, WindowJoinOracle
from millpond.testing.windows import Result

DRAWN = 0.5
"""Of seeds without a window and without a program, so many have one of these."""
SHAPES: dict[str, Shape] = {
    "tumbling": Shape(code.tumbling(15), kinds.tumbling(15), False),
    "sliding": Shape(code.sliding(20, 10), kinds.sliding(20, 10), False),
}
BETWEEN = (-SPAN, SPAN // 2)
WITHIN = 2 * SPAN
Kind = Literal["window join", "interval join", "dedup"]


class RowsModel(WindowModel):
    """What every epoch gives. Nothing of it can be asked for before."""

    def __init__(
        self, kind: Kind, name: str, shape: Shape, delays: dict[str, int], turns: list[Turn], *, to_sink: bool
    ) -> None:
        self.kind = kind
        super().__init__(name, shape, CELLS, delays, turns, apart=False, to_sink=to_sink)

    def oracle(self) -> Any:
        if self.kind == "dedup":
            return DedupOracle(WITHIN, key="k", sources=self.delays)
        delays = {"left_delay": self.delays[LEFT], "right_delay": self.delays[RIGHT]}
        if self.kind == "interval join":
            return IntervalJoinOracle(*BETWEEN, key="k", **delays)
        return WindowJoinOracle(self.shape.kind, key="k", **delays)

    def values(self, source: str, row: Row) -> dict[str, int]:
        if self.kind == "dedup":
            return {"t": row.time, "v": row.value}
        values = {"l" if source == LEFT else "r": row.value}
        return values | ({f"{source}_time": row.time} if self.kind == "interval join" else {})

    def open_of(self, oracle: Any) -> list[Result]:
        return []

    def open_in(self, resident: Any) -> list[Result]:
        return []

    def resident(self, pond: Pond) -> Any:
        if self.kind == "dedup":
            return pond.dedup(self.name, key="k long", within=WITHIN)
        what: dict[str, Any] = (
            {"between": BETWEEN} if self.kind == "interval join" else {"window": self.shape.window}
        )
        return pond.join(self.name, key="k long", left="l long", right="r long", **what)

    def source(self, resident: Any, name: str) -> FiringSource:
        if self.kind == "dedup":
            return super().source(resident, name)
        side = resident.left if name == LEFT else resident.right
        return cast(FiringSource, side(key="k", at="t", value="v", delay=self.delays[name]))


def draw_rows(chance: Random, name: str) -> RowsModel:
    kind: Kind = chance.choice(("window join", "interval join", "dedup"))
    shape = SHAPES[chance.choice(sorted(SHAPES))]
    sources = [f"{name}_source{number}" for number in range(chance.choice((1, 2)))]
    if kind != "dedup":
        sources = [LEFT, RIGHT]
    reach = chance.choice((0, SPAN, 3 * SPAN))
    delays = {source: chance.choice((0, SPAN)) for source in sources}
    if kind == "window join":
        # A row that is late for some of its windows goes into them all the same while the other side holds them open.
        delays = dict.fromkeys(sources, reach)
    order = [source for source in sources for _ in range(chance.randint(EPOCHS_MIN, 12 // len(sources)))]
    chance.shuffle(order)
    turns = draw_turns(chance, order, reach)
    return RowsModel(kind, name, shape, delays, turns, to_sink=chance.random() < 0.5)
