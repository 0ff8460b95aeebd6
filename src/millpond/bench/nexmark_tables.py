"""NEXMark's windows by Arrow tables, without Spark: how a query depends on its stores and on its load.

Everything else is as in a stream: a pond with a container in a process of its own, epochs that are logged and decided, every row
of answers compared with DuckDB's. What counts is the time from the first table to the last answer, and the CPU time of the
container; the stores' part of it is what they count themselves, and the threads of RocksDB.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import millpond as mp
from millpond.apps.nexmark import ROUND, Nexmark
from millpond.apps.nexmark_truth import truth
from millpond.bench.nexmark_load import compare
from millpond.bench.nexmark_pond import Checkpoints, StoreFigures, forget, open_pond
from millpond.bench.window_container import Means

WHOLE_TOP = mp.where_largest("price", "auction", "date_time", "extra")
AGGREGATES: dict[str, dict[str, Any]] = {
    "q5": {"bids": mp.count()},
    "q7-bidder": {"top": mp.where_largest("price", "auction", "date_time")},
    "q11": {"bids": mp.count()},
    "q11-median": {"median": mp.median("price")},
    "q12": {"bids": mp.count()},
    "q7-bidder-whole": {"top": WHOLE_TOP},
    "q7-session-whole": {"top": WHOLE_TOP},
}
"""Q12 goes by event time here. `-whole` are all columns of a bid, as large as NEXMark has them."""
PATTERNS = {
    **dict.fromkeys(("q5", "q11", "q12"), "RMW"),
    **dict.fromkeys(("q7-bidder", "q7-bidder-whole"), "AAR"),
    **dict.fromkeys(("q11-median", "q7-session-whole"), "AUR"),
}


class Load(NamedTuple):
    """Rows of a query, and its windows. `uniform_keys` is for bidders that are all equally likely, so many of them; below zero,
    all of them come once, before any comes again.
    """

    query: str
    rows: int
    batch: int
    rows_per_s: int
    """Of event time."""
    size: int = 10_000_000
    """In microseconds: of windows, or the gap of sessions."""
    slide: int = 2_000_000
    disorder: int = 1
    uniform_keys: int = 0
    active_people: int = 1_000
    warm: int = 0
    """So many rows at the beginning do not count: files are opened, and memory is asked for."""
    seed: int = 1


class Measured(NamedTuple):
    """What a run came to."""

    seconds: float
    container_s: float
    """CPU seconds of the container."""
    fired_ms: Sequence[float]
    """Of each epoch in which something fired: from its rows, which moved the watermark, to its answers."""
    answers: int
    extras: Mapping[str, Any]

    def as_result(self, system: str, load: Load, means: Means) -> dict[str, Any]:
        rows = load.rows - load.warm
        return {
            "system": system,
            "query": load.query,
            "pattern": PATTERNS[load.query],
            "rows": rows,
            "rows_per_s": rows / self.seconds,
            "rows_per_container_s": rows / max(self.container_s, 1e-9),
            "container_s": self.container_s,
            "fired_p50_ms": float(np.percentile(self.fired_ms, 50)),
            "fired_p95_ms": float(np.percentile(self.fired_ms, 95)),
            "fired_epochs": len(self.fired_ms),
            "answer_rows": self.answers,
            "load": load._asdict(),
            "means": means._asdict(),
            **self.extras,
        }


def rows_of(load: Load) -> pa.Table:
    """All bids, from when all people that are active have registered."""
    events = load.rows * ROUND // 46 + ROUND
    nexmark = Nexmark(
        seed=load.seed,
        events_per_s=load.rows_per_s * ROUND // 46,
        active_people=load.active_people,
        disorder=load.disorder,
        extra=load.query.endswith("-whole"),
    )
    bids = nexmark.bids(load.active_people * ROUND, events).slice(0, load.rows)
    if load.uniform_keys:
        chance = np.random.default_rng(load.seed)
        keys = chance.integers(0, abs(load.uniform_keys), len(bids))
        if load.uniform_keys < 0:
            keys[: -load.uniform_keys] = chance.permutation(-load.uniform_keys)
        bids = bids.set_column(1, "bidder", pa.array(keys))
    return bids


class Bench:
    """A pond whose windows have certain means, for one load after another."""

    def __init__(self, pond: mp.Pond, told: str = "") -> None:
        self._pond = pond
        self._told = told
        self._numbers = count()
        self._rehearsed: set[str] = set()

    def measured(self, load: Load, *, watches_s: float = 0.0, checkpoints: int = 0) -> Measured:
        """One run, with so many checkpoints beside it, whose answers are right: raises where they are not."""
        bids, expected = _prepared(load)
        if load.query not in self._rehearsed:
            # Kernels and connections are there before anything counts.
            few = bids.slice(0, 20_000)
            self._rehearsed.add(load.query)
            _Feed(self._pond, load._replace(batch=5_000), "rehearsal").take(few, 0, len(few)).finish()
            forget(self._pond, "rehearsal")
        name = f"w{next(self._numbers)}"
        try:
            return self._measure(name, load, bids, expected, watches_s, checkpoints)
        finally:
            forget(self._pond, name)

    def _measure(
        self,
        name: str,
        load: Load,
        bids: pa.Table,
        expected: pa.Table,
        watches_s: float,
        checkpoints: int,
    ) -> Measured:
        pond = self._pond
        feed = _Feed(pond, load, name).take(bids, 0, load.warm)
        feed.fired_ms.clear()
        did = StoreFigures(pond, name, self._told)
        began_cpu, began = _container_s(pond), time.perf_counter()
        asked = Checkpoints(pond)
        with did.watched(watches_s), asked.taken():
            for number in range(checkpoints + 1):
                # Between equal parts of the rows.
                first, stop = (
                    load.warm + share * (load.rows - load.warm) // (checkpoints + 1)
                    for share in (number, number + 1)
                )
                feed.take(bids, first, stop)
                if number < checkpoints:
                    asked.ask()
            feed.finish()
            seconds, container_s = time.perf_counter() - began, _container_s(pond) - began_cpu
        answers = answers_of(load, feed.fired)
        compare(f"{load.query} by tables", answers, expected)
        return Measured(seconds, container_s, feed.fired_ms, len(answers), did.read() | asked.figures())


@contextmanager
def bench(means: Means) -> Iterator[Bench]:
    with (
        tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder,
        open_pond(
            Path(folder) / "pond",
            means := means._replace(told=f"{folder}/rocksdb.json" if means.store == "rocksdb" else ""),
        ) as pond,
    ):
        yield Bench(pond, means.told)


@lru_cache(1)
def _prepared(load: Load) -> tuple[pa.Table, pa.Table]:
    """The rows, and what DuckDB answers: runs of one load come one after the other."""
    bids = rows_of(load)
    return bids, _truth(load, bids)


class _Feed:
    """A window of a query, and what it has fired."""

    def __init__(self, pond: mp.Pond, load: Load, name: str) -> None:
        key = "auction" if load.query == "q5" else "bidder"
        window = {
            "q5": mp.sliding(_text(load.size), _text(load.slide)),
            **dict.fromkeys(("q7-bidder", "q7-bidder-whole", "q12"), mp.tumbling(_text(load.size))),
        }.get(load.query, mp.session(_text(load.size)))
        own = pond.window(name, key=f"{key} long", window=window, aggregate=AGGREGATES[load.query])
        self._source = own.over(key=key, at="date_time", delay=_text(_disorder_us(load)))
        self._batch = load.batch
        self._epochs = count()
        self.fired: list[pa.Table] = []
        self.fired_ms: list[float] = []

    def take(self, bids: pa.Table, first: int, stop: int) -> _Feed:
        for start in range(first, stop, self._batch):
            began = time.perf_counter()
            rows = bids.slice(start, min(self._batch, stop - start))
            self._note(self._source(rows, next(self._epochs)), began)
        return self

    def finish(self) -> None:
        began = time.perf_counter()
        self._note(self._source.finish(), began)

    def _note(self, fired: pa.Table | None, began: float) -> None:
        if fired is not None and len(fired):
            self.fired_ms.append(1e3 * (time.perf_counter() - began))
            self.fired.append(fired)


def answers_of(load: Load, fired: Sequence[pa.Table]) -> pa.Table:
    """As DuckDB has them; of Q5 the auctions that have the most bids, of Q7 a row for each bid."""
    rows = pa.concat_tables(fired)
    if load.query == "q5":
        most = rows.group_by("window_start").aggregate([("bids", "max")])
        rows = rows.join(most, "window_start")
        return rows.filter(pc.equal(rows["bids"], rows["bids_max"])).drop_columns(["bids_max"])
    if load.query.startswith("q7"):
        tops = rows["top"].combine_chunks()
        flat, parents = tops.flatten(), pc.list_parent_indices(tops)
        names = ["auction", "price", "date_time", *(["extra"] if load.query.endswith("-whole") else [])]
        columns = {name: rows[name].take(parents) for name in ("window_start", "window_end", "bidder")}
        largest = {name: flat.field(name) for name in names}
        return pa.table({**columns, **largest})
    return rows


def _truth(load: Load, bids: pa.Table) -> pa.Table:
    if load.query == "q5":
        return truth("q5", bids=bids, size=_text(load.size), slide=_text(load.slide))
    whole = load.query.endswith("-whole")
    if load.query.startswith("q7-bidder"):
        return truth("q7", bids=bids, size=_text(load.size), per_bidder=True, whole=whole)
    if load.query.startswith("q7-session"):
        return truth("q7-session", bids=bids, gap=_text(load.size), whole=whole)
    if load.query == "q12":
        return truth("q12", bids=bids, size=_text(load.size), arrival="date_time")
    return truth(load.query, bids=bids, gap=_text(load.size))


def _text(micros: int) -> str:
    return f"{micros} microseconds"


def _disorder_us(load: Load) -> int:
    return Nexmark(events_per_s=load.rows_per_s * ROUND // 46, disorder=load.disorder).disorder_us


def _container_s(pond: mp.Pond) -> float:
    return float(sum(each["cpu_s"] for each in pond.metrics()["containers"].values()))
