"""What backups and slices cost when nothing moves.

Backups: three containers of one thread, one client that updates, with 0, 1 and 2 backups of each slice, epochs of 1,000 and
of 10,000 rows. Slices: ponds of one container of one thread each, of which all are open at once and take turns: the same
batches of updates and questions, cut into 1 to 256 slices; what counts is the container's CPU time for them, and for the clock the
median. All ponds hold the same keys.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import millpond as mp
from millpond.bench.elastic_client import STATE
from millpond.bench.elastic_load import SLICES, Clients, loaded_pond

LOADED_AT_ONCE = 200_000


def backups(
    mb: float, seconds: float, counts: Sequence[int], epochs: Sequence[int], progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """So many backups, epochs of so many rows."""
    rates: dict[tuple[int, int], float] = {}
    held_mb = 0.0
    for count in counts:
        progress(f"updates with {count} backups")
        with loaded_pond([number % 3 for number in range(SLICES)], mb / 3, count) as loaded:
            held_mb = sum(each["bytes"] for each in loaded.pond.metrics()["slices"].values()) / 1e6
            for rows in epochs:
                with Clients(loaded) as clients:
                    clients.start("update", kind="update", rows=rows)
                    clients.await_ready()
                    time.sleep(seconds / 4)
                    begin = time.monotonic()
                    time.sleep(seconds)
                    end = time.monotonic()
                rates[count, rows] = clients.notes["update"].rate(begin, end) * rows
    return [
        {
            "system": f"millpond, backups={count}, epochs of {rows:,}",
            "section": "backups",
            "setup": f"3 containers of 1 thread, {held_mb:,.0f} MB in all, one client",
            "updates_per_s": rate,
            "vs_none": rate / rates[0, rows],
        }
        for (count, rows), rate in sorted(rates.items(), key=lambda item: (item[0][1], item[0][0]))
    ]


def slices(
    keys: int,
    batches: Mapping[int, int],
    counts: Sequence[int],
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Batches of each size so often, and two more that do not count."""
    progress(f"slices: {', '.join(map(str, counts))} of {keys:,} keys")
    with ExitStack() as stack:
        ponds = [_Pond(stack, count) for count in counts]
        for pond in ponds:
            pond.load(keys)
        results = []
        for batch, rounds in batches.items():
            chance = np.random.default_rng(batch)
            used: dict[tuple[str, int], list[_Cost]] = {}
            for number in range(rounds + 2):
                own = chance.integers(0, keys, batch)
                for pond in ponds:
                    costs = {"update": pond.update(own), "fetch": pond.fetch(own)}
                    for work, cost in costs.items():
                        if number >= 2:
                            used.setdefault((work, pond.slices), []).append(cost)
            for work in ("update", "fetch"):
                results += [_of_slices(work, count, counts, batch, keys, used) for count in counts]
    return results


class _Cost(NamedTuple):
    seconds: float
    cpu_s: float


class _Pond:
    """One container of one thread."""

    def __init__(self, stack: ExitStack, slices: int) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="millpond-bench-"))
        pond = stack.enter_context(
            mp.open(os.path.join(folder, "pond"), containers=1, threads=1, slices=slices)
        )
        self.slices = slices
        self._pid = pond.containers()[0].pid
        self._state = pond.state(STATE, key="long", value="long", compact=mp.keep_all())
        self._feed = self._state.update(key="k", at="t", value="v", name="feed")
        self._ask = self._state.fetch(key="k", at="t", into="v").now
        self._epoch = 0

    def load(self, keys: int) -> None:
        for first in range(0, keys, LOADED_AT_ONCE):
            self.update(np.arange(first, min(first + LOADED_AT_ONCE, keys)))

    def update(self, keys: npt.NDArray[np.int64]) -> _Cost:
        """The clock until it is answered, CPU time until it is visible, too."""
        table = pa.table({"k": keys, "t": np.full(len(keys), self._epoch), "v": keys})
        before, began = self._cpu_s(), time.perf_counter()
        self._feed(table, self._epoch)
        seconds = time.perf_counter() - began
        self._epoch += 1
        while self._state.progress().update < self._epoch - 1:
            time.sleep(0.001)
        time.sleep(0.02)
        return _Cost(seconds, self._cpu_s() - before)

    def fetch(self, keys: npt.NDArray[np.int64]) -> _Cost:
        table = pa.table({"k": keys, "t": np.full(len(keys), self._epoch - 2)})
        before, began = self._cpu_s(), time.perf_counter()
        answers = self._ask(table)
        cost = _Cost(time.perf_counter() - began, self._cpu_s() - before)
        if not np.array_equal(answers["v"].to_numpy(), keys):
            raise RuntimeError(f"wrong answers with {self.slices} slices")
        return cost

    def _cpu_s(self) -> float:
        """Of the container so far, by Linux's clock of its process: asking it would cost it time by slice."""
        return time.clock_gettime((~self._pid << 3) | 2)


def _of_slices(
    work: str,
    count: int,
    counts: Sequence[int],
    batch: int,
    keys: int,
    used: dict[tuple[str, int], list[_Cost]],
) -> dict[str, Any]:
    costs, base = used[work, count], used[work, counts[0]]
    rate = batch / float(np.median([cost.seconds for cost in costs]))
    vs_one = rate / (batch / float(np.median([cost.seconds for cost in base])))
    extra = float(np.median([cost.cpu_s for cost in costs]) / np.median([cost.cpu_s for cost in base])) - 1
    result: dict[str, Any] = {
        "system": f"millpond, {work}s of {batch:,}, slices={count}".replace("fetchs", "fetches"),
        "section": "slices",
        "setup": f"1 container of 1 thread, {keys:,} keys of longs",
        f"{'updates' if work == 'update' else 'asks'}_per_s": rate,
        "vs_none": vs_one,
        "cpu_overhead": extra,
    }
    if count == counts[-1]:
        reached = extra < 0.05 and vs_one > 0.95
        result |= {"aim": "cpu_overhead < 0.05, vs_none > 0.95", "reached": reached}
    return result
