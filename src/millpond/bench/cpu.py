"""CPU seconds of the processes that take part, which others on the machine disturb less than the clock."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

# By what the command line has in it; the process that asks is the driver, whatever it runs.
KINDS = {
    "java": "java",
    "pyspark": "workers",
    "millpond.container": "containers",
    "millpond.bench.window_container": "containers",
}


def cpu_seconds_by_kind() -> dict[str, float]:
    """CPU seconds so far of this process and of all below it that are alive; 0 where the system does not tell."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    commands: dict[int, str] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            # The name, in parentheses, may hold anything; the numbers come after it.
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            commands[int(process.name)] = (process / "cmdline").read_text(errors="replace")
        except OSError:  # it has ended
            continue
        parents[int(process.name)] = int(fields[1])
        ticks[int(process.name)] = int(fields[11]) + int(fields[12])
    seconds = dict.fromkeys(("driver", *KINDS.values()), 0.0)
    for process_id, used in ticks.items():
        ancestor = process_id
        while ancestor not in (0, os.getpid()):
            ancestor = parents.get(ancestor, 0)
        if ancestor:
            kind = next((kind for part, kind in KINDS.items() if part in commands[process_id]), "driver")
            kind = "driver" if process_id == os.getpid() else kind
            seconds[kind] += used / os.sysconf("SC_CLK_TCK")
    return seconds


def cpu_seconds() -> float:
    return sum(cpu_seconds_by_kind().values())


def thread_seconds(process: int, name: str) -> float:
    """CPU seconds so far of the threads of a process whose names begin so and that are alive."""
    ticks = 0
    for thread in Path(f"/proc/{process}/task").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if (thread / "comm").read_text().startswith(name):
                fields = (thread / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
