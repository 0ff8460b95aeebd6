"""Key index: open addressing from the secret hash of a key (`slot_hashing`) to its entry, with incremental growth.

A table is int64[capacity, 2], capacity a power of two: the hash, and the entry + 1 (0 in an empty slot), side by
side on one cache line. It is never more than half full. Entries are never removed.

Growth does not stop the slice: the full table becomes `old`, a table twice its size takes over, and each entry
created moves `MOVES_PER_ENTRY` slots, so that `old` is drained before the new table fills up. Until then a key is
looked for in both. `old` has no slots when no growth is under way.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import inlined, jit
from millpond.kernels._prefetch import AHEAD, FAR_AHEAD, prefetch
from millpond.kernels.buffers import same_bytes
from millpond.kernels.control import ENTRIES, MIGRATED, SLOTS_MOVED

MOVES_PER_ENTRY = 8


@inlined
def probe(hash_: int, table: NDArray[np.int64]) -> int:
    """The slot that holds the hash, or the empty one where it would go."""
    mask = table.shape[0] - 1
    slot = hash_ & mask
    while table[slot, 1] != 0 and table[slot, 0] != hash_:
        slot = (slot + 1) & mask
    return int(slot)


@jit
def find(
    hashes: NDArray[np.int64], table: NDArray[np.int64], old: NDArray[np.int64], out: NDArray[np.int64]
) -> None:
    """The entry of each hash, or -1. Exact for longs, whose hash is a bijection."""
    mask = table.shape[0] - 1
    last = hashes.shape[0] - 1
    for i in range(hashes.shape[0]):
        prefetch(table, hashes[min(i + FAR_AHEAD, last)] & mask)
        out[i] = table[probe(hashes[i], table), 1] - 1
    if old.shape[0] > 0:
        for i in range(hashes.shape[0]):
            if out[i] < 0:
                out[i] = old[probe(hashes[i], old), 1] - 1


@jit
def probe_bytes(
    hash_: int,
    data: NDArray[np.uint8],
    start: int,
    size: int,
    slot: int,
    table: NDArray[np.int64],
    key_offsets: NDArray[np.int64],
    key_data: NDArray[np.uint8],
) -> int:
    """As `probe`, from `slot` on, comparing the bytes too: unlike longs, distinct keys may share a hash."""
    mask = table.shape[0] - 1
    while table[slot, 1] != 0:
        if table[slot, 0] == hash_:
            entry = table[slot, 1] - 1
            at = key_offsets[entry]
            if key_offsets[entry + 1] - at == size and same_bytes(data, start, key_data, at, size):
                return slot
        slot = (slot + 1) & mask
    return slot


@jit
def find_bytes(
    offsets: NDArray[np.int64],
    data: NDArray[np.uint8],
    hashes: NDArray[np.int64],
    table: NDArray[np.int64],
    old: NDArray[np.int64],
    key_offsets: NDArray[np.int64],
    key_data: NDArray[np.uint8],
    out: NDArray[np.int64],
) -> None:
    """The entry of each key, or -1."""
    # Slots first, bytes after, so that each of the two loops knows ahead what it will read.
    mask = table.shape[0] - 1
    last = hashes.shape[0] - 1
    for i in range(hashes.shape[0]):
        prefetch(table, hashes[min(i + FAR_AHEAD, last)] & mask)
        out[i] = probe(hashes[i], table)
    for i in range(hashes.shape[0]):
        prefetch(key_offsets, table[out[min(i + FAR_AHEAD, last)], 1] - 1)
        soon = table[out[min(i + AHEAD, last)], 1] - 1
        if soon >= 0:
            prefetch(key_data, key_offsets[soon])
        entry = table[out[i], 1] - 1
        if entry >= 0:
            start = offsets[i]
            size = offsets[i + 1] - start
            at = key_offsets[entry]
            if key_offsets[entry + 1] - at != size or not same_bytes(data, start, key_data, at, size):
                slot = probe_bytes(hashes[i], data, start, size, out[i], table, key_offsets, key_data)
                entry = table[slot, 1] - 1
        out[i] = entry
    if old.shape[0] > 0:
        mask = old.shape[0] - 1
        for i in range(hashes.shape[0]):
            if out[i] < 0:
                start = offsets[i]
                size = offsets[i + 1] - start
                slot = probe_bytes(hashes[i], data, start, size, hashes[i] & mask, old, key_offsets, key_data)
                out[i] = old[slot, 1] - 1


@jit
def migrate(
    table: NDArray[np.int64], old: NDArray[np.int64], control: NDArray[np.int64], budget: int
) -> None:
    """Move up to `budget` slots of `old` on to `table`. The moved ones stay in `old`, so its probes hold."""
    stop = min(control[MIGRATED] + budget, old.shape[0])
    mask = table.shape[0] - 1
    for at in range(control[MIGRATED], stop):
        if old[at, 1] != 0:
            slot = old[at, 0] & mask
            while table[slot, 1] != 0:
                slot = (slot + 1) & mask
            table[slot, 0] = old[at, 0]
            table[slot, 1] = old[at, 1]
    control[SLOTS_MOVED] += stop - control[MIGRATED]
    control[MIGRATED] = stop


@jit
def create(
    keys: NDArray[np.int64],
    hashes: NDArray[np.int64],
    first: int,
    table: NDArray[np.int64],
    old: NDArray[np.int64],
    entry_keys: NDArray[np.int64],
    entries: NDArray[np.int64],
    control: NDArray[np.int64],
    out: NDArray[np.int64],
) -> int:
    """Entries for the rows from `first` on that have none (`out[i] < 0`).

    Returns the number of rows done; fewer than all means that the table or the entry arrays are full.
    """
    for i in range(first, hashes.shape[0]):
        if out[i] >= 0:
            continue
        slot = probe(hashes[i], table)
        entry = table[slot, 1] - 1
        if entry < 0 and old.shape[0] > 0:
            entry = old[probe(hashes[i], old), 1] - 1
        if entry < 0:
            entry = control[ENTRIES]
            if entry >= entries.shape[0] or 2 * entry >= table.shape[0]:
                return i
            entry_keys[entry] = keys[i]
            entries[entry, 0] = -1
            entries[entry, 1] = 0
            table[slot, 0] = hashes[i]
            table[slot, 1] = entry + 1
            control[ENTRIES] = entry + 1
            if control[MIGRATED] < old.shape[0]:
                migrate(table, old, control, MOVES_PER_ENTRY)
        out[i] = entry
    return int(hashes.shape[0])


@jit
def create_bytes(
    offsets: NDArray[np.int64],
    data: NDArray[np.uint8],
    hashes: NDArray[np.int64],
    first: int,
    table: NDArray[np.int64],
    old: NDArray[np.int64],
    key_offsets: NDArray[np.int64],
    key_data: NDArray[np.uint8],
    entries: NDArray[np.int64],
    control: NDArray[np.int64],
    out: NDArray[np.int64],
) -> int:
    """As `create`; fewer rows than all may also mean that `key_data` is full."""
    mask = table.shape[0] - 1
    for i in range(first, hashes.shape[0]):
        if out[i] >= 0:
            continue
        start = offsets[i]
        size = offsets[i + 1] - start
        h = hashes[i]
        slot = probe_bytes(h, data, start, size, h & mask, table, key_offsets, key_data)
        entry = table[slot, 1] - 1
        if entry < 0 and old.shape[0] > 0:
            mask_old = old.shape[0] - 1
            found = probe_bytes(h, data, start, size, h & mask_old, old, key_offsets, key_data)
            entry = old[found, 1] - 1
        if entry < 0:
            entry = control[ENTRIES]
            at = key_offsets[entry]
            if entry >= entries.shape[0] or 2 * entry >= table.shape[0] or at + size > key_data.shape[0]:
                return i
            for j in range(size):
                key_data[at + j] = data[start + j]
            key_offsets[entry + 1] = at + size
            entries[entry, 0] = -1
            entries[entry, 1] = 0
            table[slot, 0] = h
            table[slot, 1] = entry + 1
            control[ENTRIES] = entry + 1
            if control[MIGRATED] < old.shape[0]:
                migrate(table, old, control, MOVES_PER_ENTRY)
        out[i] = entry
    return int(hashes.shape[0])
