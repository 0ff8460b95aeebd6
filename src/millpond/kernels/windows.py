"""Windows: rows folded into cells, cells merged, and the sessions of keys. Groups and entries are row numbers of cells.

Cells of longs and of doubles are apart. An operation says how a cell takes in another: `LOW` is the lower half of a sum of
128 bits whose upper half is the cell behind it, `TOP` the first of several cells, the largest first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import inlined, jit

ADD, LOW, HIGH, MIN, MAX, TOP, REST = 0, 1, 2, 3, 4, 5, 6
"""`HIGH` and `REST` are seen to by the cell before them."""
Longs = NDArray[np.int64]
Doubles = NDArray[np.float64]


@inlined
def _add_wide(cells: Longs, at: int, c: int, low: int, high: int) -> None:
    before = np.uint64(cells[at, c])
    after = before + np.uint64(low)
    cells[at, c + 1] += high + (1 if after < before else 0)
    cells[at, c] = np.int64(after)


@jit
def pane_starts(times: Longs, size: int, offset: int, out: Longs) -> None:
    """The beginning of the pane that each time falls into; clamped where that lies before all time."""
    for i in range(times.shape[0]):
        t = times[i]
        since = (t % size - offset) % size
        out[i] = t - since if t >= np.int64(-(2**63)) + since else np.int64(-(2**63))


@jit
def last_ends(times: Longs, size: int, slide: int, offset: int, out: Longs) -> None:
    """The end of the last window that each time falls into; clamped where that lies behind all time."""
    for i in range(times.shape[0]):
        t = times[i]
        left = size - (t % slide - offset) % slide
        out[i] = t + left if t <= np.int64(2**63 - 1) - left else np.int64(2**63 - 1)


@jit
def fold_longs(
    groups: Longs, values: Longs, valid: NDArray[np.uint8], op: int, width: int, c: int, cells: Longs
) -> None:
    """Takes values into cell `c` of their groups. `valid` has a flag for each, or nothing where all are."""
    all_valid = valid.shape[0] == 0
    for i in range(groups.shape[0]):
        if not (all_valid or valid[i]):
            continue
        g, v = groups[i], values[i]
        if op == ADD:
            cells[g, c] += v
        elif op == LOW:
            _add_wide(cells, g, c, v, -1 if v < 0 else 0)
        elif op == MIN:
            cells[g, c] = min(cells[g, c], v)
        elif op == MAX:
            cells[g, c] = max(cells[g, c], v)
        elif op == TOP:
            top_long(cells, g, c, width, v)


@jit
def fold_doubles(
    groups: Longs, values: Doubles, valid: NDArray[np.uint8], op: int, width: int, c: int, cells: Doubles
) -> None:
    """As `fold_longs`. NaN is above all numbers."""
    all_valid = valid.shape[0] == 0
    for i in range(groups.shape[0]):
        if not (all_valid or valid[i]):
            continue
        g, v = groups[i], values[i]
        if op == ADD:
            cells[g, c] += v
        elif op == MIN:
            if v < cells[g, c] or np.isnan(cells[g, c]):
                cells[g, c] = v
        elif op == MAX:
            if v > cells[g, c] or np.isnan(v):
                cells[g, c] = v
        elif op == TOP:
            top_double(cells, g, c, width, v)


@jit
def count_rows(groups: Longs, valid: NDArray[np.uint8], c: int, cells: Longs) -> None:
    all_valid = valid.shape[0] == 0
    for i in range(groups.shape[0]):
        if all_valid or valid[i]:
            cells[groups[i], c] += 1


@jit
def top_long(cells: Longs, at: int, c: int, width: int, value: int) -> None:
    last = c + width - 1
    if value <= cells[at, last]:
        return
    place = last
    while place > c and cells[at, place - 1] < value:
        cells[at, place] = cells[at, place - 1]
        place -= 1
    cells[at, place] = value


@jit
def top_double(cells: Doubles, at: int, c: int, width: int, value: float) -> None:
    last = c + width - 1
    if not (value > cells[at, last] or (np.isnan(value) and not np.isnan(cells[at, last]))):
        return
    place = last
    while place > c and (
        cells[at, place - 1] < value or (np.isnan(value) and not np.isnan(cells[at, place - 1]))
    ):
        cells[at, place] = cells[at, place - 1]
        place -= 1
    cells[at, place] = value


@jit
def merge_longs(entries: Longs, others: Longs, ops: Longs, widths: Longs, cells: Longs) -> None:
    """Row i of `others` is taken into row `entries[i]` of `cells`."""
    for i in range(entries.shape[0]):
        e = entries[i]
        for c in range(ops.shape[0]):
            op = ops[c]
            v = others[i, c]
            if op == ADD:
                cells[e, c] += v
            elif op == LOW:
                _add_wide(cells, e, c, v, others[i, c + 1])
            elif op == MIN:
                cells[e, c] = min(cells[e, c], v)
            elif op == MAX:
                cells[e, c] = max(cells[e, c], v)
            elif op == TOP:
                for place in range(widths[c]):
                    top_long(cells, e, c, widths[c], others[i, c + place])


@jit
def merge_doubles(entries: Longs, others: Doubles, ops: Longs, widths: Longs, cells: Doubles) -> None:
    for i in range(entries.shape[0]):
        e = entries[i]
        for c in range(ops.shape[0]):
            op = ops[c]
            v = others[i, c]
            if op == ADD:
                cells[e, c] += v
            elif op == MIN:
                if v < cells[e, c] or np.isnan(cells[e, c]):
                    cells[e, c] = v
            elif op == MAX:
                if v > cells[e, c] or np.isnan(v):
                    cells[e, c] = v
            elif op == TOP:
                for place in range(widths[c]):
                    top_double(cells, e, c, widths[c], others[i, c + place])


@jit
def dense_groups(ids: Longs, panes: Longs, pane_count: int, table: Longs, out: Longs, firsts: Longs) -> int:
    """Numbers the pairs of key and pane in the order in which they come; `firsts` has the first row of each.

    `table` has a place for each possible pair, all -1. Returns how many there are.
    """
    count = 0
    for i in range(ids.shape[0]):
        at = ids[i] * pane_count + panes[i]
        g = table[at]
        if g < 0:
            g = count
            table[at] = g
            firsts[g] = i
            count += 1
        out[i] = g
    return count


@jit
def runs_of_keys(
    ids: Longs, starts: Longs, ends: Longs, touching: bool, current: Longs,
    run_first: Longs, run_start: Longs, run_end: Longs, out: Longs,
) -> int:  # fmt: skip
    """Joins rows of a key to the run of the row before, where they overlap: a first step towards sessions, in any order.

    `current` has -1 for each key. Returns how many runs there are; `out` is the one of each row.
    """
    count = 0
    for i in range(ids.shape[0]):
        k = ids[i]
        r = current[k]
        if r >= 0 and _overlap(starts[i], ends[i], run_start[r], run_end[r], touching):
            run_start[r] = min(run_start[r], starts[i])
            run_end[r] = max(run_end[r], ends[i])
        else:
            r = count
            count += 1
            current[k] = r
            run_first[r] = i
            run_start[r] = starts[i]
            run_end[r] = ends[i]
        out[i] = r
    return count


@inlined
def _overlap(start: int, end: int, other_start: int, other_end: int, touching: bool) -> bool:
    if touching:
        return bool(start <= other_end and other_start <= end)
    return bool(start < other_end and other_start < end)


@jit
def join_sessions(
    entries: Longs, starts: Longs, ends: Longs, touching: bool, first: int,
    heads: Longs, node_start: Longs, node_end: Longs, node_next: Longs, node_entry: Longs,
    free: Longs, control: Longs, out: Longs, into: Longs, gone: Longs, forward: Longs,
    order: Longs, last: Longs,
) -> int:  # fmt: skip
    """Puts spans of keys into the sessions of these keys, from span `first` on; sessions that a span bridges become one.

    The sessions of a key are a list, those that begin last first. Spans are taken in `order`, and where it has those that begin
    last first, too, the list of a key is gone through once for all of them: `last[entry]` is where the one before came to,
    -1 at first.
    `control` has: nodes in use, free nodes, pairs of merged sessions. Of pairs, `gone` is a part of `into` from now on;
    `forward[node]` is -1, or the one that it became. Free nodes are not used again before all is done. Returns the number
    of spans done: fewer than all means that there are no nodes left.
    """
    for n in range(first, entries.shape[0]):
        i = order[n]
        e = entries[i]
        target = -1
        before = -1
        node = heads[e]
        # What comes before the last one in the list begins where that ends, or later.
        if last[e] >= 0 and ends[i] <= node_end[last[e]] and starts[i] <= node_start[last[e]]:
            node = last[e]
        while node >= 0:
            if node_end[node] < starts[i]:
                break  # and so do all behind it
            following = node_next[node]
            if _overlap(starts[i], ends[i], node_start[node], node_end[node], touching):
                if target < 0:
                    target = node
                    before = node
                else:
                    node_start[target] = min(node_start[target], node_start[node])
                    node_end[target] = max(node_end[target], node_end[node])
                    pair = control[2]
                    into[pair] = target
                    gone[pair] = node
                    control[2] = pair + 1
                    forward[node] = target
                    node_entry[node] = -1
                    node_next[before] = following
            elif target < 0 and node_start[node] < starts[i]:
                break
            else:
                before = node
            node = following
        if target < 0:
            if control[1] > 0:
                control[1] -= 1
                target = free[control[1]]
            elif control[0] < node_start.shape[0]:
                target = control[0]
                control[0] += 1
            else:
                return n
            node_start[target] = starts[i]
            node_end[target] = ends[i]
            node_entry[target] = e
            if before < 0:
                node_next[target] = heads[e]
                heads[e] = target
            else:
                node_next[target] = node_next[before]
                node_next[before] = target
            forward[target] = -1
        else:
            node_start[target] = min(node_start[target], starts[i])
            node_end[target] = max(node_end[target], ends[i])
        last[e] = target
        out[i] = target
    return int(entries.shape[0])


@jit
def resolve(nodes: Longs, forward: Longs) -> None:
    """Follows each to what it became."""
    for i in range(nodes.shape[0]):
        n = nodes[i]
        while forward[n] >= 0:
            n = forward[n]
        nodes[i] = n


@jit
def first_times(entries: Longs, starts: Longs, ends: Longs, used: int) -> tuple[int, int]:
    """The earliest start and the earliest end of sessions."""
    first_start = first_end = np.iinfo(np.int64).max
    for node in range(used):
        if entries[node] >= 0:
            first_start = min(first_start, starts[node])
            first_end = min(first_end, ends[node])
    return first_start, first_end


@jit
def ended_sessions(entries: Longs, ends: Longs, used: int, watermark: int, out: Longs) -> int:
    """The sessions that end at the watermark or before; how many they are."""
    count = 0
    for node in range(used):
        if entries[node] >= 0 and ends[node] <= watermark:
            out[count] = node
            count += 1
    return count


@jit
def sessions_of(entries: Longs, heads: Longs, node_next: Longs, out: Longs) -> int:
    """The sessions of these keys; how many they are. With no room for any, they are only counted."""
    count = 0
    for i in range(entries.shape[0]):
        node = heads[entries[i]]
        while node >= 0:
            if count < out.shape[0]:
                out[count] = node
            count += 1
            node = node_next[node]
    return count


@jit
def unlink(
    nodes: Longs, heads: Longs, node_next: Longs, node_entry: Longs, free: Longs, control: Longs
) -> None:
    """Takes sessions out of the lists of their keys; their nodes are free."""
    for i in range(nodes.shape[0]):
        node_entry[nodes[i]] = -2 - node_entry[nodes[i]]
    for i in range(nodes.shape[0]):
        if node_entry[nodes[i]] == -1:
            continue  # with another of its key
        e = -2 - node_entry[nodes[i]]
        node = heads[e]
        before = -1
        while node >= 0:
            following = node_next[node]
            if node_entry[node] >= 0:
                before = node
            else:
                if before < 0:
                    heads[e] = following
                else:
                    node_next[before] = following
                node_entry[node] = -1
                free[control[1]] = node
                control[1] += 1
            node = following


@jit
def order_by(ids: Longs, count: int, offsets: Longs, order: Longs) -> None:
    """Rows in the order of their ids, of which there are so many; those of one id stay as they are."""
    for i in range(offsets.shape[0]):
        offsets[i] = 0
    for i in range(ids.shape[0]):
        offsets[ids[i] + 1] += 1
    for g in range(count):
        offsets[g + 1] += offsets[g]
    cursor = offsets[:count].copy()
    for i in range(ids.shape[0]):
        order[cursor[ids[i]]] = i
        cursor[ids[i]] += 1


@jit
def percentiles(
    values: Doubles, offsets: Longs, share: float, out: Doubles, valid: NDArray[np.uint8]
) -> None:
    """Of each group's values, which are in order, the one at that share of the way, between two in proportion."""
    for g in range(out.shape[0]):
        b, e = offsets[g], offsets[g + 1]
        valid[g] = e > b
        out[g] = 0.0
        if e > b:
            place = share * (e - b - 1)
            low = int(np.floor(place))
            high = min(low + 1, e - b - 1)
            weight = place - low
            lower, upper = values[b + low], values[b + high]
            out[g] = lower
            if weight != 0.0 and lower != upper:
                # The difference of numbers may be beyond all numbers where what lies between them is not.
                between = lower + (upper - lower) * weight
                out[g] = between if np.isfinite(upper - lower) else lower * (1.0 - weight) + upper * weight


