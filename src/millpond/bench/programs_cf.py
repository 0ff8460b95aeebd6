"""Collaborative filtering: ratings and questions, mixed, beside the same algorithm compiled by hand on one core.

Some ratings are loaded first. Then requests come in batches, of a size that takes some 0.2 s: the ratings of a batch are an epoch of one operator, its
questions one of another. For the rate a batch comes as soon as the one before is done. For latency requests come evenly, at a
share of that rate, and a batch is what has come: of a question until its answer is there, of a rating until it is durable.
Before it counts, questions are asked for some seconds, in which the pond compiles what it runs often.
Staleness is how long the oldest rating that an answer does not know has been there when it is told. Each answer is compared
with that of the loop over arrays, which gets the same requests in the same order.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import millpond as mp
from millpond.apps.ratings import HOW, MOVIELENS, NETFLIX, drawn_ratings, movielens_file, read_ratings
from millpond.apps.recommender import Recommender
from millpond.bench.cpu import cpu_seconds_by_kind
from millpond.bench.programs_kernel import Filtering, seconds_of
from millpond.bench.programs_pond import CONTAINERS, Scale, opened, percentiles

Longs = npt.NDArray[np.int64]
TARGET = 14_000
MIXES = ((1, 5), (1, 1), (5, 1))
LOAD = 5_000
LATENCY_SHARE = 0.7
TURN_S = 0.2
SMALLEST, TRIES = 24, 3  # batches
AIMED = ("movielens", "generated")
DIRECT = 50
WARM = 100
"""Questions at a time, to warm up."""


@mp.program(max_rounds=100_000)
class ByItem:
    """The same with the counts of items by item: what `Partial` saves is to go from item to item."""

    user_item: mp.Partitioned[mp.Matrix]
    co_occ: mp.Partitioned[mp.Matrix]

    def add_rating(self, user: int, item: int, rating: float) -> None:
        row = self.user_item[user]
        fresh = item not in row
        others = row.keys()
        row[item] = rating
        if fresh:
            for other in others:
                self.co_occ[item, other] += 1
            for other in others:
                self.co_occ[other, item] += 1

    def get_rec(self, user: int, k: int = 10) -> list[int]:
        row = self.user_item[user].copy()
        scores = mp.Vector()
        for item in row.keys():  # noqa: SIM118 - a Vector
            scores.add(self.co_occ[item], row[item])
        return scores.without(row).top(k)


class Requests(NamedTuple):
    """Ratings, of which some are loaded, and who asks."""

    ratings: pa.Table
    loaded: int
    asking: Longs

    @classmethod
    def of(cls, ratings: pa.Table, loaded: int) -> Requests:
        """Users ask as often as each other."""
        users = np.unique(ratings["user"].to_numpy())
        return cls(ratings, loaded, np.random.default_rng(2).choice(users, 8 * len(ratings)))

    @property
    def size(self) -> tuple[int, int]:
        """Up to which user and item the numbers go."""
        return tuple(int(self.ratings[name].to_numpy().max()) + 1 for name in ("user", "item"))  # type: ignore[return-value] # two

    def adds(self, first: int, last: int) -> tuple[Any, ...]:
        part = self.ratings.slice(first, last - first)
        return tuple(part[name].to_numpy() for name in ("user", "item", "rating"))


class Turn(NamedTuple):
    """Up to which rating and question it went, and what was answered."""

    added: int
    asked: int
    answers: pa.Array | None


class Mixed:
    """A program with ratings in it, and requests that it has not had."""

    def __init__(self, pond: mp.Pond, cls: type, name: str, requests: Requests) -> None:
        self.program = pond.program(name, cls)
        self.requests = requests
        self._feed = self.program.call("add_rating", name="feed")
        self._ask = self.program.call("get_rec", into="recommended", name="ask")
        self._feeds, self._asks = itertools.count(), itertools.count()
        self.added = self.asked = 0
        self.turns: list[Turn] = []

    def load(self) -> float:
        """Seconds it took."""
        began = time.perf_counter()
        while self.added < self.requests.loaded:
            self._add(min(self.added + LOAD, self.requests.loaded))
        self.turns.append(Turn(self.added, 0, None))
        return time.perf_counter() - began

    def warm_up(self, seconds: float) -> None:
        """Questions for so long, and a rating: meanwhile the pond compiles the tasks."""
        began = time.perf_counter()
        self.turn(1, 0)
        while time.perf_counter() - began < seconds and self.asked < len(self.requests.asking) // 2:
            self.turn(0, WARM)

    def turn(self, adds: int, asks: int) -> None:
        """The next requests, so many of each kind."""
        if adds:
            self._add(self.added + adds)
        answers = None
        if asks:
            users = self.requests.asking[self.asked : self.asked + asks]
            answers = self._ask(pa.table({"user": users}), next(self._asks))["recommended"]
            self.asked += asks
        self.turns.append(Turn(self.added, self.asked, answers))

    def _add(self, last: int) -> None:
        self._feed(self.requests.ratings.slice(self.added, last - self.added), next(self._feeds))
        self.added = last

    def left(self) -> int:
        return len(self.requests.ratings) - self.added

    def wrong(self) -> int:
        """How many of all answers so far are not those of the loop."""
        filtering = Filtering(*self.requests.size)
        added = asked = wrong = 0
        for turn in self.turns:
            filtering.add(*self.requests.adds(added, turn.added))
            if turn.answers is not None:
                expected = filtering.ask(self.requests.asking[asked : turn.asked])
                wrong += sum(
                    told != [item for item in row if item >= 0]
                    for told, row in zip(turn.answers.to_pylist(), expected.tolist(), strict=True)
                )
            added, asked = turn.added, turn.asked
        return wrong


def run(scale: Scale, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for source, ratings in _sources(scale, progress):
        requests = Requests.of(ratings, min(scale.cf_loaded, len(ratings) // 2))
        mixes = ((1, 1),) if source == "netflix" else MIXES
        results += _measured(Recommender, source, requests, mixes, scale, progress)
    requests = Requests.of(drawn_ratings(5_000).slice(0, scale.cf_by_item), scale.cf_by_item // 4)
    for cls in (Recommender, ByItem):
        results += _measured(cls, "few", requests, ((1, 1),), scale, progress)
    return results


def ratings_of_movielens(progress: Callable[[str], None]) -> pa.Table | None:
    file = movielens_file()
    if file is None:
        progress(f"cf: MovieLens-100K skipped, the package recbole is not installed ({HOW})")
        return None
    return read_ratings(file)


def _sources(scale: Scale, progress: Callable[[str], None]) -> Iterator[tuple[str, pa.Table]]:
    movielens = ratings_of_movielens(progress)
    if movielens is not None:
        yield "movielens", movielens.slice(0, scale.cf_ratings)
    yield "generated", drawn_ratings(scale.cf_ratings, MOVIELENS)
    yield "netflix", drawn_ratings(scale.cf_ratings, NETFLIX)


def _measured(
    cls: type,
    source: str,
    requests: Requests,
    mixes: Sequence[tuple[int, int]],
    scale: Scale,
    progress: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """One mix after the other, each with its share of the ratings that are left."""
    kind = "partial" if cls is Recommender else "partitioned by item"
    progress(f"cf, {source}, {kind}: loading {requests.loaded:,} ratings")
    with opened() as pond:
        mixed = Mixed(pond, cls, "rec", requests)
        loading = mixed.load()
        mixed.warm_up(scale.warm_s)
        for number, mix in enumerate(mixes):
            progress(f"cf, {source}, {mix[0]}:{mix[1]}, {kind}")
            measured = _mix(mixed, mix, mixed.left() // (len(mixes) - number), scale)
            reached = measured["requests_per_s"] >= TARGET and measured["wrong"] == 0
            aims = {f">= {TARGET:,} requests/s, none wrong": reached}
            yield {
                "system": f"millpond, co_occ {kind}",
                "section": "cf",
                "work": f"{source} {mix[0]}:{mix[1]}",
                "setup": f"{CONTAINERS} containers of 1 thread; {source}: {requests.loaded:,} ratings loaded",
                "loaded_per_s": requests.loaded / loading,
                **measured,
                **({"aims": aims} if source in AIMED else {}),
            }


def _mix(mixed: Mixed, mix: tuple[int, int], most: int, scale: Scale) -> dict[str, Any]:
    """With so many ratings at most. Of batches that take `TURN_S`, or of the largest one."""
    until = mixed.left() - most
    parts = _sized(mixed, mix, most // 4, scale)
    first = mixed.added, mixed.asked
    cpu = cpu_seconds_by_kind()
    began = time.perf_counter()
    # As many ratings are for latency.
    enough = until + (mixed.left() - until) // 2
    while True:
        mixed.turn(*(parts * part for part in mix))
        if time.perf_counter() - began > scale.seconds or mixed.left() - parts * mix[0] < enough:
            break
    seconds = time.perf_counter() - began
    used = {name: s - cpu[name] for name, s in cpu_seconds_by_kind().items()}
    last = mixed.added, mixed.asked
    count = sum(last) - sum(first)
    rate = count / seconds
    latency = _latency(mixed, mix, LATENCY_SHARE * rate, mixed.left() - until, scale.seconds)
    ceiling = _ceiling(mixed.requests, first, last, parts * sum(mix))
    return {
        "requests": count,
        "batch": parts * sum(mix),
        "requests_per_s": rate,
        "ceiling_per_s": ceiling,
        "of_ceiling": rate / ceiling,
        "cpu_s": used,
        **latency,
        **_direct(mixed),
        "wrong": mixed.wrong(),
    }


def _sized(mixed: Mixed, mix: tuple[int, int], most: int, scale: Scale) -> int:
    """How many times the mix a batch is, found by at most so many ratings."""
    parts = max(1, SMALLEST // sum(mix))
    until = mixed.left() - most
    while True:
        took = []
        for _ in range(TRIES):
            began = time.perf_counter()
            mixed.turn(*(parts * part for part in mix))
            took.append(time.perf_counter() - began)
        enough = 2 * parts * sum(mix) > scale.cf_batch or 2 * parts * mix[0] * TRIES > mixed.left() - until
        if enough or min(took) > TURN_S / 2:
            return parts
        parts *= 2


def _ceiling(requests: Requests, first: tuple[int, int], last: tuple[int, int], batch: int) -> float:
    """Requests a second of the loop over arrays, of those that were measured."""
    filtering = Filtering(*requests.size)
    filtering.add(*requests.adds(0, first[0]))
    filtering.ask(requests.asking[:1])  # compiles
    asking = requests.asking[first[1] : last[1]]
    seconds = seconds_of(filtering, requests.adds(first[0], last[0]), asking, batch)
    return (sum(last) - sum(first)) / seconds


def _latency(mixed: Mixed, mix: tuple[int, int], rate: float, most: int, seconds: float) -> dict[str, float]:
    """Requests come evenly, with so many ratings at most: of `sum(mix)` the first `mix[0]` are ratings."""
    count = int(rate * seconds)
    is_add = np.arange(count) % sum(mix) < mix[0]
    count = min(count, int(np.searchsorted(np.cumsum(is_add), most + 1)))
    arrival = np.arange(count) / rate
    is_add = is_add[:count]
    ended = np.zeros(count)
    stale = np.zeros(count)
    adds_at = arrival[is_add]
    done = 0
    began = time.perf_counter()
    while done < count:
        now = time.perf_counter() - began
        if now < arrival[done]:
            time.sleep(arrival[done] - now)
            continue
        upto = int(np.searchsorted(arrival, now, side="right"))
        due = is_add[done:upto]
        mixed.turn(int(due.sum()), 0)
        durable = time.perf_counter() - began
        mixed.turn(0, int((~due).sum()))
        answered = time.perf_counter() - began
        ended[done:upto] = np.where(due, durable, answered)
        unknown = int(is_add[:upto].sum())
        oldest = adds_at[unknown] if unknown < len(adds_at) else answered
        stale[done:upto] = max(0.0, answered - oldest)
        done = upto
    took = 1e3 * (ended - arrival)
    return {
        "rate_of_latency": rate,
        **percentiles("add", took[is_add]),
        **percentiles("get", took[~is_add]),
        **percentiles("stale", 1e3 * stale[~is_add]),
    }


def _direct(mixed: Mixed) -> dict[str, float]:
    """One question after the other, by one caller; nothing else is under way."""
    took = []
    for user in mixed.requests.asking[:DIRECT].tolist():
        began = time.perf_counter()
        mixed.program.ask("get_rec", user=user)
        took.append(1e3 * (time.perf_counter() - began))
    return percentiles("direct_get", np.array(took))
