"""The pages of `millpond top`: from what was seen of a pond to lines of text that fit. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from rich.text import Text

from millpond.monitor import words
from millpond.monitor.loads import ContainerLoad
from millpond.monitor.sections import (
    Seen,
    container_table,
    heat_map,
    hottest_table,
    move_table,
    resident_table,
    slice_columns,
    title,
)
from millpond.monitor.tables import Column, table
from millpond.monitor.view import (
    View,
    grid_of,
    slices_in_order,
)
from millpond.monitor.words import line, number, percent, size
from millpond.pond.figures import too_few_backups

_SPARK = 16
_HOTTEST = 8
_HELP = (
    ("Tab", "go between containers and slices"),
    ("arrows, PgUp, PgDn, Home, End", "choose"),
    ("Enter", "look into what is chosen: a container, a slice"),
    ("Esc, Backspace", "go back"),
    ("s", "sort by the next: id, updates/s, fetches/s, CPU, bytes, keys"),
    ("r", "sort the other way round"),
    ("h", "heat map of rows, of CPU time, of bytes"),
    ("p", "pause, and go on"),
    ("q, Ctrl-C", "end"),
)
_WORDS = (
    "updates/s, fetches/s   rows applied, questions answered",
    "CPU                    of one core, by the time of threads",
    "RSS, limit             memory that a process has, and may have",
    "bytes, keys            what slices hold",
    "U                      updates below it are complete",
    "F                      no fetcher asks below it any more",
    "waiting                rows that wait for U",
    "x in the heat map      the container of the slice tells nothing",
    "underlined, on red     a slice that moves; one with too few backups",
)


def page(view: View, seen: Seen, width: int, height: int) -> list[Text]:
    """Lines that fit into so many columns and rows. The last has the keys."""
    body_height = max(1, height - 4)
    body = {"pond": _pond, "container": _container, "slice": _slice, "help": _help}[view.page]
    lines = [*_head(view, seen, width), *body(view, seen, width, body_height)[:body_height]]
    lines += [line(width)] * (height - 1 - len(lines))
    return [*lines[: height - 1], _keys(view, width)]


def plain_page(seen: Seen, width: int) -> list[Text]:
    """All of the pond's page, as long as it is."""
    body = _pond(View(page="pond", focus="slices", slice=-1), seen, width, 10_000)
    return [*_head(View(), seen, width), *body]


# Above and below


def _head(view: View, seen: Seen, width: int) -> list[Text]:
    loads, metrics = seen.loads, seen.reading.metrics
    state = (f"every {seen.interval_s:g} s", "dim")
    if view.paused:
        state = ("paused", "bold yellow")
    elif seen.age_s:
        state = (f"{seen.age_s} s old", "bold yellow")
    up = f"up {words.clock(metrics['coordinator']['up_s'])}"
    where = words.fitted(seen.where, max(8, min(len(seen.where), width - 40)))
    first = line(width, ("millpond top ", "bold cyan"), (where, "bold"), f"  {up}  ", state)
    waiting = sum(f["waiting"] for p in metrics["progress"].values() for f in p["fetchers"].values())
    rates = [loads.total(name) for name in ("updates", "fetches", "cpu", "bytes", "keys")]
    recent = [each.total("updates") + each.total("fetches") for each in seen.history]
    held = size(rates[3])
    figures: tuple[tuple[str, str], ...] = (
        ("updates/s ", "dim"), (number(rates[0]), "bold"),
        ("  fetches/s ", "dim"), (number(rates[1]), "bold"),
        ("  CPU ", "dim"), (percent(rates[2]), "bold"),
        ("  held ", "dim"), (f"{held}, {number(rates[4])} keys", "bold"),
        ("  waiting ", "dim"), (f"{waiting:,}", "bold yellow" if waiting else "bold"),
        ("  epochs/s ", "dim"), (number(loads.epochs), "bold"),
    )  # fmt: skip
    if sum(len(said) for said, _ in figures) > width:
        # Rather without keys than with a figure that is cut off, which would look like one that is not known.
        figures = tuple((held, style) if said.endswith(" keys") else (said, style) for said, style in figures)
    second = line(width, *figures)
    if second.cell_len + _SPARK + 2 <= width:
        second.append(f"  {words.spark(recent, _SPARK)}", "cyan")
    return [first, second, _health(seen, width)]


