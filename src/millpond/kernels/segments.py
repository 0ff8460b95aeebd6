"""Rows of many groups in one arena of words: which segments are whose.

A group is a chain of parts, and a part is two lists of segments: rows read back from disk (`OLD`), and those that came
since (`NEW`). A merge joins two chains. A segment is rows of one group from one batch, at an address in words.

Tables are arrays of longs, with the columns below; -1 ends a list. Parts and segments that are free are chained, too.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import inlined, jit
from millpond.kernels._prefetch import AHEAD, FAR_AHEAD, prefetch

Longs = NDArray[np.int64]

# A group: its first and last part, and when it is expected to be taken.
FIRST: Final = 0
LAST: Final = 1
TRIGGER: Final = 2
GROUP_FIELDS: Final = 3
# A part: of each of its lists head, tail, rows and words. Its generation tells it from an earlier one of its number.
NEXT: Final = 0
OWNER: Final = 1
NEW_HEAD: Final = 2
NEW_TAIL: Final = 3
NEW_ROWS: Final = 4
NEW_SIZE: Final = 5
DISK_ROWS: Final = 6
GENERATION: Final = 7
OLD_HEAD: Final = 8
OLD_TAIL: Final = 9
OLD_ROWS: Final = 10
OLD_SIZE: Final = 11
DISK_WORDS: Final = 12
DISK_ENTRIES: Final = 13
PART_FIELDS: Final = 14
# Of a list, from its head on.
_TAIL: Final = 1
_ROWS: Final = 2
_SIZE: Final = 3
# A segment. Its rows have the number of their form above them.
ADDRESS: Final = 0
WORDS: Final = 1
ROWS: Final = 2
FOLLOWER: Final = 3
SEGMENT_FIELDS: Final = 4
FORM_SHIFT: Final = 40
ROWS_MASK: Final = (1 << FORM_SHIFT) - 1
# What is counted.
PARTS_USED: Final = 0
PARTS_FREE: Final = 1
SEGMENTS_USED: Final = 2
SEGMENTS_FREE: Final = 3
NEW_WORDS: Final = 4
OLD_WORDS: Final = 5
LIVE_DISK_WORDS: Final = 6
LIVE_DISK_ENTRIES: Final = 7
PARTS_ON_DISK: Final = 8
PARTS_LOADED: Final = 9
CONTROL_SIZE: Final = 10

NEVER: Final = np.iinfo(np.int64).max


@jit
def cluster(groups: Longs, marks: Longs, order: Longs, distinct: Longs, starts: Longs) -> tuple[int, bool]:
    """Rows by group, groups as they first appear, the rows of each in their order.

    `order[starts[j]:starts[j + 1]]` are the rows of `distinct[j]`. How many groups there are, and whether the rows lie
    so already. `marks` has a zero for every group, before and after.
    """
    count = 0
    last = groups.shape[0] - 1
    for i in range(groups.shape[0]):
        g = groups[i]
        prefetch(marks, groups[min(i + FAR_AHEAD, last)])
        if marks[g] == 0:
            distinct[count] = g
            count += 1
        marks[g] += 1
    begin = 0
    for j in range(count):
        g = distinct[j]
        starts[j] = begin
        begin += marks[g]
        marks[g] = starts[j]
    starts[count] = begin
    in_place = True
    for i in range(groups.shape[0]):
        g = groups[i]
        place = marks[g]
        marks[g] = place + 1
        order[place] = i
        if place != i:
            in_place = False
    for j in range(count):
        marks[distinct[j]] = 0
    return count, in_place


@jit
def first_repeated(groups: Longs, marks: Longs) -> int:
    """The place of the first group that is there for a second time; -1 if there is none."""
    repeated = -1
    seen = groups.shape[0]
    for i in range(groups.shape[0]):
        if marks[groups[i]] != 0:
            repeated = i
            seen = i
            break
        marks[groups[i]] = 1
    for i in range(seen):
        marks[groups[i]] = 0
    return repeated


@inlined
def _new_part(parts: Longs, control: Longs, owner: int) -> int:
    part = control[PARTS_FREE]
    if part >= 0:
        control[PARTS_FREE] = parts[part, NEXT]
    else:
        part = control[PARTS_USED]
        control[PARTS_USED] += 1
        parts[part, GENERATION] = 0
    parts[part, NEXT] = -1
    parts[part, OWNER] = owner
    parts[part, NEW_HEAD] = -1
    parts[part, NEW_TAIL] = -1
    parts[part, OLD_HEAD] = -1
    parts[part, OLD_TAIL] = -1
    parts[part, NEW_ROWS] = 0
    parts[part, NEW_SIZE] = 0
    parts[part, OLD_ROWS] = 0
    parts[part, OLD_SIZE] = 0
    parts[part, DISK_ROWS] = 0
    parts[part, DISK_WORDS] = 0
    parts[part, DISK_ENTRIES] = 0
    return part  # type: ignore[no-any-return]


@inlined
def _add_segment(
    parts: Longs, segments: Longs, control: Longs, part: int, head: int, address: int, words: int, rows: int
) -> None:
    """Behind the last of the list whose head is in that column."""
    segment = control[SEGMENTS_FREE]
    if segment >= 0:
        control[SEGMENTS_FREE] = segments[segment, FOLLOWER]
    else:
        segment = control[SEGMENTS_USED]
        control[SEGMENTS_USED] += 1
    segments[segment, ADDRESS] = address
    segments[segment, WORDS] = words
    segments[segment, ROWS] = rows
    segments[segment, FOLLOWER] = -1
    tail = parts[part, head + _TAIL]
    if tail < 0:
        parts[part, head] = segment
    else:
        segments[tail, FOLLOWER] = segment
    parts[part, head + _TAIL] = segment
    parts[part, head + _ROWS] += rows & ROWS_MASK
    parts[part, head + _SIZE] += words


@inlined
def _drop_list(parts: Longs, segments: Longs, control: Longs, part: int, head: int) -> int:
    """Frees the segments of a list; how many words they had."""
    words = parts[part, head + _SIZE]
    if parts[part, head] >= 0:
        segments[parts[part, head + _TAIL], FOLLOWER] = control[SEGMENTS_FREE]
        control[SEGMENTS_FREE] = parts[part, head]
        parts[part, head] = -1
        parts[part, head + _TAIL] = -1
        parts[part, head + _ROWS] = 0
        parts[part, head + _SIZE] = 0
    return words  # type: ignore[no-any-return]


@inlined
def _drop_loaded(parts: Longs, segments: Longs, control: Longs, part: int) -> None:
    if parts[part, OLD_ROWS] != 0:
        control[OLD_WORDS] -= _drop_list(parts, segments, control, part, OLD_HEAD)
        control[PARTS_LOADED] -= 1


@inlined
def _prefetch_parts(names: Longs, i: int, groups: Longs, parts: Longs) -> None:
    """The groups whose turn comes, and sooner their last parts."""
    last = names.shape[0] - 1
    prefetch(groups, names[min(i + 2 * FAR_AHEAD, last)])
    prefetch(parts, groups[names[min(i + FAR_AHEAD, last)], LAST])


@jit
def add_rows(
    distinct: Longs,
    starts: Longs,
    bounds: Longs,
    form: int,
    groups: Longs,
    parts: Longs,
    segments: Longs,
    control: Longs,
) -> None:
    """Rows `starts[j]..starts[j + 1]` of a batch are those of group `distinct[j]`, at words `bounds[j]..bounds[j + 1]`."""
    last = distinct.shape[0] - 1
    for j in range(distinct.shape[0]):
        g = distinct[j]
        _prefetch_parts(distinct, j, groups, parts)
        soon = groups[distinct[min(j + AHEAD, last)], LAST]
        if soon >= 0:
            prefetch(segments, parts[soon, NEW_TAIL])
        part = groups[g, LAST]
        if part < 0:
            part = _new_part(parts, control, g)
            groups[g, FIRST] = part
            groups[g, LAST] = part
        rows = starts[j + 1] - starts[j]
        words = bounds[j + 1] - bounds[j]
        _add_segment(parts, segments, control, part, NEW_HEAD, bounds[j], words, rows | (form << FORM_SHIFT))
        control[NEW_WORDS] += words


@jit
def add_loaded(
    entry_parts: Longs,
    entry_rows: Longs,
    bounds: Longs,
    parts: Longs,
    segments: Longs,
    control: Longs,
) -> None:
    """Entries of the index have been read: entry i of that part is at words `bounds[i]..bounds[i + 1]`."""
    for i in range(entry_parts.shape[0]):
        part = entry_parts[i]
        if parts[part, OLD_ROWS] == 0:
            control[PARTS_LOADED] += 1
        words = bounds[i + 1] - bounds[i]
        _add_segment(parts, segments, control, part, OLD_HEAD, bounds[i], words, entry_rows[i])
        control[OLD_WORDS] += words


@jit
def count_rows(wanted: Longs, groups: Longs, parts: Longs, offsets: Longs) -> None:
    """Where the rows of each group begin, if they lie one group after another; the last is where they end."""
    rows = 0
    for i in range(wanted.shape[0]):
        offsets[i] = rows
        part = groups[wanted[i], FIRST]
        while part >= 0:
            rows += parts[part, DISK_ROWS] + parts[part, NEW_ROWS]
            part = parts[part, NEXT]
    offsets[wanted.shape[0]] = rows


@jit
def missing_parts(
    wanted: Longs, groups: Longs, parts: Longs, missing: Longs, owners: Longs
) -> tuple[int, int]:
    """Parts of these groups that are on disk alone, with the place of their group; and how many groups have some on disk."""
    count = 0
    on_disk = 0
    for i in range(wanted.shape[0]):
        part = groups[wanted[i], FIRST]
        has_some = 0
        while part >= 0:
            if parts[part, DISK_ROWS] != 0:
                has_some = 1
                if parts[part, OLD_ROWS] == 0:
                    missing[count] = part
                    owners[count] = i
                    count += 1
            part = parts[part, NEXT]
        on_disk += has_some
    return count, on_disk


@jit
def count_parts(wanted: Longs, groups: Longs, parts: Longs) -> int:
    count = 0
    for i in range(wanted.shape[0]):
        part = groups[wanted[i], FIRST]
        while part >= 0:
            count += 1
            part = parts[part, NEXT]
    return count


@jit
def collect(
    wanted: Longs,
    groups: Longs,
    parts: Longs,
    segments: Longs,
    addresses: Longs,
    rows: Longs,
) -> int:
    """The segments of these groups, in order: where each is, and its rows with their form. How many they are."""
    count = 0
    last = wanted.shape[0] - 1
    for i in range(wanted.shape[0]):
        _prefetch_parts(wanted, i, groups, parts)
        soon = groups[wanted[min(i + AHEAD, last)], LAST]
        if soon >= 0:
            prefetch(segments, parts[soon, NEW_HEAD])
        part = groups[wanted[i], FIRST]
        while part >= 0:
            for head in (OLD_HEAD, NEW_HEAD):
                segment = parts[part, head]
                while segment >= 0:
                    addresses[count] = segments[segment, ADDRESS]
                    rows[count] = segments[segment, ROWS]
                    count += 1
                    segment = segments[segment, FOLLOWER]
            part = parts[part, NEXT]
    return count


@jit
def collect_new(chosen: Longs, parts: Longs, segments: Longs, addresses: Longs, rows: Longs) -> int:
    """The same of the new rows of parts."""
    count = 0
    last = chosen.shape[0] - 1
    for i in range(chosen.shape[0]):
        prefetch(parts, chosen[min(i + FAR_AHEAD, last)])
        prefetch(segments, parts[chosen[min(i + AHEAD, last)], NEW_HEAD])
        segment = parts[chosen[i], NEW_HEAD]
        while segment >= 0:
            addresses[count] = segments[segment, ADDRESS]
            rows[count] = segments[segment, ROWS]
            count += 1
            segment = segments[segment, FOLLOWER]
    return count


@jit
def release(gone: Longs, groups: Longs, parts: Longs, segments: Longs, control: Longs) -> None:
    """These groups have no rows any more."""
    last = gone.shape[0] - 1
    for i in range(gone.shape[0]):
        g = gone[i]
        _prefetch_parts(gone, i, groups, parts)
        soon = groups[gone[min(i + AHEAD, last)], LAST]
        if soon >= 0:
            prefetch(segments, parts[soon, NEW_TAIL])
        part = groups[g, FIRST]
        while part >= 0:
            _drop_loaded(parts, segments, control, part)
            control[NEW_WORDS] -= _drop_list(parts, segments, control, part, NEW_HEAD)
            if parts[part, DISK_ROWS] != 0:
                control[PARTS_ON_DISK] -= 1
                control[LIVE_DISK_WORDS] -= parts[part, DISK_WORDS]
                control[LIVE_DISK_ENTRIES] -= parts[part, DISK_ENTRIES]
                parts[part, DISK_ROWS] = 0
            parts[part, OWNER] = -1
            parts[part, GENERATION] += 1
            following = parts[part, NEXT]
            parts[part, NEXT] = control[PARTS_FREE]
            control[PARTS_FREE] = part
            part = following
        groups[g, FIRST] = -1
        groups[g, LAST] = -1
        groups[g, TRIGGER] = NEVER


@jit
def merge(into: Longs, gone: Longs, groups: Longs, parts: Longs) -> None:
    """The chain of `gone[i]` goes behind that of `into[i]`, one pair after another."""
    for i in range(into.shape[0]):
        g, other = into[i], gone[i]
        part = groups[other, FIRST]
        if g != other and part >= 0:
            if groups[g, LAST] < 0:
                groups[g, FIRST] = part
            else:
                parts[groups[g, LAST], NEXT] = part
            groups[g, LAST] = groups[other, LAST]
            while part >= 0:
                parts[part, OWNER] = g
                part = parts[part, NEXT]
        if g != other:
            groups[other, FIRST] = -1
            groups[other, LAST] = -1
            groups[other, TRIGGER] = NEVER


@jit
def expect(
    expected: Longs,
    triggers: Longs,
    horizon: int,
    groups: Longs,
    parts: Longs,
    segments: Longs,
    control: Longs,
) -> int:
    """Triggers of groups. What was loaded of one that is now expected after the horizon is let go: how many parts."""
    evicted = 0
    for i in range(expected.shape[0]):
        g = expected[i]
        groups[g, TRIGGER] = triggers[i]
        if control[PARTS_LOADED] != 0 and triggers[i] > horizon:
            part = groups[g, FIRST]
            while part >= 0:
                if parts[part, OLD_ROWS] != 0:
                    _drop_loaded(parts, segments, control, part)
                    evicted += 1
                part = parts[part, NEXT]
    return evicted


@jit
def move_live(source: Longs, target: Longs, parts: Longs, segments: Longs, control: Longs) -> int:
    """All segments in use go to the beginning of `target`, each list in one piece; how many words they take."""
    used = 0
    last = control[PARTS_USED] - 1
    for part in range(control[PARTS_USED]):
        prefetch(segments, parts[min(part + FAR_AHEAD, last), NEW_HEAD])
        soon = parts[min(part + AHEAD, last), NEW_HEAD]
        if soon >= 0:
            prefetch(source, segments[soon, ADDRESS])
        for head in (OLD_HEAD, NEW_HEAD):
            segment = parts[part, head] if parts[part, OWNER] >= 0 else -1
            while segment >= 0:
                begin = segments[segment, ADDRESS]
                for w in range(segments[segment, WORDS]):
                    target[used + w] = source[begin + w]
                segments[segment, ADDRESS] = used
                used += segments[segment, WORDS]
                segment = segments[segment, FOLLOWER]
    return used
