"""Rows that are staged: which attempts are found, and that what is kept has its bounds."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from millpond.container.holdings.base import CheckedRows
from millpond.container.staging import (
    ATTEMPTS_KEPT,
    PART_BYTES,
    STAGED_S_LONG,
    STAGED_S_MAX,
    Arrival,
    Staged,
    StagedEpoch,
    StagedPart,
)
from millpond.errors import MessageTooLarge, Unavailable
from millpond.wire.base import Epoch, Turn


def epoch(number: int, resident: str = "s", writer: str = "feed@q") -> StagedEpoch:
    return StagedEpoch(resident, writer, Turn(Epoch(number)))


def arrival(number: int, resident: str = "s", partition: int = 0) -> Arrival:
    return Arrival(epoch(number, resident), partition, 0.0)


def part(rows: int = 2, at_s: float = 0.0) -> StagedPart:
    batch = pa.record_batch({"x": pa.array(range(rows), pa.int64())})
    return StagedPart([CheckedRows(batch, np.array([rows], np.int32))], 0, at_s)


def test_only_what_was_chosen_is_found() -> None:
    staged, parts = Staged(), {attempt: part(attempt + 1) for attempt in range(3)}
    for attempt, each in parts.items():
        staged.keep(arrival(0), attempt, each)
    staged.keep(arrival(0, partition=1), 7, parts[0])
    assert staged.find(epoch(0), {1: 7, 0: 2}) == [parts[2], parts[0]]
    assert staged.find(epoch(0), {0: 3}) == [None]
    assert staged.find(epoch(1), {0: 1}) == [None]
    again = part(9)
    staged.keep(arrival(0), 2, again)
    assert staged.find(epoch(0), {0: 2}) == [again]
    assert staged.rows == 1 + 2 + 9 + 1
    staged.validate()


def test_of_a_partition_the_newest_attempts_are_kept() -> None:
    staged = Staged()
    for attempt in range(3 * ATTEMPTS_KEPT):
        staged.keep(arrival(0), attempt, part())
        staged.validate()
    assert staged.rows == 2 * ATTEMPTS_KEPT
    assert staged.find(epoch(0), {0: 2 * ATTEMPTS_KEPT - 1}) == [None]


def test_what_is_forgotten_or_too_old_takes_no_room() -> None:
    staged = Staged()
    for number in range(4):
        staged.keep(arrival(number), 0, part(at_s=number))
        staged.keep(arrival(number, "other"), 0, part(at_s=number))
    staged.forget(lambda each: each.resident == "other" and each.turn <= Turn(Epoch(1)))
    assert staged.rows == 2 * 6
    staged.expire(STAGED_S_MAX + 2.5)
    assert staged.rows == 2 * 2
    staged.forget(lambda each: True)
    assert (staged.rows, staged.nbytes) == (0, 0)
    staged.validate()


def known(each: StagedEpoch) -> bool:
    return each.writer != "stranger@q"


def arrive(staged: Staged, each: StagedEpoch, new: StagedPart, partition: int = 0, attempt: int = 0) -> None:
    coming = Arrival(each, partition, new.at_s)
    try:
        staged.admit(coming, new.nbytes, known)
        assert staged.arriving == new.nbytes
        staged.keep(coming, attempt, new)
        assert staged.arriving == 0
    finally:
        staged.leave(coming)
        staged.validate()
        assert staged.nbytes <= staged.limit
        assert staged.arriving == 0


def held(staged: Staged, *epochs: StagedEpoch) -> list[bool]:
    return [staged.find(each, {0: 0}) != [None] for each in epochs]


def test_without_room_the_strongest_epoch_goes_on() -> None:
    """A writer that is known before a stranger, one that began before one that came later, all before one that was left."""
    staged = Staged(3 * part().nbytes)
    first, second, third = (epoch(0, writer=f"{name}@q") for name in ("first", "second", "third"))
    stranger, other = epoch(0, writer="stranger@q"), epoch(0, "other", "stranger@q")
    arrive(staged, stranger, part(at_s=0.0))
    arrive(staged, first, part(at_s=1.0))
    arrive(staged, second, part(at_s=2.0))
    # A stranger's rows push nobody's out, not even another's that came before.
    with pytest.raises(Unavailable) as caught:
        arrive(staged, other, part(at_s=3.0))
    assert "memory=" in caught.value.hint
    arrive(staged, third, part(at_s=3.0))
    assert held(staged, stranger, first, second, third) == [False, True, True, True]
    with pytest.raises(Unavailable):
        arrive(staged, third, part(at_s=4.0), partition=1)
    arrive(staged, first, part(at_s=5.0), partition=1)
    assert held(staged, first, second, third) == [True, True, False], "the one that began last let go"
    # The driver of the second never came back.
    arrive(staged, first, part(at_s=6.0 + STAGED_S_LONG), partition=2)
    assert held(staged, first, second) == [True, False]
    arrive(staged, second, part(at_s=7.0 + 3 * STAGED_S_LONG))
    assert held(staged, first, second) == [False, True]


def test_an_epoch_that_is_larger_than_all_room_is_told_so() -> None:
    staged = Staged(3 * part().nbytes)
    with pytest.raises(MessageTooLarge) as caught:
        arrive(staged, epoch(0), part(1000))
    assert (caught.value.size, caught.value.limit) == (part(1000).nbytes, staged.limit)
    for number in range(3):
        arrive(staged, epoch(0), part(), number)
    with pytest.raises(MessageTooLarge):
        arrive(staged, epoch(0), part(), 3)
    with pytest.raises(Unavailable):
        arrive(staged, epoch(0), part(), 2, attempt=1)
    assert staged.rows == 6


def test_parts_without_rows_take_room_too() -> None:
    staged = Staged(10 * PART_BYTES)
    empty = StagedPart([], 0, 0.0)
    for number in range(10):
        arrive(staged, epoch(0, writer=f"w{number}@q"), empty)
    with pytest.raises(Unavailable):
        arrive(staged, epoch(0, writer="w99@q"), StagedPart([], 0, 1.0))
