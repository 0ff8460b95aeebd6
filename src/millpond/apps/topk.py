"""The most frequent words (ChronoStream, section V): which are they, in each category, over a sliding window?

A stream brings entries of text, each of a category, out of order. A category's window is its last words, so many of them
in the order of time; stop words do not count. Every so many entries each category is asked for the most frequent words of
its window as of then: those of the highest count, of equals those that come first in the alphabet. At the end every answer
is compared with what plain Python counts.

The State holds one row for each word, by category; a rule beside it counts them, another lets go of words that have left
the window.
"""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import millpond as mp
from millpond.apps import words
from millpond.apps.windows import ASKING, DISORDER, FEED, Answers, Windows, show
from millpond.apps.words import Longs
from millpond.errors import BadOption
from millpond.ops.fetch import Fetch
from millpond.ops.update import Update

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SECONDS, RATE, KEYS, WINDOW = 20, 500, 100, 1_000
WORDS_MIN, WORDS_MAX = 49, 110  # of an entry: 474 bytes in the mean
STOP_SHARE = 0.4
DRIFT = 500  # entries: what is frequent changes with time


def run(seconds: int = SECONDS, rate: int = RATE, keys: int = KEYS, window: int = WINDOW) -> bool:
    """Entries of `keys` categories at `rate` a second for so long; True if each top was right, and told once."""
    for option, value, most in (
        ("seconds", seconds, 3_600),
        ("rate", rate, 100_000),
        ("keys", keys, 100_000),
        ("window", window, 1 << 22),
    ):
        if not 1 <= value <= most:
            raise BadOption(f"--{option} {value} is not within 1 and {most:,}", option=f"--{option}")
    return show(TopK(window=window, categories=keys), seconds, rate)


