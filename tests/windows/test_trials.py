"""An epoch is tried before it is decided, on a copy of what it touches: the trial gives what the epoch gives, and costs as little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import millpond as mp
from millpond.code.windows import Aggregate, WindowCode
from millpond.durable.files import OsFiles
from millpond.schema import KEY, TIME
from millpond.stores.keys import Keys
from millpond.stores.windows import rowlog
from millpond.stores.windows.session_index import SessionIndex
from millpond.stores.windows.shape import CUT, END, START, WindowShape
from millpond.stores.windows.spilling import Spilling
from millpond.stores.windows.store import Portions, WindowStore
from millpond.times import TIME_MAX


def add(kept, v):  # type: ignore[no-untyped-def]
    return kept + v


def merge(kept, other):  # type: ignore[no-untyped-def]
    return kept + other


CELLS: dict[str, Aggregate] = {"n": Aggregate("count"), "sum": mp.fold(0, add, merge, "v")}
ROWS: dict[str, Aggregate] = {"m": Aggregate("median", column="v"), "n": Aggregate("count")}
KINDS = {
    "tumbling": WindowCode("tumbling", size=20),
    "sliding": WindowCode("sliding", size=60, slide=20),
    "sliding far": WindowCode("sliding", size=200, slide=10),
    "session": WindowCode("session", size=15),
    "cut": WindowCode("session", size=15, longest=40),
    "counted": WindowCode("counted", size=3, or_after=30),
}
CASES = [
    # Of the two that slide, the one whose windows are of many panes.
    pytest.param(kind, cells, options, marks=[pytest.mark.long] if is_long else [])
    for kind in KINDS
    for cells in (True, False)
    for options in ({}, {"lateness": 25}, {"updates": True})
    for is_long in [kind == "sliding" or (kind == "sliding far" and not cells and bool(options))]
    if not (cells and kind in ("cut", "counted")) and not (kind == "counted" and "lateness" in options)
]


def portions_of(shape: WindowShape, keys: np.ndarray[Any, Any], times: np.ndarray[Any, Any]) -> Portions:
    """A row of each of these keys, whose value is the time."""
    columns: dict[str, Any] = {KEY: keys, TIME: times, START: times, END: times + 15, "v": times}
    if shape.window.kind != "session" and shape.layout is not None:
        columns[START] = times // shape.pane * shape.pane
    columns[CUT] = times % 7 == 0
    if shape.layout is not None:
        cells = shape.layout.fold(np.arange(len(keys)), len(keys), [pa.array(times)])
        columns |= dict(zip(shape.layout.schema.names, shape.layout.to_arrow(cells), strict=True))
    batch = pa.RecordBatch.from_arrays(
        [pa.array(columns[n]) for n in shape.staged.names], schema=shape.staged
    )
    return [(Keys.from_arrow(batch.column(0)), batch)] if len(keys) else []


def store_of(path: Path, kind: str, cells: bool, budget: int, **options: Any) -> tuple[WindowStore, Spilling]:
    shape = WindowShape("k long", "v long", KINDS[kind], CELLS if cells else ROWS, **options)
    spilling = Spilling(OsFiles(), str(path / "scratch"), budget)
    # Of one slice: a store has the keys of no other, and by its slice its sessions have their ids.
    store = WindowStore(shape, spilling.new_rows, 1, spilling.new_cells, spilling.new_outputs())
    return store, spilling


def in_order(rows: Any) -> list[str]:
    table = rows if isinstance(rows, pa.Table) else rows.table()
    return sorted(map(repr, table.to_pylist()))


@pytest.mark.parametrize("budget", [0, pytest.param(1 << 30, marks=pytest.mark.long)], ids=["disk", "memory"])
@pytest.mark.parametrize(("kind", "cells", "options"), CASES)
def test_a_trial_gives_what_the_epoch_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, cells: bool, options: Any, budget: int
) -> None:
    monkeypatch.setattr(rowlog, "SHARE_BYTES", 2048)
    store, spilling = store_of(tmp_path, kind, cells, budget, **options)
    chance = np.random.default_rng(3)
    for epoch in range(14):
        rows = int(chance.integers(0, 40))
        keys, times = chance.integers(0, 25, rows), np.sort(10 * epoch + chance.integers(0, 60, rows))
        times = np.maximum(times, 10 * epoch)
        epoch_is = portions_of(store.shape, keys, times), 10 * epoch, epoch == 13, "", epoch % 3 == 0
        before = in_order(store.open(""))
        tried = in_order(store.trial(*epoch_is))
        assert in_order(store.open("")) == before, "nothing has changed"
        store.validate()
        assert tried == in_order(store.run(*epoch_is))
        spilling.make_room(store)
        store.validate()
    store.close()


@pytest.mark.parametrize("cells", [True, False], ids=["cells", "rows"])
@pytest.mark.parametrize("kind", ["tumbling", "sliding far", "session", "cut", "counted"])
def test_a_trial_copies_no_more_than_its_epoch_touches(tmp_path: Path, kind: str, cells: bool) -> None:
    if cells and kind in ("cut", "counted"):
        pytest.skip("their rows are kept")
    store, _ = store_of(tmp_path, kind, cells, 1 << 30)
    keys = np.arange(50_000)
    store.run(portions_of(store.shape, keys, np.zeros(len(keys), np.int64)), -1, False, "")
    fork = store.windows.fork(Keys.from_longs(keys[:10]), -1, False, False)
    fork.insert(portions_of(store.shape, keys[:10], np.full(10, 5)))
    assert list(fork.fire(-1, closes=False)) == []
    assert fork.nbytes < 32_000
    assert store.windows.nbytes > 1_000_000


def test_the_first_session_is_known_whatever_comes_and_goes() -> None:
    index = SessionIndex("i64")
    chance = np.random.default_rng(5)
    for step in range(200):
        keys, starts = chance.integers(0, 60, 20), 5 * step + chance.integers(0, 80, 20)
        merged = index.join(Keys.from_longs(keys), starts, starts + 12)
        assert np.isin(merged.roots, index.all()).all()
        nodes = index.all()
        assert index.oldest == index.starts[nodes].min()
        ended = index.ended(5 * step)
        assert sorted(ended.tolist()) == nodes[index.ends[nodes] <= 5 * step].tolist()
        some = np.arange(10)
        mine = np.isin(index.keys(nodes).longs, some)
        assert sorted(index.of(Keys.from_longs(some)).tolist()) == nodes[mine].tolist()
        index.remove(ended)
        index.validate()
    index.remove(index.all())
    assert index.oldest == TIME_MAX
