"""Results of `millpond bench elastic`: a table for each section, published figures beside, and plots of throughput over time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from millpond.bench.report import cell, save_figure, wide_console

# Of each section: its title, and the figures that it has.
SECTIONS = {
    "move": (
        "moving slices under load",
        {
            "moved_mb": "moved\nMB",
            "move_s": "move\ns",
            "pause_ms": "switch\nms",
            "gap_ms": "longest gap\nms",
            "gap_ms_before": "the same\nbefore, ms",
            "update_gap_ms": "of updates\nms",
            "update_gap_ms_before": "the same\nbefore, ms",
            "asks_lost_share": "answers\nlost",
            "updates_lost_share": "updates\nlost",
            "staying_p50_ms_before": "stay: p50\nbefore",
            "staying_p50_ms_moving": "stay: p50\nmoving",
            "staying_p99_ms_before": "stay: p99\nbefore",
            "staying_p99_ms_moving": "stay: p99\nmoving",
        },
    ),
    "vertical": (
        "other threads under load",
        {
            "threads_ms_median": "median\nms",
            "threads_ms_max": "longest\nms",
            "slices_moved": "slices\nmoved",
            "gap_ms": "longest gap\nms",
        },
    ),
    "recovery": (
        "a container that ends or stops",
        {
            "held_mb": "held\nMB",
            "detection_ms": "detection\nms",
            "rebuild_ms": "rebuild\nms",
            "journal_ms": "of it until\nserved, ms",
            "without_answers_ms": "without\nanswers, ms",
            "update_gap_ms": "without\nupdates, ms",
            "process_back_s": "process\nback, s",
            "backups_whole_again_s": "backups whole\nagain, s",
        },
    ),
    "checkpoints": (
        "checkpoints under updates",
        {
            "held_mb": "held\nMB",
            "updates_per_s": "updates/s",
            "vs_none": "none\n= 1",
            "asks_per_s": "asks/s",
            "gap_ms": "longest gap of\nanswers, ms",
            "update_gap_ms": "of updates\nms",
            "ask_ms_max": "longest\nanswer, ms",
            "update_ms_max": "epoch\nms",
            "snapshot_pause_ms_max": "a slice held\nlonger than ever, ms",
            "checkpoints": "check-\npoints",
            "mb_each": "MB\neach",
            "checkpoint_s": "s\neach",
        },
    ),
    "backups": ("updates with backups", {"updates_per_s": "updates/s", "vs_none": "none\n= 1"}),
    "slices": (
        "the same work in more slices",
        {
            "updates_per_s": "updates/s",
            "asks_per_s": "rows asked/s",
            "vs_none": "1 slice\n= 1",
            "cpu_overhead": "more CPU than\n1 slice",
        },
    ),
    "spark": (
        "a Spark query with state, given other partitions",
        {
            "sst_mb": "files\nMB",
            "batch_ms": "micro-batch\nms",
            "change_s": "of it the\nchange, s",
            "without_answers_ms": "without\nanswers, ms",
        },
    ),
}
PUBLISHED = (
    "Published by others, on other machines, not measured here:",
    "ChronoStream (Wu and Tan, ICDE 2015): 8 GB of state back in 27 s on ten nodes; another number of threads in < 5 s at 8 GB;",
    "its slices cost at most 4.69 %, from 1 to 10 slices on one core.",
    "Valkey 9.0 (its blog, 29 October 2025): a cluster of 40 GB from 3 to 4 shards under heavy load in 31 s.",
)


def print_table(name: str, results: Sequence[dict[str, Any]]) -> None:
    console = wide_console()
    for section, group in groupby(results, key=lambda result: str(result["section"])):
        title, columns = SECTIONS[section]
        own = list(group)
        shown = {key: heading for key, heading in columns.items() if any(key in each for each in own)}
        table = Table(title=f"millpond bench {name}: {title}", title_justify="left")
        table.add_column("system", no_wrap=True)
        for heading in (*shown.values(), "aim"):
            table.add_column(heading, justify="right")
        for each in own:
            aim = "" if "aim" not in each else f"{each['aim']}: {'yes' if each['reached'] else 'no'}"
            table.add_row(each["system"], *(cell(each.get(key)) for key in shown), aim)
        console.print(table)
        for setup in dict.fromkeys(each["setup"] for each in own):
            console.print(f"  {setup}", markup=False)
    split = [each for each in results if "slices_taken" in each]
    for each in split:
        console.print(
            f"  {each['system']}: slices taken over by container {each['slices_taken']}", markup=False
        )
    model = recovery_model(results)
    if model is not None:
        console.print(f"  {model}", markup=False)
    for line in PUBLISHED:
        console.print(line, markup=False, soft_wrap=True)


def recovery_model(results: Sequence[dict[str, Any]]) -> str | None:
    """How taking over should scale, beside what was measured. Nothing is fitted: a few single runs differ by more than that."""
    points = [
        (max(each["slices_taken"].values()), each["journal_ms"])
        for each in results
        if each["section"] == "recovery" and "from backups" in each["system"]
    ]
    if len(points) < 2:
        return None
    return (
        "model: peers take over at the same time and nothing is copied, so that it should last as long as the one with most"
        f" slices takes. Measured: {', '.join(f'{slices} slices in {ms:.0f} ms' for slices, ms in points)};"
        f" all peers share {results[0].get('cores', '?')} cores here."
    )


def plot(path_base: Path, name: str, results: Sequence[dict[str, Any]]) -> list[Path]:
    """Throughput over time of all that has a timeline; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    shown = [each for each in results if "timeline" in each and each.get("section") != "checkpoints"]
    shown += [each for each in results if each.get("section") == "checkpoints"][:2]
    if not shown:
        return []
    rows = (len(shown) + 1) // 2
    figure = Figure(figsize=(13, 2.6 * rows), layout="constrained")
    panels = figure.subplots(rows, 2, squeeze=False).ravel()
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    for axes, each in zip(panels, shown, strict=False):
        timeline = each["timeline"]
        for label, rates in timeline["series"].items():
            times = np.arange(len(rates)) * timeline["bucket_s"]
            axes.plot(times, rates, label=label, linewidth=1)
        for number, (label, begin, end) in enumerate(timeline["spans"]):
            axes.axvspan(
                begin, end, alpha=0.25, color=("#d1495b", "#edae49", "#66a182")[number % 3], label=label
            )
        axes.set_title(each["system"].removeprefix("millpond, "), loc="left", fontsize=9)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("s", fontsize=8)
        axes.legend(fontsize=7, loc="upper right")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"millpond bench {name}", x=0.01, ha="left")
    return save_figure(figure, path_base)