def _health(seen: Seen, width: int) -> Text:
    """What needs somebody's attention, most urgent first; else that all is well."""
    metrics = seen.reading.metrics
    if seen.problem:
        return line(width, (f"no answer: {seen.problem}", "bold red"))
    parts: list[tuple[str, str] | str] = []
    containers, slices = seen.loads.containers, metrics["slices"]
    away = [str(load.id) for load in containers.values() if load.away]
    if away:
        parts += [(f"away: container {', '.join(away)}", "bold red"), "  "]
    bare = too_few_backups(slices)
    if bare:
        parts += [(f"too few backups: slices {words.numbers_of(bare)}", "bold red"), "  "]
    elif any("backups_wanted" in each for each in slices.values()):
        parts += [("backups complete", "green"), "  "]
    kinds = {progress["kind"] for progress in metrics["progress"].values()}
    broken = [name for kind in sorted(kinds) for name, own in metrics[kind].items() if "broken" in own]
    if broken:
        parts += [(f"broken: {', '.join(broken)}", "bold red"), "  "]
    slots = metrics["task_slots"]
    if slots:
        style = "bold red" if slots.get("had", 0) < slots.get("wanted", 0) else "green"
        parts += [(f"task slots {slots.get('had', 0)} of {slots.get('wanted', 0)}", style), "  "]
    count = f"{words.counted(len(containers), 'container')}, {words.counted(len(slices), 'slice')}"
    restarts = int(metrics["coordinator"]["container_restarts"])
    parts += [(count if away else f"{count}, all served", "dim" if away else "green")]
    parts += [(f"  restarts {restarts}", "yellow" if restarts else "dim")]
    return line(width, *parts)


def _keys(view: View, width: int) -> Text:
    where = {
        "pond": "q quit  ? help  Tab slices/containers  arrows Enter  s sort  r reverse  h heat  p pause",
        "container": "q quit  ? help  Esc back  ↑↓ Enter slice  s sort  r reverse  h heat  p pause",
        "slice": "q quit  ? help  Esc back  ←→ slice  p pause",
        "help": "any key goes back",
    }
    return line(width, (words.fitted(where[view.page], width), "reverse dim"))


# The pond


def _pond(view: View, seen: Seen, width: int, height: int) -> list[Text]:
    loads, metrics = seen.loads, seen.reading.metrics
    grid = grid_of(len(loads.slices), width)
    wishes = {
        "slices": 2 + grid.rows,
        "containers": 2 + len(loads.containers),
        "residents": 2 + len(metrics["progress"]) if metrics["progress"] else 0,
        "moves": 2 + len(metrics["moves"]) if metrics["moves"] else 0,
    }
    rows = shared_out(wishes, height)
    if grid.rows > rows["slices"] - 2:
        grid = grid_of(len(loads.slices), width, max(1, rows["slices"] - 2))
    lines = container_table(view, seen, width, rows["containers"])
    lines += heat_map(view, loads.slices, grid, width, view.focus == "slices")
    if wishes["residents"]:
        lines += resident_table(seen, width, rows["residents"])
    if wishes["moves"]:
        lines += move_table(metrics["moves"], width, rows["moves"])
    left = min(height, len(lines) + _HOTTEST + 2) - len(lines)
    return lines + (hottest_table(view, loads.slices, width, left) if left > 3 else [])


def shared_out(wishes: Mapping[str, int], height: int, least: int = 4) -> dict[str, int]:
    """Rows for each section: what it wishes, if all do fit; else what is over goes round, line by line."""
    rows = {name: min(wish, least) for name, wish in wishes.items()}
    left = height - sum(rows.values())
    while left > 0 and any(rows[name] < wishes[name] for name in rows):
        for name, wish in wishes.items():
            if rows[name] < wish and left > 0:
                rows[name] += 1
                left -= 1
    return rows


# One container, one slice


def _container(view: View, seen: Seen, width: int, height: int) -> list[Text]:
    load = seen.loads.containers.get(view.container)
    if load is None:
        return [title(width, f"container {view.container}"), line(width, "  it is gone")]
    if load.away:
        return [title(width, f"container {load.id}", "away"), line(width, (f"  {load.away}", "bold red"))]
    recent = [
        each.containers[load.id].updates + each.containers[load.id].fetches
        for each in seen.history
        if load.id in each.containers
    ]
    lines = [
        title(
            width,
            f"container {load.id}",
            f"process {load.figures['pid']:.0f}, term {load.figures['term']:.0f}",
        ),
        *_facts(load, width),
        line(width, ("  rows/s  ", "dim"), (words.spark(recent, min(60, width - 12)), "cyan")),
    ]
    slices = seen.loads.slices.of(load.id)
    numbers = slices_in_order(slices, view)
    listed = numbers.tolist()
    chosen = listed.index(view.slice) if view.slice in listed else -1
    lines.append(title(width, f"its {words.counted(len(slices), 'slice')}", "", active=True))
    columns = slice_columns(slices, view, owner=False)
    return lines + table(
        columns, listed, width, height - len(lines) - 1, chosen, (view.sort, view.descending)
    )


