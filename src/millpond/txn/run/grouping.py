"""Which transactions of an epoch may run side by side. Arrays in, arrays out.

`event[j]` touches `row[j]`; rows are numbered over all tables. Only rows that some event writes to make conflicts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import jit

Longs = NDArray[np.int64]
Flags = NDArray[np.uint8]


@jit
def components(event: Longs, row: Longs, written: Flags, parent: Longs, first: Longs) -> None:
    """Joins the written rows of each event. `parent` starts as the rows themselves, `first` as -1."""
    for j in range(event.shape[0]):
        r = row[j]
        if written[r] == 0:
            continue
        while parent[r] != r:
            parent[r] = parent[parent[r]]
            r = parent[r]
        e = event[j]
        if first[e] < 0:
            first[e] = r
            continue
        s = first[e]
        while parent[s] != s:
            parent[s] = parent[parent[s]]
            s = parent[s]
        # Towards the lower row, so that the outcome does not depend on chance.
        if r < s:
            parent[s] = r
            first[e] = r
        else:
            parent[r] = s
            first[e] = s


@jit
def component_sizes(first: Longs, parent: Longs, sizes: Longs) -> None:
    """`first` becomes the component of each event, -1 where it conflicts with none; `sizes` counts them."""
    for e in range(first.shape[0]):
        r = first[e]
        if r >= 0:
            while parent[r] != r:
                parent[r] = parent[parent[r]]  # else a long chain would be walked for each of its events
                r = parent[r]
            first[e] = r
            sizes[r] += 1


@jit
def share_out(order: Longs, sizes: Longs, loads: Longs, thread_of: Longs) -> None:
    """Components, the largest first, each to the thread with the least to do."""
    for j in range(order.shape[0]):
        r = order[j]
        best = 0
        for t in range(1, loads.shape[0]):
            if loads[t] < loads[best]:
                best = t
        thread_of[r] = best
        loads[best] += sizes[r]


@jit
def part_owners(owner: Longs, following: Longs, out: Longs) -> None:
    """Events apart by owner, in order: those of owner t from where `following[t]` starts."""
    for e in range(owner.shape[0]):
        t = owner[e]
        out[following[t]] = e
        following[t] += 1


@jit
def levels(starts: Longs, row: Longs, write: Flags, wrote: Longs, read: Longs, level: Longs) -> None:
    """The round of each event: after every earlier one that it conflicts with.

    Event e touches `row[starts[e]:starts[e + 1]]`. `wrote` and `read` start at 0; rounds count from 0.
    """
    for e in range(level.shape[0]):
        at = 0
        for j in range(starts[e], starts[e + 1]):
            r = row[j]
            at = max(at, wrote[r])
            if write[j] != 0:
                at = max(at, read[r])
        level[e] = at
        for j in range(starts[e], starts[e + 1]):
            r = row[j]
            if write[j] != 0:
                wrote[r] = max(wrote[r], at + 1)
            else:
                read[r] = max(read[r], at + 1)


@jit
def part_kinds(
    kind_of: Longs, order: Longs, following: Longs, starts: Longs, place_of: Longs, by_kind: Longs
) -> None:
    """Events apart by kind, in order: those of kind k from `starts[k]` on, where `following` starts too."""
    for e in range(kind_of.shape[0]):
        k = kind_of[e]
        at = following[k]
        following[k] = at + 1
        place_of[e] = at - starts[k]
        by_kind[at] = order[e]


@jit
def kinds_of(offsets: Longs, data: Flags, name_offsets: Longs, names: Flags, out: Longs) -> int:
    """Which of the names each text is. The first that is none of them, or -1."""
    for i in range(out.shape[0]):
        start = offsets[i]
        size = offsets[i + 1] - start
        found = -1
        for k in range(name_offsets.shape[0] - 1):
            at = name_offsets[k]
            if name_offsets[k + 1] - at == size:
                same = True
                for j in range(size):
                    if data[start + j] != names[at + j]:
                        same = False
                        break
                if same:
                    found = k
                    break
        if found < 0:
            return i
        out[i] = found
    return -1


@jit
def in_order(times: Longs, seqs: Longs) -> bool:
    """Whether rows come in the order of (time, seq). `seqs` may be empty."""
    some = seqs.shape[0] > 0
    for i in range(1, times.shape[0]):
        if times[i] < times[i - 1]:
            return False
        if some and times[i] == times[i - 1] and seqs[i] < seqs[i - 1]:
            return False
    return True


@jit
def put_results(
    order: Longs,
    kind_of: Longs,
    place_of: Longs,
    status: NDArray[np.int32],
    kind: int,
    returned: int,
    results: Any,
    values: Any,
    valid: Flags,
    start: int,
    stop: int,
) -> None:
    """The results of one kind to those events from `start` to `stop` that returned any."""
    if results.shape[0] == 0:
        return
    for e in range(start, stop):
        # Without branches: kinds come in no order that a processor could guess.
        is_result = (kind_of[e] == kind) & (status[e] == returned)
        at = order[e]
        result = results[place_of[e] * is_result]
        values[at] = result if is_result else values[at]
        valid[at] |= is_result


@jit
def spread_rows(places: Longs, rows: Longs, flat: Longs) -> None:
    """Row numbers to their places; a place is doubled, its last bit is a flag."""
    for j in range(places.shape[0]):
        flat[places[j] >> 1] = rows[j]


@jit
def events_of(places: Longs, offsets: Longs, out: Longs) -> None:
    """The event of each place, where both go up: places by their events, offsets by event."""
    e = 0
    last = offsets.shape[0] - 1
    for j in range(places.shape[0]):
        at = places[j] >> 1
        while e < last and offsets[e + 1] <= at:
            e += 1
        out[j] = e
