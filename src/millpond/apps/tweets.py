"""Similar tweets (ChronoStream, section V): which recent tweet of the same place shares most words with a new one?

A stream brings tweets, each of a location, out of order. Every tweet is compared with the tweets before it at its location,
so many of them: the most similar one is that with the most words in common, a word counted once, of equals the newest; a
tweet with which it shares nothing is none. Of the pairs so found each location's best are told periodically. At the end
every answer is compared with what plain Python finds.

The State holds one row for each word of a tweet, by location; a compiled rule beside it compares tweets, another lets go of
those that no window has any more.
"""

from __future__ import annotations

from collections import defaultdict, deque
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

SECONDS, RATE, KEYS, WINDOW = 20, 1_000, 50, 100
WORDS_MIN, WORDS_MAX = 6, 14  # of a tweet
COPIED = 0.1  # share of tweets that say much of what another one said not long before
STEP = 1 << 5
"""Times of a tweet, one for each of its words."""
SHARED = 1 << 40
"""An answer is the number of shared words times this, and the number of the other tweet."""


def run(seconds: int = SECONDS, rate: int = RATE, keys: int = KEYS, window: int = WINDOW) -> bool:
    """Tweets from `keys` locations at `rate` a second for so long; True if each found the right one, once."""
    for option, value, most in (
        ("seconds", seconds, 3_600),
        ("rate", rate, 100_000),
        ("keys", keys, 100_000),
        ("window", window, 1 << 17),
    ):
        if not 1 <= value <= most:
            raise BadOption(f"--{option} {value} is not within 1 and {most:,}", option=f"--{option}")
    return show(Tweets(window=window, locations=keys), seconds, rate)


