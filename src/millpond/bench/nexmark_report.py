"""Results of `millpond bench nexmark`: tables with the peers beside, bars by query, and curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from millpond.bench.report import print_notes, save_figure, wide_console

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

Results = Sequence[dict[str, Any]]
Cell = Callable[[Mapping[str, Any]], str]


def print_table(name: str, results: Results) -> None:
    """A line for each query and contender: rates with their spread, and how many times a peer's they are. Then the parts."""
    console = wide_console()
    queries = [result for result in results if "part" not in result]
    if queries:
        _print_queries(console, name, queries)
    for part, columns in PARTS.items():
        own = [result for result in results if result.get("part") == part]
        if own:
            way = "" if part == OVER else ", by Arrow tables"
            table = Table(title=f"millpond bench {name}: {part}{way}", title_justify="left")
            for heading in columns:
                table.add_column(heading, justify="right", no_wrap=True)
            for result in own:
                table.add_row(*(cell(result) for cell in columns.values()))
            console.print(table)
    print_notes(console, results)


def _print_queries(console: Console, name: str, results: Results) -> None:
    # Of the first, how many times the others' it is.
    first, *others = dict.fromkeys(result["contender"] for result in results)
    peers = [peer for peer in others if any(f"vs_{peer}" in result for result in results)]
    table = Table(title=f"millpond bench {name}", title_justify="left")
    table.add_column("query", no_wrap=True)
    table.add_column("contender", no_wrap=True)
    headings = ["M events", "M events/s", "min..max", "M events per\ncore-second", "min..max"]
    for peer in peers:
        headings += [f"{peer}\n= 1", f"per core-s\n{peer} = 1"]
    for heading in (
        *headings,
        "CPU s of it:\nJava",
        "container",
        "store",
        "check-\npoints",
        "answer\nrows",
        "their\nhash",
    ):
        table.add_column(heading, justify="right")
    for result in results:
        cells = [result["query"], result["contender"], _millions(result["events"])]
        for rate in ("events_per_s", "events_per_core_s"):
            cells += [_millions(result[rate]), _spread(result, rate)]
        for peer in peers:
            ratios = (result.get(f"vs_{peer}"), result.get(f"per_core_s_vs_{peer}"))
            is_first = result["contender"] == first
            cells += ["" if ratio is None or not is_first else f"{ratio:.2f}" for ratio in ratios]
        cells += [_number(result.get(f"{kind}_s")) for kind in ("java", "containers", "store")]
        cells.append(str(result.get("checkpoints") or ""))
        table.add_row(*cells, f"{result['result_rows']:,}", result["result_hash"][:8])
    console.print(table)


