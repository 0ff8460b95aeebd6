"""What a container tells of itself: its process, its slices, and what each resident does in one of them."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import numpy as np

from millpond.container.core import Core
from millpond.container.guard import memory_share
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
        "memory_share_bytes": memory_share(),
        "threads": means.threads,
    }


def rss_bytes() -> int:
    """What this process has of the machine's memory now; 0 where the system does not tell."""
    with suppress(OSError, ValueError, IndexError), open(_STATM) as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def slice_figures(core: Core) -> SliceFigures:
    """Of all slices that are here, whatever resident did it. Sizes are as of the holdings' last `figures`."""
    numbers = np.array(sorted(core.owned), np.int64)
    sums = {name: np.zeros(len(numbers), np.int64) for name in SliceFigures.COLUMNS[1:]}
    parts: list[dict[SliceId, tuple[Load, Size]]] = [
        {n: (held.load, holding.sizes.get(n, _NOTHING)) for n, held in list(holding.slices.items())}
        for holding in list(core.holdings.values())
    ]
    parts.append({number: (load, _NOTHING) for number, load in list(core.retired.items())})
    for part in parts:
        here = {number: figures for number, figures in part.items() if number in core.owned}
        if here:
            at = np.searchsorted(numbers, np.array(list(here), np.int64))
            rows = np.array([_row(*figures) for figures in here.values()], np.int64)
            for name, column in zip(sums, rows.T, strict=True):
                sums[name][at] += column
    return SliceFigures.of({"slices": numbers, **sums})


def _row(load: Load, size: Size) -> tuple[int, ...]:
    return load.rows_updated, load.rows_fetched, load.cpu_ns // 1000, size.nbytes, size.keys


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