def _facts(load: ContainerLoad, width: int) -> list[Text]:
    figures = load.figures
    limit = figures["memory_max_bytes"]
    rows = (
        (
            ("updates/s", number(load.updates)),
            ("fetches/s", number(load.fetches)),
            ("CPU", percent(load.cpu)),
            ("threads", number(figures["threads"])),
            ("RSS", f"{size(figures['rss_bytes'])}{f' of {size(limit)}' if limit else ''}"),
            ("up", words.clock(figures["up_s"])),
        ),
        (
            ("held", f"{size(load.bytes)}, {number(load.keys)} keys"),
            ("staged rows", number(figures["rows_staged"])),
            ("log records", number(figures["log_records"])),
            ("checkpoints", number(figures["checkpoints"])),
            ("longest pause", f"{figures['snapshot_pause_ms_max']:.0f} ms"),
        ),
    )
    return [
        line(width, *(part for name, said in row for part in ((f"  {name} ", "dim"), (said, "bold"))))
        for row in rows
    ]


def _slice(view: View, seen: Seen, width: int, height: int) -> list[Text]:
    slices = seen.loads.slices
    if not view.slice < len(slices):
        return [title(width, f"slice {view.slice}"), line(width, "  it is gone")]
    at = view.slice
    own = seen.reading.metrics["slices"][at]
    recent = [each.slices for each in seen.history if at < len(each.slices)]
    room = min(60, width - 14)
    backups = ""
    if "backups_wanted" in own:
        backups = f"{own.get('backups', 0):.0f} of {own['backups_wanted']:.0f}"
    total = max(1.0, float(np.nan_to_num(slices.rows).sum()))
    share = float(np.nan_to_num(slices.rows[at])) / total
    lines = [
        title(width, f"slice {at}", f"in container {slices.container[at]}", active=True),
        line(
            width,
            ("  updates/s ", "dim"), (number(float(slices.updates[at])), "bold"),
            ("  fetches/s ", "dim"), (number(float(slices.fetches[at])), "bold"),
            ("  CPU ", "dim"), (percent(float(slices.cpu[at])), "bold"),
            ("  of all rows ", "dim"), (percent(share), "bold"),
            ("  backups " if backups else "", "dim"), (backups, "bold red" if slices.bare[at] else "bold"),
        ),
        line(
            width,
            ("  held ", "dim"), (f"{size(own['bytes'])}, {number(own['keys'])} keys", "bold"),
            ("  since it is here ", "dim"),
            (f"{own['rows_updated']:,} rows updated, {own['rows_fetched']:,} fetched, {own['cpu_s']:.2f} s CPU", "bold"),
        ),
        line(width, ("  rows/s    ", "dim"), (words.spark([float(s.rows[at]) for s in recent], room), "cyan")),
        line(width, ("  CPU       ", "dim"), (words.spark([float(s.cpu[at]) for s in recent], room), "green")),
        title(width, "what is in it", "" if seen.residents else "…"),
    ]  # fmt: skip
    columns = [
        Column("name", 16, lambda item: item[0], 9, "left"),
        Column("rows updated", 13, lambda item: number(item[1]["rows_updated"]), 7),
        Column("rows fetched", 13, lambda item: number(item[1]["rows_fetched"]), 7),
        Column("CPU time", 10, lambda item: words.duration(item[1]["cpu_s"]), 6),
        Column("bytes", 7, lambda item: size(item[1]["bytes"]), 8),
        Column("keys", 7, lambda item: number(item[1]["keys"]), 8),
    ]
    moves = [move for move in seen.reading.metrics["moves"] if at in move["slices"]]
    residents = sorted(seen.residents.items(), key=lambda item: -item[1]["cpu_s"])
    lines += table(columns, residents, width, height - len(lines) - (2 + len(moves) if moves else 0) - 1)
    return [*lines, *(move_table(moves, width, 2 + len(moves)) if moves else [])]


def _help(view: View, seen: Seen, width: int, height: int) -> list[Text]:
    keys = [line(width, (f"  {key:<32}", "bold"), said) for key, said in _HELP]
    return [
        title(width, "keys"),
        *keys,
        line(width),
        title(width, "words"),
        *(line(width, f"  {w}") for w in _WORDS),
    ]
