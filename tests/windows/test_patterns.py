"""Which store a window has follows from its kind and its aggregates: it is said, with the reason, and it is so."""

from __future__ import annotations

from typing import Any, NamedTuple

import pyarrow as pa
import pytest

import millpond as mp
from millpond.code.windows import aggregates_of
from millpond.errors import BadOption
from millpond.ops.window import explain, shape_of
from millpond.stores.windows.aligned_windows import AlignedWindows
from millpond.stores.windows.counted import CountedWindows
from millpond.stores.windows.cut_sessions import CutSessions
from millpond.stores.windows.overlay import memory_rows
from millpond.stores.windows.panes import PaneStore
from millpond.stores.windows.sessions import SessionCells, SessionRows
from millpond.stores.windows.store import WindowStore
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.wire.windows import WindowSpec


def assign(time: int) -> list[tuple[int, int]]:
    return [(time // 30 * 30, time // 30 * 30 + 45)]


def ends(v: int) -> bool:
    return v > 3


def last(times: Any, v: Any) -> int:
    return v[len(v) - 1]


def add(kept: int, v: int) -> int:
    return kept + v


def merge(kept: int, other: int) -> int:
    return kept + other


ALIGNED = {
    "tumbling": mp.tumbling(10),
    "sliding": mp.sliding(20, 10),
    "everything": mp.everything(),
    "assigned": mp.windows(assign),
}
OF_KEYS = {
    "session": mp.session(10),
    "session column": mp.session(column="gap"),
    "session touching": mp.session(10, touching=True),
}
CUT = {
    "session longest": mp.session(10, longest=30),
    "session ends": mp.session(10, ends_when=ends),
    "counted": mp.counted(3),
    "counted or after": mp.counted(3, or_after=20),
}
WINDOWS = ALIGNED | OF_KEYS | CUT
NUMBERS = {
    "count": mp.count(),
    "count of texts": mp.count("s"),
    "total": mp.total("v"),
    "mean": mp.mean("w"),
    "smallest": mp.smallest("v"),
    "largest": mp.largest("w"),
    "top": mp.top(2, "v"),
    "fold": mp.fold(0, add, merge, "v"),
}
TEXTS = {"smallest of texts": mp.smallest("s"), "largest of texts": mp.largest("s")}
ROWS = {
    "median": mp.median("v"),
    "percentile": mp.percentile(0.9, "w"),
    "collect": mp.collect("s"),
    "latest": mp.latest("v"),
    "where_largest": mp.where_largest("v", "s"),
    "function": last,
}
AGGREGATES = NUMBERS | TEXTS | ROWS
VALUE = "v long, w double, s string, gap long"


def spec_of(window: str, aggregate: str, value: str | None = VALUE, pattern: Any = "") -> WindowSpec:
    aggregates = aggregates_of({"rows": mp.count(), "a": AGGREGATES[aggregate]})
    return WindowSpec("w", "k long", value, WINDOWS[window], aggregates, pattern)


def pattern_of(window: str, aggregate: str) -> tuple[str, str]:
    """By the rules of the docs, and words of the reason."""
    if window in CUT:
        return "AUR", "which rows belong together is known once they are all there"
    if aggregate in NUMBERS:
        return "RMW", "all aggregates can be kept as a few numbers a window"
    why = "a needs all rows of a window" if aggregate in ROWS else "a is of values without a fixed width"
    return ("AAR" if window in ALIGNED else "AUR"), why


class Explained(NamedTuple):
    store: str
    why: str
    way_in: str


def explained(spec: WindowSpec) -> Explained:
    store, why, way_in = explain(spec).splitlines()[-3:]
    return Explained(
        store.removeprefix("  store: ")[:3],
        why.removeprefix("  because "),
        way_in.removeprefix("  on the way in: "),
    )


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_what_the_store_is_and_why(window: str, aggregate: str) -> None:
    told = explained(spec_of(window, aggregate))
    pattern, why = pattern_of(window, aggregate)
    assert told.store == pattern
    assert why in told.why
    if pattern != "RMW":
        ends = "windows end for all keys at once" if window in ALIGNED else "windows end by themselves"
        assert told.why.endswith(ends)
    assert told.way_in.startswith("rows become cells" if pattern == "RMW" else "rows are sent as they are")


STORES = {
    "RMW": (PaneStore, SessionCells),
    "AAR": (AlignedWindows,),
    "AUR": (SessionRows, CutSessions, CountedWindows),
}


@pytest.mark.parametrize("window", WINDOWS)
def test_the_store_is_what_it_is_said_to_be(window: str) -> None:
    for aggregate in ("total", "largest of texts", "median"):
        spec = spec_of(window, aggregate)
        pattern, _ = pattern_of(window, aggregate)
        assert isinstance(WindowStore(shape_of(spec), memory_rows).windows, STORES[pattern])


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_hints_choose_where_there_is_a_choice(window: str, aggregate: str) -> None:
    chosen, _ = pattern_of(window, aggregate)
    for hint in ("rmw", "aar", "aur"):
        spec = spec_of(window, aggregate, pattern=hint)
        if hint == chosen.lower():
            assert explain(spec) == explain(spec_of(window, aggregate))
        elif hint == "rmw":
            with pytest.raises(BadOption, match='pattern="rmw" does not do here') as caught:
                explain(spec)
            assert caught.value.hint == 'pattern="aar" or "aur"'
        elif (hint == "aar") != (window in ALIGNED):
            with pytest.raises(BadOption, match=r"(end for all keys|each key has for itself)") as caught:
                explain(spec)
            assert caught.value.hint == ('pattern="aur"' if hint == "aar" else 'pattern="aar"')
        else:
            told = explained(spec)
            assert told.store == hint.upper()
            assert told.why.startswith("as was asked for, where rmw would do")
            assert told.way_in.startswith("rows are sent")


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_before_the_first_rows_what_types_cannot_change_is_said(window: str, aggregate: str) -> None:
    """Whether a value is a number matters to what can be numbers alone."""
    early = explain(spec_of(window, aggregate, value=None))
    if window in CUT or aggregate in ROWS or AGGREGATES[aggregate].name == "count":
        assert early == explain(spec_of(window, aggregate))
        return
    others = "AAR" if window in ALIGNED else "AUR"
    told = f"  store: RMW if all values are numbers, {others} if none is; the first rows tell their types"
    assert early.endswith(told)
    hinted = explain(spec_of(window, aggregate, value=None, pattern="rmw"))
    assert "RMW if all values are numbers, refused if none is" in hinted


def test_a_window_says_it_before_and_after_its_first_rows() -> None:
    with LocalPond(LossyFiles()) as pond:
        made = {
            name: pond.window(name, key="k long", window=mp.tumbling(10), aggregate={"a": aggregate})
            for name, aggregate in {"medians": mp.median("v"), "totals": mp.total("v")}.items()
        }
        assert "store: AAR (append, aligned read)" in made["medians"].explain()
        assert "store: RMW if all values are numbers, AAR if none is" in made["totals"].explain()
        for window in made.values():
            window.over(key="k", at="t")(pa.table({"k": [1], "t": [1], "v": [5]}), 0)
        assert "store: AAR (append, aligned read)" in made["medians"].explain()
        assert "store: RMW (read, modify, write)" in made["totals"].explain()


def test_when_windows_of_ones_own_fire_is_no_hint() -> None:
    with pytest.raises(BadOption, match="a window that your function gives fires at its end") as caught:
        mp.windows(assign, fires_at=lambda start, end: end)
    assert caught.value.option == "fires_at"
    assert "the end at which a window is to fire" in (caught.value.hint or "")
