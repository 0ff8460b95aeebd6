"""Figures as users get them: one dictionary, the text that Prometheus reads, and a line for a log."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import msgspec

from millpond.wire.figures import PondMetrics, SliceFigures
from millpond.wire.specs import Spec

Metrics = dict[str, Any]
Labels = Mapping[str, object]
NO_POND = "# TYPE millpond_up gauge\nmillpond_up 0\n"
"""What Prometheus is told of a pond that does not answer."""
HOTTEST = 8
"""Slices that a line of the log tells of."""
# What only grows, as long as nothing begins anew.
_COUNTERS = {
    *(
        "cpu_s",
        "rows_applied",
        "rows_fetched",
        "rows_updated",
        "checkpoints",
        "log_seconds",
        "upkeep_failures",
    ),
    *("snapshots_loaded", "records_replayed", "epochs_committed", "epochs_replayed", "container_restarts"),
    *(
        "journal_entries",
        "epochs",
        "events",
        "committed",
        "aborted",
        "late",
        "rule_failures",
        "rows",
        "rows_waited",
        "fired",
        "dropped",
    ),
    *(
        f"store_{figure}"
        for figure in (
            *("write_s", "read_s", "compact_s", "hits", "misses", "evictions", "compactions"),
            *("written_bytes", "read_bytes"),
        )
    ),
}
_UNITS = {"s": "seconds", "us": "microseconds", "ms": "milliseconds"}


def as_metrics(told: PondMetrics) -> Metrics:
    """The figures by what they are of. What a pond has none of is there, and empty."""
    return {
        "coordinator": told.coordinator,
        "containers": told.containers,
        "away": told.away,
        **{kind.plural: {} for kind in get_args(Spec)},
        **told.residents,
        "slices": _slices(told.slices),
        "progress": {name: msgspec.to_builtins(each) for name, each in told.progress.items()},
        "moves": [msgspec.to_builtins(move) for move in told.moves],
        "task_slots": told.task_slots,
    }


def _slices(told: SliceFigures) -> dict[int, dict[str, float]]:
    columns = {name: column.tolist() for name, column in told.columns().items()}
    columns["cpu_s"] = [us / 1e6 for us in columns.pop("cpu_us")]
    renamed = {"held_bytes": "bytes", "owners": "container"}
    numbers = columns.pop("slices")
    names = [renamed.get(name, name) for name in columns]
    rows = zip(*columns.values(), strict=True)
    return {number: dict(zip(names, row, strict=True)) for number, row in zip(numbers, rows, strict=True)}


def as_json(metrics: Any) -> Any:
    """The same without what JSON has no word for: an infinite time is "inf" or "-inf"."""
    if isinstance(metrics, dict):
        return {str(key): as_json(value) for key, value in metrics.items()}
    if isinstance(metrics, list | tuple):
        return [as_json(value) for value in metrics]
    if isinstance(metrics, float) and not math.isfinite(metrics):
        return str(metrics)
    return metrics


def log_line(metrics: Metrics) -> str:
    """One line of JSON: all figures, but of slices only how many there are and the ones that take most CPU time."""
    slices: dict[int, dict[str, float]] = metrics["slices"]
    hottest = sorted(slices, key=lambda number: -slices[number]["cpu_s"])[:HOTTEST]
    summary = {
        "count": len(slices),
        "too_few_backups": len(too_few_backups(slices)),
        "hottest": [{"slice": number, **slices[number]} for number in hottest],
    }
    return json.dumps(as_json({**metrics, "slices": summary}), separators=(",", ":"))


def too_few_backups(slices: Mapping[int, Mapping[str, float]]) -> list[int]:
    return [
        number for number, each in slices.items() if each.get("backups", 0) < each.get("backups_wanted", 0)
    ]


def exposition(metrics: Metrics) -> str:
    """The figures as Prometheus reads them (text format 0.0.4)."""
    samples: dict[str, list[str]] = {}
    for name, labels, value in _samples(metrics):
        inside = ",".join(f'{label}="{_escaped(str(said))}"' for label, said in labels.items())
        samples.setdefault(name, []).append(
            f"{name}{{{inside}}} {_number(value)}" if inside else f"{name} {_number(value)}"
        )
    lines = []
    for name, of_name in samples.items():
        lines += [f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}", *of_name]
    return "\n".join(lines) + "\n"


def _samples(metrics: Metrics) -> Iterator[tuple[str, Labels, float]]:
    yield "millpond_up", {}, 1
    yield from _flat("pond", {}, metrics["coordinator"])
    for container, figures in metrics["containers"].items():
        yield "millpond_container_up", {"container": container}, 1
        yield from _flat("container", {"container": container}, figures)
    for container in metrics["away"]:
        yield "millpond_container_up", {"container": container}, 0
    for number, figures in metrics["slices"].items():
        own = {name: value for name, value in figures.items() if name != "container"}
        yield from _flat("slice", {"slice": number, "container": figures["container"]}, own)
    for kind in get_args(Spec):
        for name, figures in metrics[kind.plural].items():
            yield from _resident(kind.kind, name, figures)
    for name, progress in metrics["progress"].items():
        yield from _progress({"resident": name}, progress)
    yield "millpond_slices_with_too_few_backups", {}, len(too_few_backups(metrics["slices"]))
    yield "millpond_moves", {}, len(metrics["moves"])
    for move in metrics["moves"]:
        labels = {"move": move["id"], "from": move["from"], "to": move["to"], "cause": move["cause"]}
        yield "millpond_move_progress", labels, move["progress"]
    for name, value in metrics["task_slots"].items():
        yield "millpond_task_slots", {"kind": name}, value


def _resident(kind: str, name: str, figures: Mapping[str, Any]) -> Iterator[tuple[str, Labels, float]]:
    labels = {kind: name}
    yield from _flat(kind, labels, figures)
    for table, own in figures.get("tables", {}).items():
        yield from _flat("table", {**labels, "table": table}, own)
    for fetcher, own in figures.get("fetchers", {}).items():
        yield from _flat("fetcher", {**labels, "fetcher": fetcher}, own)
    yield from _flat(f"{kind}_waiting", labels, figures.get("waiting", {}))


def _progress(labels: dict[str, object], progress: Mapping[str, Any]) -> Iterator[tuple[str, Labels, float]]:
    """Times as they are: microseconds since 1970, or the user's own numbers."""
    yield "millpond_update_progress", labels, progress["update"]
    yield "millpond_fetch_progress", labels, progress["fetch"]
    for updater, own in progress["updaters"].items():
        yield "millpond_updater_progress", {**labels, "updater": updater}, own
    for updater, rows in progress["late"].items():
        yield "millpond_late_rows_total", {**labels, "updater": updater}, rows
    for fetcher, own in progress["fetchers"].items():
        yield "millpond_waiting_rows", {**labels, "fetcher": fetcher}, own["waiting"]
        yield "millpond_late_rows_total", {**labels, "fetcher": fetcher}, own["late"]


def _flat(of: str, labels: Labels, figures: Mapping[str, Any]) -> Iterator[tuple[str, Labels, float]]:
    for name, value in figures.items():
        if isinstance(value, int | float):
            yield _name(of, name), labels, value


def _name(of: str, figure: str) -> str:
    """Units are spelt out, and what only grows says so, as is the custom there."""
    words = [_UNITS.get(word, word) for word in figure.split("_")]
    return "_".join(("millpond", of, *words, *(("total",) if figure in _COUNTERS else ())))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if isinstance(value, float) and math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
