"""Who is away: told from who is busy, who has a slow disk, and from a coordinator that was away itself."""

from __future__ import annotations

import pytest

from millpond.coordinator.detector import (
    BEAT_S,
    BUSY_S_MAX,
    DISK_S_MAX,
    GAP_S_MAX,
    LEASE_S,
    SILENT_S_MAX,
    Detector,
)
from millpond.wire.base import Term

ONE, TWO = Term(1), Term(2)


class Watch:
    """Looks every beat, and hears of those that answer."""

    def __init__(self, *containers: int) -> None:
        self.detector = Detector()
        self.now_s = 1000.0
        self.serving = dict.fromkeys(containers, ONE)
        self.answer = set(containers)
        self.busy: set[int] = set()
        self.disk_s: dict[int, float] = {}

    def beat(self) -> list[tuple[int, Term]]:
        for container in sorted(self.answer):
            disk_s = self.disk_s.get(container, 0.0)
            self.detector.hears(container, self.serving[container], self.now_s, disk_s)
        return self.detector.looks(self.serving, self.busy, self.now_s)

    def until_suspected(self, seconds: float) -> float | None:
        """After how many seconds somebody is suspected, if within so many."""
        began = self.now_s
        while self.now_s < began + seconds:
            if self.beat():
                return self.now_s - began
            self.now_s += BEAT_S
        return None


def test_those_that_answer_are_never_suspected() -> None:
    watch = Watch(0, 1, 2)
    assert watch.until_suspected(300) is None
    assert watch.detector.graces == 0


def test_one_that_is_silent_is_suspected_once_its_lease_is_over() -> None:
    watch = Watch(0, 1)
    watch.until_suspected(3)
    watch.answer = {0}
    after_s = watch.until_suspected(60)
    assert after_s is not None
    assert SILENT_S_MAX - BEAT_S < after_s <= SILENT_S_MAX + BEAT_S
    assert watch.beat() == [(1, ONE)]
    assert LEASE_S < SILENT_S_MAX - BEAT_S, "it must have stopped answering when it is relieved"


def test_one_that_never_answered_is_suspected_too() -> None:
    watch = Watch(0)
    watch.answer = set()
    assert watch.until_suspected(60) == SILENT_S_MAX + BEAT_S


def test_one_that_answers_in_time_is_let_alone() -> None:
    watch = Watch(0)
    for _ in range(20):
        watch.answer = set()
        assert watch.until_suspected(SILENT_S_MAX) is None
        watch.answer = {0}
        assert watch.beat() == []


def test_one_that_is_busy_gets_longer() -> None:
    watch = Watch(0, 1)
    watch.beat()
    watch.answer = {0}
    watch.busy = {1}
    after_s = watch.until_suspected(600)
    assert after_s is not None
    assert BUSY_S_MAX < after_s <= BUSY_S_MAX + BEAT_S
    watch.busy = set()
    assert watch.beat() == [(1, ONE)]


def test_one_that_stops_being_busy_and_does_not_answer_is_suspected_at_once() -> None:
    watch = Watch(0)
    watch.answer, watch.busy = set(), {0}
    assert watch.until_suspected(BUSY_S_MAX / 2) is None
    watch.busy = set()
    assert watch.beat() == [(0, ONE)]


@pytest.mark.parametrize("busy", [set(), {1}])
def test_a_slow_disk_counts_as_away_though_it_answers(busy: set[int]) -> None:
    watch = Watch(0, 1)
    watch.busy = busy
    watch.disk_s = {1: DISK_S_MAX}
    assert watch.until_suspected(10) is None
    watch.disk_s = {1: DISK_S_MAX + 0.1}
    assert watch.beat() == [(1, ONE)]
    watch.disk_s = {1: 0.001}
    assert watch.beat() == [], "it is quick again"


def test_a_coordinator_that_was_stopped_suspects_nobody_at_once() -> None:
    watch = Watch(0, 1, 2)
    watch.until_suspected(5)
    watch.answer = set()
    watch.now_s += 30.0
    assert watch.beat() == []
    assert watch.detector.graces == 1
    assert watch.until_suspected(SILENT_S_MAX) is None, "they get a whole new chance"
    watch.answer = {0, 2}
    after_s = watch.until_suspected(10)
    assert after_s is not None
    assert watch.beat() == [(1, ONE)], "the one that was away before all the same"
    assert watch.detector.graces == 1


def test_one_that_is_stopped_again_and_again_suspects_nobody() -> None:
    """It cannot tell: as long as it does not look often enough, silence says nothing."""
    watch = Watch(0)
    watch.answer = set()
    for _ in range(50):
        watch.now_s += GAP_S_MAX + 0.1
        assert watch.beat() == []


def test_a_gap_that_is_just_short_enough_is_no_excuse() -> None:
    watch = Watch(0)
    watch.beat()
    watch.answer = set()
    suspected = []
    for _ in range(4):
        watch.now_s += GAP_S_MAX
        suspected += watch.beat()
    assert suspected
    assert watch.detector.graces == 0


def test_an_old_term_that_is_heard_late_says_nothing_of_the_new_one() -> None:
    watch = Watch(0)
    watch.beat()
    watch.serving = {0: TWO}
    watch.answer = set()
    watch.beat()
    for _ in range(int(SILENT_S_MAX / BEAT_S)):
        watch.now_s += BEAT_S
        watch.detector.hears(0, ONE, watch.now_s, disk_s=99.0)
        assert watch.beat() == []
        assert watch.detector.heard[0].term == TWO
    watch.now_s += BEAT_S
    watch.detector.hears(0, ONE, watch.now_s)
    assert watch.beat() == [(0, TWO)]


def test_an_old_term_that_is_heard_before_anyone_looked_at_the_new_one() -> None:
    detector = Detector()
    detector.hears(0, ONE, 1.0, disk_s=99.0)
    assert detector.looks({0: TWO}, set(), 1.5) == []
    assert detector.heard[0].term == TWO


def test_a_new_incarnation_begins_anew() -> None:
    watch = Watch(0)
    watch.beat()
    watch.answer = set()
    assert watch.until_suspected(60) is not None
    watch.serving = {0: TWO}
    assert watch.beat() == []
    assert watch.until_suspected(60) == SILENT_S_MAX + BEAT_S


def test_one_that_serves_no_more_is_forgotten() -> None:
    watch = Watch(0, 1)
    watch.beat()
    watch.answer, watch.serving = {0}, {0: ONE}
    assert watch.until_suspected(60) is None
    assert set(watch.detector.heard) == {0}


def test_who_is_silent_may_be_asked_before_it_is_suspected() -> None:
    """`Membership` asks the host only about these whether they are busy."""
    detector = Detector()
    detector.hears(0, ONE, 10.0)
    assert not detector.is_silent(0, 10.0 + SILENT_S_MAX)
    assert detector.is_silent(0, 10.1 + SILENT_S_MAX)
    assert not detector.is_silent(1, 99.0), "nobody has heard of it"
