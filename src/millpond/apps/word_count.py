"""Word count by wall-clock time: how often was each word said in the current window?

A program reads no clock: the time comes with the word. In the demo it is that at which the word's epoch came in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

import millpond as mp
from millpond.apps.program_demo import RATE, SECONDS, Application, check_calls, show


@mp.program
class WordCount:
    """For each word the window that it was said in last, and how often in it."""

    counts: mp.Partitioned[mp.Map[str, list[int]]]

    def add(self, word: str, at: int, width: int = 1_000) -> int:
        """Count a word that was said at a time, in milliseconds; how often it was by now. One of an older window is not counted."""
        window = at // width
        seen = self.counts.get(word, [window, 0])
        if window < seen[0]:
            return 0
        count = seen[1] + 1 if window == seen[0] else 1
        self.counts[word] = [window, count]
        return count

    def count(self, word: str, at: int, width: int = 1_000) -> int:
        """How often a word was said in the window of a time, as far as it is the last one."""
        seen = self.counts.get(word, [0, 0])
        return seen[1] if at // width == seen[0] else 0


def spoken(
    count: int, *, vocabulary: int = 500, rate: int = 2_000, seed: int = 1
) -> Iterator[dict[str, Any]]:
    """Words at so many a second; few are said often. Now and then one is late."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        word = f"word{int(vocabulary * rng.random() ** 3)}"
        late = int(rng.integers(2_000)) if rng.random() < 0.05 else 0
        yield {"word": word, "at": max(number * 1_000 // rate - late, 0)}


APPLICATION = Application(
    "word_count",
    WordCount,
    {"add": {"word": pa.string(), "at": pa.int64()}},
    between=lambda ask, epoch: ask("count", word="word0"),
    words=lambda often: f"asked directly, word0 was said {often:,} times in this window",
    clock="at",
)


def run(seconds: int = SECONDS, rate: int = RATE) -> bool:
    """Epochs of so many words; each has the time at which it comes in."""
    check_calls(seconds, rate)
    return show(APPLICATION, [("add", row) for row in spoken(seconds * rate, rate=rate)], rate)
