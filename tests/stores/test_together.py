"""Several slices in one call of a kernel: the same as each by itself, and as a naive store."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from naive_store import NaiveStore

from millpond.code.rules import CompactRule, FetchRule, UpdateRule, keep_all, keep_latest, put
from millpond.stores.keys import Keys
from millpond.stores.ruleset import Ruleset
from millpond.stores.together import Newest, Updates
from millpond.stores.versioned import VersionedSlice

VALUES = pa.schema([("a", pa.int64()), ("b", pa.float64()), ("c", pa.bool_()), ("d", pa.int16())])
SLICES = 7
STEPS = 25 if os.environ.get("NUMBA_DISABLE_JIT") != "1" else 6


def of_kind(numbers: list[int], kind: str) -> Keys:
    if kind == "i64":
        return Keys.from_arrow(pa.array(numbers, pa.int64()))
    return Keys.from_arrow(pa.array([b"key %d" % n * (1 + n % 4) for n in numbers], pa.binary()))


def by_slice(numbers: list[int]) -> tuple[list[int], list[tuple[int, int, int]]]:
    """The keys grouped by slice, and those slices that have any, in an order of their own, with start and stop."""
    grouped = sorted(numbers, key=lambda n: n % SLICES)
    bounds = np.searchsorted([n % SLICES for n in grouped], range(SLICES + 1)).tolist()
    spans = [(s, bounds[s], bounds[s + 1]) for s in range(SLICES) if bounds[s] < bounds[s + 1]]
    return grouped, spans[3:] + spans[:3]


class Twins:
    """Slices that get their rows together, the same apart, and a naive store for all."""

    def __init__(self, kind: str, compact: CompactRule, update: UpdateRule) -> None:
        self.kind = kind
        self.rules = Ruleset(VALUES, update, compact)
        assert Updates.takes(self.rules)
        self.together = [VersionedSlice(kind, VALUES, self.rules) for _ in range(SLICES)]
        self.apart = [VersionedSlice(kind, VALUES, self.rules) for _ in range(SLICES)]
        self.naive = NaiveStore(len(VALUES))

    def insert(self, numbers: list[int], times: list[int], rows: list[Any], keep_from: int | None) -> None:
        grouped, spans = by_slice(numbers)
        order = sorted(range(len(numbers)), key=lambda i: numbers[i] % SLICES)
        keys, at = of_kind(grouped, self.kind), np.array([times[i] for i in order], np.int64)
        values = [pa.array([rows[i][c] for i in order], field.type) for c, field in enumerate(VALUES)]
        updates = Updates(self.rules, keys, at, values, keep_from)
        updates.insert([(self.together[s], start, stop) for s, start, stop in spans])
        for s, start, stop in spans:
            own = [array.slice(start, stop - start) for array in values]
            self.apart[s].insert(keys.part(start, stop), at[start:stop], own, keep_from)
        self.naive.insert(grouped, at.tolist(), [rows[i] for i in order])

    def fetch(self, numbers: list[int], lows: list[int] | None, highs: list[int]) -> list[list[Any]]:
        """The answers, which are those of the slices apart; as columns, and the keys in front."""
        grouped, spans = by_slice(numbers)
        order = sorted(range(len(numbers)), key=lambda i: numbers[i] % SLICES)
        keys, hi = of_kind(grouped, self.kind), np.array([highs[i] for i in order], np.int64)
        lo = None if lows is None else np.array([lows[i] for i in order], np.int64)
        newest = Newest(self.rules, keys, lo, hi)
        half = len(spans) // 2
        for part in (spans[half:], spans[:half]):
            starts, stops = (np.array([span[at] for span in part], np.int64) for at in (1, 2))
            newest.ask([self.together[s] for s, _, _ in part], starts, stops)
        answers = newest.answers()
        for array in answers:
            array.validate(full=True)
        for s, start, stop in spans:
            low = None if lo is None else lo[start:stop]
            own = self.apart[s].fetch(keys.part(start, stop), low, hi[start:stop], FetchRule("latest"))
            assert [array.slice(start, stop - start).to_pylist() for array in answers] == [
                array.to_pylist() for array in own
            ]
        return [[grouped, hi.tolist(), None if lo is None else lo.tolist()], [a.to_pylist() for a in answers]]

    def check(self) -> None:
        for mine, other in zip(self.together, self.apart, strict=True):
            mine.validate()
            assert mine.export().equals(other.export())
            assert mine.delta().export().equals(other.delta().export())
            assert (mine.keys, mine.versions, mine.masked) == (other.keys, other.versions, other.masked)


@pytest.mark.parametrize("kind", ["i64", "bytes"])
@pytest.mark.parametrize("nulls", [False, True])
@pytest.mark.parametrize("rule", ["keep_all", "keep_latest", "ttl"])
def test_slices_together_are_as_each_by_itself(kind: str, nulls: bool, rule: str) -> None:
    chance = np.random.default_rng([len(kind), nulls, len(rule)])
    compact = {"keep_all": keep_all(), "keep_latest": keep_latest()}.get(rule) or CompactRule(
        "ttl", span=40, span_kind="long"
    )
    twins = Twins(kind, compact, put())
    for step in range(STEPS):
        count = int(chance.integers(1, 300))
        numbers = chance.integers(0, 40 * (step + 1), count).tolist()
        times = (chance.integers(0, 60, count) + 4 * step).tolist()
        rows = [
            (
                None
                if nulls and step > 2 and chance.random() < 0.02
                else int(chance.integers(-(2**40), 2**40)),
                float(chance.normal()),
                bool(chance.integers(2)),
                int(chance.integers(-(2**15), 2**15)),
            )
            for _ in range(count)
        ]
        keep_from = 4 * step - 10 if rule != "keep_all" and step > 8 else None
        twins.insert(numbers, times, rows, keep_from)
        asked = chance.integers(0, 1100, 90).tolist()
        highs = (chance.integers(0, 60, 90) + 4 * step).tolist()
        for lows in (None, [high - 15 for high in highs]):
            (keys, his, los), answers = twins.fetch(asked, lows, highs)
            if rule == "keep_all":
                wanted = [
                    twins.naive.fetch(key, None if los is None else los[i], his[i], "latest")
                    for i, key in enumerate(keys)
                ]
                assert [list(row) for row in zip(*answers, strict=True)] == wanted
        if keep_from is not None and step % 3 == 0:
            for store in (*twins.together, *twins.apart):
                store.sweep(keep_from, 30)
        if step % 8 == 0:
            for store in (*twins.together, *twins.apart):
                store.clean()
        twins.check()
    assert any(store.masked for store in twins.together) == nulls


def test_rows_that_come_before_many_are_merged() -> None:
    """Each would move all that come behind it: kernels leave the rest of such a batch to be sorted."""
    twins = Twins("i64", keep_all(), put())
    twins.insert([3] * 2000, list(range(10_000, 12_000)), [(1, 0.0, True, 1)] * 2000, None)
    twins.insert([3] * 900 + [4] * 50, list(range(950, 0, -1)), [(2, 0.0, True, 1)] * 950, None)
    twins.check()
    assert twins.together[3].versions == 2900


def test_near_the_beginning_of_time_and_what_is_in_heaps_are_left_to_slices() -> None:
    ages = Ruleset(VALUES, put(), CompactRule("ttl", span=40, span_kind="long"))
    early = np.array([-(2**63) + 39, 5], np.int64)
    assert not Newest.takes(ages, early)
    assert Newest.takes(ages, early + 1)
    assert not Updates.takes(Ruleset(pa.schema([("s", pa.string())])))
