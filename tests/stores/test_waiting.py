"""Waiting rows on disk: what is listed is read back whole, or refused; whatever crashes, and whoever else writes.

Both ways are held to it: that of who sees the root, and that through the pond.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from millpond.client.waiting import WaitingRowsAway
from millpond.durable.crashpoints import WAITING_POINTS, SimulatedCrash, armed
from millpond.durable.files import OsFiles
from millpond.errors import CorruptFile
from millpond.stores import waiting
from millpond.stores.waiting import WaitingFile, WaitingRows
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.wire.base import Turn
from millpond.wire.questions import Pin

TURN = Turn(3)


def batch(*keys: int) -> pa.RecordBatch:
    return pa.record_batch({"k": pa.array(keys, pa.int64()), "at": pa.array(keys, pa.timestamp("us", "UTC"))})


def rows_in(root: Path | str, files: LossyFiles | None = None) -> WaitingRows:
    return WaitingRows(str(root), "s", "views", "q", files)


def rows_away(root: Path | str, files: LossyFiles | None = None) -> WaitingRows:
    pond = LocalPond(OsFiles() if files is None else files, str(root), containers=2)
    pond.state("s", key="long", value="long").fetch(key="k", at="t", name="views").to(
        lambda rows, epoch: None
    )
    pond._client.call(Pin("s", "views", "q", TURN, "new"))
    return WaitingRowsAway(pond._client, str(root), "s", "views", "q")


Way = Callable[..., WaitingRows]
both_ways = pytest.mark.parametrize("rows_of", [rows_in, rows_away])


def keep(rows: WaitingRows, *parts: pa.RecordBatch, turn: Turn = TURN) -> list[WaitingFile]:
    token = rows.token()
    files = [rows.write(turn, token, [part]) for part in parts]
    rows.list_files(turn, token, "{}", files)
    return files


def token_of(files: list[WaitingFile]) -> str:
    return files[0].name.partition("-")[0]


def list_of(files: list[WaitingFile]) -> str:
    return f"list-{token_of(files)}.arrow"


def kept(rows: WaitingRows, files: list[WaitingFile], turn: Turn = TURN) -> list[int]:
    listed = rows.listed(turn, token_of(files))
    return sorted(key for file in listed.files for key in rows.read(listed, file)["k"].to_pylist())


def path_of(rows: WaitingRows, name: str, turn: str = "000000000003.0000") -> Path:
    return Path(rows.folder, turn, name)


@both_ways
def test_what_was_listed_is_read_back_and_any_reader_opens_it(rows_of: Way, tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    files = keep(rows, batch(1, 2), batch(3))
    assert kept(rows, files) == [1, 2, 3]
    assert [listed.rows for listed in rows.listed(TURN, token_of(files)).files] == [2, 1]
    with pa.OSFile(str(path_of(rows, files[0].name))) as source, pa.ipc.open_stream(source) as reader:
        assert reader.read_all().to_batches() == [batch(1, 2)]


@both_ways
def test_a_flipped_bit_is_never_another_row(rows_of: Way, tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    files = keep(rows, batch(1, 2), batch(3))
    for name in (*(file.name for file in files), list_of(files)):
        path = path_of(rows, name)
        whole = path.read_bytes()
        for place in range(0, len(whole), 1 if rows_of is rows_in else 7):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
            with pytest.raises(CorruptFile, match=name):
                kept(rows, files)
        path.write_bytes(whole)
    assert kept(rows, files) == [1, 2, 3]


@both_ways
def test_a_missing_file_is_refused_and_a_leftover_is_not_seen(rows_of: Way, tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    files = keep(rows, batch(1))
    path_of(rows, files[0].name + ".tmp").write_bytes(b"half a file")
    path_of(rows, list_of(files) + ".tmp").write_bytes(b"half a list")
    assert kept(rows, files) == [1]
    for name in (files[0].name, list_of(files)):
        path_of(rows, name).unlink()
        with pytest.raises(CorruptFile, match="missing"):
            kept(rows, files)


@both_ways
def test_a_file_of_another_turn_or_driver_is_refused_though_it_is_whole(rows_of: Way, tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    files = keep(rows, batch(1))
    others = keep(rows, batch(2), turn=Turn(4))
    os.replace(path_of(rows, others[0].name, "000000000004.0000"), path_of(rows, files[0].name))
    with pytest.raises(CorruptFile, match="another turn"):
        kept(rows, files)
    os.replace(path_of(rows, list_of(others), "000000000004.0000"), path_of(rows, list_of(files)))
    with pytest.raises(CorruptFile, match="another turn"):
        kept(rows, files)


@both_ways
def test_of_two_drivers_that_run_the_same_turn_each_has_its_own_list(rows_of: Way, tmp_path: Path) -> None:
    one, two = rows_of(tmp_path), rows_in(tmp_path)
    files, others = keep(one, batch(1), batch(2)), keep(two, batch(1, 2))
    assert kept(one, files) == kept(two, files) == kept(one, others) == [1, 2]
    with pytest.raises(CorruptFile, match="another turn or driver"):
        one.read(one.listed(TURN, token_of(files)), others[0])


@pytest.mark.parametrize("point", WAITING_POINTS)
@pytest.mark.parametrize("hit", [1, 2, 3])
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@both_ways
def test_a_crash_at_any_point_leaves_what_was_listed_before(
    rows_of: Way, point: str, hit: int, seed: int | None
) -> None:
    files = LossyFiles(seed=seed)
    rows = rows_of("/pond", files)
    before = keep(rows, batch(1))
    with armed(point, hit, action=files.halt) as plan, pytest.raises(SimulatedCrash):
        keep(rows, batch(1, 2), batch(3))
    assert plan.fired
    again = rows_of("/pond", files.crash())
    assert kept(again, before) == [1]
    assert kept(again, keep(again, batch(4))) == [4]


@both_ways
def test_what_was_listed_survives_the_machine(rows_of: Way) -> None:
    for seed in range(10):
        files = LossyFiles(seed=seed)
        listed = keep(rows_of("/pond", files), batch(1), batch(2))
        assert kept(rows_in("/pond", files.crash()), listed) == [1, 2]


@both_ways
def test_many_rows_are_kept_in_files_of_a_bounded_size(
    rows_of: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container must be able to hold each of them. A row that is larger than that has a file of its own."""
    monkeypatch.setattr(waiting, "FILE_BYTES_MAX", 1000)
    rows, token = rows_of(tmp_path), "0" * 16
    small = [batch(*range(start, start + 300)) for start in (0, 300)]  # of 16 bytes a row
    files = rows.keep(TURN, token, [*small, batch(600)])
    assert sum(file.rows for file in files) == 601
    assert max(file.rows for file in files) <= 1000 // 16
    assert len(files) <= 12
    rows.list_files(TURN, token, "{}", files)
    assert kept(rows, files) == list(range(601))
    wide = pa.record_batch({"k": pa.array([1, 2], pa.int64()), "text": ["x" * 3000, "y" * 3000]})
    assert [file.rows for file in rows.keep(TURN, token, [wide])] == [1, 1]
    assert rows.keep(TURN, token, [batch()]) == []