def plot(path_base: Path, name: str, results: Results) -> list[Path]:
    """Events per core-second by query, and the curves of AUR and of state by budget; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    files = []
    queries = [result for result in results if "part" not in result]
    if queries:
        figure = Figure(figsize=(12, 4), layout="constrained")
        _bars(figure.subplots(), name, queries)
        files += save_figure(figure, path_base)
    curves = [result for result in results if result.get("part") in ("budget", "ratio", "msa")]
    if curves:
        figure = Figure(figsize=(12, 3.6), layout="constrained")
        budget, ratio, msa = figure.subplots(1, 3)
        _budget(budget, [result for result in curves if result["part"] == "budget"])
        _curve(
            ratio, "AUR: read batch ratio", [each for each in curves if each["part"] == "ratio"], hits=True
        )
        _curve(msa, "AUR: space amplification (MSA)", [each for each in curves if each["part"] == "msa"])
        files += save_figure(figure, path_base.with_name(f"{path_base.name}-stores"))
    return files


def _bars(axes: Axes, name: str, results: Results) -> None:
    queries = list(dict.fromkeys(result["query"] for result in results))
    contenders = list(dict.fromkeys(result["contender"] for result in results))
    rates = {(result["query"], result["contender"]): result["events_per_core_s"] / 1e6 for result in results}
    width = 0.8 / len(contenders)
    for number, contender in enumerate(contenders):
        heights = [rates.get((query, contender), 0.0) for query in queries]
        places = np.arange(len(queries)) + (number - (len(contenders) - 1) / 2) * width
        axes.bar(places, heights, width, label=contender)
    axes.set_xticks(range(len(queries)), queries)
    _finish(axes, f"millpond bench {name}", "million events per core-second")
    axes.legend()


def _budget(axes: Axes, results: Results) -> None:
    """Of every query and store, rows a second by what is open beside the budget."""
    for query, color in zip(
        dict.fromkeys(each["query"] for each in results), ("C0", "C1", "C2"), strict=False
    ):
        for system, style in (("millpond", "o-"), ("rocksdb", "s--"), ("rocksdb-universal", "^:")):
            own = [each for each in results if (each["query"], each["system"]) == (query, system)]
            rates = [each["rows_per_s"] / 1e6 for each in own]
            axes.plot([each["value"] for each in own], rates, style, color=color, label=f"{query}, {system}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("state / budget")
    _finish(axes, "state beside the budget", "million rows per second")
    axes.legend(fontsize=7)


def _curve(axes: Axes, title: str, results: Results, hits: bool = False) -> None:
    places = range(len(results))
    axes.plot(places, [each["rows_per_s"] / 1e6 for each in results], "o-", color="C0")
    axes.set_xticks(places, [f"{each['value']:g}" for each in results])
    axes.set_ylim(bottom=0)
    _finish(axes, title, "million rows per second")
    if hits:
        beside = axes.twinx()
        beside.plot(places, [each["hit_ratio"] or 0.0 for each in results], "s--", color="C1")
        beside.set_ylim(0, 1.02)
        beside.set_ylabel("hit ratio (dashed)")


def _finish(axes: Axes, title: str, label: str) -> None:
    axes.set_ylabel(label)
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _millions(number: float) -> str:
    millions = number / 1e6
    return f"{millions:.2f}" if millions >= 0.095 else f"{millions:.2g}"


def _spread(result: Mapping[str, Any], rate: str) -> str:
    return f"{_millions(result[f'{rate}_min'])}..{_millions(result[f'{rate}_max'])}"


def _number(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.2f}"


def _of(name: str) -> Cell:
    return lambda result: _number(result.get(name))


def _hits(result: Mapping[str, Any]) -> str:
    return "" if result["hit_ratio"] is None else f"{result['hit_ratio']:.4f}"


def _store(name: str) -> Cell:
    return lambda result: _number(result["store"][name])


LINE: dict[str, Cell] = {
    "query": lambda result: str(result["query"]),
    "pattern": lambda result: str(result["pattern"]),
    "store": lambda result: str(result["system"]),
}
VARIED: dict[str, Cell] = {
    "query": LINE["query"],
    "varied": lambda result: str(result["varied"]),
    "value": lambda result: f"{result['value']:,g}",
    "store": LINE["store"],
}
RATE: dict[str, Cell] = {
    "M rows": lambda result: _millions(result["rows"]),
    "M rows/s": lambda result: _millions(result["rows_per_s"]),
    "rocksdb = 1": _of("vs_rocksdb"),
}


def _largest(name: str) -> Cell:
    return lambda result: _number(max(each.get(name) or 0.0 for each in result["extras"]))


OVER = "streams over the budget"
PARTS: dict[str, dict[str, Cell]] = {
    OVER: {
        "query": LINE["query"],
        "contender": lambda result: str(result["contender"]),
        "open / budget": lambda result: f"{result['share']:g}",
        "M events": lambda result: _millions(result["events"]),
        "M events/s": lambda result: _millions(result["events_per_s"]),
        "min..max": lambda result: _spread(result, "events_per_s"),
        "per core-s": lambda result: _millions(result["events_per_core_s"]),
        "rocksdb = 1": _of("vs_millpond-rocksdb"),
        "per core-s, rocksdb = 1": _of("per_core_s_vs_millpond-rocksdb"),
        "spark = 1": _of("vs_spark-native"),
        "Java, CPU s": _of("java_s"),
        "container": _of("containers_s"),
        "store": _of("store_s"),
        "on disk, MB": _largest("spilled_mb_max"),
        "RSS, MB": _largest("rss_mb_max"),
        "checkpoints": lambda result: str(result["checkpoints"]),
        "answer rows": lambda result: f"{result['result_rows']:,}",
        "their hash": lambda result: str(result["result_hash"])[:8],
    },
    "stores": {
        **LINE,
        **RATE,
        "container, CPU s": _of("container_s"),
        "write, CPU s": _store("write_s"),
        "read": _store("read_s"),
        "compact": _store("compact_s"),
        "store, rocksdb = 1": _of("store_vs_rocksdb"),
        "of it puts": _of("fill_share"),
        "steps": _of("step_share"),
        "fired p50, ms": _of("fired_p50_ms"),
        "p95": _of("fired_p95_ms"),
        "p95, rocksdb = 1": _of("p95_vs_rocksdb"),
    },
    "budget": {
        **VARIED,
        **RATE,
        "on disk, MB": _of("spilled_mb_max"),
        "RSS, MB": _of("rss_mb_max"),
        "write, CPU s": _store("write_s"),
        "read": _store("read_s"),
        "compact": _store("compact_s"),
        "store, rocksdb = 1": _of("store_vs_rocksdb"),
        "of it puts": _of("fill_share"),
        "steps": _of("step_share"),
        "hit ratio": _hits,
    },
    **{
        part: {
            **VARIED,
            "M rows/s": RATE["M rows/s"],
            "hit ratio": _hits,
            "compactions": _store("compactions"),
            "compact, CPU s": _store("compact_s"),
            "read, CPU s": _store("read_s"),
        }
        for part in ("ratio", "msa")
    },
    "checkpoints": {
        **VARIED,
        "M rows/s": RATE["M rows/s"],
        "none = 1": _of("vs_none"),
        "s each": _of("checkpoint_s"),
        "MB each": _of("checkpoint_mb"),
        "fired p50, ms": _of("fired_p50_ms"),
        "p95": _of("fired_p95_ms"),
    },
    "growth": {
        **VARIED,
        "M rows": RATE["M rows"],
        "M rows/s": RATE["M rows/s"],
        "container, CPU s": _of("container_s"),
        "store, CPU s": _of("store_s"),
        "RSS, MB": _of("rss_mb_max"),
        "on disk, MB": _of("spilled_mb_max"),
    },
}
