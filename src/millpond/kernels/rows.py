"""Row index: open addressing from a key, which is one long or several, to the number of its row.

`slots` is int64[capacity, 2], capacity a power of two: the secret hash of a key (`slot_hashing`), and the row + 1 (0 in
an empty slot). It is never more than half full, and rows are never removed. `keys` is int64[rows, parts]. One long has a
bijection for a hash, so that equal hashes mean equal keys; of several, the parts are compared too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import JIT_ENABLED, inlined, jit
from millpond.kernels._prefetch import AHEAD, FAR_AHEAD, prefetch
from millpond.kernels.slot_hashing import Secret, mix

Longs = NDArray[np.int64]

ROWS = 0  # the place in `control` that counts them
NO_ROW = -1
NO_ROOM = -2

if JIT_ENABLED:

    @inlined
    def _word(part: int) -> np.uint64:
        return np.uint64(part)

    @inlined
    def _hash(word: np.uint64) -> Any:
        return np.int64(word)
else:

    def _word(part: int) -> np.uint64:
        return np.uint64(int(part) & 0xFFFF_FFFF_FFFF_FFFF)

    def _hash(word: np.uint64) -> Any:
        return word.astype(np.int64)


@inlined
def hash_key(key: Any, secret: Secret) -> Any:
    """Of a tuple of longs."""
    word = np.uint64(0)
    for part in key:
        word = mix(_word(part) ^ word, secret[0], secret[1], secret[2], secret[3])
    return _hash(word)


@inlined
def slot_of(key: Any, hash_: int, slots: Longs, keys: Longs) -> Any:
    """The slot that holds the key, or the empty one where it would go."""
    mask = slots.shape[0] - 1
    slot = hash_ & mask
    while slots[slot, 1] != 0:
        if slots[slot, 0] == hash_:
            if len(key) == 1:
                break
            row = slots[slot, 1] - 1
            same = True
            for j in range(len(key)):
                if keys[row, j] != key[j]:
                    same = False
            if same:
                break
        slot = (slot + 1) & mask
    return slot


@jit
def find_row(key: Any, secret: Secret, slots: Longs, keys: Longs) -> Any:
    """The row of a key, or NO_ROW."""
    return slots[slot_of(key, hash_key(key, secret), slots, keys), 1] - 1


@jit
def ask_for_slot(key: Any, secret: Secret, slots: Longs) -> None:
    """Memory begins to bring the slot where the search for a key will begin."""
    prefetch(slots, hash_key(key, secret) & (slots.shape[0] - 1))


@jit
def ask_for_row(key: Any, secret: Secret, slots: Longs, keys: Longs, cells: Longs) -> None:
    """The same for the row that this slot names, which mostly is the key's."""
    row = slots[hash_key(key, secret) & (slots.shape[0] - 1), 1] - 1
    if row >= 0:
        prefetch(keys, row)
        prefetch(cells, row)


@jit
def ask_for_known(key: int, known: Longs, cells: Longs) -> None:
    """The same for a row that is known by its key."""
    if 0 <= key < known.shape[0]:
        prefetch(cells, known[key])


@jit
def row_of(
    key: Any, secret: Secret, slots: Longs, keys: Longs, control: Longs, cells: Longs, first: Longs
) -> Any:
    """The row of a key, made of `first` where there is none; NO_ROOM where one more has no place."""
    hash_ = hash_key(key, secret)
    slot = slot_of(key, hash_, slots, keys)
    row = slots[slot, 1] - 1
    if row >= 0:
        return row
    row = control[ROWS]
    if 2 * row >= slots.shape[0] or row >= keys.shape[0] or row >= cells.shape[0]:
        return NO_ROOM
    for j in range(len(key)):
        keys[row, j] = key[j]
    for j in range(first.shape[0]):
        cells[row, j] = first[j]
    slots[slot, 0] = hash_
    slots[slot, 1] = row + 1
    control[ROWS] = row + 1
    return row


@jit
def hash_keys(words: NDArray[np.uint64], secret: Secret, out: NDArray[np.uint64]) -> None:
    """Of keys of several parts, as `hash_key` has it."""
    start, a, b, c = secret[0], secret[1], secret[2], secret[3]
    for i in range(words.shape[0]):
        word = np.uint64(0)
        for j in range(words.shape[1]):
            word = mix(words[i, j] ^ word, start, a, b, c)
        out[i] = word


@inlined
def _probe(i: int, keys: Longs, hash_: int, slot: int, slots: Longs, stored: Longs) -> int:
    mask = slots.shape[0] - 1
    while slots[slot, 1] != 0:
        if slots[slot, 0] == hash_:
            row = slots[slot, 1] - 1
            same = True
            for j in range(keys.shape[1]):
                if stored[row, j] != keys[i, j]:
                    same = False
            if same:
                break
        slot = (slot + 1) & mask
    return slot


@jit
def find_rows(keys: Longs, hashes: Longs, slots: Longs, stored: Longs, out: Longs) -> None:
    """The row of each key, or NO_ROW."""
    mask = slots.shape[0] - 1
    last = hashes.shape[0] - 1
    for i in range(hashes.shape[0]):
        prefetch(slots, hashes[min(i + FAR_AHEAD, last)] & mask)
        soon = slots[hashes[min(i + AHEAD, last)] & mask, 1] - 1
        if soon >= 0:
            prefetch(stored, soon)
        out[i] = slots[_probe(i, keys, hashes[i], hashes[i] & mask, slots, stored), 1] - 1


@jit
def make_rows(
    keys: Longs, hashes: Longs, done: int, slots: Longs, stored: Longs, control: Longs, out: Longs
) -> int:
    """Rows for the keys from `done` on that have none (`out[i] < 0`). Gives how many are done: not all, if there is no room."""
    mask = slots.shape[0] - 1
    for i in range(done, hashes.shape[0]):
        if out[i] >= 0:
            continue
        slot = _probe(i, keys, hashes[i], hashes[i] & mask, slots, stored)
        row = slots[slot, 1] - 1
        if row < 0:
            row = control[ROWS]
            if 2 * row >= slots.shape[0] or row >= stored.shape[0]:
                return i
            for j in range(keys.shape[1]):
                stored[row, j] = keys[i, j]
            slots[slot, 0] = hashes[i]
            slots[slot, 1] = row + 1
            control[ROWS] = row + 1
        out[i] = row
    return int(hashes.shape[0])


@jit
def move(slots: Longs, larger: Longs) -> None:
    """All rows into an empty index of more slots."""
    mask = larger.shape[0] - 1
    for at in range(slots.shape[0]):
        if slots[at, 1] != 0:
            slot = slots[at, 0] & mask
            while larger[slot, 1] != 0:
                slot = (slot + 1) & mask
            larger[slot, 0] = slots[at, 0]
            larger[slot, 1] = slots[at, 1]


@jit
def keep_row(
    row: int, cells: Longs, marks: NDArray[np.uint8], rows: Longs, kept: Longs, control: Longs
) -> bool:
    """Keeps the cells of a row that has no mark yet. False where there is no room. Rows beyond the marks are not kept."""
    if row >= marks.shape[0] or marks[row] != 0:
        return True
    count = control[0]
    if count >= rows.shape[0]:
        return False
    rows[count] = row
    for j in range(cells.shape[1]):
        kept[count, j] = cells[row, j]
    marks[row] = 1
    control[0] = count + 1
    return True
