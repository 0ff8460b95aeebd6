"""What somebody who looks at a pond has chosen to see, and what a key changes about it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from millpond.monitor.loads import ContainerLoad, PondLoads, SliceLoads

Page = Literal["pond", "container", "slice", "help"]
HEATS = ("rows", "cpu", "bytes")
SORTS = ("id", "updates", "fetches", "cpu", "bytes", "keys")
LABEL = 7
"""Characters before a row of the heat map."""
ROWS_MAX = 8
_PER_ROW = (8, 16, 32, 64, 128, 256)
_WIDE = 4
JUMP = 10


@dataclass(frozen=True)
class View:
    """`container` and `slice` are those that are chosen, also before they are opened."""

    page: Page = "pond"
    focus: Literal["containers", "slices"] = "containers"
    heat: str = "rows"
    sort: str = "id"
    descending: bool = False
    container: int = -1
    slice: int = 0
    paused: bool = False
    came_from: tuple[Page, ...] = ()

    @property
    def watched(self) -> int | None:
        """The slice of which more must be asked."""
        return self.slice if self.page == "slice" else None


@dataclass(frozen=True)
class Grid:
    """How slices are laid out: cells of so many characters, each for so many slices that follow each other."""

    slices: int
    per_row: int
    cell: int
    together: int = 1

    @property
    def rows(self) -> int:
        return math.ceil(self.slices / (self.per_row * self.together))


def grid_of(slices: int, width: int, rows_max: int = ROWS_MAX) -> Grid:
    """As many columns as have wide cells, if all slices fit; else the fewest with which they do. Else some share a cell."""
    room = max(_PER_ROW[0], width - LABEL - 1)
    possible = [each for each in _PER_ROW if each <= room]
    fitting = [each for each in possible if slices <= each * rows_max]
    if fitting:
        wide = [each for each in fitting if room // each >= _WIDE and each < slices]
        per_row = max(wide, default=fitting[0])
        return Grid(slices, per_row, min(_WIDE + 1, room // per_row))
    per_row = possible[-1]
    return Grid(slices, per_row, 1, math.ceil(slices / (per_row * rows_max)))


def containers_in_order(loads: PondLoads, view: View) -> list[ContainerLoad]:
    def key(load: ContainerLoad) -> tuple[float, int]:
        value = float(getattr(load, view.sort))
        value = -math.inf if math.isnan(value) else value
        return (-value if view.descending else value), load.id

    return sorted(loads.containers.values(), key=key)


def slices_in_order(slices: SliceLoads, view: View) -> npt.NDArray[np.int64]:
    """The numbers of slices, as they are listed."""
    column = slices.number.astype(np.float64) if view.sort == "id" else getattr(slices, view.sort)
    column = np.nan_to_num(column, nan=-1.0)
    order: npt.NDArray[np.int64] = slices.number[
        np.lexsort((slices.number, -column if view.descending else column))
    ]
    return order


def chosen_container(loads: PondLoads, view: View) -> int:
    """The one that is chosen; before any is, the first in the list."""
    if view.container in loads.containers:
        return view.container
    listed = containers_in_order(loads, view)
    return listed[0].id if listed else -1


def press(view: View, key: str, loads: PondLoads, width: int) -> View:
    """The view after a key. Keys that mean nothing here change nothing."""
    if view.page == "help":
        return _back(view)
    if key == "?":
        return _open(view, "help")
    if key in ("escape", "backspace"):
        return _back(view)
    if key == "p":
        return replace(view, paused=not view.paused)
    if key == "h":
        return replace(view, heat=HEATS[(HEATS.index(view.heat) + 1) % len(HEATS)])
    if key == "s":
        sort = SORTS[(SORTS.index(view.sort) + 1) % len(SORTS)]
        return replace(view, sort=sort, descending=sort != "id")
    if key == "r":
        return replace(view, descending=not view.descending)
    if key == "tab" and view.page == "pond":
        return replace(view, focus="slices" if view.focus == "containers" else "containers")
    if view.page == "pond":
        return _press_in_pond(view, key, loads, width)
    if view.page == "container":
        return _press_in_container(view, key, loads)
    return _press_in_slice(view, key, loads)


def _press_in_pond(view: View, key: str, loads: PondLoads, width: int) -> View:
    if view.focus == "containers":
        listed = [load.id for load in containers_in_order(loads, view)]
        if key == "enter" and listed:
            chosen = chosen_container(loads, view)
            slices = slices_in_order(loads.slices.of(chosen), view)
            first = int(slices[0]) if len(slices) else view.slice
            return replace(_open(view, "container"), container=chosen, slice=first)
        return replace(view, container=_moved(listed, chosen_container(loads, view), key))
    grid = grid_of(len(loads.slices), width)
    steps = {"left": -1, "right": 1, "up": -grid.per_row, "down": grid.per_row}
    if key == "enter" and len(loads.slices):
        return replace(_open(view, "slice"), slice=hottest_beside(loads.slices, view, grid))
    at = view.slice + steps.get(key, 0) * grid.together
    at = {"home": 0, "end": grid.slices - 1}.get(key, at)
    return replace(view, slice=at) if 0 <= at < grid.slices else view


def hottest_beside(slices: SliceLoads, view: View, grid: Grid) -> int:
    """Of the slices that share the chosen one's cell, the hottest."""
    first = view.slice - view.slice % grid.together
    heat = np.nan_to_num(getattr(slices, view.heat)[first : first + grid.together], nan=-1.0)
    return first + int(heat.argmax()) if len(heat) else view.slice


def _press_in_container(view: View, key: str, loads: PondLoads) -> View:
    listed = slices_in_order(loads.slices.of(view.container), view).tolist()
    if key == "enter" and view.slice in listed:
        return _open(view, "slice")
    return replace(view, slice=_moved(listed, view.slice, key))


def _press_in_slice(view: View, key: str, loads: PondLoads) -> View:
    at = view.slice + {"left": -1, "up": -1, "right": 1, "down": 1}.get(key, 0)
    return replace(view, slice=at) if 0 <= at < len(loads.slices) else view


def _moved(listed: list[int], chosen: int, key: str) -> int:
    """What is chosen after a key that goes up or down in a list."""
    if not listed:
        return chosen
    at = listed.index(chosen) if chosen in listed else 0
    steps = {"up": -1, "down": 1, "pageup": -JUMP, "pagedown": JUMP, "home": -len(listed), "end": len(listed)}
    return listed[min(len(listed) - 1, max(0, at + steps.get(key, 0)))]


def _open(view: View, page: Page) -> View:
    return replace(view, page=page, came_from=(*view.came_from, view.page))


def _back(view: View) -> View:
    if not view.came_from:
        return view
    return replace(view, page=view.came_from[-1], came_from=view.came_from[:-1])
