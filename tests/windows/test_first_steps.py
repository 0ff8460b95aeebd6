"""What a newcomer meets: a first window that works as it is written, and mistakes that are told with the way out."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import millpond as mp
from millpond.errors import (
    BadOption,
    BadRule,
    EpochOutOfOrder,
    SchemaMismatch,
    UnknownResident,
    WrongColumn,
    WrongType,
)
from millpond.pond.pond import Pond
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.times import format_duration, parse_duration

LOGICAL = pa.table({"user": ["ann", "bob", "ann"], "ts": [1, 2, 30], "ms": [10, 5, 7]})
STAMPS = [datetime(2026, 1, 1, 12, 0, second, tzinfo=UTC) for second in (1, 2, 30)]
STAMPED = LOGICAL.set_column(1, "ts", pa.array(STAMPS, pa.timestamp("us", tz="UTC")))


@pytest.fixture
def pond() -> Iterator[Pond]:
    with LocalPond(LossyFiles()) as pond:
        yield pond


def views(pond: Pond, window: Any = None, **options: Any) -> Any:
    options = {"aggregate": {"views": mp.count()}, **options}
    return pond.window("views", key="user string", window=window or mp.tumbling(10), **options)


def test_an_aggregate_without_a_column_is_of_the_only_one(pond: Pond) -> None:
    window = views(pond, aggregate={"ms": mp.total(), "most": mp.largest()}, value="ms long")
    fired = window.over(key="user", at="ts")(LOGICAL, 0).sort_by("user").to_pylist()
    assert [(row["user"], row["ms"], row["most"]) for row in fired] == [("ann", 10, 10), ("bob", 5, 5)]


@pytest.mark.parametrize("value", [None, "ms double", "ms double, more string"])
def test_a_function_of_its_own_reads_the_columns_that_it_names(pond: Pond, value: str | None) -> None:
    def spread(times: Any, ms: Any) -> float:
        return ms[len(ms) - 1] - ms[0]

    source = views(pond, mp.session(40), aggregate={"spread": spread}, value=value).over(key="user", at="ts")
    source(LOGICAL.append_column("more", pa.array(["a", "b", "c"])), 0)
    fired = source.finish().sort_by("user").to_pylist()
    assert [(row["user"], row["spread"]) for row in fired] == [("ann", -3), ("bob", 0)]


def test_an_aggregate_without_a_column_is_told_which_there_are(pond: Pond) -> None:
    with pytest.raises(WrongColumn, match="names no column") as caught:
        views(pond, aggregate={"ms": mp.total()}).over(key="user", at="ts")(LOGICAL, 0)
    assert 'mp.total("ms")' in str(caught.value.hint).replace("'", '"')
    with pytest.raises(BadOption, match="of which column"):
        pond.window("two", window=mp.tumbling(5), aggregate={"ms": mp.total()}, value="ms long, x long")


def test_an_aggregate_of_a_column_that_value_does_not_have_is_refused_at_once(pond: Pond) -> None:
    with pytest.raises(WrongColumn, match="no column 'cost'") as caught:
        views(pond, aggregate={"cost": mp.total("cost")}, value="ms long")
    assert caught.value.available == ["ms"]
    assert pond.windows() == {}


@pytest.mark.parametrize("aggregate", [mp.count, mp.total, mp.mean, mp.median])
def test_an_aggregate_that_was_not_called(pond: Pond, aggregate: Any) -> None:
    with pytest.raises(BadOption, match=f"mp.{aggregate.__name__} was not called"):
        views(pond, aggregate={"views": aggregate})


def test_a_fold_of_texts_is_told_what_to_do_instead() -> None:
    with pytest.raises(BadRule) as caught:
        mp.fold("", lambda kept, page: kept + page, lambda kept, other: kept + other, "page")
    assert "def rule(times" in str(caught.value.hint)


@pytest.mark.parametrize("window", [mp.tumbling, mp.session])
def test_durations_that_do_not_go_with_the_times(pond: Pond, window: Any) -> None:
    with pytest.raises(
        WrongType, match="durations of window 'views' are integers, and the times are timest"
    ) as it:
        views(pond, window(60)).over(key="user", at="ts")(STAMPED, 0)
    assert '"10 minutes"' in str(it.value.hint)
    pond.forget(pond.window("views"))
    with pytest.raises(WrongType, match="are texts with a unit, and the times are integers"):
        views(pond, window("1 minute")).over(key="user", at="ts")(LOGICAL, 0)


def test_a_name_that_is_taken_says_how_to_drop_what_has_it(pond: Pond) -> None:
    views(pond, mp.tumbling("5 minutes"))
    with pytest.raises(SchemaMismatch, match=r"tumbling\(5 minutes\)") as caught:
        views(pond, mp.tumbling("90 seconds"))
    assert "pond.forget(pond.window('views'))" in str(caught.value.hint)
    pond.forget(pond.window("views"))
    assert (
        repr(views(pond, mp.tumbling("90 seconds"))) == "<window views: tumbling(90 seconds) by user string>"
    )
    with pytest.raises(UnknownResident) as unknown:
        pond.window("nowhere")
    assert "views" in str(unknown.value.hint)


def test_a_key_of_rows_whose_window_has_none(pond: Pond) -> None:
    window = pond.window("all", window=mp.tumbling(10), aggregate={"views": mp.count()})
    with pytest.raises(BadOption, match="is not by key") as caught:
        window.over(key="user", at="ts")
    assert caught.value.option == "key"
    assert window.over(at="ts")(LOGICAL, 0)["views"].to_pylist() == [2]


def test_epochs_begin_with_0(pond: Pond) -> None:
    source = views(pond).over(key="user", at="ts")
    with pytest.raises(EpochOutOfOrder) as caught:
        source(LOGICAL, 1)
    assert "begin with 0" in str(caught.value.hint)


@pytest.mark.parametrize("keys", [[1], "ann", [("ann", 1)]])
def test_keys_that_are_none(pond: Pond, keys: Any) -> None:
    window = views(pond)
    window.over(key="user", at="ts")(LOGICAL, 0)
    with pytest.raises((BadOption, WrongType)) as caught:
        window.now(keys)
    assert caught.value.hint
    assert window.now(["ann"]).num_rows == 1


@pytest.mark.parametrize("make", [lambda: mp.session(5, ends_when="what"), lambda: mp.windows(3)])
def test_what_is_no_function_is_told_what_to_give(make: Any) -> None:
    with pytest.raises(BadOption, match=r"is no .* function") as caught:
        make()
    assert caught.value.hint == "give a plain Python function"  # no rule of Millpond's will do


def test_what_a_pond_holds_is_shown_by_its_name(pond: Pond) -> None:
    join = pond.join("offers", key="id long", left="name string", right="bid long", window=mp.tumbling(10))
    assert repr(pond) == f"<pond at {pond.address}>"
    assert repr(join) == f"<{join.explain().splitlines()[0]}>"
    assert "offers" in repr(join)
    assert repr(pond.dedup("once", key="id long")) == "<dedup once by id long>"


def test_explain_says_it_in_whole_sentences(pond: Pond) -> None:
    window = views(pond, aggregate={"a": mp.median("ms"), "b": mp.collect("ms")}, value="ms long")
    assert "a, b need all rows" in window.explain()


@pytest.mark.parametrize(
    "text", ["1 microsecond", "1500 milliseconds", "90 seconds", "1 minute", "36 hours", "2 weeks"]
)
def test_durations_are_shown_as_they_are_read(text: str) -> None:
    assert format_duration(parse_duration(text)) == text


def test_no_module_takes_the_place_of_a_function() -> None:
    """A submodule that is imported becomes an attribute of its package, whatever that had of its name."""
    packages = {path.stem for path in Path(mp.__file__).parent.iterdir() if not path.name.startswith("_")}
    assert not packages.intersection(mp.__all__)
