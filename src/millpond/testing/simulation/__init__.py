"""A whole pond in one thread, on virtual time, disk and network, from one seed. Needs `millpond[testing]`."""

from __future__ import annotations

from millpond.testing.simulation.disk import Disk
from millpond.testing.simulation.faults import Faults, Weather
from millpond.testing.simulation.history import History
from millpond.testing.simulation.kernel import Simulation
from millpond.testing.simulation.network import Network
from millpond.testing.simulation.report import Report
from millpond.testing.simulation.runtime import SimRuntime
from millpond.testing.simulation.scenario import simulate
from millpond.testing.simulation.scheduler import Died, Killed, Process, Scheduler, Stuck, Task
from millpond.testing.simulation.storms import Storms

__all__ = [
    "Died",
    "Disk",
    "Faults",
    "History",
    "Killed",
    "Network",
    "Process",
    "Report",
    "Scheduler",
    "SimRuntime",
    "Simulation",
    "Storms",
    "Stuck",
    "Task",
    "Weather",
    "simulate",
]
