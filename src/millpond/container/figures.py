"""What a container tells of itself: its process, its slices, and what each resident does in one of them."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import numpy as np

from millpond.container.core import Core
from millpond.container.holdings.base import Means, Size
from millpond.container.holdings.load import Load
from millpond.errors import Moved
from millpond.wire.base import SliceId
from millpond.wire.figures import SliceByResident, SliceFigures

_STATM = "/proc/self/statm"
_NOTHING = Size(0, 0)


def process_figures(means: Means) -> dict[str, float]:
    return {
        "pid": os.getpid(),
        "cpu_s": time.process_time(),
        "rss_bytes": rss_bytes(),
        "memory_max_bytes": means.memory_max,
        "threads": means.threads,
    }


def rss_bytes() -> int:
    """What this process has of the machine's memory now; 0 where the system does not tell."""
    with suppress(OSError, ValueError, IndexError), open(_STATM) as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def slice_figures(core: Core) -> SliceFigures:
    """Of all slices that are here, whatever resident did it."""
    numbers = np.array(sorted(core.owned), np.int64)
    place = {number: at for at, number in enumerate(numbers.tolist())}
    names = SliceFigures.COLUMNS[1:]
    sums = {name: np.zeros(len(numbers), np.int64) for name in names}

    def count(number: SliceId, load: Load, size: Size) -> None:
        at = place.get(number)
        if at is None:
            return
        row = (load.rows_updated, load.rows_fetched, load.cpu_ns // 1000, size.nbytes, size.keys)
        for name, value in zip(names, row, strict=True):
            sums[name][at] += value

    for holding in list(core.holdings.values()):
        for number, held in list(holding.slices.items()):
            count(number, held.load, _NOTHING if holding.broken else holding.size(held))
    for number, load in list(core.retired.items()):
        count(number, load, _NOTHING)
    return SliceFigures.of({"slices": numbers, **sums})


def by_resident(core: Core, number: SliceId) -> SliceByResident:
    if number not in core.owned:
        raise Moved(f"slice {number} is not served here", slice_id=number)
    residents: dict[str, dict[str, float]] = {}
    for name, holding in list(core.holdings.items()):
        held = holding.slices.get(number)
        if held is not None:
            size = _NOTHING if holding.broken else holding.size(held)
            residents[name] = {
                "rows_updated": held.load.rows_updated,
                "rows_fetched": held.load.rows_fetched,
                "cpu_s": held.load.cpu_ns / 1e9,
                "bytes": size.nbytes,
                "keys": size.keys,
            }
    return SliceByResident(core.container, residents)
