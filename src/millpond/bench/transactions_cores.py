"""What more cores would make of an epoch: the share of it that is serial, by plan, and Amdahl's law.

Each plan that is correct for an application runs whole epochs, from events to outputs, with one thread and with two. What
counts is CPU time, which other programs disturb least: of a parallel section that of its longest task, and outside of
sections that of the thread that runs the epoch. Of a section, twice what the second thread saved is parallel (at most all of
it); what both threads do alike or hinder each other in is serial, as is all that is outside of sections. To start and to
wait for threads is not counted.

What follows for more cores than two is a projection, not a measurement: it takes the serial part to stay as it is, and the
parallel part to divide evenly, which memory need not allow.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from millpond.bench.report import save_figure
from millpond.stores.threads import timed_sections
from millpond.txn.run import plans
from millpond.txn.run.execution import EpochRun

if TYPE_CHECKING:
    from millpond.bench.transactions import Case

CORES = (8, 16, 40)
PLOTTED = (1, 2, 4, 8, 16, 32, 40)
ROUNDS, ROUNDS_QUICK = 3, 2


@dataclass
class Split:
    """The shortest of some runs, in CPU seconds: within parallel sections, and outside of them."""

    inside: float = float("inf")
    outside: float = float("inf")

    @property
    def whole(self) -> float:
        return self.inside + self.outside


def serial_share(one: Split, two: Split) -> float:
    """Of the time with one thread, what a second does not shorten. From 0 to 1."""
    parallel = min(max(2 * (one.inside - two.inside), 0.0), one.inside)
    return 1 - parallel / one.whole


def amdahl(share: float, cores: int) -> float:
    """The speedup by so many cores, where a share of the work is serial."""
    return 1 / (share + (1 - share) / cores)


def run_cores(
    name: str, given: Case, run_once: Callable[..., Any], rounds: int, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A result for each plan that is correct for the application. `run_once` is that of `transactions`."""
    possible = possible_plans(given)
    best = {(plan, threads): Split() for plan in possible for threads in (1, 2)}
    outcomes = [_outcome(plan, given, run_once, threads) for plan, threads in best]
    if any(outcome != outcomes[0] for outcome in outcomes):
        raise RuntimeError(f"{name}: the plans do not agree")
    for turn in range(rounds):
        progress(f"  serial share by plan, round {turn + 1} of {rounds}")
        for (plan, threads), split in best.items():
            stores = given.stores()
            gc.collect()
            start = time.thread_time()
            with timed_sections() as sections:
                run_once(plan, given, threads, stores)
            split.inside = min(split.inside, sections.longest)
            split.outside = min(split.outside, time.thread_time() - start - sections.own)
    return [_result(name, plan, given, best[plan, 1], best[plan, 2]) for plan in possible]


def possible_plans(given: Case) -> list[str]:
    arranged = given.program.arrange(given.epochs[0], at="ts")
    run = EpochRun(given.program, arranged.prepared, arranged.epoch, given.stores(), 1)
    return plans.possible(run.work())


def _outcome(plan: str, given: Case, run_once: Callable[..., Any], threads: int) -> list[Any]:
    stores = given.stores()
    timing, outputs = run_once(plan, given, threads, stores)
    assert timing.plan == plan
    return [*outputs, *(store.snapshot() for store in stores.values())]


def _result(name: str, plan: str, given: Case, one: Split, two: Split) -> dict[str, Any]:
    share = serial_share(one, two)
    return {
        "app": name,
        "plan": plan,
        "events": given.events,
        "keys": given.keys,
        "one_thread_events_per_s": given.events / one.whole,
        "two_threads_events_per_s": given.events / two.whole,
        "inside_sections_ms": [1000 * one.inside, 1000 * two.inside],
        "outside_sections_ms": [1000 * one.outside, 1000 * two.outside],
        "outside_share": one.outside / one.whole,
        "serial_share": share,
        "amdahl_speedups": {str(cores): amdahl(share, cores) for cores in CORES},
        "projected_events_per_s": {
            str(cores): amdahl(share, cores) * given.events / one.whole for cores in CORES
        },
    }


def print_table(name: str, results: list[dict[str, Any]], console: Console) -> None:
    """A line for each application and plan."""
    table = Table(
        title=f"millpond bench {name}: what more cores would make of an epoch", title_justify="left"
    )
    for heading in ("app", "plan"):
        table.add_column(heading, no_wrap=True)
    headings = ["M events/s,\n1 thread", "2 threads", "outside parallel\nsections", "serial share"]
    headings += [f"Amdahl,\n{cores} cores" for cores in CORES]
    headings += [f"M events/s,\n{cores} cores" for cores in CORES]
    for heading in headings:
        table.add_column(heading, justify="right")
    for place, result in enumerate(results):
        if place and result["app"] != results[place - 1]["app"]:
            table.add_section()
        table.add_row(result["app"], result["plan"], *cells(result))
    console.print(table)
    console.print(
        "from Arrow events to Arrow outputs, by CPU time with 1 and 2 threads; 8 cores and more are a projection by Amdahl's law",
        soft_wrap=True,
    )


def cells(result: Mapping[str, Any]) -> list[str]:
    rates = [result["one_thread_events_per_s"], result["two_threads_events_per_s"]]
    shares = [result["outside_share"], result["serial_share"]]
    return [
        *(f"{rate / 1e6:.1f}" for rate in rates),
        *(f"{share:.0%}" for share in shares),
        *(f"{speedup:.2f}" for speedup in result["amdahl_speedups"].values()),
        *(f"{rate / 1e6:.1f}" for rate in result["projected_events_per_s"].values()),
    ]


def plot(path_base: Path, name: str, results: list[dict[str, Any]]) -> list[Path]:
    """A panel for each application: projected events per second by cores, a line for each plan."""
    from matplotlib.figure import Figure

    apps = list(dict.fromkeys(result["app"] for result in results))
    figure = Figure(figsize=(3.4 * len(apps), 3.2), layout="constrained")
    panels = figure.subplots(1, len(apps), squeeze=False)[0]
    for axes, app in zip(panels, apps, strict=True):
        for result in results:
            if result["app"] == app:
                speedups = np.array([amdahl(result["serial_share"], cores) for cores in PLOTTED])
                rates = speedups * result["one_thread_events_per_s"] / 1e6
                colour = COLOURS[result["plan"]]
                axes.plot(PLOTTED, rates, label=result["plan"], linestyle="--", color=colour)
                measured = [result[f"{count}_events_per_s"] / 1e6 for count in ("one_thread", "two_threads")]
                axes.plot((1, 2), measured, marker="o", linestyle="", markersize=4, color=colour)
        axes.set_ylim(bottom=0)
        axes.set_title(app, loc="left")
        axes.set_xlabel("cores")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("million events per second")
    panels[-1].legend(frameon=False, fontsize="small")
    figure.suptitle(f"millpond bench {name}: dots are measured, lines are Amdahl's law")
    return save_figure(figure, path_base)


COLOURS = {"serial": "#61a5c2", "chains": "#2a6f97", "groups": "#e0b15a", "rounds": "#9aa5ac"}
