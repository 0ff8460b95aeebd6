from __future__ import annotations

import errno
import os
import random
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest

from millpond.durable.arrow_files import (
    VERSION,
    durable_names,
    read_metadata,
    read_table_file,
    remove_leftovers,
    write_table_file,
)
from millpond.durable.crashpoints import FILE_KINDS, POINTS, SimulatedCrash, armed, counted
from millpond.durable.files import DIRECT_BYTES_MIN, OsFiles
from millpond.errors import BadOption, CorruptFile
from millpond.testing import LossyFiles

TRAILER = struct.Struct("<8sIQI")
SCHEMA = pa.schema([("_key", pa.int64()), ("_time", pa.int64()), ("name", pa.string())])
BATCH = pa.record_batch([[1, 2, 1], [10, -5, 11], ["a", None, ""]], schema=SCHEMA)
METADATA = {"epoch": "7", "query": "feed é"}
FILES = OsFiles()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "0007.arrow"
    write_table_file(FILES, path, "log", SCHEMA, [BATCH], METADATA)
    return path


# The real file system


def test_write_puts_the_buffers_one_after_another_and_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "f"
    FILES.write(path, [b"longer than what follows"])
    FILES.write(path, [b"ab", memoryview(b"cd"), pa.py_buffer(b"ef"), b"", memoryview(b"gh").cast("H")])
    FILES.sync(path)
    assert FILES.read(path).to_pybytes() == b"abcdefgh"


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [DIRECT_BYTES_MIN, DIRECT_BYTES_MIN + 1, 2 * DIRECT_BYTES_MIN, 9_999_999])
def test_large_files_are_what_was_written(
    tmp_path: Path, size: int, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the system's cache, and where the file system has no such way."""
    if not direct:

        def refuse(*_: object) -> None:
            raise OSError(errno.EINVAL, "no such way")

        monkeypatch.setattr("millpond.durable.files._Direct._write", refuse)
    content = random.Random(size).randbytes(size)
    cuts = [0, 1, 4096, size // 2 + 3, size - 1, size]
    FILES.write(tmp_path / "f", [content[start:stop] for start, stop in pairwise(cuts)])
    FILES.sync(tmp_path / "f")
    assert FILES.read(tmp_path / "f").to_pybytes() == content


def test_large_files_can_be_written_at_the_same_time(tmp_path: Path) -> None:
    contents = [bytes([number]) * (DIRECT_BYTES_MIN + number) for number in range(6)]
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda one: FILES.write(tmp_path / str(one[0]), [one]), contents))
    assert [FILES.read(tmp_path / str(number)).to_pybytes() for number in range(6)] == contents


def test_an_empty_file_can_be_written_and_read(tmp_path: Path) -> None:
    FILES.write(tmp_path / "f", [])
    assert FILES.read(tmp_path / "f").to_pybytes() == b""


def test_what_was_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    FILES.write(path, [b"before"])
    content = FILES.read(path)
    FILES.write(path, [b""])
    assert content.to_pybytes() == b"before"


