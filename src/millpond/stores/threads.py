"""Work side by side. Kernels release the GIL; nothing here locks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

FEW = 20_000  # items that are not worth a thread


@dataclass
class Sections:
    """CPU seconds in parallel sections: of the longest task of each, of the thread that calls them, and of all."""

    longest: float = 0.0
    own: float = 0.0
    all: float = 0.0


_sections: ContextVar[Sections | None] = ContextVar("_sections", default=None)


@contextmanager
def timed_sections() -> Iterator[Sections]:
    """Counts what this thread's calls of `in_threads` take, also with one task: what is left is serial."""
    sections = Sections()
    token = _sections.set(sections)
    try:
        yield sections
    finally:
        _sections.reset(token)


def in_threads(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """The outcomes of all tasks, the first of them done by this thread."""
    sections = _sections.get()
    if sections is None or not tasks:
        return _side_by_side(tasks)
    outcomes = _side_by_side([partial(_timed, task) for task in tasks])
    sections.own += outcomes[0][1]
    sections.longest += max(seconds for _, seconds in outcomes)
    sections.all += sum(seconds for _, seconds in outcomes)
    return [outcome for outcome, _ in outcomes]


def _timed(task: Callable[[], Any]) -> tuple[Any, float]:
    start = time.thread_time()
    return task(), time.thread_time() - start


def _side_by_side(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
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
