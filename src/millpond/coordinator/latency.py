"""Where the time goes between a row's arrival at a fetch and its answer. Kept in memory, as of the pond's opening."""

from __future__ import annotations

import bisect
import math
from collections import deque
from typing import Any

from millpond.times import Progress
from millpond.wire.questions import Passed, Waits

STEPS_REMEMBERED = 1024
"""Of U, of each resident: rows that waited for longer count as if U had passed them then."""
TURNS_REMEMBERED = 1024


class UpdateSteps:
    """When U passed what, of each resident."""

    def __init__(self) -> None:
        self._steps: dict[str, deque[tuple[Progress, float]]] = {}

    def note(self, resident: str, update: Progress, now: float) -> None:
        """U is that from now on, if it was not before."""
        steps = self._steps.setdefault(resident, deque(maxlen=STEPS_REMEMBERED))
        if not steps or update > steps[-1][0]:
            steps.append((update, now))

    def passed(self, resident: str, since: Progress, until: Progress, now: float) -> list[Passed]:
        """The steps of U above `since` and up to `until`, lowest first."""
        steps = self._steps.get(resident, ())
        return [Passed(update, now - when) for update, when in steps if since < update <= until]

    def forget(self, resident: str) -> None:
        self._steps.pop(resident, None)


class Latencies:
    """What turns of fetchers told, added up."""

    def __init__(self) -> None:
        self._turns: dict[tuple[str, str], _Turns] = {}

    def note(self, resident: str, fetcher: str, waits: Waits) -> None:
        self._turns.setdefault((resident, fetcher), _Turns()).add(waits)

    def figures(self, resident: str) -> dict[str, dict[str, Any]]:
        """Of each fetcher of a resident that has answered rows."""
        return {
            fetcher: turns.figures() for (name, fetcher), turns in self._turns.items() if name == resident
        }

    def forget(self, resident: str, fetcher: str | None = None) -> None:
        for known in [known for known in self._turns if known[0] == resident and fetcher in (None, known[1])]:
            del self._turns[known]


class _Turns:
    def __init__(self) -> None:
        self._rows = 0
        self._waited = 0
        self._sums_ms = [0.0, 0.0]
        self._histograms = [[0] * len(Waits.BOUNDS_MS), [0] * len(Waits.BOUNDS_MS)]
        self._batch_ms: deque[float] = deque(maxlen=TURNS_REMEMBERED)

    def add(self, waits: Waits) -> None:
        self._rows += waits.rows
        self._waited += waits.waited
        self._batch_ms.append(waits.batch_ms)
        phases = ((waits.update_ms, waits.update_histogram), (waits.turn_ms, waits.turn_histogram))
        for at, (total_ms, histogram) in enumerate(phases):
            self._sums_ms[at] += total_ms
            for place, rows in enumerate(histogram[: len(Waits.BOUNDS_MS)]):
                self._histograms[at][place] += rows

    def figures(self) -> dict[str, Any]:
        batches = sorted(self._batch_ms)
        figures: dict[str, Any] = {"rows": self._rows, "rows_waited": self._waited}
        for at, name in enumerate(("for_update", "for_turn")):
            figures[f"wait_{name}_ms_mean"] = self._sums_ms[at] / self._waited if self._waited else 0.0
            for percent in (50, 99):
                figures[f"wait_{name}_ms_p{percent}"] = _percentile(self._histograms[at], percent)
        for percent in (50, 99):
            figures[f"batch_ms_p{percent}"] = batches[(len(batches) - 1) * percent // 100] if batches else 0.0
        return figures


def _percentile(histogram: list[int], percent: int) -> float:
    """The bound of the class in which it falls."""
    total = sum(histogram)
    if not total:
        return 0.0
    sums = [sum(histogram[: place + 1]) for place in range(len(histogram))]
    bound = Waits.BOUNDS_MS[bisect.bisect_left(sums, math.ceil(total * percent / 100))]
    return float(bound)
