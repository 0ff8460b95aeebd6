"""One call for the rows of several slices: a call for each would cost more than the work, where a slice has few rows.

Of each slice there is a vector of `PLACES` longs, which says where its arrays lie and how long they are. Rows are those of
one batch, grouped by slice: those of slice s are `bounds[s, 0]..bounds[s, 1]`. Keys are longs, or byte strings where there
are no longs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels import index, slot_hashing
from millpond.kernels._jit import inlined, jit
from millpond.kernels._memory_at import bytes_at, longs_at, rows_at
from millpond.kernels._prefetch import FAR_AHEAD, prefetch
from millpond.kernels.compaction import mark
from millpond.kernels.control import ENTRIES, ROWS_MOVED, SIZE
from millpond.kernels.lookups import drop_until, latest_at
from millpond.kernels.versions import CLASSES, insert

# An address each, and for all but the last two a length behind it.
TABLE = 0
OLD = 2
HELD = 4
CELLS = 6
DIRTY = 8
KEY_LONGS = 10  # of keys that are longs, the keys; else the offsets of their bytes
KEY_BYTES = 12
WIDTH = 14
HEADS = 15
CONTROL = 16
PLACES = 17


@inlined
def find_of_slice(
    places: NDArray[np.int64],
    longs: NDArray[np.int64],
    offsets: NDArray[np.int64],
    data: NDArray[np.uint8],
    secret: NDArray[np.uint64],
    start: int,
    stop: int,
    hashes: NDArray[np.int64],
    ids: NDArray[np.int64],
) -> None:
    """The hash and the entry of each key of a slice's rows, -1 for one that is not there."""
    table = rows_at(places[TABLE], places[TABLE + 1], 2)
    old = rows_at(places[OLD], places[OLD + 1], 2)
    if longs.shape[0] > 0:
        slot_hashing.write_longs(longs[start:stop].view(np.uint64), secret, hashes.view(np.uint64))
        index.find(hashes, table, old, ids)
    else:
        own = offsets[start : stop + 1]
        key_offsets = longs_at(places[KEY_LONGS], places[KEY_LONGS + 1])
        key_data = bytes_at(places[KEY_BYTES], places[KEY_BYTES + 1])
        slot_hashing.write_bytes(own, data, secret, hashes.view(np.uint64))
        index.find_bytes(own, data, hashes, table, old, key_offsets, key_data, ids)


@inlined
def has_room(
    places: NDArray[np.int64],
    control: NDArray[np.int64],
    by_bytes: bool,
    offsets: NDArray[np.int64],
    ids: NDArray[np.int64],
) -> bool:
    """Whether all keys that have no entry could get one, were they all different."""
    count = control[ENTRIES]
    size = 0
    for i in range(ids.shape[0]):
        if ids[i] < 0:
            count += 1
            if by_bytes:
                size += offsets[i + 1] - offsets[i]
    if by_bytes and count > control[ENTRIES]:
        key_offsets = longs_at(places[KEY_LONGS], places[KEY_LONGS + 1])
        if key_offsets[control[ENTRIES]] + size > places[KEY_BYTES + 1]:
            return False
    room = min(places[HELD + 1], places[DIRTY + 1], places[TABLE + 1] >> 1)
    return bool(count <= room)


