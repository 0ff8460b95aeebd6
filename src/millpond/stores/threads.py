"""Work side by side. Kernels release the GIL; nothing here locks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

FEW = 20_000  # items that are not worth a thread


def in_threads(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """The outcomes of all tasks, the first of them done by this thread."""
    if len(tasks) < 2:
        return [task() for task in tasks]
    with ThreadPoolExecutor(len(tasks) - 1) as pool:
        others = [pool.submit(task) for task in tasks[1:]]
        return [tasks[0](), *(other.result() for other in others)]


def parts_of(count: int, threads: int) -> int:
    """Into how many parts it pays to divide so many items."""
    return threads if count > FEW else 1


def in_parts(function: Callable[[int, int], Any], count: int, threads: int) -> list[Any]:
    """The outcomes of `function(start, stop)` over parts of `count` items, in order; at least one."""
    bounds = np.linspace(0, count, parts_of(count, threads) + 1).astype(np.int64)
    return in_threads([partial(function, int(start), int(stop)) for start, stop in pairwise(bounds)])
