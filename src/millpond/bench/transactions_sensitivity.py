"""`millpond bench transactions-sensitivity`: how the rate of transactions depends on the workload (TStream, 6.3 and 6.4).

One parameter is varied at a time, on 1 thread and on 2, or as many as there are: the punctuation interval (events in an
epoch), the skew of the keys, the length of a transaction and the ratio of reads (all of them in grep_sum), and the ratio
of transfers in the ledger, whose writes depend on other keys, unlike those of deposits. What is timed is as in
`transactions`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from millpond.bench import transactions
from millpond.bench.report import save_figure, wide_console
from millpond.bench.transactions import APPS, COLOURS, THREADS, case, run_once

EVENTS, EVENTS_QUICK = 200_000, 20_000
ROUNDS, ROUNDS_QUICK = 3, 1
SYSTEMS = ("millpond", "lal", "lwm", "pat", "no-lock")


class Study(NamedTuple):
    """A parameter of an application's events, and its values. `interval` is that of the epochs."""

    app: str
    parameter: str
    values: tuple[float, ...]


STUDIES = (
    Study("grep_sum", "interval", (500, 2_000, 10_000, 50_000, 200_000)),
    Study("ledger", "interval", (500, 2_000, 10_000, 50_000, 200_000)),
    Study("grep_sum", "skew", (0.0, 0.4, 0.8, 1.2)),
    Study("grep_sum", "length", (1, 4, 10, 16)),
    Study("grep_sum", "read_ratio", (0.0, 0.25, 0.5, 0.75, 1.0)),
    Study("ledger", "transfer_ratio", (0.0, 0.25, 0.5, 0.75, 1.0)),
)


def run(quick: bool, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """A result for each study, value, number of threads and system."""
    count, rounds = (EVENTS_QUICK, ROUNDS_QUICK) if quick else (EVENTS, ROUNDS)
    results: list[dict[str, Any]] = []
    for study in STUDIES:
        for value in study.values[:: 2 if quick else 1]:
            progress(f"{study.app}, {study.parameter} = {value:g}")
            options = {study.parameter: value}
            interval = int(options.pop("interval", count))
            given = case(APPS[study.app], count, min(interval, count), **options)
            for threads in sorted({1, THREADS}):
                for system in SYSTEMS:
                    run_once(system, given, threads, given.stores())
                    best = transactions.Timing()
                    for _ in range(rounds):
                        stores = given.stores()
                        gc.collect()
                        timing, _ = run_once(system, given, threads, stores)
                        best.whole = min(best.whole, timing.whole)
                        best.execution = min(best.execution, timing.execution)
                    results.append(
                        {
                            "app": study.app,
                            "parameter": study.parameter,
                            "value": value,
                            "threads": threads,
                            "system": system,
                            "events": count,
                            "events_per_s": count / best.whole,
                            "execution_events_per_s": count / best.execution,
                        }
                    )
    return results


def print_table(name: str, results: list[dict[str, Any]]) -> None:
    """A table for each study: a line for each value and number of threads, a column for each system."""
    console = wide_console()
    console.print(f"millpond bench {name}: million events per second, in brackets the execution alone")
    for (app, parameter), found in _studies(results).items():
        table = Table(title=f"{app}: {parameter}", title_justify="left")
        for heading in (parameter, "threads", *SYSTEMS):
            table.add_column(heading, justify="right")
        for value, threads in dict.fromkeys((result["value"], result["threads"]) for result in found):
            row = [f"{value:g}", str(threads)]
            for result in found:
                if (result["value"], result["threads"]) == (value, threads):
                    rates = (result["events_per_s"] / 1e6, result["execution_events_per_s"] / 1e6)
                    row.append(f"{rates[0]:.2f} ({rates[1]:.1f})")
            table.add_row(*row)
        console.print(table)


def plot(path_base: Path, name: str, results: list[dict[str, Any]]) -> list[Path]:
    """A panel for each study, events to outputs; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    studies = _studies(results)
    columns = 3
    rows = -(-len(studies) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, ((app, parameter), found) in zip(panels, studies.items(), strict=False):
        for system in SYSTEMS:
            for threads in sorted({result["threads"] for result in found}):
                mine = [r for r in found if r["system"] == system and r["threads"] == threads]
                axes.plot(
                    [result["value"] for result in mine],
                    [result["events_per_s"] / 1e6 for result in mine],
                    color=COLOURS[system],
                    linestyle="--" if threads == 1 and THREADS > 1 else "-",
                    marker="o",
                    markersize=3,
                    label=f"{system}, {threads}",
                )
        if parameter == "interval":
            axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_title(f"{app}: {parameter}", loc="left")
        axes.set_ylabel("million events per second")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(studies) :]:
        axes.set_visible(False)
    panels[0].legend(frameon=False, fontsize="x-small", title="system, threads", title_fontsize="x-small")
    figure.suptitle(f"millpond bench {name}")
    return save_figure(figure, path_base)


def _studies(results: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    out: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results:
        out.setdefault((result["app"], result["parameter"]), []).append(result)
    return out