@jit
def latest_of_slices(
    slices: NDArray[np.int64],
    bounds: NDArray[np.int64],
    longs: NDArray[np.int64],
    offsets: NDArray[np.int64],
    data: NDArray[np.uint8],
    secret: NDArray[np.uint64],
    lo: NDArray[np.int64],
    hi: NDArray[np.int64],
    width: int,
    columns: NDArray[np.int64],
    out: NDArray[np.int64],
    valid: NDArray[np.uint8],
) -> None:
    """Of each row's key the newest version with lo < time <= hi; `lo` may be empty: unbounded.

    `columns` are cells, and bits in the null mask, which is behind the first `width` cells of slices that have one.
    Of column c the value goes to `out[c]`, and whether it is there to `valid[c]`; it is 0 where it is not.
    """
    most = 0
    for s in range(slices.shape[0]):
        most = max(most, bounds[s, 1] - bounds[s, 0])
    all_hashes = np.empty(most, np.int64)
    all_ids = np.empty(most, np.int64)
    all_positions = np.empty(most, np.int64)
    for s in range(slices.shape[0]):
        start = bounds[s, 0]
        stop = bounds[s, 1]
        places = longs_at(slices[s], PLACES)
        hashes = all_hashes[: stop - start]
        ids = all_ids[: stop - start]
        positions = all_positions[: stop - start]
        find_of_slice(places, longs, offsets, data, secret, start, stop, hashes, ids)
        cells = rows_at(places[CELLS], places[CELLS + 1], places[WIDTH])
        latest_at(ids, rows_at(places[HELD], places[HELD + 1], 2), cells, hi[start:stop], positions)
        if lo.shape[0] > 0:
            drop_until(positions, cells, lo[start:stop])
        masked = places[WIDTH] > width
        last = stop - start - 1
        for c in range(columns.shape[0]):
            cell = columns[c, 0]
            bit = columns[c, 1]
            for i in range(stop - start):
                prefetch(cells, positions[min(i + FAR_AHEAD, last)])
                there = positions[i] >= 0
                at = positions[i] if there else 0
                if masked:
                    there = there & ((cells[at, width] >> bit) & 1 == 0)
                out[c, start + i] = cells[at, cell] if there else 0
                valid[c, start + i] = there


@jit
def insert_of_slices(
    slices: NDArray[np.int64],
    bounds: NDArray[np.int64],
    longs: NDArray[np.int64],
    offsets: NDArray[np.int64],
    data: NDArray[np.uint8],
    secret: NDArray[np.uint64],
    rows: NDArray[np.int64],
    replaces: bool,
    keep_from: int,
    alive_from: int,
    moves_per_row: int,
    moves: int,
    ids: NDArray[np.int64],
    outcomes: NDArray[np.int64],
) -> None:
    """Put each row under the entry of its key, made where there is none; entries go to `ids`, and are marked as dirty.

    Of each slice `outcomes` tells how many rows are done (-1: nothing is, as there is no room for its new keys; else as
    `insert`), how many keys are new, and the smallest time among its rows.
    """
    most = 0
    for s in range(slices.shape[0]):
        most = max(most, bounds[s, 1] - bounds[s, 0])
    scratch = np.empty(most, np.int64)
    for s in range(slices.shape[0]):
        start = bounds[s, 0]
        stop = bounds[s, 1]
        places = longs_at(slices[s], PLACES)
        control = longs_at(places[CONTROL], SIZE)
        own = ids[start:stop]
        hashes = scratch[: stop - start]
        find_of_slice(places, longs, offsets, data, secret, start, stop, hashes, own)
        by_bytes = longs.shape[0] == 0
        key_offsets = offsets[start : stop + 1] if by_bytes else offsets
        if not has_room(places, control, by_bytes, key_offsets, own):
            outcomes[s, 0] = -1
            continue
        known = control[ENTRIES]
        table = rows_at(places[TABLE], places[TABLE + 1], 2)
        old = rows_at(places[OLD], places[OLD + 1], 2)
        entries = rows_at(places[HELD], places[HELD + 1], 2)
        entry_keys = longs_at(places[KEY_LONGS], places[KEY_LONGS + 1])
        if by_bytes:
            entry_data = bytes_at(places[KEY_BYTES], places[KEY_BYTES + 1])
            index.create_bytes(
                key_offsets, data, hashes, 0, table, old, entry_keys, entry_data, entries, control, own
            )
        else:
            index.create(longs[start:stop], hashes, 0, table, old, entry_keys, entries, control, own)
        mark(own, bytes_at(places[DIRTY], places[DIRTY + 1]))
        smallest = rows[start, 0]
        for i in range(start, stop):
            smallest = min(smallest, rows[i, 0])
        moved_max = control[ROWS_MOVED] + moves_per_row * (stop - start) + moves
        outcomes[s, 0] = insert(
            own,
            rows[start:stop],
            0,
            replaces,
            keep_from,
            alive_from,
            moved_max,
            entries,
            rows_at(places[CELLS], places[CELLS + 1], places[WIDTH]),
            longs_at(places[HEADS], CLASSES),
            control,
        )
        outcomes[s, 1] = control[ENTRIES] - known
        outcomes[s, 2] = smallest
