"""One suite for all stores of rows of open windows, beside a dict of lists."""

from __future__ import annotations

import datetime
import decimal
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millpond.durable.files import OsFiles
from millpond.errors import BadOption, BadType, CorruptFile
from millpond.private import AnyPath
from millpond.stores.windows.aligned import AlignedRows
from millpond.stores.windows.rocks import RocksRows
from millpond.stores.windows.rowlog import FIGURES, RowLog
from millpond.stores.windows.unaligned import UnalignedRows
from millpond.testing import LossyFiles

LONGS = pa.schema([(name, pa.int64()) for name in "abcd"])
Make = Callable[..., RowLog]


@pytest.fixture(params=["aligned", "unaligned", pytest.param("rocks", marks=pytest.mark.long)])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    stores: list[RowLog] = []

    def made(schema: pa.Schema = LONGS) -> RowLog:
        directory = tmp_path / f"scratch{len(stores)}"
        if request.param == "rocks":
            pytest.importorskip("rocksdict")
            stores.append(RocksRows(schema, directory, drop="keys" if len(stores) % 2 else "range"))
        else:
            kind = AlignedRows if request.param == "aligned" else UnalignedRows
            stores.append(kind(schema, OsFiles(), directory))
        return stores[-1]

    yield made
    for store in stores:
        store.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


class Oracle:
    """What a store promises, with no thought of cost."""

    def __init__(self) -> None:
        self.rows: dict[int, list[Any]] = {}

    def append(self, groups: list[int], rows: list[Any]) -> None:
        for group, row in zip(groups, rows, strict=True):
            self.rows.setdefault(group, []).append(row)

    def merge(self, into: list[int], gone: list[int]) -> None:
        for group, other in zip(into, gone, strict=True):
            if group != other and other in self.rows:
                self.rows.setdefault(group, []).extend(self.rows.pop(other))

    def peek(self, groups: list[int]) -> list[list[Any]]:
        return [list(self.rows.get(group, [])) for group in groups]

    def take(self, groups: list[int]) -> list[list[Any]]:
        return [self.rows.pop(group, []) for group in groups]


def longs(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, np.int64)


def split(answer: tuple[pa.RecordBatch, np.ndarray[Any, Any]]) -> list[list[Any]]:
    batch, offsets = answer
    batch.validate(full=True)
    rows = batch.to_pylist()
    assert offsets[-1] == len(rows)
    return [rows[start:stop] for start, stop in itertools.pairwise(offsets)]


def batch_of(schema: pa.Schema, chance: random.Random, count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array([value_of(field.type, chance) for _ in range(count)], field.type) for field in schema],
        schema=schema,
    )


def value_of(type_: pa.DataType, chance: random.Random) -> Any:
    types = pa.types
    if chance.random() < 0.15:
        return None
    if types.is_dictionary(type_):
        return value_of(type_.value_type, chance)
    if types.is_list(type_) or types.is_large_list(type_):
        return [value_of(type_.value_type, chance) for _ in range(chance.randrange(4))]
    if types.is_fixed_size_list(type_):
        return [value_of(type_.value_type, chance) for _ in range(type_.list_size)]
    if types.is_map(type_):
        return [(str(key), value_of(type_.item_type, chance)) for key in range(chance.randrange(3))]
    if types.is_struct(type_):
        return {field.name: value_of(field.type, chance) for field in type_}
    if types.is_string(type_) or types.is_large_string(type_):
        return "é" * chance.randrange(12)
    if types.is_fixed_size_binary(type_):
        return chance.randbytes(type_.byte_width)
    if types.is_binary(type_) or types.is_large_binary(type_):
        return chance.randbytes(chance.randrange(20))
    if types.is_boolean(type_):
        return chance.random() < 0.5
    if types.is_decimal(type_):
        return decimal.Decimal(chance.randrange(-(10**8), 10**8)).scaleb(-2)
    if types.is_floating(type_):
        return float(chance.randrange(-1000, 1000))
    if types.is_timestamp(type_) or types.is_date(type_):
        day = datetime.datetime(2020, 1, 1) + datetime.timedelta(seconds=chance.randrange(10**8))
        return day if types.is_timestamp(type_) else day.date()
    if types.is_null(type_):
        return None
    return chance.randrange(-100, 100)


