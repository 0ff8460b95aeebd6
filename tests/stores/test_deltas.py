"""Bases and deltas of a State's slice, through random histories: what the files hold and the log tells is all there is."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from millpond.code.rules import CompactRule, UpdateRule, add, keep_latest, put, ttl
from millpond.kernels import compaction
from millpond.schema import KeyKind
from millpond.stores import deltas, versioned
from millpond.stores.deltas import merged_versions
from millpond.stores.keys import Keys
from millpond.stores.versioned import Ruleset, VersionedSlice

VALUES = pa.schema([("v", pa.int64()), ("s", pa.string())])
SUMS = pa.schema([("v", pa.int64())])
SPAN = 6
Row = tuple[int | None, ...]


class Case(NamedTuple):
    kind: KeyKind
    values: pa.Schema
    update: UpdateRule
    compact: CompactRule


CASES = {
    "put": Case("i64", VALUES, put(), keep_latest()),
    "bytes": Case("bytes", VALUES, put(), keep_latest()),
    "add": Case("i64", SUMS, add(), keep_latest()),
    "ttl": Case("bytes", VALUES, put(), ttl(SPAN)),
}


class Model:
    """key -> {time: row}, as it would be without files. Compacted only to be compared."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.brought: dict[Any, dict[int, list[tuple[Any, ...]]]] = {}

    def insert(self, key: Any, time: int, row: tuple[Any, ...]) -> None:
        rows = self.brought.setdefault(key, {}).setdefault(time, [])
        if self._case.update.name == "put":
            rows.clear()
        rows.append(row)

    def seen_from(self, low: int) -> dict[Any, list[tuple[int, tuple[Any, ...]]]]:
        """Versions that a read at `low` or later may see."""
        seen = {}
        for key, by_time in self.brought.items():
            versions, total = [], 0
            for time, rows in sorted(by_time.items()):
                for row in rows:
                    total += row[0] or 0
                    versions.append((time, (total,) if self._case.update.name == "add" else row))
            below = [version for version in versions if version[0] < low][-1:]
            if self._case.compact.span:
                below = [version for version in below if version[0] >= low - SPAN]
            if found := below + [version for version in versions if version[0] >= low]:
                seen[key] = found
        return seen


class Slice:
    """A slice, its files, and the updates since the newest of them: what a log would have."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.store = self.new()
        self.files: list[pa.RecordBatch] = []
        self.log: list[list[tuple[Any, int, tuple[Any, ...]]]] = []

    def new(self) -> VersionedSlice:
        return VersionedSlice(
            self.case.kind, self.case.values, Ruleset(self.case.values, self.case.update, self.case.compact)
        )

    def insert(self, rows: list[tuple[Any, int, tuple[Any, ...]]], keep_from: int | None) -> None:
        keys, times, values = zip(*rows, strict=True)
        arrow = pa.array(keys, pa.int64() if self.case.kind == "i64" else pa.binary())
        columns = [
            pa.array(column, field.type)
            for column, field in zip(zip(*values, strict=True), self.case.values, strict=True)
        ]
        self.store.insert(Keys.from_arrow(arrow), np.array(times, np.int64), columns, keep_from)

    def save(self, whole: bool) -> None:
        if whole or not self.files:
            self.files = [self.store.copy().export()]
        else:
            self.files.append(self.store.delta().export())
        self.store.clean()
        self.log.clear()
        # Also without what compaction has let go, so that files do not grow for ever.
        assert held(merged_versions(self.files, whole=True)) == held(self.store.export())

    def merge(self, whole: bool) -> None:
        if whole and self.files:
            self.files = [merged_versions(self.files, whole=True)]
        elif len(self.files) > 2:
            self.files[1:] = [merged_versions(self.files[1:], whole=False)]

    def recover(self) -> None:
        self.store = self.new()
        if self.files:
            self.store.load(merged_versions(self.files, whole=True))
        for rows in self.log:
            self.insert(rows, None)

    def seen_from(self, low: int) -> dict[Any, list[tuple[int, tuple[Any, ...]]]]:
        self.store.sweep(low, 1 << 30)
        while not self.store.sweep(low, 1 << 30):
            pass
        self.store.validate()
        found = held(self.store.export())
        if self.case.update.name == "add":
            for versions in found.values():
                total = 0
                for place, (time, (value,)) in enumerate(versions):
                    total += value or 0
                    versions[place] = (time, (total,))
        return found


def held(batch: pa.RecordBatch) -> dict[Any, list[tuple[int, tuple[Any, ...]]]]:
    found: dict[Any, list[tuple[int, tuple[Any, ...]]]] = {}
    for key, time, *row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
        found.setdefault(key, []).append((time, tuple(row)))
    return found


def check(name: str, seed: int) -> None:
    """One history. The keys are few, so that they change again, and are let go and come again."""
    case, chance = CASES[name], random.Random(seed)
    one, model = Slice(case), Model(case)
    now = low = 0
    keys: list[Any] = [b"k" * (n % 5) + bytes([n]) if case.kind == "bytes" else n for n in range(24)]
    for step in range(60):
        what = chance.random()
        if what < 0.5:
            now += chance.randrange(3)
            rows = []
            for key in chance.choices(keys[: chance.choice((3, 24))], k=chance.randrange(1, 6)):
                value = chance.choice((None, step, -step))
                row = (value,) if case.values is SUMS else (value, chance.choice((None, f"s{step}")))
                rows.append((key, max(low, now - chance.randrange(4)), row))
            one.insert(rows, low)
            one.log.append(rows)
            for row_ in rows:
                model.insert(*row_)
        elif what < 0.65:
            low = min(now, low + chance.randrange(5))
            one.store.sweep(low, chance.choice((2, 1000)))
        elif what < 0.8:
            one.save(whole=chance.random() < 0.2)
        elif what < 0.9:
            one.merge(whole=chance.random() < 0.5)
        else:
            one.recover()
            assert one.seen_from(low) == model.seen_from(low), f"{name}, seed {seed}, step {step}"
    one.recover()
    assert one.seen_from(low) == model.seen_from(low), f"{name}, seed {seed}, at the end"


def check_let_go() -> None:
    """Keys whose entries went between two files, and one of them that came again."""
    one = Slice(CASES["ttl"])
    one.insert([(bytes([n]), 1, (n, None)) for n in range(20)], None)
    one.save(whole=True)
    one.insert([(b"new", 100, (1, None))], None)
    assert one.store.sweep(100, 1000)
    assert one.store.keys == 1
    one.insert([(bytes([3]), 101, (3, "again"))], None)
    one.save(whole=False)


def check_all() -> None:
    check_let_go()
    for name in CASES:
        for seed in range(10):
            check(name, seed)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that keys without versions are let go."""
    monkeypatch.setattr(versioned, "_REBUILD_KEYS", 4)


