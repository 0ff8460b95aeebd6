"""The facts of a transaction function: pure data, made by `analysis`.

Each place that names a row gets a slot. Slots lie in frames: one frame for the event, and one for each round of a
clean loop that names rows. Two places share a slot where their keys are the same for sure. A function whose keys do not
follow from the event alone finds its rows as it runs: it has no use for frames.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

Sources = frozenset[int]
"""Slots that a value was made from; ~slot where that was in another round of a loop."""

NONE: Sources = frozenset()
EVENT_FRAME = 0


@dataclass(frozen=True)
class Slot:
    """A row that the function names: `table[key]`."""

    number: int
    table: str
    key: str
    line: int
    frame: int
    place: int  # in its frame


@dataclass(frozen=True)
class Frame:
    """The event, or one round of a clean loop. A loop's first frame is found at `pointer` of its parent."""

    parent: int
    pointer: int


WHOLE = ""
"""In place of a column: whether the row is there, which `in` and `get` read and `del` writes."""


@dataclass(frozen=True)
class Use:
    """A column read or written, and what the value and whether it happens depend on, other rows included."""

    slot: int
    column: str
    line: int
    depends: Sources = NONE


@dataclass(frozen=True)
class Abort:
    reason: str
    line: int
    depends: Sources


@dataclass(frozen=True)
class Result:
    """A return statement: what each of its values depends on. None for a bare one."""

    line: int
    depends: tuple[Sources, ...] | None


@dataclass(frozen=True)
class Late:
    """Why its rows are found only while the function runs."""

    line: int
    why: str


@dataclass
class Analysis:
    """The facts of one function. Nodes are those of `tree`."""

    name: str
    tree: ast.FunctionDef
    parameters: tuple[str, ...]
    tables: tuple[str, ...]
    fields: tuple[str, ...]
    slots: list[Slot] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=lambda: [Frame(-1, -1)])
    frame_sizes: list[int] = field(default_factory=lambda: [0])
    reads: set[Use] = field(default_factory=set)
    writes: set[Use] = field(default_factory=set)
    aborts: set[Abort] = field(default_factory=set)
    results: dict[int, Result] = field(default_factory=dict)
    slot_of: dict[ast.AST, Slot] = field(default_factory=dict)
    clean: set[ast.AST] = field(default_factory=set)  # statements and conditions that the event alone decides
    frame_of: dict[ast.AST, int] = field(default_factory=dict)  # loops that have frames of their own
    ragged: set[ast.AST] = field(default_factory=set)  # loops that rows may cut short
    sources: dict[ast.AST, Sources] = field(default_factory=dict)  # of statements, targets included
    late: set[Late] = field(default_factory=set)

    @property
    def width(self) -> int:
        """How many values it returns; 0 for none."""
        return max((len(r.depends) for r in self.results.values() if r.depends is not None), default=0)

    @property
    def single(self) -> bool:
        """Whether it names one row only."""
        return len(self.slots) == 1 and self.slots[0].frame == EVENT_FRAME

    @property
    def has_frames(self) -> bool:
        """Whether loops name rows of their own, so that events differ in how many slots they have."""
        return any(self.frame_sizes[1:])

    @property
    def is_late(self) -> bool:
        """Whether its rows are found while it runs, so that nothing else may run beside it."""
        return bool(self.late)

    def coupling(self) -> str:
        """Why its operations on different rows cannot run apart; empty if they can."""
        if self.late:
            first = min(self.late, key=lambda late: late.line)
            return f"line {first.line}: {first.why}"
        if self.single or not self.slots:
            return ""
        for use in sorted(self.writes, key=lambda use: use.line):
            other = use.depends - {use.slot}
            if other:
                return (
                    f"line {use.line}: {self.slot_text(use.slot)}.{use.column} "
                    f"depends on {self.slot_texts(other)}"
                )
        for abort in sorted(self.aborts, key=lambda abort: abort.line):
            if abort.depends:
                return f"line {abort.line}: an abort depends on {self.slot_texts(abort.depends)}"
        for result in self.results.values():
            for depends in result.depends or ():
                if len(depends) > 1 or any(s < 0 or self.slots[s].frame != EVENT_FRAME for s in depends):
                    return f"line {result.line}: a result depends on {self.slot_texts(depends)}"
        for node, depends in self.sources.items():
            if not isinstance(node, ast.Return) and (len(depends) > 1 or any(s < 0 for s in depends)):
                line = getattr(node, "lineno", self.tree.lineno)
                return f"line {line}: {self.slot_texts(depends)} meet"
        return ""

    def slot_text(self, slot: int) -> str:
        found = self.slots[slot if slot >= 0 else ~slot]
        return f"{found.table}[{found.key}]" + (" of another round" if slot < 0 else "")

    def slot_texts(self, slots: Iterable[int]) -> str:
        return " and ".join(dict.fromkeys(self.slot_text(slot) for slot in sorted(slots)))
