"""k-means: each lane sums up the points nearest to each centre, and all centres move to where theirs are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

import millpond as mp
from millpond.apps.program_demo import RATE, SECONDS, Application, check_calls, show
from millpond.errors import BadOption

CLUSTERS = 4


def distance(x: list[float], y: list[float]) -> float:
    return sum([(a - b) * (a - b) for a, b in zip(x, y, strict=True)])


@mp.program(lanes=2)
class KMeans:
    """Centres, the same in all lanes; and for each, over the points of a lane, how many they are and their sums."""

    centres: mp.Partial[mp.DenseMatrix]
    sums: mp.Partial[mp.DenseMatrix]

    def start(self, places: mp.DenseMatrix) -> None:
        """Begin with these centres, in an epoch of its own."""
        mp.everywhere(self.centres).assign(places)
        mp.everywhere(self.sums).clear()

    def add(self, point: int, x: list[float]) -> int:
        """Count a point to the nearest centre, of equals the first, which is returned."""
        nearest = -1
        least = 0.0
        for centre in self.centres.keys():  # noqa: SIM118 - rows
            far = distance(x, self.centres[centre])
            if nearest < 0 or far < least:
                nearest = centre
                least = far
        counted = self.sums[nearest]
        if len(counted) == 0:
            counted = [0.0] * (len(x) + 1)
        self.sums[nearest] = [c + a for c, a in zip(counted, [1.0] + x, strict=True)]  # noqa: RUF005 - no * in a program
        return nearest

    def move(self) -> float:
        """Centres go to the middle of their points, in an epoch of its own; how far they went, squared, is returned."""
        sums = mp.total(mp.everywhere(self.sums).copy())
        places = mp.everywhere(self.centres).copy()[0]
        went = 0.0
        for centre in sums.keys():  # noqa: SIM118 - rows
            counted = sums[centre]
            middle = [c / counted[0] for c in counted[1:]]
            went += distance(middle, places[centre])
            places[centre] = middle
        mp.everywhere(self.centres).assign(places)
        mp.everywhere(self.sums).clear()
        return went


def points(count: int, *, clusters: int = 4, dimensions: int = 2, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Points around as many places as there are clusters."""
    rng = np.random.default_rng(seed)
    middles = rng.uniform(-10, 10, (clusters, dimensions))
    for number in range(count):
        x = middles[rng.integers(clusters)] + rng.normal(size=dimensions)
        yield {"point": number, "x": [float(v) for v in x]}


def run(seconds: int = SECONDS, rate: int = RATE) -> bool:
    """`seconds` iterations over `rate` points, the same ones each time."""
    check_calls(seconds, rate)
    if rate < CLUSTERS:
        raise BadOption(f"--rate {rate} is below {CLUSTERS}, which are the centres", option="--rate")
    rows = list(points(rate, clusters=CLUSTERS))
    return show(application(rows), [("add", row) for _ in range(seconds) for row in rows], rate)


def application(rows: list[dict[str, Any]]) -> Application:
    """The first points are the first centres."""
    places = mp.DenseMatrix([row["x"] for row in rows[:CLUSTERS]])
    return Application(
        "clusters",
        KMeans,
        {"add": {"point": pa.int64(), "x": pa.list_(pa.float64())}},
        start=lambda ask: ask("start", places=places),
        between=lambda ask, epoch: ask("move"),
        words=lambda went: f"centres moved by {went:.3g}, squared",
    )
