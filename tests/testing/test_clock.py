from __future__ import annotations

import pytest

from millpond.errors import BadOption
from millpond.testing import VirtualClock


def test_time_stands_still_until_it_is_moved() -> None:
    clock = VirtualClock(1_000.5)
    assert (clock.time(), clock.time(), clock.monotonic()) == (1_000.5, 1_000.5, 0.0)
    clock.advance(2)
    assert (clock.time(), clock.monotonic()) == (1_002.5, 2.0)


def test_a_sleep_returns_at_once_and_is_noted() -> None:
    clock = VirtualClock()
    for _ in range(10):
        clock.sleep(0.1)
    assert clock.monotonic() == clock.time() == 1.0
    assert clock.sleeps == [0.1] * 10


def test_the_wall_clock_can_be_set_back_and_the_monotonic_one_does_not_follow() -> None:
    clock = VirtualClock(100)
    clock.advance(5)
    clock.jump(-50)
    assert (clock.time(), clock.monotonic()) == (55.0, 5.0)


@pytest.mark.parametrize("move", ["advance", "sleep"])
def test_time_does_not_run_back(move: str) -> None:
    clock = VirtualClock(100)
    with pytest.raises(BadOption, match="run back"):
        getattr(clock, move)(-1)
    assert (clock.time(), clock.sleeps) == (100.0, [])