def test_keys_that_were_let_go_are_gone_from_files() -> None:
    check_let_go()


@pytest.mark.parametrize("name", CASES)
def test_what_files_hold_and_the_log_tells_is_all_there_is(name: str) -> None:
    for seed in range(25):
        check(name, seed)


def test_a_delta_holds_what_has_changed_and_nothing_else() -> None:
    one = Slice(CASES["put"])
    one.insert([(key, 1, (key, "a")) for key in range(1000)], None)
    one.save(whole=True)
    one.insert([(7, 2, (70, "b")), (2000, 2, (1, None))], None)
    assert 0 < one.store.dirty_share < 0.01
    one.save(whole=False)
    wanted = [(7, 1, 7, "a"), (7, 2, 70, "b"), (2000, 2, 1, None)]
    assert sorted(zip(*(column.to_pylist() for column in one.files[1].columns), strict=True)) == wanted
    assert one.store.dirty_share == 0
    one.save(whole=False)
    assert one.files[2].num_rows == 0


def test_what_is_frozen_stays_as_it_was() -> None:
    one = Slice(CASES["bytes"])
    one.insert([(b"a", 1, (1, "one")), (b"b", 1, (1, "one"))], None)
    one.save(whole=True)
    one.insert([(b"a", 2, (2, "two"))], None)
    frozen = one.store.delta()
    one.store.clean()
    for time in range(3, 40):
        one.insert([(b"a", time, (time, "x" * time)), (bytes([time]), time, (time, None))], time - 1)
        one.store.sweep(time - 1, 100)
    assert frozen.export().to_pydict() == {
        "_key": [b"a", b"a"], "_time": [1, 2], "v": [1, 2], "s": ["one", "two"]
    }  # fmt: skip


# Promises that are broken on purpose


def not_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "mark", lambda ids, dirty: None)


def forgotten_tombstones(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = deltas.FrozenVersions.export
    monkeypatch.setattr(deltas.FrozenVersions, "export", lambda self: sound(self._replace(gone=())))


def lost_with_their_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that were let go between two files."""
    sound = VersionedSlice._rebuild

    def rebuild(self: VersionedSlice) -> None:
        sound(self)
        self._gone.clear()

    monkeypatch.setattr(VersionedSlice, "_rebuild", rebuild)


def wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = deltas._newest
    monkeypatch.setattr(deltas, "_newest", lambda files: sound(files[::-1]))


def other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that are numbered anew have lost their marks."""

    def only(self: versioned.Dirty, ids: Any) -> versioned.Dirty:
        clean = versioned.Dirty()
        clean.fit(len(ids))
        return clean

    monkeypatch.setattr(versioned.Dirty, "only", only)


@pytest.mark.parametrize(
    "broken", [not_marked, forgotten_tombstones, lost_with_their_entries, wrong_order, other_numbers]
)
def test_a_broken_promise_is_found(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        check_all()
