"""In which round each field is accessed, over all methods, and whether an epoch equals its calls one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Step(NamedTuple):
    """A method accesses one field after another."""

    before: str
    after: str
    method: str
    line: int


class Levels(NamedTuple):
    of: dict[str, int]
    serial: bool
    why: tuple[str, ...]


def level(fields: Sequence[str], steps: Sequence[Step]) -> Levels:
    """Fields that lead to each other, as a loop does, share a level; all others come after those that lead to them."""
    reach = {f: _reached(f, steps) for f in fields}
    groups = {f: frozenset({f} | {g for g in reach[f] if f in reach[g]}) for f in fields}
    of: dict[str, int] = {}

    def depth(field: str) -> int:
        if field not in of:
            mine = groups[field]
            earlier = [s.before for s in steps if s.after in mine and s.before not in mine]
            found = max((depth(f) + 1 for f in earlier), default=0)
            of.update(dict.fromkeys(mine, found))
        return of[field]

    for field in fields:
        depth(field)
    cycles = [s for s in steps if s.before in groups[s.after]]
    why = tuple(dict.fromkeys(_words(s, steps) for s in cycles))
    if not cycles:
        why = ("no call accesses a field twice, and all access fields in the same order",)
    return Levels(of, not cycles, why)


def _words(step: Step, steps: Sequence[Step]) -> str:
    if step.before == step.after:
        return f"{step.method}, line {step.line}, accesses {step.after} again"
    return f"{step.method}, line {step.line}, accesses {step.after} after {step.before}, and the other way round happens, too"


def _reached(field: str, steps: Sequence[Step]) -> set[str]:
    found: set[str] = set()
    pending = [field]
    while pending:
        here = pending.pop()
        for step in steps:
            if step.before == here and step.after not in found:
                found.add(step.after)
                pending.append(step.after)
    return found


def steps_of(
    method: str, sites: Sequence[str | None], following: Mapping[int, Sequence[int]], lines: Sequence[int]
) -> list[Step]:
    """Which field a method accesses next after which, past tasks that access none."""
    found: list[Step] = []
    for number, field in enumerate(sites):
        if field is None:
            continue
        seen: set[int] = set()
        pending = list(following[number])
        while pending:
            other = pending.pop()
            if other in seen:
                continue
            seen.add(other)
            after = sites[other]
            if after is None:
                pending += following[other]
            else:
                found.append(Step(field, after, method, lines[other]))
    return found
