"""Which operator of a client answered a turn last, so that two of one name are not taken for a replay of each other."""

from __future__ import annotations

import itertools
from typing import NamedTuple

# Fetchers whose last turn is remembered: those that answered last.
FETCHERS_MAX = 1024


class Run(NamedTuple):
    """An operator's turn in a run of a query, which has each epoch once. `id` is None outside of a streaming query."""

    id: str | None
    epoch: int
    operator: int


class Runs:
    """The last turn of each fetcher, by its State and its name. Safe to share between threads."""

    def __init__(self) -> None:
        self._operators = itertools.count()
        self._last: dict[tuple[str, str], Run] = {}

    def new_operator(self) -> int:
        """A number that no other operator of this client has."""
        return next(self._operators)

    def is_taken(self, state: str, fetcher: str, run: Run) -> bool:
        """Whether another operator of that name has answered this very turn."""
        last = self._last.get((state, fetcher))
        return (
            run.id is not None and last is not None and last[:2] == run[:2] and last.operator != run.operator
        )

    def note(self, state: str, fetcher: str, run: Run) -> None:
        """The turn was answered."""
        self._last.pop((state, fetcher), None)
        self._last[state, fetcher] = run
        while len(self._last) > FETCHERS_MAX:
            self._last.pop(next(iter(self._last)), None)
