"""Runs many seeds on all cores: `python -m millpond.testing.simulation --seeds 1000 [--start 0] [--jobs 2]`."""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context

from millpond.testing.simulation.report import Report
from millpond.testing.simulation.scenario import simulate

BATCH = 10
BATCHES_PER_POOL = 100
"""Workers are replaced after so many, so that they do not grow: all at once, since Python 3.11 hangs when one by one."""
SHOWN_MAX = 20


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m millpond.testing.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--start", type=int, default=0, help="the first")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args(arguments)
    fired: Counter[str] = Counter()
    did: Counter[str] = Counter()
    failures: list[int] = []
    began = time.monotonic()
    for report in _reports(options.start, options.seeds, options.jobs):
        fired.update(report.fired)
        did.update(report.did)
        if not report.passed:
            failures.append(report.seed)
            if len(failures) <= SHOWN_MAX:
                print(f"{report}\n", flush=True)
    seconds = time.monotonic() - began
    print(f"{options.seeds} seeds in {seconds:.0f} s: {options.seeds / seconds:.1f} per second")
    print("done: " + _counts(did))
    print("faults: " + _counts(fired))
    print(f"{len(failures)} failed" + (f": {', '.join(map(str, failures[:100]))}" if failures else ""))
    return 1 if failures else 0


def _reports(start: int, seeds: int, jobs: int) -> Iterator[Report]:
    """Reports as they come."""
    batches = iter(range(start, start + seeds, BATCH))
    if jobs == 1:
        for first in batches:
            yield from run_batch(first, min(BATCH, start + seeds - first))
        return
    while wave := list(islice(batches, BATCHES_PER_POOL)):
        counts = [min(BATCH, start + seeds - first) for first in wave]
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            for reports in pool.map(run_batch, wave, counts):
                yield from reports


def run_batch(first: int, count: int) -> list[Report]:
    # What simulated ponds say of their faults would hide what matters: the reports tell of those.
    logging.getLogger("millpond").addHandler(logging.NullHandler())
    return [simulate(seed) for seed in range(first, first + count)]


def _counts(counted: Counter[str]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in sorted(counted.items())) or "none"
