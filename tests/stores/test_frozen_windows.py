"""What a checkpoint copies of windows that are on disk: as they were, piece by piece, while they go on."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import millpond as mp
from millpond.code.windows import Aggregate, WindowCode
from millpond.container.holdings.base import pieces_of
from millpond.durable.arrow_files import read_table_file, settle, write_batches
from millpond.durable.files import OsFiles
from millpond.errors import WriteFailed
from millpond.private import AnyPath
from millpond.stores import parts
from millpond.stores.keys import Keys
from millpond.stores.windows.firing import FiringStore
from millpond.stores.windows.intervals import IntervalPairs
from millpond.stores.windows.join_shape import JoinShape
from millpond.stores.windows.pair_windows import PairWindows
from millpond.stores.windows.shape import WindowShape
from millpond.stores.windows.spilling import Spilling
from millpond.stores.windows.store import WindowStore
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.wire.base import Epoch, Turn
from millpond.wire.joins import Between, JoinSpec

MB = 1 << 20
NUMBERS = {"n": Aggregate("count"), "sum": Aggregate("total", "v")}
ROWS = {"all": Aggregate("values", "v"), "n": Aggregate("count")}
WINDOWS: dict[str, tuple[WindowCode, Any]] = {
    "panes": (WindowCode("sliding", size=1000, slide=250), NUMBERS),
    "sessions": (WindowCode("session", size=100), NUMBERS),
    "AAR": (WindowCode("tumbling", size=1000), ROWS),
    "AUR": (WindowCode("session", size=100), ROWS),
    "cut": (WindowCode("session", size=100, longest=1000), ROWS),
    "counted": (WindowCode("counted", size=20), ROWS),
}
Store = WindowStore | FiringStore


def portions(schema: pa.Schema, fill: Callable[[int], list[pa.Array]], rows: int) -> list[Any]:
    batch = pa.RecordBatch.from_arrays(fill(rows), schema=schema)
    return [(Keys.from_arrow(batch.column(0)), batch)]


class Case:
    """A kind of store, and rows for it. `bulk` bytes of each row are of no use but to take room."""

    def __init__(self, name: str, spilling: Spilling) -> None:
        self.name = name
        self.spilling = spilling
        self.rng = np.random.default_rng(3)
        self.shape: Any
        if name in WINDOWS:
            window, aggregates = WINDOWS[name]
            self.shape = WindowShape("k long", "v long", window, aggregates)
        else:
            spec = JoinSpec(
                "j", "k long", "a long", "b long",
                window=WindowCode("tumbling", size=1000) if name == "join" else None,
                between=Between(-100, 100) if name == "intervals" else None,
            )  # fmt: skip
            self.shape = JoinShape(spec)

    def new(self) -> Store:
        new_rows, new_cells = self.spilling.new_rows, self.spilling.new_cells
        if self.name in WINDOWS:
            return WindowStore(self.shape, new_rows, 1, new_cells, self.spilling.new_outputs())
        kind = PairWindows if self.name == "join" else IntervalPairs
        return kind(self.shape, new_rows, self.spilling.new_outputs())

    def rows(self, count: int, first: int, keys: int) -> list[Any]:
        own, at = self.rng.integers(0, keys, count), np.sort(self.rng.integers(first, first + 300, count))
        values = pa.array(self.rng.integers(0, 99, count))
        if self.name not in WINDOWS:
            schema = self.shape.staged["right" if self.rng.random() < 0.5 else "left"]
            return portions(schema, lambda _: [pa.array(own), pa.array(at), values], count)
        shape = self.shape
        times = [at, at + shape.window.size] if shape.window.kind == "session" else [at]
        columns = [values]
        if shape.layout is not None:
            times = [at // shape.pane * shape.pane] if shape.window.kind == "sliding" else times
            columns = shape.layout.to_arrow(shape.layout.fold(np.arange(count), count, [values]))
        return portions(shape.staged, lambda _: [pa.array(own), *map(pa.array, times), *columns], count)

    def run(self, store: Store, rows: list[Any], watermark: int, turn: int, closes: bool = False) -> pa.Table:
        fired = store.run(rows, watermark, closes, "long")
        store.keep("feed@q", Turn(Epoch(turn)), fired)
        return fired if isinstance(fired, pa.Table) else fired.table()

    def spill(self, store: Store) -> None:
        for each in store.spillables:
            each.spill(1 << 40)


def disk_bytes(store: Store) -> int:
    logs = [store.spillable] if isinstance(store, WindowStore) else store.logs
    return sum(log.disk_bytes for log in logs)


def rows_of(table: pa.Table) -> list[str]:
    return sorted(map(repr, table.to_pylist()))


@pytest.mark.parametrize("name", [*WINDOWS, "join", "intervals"])
def test_a_copy_is_as_the_slice_was_whatever_became_of_it(name: str, tmp_path: Path) -> None:
    case = Case(name, Spilling(OsFiles(), str(tmp_path / "scratch"), 1 << 40))
    store = case.new()
    for turn in range(6):
        case.run(store, case.rows(800, 100 * turn, 300), 0, turn)
        if turn % 2:
            case.spill(store)
    assert disk_bytes(store) > 0
    at_once = case.new()
    at_once.load(store.export())
    copies = [store.copy() for _ in range(2)]
    fired = 0
    for turn in range(6, 20):
        # Windows fire, runs are merged, logs are compacted, files go.
        fired += len(case.run(store, case.rows(800, 150 * turn, 300), 150 * turn - 100, turn))
        case.spill(store)
    assert fired
    store.validate()
    store.close()
    loaded = case.new()
    for piece in pieces_of(copies.pop()):
        loaded.load(piece)
    loaded.validate()
    for turn in range(2):
        rows = case.rows(50, 700, 300)
        ours, theirs = (
            case.run(each, rows, 700 * turn, 20 + turn, closes=bool(turn)) for each in (loaded, at_once)
        )
        assert rows_of(ours) == rows_of(theirs)
    for turn in (4, 5):
        assert loaded.outputs.find("feed@q", Turn(Epoch(turn))) == at_once.outputs.find(
            "feed@q", Turn(Epoch(turn))
        )
    del store
    assert list((tmp_path / "scratch").rglob("*")), "a copy is still to be read"
    del copies
    loaded.close()
    at_once.close()
    assert not [path for path in (tmp_path / "scratch").rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", ["panes", "AAR", "AUR"])
def test_a_copy_takes_no_memory_for_what_is_on_disk(name: str, tmp_path: Path) -> None:
    case = Case(name, Spilling(OsFiles(), str(tmp_path / "scratch"), 1 << 40))
    store = case.new()
    for _ in range(8):
        case.run(store, case.rows(100_000, 0, 1 << 40), 0, 0)
        case.spill(store)
    on_disk, before = disk_bytes(store), pa.total_allocated_bytes()
    assert on_disk > 18 * MB
    copy = store.copy()
    assert pa.total_allocated_bytes() - before < 4 * MB
    most = 0
    for _ in pieces_of(copy):
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 0.7 * on_disk
    store.close()


def test_snapshots_of_many_pieces_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PACK_BYTES", 1)
    files = LossyFiles()
    for attempt in range(2):
        pond = LocalPond(files, containers=2, slices=4, backups=1)
        window = pond.window(
            "w", key="k long", window=mp.session(10), aggregate={"n": mp.count()}, lateness=5
        )
        join = pond.join("j", key="k long", left="a long", right="b long", window=mp.tumbling(50))
        feeds = [window.over(key="k", at="t"), join.left(key="k", at="t"), join.right(key="k", at="t")]
        rows = {"k": [*range(20)] * 2, "t": [*range(20), *range(60, 80)], "a": [1] * 40, "b": [2] * 40}
        fired = [
            feed(pa.table(rows).select(["k", "t", *own]), 0)
            for feed, own in zip(feeds, ([], ["a"], ["b"]), strict=True)
        ]
        assert [len(each) for each in fired] == [30, 0, 20]
        before = window.now().sort_by("k")
        if not attempt:
            paths = [path for path in files._names if "/snapshots/" in path]
            assert not paths
            pond.checkpoint()
            paths = [path for path in files._names if "/snapshots/" in path]
            assert max(len(read_table_file(files, path)[0]) for path in paths) > 3
            open_then = before
        assert before == open_then
        pond.close()


class FullDisk(LossyFiles):
    room = 1 << 40

    def append(self, path: AnyPath, buffers: Any) -> int:
        self.room -= 1
        if self.room < 0:
            raise OSError(errno.ENOSPC, "no space left")
        return super().append(path, buffers)


@pytest.mark.parametrize("room", [0, 1, 2, 3, 4])
def test_a_disk_that_is_full_in_the_middle_of_a_file_is_not_kept_full(room: int) -> None:
    files = FullDisk()
    files.make_dir("/d")
    schema = pa.schema({"x": pa.int64()})
    batches = [pa.record_batch([pa.array([n] * 10)], schema=schema) for n in range(3)]

    def write() -> None:
        written, nbytes = write_batches(files, "/d/f", "snapshot", schema, iter(batches), {"a": "b"})
        assert nbytes == 240
        settle(files, [written])

    files.room = room
    with pytest.raises(WriteFailed, match="no space left"):
        write()
    assert files.list("/d") == []
    files.room = 1 << 40
    write()
    assert read_table_file(files, "/d/f") == (batches, schema, {"a": "b"})
