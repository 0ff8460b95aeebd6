"""Windows larger than memory: what is read, made and given back is never all there at once, and right all the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import memory_attack
import numpy as np
import pyarrow as pa
import pytest

import millpond as mp
from millpond.durable.files import AnyBuffer, OsFiles
from millpond.errors import CorruptFile, OutOfMemory
from millpond.private import AnyPath
from millpond.stores.windows import aligned, intervals, pair_windows, rowlog, store
from millpond.stores.windows.cellruns import CellRuns
from millpond.stores.windows.kept_rows import RowsOnDisk, SpilledOutputs
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.wire.base import Epoch, Turn

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "aar": (mp.tumbling(100), {"m": mp.median("v"), "all": mp.collect("v")}),
    "aar sliding": (mp.sliding(200, 100), {"m": mp.median("v"), "last": mp.latest("v")}),
    "aur": (mp.session(300), {"m": mp.median("v"), "all": mp.collect("v")}),
    "cut": (mp.session(300, longest=200), {"m": mp.median("v"), "all": mp.collect("v")}),
    "counted": (mp.counted(7), {"m": mp.median("v"), "n": mp.count()}),
    "rmw": (mp.tumbling(100), {"n": mp.count(), "top": mp.largest("v")}),
    "rmw session": (mp.session(300), {"n": mp.count(), "top": mp.largest("v")}),
}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read and made at once is little."""
    monkeypatch.setattr(rowlog, "SHARE_BYTES", 1 << 10)
    monkeypatch.setattr(store, "FIRED_BYTES", 1 << 10)
    monkeypatch.setattr(aligned, "_SHARED_BYTES", 16)


def epochs_of(keys: int) -> list[pa.Table]:
    random = np.random.default_rng(7)
    return [
        pa.table(
            {
                "k": random.integers(0, keys, 400),
                "ts": epoch * 40 + random.integers(0, 60, 400),
                "v": random.integers(0, 1000, 400),
            }
        )
        for epoch in range(8)
    ]


def answers(
    spills: bool, window: Any, aggregate: dict[str, Any], keys: int, **options: Any
) -> list[list[dict[str, Any]]]:
    """Of each epoch what it fired, and what is open then."""
    with LocalPond(LossyFiles(), window_bytes=0 if spills else None) as pond:
        opened = pond.window("w", key="k long", window=window, aggregate=aggregate, **options)
        feed = opened.over(delay=10)
        given = []
        on_disk = 0
        for epoch, rows in enumerate(epochs_of(keys)):
            fired = feed(rows, epoch)
            assert in_order(feed(rows, epoch)) == in_order(fired), "the same again"
            given += [in_order(fired), in_order(opened.now())]
            on_disk += pond.metrics()["windows"]["w"]["spilled_bytes"]
        assert (on_disk > 0) == spills
        return [*given, in_order(feed.finish())]


def in_order(rows: pa.Table) -> list[dict[str, Any]]:
    return sorted(rows.to_pylist(), key=lambda row: (row["window_start"], row["k"]))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("case", CASES)
def test_windows_read_and_given_piece_by_piece_are_the_same(case: str) -> None:
    window, aggregate = CASES[case]
    assert answers(True, window, aggregate, keys=150) == answers(False, window, aggregate, keys=150)


def whole_spread(times: Any, v: Any) -> float:
    return float(v.max() - v.min())


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("window", [mp.tumbling(100), mp.session(300)])
def test_functions_see_whole_windows_of_a_key(window: Any) -> None:
    aggregate = {"spread": whole_spread}
    assert answers(True, window, aggregate, keys=40) == answers(False, window, aggregate, keys=40)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("window", [mp.tumbling(100), mp.sliding(200, 100)])
@pytest.mark.parametrize("options", [{"lateness": 50}, {"emit": "update"}])
def test_cells_that_stay_or_are_updated_go_to_disk(window: Any, options: dict[str, Any]) -> None:
    aggregate = {"n": mp.count(), "top": mp.largest("v")}
    assert answers(True, window, aggregate, keys=150, **options) == answers(
        False, window, aggregate, keys=150, **options
    )


def test_sessions_that_stay_have_a_bound() -> None:
    with LocalPond(LossyFiles(), window_bytes=1 << 10) as pond:
        opened = pond.window(
            "w", key="k long", window=mp.session(10), aggregate={"n": mp.count()}, lateness=1000
        )
        feed = opened.over()
        feed(pa.table({"k": np.arange(30_000), "ts": np.zeros(30_000, np.int64)}), 0)
        with pytest.raises(OutOfMemory, match="window 'w' has") as refused:
            feed(pa.table({"k": [1], "ts": [5]}), 1)
        assert refused.value.hint
        assert opened.now().num_rows == 30_000


