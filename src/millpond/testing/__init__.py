"""What Millpond is tested with, for those who test what they build on it.

`Oracle` says what a State must answer, `VirtualClock` moves when told to, `armed` makes a crash happen at a
named point, `LossyFiles` loses what was not synced.
"""

from __future__ import annotations

from millpond.durable.crashpoints import POINTS, SimulatedCrash, armed, counted, reach
from millpond.testing.clock import VirtualClock
from millpond.testing.files import LossyFiles
from millpond.testing.oracle import Oracle, Receipt

__all__ = [
    "POINTS",
    "LossyFiles",
    "Oracle",
    "Receipt",
    "SimulatedCrash",
    "VirtualClock",
    "armed",
    "counted",
    "reach",
]
