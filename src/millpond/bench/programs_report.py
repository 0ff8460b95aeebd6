"""Results of `millpond bench programs`: a table for each section with its aims, and bars."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table

from millpond.bench.report import cell, save_figure, wide_console

CPU = {"driver": "CPU s\ndriver", "containers": "CPU s\ncontainers"}
# Of each section: its title, and the figures that it has. The first one is drawn.
SECTIONS = {
    "cf": (
        "collaborative filtering",
        {
            "requests_per_s": "requests/s",
            "batch": "batch of\nrequests",
            "ceiling_per_s": "a loop on\none core",
            "of_ceiling": "of it",
            "loaded_per_s": "ratings/s\nloaded",
            "add_p50_ms": "add\np50 ms",
            "add_p95_ms": "add\np95 ms",
            "get_p50_ms": "get\np50 ms",
            "get_p95_ms": "get\np95 ms",
            "stale_p50_ms": "stale\np50 ms",
            "stale_p95_ms": "stale\np95 ms",
            "direct_get_p50_ms": "direct\np50 ms",
            "wrong": "wrong",
        },
    ),
    "kv": (
        "keys and values",
        {
            "calls_per_s": "calls/s",
            "read_p50_ms": "read\np50 ms",
            "read_p95_ms": "read\np95 ms",
            "write_p50_ms": "write\np50 ms",
            "write_p95_ms": "write\np95 ms",
            "sync_p50_ms": "a sync\np50 ms",
        },
    ),
    "lr": (
        "logistic regression",
        {"iteration_s": "s an\niteration", "points_per_s": "points/s", "loss": "log-loss"},
    ),
    "words": (
        "word count",
        {
            "window_ms": "smallest\nwindow, ms",
            "counted_p95_ms": "counted after\nits end, p95 ms",
            "words_per_s": "words/s",
        },
    ),
    "checkpoint": (
        "checkpoints while calls come",
        {"calls_per_s": "calls/s", "checkpoint_s": "a checkpoint\ns", "checkpoints": "check-\npoints", "cost": "cost"},
    ),
    "recovery": (
        "containers that are killed",
        {"held_mb": "held\nMB", "entries": "entries", "without_answers_s": "without\nanswers, s"},
    ),
}  # fmt: skip


def print_table(name: str, results: Sequence[dict[str, Any]]) -> None:
    console = wide_console()
    for section, group in groupby(results, key=lambda result: str(result["section"])):
        title, columns = SECTIONS[section]
        own = list(group)
        shown = {key: heading for key, heading in columns.items() if any(key in each for each in own)}
        table = Table(title=f"millpond bench {name}: {title}", title_justify="left")
        table.add_column("system", no_wrap=True)
        for heading in shown.values():
            table.add_column(heading, justify="right")
        for each in own:
            table.add_row(label(each), *(cell(each.get(key)) for key in shown))
        console.print(table)
        for line in dict.fromkeys(each[what] for each in own for what in ("setup", "note") if what in each):
            console.print(f"  {line}", markup=False, soft_wrap=True)
        for line in aims(own):
            console.print(f"  {line}", markup=False, soft_wrap=True)


def label(result: dict[str, Any]) -> str:
    return ", ".join(str(result[part]) for part in ("work", "system") if part in result)


def aims(results: Sequence[dict[str, Any]]) -> list[str]:
    """What was to be reached, and whether it was."""
    return [
        f"{label(each)}: {aim}: {'reached' if reached else 'not reached'}"
        for each in results
        for aim, reached in each.get("aims", {}).items()
    ]


def plot(path_base: Path, name: str, results: Sequence[dict[str, Any]]) -> list[Path]:
    """Of each section the first figure as bars; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    panels = []
    for section, group in groupby(results, key=lambda result: str(result["section"])):
        title, columns = SECTIONS[section]
        own = list(group)
        figure = next((key for key in columns if any(key in each for each in own)), None)
        if figure is not None:
            rows = [each for each in own if each.get(figure)]
            panels.append((f"{title}: {columns[figure].replace(chr(10), ' ')}", figure, rows))
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        return []
    heights = [0.4 * len(rows) + 0.8 for _, _, rows in panels]
    drawn = Figure(figsize=(9, sum(heights)), layout="constrained")
    every = drawn.subplots(len(panels), 1, squeeze=False, height_ratios=heights).ravel()
    for axes, (title, figure, rows) in zip(every, panels, strict=True):
        names = [label(each) for each in rows]
        numbers = [each[figure] for each in rows]
        colors = ["#2a6f97" if "millpond" in text else "#9aa5ac" for text in names]
        bars = axes.barh(range(len(rows)), numbers, color=colors)
        axes.bar_label(bars, labels=[cell(number) for number in numbers], padding=4, fontsize=8)
        axes.set_yticks(range(len(rows)), names, fontsize=8)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlim(min(numbers) / 3, max(numbers) * 6)
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    drawn.suptitle(f"millpond bench {name}", x=0.01, ha="left")
    return save_figure(drawn, path_base)