def pairs(spills: bool, **how: Any) -> tuple[list[list[dict[str, Any]]], int]:
    """Of each epoch what it gave, and what a container of the join wrote."""
    with LocalPond(LossyFiles(), window_bytes=0 if spills else None) as pond:
        join = pond.join("j", key="k long", left="v long", right="w long", **how)
        left, right = join.left(key="k", at="ts", delay=10), join.right(key="k", at="ts", delay=10)
        given = []
        for epoch, rows in enumerate(epochs_of(40)):
            given.append(left(rows, epoch))
            given.append(right(rows.rename_columns(["k", "ts", "w"]), epoch))
        written = pond.metrics()["joins"]["j"]["store_written_bytes"]
        given += [left.finish(), right.finish()]
        pond.validate()
    return [sorted(table.to_pylist(), key=repr) for table in given], written


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    "how", [{"window": mp.tumbling(100)}, {"window": mp.sliding(200, 100)}, {"between": (-20, 30)}]
)
def test_joins_read_and_given_piece_by_piece_are_the_same(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_windows, "PAIRS_AT_ONCE", 64)
    monkeypatch.setattr(intervals, "PAIRS_AT_ONCE", 64)
    (on_disk, written), (in_memory, _) = pairs(True, **how), pairs(False, **how)
    assert on_disk == in_memory
    assert sum(map(len, on_disk)) > 10_000
    assert written > 0


def test_what_cannot_go_to_disk_has_a_bound() -> None:
    """Sessions of rows, keys that count, a deduplication, an interval join: refused before an epoch is decided."""
    many, one = np.arange(30_000), pa.table({"k": [1], "ts": [5], "v": [1]})
    rows = pa.table({"k": many, "ts": np.zeros(len(many), np.int64), "v": many})
    median = {"m": mp.median("v")}

    def feeds(pond: LocalPond) -> dict[str, Any]:
        join = pond.join("join", key="k long", left="v long", right="w long", between=(-10, 10))
        return {
            "session": pond.window("session", key="k long", window=mp.session(10), aggregate=median).over(),
            "counted": pond.window("counted", key="k long", window=mp.counted(9), aggregate=median).over(),
            "dedup": pond.dedup("dedup", key="k long").over(key="k", at="ts"),
            "join": join.left(key="k", at="ts"),
        }

    for name in ("session", "counted", "dedup", "join"):
        with LocalPond(LossyFiles(), window_bytes=1 << 10) as pond:
            feed = feeds(pond)[name]
            feed(rows, 0)
            for _ in range(2):
                with pytest.raises(OutOfMemory, match=f"'{name}' has") as refused:
                    feed(one, 1)
                assert refused.value.hint
            feed.finish()
            pond.validate()


# What epochs gave, on disk


class SmallDisk(OsFiles):
    room = 1 << 40

    def append(self, path: AnyPath, buffers: Sequence[AnyBuffer]) -> int:
        self.room -= sum(memoryview(each).nbytes for each in buffers)
        if self.room < 0:
            raise OSError(28, "No space left on device")
        return super().append(path, buffers)


def tables(count: int) -> list[pa.Table]:
    return [pa.table({"v": np.arange(200_000) + 200_000 * number}) for number in range(count)]


@pytest.mark.parametrize("room", [1 << 40, 3_500_000, 0])
def test_results_that_a_disk_takes_in_part_are_whole(tmp_path: Path, room: int) -> None:
    files = SmallDisk()
    outputs = SpilledOutputs(CellRuns(files, tmp_path / "outputs"))
    files.room = room
    made = tables(4)
    rows = outputs.collect(iter(made), made[0].schema)
    assert isinstance(rows, RowsOnDisk)
    assert len(rows) == 800_000
    assert rows.table().column("v").to_pylist() == list(range(800_000))
    outputs.keep("w", Turn(Epoch(0)), rows)
    assert (outputs.memory_bytes == 0) == (room > 1 << 30)
    assert outputs.nbytes > 6_000_000


