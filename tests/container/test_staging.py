"""Rows that are staged: which attempts are found, and that what is kept has its bounds."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from millpond.container import staging
from millpond.container.holdings.base import CheckedRows
from millpond.container.staging import ATTEMPTS_KEPT, STAGED_S_MAX, Staged, StagedEpoch, StagedPart
from millpond.wire.base import Epoch, Turn


def epoch(number: int, resident: str = "s", writer: str = "feed@q") -> StagedEpoch:
    return StagedEpoch(resident, writer, Turn(Epoch(number)))


def part(rows: int = 2, at_s: float = 0.0) -> StagedPart:
    batch = pa.record_batch({"x": pa.array(range(rows), pa.int64())})
    return StagedPart([CheckedRows(batch, np.array([rows], np.int32))], 0, at_s)


def test_only_what_was_chosen_is_found() -> None:
    staged, parts = Staged(), {attempt: part(attempt + 1) for attempt in range(3)}
    for attempt, each in parts.items():
        staged.keep(epoch(0), 0, attempt, each)
    staged.keep(epoch(0), 1, 7, parts[0])
    assert staged.find(epoch(0), {1: 7, 0: 2}) == [parts[2], parts[0]]
    assert staged.find(epoch(0), {0: 3}) == [None]
    assert staged.find(epoch(1), {0: 1}) == [None]
    again = part(9)
    staged.keep(epoch(0), 0, 2, again)
    assert staged.find(epoch(0), {0: 2}) == [again]
    assert staged.rows == 1 + 2 + 9 + 1
    staged.validate()


def test_of_a_partition_the_newest_attempts_are_kept() -> None:
    staged = Staged()
    for attempt in range(3 * ATTEMPTS_KEPT):
        staged.keep(epoch(0), 0, attempt, part())
        staged.validate()
    assert staged.rows == 2 * ATTEMPTS_KEPT
    assert staged.find(epoch(0), {0: 2 * ATTEMPTS_KEPT - 1}) == [None]


def test_what_is_forgotten_or_too_old_takes_no_room() -> None:
    staged = Staged()
    for number in range(4):
        staged.keep(epoch(number), 0, 0, part(at_s=number))
        staged.keep(epoch(number, "other"), 0, 0, part(at_s=number))
    staged.forget(lambda each: each.resident == "other" and each.turn <= Turn(Epoch(1)))
    assert staged.rows == 2 * 6
    staged.expire(STAGED_S_MAX + 2.5)
    assert staged.rows == 2 * 2
    staged.forget(lambda each: True)
    assert (staged.rows, staged.nbytes) == (0, 0)
    staged.validate()


def test_beyond_a_bound_what_others_staged_longest_ago_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "STAGED_BYTES_MAX", 3 * part().nbytes)
    staged = Staged()
    for number in (2, 0, 1):
        staged.keep(epoch(number), 0, 0, part(at_s=number))
    staged.keep(epoch(9), 0, 0, part(at_s=-1.0))
    assert [staged.find(epoch(n), {0: 0}) == [None] for n in (0, 1, 2, 9)] == [True, False, False, False]
    large = part(100, at_s=-2.0)
    staged.keep(epoch(10), 0, 0, large)
    assert staged.find(epoch(10), {0: 0}) == [large], "what came last stays, whatever its size"
    assert staged.rows == 100
    staged.validate()
