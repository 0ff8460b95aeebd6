"""Programs from text, run as plain Python and as graphs."""

from __future__ import annotations

import itertools
import linecache
import os
import textwrap
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, settings

import millpond as mp
from millpond.errors import Rejected
from millpond.programs.explain import graph_of
from millpond.programs.graph import Graph
from millpond.programs.local import Call, LocalRun, Outcome
from millpond.programs.plain import state_of

EXAMPLES = int(os.environ.get("MILLPOND_PROGRAM_EXAMPLES", "0"))
"""So many programs are drawn at random. Without it always the same few are, and none is made smaller: that takes minutes."""
DRAWN = settings(
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate, *([Phase.shrink] if EXAMPLES else [])),
    print_blob=True,
)
_numbers = itertools.count()


def define(source: str, **names: Any) -> type:
    """The class `P` of a text, as if it were in a file."""
    text = textwrap.dedent(source)
    file = f"<program {next(_numbers)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space: dict[str, Any] = {"mp": mp, "__name__": "some_program", **names}
    exec(compile(text, file, "exec"), space)
    made: type = space["P"]
    return made


def graph(cls: type) -> Graph:
    return graph_of(cls)


def plainly(instance: Any, calls: Sequence[Call]) -> list[Outcome]:
    out = []
    for method, arguments in calls:
        try:
            out.append(Outcome(getattr(instance, method)(**arguments)))
        except Rejected as error:
            out.append(Outcome(None, error.reason))
    return out


def both(cls: type, calls: Sequence[Call], *, epochs: int | None = None, slices: int = 64) -> list[Outcome]:
    """Outcomes of calls, after the same came out both ways: one epoch where that is serial, else each call its own."""
    found = graph_of(cls)
    instance = mp.plain(cls, slices=slices)
    wanted = plainly(instance, calls)
    size = epochs or (max(len(calls), 1) if found.serial else 1)
    run = LocalRun(found, slices=slices)
    outcomes = [o for i in range(0, len(calls), size) for o in run.epoch(calls[i : i + size])]
    assert outcomes == wanted
    assert run.state() == state_of(instance)
    run.validate()
    return wanted
