"""Containers that end over an epoch of user code: when the code is to blame."""

from __future__ import annotations

import pytest

from millpond.coordinator.deaths import DEATHS_MAX, EPOCHS_REMEMBERED, KILLS_MAX, Deaths
from millpond.wire.base import Epoch, Turn
from millpond.wire.epochs import Prepare
from millpond.wire.states import RowsWork

KILLED = "was killed by SIGKILL"
LEFT = "ended with exit code 3"


def prepare(epoch: int, resident: str = "s") -> Prepare:
    return Prepare(resident, "feed@q", Turn(Epoch(epoch)), 1, {}, RowsWork())


@pytest.mark.parametrize(("words", "most"), [(KILLED, KILLS_MAX), (LEFT, DEATHS_MAX)])
def test_deaths_may_come_from_outside_but_not_again_and_again(words: str, most: int) -> None:
    deaths = Deaths()
    for _ in range(most - 1):
        deaths, blamed = deaths.after(prepare(3), words)
        assert not blamed
        deaths, blamed = deaths.after(prepare(3, "other"), words)
        assert not blamed, "another resident's epoch counts for itself"
    deaths, blamed = deaths.after(prepare(3), words)
    assert blamed
    assert [epoch[0] for epoch in deaths.counts] == ["other"]
    deaths, blamed = deaths.after(prepare(3), words)
    assert not blamed, "it may have been mended since"


@pytest.mark.parametrize("crash", ["SIGSEGV", "SIGABRT"])
def test_a_crash_is_of_its_own_making(crash: str) -> None:
    before, _ = Deaths().after(prepare(0), KILLED)
    deaths, blamed = before.after(prepare(0), f"was killed by {crash}")
    assert blamed
    assert not deaths.counts
    assert before.counts, "a value: whoever counts at the same time counts from what is remembered"


def test_two_containers_that_end_over_one_epoch_count_twice() -> None:
    """In whichever order they are counted, and also right after the epoch was blamed."""
    deaths = Deaths()
    verdicts = []
    for _ in range(2 * DEATHS_MAX):
        deaths, blamed = deaths.after(prepare(0), LEFT)
        verdicts.append(blamed)
    assert verdicts == ([False] * (DEATHS_MAX - 1) + [True]) * 2


def test_what_is_remembered_has_an_end() -> None:
    deaths = Deaths()
    for epoch in range(3 * EPOCHS_REMEMBERED):
        deaths, _ = deaths.after(prepare(epoch), KILLED)
        deaths, _ = deaths.after(prepare(0, "again"), KILLED) if epoch % 3 == 0 else (deaths, False)
        assert len(deaths.counts) <= EPOCHS_REMEMBERED
    assert ("s", "feed@q", str(3 * EPOCHS_REMEMBERED - 1)) in deaths.counts
