"""Every window with every aggregate answers as the oracle does, epoch by epoch, also from what the disk kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest
from reopening import Build, Disturbed
from window_driving import Operator, Shape, check, draw

import millpond as mp
from millpond.pond.pond import Pond
from millpond.stores.windows.spilling import Spilling
from millpond.testing import LossyFiles
from millpond.testing import window_aggregates as agg
from millpond.testing import window_kinds as kinds
from millpond.testing.local import LocalPond
from millpond.testing.windows import WindowOracle


def assign(time: int) -> list[tuple[int, int]]:
    if time % 7 == 0:
        return []
    start = time // 30 * 30
    return [(start, start + 30), (start + 15, start + 70)]


def add(kept: int, v: int) -> int:
    return kept + v * v


def merge(kept: int, other: int) -> int:
    return kept + other


def spread(times: Any, v: Any, w: Any) -> float:
    best = 0.0
    for i in range(len(times)):
        best = best + v[i] * w[i] - times[i]
    return best


def span_of(times: Any, v: Any) -> int:
    return times[len(times) - 1] - times[0] + len(v)


WINDOWS: dict[str, tuple[Any, kinds.Kind]] = {
    "tumbling": (mp.tumbling(20), kinds.tumbling(20)),
    "tumbling with an offset": (mp.tumbling(20, offset=7), kinds.tumbling(20, 7)),
    "sliding": (mp.sliding(60, 20), kinds.sliding(60, 20)),
    "sliding over many panes": (mp.sliding(70, 3), kinds.sliding(70, 3)),
    "sliding unevenly": (mp.sliding(50, 15), kinds.sliding(50, 15)),
    "session": (mp.session(15), kinds.session(15)),
    "session touching": (mp.session(15, touching=True), kinds.session(15, touching=True)),
    "everything": (mp.everything(), kinds.everything()),
    "assigned": (mp.windows(assign), kinds.custom(assign)),
}
ALWAYS_ROWS: dict[str, tuple[Any, kinds.Kind]] = {
    "counted": (mp.counted(5), kinds.counted(5)),
    "counted or after": (mp.counted(5, or_after=40), kinds.counted(5, or_after=40)),
    "session cut": (mp.session(15, longest=40), kinds.session(15, longest=40)),
}
CELLS: tuple[dict[str, Any], dict[str, Any]] = (
    {
        "rows": mp.count(),
        "of_v": mp.count("v"),
        "total": mp.total("v"),
        "total_w": mp.total("w"),
        "mean": mp.mean("v"),
        "low": mp.smallest("w"),
        "high": mp.largest("v"),
        "top": mp.top(3, "v"),
    },
    {
        "rows": agg.count(),
        "of_v": agg.count("v"),
        "total": agg.total("v"),
        "total_w": agg.total("w"),
        "mean": agg.mean("v"),
        "low": agg.smallest("w"),
        "high": agg.largest("v"),
        "top": agg.top(3, "v"),
    },
)
WHOLE: tuple[dict[str, Any], dict[str, Any]] = (
    {
        "rows": mp.count(),
        "median": mp.median("v"),
        "p90": mp.percentile(0.9, "w"),
        "all": mp.collect("v"),
        "high": mp.largest("w"),
        "top": mp.top(2, "w"),
    },
    {
        "rows": agg.count(),
        "median": agg.median("v"),
        "p90": agg.percentile(0.9, "w"),
        "all": agg.collect("v"),
        "high": agg.largest("w"),
        "top": agg.top(2, "w"),
    },
)


def over(
    window: Any, aggregate: Mapping[str, Any], sources: Mapping[str, int], key_type: str = "long"
) -> Build:
    """Sources with their delays."""

    def build(pond: Pond) -> Mapping[str, Operator]:
        made = pond.window("w", key=f"key {key_type}", window=window, aggregate=aggregate)
        return {
            name: made.over(key="key", at="ts", delay=delay, name=name) for name, delay in sources.items()
        }  # type: ignore[misc]

    return build


def run(
    window: Any, kind: kinds.Kind, aggregates: tuple[dict[str, Any], dict[str, Any]], seed: int,
    shape: Shape | None = None, every: int = 0, key_type: str = "long", window_bytes: int | None = None,
    spilling: Spilling | None = None,
) -> None:  # fmt: skip
    ours, theirs = aggregates
    driven = Disturbed(
        over(window, ours, {"feed": 10}, key_type), every=every, window_bytes=window_bytes, spilling=spilling
    )
    oracle = WindowOracle(kind, theirs, sources={"feed": 10})
    check(driven.sources, oracle, draw(seed, shape))
    driven.pond.close()


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("aggregates", [CELLS, WHOLE], ids=["cells", "rows"])
def test_windows_answer_as_the_oracle(name: str, aggregates: Any) -> None:
    for seed in range(2):
        run(*WINDOWS[name], aggregates, seed)


def test_a_row_for_a_pane_that_was_empty_when_a_window_over_it_fired() -> None:
    run(*WINDOWS["sliding unevenly"], CELLS, 14, Shape(epochs=14, rows=100, disorder=60))


@pytest.mark.parametrize("name", ALWAYS_ROWS)
def test_windows_that_keep_rows(name: str) -> None:
    for seed in range(2):
        run(*ALWAYS_ROWS[name], CELLS, seed)
        run(*ALWAYS_ROWS[name], WHOLE, seed)


@pytest.mark.parametrize("name", [*WINDOWS, *ALWAYS_ROWS])
def test_what_the_disk_kept_goes_on(name: str) -> None:
    window = (WINDOWS | ALWAYS_ROWS)[name]
    run(*window, CELLS, 11, Shape(epochs=14), every=2)
    run(*window, WHOLE, 12, Shape(epochs=14), every=2)


@pytest.mark.parametrize("name", [*WINDOWS, *ALWAYS_ROWS])
@pytest.mark.parametrize("window_bytes", [0, pytest.param(20_000, marks=pytest.mark.long)])
def test_rows_on_disk(name: str, window_bytes: int) -> None:
    window = (WINDOWS | ALWAYS_ROWS)[name]
    run(*window, WHOLE, 13, Shape(epochs=14, rows=100), every=3, window_bytes=window_bytes)


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("window_bytes", [0, 20_000])
def test_cells_on_disk(name: str, window_bytes: int) -> None:
    run(
        *WINDOWS[name], CELLS, 14, Shape(epochs=14, rows=100, disorder=60), every=3, window_bytes=window_bytes
    )
    if name != "sliding over many panes":
        run(*WINDOWS[name], CELLS, 16, Shape(epochs=20, rows=200, keys="many"), window_bytes=window_bytes)


@pytest.mark.parametrize("name", ["tumbling", "session", "sliding"])
def test_cells_of_your_own_functions_on_disk(name: str) -> None:
    ours = {"folded": mp.fold(0, add, merge, "v"), "rows": mp.count()}
    theirs = {"folded": agg.user(0, add, merge, "v"), "rows": agg.count()}
    run(*WINDOWS[name], (ours, theirs), 53, every=3, window_bytes=0)


@pytest.mark.parametrize("name", ["tumbling", "session", "sliding"])
def test_keys_of_strings(name: str) -> None:
    for aggregates in (CELLS, WHOLE):
        run(*WINDOWS[name], aggregates, 21, Shape(key_type="string", keys="many"), every=3, key_type="string")
    shape = Shape(key_type="string", keys="many")
    run(*WINDOWS[name], CELLS, 22, shape, key_type="string", window_bytes=3_000)


@pytest.mark.parametrize("name", ["tumbling", "session", "sliding", "session cut"])
@pytest.mark.parametrize("keys", ["hot", pytest.param("many", marks=pytest.mark.long)])
def test_hot_and_many_keys(name: str, keys: Any) -> None:
    for aggregates in (CELLS, WHOLE):
        run(*(WINDOWS | ALWAYS_ROWS)[name], aggregates, 31, Shape(keys=keys, rows=300, disorder=60))


@pytest.mark.parametrize("name", ["tumbling", "session"])
@pytest.mark.parametrize("start", [-(2**63) + 1, 2**63 - 2000])
def test_the_ends_of_time(name: str, start: int) -> None:
    shape = Shape(start=start, silence=0.0, straggling=0.0, disorder=0, epochs=5)
    for aggregates in (CELLS, WHOLE):
        run(*WINDOWS[name], aggregates, 41, shape)


def of_all(times: Any, v: Any, w: Any) -> str:
    """A window with nulls in a column has None for each."""
    rows = zip(times, v, w, strict=True)
    return ", ".join(
        f"{int(at)} {None if v is None else int(v)} {None if w is None else float(w)}" for at, v, w in rows
    )


def test_functions_of_your_own() -> None:
    ours = {"folded": mp.fold(0, add, merge, "v"), "rows": mp.count()}
    theirs = {"folded": agg.user(0, add, merge, "v"), "rows": agg.count()}
    for name in ("tumbling", "sliding", "session"):
        run(*WINDOWS[name], (ours, theirs), 51, every=3)
    ours = {"spread": spread, "span": span_of}
    theirs = {
        "spread": agg.function(spread, "ts", "v", "w"),
        "span": agg.function(span_of, "ts", "v"),
    }
    for name in ("tumbling", "session"):
        run(*WINDOWS[name], (ours, theirs), 52, Shape(nulls=0.0), every=3)
        run(*WINDOWS[name], ({"of all": of_all}, {"of all": agg.function(of_all, "ts", "v", "w")}), 54)


@pytest.mark.parametrize("aggregates", [CELLS, WHOLE], ids=["cells", "rows"])
def test_a_window_longer_than_the_stream_fires_with_its_end(aggregates: Any) -> None:
    run(mp.tumbling(10**9), kinds.tumbling(10**9), aggregates, 55, Shape(epochs=4), every=2)


@pytest.mark.parametrize("aggregates", [CELLS, WHOLE], ids=["cells", "rows"])
def test_the_watermark_is_the_lowest_of_the_sources(aggregates: Any) -> None:
    ours, theirs = aggregates
    for name in ("tumbling", "session"):
        window, kind = WINDOWS[name]
        delays = {"left": 10, "right": 25}
        driven = Disturbed(over(window, ours, delays), every=5)
        oracle = WindowOracle(kind, theirs, sources=delays)
        epochs = draw(61, Shape(sources=("left", "right")))
        check(driven.sources, oracle, epochs, each_epoch=False)


@pytest.mark.parametrize("slide", [20, 5])
def test_a_pane_that_comes_late_is_in_windows_whose_panes_were_merged(slide: int) -> None:
    pond = LocalPond(LossyFiles())
    window = pond.window("w", key="key long", window=mp.sliding(60, slide), aggregate={"rows": mp.count()})
    operator = window.over(key="key")
    operator(pa.table({"key": [1, 1], "ts": [25, 62]}), 0)
    fired = operator(pa.table({"key": [1, 1], "ts": [45, 90]}), 1).to_pylist()
    expected = {start: sum(start <= t < start + 60 for t in (25, 62, 45)) for start in range(5, 31, slide)}
    if slide == 20:
        expected = {20: 3}
    assert {row["window_start"]: row["rows"] for row in fired} == expected
    pond.close()
