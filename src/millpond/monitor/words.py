"""Figures in few characters: numbers, bytes, times, bars and the steps of a heat map."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from millpond.times import Progress, format_time

NOTHING = "-"
AWAY = "x"
STEPS = "·▁▂▃▄▅▆▇█"
COLOURS = tuple(f"color({n})" for n in (240, 24, 31, 37, 71, 142, 178, 208, 196))
_US = 1e6
_DAY_S = 86_400


def number(value: float | None) -> str:
    """Of four characters and a unit at most: 999, 1.2k, 34k, 5.6M."""
    if value is None or math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "inf"
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or unit == "T":
            break
        value /= 1000
    if not unit:
        return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"
    return f"{value:.1f}{unit}" if abs(value) < 9.95 else f"{value:.0f}{unit}"


def size(value: float | None) -> str:
    """Bytes: 999, 1.2K, 34M, 5.6G, in powers of 1,024."""
    if value is None or math.isnan(value):
        return NOTHING
    for unit in ("", "K", "M", "G", "T"):
        if abs(value) < 1023.5 or unit == "T":
            break
        value /= 1024
    return f"{value:.0f}{unit}" if not unit or abs(value) >= 9.95 else f"{value:.1f}{unit}"


def percent(share: float) -> str:
    """Of one core, or of the whole: with as many digits as tell something."""
    if math.isnan(share):
        return NOTHING
    digits = 0 if share >= 0.0995 or share == 0 else 1 if share >= 0.00995 else 2
    return f"{100 * share:.{digits}f}%"


def duration(seconds: float | None) -> str:
    if seconds is None or math.isnan(seconds):
        return NOTHING
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return (
        f"{minutes:.0f} min" if minutes < 120 else f"{hours:.0f} h" if hours < 48 else f"{hours / 24:.0f} d"
    )


def progress(value: Progress, kind: str) -> str:
    """A time: of a timestamp the hour of its day, which `behind` puts beside the present."""
    if isinstance(value, float) and math.isinf(value):
        return "finished" if value > 0 else "none yet"
    if kind != "timestamp":
        return str(value)
    date, _, hour = format_time(value, "timestamp").removesuffix("Z").partition("T")
    return f"{date[5:]} {hour[:10]}"


def behind(value: Progress, kind: str, now_s: float) -> str:
    """How far a time is behind the present; empty for what is no such time, or nowhere near."""
    if kind != "timestamp" or (isinstance(value, float) and math.isinf(value)):
        return ""
    seconds = now_s - value / _US
    return duration(seconds) if abs(seconds) < _DAY_S else ""


def clock(seconds: float) -> str:
    days, rest = divmod(int(seconds), _DAY_S)
    said = f"{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days} d {said}" if days else said


def step(value: float, most: float) -> int:
    """0 for nothing, then 1 to 8."""
    if not value > 0 or not most > 0:
        return 0
    return max(1, math.ceil(min(1.0, value / most) * (len(STEPS) - 1)))


def bar(share: float, width: int) -> str:
    """A share from 0 to 1, in eighths of a character."""
    share = 0.0 if math.isnan(share) else min(1.0, max(0.0, share))
    eighths = round(share * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(width)


def spark(values: Iterable[float], width: int) -> str:
    """The newest values at the right, each as high as it is beside the highest."""
    newest = [0.0 if math.isnan(value) else value for value in values][-width:]
    most = max(newest, default=0.0)
    return "".join(STEPS[step(value, most)] for value in newest).rjust(width)


def fitted(text: str, width: int, align: Literal["left", "right"] = "left") -> str:
    """Of exactly that width; what is longer ends in an ellipsis."""
    if cell_len(text) > width:
        return set_cell_size(text, width - 1) + "…" if width > 0 else ""
    return text.rjust(width - cell_len(text) + len(text)) if align == "right" else set_cell_size(text, width)


def line(width: int, *parts: tuple[str, str] | str) -> Text:
    """One line, never wider."""
    text = Text(no_wrap=True, overflow="crop", end="")
    for part in parts:
        said, style = (part, "") if isinstance(part, str) else part
        text.append(said, style)
    if text.cell_len > width:
        text.truncate(width, overflow="ellipsis")
    return text


def counted(count: int, what: str) -> str:
    """1 slice, 2 slices."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def numbers_of(slices: Sequence[int], most: int = 8) -> str:
    """A list for people: 1, 2, 3 and 40 more."""
    shown = ", ".join(map(str, slices[:most]))
    return f"{shown} and {len(slices) - most:,} more" if len(slices) > most else shown
