"""Idempotency keys: what a call with one did is done once, through restarts, moves and long lists of others."""

from __future__ import annotations

import pytest
from program_graphs import store
from test_program_life import Counter

from millpond.container.holdings import program_once
from millpond.errors import EpochChanged, Rejected
from millpond.ops.direct_writes import _Waiting
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

SLICES = 4


def call_many(counter: object, keys: range) -> None:
    """Calls with these keys, as one group."""
    writes = counter._writes(counter._method("add"), once=True)  # type: ignore[attr-defined] # a Program
    group = [
        _Waiting(writes._row({"key": number % 7, "by": 1}, f"n{number}"), f"n{number}") for number in keys
    ]
    writes._commit(group)
    for each in group:
        each.outcome()


def test_keys_are_remembered_after_many_others() -> None:
    with LocalPond(LossyFiles(1), containers=2, slices=SLICES) as pond:
        counter = pond.program("counter", Counter)
        assert counter.ask("add", key=1, by=5, idempotency_key="first") == 5
        for start in range(300):
            counter.ask("add", key=2, by=1, idempotency_key=f"k{start}")
        assert counter.ask("add", key=1, by=5, idempotency_key="first") == 5
        assert counter.entries("counts") == {1: 5, 2: 300}


def test_ten_thousand_keys() -> None:
    with LocalPond(LossyFiles(1), containers=2, slices=SLICES) as pond:
        counter = pond.program("counter", Counter)
        for start in range(0, 10_000, 2_500):
            call_many(counter, range(start, start + 2_500))
        before = counter.entries("counts")
        assert (sum(before.values()), counter.progress().seen) == (10_000, 4)
        call_many(counter, range(10_000))
        assert counter.entries("counts") == before
        pond.validate()


def test_keys_go_where_slices_go_and_come_back_after_a_crash() -> None:
    files = LossyFiles(1)
    for opening in range(3):
        with LocalPond(files, containers=3, slices=SLICES, backups=1) as pond:
            counter = pond.program("counter", Counter)
            for number in range(10):
                assert counter.ask("add", key=number, by=1, idempotency_key=f"n{number}") == 1
            pond.coordinator.maintain()
            pond.move(range(SLICES), to=opening)
            call_many(counter, range(10, 30))
            pond.hosting.kill(opening)
            pond.coordinator.recover(opening)
            call_many(counter, range(10, 30))
            if opening:
                pond.checkpoint()
                pond.maintain()
            assert sum(counter.entries("counts").values()) == 30
            pond.validate()


def test_a_key_is_for_one_call() -> None:
    with LocalPond(LossyFiles(1), containers=2, slices=SLICES) as pond:
        kept = pond.program("kv", store())
        kept.put(key=1, value="a", idempotency_key="one")
        for key, value in ((1, "b"), (2, "a")):
            with pytest.raises(EpochChanged, match="other arguments"):
                kept.put(key=key, value=value, idempotency_key="one")
        # Of another method it is another one; a rejected call is remembered, too.
        with pytest.raises(Rejected):
            kept.drop(key=2, idempotency_key="one")
        kept.put(key=2, value="c")
        with pytest.raises(Rejected):
            kept.drop(key=2, idempotency_key="one")
        assert kept.drop(key=1, idempotency_key="two") == "a"
        assert kept.drop(key=1, idempotency_key="two") == "a"
        assert kept.entries("kept") == {2: "c"}


def test_old_keys_are_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_once, "KEYS_KEPT", 5)
    monkeypatch.setattr(program_once, "_SLICE_MIN", 20)
    with LocalPond(LossyFiles(1), slices=1) as pond:
        counter = pond.program("counter", Counter)
        for start in range(0, 60, 10):
            call_many(counter, range(start, start + 10))
        [held] = pond.hosting.services[0].core.holding("counter").slices.values()
        keys = held.store.part("idempotency keys")
        assert len(keys) == 60, "they are young"
        monkeypatch.setattr(program_once, "KEYS_KEPT_S", 0.0)
        call_many(counter, range(60, 80))
        assert len(keys) == 20
        call_many(counter, range(60, 80))
        assert sum(counter.entries("counts").values()) == 80
        call_many(counter, range(1))
        assert sum(counter.entries("counts").values()) == 81
        pond.checkpoint()
        pond.validate()
