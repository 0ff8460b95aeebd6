"""The index of sessions: which spans are one, and a key with many of them."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from millpond.stores.keys import Keys
from millpond.stores.windows.firsts import FirstTimes
from millpond.stores.windows.session_index import SessionIndex
from millpond.times import TIME_MAX

HOT = 60_000
SECONDS_MAX = 2.0
"""That its sessions are looked at one after the other for each row takes many times as long."""

Spans = list[tuple[int, int]]


def joined(spans: Spans, touching: bool) -> Spans:
    sessions: Spans = []
    for start, end in sorted(spans):
        if sessions and (start <= sessions[-1][1] if touching else start < sessions[-1][1]):
            sessions[-1] = sessions[-1][0], max(sessions[-1][1], end)
        else:
            sessions.append((start, end))
    return sessions


@pytest.mark.parametrize("touching", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_spans_in_any_order_become_the_same_sessions(seed: int, touching: bool) -> None:
    chance = random.Random(seed)
    index = SessionIndex("i64", touching)
    known: dict[int, Spans] = {key: [] for key in range(4)}
    for epoch in range(30):
        rows = []
        for _ in range(chance.choice((0, 1, 5, 40))):
            start = chance.randrange(600)
            rows.append((chance.choice((0, 0, 0, 1, 2, 3)), start, start + chance.choice((1, 2, 3, 10, 80))))
        if chance.random() < 0.5:
            rows.sort(key=lambda row: row[1], reverse=chance.random() < 0.3)
        keys, starts, ends = np.array(rows, np.int64).reshape(-1, 3).T.copy()
        nodes = index.join(Keys.from_longs(keys), starts, ends).nodes
        assert (index.starts[nodes] <= starts).all()
        assert (index.ends[nodes] >= ends).all()
        for key, start, end in rows:
            known[key] = joined([*known[key], (start, end)], touching)
        if chance.random() < 0.4:
            limit = chance.randrange(700)
            index.remove(index.ended(limit))
            known = {key: [span for span in own if span[1] > limit] for key, own in known.items()}
        index.validate()
        for key, own in known.items():
            found = index.of(Keys.from_longs(np.array([key])))
            spans = zip(index.starts[found].tolist(), index.ends[found].tolist(), strict=True)
            assert sorted(spans) == own, f"epoch {epoch}, key {key}"


@pytest.mark.parametrize("order", ["ascending", "descending", "shuffled", "two halves"])
def test_one_key_may_have_many_sessions(order: str) -> None:
    starts = np.arange(HOT) * 10
    if order == "descending":
        starts = starts[::-1].copy()
    elif order == "shuffled":
        np.random.default_rng(1).shuffle(starts)
    elif order == "two halves":
        starts = np.concatenate([starts[1::2], starts[::2]])
    index = SessionIndex("i64")
    index.join(Keys.from_longs(np.zeros(1, np.int64)), np.array([-9]), np.array([-8]))
    began = time.perf_counter()
    for part in np.split(starts, 2):
        index.join(Keys.from_longs(np.zeros(len(part), np.int64)), part, part + 5)
    assert len(index) == HOT + 1
    for share in (1, 2, 3):
        index.remove(index.ended(share * HOT * 10 // 4))
    index.remove(index.ended(TIME_MAX - 1))
    assert time.perf_counter() - began < SECONDS_MAX
    assert not len(index)


def test_one_key_may_pass_at_many_times() -> None:
    times = np.arange(HOT) * 10
    firsts = FirstTimes("i64", 5)
    began = time.perf_counter()
    for part in np.split(np.repeat(times, 2), 2):
        assert firsts.admit(Keys.from_longs(np.zeros(len(part), np.int64)), part).sum() == HOT // 2
    late = np.array([3, 6, 12, 305, 311])
    assert firsts.admit(Keys.from_longs(np.zeros(5, np.int64)), late).tolist() == [False] * 3 + [True, False]
    firsts.validate()
    assert time.perf_counter() - began < SECONDS_MAX