def test_results_leave_memory_and_their_files_go_with_them(tmp_path: Path) -> None:
    outputs = SpilledOutputs(CellRuns(OsFiles(), tmp_path / "outputs"))
    for epoch, rows in enumerate(tables(3)):
        outputs.keep("w", Turn(Epoch(epoch)), rows)
    assert outputs.spill(1) >= 1_600_000
    assert outputs.spill(1 << 40) > 0
    assert outputs.memory_bytes == 0
    _, reading = outputs.find_batches("w", Turn(Epoch(2)))
    first = next(reading)
    outputs.forget("w")
    rest = pa.Table.from_batches([first, *reading])
    assert rest.column("v").to_pylist() == list(range(400_000, 600_000)), "whoever reads comes to the end"
    del reading
    assert not list((tmp_path / "outputs").iterdir())


def test_damaged_results_are_named(tmp_path: Path) -> None:
    outputs = SpilledOutputs(CellRuns(OsFiles(), tmp_path / "outputs"))
    outputs.keep("w", Turn(Epoch(0)), tables(1)[0])
    outputs.spill(1)
    (path,) = (tmp_path / "outputs").iterdir()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(CorruptFile, match=path.name):
        outputs.find("w", Turn(Epoch(0)))


# Processes


def test_a_container_stays_within_its_budget(tmp_path: Path, started_as_ever: None) -> None:
    """Few rows, which are large: what takes minutes otherwise is below."""
    memory, rows, epochs = 512 << 20, 16_000, 13
    budget = memory_attack.budget_of(memory)
    row_bytes = 1_000
    random = np.random.default_rng(1)
    with mp.open(tmp_path / "pond", memory=memory) as pond:
        aggregate = {"n": mp.count(), "last": mp.latest("v"), "low": mp.latest("ts")}
        feed = pond.window("w", key="k long", window=mp.tumbling(1000), aggregate=aggregate).over(
            key="k", at="ts"
        )
        pid = memory_attack.container_of_this_process()
        offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * row_bytes).buffers()[1]
        most, before = 0, 0
        for epoch in range(epochs):
            values = pa.py_buffer(random.bytes(rows * row_bytes))
            column = pa.Array.from_buffers(pa.binary(), rows, [None, offsets, values])
            feed(pa.table({"k": np.arange(rows) % 500, "ts": np.full(rows, epoch), "v": column}), epoch)
            # What the first takes is that of the process, and of what it is told at once.
            before = before or memory_attack.bytes_of(pid, "VmHWM")
        spilled = int(pond.metrics()["windows"]["w"]["spilled_bytes"])
        fired = feed.finish()
        most = memory_attack.bytes_of(pid, "VmHWM") - before
    assert fired["n"].to_pylist() == [rows * epochs // 500] * 500
    assert fired["low"].to_pylist() == [epochs - 1] * 500
    assert spilled > rows * epochs * row_bytes - budget
    assert most < 1.15 * budget + (48 << 20) < 0.6 * rows * epochs * row_bytes


@pytest.mark.long
@pytest.mark.parametrize("case", memory_attack.CASES)
def test_ten_times_the_budget(tmp_path: Path, case: str) -> None:
    """`python tests/windows/memory_attack.py CASE` tells more."""
    peak = memory_attack.run(case, 10, 900 << 20, str(tmp_path / "pond"))
    assert peak.spilled > 0
    assert peak.rss <= memory_attack.RSS_SHARE_MAX * peak.limit


@pytest.mark.parametrize("case", ["aar", "aur", "counted", "rmw session"])
def test_slices_on_disk_are_moved_and_recovered(case: str) -> None:
    window, aggregate = CASES[case]
    given: list[list[Any]] = []
    for disturbed in (False, True):
        with LocalPond(LossyFiles(), containers=2, window_bytes=0) as pond:
            feed = pond.window("w", key="k long", window=window, aggregate=aggregate).over(delay=10)
            parts = []
            for epoch, rows in enumerate(epochs_of(60)):
                parts.append(in_order(feed(rows, epoch)))
                if disturbed and epoch == 3:
                    assert pond.metrics()["windows"]["w"]["spilled_bytes"] > 0
                    assert set(pond.placement().values()) == {0, 1}
                    pond.coordinator.place([1] * 4)
                    assert set(pond.placement().values()) == {1}
                if disturbed and epoch == 5:
                    assert pond.metrics()["windows"]["w"]["spilled_bytes"] > 0
                    pond.hosting.kill(1)
                    pond.coordinator.recover(1)
                    assert in_order(feed(rows, epoch)) == parts[-1]
                    pond.validate()
            given.append([*parts, in_order(feed.finish())])
            pond.validate()
    assert given[0] == given[1]
