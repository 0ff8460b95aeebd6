"""Places in a slice's control vector: the counters that kernels read and write, as one int64 array."""

from __future__ import annotations

ENTRIES = 0  # keys in the index
MIGRATED = 1  # slots of the old index table that have been moved
USED = 2  # arena rows handed out so far, live or free
VERSIONS = 3  # versions held
FREE = 4  # arena rows on free lists
SLOTS_MOVED = 5  # index slots moved by growth, ever
ROWS_MOVED = 6  # versions moved by inserts and compaction, ever
SIZE = 8
