"""Segments on disk: entries of an index say where the rows of parts are in a log of words.

An entry is a row of longs with the columns below. It is live as long as its part has the generation that it names.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from millpond.kernels import segments as at
from millpond.kernels._jit import jit
from millpond.kernels._prefetch import AHEAD, FAR_AHEAD, prefetch
from millpond.kernels.segments import _drop_list, _drop_loaded

Longs = NDArray[np.int64]

# Where its rows begin, in bytes; how many words they have; rows and form as in a segment.
PART: Final = 0
OFFSET: Final = 1
WORDS: Final = 2
ROWS: Final = 3
CHECKSUM: Final = 4
ENTRY_FIELDS: Final = 5
GENERATION_SHIFT: Final = 32
PART_MASK: Final = (1 << GENERATION_SHIFT) - 1
GENERATION_MASK: Final = (1 << 31) - 1


@jit
def checksums(words: Longs, begins: Longs, counts: Longs, out: Longs) -> None:
    """Of `counts[i]` words from `begins[i]` on. For damage, not for malice: it has no secret."""
    for i in range(begins.shape[0]):
        # Multiplication by an odd number loses nothing, and the shift brings high bits down.
        h = np.int64(counts[i] + 0x27D4EB2F)
        for w in range(begins[i], begins[i] + counts[i]):
            h = (h ^ words[w]) * np.int64(-7046029254386353131)
            h ^= (h >> np.int64(29)) & np.int64(0x7FFFFFFFF)
        out[i] = h


@jit
def add_spilled(chosen: Longs, bounds: Longs, parts: Longs, segments: Longs, control: Longs) -> int:
    """The new rows of these parts are on disk, in an entry each. How many parts had rows from there in memory."""
    evicted = 0
    last = chosen.shape[0] - 1
    for i in range(chosen.shape[0]):
        part = chosen[i]
        prefetch(parts, chosen[min(i + FAR_AHEAD, last)])
        prefetch(segments, parts[chosen[min(i + AHEAD, last)], at.NEW_TAIL])
        if parts[part, at.OLD_ROWS] != 0:
            _drop_loaded(parts, segments, control, part)
            evicted += 1
        rows = parts[part, at.NEW_ROWS]
        control[at.NEW_WORDS] -= _drop_list(parts, segments, control, part, at.NEW_HEAD)
        if parts[part, at.DISK_ROWS] == 0:
            control[at.PARTS_ON_DISK] += 1
        words = bounds[i + 1] - bounds[i]
        parts[part, at.DISK_ROWS] += rows
        parts[part, at.DISK_WORDS] += words
        parts[part, at.DISK_ENTRIES] += 1
        control[at.LIVE_DISK_WORDS] += words
        control[at.LIVE_DISK_ENTRIES] += 1
    return evicted


@jit
def evict(chosen: Longs, parts: Longs, segments: Longs, control: Longs) -> int:
    """Lets go of what was loaded of these parts; how many had some."""
    evicted = 0
    for i in range(chosen.shape[0]):
        if parts[chosen[i], at.OLD_ROWS] != 0:
            _drop_loaded(parts, segments, control, chosen[i])
            evicted += 1
    return evicted


@jit
def on_disk_alone(groups: Longs, parts: Longs, used: int, found: Longs, triggers: Longs) -> int:
    """Parts that are not loaded and are expected at some time, with that time. How many they are."""
    count = 0
    for part in range(used):
        if parts[part, at.OWNER] >= 0 and parts[part, at.DISK_ROWS] != 0 and parts[part, at.OLD_ROWS] == 0:
            trigger = groups[parts[part, at.OWNER], at.TRIGGER]
            if trigger != at.NEVER:
                found[count] = part
                triggers[count] = trigger
                count += 1
    return count


@jit
def name_live(parts: Longs, wanted: NDArray[np.uint8], names: Longs) -> None:
    """What an entry of each part is told by: its generation, and whether it is wanted; -1 if nothing of it is on disk.

    So a scan, which meets parts in no order, has one word to look at for each.
    """
    for part in range(names.shape[0]):
        if parts[part, at.OWNER] >= 0 and parts[part, at.DISK_ROWS] != 0:
            names[part] = ((parts[part, at.GENERATION] & GENERATION_MASK) << 1) | wanted[part]
        else:
            names[part] = -1


@jit
def scan(entries: Longs, names: Longs, selected: Longs, live: Longs) -> tuple[np.int64, np.int64]:
    """The places of entries of parts that are wanted, and of all that are live; how many of each."""
    selects = np.int64(0)
    lives = np.int64(0)
    for i in range(entries.shape[0]):
        name = names[entries[i, PART] & PART_MASK]
        # Without a branch that nobody can foretell.
        is_live = np.int64(name >> 1 == entries[i, PART] >> GENERATION_SHIFT)
        live[lives] = i
        lives += is_live
        selected[selects] = i
        selects += is_live & name
    return selects, lives


@jit
def spans(entries: Longs, gap: int, begins: Longs, ends: Longs, places: Longs) -> int:
    """Ranges of bytes that hold all entries, which come by offset; those that lie closer than `gap` share one.

    Read one after another, they have entry i at word `places[i]`. How many ranges there are.
    """
    count = 0
    before = 0
    for i in range(entries.shape[0]):
        begin = entries[i, OFFSET]
        end = begin + 8 * entries[i, WORDS]
        if count > 0 and 0 <= begin - ends[count - 1] <= gap and (begin - begins[count - 1]) & 7 == 0:
            ends[count - 1] = end
        else:
            if count > 0:
                before += ends[count - 1] - begins[count - 1]
            begins[count] = begin
            ends[count] = end
            count += 1
        places[i] = (before + begin - begins[count - 1]) >> 3
    return count


@jit
def copy_words(source: Longs, places: Longs, bounds: Longs, target: Longs) -> None:
    """Words from `places[i]` on go to `bounds[i]..bounds[i + 1]`."""
    for i in range(places.shape[0]):
        begin = places[i]
        for w in range(bounds[i + 1] - bounds[i]):
            target[bounds[i] + w] = source[begin + w]
