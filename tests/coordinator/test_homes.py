"""Slices that left a container only because it ended, and go back to it."""

from __future__ import annotations

import itertools

from millpond.coordinator.homes import PAUSE_S, TIMES_MAX, Homes
from millpond.wire.base import SliceId


def taken(*pairs: tuple[int, int]) -> dict[SliceId, int]:
    return {SliceId(number): owner for number, owner in pairs}


def test_they_go_back_after_a_pause_in_which_all_is_well() -> None:
    homes = Homes()
    homes.left(0, taken((0, 1), (1, 2)))
    owners, ids = [1, 2, 2], [0, 1, 2]
    assert homes.to_return(0.0, owners, ids, is_well=False) == {}
    assert homes.to_return(100.0, owners, ids, is_well=True) == {}, "it has just become well"
    assert homes.to_return(100.0 + PAUSE_S / 2, owners, ids, is_well=False) == {}
    assert homes.to_return(101.0 + PAUSE_S, owners, ids, is_well=True) == {}, "the pause begins anew"
    assert homes.to_return(101.0 + 2 * PAUSE_S, owners, ids, is_well=True) == {0: [0, 1]}
    assert homes.to_return(102.0 + 2 * PAUSE_S, owners, ids, is_well=True) == {}, "not twice at once"
    assert homes.to_return(103.0 + 9 * PAUSE_S, [0, 0, 2], ids, is_well=True) == {}, "they are there"
    assert homes.to_return(104.0 + 19 * PAUSE_S, owners, ids, is_well=True) == {}, "and are forgotten"


def settled(homes: Homes, owners: list[int], ids: list[int]) -> dict[int, list[SliceId]]:
    homes.to_return(0.0, owners, ids, is_well=True)
    return homes.to_return(PAUSE_S, owners, ids, is_well=True)


def test_a_guest_whose_host_ends_keeps_its_home() -> None:
    homes = Homes()
    homes.left(0, taken((0, 1)))
    homes.left(1, taken((0, 2), (1, 2)))
    assert settled(homes, [2, 2], [0, 1, 2]) == {0: [0], 1: [1]}


def test_one_that_went_elsewhere_by_wish_has_no_other_home() -> None:
    homes = Homes()
    homes.left(0, taken((0, 1), (1, 1), (2, 1)))
    homes.forget([SliceId(2)])
    assert settled(homes, [2, 1, 1], [0, 1, 2]) == {0: [1]}
    homes.left(2, taken((0, 1)))
    assert settled(homes, [1, 1, 1], [0, 1, 2]) == {0: [1], 2: [0]}, "where it was last by wish"
    homes.forget()
    assert settled(homes, [1, 1, 1], [0, 1, 2]) == {}


def test_what_fails_is_tried_again_less_and_less_often() -> None:
    homes = Homes()
    homes.left(0, taken((0, 1)))
    looks_s = (step * PAUSE_S / 2 for step in range(2000))
    times = [now_s for now_s in looks_s if homes.to_return(now_s, [1, 1], [0, 1], is_well=True)]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert gaps == sorted(gaps)
    assert gaps[0] < 3 * PAUSE_S
    assert TIMES_MAX * PAUSE_S <= gaps[-1] <= (TIMES_MAX + 1) * PAUSE_S
    homes.left(0, taken((1, 1)))
    assert settled(homes, [1, 1], [0, 1]) == {0: [0, 1]}, "another end, another try"


def test_a_home_that_is_gone_is_none() -> None:
    homes = Homes()
    homes.left(0, taken((0, 1)))
    assert settled(homes, [1, 1], [1, 2]) == {}
    assert settled(homes, [1, 1], [0, 1, 2]) == {}, "another container of that number is not it"
