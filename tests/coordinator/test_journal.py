"""Of two coordinators that have one root open, past every lock, one alone decides."""

from __future__ import annotations

import pytest

from millpond.coordinator.journal import Journal
from millpond.coordinator.records import PondRecord
from millpond.errors import PondInUse
from millpond.testing import LossyFiles

ROOT = "/pond"


def record(number: int) -> PondRecord:
    return PondRecord(owners=(number,))


def opened(files: LossyFiles) -> Journal:
    journal = Journal(files, ROOT)
    journal.load()
    return journal


@pytest.fixture
def files() -> LossyFiles:
    files = LossyFiles()
    files.make_dir(ROOT)
    return files


@pytest.mark.parametrize("entries", [1, 2, 5])
def test_who_was_overtaken_decides_nothing_any_more(files: LossyFiles, entries: int) -> None:
    """However far the other one is: entries that it replaced are gone, and their numbers are not free."""
    first = opened(files)
    first.write(record(0))
    second = opened(files)
    for number in range(entries):
        second.write(record(10 + number))
    for _ in range(entries + 2):
        with pytest.raises(PondInUse) as caught:
            first.write(record(99))
        assert caught.value.root == ROOT
        assert caught.value.hint
    second.write(record(20))
    assert Journal(files, ROOT).load() == record(20)
    assert len(files.list(f"{ROOT}/journal")) == 1, "nothing is left of the one that was refused"


@pytest.mark.parametrize("entries", [1, 2, 5])
def test_who_comes_second_and_decides_later_is_refused(files: LossyFiles, entries: int) -> None:
    first = opened(files)
    first.write(record(0))
    second = opened(files)
    for number in range(entries):
        first.write(record(1 + number))
    with pytest.raises(PondInUse):
        second.write(record(99))
    first.write(record(20))
    assert Journal(files, ROOT).load() == record(20)


def test_entries_of_one_alone_replace_each_other(files: LossyFiles) -> None:
    journal = opened(files)
    for number in range(3):
        journal.write(record(number))
        assert opened(files).load() == record(number)
    assert len(files.list(f"{ROOT}/journal")) == 1
    assert journal.entries_written == 3


@pytest.mark.parametrize("entries", [0, 1, 3])
def test_who_decides_nothing_hears_of_another_one_by_looking(files: LossyFiles, entries: int) -> None:
    first = opened(files)
    first.write(record(0))
    for number in range(entries):
        first.write(record(number))
        first.look()
    opened(files).write(record(10))
    for _ in range(2):
        with pytest.raises(PondInUse):
            first.look()
    assert first.is_taken
    with pytest.raises(PondInUse):
        first.write(record(99))
