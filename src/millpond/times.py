"""Time is an int64: microseconds since 1970 for timestamps, or any logical counter."""

from __future__ import annotations

import math
import operator
import re
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Literal, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.errors import BadDuration, BelowFetchProgress, NullTime, WrongType
from millpond.schema.casting import cast_column, plain_array
from millpond.schema.ddl import describe_type

Progress: TypeAlias = int | float
"""A time, or -inf before all times, or +inf after all. Only the infinities are floats."""

TimeKind = Literal["timestamp", "long"]

MICROS = 1_000_000
"""Units of a timestamp in a second."""

TIME_MIN = -(2**63)
TIME_MAX = 2**63 - 1

_UNITS = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": MICROS,
    "minute": 60 * MICROS,
    "hour": 3_600 * MICROS,
    "day": 86_400 * MICROS,
    "week": 7 * 86_400 * MICROS,
}
_SHORT_UNITS = {
    "us": "microsecond",
    "ms": "millisecond",
    "s": "second",
    "sec": "second",
    "min": "minute",
    "h": "hour",
    "d": "day",
    "w": "week",
}
_PART = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*")
_EXAMPLES = (
    'write it as "5 seconds" or "1 minute 30 seconds", or give a timedelta, or an integer for logical time'
)


def parse_duration(duration: str | timedelta | SupportsIndex) -> int:
    """A duration in microseconds; an integer stays as it is, in units of its logical time.

    Durations are never negative, and exact: one that is no whole number of microseconds is a `BadDuration`.
    """
    if isinstance(duration, str):
        amount = _parse_text(duration)
    elif isinstance(duration, timedelta):
        amount = duration // timedelta(microseconds=1)
        if getattr(duration, "nanoseconds", 0):  # pandas' Timedelta is a timedelta that holds more
            raise BadDuration(
                f"{duration!r} is no whole number of microseconds", hint="round it to microseconds"
            )
    elif isinstance(duration, bool) or not hasattr(duration, "__index__"):
        raise BadDuration(f"{duration!r} is not a duration", hint=_EXAMPLES)
    else:
        amount = operator.index(duration)
    if not 0 <= amount <= TIME_MAX:
        what = "negative" if amount < 0 else "too long"
        raise BadDuration(f"the duration {duration!r} is {what}", hint="give one from 0 to 2**63 - 1 units")
    return amount


def delay_for(kind: TimeKind, delay: str | timedelta | SupportsIndex) -> int:
    """A delay in the units of a time column of that kind. Zero fits either kind, however it is written."""
    amount = parse_duration(delay)
    is_duration = isinstance(delay, (str, timedelta))
    if amount and is_duration != (kind == "timestamp"):
        if kind == "timestamp":
            raise BadDuration(
                f"the times are timestamps, but the delay {delay!r} has no unit",
                hint='give a duration, as in delay="5 seconds"',
            )
        raise BadDuration(
            f"the times are logical, but the delay {delay!r} is a duration",
            hint="give an integer in the units of the time column, as in delay=5",
        )
    return amount


def format_duration(micros: int) -> str:
    """A duration for people, as `parse_duration` reads it: in the largest unit of which it is a whole number."""
    unit, length = next(
        (unit, length)
        for unit, length in sorted(_UNITS.items(), key=lambda each: -each[1])
        if micros % length == 0
    )
    amount = micros // length
    return f"{amount} {unit}{'' if amount == 1 else 's'}"


def watermark_after(before: Progress, newest: int | None, delay: int) -> Progress:
    """The watermark that follows when rows came, the newest of that time: `delay` behind it, and never back."""
    if newest is None or newest - delay < TIME_MIN:
        return before
    return max(before, newest - delay)


def time_column(column: pa.Array | pa.ChunkedArray, name: str) -> tuple[npt.NDArray[np.int64], TimeKind]:
    """The times of a column, exactly, and whether they are timestamps or logical.

    Timestamps of any unit and zone, and dates, become microseconds; a timestamp without a zone counts as UTC.
    Integers become int64. The result may be a read-only view of the column.
    """
    array = plain_array(column, name)
    if array.null_count:
        raise NullTime(
            f"the time column '{name}' is null in {array.null_count} of {len(array)} rows",
            hint="filter these rows out, or give them a time",
            column=name,
            rows=array.null_count,
        )
    if pa.types.is_timestamp(array.type) or pa.types.is_date(array.type):
        kind: TimeKind = "timestamp"
        array = cast_column(array, pa.field(name, pa.timestamp("us", tz="UTC")), name)
    elif pa.types.is_integer(array.type):
        kind = "long"
        array = cast_column(array, pa.field(name, pa.int64()), name)
    else:
        raise WrongType(
            f"the time column '{name}' is {describe_type(array.type)}: a time is a timestamp, a date or an integer",
            hint="cast the column to timestamp, or to long for logical time",
            column=name,
            expected="timestamp or long",
            actual=describe_type(array.type),
        )
    times: npt.NDArray[np.int64] = array.view(pa.int64()).to_numpy(zero_copy_only=True)
    return times, kind


def format_time(value: Progress, kind: TimeKind) -> str:
    """A time for people: ISO 8601 in UTC for timestamps, the number for logical times, `-inf` and `+inf`."""
    if isinstance(value, float) and math.isinf(value):
        return "+inf" if value > 0 else "-inf"
    time = int(value)
    if kind == "long":
        return str(time)
    if time == TIME_MIN:  # numpy's not-a-time
        return f"{time} us"
    return str(np.datetime64(time, "us")).removesuffix(".000000") + "Z"


def time_of(moment: datetime) -> int:
    """A moment as a time; without a zone it counts as UTC."""
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return (aware - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def below_fetch_progress(time: Progress, fetch_progress: Progress, kind: TimeKind) -> BelowFetchProgress:
    """The refusal of a read at a time below F."""
    return BelowFetchProgress(
        f"a read at {format_time(time, kind)} is below fetch progress F = {format_time(fetch_progress, kind)}",
        hint="values below F may have been compacted; read at F or later",
        time=time,
        fetch_progress=fetch_progress,
    )


def _parse_text(text: str) -> int:
    folded = text.strip().lower().removeprefix("interval ")
    amount = Fraction(0)
    position = 0
    while position < len(folded):
        match = _PART.match(folded, position)
        if match is None:
            raise BadDuration(f"cannot read the duration {text!r}", hint=_EXAMPLES)
        number, word = match.groups()
        amount += Fraction(number) * _unit(word, text)
        position = match.end()
    if not folded:
        raise BadDuration("the duration is empty", hint=_EXAMPLES)
    if amount.denominator != 1:
        raise BadDuration(f"{text!r} is no whole number of microseconds", hint="round it to microseconds")
    return amount.numerator


def _unit(word: str, text: str) -> int:
    unit = _SHORT_UNITS.get(word, word.removesuffix("s"))
    if unit in _UNITS:
        return _UNITS[unit]
    if unit in ("month", "year"):
        raise BadDuration(f"a {unit} in {text!r} has no fixed length", hint='count in days, as in "30 days"')
    raise BadDuration(f"unknown unit {word!r} in {text!r}", hint=f"the units are {', '.join(_UNITS)}")