SCHEMAS = {
    "longs": LONGS,
    "fixed": pa.schema(
        [
            ("byte", pa.int8()),
            ("short", pa.int16()),
            ("int", pa.int32()),
            ("flag", pa.bool_()),
            ("float", pa.float32()),
            ("double", pa.float64()),
            ("money", pa.decimal128(10, 2)),
            ("wide", pa.decimal256(50, 2)),
            ("at", pa.timestamp("us")),
            ("day", pa.date32()),
            ("code", pa.binary(5)),
            ("nothing", pa.null()),
        ]
    ),
    "bytes": pa.schema(
        [("s", pa.string()), ("b", pa.binary()), ("ls", pa.large_string()), ("lb", pa.large_binary())]
    ),
    "nested": pa.schema(
        [
            ("list", pa.list_(pa.int32())),
            ("deep", pa.list_(pa.struct([("x", pa.list_(pa.string())), ("y", pa.decimal128(9, 2))]))),
            ("struct", pa.struct([("a", pa.int64()), ("b", pa.struct([("c", pa.bool_())]))])),
            ("map", pa.map_(pa.string(), pa.list_(pa.int8()))),
            ("large", pa.large_list(pa.string())),
            ("pair", pa.list_(pa.int64(), 2)),
        ]
    ),
    "nothing": pa.schema([("nothing", pa.null())]),
    "dictionary": pa.schema([("word", pa.dictionary(pa.int32(), pa.string())), ("n", pa.int64())]),
    "many": pa.schema([(f"c{number}", pa.int32()) for number in range(70)]),
}


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.long)])
def test_any_sequence_gives_what_the_oracle_gives(make: Make, name: str, seed: int) -> None:
    compare_with_oracle(make(SCHEMAS[name]), name, seed)


def test_rocks_gives_what_the_oracle_gives(tmp_path: Path) -> None:
    """The one of its tests that is not long."""
    pytest.importorskip("rocksdict")
    store = RocksRows(SCHEMAS["longs"], tmp_path / "rocks")
    try:
        compare_with_oracle(store, "longs", 0)
    finally:
        store.close()


def unaligned_in_memory(schema: pa.Schema) -> UnalignedRows:
    return UnalignedRows(schema, LossyFiles(), "/scratch")


def compare_with_oracle(store: RowLog, name: str, seed: int) -> None:
    chance = random.Random(f"{name}/{seed}")
    schema, oracle = SCHEMAS[name], Oracle()
    few = chance.choice([3, 40])
    for _ in range(60):
        names = [chance.randrange(few) for _ in range(chance.choice([0, 1, 5, 50]))]
        match chance.choice(["append"] * 4 + ["take", "take", "peek", "merge", "expect", "spill", "slice"]):
            case "append" | "slice" as how:
                batch = batch_of(schema, chance, len(names) + 2)
                batch = batch.slice(1, len(names))
                if how == "slice" and chance.random() < 0.5:
                    names.sort()  # in place already
                store.append(longs(*names), batch)
                oracle.append(names, batch.to_pylist())
            case "take":
                names = list(dict.fromkeys(names))
                assert split(store.take(longs(*names))) == oracle.take(names)
            case "peek":
                assert split(store.peek(longs(*names))) == oracle.peek(names)
            case "merge":
                others = [chance.randrange(few) for _ in names]
                store.merge(longs(*names), longs(*others))
                oracle.merge(names, others)
            case "expect":
                store.expect(longs(*names), longs(*(chance.randrange(1000) for _ in names)))
            case "spill":
                before = store.memory_bytes
                moved = store.spill(chance.choice([0, 1, 300, 1 << 40]))
                assert 0 <= moved <= before
        assert store.groups().tolist() == sorted(oracle.rows)
        store.validate()
    left = sorted(oracle.rows)
    batch, offsets = store.take(store.groups())
    assert batch.schema == schema
    assert split((batch, offsets)) == oracle.take(left)
    assert store.groups().tolist() == []
    assert store.live_bytes == 0
    store.validate()
    assert set(store.figures()) == set(FIGURES)


def test_a_hot_group(make: Make) -> None:
    store = make()
    column = np.arange(100_000)
    batch = pa.record_batch([column] * 4, schema=LONGS)
    for start in range(0, 100_000, 5_000):
        store.append(np.zeros(5_000, np.int64), batch.slice(start, 5_000))
        if start % 20_000 == 0:
            store.spill(1)
    taken, offsets = store.take(longs(0))
    assert offsets.tolist() == [0, 100_000]
    assert np.array_equal(taken.column(0).to_numpy(), column)
    store.validate()


