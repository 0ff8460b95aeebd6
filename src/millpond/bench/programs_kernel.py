"""Collaborative filtering by hand, compiled, on one core: what the algorithm alone takes, and what its answers are."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.kernels._jit import jit

Longs = npt.NDArray[np.int64]

K = 10


class Filtering:
    """Ratings of users and items from 0 on, and how often two items were rated by the same user, as arrays."""

    def __init__(self, users: int, items: int) -> None:
        self._ratings = np.zeros((users, items), np.float32)
        self._rated = np.zeros((users, items), np.bool_)
        self._of_user = np.zeros((users, items), np.int32)
        self._counts = np.zeros(users, np.int64)
        self._together = np.zeros((items, items), np.uint16)

    def add(self, users: Longs, items: Longs, ratings: npt.NDArray[np.float64]) -> None:
        _add(
            users, items, ratings, self._ratings, self._rated, self._of_user, self._counts, self._together
        )  # fmt: skip

    def ask(self, users: Longs) -> npt.NDArray[np.int64]:
        """The best `K` items of each, -1 where there are fewer."""
        answers = np.full((len(users), K), -1, np.int64)
        _ask(users, self._ratings, self._rated, self._of_user, self._counts, self._together, answers)
        return answers


@jit
def _add(
    users: Any,
    items: Any,
    given: Any,
    ratings: Any,
    rated: Any,
    of_user: Any,
    counts: Any,
    together: Any,
) -> None:
    for n in range(len(users)):
        user, item = users[n], items[n]
        ratings[user, item] = given[n]
        if rated[user, item]:
            continue
        for place in range(counts[user]):
            other = of_user[user, place]
            together[item, other] += 1
            together[other, item] += 1
        rated[user, item] = True
        of_user[user, counts[user]] = item
        counts[user] += 1


@jit
def _ask(
    users: Any, ratings: Any, rated: Any, of_user: Any, counts: Any, together: Any, answers: Any
) -> None:
    items = together.shape[0]
    scores = np.zeros(items)
    for n in range(len(users)):
        user = users[n]
        scores[:] = 0.0
        for place in range(counts[user]):
            other = of_user[user, place]
            rating = ratings[user, other]
            for item in range(items):
                scores[item] += together[other, item] * rating
        for item in range(items):
            # An item that was never rated together with one of these has no entry.
            if rated[user, item] or scores[item] == 0.0:
                continue
            rank = answers.shape[1]
            while rank > 0 and (answers[n, rank - 1] < 0 or scores[item] > scores[answers[n, rank - 1]]):
                rank -= 1
            for after in range(answers.shape[1] - 1, rank, -1):
                answers[n, after] = answers[n, after - 1]
            if rank < answers.shape[1]:
                answers[n, rank] = item


def seconds_of(filtering: Filtering, adds: Any, asked: Longs, batch: int) -> float:
    """How long it takes to do all of these, so many of each kind by turns as batches have them."""
    turns = max(1, -(-(len(adds[0]) + len(asked)) // batch))
    began = time.perf_counter()
    for turn in range(turns):
        first, last = (len(adds[0]) * n // turns for n in (turn, turn + 1))
        filtering.add(*(column[first:last] for column in adds))
        first, last = (len(asked) * n // turns for n in (turn, turn + 1))
        filtering.ask(asked[first:last])
    return time.perf_counter() - began
