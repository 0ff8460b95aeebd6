"""Collaborative filtering (SDG, algorithm 1): what else do people like who rated what you did?

Corrected: an item is not counted with itself, a rating that is given again is not counted again, and all items that the user
rated before count.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import millpond as mp
from millpond.apps.program_demo import RATE, SECONDS, Application, check_calls, show
from millpond.apps.ratings import read_ratings


@mp.program(lanes=2)
class Recommender:
    """Ratings by user, and how often two items were rated by the same user."""

    user_item: mp.Partitioned[mp.Matrix]
    co_occ: mp.Partial[mp.Matrix]

    def add_rating(self, user: int, item: int, rating: float) -> None:
        row = self.user_item[user]
        fresh = item not in row
        others = row.keys()
        row[item] = rating
        if fresh:
            for other in others:
                self.co_occ[item, other] += 1
                self.co_occ[other, item] += 1

    def get_rec(self, user: int, k: int = 10) -> list[int]:
        row = self.user_item[user]
        parts = mp.everywhere(self.co_occ).multiply(row)
        return self.best(parts, row, k)

    def best(self, parts: mp.Collection[mp.Vector], row: mp.Vector, k: int) -> list[int]:
        return mp.total(parts).without(row).top(k)


def requests(
    count: int, *, users: int = 900, items: int = 1_600, asked: float = 0.5, seed: int = 1
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ratings and questions, a share `asked` of them questions: few items are rated by many, as people do."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        user = int(rng.integers(users))
        if rng.random() < asked:
            yield "get_rec", {"user": user}
        else:
            item = int(items * rng.random() ** 3)
            yield "add_rating", {"user": user, "item": item, "rating": float(rng.integers(1, 6))}


APPLICATION = Application(
    "recommender",
    Recommender,
    {
        "add_rating": {"user": pa.int64(), "item": pa.int64(), "rating": pa.float64()},
        "get_rec": {"user": pa.int64()},
    },
    between=lambda ask, epoch: (epoch, ask("get_rec", user=epoch, k=3)),
    words=lambda told: f"asked directly, user {told[0]} should like {told[1]}",
)


def run(seconds: int = SECONDS, rate: int = RATE, data: Path | None = None) -> bool:
    """`seconds` epochs of `rate` calls, half of them questions; the ratings are drawn, or the first of a file."""
    check_calls(seconds, rate)
    calls = requests(seconds * rate) if data is None else requests_of(read_ratings(data), seconds * rate)
    return show(APPLICATION, calls, rate)


def requests_of(ratings: pa.Table, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The first ratings, and after each one a question of a user who has rated; so many calls at most."""
    rng = np.random.default_rng(1)
    rows = ratings.slice(0, -(-count // 2)).to_pylist()
    for number, row in enumerate(rows):
        yield "add_rating", row
        if 2 * number + 1 < count:
            yield "get_rec", {"user": rows[int(rng.integers(number + 1))]["user"]}