@inlined
def _is_limited(start: int, longest: int) -> bool:
    """Whether a part that begins there has to end before time does."""
    return bool(longest > 0 and start <= np.int64(2**63 - 1) - longest)


@jit
def cut(
    groups: Longs, times: Longs, ends: Longs, cuts: NDArray[np.uint8], longest: int, touching: bool,
    part_of: Longs, starts: Longs, stops: Longs,
) -> int:  # fmt: skip
    """Numbers the parts; where each begins and ends. A part that is cut ends where the cut is."""
    count = 0
    was_cut = False
    for i in range(groups.shape[0]):
        t = times[i]
        p = count - 1
        fresh = i == 0 or groups[i] != groups[i - 1] or was_cut
        if not fresh:
            apart = t > stops[p] if touching else t >= stops[p]
            fresh = apart or (_is_limited(starts[p], longest) and t >= starts[p] + longest)
        if fresh:
            p = count
            count += 1
            starts[p] = t
            stops[p] = t
        stop = ends[i]
        if _is_limited(starts[p], longest):
            stop = min(stop, starts[p] + longest)
        stops[p] = max(stops[p], stop)
        was_cut = cuts[i] != 0
        if was_cut:
            stops[p] = t + 1 if t < np.int64(2**63 - 1) else t
        part_of[i] = p
    return count
