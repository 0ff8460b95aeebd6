"""A key/value store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

import millpond as mp
from millpond.apps.program_demo import RATE, SECONDS, Application, check_calls, show


@mp.program
class KeyValues:
    """Texts by key."""

    values: mp.Partitioned[mp.Map[str, str]]

    def put(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> str | None:
        return self.values.get(key)

    def swap(self, key: str, expected: str, value: str) -> bool:
        """Put the value if the one that is expected is there."""
        if self.values.get(key) != expected:
            return False
        self.values[key] = value
        return True

    def remove(self, key: str) -> bool:
        """Whether there was one."""
        there = key in self.values
        del self.values[key]
        return there


def requests(
    count: int, *, keys: int = 1_000, read: float = 0.5, seed: int = 1
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Calls, a share `read` of which only read."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        key = f"key-{int(rng.integers(keys))}"
        kind = rng.random()
        if kind < read:
            yield "get", {"key": key}
        elif kind < read + (1 - read) * 0.8:
            yield "put", {"key": key, "value": f"value-{number % 50}"}
        elif kind < read + (1 - read) * 0.9:
            yield (
                "swap",
                {"key": key, "expected": f"value-{int(rng.integers(50))}", "value": f"swapped-{number}"},
            )
        else:
            yield "remove", {"key": key}


APPLICATION = Application(
    "key_values",
    KeyValues,
    {
        "put": {"key": pa.string(), "value": pa.string()},
        "swap": {"key": pa.string(), "expected": pa.string(), "value": pa.string()},
        "remove": {"key": pa.string()},
        "get": {"key": pa.string()},
    },
    between=lambda ask, epoch: (
        ask("swap", key="key-0", expected="value-0", value="mine"),
        ask("get", key="key-0"),
    ),
    words=lambda told: f"asked directly, key-0 is {told[1]!r}",
)


def run(seconds: int = SECONDS, rate: int = RATE, keys: int = 1_000) -> bool:
    """`seconds` epochs of `rate` calls."""
    check_calls(seconds, rate)
    return show(APPLICATION, requests(seconds * rate, keys=keys), rate)
