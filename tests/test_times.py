from __future__ import annotations

import datetime
import math
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.errors import BadDuration, NullTime, WrongType
from millpond.times import MICROS, TIME_MAX, TIME_MIN, delay_for, format_time, parse_duration, time_column


@pytest.mark.parametrize(
    ("duration", "expected"),
    [
        ("5 seconds", 5 * MICROS),
        ("0 seconds", 0),
        ("1 second", MICROS),
        ("1 minute 30 seconds", 90 * MICROS),
        ("  2  HOURS 1 Minute ", 7_260 * MICROS),
        ("interval 1 day", 86_400 * MICROS),
        ("1 week", 7 * 86_400 * MICROS),
        ("250 milliseconds", 250_000),
        ("7 microseconds", 7),
        ("1.5 seconds", 1_500_000),
        ("0.000001 seconds", 1),
        ("5s", 5 * MICROS),
        ("10ms 3us", 10_003),
        ("1h30min", 5_400 * MICROS),
        ("1 d", 86_400 * MICROS),
        (datetime.timedelta(days=1, microseconds=1), 86_400 * MICROS + 1),
        (datetime.timedelta.max, 86_399_999_999_999_999_999),
        (pd.Timedelta(1, "min"), 60 * MICROS),
        (0, 0),
        (5, 5),
        (TIME_MAX, TIME_MAX),
        (np.int32(7), 7),
    ],
)
def test_durations(duration: Any, expected: int) -> None:
    if expected > TIME_MAX:
        with pytest.raises(BadDuration, match="too long"):
            parse_duration(duration)
    else:
        parsed = parse_duration(duration)
        assert parsed == expected
        assert type(parsed) is int


@pytest.mark.parametrize(
    ("duration", "message", "hint"),
    [
        ("", "empty", "5 seconds"),
        ("  ", "empty", "5 seconds"),
        ("5", "cannot read", "5 seconds"),
        ("seconds", "cannot read", "5 seconds"),
        ("-5 seconds", "cannot read", "5 seconds"),
        ("5 seconds ago!", "cannot read", "5 seconds"),
        ("5 fortnights", "unknown unit 'fortnights'", "units are microsecond"),
        ("1 month", "no fixed length", "30 days"),
        ("2 years", "no fixed length", "30 days"),
        ("0.0000001 seconds", "whole number of microseconds", "round"),
        ("9999999999999 weeks", "too long", "2**63"),
        (-1, "negative", "from 0"),
        (2**63, "too long", "2**63"),
        (datetime.timedelta(microseconds=-1), "negative", "from 0"),
        (pd.Timedelta(1, "ns"), "whole number of microseconds", "round"),
        (True, "not a duration", "5 seconds"),
        (1.5, "not a duration", "5 seconds"),
        (None, "not a duration", "5 seconds"),
        (b"5 seconds", "not a duration", "5 seconds"),
    ],
)
def test_bad_durations(duration: Any, message: str, hint: str) -> None:
    with pytest.raises(BadDuration) as caught:
        parse_duration(duration)
    assert message in caught.value.message
    assert hint in caught.value.hint


@given(st.timedeltas(datetime.timedelta(0), datetime.timedelta(days=100_000_000)))
def test_durations_by_parts(duration: datetime.timedelta) -> None:
    text = f"{duration.days} days {duration.seconds} seconds {duration.microseconds} microseconds"
    assert parse_duration(text) == parse_duration(duration)


@given(st.text(max_size=20))
def test_any_text_is_a_duration_or_bad(text: str) -> None:
    try:
        assert parse_duration(text) >= 0
    except BadDuration as error:
        assert error.hint


def test_delays_fit_the_kind_of_time() -> None:
    assert delay_for("timestamp", "5 seconds") == 5 * MICROS
    assert delay_for("timestamp", datetime.timedelta(seconds=5)) == 5 * MICROS
    assert delay_for("long", 5) == 5
    for kind in ("timestamp", "long"):
        assert delay_for(kind, "0 seconds") == 0
        assert delay_for(kind, 0) == 0
    with pytest.raises(BadDuration, match="timestamps, but the delay 5 has no unit"):
        delay_for("timestamp", 5)
    with pytest.raises(BadDuration, match="logical, but the delay '5 seconds' is a duration"):
        delay_for("long", "5 seconds")


MOMENT = datetime.datetime(2024, 5, 1, 12, 0, 0, tzinfo=datetime.UTC)
MOMENT_US = 1_714_564_800 * MICROS


