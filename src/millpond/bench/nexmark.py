"""NEXMark beside its peers: the same files through `readStream`, one a micro-batch, answers compared with DuckDB's.

For each query all contenders take turns, every other round in the opposite order; the first file of a run does not count. What counts
is the time from when the timed files are there until everything is answered, and the CPU time of all processes meanwhile:
Spark's, its workers', and a pond's containers'. Rates are medians of the rounds, with the lowest and the highest beside
them. Machines are slower in one minute than in the next: ratios are between runs of the same round, and of those the median.
Every run's rows of answers are counted, hashed and compared; a run that answers wrongly ends the benchmark.

Flink, where it is asked for, has the same rows in files of its own: `nexmark_flink` tells what that changes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from millpond.apps.spark_session import spark_session
from millpond.bench import flink_environment, nexmark_over, nexmark_parts
from millpond.bench.nexmark_flink import flink_sql, setup
from millpond.bench.nexmark_load import (
    FULL,
    QUERIES,
    QUICK,
    Contender,
    Fingerprint,
    Run,
    Work,
    Workload,
    check_queries,
)
from millpond.bench.nexmark_pond import PondWindows, loops_share, open_pond, options_text
from millpond.bench.nexmark_report import plot, print_table
from millpond.bench.nexmark_spark import SparkNative
from millpond.bench.window_container import Means, told_by
from millpond.errors import BadOption

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["plot", "print_table", "run"]
WATCHES_S = 1.0
"""How often one looks at what is on disk, where more than the budget is kept."""


class Setting(NamedTuple):
    """What a contender is made of."""

    spark: SparkSession
    folder: Path
    """Of its own."""
    progress: Callable[[str], None]
    means: Means = Means()


Factory = Callable[[Setting], AbstractContextManager[Contender]]
"""A contender that is ready to run, until the benchmark ends."""


@contextmanager
def _spark_native(setting: Setting) -> Iterator[Contender]:
    yield SparkNative(setting.spark, setting.means.budget if setting.means.uncached else 0)


@contextmanager
def _millpond(setting: Setting) -> Iterator[Contender]:
    with open_pond(setting.folder / "pond", setting.means, setting.spark) as pond:
        yield PondWindows(setting.spark, pond, watches_s=WATCHES_S * setting.means.uncached)


@contextmanager
def _millpond_rocksdb(setting: Setting) -> Iterator[Contender]:
    """The same pond and operators, over RocksDB within the same budget."""
    from millpond.stores.windows.rocks_database import imported

    imported()  # or it says what is missing
    options_file = setting.folder / "rocksdb.json"
    means = setting.means._replace(store="rocksdb", told=str(options_file))
    with open_pond(setting.folder / "pond", means, setting.spark) as pond:
        options = told_by(means.told, settled=False)["options"]
        setting.progress(f"millpond-{options_text(options)}")
        yield PondWindows(
            setting.spark, pond, "millpond-rocksdb", means.told, watches_s=WATCHES_S * means.uncached
        )


def _flink(python: Path) -> Factory:
    """Flink SQL, by the Python of its environment."""

    @contextmanager
    def opened(setting: Setting) -> Iterator[Contender]:
        setting.progress(setup())
        with flink_sql(python, setting.folder, setting.progress) as contender:
            yield contender

    return opened


CONTENDERS: dict[str, Factory] = {
    "millpond": _millpond,
    "millpond-rocksdb": _millpond_rocksdb,
    "spark-native": _spark_native,
}
"""By name, in the order of the table; Flink comes last, where it is asked for."""
ONLY = ("queries", "over", *nexmark_parts.PARTS)
"""What can be measured alone: queries, the same with more open than there is memory for, and parts by Arrow tables."""


class Reach(NamedTuple):
    """By how much a contender should be faster than another."""

    contender: str
    beside: str
    at_least: Mapping[str, float]
    """By query."""


ROCKSDB_REACH = {
    **dict.fromkeys(("q7", "q7-bidder", "q7-session"), 1.9),
    "q8": 1.6,
    "q11-median": 2.0,
    "q11": 2.5,
    "q12": 2.5,
    "q5": 4.1,
    "q5-append": 4.1,
}
SPARK_REACH = {**dict.fromkeys(("q7", "q7-bidder", "q8", "q11", "q11-median"), 3.0), "q5": 1.5}
FLOORS = {"q7": 0.7, "q11": 0.7}
"""Million events per core-second."""
REACHES = (
    Reach("millpond", "millpond-rocksdb", ROCKSDB_REACH),
    Reach("millpond", "spark-native", SPARK_REACH),
)


def run(
    quick: bool,
    progress: Callable[[str], None],
    query: Sequence[str] | None = None,
    work: Work | None = None,
    contenders: Mapping[str, Factory] | None = None,
    flink: bool = False,
    only: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Measure all queries with all contenders, and then the parts; or these queries, or parts of `ONLY`, alone.

    Flink only where asked for. Raises where an answer differs from DuckDB's.
    """
    wanted = list(only or (["queries"] if query else ONLY))
    for part in wanted:
        if part not in ONLY:
            raise BadOption(
                f"there is no part {part!r}", hint=f"there are {', '.join(ONLY)}", option="--only"
            )
    if query and wanted != ["queries"]:
        raise BadOption(
            f"queries are no part of {', '.join(wanted)}",
            hint="leave --only or --query out",
            option="--query",
        )
    queries = list(query or QUERIES)
    check_queries(queries)
    work = work or (QUICK if quick else FULL)
    factories = dict(CONTENDERS if contenders is None else contenders)
    if flink:
        factories["flink"] = _flink(flink_environment.prepare(progress))
    results: list[dict[str, Any]] = []
    if "queries" in wanted or "over" in wanted:
        with (
            spark_session("millpond bench nexmark", memory="4g") as spark,
            tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder,
        ):
            if "queries" in wanted:
                results += _queries(spark, Path(folder), queries, work, factories, progress)
            if "over" in wanted:
                results += over_budget(
                    spark, Path(folder), nexmark_over.QUICK if quick else nexmark_over.FULL, progress
                )
    return results + nexmark_parts.run(quick, progress, wanted)


