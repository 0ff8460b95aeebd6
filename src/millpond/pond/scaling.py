"""Moves as a user waits for them: with a bar where somebody looks on, and an error where one failed."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import SupportsIndex

from millpond.client.client import Client
from millpond.errors import BadOption, Unavailable
from millpond.wire.base import SliceId
from millpond.wire.moves import AskMoves, MoveInfo, Moves

LOOK_S = 0.02
_log = logging.getLogger("millpond")


def await_moves(
    client: Client, asked: Moves, what: str, progress: bool | None, *, scaling: bool = False
) -> list[MoveInfo]:
    """Returns when all is where it belongs. Interrupted, it leaves the pond to go on by itself.

    `progress` shows how far it is on standard error; None does so where that is a terminal. With `scaling`, the number of
    containers changes, too.
    """
    known = {move.id: move for move in asked.moves}
    ids = list(known)
    for note in asked.notes:
        _log.warning("%s", note)

    def ask() -> Moves:
        moves = client.call(AskMoves(ids, scaling))
        known.update((move.id, move) for move in moves.moves)
        return moves

    moves = _watched(ask, what) if _is_shown(progress) else _unwatched(ask)
    if moves.error:
        raise Unavailable(f"{what} failed: {moves.error}", hint="what moved stays where it is", address="")
    failed = [move for move in known.values() if move.stage == "failed"]
    if failed:
        raise Unavailable(
            f"{len(failed)} of {len(known)} moves failed: {failed[0].error}",
            hint="those slices are served where they were; try again",
            address="",
        )
    forgotten = [move for move in known.values() if not move.is_over]
    if forgotten:
        raise Unavailable(
            f"what became of {len(forgotten)} of {len(known)} moves is not remembered any more",
            hint="pond.placement() tells where slices are",
            address="",
        )
    return list(known.values())


def _is_over(moves: Moves) -> bool:
    return not moves.scaling and all(move.is_over for move in moves.moves)


def _unwatched(ask: Callable[[], Moves]) -> Moves:
    while not _is_over(moves := ask()):
        time.sleep(LOOK_S)
    return moves


def _watched(ask: Callable[[], Moves], what: str) -> Moves:
    from rich.console import Console  # noqa: PLC0415 - only where somebody looks on
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=1.0)
        while not _is_over(moves := ask()):
            done = sum(move.progress * len(move.slices) for move in moves.moves)
            total = sum(len(move.slices) for move in moves.moves)
            told = f"{what}: {moves.scaling}" if moves.scaling else what
            bars.update(task, completed=done / total if total else 0.0, description=told)
            time.sleep(LOOK_S)
    return moves


def _is_shown(progress: bool | None) -> bool:
    return sys.stderr.isatty() if progress is None else progress


def slice_ids(slices: int | Collection[int]) -> list[SliceId]:
    """As a user gives them: one, or several."""
    if not isinstance(slices, int | Iterable):
        raise BadOption(f"{slices!r} are no slices", hint="give one number, or several", option="slices")
    several = [slices] if isinstance(slices, int) else slices
    return [SliceId(_number(each, "slice", "slices")) for each in several]


def container_id(container: int) -> int:
    """As a user gives it."""
    return _number(container, "container", "to")


def _number(value: object, what: str, option: str) -> int:
    """A whole number of any type, numpy's included; it names a slice or a container."""
    number = value.__index__() if isinstance(value, SupportsIndex) and not isinstance(value, bool) else -1
    if not 0 <= number < 1 << 31:
        raise BadOption(f"{value!r} is no {what}", hint=f"{what}s are whole numbers from 0 on", option=option)
    return number


def autoscale_limits(
    containers: Sequence[int], busy: Sequence[float], hold_s: float
) -> tuple[int, int, float, float]:
    """As a user gives them: the least and the most containers, and how busy they are to be."""
    try:
        (low, high), (idle, full) = containers, busy
        check_at_least_one("containers", low)
        check_at_least_one("containers", high)
        if low <= high and 0 <= idle < full <= 1 and 0 < hold_s < math.inf:
            return low, high, float(idle), float(full)
    except BadOption:
        raise
    except (TypeError, ValueError):
        pass  # they are not two numbers each
    raise BadOption(
        f"containers={containers!r}, busy={busy!r} and hold={hold_s:g} s are no limits",
        hint='for example containers=(1, 8), busy=(0.2, 0.75), hold="30 seconds"',
        option="containers",
    )


def check_at_least_one(option: str, value: int | None) -> None:
    if value is not None and (
        not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 9_999
    ):
        raise BadOption(
            f"{option}={value!r} is not between 1 and 9999", hint="give a whole number", option=option
        )
