"""As-of lookups through the kernels, beside DuckDB's ASOF JOIN and polars' join_asof.

The same probes into the same versions for all; the answers must agree. Every system runs once to warm up, then in
turns with the others, and its best run counts. Peers start from what they like best: DuckDB from tables in memory,
polars from frames sorted by key and time. They build what they need in each run; Millpond's slices are built before,
as they are in a pond, which `rows_per_s_with_build` charges for.
"""

from __future__ import annotations

import functools
import importlib
import os
import time
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millpond.code.rules import latest
from millpond.errors import BadOption
from millpond.kernels import warm_up
from millpond.kernels.hashing import slices_of
from millpond.kernels.partition import slice_places
from millpond.schema import KeyKind
from millpond.stores.keys import Keys
from millpond.stores.rows import restore, spread
from millpond.stores.versioned import VersionedSlice

ROWS = 5_000_000
QUICK_ROWS = ROWS // 10
SLICES = 64
FEED_BATCH = 250_000
ROUNDS = 3


class Work(NamedTuple):
    """Versions in time order, no two of a key at one time; probes in random order."""

    keys: int
    versions: pa.Table  # k, t, v
    probes: pa.Table  # id, k, t


def make_work(rows: int, keys: int, seed: int = 7) -> Work:
    rng = np.random.default_rng(seed)
    span = 4 * rows
    times = np.sort(rng.choice(span, rows, replace=False))
    versions = {"k": rng.integers(0, keys, rows), "t": times, "v": rng.integers(-(10**12), 10**12, rows)}
    probes = {"id": np.arange(rows), "k": rng.integers(0, keys, rows), "t": rng.integers(0, span, rows)}
    return Work(keys, pa.table(versions), pa.table(probes))


def with_string_keys(work: Work) -> Work:
    def renamed(table: pa.Table) -> pa.Table:
        names = pc.binary_join_element_wise("key-", table["k"].cast(pa.string()), "")
        return table.set_column(table.column_names.index("k"), "k", names)

    return Work(work.keys, renamed(work.versions), renamed(work.probes))


class Slices:
    """The slices of a state in this process, without the pond around them. One thread."""

    def __init__(self, kind: KeyKind) -> None:
        self._slices = [VersionedSlice(kind, pa.schema([("v", pa.int64())])) for _ in range(SLICES)]

    def feed(self, versions: pa.Table) -> None:
        """Insert the versions batch by batch, as a stream brings them."""
        for batch in versions.combine_chunks().to_batches(FEED_BATCH):
            keys, times, places, starts = _routed(batch)
            values = pa.array(spread(batch["v"].to_numpy(), places))
            for slice_, first, stop in zip(self._slices, starts, starts[1:], strict=False):
                part = values.slice(first, stop - first)
                slice_.insert(keys.part(first, stop), times[first:stop], [part])

    def asof(self, probes: pa.Table) -> pa.Array:
        """The newest value at each probe's time, in the probes' order: hashing, routing and the way back included."""
        (batch,) = probes.combine_chunks().to_batches()
        keys, times, places, starts = _routed(batch)
        parts = [
            slice_.fetch(keys.part(first, stop), None, times[first:stop], latest())[0]
            for slice_, first, stop in zip(self._slices, starts, starts[1:], strict=False)
        ]
        return restore(parts, places)


def _routed(batch: pa.RecordBatch) -> tuple[Keys, NDArray[np.int64], NDArray[np.int64], list[int]]:
    keys = Keys.from_arrow(batch["k"])
    places, starts = slice_places(slices_of(keys.hashes, SLICES), SLICES)
    return keys.spread(places), spread(batch["t"].to_numpy(), places), places, starts.tolist()


class Duck:
    """DuckDB with the tables loaded in memory."""

    def __init__(self, duckdb: ModuleType, work: Work, threads: int) -> None:
        self._connection = duckdb.connect()
        self._connection.execute(f"SET threads = {threads}")
        for name, table in (("versions", work.versions), ("probes", work.probes)):
            self._connection.register("loading", table)
            self._connection.execute(f"CREATE TABLE {name} AS FROM loading")
            self._connection.unregister("loading")

    QUERY = "SELECT p.id, v.v FROM probes p ASOF LEFT JOIN versions v ON p.k = v.k AND p.t >= v.t"

    def to_arrow(self) -> pa.Table:
        return self._connection.sql(self.QUERY).to_arrow_table()

    def to_table(self) -> None:
        self._connection.execute(f"CREATE OR REPLACE TABLE answers AS {self.QUERY}")


class Polars:
    """polars with both frames sorted."""

    def __init__(self, polars: ModuleType, work: Work) -> None:
        self._versions, self._probes = (
            polars.from_arrow(table).sort("k", "t") for table in (work.versions, work.probes)
        )

    def asof(self) -> Any:
        with warnings.catch_warnings():
            # It cannot see that frames are sorted within each key, and says so.
            warnings.simplefilter("ignore")
            return self._probes.join_asof(self._versions, on="t", by="k", strategy="backward")


