"""Windows that stay after their end fire again with each epoch that brings rows for them, as the oracle does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from firing import CELLS, WHOLE, WINDOWS, StayingPond, assign, table
from window_driving import Shape, check, difference, draw, oracle_rows, result_rows

import millpond as mp
from millpond.errors import BadDuration, BadOption, SchemaMismatch, WrongType
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.testing.windows import WindowOracle

LATE = Shape(straggling=0.25, epochs=10)

ROWS_LONG = pytest.param(WHOLE, marks=pytest.mark.long)


def run(name: str, aggregates: Any, seed: int, lateness: int, shape: Shape = LATE, every: int = 0) -> None:
    window, kind = WINDOWS[name]
    ours, theirs = aggregates
    driven = StayingPond(LossyFiles(), window, ours, every=every, lateness=lateness)
    driven.key_type = shape.key_type
    oracle = WindowOracle(kind, theirs, sources={"feed": 10}, lateness=lateness)
    check(driven.source(), oracle, draw(seed, shape))
    driven.close()
    assert fired_again(oracle) > 0, "no window fired again"


def fired_again(oracle: WindowOracle) -> int:
    """Of a key, results of a window that was sent before; of sessions, also what such a one has become."""
    fired = [row for _, answer in oracle.epochs["feed"].values() for row in answer.rows]
    spans = [(row["key"], row["window_start"], row["window_end"]) for row in fired]
    if not oracle.window.has_sessions:
        return len(spans) - len(set(spans))
    pairs = itertools.pairwise(sorted(spans))
    return sum(one[0] == other[0] and other[1] < one[2] for one, other in pairs)


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("aggregates", [CELLS, ROWS_LONG], ids=["cells", "rows"])
def test_windows_that_stay_answer_as_the_oracle(name: str, aggregates: Any) -> None:
    for seed, lateness in ((1, 30), (2, 200), (3, 1000)):
        run(name, aggregates, seed, lateness)


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("aggregates", [CELLS, ROWS_LONG], ids=["cells", "rows"])
def test_what_the_disk_kept_goes_on(name: str, aggregates: Any) -> None:
    run(name, aggregates, 11, 250, Shape(straggling=0.25, epochs=14), every=2)


@pytest.mark.parametrize("name", ["tumbling", "sliding", "session"])
@pytest.mark.parametrize("keys", ["hot", pytest.param("many", marks=pytest.mark.long)])
def test_hot_and_many_keys_of_strings(name: str, keys: Any) -> None:
    for aggregates in (CELLS, WHOLE):
        shape = Shape(keys=keys, rows=300, disorder=60, straggling=0.3, key_type="string")
        run(name, aggregates, 21, 150, shape, every=3)


@pytest.mark.parametrize("aggregates", [CELLS, WHOLE], ids=["cells", "rows"])
def test_open_windows_are_those_that_have_not_fired(aggregates: Any) -> None:
    for name, (window, kind) in WINDOWS.items():
        driven = StayingPond(LossyFiles(), window, aggregates[0], every=2, lateness=100)
        oracle = WindowOracle(kind, aggregates[1], sources={"feed": 10}, lateness=100)
        operator = driven.source()
        for epoch in draw(31, LATE):
            operator(epoch.table, epoch.number)
            oracle.epoch(epoch.number, oracle_rows(epoch.table))
            assert driven.pond is not None
            lines = difference(result_rows(driven.pond.window("w").now()), oracle.now())
            assert not lines, (name, lines)
        driven.close()


@pytest.mark.parametrize("aggregates", [CELLS, WHOLE], ids=["cells", "rows"])
def test_beyond_the_lateness_rows_are_late(aggregates: Any) -> None:
    driven = StayingPond(LossyFiles(), mp.tumbling(20), aggregates[0], lateness=30)
    operator = driven.source(delay=0)
    assert [row["rows"] for row in result_rows(operator(table((1, 5), (1, 25)), 0))] == [1]
    assert [row["rows"] for row in result_rows(operator(table((1, 6)), 1))] == [2]
    assert [row["window_end"] for row in result_rows(operator(table((1, 50)), 2))] == [40]
    # The first window went when the watermark came to 50; the second is there.
    rows = result_rows(operator(table((1, 7), (1, 26)), 3))
    assert [(row["window_end"], row["rows"]) for row in rows] == [(40, 2)]
    assert driven.pond is not None
    assert driven.pond.window("w").progress().late == {"feed": 1}
    assert [row["window_end"] for row in result_rows(operator.finish())] == [60]
    # What ended with the stream does not come back, however long it would have stayed.
    assert operator(table((1, 26), (1, 55)), 4).num_rows == 0
    driven.close()


def test_bad_input() -> None:
    pond = LocalPond(LossyFiles())

    def window(window: Any, lateness: Any) -> Any:
        return pond.window(
            "w", key="key long", window=window, aggregate={"rows": mp.count()}, lateness=lateness
        )

    for kind, lateness in (
        (mp.tumbling("1 minute"), 5),
        (mp.tumbling(20), "1 minute"),
        (mp.counted(5), 10),
        (mp.everything(), "1 minute"),
    ):
        with pytest.raises(BadOption) as caught:
            window(kind, lateness)
        assert caught.value.option == "lateness"
        assert caught.value.hint
    for lateness in (-1, "soon", 1.5):
        with pytest.raises(BadDuration):
            window(mp.tumbling(20), lateness)
    assert pond.windows() == {}
    window(mp.tumbling(20), 5)
    with pytest.raises(SchemaMismatch, match="lateness=5"):
        window(mp.tumbling(20), 6)
    pond.close()


def test_lateness_tells_the_kind_of_times() -> None:
    pond = LocalPond(LossyFiles())
    window = pond.window(
        "w", key="key long", window=mp.windows(assign), aggregate={"rows": mp.count()}, lateness="1 minute"
    )
    with pytest.raises(WrongType):
        window.over(key="key")(table((1, 5)), 0)
    pond.close()


@pytest.mark.parametrize("aggregates", [CELLS, WHOLE], ids=["cells", "rows"])
def test_the_watermark_is_the_lowest_of_the_sources(aggregates: Any) -> None:
    for name in ("tumbling", "session", "session cut"):
        window, kind = WINDOWS[name]
        delays = {"left": 10, "right": 25}
        driven = StayingPond(LossyFiles(), window, aggregates[0], every=5, lateness=150)
        driven.sources = dict(delays)
        operators = {source: driven.source(source, delay) for source, delay in delays.items()}
        oracle = WindowOracle(kind, aggregates[1], sources=delays, lateness=150)
        epochs = draw(61, Shape(sources=("left", "right"), straggling=0.25))
        check(operators, oracle, epochs, each_epoch=False)
        driven.close()


def test_explain_tells_when_it_fires() -> None:
    pond = LocalPond(LossyFiles())
    options: dict[str, Any] = {"window": mp.tumbling("1 minute"), "aggregate": {"rows": mp.count()}}
    often = pond.window("often", key="key long", lateness="2 seconds", every="10 seconds", **options)
    assert "fires: with each epoch that changes it, at most every 10 s, and again" in often.explain()
    assert "fires" not in pond.window("once", key="key long", **options).explain()
    pond.close()
