"""Folds: the value at each version made from the one before it. Cells of updates and of folded values lie side by side.

A plan lists positions entry by entry, oldest first. `step` says what each is: the first of a chain, whose folded value
is its update; one that follows the position before it in the plan; or one that is there to be followed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import jit
from millpond.kernels.versions import CLASS_BITS, count_until

FIRST = 0
FOLLOWS = 1
STANDS = 2
NEVER = 2**63 - 1


@jit
def mark(
    ids: NDArray[np.int64], times: NDArray[np.int64], changed: NDArray[np.int64], touched: NDArray[np.int64]
) -> int:
    """The oldest time at which each of these entries changed; `changed` is `NEVER` before. Lists the entries once each."""
    found = 0
    for i in range(ids.shape[0]):
        if changed[ids[i]] == NEVER:
            touched[found] = ids[i]
            found += 1
        changed[ids[i]] = min(changed[ids[i]], times[i])
    return found


@jit
def plan_size(
    touched: NDArray[np.int64],
    changed: NDArray[np.int64],
    entries: NDArray[np.int64],
    arena: NDArray[np.int64],
    first: NDArray[np.int64],
) -> int:
    """How long the plan for all that comes after a change is. `first` gets the number of versions before it."""
    total = 0
    for i in range(touched.shape[0]):
        e = touched[i]
        length = entries[e, 1] >> CLASS_BITS
        first[i] = 0
        if changed[e] > -(2**63):
            first[i] = count_until(arena, entries[e, 0], length, changed[e] - 1)
        total += length - first[i] + (first[i] > 0)
        changed[e] = NEVER
    return total


@jit
def plan(
    touched: NDArray[np.int64],
    first: NDArray[np.int64],
    entries: NDArray[np.int64],
    arena: NDArray[np.int64],
    span: int,
    positions: NDArray[np.int64],
    step: NDArray[np.uint8],
) -> None:
    """The plan itself. A chain ends where the next version is `span` or more later; 0 means never."""
    at = 0
    for i in range(touched.shape[0]):
        e = touched[i]
        start = entries[e, 0]
        if first[i] > 0:
            positions[at] = start + first[i] - 1
            step[at] = STANDS
            at += 1
        for p in range(start + first[i], start + (entries[e, 1] >> CLASS_BITS)):
            positions[at] = p
            # The difference may not fit: then it is negative, and times are surely apart.
            apart = arena[p, 0] - arena[p - 1, 0]
            chained = p > start and (span == 0 or (apart >= 0 and apart < span))
            step[at] = FOLLOWS if chained else FIRST
            at += 1


@jit
def add_longs(
    cells: NDArray[np.int64], update: int, folded: int, positions: NDArray[np.int64], step: NDArray[np.uint8]
) -> None:
    for i in range(positions.shape[0]):
        p = positions[i]
        if step[i] == FIRST:
            cells[p, folded] = cells[p, update]
        elif step[i] == FOLLOWS:
            cells[p, folded] = cells[positions[i - 1], folded] + cells[p, update]


@jit
def add_doubles(
    cells: NDArray[np.float64],
    update: int,
    folded: int,
    narrow: bool,
    positions: NDArray[np.int64],
    step: NDArray[np.uint8],
) -> None:
    """`narrow` sums are floats: rounded at each step, as they are when they are written and read again."""
    for i in range(positions.shape[0]):
        p = positions[i]
        if step[i] == FIRST:
            cells[p, folded] = cells[p, update]
        elif step[i] == FOLLOWS:
            total = cells[positions[i - 1], folded] + cells[p, update]
            cells[p, folded] = np.float64(np.float32(total)) if narrow else total


@jit
def vector_sizes(
    update: NDArray[np.int64], folded: NDArray[np.int64], step: NDArray[np.uint8], out: NDArray[np.int64]
) -> int:
    """Offsets of the sums of vectors with those offsets: a sum is as long as the longest. Returns their items."""
    out[0] = 0
    for i in range(step.shape[0]):
        size = update[i + 1] - update[i]
        if step[i] == STANDS:
            size = folded[i + 1] - folded[i]
        elif step[i] == FOLLOWS:
            size = max(size, out[i] - out[i - 1])
        out[i + 1] = out[i] + size
    return int(out[step.shape[0]])


@jit
def add_vectors(
    update: NDArray[np.int64],
    updates: NDArray[np.generic],
    folded: NDArray[np.int64],
    folds: NDArray[np.generic],
    step: NDArray[np.uint8],
    out: NDArray[np.int64],
    sums: NDArray[np.generic],
) -> None:
    """The sums themselves, item by item, behind each other as `out` says."""
    for i in range(step.shape[0]):
        at = out[i]
        size = out[i + 1] - at
        if step[i] == STANDS:
            for j in range(size):
                sums[at + j] = folds[folded[i] + j]
            continue
        own = update[i + 1] - update[i]
        before = at - out[i - 1] if step[i] == FOLLOWS else 0
        for j in range(size):
            if j < before and j < own:
                sums[at + j] = sums[out[i - 1] + j] + updates[update[i] + j]
            elif j < own:
                sums[at + j] = updates[update[i] + j]
            else:
                sums[at + j] = sums[out[i - 1] + j]