def test_rows_of_every_type_go_through_the_pond_as_they_are(tmp_path: Path) -> None:
    """Also such as no message of the pond's own may have: nobody on the way looks at them."""
    rows = rows_away(tmp_path)
    odd = pa.record_batch(
        {
            "k": pa.array([1, 2], pa.int64()),
            "view": pa.array(["a", None], pa.string_view()),
            "runs": pa.RunEndEncodedArray.from_arrays([2], ["x"]),
            "some": pa.UnionArray.from_sparse(
                pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array([3, 4])]
            ),
            "words": pa.array(["a", "b"]).dictionary_encode(),
        }
    )
    listed = waiting.WaitingList(TURN, "f" * 16, "", [rows.write(TURN, "f" * 16, [odd])])
    assert rows.read(listed, listed.files[0]).to_batches() == [odd]


def test_what_a_zombie_writes_is_not_read_and_goes_with_its_turn_or_after_it(tmp_path: Path) -> None:
    rows = rows_in(tmp_path)
    token = rows.token()
    first, twin = (rows.write(TURN, token, [batch(1, 2)]) for _ in range(2))
    assert first.name != twin.name
    rows.list_files(TURN, token, "{}", [twin])
    rows.write(TURN, token, [batch(1, 2)])
    assert kept(rows, [twin]) == [1, 2]
    rows.remove_before(Turn(4), Turn(4))
    assert not path_of(rows, "").exists()
    rows.write(TURN, token, [batch(1, 2)])  # its turn is long over
    rows.remove_before(Turn(4), Turn(5))
    assert not path_of(rows, "").exists()


def test_turns_are_removed_up_to_the_oldest_that_is_needed(tmp_path: Path) -> None:
    rows = rows_in(tmp_path)
    kept_files = [keep(rows, batch(t.epoch), turn=t) for t in (Turn(0), Turn(0, 1), Turn(1), Turn(1, 10))]
    Path(rows.folder, "someone's").mkdir()
    rows.remove_before(Turn(1), Turn(1))
    assert sorted(os.listdir(rows.folder)) == ["000000000001.0000", "000000000001.0010", "someone's"]
    assert kept(rows, kept_files[-1], Turn(1, 10)) == [1]
    rows_in(tmp_path / "nowhere").remove_before(Turn(1), Turn(1))


def test_of_the_drains_after_an_epoch_the_last_two_are_kept(tmp_path: Path) -> None:
    rows = rows_in(tmp_path)
    for turn in (Turn(0), Turn(0, 1), Turn(1), *(Turn(1, drain) for drain in range(1, 6))):
        keep(rows, batch(1), turn=turn)
        rows.remove_before(Turn(0), turn)
    kept_turns = ["000000000000.0000", "000000000000.0001"]  # what the epoch asks for if it runs again
    kept_turns += ["000000000001.0000", "000000000001.0004", "000000000001.0005"]
    assert sorted(os.listdir(rows.folder)) == kept_turns


def test_a_turn_that_cannot_be_removed_now_is_left_for_the_next_time(tmp_path: Path) -> None:
    rows = rows_in(tmp_path)
    keep(rows, batch(1), turn=Turn(0))
    held = Path(rows.folder, "000000000000.0000", "held")
    held.mkdir()
    rows.remove_before(Turn(1), Turn(1))
    held.rmdir()
    rows.remove_before(Turn(1), Turn(1))
    assert os.listdir(rows.folder) == []
