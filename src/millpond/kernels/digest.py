"""Order-independent content digest: the sum, mod 2**64, of a strong hash of each row.

A row's hash folds its columns from left to right, so the digest changes when two columns swap values, and does
not when rows swap places or move to another partition. Digests of disjoint batches add.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import inlined, jit
from millpond.kernels.hashing import P1, P3, P4, avalanche, hash_word, rotate

NULL = np.uint64(0x6E756C6C6E756C6C)


@inlined
def fold(row: np.uint64, word: np.uint64) -> np.uint64:
    """A row hash extended by one value. Not commutative."""
    return avalanche(rotate(row ^ (word * P3), 27) * P1 + P4)


@jit
def fold_words(
    rows: NDArray[np.uint64], words: NDArray[np.uint64], valid: NDArray[np.uint8], offset: int
) -> None:
    """Extend each row's hash by its word, or by null where Arrow's validity bits, from bit `offset` on, say so.

    No bits at all: no nulls. A null is folded twice, so that no single word is its equal.
    """
    if valid.shape[0] == 0:
        for i in range(rows.shape[0]):
            rows[i] = fold(rows[i], words[i])
    else:
        for i in range(rows.shape[0]):
            bit = offset + i
            if (valid[bit >> 3] >> (bit & 7)) & 1 != 0:
                rows[i] = fold(rows[i], words[i])
            else:
                rows[i] = fold(fold(rows[i], NULL), NULL)


@jit
def fold_lists(offsets: NDArray[np.int64], items: NDArray[np.uint64], out: NDArray[np.uint64]) -> None:
    """Hash of each list from the hashes of its items; `items[0]` is the item at offset `offsets[0]`."""
    base = offsets[0]
    for i in range(out.shape[0]):
        h = hash_word(np.uint64(offsets[i + 1] - offsets[i]))
        for j in range(offsets[i] - base, offsets[i + 1] - base):
            h = fold(h, items[j])
        out[i] = h


@jit
def total_of(rows: NDArray[np.uint64]) -> np.uint64:
    total = np.uint64(0)
    for i in range(rows.shape[0]):
        total += avalanche(rows[i] + P4)
    return total
