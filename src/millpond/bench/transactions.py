"""`millpond bench transactions`: whole epochs of transactions, beside the schemes that TStream is measured against.

The applications are those of TStream's section 6.1, their events in Arrow tables. What is timed is the same for all
systems, from the events to the outputs: the events taken apart and put in order, the rows of all keys found, the
transactions executed, an Arrow table of outcomes built. All but the execution is one code for all of them. The execution
is timed for itself too. What a scheme has to know beforehand, such as which locks a transaction needs, is given to it
for nothing.

- millpond: as `TransactionSet.run` does it, by the plan that it chooses.
- serial: one thread executes, in time order.
- lal, lwm, pat, no-lock: see `transactions_schemes`; as many executors as threads.

The outcome of each, but of no-lock, is compared with that of serial. Then `transactions_cores`: which share of an epoch is
serial, by plan; and `transactions_spark`: the same through Spark.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
from rich.table import Table

from millpond.apps import bidding, grep_sum, ledger, tolls
from millpond.bench import transactions_cores, transactions_spark
from millpond.bench import transactions_schemes as schemes
from millpond.bench.report import save_figure, wide_console
from millpond.stores.tables import TableStore
from millpond.txn import TransactionSet
from millpond.txn.run import plans
from millpond.txn.run.execution import EpochRun

APPS: dict[str, ModuleType] = {
    "grep_sum": grep_sum,
    "ledger": ledger,
    "bidding": bidding,
    "tolls": tolls,
}
SYSTEMS = ("millpond", "serial", *schemes.SCHEMES)
EVENTS, EVENTS_QUICK = 1_000_000, 50_000
ROUNDS, ROUNDS_QUICK = 5, 2
THREADS = min(2, os.cpu_count() or 1)


@dataclass
class Timing:
    """The shortest of some runs, in seconds."""

    whole: float = float("inf")
    execution: float = float("inf")
    plan: str = ""
    phases_ms: dict[str, float] = field(default_factory=dict)


@dataclass
class Case:
    """Events for an application, in epochs, and the tables as they are before the first of them."""

    program: TransactionSet
    epochs: list[pa.Table]
    keys: int

    @property
    def events(self) -> int:
        return sum(len(epoch) for epoch in self.epochs)

    def stores(self) -> dict[str, TableStore]:
        """Every key has its row already: to make rows is not what is measured."""
        stores = self.program.stores()
        for store in stores.values():
            store.resolve(np.arange(self.keys))
        return stores


def case(app: ModuleType, count: int, interval: int | None = None, **options: Any) -> Case:
    """`count` events of an application, `interval` in an epoch."""
    keys = options.get("keys", 100 if app is tolls else 10_000)
    events = app.events(count, **options)
    step = interval or count
    epochs = [events.slice(start, step).combine_chunks() for start in range(0, count, step)]
    return Case(TransactionSet(app.KINDS, app.TABLES), epochs, keys)


def run_once(
    system: str, given: Case, threads: int, stores: Mapping[str, TableStore]
) -> tuple[Timing, list[pa.Table]]:
    """All epochs by one system: how long it took, and the outputs."""
    timing = Timing(0.0, 0.0, "", dict.fromkeys(("arrange", "keys", "sets", "execute", "outputs"), 0.0))
    outputs = []
    for epoch in given.epochs:
        times = [time.perf_counter()]
        arranged = given.program.arrange(epoch, at="ts")
        times.append(time.perf_counter())
        run = EpochRun(given.program, arranged.prepared, arranged.epoch, stores, threads)
        work = run.work()
        times.append(time.perf_counter())
        if system in schemes.SCHEMES:
            execute = schemes.prepare(system, run, work, threads)
            times.append(time.perf_counter())
            execute()
        else:
            times.append(time.perf_counter())
            timing.plan = plans.run(work, system if system in plans.PLANS else None).plan
        times.append(time.perf_counter())
        outputs.append(run.outputs())
        times.append(time.perf_counter())
        timing.whole += times[-1] - times[0] - (times[3] - times[2])  # what schemes know beforehand is free
        timing.execution += times[4] - times[3]
        for phase, seconds in zip(timing.phases_ms, np.diff(times), strict=True):
            timing.phases_ms[phase] += 1000 * float(seconds)
    return timing, outputs


def race(
    given: Case, systems: tuple[str, ...], threads: int, rounds: int, progress: Callable[[str], None]
) -> dict[str, Timing]:
    """The best of some rounds, systems in turns, after one to warm up in which outcomes are compared."""
    best = {system: Timing() for system in systems}
    wanted = _outcome("serial", given, threads)
    for system in systems:
        progress(f"  {system}: compiling, comparing")
        found = _outcome(system, given, threads)
        if system != "no-lock" and found != wanted:
            raise RuntimeError(f"the outcome of {system} differs from that of serial execution")
    for turn in range(rounds):
        progress(f"  round {turn + 1} of {rounds}")
        for system in systems:
            stores = given.stores()
            gc.collect()
            timing, _ = run_once(system, given, threads, stores)
            if timing.whole < best[system].whole:
                best[system].whole, best[system].phases_ms = timing.whole, timing.phases_ms
            best[system].execution = min(best[system].execution, timing.execution)
            best[system].plan = timing.plan
    return best


def _outcome(system: str, given: Case, threads: int) -> list[pa.Table]:
    stores = given.stores()
    _, outputs = run_once(system, given, threads, stores)
    return [*outputs, *(store.snapshot() for store in stores.values())]


def run(quick: bool, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """The results of all applications by all systems."""
    count, rounds = (EVENTS_QUICK, ROUNDS_QUICK) if quick else (EVENTS, ROUNDS)
    results: list[dict[str, Any]] = []
    by_cores: list[dict[str, Any]] = []
    for name, app in APPS.items():
        progress(f"{name}: {count:,} events")
        given = case(app, count)
        best = race(given, SYSTEMS, THREADS, rounds, progress)
        peer = min(best[scheme].whole for scheme in schemes.ORDERED)
        peer_execution = min(best[scheme].execution for scheme in schemes.ORDERED)
        for system in SYSTEMS:
            timing = best[system]
            result: dict[str, Any] = {
                "app": name,
                "system": system,
                "events_per_s": count / timing.whole,
                "execution_events_per_s": count / timing.execution,
                "vs_best_scheme": peer / timing.whole,
                "execution_vs_best_scheme": peer_execution / timing.execution,
                "vs_no_lock": best["no-lock"].whole / timing.whole,
                "execution_vs_no_lock": best["no-lock"].execution / timing.execution,
                "events": count,
                "keys": given.keys,
                "threads": THREADS,
                "phases_ms": timing.phases_ms,
            }
            if timing.plan:
                result["plan"] = timing.plan
            results.append(result)
        if THREADS > 1:
            turns = transactions_cores.ROUNDS_QUICK if quick else transactions_cores.ROUNDS
            by_cores += transactions_cores.run_cores(name, given, run_once, turns, progress)
    return results + by_cores + transactions_spark.run_spark(quick, progress)


def print_table(name: str, results: list[dict[str, Any]]) -> None:
    """A line for each application and system."""
    results, by_cores, through_spark = _apart(results)
    table = Table(title=f"millpond bench {name}", title_justify="left")
    for heading in ("app", "system"):
        table.add_column(heading, no_wrap=True)
    headings = ("M events/s", "best of lal,\nlwm, pat = 1", "no-lock\n= 1")
    for heading in (*headings, *(f"execution only\n{heading}" for heading in headings)):
        table.add_column(heading, justify="right")
    table.add_column("plan")
    for place, result in enumerate(results):
        if place and result["app"] != results[place - 1]["app"]:
            table.add_section()
        ratios = [
            result[f"{part}{peer}"]
            for part in ("", "execution_")
            for peer in ("vs_best_scheme", "vs_no_lock")
        ]
        rates = [result["events_per_s"] / 1e6, result["execution_events_per_s"] / 1e6]
        numbers = [rates[0], *ratios[:2], rates[1], *ratios[2:]]
        cells = [f"{number:.2f}" for number in numbers]
        table.add_row(result["app"], result["system"], *cells, result.get("plan", ""))
    console = wide_console()
    console.print(table)
    console.print(
        "from Arrow events to Arrow outputs, the same code for all but the execution; each but no-lock gave what serial gives",
        soft_wrap=True,
    )
    if by_cores:
        transactions_cores.print_table(name, by_cores, console)
    if through_spark:
        transactions_spark.print_table(name, through_spark)


def plot(path_base: Path, name: str, results: list[dict[str, Any]]) -> list[Path]:
    """Events per second by application, whole and execution alone; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    results, by_cores, through_spark = _apart(results)
    apps = list(dict.fromkeys(result["app"] for result in results))
    systems = list(dict.fromkeys(result["system"] for result in results))
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    panels = figure.subplots(1, 2)
    measures = {"events_per_s": "events to outputs", "execution_events_per_s": "execution alone"}
    for axes, (measure, title) in zip(panels, measures.items(), strict=True):
        rate = {(result["app"], result["system"]): result[measure] / 1e6 for result in results}
        width = 0.8 / len(systems)
        for place, system in enumerate(systems):
            at = np.arange(len(apps)) + (place - len(systems) / 2 + 0.5) * width
            axes.bar(at, [rate[app, system] for app in apps], width, label=system, color=COLOURS.get(system))
        axes.set_xticks(range(len(apps)), apps)
        axes.set_title(title, loc="left")
        axes.set_ylabel("million events per second")
        axes.spines[["top", "right"]].set_visible(False)
    panels[1].legend(frameon=False)
    figure.suptitle(f"millpond bench {name}")
    files = save_figure(figure, path_base)
    if by_cores:
        files += transactions_cores.plot(path_base.with_name(f"{path_base.name}-cores"), name, by_cores)
    if through_spark:
        files += transactions_spark.plot(path_base.with_name(f"{path_base.name}-spark"), name, through_spark)
    return files


def _apart(results: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], ...]:
    """Those of systems without Spark, those of plans by cores, and those through Spark."""
    return (
        [result for result in results if "through" not in result and "serial_share" not in result],
        [result for result in results if "serial_share" in result],
        [result for result in results if "through" in result],
    )


COLOURS = {
    "millpond": "#2a6f97",
    "serial": "#61a5c2",
    "lal": "#9aa5ac",
    "lwm": "#b8c0c4",
    "pat": "#7d878d",
    "no-lock": "#e0b15a",
}
