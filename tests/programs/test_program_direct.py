"""Direct calls: reads see whole epochs, writes are there once they return, and a retry with a key does nothing twice."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from program_graphs import recommender, store
from test_program_calls import PlainRecommender, as_rows, failing, ratings

import millpond as mp
from millpond.errors import BadOption, EpochChanged, ProgramFailed, Rejected
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

SLICES = 8


@pytest.mark.parametrize("containers", [1, 3])
def test_a_direct_read_is_what_a_streamed_one_gives(containers: int) -> None:
    plain = PlainRecommender(3)
    with LocalPond(LossyFiles(1), containers=containers, slices=SLICES) as pond:
        rec = pond.program("rec", recommender(3))
        rated = ratings(5, 60)
        rec.call("add_rating", name="feed")(as_rows(rated), 0)
        for each in rated:
            plain.add_rating(*each)
        for user in range(13):
            assert rec.get_rec(user=user) == plain.get_rec(user)
            assert rec.get_rec(user, 3) == plain.get_rec(user, 3)
        assert rec.progress().seen == 1, "a read is no epoch"


def test_a_task_that_accesses_nothing_fails_where_the_call_was_made() -> None:
    made = recommender(2)
    *others, ask = made.methods
    last = ask.tasks[2]._replace(source="def te(state, parts, row, k):\n    return -1, ([1 // k],)")
    made = made._replace(methods=(*others, ask._replace(tasks=(*ask.tasks[:2], last))))
    with LocalPond(LossyFiles(1), containers=2, slices=SLICES) as pond:
        rec = pond.program("rec", made)
        assert rec.get_rec(user=1, k=1) == [1]
        with pytest.raises(ProgramFailed, match="ZeroDivisionError") as caught:
            rec.get_rec(user=1, k=0)
        assert (caught.value.method, caught.value.line) == ("get_rec", 201)


def test_direct_writes_are_there_when_they_return() -> None:
    plain = PlainRecommender(2)
    with LocalPond(LossyFiles(1), containers=2, slices=SLICES) as pond:
        rec = pond.program("rec", recommender(2))
        for rated in ratings(6, 25):
            assert rec.add_rating(*rated) is None
            plain.add_rating(*rated)
            assert rec.get_rec(user=rated[0]) == plain.get_rec(rated[0])
        # Streamed and direct calls are of one state.
        rec.call("add_rating", name="feed")(as_rows([(3, 4, 5.0)]), 0)
        plain.add_rating(3, 4, 5.0)
        assert (rec.entries("user_item"), rec.entries("co_occ")) == plain.entries()


def test_direct_calls_are_rejected_fail_and_are_refused() -> None:
    with LocalPond(LossyFiles(1), containers=2, slices=SLICES) as pond:
        kept = pond.program("kv", store())
        kept.put(key=1, value="a")
        assert kept.drop(key=1) == "a"
        with pytest.raises(Rejected, match="unknown"):
            kept.drop(key=1)
        for wrong in ({}, {"key": "x"}, {"key": 1, "more": 2}):
            with pytest.raises(BadOption):
                kept.get(**wrong)
        with pytest.raises(BadOption):
            kept.get(1, key=2)
        assert repr(kept).startswith("<program kv: ")
        with pytest.raises(AttributeError, match=r"'kv' no such method: it has .*drop"):
            kept.nothing()
        program = pond.program("p", failing())
        with pytest.raises(ProgramFailed, match="below"):
            program.put(key=1, value=-1)
        program.put(key=1, value=1)
        assert program.entries("first") == {1: 1}


def test_a_call_with_a_key_is_done_once() -> None:
    files = LossyFiles(1)
    for _ in range(2):
        with LocalPond(files, containers=2, slices=SLICES) as pond:
            kept = pond.program("kv", store())
            for _ in range(3):
                kept.put(key=1, value="a", idempotency_key="one")
            assert kept.get(key=1) == "a"
            with pytest.raises(EpochChanged):
                kept.put(key=1, value="b", idempotency_key="one")


def test_many_threads_and_a_stream_at_once(tmp_path: Path) -> None:
    """On real processes: every write is there once, and what a reader sees never goes back."""
    with mp.open(tmp_path / "pond", containers=2, slices=SLICES, threads=1) as pond:
        rec = pond.program("rec", recommender(2))
        errors: list[BaseException] = []
        done = threading.Event()

        def write(own: int) -> None:
            for item in range(15):
                rec.add_rating(user=own, item=item, rating=1.0)

        def read() -> None:
            most = 0
            while not done.is_set():
                found = len(rec.get_rec(user=100, k=100))
                assert found >= most, (found, most)
                most = found

        def guarded(work: Any, *given: Any) -> None:
            try:
                work(*given)
            except BaseException as error:  # noqa: BLE001 - told below
                errors.append(error)

        rec.add_rating(user=100, item=0, rating=1.0)
        writers = [threading.Thread(target=guarded, args=(write, own)) for own in range(4)]
        reader = threading.Thread(target=guarded, args=(read,))
        for thread in [*writers, reader]:
            thread.start()
        feed = rec.call("add_rating", name="feed")
        for epoch in range(5):
            feed(pa.table({"user": [50 + epoch] * 3, "item": [0, 1, 2], "rating": [1.0, 2.0, 3.0]}), epoch)
        for thread in writers:
            thread.join()
        done.set()
        reader.join()
        assert not errors, errors
        plain = PlainRecommender(2)
        plain.add_rating(100, 0, 1.0)
        for own in range(4):
            for item in range(15):
                plain.add_rating(own, item, 1.0)
        for epoch in range(5):
            for item in range(3):
                plain.add_rating(50 + epoch, item, item + 1.0)
        assert (rec.entries("user_item"), rec.entries("co_occ")) == plain.entries()
        assert rec.get_rec(user=100, k=100) == plain.get_rec(100, 100)
