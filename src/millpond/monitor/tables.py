"""Tables that fit: the columns that matter least give way, and of the rows a window around the chosen one is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from rich.text import Text

from millpond.monitor.words import fitted, line

_GAP = 2
_FLEXIBLE_MAX = 48


class Column(NamedTuple):
    """`keep` says how much it matters; one that is `flexible` takes what the others leave. `sort` is what orders by it."""

    title: str
    width: int
    value: Callable[[Any], str | tuple[str, str]]
    keep: int = 1
    align: Literal["left", "right"] = "right"
    sort: str = ""
    flexible: bool = False


def table(
    columns: Sequence[Column],
    rows: Sequence[Any],
    width: int,
    rows_max: int,
    chosen: int = -1,
    sort: tuple[str, bool] = ("", False),
) -> list[Text]:
    """A line of titles and at most `rows_max` rows, of which `chosen` is one."""
    shown = _fitting(columns, width - 2)
    first, last = _window(len(rows), rows_max, chosen)
    titles: list[tuple[str, str] | str] = ["  "]
    for column, space in shown:
        mark = ("▼" if sort[1] else "▲") if column.sort and column.sort == sort[0] else ""
        titles += [(fitted(column.title + mark, space, column.align), "bold" if mark else "dim"), " " * _GAP]
    lines = [line(width, *titles[:-1])]
    for at in range(first, last):
        style = "reverse" if at == chosen else ""
        parts: list[tuple[str, str] | str] = [("▸ " if at == chosen else "  ", style)]
        for column, space in shown:
            value = column.value(rows[at])
            said, own = (value, "") if isinstance(value, str) else value
            parts += [(fitted(said, space, column.align), f"{own} {style}".strip()), (" " * _GAP, style)]
        lines.append(line(width, *parts[:-1]))
    if lines and (hidden := len(rows) - (last - first)):
        lines[0].append(f"  {hidden:,} more", "dim italic")
        lines[0].truncate(width)
    return lines


def _fitting(columns: Sequence[Column], width: int) -> list[tuple[Column, int]]:
    shown = list(columns)
    while len(shown) > 1 and sum(column.width + _GAP for column in shown) - _GAP > width:
        least = min(shown, key=lambda column: column.keep)
        # Of those that matter as little, the last goes first.
        shown.remove(next(column for column in reversed(shown) if column.keep == least.keep))
    left = max(0, width - sum(column.width + _GAP for column in shown) + _GAP)
    return [
        (column, min(_FLEXIBLE_MAX, column.width + left) if column.flexible else column.width)
        for column in shown
    ]


def _window(count: int, rows_max: int, chosen: int) -> tuple[int, int]:
    rows_max = max(1, rows_max)
    first = min(max(0, chosen - rows_max // 2), max(0, count - rows_max))
    return first, min(count, first + rows_max)