@dataclass(frozen=True)
class TopK(Windows):
    """The `k` most frequent of the last `window` words of each category, every so many entries."""

    window: int = WINDOW
    k: int = 10
    categories: int = KEYS
    every: int = 200
    vocabulary: int = 20_000

    name: ClassVar[str] = "topk"
    events_are: ClassVar[str] = "entries"
    step: ClassVar[int] = 1 << 10
    columns: ClassVar[str] = "number long, category long, text string"
    update_columns: ClassVar[str] = "category long, ts long, word long"

    @property
    def entries_to_fill(self) -> int:
        """About how many entries it takes until all windows are full."""
        words_of_entry = (1 - STOP_SHARE) * (WORDS_MIN + WORDS_MAX) / 2
        return int(1.1 * self.window * self.categories / words_of_entry) + DISORDER

    def events(self, count: int, *, first: int = 0, seed: int = 1) -> pa.Table:
        rng = np.random.default_rng((seed, first))
        numbers = np.arange(first, first + count)
        categories = rng.integers(0, self.categories, count)
        lengths = rng.integers(WORDS_MIN, WORDS_MAX + 1, count)
        total = int(lengths.sum())
        known = pa.concat_arrays([pa.array(words.STOP_WORDS), words.vocabulary(self.vocabulary)])
        stop = len(words.STOP_WORDS)
        # Each category has words of its own that are frequent, and they change.
        turned = np.repeat(97 * categories + numbers // DRIFT, lengths)
        chosen = stop + (words.ranks(rng, total, self.vocabulary) + turned) % self.vocabulary
        chosen = np.where(rng.random(total) < STOP_SHARE, rng.integers(0, stop, total), chosen)
        texts = words.joined(known.take(pa.array(chosen)), lengths)
        table = pa.table({"number": numbers, "category": categories, "text": texts})
        return table.take(words.arrival(rng, count, DISORDER))

    def updates(self, events: pa.Table) -> pa.Table:
        """A row for each word, but stop words, at a time of its own."""
        rows, places, every = words.split(events["text"])
        if len(places) and places.max() >= self.step:
            raise BadOption(
                f"a text has more than {self.step:,} words", hint="cut it into several entries", option="text"
            )
        is_stop = pc.is_in(every.dictionary, pa.array(words.STOP_WORDS)).to_numpy(False)
        counts = ~is_stop[every.indices.to_numpy()]
        rows, places = rows[counts], places[counts]
        return pa.table(
            {
                "category": events["category"].to_numpy()[rows],
                "ts": events["number"].to_numpy()[rows] * self.step + places,
                "word": words.encode(every.filter(pa.array(counts))),
            }
        )

    def questions(self, events: pa.Table) -> pa.Table:
        """With each entry whose number tells so, one for every category, as of the entry's end."""
        numbers = events["number"].to_numpy()
        numbers = numbers[numbers % self.every == 0]
        ends = np.repeat(numbers * self.step + self.step - 1, self.categories)
        return pa.table({"category": np.tile(np.arange(self.categories), len(numbers)), "ts": ends})

    def frame_of_questions(self, events: DataFrame) -> DataFrame:
        return events.where(f"number % {self.every} = 0").selectExpr(
            f"explode(sequence(0L, {self.categories - 1}L)) AS category",
            f"number * {self.step} + {self.step - 1} AS ts",
        )

    def state(self, pond: mp.Pond) -> mp.State:
        return pond.state("words", key="category long", value="word long", compact=newest(self.window))

    def update(self, state: mp.State) -> Update:
        return state.update(key="category", at="ts", value="word", delay=self.delay, late="error", name=FEED)

    def fetch(self, state: mp.State) -> Fetch:
        with warnings.catch_warnings():
            # It gives an array, and so it is not compiled; but all it does, NumPy does with whole arrays.
            warnings.simplefilter("ignore", mp.RuleInterpreted)
            return state.fetch(
                key="category",
                at="ts",
                rule=top(self.k, self.window),
                into="top",
                delay=self.delay,
                name=ASKING,
            )

    def pairs(self, answers: pa.Table) -> Iterator[tuple[Hashable, Any]]:
        for row in self.told(answers).to_pylist():
            yield (row["category"], row["ts"]), list(zip(row["words"], row["counts"], strict=True))

    @staticmethod
    def told(answers: pa.Table) -> pa.Table:
        """The answers with the words as words, and how often each comes: `words` and `counts`, most frequent first."""
        tops = answers["top"].combine_chunks()
        flat = tops.flatten().to_numpy().reshape(-1, 2)
        lengths = pc.fill_null(pc.list_value_length(tops), 0).to_numpy() // 2
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        names = pa.ListArray.from_arrays(offsets, words.decode(flat[:, 0]))
        counts = pa.ListArray.from_arrays(offsets, pa.array(flat[:, 1].copy()))
        return answers.drop_columns("top").append_column("words", names).append_column("counts", counts)

    def example(self, answers: pa.Table) -> str:
        row = self.told(answers.slice(0, 1)).to_pylist()[0]
        ranked = zip(row["words"][:3], row["counts"], strict=False)
        return f"category {row['category']}: {', '.join(f'{word} {count}' for word, count in ranked)}"

    def model(self, events: Iterable[Mapping[str, Any]]) -> Answers:
        windows: dict[int, deque[str]] = {n: deque() for n in range(self.categories)}
        counted: dict[int, Counter[str]] = {n: Counter() for n in range(self.categories)}
        answers: Answers = {}
        for event in sorted(events, key=lambda event: event["number"]):
            window, counts = windows[event["category"]], counted[event["category"]]
            for word in event["text"].split():
                if word not in words.STOP_WORDS:
                    window.append(word)
                    counts[word] += 1
                    if len(window) > self.window:
                        old = window.popleft()
                        counts[old] -= 1
                        if counts[old] == 0:
                            del counts[old]
            if event["number"] % self.every == 0:
                until = (event["number"] + 1) * self.step - 1
                for category, seen in counted.items():
                    ranked = sorted(seen.items(), key=lambda item: (-item[1], item[0]))
                    answers[category, until] = ranked[: self.k]
        return answers


# Beside the state


def top(k: int, window: int) -> Callable[..., Any]:
    """The most frequent words of the window, each followed by its count."""

    def most_frequent(times: Longs, word: Longs) -> "array<long>":  # type: ignore[valid-type]  # noqa: F722 - DDL
        different, counts = np.unique(word[-window:], return_counts=True)
        order = np.lexsort((different, -counts))[:k]
        return np.stack((different[order], counts[order]), axis=1).ravel().tolist()

    return most_frequent


def newest(window: int) -> Callable[..., Any]:
    """Of what is below F a window may still need its newest words, so many."""

    def in_window(times: Longs, word: Longs) -> Any:
        kept = np.ones(len(times))
        for i in range(len(times) - window):
            kept[i] = 0.0
        return kept

    return in_window