def _queries(
    spark: SparkSession,
    folder: Path,
    queries: Sequence[str],
    work: Work,
    factories: Mapping[str, Factory],
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    results = []
    with _opened(spark, folder / "contenders", Means(), factories, progress) as taking:
        workload = Workload(folder / "events", work)
        for each in queries:
            able = [contender for contender in taking.values() if contender.supports(each)]
            results += _measure(workload, each, able, progress)
    return results


@contextmanager
def _opened(
    spark: SparkSession,
    folder: Path,
    means: Means,
    factories: Mapping[str, Factory],
    progress: Callable[[str], None],
) -> Iterator[dict[str, Contender]]:
    """All of them at once: their ponds take memory, and processors, until the end."""
    with ExitStack() as opened:
        taking = {}
        for name, factory in factories.items():
            (folder / name).mkdir(parents=True)
            taking[name] = opened.enter_context(factory(Setting(spark, folder / name, progress, means)))
        yield taking


def over_budget(
    spark: SparkSession, folder: Path, scale: nexmark_over.Scale, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """All contenders with less, and the ponds with more open than the budget has room for."""
    means = nexmark_over.means_of(scale)
    results = []
    with _opened(spark, folder / "over", means, CONTENDERS, progress) as taking:
        for number, over in enumerate(nexmark_over.works(scale)):
            progress(f"{over.part}: {over.work.events:,} events")
            able = [
                contender
                for name, contender in taking.items()
                if contender.supports(over.query)
                and (name != "spark-native" or over.share <= nexmark_over.SPARK_SHARE_MAX)
            ]
            with tempfile.TemporaryDirectory(dir=folder) as events:
                workload = Workload(Path(events), over.work)
                results += [
                    result
                    | {
                        "part": "streams over the budget",
                        "number": number,
                        "share": over.share,
                        "budget": means.budget,
                    }
                    for result in _measure(workload, over.query, able, progress, floors={})
                ]
    return results


def _measure(
    workload: Workload,
    query: str,
    contenders: Sequence[Contender],
    progress: Callable[[str], None],
    floors: Mapping[str, float] = FLOORS,
) -> list[dict[str, Any]]:
    """One result of each contender, from all rounds that count."""
    work = workload.work
    runs: dict[str, list[Run]] = {contender.name: [] for contender in contenders}
    fingerprints: dict[str, Fingerprint] = {}
    for number in range(work.uncounted_rounds + work.rounds):
        counts = number >= work.uncounted_rounds
        for contender in contenders if number % 2 == 0 else contenders[::-1]:
            progress(f"{query}: {contender.name}, {'round' if counts else 'warming up, round'} {number + 1}")
            done = contender.run(workload, query)
            fingerprints[contender.name] = workload.check(contender.name, query, done)
            progress(
                f"  {done.events / done.seconds / 1e6:.3f} M events/s,"
                f" {done.events / max(done.cpu_seconds, 1e-9) / 1e6:.3f} per core-second"
            )
            if counts:
                done.result = done.result.slice(0, 0)  # it has been looked at
                runs[contender.name].append(done)
    return [
        _result(workload, query, name, runs, fingerprints[name]) | _beside(query, name, runs, floors)
        for name in runs
    ]


def _result(
    workload: Workload, query: str, name: str, runs: Mapping[str, Sequence[Run]], fingerprint: Fingerprint
) -> dict[str, Any]:
    own = runs[name]
    rates = [each.events / each.seconds for each in own]
    core_rates = [each.events / max(each.cpu_seconds, 1e-9) for each in own]
    return {
        "system": f"{query} {name}",
        "query": query,
        "contender": name,
        "events": own[0].events,
        "files": workload.work.files - workload.work.warm_files,
        "cores": os.cpu_count(),
        **_spread("events_per_s", rates),
        **_spread("events_per_core_s", core_rates),
        "seconds": [each.seconds for each in own],
        "cpu_seconds": [each.cpu_seconds for each in own],
        "result_rows": fingerprint.rows,
        "result_hash": fingerprint.hash,
        "checkpoints": own[0].extras.get("checkpoints"),
        "work": workload.work._asdict(),
        "parameters": workload.parameters(query),
        "load_average": os.getloadavg()[0],
        **{f"{kind}_s": _median(own, kind) for kind in ("java", "containers")},
        **(
            {"store_s": float(np.median([each.extras["store_s"] for each in own]))}
            if "store_s" in own[0].extras
            else {}
        ),
        **loops_share([each.extras for each in own]),
        "extras": [each.extras for each in own],
    }


def _median(runs: Sequence[Run], kind: str) -> float:
    """Of the CPU seconds of one kind of processes."""
    return float(np.median([each.extras["cpu_by_kind"][kind] for each in runs]))


def _spread(name: str, numbers: Sequence[float]) -> dict[str, float]:
    return {
        name: float(np.median(numbers)),
        f"{name}_min": min(numbers),
        f"{name}_max": max(numbers),
    }


def _beside(
    query: str, name: str, runs: Mapping[str, Sequence[Run]], floors: Mapping[str, float]
) -> dict[str, Any]:
    """How many times as fast as each of the others: medians of the ratios of each round, by the clock and by CPU time."""
    ratios: dict[str, Any] = {}
    for other in runs:
        if other != name:
            pairs = list(zip(runs[name], runs[other], strict=True))
            ratios[f"vs_{other}"] = float(np.median([beside.seconds / own.seconds for own, beside in pairs]))
            ratios[f"per_core_s_vs_{other}"] = float(
                np.median([beside.cpu_seconds / max(own.cpu_seconds, 1e-9) for own, beside in pairs])
            )
    notes = []
    for reach in REACHES:
        ratio = ratios.get(f"vs_{reach.beside}")
        if reach.contender == name and ratio is not None and query in reach.at_least:
            least = reach.at_least[query]
            notes.append(_said(ratio, least, f"of {reach.beside}"))
    if name == "millpond" and query in floors:
        rate = float(np.median([each.events / max(each.cpu_seconds, 1e-9) for each in runs[name]]))
        notes.append(_said(rate / 1e6, floors[query], "M events per core-second"))
    return ratios | ({"note": "; ".join(notes)} if notes else {})


def _said(number: float, least: float, unit: str) -> str:
    return f"{'reached' if number >= least else 'not reached'}, {number:.2f}: at least {least} {unit}"
