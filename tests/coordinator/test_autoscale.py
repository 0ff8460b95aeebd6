"""The number of containers by load: a machine that is told what containers spend."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from millpond.coordinator.autoscale import SHRINK_TIMES, Autoscaler, Limits

HOLD_S = 10.0


class Machine:
    """Containers that share a load: so many processors' worth of it, as far as they have threads."""

    def __init__(
        self, count: int, low: int = 1, high: int = 3, busy: tuple[float, float] = (0.2, 0.75)
    ) -> None:
        self.scaler = Autoscaler(Limits(low, high, *busy, HOLD_S))
        self.count = count
        self.now_s = 0.0
        self.spent_s: dict[int, float] = {}
        self.changes: list[tuple[float, int]] = []

    def goes_on(
        self, seconds: float, load: Callable[[float], float], shares: Mapping[int, float] | None = None
    ) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 2.0
            for container in range(self.count):
                share = load(self.now_s) * (1 / self.count if shares is None else shares[container])
                self.spent_s[container] = self.spent_s.get(container, 0.0) + 2.0 * min(1.0, share)
            spent_s = {c: self.spent_s.setdefault(c, 0.0) for c in range(self.count)}
            wanted = self.scaler.looks(self.now_s, spent_s, threads=1)
            if wanted is not None:
                self.changes.append((self.now_s, wanted))
                self.count = wanted


def test_load_brings_containers_and_its_end_takes_them_away() -> None:
    machine = Machine(1)
    machine.goes_on(HOLD_S, lambda _: 1.4)
    assert machine.changes == [], "not at once"
    machine.goes_on(100, lambda _: 1.4)
    assert [count for _, count in machine.changes] == [2], "two are enough"
    machine.goes_on(100, lambda _: 2.2)
    assert [count for _, count in machine.changes] == [2, 3]
    quiet_s = machine.now_s
    machine.goes_on(SHRINK_TIMES * HOLD_S, lambda _: 0.0)
    assert len(machine.changes) == 2
    machine.goes_on(200, lambda _: 0.0)
    assert [count for _, count in machine.changes] == [2, 3, 2, 1]
    first, second = (at_s for at_s, _ in machine.changes[2:])
    assert first - quiet_s >= SHRINK_TIMES * HOLD_S
    assert second - first >= SHRINK_TIMES * HOLD_S


@pytest.mark.parametrize("busy", [(0.2, 0.75), (0.7, 0.75), (0.0, 0.1)])
@pytest.mark.parametrize("tenths", range(0, 60, 2))
def test_a_steady_load_comes_to_rest(tenths: int, busy: tuple[float, float]) -> None:
    machine = Machine(3, high=8, busy=busy)
    machine.goes_on(2000, lambda _: tenths / 10)
    changes = len(machine.changes)
    counts = [3, *(count for _, count in machine.changes)]
    assert counts in (sorted(counts), sorted(counts, reverse=True)), "it goes one way"
    machine.goes_on(2000, lambda _: tenths / 10)
    assert len(machine.changes) == changes


def test_a_load_that_comes_and_goes_changes_nothing() -> None:
    machine = Machine(2)
    machine.goes_on(1000, lambda now_s: 2.0 if now_s % 8 < 4 else 0.0)
    assert machine.changes == []


@pytest.mark.parametrize(("count", "wanted"), [(1, 2), (5, 3)])
def test_limits_count_at_once_and_a_change_that_fails_is_not_tried_again_at_once(
    count: int, wanted: int
) -> None:
    machine = Machine(count, low=2)
    machine.goes_on(2, lambda _: 0.5)
    assert machine.changes == [(2.0, wanted)]
    machine.count = count
    machine.goes_on(HOLD_S - 2, lambda _: 0.5)
    assert len(machine.changes) == 1
    machine.goes_on(2, lambda _: 0.5)
    assert machine.changes[1:] == [(2.0 + HOLD_S, wanted)]


def test_one_that_is_much_busier_than_the_others_is_told_after_a_while() -> None:
    machine = Machine(2)
    for _ in range(6):
        machine.goes_on(2, lambda _: 1.0, {0: 0.9, 1: 0.1})
        uneven = machine.scaler.is_uneven
    assert not uneven
    machine.goes_on(2, lambda _: 1.0, {0: 0.9, 1: 0.1})
    assert machine.scaler.is_uneven
    machine.goes_on(2, lambda _: 1.0, {0: 0.9, 1: 0.1})
    assert not machine.scaler.is_uneven, "said once: what it brings is looked at first"
    machine.goes_on(100, lambda _: 1.0)
    assert not machine.scaler.is_uneven
    machine.goes_on(100, lambda _: 0.1, {0: 0.9, 1: 0.1})
    assert not machine.scaler.is_uneven, "there is hardly any load"


def test_what_was_seen_before_an_interruption_counts_no_more() -> None:
    machine = Machine(1)
    machine.goes_on(HOLD_S, lambda _: 2.0)
    machine.scaler.interrupted()
    machine.spent_s[0] = 1e6
    machine.goes_on(HOLD_S, lambda _: 2.0)
    assert machine.changes == []
    machine.goes_on(2 * HOLD_S, lambda _: 1.4)
    assert [count for _, count in machine.changes] == [2]
