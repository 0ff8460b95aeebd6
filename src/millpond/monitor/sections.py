"""The parts that pages of `millpond top` are made of: what was seen, and tables and a heat map of it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from rich.text import Text

from millpond.monitor import words
from millpond.monitor.loads import UNKNOWN, ContainerLoad, PondLoads, Reading, SliceLoads
from millpond.monitor.tables import Column, table
from millpond.monitor.view import LABEL, Grid, View, chosen_container, containers_in_order, slices_in_order
from millpond.monitor.words import NOTHING, line, number, percent, size

_HEAT_WORDS = {"rows": "rows/s", "cpu": "CPU", "bytes": "bytes held"}
_HEAT_VALUES = {"rows": number, "cpu": percent, "bytes": size}


@dataclass(frozen=True)
class Seen:
    """What there is to show. `history` are the loads of the last readings, the newest at the end."""

    where: str
    reading: Reading
    loads: PondLoads
    history: Sequence[PondLoads] = ()
    interval_s: float = 2.0
    problem: str = ""
    age_s: int = 0
    """Of the reading; 0 for one that is as new as it should be."""
    residents: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """What the watched slice does, by resident."""


def title(width: int, said: str, more: str = "", active: bool = False) -> Text:
    text = line(
        width,
        ("─ ", "dim"),
        (said, "bold cyan" if active else "bold"),
        (f" {more}" if more else "", "dim"),
        " ",
    )
    text.append("─" * max(0, width - text.cell_len), "dim")
    return text


def container_table(view: View, seen: Seen, width: int, height: int) -> list[Text]:
    listed = containers_in_order(seen.loads, view)
    active = view.page == "pond" and view.focus == "containers"
    chosen = (
        [load.id for load in listed].index(chosen_container(seen.loads, view)) if listed and active else -1
    )

    def figure(name: str, shown: Any) -> Any:
        return lambda load: shown(load.figures.get(name, UNKNOWN))

    def cpu_bar(load: ContainerLoad) -> tuple[str, str]:
        share = load.cpu / max(1.0, load.figures.get("threads", 1.0))
        return (
            ("away", "bold red") if load.away else (words.bar(share, 8), "green" if share < 0.8 else "yellow")
        )

    columns = [
        Column("id", 4, lambda load: str(load.id), 9, sort="id"),
        Column("slices", 6, figure("slices", number), 7),
        Column("updates/s", 10, lambda load: number(load.updates), 9, sort="updates"),
        Column("fetches/s", 10, lambda load: number(load.fetches), 9, sort="fetches"),
        Column("CPU", 5, lambda load: percent(load.cpu), 8, sort="cpu"),
        Column("", 8, cpu_bar, 4, "left"),
        Column("RSS", 5, figure("rss_bytes", size), 6),
        Column("limit", 5, figure("memory_max_bytes", size), 3),
        Column("bytes", 6, lambda load: size(load.bytes), 8, sort="bytes"),
        Column("keys", 5, lambda load: number(load.keys), 5, sort="keys"),
        Column("threads", 7, figure("threads", number), 2),
        Column(
            "up", 8, lambda load: words.clock(load.figures.get("up_s", 0)) if load.figures else NOTHING, 2
        ),
        Column("pid", 7, figure("pid", lambda pid: NOTHING if math.isnan(pid) else f"{pid:.0f}"), 1),
    ]
    lines = table(columns, listed, width, height - 2, chosen, (view.sort, view.descending))
    return [title(width, "containers", "", active), *lines]


def heat_map(view: View, slices: SliceLoads, grid: Grid, width: int, active: bool) -> list[Text]:
    heat = np.nan_to_num(getattr(slices, view.heat))
    shown, most = _HEAT_VALUES[view.heat], float(heat.max()) if len(heat) else 0.0
    legend = f"by {_HEAT_WORDS[view.heat]}: {words.STEPS[0]} none  {words.STEPS[1]}{words.STEPS[-1]} up to {shown(most)}"
    if grid.together > 1:
        legend += f", each the hottest of {grid.together}"
    lines = [title(width, "slices", legend, active)]
    for row in range(grid.rows):
        first = row * grid.per_row * grid.together
        text = line(width, (f"{first:>{LABEL - 1},} ", "dim"))
        for at in range(first, min(first + grid.per_row * grid.together, grid.slices), grid.together):
            _cell(text, slices, heat, most, at, grid, view if active else None)
        text.truncate(width)
        lines.append(text)
    if active and 0 <= view.slice < len(slices):
        lines[0] = title(width, "slices", f"{legend}  ▸ {_chosen(slices, view.slice, grid)}", active)
    return lines


def _cell(
    text: Text, slices: SliceLoads, heat: Any, most: float, at: int, grid: Grid, view: View | None
) -> None:
    here = np.s_[at : at + grid.together]
    step = words.step(float(heat[here].max()), most)
    style = words.COLOURS[step]
    if slices.bare[here].any():
        style += " on dark_red"
    if slices.moving[here].any():
        style += " underline"
    if view is not None and at <= view.slice < at + grid.together:
        style += " reverse"
    glyphs = max(1, grid.cell - 1)
    is_away = bool(slices.away[here].all())
    text.append((words.AWAY if is_away else words.STEPS[step]) * glyphs, f"red {style}" if is_away else style)
    text.append(" " * (grid.cell - glyphs))


def _chosen(slices: SliceLoads, at: int, grid: Grid) -> str:
    first = at - at % grid.together
    if grid.together > 1:
        return f"{first}-{min(first + grid.together, grid.slices) - 1}"
    return f"slice {at} in container {slices.container[at]}"


def hottest_table(view: View, slices: SliceLoads, width: int, height: int) -> list[Text]:
    order = replace(view, sort=view.heat, descending=True)
    listed = slices_in_order(slices, order)[: height - 2].tolist()
    return [
        title(width, "hottest slices"),
        *table(slice_columns(slices, view, True), listed, width, height - 2),
    ]


def slice_columns(slices: SliceLoads, view: View, owner: bool) -> list[Column]:
    """For tables whose rows are numbers of slices."""
    place = {number: at for at, number in enumerate(slices.number.tolist())}
    most = float(np.nan_to_num(getattr(slices, view.heat)).max()) if len(slices) else 0.0

    def figure(name: str, shown: Any) -> Any:
        return lambda number: shown(float(getattr(slices, name)[place[number]]))

    def heat(number: int) -> tuple[str, str]:
        value = float(np.nan_to_num(getattr(slices, view.heat)[place[number]]))
        return words.bar(value / most if most else 0.0, 16), words.COLOURS[words.step(value, most)]

    def notes(number: int) -> tuple[str, str]:
        at = place[number]
        said = [*(["moves"] if slices.moving[at] else []), *(["too few backups"] if slices.bare[at] else [])]
        return ", ".join(said), "bold red" if slices.bare[at] else "magenta"

    return [
        Column("slice", 6, str, 9, sort="id"),
        *([Column("in", 4, figure("container", number), 8)] if owner else []),
        Column("updates/s", 10, figure("updates", number), 8, sort="updates"),
        Column("fetches/s", 10, figure("fetches", number), 8, sort="fetches"),
        Column("CPU", 6, figure("cpu", percent), 7, sort="cpu"),
        Column("bytes", 6, figure("bytes", size), 7, sort="bytes"),
        Column("keys", 6, figure("keys", number), 6, sort="keys"),
        Column(_HEAT_WORDS[view.heat], 16, heat, 4, "left"),
        Column("", 8, notes, 3, "left", flexible=True),
    ]


def resident_table(seen: Seen, width: int, height: int) -> list[Text]:
    metrics, now_s = seen.reading.metrics, seen.reading.taken_s

    def waiting(item: tuple[str, Any]) -> tuple[str, str]:
        rows = sum(fetcher["waiting"] for fetcher in item[1]["fetchers"].values())
        rows += _figures(metrics, item).get("waiting", {}).get("rows", 0)
        return f"{rows:,}", "yellow" if rows else ""

    def held(item: tuple[str, Any], name: str) -> float:
        figures = _figures(metrics, item)
        tables = figures.get("tables", {}).values()
        return float(sum(each[name] for each in tables) if tables else figures.get(name, UNKNOWN))

    def keys(item: tuple[str, Any]) -> float:
        """Of windows, how many are open."""
        return held(item, "open" if "open" in _figures(metrics, item) else "keys")

    has_windows = any("open" in _figures(metrics, item) for item in metrics["progress"].items())
    columns = [
        Column("name", 12, lambda item: item[0], 9, "left", flexible=False),
        Column("kind", 6, lambda item: item[1]["kind"].removesuffix("s"), 2, "left"),
        Column("U", 17, lambda item: words.progress(item[1]["update"], item[1]["time_kind"]), 9),
        Column("behind", 6, lambda item: words.behind(item[1]["update"], item[1]["time_kind"], now_s), 7),
        Column("F", 17, lambda item: words.progress(item[1]["fetch"], item[1]["time_kind"]), 6),
        Column("waiting", 9, waiting, 8),
        Column("keys", 5, lambda item: number(keys(item)), 4),
        Column("bytes", 5, lambda item: size(held(item, "bytes")), 5),
        *(
            [Column("disk", 5, lambda item: size(_figures(metrics, item).get("spilled_bytes", 0)), 2)]
            if has_windows
            else []
        ),
        Column("U waits for", 11, lambda item: ", ".join(item[1]["held_by"]), 3, "left", flexible=True),
    ]
    lines = table(columns, list(metrics["progress"].items()), width, height - 2)
    return [title(width, "states, tables and windows" if has_windows else "states and tables"), *lines]


def _figures(metrics: Mapping[str, Any], item: tuple[str, Any]) -> Mapping[str, Any]:
    own: Mapping[str, Any] = metrics[item[1]["kind"]].get(item[0], {})
    return own


def move_table(moves: Sequence[Mapping[str, Any]], width: int, height: int) -> list[Text]:
    columns = [
        Column("move", 5, lambda move: str(move["id"]), 6),
        Column("slices", 22, lambda move: words.numbers_of(move["slices"], 3), 7, "left"),
        Column("from", 4, lambda move: str(move["from"]), 8),
        Column("to", 4, lambda move: str(move["to"]), 8),
        Column("phase", 11, lambda move: move["phase"], 5, "left"),
        Column("", 12, lambda move: (words.bar(move["progress"], 12), "cyan"), 4, "left"),
        Column("done", 5, lambda move: percent(move["progress"]), 9),
        Column("left", 7, lambda move: words.duration(move["seconds_left"]), 7),
        Column("cause", 8, lambda move: move["cause"], 3, "left", flexible=True),
    ]
    tried = [move for move in moves if move.get("error")]
    said = f"{tried[0]['id']} is tried again: {tried[0]['error']}" if tried else ""
    return [title(width, "moves under way", said), *table(columns, moves, width, height - 2)]