@pytest.mark.parametrize("count", [100_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_many_groups(make: Make, count: int) -> None:
    store = make()
    # Windows that keys share are few.
    count = count if not isinstance(store, AlignedRows) else count // 100
    chance = np.random.default_rng(5)
    for number in range(3):
        names = chance.permutation(count)
        store.append(names, pa.record_batch([names, names * 2, names, np.full(count, number)], schema=LONGS))
        if number == 1:
            store.spill(1 << 40)
    assert np.array_equal(store.groups(), np.arange(count))
    for part in np.array_split(chance.permutation(count), 10):
        taken, offsets = store.take(part)
        assert np.array_equal(offsets, np.arange(len(part) + 1) * 3)
        assert np.array_equal(taken.column(0).to_numpy(), np.repeat(part, 3))
        assert np.array_equal(taken.column(3).to_numpy(), np.tile(np.arange(3), len(part)))
    assert store.groups().tolist() == []


def test_groups_that_cannot_be_are_refused_and_nothing_changes(make: Make) -> None:
    store = make()
    batch = pa.record_batch([[1, 2]] * 4, schema=LONGS)
    store.append(longs(1, 2), batch)
    for wrong in (longs(-1, 1), longs(1, 1 << 40)):
        with pytest.raises(BadOption, match="cannot be a group") as caught:
            store.append(wrong, batch)
        assert caught.value.hint
    with pytest.raises(BadOption, match="group 2 is to be taken twice"):
        store.take(longs(1, 2, 2))
    assert split(store.take(longs(2, 1))) == [[dict.fromkeys("abcd", 2)], [dict.fromkeys("abcd", 1)]]
    store.validate()


def test_memory_of_what_was_taken_is_given_back(make: Make) -> None:
    store = make()
    names = np.arange(50_000) % 500
    store.append(names, pa.record_batch([names] * 4, schema=LONGS))
    full = store.memory_bytes
    store.take(np.arange(499))
    assert isinstance(store, RocksRows) or store.memory_bytes < full / 4
    assert store.live_bytes == pytest.approx(100 * 32, rel=0.2)


# What is on disk


def test_a_spill_gives_memory_back_and_a_take_brings_all_rows(make: Make) -> None:
    store = make()
    names = np.arange(40_000) % 200
    for number in range(4):
        store.append(names, pa.record_batch([names, names, names, np.full(40_000, number)], schema=LONGS))
        before = store.memory_bytes
        moved = store.spill(600_000)
        assert moved >= 600_000
        assert store.memory_bytes <= before - 600_000
    assert store.disk_bytes >= 4 * 600_000
    taken, offsets = store.take(np.arange(200))
    assert np.array_equal(offsets, np.arange(201) * 800)
    assert np.array_equal(taken.column(3).to_numpy(), np.tile(np.repeat(np.arange(4), 200), 200))
    assert isinstance(store, RocksRows) or store.disk_bytes == 0
    assert store.figures()["written_bytes"] > 0
    store.validate()


def test_everything_can_be_spilled_and_then_there_is_nothing(make: Make) -> None:
    store = make()
    store.append(longs(3, 4, 3), pa.record_batch([[1, 2, 3]] * 4, schema=LONGS))
    assert store.spill(1 << 40) > 0
    assert store.spill(1 << 40) == 0
    assert store.groups().tolist() == [3, 4]
    assert [len(rows) for rows in split(store.peek(longs(4, 3, 5)))] == [1, 2, 0]
    store.validate()


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_file_is_named_and_other_rows_are_still_there(
    make: Make, tmp_path: Path, damage: str
) -> None:
    store = make()
    if isinstance(store, RocksRows):
        pytest.skip("its files are not ours to check")
    names = np.arange(3_000) % 30
    store.append(names, pa.record_batch([names] * 4, schema=LONGS))
    store.spill(1 << 40)
    store.append(longs(77), pa.record_batch([[77]] * 4, schema=LONGS))
    damaged = set()
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        damaged.add(str(path))
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    for ask in (store.take, store.peek):
        with pytest.raises(CorruptFile) as caught:
            ask(np.arange(30))
        assert caught.value.path in damaged
        assert caught.value.path in str(caught.value)
        assert caught.value.hint
    assert len(split(store.take(longs(77)))[0]) == 1
    assert len(store.groups()) == 30


class FullDisk(OsFiles):
    """Takes a part of what is appended, then no more, as long as it is full."""

    full = False

    def append(self, path: Any, buffers: Any) -> int:
        if self.full:
            super().append(path, [b"".join(memoryview(buffer).cast("B") for buffer in buffers)[:13]])
            raise OSError(28, "No space left on device", str(path))
        return super().append(path, buffers)

    def copy_ranges(self, source: Any, ranges: Any, target: Any) -> int:
        if self.full:
            raise OSError(28, "No space left on device", str(target))
        return super().copy_ranges(source, ranges, target)


@pytest.mark.parametrize("kind", [AlignedRows, UnalignedRows])
def test_a_full_disk_loses_nothing(kind: type[AlignedRows | UnalignedRows], tmp_path: Path) -> None:
    files, oracle, chance = FullDisk(), Oracle(), random.Random(3)
    store = kind(LONGS, files, tmp_path / "scratch")
    for number in range(40):
        files.full = number % 4 == 3
        names = [chance.randrange(20) for _ in range(30)]
        batch = batch_of(LONGS, chance, 30)
        store.append(longs(*names), batch)
        oracle.append(names, batch.to_pylist())
        if files.full:
            with pytest.raises(OSError, match="No space left"):
                store.spill(1 << 40)
        else:
            store.spill(1 << 40)
        taken = chance.sample(range(20), 4)
        assert split(store.take(longs(*taken))) == oracle.take(taken)
        store.validate()
    assert split(store.take(np.arange(20))) == oracle.take(list(range(20)))
    store.close()


def test_a_store_lives_on_any_files() -> None:
    files = LossyFiles()
    for kind in (AlignedRows, UnalignedRows):
        store = kind(LONGS, files, "/scratch/1")
        store.append(np.arange(100) % 7, batch_of(LONGS, random.Random(1), 100))
        before = split(store.peek(np.arange(7)))
        store.spill(1 << 40)
        assert split(store.take(np.arange(7))) == before
        store.close()
        assert files.list("/scratch/1") == []


def test_what_an_earlier_process_left_is_removed(make: Make, tmp_path: Path) -> None:
    (tmp_path / "scratch0").mkdir()
    (tmp_path / "scratch0" / "data-0").write_bytes(b"old")
    store = make()
    store.append(longs(0), pa.record_batch([[1]] * 4, schema=LONGS))
    store.spill(1 << 40)
    assert split(store.take(longs(0))) == [[dict.fromkeys("abcd", 1)]]


# Windows of each key


def fire(store: UnalignedRows, seed: int, *, keys: int, steps: int) -> float:
    """Sessions of random keys: rows, expectations, and takes in the order of triggers. The largest amplification seen."""
    chance = np.random.default_rng(seed)
    gap, worst = 40, 0.0
    trigger = np.full(keys, -1)
    for now in range(steps):
        names = chance.integers(0, keys, keys // 100)
        store.append(names, pa.record_batch([names] * 4, schema=LONGS))
        trigger[names] = now + gap
        store.expect(np.unique(names), np.full(len(np.unique(names)), now + gap))
        if now % 8 == 7:
            store.spill(1 << 40 if now % 16 == 7 else 1)
        due = np.flatnonzero((trigger >= 0) & (trigger <= now))
        compactions = store.figures()["compactions"]
        store.take(due)
        trigger[due] = -1
        if store.figures()["compactions"] > compactions and store.disk_bytes:
            worst = max(worst, store.disk_bytes / max(1, store._live_disk_bytes))
    assert np.array_equal(store.groups(), np.flatnonzero(trigger >= 0))
    return worst


def test_what_is_expected_next_is_there_when_it_is_taken(tmp_path: Path) -> None:
    store = UnalignedRows(LONGS, OsFiles(), tmp_path / "scratch", ratio=0.02)
    # Sessions that end one after another, as keys fall silent.
    names = np.random.default_rng(2).permutation(20_000)
    for number in range(4):
        store.append(names, pa.record_batch([names] * 4, schema=LONGS))
        store.expect(names, names + number)
        store.spill(1 << 40)
    for start in range(0, 20_000, 40):
        taken, offsets = store.take(np.arange(start, start + 40))
        assert offsets[-1] == 160
        assert np.array_equal(taken.column(0).to_numpy(), np.repeat(np.arange(start, start + 40), 4))
    figures = store.figures()
    assert figures["hits"] + figures["misses"] == 20_000
    assert figures["hits"] / 20_000 >= 0.93
    assert figures["compactions"] > 0
    assert store.disk_bytes == 0
    store.validate()
    store.close()


def test_sessions_that_go_on_are_evicted_and_space_is_given_back(tmp_path: Path) -> None:
    store = UnalignedRows(LONGS, OsFiles(), tmp_path / "scratch")
    worst = fire(store, 4, keys=5_000, steps=400)
    figures = store.figures()
    assert figures["compactions"] > 0
    assert 1 <= worst <= store.msa
    assert figures["evictions"] > 0
    assert figures["hits"] / (figures["hits"] + figures["misses"]) >= 0.93
    store.validate()
    store.close()


def test_a_small_amplification_costs_more_compactions(tmp_path: Path) -> None:
    counts = []
    for number, msa in enumerate((1.1, 3.0)):
        store = UnalignedRows(LONGS, OsFiles(), tmp_path / str(number), msa=msa)
        fire(store, 4, keys=2_000, steps=150)
        counts.append(store.figures()["compactions"])
        store.close()
    assert counts[0] > counts[1]


def test_options_outside_their_bounds_are_refused(tmp_path: Path) -> None:
    for wrong in ({"ratio": 1.5}, {"ratio": -0.1}, {"msa": 1.0}):
        with pytest.raises(BadOption) as caught:
            UnalignedRows(LONGS, OsFiles(), tmp_path, **wrong)
        assert caught.value.hint
    with pytest.raises(BadType, match="cannot be kept"):
        UnalignedRows(pa.schema([("x", pa.string_view())]), OsFiles(), tmp_path)


class Copying(OsFiles):
    copied = 0

    def copy_ranges(self, source: AnyPath, ranges: Sequence[tuple[int, int]], target: AnyPath) -> int:
        self.copied += sum(length for _, length in ranges)
        return super().copy_ranges(source, ranges, target)


def test_large_rows_go_from_file_to_file(tmp_path: Path) -> None:
    """A compaction copies ranges of 16 KiB and more without reading them; what is dropped needs none of them either."""
    files = Copying()
    schema = pa.schema({"v": pa.string()})
    store = UnalignedRows(schema, files, tmp_path / "rows")
    texts = [f"{number:05d}" * 8000 for number in range(40)]
    store.append(np.arange(40), pa.RecordBatch.from_arrays([pa.array(texts)], schema=schema))
    store.expect(np.arange(40), np.arange(40))
    store.spill(1 << 40)
    store.drop(np.arange(0, 40, 2))
    store.validate()
    assert files.copied > 20 * 40_000
    assert store.disk_bytes < 1.5 * store.live_bytes
    batch, _ = store.take(np.arange(1, 40, 2))
    assert batch.column(0).to_pylist() == texts[1::2]


def test_a_share_of_keys_may_be_finer_than_it_is_written(tmp_path: Path) -> None:
    """A window of any size is read in pieces that fit: together they are all of it, each key is in one."""
    store = AlignedRows(KEYED, OsFiles(), tmp_path / "rows", by_key=True)
    keys = np.arange(20_000)
    rows = pa.RecordBatch.from_arrays([pa.array(keys), pa.array(keys)], schema=KEYED)
    store.append(np.zeros(len(keys), np.int64), rows)
    store.spill(1 << 40)
    store.append(np.zeros(len(keys), np.int64), rows)
    for shares in (2, 16, 64):
        parts = [store.peek_share(np.zeros(1, np.int64), share, shares) for share in range(shares)]
        assert max(part.num_rows for part in parts) < 3 * 2 * len(keys) // shares
        own = [set(part.column(0).to_pylist()) for part in parts]
        assert sum(map(len, own)) == len(keys) == len(set().union(*own))
        assert sum(part.num_rows for part in parts) == 2 * len(keys)


KEYED = pa.schema({"k": pa.int64(), "v": pa.int64()})
