"""What Millpond is tested with, for those who test what they build on it.

`Oracle` says what a State must answer, `WindowOracle` what a window, `WindowJoinOracle`, `IntervalJoinOracle` and
`DedupOracle` what joins and deduplication (windows and aggregates for them are in `window_kinds` and
`window_aggregates`). `armed` makes a crash happen at a named point, `LossyFiles` loses what
was not synced, `simulate` runs a whole pond in all weathers from one seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millpond.durable.crashpoints import POINTS, SimulatedCrash, armed, counted, reach
from millpond.testing.files import LossyFiles
from millpond.testing.oracle import Oracle, Receipt
from millpond.testing.window_joins import DedupOracle, IntervalJoinOracle, WindowJoinOracle
from millpond.testing.windows import Fired, WindowOracle

if TYPE_CHECKING:
    from millpond.testing.simulation.report import Report

__all__ = [
    "POINTS",
    "DedupOracle",
    "Fired",
    "IntervalJoinOracle",
    "LossyFiles",
    "Oracle",
    "Receipt",
    "SimulatedCrash",
    "WindowJoinOracle",
    "WindowOracle",
    "armed",
    "counted",
    "reach",
    "simulate",
]


def simulate(seed: int) -> Report:
    """A whole pond with its applications, on virtual time, disk and network. Needs `millpond[testing]`.

    The same seed gives the same report; `report.failure` is empty if every promise was kept.
    """
    from millpond.testing.simulation.scenario import simulate as run

    return run(seed)
