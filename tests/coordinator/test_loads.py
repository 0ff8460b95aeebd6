"""Load alone: what slices have done of late, and where they should go by it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from millpond.coordinator.loads import MEAN_S, Loads, Plan, Room, left_in, left_on_hosts, load_moves
from millpond.wire.base import SliceId
from millpond.wire.figures import Column


def numbers(*slices: int) -> list[SliceId]:
    return [SliceId(number) for number in slices]


def columns(
    owners: Sequence[int], cpu_us: Sequence[int], rows: Sequence[int] | None = None
) -> dict[str, Column]:
    return {
        "owners": np.array(owners),
        "cpu_us": np.array(cpu_us),
        "rows_updated": np.array(rows if rows is not None else [0] * len(owners)),
        "rows_fetched": np.zeros(len(owners), np.int64),
    }


# What slices have done


def test_a_first_look_tells_nothing_of_what_was_long_before() -> None:
    loads = Loads()
    loads.looks(100.0, columns([0, 1], [5_000_000, 0]), [0, 1])
    assert (loads.watched_s, loads.rates("cpu_us")) == (0.0, {0: 0.0, 1: 0.0})


def test_what_was_done_of_late_counts_and_fades() -> None:
    loads = Loads()
    loads.looks(0.0, columns([0, 1], [1_000_000, 0], [0, 0]), [0, 1])
    loads.looks(10.0, columns([0, 1], [1_000_000, 500], [30, 10]), [0, 1])
    rates = loads.rates("cpu_us")
    assert rates[SliceId(0)] == 0.0
    assert 0 < rates[SliceId(1)] < 50.0
    rows = loads.rates("rows_updated", "rows_fetched")
    assert rows[SliceId(0)] == pytest.approx(3 * rows[SliceId(1)])
    loads.looks(10.0 + 10 * MEAN_S, columns([0, 1], [1_000_000, 500], [30, 10]), [0, 1])
    assert loads.rates("cpu_us")[SliceId(1)] < rates[SliceId(1)] / 1000


def test_a_steady_load_is_told_as_it_is_however_often_it_is_looked_at() -> None:
    for steps in (1, 10, 100):
        loads = Loads()
        for step in range(steps + 1):
            at_s = 10 * MEAN_S * step / steps
            loads.looks(at_s, columns([0], [int(70 * at_s)]), [0])
        assert loads.rates("cpu_us")[SliceId(0)] == pytest.approx(70, rel=0.01)


def test_a_slice_that_moves_is_as_hot_as_it_was() -> None:
    """Its counts begin anew, and may be higher than they were all the same."""
    for after in (0, 900):
        loads = Loads()
        loads.looks(0.0, columns([0, 0], [0, 0]), [0, 1])
        loads.looks(10.0, columns([0, 0], [800, 100]), [0, 1])
        before = loads.rates("cpu_us")
        loads.looks(20.0, columns([1, 0], [after, 200]), [0, 1])
        assert loads.rates("cpu_us")[SliceId(0)] == before[SliceId(0)]
        assert loads.rates("cpu_us")[SliceId(1)] > before[SliceId(1)]
        loads.looks(30.0, columns([1, 0], [after + 800, 200]), [0, 1])
        assert loads.rates("cpu_us")[SliceId(0)] > before[SliceId(0)]


def test_of_those_who_do_not_answer_nothing_is_concluded() -> None:
    loads = Loads()
    loads.looks(0.0, columns([0, 1], [100, 100]), [0, 1])
    loads.looks(10.0, columns([0, 1], [200, 200]), [0, 1])
    before = loads.rates("cpu_us")
    loads.looks(20.0, columns([0, 1], [0, 300]), [1])
    assert loads.rates("cpu_us")[SliceId(0)] == before[SliceId(0)]
    loads.looks(30.0, columns([0, 1], [400, 400]), [0, 1])
    assert loads.rates("cpu_us")[SliceId(0)] == pytest.approx(loads.rates("cpu_us")[SliceId(1)])
    loads.looks(40.0, columns([0, 1], [3, 500]), [0, 1])
    assert loads.rates("cpu_us")[SliceId(0)] == pytest.approx(
        before[SliceId(0)] * np.exp(-20 / MEAN_S) + 10 * (1 - np.exp(-20 / MEAN_S))
    ), "it began anew: what it did before is all that is known"


# Room


def test_who_holds_a_backup_needs_no_room_for_it() -> None:
    room = Room({1: 100}, {SliceId(0): 90, SliceId(1): 20}, {SliceId(1): [1]})
    assert room.needs(1, numbers(0, 1)) == 90
    assert room.fits(1, numbers(0, 1))
    room.take(1, numbers(0))
    assert room.left == {1: 10}
    assert not room.fits(1, numbers(0))
    assert room.fits(1, numbers(1))
    assert room.fits(2, numbers(0)), "of which nothing is known"


def test_containers_of_one_host_share_what_is_left_there() -> None:
    hosts = {0: "a", 1: "a", 2: "b"}
    limits = {"memory_max_bytes": 100.0, "memory_share_bytes": 100.0}
    figures = {container: {"rss_bytes": 40.0, **limits} for container in hosts}
    assert {left_in(own) for own in figures.values()} == {60}
    assert left_on_hosts(figures, hosts) == {"a": 20, "b": 60}
    for silent in ({}, {**figures[1], "memory_max_bytes": 0.0}, {**figures[1], "memory_share_bytes": 0.0}):
        assert left_on_hosts({0: figures[0], 1: silent, 2: figures[2]}, hosts) == {"b": 60}, (
            "one does not tell"
        )
    figures[1]["memory_max_bytes"] = 130.0
    assert left_on_hosts(figures, hosts)["a"] == 50, "whoever gave one more means it"

    sizes = dict.fromkeys(numbers(*range(6)), 15)
    room = Room(dict.fromkeys(hosts, 60), sizes, {SliceId(5): [1]}, hosts, {"a": 20, "b": 60})
    assert room.fits(0, numbers(0))
    assert not room.fits(0, numbers(0, 1))
    room.take(0, numbers(0))
    assert room.left_on == {"a": 5, "b": 60}
    assert not room.fits(1, numbers(1))
    assert room.fits(1, numbers(5)), "it holds it already"
    assert room.fits(2, numbers(0, 1, 2, 3))


def test_what_has_no_room_stays_and_a_smaller_one_goes() -> None:
    loads = {SliceId(n): load for n, load in enumerate([50.0, 48.0, 2.0, 0.0])}
    sizes = {SliceId(0): 1000, SliceId(1): 10, SliceId(2): 10}
    room = Room({0: 0, 1: 500}, sizes)
    assert load_moves(loads, [0, 0, 0, 1], [0, 1], room=room) == Plan({SliceId(1): 1}, {SliceId(0): 1})
    assert room.left == {0: 0, 1: 490}


def test_where_the_coolest_has_no_room_the_next_gets_it() -> None:
    loads = {SliceId(n): load for n, load in enumerate([50.0, 50.0, 0.0, 0.0])}
    room = Room({1: 10, 2: 1000}, {SliceId(0): 100, SliceId(1): 100})
    plan = load_moves(loads, [0, 0, 1, 2], [0, 1, 2], room=room)
    assert plan == Plan({SliceId(0): 2}, {SliceId(1): 1})


def test_those_on_their_way_stay() -> None:
    loads = {SliceId(n): load for n, load in enumerate([50.0, 40.0, 10.0, 0.0])}
    assert load_moves(loads, [0, 0, 0, 1], [0, 1], stay=numbers(0)).moves == {1: 1, 2: 1}


# Where they should go


def totals(loads: dict[SliceId, float], owners: Sequence[int], containers: Sequence[int]) -> dict[int, float]:
    return {
        c: sum(loads.get(SliceId(n), 0.0) for n, owner in enumerate(owners) if owner == c) for c in containers
    }


def test_the_hottest_goes_first_and_no_more_than_it_takes() -> None:
    loads = {SliceId(n): load for n, load in enumerate([50.0, 10.0, 10.0, 30.0, 0.0, 0.0])}
    assert load_moves(loads, [0, 0, 0, 0, 1, 1], [0, 1]).moves == {0: 1}


def test_one_slice_that_is_all_the_load_stays_where_it_is() -> None:
    assert load_moves({SliceId(0): 90.0}, [0, 0, 1, 1], [0, 1]).moves == {}
    assert load_moves({SliceId(0): 90.0}, [0, 1], [0, 1]).moves == {}


@pytest.mark.parametrize("containers", [[0], [0, 1]])
def test_without_load_nothing_moves(containers: list[int]) -> None:
    assert load_moves({}, [0, 0, 0], containers).moves == {}
    assert load_moves({SliceId(0): 0.0}, [0, 0, 0], containers).moves == {}


def test_what_is_even_within_the_tolerance_stays() -> None:
    loads = {SliceId(0): 54.0, SliceId(1): 46.0}
    assert load_moves(loads, [0, 1], [0, 1]).moves == {}
    loads = {SliceId(n): load for n, load in enumerate([4.0, 50.0, 46.0])}
    assert load_moves(loads, [0, 0, 1], [0, 1]).moves == {}
    assert load_moves(loads, [0, 0, 1], [0, 1], tolerance=0.01).moves == {0: 1}


def test_slices_of_others_than_the_containers_are_left_alone() -> None:
    loads = {SliceId(n): 10.0 for n in range(6)}
    out = load_moves(loads, [9, 9, 9, 0, 0, 0], [0, 1]).moves
    assert set(out) <= {3, 4, 5}
    assert set(out.values()) == {1}


@pytest.mark.parametrize("seed", range(60))
def test_every_slice_moves_at_most_once_and_the_hottest_container_gets_cooler(seed: int) -> None:
    chance = random.Random(seed)
    containers = list(range(chance.randint(1, 5)))
    owners = [chance.choice(containers) for _ in range(chance.randint(1, 40))]
    loads = {SliceId(n): chance.choice([0.0, 1.0, 5.0, chance.random() * 100]) for n in range(len(owners))}
    out = load_moves(loads, owners, containers).moves
    after = [out.get(SliceId(n), owner) for n, owner in enumerate(owners)]
    assert all(owners[n] != target for n, target in out.items())
    assert all(loads[n] > 0 for n in out)
    before_loads, after_loads = totals(loads, owners, containers), totals(loads, after, containers)
    if out:
        assert max(after_loads.values()) < max(before_loads.values())
    assert load_moves(loads, owners, containers).moves == out
    # Small pieces: what is left is within the tolerance, or within one piece.
    mean = sum(after_loads.values()) / len(containers)
    pieces = [
        loads[SliceId(n)]
        for n, owner in enumerate(after)
        if owner == max(after_loads, key=after_loads.__getitem__)
    ]
    assert max(after_loads.values()) <= mean * 1.1 + max(pieces, default=0.0) + 1e-9
