"""What nobody should do, or all at once: values that nothing can hold, names that are taken, operators that share a name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import millpond as mp
from millpond.errors import BadOption, EpochChanged, ProgramFailed, Rejected, WrongType
from millpond.pond.program import Program
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

FAR = 1 << 61
HALF = "\ud800"


@mp.program(lanes=2)
class Odd:
    counts: mp.Partitioned[mp.Map[int, int]]
    notes: mp.Partitioned[mp.Map[str, str]]
    lists: mp.Partitioned[mp.Map[int, list[str]]]
    grid: mp.Partitioned[mp.Matrix]
    sums: mp.Partial[mp.Vector]

    def put(self, key: int, by: int):
        self.counts[key] = by

    def add(self, key: int, by: int) -> int:
        self.counts[key] += by
        return self.counts[key]

    def far_index(self, key: int):
        self.sums[key * key] = 1.0

    def far_column(self, key: int):
        self.grid[key, key * 8] = 1.0

    def far_row(self, key: int):
        self.grid[key * 8, 1] = 1.0

    def far_entries(self, key: int):
        self.grid[key].assign({key * 8: 1.0})

    def half_value(self, key: int):
        self.notes[str(key)] = HALF

    def half_key(self, key: int):
        self.notes[str(key) + HALF] = "x"

    def half_item(self, key: int):
        self.lists[key] = [HALF]

    def no_key(self, key: int) -> int:
        there = self.counts[key]
        other = None if there == 0 else there
        return self.counts[other]

    def free_no_key(self, key: int | None, by: int) -> int:
        other = None if by > 1 else key
        return self.counts[other]

    def complain(self, key: int, error: str, _once: str = "", _call: int = 1, _result: int = 2) -> str:
        if key < 0:
            mp.reject("below 0")
        self.counts[key] += _call + _result
        return error + _once


@pytest.fixture(scope="module")
def odd() -> Iterator[Program]:
    with LocalPond(LossyFiles(1), containers=2, slices=8) as pond:
        yield pond.program("odd", Odd)
        pond.validate()


def line_of(method: str, text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if f"def {method}(" in line)
    return next(n for n, line in enumerate(lines) if n > start and text in line) + 1


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("far_index", "self.sums"),
        ("far_column", "self.grid"),
        ("far_row", "self.grid"),
        ("far_entries", "self.grid"),
        ("half_value", "self.notes"),
        ("half_key", "self.notes"),
        ("half_item", "self.lists"),
    ],
)
def test_what_nothing_can_hold_names_row_method_and_line(odd: Program, method: str, text: str) -> None:
    before = odd.progress().seen
    with pytest.raises((OverflowError, UnicodeEncodeError)):
        getattr(mp.plain(Odd), method)(FAR)
    for call in (lambda: odd.ask(method, FAR), lambda: odd.call(method)(pa.table({"key": [FAR]}), 0)):
        with pytest.raises(ProgramFailed, match=r"row 0: (OverflowError|UnicodeEncodeError)") as caught:
            call()
        assert (caught.value.method, caught.value.line) == (method, line_of(method, text))
    assert odd.progress().seen == before


def test_a_key_that_is_none_in_the_middle_of_a_call_says_where(odd: Program) -> None:
    odd.put(1, 1)
    keys = pa.table({"key": [1, 77]})
    for call, row in ((lambda: odd.no_key(77), 0), (lambda: odd.call("no_key", into="x")(keys, 0), 1)):
        with pytest.raises(ProgramFailed, match="a key is None") as caught:
            call()
        assert (caught.value.line, caught.value.row) == (line_of("no_key", "self.counts[other]"), row)
    with pytest.raises(ProgramFailed, match="a key is None") as caught:
        odd.free_no_key(1, 2)
    assert caught.value.line == line_of("free_no_key", "self.counts[other]")


def test_arguments_that_do_not_fit_name_their_column(odd: Program) -> None:
    put = odd.call("put", name="misfits")
    for values in (pa.array([1.5]), pa.array([2**64 - 1], pa.uint64())):
        with pytest.raises(WrongType, match="'by'"):
            put(pa.table({"key": [1], "by": values}), 0)
    with pytest.raises(BadOption, match="surrogates"):
        odd.complain(1, HALF)


def test_parameters_may_have_any_name_in_direct_calls(odd: Program) -> None:
    assert odd.complain(500, "a", "b", 3, 4) == "ab"
    assert odd.ask("complain", 500, "a", "b", 1, 1, idempotency_key="k") == "ab"
    assert odd.ask("complain", 500, "a", "b", 1, 1, idempotency_key="k") == "ab"
    with pytest.raises(Rejected, match="below 0"):
        odd.complain(-1, "a")
    assert odd.entries("counts")[500] == 9


def test_operators_are_of_their_methods(odd: Program) -> None:
    """The rows of two methods may be the same: no call is taken for the replay of another method's."""
    rows = pa.table({"key": [101, 102], "by": [10, 20]})
    odd.call("put")(rows, 0)
    assert odd.call("add", into="now")(rows, 0)["now"].to_pylist() == [20, 40]
    odd.call("put", name="shared")(rows, 0)
    with pytest.raises(EpochChanged, match="'shared'") as caught:
        odd.call("add", into="now", name="shared")(rows, 0)
    assert "another operator has this name" in caught.value.hint


@pytest.mark.parametrize(("first", "later"), [(None, "now"), ("now", "then")])
def test_what_was_not_kept_is_not_given_as_nothing(odd: Program, first: str | None, later: str) -> None:
    name, rows = f"kept_{later}", pa.table({"key": [7, 8], "by": [1, 1]})
    odd.call("add", into=first, name=name)(rows, 0)
    before = odd.entries("counts")
    with pytest.raises(EpochChanged, match=f"and not {later} int64"):
        odd.call("add", into=later, name=name)(rows, 0)
    assert odd.call("add", name=name)(rows, 0).equals(rows), "who wants nothing gets it"
    assert odd.entries("counts") == before
    given = odd.call("add", into=later, name=name)(rows, 1)
    assert given[later].to_pylist() == [before[7] + 1, before[8] + 1]
    assert odd.call("add", into=later, name=name)(rows, 1).equals(given), "a replay"


def test_calls_count_as_load_of_their_slices() -> None:
    """Also where nothing is returned, and where they only read: balancing goes by it."""
    with LocalPond(LossyFiles(1), containers=1, slices=4) as pond:
        program = pond.program("odd", Odd)
        program.call("put")(pa.table({"key": [1, 2, 3], "by": [1, 1, 1]}), 0)
        slices: dict[int, dict[str, Any]] = pond.metrics()["slices"]
        assert sum(each["rows_updated"] for each in slices.values()) == 3
        assert sum(each["rows_fetched"] for each in slices.values()) == 0
        program.ask("free_no_key", 1, 1)
        slices = pond.metrics()["slices"]
        assert sum(each["rows_fetched"] for each in slices.values()) > 0
