"""Growth is paid for little by little: counted in slots and versions moved, not in time."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from millpond.code.rules import FetchRule
from millpond.kernels import control as at
from millpond.kernels import index
from millpond.stores.keys import Keys
from millpond.stores.versioned import VersionedSlice

SCHEMA = pa.schema([("v", pa.int64())])


def batch(numbers: np.ndarray, kind: str) -> Keys:
    if kind == "i64":
        return Keys.from_longs(numbers)
    return Keys.from_arrow(pa.array([f"key {n}" for n in numbers]))


@pytest.mark.parametrize("kind", ["i64", "bytes"])
def test_a_call_moves_a_bounded_number_of_slots(kind: str) -> None:
    store = VersionedSlice(kind, SCHEMA)
    moved, grown_while_inserting = 0, 0
    size = 32
    for step in range(400):
        keys = batch(np.arange(step * size, (step + 1) * size), kind)
        store.insert(keys, np.zeros(size, np.int64), [pa.array(np.arange(size))])
        now = int(store._control[at.SLOTS_MOVED])
        assert now - moved <= index.MOVES_PER_ENTRY * size
        moved = now
        if len(store._index.old):
            grown_while_inserting += 1
            # Old and new table are live together, and every key is found in one of them.
            count = store.fetch(
                batch(np.arange(store.keys), kind), None, np.zeros(store.keys, np.int64), FetchRule("count")
            )
            assert count[0].to_pylist() == [1] * store.keys
        if step % 50 == 0:
            store.validate()
    assert grown_while_inserting > 20, "growth spans many calls"
    store.validate()


@pytest.mark.parametrize("kind", ["i64", "bytes"])
def test_sweeps_move_growth_on_within_their_budget(kind: str) -> None:
    store = VersionedSlice(kind, SCHEMA)
    numbers = np.arange(1025)
    store.insert(batch(numbers, kind), np.zeros(1025, np.int64), [pa.array(numbers)])
    assert len(store._index.old) > 0
    moved = int(store._control[at.SLOTS_MOVED])
    for calls in range(1, 1000):  # noqa: B007
        done = store.sweep(-(2**63), 16)
        now = int(store._control[at.SLOTS_MOVED])
        assert now - moved <= 16
        moved = now
        store.validate()
        if done:
            break
    assert calls > 10
    assert len(store._index.old) == 0


def test_in_order_inserts_move_a_constant_number_of_versions_each() -> None:
    store = VersionedSlice("i64", SCHEMA)
    keys = Keys.from_longs(np.repeat(np.arange(3), 50))
    inserted = 0
    for step in range(200):
        times = np.tile(np.arange(step * 50, (step + 1) * 50), 3)
        store.insert(keys, times, [pa.array(times)])
        inserted += len(times)
        assert store._control[at.ROWS_MOVED] <= 2 * inserted
    assert store.versions == inserted
    store.validate()


def test_outgrown_blocks_are_used_again() -> None:
    store = VersionedSlice("i64", SCHEMA)
    for key in range(200):
        store.insert(Keys.from_longs(np.full(64, key)), np.arange(64), [pa.array(np.arange(64))])
    # Each block of 64 left 63 rows behind on its way: only the first key may leave them unused.
    assert store._control[at.USED] <= 200 * 64 + 2 * 64
    store.validate()


def test_compaction_on_touch_keeps_a_moving_window_small() -> None:
    store = VersionedSlice("i64", SCHEMA)
    keys = Keys.from_longs(np.arange(10))
    inserted = 0
    for time in range(3000):
        store.insert(keys, np.full(10, time), [pa.array(np.full(10, time))], keep_from=time - 20)
        inserted += 10
        # 21 in the window, and as many again before a touch drops them.
        assert store.versions <= 10 * 44
        assert store._control[at.ROWS_MOVED] <= 3 * inserted
    assert store.nbytes < 200_000
    store.validate()


def test_sweeping_gives_memory_back() -> None:
    schema = pa.schema([("v", pa.int64()), ("s", pa.string()), ("l", pa.list_(pa.int64()))])
    store = VersionedSlice("i64", schema)
    keys = Keys.from_longs(np.arange(100))
    for time in range(300):
        values = [
            pa.array(np.full(100, time)),
            pa.array([f"{time:050}"] * 100),
            pa.array([[time] * 5] * 100, pa.list_(pa.int64())),
        ]
        store.insert(keys, np.full(100, time), values)
    before = store.nbytes
    while not store.sweep(299, 7):
        pass
    assert store.versions == 200
    assert store.nbytes < before / 20
    found = store.fetch(keys, None, np.full(100, 299), FetchRule("values"))
    assert found[1].to_pylist() == [[f"{298:050}", f"{299:050}"]] * 100
    store.validate()


def test_bytes_keys_that_share_a_hash_stay_apart() -> None:
    control = np.zeros(at.SIZE, np.int64)
    table, old = np.zeros((16, 2), np.int64), np.zeros((0, 2), np.int64)
    entries, key_offsets, key_data = np.zeros((8, 2), np.int64), np.zeros(9, np.int64), np.zeros(64, np.uint8)
    data = np.frombuffer(bytearray(b"abcabdab"), np.uint8)
    offsets = np.array([0, 3, 6, 8])
    same = np.full(3, 15)
    out = np.full(3, -1)
    args = (offsets, data, same, 0, table, old, key_offsets, key_data, entries, control, out)
    assert index.create_bytes(*args) == 3
    assert out.tolist() == [0, 1, 2]
    found = np.empty(3, np.int64)
    index.find_bytes(offsets, data, same, table, old, key_offsets, key_data, found)
    assert found.tolist() == [0, 1, 2]
    bigger = np.zeros((32, 2), np.int64)
    index.find_bytes(offsets, data, same, bigger, table, key_offsets, key_data, found)
    assert found.tolist() == [0, 1, 2], "also in the old table"