@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Tokyo", "-05:00"])
@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_timestamps_of_any_unit_and_zone(unit: str, zone: str | None) -> None:
    naive = pa.array([MOMENT_US // MICROS]).cast(pa.timestamp("s"))
    column = naive.cast(pa.timestamp(unit)).view(pa.timestamp(unit, tz=zone))
    times, kind = time_column(column, "ts")
    assert (times.tolist(), times.dtype.name, kind) == ([MOMENT_US], "int64", "timestamp")


@pytest.mark.parametrize("type_", [pa.date32(), pa.date64()])
def test_dates(type_: pa.DataType) -> None:
    times, kind = time_column(pa.array([datetime.date(1969, 12, 31)], type_), "day")
    assert (times.tolist(), kind) == ([-86_400 * MICROS], "timestamp")


@pytest.mark.parametrize("type_", [pa.int8(), pa.uint8(), pa.int16(), pa.int32(), pa.int64(), pa.uint64()])
def test_logical_times(type_: pa.DataType) -> None:
    times, kind = time_column(pa.array([0, 7], type_), "n")
    assert (times.tolist(), times.dtype.name, kind) == ([0, 7], "int64", "long")


@pytest.mark.parametrize("type_", [pa.int64(), pa.timestamp("us"), pa.timestamp("us", tz="UTC")])
def test_the_whole_range_of_times(type_: pa.DataType) -> None:
    times, _ = time_column(pa.array([TIME_MIN, -1, 0, TIME_MAX]).view(type_), "t")
    assert times.tolist() == [TIME_MIN, -1, 0, TIME_MAX]


def test_slices_chunks_and_dictionaries() -> None:
    assert time_column(pa.array([1, 2, 3]).slice(1), "t")[0].tolist() == [2, 3]
    assert time_column(pa.chunked_array([[1], [], [2, 3]]), "t")[0].tolist() == [1, 2, 3]
    assert time_column(pa.array([5, 5]).dictionary_encode(), "t")[0].tolist() == [5, 5]
    assert time_column(pa.array([], pa.timestamp("ns")), "t")[0].tolist() == []


def test_times_are_not_copied_where_they_fit() -> None:
    array = pa.array([MOMENT_US]).view(pa.timestamp("us", tz="UTC"))
    assert time_column(array, "ts")[0].ctypes.data == array.buffers()[1].address


def test_null_times_are_counted() -> None:
    with pytest.raises(NullTime, match="'ts' is null in 2 of 3 rows") as caught:
        time_column(pa.chunked_array([[None, 1], [None]], pa.int64()), "ts")
    assert caught.value.attributes() == {"column": "ts", "rows": 2}
    assert caught.value.hint


def test_null_times_in_a_dictionary_are_counted() -> None:
    with pytest.raises(NullTime):
        time_column(pa.array([1, None]).dictionary_encode(), "ts")


@pytest.mark.parametrize(
    "column",
    [pa.array([1.0]), pa.array(["2024-05-01"]), pa.array([True]), pa.array([datetime.time(1)]), pa.array([], pa.null())],
)  # fmt: skip
def test_columns_that_hold_no_times(column: pa.Array) -> None:
    with pytest.raises(WrongType, match="the time column 'ts' is") as caught:
        time_column(column, "ts")
    assert caught.value.attributes()["column"] == "ts"
    assert "cast" in caught.value.hint


@pytest.mark.parametrize(
    "column",
    [
        pa.array([MOMENT_US * 1000 + 1]).view(pa.timestamp("ns")),
        pa.array([2**62]).view(pa.timestamp("s")),
        pa.array([2**63], pa.uint64()),
        pa.array([2**31 - 1], pa.int32()).view(pa.date32()),
    ],
)
def test_times_that_do_not_fit(column: pa.Array) -> None:
    with pytest.raises(WrongType, match="not all its values fit"):
        time_column(column, "ts")


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (MOMENT_US, "timestamp", "2024-05-01T12:00:00Z"),
        (MOMENT_US + 1, "timestamp", "2024-05-01T12:00:00.000001Z"),
        (-1, "timestamp", "1969-12-31T23:59:59.999999Z"),
        (0, "timestamp", "1970-01-01T00:00:00Z"),
        (0, "long", "0"),
        (TIME_MIN, "long", str(TIME_MIN)),
        (TIME_MIN, "timestamp", f"{TIME_MIN} us"),
        (TIME_MAX, "timestamp", "294247-01-10T04:00:54.775807Z"),
        (-math.inf, "timestamp", "-inf"),
        (math.inf, "timestamp", "+inf"),
        (-math.inf, "long", "-inf"),
        (math.inf, "long", "+inf"),
    ],
)
def test_format_time(value: float, kind: Any, expected: str) -> None:
    assert format_time(value, kind) == expected


@given(st.datetimes(timezones=st.just(datetime.UTC)))
def test_format_time_is_iso(moment: datetime.datetime) -> None:
    micros = (moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)) // datetime.timedelta(
        microseconds=1
    )
    assert datetime.datetime.fromisoformat(format_time(micros, "timestamp")) == moment