def run(quick: bool, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Measure all four. Raises where an answer of Millpond's differs from DuckDB's."""
    duckdb, polars = _peer("duckdb"), _peer("polars")
    cores = os.cpu_count() or 1
    rows = QUICK_ROWS if quick else ROWS
    progress(f"{rows:,} probes into {rows:,} versions of {rows // 5:,} keys")
    longs = make_work(rows, rows // 5)
    strings = with_string_keys(longs)

    progress("building slices")
    warm_up()
    built, feed_seconds = {}, {}
    for system, slices, work in (
        ("millpond", Slices("i64"), longs),
        ("millpond-strings", Slices("bytes"), strings),
    ):
        feed_seconds[system] = _timed(functools.partial(slices.feed, work.versions)).wall
        built[system] = slices

    progress("loading DuckDB and polars")
    duck, duck_strings = Duck(duckdb, longs, cores), Duck(duckdb, strings, cores)
    polar = Polars(polars, longs)

    progress("comparing answers")
    _compare(built["millpond"].asof(longs.probes), duck.to_arrow())
    _compare(built["millpond-strings"].asof(strings.probes), duck_strings.to_arrow())

    runs: dict[str, list[Callable[[], object]]] = {
        "millpond": [lambda: built["millpond"].asof(longs.probes)],
        "millpond-strings": [lambda: built["millpond-strings"].asof(strings.probes)],
        # Which of the two is faster differs between its versions: the faster one counts.
        "duckdb": [duck.to_arrow, duck.to_table],
        "polars": [polar.asof],
        "duckdb, string keys": [duck_strings.to_arrow, duck_strings.to_table],
    }
    best = _race(runs, progress)

    threads = {"millpond": 1, "millpond-strings": 1, "duckdb": cores, "polars": polars.thread_pool_size()}
    results: list[dict[str, Any]] = []
    for system, used in threads.items():
        timing, duckdbs = best[system], best["duckdb"]
        results.append(
            {
                "system": system,
                "rows_per_s": rows / timing.wall,
                "threads": used,
                "probes": rows,
                "versions": rows,
                "keys": longs.keys,
                "per_thread_vs_duckdb": duckdbs.wall / timing.wall * cores / used,
                "rows_per_cpu_s": rows / timing.cpu,
                "per_cpu_s_vs_duckdb": duckdbs.cpu / timing.cpu,
            }
        )
        if system in feed_seconds:
            results[-1]["build_rows_per_s"] = rows / feed_seconds[system]
            results[-1]["rows_per_s_with_build"] = rows / (timing.wall + feed_seconds[system])
    results[2]["rows_per_s_string_keys"] = rows / best["duckdb, string keys"].wall
    _annotate(results, best, duckdb, polars)
    return results


def _annotate(
    results: list[dict[str, Any]], best: dict[str, Timing], duckdb: ModuleType, polars: ModuleType
) -> None:
    """Say what was run, in a line per system."""
    ours = "hash, route, look up, answers in the probes' order, equal to DuckDB's; slices built before at {:.2f} M rows/s"
    for result in results[:2]:
        result["note"] = ours.format(result["build_rows_per_s"] / 1e6)
    strings = best["duckdb, string keys"].wall / best["millpond-strings"].wall * results[2]["threads"]
    results[1]["note"] += f"; per thread {strings:.2f} times DuckDB with the same string keys"
    results[2]["version"], results[3]["version"] = duckdb.__version__, polars.__version__
    results[2]["note"] = f"{duckdb.__version__}, ASOF LEFT JOIN of tables in memory, long keys"
    results[3]["note"] = f"{polars.__version__}, join_asof of frames sorted before, long keys"


class Timing(NamedTuple):
    """`wall` seconds are what counts; `cpu` seconds, over all threads, tell when others kept the cores busy."""

    wall: float
    cpu: float


def _race(runs: dict[str, list[Callable[[], object]]], progress: Callable[[str], None]) -> dict[str, Timing]:
    """Each system's best run: one to warm up, then `ROUNDS` in turns."""
    best = dict.fromkeys(runs, Timing(float("inf"), float("inf")))
    for turn in range(ROUNDS + 1):
        progress("warming up" if turn == 0 else f"round {turn} of {ROUNDS}")
        for system, ways in runs.items():
            fastest = min(_timed(way) for way in ways)
            if turn:
                best[system] = min(best[system], fastest)
    return best


def _timed(work: Callable[[], object]) -> Timing:
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return Timing(time.perf_counter() - wall, time.process_time() - cpu)


def _compare(ours: pa.Array, theirs: pa.Table) -> None:
    """DuckDB's rows come in its own order, with the probe's id."""
    found, wanted = ours.take(theirs["id"].combine_chunks()), theirs["v"].combine_chunks()
    if not found.equals(wanted):
        equal = pc.fill_null(pc.equal(found, wanted), False)
        both_null = pc.and_(found.is_null(), wanted.is_null())
        differing = len(ours) - pc.sum(pc.or_(equal, both_null)).as_py()
        raise RuntimeError(f"{differing} of {len(ours)} answers differ from DuckDB's")


def _peer(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BadOption(f"this benchmark needs {name}", hint='pip install "millpond[bench]"') from error
