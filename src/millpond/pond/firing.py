"""When windows fire, as users say it."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

from msgspec.structs import replace

from millpond.code.windows import WindowCode
from millpond.errors import BadOption
from millpond.times import TimeKind, parse_duration
from millpond.wire.windows import Emit


class Firing(NamedTuple):
    """How long windows stay, in units of their times, and when they are sent; `every` in microseconds."""

    lateness: int
    emit: Emit
    every: int


def firing_of(
    window: WindowCode, lateness: str | int | timedelta, emit: str, every: str | timedelta | None
) -> tuple[WindowCode, Firing]:
    """Checked. A window whose times were of either kind is of that of its lateness."""
    amount = parse_duration(lateness)
    if amount:
        window = _of_kind(window, lateness)
    modes: tuple[Emit, ...] = ("close", "update")
    for mode in modes:
        if emit == mode:
            return window, Firing(amount, "update" if every is not None else mode, _every(every))
    raise BadOption(
        f"emit={emit!r} is not a choice",
        hint='emit="close", emit="update", or every="10 seconds"',
        option="emit",
    )


def _of_kind(window: WindowCode, lateness: str | int | timedelta) -> WindowCode:
    if window.kind in ("counted", "everything"):
        raise BadOption(
            f"lateness={lateness!r} with {window}: nothing is late there",
            hint="leave lateness out",
            option="lateness",
        )
    kind: TimeKind = "timestamp" if isinstance(lateness, str | timedelta) else "long"
    if window.span_kind not in ("", kind):
        raise BadOption(
            f"lateness={lateness!r} does not go with {window}",
            hint='durations as in "1 minute" go with durations, integers with logical time',
            option="lateness",
        )
    return replace(window, span_kind=kind)


def _every(every: str | timedelta | None) -> int:
    if every is None:
        return 0
    if not isinstance(every, str | timedelta):
        raise BadOption(
            f"every={every!r} has no unit: it is of the driver's clock",
            hint='for example every="10 seconds"',
            option="every",
        )
    amount = parse_duration(every)
    if not amount:
        raise BadOption(
            f"every={every!r} is no time", hint='emit="update" is as often as can be', option="every"
        )
    return amount
