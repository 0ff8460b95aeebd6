"""Results of a benchmark, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

# Where a result has these, the table has a column for each.
RATIOS = {
    "per_thread_vs_duckdb": "per thread\nDuckDB = 1",
    "per_cpu_s_vs_duckdb": "per CPU second\nDuckDB = 1",
}


def write_json(path: Path, name: str, results: Sequence[dict[str, Any]]) -> None:
    """Write `{"bench": name, "results": results}`."""
    path.write_text(json.dumps({"bench": name, "results": list(results)}, indent=2) + "\n")


def print_table(name: str, results: Sequence[dict[str, Any]]) -> None:
    """One line per system: rows per second, and per thread used, beside DuckDB's."""
    ratios = {key: heading for key, heading in RATIOS.items() if any(key in result for result in results)}
    table = Table(title=f"millpond bench {name}", title_justify="left")
    table.add_column("system", no_wrap=True)
    for heading in ("threads", "M rows/s", "M rows/s\nper thread", *ratios.values()):
        table.add_column(heading, justify="right")
    for result in results:
        rate, threads = result["rows_per_s"], result["threads"]
        cells = [result["system"], str(threads), f"{rate / 1e6:.2f}", f"{rate / threads / 1e6:.2f}"]
        table.add_row(*cells, *(f"{result[key]:.2f}" if key in result else "" for key in ratios))
    console = Console(highlight=False)
    console.print(table)
    for result in results:
        if "note" in result:
            console.print(f"{result['system']}: {result['note']}", soft_wrap=True, markup=False)
