"""What an epoch of an operator may take: seconds and memory, as users write them."""

from __future__ import annotations

import math
import re
from datetime import timedelta

from millpond.errors import BadOption
from millpond.times import MICROS, parse_duration

MEMORY_MIN = 1 << 20


def seconds_of(limit: str | float | timedelta | None) -> float | None:
    """`limit=`: a duration, or a number of seconds."""
    if limit is None:
        return None
    if isinstance(limit, str | timedelta):
        seconds = parse_duration(limit) / MICROS
    elif isinstance(limit, int | float) and not isinstance(limit, bool):
        seconds = float(limit)
    else:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise BadOption(
            f"limit={limit!r} is no time to run for", hint='for example limit="30 seconds"', option="limit"
        )
    return seconds


def bytes_of(memory: str | int | None) -> int | None:
    """`memory=`: bytes, or a text as in "512m"."""
    if memory is None:
        return None
    size = parse_bytes(memory) if isinstance(memory, str) else memory
    if not isinstance(size, int) or isinstance(size, bool) or not MEMORY_MIN <= size < 1 << 63:
        raise BadOption(
            f"memory={memory!r} is not a number of bytes, {MEMORY_MIN:,} at least",
            hint='for example memory="512m", or memory="2g"',
            option="memory",
        )
    return size


def parse_bytes(text: str) -> int | None:
    """A number of bytes, as in 2g, 900m or 1073741824: units are powers of 1,024. None if it is none."""
    size = re.fullmatch(r"(\d{1,18})\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    return None if size is None else int(size[1]) << 10 * " kmgt".index(size[2] or " ")
