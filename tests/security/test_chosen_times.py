"""Whoever chooses the order of times, and of the keys that transactions touch, makes nothing quadratic."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

import millpond as mp
from millpond import kernels
from millpond.code.rules import FetchRule
from millpond.errors import MessageTooLarge
from millpond.kernels import control as at
from millpond.stores import arena as arenas
from millpond.stores import versioned
from millpond.stores.arena import SMALLEST_TIME, Arena
from millpond.stores.keys import Keys
from millpond.stores.versioned import VersionedSlice
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.txn.run import grouping

ROWS = 100_000
VALUES = pa.schema([("v", pa.int64())])
ORDERS = {
    "falling": np.arange(ROWS)[::-1].copy(),
    "random": np.random.default_rng(3).permutation(ROWS),
    "from both ends": np.stack(
        [np.arange(ROWS // 2), np.arange(ROWS - 1, ROWS // 2 - 1, -1)], axis=1
    ).ravel(),
}


@pytest.mark.parametrize("batches", [1, 10])
@pytest.mark.parametrize("name", list(ORDERS))
def test_versions_of_one_key_are_moved_seldom(name: str, batches: int) -> None:
    times = ORDERS[name]
    store = VersionedSlice("i64", VALUES)
    for part in np.array_split(times, batches):
        store.insert(Keys.from_longs(np.zeros(len(part), np.int64)), part, [pa.array(10 * part)])
    # Each batch may move what was there once, and some more for each of its rows.
    assert store._control[at.ROWS_MOVED] < (batches + 32) * ROWS
    asked = Keys.from_longs(np.zeros(ROWS, np.int64))
    (values,) = store.fetch(asked, None, np.arange(ROWS), FetchRule("latest"))
    assert np.array_equal(values.to_numpy(), 10 * np.arange(ROWS))
    store.validate()


@pytest.mark.parametrize("replaces", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_merged_rows_come_to_lie_where_rows_one_by_one_would(
    replaces: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arenas, "MOVES_PER_ROW", 0)
    monkeypatch.setattr(arenas, "MOVES", seed - 1)  # below 0 no row goes in by itself
    rng = np.random.default_rng(seed)
    keys, control = 5, np.zeros(at.SIZE, np.int64)
    control[at.ENTRIES] = keys
    entries = np.tile(np.array([-1, 0]), (keys, 1))
    arena = Arena(2, control)
    wanted: list[list[tuple[int, int]]] = [[] for _ in range(keys)]
    for batch in range(30):
        count = int(rng.integers(1, 40)) if batch else 3 * keys
        ids = rng.integers(0, keys, count) if batch else np.repeat(np.arange(keys), 3)
        rows = np.stack([rng.integers(-30, 30, count), rng.integers(0, 2**40, count)], axis=1)
        arena.insert(ids, rows, replaces, SMALLEST_TIME, SMALLEST_TIME, entries)
        for key, row in zip(ids.tolist(), rows.tolist(), strict=True):
            if replaces:
                wanted[key] = [version for version in wanted[key] if version[0] != row[0]]
            wanted[key].append(tuple(row))
        for key in range(keys):
            wanted[key].sort(key=lambda version: version[0])
            start, meta = entries[key].tolist()
            held = arena.cells[start : start + (meta >> 6)]
            assert list(map(tuple, held.tolist())) == wanted[key]
        arena.validate(entries, replaces)


def test_merged_rows_let_entries_drop_what_no_read_can_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "MOVES_PER_ROW", 0)
    monkeypatch.setattr(arenas, "MOVES", -1)
    store = VersionedSlice("i64", VALUES)
    keys = Keys.from_longs(np.zeros(100, np.int64))
    for first in range(0, 1000, 100):
        times = np.arange(first + 99, first - 1, -1)
        store.insert(keys, times, [pa.array(times)], keep_from=first)
    assert store.versions < 300
    (values,) = store.fetch(keys, None, np.arange(900, 1000), FetchRule("latest"))
    assert values.to_pylist() == list(range(900, 1000))
    store.validate()


def test_a_long_chain_of_transactions_is_found_in_time() -> None:
    """Each event joins a row to the one below it: the tree of a component is as deep as it has rows."""

    def seconds(rows: NDArray[np.int64]) -> float:
        event, written = np.repeat(np.arange(ROWS - 1), 2), np.ones(ROWS, np.uint8)
        parent, first, sizes = np.arange(ROWS), np.full(ROWS - 1, -1), np.zeros(ROWS, np.int64)
        start = time.thread_time()
        grouping.components(event, rows, written, parent, first)
        grouping.component_sizes(first, parent, sizes)
        taken = time.thread_time() - start
        assert sizes[0] == ROWS - 1
        assert not first.any()
        return taken

    rising = np.stack([np.arange(ROWS - 1), np.arange(1, ROWS)], axis=1).ravel()
    seconds(rising)
    usual = min(seconds(rising) for _ in range(3))
    assert min(seconds(rising[::-1].copy()) for _ in range(3)) < 20 * max(usual, 0.001)


@pytest.mark.parametrize("rule", ["values", "total"])
def test_many_questions_about_one_key_are_answered_in_parts(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a reader would have a container hold, or pass, as many values as it has questions times versions."""
    count = 100
    monkeypatch.setattr(versioned, "RANGES_MAX", 20 * count)
    rows = pa.table({"k": np.zeros(count, np.int64), "t": np.arange(count), "v": np.ones(count, np.int64)})
    asked = pa.table({"k": np.zeros(count, np.int64), "t": np.full(count, count)})
    with LocalPond(LossyFiles()) as pond:
        state = pond.state("s", key="long", value="long", compact=mp.keep_all())
        state.update(key="k", at="t", value="v", name="feed")(rows, 0)
        state.finish("feed")
        fetch = state.fetch(key="k", at="t", into="a", rule=getattr(mp, rule)())
        answers = fetch.now(asked)["a"].to_pylist()
        assert answers == [[1] * count if rule == "values" else count] * count
    store = VersionedSlice("i64", VALUES)
    keys, numbers = Keys.from_longs(np.zeros(count, np.int64)), np.arange(count)
    store.insert(keys, numbers, [pa.array(numbers)])
    with pytest.raises(MessageTooLarge, match="100 questions are about 10000 values"):
        store.fetch(keys, None, np.full(count, count), FetchRule(rule))


def test_no_kernel_sorts() -> None:
    """For numba's quicksort there are orders that take it quadratic time (McIlroy 1999); for NumPy's sorts there are none."""
    sorts = re.compile(r"np\.(sort|argsort|unique|median|partition|argpartition|percentile)\b|\.sort\(")
    files = [*Path(kernels.__file__).parent.glob("*.py"), Path(grouping.__file__)]
    assert len(files) > 10
    assert [file.name for file in files if sorts.search(file.read_text())] == []
