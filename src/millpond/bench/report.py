"""Results of a benchmark, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE = 260
# Where a result has these, the table has a column for each.
COLUMNS = {
    "per_thread_vs_duckdb": "per thread\nDuckDB = 1",
    "per_cpu_s_vs_duckdb": "per CPU second\nDuckDB = 1",
    "vs_identity": "identity\n= 1",
    "per_cpu_s_vs_identity": "per CPU s\nidentity = 1",
    "batch_p50_ms": "micro-batch\np50 ms",
    "batch_p99_ms": "micro-batch\np99 ms",
    "p50_vs_identity": "p50, times\nidentity's",
    "reach": "reach",
    "source_reads": "source is\nread, times",
    "updates_per_s": "updates/s\ndurable",
    "bytes_per_version": "bytes per\nversion",
    "state_mb": "state\nMB",
    "commit_ms": "commit of\n1,000 rows, ms",
    "call_p50_ms": "call\np50 ms",
    "call_p99_ms": "call\np99 ms",
    "one_row_p50_ms": "one row\np50 ms",
    "one_row_p99_ms": "one row\np99 ms",
    "checkpoint_s": "checkpoint\ns",
    "checkpoint_pause_ms": "longest\npause, ms",
}


def write_json(path: Path, name: str, results: Sequence[dict[str, Any]]) -> None:
    """Write `{"bench": name, "results": results}`."""
    path.write_text(json.dumps({"bench": name, "results": list(results)}, indent=2) + "\n")


def print_table(name: str, results: Sequence[dict[str, Any]]) -> None:
    """One line per system: rows per second, and per thread used, beside DuckDB's."""
    columns = {key: heading for key, heading in COLUMNS.items() if any(key in result for result in results)}
    table = Table(title=f"millpond bench {name}", title_justify="left")
    table.add_column("system", no_wrap=True)
    for heading in ("threads", "M rows/s", "M rows/s\nper thread", *columns.values()):
        table.add_column(heading, justify="right")
    for result in results:
        rate, threads = result["rows_per_s"], result["threads"]
        cells = [result["system"], str(threads), _short(rate / 1e6), _short(rate / threads / 1e6)]
        table.add_row(*cells, *(_short(result[key]) if key in result else "" for key in columns))
    console = wide_console()
    console.print(table)
    print_notes(console, results)


def wide_console() -> Console:
    """As wide as the window; without one, wide enough: a table that is cut says nothing."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDE)


def print_notes(console: Console, results: Sequence[dict[str, Any]]) -> None:
    for result in results:
        if "note" in result:
            console.print(f"{result['system']}: {result['note']}", soft_wrap=True, markup=False)


def plot(path_base: Path, name: str, results: Sequence[dict[str, Any]]) -> list[Path]:
    """Rows per second of each system as bars; nothing without matplotlib."""
    return plot_bars(path_base, name, results, "rows_per_s", "rows per second")


def plot_bars(
    path_base: Path, name: str, results: Sequence[dict[str, Any]], rate: str, label: str
) -> list[Path]:
    """A rate of each system as bars, in `path_base`.png and .svg; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    systems = [result["system"] for result in results]
    rates = [result[rate] for result in results]
    figure = Figure(figsize=(8, 0.5 * len(systems) + 1.2), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(
        systems, rates, color=["#2a6f97" if "millpond" in name else "#9aa5ac" for name in systems]
    )
    axes.bar_label(bars, labels=[f"{number:,.0f}" for number in rates], padding=4)
    axes.invert_yaxis()
    # Systems differ by factors of a hundred and more.
    axes.set_xscale("log")
    axes.set_xlim(min(rates) / 3, max(rates) * 6)
    axes.set_xlabel(label)
    axes.set_title(f"millpond bench {name}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return save_figure(figure, path_base)


def save_figure(figure: Figure, path_base: Path) -> list[Path]:
    """As `path_base`.png and .svg."""
    files = [path_base.with_name(f"{path_base.name}.{kind}") for kind in ("png", "svg")]
    for file in files:
        figure.savefig(file, dpi=150)
    return files


def _short(number: float) -> str:
    """Two decimals, or as many as a small number needs to be seen, or none where they say nothing."""
    if number >= 1000:
        return f"{number:,.0f}"
    return f"{number:.2f}" if number >= 0.095 or number == 0 else f"{number:.2g}"


def cell(number: float | None) -> str:
    """A figure as tables have it; nothing where there is none."""
    if number is None:
        return ""
    if number != 0 and abs(number) < 0.095:
        return f"{number:.2g}"
    return f"{number:,.0f}" if abs(number) >= 100 or number == int(number) else f"{number:.2f}"