@dataclass(frozen=True)
class Tweets(Windows):
    """Of the last `window` tweets before it at its location, the one that is most similar to each tweet."""

    window: int = WINDOW
    locations: int = KEYS
    vocabulary: int = 20_000

    name: ClassVar[str] = "tweets"
    events_are: ClassVar[str] = "tweets"
    step: ClassVar[int] = STEP
    columns: ClassVar[str] = "number long, location long, text string"
    update_columns: ClassVar[str] = "location long, ts long, word long"

    @property
    def tweets_to_fill(self) -> int:
        """About how many tweets it takes until all windows are full."""
        return int(1.1 * self.window * self.locations) + DISORDER

    def events(self, count: int, *, first: int = 0, seed: int = 1) -> pa.Table:
        rng = np.random.default_rng((seed, first))
        numbers = np.arange(first, first + count)
        locations = rng.integers(0, self.locations, count)
        chosen = words.ranks(rng, count * WORDS_MAX, self.vocabulary).reshape(count, WORDS_MAX)
        chosen = (chosen + 97 * locations[:, None]) % self.vocabulary
        # Some repeat half of what one wrote a few tweets ago, from the same place.
        copies = np.flatnonzero(rng.random(count) < COPIED)
        copied = copies - rng.integers(1, 2 * self.locations, len(copies))
        copies, copied = copies[copied >= 0], copied[copied >= 0]
        locations[copies] = locations[copied]
        chosen[copies, : WORDS_MAX // 2] = chosen[copied, : WORDS_MAX // 2]
        lengths = rng.integers(WORDS_MIN, WORDS_MAX + 1, count)
        is_said = np.arange(WORDS_MAX) < lengths[:, None]
        texts = words.joined(words.vocabulary(self.vocabulary).take(pa.array(chosen[is_said])), lengths)
        table = pa.table({"number": numbers, "location": locations, "text": texts})
        return table.take(words.arrival(rng, count, DISORDER))

    def updates(self, events: pa.Table) -> pa.Table:
        """A row for each word of a tweet, each word once and in the order of the alphabet: so rules can merge them."""
        rows, _, every = words.split(events["text"])
        codes = words.encode(every).to_numpy()
        order = np.lexsort((codes, rows))
        rows, codes = rows[order], codes[order]
        is_new = np.ones(len(rows), np.bool_)
        is_new[1:] = (np.diff(rows) != 0) | (np.diff(codes) != 0)
        rows, codes = rows[is_new], codes[is_new]
        places = words.places_of(rows)
        if len(places) and places.max() >= STEP:
            raise BadOption(f"a tweet has more than {STEP} different words", hint="shorten it", option="text")
        return pa.table(
            {
                "location": events["location"].to_numpy()[rows],
                "ts": events["number"].to_numpy()[rows] * STEP + places,
                "word": codes,
            }
        )

    def questions(self, events: pa.Table) -> pa.Table:
        """One for each tweet that has words, as of its end."""
        events = events.filter(pc.not_equal(pc.ascii_trim_whitespace(events["text"]), ""))
        ends = events["number"].to_numpy() * STEP + STEP - 1
        return pa.table({"number": events["number"], "location": events["location"], "ts": ends})

    def frame_of_questions(self, events: DataFrame) -> DataFrame:
        return events.where(r"text RLIKE '\\S'").selectExpr(
            "number", "location", f"number * {STEP} + {STEP - 1} AS ts"
        )

    def state(self, pond: mp.Pond) -> mp.State:
        return pond.state("tweets", key="location long", value="word long", compact=newest(self.window))

    def update(self, state: mp.State) -> Update:
        return state.update(key="location", at="ts", value="word", delay=self.delay, late="error", name=FEED)

    def fetch(self, state: mp.State) -> Fetch:
        return state.fetch(
            key="location",
            at="ts",
            rule=most_similar(self.window),
            into="similar",
            delay=self.delay,
            name=ASKING,
        )

    def pairs(self, answers: pa.Table) -> Iterator[tuple[Hashable, Any]]:
        for row in self.told(answers).to_pylist():
            yield row["number"], (row["other"], row["shared"])

    @staticmethod
    def told(answers: pa.Table) -> pa.Table:
        """The answers with the number of the `other` tweet, null where there is none, and how many words are `shared`."""
        similar = answers["similar"].to_numpy()
        shared = similar // SHARED
        other = pa.array(similar % SHARED, mask=shared == 0)
        return answers.drop_columns("similar").append_column("other", other).append_column("shared", [shared])

    @staticmethod
    def most_similar_pairs(told: pa.Table, every: int) -> pa.Table:
        """Of each `every` numbers and each location the pair that shares most words: of equals that of the newest tweet.

        The columns are `period`, `location`, `number`, `other` and `shared`.
        """
        told = told.filter(pc.is_valid(told["other"]))
        told = told.append_column("period", [told["number"].to_numpy() // every])
        order = [
            ("period", "ascending"),
            ("location", "ascending"),
            ("shared", "descending"),
            ("number", "descending"),
        ]
        told = told.sort_by(order)
        groups = np.stack((told["period"].to_numpy(), told["location"].to_numpy()), axis=1)
        is_first = np.ones(len(told), np.bool_)
        is_first[1:] = (np.diff(groups, axis=0) != 0).any(axis=1)
        return told.filter(pa.array(is_first)).select(["period", "location", "number", "other", "shared"])

    def example(self, answers: pa.Table) -> str:
        best = self.most_similar_pairs(self.told(answers), every=1 << 62).sort_by([("shared", "descending")])
        if len(best) == 0:
            return "no two are similar"
        row = best.slice(0, 1).to_pylist()[0]
        return f"location {row['location']}: {row['number']} and {row['other']} share {row['shared']} words"

    def model(self, events: Iterable[Mapping[str, Any]]) -> Answers:
        windows: defaultdict[int, deque[tuple[int, set[str]]]] = defaultdict(
            lambda: deque(maxlen=self.window)
        )
        answers: Answers = {}
        for event in sorted(events, key=lambda event: event["number"]):
            said = set(event["text"].split())
            if said:
                window = windows[event["location"]]
                shared, other = max(
                    ((len(said & others), number) for number, others in window), default=(0, 0)
                )
                answers[event["number"]] = (other if shared else None, shared)
                window.append((event["number"], said))
        return answers


# Beside the state


def most_similar(window: int) -> Callable[..., Any]:
    """Compares the newest tweet with so many before it, the newest first."""

    def similar(times: Longs, word: Longs) -> int:
        end = len(times)
        begin = beginning(times, end)
        best, most, stop = 0, 0, begin
        for _ in range(window):
            if stop == 0:
                break
            start = beginning(times, stop)
            # Both are in the order of the alphabet.
            i, j, shared = begin, start, 0
            while i < end and j < stop:
                if word[i] < word[j]:
                    i += 1
                elif word[i] > word[j]:
                    j += 1
                else:
                    i += 1
                    j += 1
                    shared += 1
            if shared > most:
                most = shared
                best = shared * SHARED + times[start] // STEP
            stop = start
        return best

    return similar


def newest(window: int) -> Callable[..., Any]:
    """Of what is below F a window may still need its newest tweets, and the tweet that asks may be one of them."""

    def in_window(times: Longs, word: Longs) -> Any:
        kept = np.zeros(len(times))
        stop = len(times)
        for _ in range(window + 1):
            if stop == 0:
                break
            start = beginning(times, stop)
            for i in range(start, stop):
                kept[i] = 1.0
            stop = start
        return kept

    return in_window


def beginning(times: Longs, stop: int) -> int:
    """Where the tweet begins whose words end at `stop`."""
    start = stop - 1
    first = times[start] // STEP * STEP
    while start > 0 and times[start - 1] >= first:
        start -= 1
    return start