def test_rename_replaces_remove_forgives_and_list_sorts(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        FILES.write(tmp_path / name, [name.encode()])
    FILES.rename(tmp_path / "c", tmp_path / "a")
    FILES.sync_dir(tmp_path)
    assert FILES.list(tmp_path) == ["a", "b"]
    assert FILES.read(tmp_path / "a").to_pybytes() == b"c"
    FILES.remove(tmp_path / "b")
    FILES.remove(tmp_path / "b")
    assert FILES.list(tmp_path) == ["a"]
    assert FILES.exists(tmp_path / "a")
    assert not FILES.exists(tmp_path / "b")


def test_directories_are_made_with_their_parents_and_an_absent_one_is_empty(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b" / "c"
    assert FILES.list(deep) == []
    FILES.make_dir(deep)
    FILES.make_dir(deep)
    assert FILES.exists(deep)
    assert FILES.list(tmp_path / "a") == ["b"]


@pytest.mark.parametrize("operation", ["read", "sync", "sync_dir"])
def test_an_absent_path_is_not_found(tmp_path: Path, operation: str) -> None:
    with pytest.raises(FileNotFoundError):
        getattr(FILES, operation)(tmp_path / "absent")


# The format


def test_a_table_file_gives_back_what_was_written(path: Path) -> None:
    batches, schema, metadata = read_table_file(FILES, path)
    assert batches == [BATCH]
    assert schema.equals(SCHEMA, check_metadata=True)
    assert batches[0].schema.equals(SCHEMA, check_metadata=True)
    assert metadata == METADATA == read_metadata(FILES, path)
    batches[0].validate(full=True)


def test_metadata_of_others_stays_in_the_schema(tmp_path: Path) -> None:
    schema = SCHEMA.with_metadata({"owner": "ads", "millpond.stale": "from an earlier file"})
    write_table_file(FILES, tmp_path / "f", "snapshot", schema, [], {})
    batches, read, metadata = read_table_file(FILES, tmp_path / "f")
    assert (batches, metadata) == ([], {})
    assert read.metadata == {b"owner": b"ads"}


def test_several_batches_slices_and_nested_types_come_back(tmp_path: Path) -> None:
    schema = pa.schema([("x", pa.list_(pa.struct([("y", pa.decimal128(9, 2)), ("z", pa.string())])))])
    rows = [{"x": [{"y": None, "z": "q" * n}] * n} for n in range(20)] + [{"x": None}]
    whole = pa.RecordBatch.from_pylist(rows, schema=schema)
    parts = [whole.slice(0, 3), whole.slice(3, 0), whole.slice(3)]
    write_table_file(FILES, tmp_path / "f", "log", schema, parts, {})
    batches, _, _ = read_table_file(FILES, tmp_path / "f")
    assert [batch.num_rows for batch in batches] == [3, 0, 18]
    assert pa.Table.from_batches(batches).to_pylist() == rows


def test_any_arrow_reader_opens_the_file_and_sees_version_and_metadata(path: Path) -> None:
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
        assert reader.read_all().to_batches()[0].to_pylist() == BATCH.to_pylist()
        assert reader.schema.metadata[b"millpond.version"] == str(VERSION).encode()
        assert reader.schema.metadata[b"millpond.epoch"] == b"7"


def test_the_version_is_not_for_callers_to_set(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="version"):
        write_table_file(FILES, tmp_path / "f", "log", SCHEMA, [], {"version": "9"})
    assert FILES.list(tmp_path) == []


def test_a_batch_of_another_schema_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(pa.ArrowInvalid):
        write_table_file(FILES, tmp_path / "f", "log", pa.schema([("x", pa.int8())]), [BATCH], {})
    assert FILES.list(tmp_path) == []


# Damage


def refused(path: Path) -> CorruptFile:
    with pytest.raises(CorruptFile) as caught:
        read_table_file(FILES, path)
    with pytest.raises(CorruptFile):
        read_metadata(FILES, path)
    assert caught.value.attributes() == {"path": str(path)}
    assert str(path) in str(caught.value)
    return caught.value


def test_a_cut_at_every_length_is_refused_by_name(path: Path) -> None:
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        error = refused(path)
        assert ("too short" if length < TRAILER.size else "wrong magic") in str(error), length


def test_a_flip_of_every_bit_is_refused_by_name(path: Path) -> None:
    content = path.read_bytes()
    body = len(content) - TRAILER.size
    fields = [
        ("checksum mismatch", body),
        ("wrong magic", 8),
        ("unknown version", 4),
        ("length mismatch", 8),
        ("checksum mismatch", 4),
    ]
    expected = [reason for reason, size in fields for _ in range(size)]
    for position, reason in enumerate(expected):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            assert reason in str(refused(path)), (position, bit)
    path.write_bytes(content)
    read_table_file(FILES, path)


@pytest.mark.parametrize("garbage", [b"\0", b"\0" * 24, b"MILLPOND"])
def test_bytes_after_the_trailer_are_refused(path: Path, garbage: bytes) -> None:
    path.write_bytes(path.read_bytes() + garbage)
    refused(path)


def test_a_whole_file_inside_another_is_no_file(path: Path) -> None:
    path.write_bytes(b"\0" * 8 + path.read_bytes())
    assert "length mismatch" in str(refused(path))


def test_a_block_of_zeros_in_place_of_the_content_is_refused(path: Path) -> None:
    path.write_bytes(b"\0" * len(path.read_bytes()))
    assert "wrong magic" in str(refused(path))


def with_trailer(payload: bytes, version: int = VERSION) -> bytes:
    return payload + TRAILER.pack(b"MILLPOND", version, len(payload), zlib.crc32(payload))


def test_an_unknown_version_comes_with_a_hint(path: Path) -> None:
    path.write_bytes(with_trailer(path.read_bytes()[: -TRAILER.size], version=VERSION + 1))
    error = refused(path)
    assert f"unknown version {VERSION + 1}" in str(error)
    assert "later one" in error.hint


@pytest.mark.parametrize("payload", [b"", b"not Arrow at all", b"\xff\xff\xff\xff\0\0\0\0", b"\xff" * 64])
def test_a_whole_file_that_is_no_arrow_stream_is_refused(path: Path, payload: bytes) -> None:
    path.write_bytes(with_trailer(payload))
    assert "not an Arrow stream" in str(refused(path))


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    assert "missing" in str(refused(tmp_path / "absent"))


# Steps and crashes


def test_a_leftover_is_never_read_even_if_it_is_whole(path: Path) -> None:
    leftover = path.with_name(path.name + ".tmp")
    leftover.write_bytes(path.read_bytes())
    assert "unfinished write" in str(refused(leftover))
    assert durable_names(FILES, path.parent) == [path.name]
    assert remove_leftovers(FILES, path.parent) == [leftover.name]
    assert FILES.list(path.parent) == [path.name]


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_a_write_passes_its_points_in_order_once(tmp_path: Path, kind: str) -> None:
    with counted() as plans:
        write_table_file(FILES, tmp_path / "f", kind, SCHEMA, [BATCH], {})
    assert {p for p, plan in plans.items() if plan.hits} == {p for p in POINTS if p.startswith(kind + ".")}
    assert {plan.hits for plan in plans.values()} == {0, 1}
    assert durable_names(FILES, tmp_path) == FILES.list(tmp_path) == ["f"]


def test_a_kind_without_crash_points_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="no crash point"):
        write_table_file(FILES, tmp_path / "f", "diary", SCHEMA, [BATCH], {})
    assert FILES.list(tmp_path) == []


def test_the_file_is_durable_once_the_call_returned() -> None:
    for seed in range(20):
        files = LossyFiles(seed=seed)
        files.make_dir("/p")
        write_table_file(files, "/p/f", "log", SCHEMA, [BATCH], METADATA)
        files = files.crash()
        assert read_table_file(files, "/p/f") == ([BATCH], SCHEMA, METADATA)


@pytest.mark.parametrize("point", [point for point in POINTS if point.startswith("log.")])
@pytest.mark.parametrize("seed", [None, *range(20)])
def test_after_a_crash_at_any_step_the_old_file_or_the_new_one_is_there_whole(
    point: str, seed: int | None
) -> None:
    files = LossyFiles(seed=seed)
    files.make_dir("/p")
    write_table_file(files, "/p/f", "log", SCHEMA, [BATCH], {"is": "old"})
    with armed(point) as plan, pytest.raises(SimulatedCrash):
        write_table_file(files, "/p/f", "log", SCHEMA, [BATCH, BATCH], {"is": "new"})
    assert plan.fired
    files = files.crash()
    batches, _, metadata = read_table_file(files, "/p/f")
    assert metadata["is"] == ("old" if len(batches) == 1 else "new")
    if point in ("log.append.before", "log.append.after", "log.sync.before"):
        assert metadata["is"] == "old"
    if point == "log.dirsync.after":
        assert metadata["is"] == "new"
    assert set(files.list("/p")) <= {"f", "f.tmp"}
    write_table_file(files, "/p/f", "log", SCHEMA, [], {"is": "newest"})
    assert read_metadata(files.crash(), "/p/f") == {"is": "newest"}


class FullDisk(OsFiles):
    """Takes half of what is written, then none."""

    def write(self, path: object, buffers: object) -> None:
        super().write(path, [bytes(buffers[0])[:10]])  # type: ignore[index,arg-type]
        raise OSError(28, "No space left on device", os.fspath(path))  # type: ignore[call-overload]


def test_a_full_disk_is_an_error_that_leaves_nothing_behind(path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        write_table_file(FullDisk(), path, "log", SCHEMA, [BATCH, BATCH], {})
    assert FILES.list(path.parent) == [path.name]
    assert read_table_file(FILES, path)[2] == METADATA


# Appends and ranges


@pytest.fixture(params=["os", "os without copy_file_range", "lossy"])
def any_files(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> OsFiles | LossyFiles:
    if request.param == "os without copy_file_range":

        def refuse(*_: object) -> int:
            raise OSError(errno.EXDEV, "not between these")

        monkeypatch.setattr("millpond.durable.files._copy_file_range", refuse)
    return LossyFiles() if request.param == "lossy" else OsFiles()


def test_appends_go_behind_one_another_and_ranges_come_back(
    tmp_path: Path, any_files: OsFiles | LossyFiles
) -> None:
    any_files.make_dir(tmp_path)
    path = tmp_path / "f"
    assert any_files.append(path, [b"abc", memoryview(b"de").cast("B")]) == 0
    assert any_files.append(path, [pa.py_buffer(b"fgh"), b""]) == 5
    assert any_files.append(path, []) == 8
    assert any_files.read(path).to_pybytes() == b"abcdefgh"
    assert any_files.read_range(path, 2, 3).to_pybytes() == b"cde"
    assert any_files.read_range(path, 6, 100).to_pybytes() == b"gh"
    assert any_files.read_range(path, 100, 1).to_pybytes() == b""
    assert any_files.read_ranges(path, [(6, 2), (0, 1), (3, 0)]).to_pybytes() == b"gha"
    with pytest.raises(EOFError, match="ends before byte 9"):
        any_files.read_ranges(path, [(0, 1), (5, 4)])


def test_ranges_are_copied_to_the_end_of_another_file(
    tmp_path: Path, any_files: OsFiles | LossyFiles
) -> None:
    any_files.make_dir(tmp_path)
    content = random.Random(1).randbytes(9_000_000)
    any_files.write(tmp_path / "f", [content])
    assert any_files.copy_ranges(tmp_path / "f", [(10, 5), (4000, 8_900_000)], tmp_path / "g") == 0
    assert any_files.copy_ranges(tmp_path / "f", [(0, 3)], tmp_path / "g") == 8_900_005
    assert (
        any_files.read(tmp_path / "g").to_pybytes() == content[10:15] + content[4000:8_904_000] + content[:3]
    )
    with pytest.raises(EOFError, match="ends before byte"):
        any_files.copy_ranges(tmp_path / "f", [(8_999_999, 2)], tmp_path / "h")


@pytest.mark.parametrize("operation", ["read_range", "read_ranges", "copy_ranges"])
def test_ranges_of_an_absent_file_are_not_found(
    tmp_path: Path, any_files: OsFiles | LossyFiles, operation: str
) -> None:
    any_files.make_dir(tmp_path)
    arguments = {"read_range": (0, 1), "read_ranges": ([(0, 1)],), "copy_ranges": ([(0, 1)], tmp_path / "g")}
    with pytest.raises(FileNotFoundError):
        getattr(any_files, operation)(tmp_path / "absent", *arguments[operation])
    assert any_files.list(tmp_path) == []


def test_an_appended_file_is_this_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        FILES.append(tmp_path / "f", [b"x"])
    finally:
        os.umask(before)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "f")
    with pytest.raises(OSError, match="symbolic links"):
        FILES.append(tmp_path / "link", [b"y"])


def test_what_was_appended_since_a_sync_is_lost_in_a_crash() -> None:
    files = LossyFiles()
    files.make_dir("/p")
    files.append("/p/f", [b"durable"])
    files.sync("/p/f")
    files.sync_dir("/p")
    files.append("/p/f", [b" and not"])
    files.copy_ranges("/p/f", [(0, 3)], "/p/g")
    assert files.unsynced()
    after = files.crash()
    assert after.read("/p/f").to_pybytes() == b"durable"
    assert after.list("/p") == ["f"]
    with pytest.raises(SimulatedCrash):
        files.append("/p/f", [b"late"])
