"""Programs beside their peers (SDG, section 6): the same work in the same run, on all cores of this machine.

What each part measures, and how, is told by the modules `programs_*`. `--only cf,kv` takes some parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from millpond.bench import (
    programs_cf,
    programs_durable,
    programs_kv,
    programs_lr,
    programs_report,
    programs_stream,
    programs_words,
)
from millpond.bench.programs_pond import FULL, QUICK, Scale
from millpond.errors import BadOption

plot = programs_report.plot
print_table = programs_report.print_table

PARTS: dict[str, Callable[[Scale, Callable[[str], None]], Iterable[dict[str, Any]]]] = {
    "cf": programs_cf.run,
    "stream": programs_stream.run,
    "kv": programs_kv.run,
    "lr": programs_lr.run,
    "words": programs_words.run,
    "checkpoint": programs_durable.checkpoints,
    "recovery": programs_durable.recovery,
}


def run(
    quick: bool, progress: Callable[[str], None], only: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """All parts, or some."""
    for part in only or ():
        if part not in PARTS:
            raise BadOption(f"there is no part {part!r}", hint=f"parts: {', '.join(PARTS)}", option="--only")
    scale = QUICK if quick else FULL
    results: list[dict[str, Any]] = []
    for part in only or PARTS:
        results += PARTS[part](scale, progress)
    return results
