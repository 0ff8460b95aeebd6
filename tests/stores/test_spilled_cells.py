"""Windows whose cells are more than memory may hold: what stays in memory, what they answer, and what the disk keeps."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import millpond as mp
from millpond.code.windows import Aggregate, WindowCode
from millpond.durable.files import AnyBuffer, OsFiles
from millpond.errors import CorruptFile, RuleFailed
from millpond.private import AnyPath
from millpond.stores.keys import Keys
from millpond.stores.windows.cellruns import CellRuns
from millpond.stores.windows.celltable import CellTable
from millpond.stores.windows.panes import PaneStore
from millpond.stores.windows.sessions import SessionCells
from millpond.stores.windows.shape import WindowShape
from millpond.stores.windows.spilling import Spilling
from millpond.stores.windows.store import WindowStore

MB = 1 << 20
TUMBLING = WindowCode("tumbling", size=1000)
SLIDING = WindowCode("sliding", size=1000, slide=250)
SESSION = WindowCode("session", size=100)


def shape_of(window: WindowCode) -> WindowShape:
    return WindowShape("k long", "v long", window, {"n": Aggregate("count"), "sum": Aggregate("total", "v")})


def portion(
    shape: WindowShape, keys: Sequence[int], times: Sequence[int]
) -> list[tuple[Keys, pa.RecordBatch]]:
    """A row of each key, whose value is the key."""
    assert shape.layout is not None
    own, at = np.array(keys, np.int64), np.array(times, np.int64)
    cells = shape.layout.fold(np.arange(len(own)), len(own), [pa.array(own)])
    if shape.window.kind == "session":
        spans = [at, at + shape.window.size]
    else:
        spans = [at // shape.pane * shape.pane]
    columns = [pa.array(own), *map(pa.array, spans), *shape.layout.to_arrow(cells)]
    batch = pa.RecordBatch.from_arrays(columns, schema=shape.staged)
    return [(Keys.from_arrow(batch.column(0)), batch)]


def sums(table: pa.Table) -> dict[tuple[int, int, int], tuple[int, int]]:
    rows = table.to_pylist()
    answers = {(r["window_start"], r["window_end"], r["k"]): (r["n"], r["sum"]) for r in rows}
    assert len(answers) == len(rows), "a window of a key fires once"
    return answers


@pytest.mark.parametrize("window", [TUMBLING, SESSION], ids=["tumbling", "session"])
def test_a_million_keys_in_a_small_budget(window: WindowCode, tmp_path: Path) -> None:
    budget = 20 * MB
    spilling = Spilling(OsFiles(), str(tmp_path / "scratch"), budget)
    shape = shape_of(window)
    store = WindowStore(shape, spilling.new_rows, 1, spilling.new_cells)
    keys = np.random.default_rng(1).permutation(1_000_000)
    most = 0
    for number, some in enumerate([*np.split(keys, 40), *np.split(keys, 40)[:20]]):
        store.run(portion(shape, some, np.full(len(some), number)), -1, closes=False, time_kind="long")
        spilling.relieve(store.spillable)
        most = max(most, spilling.memory_bytes)
    assert store.spillable.memory_bytes == spilling.memory_bytes
    assert most < 1.15 * budget
    assert store.spillable.disk_bytes > budget
    assert list((tmp_path / "scratch").rglob("*.run"))
    columns = store.run([], 2000, closes=False, time_kind="long").to_pandas()
    assert len(columns) == 1_000_000
    assert (columns["sum"] == columns["k"] * columns["n"]).all()
    assert columns["n"].sum() == 1_500_000
    assert store.spillable.disk_bytes == 0
    assert not list((tmp_path / "scratch").rglob("*.run"))
    store.close()


@pytest.mark.parametrize("window", [TUMBLING, SLIDING, SESSION], ids=["tumbling", "sliding", "session"])
def test_spilled_at_any_time_it_answers_as_in_memory(window: WindowCode, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    shape = shape_of(window)
    spilling = Spilling(OsFiles(), str(tmp_path / "scratch"), 0)
    on_disk, plain = (
        WindowStore(shape, spilling.new_rows, 1, spilling.new_cells),
        WindowStore(shape, spilling.new_rows),
    )
    for epoch in range(30):
        count = int(rng.integers(1, 3000))
        rows = portion(shape, rng.integers(0, 5000, count), 60 * epoch + rng.integers(0, 300, count))
        watermark = 60 * epoch - 50
        trial = on_disk.trial(rows, watermark, closes=False, time_kind="long")
        answers = on_disk.run(rows, watermark, closes=False, time_kind="long")
        assert (
            sums(trial) == sums(answers) == sums(plain.run(rows, watermark, closes=False, time_kind="long"))
        )
        if rng.random() < 0.7:
            on_disk.spillable.spill(int(rng.integers(1, 200_000)))
        on_disk.validate()
        some = Keys.from_longs(rng.permutation(5000)[:20])
        assert sums(on_disk.open("long", some)) == sums(plain.open("long", some))
        assert on_disk.windows.oldest == plain.windows.oldest
        assert on_disk.windows.newest == plain.windows.newest
    assert sums(on_disk.open("long")) == sums(plain.open("long"))
    loaded = WindowStore(shape, spilling.new_rows)
    loaded.load(on_disk.export())
    expected = sums(plain.run([], 0, closes=True, time_kind="long"))
    assert sums(on_disk.run([], 0, closes=True, time_kind="long")) == expected
    assert sums(loaded.run([], 0, closes=True, time_kind="long")) == expected
    assert on_disk.spillable.disk_bytes == 0
    on_disk.close()
    assert not list((tmp_path / "scratch").rglob("*.run"))


def merged_per_window(slides: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Cells that are taken in for each window of so many slides, beside those of its rows, for each of its keys."""
    shape = shape_of(WindowCode("sliding", size=10 * slides, slide=10))
    store = PaneStore(shape)
    taken = 0
    take_in = CellTable.take_in

    def counted(self: CellTable, keys: Keys, cells: Any) -> None:
        nonlocal taken
        taken += len(keys)
        take_in(self, keys, cells)

    monkeypatch.setattr(CellTable, "take_in", counted)
    fired, panes, keys = 0, 4 * slides, 5
    for pane in range(panes):
        store.insert(portion(shape, range(keys), [10 * pane] * keys))
        for each in store.fire(10 * pane + 10, closes=False):
            begin = max(int(each.starts[0]), 0)
            assert set(each.columns["n"].to_pylist()) == {(10 * pane + 10 - begin) // 10}
            fired += 1
    assert fired == panes
    return (taken - panes * keys) / (fired * keys)


def test_a_window_costs_the_same_however_many_slides_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {slides: merged_per_window(slides, monkeypatch) for slides in (2, 8, 9, 20, 60)}
    assert costs[2] <= 2
    assert costs[8] <= 8
    assert max(costs[slides] for slides in (9, 20, 60)) <= 5, costs


def test_a_session_on_disk_holds_back_one_in_memory_that_it_reaches_over(tmp_path: Path) -> None:
    shape = shape_of(SESSION)
    store = SessionCells(shape, 1, CellRuns(OsFiles(), tmp_path / "runs"))
    store.insert(portion(shape, [1, 1, 2], [100, 190, 150]))
    store.spill(1 << 30)
    assert store.disk_bytes > 0
    # In memory it is over at 205, on disk it goes on until 290.
    store.insert(portion(shape, [1], [105]))
    assert not list(store.fire(220, closes=False))
    fired = list(store.fire(290, closes=False))
    spans = [
        (k, s, e) for each in fired for k, s, e in zip(each.keys.longs, each.starts, each.ends, strict=True)
    ]
    assert sorted(spans) == [(1, 100, 290), (2, 150, 250)]
    store.validate()


def test_runs_of_a_pane_that_hold_the_same_keys_are_merged(tmp_path: Path) -> None:
    shape = shape_of(TUMBLING)
    runs = CellRuns(OsFiles(), tmp_path / "runs")
    store = PaneStore(shape, runs)
    for _ in range(12):
        store.insert(portion(shape, range(20_000), [5] * 20_000))
        store.spill(1 << 30)
        assert store.count < 2.5 * 20_000
    assert runs.figures["compactions"] > 0
    fired = list(store.fire(1000, closes=False))
    assert len(fired) > 1, "it comes in parts"
    assert sum(map(len, fired)) == 20_000
    assert all((each.columns["n"].to_numpy() == 12).all() for each in fired)
    assert runs.disk_bytes == 0


def _added(kept, v):  # type: ignore[no-untyped-def]
    return kept + v


def _refused(kept, other):  # type: ignore[no-untyped-def]
    return kept + other if kept < 5 or other < 5 else kept[0]


@pytest.mark.parametrize("merge", [_added, _refused], ids=["works", "fails"])
def test_runs_are_merged_by_functions_of_the_users_where_these_may_fail(merge: Any, tmp_path: Path) -> None:
    aggregates = {"sum": mp.fold(0, _added, merge, "v")}
    shape = WindowShape("k long", "v long", TUMBLING, aggregates)
    runs = CellRuns(OsFiles(), tmp_path / "runs")
    store = WindowStore(shape, lambda *_: None)  # type: ignore[arg-type,return-value]
    store.windows = PaneStore(shape, runs)
    for _epoch in range(12):
        trial = store.trial(portion(shape, range(500), [5] * 500), 0, closes=False, time_kind="long")
        assert not len(trial)
        store.tidy_folds()
        merged = runs.figures["compactions"]
        store.run(portion(shape, range(500), [5] * 500), 0, closes=False, time_kind="long")
        store.spillable.spill(1 << 30)
        assert runs.figures["compactions"] == merged, "not where they may not fail"
        if merge is _added:
            assert store.windows.count <= 2.5 * 500
        store.validate()
    if merge is _refused:
        assert store.windows.count == 12 * 500
        with pytest.raises(RuleFailed, match="_added"):
            store.run([], 1000, closes=False, time_kind="long")
        return
    assert runs.figures["compactions"] > 0
    rows = store.run([], 1000, closes=False, time_kind="long").to_pylist()
    assert {row["k"]: row["sum"] for row in rows} == {key: 12 * key for key in range(500)}
    assert runs.disk_bytes == 0


def test_a_damaged_run_is_named(tmp_path: Path) -> None:
    for window in (TUMBLING, SESSION):
        store = WindowStore(shape_of(window), lambda *_: None)  # type: ignore[arg-type,return-value]
        directory = tmp_path / window.kind
        runs = CellRuns(OsFiles(), directory)
        store.windows = (
            SessionCells(store.shape, 1, runs) if window is SESSION else PaneStore(store.shape, runs)
        )
        store.windows.insert(portion(store.shape, range(100), [5] * 100))
        store.spillable.spill(1 << 30)
        (path,) = directory.iterdir()
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(bytes(content))
        with pytest.raises(CorruptFile, match=path.name) as caught:
            store.run([], 1000, closes=False, time_kind="long")
        assert "restart the container" in str(caught.value)


class FullDisk(OsFiles):
    room = 1 << 40

    def append(self, path: AnyPath, buffers: Sequence[AnyBuffer]) -> int:
        size = sum(memoryview(each).nbytes for each in buffers)
        if size > self.room:
            raise OSError(errno.ENOSPC, "no space left")
        self.room -= size
        return super().append(path, buffers)


@pytest.mark.parametrize("window", [TUMBLING, SESSION], ids=["tumbling", "session"])
def test_a_full_disk_loses_nothing(window: WindowCode, tmp_path: Path) -> None:
    files, shape = FullDisk(), shape_of(window)
    runs = CellRuns(files, tmp_path / "runs")
    store = SessionCells(shape, 1, runs) if window is SESSION else PaneStore(shape, runs)
    for room in (1 << 40, 100, 150_000):
        store.insert(portion(shape, range(40_000), [5] * 40_000))
        files.room = room
        if room == 1 << 40:
            store.spill(1 << 30)
        else:
            with pytest.raises(OSError, match="no space"):
                store.spill(1 << 30)
        store.validate()
    fired = list(store.fire(1000, closes=False))
    assert sum(map(len, fired)) == 40_000
    assert sum(int(np.sum(each.columns["n"].to_numpy())) for each in fired) == 120_000
    assert not list((tmp_path / "runs").iterdir())
