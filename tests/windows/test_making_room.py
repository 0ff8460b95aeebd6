"""Memory is short: what leaves it, what a full disk and a damaged one do to that, and what open windows hold then."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from millpond.code.windows import Aggregate, WindowCode
from millpond.durable.files import AnyBuffer, OsFiles
from millpond.errors import CorruptFile, OutOfMemory
from millpond.private import AnyPath
from millpond.stores.keys import Keys
from millpond.stores.windows.cellruns import CellRuns
from millpond.stores.windows.panes import PaneStore
from millpond.stores.windows.rowlog import InMemory
from millpond.stores.windows.shape import WindowShape
from millpond.stores.windows.spilling import Spilling

SHAPE = WindowShape("k long", "v long", WindowCode("tumbling", size=100), {"n": Aggregate("count")})


def portions(keys: int) -> list[tuple[Keys, pa.RecordBatch]]:
    """A row of each key."""
    assert SHAPE.layout is not None
    own = pa.array(np.arange(keys))
    cells = SHAPE.layout.to_arrow(SHAPE.layout.fold(np.arange(keys), keys, [own]))
    batch = pa.RecordBatch.from_arrays([own, pa.array(np.zeros(keys, np.int64)), *cells], schema=SHAPE.staged)
    return [(Keys.from_arrow(own), batch)]


class Disk(OsFiles):
    """Takes so many appends more."""

    appends = 1 << 30

    def append(self, path: AnyPath, buffers: Sequence[AnyBuffer]) -> int:
        self.appends -= 1
        if self.appends < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().append(path, buffers)


def counts(store: PaneStore) -> set[int]:
    (fired,) = store.fire(100, closes=False)
    return set(fired.columns["n"].to_pylist())


def test_a_disk_too_full_to_merge_runs_counts_nothing_twice(tmp_path: Path) -> None:
    disk = Disk()
    store = PaneStore(SHAPE, CellRuns(disk, tmp_path / "runs"))
    store.insert(portions(1000))
    store.spill(1 << 30)
    store.insert(portions(1000))
    disk.appends = 1  # enough for the second run, not for one of both
    with pytest.raises(OSError, match="No space"):
        store.spill(1 << 30)
    store.validate()
    assert counts(store) == {2}


def test_damage_that_merging_runs_finds_is_told(tmp_path: Path) -> None:
    spilling = Spilling(OsFiles(), str(tmp_path), 0)
    store = spilling.new_cells(SHAPE)
    slice_ = Slice(store)
    store.insert(portions(1000))
    spilling.make_room(slice_)
    (run,) = tmp_path.rglob("*.run")
    content = bytearray(run.read_bytes())
    content[len(content) // 2] ^= 1
    run.write_bytes(bytes(content))
    store.insert(portions(1000))
    with pytest.raises(CorruptFile, match=run.name):
        spilling.make_room(slice_)


class Slice:
    beside_bytes = staying_bytes = 0

    def __init__(self, *spillables: InMemory) -> None:
        self.spillables = spillables


class Refused:
    """What a disk takes nothing of."""

    memory_bytes = 1000

    def spill(self, nbytes: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


class Moved:
    memory_bytes = 1000

    def spill(self, nbytes: int) -> int:
        self.memory_bytes = 0
        return 1000


def test_what_the_disk_refuses_keeps_nothing_else_in_memory(tmp_path: Path) -> None:
    refused, moved = Refused(), Moved()
    Spilling(OsFiles(), str(tmp_path), 0).make_room(Slice(refused, moved))
    assert (refused.memory_bytes, moved.memory_bytes) == (1000, 0)


@pytest.mark.parametrize(
    ("staying", "spare", "takes_more"),
    [
        (4 << 20, 0, True),
        (5 << 20, 0, False),
        (5 << 20, 3 << 20, True),
        (5 << 20, 2 << 20, False),
        (16 << 20, 8 << 20, True),
        (17 << 20, 99 << 20, False),
    ],
    ids=["in the budget", "over it", "over it, with enough to spare", "with too little", "all", "beyond all"],
)
def test_what_cannot_leave_memory_may_take_what_nothing_else_does(
    tmp_path: Path, staying: int, spare: int, takes_more: bool
) -> None:
    spilling = Spilling(OsFiles(), str(tmp_path), 4 << 20, most=16 << 20, spare=lambda: spare)
    slice_, other = Slice(), Slice()
    slice_.beside_bytes = slice_.staying_bytes = staying
    spilling.count_what_stays(slice_)
    spilling.check_room("window 'other'", [other])
    if takes_more:
        spilling.check_room("window 'w'", [slice_])
        return
    with pytest.raises(OutOfMemory, match=f"and {spare:,} to spare; window 'w' has {staying:,}"):
        spilling.check_room("window 'w'", [slice_])


def test_rows_stay_in_memory_beside_what_cannot_leave_it(tmp_path: Path) -> None:
    """Else each epoch would write all that it brings."""
    spilling, moved = Spilling(OsFiles(), str(tmp_path), 1 << 20), Moved()
    slice_ = Slice(moved)
    slice_.beside_bytes = slice_.staying_bytes = 2 << 20
    spilling.make_room(slice_)
    assert moved.memory_bytes == 1000
    moved.memory_bytes = 1 << 20
    spilling.make_room(slice_)
    assert moved.memory_bytes == 0
