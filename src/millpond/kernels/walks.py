"""Walks over lists of edges: which vertices lie ahead, and which paths lead from one vertex to another.

Vertices are numbers from 0. The edges of vertex x are `begin[x]:end[x]` of `ends`, `times` and `until`, oldest first: each
an addition, with the vertex at its other end, its time, and the last time at which it is there. A walk as of `high` by
edges from `since` on takes those with since <= time <= high <= until.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import inlined, jit

ALWAYS = np.iinfo(np.int64).max
FORWARD_MAX = 3
# Most vertices on the way meet nothing. A small table that stays in the nearest cache says so of nearly all of them.
SIEVE = 1 << 13


@jit
def mark_until(
    offsets: NDArray[np.int64],
    ends: NDArray[np.int64],
    times: NDArray[np.int64],
    vertices: int,
    added: NDArray[np.int64],
    until: NDArray[np.int64],
) -> None:
    """For each event of each list, oldest first, the last time before the next one of the same end.

    An addition that is replaced at its own time is one no more.
    """
    latest = np.empty(vertices, np.int64)
    seen = np.zeros(vertices, np.int64)
    for i in range(offsets.shape[0] - 1):
        for at in range(offsets[i + 1] - 1, offsets[i] - 1, -1):
            end = ends[at]
            until[at] = ALWAYS
            if seen[end] == i + 1:
                if latest[end] == times[at]:
                    added[at] = 0
                else:
                    until[at] = latest[end] - 1
            seen[end] = i + 1
            latest[end] = times[at]


@inlined
def first_since(times: NDArray[np.int64], begin: int, end: int, since: int) -> int:
    """The first of the sorted times that is not below `since`."""
    while begin < end:
        middle = (begin + end) >> 1
        if times[middle] < since:
            begin = middle + 1
        else:
            end = middle
    return begin


@jit
def any_edge(
    starts: NDArray[np.int64],
    since: NDArray[np.int64],
    highs: NDArray[np.int64],
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    times: NDArray[np.int64],
    until: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> None:
    """Whether a walk from there can take a first step."""
    for i in range(starts.shape[0]):
        start = starts[i]
        out[i] = 0
        for at in range(first_since(times, begin[start], end[start], since[i]), end[start]):
            if times[at] > highs[i]:
                break
            if until[at] >= highs[i]:
                out[i] = 1
                break


@jit
def mark_ahead(
    starts: NDArray[np.int64],
    steps: int,
    wanted: NDArray[np.uint8],
    since: NDArray[np.int64],
    highs: NDArray[np.int64],
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    ends: NDArray[np.int64],
    times: NDArray[np.int64],
    until: NDArray[np.int64],
    marks: NDArray[np.uint8],
) -> None:
    """Marks the vertices that the wanted walks reach in one or in two steps."""
    for i in range(starts.shape[0]):
        if wanted[i] == 0:
            continue
        high = highs[i]
        start = starts[i]
        for at in range(first_since(times, begin[start], end[start], since[i]), end[start]):
            if times[at] > high:
                break
            if until[at] < high:
                continue
            middle = ends[at]
            if steps == 1:
                marks[middle] = 1
                continue
            for then in range(first_since(times, begin[middle], end[middle], since[i]), end[middle]):
                if times[then] > high:
                    break
                if until[then] >= high:
                    marks[ends[then]] = 1


@jit
def paths(
    first: int,
    starts: NDArray[np.int64],
    targets: NDArray[np.int64],
    hops: NDArray[np.int64],
    since: NDArray[np.int64],
    highs: NDArray[np.int64],
    limit: int,
    out_begin: NDArray[np.int64],
    out_end: NDArray[np.int64],
    out_ends: NDArray[np.int64],
    out_times: NDArray[np.int64],
    out_until: NDArray[np.int64],
    in_begin: NDArray[np.int64],
    in_end: NDArray[np.int64],
    in_ends: NDArray[np.int64],
    in_times: NDArray[np.int64],
    in_until: NDArray[np.int64],
    row_stops: NDArray[np.int64],
    path_stops: NDArray[np.int64],
    vertices: NDArray[np.int64],
) -> int:
    """The paths from `starts[i]` to `targets[i]`, from row `first` on, that visit no vertex twice.

    `hops` are ascending; `since` has a row for each of them. A path of n hops is walked from both ends: n // 2 edges back
    from the target are kept by the vertex where they begin, and the others are followed from the start to meet them. Of a
    row at most `limit` paths are taken: fewest hops first, then by the edges from the start on, oldest first.

    Row i has the paths up to `row_stops[i]`, path p the vertices up to `path_stops[p]`. Returns the row before which the
    room for paths might not have been enough; there is some for one row.
    """
    count = out_begin.shape[0]
    head = np.empty(count, np.int64)
    stamps = np.zeros(count, np.int64)
    sieve = np.zeros(SIEVE, np.int32)
    ahead = np.zeros(SIEVE, np.int32)
    stamp = 0
    # The edges back from a target are at most those there are, each once; a link is the vertex behind, and the next link.
    behind = np.empty(in_ends.shape[0] + 1, np.int64)
    following = np.empty(in_ends.shape[0] + 1, np.int64)
    path = np.empty(FORWARD_MAX + 1, np.int64)
    cursor = np.empty(FORWARD_MAX + 1, np.int64)
    stop = np.empty(FORWARD_MAX + 1, np.int64)
    paths_made = 0
    made = 0
    longest = hops[hops.shape[0] - 1] + 1
    for i in range(first, starts.shape[0]):
        if paths_made + limit > path_stops.shape[0] or made + limit * longest > vertices.shape[0]:
            return i
        start = starts[i]
        target = targets[i]
        high = highs[i]
        room = paths_made + limit
        for h in range(hops.shape[0]):
            if start == target:
                break
            low = since[h, i]
            backward = hops[h] // 2
            forward = hops[h] - backward
            stamp += 1
            links = 0
            if backward == 0:
                sieve[target & (SIEVE - 1)] = stamp
                stamps[target] = stamp
                head[target] = 0
                behind[0] = -1
                following[0] = -1
                links = 1
            else:
                both = forward == 2 and backward == 2
                if both:
                    # Of the many edges two before the target only those are kept that may be two behind the start.
                    for at in range(
                        first_since(out_times, out_begin[start], out_end[start], low), out_end[start]
                    ):
                        middle = out_ends[at]
                        for then in range(out_begin[middle], out_end[middle]):
                            ahead[out_ends[then] & (SIEVE - 1)] = stamp
                # From the newest down, so that the links of a vertex come oldest first.
                base = first_since(in_times, in_begin[target], in_end[target], low)
                for at in range(in_end[target] - 1, base - 1, -1):
                    if in_times[at] > high or in_until[at] < high:
                        continue
                    last = in_ends[at]
                    if last == target or last == start:
                        continue
                    if backward == 1:
                        sieve[last & (SIEVE - 1)] = stamp
                        stamps[last] = stamp
                        head[last] = links
                        behind[links] = -1
                        following[links] = -1
                        links += 1
                        continue
                    beyond = first_since(in_times, in_begin[last], in_end[last], low)
                    for then in range(in_end[last] - 1, beyond - 1, -1):
                        if both and ahead[in_ends[then] & (SIEVE - 1)] != stamp:
                            continue
                        if in_times[then] > high or in_until[then] < high:
                            continue
                        meeting = in_ends[then]
                        if meeting == target or meeting == last or meeting == start:
                            continue
                        following[links] = head[meeting] if stamps[meeting] == stamp else -1
                        behind[links] = last
                        sieve[meeting & (SIEVE - 1)] = stamp
                        stamps[meeting] = stamp
                        head[meeting] = links
                        links += 1
            if links == 0:
                continue
            depth = 0
            path[0] = start
            cursor[0] = first_since(out_times, out_begin[start], out_end[start], low)
            stop[0] = out_end[start]
            while depth >= 0 and paths_made < room:
                at = cursor[depth]
                if depth + 1 == forward:
                    while at < stop[depth] and sieve[out_ends[at] & (SIEVE - 1)] != stamp:
                        at += 1
                if at >= stop[depth] or out_times[at] > high:
                    depth -= 1
                    continue
                cursor[depth] = at + 1
                if out_until[at] < high:
                    continue
                vertex = out_ends[at]
                if depth + 1 == forward and stamps[vertex] != stamp:
                    continue
                visited = False
                for d in range(depth + 1):
                    visited |= path[d] == vertex
                if visited:
                    continue
                if depth + 1 < forward:
                    if vertex != target:
                        depth += 1
                        path[depth] = vertex
                        cursor[depth] = first_since(out_times, out_begin[vertex], out_end[vertex], low)
                        stop[depth] = out_end[vertex]
                    continue
                link = head[vertex]
                while link >= 0 and paths_made < room:
                    last = behind[link]
                    visited = False
                    for d in range(depth + 1):
                        visited |= path[d] == last
                    if not visited:
                        for d in range(depth + 1):
                            vertices[made] = path[d]
                            made += 1
                        vertices[made] = vertex
                        made += 1
                        if last >= 0:
                            vertices[made] = last
                            made += 1
                        if backward > 0:
                            vertices[made] = target
                            made += 1
                        path_stops[paths_made] = made
                        paths_made += 1
                    link = following[link]
        row_stops[i] = paths_made
    return int(starts.shape[0])
